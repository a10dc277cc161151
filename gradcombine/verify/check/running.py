"""Runs the step under test on chosen examples, in its native precision or in float64, with results as NumPy arrays."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import owner
from gradcombine.errors import GradCombineError, invalid, require_equal
from gradcombine.types import Tree
from gradcombine.verify.check.leaves import (
    Noise,
    array_of,
    as_floats,
    as_framework_of,
    but_exact,
    change,
    copied,
    differs_on_devices,
    examples,
    finite,
    flattened,
    floats_in,
    from_floats,
    is_float,
    is_float_dtype,
    is_integers,
    is_present,
    shape_of,
    taken,
    widened,
)
from gradcombine.verify.check.retyping import NotWide, Program
from gradcombine.verify.check.retyping import wide as wide_types
from gradcombine.verify.compare.ulp import kind_of, rounding_unit

Step: TypeAlias = Callable[[Any, Any], Any]
"""Function of parameters and a batch that returns gradients or new parameters."""

Floats: TypeAlias = Sequence[np.ndarray]

Rows: TypeAlias = tuple[int, ...]
"""Indices of examples, which may repeat."""


class Split(NamedTuple):
    """How a step divides its batch: numbers of microbatches and devices. (1, 1) is one batch.

    >>> print(Split(4, 1), "|", Split(2, 8))
    4 microbatches | 2 microbatches on 8 devices
    """

    microbatches: int = 1
    devices: int = 1

    def __str__(self) -> str:
        first = "one batch" if self.microbatches == 1 else f"{self.microbatches} microbatches"
        return first if self.devices == 1 else f"{first} on {self.devices} devices"


ONE_BATCH = Split()


class Result(NamedTuple):
    """Result of a step.

    Attributes:
      floats: the float leaves, in float64; for new parameters, their change.
      integers: the other leaves.
      dtypes: dtypes of the float leaves as returned by the step.
      forms: path of each leaf, and its kind of numbers and shape.
      unequal: paths of the leaves that are declared to be replicated but differ between devices.
    """

    floats: tuple[np.ndarray, ...]
    integers: tuple[np.ndarray, ...]
    dtypes: tuple[np.dtype, ...]
    forms: tuple[tuple[str, str], ...]
    unequal: tuple[str, ...] = ()

    @property
    def integer_names(self) -> list[str]:
        """Paths of `integers`."""
        return [path for path, form in self.forms if form.startswith(_KINDS["integer"])]

    def differs_in_integers(self, other: Result) -> bool:
        """Whether an integer leaf differs from another result's."""
        pairs = zip(self.integers, other.integers, strict=True)
        return any(x.shape != y.shape or np.any(x != y) for x, y in pairs)

    def require_form_of(self, one: Result) -> None:
        """Raises if a leaf has another shape or kind of numbers than in the result of one batch."""
        for (path, form), (_, expected) in zip(self.forms, one.forms, strict=True):
            require_equal("{}, as in one batch", expected, form, path)


def _is_counted(x: Any) -> bool:
    """Whether a parameter is neither a float array nor a float that is a setting, such as a rate of dropout."""
    return is_present(x) and not is_float(x) and not isinstance(x, float | complex)


class Subject:
    """The step under test, with its parameters and batch.

    Args:
      make_step: ``make_step(microbatches)``, or ``make_step(microbatches, devices=...)``.
      params: a tree of arrays.
      batch: a tree of arrays with a first axis of examples; scalars apply to all examples.
      returns_params: whether the step returns new parameters.
      reverse: whether the step also accepts the examples in reverse order.
    """

    def __init__(
        self, make_step: Callable[..., Step], params: Tree, batch: Tree, returns_params: bool, reverse: bool = True
    ) -> None:
        self.make_step, self.returns_params, self.reverse = make_step, returns_params, reverse
        self._params, self._params_structure = flattened(params)
        self.batch = batch
        self.names: tuple[str, ...] = ()
        self._structure: tree.Structure | None = None
        """The structure of all results."""
        self._steps: dict[Split, Step] = {}
        self._programs: dict[Any, tuple[Step, Program | None]] = {}

    @property
    def examples(self) -> int:
        return examples(self.batch)

    def on(self, batch: Tree) -> Subject:
        """Returns this subject with another batch of the same size."""
        other = copy.copy(self)
        other.batch = batch
        return other

    def after_one_batch(self) -> Subject:
        """Returns this subject with the parameters that one batch of its step returns."""
        other = copy.copy(self)
        new, _ = flattened(self.call(self.step(ONE_BATCH), self.batch, wide=False)[0])
        other._params = [x if isinstance(x, float | complex) else y for x, y in zip(self._params, new, strict=False)]
        return other

    def perturbed(self, noise: Noise) -> Subject:
        """Returns this subject with perturbed float parameters."""
        other = copy.copy(self)
        other._params = [copied(x, False, noise) for x in self._params]
        return other

    @property
    def params(self) -> Tree:
        return tree.unflatten(self._params_structure, self._params)

    @property
    def framework(self) -> str:
        """Name of the framework of the inputs; ``make_step.framework`` overrides it."""
        if name := getattr(self.make_step, "framework", ""):
            return name
        backends = [owner(x) for x in [*self._params, *flattened(self.batch)[0]] if x is not None]
        return next((x.name for x in backends if x is not None and x.name != "numpy"), "numpy")

    @property
    def param_leaves(self) -> list[tuple[str, np.ndarray]]:
        """Paths and values of the float parameters, with 0 in place of infinities."""
        pairs = zip(self._params_structure.paths(), self._params, strict=True)
        return [(path, finite(array_of(x))) for path, x in pairs if is_float(x)]

    @property
    def start(self) -> list[np.ndarray]:
        """Values of the float parameters, in float64, with complex numbers as pairs."""
        return [as_floats(array_of(x)) for x in self._params if is_float(x)]

    @property
    def integers(self) -> list[np.ndarray]:
        """Values of the other parameters, such as step counts and random keys."""
        return [array_of(x) for x in self._params if _is_counted(x)]

    def step(self, split: Split) -> Step:
        """Returns the cached step of a division."""
        if split not in self._steps:
            devices = {} if split.devices == 1 else {"devices": split.devices}
            try:
                self._steps[split] = self.make_step(split.microbatches, **devices)
            except GradCombineError:
                raise
            except Exception as error:  # a user's function may raise anything
                raise invalid(f"a make_step for {split}", f"{type(error).__name__}: {line(error)}") from error
        return self._steps[split]

    def run(self, split: Split, batch: Tree, wide: bool = False, step: Step | None = None, **changes: Any) -> Result:
        """Runs the step on a batch.

        Args:
          split: how the step divides the batch.
          batch: like the subject's batch, with any number of examples.
          wide: whether to run in float64.
          step: a step to run instead of the subject's.
          changes: of the arguments, as in `call`.

        Raises:
          NotWide: if ``wide`` and this is impossible.
          GradCombineError: if the step raises, or returns something else than float arrays or than earlier.
          NotFiniteError: if the result is not finite.
        """
        try:
            result = self._result(*self.call(step or self.step(split), batch, wide, **changes))
        except (NotWide, NotFiniteError):
            raise
        except Exception as error:  # a user's step may raise anything
            if wide:
                raise NotWide(f"it does not run in float64: {line(error)}") from None
            if isinstance(error, GradCombineError):
                raise
            expected = f"a step that takes {examples(batch)} examples as {split}"
            raise invalid(expected, f"{type(error).__name__}: {line(error)}") from error
        narrow = next((x for x in result.dtypes if rounding_unit(x) > rounding_unit(np.dtype(np.float64))), None)
        if wide and narrow is not None:
            raise NotWide(f"it returns {narrow} for float64 inputs")
        return result

    def tried(
        self, split: Split, batch: Tree, wide: bool = False, step: Step | None = None, **changes: Any
    ) -> Result | None:
        """Runs the step as `run` does; None if that raises, is not finite, or is not possible in float64."""
        try:
            return self.run(split, batch, wide, step, **changes)
        except (NotWide, GradCombineError):
            return None

    def floats_of(self, function: Step, batch: Tree, wide: bool, noise: Noise | None = None) -> list[np.ndarray]:
        """Calls another function of parameters and batch; returns its float leaves in float64, 0 for infinities."""
        return floats_in(self.call(function, batch, wide, noise)[0])

    def call(
        self,
        function: Step,
        batch: Tree,
        wide: bool,
        noise: Noise | None = None,
        batch_noise: Noise | None = None,
        start: Sequence[np.ndarray] | None = None,
        counts: Sequence[np.ndarray] | None = None,
    ) -> tuple[Tree, list[np.ndarray]]:
        """Calls a function of parameters and batch.

        Args:
          wide: whether to run in float64.
          noise, batch_noise: perturb the float parameters, and the floats of the batch.
          start: values like `start` to use instead of the float parameters.
          counts: values to use instead of the integer parameters.

        Returns:
          Its result, and the float parameters that it received, as NumPy arrays.
        """
        params = list(self._params)
        if start is not None:
            values = iter(start)
            with wide_types(wide):
                params = [as_framework_of(from_floats(next(values), x, wide), x) if is_float(x) else x for x in params]
        if counts is not None:
            integers = iter(counts)
            pairs = [(next(integers, None) if _is_counted(x) else None, x) for x in params]
            params = [x if y is None or not is_integers(x) else as_framework_of(y, x) for y, x in pairs]
        program = self.program(function, batch) if wide else None
        with wide_types(wide), np.errstate(all="ignore"):
            arguments = [copied(x, wide, noise) for x in params]
            leaves, structure = flattened(batch)
            rows = [copied(x, wide, None if batch_noise is None else but_exact(batch_noise, x)) for x in leaves]
            before = [array_of(x).copy() for x in arguments if is_float(x)]  # a step may change them in place
            if program is not None and not program.problem:
                return program([*arguments, *rows]), before
            return self._apply(function, arguments, tree.unflatten(structure, rows)), before

    def _apply(self, function: Step, leaves: Sequence[Any], batch: Tree) -> Tree:
        """Calls a function; returns parameters that it replaces in place before its result."""
        params = tree.unflatten(self._params_structure, leaves)
        result = function(params, batch)
        if not self.returns_params or self._starts_with_params(result):
            return result
        changed = any(x is not y for x, y in zip(flattened(params)[0], leaves, strict=True))
        return (params, result) if changed else result

    def program(self, function: Step, batch: Tree) -> Program | None:
        """Returns the JAX program of a function of parameters and batch, or None if it cannot be traced."""
        leaves, structure = flattened(batch)
        key = id(function), *((shape_of(x), getattr(x, "dtype", None)) for x in leaves)
        if key not in self._programs:

            def of_leaves(arguments: list[Any]) -> Tree:
                count = len(self._params)
                return self._apply(function, arguments[:count], tree.unflatten(structure, arguments[count:]))

            program = None
            if "jax" in sys.modules and self.framework in ("jax", "numpy"):
                with suppress(Exception):  # the step reads values, or belongs to another framework
                    program = Program(of_leaves, [*self._params, *leaves])
            self._programs[key] = function, program  # a reference to the function keeps its id unique
        return self._programs[key][1]

    def evaluated(self, split: Split, evaluate: Callable[[Program, Sequence[Any]], list[Tree]]) -> list[Result]:
        """Returns the results of ``evaluate(program, arguments)`` for a division's program and float64 arguments."""
        program = self.program(self.step(split), self.batch)
        if program is None or program.problem:
            raise NotWide("its program is not known")
        with wide_types():
            arguments = [copied(x, True, None) for x in [*self._params, *flattened(self.batch)[0]]]
            before = [array_of(x) for x in arguments[: len(self._params)] if is_float(x)]
            return [self._result(x, before) for x in evaluate(program, arguments)]

    def read(self, value: Tree) -> Result:
        """Converts a reference result that the user passed."""
        return self._result(value, [array_of(x) for x in self._params if is_float(x)])

    def rows(self, rows: Sequence[int]) -> Tree:
        """Returns a batch of these examples."""
        leaves, structure = flattened(self.batch)
        return tree.unflatten(structure, [taken(x, np.array(rows, np.int32)) for x in leaves])

    def arrays(self) -> list[np.ndarray]:
        """Returns the leaves of the batch that have a row for each example."""
        return [array_of(x) for x in flattened(self.batch)[0] if is_present(x) and shape_of(x)]

    def with_row_of(self, row: int, other: int) -> Iterator[Tree]:
        """Yields, for each leaf, the batch with that leaf's ``row`` replaced by its row ``other``."""
        leaves, structure = flattened(self.batch)
        rows = np.arange(self.examples, dtype=np.int32)
        rows[row] = other
        for i, leaf in enumerate(leaves):
            yield tree.unflatten(structure, [*leaves[:i], taken(leaf, rows), *leaves[i + 1 :]])

    def zeros(self) -> Tree:
        """Returns a batch of the same size that is all zeros, like padding."""
        leaves, structure = flattened(self.batch)
        zeros = [as_framework_of(np.zeros_like(array_of(x)), x) if shape_of(x) else x for x in leaves]
        return tree.unflatten(structure, zeros)

    def _result(self, value: Tree, before: Sequence[np.ndarray]) -> Result:
        leaves, structure = flattened(value)
        if self.returns_params and not self._starts_with_params(value):
            raise tree.difference(self._params_structure, structure)
        self._structure = self._structure or structure
        if structure != self._structure:
            raise tree.difference(self._structure, structure)
        paths = list(structure.paths())
        present = [(i, array_of(x)) for i, x in enumerate(leaves) if is_present(x)]
        if self.returns_params:
            fixed = {i: x for i, x in enumerate(self._params) if isinstance(x, float | complex)}
            for i, x in present:
                if i in fixed and np.any(np.complex64(x) != np.complex64(fixed[i])):  # a float32 constant
                    raise invalid("an array as a parameter that the step changes", f"{fixed[i]}, then {x}", paths[i])
            present = [(i, x) for i, x in present if i not in fixed]
        floats = [(i, x) for i, x in present if is_float_dtype(x.dtype)]
        if not floats:
            raise invalid("a step that returns float arrays", f"{len(leaves)} leaves, none of them float arrays")
        self.names = tuple(paths[i] or "(root)" for i, _ in floats)
        wide = [widened(x) for _, x in floats]
        if self.returns_params:
            new, others = wide[: len(before)], wide[len(before) :]
            for name, x, y in zip(self.names, new, before, strict=False):
                if x.shape != y.shape:
                    raise invalid(f"a new parameter of the same shape {y.shape}", x.shape, name)
            wide = [change(x, widened(y)) for x, y in zip(new, before, strict=True)] + others
        for name, x in zip(self.names, wide, strict=True):
            if not np.isfinite(x).all():
                raise NotFiniteError(name)
        unequal = [name for name, (i, _) in zip(self.names, floats, strict=True) if differs_on_devices(leaves[i])]
        integers = tuple(x for _, x in present if not is_float_dtype(x.dtype))
        forms = tuple((paths[i] or "(root)", f"{_KINDS[kind_of(x.dtype)]} of shape {x.shape}") for i, x in present)
        return Result(tuple(map(as_floats, wide)), integers, tuple(x.dtype for _, x in floats), forms, tuple(unequal))

    def _starts_with_params(self, result: Tree) -> bool:
        """Whether a result is parameters, alone or followed by metrics."""
        starts = [result]
        if type(result) is tuple and result:
            starts += [result[0], result[: len(self._params_structure.children)]]
        return any(flattened(x)[1] == self._params_structure for x in starts)


_KINDS = {"integer": "integers", "float": "floats", "complex": "complex numbers"}


class NotFiniteError(GradCombineError):
    """Raised for a result that contains NaN or infinity."""

    def __init__(self, path: str) -> None:
        super().__init__("", "a step whose result is finite", "NaN or infinity", path)


def line(error: Exception) -> str:
    """Returns the message of an error as one line."""
    lines = str(error).strip().splitlines()
    # TensorFlow's first line may be a heading, with the error in the last line.
    chosen = [lines[0], *lines[-1:]] if lines and lines[0].endswith(":") else lines[:1]
    return " ".join(x.strip() for x in chosen) or type(error).__name__

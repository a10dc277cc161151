"""A step under test, run on chosen examples, in its own precision and in float64; what it gives, as NumPy arrays."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import dtype_of, owner
from gradcombine.errors import GradCombineError, invalid
from gradcombine.types import Tree
from gradcombine.verify.check.leaves import (
    NUMBERS,
    are_counts,
    array_of,
    as_floats,
    as_kind,
    copied,
    examples,
    flattened,
    is_float,
    is_float_dtype,
    is_there,
    shape_of,
    taken,
    widened,
)
from gradcombine.verify.check.retyping import NotWide, Retyped
from gradcombine.verify.check.retyping import wide as wide_types
from gradcombine.verify.compare.ulp import rounding_unit

Step: TypeAlias = Callable[[Any, Any], Any]
"""From parameters and a batch to gradients, or to new parameters."""

Rows: TypeAlias = tuple[int, ...]
"""Numbers of examples; one may occur several times."""


class Split(NamedTuple):
    """How a step divides its batch: into microbatches, on devices; (1, 1) is one batch.

    >>> print(Split(4, 1), "|", Split(2, 8))
    4 microbatches | 2 microbatches on 8 devices
    """

    microbatches: int = 1
    devices: int = 1

    def __str__(self) -> str:
        first = "one batch" if self.microbatches == 1 else f"{self.microbatches} microbatches"
        return first if self.devices == 1 else f"{first} on {self.devices} devices"


WHOLE = Split()


class Result(NamedTuple):
    """Result of a step.

    Attributes:
      floats: the float leaves, in float64; of new parameters, their distance from the old ones.
      integers: the other leaves.
      dtypes: of the float leaves, as they came.
    """

    floats: tuple[np.ndarray, ...]
    integers: tuple[np.ndarray, ...]
    dtypes: tuple[np.dtype, ...]


class Subject:
    """The step of a factory, for every division, with its parameters and its batch.

    Args:
      make_step: ``make_step(microbatches)``, or ``make_step(microbatches, devices=...)``.
      params: a tree of arrays.
      batch: a tree of arrays with a first axis of examples; scalars belong to all of them.
      returns_params: whether the step returns new parameters.
      turns: whether divisions take the examples in reverse order, too.
    """

    def __init__(
        self, make_step: Callable[..., Step], params: Tree, batch: Tree, returns_params: bool, turns: bool = True
    ) -> None:
        self.make_step, self.returns_params, self.turns = make_step, returns_params, turns
        self._params, self._params_structure = flattened(params)
        self.batch = batch
        self.names: tuple[str, ...] = ()
        self._structure: tree.Structure | None = None
        self._steps: dict[Split, Step] = {}
        self._programs: dict[Any, tuple[Step, Program | None]] = {}

    @property
    def examples(self) -> int:
        """How many examples the batch has."""
        return examples(self.batch)

    def on(self, batch: Tree) -> Subject:
        """This subject with another batch of as many examples."""
        other = copy.copy(self)
        other.batch = batch
        return other

    @property
    def params(self) -> Tree:
        """The parameters, as they were given."""
        return self._tree(self._params)

    @property
    def framework(self) -> str:
        """The framework of the inputs; of steps that take their arrays from NumPy, what their factory says."""
        if name := getattr(self.make_step, "framework", ""):
            return name
        backends = [owner(x) for x in [*self._params, *flattened(self.batch)[0]] if x is not None]
        return next((x.name for x in backends if x is not None and x.name != "numpy"), "numpy")

    @property
    def param_leaves(self) -> list[tuple[str, np.ndarray]]:
        """The float parameters, by their paths."""
        pairs = zip(self._params_structure.paths(), self._params, strict=True)
        return [(path, array_of(x)) for path, x in pairs if is_float(x)]

    def step(self, split: Split) -> Step:
        """The step of a division, made once."""
        if split not in self._steps:
            others = {} if split.devices == 1 else {"devices": split.devices}
            try:
                made = self.make_step(split.microbatches, **others)
            except GradCombineError:
                raise
            except Exception as error:  # whatever a foreign function raises
                received = f"{type(error).__name__}: {line(error)}"
                raise invalid(f"a make_step for {split}", received) from error
            self._steps[split] = made
        return self._steps[split]

    def run(
        self,
        split: Split,
        batch: Tree,
        wide: bool = False,
        noise: Callable[[np.ndarray], np.ndarray] | None = None,
        batch_noise: Callable[[np.ndarray], np.ndarray] | None = None,
        start: Sequence[np.ndarray] | None = None,
        step: Step | None = None,
    ) -> Result:
        """Runs the step on a division of a batch.

        Args:
          split: how it divides the batch.
          batch: like the subject's own, of any number of examples.
          wide: whether all floats enter in float64.
          noise, batch_noise: what changes the float parameters, and the floats of the batch.
          start: float64 parameters to take in place of the subject's own, one a float leaf; the result is still the
            distance from these.
          step: another one, in its place.
        """
        made, before = self.called(step or self.step(split), batch, wide, noise, batch_noise, start)
        result = self._result(made, before)
        narrow = next((x for x in result.dtypes if rounding_unit(x) > rounding_unit(np.dtype(np.float64))), None)
        if wide and narrow is not None:
            raise NotWide(f"it returns {narrow} whatever it is given")
        return result

    def of(
        self, function: Step, batch: Tree, wide: bool, noise: Callable[[np.ndarray], np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """The float leaves that another function of parameters and batch gives, in float64."""
        leaves = flattened(self.called(function, batch, wide, noise)[0])[0]
        arrays = [array_of(x) for x in leaves if is_there(x)]
        return [as_floats(x) for x in arrays if is_float_dtype(x.dtype)]

    def called(
        self,
        function: Step,
        batch: Tree,
        wide: bool,
        noise: Callable[[np.ndarray], np.ndarray] | None = None,
        batch_noise: Callable[[np.ndarray], np.ndarray] | None = None,
        start: Sequence[np.ndarray] | None = None,
    ) -> tuple[Tree, list[np.ndarray]]:
        """Calls a function; returns its result as NumPy arrays, and the float parameters that it got."""
        entered = list(self._params)
        if start is not None:
            given = iter(start)
            pairs = [(next(given), x) if is_float(x) else (None, x) for x in entered]
            entered = [x if y is None else as_kind(y if wide else y.astype(dtype_of(x)), x) for y, x in pairs]
        program = self.program(function, batch) if wide else None
        with wide_types() if wide else nullcontext(), np.errstate(all="ignore"):
            arguments = [copied(x, wide, noise) for x in entered]
            leaves, structure = flattened(batch)
            rows = [copied(x, wide, None if are_counts(x) else batch_noise) for x in leaves]
            before = [array_of(x) for x in arguments if is_float(x)]
            if program is not None and not program.retyped.problem:
                return program([*arguments, *rows]), before
            return self._applied(function, arguments, tree.unflatten(structure, rows)), before

    def _applied(self, function: Step, params: Sequence[Any], batch: Tree) -> Tree:
        """The result of a function; of one that changes its parameters in place, these before what it returns."""
        given = self._tree(params)
        made = function(given, batch)
        if not self.returns_params or self._begins(made):
            return made
        changed = any(x is not y for x, y in zip(flattened(given)[0], params, strict=True))
        return (given, made) if changed else made

    def _tree(self, params: Sequence[Any]) -> Tree:
        return tree.unflatten(self._params_structure, params)

    def program(self, function: Step, batch: Tree) -> Program | None:
        """The JAX program of a function of parameters and batch; None where it cannot be traced."""
        leaves, structure = flattened(batch)
        key = id(function), *((shape_of(x), getattr(x, "dtype", None)) for x in leaves)
        if key not in self._programs:

            def of_leaves(every: list[Any]) -> Tree:
                count = len(self._params)
                return self._applied(function, every[:count], tree.unflatten(structure, every[count:]))

            made = None
            if "jax" in sys.modules and self.framework in ("jax", "numpy"):
                with suppress(Exception):  # of a step that reads values, or of another framework
                    made = Program.of(of_leaves, [*self._params, *leaves])
            self._programs[key] = function, made  # a function that is kept keeps its id
        return self._programs[key][1]

    def scaled(
        self, split: Split, place: Callable[[Any], int | None], factors: Sequence[Sequence[float]]
    ) -> list[Result]:
        """Results in float64 where divisors are multiplied by factors, as `Retyped.scaled` has it."""
        leaves, params = flattened(self.batch)[0], self._params
        program = self.program(self.step(split), self.batch)
        if program is None or program.retyped.problem:
            raise NotWide("its program is not known")
        with wide_types():
            entered = [copied(x, True, None) for x in [*params, *leaves]]
            before = [array_of(x) for x in entered[: len(params)] if is_float(x)]
            made = program.retyped.scaled([entered[i] for i in program.entering], place, [np.array(x) for x in factors])
            return [self._result(program.filled(x), before) for x in made]

    def divided(self, split: Split, batch: Tree) -> Result:
        """`run`; raises GradCombineError where the step cannot divide the batch."""
        try:
            return self.run(split, batch)
        except GradCombineError:
            raise
        except Exception as error:  # whatever a foreign step raises
            expected = f"a step that takes {examples(batch)} examples as {split}"
            raise invalid(expected, f"{type(error).__name__}: {line(error)}") from error

    def wide(self, split: Split, batch: Tree, **others: Any) -> Result:
        """`run` in float64.

        Raises:
          NotWide: where it cannot be.
        """
        try:
            return self.run(split, batch, wide=True, **others)
        except Exception as error:  # whatever a foreign step raises
            if isinstance(error, (NotWide, NotFiniteError)):
                raise
            raise NotWide(f"it does not run in float64: {line(error)}") from None

    def read(self, made: Tree) -> Result:
        """Reads a reference that was given in place of a result."""
        return self._result(made, [array_of(x) for x in self._params if is_float(x)])

    def rows(self, rows: Sequence[int]) -> Tree:
        """A batch of these examples."""
        leaves, structure = flattened(self.batch)
        return tree.unflatten(structure, [taken(x, np.array(rows, np.int32)) for x in leaves])

    def arrays(self) -> list[np.ndarray]:
        """The leaves of the batch that have a row for each example."""
        return [array_of(x) for x in flattened(self.batch)[0] if is_there(x) and shape_of(x)]

    def with_row_of(self, row: int, other: int) -> Iterator[Tree]:
        """The batch, one leaf after the other with another example's values in a row."""
        leaves, structure = flattened(self.batch)
        rows = np.arange(self.examples, dtype=np.int32)
        rows[row] = other
        for i, leaf in enumerate(leaves):
            yield tree.unflatten(structure, [*leaves[:i], taken(leaf, rows), *leaves[i + 1 :]])

    def zeros(self) -> Tree:
        """A batch of as many examples, all of them zeros: what padding is made of."""
        leaves, structure = flattened(self.batch)
        return tree.unflatten(structure, [as_kind(np.zeros_like(array_of(x)), x) if shape_of(x) else x for x in leaves])

    def _result(self, made: Tree, before: Sequence[np.ndarray]) -> Result:
        leaves, structure = flattened(made)
        self._compare(made, structure)
        present = [(i, array_of(x)) for i, x in enumerate(leaves) if is_there(x)]
        floats = [(i, x) for i, x in present if is_float_dtype(x.dtype)]
        if not floats:
            raise invalid("a step that returns float arrays", f"{len(leaves)} leaves, none of them")
        paths = list(structure.paths())
        self.names = tuple(paths[i] or "(root)" for i, _ in floats)
        wide = [widened(x) for _, x in floats]
        if self.returns_params:
            new, others = wide[: len(before)], wide[len(before) :]
            for name, x, y in zip(self.names, new, before, strict=False):
                if x.shape != y.shape:
                    raise invalid(f"new parameters of the old shape {y.shape}", x.shape, name)
            wide = [x - widened(y) for x, y in zip(new, before, strict=True)] + others
        for name, x in zip(self.names, wide, strict=True):
            if not np.isfinite(x).all():
                raise NotFiniteError(name)
        others = tuple(x for _, x in present if not is_float_dtype(x.dtype))
        return Result(tuple(map(as_floats, wide)), others, tuple(x.dtype for _, x in floats))

    def _begins(self, made: Tree) -> bool:
        """Whether a result is parameters, alone or before metrics."""
        starts = [made]
        if type(made) is tuple and made:
            starts += [made[0], made[: len(self._params_structure.children)]]
        return any(flattened(x)[1] == self._params_structure for x in starts)

    def _compare(self, made: Tree, structure: tree.Structure) -> None:
        """Refuses another structure than that of the parameters, with metrics after them or not, and of other runs."""
        if self.returns_params and not self._begins(made):
            raise tree.difference(self._params_structure, structure)
        if self._structure is None:
            self._structure = structure
        elif structure != self._structure:
            raise tree.difference(self._structure, structure)


class Program(NamedTuple):
    """The JAX program of a function from the leaves of its arguments to a tree; some leaves of both are no arrays.

    Attributes:
      retyped: from arrays to arrays.
      entering, leaving: the places of these among the leaves.
      leaves: of the tree, None in place of each array.
      structure: of the tree.
    """

    retyped: Retyped
    entering: list[int]
    leaving: list[int]
    leaves: list[Any]
    structure: tree.Structure

    @classmethod
    def of(cls, function: Callable[[list[Any]], Tree], leaves: Sequence[Any]) -> Program:
        """The program that a function runs for these leaves."""
        entering = [i for i, x in enumerate(leaves) if is_there(x) and not isinstance(x, NUMBERS)]
        traced: list[tuple[list[int], list[Any], tree.Structure]] = []

        def run(arrays: list[Any]) -> list[Any]:
            every = list(leaves)
            for i, x in zip(entering, arrays, strict=True):
                every[i] = x
            made, structure = flattened(function(every))
            leaving = [i for i, x in enumerate(made) if is_there(x)]
            traced.append((leaving, [None if i in leaving else x for i, x in enumerate(made)], structure))
            return [made[i] for i in leaving]

        return cls(Retyped(run, [leaves[i] for i in entering]), entering, *traced[0])

    def __call__(self, leaves: Sequence[Any]) -> Tree:
        """The tree for other leaves of these shapes, in float64."""
        return self.filled(self.retyped([leaves[i] for i in self.entering]))

    def filled(self, arrays: Sequence[Any]) -> Tree:
        """The tree of these results."""
        made = list(self.leaves)
        for i, x in zip(self.leaving, arrays, strict=True):
            made[i] = x
        return tree.unflatten(self.structure, made)


class NotFiniteError(GradCombineError):
    """A result that holds NaN or infinity."""

    def __init__(self, path: str) -> None:
        super().__init__("", "a step whose result is finite", "NaN or infinity", path)


def line(error: Exception) -> str:
    """An error's message, in one line."""
    lines = str(error).strip().splitlines()
    # TensorFlow's first line may be a heading, and the last one the error.
    chosen = [lines[0], *lines[-1:]] if lines and lines[0].endswith(":") else lines[:1]
    return " ".join(x.strip() for x in chosen) or type(error).__name__

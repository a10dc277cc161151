"""Records the values in the shapes of the parameters that a JAX step computes, and runs it with others in their place.

Inside of `jax.shard_map`, values that are equal on all devices can be recorded, too. A value may differ along an axis
of the mesh if the spec of an argument that it depends on, or an operation in between, names it, up to a sum along this
axis. (Other values, such as shards that are gathered after the optimizer has scaled them by a norm, may hide the
gradient.)
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from gradcombine import tree
from gradcombine.types import Tree
from gradcombine.verify.check.leaves import array_of, flattened
from gradcombine.verify.check.retyping import Traced, inner, inputs_among, mapped, operations, with_inputs
from gradcombine.verify.check.running import NotWide, Split, Subject
from gradcombine.verify.check.step_program import scope_of

EQUALIZING = "psum", "psum_invariant", "pmax", "pmin"
"""Operations whose results are equal on all devices along their axes."""

EXAMPLES, EXCHANGED = -1, -2
"""Indices of the examples, and of numbers that devices exchange, among the dependencies of a value."""

TRANSPARENT = "pvary", "copy", "copy_p"
"""Operations that change no value."""


class Recorded:
    """Records the values in the shapes of the parameters that a step computes from its examples.

    Attributes:
      values: a function of lengths that returns a function of parameters and batch, which returns `inputs`, or all
        values if there are no lengths.
      rest: a function of parameters and (batch, values, chosen) that runs the step with the chosen values replaced.
      operations: the operation, the shape and the constant operands of each value.
      dependencies: the indices of the values that each is computed from, directly.
      inside: whether values inside of shard_map are recorded.
      maps: whether there is a shard_map.

    Raises:
      NotWide: if the step is not a JAX program.
    """

    def __init__(self, subject: Subject, split: Split, inside: bool = False) -> None:
        if "jax" not in sys.modules or subject.framework not in ("jax", "numpy"):
            raise NotWide("it is not a JAX program")
        jax, self.inside, self.maps = import_module("jax"), inside, False
        self._step, self._shapes = subject.step(split), {x.shape for _, x in subject.param_leaves}
        self.operations: list[tuple[str, tuple[int, ...], Constants]] = []
        self.dependencies: list[Dependencies] = []
        self._visited: list[Any] = []
        self._users: defaultdict[int, list[int]] = defaultdict(list)
        """The values that are computed from each value, directly."""
        self._state: list[int] = []
        """The indices of the arrays in the new state that are recorded."""
        self._sizes: tuple[tuple[Hashable, int], ...] = ()
        """The axes of the mesh around an operation, with their sizes."""
        self._leaves = len(subject.param_leaves)
        self._params, self._structure = flattened(subject.params)
        """Leaves and structure of the parameters; those that are no arrays, such as functions, are constants."""

        @jax.jit
        def run(arrays: Sequence[Any], replacement: tuple[Tree, Sequence[Any], Any]) -> list[Any]:
            batch, values, chosen = replacement
            pairs = iter([*zip(values, chosen, strict=True)])

            def replace(x: Any) -> Any:
                value, replaces = next(pairs)
                return jax.numpy.where(replaces, value.astype(x.dtype), x)

            return self._run(arrays, batch, replace)[0]

        def rest(params: Tree, replacement: tuple[Tree, Sequence[Any], Any]) -> Tree:
            arrays = run(self._arrays(params), replacement)
            return self._traced.tree(arrays)

        self.rest = rest
        self.values = lru_cache(maxsize=2)(self._values)
        jax.eval_shape(partial(self.values(), subject.params), subject.batch)

    def _values(self, *lengths: int) -> Callable[[Tree, Tree], list[Any]]:
        def step(arrays: Sequence[Any], batch: Tree) -> list[Any]:
            _, visited = self._run(arrays, batch, lambda x: x)
            # Indices depend on the batch: for one of another size, other values may have the parameters' shapes.
            return [visited[i] for i in self.inputs(*lengths)] if lengths else visited

        compiled = import_module("jax").jit(step)
        return lambda params, batch: compiled(self._arrays(params), batch)

    def _arrays(self, params: Tree) -> list[Any]:
        leaves, _ = flattened(params)
        return [leaves[i] for i in inputs_among(self._params)]

    def inputs(self, *lengths: int) -> tuple[int, ...]:
        """Returns the indices of the inputs of the last ``length`` operations, in order of use, for each length."""
        starts = [len(self.operations) - length for length in lengths]
        used = (i for start in starts for indices in self.dependencies[start:] for i in indices or () if i < start)
        return tuple(dict.fromkeys(i for i in used if i >= 0))

    def closed(self) -> int:
        """Returns the number of last operations that depend on the examples through their `inputs` only.

        Ignores scalars that no array depends on, such as metrics. Returns 0 if devices exchange a norm of the gradient,
        or the like, and use it: the results do not show then what the gradient is.
        """
        used = set[int]()
        for i in range(len(self.operations) - 1, -1, -1):
            if self.operations[i][1] or not used.isdisjoint(self._users[i]):
                used.add(i)
        if any(EXCHANGED in (self.dependencies[i] or ()) for i in used):
            return 0
        last = max((i for i in used if EXAMPLES in (self.dependencies[i] or ())), default=-1)
        return len(self.operations) - 1 - last

    def updates_state(self, length: int) -> bool:
        """Whether the last operations compute half of the arrays in the new state (the rest may be running statistics).

        Not if they only add updates, or choose between states.
        """
        start = len(self.operations) - length
        computed = [i >= start for i in self._state]
        changes = any(name not in (*UNSCALED, *ADDING) for name, _, _ in self.operations[start:])
        return changes and 2 * sum(computed) >= len(computed)

    def may_rescale(self, index: int, length: int) -> bool:
        """Whether the last operations may use a value only divided, or multiplied, by a number that is no constant."""
        while True:
            users = [j for j in self._users[index] if j >= len(self.operations) - length]
            if len(users) != 1:
                return False
            name, _, constants = self.operations[index := users[0]]
            if name not in UNSCALED:
                return name in ("scan", "while", "cond", "shard_map") or (name in ("div", "mul") and not constants)

    def shapes(self, indices: Sequence[int]) -> list[tuple[int, ...]]:
        return [self.operations[i][1] for i in indices]

    def _run(self, arrays: Sequence[Any], batch: Tree, visit: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
        """Runs the step; returns the arrays of its result and the recorded values, or what ``visit`` made of them."""
        rows, structure = flattened(batch)
        params, count = with_inputs(self._params, arrays), len(self._params)

        def of_leaves(leaves: list[Any]) -> Tree:
            state, examples = tree.unflatten(self._structure, leaves[:count]), tree.unflatten(structure, leaves[count:])
            return self._step(state, examples)

        self._traced = Traced(of_leaves, [*params, *rows])
        self.operations, self.dependencies, self._visited, self._users = [], [], [], defaultdict(list)
        arguments = [Tracked(x, constant=hash(("state", i))) for i, x in enumerate(arrays)]
        arguments += [Tracked(x, (EXAMPLES,)) for x in self._traced.arrays([*params, *rows])[len(arrays) :]]
        results = self._evaluate(self._traced.jaxpr, arguments, visit)
        state = [x.dependencies or () for x in results[: self._leaves] if np.ndim(x.value)]
        self._state = [x[0] for x in state if len(x) == 1 and x[0] >= 0]
        visited, self._visited = self._visited, []
        return [x.value for x in results], visited

    def _evaluate(self, program: Any, arguments: Sequence[Tracked], visit: Callable[[Any], Any]) -> list[Tracked]:
        """Evaluates a program with results of ``visit`` in place of the recorded values; inlines jitted functions."""
        jaxpr = getattr(program, "jaxpr", program)
        inputs = [*(Tracked(x, constant=_hashed(x)) for x in getattr(program, "consts", ())), *arguments]
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

        def read(variable: Any) -> Tracked:
            if hasattr(variable, "val"):
                return Tracked(variable.val, constant=_hashed(variable.val))
            return values[variable]

        for x in jaxpr.eqns:
            operands = [read(v) for v in x.invars]
            self.maps |= x.primitive.name == "shard_map"
            if x.primitive.name in ("jit", "pjit"):
                results = self._evaluate(x.params["jaxpr"], operands, visit)
            elif self.inside and x.primitive.name == "shard_map":
                results = self._on_devices(x, operands, visit)
            else:
                functions, params = _bind_params(x)
                with import_module("jax").named_scope(scope_of(x)):
                    outputs = x.primitive.bind(*functions, *(y.value for y in operands), **params)
                outputs = outputs if x.primitive.multiple_results else [outputs]
                results = self._results(x, operands, outputs, visit)
            values.update(zip(x.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _on_devices(self, x: Any, operands: Sequence[Tracked], visit: Callable[[Any], Any]) -> list[Tracked]:
        """Evaluates a shard_map, whose recorded values are returned from it."""
        params, start, inside, around = x.params, len(self._visited), list[Tracked](), self._sizes
        self._sizes = tuple(params["mesh"].shape.items())

        def on_device(*arguments: Any) -> tuple[list[Any], list[Any]]:
            rows = zip(operands, arguments, params["in_specs"], strict=True)
            entering = [y._replace(value=value, axes=y.axes | _named(tuple(spec))) for y, value, spec in rows]
            inside[:] = self._evaluate(params["jaxpr"], entering, visit)
            return [y.value for y in inside], self._visited[start:]

        specs = list(params["out_specs"]), import_module("jax").sharding.PartitionSpec()
        outputs, self._visited[start:] = mapped(params, on_device, specs)(*(y.value for y in operands))
        self._sizes = around
        outside = frozenset[Hashable]().union(*(y.axes for y in operands))
        results = list[Tracked]()
        for value, y in zip(outputs, inside, strict=True):
            result = y._replace(value=value, axes=y.axes & outside)
            if y.axes != result.axes and y.dependencies is not None:  # its shards were not recorded
                result = self._recorded("shard_map", result, (), visit) or result
            results.append(result)
        return results

    def _results(
        self, x: Any, operands: Sequence[Tracked], outputs: Sequence[Any], visit: Callable[[Any], Any]
    ) -> list[Tracked]:
        name, axes = x.primitive.name, _axes(x, operands) if self.inside else frozenset[Hashable]()
        constants, indices = tuple(y.constant for y in operands if y.constant is not None), _sources(name, operands)
        if indices is not None:
            exchanges = self.inside and name != "pvary" and any(i >= 0 for i in indices) and _names_axes(x)
            results = [Tracked(y, indices, axes=axes) for y in outputs]
            unrecorded = (*indices, EXCHANGED) if exchanges else indices
            return [self._recorded(name, y, constants, visit) or y._replace(dependencies=unrecorded) for y in results]
        if name in TRANSPARENT:
            return [operands[0]._replace(value=outputs[0], axes=axes)]
        if len(constants) < len(operands):
            return [Tracked(y, axes=axes) for y in outputs]
        # Without addresses of functions. A sum over devices is another one for another number of them.
        params = re.sub("0x[0-9a-f]+", "", str([(key, y) for key, y in x.params.items() if key != "sharding"]))
        operation = name, constants, params, self._sizes if _names_axes(x) else ()
        return [Tracked(y, constant=hash((operation, i, y.shape)), axes=axes) for i, y in enumerate(outputs)]

    def _recorded(self, name: str, x: Tracked, constants: Constants, visit: Callable[[Any], Any]) -> Tracked | None:
        """Records a result of an operation; None for one of another shape or dtype, or that may differ on devices."""
        value, indices = x.value, x.dependencies or ()
        is_float = import_module("jax").numpy.issubdtype(value.dtype, np.floating)
        if x.axes or value.shape not in self._shapes or not is_float:
            return None
        self.operations.append((name, value.shape, constants))
        self.dependencies.append(indices)
        for i in indices:
            self._users[i].append(len(self.operations) - 1)
        self._visited.append(visit(value))
        return Tracked(self._visited[-1], (len(self.operations) - 1,))


UNSCALED = "convert_element_type", "copy", "reshape", "select_n", "transpose"
"""Operations that keep the numbers, or choose among them."""

ADDING = "add", "sub", "neg", "slice", "squeeze", "broadcast_in_dim", "pvary", "shard_map"
"""Operations between an update and the new parameters, besides `UNSCALED` ones."""

Dependencies: TypeAlias = tuple[int, ...] | None
"""Indices of the recorded values, or `EXAMPLES`, that a value is computed from; None if it depends on none of them."""

Constants: TypeAlias = tuple[int, ...]
"""Hashes of constants and arrays of the state, or of the operations that compute values from these alone."""

Axes: TypeAlias = frozenset[Hashable]
"""Axes of a mesh along which devices may hold different values."""


class Tracked(NamedTuple):
    """A value in a program.

    Attributes:
      value: an array.
      dependencies: the recorded values that it is computed from.
      constant: hash of a constant or an array of the state, or of the operations that compute it from these alone; None
        for others.
      axes: along which it may differ.
    """

    value: Any
    dependencies: Dependencies = None
    constant: int | None = None
    axes: Axes = frozenset()


def _sources(name: str, operands: Sequence[Tracked]) -> Dependencies:
    """Returns the dependencies of an operation.

    Which of two states is kept may depend on the examples, as with a loss that is not finite.
    """
    sources = [y.dependencies for y in operands]
    if name == "select_n" and any(i >= 0 for some in sources[1:] for i in some or ()):
        sources[0] = tuple(i for i in sources[0] or () if i >= 0)
    known = [some for some in sources if some is not None]
    return tuple(dict.fromkeys(i for some in known for i in some)) if known else None


def _hashed(x: Any) -> int | None:
    return None if isinstance(x, import_module("jax").core.Tracer) else hash(array_of(x).tobytes())


def _bind_params(equation: Any) -> tuple[Any, Any]:
    """Returns the functions and parameters to bind a primitive with; newer versions of JAX return no functions."""
    bound = equation.primitive.get_bind_params(equation.params)
    return cast("tuple[Any, Any]", bound if isinstance(bound, tuple) else ((), bound))


def _names_axes(equation: Any) -> list[tuple[Any, Axes]]:
    """Returns the operations of an equation and its inner programs that name axes of a mesh, with these axes."""
    found = (equation, *(y for program in inner(equation) for y in operations(program)))
    named = ((x, _named(x.params.get("axes", ())) | _named(x.params.get("axis_name", ()))) for x in found)
    return [(x, axes) for x, axes in named if axes]


def _axes(equation: Any, operands: Sequence[Tracked]) -> Axes:
    """Returns the axes along which the results of an operation may differ."""
    axes = frozenset[Hashable]().union(*(y.axes for y in operands))
    for x, named in _names_axes(equation):
        equalizes = x is equation and x.primitive.name in EQUALIZING
        axes = axes - named if equalizes and x.params.get("axis_index_groups") is None else axes | named
    return axes


def _named(axes: Any) -> Axes:
    """Returns the names among the axes of an operation or a partition spec; others are numbers."""
    parts: list[Any] = []
    for x in cast("tuple[Any, ...]", axes if isinstance(axes, tuple) else (axes,)):
        parts += cast("tuple[Any, ...]", x if isinstance(x, tuple) else (x,))
    return frozenset(x for x in parts if x is not None and not isinstance(x, int | np.integer))

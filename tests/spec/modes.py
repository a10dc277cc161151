"""The execution modes of the suite. Each runs a program on one or more replicas that hold different data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

import gradcombine as gc
from gradcombine import tree


class Env(NamedTuple):
    """Collective and loop of a mode, as a program uses them."""

    collective: Any
    loop: Callable[[Callable[[Any, Any], Any], Any, Any], Any]
    """``loop(step, state, xs)``: the state after ``state = step(state, x)`` for each row x of the tree xs."""


Program = Callable[[Env, Any], Any]


class Mode:
    """One execution mode of a framework.

    Args:
      name: id of the mode in the tests.
      framework: framework of the program's arrays.
      replicas: supported numbers of replicas.
      start: ``start(body, n) -> function``. The function takes a list of arrays stacked over n replicas and returns,
        for each output of body, the n values.
      env: collective and loop for the programs.
    """

    def __init__(self, name: str, framework: str, replicas: tuple[int, ...], start: Any, env: Env) -> None:
        self.name, self.framework, self.replicas, self.start, self.env = name, framework, replicas, start, env
        self.compiled: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return self.name

    def run(self, program: Program, per_replica: Sequence[Any]) -> list[Any]:
        """Runs the program on all replicas; returns the output of each as a NumPy tree.

        Args:
          program: a hashable callable of (env, data); compiled once for each structure and shape.
          per_replica: one tree per replica.
        """
        started, outputs, stacked = self.started(program, per_replica)
        columns = started(stacked)
        leaves, out_structure = outputs[0]
        results = []
        for rank in range(len(per_replica)):
            values = iter(columns)
            results.append(tree.unflatten(out_structure, [next(values)[rank] if x else None for x in leaves]))
        return results

    def started(self, program: Program, per_replica: Sequence[Any]) -> tuple[Any, list[Any], list[np.ndarray]]:
        """Returns the compiled function, a list that holds its output structure once traced, and its stacked inputs."""
        flat = [tree.flatten(data) for data in per_replica]
        structure = flat[0][1]
        here = [i for i, leaf in enumerate(flat[0][0]) if leaf is not None]
        stacked = [np.stack([leaves[i] for leaves, _ in flat]) for i in here]
        key = (program, len(flat), str(structure), *((x.shape, str(x.dtype)) for x in stacked))
        if key not in self.compiled:
            self.compiled[key] = self._compile(program, structure, here, len(flat))
        return *self.compiled[key], stacked

    def _compile(self, program: Program, structure: tree.Structure, here: list[int], n: int) -> tuple[Any, list[Any]]:
        count = len(list(structure.paths()))
        outputs: list[Any] = []

        def body(arrays: Sequence[Any]) -> list[Any]:
            leaves: list[Any] = [None] * count
            for i, array in zip(here, arrays, strict=True):
                leaves[i] = array
            out, out_structure = tree.flatten(program(self.env, tree.unflatten(structure, leaves)))
            outputs[:] = [([leaf is not None for leaf in out], out_structure)]
            return [leaf for leaf in out if leaf is not None]

        return self.start(body, n), outputs


def converter(framework: str) -> Callable[[np.ndarray], Any]:
    """The function that makes an array of a framework."""
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray
    if framework == "tensorflow":
        import tensorflow as tf

        return tf.constant
    return np.asarray


def as_arrays(framework: str, value: Any) -> Any:
    """A tree with arrays of a framework as leaves."""
    leaves, structure = tree.flatten(value)
    return tree.unflatten(structure, [None if x is None else converter(framework)(x) for x in leaves])


def python_loop(step: Callable[[Any, Any], Any], state: Any, xs: Any) -> Any:
    """Calls ``step`` once per row."""
    leaves, structure = tree.flatten(xs)
    for i in range(next(leaf.shape[0] for leaf in leaves if leaf is not None)):
        state = step(state, tree.unflatten(structure, [None if leaf is None else leaf[i] for leaf in leaves]))
    return state


def _one_by_one(convert: Callable[[np.ndarray], Any]) -> Any:
    def start(body: Any, n: int) -> Any:
        def call(stacked: list[np.ndarray]) -> list[list[np.ndarray]]:
            per_replica = [body([convert(x[rank]) for x in stacked]) for rank in range(n)]
            return [[np.asarray(x) for x in column] for column in zip(*per_replica, strict=True)]

        return call

    return start


def _numpy_modes() -> list[Mode]:
    return [Mode("numpy", "numpy", (1,), _one_by_one(np.asarray), Env(gc.LOCAL, python_loop))]


def _jax_modes() -> list[Mode]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from tests.integrations.jax.replicas import mesh

    axis = gc.jax_axis("data")

    def scan(step: Any, state: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda carry, x: (step(carry, x), None), state, xs)[0]

    def called(function: Any) -> Any:
        def call(stacked: list[np.ndarray]) -> list[list[np.ndarray]]:
            return [list(map(np.asarray, np.asarray(x))) for x in function(stacked)]

        call.function = function
        call.traced = lambda stacked: function.lower(stacked).as_text()
        return call

    def jit(body: Any, n: int) -> Any:
        compiled = jax.jit(body)

        def call(stacked: list[np.ndarray]) -> list[list[np.ndarray]]:
            return [[np.asarray(x)] for x in compiled([x[0] for x in stacked])]

        return call

    def vmap(body: Any, n: int) -> Any:
        return called(jax.jit(jax.vmap(body, axis_name="data")))

    def shard_map(check_vma: bool) -> Any:
        def start(body: Any, n: int) -> Any:
            spec = PartitionSpec("data")

            def block(stacked: Any) -> Any:
                return [x[None] for x in body([x[0] for x in stacked])]

            devices = mesh(n, "data")
            mapped = jax.shard_map(block, mesh=devices, in_specs=(spec,), out_specs=spec, check_vma=check_vma)
            return called(jax.jit(mapped))

        return start

    over, counts = Env(axis, python_loop), (1, 2, 4, 8)
    return [
        Mode("jax_eager", "jax", (1,), _one_by_one(jnp.asarray), Env(gc.LOCAL, python_loop)),
        Mode("jax_jit", "jax", (1,), jit, Env(gc.LOCAL, python_loop)),
        Mode("jax_scan", "jax", (1,), jit, Env(gc.LOCAL, scan)),
        Mode("jax_vmap", "jax", counts, vmap, over),
        Mode("jax_shard_map", "jax", counts, shard_map(True), over),
        Mode("jax_shard_map_scan", "jax", counts, shard_map(True), Env(axis, scan)),
        Mode("jax_shard_map_unchecked", "jax", counts, shard_map(False), over),
    ]


def _tensorflow_modes() -> list[Mode]:
    import tensorflow as tf

    from tests.integrations.tensorflow import strategies

    def called(compiled: Any, dealt: Any, rows: Any = lambda x: [x]) -> Any:
        def call(stacked: list[np.ndarray]) -> list[list[np.ndarray]]:
            return [[x.numpy() for x in rows(column)] for column in compiled(dealt(stacked))]

        call.traced = lambda stacked: compiled.get_concrete_function(dealt(stacked)).graph.as_graph_def()
        return call

    def function(jit_compile: bool) -> Any:
        def start(body: Any, n: int) -> Any:
            return called(
                tf.function(body, autograph=False, jit_compile=jit_compile),
                lambda stacked: [tf.constant(x[0]) for x in stacked],
            )

        return start

    def mirrored(body: Any, n: int) -> Any:
        replicas = strategies.mirrored(n)
        compiled = tf.function(lambda arrays: replicas.run(body, (arrays,)), autograph=False)

        def dealt(stacked: list[np.ndarray]) -> Any:
            return [strategies.per_replica(replicas, x.__getitem__) for x in stacked]

        return called(compiled, dealt, replicas.experimental_local_results)

    local, over = Env(gc.LOCAL, python_loop), Env(gc.tf_replicas(), python_loop)
    return [
        Mode("tf_eager", "tensorflow", (1,), _one_by_one(tf.constant), over),
        Mode("tf_function", "tensorflow", (1,), function(False), over),
        Mode("tf_xla", "tensorflow", (1,), function(True), local),
        Mode("tf_mirrored", "tensorflow", (1, 2, 4, 8), mirrored, over),
    ]


FRAMEWORK_MODES = {"numpy": _numpy_modes, "jax": _jax_modes, "tensorflow": _tensorflow_modes}

NAMES = {
    "numpy": ("numpy",),
    "jax": (
        "jax_eager",
        "jax_jit",
        "jax_scan",
        "jax_vmap",
        "jax_shard_map",
        "jax_shard_map_scan",
        "jax_shard_map_unchecked",
    ),
    "tensorflow": ("tf_eager", "tf_function", "tf_xla", "tf_mirrored"),
}
"""Names of all modes by framework; importing this module imports no framework."""

REPLICATED = ("jax_vmap", "jax_shard_map", "jax_shard_map_scan", "jax_shard_map_unchecked", "tf_mirrored")
"""Modes with a collective over several replicas."""

LOOPING = ("jax_scan", "jax_shard_map_scan")
"""Modes that use a scan; programs without a loop are the same as in jax_jit and jax_shard_map."""

UNROLLED = tuple(name for names in NAMES.values() for name in names if name not in LOOPING)
"""Modes that differ for programs without a loop."""

EXCHANGING = tuple(name for name in UNROLLED if name in REPLICATED)
"""Modes of several replicas that differ for programs without a loop."""

COMMUNICATING = ("jax_shard_map_unchecked", "tf_mirrored")
"""Modes omitted from tests without communication, where they run the same programs as jax_jit and tf_function.

`tests/spec/test_modes.py` shows this, and that jax.pmap, which is not a mode, always runs the same programs as
jax_shard_map_unchecked.
"""

CANNOT = {
    ("jax", "float64"): "JAX has no 64-bit values unless jax_enable_x64 is set, for the entire process",
    ("jax", "complex128"): "as float64",
}
"""Dtypes that a framework does not support, and why."""


_begun: set[str] = set()


@cache
def _made(framework: str) -> dict[str, Mode]:
    _begun.add(framework)
    modes = {mode.name: mode for mode in FRAMEWORK_MODES[framework]()}
    assert tuple(modes) == NAMES[framework]
    return modes


def get(name: str) -> Mode:
    """Returns the mode with this name; imports its framework."""
    return _made(next(framework for framework, names in NAMES.items() if name in names))[name]


def forget() -> None:
    """Drops all compiled programs."""
    for framework in FRAMEWORK_MODES:
        if framework in _begun:
            for mode in _made(framework).values():
                mode.compiled.clear()

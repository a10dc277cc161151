"""Omitted modes compile the same programs as another mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.spec import modes, test_faults, test_laws, test_losses
from tests.spec.data import deal
from tests.spec.programs import Combine
from tests.spec.selection import FULL


def stacked(n: int) -> Any:
    """Ones with the structure and shapes of `data.contributions`."""
    values = {"none": None, "w": np.ones((n, 2)), "scalar": np.ones(n), "empty": np.ones((n, 0, 2))}
    return {
        "values": {name: None if x is None else np.float32(x) for name, x in values.items()},
        "weights": np.ones(n, np.float32),
    }


LAWS = {"-".join(names): (test_laws.Sides(names), [stacked(3)]) for names in test_laws.NAMES.args[1]}
REPLICATED = {
    "laws": (test_laws.Sides(test_laws.QUICK_NAMES), [stacked(3)] * 2),
    **{place: (Combine(place, "tree"), deal(stacked(4), 2)) for place in ("time", "time x replicas")},
    "list x replicas": (Combine("list x replicas", "sequential"), deal(stacked(4), 2)),
    "replicas": (Combine("replicas", "sequential"), deal(stacked(2), 2)),
    "exact": (Combine("time x replicas", "sequential", ("sum", "mean"), "exact"), deal(stacked(4), 2)),
    "faults": (test_faults._program("tree", True), [test_faults.replica(rank) for rank in range(2)]),
    "losses": (test_losses.reduced, test_losses.divided(2, packed=True)),
}


@FULL
@pytest.mark.needs("jax")
@pytest.mark.parametrize("name", REPLICATED)
def test_pmap_is_shard_map_unchecked(name: str) -> None:
    """The lowered programs are equal except for function names and argument shardings."""
    import jax

    def pmap(body: Any, n: int) -> Any:
        return jax.pmap(body, axis_name="data", devices=jax.devices()[:n])

    unchecked = modes.get("jax_shard_map_unchecked")
    started, _, arrays = unchecked.started(*REPLICATED[name])
    mapped, *_ = modes.Mode("pmap", "jax", (2,), pmap, unchecked.env).started(*REPLICATED[name])
    texts = started.traced(arrays), mapped.lower(arrays).as_text()
    ours, theirs = ([x for x in text.splitlines() if "@main" not in x] for text in texts)
    assert len(ours) > 100
    assert ours[1:] == theirs[1:]


def operations(jaxpr: Any) -> list[Any]:
    """Primitive, inputs, parameters and result types of each equation, with inner programs as nested lists."""
    from jax.extend import core

    numbers = {x: i for i, x in enumerate([*jaxpr.constvars, *jaxpr.invars])}
    listed = []
    for eqn in jaxpr.eqns:
        inputs = [x.val if isinstance(x, core.Literal) else numbers[x] for x in eqn.invars]
        flat = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple) else (value,))]
        inner = [getattr(x, "jaxpr", x) for x in flat if isinstance(x, core.Jaxpr | core.ClosedJaxpr)]
        others = [str(x) for x in flat if isinstance(x, bool | int | float | str | np.dtype)]
        numbers |= {x: len(numbers) + i for i, x in enumerate(eqn.outvars)}
        listed.append((eqn.primitive, str(inputs), others, str([x.aval for x in eqn.outvars])))
        listed += [operations(x) for x in inner]
    return listed


@FULL
@pytest.mark.needs("jax")
@pytest.mark.parametrize("name", [*LAWS, "time"])
def test_shard_map_unchecked_is_jit_where_nothing_communicates(name: str) -> None:
    import jax

    program, data = (LAWS | REPLICATED)[name]
    unchecked = modes.get("jax_shard_map_unchecked")

    def jit(body: Any, n: int) -> Any:
        return jax.jit(lambda stacked: [x[None] for x in body([x[0] for x in stacked])])

    started, _, arrays = modes.Mode("jit", "jax", (1,), jit, modes.get("jax_jit").env).started(program, data[:1])
    mapped, *_ = unchecked.started(program, data[:1])
    (ours,) = jax.make_jaxpr(started)(arrays).eqns
    (theirs,) = jax.make_jaxpr(mapped.function)(arrays).eqns
    (theirs,) = theirs.params["jaxpr"].eqns
    ours, theirs = operations(ours.params["jaxpr"].jaxpr), operations(theirs.params["jaxpr"])
    assert len(ours) > 100
    assert ours == theirs


def nodes(graph: Any) -> list[Any]:
    """Operation, inputs and attributes of each node, then the operations of each library function."""
    index = {node.name: i for i, node in enumerate(graph.node)}

    def source(tensor: str) -> tuple[Any, ...]:
        name, _, output = tensor.lstrip("^").partition(":")
        return index[name], output, tensor.startswith("^")

    def attributes(node: Any) -> list[tuple[str, str]]:
        names = ("_user_specified_name", "_gradient_op_type")  # the second contains a running number
        return sorted((k, str(v)) for k, v in node.attr.items() if k not in names and not v.HasField("func"))

    bodies = sorted([node.op for node in function.node_def] for function in graph.library.function)
    return [(node.op, [*map(source, node.input)], attributes(node)) for node in graph.node] + bodies


@FULL
@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("name", [*LAWS, "time"])
def test_mirrored_is_function_where_nothing_communicates(name: str) -> None:
    program, data = (LAWS | REPLICATED)[name]
    both = [modes.get(mode).started(program, data[:1]) for mode in ("tf_function", "tf_mirrored")]
    ours, theirs = (nodes(started.traced(arrays)) for started, _, arrays in both)
    assert len(ours) > 100
    assert ours == theirs

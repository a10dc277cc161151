"""Strategies to run a window: their results, predicted costs, and errors for bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

import gradcombine as gc
from gradcombine.audit import Target
from gradcombine.audit.target import Published
from gradcombine.integrations.jax import Loss, LossOutput
from gradcombine.verify.command import app
from gradcombine.verify.plan import Plan, plan
from gradcombine.verify.plan.strategies import CALLS, DEFAULT, NUMBERS, PLACES, way_of

pytestmark = pytest.mark.usefixtures("standard_promotion")

K, N, ROWS, WIDTH = 4, 8, 2, 16
"""Number of microbatches, of replicas, of rows in a replica's microbatch, and width of a row."""


def linear(params: Any, x: Any) -> Any:
    """A loss whose gradient is the mean of the rows for all parameters."""
    return jnp.mean(jnp.sum(x * params["w"][:, 0][None], axis=1)) + params["b"]


LIKE = {"w": jax.ShapeDtypeStruct((WIDTH, 2), jnp.float32), "b": jax.ShapeDtypeStruct((), jnp.float32)}
OPTIMIZER = optax.sgd(0.5, momentum=0.5)


def planned(names: list[str], **changed: Any) -> Plan:
    batch = jax.ShapeDtypeStruct((K * N * ROWS, WIDTH), jnp.float32)
    arguments = {"loss": linear, "params": LIKE, "batch": batch, "optimizer": OPTIMIZER, "microbatches": K}
    return plan(**arguments | {"names": names} | changed)


def run(code: str, loss: Callable[..., Any] | Loss, window: np.ndarray, mesh: Mesh, *others: Any) -> Any:
    """The parameters after one window, computed by the code that a plan shows."""
    replicated, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params = jax.device_put({"w": jnp.zeros((WIDTH, 2)), "b": jnp.zeros(())}, replicated)
    # The rows of each replica are contiguous; each microbatch has some rows of every replica.
    parts = window.reshape(N, K, ROWS, WIDTH).swapaxes(0, 1).reshape(K, N * ROWS, WIDTH)
    names = {
        "loss": loss,
        "optimizer": OPTIMIZER,
        "mesh": mesh,
        "params": params,
        "batch": (jax.device_put(window, rows), *others),
        "microbatches": [(jax.device_put(part, rows), *others) for part in parts],
    }
    exec(compile(code, "<plan>", "exec"), names)
    return jax.tree.map(np.asarray, names["params"])


QUICK = ("flush+zero2", "every+zero1", "accumulate")


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if way_of(name).name in QUICK else pytest.mark.full) for name in DEFAULT]
)
def test_the_code_of_a_strategy_computes_the_step_of_the_whole_batch(name: str) -> None:
    """Sums of small integers and powers of two are exact in every type and order."""
    window = np.random.default_rng(0).integers(-4, 5, (K * N * ROWS, WIDTH)).astype(np.float32)
    mesh = jax.make_mesh((N,), ("data",))
    (row,) = planned([name], mesh=mesh).rows
    assert row.compiled is not None, row.refused
    got = run(row.code, linear, window, mesh)
    np.testing.assert_array_equal(got["w"][:, 0], -0.5 * window.mean(0))
    assert (got["w"][:, 1] == 0).all() and got["b"] == -0.5


@pytest.mark.full
def test_the_predicted_exchange_is_the_compiled_one_and_what_holds_less_memory_is_seen() -> None:
    wide = {f"w{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for i in range(2)}

    def loss(params: Any, x: Any) -> Any:
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    batch = jax.ShapeDtypeStruct((K * N * ROWS, 256), jnp.float32)
    names = ["window", "window+8bits", "window+zero2", "window+zero2+8bits", "window+compensated"]
    found = planned(names, loss=loss, params=wide, batch=batch)
    rows = {row.name: row for row in found.rows}
    size = 2 * 256 * 256 * 4
    part = 2 * (256 * 256 // 8) * 129 // 128  # 8 bits per element, and a byte per block of 128
    sent = {
        "window": 2 * 7 * size // 8,
        "window+8bits": 2 * 7 * part,
        "window+zero2": (K + 1) * 7 * size // 8,
        "window+zero2+8bits": K * 7 * part + 7 * size // 8,
        "window+compensated": 7 * 2 * size,
    }
    for name, row in rows.items():
        assert row.compiled is not None and row.predicted is not None
        assert abs(row.compiled.sent - sent[name]) < 500 and abs(row.predicted.sent - sent[name]) < 500
        if name != "window+zero2+8bits":  # CPUs encode in several passes, here for each microbatch
            assert 0.5 < row.compiled.moved / row.predicted.moved < 1.5
    assert (
        rows["window+zero2"].compiled.memory
        < rows["window"].compiled.memory
        < rows["window+compensated"].compiled.memory
    )  # pyright: ignore[reportOptionalMemberAccess]
    assert [row.compiled.moved + row.compiled.sent for row in found.rows if row.compiled] == sorted(  # by the bytes
        row.compiled.moved + row.compiled.sent for row in found.rows if row.compiled
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ["window+bfloat16", "window+8bits"])
def test_sums_stay_wide_beside_axes_that_the_compiler_shards(name: str) -> None:
    like = {"w": jax.ShapeDtypeStruct((256, 2), jnp.float32), "b": jax.ShapeDtypeStruct((), jnp.float32)}
    batch, mesh = jax.ShapeDtypeStruct((K * N * ROWS, 256), jnp.float32), jax.make_mesh((2, 2), ("data", "model"))
    rows = {row.name: row for row in planned(["window", name], params=like, batch=batch, mesh=mesh).rows}
    assert rows[name].predicted.sent == rows["window"].predicted.sent  # pyright: ignore[reportOptionalMemberAccess]
    assert rows[name].compiled.sent == rows["window"].compiled.sent  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.full
def test_what_does_not_fit_and_what_is_refused_has_a_row() -> None:
    """ZeRO-2 cannot be combined with an optimizer that clips by the global norm."""
    clipping = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5))
    small = Target("a small card", tuple(jax.devices()), N, Published({32: 1e12}, 1e12, 1000, 1e11))
    names = ["window", "zero2", "zero2+bfloat16", "accumulate+zero1", "zero2+exact", "exact+8bits"]
    found = planned(names, optimizer=clipping, target=small)
    assert found.best is None
    first, *others = found.rows
    assert (first.name, first.fits, first.refused) == ("window", False, "")
    assert first.compiled is not None and first.lacking == first.compiled.memory - 1000 > 0
    assert "more than a device has" in first.why
    words = {
        "window+zero2": "an elementwise optimizer for zero2",
        "window+zero2+bfloat16": "an elementwise optimizer for zero2",
        "accumulate+zero1": "replicated parameters with accumulate",
        "window+zero2+exact": "precision 'fast'",
        "window+8bits+exact": "no wire for precision 'exact'",
    }
    assert {row.name for row in others} == set(words)
    assert all(words[row.name] in row.refused and row.compiled is None for row in others)
    assert not any(row.refused.startswith(":") for row in others)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["flush+zero2", "window", "every", "zero2", "accumulate"],
)
def test_the_code_of_a_loss_with_weights_metrics_and_random_numbers(name: str) -> None:
    """Weights of 0, 1 and 2 that sum to a power of two; the unweighted mean would differ."""

    def loss(params: Any, x: Any, key: Any) -> Any:
        kept = jnp.sum(x[:, 0] > 0).astype(jnp.float32)
        noise = jax.random.uniform(key, ())
        return LossOutput(linear(params, x) + 0 * noise, weight=kept, aux={"kept": kept})

    window = np.random.default_rng(0).integers(-4, 5, (N, K, ROWS, WIDTH)).astype(np.float32)
    weights = np.array([[(0, 1, 1, 2)[(i + j) % 4] for j in range(K)] for i in range(N)])
    window[..., 0] = np.arange(ROWS) < weights[..., None]
    batch = jax.ShapeDtypeStruct((K * N * ROWS, WIDTH), jnp.float32), jax.eval_shape(lambda: jax.random.key(0))
    mesh, seen = jax.make_mesh((N,), ("data",), (AxisType.Auto,)), Loss(loss, rng_argnum=2)
    (row,) = planned([name], loss=seen, batch=batch, mesh=mesh).rows
    assert row.compiled is not None, row.refused
    # The library derives a key per replica; where replicas are mapped by the code, the code does.
    assert ("fold_in(" in row.code) == (name in ("zero2", "flush+zero2", "accumulate"))
    got = run(row.code, seen, window.reshape(-1, WIDTH), mesh, jax.random.key(0))
    mean = (window.mean(2) * weights[..., None]).sum((0, 1)) / weights.sum()
    np.testing.assert_array_equal(got["w"][:, 0], -0.5 * mean)
    assert got["b"] == -0.5


@pytest.mark.parametrize(
    "name", ["accumulate", *(pytest.param(name, marks=pytest.mark.full) for name in ("window", "every"))]
)
@pytest.mark.parametrize("form", ["argument", "beside metrics", "examples"])
def test_the_code_weights_microbatches_by_what_their_loss_averages_over(name: str, form: str) -> None:
    """Two microbatches of two thirds and one third of the examples; weights and sums are small integers."""

    def loss(params: Any, x: Any, mask: Any) -> Any:
        value = jnp.sum(x * params["w"][:, 0][None] * mask[:, None]) / jnp.sum(mask)
        return LossOutput(value, aux=jnp.sum(mask)) if form == "beside metrics" else value

    weight = None if form == "examples" else lambda x, mask: jnp.sum(mask)
    rows, mesh, params = np.arange(12, dtype=np.float32), jax.make_mesh((2,), ("data",)), {"w": jnp.zeros((1, 1))}
    mask = np.float32([1] * 12 if form == "examples" else [1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    data, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    batch = jax.device_put((rows[:, None], mask), data)
    (row,) = planned([name], loss=loss, params=params, batch=batch, weight=weight, microbatches=2, mesh=mesh).rows
    parts = [jax.device_put((rows[a:b, None], mask[a:b]), data) for a, b in ((0, 8), (8, 12))]
    names = {"loss": loss, "optimizer": OPTIMIZER, "mesh": mesh, "params": jax.device_put(params, replicated)}
    names |= {"weight": weight, "batch": batch, "microbatches": parts}
    exec(row.code, names)
    assert names["params"]["w"].item() == np.float32(-0.5 * (rows * mask).sum() / mask.sum())


def test_the_page_counts_the_strategies() -> None:
    assert len(DEFAULT) == 18 and "with eighteen strategies" in Path("docs/plan.md").read_text()
    assert "Default: 18." in CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200"}).output


def test_strategies_have_names() -> None:
    for name in DEFAULT:
        assert way_of(way_of(name).name) == way_of(name)
    words = {word for name in DEFAULT for word in name.split("+")}
    assert words == {*CALLS, *PLACES, *NUMBERS}


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"names": ["zero3"]}, "plan: expected a strategy of the words window, every.*received zero3"),
        ({"names": ["window+every"]}, "a strategy with at most one word.*received window.every"),
        ({"names": ["exact+compensated"]}, "at most one word"),
        ({"names": []}, "names of strategies, for instance window"),
        ({"microbatches": 0}, "microbatches as an integer of 1 or more, received 0"),
        ({"microbatches": 3}, "a multiple of 24 examples, for 8 replicas with 3 microbatches each, received 64"),
        ({"axis": "replica", "mesh": {"data": 8}}, "an axis of the mesh, data, received 'replica'"),
        ({"mesh": {"model": 8}}, "an axis of the mesh, model, received 'data'"),
        ({"mesh": {"data": 16}}, "a mesh of at most 8 devices.*received a mesh of 16"),
        ({"mesh": {"data": 0}}, "a size of mesh axis data"),
        ({"mesh": 8}, "a mesh, or a mapping of its axes"),
        ({"target": "h1000:8"}, "plan: expected a target: h100:8"),
        ({"optimizer": 0.1}, "an optax.GradientTransformation"),
        ({"params": {}}, "parameters: a tree with an array"),
        ({"batch": ()}, "2 positional arguments|a batch argument"),
        ({"loss": None}, "plan: expected a function as loss"),
        ({"loss": lambda params, x: x}, "plan: expected a loss whose gradients compile"),
        ({"loss": Loss(linear, has_aux=True)}, "plan: expected a loss whose gradients compile.*value, aux"),
    ],
)
def test_bad_input_is_refused(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(gc.GradCombineError, match=match):
        planned(**{"names": ["window"]} | changed)


def test_shardings_over_an_axis_that_the_mesh_lacks_are_refused() -> None:
    there = jax.make_mesh((4, 2), ("data", "model"))
    w = jax.ShapeDtypeStruct((WIDTH, 2), jnp.float32, sharding=NamedSharding(there, P(None, "model")))
    with pytest.raises(gc.GradCombineError, match=r"leaf \['w'\]: expected shardings over data, .* received model"):
        planned(["window"], params=LIKE | {"w": w}, mesh={"data": 8})


PROBLEMS = """
import jax, jax.numpy as jnp, optax

def problem():
    return {
        "loss": lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2),
        "params": jax.ShapeDtypeStruct((16, 16), jnp.float32),
        "batch": jax.ShapeDtypeStruct((64, 16), jnp.float32),
        "optimizer": optax.adam(1e-3),
        "microbatches": 4,
    }

def on(devices):
    return problem() | {"mesh": {"data": len(devices)}}

def number():
    return 3

def lacking():
    return {"loss": len}

def more():
    return problem() | {"every": 4}

def fails():
    raise RuntimeError("no data")

def seven():
    return problem() | {"microbatches": 7}

def elsewhere():
    return problem() | {"axis": "replica", "mesh": {"data": 8}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Changes the working directory to a folder with a module of problems."""
    (tmp_path / "problems.py").write_text(PROBLEMS)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("problems", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    sys.modules.pop("problems", None)


@pytest.mark.full
def test_the_command_shows_the_strategies_and_the_code_of_the_best(here: Path) -> None:
    done = CliRunner().invoke(app, ["plan", "problems:on", "--ways", "window,zero2+exact", "--json", "plan.json"])
    assert done.exit_code == 0, done.output
    table, _, code = done.output.partition("window:\n\n")
    assert max(map(len, table.splitlines())) <= 80
    assert "window is the best of 2 strategies, of which 1 fit" in table and "Rejected" in table
    written: Any = json.loads((here / "plan.json").read_text())
    assert [way["name"] for way in written["ways"]] == ["window", "window+zero2+exact"]
    assert written["ways"][0]["code"].strip() == code.strip()
    assert written["ways"][0]["programs"][0]["moved"] == written["ways"][0]["compiled"]["moved"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("broken:problem",), "No module named 'nothing_of_this_name'"),
        (("problems",), "expected module:callable"),
        (("problems:none",), "a callable none in problems"),
        (("problems:number",), "to return a dict of loss, params"),
        (("problems:lacking",), "none of params, batch, optimizer, microbatches"),
        (("problems:more",), "received also every"),
        (("problems:fails",), "RuntimeError: no data"),
        (("problems:seven",), "8 replicas with 7 microbatches each, received 64"),
        (("problems:elsewhere",), "an axis of the mesh, data, received 'replica'"),
        (("problems:problem", "--ways", "window,zero3"), "a strategy of the words"),
        (("problems:problem", "--target", "h1000:8"), "a target: h100:8"),
        (("problems:problem", "--json", "no/such/folder.json"), "a path in an existing folder"),
    ],
)
def test_bad_input_of_the_command_is_an_error_of_one_line(here: Path, arguments: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert done.exit_code == 2, done.output
    assert words in done.stderr and "Traceback" not in done.output and not done.stdout.strip()

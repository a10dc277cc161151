"""Steps as users write them: gradients with metrics, optimizer states, modules, and strings in the batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradcombine.verify import Cause, check_step
from gradcombine.verify.check.step_report import REMEDIES
from tests.verify.steps import by_hand, defects
from tests.verify.steps.dividing import averaging, eager, jitted

PARAMS, BATCH = by_hand.params(), by_hand.batch()


def norm(grads: Any) -> Any:
    return np.sqrt(sum((x * x).sum() for x in grads))


def with_metrics(make: Any, sums: Any, k: int) -> Any:
    """Returns the gradients of `make`'s step and a correct loss."""

    def step(p: Any, batch: Any) -> Any:
        grads = make(sums, k)(p, batch)
        return grads, {"loss": p[0].sum()}

    return step


def clipped(make: Any, sums: Any, k: int) -> Any:
    """Clips the mean, which is then no linear combination of the examples' gradients."""

    def step(p: Any, batch: Any) -> Any:
        grads = make(sums, k)(p, batch)
        size = norm(grads)
        return [x * (x.dtype.type(0.01) / size) for x in grads]

    return step


def rms_prop(make: Any, sums: Any, k: int, decay: float = 0.5) -> Any:
    """Returns new parameters, squares, and metrics. The default `decay` and ``1 - decay`` are exact in float32."""

    def step(state: Any, batch: Any) -> Any:
        p, squares = state
        grads = make(sums, k)(p, batch)
        kept = p[0].dtype.type(decay)
        squares = [kept * s + (1 - kept) * g * g for s, g in zip(squares, grads, strict=True)]
        made = [
            x - g / np.sqrt(s / (1 - kept) + g.dtype.type(1)) / 8 for x, g, s in zip(p, grads, squares, strict=True)
        ]
        return made, squares, {"norm": norm(grads)}

    return step


@defects.of_sums
def normalized(sums: Any, p: Any, batch: Any, k: int) -> Any:
    """Normalizes each microbatch by its statistics and updates a running mean."""
    del sums
    total, running = 0.0, p["mean"]
    for part in defects.pieces(batch, k):
        x = part["tokens"].astype(p["w"].dtype)
        x = (x - x.mean(0)) / (x.std(0) + 1)
        total = total + x.T @ (x @ p["w"] - 1) / len(x)
        running = running / 2 + x.mean() * p["mean"]
    return {"w": p["w"] - total / k, "mean": running}


def kept_in_float32(sums: Any, k: int) -> Any:
    """`normalized`, with a result that is float32 even for float64 inputs."""
    step = normalized(sums, k)
    return lambda p, batch: {"w": step(p, batch)["w"].astype(np.float32)}


@defects.of_sums
def decayed_each(sums: Any, p: Any, batch: Any, k: int) -> Any:
    """Updates once, but decays the new parameters once per microbatch."""
    kept = [x.dtype.type(1 - 2**-10) for x in p]
    grads = defects.right(sums, k)(p, batch)
    return [(x - g / 8) * y**k for x, g, y in zip(p, grads, kept, strict=True)]


@defects.of_sums
def decays_within(sums: Any, p: Any, batch: Any, k: int) -> Any:
    """Decays the parameters after each microbatch and updates them once at the end."""
    total, now = 0.0, p
    for part in defects.pieces(batch, k):
        total = [x + g / k for x, g in zip(total or [0] * len(p), defects.mean(sums, now, part), strict=True)]
        now = [x * x.dtype.type(1 - 2**-10) for x in now]
    return [x - g / 8 for x, g in zip(now, total, strict=True)]


@defects.of_sums
def iterated(sums: Any, state: Any, batch: Any, k: int) -> Any:
    """Advances a state that depends on no example, as spectral norm does, at each microbatch."""
    p, u = state
    made, moved = [sums(p, part) for part in defects.pieces(batch, k)], p
    for grads, _ in made:
        u = (u + u.dtype.type(1)) / u.dtype.type(2)
        moved = [x - g * u[0] / sum(n for _, n in made) for x, g in zip(moved, grads, strict=True)]
    return moved, u


def unclipped(sums: Any, k: int) -> Any:
    """Clips the mean only if there is a single batch."""
    return (clipped if k == 1 else lambda make, *others: make(*others))(defects.right, sums, k)


@defects.of_sums
def averaged(sums: Any, state: Any, batch: Any, k: int) -> Any:
    """Moves an average of the parameters once per microbatch."""
    p, average = state
    new = [x - g / 8 for x, g in zip(p, defects.right(sums, k)(p, batch), strict=True)]
    for _ in range(k):
        average = [x + (y - x) / 4 for x, y in zip(average, new, strict=True)]
    return new, average


def counting(sums: Any, k: int) -> Any:
    """Counts the microbatches instead of the windows."""
    return lambda state, batch: (defects.right(sums, k)(state[0], batch), state[1] + k)


@defects.of_sums
def tracked(sums: Any, state: Any, batch: Any, k: int) -> Any:
    """Updates once, but moves an average of the squared gradients at each microbatch."""
    p, squares = state
    for part in defects.pieces(batch, k):
        squares = [x / 2 + g * g / 2 for x, g in zip(squares, defects.mean(sums, p, part), strict=True)]
    return [x - g / 8 for x, g in zip(p, defects.right(sums, k)(p, batch), strict=True)], squares


@defects.of_sums
def filled_up(sums: Any, p: Any, batch: Any, k: int) -> Any:
    """Pads the last microbatch with rows of zeros, whose gradient is not 0: a bias predicts for them, too."""
    del sums
    x = batch["tokens"].astype(p["w"].dtype)
    x = np.concatenate([x, np.zeros((-len(x) % k, *x.shape[1:]), x.dtype)])
    error = np.tanh(x @ p["w"] + p["b"])
    return {"w": x.T @ error / len(x), "b": error.mean(0)}


def summed_narrowly(sums: Any, k: int) -> Any:
    """Two defects: a sum instead of a mean, in an accumulator of float16."""
    return lambda p, batch: [x * k for x in defects.narrow(sums, k)(p, batch)]


def positives(sums: Any, k: int) -> Any:
    """Mean over rare positives, dividing by at least 1 since a microbatch may have none."""
    del sums

    def one(p: Any, part: Any) -> Any:
        x = np.concatenate([part["tokens"] / 8, np.square(part["tokens"] / 8)], axis=1).astype(p.dtype)
        count = (part["mask"].sum(1) > 4).sum()
        return x.T @ np.tanh(x @ p - 1) / p.dtype.type(max(count, 1))

    return lambda p, batch: [sum(one(p[0], part) for part in defects.pieces(batch, k)) / p[0].dtype.type(k)]


@defects.of_sums
def relabelled(sums: Any, p: Any, batch: Any, k: int) -> Any:
    """Takes a batch with a string and a function among its values."""
    assert batch["task"] == "words"
    rows = {name: x for name, x in batch.items() if name in BATCH}
    return [batch["scale"](x) for x in defects.right(sums, k)(p, rows)]


def squares() -> Any:
    return [np.zeros_like(x) for x in PARAMS]


FOUR, NEW = {"microbatches": (4,)}, {"returns": "params"}
WRITTEN: dict[str, tuple[Any, Any, Any, dict[str, Any], Cause | None, str]] = {
    "metrics": (partial(with_metrics, defects.right), PARAMS, BATCH, {}, None, ""),
    "a sum and a right loss": (
        partial(with_metrics, defects.sum_of_means), PARAMS, BATCH, {}, Cause.SUM, "in 3 of 4 leaves",
    ),
    "clipped": (partial(clipped, defects.right), PARAMS, BATCH, {}, None, ""),
    "clipped mean of means": (
        partial(clipped, defects.mean_of_means), PARAMS, BATCH, FOUR, Cause.MEAN_OF_MEANS, "of 158 rows",
    ),
    "clipped and lost": (
        partial(clipped, defects.only_the_last), PARAMS, BATCH, FOUR, Cause.LOST, "examples 0, 1, 2, 3, 4, 5",
    ),
    "squares and metrics": (partial(rms_prop, defects.right), (PARAMS, squares()), BATCH, NEW, None, ""),
    "squares of means of means": (
        partial(rms_prop, defects.mean_of_means), (PARAMS, squares()), BATCH, NEW | FOUR, Cause.MEAN_OF_MEANS, "",
    ),
    "statistics that are kept": (
        normalized, {"w": PARAMS[1][:1].repeat(6, 0), "mean": np.ones(3, np.float32)}, BATCH, NEW, Cause.STATISTICS,
        "seen in ['w'], not in all",
    ),
    "decay of new parameters": (decayed_each, PARAMS, BATCH, NEW, Cause.ADDED, "times the new parameters"),
    "decay between microbatches": (
        decays_within, PARAMS, BATCH | {"mask": np.ones_like(BATCH["mask"])}, NEW, Cause.MOVED, "by -0.00097656",
    ),
    "a state that no example enters": (
        iterated, (PARAMS, np.float32([0.5, 0.25])), BATCH, NEW, Cause.ADVANCED, "[1] is updated 2 times",
    ),
    "clipping of one batch alone": (unclipped, PARAMS, BATCH, {}, Cause.SCALED, "by "),
    "an average of new parameters": (
        averaged, (PARAMS, by_hand.params(2)), BATCH, NEW, Cause.ADVANCED, "[1][0] is updated 2 times; in 3 of 6",
    ),
    "a counter of microbatches": (counting, (PARAMS, np.int64(3)), BATCH, NEW, Cause.COUNTED, "is 5 instead of 4"),
    "an average of squares": (
        tracked, (PARAMS, squares()), BATCH, NEW, Cause.ADVANCED, "[1][0] is updated 2 times; in 3 of 6",
    ),
    "rows of zeros": (
        filled_up, {"w": PARAMS[1][:1].repeat(6, 0) / 9, "b": PARAMS[2]}, by_hand.batch(10), FOUR,
        Cause.PLACEHOLDERS, "padded with 2 rows of zeros",
    ),
    "a sum that is rounded": (summed_narrowly, PARAMS, BATCH, FOUR, Cause.SUM, "explains all but 3% or less"),
    "a divisor with a floor": (
        positives, [by_hand.params()[0][:12] / 8], BATCH, FOUR,
        Cause.MEAN_OF_MEANS, "the single examples' results add up to",
    ),
    "a name and a function": (relabelled, PARAMS, BATCH | {"task": "words", "scale": np.negative}, {}, None, ""),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", WRITTEN)
def test_what_people_return_and_pass(name: str) -> None:
    make, params, batch, options, cause, detail = WRITTEN[name]
    report = check_step(partial(make, by_hand.sums), params, batch, **options)
    assert report.cause is cause, str(report)
    assert all(run.accuracy is not None for run in report.runs)
    assert cause is None or detail in report.faults[0].detail, str(report)


@pytest.mark.full
def test_a_wrong_division_is_named_before_constants_that_float32_has_not() -> None:
    """``1 - 0.9999`` in float32 is off by more than rounding noise, and NumPy programs cannot be retyped."""
    make = partial(rms_prop, defects.mean_of_means, by_hand.sums, decay=0.9999)
    report = check_step(make, (PARAMS, squares()), BATCH, returns="params", microbatches=(4,))
    assert [fault.cause for fault in report.faults] == [Cause.MEAN_OF_MEANS], str(report)
    assert ["whose constants may differ" in line for line in report.not_checked] == [True], str(report)


def test_constants_that_float32_has_not_are_no_defect() -> None:
    """A correct step that cannot be retyped neither fails nor passes: its accuracy is not checked."""
    make = partial(rms_prop, defects.right, by_hand.sums, decay=0.9999)
    report = check_step(make, (PARAMS, squares()), BATCH, returns="params", microbatches=(4,))
    assert (report.faults, report.passes) == ((), False), str(report)
    assert ["whose constants may differ" in line for line in report.not_checked] == [True], str(report)


X = {"x": np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)}


@jitted
def adam(state: Any, batch: Any, k: int) -> Any:
    tx = optax.adam(0.1)

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ p["w"]) ** 2)

    p, s = state
    made = [jax.value_and_grad(loss)(p, x) for x in jnp.split(batch["x"], k)]
    value, grads = jax.tree.map(lambda *x: sum(x) / k, *made)
    updates, s = tx.update(grads, s)
    return (optax.apply_updates(p, updates), s), {"loss": value}


def divided_in(divide: Any, k: int) -> Any:
    """Two parameters, whose summed gradients are divided one after the other."""
    tx = optax.sgd(0.1, momentum=0.9)

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ p["w"]) @ p["v"])

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        p, s = state
        sums = jax.tree.map(lambda *x: sum(x), *(jax.grad(loss)(p, x) for x in jnp.split(batch["x"], k)))
        updates, s = tx.update(divide(sums, k), s)
        return optax.apply_updates(p, updates), s

    return step


DIVISIONS = {
    "by a number": lambda sums, k: jax.tree.map(lambda x: x / k, sums),
    "by an argument": lambda sums, k: jax.jit(lambda x, n: jax.tree.map(lambda x: x / n, x))(sums, k),
    "by an array": lambda sums, k: jax.tree.map(lambda x: x / jnp.full_like(x, k), sums),
}


@pytest.mark.full
@pytest.mark.parametrize("form", [pytest.param(x, marks=[pytest.mark.full] * (x != "by a number")) for x in DIVISIONS])
def test_sums_that_are_divided_leaf_by_leaf_hide_no_difference(form: str) -> None:
    rng = np.random.default_rng(1)
    p = {"w": rng.normal(size=(5, 3)).astype(np.float32), "v": rng.normal(size=(3, 2)).astype(np.float32)}
    with jax.numpy_dtype_promotion("standard"):
        state = p, optax.sgd(0.1, momentum=0.9).init(p)
        report = check_step(partial(divided_in, DIVISIONS[form]), state, X, returns="params", microbatches=(2,))
    assert report.passes, str(report)


def module(k: int) -> Any:
    @eqx.filter_jit
    def step(model: Any, batch: Any) -> Any:
        def loss(model: Any, x: Any) -> Any:
            return jnp.mean(jax.vmap(model)(x) ** 2)

        made = [eqx.filter_grad(loss)(model, x) for x in jnp.split(batch["x"], k)]
        return jax.tree.map(lambda *x: sum(x) / k, *made)

    return step


@jitted
def queued(state: Any, batch: Any, k: int) -> Any:
    """Keeps a queue of examples in order, and moves an average of the parameters at each microbatch."""
    p, momentum, _ = state
    grads = jnp.zeros_like(p)
    for x in jnp.split(batch["x"], k):
        grads += jax.grad(lambda p, x=x, m=momentum: jnp.mean((x @ p - jnp.tanh(x @ m)) ** 2))(p) / k
        momentum += (p - momentum) / 4
    return p - grads / 8, momentum, batch["x"][:3] @ p


def drawn(*shape: int) -> np.ndarray:
    return np.abs(np.random.default_rng(2).normal(size=shape)).astype(np.float32)


@pytest.mark.full
def test_a_queue_of_examples_hides_no_other_cause() -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        report = check_step(queued, (drawn(5, 3), drawn(5, 3) / 2, drawn(3, 3)), X, returns="params", microbatches=(2,))
    assert report.cause is Cause.ADVANCED, str(report)
    assert "[1] is updated 2 times; in 2 of 3 leaves" in report.faults[0].detail


@eager
def queued_in_numpy(state: Any, batch: Any, k: int) -> Any:
    """`queued` with `numpy.split`, which JAX cannot trace."""
    p, momentum, _ = state
    grads = np.zeros_like(p)
    for x in np.split(batch["x"], k):
        grads += x.T @ (x @ p - np.tanh(x @ momentum)) / np.float32(len(batch["x"]))
        momentum = momentum + (p - momentum) / 4
    return p - grads / 8, momentum, batch["x"][:3] @ p


def test_a_queue_in_numpy_is_not_called_random() -> None:
    report = check_step(queued_in_numpy, (drawn(5, 3), drawn(5, 3) / 2, drawn(3, 3)), X, returns="params")
    assert [fault.cause for fault in report.faults] == [Cause.ADVANCED], str(report)


@pytest.mark.parametrize(("seeds", "cause"), [((0, 0, 0, 0), Cause.KEY), ((0, 1, 2, 3), Cause.RANDOM)])
def test_random_numbers_of_numpy_are_no_neighbors(seeds: tuple[int, ...], cause: Cause) -> None:
    """JAX traces such steps, with the random numbers as constants."""

    @eager
    def make_step(p: Any, batch: Any, k: int) -> Any:
        made = 0
        for x, seed in zip(batch["x"].reshape(k, -1, 5), seeds, strict=False):
            x = x * (np.random.default_rng(seed).random(x.shape) > 0.3).astype(x.dtype)
            made = made + x.T @ (x @ p - 1)
        return made / np.float32(len(batch["x"]))

    report = check_step(make_step, drawn(5, 3), X, microbatches=(4,))
    assert report.cause is cause, str(report)


def documents(p: Any, batch: Any, k: int, written: bool) -> Any:
    """A causal mean over the tokens of a microbatch's rows, concatenated; or masked within each row."""
    made = 0
    for x in batch["x"].reshape(k, -1, 5):
        row = np.arange(len(x)) // 2
        attends = (np.tri(len(x)) * (row[:, None] == row if written else 1)).astype(x.dtype)
        x = attends @ x / attends.sum(1, keepdims=True)
        made = made + x.T @ jnp.tanh(x @ p - 1)
    return made / np.float32(len(batch["x"]))


def noisy(p: Any, batch: Any, k: int, written: bool) -> Any:
    made = 0
    for i, x in enumerate(batch["x"].reshape(k, -1, 5)):
        keys = i * len(x) + np.arange(len(x)) if written else np.arange(len(x))
        x = x * np.stack([np.random.default_rng(key).random(5) > 0.3 for key in keys.tolist()]).astype(x.dtype)
        made = made + x.T @ (x @ p - 1)
    return made / np.float32(len(batch["x"]))


def summed(p: Any, batch: Any, k: int, written: bool) -> Any:
    """A sum of means of different weights."""
    parts = [(x.T @ (x @ p - 1), np.float32(np.sum(x > 0.5))) for x in batch["x"].reshape(k, -1, 5)]
    if written:
        return sum(g for g, _ in parts) / sum(n for _, n in parts)
    return sum(g / n for g, n in parts)


def test_the_detail_of_neighbors_is_what_was_seen() -> None:
    """The number of copies of one example changes their result, as each one attends to those before it."""
    report = check_step(jitted(partial(documents, written=False)), drawn(5, 3), {"x": drawn(8, 2, 5)})
    assert report.faults[0].detail == "one batch in reverse order has another result", str(report)


@pytest.mark.parametrize(
    ("make", "cause", "remedy"),
    [
        (documents, Cause.NEIGHBOURS, "mask attention within each row"),
        (noisy, Cause.KEY, "fold the index of each example into its random key"),
        (summed, Cause.SUM, "return sums and counts"),
    ],
)
def test_a_step_written_as_its_remedy_says_passes(make: Any, cause: Cause, remedy: str) -> None:
    batch = {"x": drawn(8, 2, 5)} if make is documents else X
    wrapped = jitted if make is documents else eager
    report = check_step(wrapped(partial(make, written=False)), drawn(5, 3), batch, microbatches=(4,))
    assert report.cause is cause and remedy in REMEDIES[cause], str(report)
    report = check_step(wrapped(partial(make, written=True)), drawn(5, 3), batch, microbatches=(4,))
    assert report.passes, str(report)


@jitted
def normalised(p: Any, batch: Any, k: int) -> Any:
    """Adam on a batch-normalized net that loses the last microbatch; the gradient of one example is not finite."""
    tx = optax.adam(0.1)

    def loss(p: Any, x: Any) -> Any:
        h = x @ p[0]
        return jnp.mean(jnp.tanh((h - h.mean(0)) / (h.std(0) + 0.1) @ p[1]) ** 2)

    x = batch["x"]
    updates, _ = tx.update(jax.grad(loss)(p, x if k == 1 else x[: len(x) - len(x) // k]), tx.init(p))
    return optax.apply_updates(p, updates)


@pytest.mark.full
def test_rows_of_another_batch_may_have_the_shape_of_a_parameter() -> None:
    """Six rows of activations have the shape of the second matrix: a gradient is not recognized by shape alone."""
    rng = np.random.default_rng(1)
    p = [rng.normal(size=shape).astype(np.float32) for shape in ((5, 6), (6, 6))]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        report = check_step(normalised, p, X, returns="params", microbatches=(4,))
    assert report.cause is Cause.LOST and "rows 6, 7" in report.faults[0].detail, str(report)


def of_adam() -> Any:
    p = {"w": np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)}
    return p, optax.adam(0.1).init(p)


def of_modules() -> Any:
    one, other = jax.random.split(jax.random.key(0))
    layers = [
        eqx.nn.Linear(5, 4, key=one),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Identity(),
        eqx.nn.Linear(4, 2, key=other),
    ]
    return eqx.nn.Sequential(layers)


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "params", "returns"),
    [
        (adam, of_adam, "params"),
        pytest.param(module, of_modules, "gradients", marks=pytest.mark.full),
    ],
)
def test_optimizers_and_modules_are_not_accused(make: Any, params: Callable[[], Any], returns: Any) -> None:
    with jax.numpy_dtype_promotion("standard"):
        report = check_step(make, params(), X, returns=returns, microbatches=(2,))
    assert report.passes, str(report)
    assert all(run.accuracy is not None for run in report.runs), str(report)


def test_statistics_are_named_in_float32_too() -> None:
    params = {"w": PARAMS[1][:1].repeat(6, 0), "mean": np.ones(3, np.float32)}
    report = check_step(partial(kept_in_float32, by_hand.sums), params, BATCH)
    assert report.cause is Cause.STATISTICS, str(report)


@pytest.mark.full
def test_keras_on_jax() -> None:
    """Runs in a subprocess, since Keras fixes its backend at import."""
    command = [sys.executable, "-m", "tests.verify.steps.on_keras_jax"]
    environment = {**os.environ, "KERAS_BACKEND": "jax", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "right": None,
        "normalized layers": None,
        "mean of means": "MEAN_OF_MEANS",
        "the last dropped": "LOST",
        "normalized batches": "STATISTICS",
        "dropout": "KEY",
        "trained": None,
        "trained on means of means": "MEAN_OF_MEANS",
    }


def centered(p: Any, batch: Any) -> Any:
    """The outputs of each example are centered, so that the bias cancels."""
    scores = jnp.tanh(batch["x"] @ p["w"]) @ p["v"] + p["bias"]
    return jnp.mean(jnp.abs(scores - jnp.mean(scores, 1, keepdims=True) - batch["y"]))


@pytest.mark.full
def test_a_bias_that_cancels_is_not_inaccurate_if_the_loss_is_piecewise_linear() -> None:
    rng = np.random.default_rng(0)
    p = {"w": rng.normal(size=(6, 7)), "v": rng.normal(size=7), "bias": 0.25}
    batch = {"x": rng.normal(size=(8, 5, 6)), "y": rng.normal(size=(8, 5))}
    p, batch = jax.tree.map(np.float32, (p, batch))
    report = check_step(averaging(centered), p, batch)
    assert report.passes, str(report)

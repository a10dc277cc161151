"""Defects whose results resemble those of another cause."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gradcombine.verify import Cause, Verdict, check_step
from tests.spec.selection import cases, named
from tests.verify.steps.dividing import (
    adding,
    averaging,
    eager,
    jitted,
    mean_gradient,
    parts,
    plus,
    scaled,
    summed_gradient,
)

pytestmark = [pytest.mark.needs("jax", "optax", "flax"), pytest.mark.usefixtures("as_users_do")]

RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 5)).astype(np.float32),
    "y": RNG.normal(size=16).astype(np.float32),
    "length": np.float32(RNG.integers(1, 9, 16)),
}
PARAMS = {"b": np.float32(0.1), "w": RNG.normal(size=5).astype(np.float32)}


def divisor(part: Any, batch: Any, k: int, means: bool) -> Any:
    """The tokens of the batch, or those of the part times k, as in a mean of means."""
    return part["length"].sum() * k if means else batch["length"].sum()


def of_groups(p: Any, batch: Any) -> Any:
    """Policy loss with advantages relative to each group of four examples, summed over tokens."""
    reward = batch["y"].reshape(-1, 4)
    advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-4)
    return -(advantage.ravel() * jax.nn.log_sigmoid(batch["x"] @ p["w"] + p["b"]) * batch["length"]).sum()


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("means", [False, True])
def test_means_of_groups_are_no_statistics_of_a_microbatch(means: bool, k: int) -> None:
    def loss(p: Any, part: Any, batch: Any, k: int) -> Any:
        return of_groups(p, part) / divisor(part, batch, k, means)

    report = check_step(adding(loss), PARAMS, BATCH, microbatches=(k,))
    assert report.cause is (Cause.MEAN_OF_MEANS if means else None), str(report)
    assert report.allowing("statistics").passes is not means


def test_means_of_groups_that_are_weighted_by_tokens_are_no_statistics() -> None:
    """One batch is the mean over the examples, although an example alone, whose advantage is 0, has no gradient."""

    def loss(p: Any, part: Any, batch: Any, k: int) -> Any:
        mean = of_groups(p, part | {"length": jnp.ones(len(part["y"]))}) / len(part["y"])
        return mean * part["length"].sum() / batch["length"].sum()

    report = check_step(adding(loss), PARAMS, BATCH, microbatches=(2,))
    assert report.cause is Cause.COEFFICIENTS, str(report)
    assert not report.allowing("statistics").passes


def test_a_mean_of_means_beside_many_leaves_is_no_statistics() -> None:
    """The mask that counts the tokens of one term is the last of the leaves, whose counts are all different."""
    rng = np.random.default_rng(3)
    words = {f"a{i}": rng.integers(0, 4, (16, 6)).astype(np.int32) for i in range(4)}
    mask = np.float32(np.arange(6) < rng.integers(1, 7, 16)[:, None])

    def loss(p: Any, part: Any) -> Any:
        scores, count = jnp.tanh(part["x"] @ p["w"] + p["b"]), part["mask"].sum(1)
        return ((scores - part["y"]) ** 2 * count).sum() / count.sum() + (scores**4).mean()

    report = check_step(averaging(loss), PARAMS, {**words, **BATCH, "mask": mask}, microbatches=(2,))
    assert report.cause is Cause.MEAN_OF_MEANS, str(report)
    assert not report.allowing("statistics").passes


@pytest.mark.parametrize("k", [2, 4])
def test_a_guarded_divisor_of_an_example_without_weight_hides_no_mean_of_means(k: int) -> None:
    """As in detection: an example without objects has a loss, but only those with objects are counted."""

    def loss(p: Any, part: Any) -> Any:
        errors = (jnp.tanh(part["x"] @ p) - part["y"][:, None]) ** 2
        return errors.sum() / jnp.maximum(part["objects"].sum(), 1)

    params = np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32)
    batch = parts(BATCH, 2)[0] | {"objects": np.float32([0, 3, 4, 6, 8, 8, 8, 9])}
    report = check_step(averaging(loss), params, batch, microbatches=(k,))
    assert report.cause is Cause.MEAN_OF_MEANS, str(report)
    low, high = {2: (13, 33), 4: (3, 17)}[k]
    assert f"they weigh from {low / 46:.4g} to {high / 46:.4g} in one batch" in report.faults[0].detail


def test_a_batch_without_a_gradient_has_no_means() -> None:
    """A microbatch with a small mean is trained on, the full batch is not."""

    def loss(p: Any, part: Any) -> Any:
        return ((part["x"] @ p - part["y"][:, None]) ** 2).mean() * (part["length"].mean() < limit)

    means = BATCH["length"].reshape(2, -1).mean(1)
    limit = float(means.mean())
    assert means.min() < limit
    params = np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32)
    report = check_step(averaging(loss), params, BATCH, microbatches=(2,))
    assert report.cause is not Cause.MEAN_OF_MEANS and not report.passes, str(report)


@pytest.mark.parametrize("returns", ["gradients", "params"])
def test_a_term_by_the_wrong_denominator_is_no_statistics(returns: str) -> None:
    """A mean over examples beside one over tokens, both weighted by tokens."""

    def loss(p: Any, part: Any, batch: Any, k: int) -> Any:
        scores = part["x"] @ p["w"] + p["b"]
        main = ((scores - part["y"]) ** 2 * part["length"]).sum() / part["length"].sum()
        return (main + (scores**4).mean()) * part["length"].sum() / batch["length"].sum()

    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        grads = summed_gradient(loss, p, batch, k)
        return grads if returns == "gradients" else plus(p, scaled(grads, -0.1))

    report = check_step(make_step, PARAMS, BATCH, microbatches=(2,), returns=returns)
    assert report.cause is Cause.DENOMINATOR, str(report)
    assert not report.allowing("statistics").passes


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("terms", [2, 3])
def test_terms_by_two_counts_are_no_statistics(terms: int, by_tokens: bool) -> None:
    """Terms over three sets of tokens, with equal microbatches, or all weighted by the tokens of the first term."""
    rng = np.random.default_rng(terms)
    counts = [np.float32(rng.integers(1, 6, 8)) for _ in range(terms)]
    batch = {"x": np.float32(rng.normal(size=(8, 5))), "y": np.float32(rng.normal(size=8)), "counts": counts}

    def loss(p: Any, part: Any) -> Any:
        scores = jnp.tanh(part["x"] @ p["w"] + p["b"])
        each = [(scores - part["y"]) ** 2, 0.3 * scores**4, jnp.exp(scores)]
        return sum((x * count).sum() / count.sum() for x, count in zip(each, part["counts"], strict=False))

    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        tokens = [part["counts"][0].sum() if by_tokens else 1.0 for part in parts(batch, k)]
        grads = [jax.grad(loss)(p, part) for part in parts(batch, k)]
        return jax.tree.map(lambda *x: sum(a * b for a, b in zip(tokens, x, strict=True)) / sum(tokens), *grads)

    report = check_step(make_step, PARAMS, batch, microbatches=(2,))
    assert report.cause is (Cause.DENOMINATOR if by_tokens else Cause.MEAN_OF_MEANS), str(report)
    assert "terms" in report.faults[0].detail
    assert not report.allowing("statistics").passes


def test_a_mean_over_labels_that_are_not_ignored_is_no_statistics() -> None:
    """Only the signs of the labels show their number."""
    labels = np.random.default_rng(5).integers(1, 9, (16, 6)).astype(np.int32)
    labels[np.arange(6) >= 1 + np.arange(16)[:, None] * 5 % 6] = -100
    batch = {"x": BATCH["x"], "y": BATCH["y"], "labels": labels}

    def loss(p: Any, part: Any) -> Any:
        scores, count = jnp.tanh(part["x"] @ p["w"] + p["b"]), (part["labels"] >= 0).sum(1)
        return ((scores - part["y"]) ** 2 * count).sum() / count.sum() + (scores**4).mean()

    report = check_step(averaging(loss), PARAMS, batch, microbatches=(2,))
    assert report.cause is Cause.MEAN_OF_MEANS, str(report)
    assert not report.allowing("statistics").passes


def test_balance_is_statistics_though_it_is_linear_in_two_examples() -> None:
    """Examples with the most and the fewest tokens have the same expert, so the balance is linear in their copies."""
    batch = BATCH | {"x": BATCH["x"].copy()}
    first, second = int(batch["length"].argmax()), int(batch["length"].argmin())
    batch["x"][second] = batch["x"][first]

    def loss(p: Any, part: Any, batch: Any, k: int) -> Any:
        scores, tokens = part["x"] @ p["w"] + p["b"], part["length"] / part["length"].sum()
        chance = jax.nn.sigmoid(scores)
        balance = (tokens * (scores > 0)).sum() * (tokens * chance).sum()
        mean = (tokens * (chance - part["y"]) ** 2).sum() + balance
        return mean * (part["length"].sum() / batch["length"].sum())

    report = check_step(adding(loss), PARAMS, batch, microbatches=(2,))
    assert report.cause is Cause.STATISTICS, str(report)
    allowed = report.allowing("statistics")
    assert allowed.passes, str(allowed)
    assert "by an allowed cause alone" in str(allowed)


def test_a_step_that_ignores_its_batch_is_not_compared() -> None:
    report = check_step(lambda _: lambda p, _: p, PARAMS, BATCH, microbatches=(2,), returns="gradients")
    assert report.verdict is Verdict.CANNOT_TELL, str(report)
    assert "no example changes" in str(report)


@pytest.mark.parametrize("statistic", ["normalized", "contrasted", "balanced"])
def test_statistics_are_named(statistic: str) -> None:
    def loss(p: Any, part: Any) -> Any:
        scores = part["x"] @ p["w"] + p["b"]
        if statistic == "normalized":
            scores = (scores - scores.mean()) / jnp.sqrt(scores.var() + 0.1)
        if statistic == "contrasted":
            scores = jax.nn.log_softmax(scores)
        if statistic == "balanced":
            shares = jax.nn.softmax(scores[:, None] * jnp.float32([1, -1]), axis=-1).mean(0)
            return (shares**2).sum()
        return ((scores - part["y"]) ** 2).mean()

    report = check_step(averaging(loss), PARAMS, BATCH, microbatches=(2,))
    assert report.cause is Cause.STATISTICS, str(report)


@pytest.mark.parametrize("k", [2, 4])
def test_a_bias_after_normalization_is_not_clipped(k: int) -> None:
    """Copies of one example are normalized to 0, so the gradients of the biases of the logits have one norm."""
    rng = np.random.default_rng(1)
    shapes = {"w": (5, 16), "out": (16, 3)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    params["bias"] = np.zeros(3, np.float32)
    batch = {"x": rng.normal(size=(8, 5)).astype(np.float32), "label": rng.integers(0, 3, 8).astype(np.int32)}

    def loss(p: Any, part: Any) -> Any:
        h = part["x"] @ p["w"]
        h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
        logs = jax.nn.log_softmax(jax.nn.relu(h) @ p["out"] + p["bias"])
        return -jnp.take_along_axis(logs, part["label"][:, None], 1).mean()

    report = check_step(averaging(loss), params, batch, microbatches=(k,))
    assert report.cause is Cause.STATISTICS and report.allowing("statistics").passes, str(report)


def test_the_rounding_of_parameters_is_no_clipping() -> None:
    """Copies of one example have no covariance, and change the parameters by few units in their last place."""

    def make_step(k: int) -> Any:
        def gradient(x: Any, y: Any) -> Any:
            return ((x - x.mean(0)) * y[:, None] + np.float32(3e-7) * x).mean(0)

        def step(w: Any, batch: Any) -> Any:
            pieces = zip(*(np.split(np.float32(batch[name]), k) for name in "xy"), strict=True)
            return np.float32(w) - np.float32(0.1 / k) * sum(gradient(x, y) for x, y in pieces)

        return step

    w = np.linspace(0.5, 0.9, 5, dtype=np.float32)
    report = check_step(make_step, w, BATCH, microbatches=(2,), returns="params")
    assert report.cause is Cause.STATISTICS, str(report)


def test_rounding_of_a_bias_before_normalization_is_no_clipping() -> None:
    """The bias has no gradient, only the same few units of rounding in several microbatches."""
    rng, optimizer = np.random.default_rng(1), optax.adam(0.01)
    shapes = {"w": (6, 8), "bias": 8, "out": 8}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    batch = {name: rng.normal(size=shape).astype(np.float32) for name, shape in {"x": (8, 6), "y": 8}.items()}

    def loss(p: Any, part: Any) -> Any:
        h = part["x"] @ p["w"] + p["bias"]
        return ((jnp.tanh((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)) @ p["out"] - part["y"]) ** 2).mean()

    def make_step(k: int) -> Any:
        def step(state: Any, batch: Any) -> Any:
            updates, moments = optimizer.update(averaging(loss)(k)(state[0], batch), state[1])
            return optax.apply_updates(state[0], updates), moments

        return jax.jit(step)

    report = check_step(make_step, (params, optimizer.init(params)), batch, microbatches=(2,), returns="params")
    assert report.cause is Cause.STATISTICS, str(report)


def test_groups_that_are_divided_are_statistics() -> None:
    """Copies of one example in a group have no advantage, so mixtures of copies show nothing."""

    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        def loss(p: Any, part: Any) -> Any:
            return of_groups(p, part) / batch["length"].sum()

        # Every k-th example, so that the groups are others than in one batch.
        strided = [jax.tree.map(lambda x, i=i: x[i::k], batch) for i in range(k)]
        return plus(*(jax.grad(loss)(p, part) for part in strided))

    report = check_step(make_step, PARAMS, BATCH, microbatches=(2,))
    assert report.cause is Cause.STATISTICS, str(report)


def of_pairs(p: Any, part: Any) -> tuple[Any, Any]:
    """Summed loss of the preferences between rows that follow each other, and the number of the valid ones."""
    scores = part["x"] @ p
    valid = part["length"].reshape(-1, 2).min(1) > 2
    return -(jax.nn.log_sigmoid(scores[::2] - scores[1::2]) * valid).sum(), valid.sum()


def clipped(x: Any) -> Any:
    return x * jnp.minimum(1, 0.1 / jnp.linalg.norm(x))


COMBINED: dict[Cause | None, Any] = {
    None: lambda grads, counts: sum(grads) / sum(counts),
    Cause.MEAN_OF_MEANS: lambda grads, counts: sum(g / n for g, n in zip(grads, counts, strict=True)) / len(grads),
    Cause.SUM: lambda grads, counts: sum(g / n for g, n in zip(grads, counts, strict=True)),
    Cause.SCALED: lambda grads, counts: sum(grads) / sum(counts) / len(grads),
    Cause.LOST: lambda grads, counts: grads[-1] / counts[-1],
    Cause.CHANGED_BEFORE: lambda grads, counts: (
        sum(clipped(g / n) * n for g, n in zip(grads, counts, strict=True)) / sum(counts)
    ),
}


@pytest.mark.parametrize("cause", COMBINED, ids=str)
def test_pairs_of_rows_are_no_rolled_labels(cause: Cause | None) -> None:
    """One batch depends on the order of its rows, but no pair is divided."""

    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        made = [jax.value_and_grad(of_pairs, has_aux=True)(p, part) for part in parts(batch, k)]
        return COMBINED[cause]([grads for _, grads in made], [count for (_, count), _ in made])

    report = check_step(make_step, PARAMS["w"], BATCH, microbatches=(2,))
    assert report.cause is cause, str(report)


def of_pairs_in_numpy(p: Any, part: Any) -> tuple[Any, Any]:
    """Gradient of `of_pairs`, and the number of valid preferences."""
    x = part["x"][::2] - part["x"][1::2]
    valid = part["length"].reshape(-1, 2).min(1) > 2
    return -(valid / (1 + np.exp(x @ p)) @ x).astype(p.dtype), p.dtype.type(valid.sum())


def test_copies_of_a_row_that_does_not_count_draw_no_random_numbers() -> None:
    """The mean over no pairs is NaN in a batch of copies of the first row."""

    @eager
    def make_step(p: Any, batch: Any, k: int) -> Any:
        made = [of_pairs_in_numpy(p, part) for part in parts(batch, k)]
        with np.errstate(invalid="ignore"):
            return sum(grads / count for grads, count in made) / p.dtype.type(k)

    length = BATCH["length"].copy()
    length[0] = 0
    report = check_step(make_step, PARAMS["w"], BATCH | {"length": length}, microbatches=(2,))
    assert report.cause is Cause.MEAN_OF_MEANS, str(report)


def test_normalized_gradients_of_copies_that_cancel_draw_no_random_numbers() -> None:
    """A pair of copies has no gradient but rounding, since the tokens of the batch are added in their order."""
    batch = {"x": np.float32(np.random.default_rng(0).normal(size=(16, 6, 5)))}

    @eager
    def make_step(p: Any, batch: Any, k: int) -> Any:
        def direction(part: Any) -> Any:
            scores = part["x"].sum(1) @ p
            slope = 1 / (1 + np.exp(scores[::2] - scores[1::2]))
            signed = np.stack([-slope, slope], 1).reshape(-1, 1, 1) * part["x"]
            grads = np.cumsum(signed.reshape(-1, 5), 0)[-1]
            return grads / (np.linalg.norm(grads) + p.dtype.type(1e-8))

        return sum(map(direction, parts(batch, k))) / p.dtype.type(k)

    report = check_step(make_step, PARAMS["w"], batch, microbatches=(2,))
    assert report.cause is Cause.CHANGED_BEFORE, str(report)


@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_baseline_of_rewards_beside_a_mean_over_tokens_is_statistics(rows: int, seed: int) -> None:
    """In copies of two examples, their product is a sum of means over tokens and over examples."""
    rng = np.random.default_rng(seed)
    batch = {
        "x": np.float32(rng.normal(size=(rows, 5))),
        "y": np.float32(rng.normal(size=rows)),
        "mask": np.float32(np.arange(6) < rng.integers(0, 7, rows)[:, None]),
    }

    def loss(p: Any, part: Any, batch: Any, k: int) -> Any:
        advantage, tokens = part["y"] - part["y"].mean(), part["mask"].sum(1)
        return -(advantage * jax.nn.log_sigmoid(part["x"] @ p["w"] + p["b"]) * tokens).sum() / batch["mask"].sum()

    report = check_step(adding(loss), PARAMS, batch, microbatches=(2,))
    assert report.cause is Cause.STATISTICS, str(report)
    assert report.allowing("statistics").passes


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner, self.dropout = nnx.Linear(5, 4, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)
        self.outer = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.outer(self.dropout(self.inner(x)))[:, 0]


def test_a_count_of_random_keys_is_no_step_count() -> None:
    model = Model(nnx.Rngs(0))
    graph, state = nnx.split((model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)))

    @jitted
    def make_step(state: Any, batch: Any, k: int) -> Any:
        model, optimizer = nnx.merge(graph, state)

        def loss(model: Any, part: Any) -> Any:
            return ((model(part["x"]) - part["y"]) ** 2).sum() / len(batch["y"])

        grads = [nnx.grad(loss)(model, part) for part in parts(batch, k)]
        optimizer.update(model, plus(*grads))
        return nnx.state((model, optimizer))

    report = check_step(make_step, state, BATCH, microbatches=(2,), returns="params")
    assert report.cause is Cause.RANDOM, str(report)


def draws_each(k: int, each: bool = True) -> Any:
    """Draws a random number per example, by a key that is split once, or at each microbatch."""

    def step(state: Any, batch: Any) -> Any:
        key = state["key"]
        drawn = jax.vmap(jax.random.uniform)(jax.random.split(key, len(batch)))
        for _ in range(k if each else 1):
            key, _ = jax.random.split(key)
        sums = [jax.grad(lambda w, x=x: jnp.sum(x * w**2))(state["w"]) for x in jnp.split(batch * drawn, k)]
        return {"key": key, "w": state["w"] - sum(sums[1:], sums[0]) / len(batch)}

    return jax.jit(step)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("make_key", named(["raw"], {"typed": jax.random.key, "raw": jax.random.PRNGKey}))
def test_a_random_key_that_is_split_at_each_microbatch_is_a_state(make_key: Any, each: bool) -> None:
    state = {"key": make_key(0), "w": np.float32(0.5)}
    report = check_step(partial(draws_each, each=each), state, np.arange(1, 9, dtype=np.float32), returns="params")
    assert report.cause is (Cause.ADVANCED if each else None), str(report)
    assert report.allowing("state").passes, str(report.allowing("state"))


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("by_means", [False, True])
def test_random_keys_of_examples_move_with_them(by_means: bool, typed: bool) -> None:
    keys = jax.random.split(jax.random.key(0), len(BATCH["length"]))
    batch = BATCH | {"key": keys if typed else jax.random.key_data(keys)}

    def loss(p: Any, part: Any, batch: Any, k: int) -> Any:
        scores = part["x"] @ p["w"] + p["b"] * jax.vmap(jax.random.uniform)(part["key"])
        return ((scores - part["y"]) ** 2 * part["length"]).sum() / divisor(part, batch, k, by_means)

    report = check_step(adding(loss), PARAMS, batch, microbatches=(2,))
    assert report.cause is (Cause.MEAN_OF_MEANS if by_means else None), str(report)


def test_weights_that_are_drawn_are_no_statistics() -> None:
    """As those of diffusion's noise levels: means over microbatches that are divided by sums of random weights."""
    batch = BATCH | {"key": jax.random.key_data(jax.random.split(jax.random.key(0), len(BATCH["length"])))}

    def loss(p: Any, part: Any) -> Any:
        weights = 1 / (jax.vmap(jax.random.uniform)(part["key"]) + 0.1)
        return ((part["x"] @ p["w"] + p["b"] - part["y"]) ** 2 * weights).sum() / weights.sum()

    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        results = [jax.value_and_grad(loss)(p, part) for part in parts(batch, k)]
        return jax.tree.map(lambda *x: sum(x) / k, *results)

    report = check_step(make_step, PARAMS, batch, microbatches=(2,))
    assert report.cause is Cause.MEAN_OF_MEANS, str(report)
    assert not report.allowing("statistics").passes


@pytest.mark.parametrize("by_means", [False, True])
def test_random_numbers_of_each_place_are_no_neighbors(by_means: bool) -> None:
    def loss(p: Any, part: Any, batch: Any, k: int) -> Any:
        errors = (part["x"] + part["noise"]) @ p["w"] + p["b"] - part["y"]
        return (errors**2 * part["length"]).sum() / divisor(part, batch, k, by_means)

    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        keys = jax.random.split(jax.random.key(0), len(batch["y"]))
        noise = jax.vmap(lambda key: jax.random.normal(key, (5,)))(keys)
        return summed_gradient(loss, p, batch | {"noise": noise}, k)

    report = check_step(make_step, PARAMS, BATCH, microbatches=(2,))
    assert report.cause is (Cause.UNEXPLAINED if by_means else None), str(report)


OPTIMIZERS = {
    "adam": optax.adam(0.01),
    "adamw": optax.adamw(0.01),
    "momentum": optax.sgd(0.1, 0.9),
    "sgd": optax.sgd(0.1),
}


@pytest.mark.parametrize(
    ("optimizer", "by_number", "k"),
    cases([("adam", True, 2), ("adamw", False, 4), ("sgd", True, 4)], OPTIMIZERS, [False, True], [2, 4]),
)
def test_updates_at_each_microbatch_by_its_share_are_named(optimizer: str, by_number: bool, k: int) -> None:
    """The loss of a microbatch is divided by their number, or its sum by the tokens of the batch."""
    tx = OPTIMIZERS[optimizer]

    def loss(p: Any, part: Any, total: Any) -> Any:
        return ((jnp.tanh(part["x"] @ p["w"] + p["b"]) - part["y"]) ** 2 * part["length"]).sum() / total

    @jitted
    def make_step(state: Any, batch: Any, k: int) -> Any:
        params, moments = state
        for part in parts(batch, k):
            total = divisor(part, batch, k, by_number)
            updates, moments = tx.update(jax.grad(loss)(params, part, total), moments, params)
            params = optax.apply_updates(params, updates)
        return params, moments

    report = check_step(make_step, (PARAMS, tx.init(PARAMS)), BATCH, microbatches=(k,), returns="params")
    assert report.cause is Cause.MOVED_EACH, str(report)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_sum_is_no_addition_if_adam_hides_it_in_most_leaves(by_hand: bool) -> None:
    tx = optax.multi_transform({"adam": optax.adam(0.01), "sgd": optax.sgd(0.1)}, {"w": "adam", "b": "sgd"})

    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        def loss(p: Any) -> Any:
            return ((batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2).mean()

        grads = scaled(jax.grad(loss)(p), k)
        if by_hand:
            return {"w": p["w"] - 0.01 * grads["w"] / (abs(grads["w"]) + 1e-8), "b": p["b"] - 0.1 * grads["b"]}
        return optax.apply_updates(p, tx.update(grads, tx.init(p), p)[0])

    report = check_step(make_step, PARAMS, BATCH, microbatches=(2,), returns="params")
    assert report.cause is Cause.SUM, str(report)


def loss_of(p: Any, part: Any, count: Any) -> Any:
    return (((part["x"] @ p["w"] + p["b"]) - part["y"]) ** 2 * part["length"]).sum() / count


@pytest.mark.parametrize(
    ("optimizer", "factor"), cases([("sgd", "of means"), ("adamw", 2)], ["sgd", "adamw"], ["of means", 2])
)
def test_a_wrong_metric_beside_right_parameters_is_named(optimizer: str, factor: Any) -> None:
    tx = getattr(optax, optimizer)(0.01)

    @jitted
    def make_step(state: Any, batch: Any, k: int) -> Any:
        p, count = state["params"], batch["length"].sum()
        divided = parts(batch, k)
        losses, grads = zip(*(jax.value_and_grad(loss_of)(p, part, count) for part in divided), strict=True)
        loss = sum(losses) * (k if factor == 2 else 1)
        if factor == "of means":
            loss = sum(loss_of(p, part, part["length"].sum()) for part in divided) / k
        updates, moments = tx.update(plus(*grads), state["moments"], p)
        return {"params": optax.apply_updates(p, updates), "moments": moments}, {"loss": loss}

    state = {"params": PARAMS, "moments": tx.init(PARAMS)}
    report = check_step(make_step, state, BATCH, microbatches=(2,), returns="params")
    assert report.cause is (Cause.SUM if factor == 2 else Cause.MEAN_OF_MEANS), str(report)
    assert "in 1 of" in report.faults[0].detail


def test_a_count_among_the_metrics_is_no_step_count() -> None:
    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        grads = [jax.grad(loss_of)(p, part, batch["length"].sum()) for part in parts(batch, k)]
        return jax.tree.map(lambda x, *g: x - 0.1 * sum(g), p, *grads), {"microbatches": jnp.int32(k)}

    report = check_step(make_step, PARAMS, BATCH, microbatches=(2,), returns="params")
    assert report.cause is Cause.UNEXPLAINED, str(report)
    assert "an integer in the result is 2 instead of 1, in leaf [1]['microbatches']" in report.faults[0].detail


def test_running_statistics_in_the_state_are_no_clipping() -> None:
    """The variance of copies of one example is 0, so that all of them change it by the same amount."""
    params = {"scale": np.ones(5, np.float32), "w": RNG.normal(size=(5, 4)).astype(np.float32)}
    running = {"mean": np.zeros(5, np.float32), "variance": np.ones(5, np.float32)}

    def loss(p: Any, running: Any, part: Any) -> Any:
        mean, variance = part["x"].mean(0), part["x"].var(0)
        scores = (part["x"] - mean) / jnp.sqrt(variance + 1e-5) * p["scale"] @ p["w"]
        now = {"mean": mean, "variance": variance}
        return ((scores - part["y"][:, None]) ** 2).mean(), jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, running, now)

    @jitted
    def make_step(state: Any, batch: Any, k: int) -> Any:
        running, grads = state["running"], []
        for part in parts(batch, k):
            grad, running = jax.grad(loss, has_aux=True)(state["params"], running, part)
            grads.append(grad)
        params = jax.tree.map(lambda x, *g: x - 0.1 * sum(g) / k, state["params"], *grads)
        return {"params": params, "running": running}

    state = {"params": params, "running": running}
    report = check_step(make_step, state, BATCH, microbatches=(2,), returns="params")
    assert report.cause is Cause.STATISTICS, str(report)


@pytest.mark.parametrize(("seed", "optimizer"), cases([(0, "adam"), (2, "adamw")], range(3), ["adam", "adamw"]))
def test_signs_that_agree_by_chance_name_no_examples(seed: int, optimizer: str) -> None:
    """Adam's first step shows signs alone, and a zero factor of a low-rank update leaves few of them."""
    rng = np.random.default_rng(seed)
    shapes = {"base": (5, 3), "down": (5, 2), "up": (2, 3)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    params["up"] *= 0
    batch = {
        "x": rng.normal(size=(8, 5)).astype(np.float32),
        "y": rng.normal(size=(8, 3)).astype(np.float32),
        "real": np.float32([1, 1, 1, 1, 1, 0, 1, 0]),
    }

    def loss(p: Any, part: Any) -> Any:
        errors = part["x"] @ (p["base"] + p["down"] @ p["up"]) - part["y"]
        return ((errors**2).sum(1) * part["real"]).sum() / part["real"].sum()

    labels = {"base": "frozen", "down": "trained", "up": "trained"}
    tx = optax.multi_transform({"trained": OPTIMIZERS[optimizer], "frozen": optax.set_to_zero()}, labels)

    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        grads = mean_gradient(loss, p, batch, k)
        return optax.apply_updates(p, tx.update(grads, tx.init(p), p)[0])

    report = check_step(make_step, params, batch, microbatches=(2,), returns="params")
    assert report.cause is Cause.MEAN_OF_MEANS, str(report)

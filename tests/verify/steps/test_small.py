"""Steps with so few parameters that the gradients do not determine the weight of each example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradcombine.errors import GradCombineError
from gradcombine.verify import Cause, Verdict, check_step
from tests.verify.steps.defects import pieces
from tests.verify.steps.dividing import eager

Batch = dict[str, np.ndarray]
Step = Callable[[np.ndarray, Batch], Any]


def taken(batch: Batch, rows: Any) -> Batch:
    return {name: values[rows] for name, values in batch.items()}


def gradient(w: np.ndarray, batch: Batch) -> np.ndarray:
    """Gradient of the mean squared error over the real examples."""
    residual = (batch["x"] @ w - batch["y"]) * batch["real"]
    return 2 * (batch["x"].T @ residual) / max(batch["real"].sum(), 1)


def weighted(w: np.ndarray, batch: Batch, k: int, one: Step = gradient) -> np.ndarray:
    return sum(one(w, x) * x["real"].sum() for x in pieces(batch, k)) / batch["real"].sum()


def normalized(w: np.ndarray, batch: Batch) -> np.ndarray:
    x = (batch["x"] - batch["x"].mean(0)) / (batch["x"].std(0) + batch["x"].dtype.type(1e-3))
    return gradient(w, batch | {"x": x})


def clipped(w: np.ndarray, batch: Batch) -> np.ndarray:
    made = gradient(w, batch)
    return made * min(1, 0.1 / max(np.linalg.norm(made), 1e-30))


STEPS: dict[str, tuple[Callable[[int], Step], Cause | None]] = {
    "right": (lambda k: lambda w, b: weighted(w, b, k), None),
    "mean of means": (
        lambda k: lambda w, b: sum(gradient(w, x) for x in pieces(b, k)) / w.dtype.type(k),
        Cause.MEAN_OF_MEANS,
    ),
    "sum": (lambda k: lambda w, b: weighted(w, b, k) * w.dtype.type(k), Cause.SUM),
    "last is lost": (
        lambda k: lambda w, b: gradient(w, b if k == 1 else taken(b, np.s_[:-1])),
        Cause.LOST,
    ),
    "first counts twice": (
        lambda k: lambda w, b: gradient(w, b if k == 1 else taken(b, np.r_[0, np.arange(len(b["x"]))])),
        Cause.DOUBLED,
    ),
    "decay": (lambda k: lambda w, b: weighted(w, b, k) + w * w.dtype.type(0.01 * (k - 1)), Cause.ADDED),
    "statistics": (lambda k: lambda w, b: weighted(w, b, k, normalized), Cause.STATISTICS),
    "clipped": (lambda k: lambda w, b: weighted(w, b, k, clipped), Cause.CHANGED_BEFORE),
}


# A clipped scalar has no direction, so clipping cannot be recognized.
@pytest.mark.parametrize(("name", "params"), [(x, p) for x in STEPS for p in (1, 5) if (x, p) != ("clipped", 1)])
def test_causes_of_steps_with_fewer_parameters_than_examples(name: str, params: int) -> None:
    make_step, cause = STEPS[name]
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(12, params)).astype(np.float32),
        "y": rng.normal(size=12).astype(np.float32),
        "real": np.float32([0, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0, 1]),
    }
    report = check_step(make_step, rng.normal(size=params).astype(np.float32), batch, microbatches=(2, 4))
    assert [fault.cause for fault in report.faults] == ([] if cause is None else [cause]), report


@pytest.mark.parametrize("scaled", [False, True])
def test_a_moment_of_few_elements_shows_the_sizes_of_gradients_also_before_metrics(scaled: bool) -> None:
    """Adam's first step changes each parameter by the same amount; a training state before metrics has longer paths."""

    def make_step(k: int) -> Any:
        def step(state: Any, batch: Batch) -> Any:
            p, mean, square = (state[name]["w"] for name in ("params", "mean", "square"))
            real = batch["real"].sum()
            gradient = sum(x["x"].T @ ((x["x"] @ p - x["y"]) * x["real"]) for x in pieces(batch, k)) / real
            gradient = gradient * k if scaled else gradient
            mean, square = mean + (gradient - mean) / 8, square + (gradient**2 - square) / 64
            change = 8 * mean / (np.sqrt(64 * square) + 2.0**-30) / 128
            return {"params": {"w": p - change}, "mean": {"w": mean}, "square": {"w": square}}, {"real": real}

        return step

    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 3)), "y": rng.normal(size=8), "real": np.array([1, 1, 1, 0, 1, 0, 0, 1])}
    state = {name: {"w": np.full(3, name == "params", np.float32)} for name in ("params", "mean", "square")}
    batch = {name: x.astype(np.float32) for name, x in batch.items()}
    report = check_step(make_step, state, batch, returns="params")
    assert report.verdict is (Verdict.FAILS if scaled else Verdict.PASSES), report


def test_what_its_elements_leave_open_is_not_called_statistics() -> None:
    """One parameter and weights absent from the batch: a mean of means looks like batch statistics."""
    rng = np.random.default_rng(1)
    batch = {"x": rng.normal(size=(8, 1)).astype(np.float32), "y": rng.normal(size=8).astype(np.float32)}

    def make_step(k: int) -> Step:
        def one(w: np.ndarray, x: Batch) -> np.ndarray:
            weights = np.exp(x["y"])
            return 2 * (x["x"].T @ ((x["x"] @ w - x["y"]) * weights)) / weights.sum()

        return lambda w, b: sum(one(w, x) for x in pieces(b, k)) / w.dtype.type(k)

    report = check_step(make_step, np.ones(1, np.float32), batch, microbatches=(4,))
    assert [fault.cause for fault in report.faults] == [Cause.UNEXPLAINED], report


def test_a_defect_that_shows_in_reverse_alone_is_named_there() -> None:
    """The first example counts twice; in the original order it is padding, so nothing changes."""
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(8, 5)).astype(np.float32),
        "y": rng.normal(size=8).astype(np.float32),
        "real": np.float32([0, 1, 1, 1, 1, 1, 1, 1]),
    }
    make_step, cause = STEPS["first counts twice"]
    (fault,) = check_step(make_step, np.ones(5, np.float32), batch).faults
    assert (fault.cause, fault.run) == (cause, "4 microbatches in reverse order")


def test_weights_that_stand_nowhere_in_the_batch_are_fitted_at_other_parameters() -> None:
    """Ten examples and three parameters; a gradient polynomial in the parameters would give too few equations."""
    rng = np.random.default_rng(1)
    batch = {"x": rng.normal(size=(10, 3)).astype(np.float32), "y": rng.normal(size=10).astype(np.float32)}

    def one(w: np.ndarray, part: Batch) -> np.ndarray:
        weights, product = np.exp(part["y"]), part["x"] @ w
        return part["x"].T @ (weights * (np.tanh(product) - part["y"]) / np.cosh(product) ** 2) / weights.sum()

    def make_step(k: int) -> Step:
        return lambda w, b: sum(one(w, x) for x in pieces(b, k)) / w.dtype.type(k)

    (fault,) = check_step(make_step, np.float32([1, -2, 0.5]), batch, microbatches=(2,)).faults
    assert fault.cause is Cause.MEAN_OF_MEANS, fault


def small_batch(examples: int = 8) -> Batch:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(examples, 3)).astype(np.float32), rng.normal(size=examples).astype(np.float32)
    return {"x": x, "y": y, "real": np.ones(examples, np.float32)}


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda w, b, k: np.ones(k, np.float32), r"leaf \[1\]: expected floats of shape \(1,\), as in one batch"),
        (lambda w, b, k: np.ones(k, np.int32), r"expected integers of shape \(1,\), .* of shape \(2,\)"),
        (lambda w, b, k: np.float32(1) if k > 1 else np.int32(1), r"expected integers of shape \(\), .* floats"),
    ],
)
def test_metrics_of_another_shape_or_kind_are_refused(metric: Any, message: str) -> None:
    def make_step(k: int) -> Step:
        return lambda w, b: (weighted(w, b, k), metric(w, b, k))

    with pytest.raises(GradCombineError, match=message):
        check_step(make_step, np.zeros(3, np.float32), small_batch())


def test_a_gradient_or_reference_of_another_shape_is_refused_and_one_number_per_example_is_not() -> None:
    batch, w = small_batch(), np.zeros(3, np.float32)
    with pytest.raises(GradCombineError, match=r"floats of shape \(3,\), as in one batch, received .* \(1, 3\)"):
        check_step(lambda k: lambda w, b: weighted(w, b, k)[None] if k > 1 else weighted(w, b, k), w, batch)
    with pytest.raises(GradCombineError, match=r"as in one batch, received floats of shape \(3, 1\)"):
        check_step(lambda k: lambda w, b: weighted(w, b, k), w, batch, reference=np.zeros((3, 1)))
    with pytest.raises(GradCombineError, match="expected a finite reference, received NaN"):
        check_step(lambda k: lambda w, b: weighted(w, b, k), w, batch, reference=np.full(3, np.nan))
    assert check_step(lambda k: lambda w, b: (weighted(w, b, k), b["x"] @ w - b["y"]), w, batch).passes


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_parameters_of_any_shape_are_updated_in_sequence(shape: tuple[int, ...]) -> None:
    @eager
    def make_step(params: Any, batch: Batch, k: int) -> Any:
        w, scale = params["w"], params["scale"]
        for part in pieces(batch, k):
            gradients = gradient(w, part), 2 * scale
            w, scale = w - w.dtype.type(0.1) * gradients[0], scale - w.dtype.type(0.1) * gradients[1]
        return {"w": w, "scale": np.asarray(scale)}

    start = {"w": np.zeros(3, np.float32), "scale": np.ones(shape, np.float32)}
    (fault,) = check_step(make_step, start, small_batch(), returns="params", microbatches=(2,)).faults
    assert fault.cause is Cause.MOVED_EACH


@pytest.mark.parametrize("seed", range(4))
def test_a_single_number_is_not_fitted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = small_batch() | {"y": rng.normal(size=8).astype(np.float32)}

    @eager
    def make_step(w: np.ndarray, b: Batch, k: int) -> Any:
        value = np.mean(np.square(b["x"] @ w - b["y"]))
        return weighted(w, b, k), value if k == 1 else value ** w.dtype.type(1.3)

    start = rng.normal(size=3).astype(np.float32)
    (fault,) = check_step(make_step, start, batch, microbatches=(2,)).faults
    assert fault.cause is Cause.UNEXPLAINED


def test_a_number_given_twice_is_one_division() -> None:
    batch = {"x": np.eye(4, dtype=np.float32), "y": np.arange(4, dtype=np.float32), "real": np.ones(4, np.float32)}
    once, twice = (
        check_step(lambda k: lambda w, b: weighted(w, b, k), np.ones(4, np.float32), batch, microbatches=numbers)
        for numbers in ((2,), (2, 2))
    )
    assert once.passes and [run.name for run in twice.runs] == [run.name for run in once.runs]


@pytest.mark.needs("tensorflow")
def test_texts_in_a_batch_are_passed_unchanged() -> None:
    import tensorflow as tf

    texts = ["a", "b", "bc", "def", "i", "ab", "abcdef", "g"]
    x = np.random.default_rng(0).normal(size=(8, 9)).astype(np.float32)

    def make_step(k: int) -> Step:
        def step(w: Any, batch: Any) -> Any:
            parts = zip(tf.split(batch["x"], k), tf.split(batch["texts"], k), strict=True)
            lengths = [(rows, tf.cast(tf.strings.length(text), rows.dtype)) for rows, text in parts]
            means = [tf.linalg.matvec(rows, n, transpose_a=True) / tf.reduce_sum(n) for rows, n in lengths]
            return w * 0 + tf.add_n(means) / k

        return tf.function(step)

    batch = {"x": tf.constant(x), "texts": tf.constant(texts)}
    report = check_step(make_step, tf.ones(9), batch, microbatches=(2,))
    assert report.cause is Cause.MEAN_OF_MEANS, report
    assert report.faults[0].detail == "they weigh from 0.4118 to 0.5882 in one batch", report


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("right", [True, False])
def test_a_scalar_of_bfloat16_in_tensorflow(right: bool) -> None:
    """NumPy itself cannot convert it."""
    import tensorflow as tf

    def make_step(k: int) -> Step:
        def gradient(p: Any, x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(p)
                loss = tf.reduce_mean(tf.linalg.matvec(x, p["w"]) ** 2 * tf.cast(p["scale"], x.dtype))
            return tape.gradient(loss, p)

        def step(p: Any, batch: Any) -> Any:
            grads = [gradient(p, x) for x in tf.split(batch, k)]
            return tf.nest.map_structure(lambda *x: tf.add_n(x) / (k if right else 1), *grads)

        return tf.function(step)

    batch = tf.constant(np.random.default_rng(0).normal(size=(8, 9)).astype(np.float32))
    report = check_step(make_step, {"w": tf.ones(9), "scale": tf.constant(1.5, tf.bfloat16)}, batch, microbatches=(2,))
    assert report.passes == right, report
    assert report.cause is (None if right else Cause.SUM), report

"""The float64 classifier and its error bounds."""

import numpy as np
import pytest

from gradcombine.verify.suite import classifier as problem
from gradcombine.verify.suite.classifier import analyse, analyse_mean

BATCHES = list(problem.cut(problem.load(), problem.SIZES[:4]))
PARAMETERS = problem.initial_parameters()


def _float32(parameters: dict[str, np.ndarray], batch: problem.Batch) -> dict[str, np.ndarray]:
    """The classifier in NumPy and float32."""
    hidden = np.tanh(batch.images @ parameters["w1"] + parameters["b1"])
    logits = hidden @ parameters["w2"] + parameters["b2"]
    exp = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax = exp / exp.sum(axis=1, keepdims=True)
    expected = np.eye(problem.CLASSES, dtype=np.float32)[batch.labels]
    slope = (softmax - expected) / np.float32(len(batch.labels))
    inner = (slope @ parameters["w2"].T) * (1 - hidden**2)
    return {
        "b1": inner.sum(axis=0),
        "b2": slope.sum(axis=0),
        "loss": -np.log((softmax * expected).sum(axis=1)).mean(),
        "w1": batch.images.T @ inner,
        "w2": hidden.T @ slope,
    }


@pytest.mark.parametrize("name", ["b1", "b2", "w1", "w2"])
def test_the_gradient_is_that_of_the_loss(name: str) -> None:
    direction = np.random.default_rng(0).choice([-1.0, 1.0], PARAMETERS[name].shape)
    step = 1e-5

    def loss(sign: float) -> float:
        moved = PARAMETERS | {name: PARAMETERS[name] + sign * step * direction}
        return float(analyse(moved, BATCHES[0])[0]["loss"])

    slope = (loss(1) - loss(-1)) / (2 * step)
    values, _ = analyse(PARAMETERS, BATCHES[0])
    # Central differences err by step**2 times a third derivative of order 100, and by rounding of order 2**-52 / step.
    assert slope == pytest.approx(float((values[name] * direction).sum()), abs=1e-7)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_float32_keeps_to_the_bounds(batch: problem.Batch, scale: float) -> None:
    parameters = {name: np.float32(scale) * leaf for name, leaf in PARAMETERS.items()}
    values, bounds = analyse(parameters, batch)
    for name, leaf in _float32(parameters, batch).items():
        assert (np.abs(leaf - values[name]) <= bounds[name]).all(), name


def test_the_bounds_are_far_below_one_example() -> None:
    batch = BATCHES[1]
    values, bounds = analyse(PARAMETERS, batch)
    without, _ = analyse(PARAMETERS, problem.Batch(batch.images[1:], batch.labels[1:]))
    for name in values:
        assert np.max(np.abs(values[name] - without[name])) > 10 * np.max(bounds[name]), name


def test_the_mean_over_batches_is_the_whole_batch() -> None:
    means, bounds = analyse_mean(PARAMETERS, BATCHES)
    values, whole = analyse(PARAMETERS, problem.join(BATCHES))
    for name, value in values.items():
        np.testing.assert_allclose(means[name], value, rtol=1e-9, atol=1e-13)
        assert bounds[name].shape == whole[name].shape

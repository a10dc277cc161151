"""The frameworks' own gradients: microbatches against the full batch, and JAX against TensorFlow.

Kernels (matmul, tanh, softmax) add in orders of their own, so no bits are promised here. The bounds are those of
`analysis`: two float32 computations of one gradient are as far apart as both their errors at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import gradcombine as gc
from gradcombine.verify.suite import digits, exact
from gradcombine.verify.suite.analysis import analyse, analyse_mean
from gradcombine.verify.suite.digits import Batch
from gradcombine.verify.suite.findings import BOUND, OUTSIDE, Finding
from gradcombine.verify.suite.laws import distances
from gradcombine.verify.suite.places import Contributions
from gradcombine.verify.ulp import equal_bits

Gradients = dict[str, np.ndarray]
Measure = Callable[[Gradients, Batch], Gradients]
"""From NumPy parameters and a batch to the loss and its gradient by one framework, as NumPy arrays."""


def contributions(measure: Measure, parameters: Gradients, batches: Sequence[Batch]) -> Contributions:
    """The microbatches' gradients, weighted by the number of examples."""
    return Contributions([measure(parameters, batch) for batch in batches], [len(batch.labels) for batch in batches])


def full_batch(
    framework: str, measure: Measure, given: Contributions, parameters: Gradients, batches: Sequence[Batch]
) -> Iterator[Finding]:
    """The weighted mean equals the full batch's gradient up to rounding; a mean of means does not."""
    whole = digits.join(batches)
    reference = measure(parameters, whole)
    _, mean_bounds = analyse_mean(parameters, batches)
    _, bounds = analyse(parameters, whole)
    allowed = {name: bounds[name] + mean_bounds[name] for name in bounds}
    for combined, weights in (("weighted mean", given.weights), ("mean of means", None)):
        result = gc.mean(given.values, weights=weights)
        pairs = [(result[name], leaf) for name, leaf in reference.items()]
        share = max(_share(result[name], leaf, allowed[name]) for name, leaf in reference.items())
        within = weights is not None
        yield Finding(
            "full batch",
            {"framework": framework, "combined": combined},
            BOUND if within else OUTSIDE,
            (share <= 1) == within,
            *distances(pairs),
            share,
        )


def kernels(jax: Gradients, tensorflow: Gradients, parameters: Gradients, batch: Batch) -> Iterator[Finding]:
    """How far the two frameworks' gradients of one batch are apart, leaf by leaf."""
    _, bounds = analyse(parameters, batch)
    for name in sorted(bounds):
        a, b = jax[name], tensorflow[name]
        share = _share(a, b, 2 * bounds[name])
        labels: dict[str, Any] = {"leaf": name, "shape": "x".join(map(str, a.shape)) or "scalar"}
        yield Finding("kernels", labels, BOUND, share <= 1, *distances([(a, b)]), share, equal_bits(a, b))


def _share(a: np.ndarray, b: np.ndarray, allowed: np.ndarray) -> float:
    return exact.share(np.abs(np.float64(a) - b), allowed)

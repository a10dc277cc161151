"""What local gradient aggregation refuses."""

from __future__ import annotations

import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine.integrations.horovod import AllReduce, LocalGradientAggregation

BAD = {
    "lengths": (lambda: LocalGradientAggregation(2, AllReduce(gc.LOCAL)).compute_gradients([None], []), "0 gradients"),
    "passes": (lambda: LocalGradientAggregation(1.5, AllReduce(gc.LOCAL)), "an integer backward_passes_per_step"),  # pyright: ignore[reportArgumentType]
    "mode": (lambda: LocalGradientAggregation(2, AllReduce(gc.LOCAL), mode="lazy"), "mode 'eager', 'graph' or None"),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    call, text = BAD[case]
    with pytest.raises(gc.GradCombineError, match=text):
        call()


def test_a_short_answer_of_the_all_reduce() -> None:
    aggregation = LocalGradientAggregation(1, lambda gradients, variables: [])
    with pytest.raises(gc.GradCombineError, match="1 gradients of allreduce"):
        aggregation.compute_gradients([tf.constant(1.0)], [tf.Variable(0.0)])


def test_a_size_is_needed_for_local_variables() -> None:
    aggregation, variable = LocalGradientAggregation(1, lambda gradients, variables: gradients), tf.Variable(0.0)
    aggregation.register_local_var(variable)
    with pytest.raises(gc.GradCombineError, match="expected a size"):
        aggregation.compute_gradients([tf.constant(1.0)], [variable])

"""JAX: gradients in microbatches, training steps, sharded accumulators, and processes that may be lost."""

from gradcombine.errors import importing
from gradcombine.places.window import UNTIL_FLUSH

with importing("gradcombine.integrations.jax"):
    from gradcombine.integrations.jax import zero
    from gradcombine.integrations.jax.arrays import detect_lost_peers
    from gradcombine.integrations.jax.islands import Outer, OuterState, outer
    from gradcombine.integrations.jax.loss import Loss, LossOutput
    from gradcombine.integrations.jax.objective_of_terms import grads_by_denominator
    from gradcombine.integrations.jax.requests import RequestStep, Slot, request_step
    from gradcombine.integrations.jax.step_functions import StepMetrics, TrainState
    from gradcombine.integrations.jax.training_step import TrainStep, train_step
    from gradcombine.integrations.jax.value_and_grad import value_and_grad

__all__ = [
    "UNTIL_FLUSH",
    "Loss",
    "LossOutput",
    "Outer",
    "OuterState",
    "RequestStep",
    "Slot",
    "StepMetrics",
    "TrainState",
    "TrainStep",
    "detect_lost_peers",
    "grads_by_denominator",
    "outer",
    "request_step",
    "train_step",
    "value_and_grad",
    "zero",
]

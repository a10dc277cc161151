"""JAX: gradients in microbatches, training steps, sharded accumulators, and errors for lost processes."""

from gradcombine.errors import importing

with importing("gradcombine.integrations.jax"):
    from gradcombine.integrations.jax import zero as zero
    from gradcombine.integrations.jax.arrays import detect_lost_peers
    from gradcombine.integrations.jax.islands import outer
    from gradcombine.integrations.jax.loss import Loss, LossOutput
    from gradcombine.integrations.jax.requests import RequestStep as RequestStep
    from gradcombine.integrations.jax.requests import Slot, request_step
    from gradcombine.integrations.jax.step_functions import StepMetrics as StepMetrics
    from gradcombine.integrations.jax.step_functions import TrainState
    from gradcombine.integrations.jax.training_step import TrainStep as TrainStep
    from gradcombine.integrations.jax.training_step import train_step
    from gradcombine.integrations.jax.value_and_grad import grads_by_denominator, value_and_grad

__all__ = [
    "Loss",
    "LossOutput",
    "Slot",
    "TrainState",
    "detect_lost_peers",
    "grads_by_denominator",
    "outer",
    "request_step",
    "train_step",
    "value_and_grad",
]

"""JAX: gradients in microbatches, and training steps."""

from gradcombine.integrations.jax.loss import LossOutput
from gradcombine.integrations.jax.step import TrainStep, train_step
from gradcombine.integrations.jax.train_state import StepMetrics, TrainState
from gradcombine.integrations.jax.value_and_grad import value_and_grad

__all__ = ["LossOutput", "StepMetrics", "TrainState", "TrainStep", "train_step", "value_and_grad"]

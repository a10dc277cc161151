"""Fits a classifier of scikit-learn's digits with batches of 64, and with microbatches of 16 to the same result.

Runs on Keras' TensorFlow backend, or on its JAX backend with KERAS_BACKEND=jax.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

from gradcombine.integrations.keras import Accumulate, FlushAtEpochEnd, WeightedTrainStep

BATCH, EVERY, EPOCHS = 64, 4, 3


class Model(WeightedTrainStep, keras.Model):
    """Weights each microbatch by its examples: the last one of an epoch has 5 instead of 16."""


def compiled(optimizer: keras.optimizers.Optimizer) -> Model:
    keras.utils.set_random_seed(0)
    images = keras.Input((64,))
    hidden = keras.layers.Dense(32, "relu")(images)
    model = Model(images, keras.layers.Dense(10)(hidden))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def main() -> None:
    digits = load_digits()
    images, labels = np.float32(digits.data) / 16, digits.target

    def fit(name: str, model: Model, batch_size: int, **settings: object) -> None:
        model.fit(images, labels, batch_size, EPOCHS, shuffle=False, verbose=0, **settings)
        loss = model.evaluate(images, labels, batch_size=599, verbose=0)
        updates = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
        print(f"{name:<34} loss {loss:.4f} after {updates} updates")

    def adam(**settings: object) -> keras.optimizers.Optimizer:
        return keras.optimizers.Adam(3e-3, clipnorm=1.0, **settings)

    fit("one batch", compiled(adam()), BATCH)

    # quickstart: begin
    # Clipping and Adam run once per window of four microbatches; the rest of an epoch is a shorter window.
    model = compiled(Accumulate(adam(), every=EVERY))
    fit("Accumulate", model, BATCH // EVERY, callbacks=[FlushAtEpochEnd()])
    # quickstart: end

    fit("Keras gradient_accumulation_steps", compiled(adam(gradient_accumulation_steps=EVERY)), BATCH // EVERY)


if __name__ == "__main__":
    main()

"""Invalid calls raise and leave the optimizer intact."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from gradcombine.errors import GradCombineError
from gradcombine.integrations.keras import Accumulate
from tests.integrations.keras.cases import WITH_SEVERAL, bits, matrix_and_vector, microbatches, tensor


def sgd(**settings: Any) -> Any:
    return keras.optimizers.SGD(1.0, **settings)


def several(inner: Any) -> Any:
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(inner))


def assigned(name: str, value: Any, built: bool) -> None:
    optimizer = Accumulate(sgd(), 2)
    if built:
        optimizer.build(matrix_and_vector())
    setattr(optimizer, name, value)


def twice() -> None:
    """A gradient for each of two mentions of a variable, of which one would be lost."""
    variable = keras.Variable([1.0])
    Accumulate(sgd(), 2).apply([tensor([1.0]), tensor([2.0])], [variable, variable])


SEVERAL = [
    (lambda: Accumulate(several(Accumulate(sgd(), 2)), 2), "does not accumulate already"),
    (lambda: Accumulate(several(sgd(gradient_accumulation_steps=4)), 2), "without gradient_accumulation_steps"),
    (lambda: Accumulate(several(sgd()), 2).exclude_from_weight_decay(), "exclude_from_weight_decay on one of Multi"),
]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Accumulate(sgd(), lambda index: 2, order="tree"), "max_every"),
        (lambda: Accumulate(sgd(gradient_accumulation_steps=4), 2), "without gradient_accumulation_steps, received 4"),
        (lambda: Accumulate(Accumulate(sgd(), 2), 2), "does not accumulate already"),
        (lambda: Accumulate(sgd(), 2).apply([tensor([1.0])]), "an optimizer that is built"),
        (lambda: Accumulate(sgd(), 2).update_step(None, None, 1.0), "update_step"),
        (
            lambda: Accumulate(keras.optimizers.SGD, 2),
            "a Keras optimizer, its name or its config, received SGD, not call",
        ),
        (lambda: assigned("reduction", "sum", built=False), "Accumulate: expected reduction as an argument"),
        (
            lambda: assigned("every", 4, built=True),
            "Accumulate: expected every as an argument of Accumulate.*received 4",
        ),
        (lambda: twice(), r"leaf \[1\]: expected each variable once, received that of \[0\] again"),
        *(pytest.param(*case, marks=WITH_SEVERAL) for case in SEVERAL),
    ],
)
def test_arguments(make: Any, message: str) -> None:
    with pytest.raises(GradCombineError, match=message) as error:
        make()
    assert error.value.operation in ("Accumulate", "accumulate")


@pytest.mark.parametrize(
    ("change", "weight", "message"),
    [
        (lambda a, b: [a], None, "2 gradients, one per variable, received 1"),
        (lambda a, b: [None, None], None, "a gradient for one variable or more"),
        (lambda a, b: [a, b[:2]], None, "shape"),
        (lambda a, b: [a, b.astype(np.float16)], None, "dtype float32"),
        (lambda a, b: [a, b], -1.0, "weight"),
        (lambda a, b: [a, b], [1.0, 2.0], "weight"),
    ],
)
def test_a_refused_microbatch_leaves_the_window_whole(change: Any, weight: Any, message: str) -> None:
    variables, given = matrix_and_vector(), microbatches(0, 2)
    optimizer = Accumulate(sgd(), 3)
    optimizer.apply([tensor(x) for x in given[0]], variables)
    before = bits([*variables, *optimizer.variables])
    bad = [None if x is None else tensor(x) for x in change(*given[1])]
    with pytest.raises(GradCombineError, match=message):
        optimizer.apply(bad, weight=weight)
    assert bits([*variables, *optimizer.variables]) == before


def test_the_length_of_a_window_may_change_until_it_is_built() -> None:
    (a, b), gradients = matrix_and_vector(), [[tensor(x) for x in pair] for pair in microbatches(1, 4)]
    optimizer = Accumulate(sgd(), 2)
    optimizer.every = 4
    for pair in gradients:
        optimizer.apply(pair, [a, b])
    assert (optimizer.get_config()["every"], int(optimizer.iterations)) == (4, 1)


def test_variables_that_it_does_not_know() -> None:
    known, other = matrix_and_vector()
    optimizer = Accumulate(sgd(), 2)
    optimizer.build([known])
    with pytest.raises(GradCombineError, match=r"^Accumulate: leaf \[1\]: expected an optimizer .* with this variable"):
        optimizer.apply([tensor(np.ones(x.shape)) for x in (known, other)], [known, other])


def test_an_inner_optimizer_of_other_variables() -> None:
    """Also inside of one that is built here."""
    for wrap in (lambda x: x, keras.optimizers.LossScaleOptimizer):
        inner = sgd()
        inner.build(matrix_and_vector())
        with pytest.raises(GradCombineError, match=r"expected an .*optimizer that is not built.*others$"):
            Accumulate(wrap(inner), 2).build(matrix_and_vector())


@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # on JAX, while it traces both cases
def test_gradients_may_come_in_another_order_or_in_part() -> None:
    (a, b), (g, h) = matrix_and_vector(), microbatches(1, 1)[0]
    optimizer = Accumulate(sgd(), 2)
    optimizer.build([a, b])
    optimizer.apply_gradients([(tensor(h), b), (tensor(g), a)])
    optimizer.apply([tensor(h)], [b])
    # A sum of two equal terms, divided by 2.
    assert (1 - a.numpy()).tolist() == (1 - (1 - g / 2)).tolist()
    assert b.numpy().tolist() == (1 - h).tolist()


def test_a_weight_around_a_compiled_function_is_refused() -> None:
    """The function would keep the weight with which it was traced."""
    x = np.ones((2, 2), np.float32)

    def model() -> Any:
        made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        made.compile(Accumulate(sgd(), 2), "mse")
        return made

    fresh, compiled = model(), model()
    with (
        pytest.raises(GradCombineError, match="weighted inside of the compiled function"),
        fresh.optimizer.weighted(2),
    ):
        fresh.train_on_batch(x, x[:, :1])
    compiled.train_on_batch(x, x[:, :1])
    with (
        pytest.raises(GradCombineError, match="Accumulate: expected a microbatch applied inside of weighted"),
        compiled.optimizer.weighted(2),
    ):
        compiled.train_on_batch(x, x[:, :1])


@pytest.mark.parametrize("dtype", [np.float32, np.dtype(np.float32), "float32"], ids=repr)
def test_a_dtype_is_saved_by_its_name(dtype: Any) -> None:
    config = Accumulate(sgd(), 2, dtype=dtype).get_config()
    assert Accumulate.from_config(config).dtype == "float32"

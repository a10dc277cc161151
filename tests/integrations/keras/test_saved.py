"""Windows loaded into optimizers with other settings are continued or rejected, never lost."""

from __future__ import annotations

import pickle
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import gradcombine as gc
from gradcombine.errors import GradCombineError
from gradcombine.integrations.keras import Accumulate
from tests.integrations.keras.cases import bits, linear, stepper, tensor
from tests.spec.selection import cases


def made(every: int, **settings: Any) -> tuple[Any, Any]:
    w = keras.Variable(np.zeros(2, np.float32), dtype="bfloat16" if "dtype" in settings else "float32")
    optimizer = Accumulate(keras.optimizers.SGD(-1.0), every, **settings)
    optimizer.build([w])
    return optimizer, w


def feed(optimizer: Any, w: Any, numbers: range) -> None:
    """Microbatch number n has gradient n and 2 n, and weight n."""
    for n in numbers:
        optimizer.apply([tensor(np.array([n, 2 * n]), w.dtype)], [w], weight=n)


def copied(source: Any, target: Any, way: str) -> None:
    if way == "weights":
        target.set_weights([x.numpy() for x in source.variables])
    elif way == "assigned":
        for x, y in zip(target.variables, source.variables, strict=True):
            x.assign(y.value)
    else:
        store: dict[str, Any] = {}
        source.save_own_variables(store)
        target.load_own_variables(store)


def mean(numbers: range) -> Fraction:
    return Fraction(sum(n * n for n in numbers), sum(numbers))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),
        ({}, {"order": "tree"}),
        ({"order": "tree"}, {}),
        ({"order": "tree"}, {"order": "tree"}),
        ({"precision": "compensated"}, {"precision": "compensated"}),
        ({"dtype": "bfloat16"}, {"dtype": "float32"}),
    ],
    ids=str,
)
@pytest.mark.parametrize(("every", "longer"), [(3, 5), (4, 3), (5, 3)])
def test_a_window_goes_on_in_one_of_another_length_and_order(every: int, longer: int, before: Any, after: Any) -> None:
    (old, v), (new, w) = made(every, **before), made(longer, **after)
    feed(old, v, range(1, 3))
    copied(old, new, "store")
    feed(new, w, range(3, longer))
    assert int(new.iterations) == 0
    feed(new, w, range(longer, longer + 1))
    expected = mean(range(1, longer + 1))
    assert int(new.iterations) == 1
    rounding = Fraction(1, 2**8 if "dtype" in after else 2**22)
    assert abs(Fraction(float(w[0])) - expected) <= rounding * expected


@pytest.mark.parametrize(
    ("way", "every", "before", "after", "message"),
    [
        ("store", 2, {}, {}, "fewer microbatches than every, received 2"),
        ("weights", 2, {}, {}, "fewer microbatches than every, received 2"),
        ("store", 1, {"order": "tree"}, {"order": "tree"}, "fewer microbatches"),
        ("weights", 1, {"order": "tree"}, {"order": "tree"}, "of shapes"),
        ("store", 3, {"reduction": "sum"}, {}, "a window of mean, .* received sum"),
        ("store", 3, {}, {"precision": "compensated"}, "a window of mean, precision 'compensated'"),
        ("store", 3, {}, {"wire": gc.wires.blocks(8)}, "a window of mean, precision 'fast', wires.blocks"),
        ("weights", 3, {}, {"precision": "compensated"}, "of shapes"),
        ("store", 3, {"dtype": "float32"}, {"dtype": "bfloat16"}, "bfloat16 of shape"),
        ("weights", 3, {"dtype": "float32"}, {"dtype": "bfloat16"}, "bfloat16 of shape"),
    ],
)
def test_a_window_that_cannot_go_on_is_refused(way: str, every: int, before: Any, after: Any, message: str) -> None:
    (old, v), (new, w) = made(3, **before), made(every, **after)
    feed(old, v, range(1, 3))
    feed(new, w, range(7, 7 + every // 2))
    state = bits(new.variables)
    with pytest.raises(GradCombineError, match=message):
        copied(old, new, way)
    assert bits(new.variables) == state


@pytest.mark.parametrize("position", [-3, -2, -1], ids=["step", "index", "touched"])
def test_a_negative_count_is_refused(position: int) -> None:
    (old, v), (new, _) = made(3), made(3)
    feed(old, v, range(1, 3))
    store: dict[str, Any] = {}
    old.save_own_variables(store)
    name = sorted((x for x in store if x.isdecimal()), key=int)[position]
    store[name] = -np.ones_like(store[name])
    state = bits(new.variables)
    with pytest.raises(GradCombineError, match="not negative, received -1"):
        new.load_own_variables(store)
    assert bits(new.variables) == state


@pytest.mark.parametrize("way", ["store", "weights", "assigned"])
@pytest.mark.parametrize("every", [2, 5])
def test_a_window_that_was_applied_is_over(way: str, every: int) -> None:
    (old, v), (new, w) = made(3), made(every)
    feed(old, v, range(1, 4))
    copied(old, new, way)
    before = int(new.iterations)
    assert not bool(new.flush())
    feed(new, w, range(4, 4 + every))
    expected = mean(range(4, 4 + every))
    assert int(new.iterations) == before + 1
    assert abs(Fraction(float(w[0])) - expected) <= Fraction(1, 2**22) * expected


@pytest.mark.parametrize("flush", [True, False])
def test_what_nobody_checks_is_not_lost(flush: bool) -> None:
    """E.g. from a checkpoint with a longer window: the next microbatch completes it."""
    (old, v), (new, w) = made(3), made(2)
    feed(old, v, range(1, 3))
    copied(old, new, "assigned")
    if flush:
        assert bool(new.flush())
    else:
        feed(new, w, range(3, 4))
    expected = mean(range(1, 3 if flush else 4))
    assert int(new.iterations) == 1
    assert abs(Fraction(float(w[0])) - expected) <= Fraction(1, 2**22) * expected


@pytest.mark.full
def test_a_file_says_what_could_not_be_loaded(tmp_path: Path) -> None:
    x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
    model, other = linear(Accumulate("sgd", 3)), linear(Accumulate("sgd", 2))
    model.fit(x, y, batch_size=2, verbose=0)
    other.optimizer.build(other.trainable_variables)
    model.save_weights(tmp_path / "a.weights.h5")
    with pytest.raises(ValueError, match="a window of fewer microbatches than every"):
        other.load_weights(tmp_path / "a.weights.h5")
    assert int(other.optimizer.variables[0]) == 0


def test_what_is_not_built_says_so(tmp_path: Path) -> None:
    model, other = linear(Accumulate("sgd", 3)), linear(Accumulate("sgd", 3))
    model.save_weights(tmp_path / "nothing.weights.h5")
    model.optimizer.build(model.trainable_variables)
    with pytest.warns(UserWarning, match="Skipping the window .* the file contains none"):
        model.load_weights(tmp_path / "nothing.weights.h5")
    model.save_weights(tmp_path / "a.weights.h5")
    with pytest.warns(UserWarning, match="the optimizer is not built; call build"):
        other.load_weights(tmp_path / "a.weights.h5")


copies = pytest.mark.parametrize(
    "copy_of", [deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)


@copies
def test_a_copy_goes_on_once_it_is_built(copy_of: Any) -> None:
    assert copy_of(Accumulate("sgd", 3)).every == 3
    w, again = keras.Variable([1.0, 2.0]), keras.Variable([1.0, 2.0])
    optimizer = Accumulate(keras.optimizers.SGD(0.5, momentum=0.5), 2)
    optimizer.build([w])
    feed(optimizer, w, range(1, 4))
    again.assign(w.value)
    copied = copy_of(copy_of(optimizer))
    copied.build([again])
    assert bits(copied.variables) == bits(optimizer.variables)
    feed(optimizer, w, range(4, 7))
    feed(copied, again, range(4, 7))
    assert bits([again, *copied.variables]) == bits([w, *optimizer.variables])


@copies
@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
def test_a_copy_keeps_a_lambda(copy_of: Any) -> None:
    """Unlike a file, which Keras loads in safe mode."""
    assert copy_of(Accumulate("sgd", lambda index: index + 2)).every(1) == 3


@copies
@pytest.mark.parametrize("count", [3, 4])
def test_a_copy_for_other_variables_begins_anew(copy_of: Any, count: int) -> None:
    """With and without a partial window."""
    w, other = keras.Variable([1.0, 2.0]), keras.Variable([1.0, 2.0, 3.0])
    optimizer = Accumulate(keras.optimizers.SGD(0.5, momentum=0.5), 2, name="mine")
    optimizer.build([w])
    feed(optimizer, w, range(count))
    copied, new = copy_of(optimizer), Accumulate.from_config(Accumulate(optimizer.inner_optimizer, 2).get_config())
    new.build([other])
    with pytest.warns(UserWarning, match="Skipping the window .*'mine': the optimizer was copied from one of other"):
        copied.build([other])
    assert bits(copied.variables) == bits(new.variables)


INNER: dict[str, Any] = {
    "momentum": lambda: keras.optimizers.SGD(1.0, momentum=0.5, weight_decay=0.5),
    "adamw": lambda: keras.optimizers.AdamW(0.5, amsgrad=True, global_clipnorm=1.0),
    "averaged": lambda: keras.optimizers.Adam(0.5, use_ema=True, ema_momentum=0.5),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adagrad(0.5), 4.0),
}


CASES = [(2, (1, 0), 1), (1, (1, 0), 1), (2, (1, 1, 0, 0), 2)]
"""Window length, microbatches in which the second variable has a gradient, and position of the restart."""


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
@pytest.mark.parametrize(
    ("name", "case", "mode"),
    cases(
        [(name, CASES[0], "compiled") for name in INNER] + [("momentum", case, "eager") for case in CASES[1:]],
        INNER,
        CASES,
        ("eager", "compiled"),
        pairwise=True,
    ),
)
def test_a_restart_does_not_forget_which_variables_have_had_a_gradient(
    name: str, case: tuple[int, tuple[int, ...], int], mode: str
) -> None:
    """In this window or an earlier one; a variable that never had a gradient and its slots stay unchanged."""
    every, having, restart = case

    def built() -> tuple[Any, list[Any]]:
        variables = [keras.Variable(1.0) for _ in range(3)]
        optimizer = Accumulate(INNER[name](), every)
        return optimizer, variables

    def trained(restarts: int | None) -> list[float]:
        optimizer, variables = built()
        step = stepper(optimizer, variables, mode)
        for k, chosen in enumerate(having):
            if k == restarts:
                new, now = built()
                step = stepper(new, now, mode)
                copied(optimizer, new, "store")
                inner = [x.inner_optimizer.variables for x in (new, optimizer)]
                for x, y in zip([*now, *inner[0]], [*variables, *inner[1]], strict=True):
                    x.assign(y.value)
                optimizer, variables = new, now
            one = np.float32(1)
            step([one, one if chosen else None, None])
        return [float(x.numpy()) for x in (*variables, *optimizer.inner_optimizer.variables)]

    received = trained(restart)
    np.testing.assert_allclose(received, trained(None), rtol=1e-6)
    assert received[2] == 1

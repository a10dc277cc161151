# pyright: standard
"""Finds gradients that reach Keras optimizers on TensorFlow. Imported only if the user's program has imported Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeAlias

import keras
import tensorflow as tf

from gradcombine.errors import GradCombineError
from gradcombine.types import Tree
from gradcombine.verify.check.case import Case
from gradcombine.verify.check.inner import HIDDEN, are_different, are_far, measured_once, unpredicted
from gradcombine.verify.check.leaves import floats_in
from gradcombine.verify.check.measure import FLOAT32_UNIT
from gradcombine.verify.check.running import ONE_BATCH, NotWide, Split, Step, Subject
from gradcombine.verify.check.standard import Standard
from gradcombine.verify.check.tensorflow_programs import eagerly

Gradients: TypeAlias = dict[str, tf.Tensor]
"""Gradients of variables, by name."""

OPTIMIZER = "Keras"
"""Key of the measured gradients."""


def before_update(case: Case) -> Iterator[tuple[Standard, list[int]]]:
    """Yields the step up to the gradients at the optimizer, as `inner.before_update` does."""
    standard, subject = case.standard, case.standard.subject
    inner = _to_gradients(subject)
    if not (pair := _gradients(inner, case.split, case.wide)):
        return
    with suppress(NotWide, GradCombineError):
        predicted = subject.run(ONE_BATCH, (subject.batch, pair[1]), case.wide, _replaced(subject)).floats
        if (others := unpredicted(case, predicted)) is not None:
            yield measured_once(standard, OPTIMIZER, inner.make_step), others


def hidden_by_update(standard: Standard, split: Split) -> Iterator[tuple[Standard, bool]]:
    """Yields the step up to the gradients at the optimizer if they differ, as `inner.hidden_by_update` does."""
    inner, wide = _to_gradients(standard.subject), standard.wide is not None and standard.unit > FLOAT32_UNIT
    pair = _gradients(inner, split, wide)
    standard.gradient_examined = bool(pair)
    if not pair:
        return
    one, divided = map(floats_in, pair)
    differs = are_far(one, divided, [0.0] * len(one), HIDDEN * min(standard.unit, FLOAT32_UNIT))
    try:
        measured = measured_once(standard, OPTIMIZER, inner.make_step) if differs else None
        if measured is not None and are_different(measured, split):
            yield measured, False
    except (NotWide, GradCombineError):  # gradients that are not finite, with or without perturbation
        standard.gradient_examined = False


def updates(subject: Subject, split: Split) -> int:
    """Returns the number of updates that a division makes."""
    with _observed() as found:
        subject.call(subject.step(split), subject.batch, wide=False)
    return len(found)


def _gradients(inner: Subject, split: Split, wide: bool) -> tuple[Tree, Tree] | None:
    """Returns the gradients of one batch and of a division; None if the optimizer's are not known."""
    try:
        one, divided = (inner.call(inner.step(x), inner.batch, wide)[0] for x in (ONE_BATCH, split))
    except Exception:  # the step cannot run eagerly, or updates a variable twice
        return None
    return (one, divided) if one and [*one] == [*divided] else None


def _to_gradients(subject: Subject) -> Subject:
    """Returns a subject whose steps return the gradients that Keras optimizers receive, by variable."""

    def make_step(microbatches: int, devices: int = 1) -> Step:
        original = subject.step(Split(microbatches, devices))

        def step(params: Tree, batch: Tree) -> Gradients:
            gradients: Gradients = {}
            with _observed() as found:
                original(params, batch)
            for update in found:
                if gradients.keys() & update.keys():
                    raise NotWide("a variable is updated twice")
                gradients |= update
            return gradients

        return step

    return Subject(make_step, subject.params, subject.batch, returns_params=False)


def _replaced(subject: Subject) -> Step:
    """Returns one batch's step of parameters and (batch, gradients), whose optimizers receive these gradients."""

    def step(params: Tree, replacement: tuple[Tree, Gradients]) -> Tree:
        with _observed(replacement[1]):
            return subject.step(ONE_BATCH)(params, replacement[0])

    return step


@contextmanager
def _observed(replacements: Gradients | None = None) -> Iterator[list[Gradients]]:
    """Context in which functions run eagerly; yields the gradients of each update, which are replaced if given.

    Names are those of the variables, after their number in the order of the updates.

    Raises:
      NotWide: in the context, for an update on a replica, or by an optimizer that accumulates.
    """
    optimizer, found, numbers = keras.optimizers.Optimizer, list[Gradients](), dict[int, int]()
    apply: Callable[..., None] = optimizer.apply

    def observed(
        self: keras.optimizers.Optimizer,
        grads: Sequence[tf.Tensor | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if tf.distribute.has_strategy() or self.gradient_accumulation_steps:
            raise NotWide("the gradients of the update are not known")
        names = [f"{numbers.setdefault(id(v), len(numbers))}.{v.name}" for v in variables]
        dense = {name: tf.convert_to_tensor(g) for name, g in zip(names, grads, strict=True) if g is not None}
        found.append(dense)
        if replacements is not None:
            grads = [tf.cast(replacements[name], dense[name].dtype) if name in dense else None for name in names]
        apply(self, grads, trainable_variables)

    optimizer.apply = observed
    try:
        with eagerly():
            yield found
    finally:
        optimizer.apply = apply

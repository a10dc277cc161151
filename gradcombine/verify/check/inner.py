"""Finds the gradient that reaches an optimizer inside the JAX program of a step that returns new parameters.

The programs of one batch and of a division end with the same optimizer, i.e. with the same operations on values in the
shapes of the parameters, with the same constant operands, so a division by the number of microbatches comes before it.
The inputs of these last operations include the gradient: if the division's values replace them, one batch's program
returns the division's result. A step that is cut off there returns gradients, and is explained as such.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import takewhile
from math import gcd
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from gradcombine.errors import GradCombineError
from gradcombine.types import Tree
from gradcombine.verify.check.case import Case
from gradcombine.verify.check.leaves import array_of, change, changed, perturbation
from gradcombine.verify.check.measure import FLOAT32_UNIT, SAMPLES, TIMES, UNIT64
from gradcombine.verify.check.recorded import EQUALIZING, Recorded
from gradcombine.verify.check.running import ONE_BATCH, Floats, NotWide, Split, Step, Subject
from gradcombine.verify.check.standard import Standard

CUTS = 2
"""Number of points at which a step is cut off; the earliest ones."""


def before_update(case: Case) -> Iterator[tuple[Standard, list[int]]]:
    """Yields the step up to the gradients that reach the optimizer, for all cuts that predict the result.

    Each comes with the leaves of the state that differ, but do not depend on these gradients, such as running
    statistics. Cuts without such leaves come first.
    """
    for module in observers(case.standard.subject):
        yield from module.before_update(case)
    partial_cuts = list[tuple[Callable[[], Standard], list[int]]]()
    for cuts in _cuts(case.standard, case.split):
        for length, others in _that_predict(case, cuts):
            measure = partial(_up_to, case.standard, length, cuts.one.inside)
            if others:
                partial_cuts.append((measure, others))
            else:
                yield from _measured(measure, others)
    for measure, others in sorted(partial_cuts, key=lambda x: len(x[1])):
        yield from _measured(measure, others)


def observers(subject: Subject) -> Iterator[ModuleType]:
    """Yields the module that observes optimizers while the step runs: PyTorch's, or those of Keras on TensorFlow."""
    if subject.framework == "torch":
        yield import_module("gradcombine.verify.check.torch_steps")
    elif subject.framework != "jax" and keras_on_tensorflow() is not None:
        yield import_module("gradcombine.verify.check.keras_steps")


def keras_on_tensorflow() -> Any:
    """Returns the module if the user's program has imported it with this backend, else None."""
    keras = sys.modules.get("keras")
    return keras if keras is not None and keras.backend.backend() == "tensorflow" else None


def _measured(measure: Callable[[], Standard], others: list[int]) -> Iterator[tuple[Standard, list[int]]]:
    """Yields the standard of a cut, which takes many runs, unless the cut cannot be run."""
    with suppress(NotWide, ValueError):
        yield measure(), others


def _that_predict(case: Case, cuts: Cuts) -> Iterator[tuple[int, list[int]]]:
    """Yields the length of each cut that predicts the result, and the leaves of the state that differ beside it."""
    subject, one, divided = case.standard.subject, cuts.one, cuts.divided
    try:
        values, divided_values = (subject.floats_of(x.values(), subject.batch, case.wide) for x in (one, divided))
    except Exception:  # the step cannot be run like this
        return
    for length in cuts.lengths:
        counterparts = dict(zip(one.inputs(length), divided.inputs(length), strict=True))
        if all(np.array_equal(values[i], divided_values[j]) for i, j in counterparts.items()):
            continue
        replaced = [divided_values[counterparts[i]] if i in counterparts else x for i, x in enumerate(values)]
        chosen = np.array([i in counterparts for i in range(len(values))])
        try:
            predicted = subject.run(ONE_BATCH, (subject.batch, replaced, chosen), case.wide, one.rest).floats
            if (others := unpredicted(case, predicted)) is not None:
                yield length, others
        except (NotWide, ValueError):
            continue


def unpredicted(case: Case, predicted: Floats) -> list[int] | None:
    """Returns the leaves of the state that gradients do not move, and that differ; None if others differ, too."""
    standard, count = case.standard, len(case.standard.subject.param_leaves)
    moved = np.flatnonzero(standard.shares(predicted, standard.best.floats, case.wide)[:count] > 1).tolist()
    accounted = next((x for x in (range(count), moved) if case.accounts_for(predicted, 1, x)), None)
    return None if accounted is None else [i for i in range(count) if i not in accounted]


def updated_in_sequence(
    case: Case, batches: Sequence[Sequence[int]], weights: Sequence[float]
) -> Iterator[list[np.ndarray]]:
    """Yields the change of the parameters by one update per microbatch, for the earliest cuts of one batch's program.

    Each update uses the gradient of its microbatch, at the parameters after the last update, times its weight.

    Raises:
      Exception: of any type, if the step cannot be traced by JAX, or not run like this.
    """
    subject, one = case.standard.subject, case.standard.recorded(ONE_BATCH, False)
    start = subject.start
    for length in _gradients(one, [x.shape for _, x in subject.param_leaves]):
        indices, state, counts = one.inputs(length), start, None
        for rows, weight in zip(batches, weights, strict=True):
            batch = subject.rows(rows)
            values = [array_of(x) for x in subject.call(one.values(), batch, case.wide, start=state, counts=counts)[0]]
            chosen = np.array([i in indices for i in range(len(values))])
            replaced = [np.asarray(x * weight if y else x) for x, y in zip(values, chosen, strict=True)]
            arguments = (batch, replaced, chosen), case.wide, one.rest
            result = subject.run(ONE_BATCH, *arguments, start=state, counts=counts)
            state = [changed(x, y) for x, y in zip(state, result.floats, strict=False)]
            counts = result.integers
        yield [change(x, y) for x, y in zip(state, start, strict=True)]


def _gradients(one: Recorded, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Returns numbers of last operations whose inputs have the shapes of the parameters, without their moments.

    Moments have the same shapes, so a state has a multiple of them. Numbers in a state, such as a rate, are ignored if
    there is no such length with them.
    """
    by_inputs: dict[tuple[int, ...], int] = {}
    for least in (0, 1):
        counts = Counter(shape for shape in shapes if len(shape) >= least)
        common = gcd(*counts.values())
        wanted = [Counter({x: n // d for x, n in counts.items()}) for d in range(1, common + 1) if common % d == 0]
        for length in range(len(one.operations), 0, -1) if not by_inputs else ():
            inputs = one.inputs(length)
            if Counter(shape for shape in one.shapes(inputs) if len(shape) >= least) in wanted:
                by_inputs.setdefault(inputs, length)
    return list(by_inputs.values())[:CUTS]


HIDDEN = 16
"""Least difference of gradients, in units of rounding, at which a step that hides it (Adam's first one) is examined."""


def hidden_by_update(standard: Standard, split: Split) -> Iterator[tuple[Standard, bool]]:
    """Yields the step up to gradients at the optimizer that differ beyond rounding, for the earliest cuts.

    Each comes with whether the optimizer may begin with a division of the gradients by a computed number.
    """
    subject = standard.subject
    for module in observers(subject):
        yield from module.hidden_by_update(standard, split)
    if standard.gradient_examined:
        return
    for cuts in _cuts(standard, split):
        yield from _hidden(standard, split, cuts)


def _hidden(standard: Standard, split: Split, cuts: Cuts) -> Iterator[tuple[Standard, bool]]:
    # In a narrow dtype, rounding would look like a difference.
    wide = standard.wide is not None and standard.unit > FLOAT32_UNIT
    subject, one, divided = standard.subject, cuts.one, cuts.divided
    lengths = [*dict.fromkeys([*cuts.lengths[:CUTS], *cuts.complete[:1]])]
    standard.gradient_examined = False
    if not lengths:
        return
    try:
        indices, divided_indices = (x.inputs(*lengths) for x in (one, divided))
        functions = [x.values(*lengths) for x in (one, divided)]
        values, divided_values = (subject.floats_of(x, subject.batch, wide) for x in functions)
        noise_of = [perturbation(seed, 2 * (UNIT64 if wide else standard.unit)) for seed in range(SAMPLES)]
        perturbed = [subject.floats_of(functions[0], subject.batch, wide, x) for x in noise_of]
    except Exception:  # the step cannot be traced, or not run like this
        return
    standard.gradient_examined = bool(cuts.complete)
    columns = zip(*perturbed, values, strict=True)
    noise = [TIMES * max(float(np.linalg.norm(x - y)) for x in column) for *column, y in columns]
    for length in lengths:
        at = [indices.index(i) for i in one.inputs(length)]
        first = [values[i] for i in at]
        second = [divided_values[divided_indices.index(i)] for i in divided.inputs(length)]
        if not are_far(first, second, [noise[i] for i in at], HIDDEN * min(standard.unit, FLOAT32_UNIT)):
            continue
        try:
            inner = _up_to(standard, length, one.inside)
        except GradCombineError:  # gradients that are not finite, with or without perturbation
            standard.gradient_examined = False
            return
        if not are_different(inner, split):
            continue
        yield inner, any(divided.may_rescale(i, length) for i in divided.inputs(length))


def are_different(inner: Standard, split: Split) -> bool:
    """Whether the gradients of a division differ from those of one batch by more than their rounding bound."""
    batch = inner.subject.batch
    return inner.distance(split, batch, inner.subject.run(split, batch)) > 1


def are_far(a: Sequence[np.ndarray], b: Sequence[np.ndarray], noise: Sequence[float], threshold: float) -> bool:
    """Whether a leaf differs by more than a relative threshold plus noise; ignores leaves that are 0 up to rounding."""
    sizes = [np.linalg.norm(x) for x in a]
    rows = zip(a, b, sizes, noise, strict=True)
    return any(z > threshold * max(sizes) and np.linalg.norm(x - y) > threshold * z + e for x, y, z, e in rows)


def _lengths(one: Recorded, divided: Recorded, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Returns candidate numbers of last operations that form the optimizer.

    Candidates whose inputs have the shapes of the parameters come first, and larger numbers before smaller ones. Inside
    of a shard_map, a sum over devices is another function for another number of them, and ends the optimizer.
    """
    pairs = zip(one.operations[::-1], divided.operations[::-1], strict=False)
    sums = EQUALIZING if one.inside else ()
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] and pair[0][0] not in sums, pairs))
    by_inputs: dict[tuple[int, ...], int] = {}
    for length in range(common, 0, -1):
        inputs = one.inputs(length)
        if inputs and one.shapes(inputs) == divided.shapes(divided.inputs(length)):
            by_inputs.setdefault(inputs, length)
    # Optimizers of groups of parameters use them in another order.
    return sorted(by_inputs.values(), key=lambda length: sorted(one.shapes(one.inputs(length))) != sorted(shapes))


def _up_to(standard: Standard, length: int, inside: bool) -> Standard:
    """Measures the step that ends before its last operations and returns their inputs."""

    def make_step(microbatches: int, devices: int = 1) -> Callable[[Tree, Tree], Tree]:
        return Recorded(standard.subject, Split(microbatches, devices), inside).values(length)

    return measured_once(standard, (length, inside), make_step)


def measured_once(standard: Standard, cut: Hashable, make_step: Callable[..., Step]) -> Standard:
    """Measures the step up to a cut, once for all divisions."""
    if cut not in standard.cuts:
        subject = standard.subject
        inner = Subject(make_step, subject.params, subject.batch, returns_params=False)
        standard.cuts[cut] = Standard(inner, standard.unit)
    return standard.cuts[cut]


class Cuts(NamedTuple):
    """The recorded steps of one batch and of a division, the `_lengths` of both, and those that use no examples."""

    one: Recorded
    divided: Recorded
    lengths: list[int]
    complete: list[int]


def _cuts(standard: Standard, split: Split) -> Iterator[Cuts]:
    """Yields the cuts of a step, and those inside of shard_map unless one of the others has all examples before it.

    Inside of it, such a cut comes first, otherwise after `CUTS` others. Yields none if the step cannot be traced.
    """
    shapes = [x.shape for _, x in standard.subject.param_leaves]
    if standard.subject.framework not in ("jax", "numpy"):
        return
    for inside in (False, True):
        try:
            one, divided = (standard.recorded(x, inside) for x in (ONE_BATCH, split))
        except Exception:
            return
        lengths, closed = _lengths(one, divided, shapes), min(one.closed(), divided.closed())
        updating = (x for x in sorted(lengths, reverse=True) if one.updates_state(x) and divided.updates_state(x))
        complete = [x for x in updating if x <= closed]
        first = [*lengths[: 0 if inside else CUTS], *complete[:1]]
        yield Cuts(one, divided, [*dict.fromkeys([*first, *lengths])], complete)
        if complete or not (one.maps or divided.maps):
            return

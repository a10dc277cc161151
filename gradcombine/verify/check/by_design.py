"""Predictions that an explanation by design, such as statistics of each microbatch, must make before it is allowed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gradcombine.verify.check.case import Case, Prediction, explained, numbers, split_by
from gradcombine.verify.check.combinations import linear
from gradcombine.verify.check.moves import in_sequence
from gradcombine.verify.check.running import Floats
from gradcombine.verify.check.separate import candidate_weights, separate_results
from gradcombine.verify.check.standard import combined
from gradcombine.verify.check.step_report import Cause


def beside_statistics(case: Case, leaves: Sequence[int], seen: Sequence[int] = ()) -> Iterator[Prediction]:
    """Explains leaves that are not the mean of the microbatches' separate results, although statistics change others.

    Yields nothing if they are a state that moves at each microbatch, such as running statistics. A metric that depends
    on the order of the examples may be such a state outside of the parameters: it is not compared.

    Args:
      leaves: leaves that may differ from one batch.
      seen: leaves that show statistics of the microbatches, from which weights of the microbatches are fitted.
    """
    standard = case.standard
    count = len(standard.subject.param_leaves) if standard.subject.returns_params else 0
    others = leaves = _far(case, None, leaves)
    for _, pieces, floats in separate_results(case):
        if not others:
            return
        for weights in candidate_weights(case, pieces, floats, seen):
            predicted = combined(weights, floats)
            far = _far(case, predicted, leaves)
            moving = [i for i in far if i < count]
            if 0 < len(moving) < count:
                moves = in_sequence(case, moving, [standard.copies(rows) for rows in pieces])
                if moves is not None:
                    for i in moving:
                        predicted[i] = np.sum([x[i] for x in moves], axis=0)
                    far = _far(case, predicted, far)
            others = min(others, far, key=len)
    if not others:
        return
    names = ", ".join(standard.names[i] for i in others[:3])
    text = f"in {names}, beside statistics of the microbatches"
    for cause, detail, predicted in _of_some(case):
        if not _far(case, predicted, others):
            yield Prediction(cause, f"{detail}; {text}")
            return
    if all(i >= count and i not in standard.params for i in others) and _depends_on_order(case, others):
        standard.not_compared = f"{names}, which depends on the order of the microbatches"
        return
    x = explained(case._replace(leaves=tuple(others)), (linear,))
    yield Prediction(Cause.UNEXPLAINED, text) if x is None else x._replace(detail=f"{x.detail}; {text}")


def not_predicted(case: Case, leaves: Sequence[int]) -> str:
    """Names what an explanation by design does not predict: these leaves, or an integer that differs.

    An integer is predicted if it is a sum of the microbatches' counts, a count of calls in the state, or a random key
    (uint32) where all floats are equal.
    """
    standard, alone = case.standard, case.shares().max(initial=0) <= 1
    names, divided = [standard.names[i] for i in leaves], case.native.integers
    subject, one, more = standard.subject, standard.native, case.split.microbatches - 1
    start = [x.astype(np.int64) for x in subject.integers] if subject.returns_params else []
    for i, (name, x, y) in enumerate(zip(one.integer_names, one.integers, divided, strict=True)):
        a, b = x.astype(np.int64), y.astype(np.int64)
        counts_calls = i < len(start) and np.array_equal(b - a, more * (a - start[i]))
        is_key = alone and x.dtype == np.uint32
        if not np.all(a == b) and not is_key and not counts_calls and not _is_counted(case, i, b):
            names.append(name)
    return ", ".join(names)


def _is_counted(case: Case, index: int, total: np.ndarray) -> bool:
    """Whether an integer of the microbatches' separate results, which repeat their examples, has this sum."""
    standard = case.standard
    for pieces in case.partitions.values():
        results = [(len(rows), x.integers[index]) for rows in pieces if (x := standard.repeated(rows)) is not None]
        parts = [n * x.astype(np.int64) for n, x in results]
        if len(parts) == len(pieces) and np.array_equal(sum(parts), standard.examples * total):
            return True
    return False


def _of_some(case: Case) -> Iterator[tuple[Cause, str, Floats]]:
    """Yields the sum of the microbatches' separate results, and each of them."""
    for name, pieces, floats in separate_results(case):
        text = f"the sum of the results of the {len(pieces)} microbatches{split_by(name)}"
        yield Cause.SUM, text, combined(np.ones(len(pieces)), floats)
        for rows, result in zip(pieces, floats, strict=True):
            yield Cause.LOST, f"the result of examples {numbers(rows)} alone", result


def _far(case: Case, predicted: Floats | None, leaves: Sequence[int]) -> list[int]:
    """Returns the leaves of a division's result that differ from a prediction, or one batch, by more than rounding."""
    shares = case.shares(predicted, sides=3)
    return [i for i in leaves if shares[i] > 1]


def _depends_on_order(case: Case, leaves: Sequence[int]) -> bool:
    """Whether these leaves of a division change if the examples are reversed."""
    result = case.standard.in_reverse(case.split, case.wide)
    return result is not None and len(_far(case, result.floats, leaves)) == len(leaves)

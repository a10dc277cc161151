"""Why a division does not give what one batch gives: what each known defect would give is computed, and compared.

A hypothesis is accepted where it accounts for the whole difference: what it predicts is within rounding of what the
division gives, in float64 where the step runs in it. None of them is a guess; what no hypothesis accounts for stays
unexplained.

Most are linear. The gradient of one batch is ``sum_e c_e g_e`` over its examples, with weights ``c_e`` that add up to 1
and are found by least squares; of a division that has lost an example its ``x_e`` is 0, of a mean of means the ``x_e``
add up to the same in each microbatch, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from gradcombine.verify.microbatches.causes import Cause
from gradcombine.verify.microbatches.combination import NARROW
from gradcombine.verify.steps.measure import SAME, Floats, Standard
from gradcombine.verify.steps.running import WHOLE, NotWide, Result, Rows, Split, as_floats, widened

Answer: TypeAlias = "tuple[Cause, str]"


class Case(NamedTuple):
    """A division that differs.

    Attributes:
      split: the division.
      result: what it gave, in float64 where there is such a result.
      own: the same in its own precision.
      wide: whether the result is in float64.
    """

    split: Split
    result: Result
    own: Result
    wide: bool


def explain(standard: Standard, case: Case) -> Answer:
    """The cause of a difference, and figures."""
    return next(_answers(standard, case), (Cause.UNEXPLAINED, _far(standard, case)))


def _answers(standard: Standard, case: Case) -> Iterator[Answer]:
    yield from _counted(standard, case)
    if case.wide and standard.shares(case.result.floats, standard.best.floats, wide=True).max() <= 1:
        yield Cause.PRECISION, "in float64 it equals one batch: its own additions round by more than one batch's do"
        return
    if standard.depends_on_places:
        yield from _random(standard, case)
        return
    yield from _added(standard, case)
    yield from _microbatches(standard, case)
    yield from _linear(standard, case)
    yield from _moved(standard, case)
    yield from _ignored(standard, case)
    yield from _scattered(standard, case)
    yield from _narrow(standard, case)


def _far(standard: Standard, case: Case) -> str:
    shares = standard.shares(case.result.floats, standard.best.floats, case.wide)
    worst = int(shares.argmax())
    kind = "float64" if case.wide else "its own precision"
    return f"{shares[worst]:.3g} times what rounding allows, in {kind}, in {standard.subject.names[worst]}"


def partitions(examples: int, split: Split) -> dict[str, list[Rows]]:
    """The ways to divide examples that steps use, by what they are called."""
    k, devices = split
    rows = np.arange(examples)
    made: dict[str, list[np.ndarray]] = {"neighbours": _chunks(rows, k)}
    if examples % k:
        made["as numpy.array_split divides"] = np.array_split(rows, k)
    if k > 1:
        made["every k-th"] = [rows[i::k] for i in range(k)]
    if devices > 1:
        on_each = _chunks(rows, devices)
        made["devices"] = on_each
        made["microbatches of devices"] = [x for block in on_each for x in _chunks(block, k)]
        made["microbatches over devices"] = [
            np.concatenate(x) for x in zip(*(_chunks(block, k) for block in on_each), strict=False)
        ]
        made["devices in microbatches"] = [x for block in _chunks(rows, k) for x in _chunks(block, devices)]
    found: dict[str, list[Rows]] = {}
    for name, pieces in made.items():
        tuples = [tuple(x.tolist()) for x in pieces if len(x)]
        if len(tuples) > 1 and tuples not in found.values():
            found[name] = tuples
    return found


def _chunks(rows: np.ndarray, count: int) -> list[np.ndarray]:
    size = -(-len(rows) // count)
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _accounts(
    standard: Standard, case: Case, predicted: Floats, terms: float, leaves: Sequence[int] | None = None
) -> bool:
    """Whether a prediction is within rounding of the result, and much nearer to it than one batch is.

    Args:
      terms: how many results it is made of, by the sum of their coefficients.
      leaves: those that it is about; None: all.
    """
    chosen = np.arange(len(predicted)) if leaves is None else np.array(leaves)
    near = standard.shares(case.result.floats, predicted, case.wide, 2 + terms)[chosen]
    far = standard.shares(case.result.floats, standard.best.floats, case.wide, 2 + terms)[chosen]
    return bool(near.max(initial=0) <= 1 and far.max(initial=0) >= 4 * near.max(initial=0) and far.max(initial=0) > 1)


# --- what needs no examples ---


def _counted(standard: Standard, case: Case) -> Iterator[Answer]:
    """Integers of the result, as counts of steps are."""
    for a, b in zip(standard.own.integers, case.own.integers, strict=True):
        if a.shape == b.shape and np.any(a != b):
            at = np.unravel_index(np.argmax(a != b), a.shape)
            yield Cause.COUNTED, f"an integer of the result is {b[at]} in place of {a[at]}"
            return


def _random(standard: Standard, case: Case) -> Iterator[Answer]:
    """Copies of one microbatch: with one key for all of them they give what fewer copies give."""
    subject, k = standard.subject, case.split.microbatches
    size = subject.examples // k if subject.examples % k == 0 else 1
    first = list(range(size))
    others = [x for x in (WHOLE, Split(2), Split(k + 1)) if x.microbatches != k]
    made = subject.divided(case.split, subject.rows(first * (k * case.split.devices)))
    for other in others:
        try:
            copies = subject.divided(other, subject.rows(first * other.microbatches))
        except ValueError:
            continue
        if standard.shares(made.floats, copies.floats, wide=False).max() <= 1:
            text = (
                f"{k} copies of a microbatch give what {other.microbatches} give: no other numbers are drawn for them"
            )
            yield Cause.KEY, text
            return
    yield Cause.RANDOM, "so divisions cannot be compared; keys that belong to the examples can be"


def _added(standard: Standard, case: Case) -> Iterator[Answer]:
    """The parameters themselves, as decay gives them."""
    one, names = standard.best.floats, standard.subject.names
    params = [(path, as_floats(x)) for path, x in standard.subject.param_leaves]
    if [x.shape for x in one] == [x.shape for _, x in params]:
        matched = dict(enumerate(x for _, x in params))
    else:
        matched = {
            i: p
            for i, (name, x) in enumerate(zip(names, one, strict=True))
            for path, p in params
            if name.endswith(path) and p.shape == x.shape
        }
    shares, allowed = standard.shares(case.result.floats, one, case.wide), standard.allowed(case.wide)
    differ = [i for i, share in enumerate(shares) if share > 1]
    if not all(i in matched and np.any(matched[i]) for i in differ):
        return
    off = np.concatenate([(case.result.floats[i] - one[i]).ravel() / allowed[i] for i in differ])
    p = np.concatenate([matched[i].ravel() / allowed[i] for i in differ])
    factor = float(off @ p / (p @ p))
    added = [x + factor * matched[i] if i in differ else x for i, x in enumerate(one)]
    if _accounts(standard, case, added, 1):
        every = "" if len(differ) == len(names) else f", in {len(differ)} of {len(names)} leaves"
        yield Cause.ADDED, f"{factor:.6g} times the parameters{every}"


def _moved(standard: Standard, case: Case) -> Iterator[Answer]:
    """One update after the other."""
    subject = standard.subject
    if not subject.returns_params:
        return
    start = [widened(x) for _, x in subject.param_leaves]
    for name, pieces in partitions(subject.examples, case.split).items():
        for factor, text in ((1.0, ""), (1 / len(pieces), " of a part of its length")):
            moved = [np.zeros_like(x) for x in standard.best.floats]
            at = list(start)
            try:
                for rows in pieces:
                    batch = subject.rows(rows)
                    made = subject.wide(WHOLE, batch, start=at) if case.wide else subject.run(WHOLE, batch, start=at)
                    moved = [x + factor * y for x, y in zip(moved, made.floats, strict=True)]
                    at = [x + y.reshape(x.shape) for x, y in zip(start, moved, strict=True)]
            except (NotWide, ValueError):
                continue
            if _accounts(standard, case, moved, len(pieces)):
                yield Cause.MOVED_EACH, f"{len(pieces)} updates{text}, one after the other, give it{_of(name)}"
                return


# --- what is a combination of microbatches ---


def _microbatches(standard: Standard, case: Case) -> Iterator[Answer]:
    """The mean of what one batch makes of each microbatch, where it makes something else of all."""
    n = standard.subject.examples
    if len(standard.combination[1]) == len(standard.subject.names):
        return
    for name, pieces in partitions(n, case.split).items():
        parts = [standard.one(rows) for rows in pieces]
        if any(part is None for part in parts):
            continue
        floats = [part.floats for part in parts if part is not None]
        sizes = np.array([len(rows) for rows in pieces]) / n
        for weights in (np.full(len(pieces), 1 / len(pieces)), sizes, np.ones(len(pieces))):
            if not _accounts(standard, case, _combined(weights, floats), float(weights.sum())):
                continue
            norm = _one_norm([standard.best.floats, *floats, *(x.floats for x in standard.columns() if x is not None)])
            if norm is not None:
                yield Cause.CHANGED_BEFORE, f"several microbatches or examples have {norm}{_of(name)}"
            else:
                text = f"it is the mean of what each microbatch gives by itself, as it should be{_of(name)}"
                yield Cause.STATISTICS, text
            return


def _one_norm(results: Sequence[Floats]) -> str | None:
    """The norm, or the largest element, that the longest results have in common."""
    norms = [float(np.sqrt(sum(float(np.sum(np.square(x))) for x in floats))) for floats in results]
    highest = [max(float(np.abs(x).max(initial=0)) for x in floats) for floats in results]
    for values, text in ((norms, "a norm of {:.6g}"), (highest, "a largest element of {:.6g}")):
        top = max(values)
        if top > 0 and sum(x >= top * (1 - 1e-5) for x in values) > 1:
            return text.format(top)
    return None


# --- what is a combination of examples ---


def _linear(standard: Standard, case: Case) -> Iterator[Answer]:
    c, leaves = standard.combination
    if c is None:
        return
    columns = [None if x is None else x.floats for x in standard.columns()]

    def accounts(x: np.ndarray) -> bool:
        used = [(a, floats) for a, floats in zip(x, columns, strict=True) if floats is not None]
        predicted = _combined(np.array([a for a, _ in used]), [floats for _, floats in used])
        return _accounts(standard, case, predicted, float(np.abs(x).sum()), leaves)

    some = "" if len(leaves) == len(standard.subject.names) else f"; seen in {len(leaves)} leaves that are means"
    for cause, detail, x in _combinations(standard, case, c):
        if accounts(x):
            yield cause, detail + some
            return
    yield from _padded(standard, case, c)


def _combinations(standard: Standard, case: Case, c: np.ndarray) -> Iterator[tuple[Cause, str, np.ndarray]]:
    """What each known combination would make of the weights of the units."""
    units = standard.units()
    whole = np.concatenate(
        [standard.best.floats[i].ravel() / standard.allowed(False)[i] for i in standard.combination[1]]
    )
    result = np.concatenate(
        [case.result.floats[i].ravel() / standard.allowed(False)[i] for i in standard.combination[1]]
    )
    factor = float(result @ whole / (whole @ whole)) if whole.any() else 0.0
    k, devices = case.split
    for count, name in ((k, "microbatches"), (devices, "devices"), (k * devices, "microbatches of all devices")):
        if count > 1:
            yield Cause.SUM, f"{count} times the mean: the number of {name}", c * count
    n = standard.subject.examples
    for filled in {n + (-n % k), n + (-n % (k * devices))} - {n}:
        yield Cause.PLACEHOLDERS, f"{filled - n} rows that fill up the last microbatch are counted", c * n / filled
    yield Cause.SCALED, f"by {factor:.6g}", c * factor
    divided = {
        name: [_in(units, rows) for rows in pieces]
        for name, pieces in partitions(standard.subject.examples, case.split).items()
    }
    divided = {name: [p for p in pieces if p.any()] for name, pieces in divided.items()}
    for name, pieces in divided.items():
        yield Cause.MEAN_OF_MEANS, _weights([float(c @ p) for p in pieces]) + _of(name), _mean_of_means(c, pieces)
    for pieces in divided.values():
        for piece in pieces:
            for kept in (1 - piece, piece):
                if 0 < c @ kept < c.sum() and len(pieces) > 1:
                    lost = _named(units, kept == 0)
                    yield Cause.LOST, f"{lost}, divided by the rest", c * kept / (c @ kept)
                    yield Cause.LOST, f"{lost}, divided by all", c * kept
            more = 1 + piece
            yield Cause.DOUBLED, _named(units, piece > 0), c * more / (c @ more)
    x = standard.fitted(case.result, case.wide)
    if x is not None:
        yield from _levels(standard, case, c, x, divided)


def _levels(
    standard: Standard, case: Case, c: np.ndarray, x: np.ndarray, divided: dict[str, list[np.ndarray]]
) -> Iterator[tuple[Cause, str, np.ndarray]]:
    """What fitted coefficients say, beside the weights."""
    units, real = standard.units(), np.abs(c) > 1e-6 * np.abs(c).max()
    if np.any(np.abs(x[~real]) > SAME * np.abs(c).max()):
        rows = _named(units, ~real & (np.abs(x) > SAME * np.abs(c).max()))
        yield Cause.PLACEHOLDERS, f"{rows} weigh nothing in one batch", x
        return
    r = np.where(real, x / np.where(real, c, 1), 1)
    kept = r[real & (np.abs(r) > SAME)]
    if not len(kept):
        return
    for unit in {float(np.median(kept)), float(kept.min())}:
        times = np.round(r / unit)
        # Divided by all, or by what is there.
        by_all, by_these = abs(unit - 1) < SAME, abs(float(c[real] @ times[real]) * unit - 1) < SAME
        if (
            (by_all or by_these)
            and np.all(np.abs(r / unit - times)[real] < SAME)
            and np.any(times[real] != 1)
            and np.all(times[real] >= 0)
        ):
            lost, twice = _named(units, real & (times == 0)), _named(units, real & (times > 1))
            snapped = np.where(real, c * times * unit, 0)
            if lost:
                yield Cause.LOST, lost + (f"; {twice} count more than once" if twice else ""), snapped
            else:
                yield Cause.DOUBLED, twice, snapped
    for name, pieces in divided.items():
        if all(np.ptp(r[(p > 0) & real]) < SAME * np.abs(r).max() for p in pieces if (p > 0)[real].any()):
            by_place = [float(np.mean(r[(p > 0) & real])) for p in pieces]
            snapped = np.where(real, c * sum(a * (p > 0) for a, p in zip(by_place, pieces, strict=True)), 0)
            places = ", ".join(f"{a:.4g}" for a in by_place)
            if np.ptp(by_place) > SAME and _turned(standard, case, c, by_place, pieces):
                yield Cause.BY_PLACE, f"microbatches count {places} times, in reverse order too{_of(name)}", snapped
            yield Cause.COEFFICIENTS, f"{places} times theirs{_of(name)}", snapped
    yield Cause.COEFFICIENTS, f"from {r[real].min():.4g} to {r[real].max():.4g} times theirs", x


def _turned(
    standard: Standard, case: Case, c: np.ndarray, by_place: Sequence[float], pieces: Sequence[np.ndarray]
) -> bool:
    """Whether the examples in reverse order have the same factors, place by place."""
    subject = standard.subject
    if len(c) != subject.examples:
        return False
    batch = subject.rows(range(subject.examples - 1, -1, -1))
    try:
        result = standard.in_float64(case.split, batch) if case.wide else subject.divided(case.split, batch)
    except NotWide:
        return False
    x = c * sum(a * (p > 0)[::-1] for a, p in zip(by_place, pieces, strict=True))
    columns = [(a, y.floats) for a, y in zip(x, standard.columns(), strict=True) if y is not None]
    predicted = _combined(np.array([a for a, _ in columns]), [y for _, y in columns])
    turned = case._replace(result=result)
    return _accounts(standard, turned, predicted, float(np.abs(x).sum()), standard.combination[1])


def _padded(standard: Standard, case: Case, c: np.ndarray) -> Iterator[Answer]:
    """Rows of zeros that fill up the last microbatch."""
    n, k = standard.subject.examples, case.split.microbatches * case.split.devices
    more = -n % k
    if not more:
        return
    subject = standard.subject
    try:
        zeros = subject.wide(WHOLE, subject.zeros()) if standard.wide else subject.run(WHOLE, subject.zeros())
    except (NotWide, ValueError):
        return
    predicted = [(n * x + more * z) / (n + more) for x, z in zip(standard.best.floats, zeros.floats, strict=True)]
    if _accounts(standard, case, predicted, 2, standard.combination[1]):
        yield Cause.PLACEHOLDERS, f"{more} rows of zeros fill up the last microbatch, and count as examples"


def _ignored(standard: Standard, case: Case) -> Iterator[Answer]:
    """Whether the division depends on an example that one batch ignores, whatever it holds."""
    c, subject, n = standard.weights, standard.subject, standard.subject.examples
    if c is None or len(c) != n or not np.any(c == 0):
        return
    real, ignored = int(np.argmax(c)), int(np.argmax(c == 0))
    for batch in subject.with_row_of(ignored, real):
        whole, other = standard.subject.divided(WHOLE, batch), standard.subject.divided(case.split, batch)
        if (
            standard.shares(whole.floats, standard.own.floats, wide=False).max() <= 1
            and standard.shares(other.floats, case.own.floats, wide=False).max() > 1
        ):
            yield Cause.PLACEHOLDERS, f"one batch ignores what example {ignored} holds, this division does not"
            return


# --- what the elements tell ---


def _scattered(standard: Standard, case: Case) -> Iterator[Answer]:
    """Rows of a leaf that keep one contribution of several."""
    units = len(standard.units())
    c = np.full(units, 1 / units) if standard.weights is None else standard.weights
    groups: list[tuple[str, list[Floats]]] = []
    columns = standard.columns()
    if all(x is not None for x in columns):
        groups.append(
            ("examples", [[a * y for y in x.floats] for a, x in zip(c, columns, strict=True) if x is not None])
        )
    for name, pieces in partitions(standard.subject.examples, case.split).items():
        parts = [standard.one(rows) for rows in pieces]
        if all(x is not None for x in parts):
            sizes = [float(c @ _in(standard.units(), rows)) for rows in pieces]
            groups.append(
                (
                    f"microbatches: {name}",
                    [[a * y for y in x.floats] for a, x in zip(sizes, parts, strict=True) if x is not None],
                )
            )
    shares = standard.shares(case.result.floats, standard.best.floats, case.wide)
    allowed = standard.allowed(case.wide)
    for name, terms in groups:
        found = 0
        for i, share in enumerate(shares):
            if share <= 1:
                continue
            whole, made = standard.best.floats[i], case.result.floats[i]
            if whole.ndim < 2:
                break
            stack = np.stack([term[i] for term in terms]).reshape(len(terms), len(whole), -1)
            off = np.sqrt(np.mean(np.square(made.reshape(len(whole), -1) - whole.reshape(len(whole), -1)), axis=1))
            wrong = off > 4 * allowed[i]
            each = np.sqrt(np.mean(np.square(stack - made.reshape(1, len(whole), -1)), axis=2)).min(axis=0)
            several = (np.abs(stack).max(axis=2) > 0).sum(axis=0) > 1
            if not wrong.any() or wrong.all() or np.any(each[wrong] > 4 * allowed[i]) or not several[wrong].all():
                break
            found += int(wrong.sum())
        else:
            if found:
                yield Cause.SCATTER, f"{found} rows keep one contribution of those of several {name}"
                return


TELLING = 32
"""How many elements have to agree before an accumulator is blamed."""


def _narrow(standard: Standard, case: Case) -> Iterator[Answer]:
    """Additions in a narrow accumulator, by the bits that they leave: in 99 of 100 elements those of the result."""
    subject, allowed = standard.subject, standard.allowed(wide=False)
    made, whole = case.own.floats, standard.best.floats
    far = [i for i, x in enumerate(standard.shares(made, whole, wide=False)) if x > 1]
    for name, pieces in partitions(subject.examples, case.split).items():
        try:
            parts = [subject.run(WHOLE, subject.rows(rows)).floats for rows in pieces]
        except ValueError:
            continue
        for dtype in NARROW:
            for text, terms, divisor in _ways(standard, pieces):
                sums = [_chain([a * x[i] for a, x in zip(terms, parts, strict=True)], dtype) / divisor for i in far]
                hits = sum(_near(made[i], x, allowed[i]) for i, x in zip(far, sums, strict=True))
                total = sum(made[i].size for i in far)
                if total >= TELLING and hits >= 0.99 * total:
                    yield Cause.PRECISION, f"additions in {dtype} give it, {text}{_of(name)}"
                    return
    for dtype in NARROW:
        for times in {1.0, float(case.split.microbatches), *_totals(standard)}:
            values = np.concatenate([made[i].ravel() * times for i in far] or [np.zeros(0)])
            values = values[values != 0]
            rounded = values.astype(np.float32).astype(dtype).astype(np.float64)
            if len(values) >= TELLING and np.mean(np.abs(values - rounded) <= 2**-22 * np.abs(values)) > 0.999:
                yield Cause.PRECISION, f"every element is a {dtype}" + (f" over {times:g}" if times > 1 else "")
                return


def _totals(standard: Standard) -> list[float]:
    """Of how many tokens the examples' weights can be the parts: numbers that make integers of all of them."""
    if standard.likely is None:
        return []
    totals = np.arange(1, 2049)
    parts = totals[:, None] * standard.likely
    return [float(x) for x in totals[np.abs(parts - np.round(parts)).max(axis=1) < 0.02][:3]]


def _ways(standard: Standard, pieces: Sequence[Rows]) -> Iterator[tuple[str, np.ndarray, float]]:
    """Names, factors of the terms, and what their sum is divided by."""
    sizes = np.array([len(x) for x in pieces], np.float64)
    yield "divided at the end", np.ones(len(pieces)), float(len(pieces))
    yield "of parts of the mean", sizes / sizes.sum(), 1.0
    yield "of sums, divided at the end", sizes, float(sizes.sum())
    if standard.likely is not None:
        parts = np.array([standard.likely @ _in(standard.units(), rows) for rows in pieces])
        yield "of parts of the mean", parts, 1.0
        for total in _totals(standard):
            yield "of sums, divided at the end", np.round(parts * total), total


def _chain(terms: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    total = terms[0].astype(np.float32).astype(dtype)
    for term in terms[1:]:
        total = total + term.astype(np.float32).astype(dtype)
    return total.astype(np.float64)


def _near(x: np.ndarray, y: np.ndarray, allowed: float) -> int:
    return int(np.count_nonzero(np.abs(x - y) <= 2 * allowed))


def _combined(weights: np.ndarray, results: Sequence[Floats]) -> list[np.ndarray]:
    return [np.tensordot(weights, np.stack(column), 1) for column in zip(*results, strict=True)]


def _in(units: Sequence[Rows], rows: Rows) -> np.ndarray:
    """The part of each unit that is among these rows."""
    chosen = set(rows)
    return np.array([len(chosen.intersection(unit)) / len(unit) for unit in units])


def _mean_of_means(c: np.ndarray, pieces: Sequence[np.ndarray]) -> np.ndarray:
    weights = [float(c @ p) for p in pieces]
    return sum((c * p / w for p, w in zip(pieces, weights, strict=True) if w), np.zeros_like(c)) / len(pieces)


def _weights(values: Sequence[float]) -> str:
    return f"they weigh from {min(values):.4g} to {max(values):.4g} in one batch"


def _of(partition: str) -> str:
    """A partition in a detail, unless it is the usual one."""
    return "" if partition == "neighbours" else f"; {partition}"


def _named(units: Sequence[Rows], chosen: np.ndarray) -> str:
    rows = [row for unit, yes in zip(units, chosen, strict=True) if yes for row in unit]
    if not rows:
        return ""
    shown = ", ".join(map(str, rows[:6])) + (f" and {len(rows) - 6} more" if len(rows) > 6 else "")
    return f"example{'s' if len(rows) > 1 else ''} {shown}"

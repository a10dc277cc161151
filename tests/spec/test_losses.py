"""Losses as sums and counts have one exact result however sequences are packed, split and replicated."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import losses
from gradcombine.reductions import Ratio, ratio
from tests.spec import exact, modes
from tests.spec.selection import among, pairwise

RNG = np.random.default_rng(0)
LONGEST, NORMALIZER = 8, 16
GROUPS = [i for i, size in enumerate([1, 2, 4, 1, 2, 4, 2, 1, 4, 2, 1, 2, 4, 2, 1, 1, 2, 4]) for _ in range(size)]
LENGTHS = [int(np.random.default_rng(group).choice([1, 2, 4, 8])) for group in GROUPS]
"""Powers of two, like the sizes of groups: numerators are exact, and only the quotient rounds."""
VALUES = [RNG.integers(-64, 64, n).astype(np.float32) / 64 for n in LENGTHS]
EMPTY = [i % 7 == 3 for i in range(len(GROUPS))]
"""Sequences whose tokens are all filtered out, including all samples of some groups."""


def kept() -> list[int]:
    alone = {group for group in GROUPS if GROUPS.count(group) == 1}
    return [i for i in range(len(GROUPS)) if not (EMPTY[i] and GROUPS[i] in alone)]


def mean(values: list[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def tokens(i: int) -> list[Fraction]:
    return [Fraction(float(x)) for x in VALUES[i]]


def of_groups(of: Callable[[list[int]], Fraction]) -> Fraction:
    members = defaultdict[int, list[int]](list)
    for i in kept():
        members[GROUPS[i]].append(i)
    return mean([of(numbers) for numbers in members.values()])


LOSSES: dict[str, tuple[Callable[..., Ratio], Callable[[], Fraction]]] = {
    "token mean": (
        lambda d: losses.token_mean(d["values"], d["mask"]),
        lambda: mean([x for i in kept() for x in tokens(i)]),
    ),
    "token sum over all sequences, filtered ones too": (
        lambda d: losses.token_sum(d["values"], d["mask"], count=d["count"]),
        lambda: sum([x for i in kept() for x in tokens(i)], Fraction(0)) / len(GROUPS),
    ),
    "sequence mean of token mean": (
        lambda d: losses.sequence_mean_of_token_mean(d["values"], d["mask"], d["segments"]),
        lambda: mean([mean(tokens(i)) for i in kept()]),
    ),
    "sequence mean of token sum": (
        lambda d: losses.sequence_mean_of_token_sum(d["values"], d["mask"], d["segments"]),
        lambda: mean([sum(tokens(i), Fraction(0)) for i in kept()]),
    ),
    "sequence mean of token sum, normalized": (
        lambda d: losses.sequence_mean_of_token_sum(d["values"], d["mask"], d["segments"], NORMALIZER),
        lambda: mean([sum(tokens(i), Fraction(0)) / NORMALIZER for i in kept()]),
    ),
    "group mean": (
        lambda d: losses.group_mean(d["values"], d["groups"], d["mask"], d["segments"]),
        lambda: of_groups(lambda numbers: mean([mean(tokens(i)) for i in numbers])),
    ),
    "group mean of tokens": (
        lambda d: losses.group_mean(d["values"], d["groups"], d["mask"], d["segments"], of="tokens"),
        lambda: of_groups(lambda numbers: mean([x for i in numbers for x in tokens(i)])),
    ),
}


def microbatch(numbers: list[int], rows: int, packed: bool) -> dict[str, Any]:
    """Arrays of these sequences, NaN at tokens that do not count."""
    length = 2 * LONGEST if packed else LONGEST
    placed = losses.pack([LENGTHS[i] for i in numbers], length) if packed else [[j] for j in range(len(numbers))]
    values = np.full((rows, length), np.nan, np.float32)
    mask, segments = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
    groups = np.zeros((rows, length) if packed else rows, np.int32)
    for row, held in enumerate(placed):
        at = 0
        for segment, j in enumerate(held):
            i = numbers[j]
            here = slice(at, at := at + LENGTHS[i])
            counts = i in kept()
            values[row, here] = VALUES[i] if counts else np.nan
            mask[row, here], segments[row, here] = counts, segment + 1
            groups[(row, here) if packed else row] = GROUPS[i]
    segments = segments if packed else None
    return {"values": values, "mask": mask, "segments": segments, "groups": groups, "count": np.int32(len(numbers))}


def divided(parts: int, packed: bool) -> list[dict[str, Any]]:
    dealt = losses.deal(LENGTHS, GROUPS, parts)
    losses.require_whole([[GROUPS[i] for i in part] for part in dealt])
    rows = max(1, *map(len, dealt))
    return [microbatch(part, rows, packed) for part in dealt]


def all_of_them(env: modes.Env, data: Any) -> Any:
    return {name: tuple(loss(data)) for name, (loss, _) in LOSSES.items()}


def expected() -> dict[str, float]:
    return {name: float(exact.round_to(truth())) for name, (_, truth) in LOSSES.items()}


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", among((), ["numpy", "jax_eager", "jax_jit", "tf_eager", "tf_function", "tf_xla"]))
def test_no_division_changes_a_loss(name: str, packed: bool) -> None:
    for microbatches in (1, 3, 16):
        contributions = [modes.get(name).run(all_of_them, [data])[0] for data in divided(microbatches, packed)]
        for loss, truth in expected().items():
            value = gc.combine(ratio(), [Ratio(*part[loss]) for part in contributions])
            assert float(value) == truth, (loss, microbatches)


def reduced(env: modes.Env, data: Any) -> Any:
    return {name: gc.all_reduce(ratio(), loss(data), over=env.collective) for name, (loss, _) in LOSSES.items()}


@pairwise(2, "name", "replicas", "packed")
@pytest.mark.parametrize("replicas", [2, 1, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", among((), modes.EXCHANGING))
def test_no_number_of_replicas_changes_a_loss(name: str, packed: bool, replicas: int) -> None:
    for results in modes.get(name).run(reduced, divided(replicas, packed)):
        assert {loss: float(x) for loss, x in results.items()} == expected()


SEQUENCES = [RNG.normal(size=n).astype(np.float32) for n in RNG.integers(0, 24, 61)]
"""Sequences of any lengths, including 0."""
HORIZON = 24


def of_sequences(each: Callable[[np.ndarray], float]) -> float:
    """The float64 mean over the sequences that have a token."""
    return math.fsum(each(x.astype(np.float64)) for x in SEQUENCES if x.size) / sum(x.size > 0 for x in SEQUENCES)


ALL = math.fsum(float(x) for sequence in SEQUENCES for x in sequence)
MODES: dict[str, tuple[Callable[..., Ratio], float]] = {
    "token-mean": (
        lambda x, mask, segments, rows: losses.token_mean(x, mask),
        ALL / sum(x.size for x in SEQUENCES),
    ),
    "sequence-mean-token-mean": (
        lambda x, mask, segments, rows: losses.sequence_mean_of_token_mean(x, mask, segments),
        of_sequences(lambda x: math.fsum(x) / x.size),
    ),
    "seq-mean-token-sum": (
        lambda x, mask, segments, rows: losses.sequence_mean_of_token_sum(x, mask, segments),
        of_sequences(math.fsum),
    ),
    "sequence-mean-token-scale": (
        lambda x, mask, segments, rows: losses.sequence_mean_of_token_sum(x, mask, segments, normalizer=HORIZON),
        of_sequences(lambda x: math.fsum(x) / HORIZON),
    ),
    "sequence-mean-token-sum-norm": (
        lambda x, mask, segments, rows: losses.token_sum(x, mask, count=rows),
        ALL / len(SEQUENCES),
    ),
}
"""Losses by their names in Tunix' ``aggregate_loss``; verl has the first, and the next three as "seq-mean-token-mean",
"seq-mean-token-sum" and "seq-mean-token-sum-norm"."""


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("microbatches", range(1, 17))
@pytest.mark.parametrize("name", MODES)
def test_modes_of_other_libraries(name: str, microbatches: int, packed: bool) -> None:
    """The float64 reference rounded to float32 has exactly the expected bits."""
    loss, truth = MODES[name]
    lengths, parts = [x.size for x in SEQUENCES], []
    for numbers in losses.deal(lengths, range(len(SEQUENCES)), microbatches):
        rows = losses.pack([lengths[i] for i in numbers], 2 * HORIZON) if packed else [[j] for j in range(len(numbers))]
        values, segments = np.zeros((len(rows), 2 * HORIZON)), np.zeros((len(rows), 2 * HORIZON), int)
        for row, held in enumerate(rows):
            at = 0
            for segment, i in enumerate(numbers[j] for j in held):
                here = slice(at, at := at + lengths[i])
                values[row, here], segments[row, here] = SEQUENCES[i], segment + 1
        parts.append(loss(values, segments > 0, segments if packed else None, len(numbers)))
    assert np.float32(gc.combine(ratio(), parts)) == np.float32(truth)


def test_lengths_of_any_size_are_right_to_rounding() -> None:
    """Compares with a float64 loop over tokens."""
    rng = np.random.default_rng(1)
    values, mask = rng.normal(size=(9, 31)), rng.random((9, 31)) < 0.6
    mask[4] = False
    groups = np.array([5, 0, 5, 5, 8, 0, 2, 2, 2])
    rows = [i for i in range(9) if mask[i].any()]
    means = {i: values[i][mask[i]].mean() for i in rows}
    by_group = [[i for i in rows if groups[i] == g] for g in (5, 0, 2)]
    cases = [
        (losses.token_mean(values, mask), values[mask].mean()),
        (losses.sequence_mean_of_token_mean(values, mask), np.mean([*means.values()])),
        (losses.sequence_mean_of_token_sum(values, mask), np.mean([values[i][mask[i]].sum() for i in rows])),
        (losses.group_mean(values, groups, mask), np.mean([np.mean([means[i] for i in of]) for of in by_group])),
    ]
    for received, truth in cases:
        assert received.numerator.dtype == np.float64
        np.testing.assert_allclose(gc.combine(ratio(), [received]), truth, rtol=1e-14)


@pytest.mark.full
@pytest.mark.needs("jax")
def test_what_does_not_count_has_no_gradient() -> None:
    import jax

    data = divided(1, True)[0]
    for name, (loss, _) in LOSSES.items():
        grads = jax.grad(lambda v, loss=loss: loss(data | {"values": v}).numerator)(data["values"])
        assert np.isfinite(grads).all() and not np.any(np.asarray(grads)[data["mask"] == 0]), name
        assert np.all(np.asarray(grads)[data["mask"] == 1] > 0), name


@pytest.mark.needs("jax")
def test_traced_masks_and_ids_out_of_range_make_the_numerator_nan() -> None:
    import jax

    values, ids = np.ones((1, 4), np.float32), np.array([[1, 1, 5, 2]])
    bad = jax.jit(lambda ids: losses.sequence_mean_of_token_mean(values, segments=ids))(ids)
    assert np.isnan(bad.numerator)
    assert np.isnan(jax.jit(lambda g: losses.group_mean(values, g))(np.array([-1])).numerator)
    for mask in ([[1, 0.5, 1, 1]], [[0, 0, 0, -1e9]], [[0, np.nan, 1, 1]]):
        assert np.isnan(jax.jit(losses.token_mean)(values, np.float32(mask)).numerator)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "float16", "bfloat16", "float32"])
def test_masks_of_any_dtype(dtype: str) -> None:
    mask = np.array([[1, 0, 1]]).astype(np.dtype(dtype))
    assert losses.token_mean(np.float32([[3, np.nan, 5]]), mask) == (8, 2)


@pytest.mark.needs("tensorflow")
def test_a_batch_of_unknown_size() -> None:
    import tensorflow as tf

    spec = [
        tf.TensorSpec([None, LONGEST], tf.float32),
        tf.TensorSpec([None, LONGEST], tf.int32),
        tf.TensorSpec([None], tf.int32),
    ]

    @tf.function(input_signature=spec)
    def loss(values: Any, mask: Any, groups: Any) -> Any:
        return losses.group_mean(values, groups, mask)

    data = divided(1, False)[0]
    received = loss(*map(tf.constant, (data["values"], data["mask"], data["groups"])))
    assert float(gc.combine(ratio(), [received])) == expected()["group mean"]


def test_nothing_at_all_is_zero() -> None:
    values, none = np.full((2, 3), np.nan, np.float32), np.zeros((2, 3), bool)
    for received in (
        losses.token_mean(values, none),
        losses.sequence_mean_of_token_mean(values, none),
        losses.sequence_mean_of_token_sum(values, none),
        losses.group_mean(values, np.zeros(2, int), none),
    ):
        assert (received.numerator, received.denominator) == (0, 0)
        assert gc.combine(ratio(), [received]) == 0


ONES = np.ones((2, 3), np.float32)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a mask of another shape": (
        lambda: losses.token_mean(ONES, np.ones(3)),
        "token_mean: expected mask of numbers or bools",
    ),
    "weights as a mask": (lambda: losses.token_mean(ONES, 0.5 * ONES), "a mask of bools, floats of 0 or 1"),
    "a mask that is added to logits": (
        lambda: losses.token_mean(ONES, np.float32([[0, 0, -np.inf]] * 2)),
        "received -inf",
    ),
    "labels as a mask": (lambda: losses.token_mean(ONES, np.array([[7, 3, -100]] * 2)), "received -100"),
    "values of integers": (lambda: losses.token_mean(np.ones((2, 3), int)), "a real float dtype"),
    "a scalar": (lambda: losses.token_mean(np.float32(1)), "of shape (..., T)"),
    "no arrays": (lambda: losses.token_mean([[1.0]]), "arrays of NumPy, JAX or TensorFlow"),
    "segments of floats": (lambda: losses.sequence_mean_of_token_mean(ONES, segments=ONES), "segments of integers"),
    "a segment beyond": (
        lambda: losses.sequence_mean_of_token_mean(ONES, segments=np.full((2, 3), 4)),
        "from 0 to 3, received 4",
    ),
    "a negative segment": (
        lambda: losses.sequence_mean_of_token_mean(ONES, segments=np.full((2, 3), -1)),
        "received -1",
    ),
    "a negative group": (
        lambda: losses.group_mean(ONES, np.array([0, -7])),
        "groups from 0 to 2147483646, received -7",
    ),
    "groups of another shape": (
        lambda: losses.group_mean(ONES, np.zeros(3, int)),
        "groups of integers of shape (2, 3)",
    ),
    "a number as groups": (
        lambda: losses.group_mean(ONES, 5),
        "groups of integers of shape (2, 3), received int32 of shape ()",
    ),
    "a mean of what": (lambda: losses.group_mean(ONES, np.zeros(2, int), of="rows"), "of 'sequences' or 'tokens'"),
    "a normalizer of 0": (lambda: losses.sequence_mean_of_token_sum(ONES, normalizer=0), "a positive normalizer"),
    "a normalizer that is 0 in float32": (
        lambda: losses.sequence_mean_of_token_sum(ONES, normalizer=1e-50),
        "a positive normalizer in the range of float32, received 1e-50",
    ),
    "a normalizer that is infinite in float32": (
        lambda: losses.sequence_mean_of_token_sum(ONES, normalizer=1e300),
        "a positive normalizer in the range of float32, received 1e+300",
    ),
    "a count of rows": (lambda: losses.token_sum(ONES, count=ONES[0]), "leaf .count: expected a weight of shape ()"),
    "tokens that are taken back": (
        lambda: losses.token_sum(-ONES, count=-2),
        "token_sum: leaf .count: expected a finite weight that is not negative, "
        "received -2: a contribution cannot be subtracted",
    ),
    "a sum without tokens": (lambda: losses.token_sum(np.float32(1), count=1), "token_sum: expected values of a real"),
    "a group cut apart": (lambda: losses.require_whole([[1, 2], [3, 2]]), "group 2 in microbatches 0 and 1"),
    "too few groups": (lambda: losses.deal([1, 2], [0], 2), "2 groups, one for each sequence"),
    "no part": (lambda: losses.deal([1], [0], 0), "1 part or more"),
    "a sequence too long": (lambda: losses.pack([9], 8), "sequences of 0 to 8 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_named(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(gc.GradCombineError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize(("parts", "count"), [*product((1, 2, 8, 64), (0, 1, 40))])
def test_groups_are_dealt_whole_and_balanced(parts: int, count: int) -> None:
    rng = np.random.default_rng(count)
    hashes = rng.integers(-(2**63), 2**63 - 1, 12)  # the ids may be any integers
    groups, lengths = hashes[rng.integers(0, 12, count)].tolist(), rng.integers(0, 50, count).tolist()
    dealt = losses.deal(lengths, groups, parts)
    assert len(dealt) == parts and sorted(i for part in dealt for i in part) == [*range(count)]
    losses.require_whole([[groups[i] for i in part] for part in dealt])
    sizes = defaultdict[int, int](int)
    for group, n in zip(groups, lengths, strict=True):
        sizes[group] += n
    held = [sum(lengths[i] for i in part) for part in dealt]
    # The largest and the smallest part differ by at most the last, smallest group.
    assert max(held) - min(held) <= max([0, *sizes.values()])


def test_rows_are_packed_without_cutting() -> None:
    lengths = np.random.default_rng(0).integers(0, 17, 50).tolist()
    rows = losses.pack(lengths, 16)
    assert sorted(i for row in rows for i in row) == [*range(50)]
    assert all(sum(lengths[i] for i in row) <= 16 for row in rows)
    assert len(rows) <= 1.25 * sum(lengths) / 16 + 1


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64, 100])
def test_rows_are_packed_by_first_fit(count: int) -> None:
    lengths = np.random.default_rng(count).integers(0, 17, count).tolist()
    rows: list[list[int]] = []
    for i in sorted(range(count), key=lambda i: -lengths[i]):
        fitting = (row for row in rows if sum(lengths[j] for j in row) + lengths[i] <= 16)
        row = next(fitting, None)
        if row is None:
            rows.append(row := [])
        row.append(i)
    assert losses.pack(lengths, 16) == rows


def test_ids_that_do_not_fit_in_32_bits_are_refused() -> None:
    values, wide = np.ones((2, 1), np.float32), np.array([2**32 + 1, 1])
    with pytest.raises(gc.GradCombineError, match="groups from 0 to 2147483646, received 4294967297"):
        losses.group_mean(values, wide)
    with pytest.raises(gc.GradCombineError, match="segments from 0 to 1, received 4294967297"):
        losses.sequence_mean_of_token_mean(values, segments=wide[:, None])
    assert losses.group_mean(values, np.array([2**31 - 2, 1])) == (2, 2)


@pytest.mark.needs("jax")
def test_ids_of_64_bits_are_taken_beside_jax_arrays() -> None:
    import jax.numpy as jnp

    values, ids = jnp.ones((2, 2)), np.array([7, 7], np.int64)
    assert float(losses.group_mean(values, ids).denominator) == 1
    assert float(losses.token_mean(values, np.eye(2, dtype=np.int64)).denominator) == 2

"""Fits results by linear combinations of the results of single examples."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from functools import cache, cached_property, partial

import numpy as np

from gradcombine.errors import GradCombineError
from gradcombine.types import Tree
from gradcombine.verify.check.leaves import as_floats, flat, perturbation
from gradcombine.verify.check.measure import Measured
from gradcombine.verify.check.recorded import Recorded
from gradcombine.verify.check.running import ONE_BATCH, Floats, NotWide, Result, Rows, Split, Subject
from gradcombine.verify.check.terms import Terms

SAME = 0.01
"""Distance from fitted coefficients to those of a hypothesis within which the hypothesis itself is tested."""

POINTS = 48
"""Maximal number of other parameter values at which examples are run if a result has few elements."""

OVERDETERMINED = 2
"""Minimal number of equations per fitted coefficient."""

CERTAIN = 1e3
"""Smallest singular value, in units of rounding, at which coefficients are determined."""

SAME_SIZE = 0.05
"""Relative difference of changes of the same size; twice that part of the parameters may change otherwise."""

SAME_NORM = 1e-5
"""Relative difference of norms that are equal: clipping adds an epsilon to the norm."""

PART = re.compile(r"\.\w+|\[[^\]]*\]")
"""A part of a leaf's path."""

MIN_SIGNS, SAME_SIGNS = 8, 0.9
"""Minimal number of elements, and part of their signs, that two leaves share if one is a moment of the other."""

MIN_CHANGES = 3
"""Smallest number of changes of the same size that is not by chance."""


class Standard(Measured):
    """The measured results of a step, and the weights of its examples in them.

    Attributes:
      terms: terms of the loss, if known.
      recorded: returns the recorded program of a division, outside or inside of shard_map.
      cuts: the measured steps up to gradients that reach an optimizer, which all divisions share.
    """

    def __init__(self, subject: Subject, unit: float | None, terms: Terms | None = None) -> None:
        super().__init__(subject, unit)
        self._given_unit, self.terms = unit, terms
        self.recorded = cache(partial(Recorded, subject))
        self.elsewhere = cache(self._elsewhere)
        self.cuts: dict[Hashable, Standard] = {}

    def at(self, subject: Subject) -> Standard:
        """Measures the step at other parameters, or on another batch."""
        return Standard(subject, self._given_unit, self.terms)

    def uninformative(self, faults: bool) -> str:
        """Description of the differences that the result of any gradients hides; empty if there are none.

        Args:
          faults: whether there are other faults, such as batch statistics, with which one example may change nothing.
        """
        if not any(np.any(x) for x in self.best.floats):
            return "a result that is 0"
        results = [x.floats for x in self.columns if x is not None]
        if results and not faults and all(np.array_equal(flat(x), flat(self.best.floats)) for x in results):
            return "a result that no example changes"
        if not self.subject.returns_params or self.gradient_examined:
            return ""
        if self.observed:
            gradients = [flat([x[i] for i in self.observed]) for x in (self.best.floats, *results)]
            clipped = any(_same_norm(gradients[0], x) for x in gradients[1:])
            return "the sizes of the gradients: several have the same norm, as after clipping" if clipped else ""
        params = [as_floats(x) for _, x in self.subject.param_leaves]
        if not any(np.any(x) for x in self.best.floats[: len(params)]):
            return "a change of the parameters that is 0"
        changes = [x.floats[: len(params)] for x in (self.best, *self.columns) if x is not None]
        leaves = [i for i in range(len(params)) if any(np.any(x[i]) for x in changes)]
        linear = self._linear() & set(leaves)
        unseen = [i for i in leaves if i not in linear and not any(self._is_moment(j, i, changes) for j in linear)]
        for some in [[i] for i in unseen] if linear else [leaves]:
            hidden = "the sizes of the gradients" + (f" of leaf {self.names[some[0]]}" if linear else "")
            if _have_one_size(np.stack([flat([x[i] for i in some]) for x in changes])):
                return f"{hidden}: each parameter changes by the same amount, as in Adam's first step"
            if _have_one_norm(changes, params, some) or all(_have_one_norm(changes, params, [i]) for i in some):
                return f"{hidden}: all changes of the parameters have the same norm, as if it is clipped"
        if linear:
            return ""
        # A mean of vectors in different directions is smaller than the largest of them.
        norms = [float(np.linalg.norm(flat(x))) for x in changes]
        if not faults and norms[0] >= (1 - SAME_SIZE) * max(norms[1:], default=0) > 0:
            return "the sizes of the gradients: no single example changes the parameters by more than all together do"
        return ""

    @cached_property
    def hides_sizes(self) -> bool:
        """Whether the result hides the sizes of gradients, unless the gradients are compared themselves."""
        return bool(self.uninformative(faults=True))

    def _linear(self) -> set[int]:
        """Leaves that are linear in examples that differ, and so show the sizes of their gradients."""
        known, linear = [] if self.weights is None else [self.weights], set[int]()
        for weights in (*known, *self.counted(self.units)):
            for i in np.flatnonzero(self._shares_from(weights) <= 1):
                pairs = zip(self.columns, weights, strict=True)
                if any(x is not None and a > SAME and _differ(x.floats[i], self.best.floats[i]) for x, a in pairs):
                    linear.add(int(i))
        return linear

    def _is_moment(self, leaf: int, of: int, changes: Sequence[Floats]) -> bool:
        """Whether a leaf is an optimizer's moment of another one, which changes by steps in its direction or opposed.

        Leaves of few elements may agree by chance, so theirs also need a path with the same end.
        """
        if self.best.floats[leaf].shape != self.best.floats[of].shape:
            return False
        name, other = (PART.findall(self.names[i]) for i in (leaf, of))
        place = next((i for i, (x, y) in enumerate(zip(name, other, strict=False)) if x != y), 0)
        end = other[place + 1 :] or other  # without the place of the parameters in the state, as in (params, moments)
        if self.best.floats[leaf].size < MIN_SIGNS and name[-len(end) :] != end:
            return False
        a, b = (np.stack([x[i] for x in changes]) for i in (leaf, of))
        # Differences between examples are free of a weight decay.
        pairs = [np.sign(a) * np.sign(b), np.sign(np.diff(a, axis=0)) * np.sign(_steps(b))]
        return any(np.count_nonzero(x) and abs(x.sum()) >= SAME_SIGNS * np.count_nonzero(x) for x in pairs)

    def counts(self) -> Iterator[np.ndarray]:
        """Yields distinct plausible counts of the examples: equal ones, and counts and sums of the leaves' rows."""
        candidates = [np.ones(self.examples)]
        for leaf in sorted(self.subject.arrays(), key=lambda x: not ((x == 0) | (x == 1)).all()):  # masks first
            each = leaf.reshape(self.examples, -1)
            # Next-token losses skip the first or the last token of a sequence.
            candidates += [np.count_nonzero(x, axis=1).astype(np.float64) for x in (each, each[:, 1:], each[:, :-1])]
            if leaf.dtype.kind == "i" and leaf.min(initial=0) < 0:  # labels of which negative ones are ignored
                candidates.append((each >= 0).sum(axis=1, dtype=np.float64))
            if leaf.dtype.kind in "fiub":
                candidates.append(each.sum(axis=1, dtype=np.float64))
        distinct: dict[bytes, np.ndarray] = {}
        for counts in candidates:
            if np.isfinite(counts).all():  # unlike sums of a mask of -inf
                distinct.setdefault((counts / (counts.sum() or 1)).tobytes(), counts)
        yield from distinct.values()

    def _elsewhere(self, seed: int, split: Split, rows: Rows | None, wide: bool) -> Result | None:
        """Runs a division, or one batch of some examples, at perturbed parameters; None if the step raises there."""
        batch = self.subject.batch if rows is None else self.subject.rows(self.copies(rows))
        return self.subject.tried(split, batch, wide, noise=perturbation(seed, 0.5, 0.5))

    def in_reverse(self, split: Split, wide: bool) -> Result | None:
        """Runs a division of the examples in reverse order; None if the step does not accept them."""
        return self.tried(split, self.reversed_batch, wide) if self.subject.reverse else None

    def tried(self, split: Split, batch: Tree, wide: bool) -> Result | None:
        """Runs a division as `run` does; None if that raises, is not finite, or is not possible in float64."""
        try:
            return self.run(split, batch, wide)
        except (NotWide, GradCombineError):
            return None

    @cached_property
    def combination(self) -> tuple[np.ndarray | None, list[int]]:
        """The weights of the units in one batch, and the leaves that are the mean of the units with these weights.

        The weights are None if no leaf is such a mean, or if its elements do not determine them.
        """
        every = list(range(len(self.best.floats)))
        for c, leaves in self._proposed(every):
            if c.min() < -SAME:  # fits the signs of an optimizer's first step by chance
                continue
            shares = self._shares_from(c)
            means = [i for i in every if shares[i] <= 1]
            if set(leaves) <= set(means):
                return c, means
        # A metric shows weights although an optimizer hides those of the gradients.
        metrics = every[len(self.subject.param_leaves) :] if self.subject.returns_params else []
        for c in self.counted(self.units):
            means = np.flatnonzero(self._shares_from(c) <= 1).tolist()
            shown = [i for i in means if i in metrics]
            if any(_differ(x.floats[i], self.best.floats[i]) for i in shown for x in self.columns if x is not None):
                return c, means
        return None, []

    def _proposed(self, every: list[int]) -> Iterator[tuple[np.ndarray, list[int]]]:
        """Yields candidate weights of the units in one batch, and the leaves that must be a mean with these weights."""
        one, wide = self.best.floats, self.wide is not None
        for leaves in [every, *([i] for i in sorted(every, key=lambda i: -one[i].size))]:
            c = self._fit_weights(one, leaves, wide)
            if c is not None and abs(c.sum() - 1) <= SAME:
                yield c, leaves
        for c in self.counted(self.units):
            yield c, every
        c = self._fit_weights(one, every, wide, elsewhere=ONE_BATCH)
        if c is not None and abs(c.sum() - 1) <= SAME:
            yield c, every

    def counted(self, parts: Sequence[Rows]) -> Iterator[np.ndarray]:
        """Yields plausible weights of parts of the batch: the total count of each part's examples."""
        for counts in self.counts():
            x = np.array([counts[list(rows)].sum() for rows in parts])
            if x.min() >= 0 and x.any():
                yield x / x.sum()

    @cached_property
    def excluded(self) -> bool:
        """Whether one batch is certainly no linear combination of its examples."""
        every = range(len(self.best.floats))
        if self.combination[0] is not None:
            return len(self.combination[1]) < len(every)
        floats, terms, _ = self._system(self.best.floats, every, self.wide is not None, ONE_BATCH)
        matrix, target = self._scaled(floats, terms, every, self.wide is not None)
        # The norm of true weights is at most 1, so that of the minimum-norm solution is, too. Directions that rounding
        # hides are cut off.
        largest = float(np.linalg.norm(matrix, 2)) if matrix.size else 0.0
        coefficients = np.linalg.lstsq(matrix.T, target, rcond=1 / max(largest, 1))[0]
        residual = np.linalg.norm(coefficients @ matrix - target)
        return bool(np.linalg.norm(coefficients) > 2 or residual > (2 + np.abs(coefficients).sum()) * len(every))

    @cached_property
    def total(self) -> float | None:
        """The sum of the units' weights in one batch; None if it is no linear combination of them."""
        c = self._fit_weights(self.best.floats, range(len(self.best.floats)), self.wide is not None)
        return float(c.sum()) if c is not None and self._shares_from(c).max() <= 1 else None

    @property
    def weights(self) -> np.ndarray | None:
        return self.combination[0]

    @property
    def heaviest(self) -> int:
        """An example with the largest weight, or the first one with a finite result if the weights are unknown."""
        finite = [x is not None for x in self.columns]
        return self.units[int(np.argmax(finite if self.weights is None else self.weights))][0]

    def fit_units(self, result: Result, split: Split, wide: bool, leaves: Sequence[int]) -> np.ndarray | None:
        """Fits the weights of the units in a division's result by least squares over these leaves."""
        x = self._fit_weights(result.floats, leaves, wide)
        return self._fit_weights(result.floats, leaves, wide, elsewhere=split) if x is None else x

    def mixed(self, weights: np.ndarray) -> list[np.ndarray]:
        """Combines the units' results with these weights; results that are not finite are left out."""
        used = [(a, x.floats) for a, x in zip(weights, self.columns, strict=True) if x is not None]
        return combined(np.array([a for a, _ in used]), [floats for _, floats in used])

    def _shares_from(self, weights: np.ndarray) -> np.ndarray:
        """Returns the distance of one batch from the units combined with these weights, over the bound."""
        if not any(self.columns):  # a variance of one example is 0, and the derivative of its root is not finite
            return np.full(len(self.best.floats), np.inf)
        terms = 2 + float(np.abs(weights).sum())
        return self.shares(self.best.floats, self.mixed(weights), self.wide is not None, terms)

    @cached_property
    def estimated_weights(self) -> np.ndarray | None:
        """The weights, or the least-squares estimate if rounding leaves them open: for hypotheses that are verified."""
        if self.weights is not None:
            return self.weights
        return self._fit_weights(self.best.floats, range(len(self.best.floats)), self.wide is not None, certain=0)

    @property
    def token_totals(self) -> list[float]:
        """Plausible total token counts: the smallest numbers whose products with all weights are integers."""
        if self.estimated_weights is None:
            return []
        totals = np.arange(1, 2049)
        parts = totals[:, None] * self.estimated_weights
        return [float(x) for x in totals[np.abs(parts - np.round(parts)).max(axis=1) < 0.02][:3]]

    def _fit_weights(
        self,
        floats: Floats,
        leaves: Sequence[int],
        wide: bool,
        certain: float = CERTAIN,
        elsewhere: Split | None = None,
    ) -> np.ndarray | None:
        """Returns the coefficients of the units that fit a result best; None if rounding leaves them open."""
        stacked, terms, nonzero = self._system(floats, leaves, wide, elsewhere)
        coefficients = self.fit(stacked, terms, wide, leaves, certain)
        if coefficients is None:
            return None
        weights = np.zeros(len(self.units))
        weights[nonzero] = coefficients
        return weights

    def _system(
        self, floats: Floats, leaves: Sequence[int], wide: bool, elsewhere: Split | None
    ) -> tuple[Floats, Sequence[Floats], list[int]]:
        """Returns a result, the results of the units that are not zero, and the indices of these units.

        If there are too few elements for a fit, stacks results at perturbed parameters; ``elsewhere`` is the division
        that returned this result.
        """
        columns = dict(enumerate(self.columns))
        nonzero = {
            i: x.floats for i, x in columns.items() if x is not None and any(np.any(x.floats[j]) for j in leaves)
        }
        points: list[tuple[Floats, list[Floats]]] = [(floats, list(nonzero.values()))]
        needed = OVERDETERMINED * len(nonzero) / max(sum(floats[j].size for j in leaves), 1)
        for seed in range(min(int(np.ceil(needed)), POINTS) if elsewhere is not None and needed > 1 else 0):
            result = self.elsewhere(seed, elsewhere, None, wide)
            parts = [self.elsewhere(seed, ONE_BATCH, self.units[i], self.wide is not None) for i in nonzero]
            if result is not None and None not in parts:
                points.append((result.floats, [x.floats for x in parts if x is not None]))
        stacked = [np.stack(x) for x in zip(*(result for result, _ in points), strict=True)]
        terms = [[np.stack(x) for x in zip(*term, strict=True)] for term in zip(*(x for _, x in points), strict=True)]
        return stacked, terms, list(nonzero)

    def fit(
        self, floats: Floats, terms: Sequence[Floats], wide: bool, leaves: Sequence[int], certain: float = CERTAIN
    ) -> np.ndarray | None:
        """Fits a result as a linear combination of terms by least squares; None if rounding leaves it open."""
        matrix, target = self._scaled(floats, terms, leaves, wide)
        equations = int(np.count_nonzero(np.any(matrix != 0, axis=0)))
        if not matrix.size or equations < OVERDETERMINED * len(terms):
            return None
        if np.linalg.svd(matrix, compute_uv=False)[-1] < certain * np.sqrt(len(leaves)):
            return None
        return np.linalg.lstsq(matrix.T, target, rcond=None)[0]

    def _scaled(
        self, floats: Floats, terms: Sequence[Floats], leaves: Sequence[int], wide: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns terms as rows of a matrix, and a result as a vector, in units of each leaf's rounding bound."""
        allowed = self.allowed(wide)
        scales = {j: 1 / (allowed[j] * np.sqrt(max(floats[j].size, 1))) for j in leaves if allowed[j] > 0}
        rows = [np.concatenate([np.zeros(0), *(x[j].ravel() * a for j, a in scales.items())]) for x in (floats, *terms)]
        return np.stack(rows[1:]) if terms else np.zeros((0, len(rows[0]))), rows[0]


def combined(weights: np.ndarray, results: Sequence[Floats]) -> list[np.ndarray]:
    return [np.tensordot(weights, np.stack(column), 1) for column in zip(*results, strict=True)]


def _differ(x: np.ndarray, y: np.ndarray) -> bool:
    return bool(np.linalg.norm(x - y) > SAME * np.linalg.norm(y))


def _same_norm(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two results that differ have the same norm."""
    norm = float(np.linalg.norm(a))
    return abs(norm - float(np.linalg.norm(b))) <= SAME_NORM * norm and _differ(a, b)


def _steps(changes: np.ndarray) -> np.ndarray:
    """Returns the differences of successive rows; 0 for those that are small in comparison."""
    differences = np.diff(changes, axis=0)
    return np.where(np.abs(differences) > SAME_SIZE * np.abs(differences).max(initial=0), differences, 0)


def _have_one_size(changes: np.ndarray) -> bool:
    """Whether each column has elements a - c, a and a + c alone, with one c and any a: a rate and a weight decay."""
    differences = np.abs(changes - changes[0])
    largest = float(differences.max(initial=0))
    seen = differences[differences > SAME_SIZE * largest]
    near = np.minimum(np.abs(seen - largest), np.abs(seen - largest / 2)) <= SAME_SIZE * largest
    return seen.size >= MIN_CHANGES and np.count_nonzero(near) >= (1 - 2 * SAME_SIZE) * seen.size


def _have_one_norm(changes: Sequence[Floats], params: Floats, leaves: Sequence[int]) -> bool:
    """Whether all changes of these leaves have one norm, apart from weight decay, but several directions.

    For a decay b of the parameters p, |c - b p| is constant if |c|^2 is linear in c p, with the slope 2 b. Matrices
    and other leaves each have a decay.
    """
    rows = np.stack([flat([x[i] for i in leaves]) for x in changes])
    sizes = np.linalg.norm(rows - np.median(rows, axis=0), axis=1)
    if len(rows) < 2 * MIN_CHANGES or np.count_nonzero(sizes > SAME * sizes.max()) <= MIN_CHANGES:
        return False  # a norm and two decays fit the few changes that differ
    values = flat([params[i] for i in leaves])
    is_matrix = np.repeat(np.array([params[i].ndim > 1 for i in leaves]), [params[i].size for i in leaves])
    decayed = np.stack([values * is_matrix, values * ~is_matrix])
    products, squares = rows @ decayed.T, np.square(rows).sum(axis=1)
    matrix: np.ndarray = products - products.mean(axis=0)
    target: np.ndarray = squares - squares.mean()
    fitted = np.linalg.lstsq(matrix, target, rcond=None)[0]
    spread = float(np.median(np.linalg.norm(rows - rows.mean(axis=0), axis=1)))
    for slopes in (np.zeros(2), fitted):
        norms = np.linalg.norm(rows - slopes / 2 @ decayed, axis=1)
        if np.all(np.abs(norms - np.median(norms)) <= SAME_SIZE * spread):
            return True
    return False

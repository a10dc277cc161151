"""A fault to be found: one flipped bit."""

from __future__ import annotations

import numpy as np

from gradcombine.verify.suite import numpy_rows
from gradcombine.verify.suite.places import Case, Contributions


def flip_lowest_bit(case: Case, given: Contributions) -> Contributions:
    """The contributions of a case with the lowest mantissa bit of one element of the first one flipped.

    The combine rounds, and may round the flipped bit away: the element is one where it does not.
    """
    first = {name: np.asarray(leaf) for name, leaf in given.values[0].items()}
    flipped = {name: (leaf.view(np.uint32) ^ np.uint32(1)).view(np.float32) for name, leaf in first.items()}
    before = numpy_rows.combined(given, case.order)
    after = numpy_rows.combined(Contributions([flipped, *given.values[1:]], given.weights), case.order)
    for name, leaf in first.items():
        seen = np.argwhere(before[name] != after[name])
        if len(seen):
            chosen = tuple(seen[0])
            harmed = leaf.copy()
            harmed[chosen] = flipped[name][chosen]
            return Contributions([first | {name: harmed}, *given.values[1:]], given.weights)
    raise AssertionError("no element shows a flipped bit")

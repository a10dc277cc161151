"""The defects that `gradcombine verify` plants and names."""

from __future__ import annotations

import numpy as np

from gradcombine.verify.suite import defects


def test_the_defect_is_named_and_the_repaired_step_is_not_accused() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(defects.EXAMPLES, 5)).astype(np.float32)
    averaged, weighted = defects.checked(inputs, inputs.sum(1))
    assert averaged.labels["answer"] == "mean of means" and averaged.holds
    assert weighted.labels["answer"] == "no defect" and weighted.holds
    alike, _ = defects.checked(np.tile(inputs[:1], (defects.EXAMPLES, 1)), np.ones(defects.EXAMPLES, np.float32))
    assert not alike.holds  # all microbatches have the same mean: no defect to name

"""Verdicts on the inaccurate side: two dumps against a float64 reference, in units of their rounding noise."""

import json

import ml_dtypes
import numpy as np
import pytest

from gradcombine import GradCombineError
from gradcombine.verify import compare
from tests.verify.diff.test_command import run

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(512, 12)), RNG.normal(size=(512, 20))
EXACT = {"dense": {"kernel": X.T @ Y, "bias": Y.sum(axis=0)}, "scale": np.float64([X.sum()])}


def rounded(dtype=np.float32, block=512):
    """The sums of `EXACT` in `dtype`: the terms of each block are summed, then the blocks sequentially."""
    x, y = X.astype(dtype), Y.astype(dtype)
    kernel, bias, scale = np.zeros((12, 20), dtype), np.zeros(20, dtype), np.zeros(1, dtype)
    for i in range(0, 512, block):
        kernel = (kernel + (x[i : i + block].T @ y[i : i + block]).astype(dtype)).astype(dtype)
        bias = (bias + y[i : i + block].sum(axis=0, dtype=dtype)).astype(dtype)
        scale = (scale + x[i : i + block].sum(dtype=dtype)).astype(dtype)
    return {"dense": {"kernel": kernel, "bias": bias}, "scale": scale}


def scaled(tree, factor):
    kernel = tree["dense"]["kernel"]
    return tree | {"dense": tree["dense"] | {"kernel": (kernel * factor).astype(kernel.dtype)}}


def one_element(tree):
    kernel = tree["dense"]["kernel"].copy()
    kernel[3, 4] += kernel.dtype.type(0.01 * np.sqrt(np.mean(EXACT["dense"]["kernel"] ** 2)))
    return tree | {"dense": tree["dense"] | {"kernel": kernel}}


def lost(tree):
    """The tree with a kernel that was accumulated in bfloat16."""
    kernel = rounded(ml_dtypes.bfloat16)["dense"]["kernel"].astype(np.float32)
    return tree | {"dense": tree["dense"] | {"kernel": kernel}}


PLANTED = {
    "a part in a thousand": lambda tree: scaled(tree, 1.001),
    "half": lambda tree: scaled(tree, 0.5),
    "the other sign": lambda tree: scaled(tree, -1),
    "one element": one_element,
    "a narrow accumulator": lost,
    "NaN": lambda tree: scaled(tree, np.nan),
    "nothing": lambda tree: scaled(tree, 0),
}


def verdicts(a, b, reference=EXACT, roundings=None):
    return {each.name: each.verdict for each in compare(a, b, reference=reference, roundings=roundings).judgements}


@pytest.mark.parametrize("roundings", [None, 512])
@pytest.mark.parametrize("planted", PLANTED)
def test_the_side_that_is_off_is_named(planted, roundings):
    kernel, others = "['dense']['kernel']", {"within noise"}
    good, bad = rounded(), PLANTED[planted](rounded(block=8))
    for a, b, expected in ((good, bad, "B is off"), (bad, good, "A is off")):
        found = verdicts(a, b, roundings=roundings)
        assert (found.pop(kernel), set(found.values())) == (expected, others)


@pytest.mark.parametrize("roundings", [None, 512])
def test_two_sides_that_are_off_each_in_its_own_way(roundings):
    found = verdicts(scaled(rounded(), 0.5), scaled(rounded(), 3), roundings=roundings)
    assert found["['dense']['kernel']"] == "both are off"


@pytest.mark.parametrize("roundings", [None, 512])
def test_other_orders_and_dtypes_are_within_noise(roundings):
    nearest = {"dense": {key: x.astype("f4") for key, x in EXACT["dense"].items()}, "scale": np.float32(EXACT["scale"])}
    sides = [rounded(), rounded(block=1), rounded(block=8), nearest, rounded(ml_dtypes.bfloat16, 64)]
    for a in sides:
        for b in sides:
            assert set(verdicts(a, b, roundings=roundings).values()) == {"within noise"}


def test_a_reference_of_another_computation_is_named():
    other = {
        "dense": {"kernel": 0.9 * EXACT["dense"]["kernel"], "bias": EXACT["dense"]["bias"]},
        "scale": EXACT["scale"],
    }
    assert verdicts(rounded(), rounded(block=8), other)["['dense']['kernel']"] == "the reference is off"


def test_terms_that_cancel_are_measured_by_the_largest_leaf():
    """The gradient of a bias before a normalization is pure noise on every side."""
    exact = {"w": np.linspace(-1, 1, 99), "bias": np.float64([1e-17, 0, -2e-17]), "unused": np.zeros(3)}
    a = {"w": exact["w"].astype("f4"), "bias": np.float32([1e-8, 0, 3e-9]), "unused": np.float32([0, 0, 0])}
    b = {"w": exact["w"].astype("f4"), "bias": np.float32([-2e-8, 1e-9, 0]), "unused": np.float32([0, 1e-3, 0])}
    assert verdicts(a, b, exact) == {"['w']": "within noise", "['bias']": "within noise", "['unused']": "B is off"}


def test_specials_and_integers_have_to_be_the_references():
    exact = {"x": np.float64([1e39, np.nan, np.inf, 1.0]), "n": np.int64([7, 2**60])}
    same = {"x": np.float32([np.inf, np.nan, np.inf, 1.0]), "n": np.int64([7, 2**60])}
    assert set(verdicts(same, same, exact).values()) == {"within noise"}
    for i in range(3):
        wrong = same["x"].copy()
        wrong[i] = 0
        assert verdicts(same, same | {"x": wrong}, exact)["['x']"] == "B is off"
    assert verdicts(same | {"n": np.int64([7, 2**60 + 1])}, same, exact)["['n']"] == "A is off"


def test_what_cannot_be_judged_is_refused():
    a = {"w": np.float32([1, 2])}
    for reference, expected in (
        ({"w": np.float32([1, 2])}, "a reference in float64"),
        ({"w": np.float64([1, 2, 3])}, "a reference of shape"),
        ({"v": np.float64([1, 2])}, "no such leaf"),
        ({"w": np.int64([1, 2])}, "float numbers"),
    ):
        with pytest.raises(GradCombineError, match=expected):
            compare(a, a, reference=reference)
    with pytest.raises(GradCombineError, match="narrower than the reference"):
        compare({"w": np.float64([1])}, {"w": np.float64([1])}, reference={"w": np.float64([1])})
    with pytest.raises(GradCombineError, match="from 1 on"):
        compare(a, a, reference={"w": np.float64([1, 2])}, roundings=0)
    with pytest.raises(GradCombineError, match="compare: expected a reference, which roundings needs, received none"):
        compare(a, a, roundings=5)


def dumped(path, tree):
    np.savez(path, kernel=tree["dense"]["kernel"], bias=tree["dense"]["bias"], scale=tree["scale"])
    return str(path)


def test_the_command_answers_in_words_and_by_its_exit_status(tmp_path):
    a, b, r = (tmp_path / f"{name}.npz" for name in "abr")
    dumped(a, rounded()), dumped(b, rounded(block=8))
    # The reference has B's names and order of axes.
    np.savez(r, kernel=EXACT["dense"]["kernel"].T, bias=EXACT["dense"]["bias"], scale=EXACT["scale"])
    code, output = run(a, b, "--reference", r)
    assert (code, "within their rounding noise" in output) == (0, True), output
    dumped(b, scaled(rounded(), 1.001))
    code, output = run(a, b, "--reference", r, "--json", tmp_path / "out.json")
    assert (code, "1 (B is off)" in output) == (1, True), output
    leaves = {leaf["a"]: leaf["judgement"] for leaf in json.loads((tmp_path / "out.json").read_text())["leaves"]}
    assert leaves["kernel"]["verdict"] == "B is off" and leaves["kernel"]["b"] > 100 * leaves["kernel"]["a"]
    np.savez(r, kernel=EXACT["dense"]["kernel"].T, bias=EXACT["dense"]["bias"].astype("f4"))
    code, output = run(a, a, "--reference", r)
    assert (code, "2 could not be compared" in output) == (1, True), output
    assert run(a, b, "--reference", r, "--rtol", 1)[0] == 2
    code, output = run(a, b, "--roundings", 5)
    assert (code, "a reference, which roundings needs" in output) == (2, True), output


def test_runs_are_judged_step_by_step(tmp_path):
    for name, trees in (
        ("a", [rounded()] * 3),
        ("b", [rounded(block=8)] * 2 + [scaled(rounded(), 2)]),
        ("r", [EXACT] * 3),
    ):
        (tmp_path / name).mkdir()
        for step, tree in enumerate(trees):
            dumped(tmp_path / name / f"step_{step}.npz", tree)
    code, output = run(*(tmp_path / name for name in "ab"), "--reference", tmp_path / "r")
    assert code == 1 and "first step that differs is 2" in output and "B is off" in output
    (tmp_path / "r" / "step_0.npz").unlink()
    code, output = run(*(tmp_path / name for name in "ab"), "--reference", tmp_path / "r")
    assert code == 1 and "first step that differs is 0" in output

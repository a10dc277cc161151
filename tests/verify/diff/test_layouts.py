"""Equal parameters with different shapes and names are matched; swapped names are detected."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradcombine.verify.diff.comparing import diff
from gradcombine.verify.diff.mapping import canonical
from gradcombine.verify.diff.rules import Rule, Rules, read_rules
from tests.verify.diff.test_command import run, saved
from tests.verify.diff.test_mapping import dump

RNG = np.random.default_rng(8)
PACKED = {"attn.in_proj_weight": RNG.normal(size=(24, 8)), "attn.in_proj_bias": RNG.normal(size=24)}
SPLIT = {
    f"attn/{name}/{leaf}": part
    for packed, leaf in (("attn.in_proj_weight", "kernel"), ("attn.in_proj_bias", "bias"))
    for name, part in zip(("query", "key", "value"), np.split(PACKED[packed], 3), strict=True)
}


def turned(heads: int) -> dict[str, Any]:
    """Attention parameters with a head axis, as in flax."""
    return {name: (x.T if x.ndim == 2 else x).reshape(*x.shape[1:], heads, -1) for name, x in SPLIT.items()}


@pytest.mark.parametrize("other", [SPLIT, turned(2), turned(4)], ids=["split", "2 heads", "4 heads"])
def test_packed_attention_is_split(other: dict[str, Any]) -> None:
    report = diff(dump(PACKED), dump(other))
    assert report.passes and len(report.rows) == 6
    assert {row.pair.a: row.pair.b for row in report.rows}["attn.k_proj_weight"] == "attn/key/kernel"
    assert {row.pair.reason for row in report.rows} == {"similar name"}
    assert diff(dump(other), dump(PACKED)).passes


def test_what_both_pack_stays_packed(tmp_path: Path) -> None:
    assert len(diff(dump(PACKED), dump(PACKED)).rows) == 2
    (tmp_path / "rules.toml").write_text("[[rule]]\na = 'attn.in_proj_(.*)'\nb = 'x_\\1'")
    other = {"x_weight": PACKED["attn.in_proj_weight"].T, "x_bias": PACKED["attn.in_proj_bias"]}
    report = diff(dump(PACKED), dump(other), rules=read_rules(tmp_path / "rules.toml"))
    assert report.passes and len(report.rows) == 2
    assert diff(dump({"in_proj_weight": np.ones((5, 8))}), dump({"w": np.ones((8, 5))}), rules=Rules()).passes


GATED = RNG.normal(size=(4, 6, 6))
BIASES = RNG.normal(size=(2, 4, 6))


def flax_cell(order: str = "ifgo", **biases: Any) -> dict[str, Any]:
    """An LSTM with input and state of one size; `order`: the gate names that PyTorch's blocks are given."""
    kernels = {f"cell/{side}{gate}/kernel": w.T for side in "ih" for gate, w in zip(order, GATED, strict=True)}
    return kernels | {f"cell/h{gate}/bias": bias for gate, bias in zip(order, BIASES.sum(0), strict=True)} | biases


TORCH_CELL = {
    **{f"rnn.weight_{side}h_l0": GATED.reshape(24, 6) for side in "ih"},
    **{f"rnn.bias_{side}h_l0": bias.reshape(24) for side, bias in zip("ih", BIASES, strict=True)},
}


def test_gates_are_compared_by_their_names() -> None:
    """Swapped gates are not matched by value, and neither is a kernel that is not transposed."""
    report = diff(dump(TORCH_CELL), dump(flax_cell()))
    assert report.passes and len(report.rows) == 12
    found = {row.pair.a: row.pair.b for row in report.rows}
    assert found["rnn.weight_hh_l0[g]"] == "cell/hg/kernel"
    assert found["rnn.bias_ih_l0[o] + rnn.bias_hh_l0[o]"] == "cell/ho/bias"
    swapped = diff(dump(flax_cell("figo")), dump(TORCH_CELL))
    assert sum(row.passes for row in swapped.rows) == 6
    assert ("cell/hi/bias", "rnn.bias_ih_l0[f] + rnn.bias_hh_l0[f]") in swapped.mixed_up
    straight = flax_cell(**{f"cell/h{gate}/kernel": w for gate, w in zip("ifgo", GATED, strict=True)})
    assert sum(not row.passes for row in diff(dump(TORCH_CELL), dump(straight)).rows) == 4
    assert not diff(dump(TORCH_CELL), dump(flax_cell()), gradients=True).passes
    gradients = flax_cell(**{f"cell/h{gate}/bias": b for gate, b in zip("ifgo", BIASES[0], strict=True)})
    each = TORCH_CELL | {"rnn.bias_hh_l0": TORCH_CELL["rnn.bias_ih_l0"]}
    assert len(diff(dump(each), dump(gradients), gradients=True).rows) == 16
    assert diff(dump(each), dump(gradients), gradients=True).passes
    undecided = diff(dump(each), dump(gradients))
    assert not undecided.passes and len(undecided.left_out) == 4
    assert diff(dump(TORCH_CELL), dump(TORCH_CELL)).elements == sum(x.size for x in TORCH_CELL.values())


@pytest.mark.parametrize("sizes", [(3, 4, 3, 2), (3, 3, 3, 3), (5, 2, 4)], ids=str)
def test_a_transposed_convolution_of_flax_is_flipped(sizes: tuple[int, ...]) -> None:
    """Matched by name or value; an unflipped one passes with a note, a flipped plain convolution fails."""
    kernel = RNG.normal(size=sizes)
    axes = tuple(range(len(sizes) - 2))
    weight = np.moveaxis(np.flip(kernel, axes), (-2, -1), (0, 1))
    for name in ("up/kernel", "params/ConvTranspose_0/kernel"):
        (row,) = diff(dump({"up.weight": weight}), dump({name: kernel})).rows
        assert row.passes and row.pair.flipped == axes and not row.transposed
        assert diff(dump({name: kernel}), dump({"up.weight": weight})).passes
    (row,) = diff(dump({"up.weight": weight}), dump({"up/kernel": np.flip(kernel, axes)})).rows
    assert row.passes and row.transposed
    plain = np.moveaxis(np.flip(kernel, axes), (-1, -2), (0, 1))
    assert not diff(dump({"up.weight": plain}), dump({"up/kernel": kernel})).passes


def test_a_transposed_kernel_has_no_heads() -> None:
    """Axes are merged only if nothing else fits."""
    x = RNG.normal(size=(4, 2, 8))
    assert [row.difference.shape for row in diff(dump({"w": x}), dump({"w": x.T})).rows] == [(4, 2, 8)]
    report = diff(dump({"w": x}), dump({"v": np.ones(3)}))
    assert report.only_a == ("w",)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("cls_token", (1, 1, 8)), ("params/cls_token", (8,))),
        (("gamma", (8,)), ("layer_scale", (1, 1, 1, 8))),
        (("pos_embed", (1, 5, 8)), ("pos_embedding", (5, 8))),
        (("logit_scale", ()), ("params/logit_scale", (1,))),
        (("mlp.fc.weight", (6, 4, 1, 1)), ("mlp/fc/kernel", (4, 6))),
        (("mlp/fc/kernel", (1, 4, 6)), ("mlp.fc.weight", (6, 4))),
    ],
    ids=str,
)
def test_axes_of_length_1_may_be_left_out(a: Any, b: Any) -> None:
    (name, shape), (other, other_shape) = a, b
    x = RNG.normal(size=shape)
    y = x.reshape([n for n in shape if n > 1])
    y = (y.T if "fc" in name else y).reshape(other_shape)
    for left, right in (({name: x}, {other: y}), ({other: y}, {name: x})):
        report = diff(dump(left), dump(right))
        assert report.passes and report.rows[0].reshaped is not None, report
        assert not report.rows[0].transposed
    report = diff(dump({name: x}), dump({other: 2 * y + 1}))
    assert not report.passes


def test_a_step_count_is_no_bias_of_one_element() -> None:
    report = diff(dump({"head.bias": np.ones(1)}), dump({"count": np.ones(())}))
    assert report.only_a == ("head.bias",) and not report.rows


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("layers.0.self_attn.q_proj.weight", "params/layers_0/self_attention/query/kernel"),
        ("attn.v_proj.bias", "attention/value/bias/value"),
        ("bn.running_var", "batch_stats/bn/var"),
        ("bn/moving_variance", "bn.running_var"),
        ("attn.out_proj.weight", "attn/output_proj/weight"),
    ],
)
def test_names_of_frameworks_are_alike(a: str, b: str) -> None:
    assert canonical(a) == canonical(b)


def test_a_normalization_and_a_kernel_of_one_module_stay_apart() -> None:
    x = {"m/kernel": RNG.normal(size=3), "m/scale": RNG.normal(size=3)}
    report = diff(dump(x), dump({"m.weight": x["m/kernel"], "m.scale": x["m/scale"]}))
    assert {row.pair.a: row.pair.b for row in report.rows} == {"m/kernel": "m.weight", "m/scale": "m.scale"}


@pytest.mark.parametrize(
    ("names", "noted"),
    [
        (("fc.weight", "fc/kernel"), False),
        (("fc/kernel/value", "fc.weight"), False),
        (("fc.weight", "fc.weight"), True),
        (("fc/kernel", "fc/kernel"), True),
    ],
)
def test_a_weight_is_a_kernel_transposed(names: tuple[str, str], noted: bool) -> None:
    """Even a square one, if the names show that two frameworks are involved."""
    x = RNG.normal(size=(5, 5))
    (row,) = diff(dump({names[0]: x}), dump({names[1]: x.T})).rows
    assert row.passes and row.transposed is noted
    (row,) = diff(dump({names[0]: x}), dump({names[1]: x})).rows
    assert row.passes and row.transposed is not noted


@pytest.mark.parametrize("multiplier", [1, 2])
def test_a_convolution_over_each_channel(multiplier: int) -> None:
    """PyTorch's (C m, 1, H, W) against Keras' (H, W, C, m)."""
    x = RNG.normal(size=(5 * multiplier, 1, 3, 3))
    kernel = x.reshape(5, multiplier, 3, 3).transpose(2, 3, 0, 1)
    for name in ("conv/kernel", "layers/depthwise/vars/0"):
        (row,) = diff(dump({"conv.weight": x}), dump({name: kernel})).rows
        assert row.passes and not row.transposed


def test_a_tied_leaf_is_said_to_be_one(tmp_path: Path) -> None:
    x = {"embed.weight": RNG.normal(size=(5, 3)), "norm.weight": RNG.normal(size=3)}
    more = {"head.weight": x["embed.weight"], "other.weight": x["norm.weight"] + 1}
    code, output = run(*saved(tmp_path, x | more, x))
    assert code == 1 and output.count("only in A, with the bits of embed.weight") == 1 == output.count("with the bits")


def test_swapped_names_are_said(tmp_path: Path) -> None:
    a, b, c = (RNG.normal(size=(6, 6)) for _ in range(3))
    swapped = {"q": b.T, "k": a * 1.001, "other": c, "gain": 2.0}
    code, output = run(*saved(tmp_path, {"q": a, "k": b, "other": c, "gain": 1.0}, swapped))
    assert code == 1
    assert "Leaves that resemble another leaf" in output
    assert re.search(r"\bq +k\b", output) and re.search(r"\bk +q\b", output)
    assert not diff(dump({"q": a, "k": b}), dump({"q": a * 1.1, "k": c})).mixed_up


@pytest.mark.parametrize("spatial", [(3,), (3, 3), (3, 5), pytest.param((3, 3, 3), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("channels", [(4, 6), (5, 5), (1, 6)], ids=str)
def test_swapped_axes_of_convolutions_are_noted(spatial: tuple[int, ...], channels: tuple[int, int]) -> None:
    """Conventional names fix the order of axes: any other order is noted, the right one is not."""
    kernel = RNG.normal(size=(*spatial, *channels))
    n = kernel.ndim
    weight = kernel.transpose(n - 1, n - 2, *range(n - 2))
    for a, b in (({"c.weight": weight}, {"c/kernel": kernel}), ({"c/kernel": kernel}, {"c.weight": weight})):
        (row,) = diff(dump(a), dump(b)).rows
        assert row.passes and not row.transposed
    for order in itertools.permutations(range(n)):
        for x, name, y in ((weight, "c.weight", weight), (kernel, "c/kernel", kernel), (weight, "c.weight", kernel)):
            turned, right = x.transpose(order), x is y
            if turned.shape == x.shape and np.array_equal(turned, x):
                continue
            other = name if right else "c/kernel"
            report = diff(dump({name: turned}), dump({other: y}))
            assert not report.passes or report.rows[0].transposed


@pytest.mark.parametrize("other", ["kernel", "weight"])
def test_names_decide_of_square_kernels_where_the_others_follow_them(other: str) -> None:
    """GPT-2 is a counterexample: its weights have the layout of kernels."""
    wide, square, conv = RNG.normal(size=(4, 6)), RNG.normal(size=(5, 5)), RNG.normal(size=(3, 3, 5, 5))
    turned = {"a": wide.T, "b": square.T, "c": conv.transpose(3, 2, 0, 1)}
    weights = {f"{name}.weight": x for name, x in turned.items()}
    b = {f"{x}/kernel": y for x, y in zip("abc", (wide, square, conv), strict=True)} if other == "kernel" else weights
    assert diff(dump(weights), dump(b)).passes
    for name, x in (("b.weight", square), ("c.weight", turned["c"].swapaxes(0, 1))):
        report = diff(dump(weights | {name: x}), dump(b))
        (row,) = [row for row in report.rows if not row.passes]
        assert row.pair.a == name and row.transposed and not report.passes
    # If there are no other leaves, or they do not follow their names, the transposition is only noted.
    assert diff(dump({"b.weight": square}), dump({k: v for k, v in b.items() if "b" in k})).passes
    if other == "kernel":
        as_kernels = {"a.weight": wide, "b.weight": square}
        report = diff(dump(as_kernels), dump({"a/kernel": wide, "b/kernel": square}))
        assert report.passes and all(row.transposed for row in report.rows)
        # No kernel whose shape decides follows its name: a square one that does is transposed, unless it is symmetric.
        report = diff(dump(as_kernels), dump({"a/kernel": wide, "b/kernel": square.T}))
        assert [(row.pair.a, row.transposed) for row in report.rows if not row.passes] == [("b.weight", True)]
        symmetric = square + square.T
        b = dump({"a/kernel": wide, "b/kernel": symmetric})
        assert diff(dump(as_kernels | {"b.weight": symmetric}), b).passes
        rules = Rules((Rule(re.compile("b.weight"), "b/kernel", (1, 0)),))
        assert diff(dump(as_kernels), dump({"a/kernel": wide, "b/kernel": square.T}), rules=rules).passes


def test_a_leaf_that_is_compared_in_another_shape_is_said(tmp_path: Path) -> None:
    x = RNG.normal(size=(4, 2, 8))
    code, output = run(*saved(tmp_path, {"q/kernel": x}, {"q/kernel": x.reshape(4, 16)}))
    assert code == 0 and "Leaves with different shapes" in output and "4 x 2 x 8" in output and "4 x 16" in output


@pytest.mark.parametrize("wrong", [(), ("b",)])
def test_square_kernels_alone_follow_each_other(wrong: tuple[str, ...]) -> None:
    kernels = {x: RNG.normal(size=(5, 5)) for x in "abc"}
    weights = {f"{x}.weight": y if x in wrong else y.T for x, y in kernels.items()}
    report = diff(dump(weights), dump({f"{x}/kernel": y for x, y in kernels.items()}))
    assert [row.pair.a for row in report.rows if not row.passes] == [f"{x}.weight" for x in wrong]


@pytest.mark.parametrize("alone", [False, True])
def test_height_and_width_that_are_swapped_fail(alone: bool) -> None:
    """As ``weight.T`` swaps them. The other kernels follow their names, or there are no others."""
    conv, dense = RNG.normal(size=(6, 4, 3, 3)), RNG.normal(size=(5, 6))
    b = {"c/kernel": conv.T} if alone else {"c/kernel": conv.T, "d/kernel": dense.T}
    report = diff(dump({"c.weight": conv} if alone else {"c.weight": conv, "d.weight": dense}), dump(b))
    assert [row.pair.a for row in report.rows if not row.passes] == ["c.weight"]


@pytest.mark.parametrize("square", [np.zeros((4, 4)), np.eye(4)], ids=["zeros", "identity"])
def test_a_symmetric_kernel_is_not_transposed(square: np.ndarray) -> None:
    dense = RNG.normal(size=(3, 4))
    a, b = {"c.weight": square, "d.weight": dense}, {"c/kernel": square, "d/kernel": dense.T}
    report = diff(dump(a), dump(b))
    assert report.passes and not any(row.transposed for row in report.rows)


KERNEL_NAMES = [
    "{}/kernel",
    "['{}/kernel']",
    '["{}/kernel:0"]',
    "{}/kernel/value",
    "layers/{}/vars/0",
    "{}/w",
    "net.{}.w",
]


@pytest.mark.parametrize("weight_first", [True, False])
@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_kernels_of_all_spellings_follow_their_names(name: str, weight_first: bool) -> None:
    """Paths of Keras' variables as keys, its files, and Haiku: square matrices, and convolutions' height and width."""
    dense, square, conv = RNG.normal(size=(4, 6)), RNG.normal(size=(5, 5)), RNG.normal(size=(3, 3, 2, 5))
    kernels = dict(zip((name.format(x) for x in ("dense", "square", "conv")), (dense, square, conv), strict=True))
    right = {"dense.weight": dense.T, "square.weight": square.T, "conv.weight": conv.transpose(3, 2, 0, 1)}
    for wrong in ({}, {"square.weight": square}, {"conv.weight": conv.T}):
        sides = dump(right | wrong), dump(kernels)
        report = diff(*(sides if weight_first else sides[::-1]))
        assert len(report.rows) == 3
        failed = {row.pair[not weight_first] for row in report.rows if not row.passes}
        assert failed == wrong.keys() == {row.pair[not weight_first] for row in report.rows if row.transposed}


def test_an_embedding_in_a_keras_file_is_not_transposed() -> None:
    table, dense = RNG.normal(size=(6, 6)), RNG.normal(size=(6, 3))
    a = {"embed.weight": table, "dense.weight": dense.T}
    report = diff(dump(a), dump({"layers/embedding/vars/0": table, "layers/dense/vars/0": dense}))
    assert report.passes and not any(row.transposed for row in report.rows)


def both_directions(forward: str, backward: str, swapped: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """An LSTM of PyTorch, and its gates as those of Keras (i f c o), in two directions."""
    a: dict[str, Any] = {}
    b: dict[str, Any] = {}
    for suffix, name in (("", backward if swapped else forward), ("_reverse", forward if swapped else backward)):
        w, u, bias = RNG.normal(size=(16, 3)), RNG.normal(size=(16, 4)), RNG.normal(size=(2, 16))
        a |= {f"encoder.weight_ih_l0{suffix}": w, f"encoder.weight_hh_l0{suffix}": u}
        a |= {f"encoder.bias_{part}h_l0{suffix}": x for part, x in zip("ih", bias, strict=True)}
        b |= {f"{name}/kernel": w.T, f"{name}/recurrent_kernel": u.T, f"{name}/bias": bias.sum(0)}
    return a, b


@pytest.mark.parametrize("module", ["bi/", "bidirectional/", "encoder/", "bi0/", ""])
def test_directions_that_are_swapped_fail(module: str) -> None:
    """Also if the modules have different names, or numbers."""
    names = f"{module}forward_lstm/lstm_cell", f"{module}backward_lstm/lstm_cell"
    assert diff(*map(dump, both_directions(*names, swapped=False)), gradients=False).passes
    assert not diff(*map(dump, both_directions(*names, swapped=True)), gradients=False).passes


def test_layers_of_cells_with_equal_numbers_that_are_swapped_fail() -> None:
    """Although the words of their names differ."""
    a = {name.replace("l0", f"l{i}"): x * 2**i for i in range(2) for name, x in TORCH_CELL.items()}
    for order in ((0, 1), (1, 0)):
        layers = [(i, name, x * 2**j) for i, j in enumerate(order) for name, x in flax_cell().items()]
        b = {name.replace("cell/", f"enc{i}/"): x for i, name, x in layers}
        assert diff(dump(a), dump(b), gradients=False).passes is (order == (0, 1))


def test_vectors_of_contradictory_roles_are_not_matched_by_values() -> None:
    """A scale that became a bias, and a mean that became a variance, in a layer of another name."""
    vectors = dict(zip(("weight", "bias", "running_mean", "running_var"), RNG.normal(size=(4, 50)), strict=True))
    a = dump({f"bn.{name}": x for name, x in vectors.items()})
    right = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
    assert diff(a, dump({f"BatchNorm_0/{x}": vectors[y] for x, y in right.items()})).passes
    wrong = {"scale": "bias", "bias": "weight", "mean": "running_var", "var": "running_mean"}
    report = diff(a, dump({f"BatchNorm_0/{x}": vectors[y] for x, y in wrong.items()}))
    assert not report.passes and ("bn.weight", "BatchNorm_0/bias") in report.mixed_up


def test_a_kernel_that_is_compared_flipped_is_listed(tmp_path: Path) -> None:
    """As it may also be that of a plain convolution, flipped by mistake."""
    kernel = RNG.normal(size=(3, 3, 2, 2))
    flipped = kernel[::-1, ::-1].transpose(2, 3, 0, 1)
    code, output = run(*saved(tmp_path, {"c.weight": flipped}, {"c/kernel": kernel}))
    assert code == 0 and "compared as those of transposed convolutions" in output

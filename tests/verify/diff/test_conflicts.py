"""Leaves that only their values match: they fail where their names say otherwise, as of layers in another order."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradcombine import GradCombineError
from gradcombine.verify.diff.comparing import DiffReport, diff
from gradcombine.verify.diff.conflicts import crossed
from gradcombine.verify.diff.mapping import Pair
from gradcombine.verify.diff.rules import Rule, Rules
from tests.verify.diff.test_command import run, saved
from tests.verify.diff.test_mapping import dump

RNG = np.random.default_rng(7)
PYTORCH = {
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
    "norm": "model.layers.{}.input_layernorm.weight",
    "second": "model.layers.{}.post_attention_layernorm.weight",
}
OTHERS: dict[str, dict[str, str]] = {
    "other words": {
        "q": "params/layers_{}/attention/wq/kernel",
        "k": "params/layers_{}/attention/wk/kernel",
        "o": "params/layers_{}/attention/wo/kernel",
        "down": "params/layers_{}/w2/kernel",
        "norm": "params/layers_{}/attention_norm/scale",
        "second": "params/layers_{}/ffn_norm/scale",
    },
    "blocks": {key: name.replace("model.layers.", "params/Block_").replace(".", "/") for key, name in PYTORCH.items()},
    "auto-numbered": {
        "q": "params/Layer_{}/Dense_0/kernel",
        "k": "params/Layer_{}/Dense_1/kernel",
        "o": "params/Layer_{}/Dense_2/kernel",
        "down": "params/Layer_{}/Dense_3/kernel",
        "norm": "params/Layer_{}/RMSNorm_0/scale",
        "second": "params/Layer_{}/RMSNorm_1/scale",
    },
}
LAYERS = 3
SHAPES = {"down": (6, 4), "norm": (4,), "second": (4,)}
VALUES = {
    (key, i): RNG.normal(size=SHAPES.get(key, (4, 4))).astype(np.float32) for key in PYTORCH for i in range(LAYERS)
}


def renamed(names: dict[str, str], order: Any = range(LAYERS), first: int = 0, **exchanged: str) -> Any:
    """The leaves under these names: of the layers in this order, counted from ``first``, with exchanged modules."""
    arrays = {
        name.format(i + first): VALUES[exchanged.get(key, key), j]
        for i, j in enumerate(order)
        for key, name in names.items()
    }
    return dump({name: x.T if name.endswith("kernel") else x for name, x in arrays.items()})


def failing(report: DiffReport) -> set[str]:
    return {row.pair.a for row in report.rows if not row.passes}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("style", OTHERS)
def test_right_ports_pass_whatever_their_names(style: str, first: int) -> None:
    report = diff(renamed(PYTORCH), renamed(OTHERS[style], first=first))
    assert report.passes and not report.crossed, report.crossed


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("style", OTHERS)
def test_layers_in_another_order_fail(style: str, first: int) -> None:
    report = diff(renamed(PYTORCH), renamed(OTHERS[style], order=(1, 0, 2), first=first))
    moved = {name.format(i) for name in PYTORCH.values() for i in (0, 1)}
    assert failing(report) == moved


@pytest.mark.parametrize(("style", "exchanged"), [("other words", ("q", "k")), ("blocks", ("norm", "second"))])
def test_exchanged_modules_fail(style: str, exchanged: tuple[str, str]) -> None:
    x, y = exchanged
    report = diff(renamed(PYTORCH), renamed(OTHERS[style], **{x: y, y: x}))
    assert failing(report) == {PYTORCH[key].format(i) for key in exchanged for i in range(LAYERS)}


ATTENTIONS = {
    "flax": "params/Block_0/MultiHeadDotProductAttention_0/{}/kernel",
    "PyTorch": "layers.0.self_attn.{:.1}_proj.weight",
    "packed": "layers.0.self_attn.in_proj_weight",
    "BERT": "encoder.layer.0.attention.self.{}.weight",
    "LLaMA": "layers/0/attention/w{:.1}/kernel",
}


@pytest.mark.parametrize(("left", "right"), [*itertools.permutations(ATTENTIONS, 2)])
@pytest.mark.parametrize("exchanged", ["", "query key", "key value"])
def test_queries_keys_and_values_have_names_everywhere(left: str, right: str, exchanged: str) -> None:
    kernels = dict(zip(("query", "key", "value"), RNG.normal(size=(3, 6, 6)), strict=True))
    moved = dict(zip(exchanged.split(), exchanged.split()[::-1], strict=True))

    def attention(style: str, moved: dict[str, str]) -> Any:
        values = {name: kernels[moved.get(name, name)] for name in kernels}
        if style == "packed":
            return dump({ATTENTIONS[style]: np.concatenate([x.T for x in values.values()])})
        laid_out = {name: x if style in ("flax", "LLaMA") else x.T for name, x in values.items()}
        return dump({ATTENTIONS[style].format(name): x for name, x in laid_out.items()})

    report = diff(attention(left, {}), attention(right, moved))
    assert report.passes == (not exchanged)
    assert len(failing(report)) == len(moved)


T5 = {
    "layer.0.SelfAttention.k": "attention/key",
    "layer.0.SelfAttention.o": "attention/out",
    "layer.1.DenseReluDense.wi": "mlp/up",
    "layer.1.DenseReluDense.wo": "mlp/down",
}


@pytest.mark.parametrize(
    ("layers", "exchanged"),
    [
        (2, {"attention/key": "mlp/up"}),  # a key is named so on both sides
        (3, {"attention/key": "mlp/up"}),
        (3, {"attention/out": "mlp/down"}),  # the names of these have nothing in common
        (3, {}),
    ],
)
def test_a_module_of_one_layer_that_is_exchanged_with_one_of_another_fails(
    layers: int, exchanged: dict[str, str]
) -> None:
    """Most layers say which modules correspond."""
    values = {(name, i): RNG.normal(size=(6, 6)) for name in T5 for i in range(layers)}
    a = {f"encoder.block.{i}.{name}.weight": x.T for (name, i), x in values.items()}
    b = {f"target/encoder/layers_{i}/{T5[name]}/kernel": x for (name, i), x in values.items()}
    for one, other in exchanged.items():
        x, y = f"target/encoder/layers_0/{one}/kernel", f"target/encoder/layers_1/{other}/kernel"
        b[x], b[y] = b[y], b[x]
    report = diff(dump(a), dump(b))
    assert report.passes == (not exchanged) and len(failing(report)) == 2 * len(exchanged), report.crossed


def test_packed_attention_may_have_a_number_for_a_name() -> None:
    sizes = {"attn.c_attn": (6, 18), "attn.c_proj": (6, 6), "mlp.c_fc": (6, 24), "mlp.c_proj": (24, 6)}
    values = {(name, i): RNG.normal(size=size) for name, size in sizes.items() for i in range(2)}
    a = {f"h.{i}.{name}.{x}": y for (name, i), k in values.items() for x, y in (("weight", k.T), ("bias", k[0]))}
    numbers = dict(
        zip(sizes, ("Attention_0/Dense_0", "Attention_0/Dense_1", "MLP_0/Dense_0", "MLP_0/Dense_1"), strict=True)
    )
    b = {
        f"Block_{i}/{numbers[name]}/{x}": y
        for (name, i), k in values.items()
        for x, y in (("kernel", k), ("bias", k[0]))
    }
    assert diff(dump(a), dump(b)).passes
    x, y = (f"Block_{i}/Attention_0/Dense_0/kernel" for i in range(2))
    assert not diff(dump(a), dump(b | {x: b[y], y: b[x]})).passes


NORMALIZED = {
    "named": {
        "conv": ("conv/kernel", "conv/bias"),
        "norm": ("norm/gamma", "norm/beta", "norm/moving_mean", "norm/moving_variance"),
        "dense": ("dense/kernel", "dense/bias"),
    },
    "numbered": {
        "conv": ("layers/conv2d/vars/0", "layers/conv2d/vars/1"),
        "norm": tuple(f"layers/batch_normalization/vars/{i}" for i in range(4)),
        "dense": ("layers/dense/vars/0", "layers/dense/vars/1"),
    },
    "flax": {
        "conv": ("params/Conv_0/kernel", "params/Conv_0/bias"),
        "norm": (
            *("params/BatchNorm_0/scale", "params/BatchNorm_0/bias"),
            *("batch_stats/BatchNorm_0/mean", "batch_stats/BatchNorm_0/var"),
        ),
        "dense": ("params/Dense_0/kernel", "params/Dense_0/bias"),
    },
    "PyTorch": {
        "conv": ("net.0.weight", "net.0.bias"),
        "norm": ("net.1.weight", "net.1.bias", "net.1.running_mean", "net.1.running_var"),
        "dense": ("net.4.weight", "net.4.bias"),
    },
}
VECTORS = [*itertools.combinations([("conv", 1), ("dense", 1), *(("norm", i) for i in range(4))], 2)]


@pytest.mark.parametrize("exchanged", [None, *VECTORS])
@pytest.mark.parametrize(("left", "right"), [*itertools.product(("named", "numbered"), ("flax", "PyTorch"))])
def test_vectors_that_are_exchanged_between_modules_or_roles_fail(left: str, right: str, exchanged: Any) -> None:
    """Convolution, batch normalization and dense layer of equal width, whose vectors have one shape."""
    sizes = {"conv": [(1, 1, 4, 4), 4], "norm": [4] * 4, "dense": [(4, 5), 4]}
    values = {(module, i): RNG.normal(size=n) for module, each in sizes.items() for i, n in enumerate(each)}

    def leaves(style: str, values: dict[tuple[str, int], np.ndarray]) -> Any:
        named = {NORMALIZED[style][module][i]: x for (module, i), x in values.items()}
        return dump(
            {
                name: np.moveaxis(x, (-1, -2), (0, 1)) if style == "PyTorch" and x.ndim > 1 else x
                for name, x in named.items()
            }
        )

    wrong = dict(values)
    if exchanged is not None:
        x, y = exchanged
        wrong[x], wrong[y] = values[y], values[x]
    report = diff(leaves(left, values), leaves(right, wrong))
    assert report.passes == (exchanged is None), [row.pair for row in report.rows]


@pytest.mark.parametrize("kept", ["scale", "center"])
def test_three_vectors_of_a_batch_normalization_may_lack_either(kept: str) -> None:
    names = {"scale": "scale", "center": "bias"}
    values = RNG.normal(size=(3, 4))
    a = {f"layers/batch_normalization/vars/{i}": x for i, x in enumerate(values)}
    b = [f"params/BatchNorm_0/{names[kept]}", "batch_stats/BatchNorm_0/mean", "batch_stats/BatchNorm_0/var"]
    assert diff(dump(a), dump(dict(zip(b, values, strict=True)))).passes


@pytest.mark.parametrize("moved", ["kernel", "bias"])
def test_leaves_that_are_exchanged_between_two_of_three_layers_fail(moved: str) -> None:
    """The other leaves of the two layers are not in reverse, as all would be of a decoder."""
    arrays = {(i, leaf): RNG.normal(size=size) for i in range(3) for leaf, size in (("kernel", (4, 4)), ("bias", 4))}
    a = dump({f"fc{i + 1}/{leaf}": x for (i, leaf), x in arrays.items()})
    b = dump({f"Dense_{2 - i if leaf == moved else i}/{leaf}": x for (i, leaf), x in arrays.items()})
    report = diff(a, b)
    assert failing(report) == {f"fc1/{moved}", f"fc3/{moved}"}
    assert set(report.crossed) == {
        (f"fc1/{moved}", f"Dense_2/{moved}", f"Dense_0/{moved}"),
        (f"fc3/{moved}", f"Dense_0/{moved}", f"Dense_2/{moved}"),
    }
    reverse = dump({f"Dense_{2 - i}/{leaf}": x for (i, leaf), x in arrays.items()})
    assert diff(a, reverse).passes


def test_exchanged_normalizations_with_scales_near_1_fail() -> None:
    """Their cosine is near 1; names decide, also where a prefix is on one side only."""
    values = {(key, i): 1 + 0.02 * RNG.normal(size=8).astype(np.float32) for key in ("norm", "second") for i in (0, 1)}
    a = {PYTORCH[key].format(i): x for (key, i), x in values.items()}
    b = {name.replace("model.", "net.").replace(".weight", ".scale").replace(".", "/"): x for name, x in a.items()}
    a["model.head.weight"] = b["net/head/w"] = RNG.normal(size=(8, 3))
    assert diff(dump(a), dump(b)).passes
    for x, y in itertools.combinations(list(b)[:4], 2):
        assert not diff(dump(a), dump(b | {x: b[y], y: b[x]})).passes, (x, y)


def test_auto_numbered_normalizations_with_scales_near_1_belong_to_their_biases() -> None:
    scales, biases = (near + 0.02 * RNG.normal(size=(3, 8)).astype(np.float32) for near in (1, 0))
    names = ["embeddings.LayerNorm", "attention.LayerNorm", "mlp.output.LayerNorm"]
    a = {f"{x}.weight": y for x, y in zip(names, scales, strict=True)}
    a |= {f"{x}.bias": y for x, y in zip(names, biases, strict=True)}
    sides = {"scale": scales, "bias": biases}
    b = {f"LayerNorm_{i}/{kind}": x[i] for kind, x in sides.items() for i in range(3)}
    assert diff(dump(a), dump(b)).passes
    for kind, (i, j) in itertools.product(sides, itertools.combinations(range(3), 2)):
        x, y = f"LayerNorm_{i}/{kind}", f"LayerNorm_{j}/{kind}"
        assert not diff(dump(a), dump(b | {x: b[y], y: b[x]})).passes, (x, y)


def test_layers_in_reverse_with_equal_biases_pass() -> None:
    """The biases are matched in order, and might as well be in reverse."""
    kernels, zeros = [RNG.normal(size=(4, 4)) for _ in range(3)], np.zeros(4)
    a, b = (
        dump({f"{layer}{i}/{leaf}": x for i, kernel in each for leaf, x in (("kernel", kernel), ("bias", zeros))})
        for layer, each in (("fc", enumerate(kernels, 1)), ("Dense_", enumerate(kernels[::-1])))
    )
    assert diff(a, b).passes


def test_a_rule_says_that_another_order_is_intended() -> None:
    a, b = renamed(PYTORCH), renamed(OTHERS["auto-numbered"], order=(1, 0, 2))
    assert not diff(a, b).passes
    order = (1, 0, 2)
    exchanged = [
        Rule(re.compile(re.escape(x.format(i))), OTHERS["auto-numbered"][key].format(order[i]), None)
        for key, x in PYTORCH.items()
        for i in range(LAYERS)
    ]
    assert diff(a, b, rules=Rules(tuple(exchanged))).passes


RIGHT = {
    "Keras, the first without a number": [
        (f"net.{i}.{x}", f"layers/batch_normalization{f'_{i}' * (i > 0)}/vars/{j}")
        for i in range(12)
        for j, x in enumerate(("weight", "bias"))
    ],
    "Keras, numbered on in each block": [
        (f"blocks.{i}.norm{j}.gamma", f"block{f'_{i}' * (i > 0)}/norm_{2 * i + j}/gamma")
        for i in range(2)
        for j in (1, 2)
    ],
    "Haiku": [
        (f"mlps.{i}.layers.{2 * j}.scale", f"net/~/mlp{f'_{i}' * (i > 0)}/~/linear_{j}/w")
        for i in range(3)
        for j in range(3)
    ],
    "layers of experts and experts of layers": [
        (f"experts.{i}.layers.{j}.scale", f"layer_{j}/expert_{i}/w") for i in range(2) for j in range(3)
    ],
    "a decoder in reverse order": [
        (f"decoder.up.{i}.{x}.scale", f"decoder/up_blocks_{1 - i}/{y}/w")
        for i in range(2)
        for x, y in (("block.norm1", "resnet/norm_1"), ("block.norm2", "resnet/norm_2"), ("wide", "upsampler"))
    ],
    "a pyramid in reverse order": [(f"refinenet{i + 1}.scale", f"fusion/layers/{3 - i}/w") for i in range(4)],
    "decoders without levels": [
        (f"dec{i}.conv{j}.scale", f"conv_{14 - 2 * i + j}/w") for i in range(3) for j in (1, 2)
    ],
    "words that belong to another leaf": [
        (f"model.layers.{i}.{x}.weight", f"layers.{i}.{y}.weight")
        for i in range(2)
        for x, y in (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"), ("down", "w2"))
    ],
}


@pytest.mark.parametrize("name", RIGHT)
def test_frameworks_may_number_layers_otherwise(name: str) -> None:
    values = [RNG.normal(size=4) for _ in RIGHT[name]]
    a, b = ({pair[i]: x for pair, x in zip(RIGHT[name], values, strict=True)} for i in (0, 1))
    report = diff(dump(a), dump(b))
    assert report.passes, report.crossed
    wrong, middle = [*values], len(values) // 2
    wrong[0], wrong[middle] = values[middle], values[0]
    assert not diff(dump(a), dump(dict(zip(b, wrong, strict=True)))).passes


def test_equal_leaves_are_in_any_order() -> None:
    a = {f"layers.{i}.gamma": np.ones(4) for i in range(3)}
    b = {f"stage_{i}/norm/scale": np.ones(4) for i in (2, 0, 1)}
    assert diff(dump(a), dump(b)).passes


def test_the_command_says_what_names_imply(tmp_path: Path) -> None:
    sides = [{f"stage_{i}_scale/gamma": VALUES["norm", j] for i, j in enumerate(order)} for order in ((0, 1), (1, 0))]
    a, right, wrong = saved(tmp_path, {f"stages.{i}.gamma": VALUES["norm", i] for i in range(2)}, *sides)
    code, output = run(a, wrong)
    assert code == 1 and "names pair with another leaf" in output and "stage_0_scale/gamma" in output
    code, output = run(a, right)
    assert code == 0 and "2 were matched by values or shape, not by name." in output


@pytest.mark.parametrize(
    ("names", "upsamples", "passes"),
    [
        (("dwconv.weight", "dwconv/kernel"), False, False),
        (("dwconv.weight", "dwconv/kernel"), True, True),
        (("up.weight", "up/kernel"), False, True),
        (("last.weight", "ConvTranspose_0/kernel"), False, True),
        (("last.weight", "last/kernel"), False, False),
        (("last_even.weight", "last_even/kernel"), False, True),
    ],
)
def test_a_flipped_kernel_that_may_be_depthwise_fails(names: tuple[str, str], upsamples: bool, passes: bool) -> None:
    sides: list[dict[str, np.ndarray]] = [{}, {}]
    for (left, right), outputs in ((names, 1), (("x.weight", "x/kernel"), 5))[: 2 if upsamples else 1]:
        size = 4 if "even" in left else 3
        weight = RNG.normal(size=(8, outputs, size, size)).astype(np.float32)
        sides[0][left], sides[1][right] = weight, np.flip(weight, (2, 3)).transpose(2, 3, 0, 1)
    report = diff(*map(dump, sides))
    assert report.passes is passes and all(row.pair.flipped for row in report.rows)


@pytest.mark.parametrize("other", ["a.npz", {"w": np.ones(2)}, [1]])
def test_only_dumps_are_compared(other: Any) -> None:
    with pytest.raises(GradCombineError, match="diff: expected dumps, as open_dump returns them, received"):
        diff(dump({"w": np.ones(2)}), other)


def test_numbers_in_names_may_have_thousands_of_digits() -> None:
    number, values = "9" * 5000, RNG.normal(size=(3, 4))
    a = dict(zip((f"a{number}.w", f"a{number}.z", f"q/vars/{number}"), values, strict=True))
    b = dict(zip((f"b{number}.x", f"b1{number}.y", "t/vars/1"), values, strict=True))
    assert diff(dump(a), dump(b)).passes


def calls(function: Callable[[], object]) -> int:
    """The number of calls of functions, Python's and built-in ones, that a call makes."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(None)
    return events.count("call") + events.count("c_call")


def test_the_cost_of_names_without_common_words_is_linear() -> None:
    def cost(number: int) -> int:
        words = ["".join(letters) for letters in itertools.islice(itertools.product("cdfhjm", repeat=4), number)]
        sides = [
            {f"{word}{end}/kernel": np.float32(i) + np.ones((5, 3)) for i, word in enumerate(words)} for end in "ps"
        ]
        pairs = [Pair(*names, None, "values") for names in zip(*sides, strict=True)]
        return calls(lambda: [*crossed(dump(sides[0]), dump(sides[1]), pairs)])

    assert cost(400) < 6 * cost(100)

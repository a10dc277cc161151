"""PyTorch modules against equivalent flax, Keras and equinox modules: every leaf is matched with equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import torch

from gradcombine.formats import from_array
from gradcombine.verify.diff.comparing import DiffReport, diff
from gradcombine.verify.diff.dumps import Dump, open_dump

DIM, HEADS = 8, 2
RNG = np.random.default_rng(2)
TOKENS = RNG.normal(size=(4, 5, DIM)).astype(np.float32)
IMAGES = RNG.normal(size=(2, 6, 6, 3)).astype(np.float32)


def dump(arrays: dict[str, Any]) -> Dump:
    given = {name: np.asarray(x) for name, x in arrays.items()}
    return {name: from_array(name, x.shape, x.dtype, lambda x=x: x) for name, x in given.items()}


def of_torch(path: Path, module: torch.nn.Module) -> Dump:
    torch.save(torch.nn.ModuleDict({"layer": module}).state_dict(), path / "w.pt")
    return open_dump(path / "w.pt")


def of_flax(collections: Any) -> Dump:
    leaves = jax.tree_util.tree_flatten_with_path(collections)[0]
    return dump({"/".join(key.key for key in keys): x for keys, x in leaves})


def weights(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Randomizes all weights: PyTorch initializes many biases to zeros, which could not be told apart."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape) + 0.5)
    return {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}


def pairs(report: DiffReport) -> dict[str, str]:
    assert report.passes, report
    return {row.pair.a.removeprefix("layer."): row.pair.b for row in report.rows}


def assert_close(a: torch.Tensor, b: Any) -> None:
    np.testing.assert_allclose(a.detach().numpy(), np.asarray(b), rtol=2e-5, atol=2e-5)


def test_linear(tmp_path: Path) -> None:
    module = torch.nn.Linear(DIM, DIM)
    w = weights(module)
    params = {"layer": {"kernel": w["weight"].T, "bias": w["bias"]}}
    assert_close(module(torch.tensor(TOKENS)), nn.Dense(DIM).apply({"params": params["layer"]}, TOKENS))
    report = diff(of_torch(tmp_path, module), of_flax({"params": params}))
    assert pairs(report) == {"weight": "params/layer/kernel", "bias": "params/layer/bias"}
    assert {row.pair.axes for row in report.rows} == {(1, 0), None}
    linear = eqx.nn.Linear(DIM, DIM, key=jax.random.key(0))
    linear = eqx.tree_at(lambda x: (x.weight, x.bias), linear, (jnp.asarray(w["weight"]), jnp.asarray(w["bias"])))
    assert_close(module(torch.tensor(TOKENS[0, 0])), linear(TOKENS[0, 0]))
    found = diff(of_torch(tmp_path, module), dump({"layer.weight": linear.weight, "layer.bias": linear.bias}))
    assert [row.pair.axes for row in found.rows] == [None, None] and found.passes


@pytest.mark.parametrize("transposed", [False, True])
def test_convolution(tmp_path: Path, transposed: bool) -> None:
    """OIHW against HWIO; transposed, IOHW against Keras' HWOI."""
    kind, layer = (
        (torch.nn.ConvTranspose2d, keras.layers.Conv2DTranspose)
        if transposed
        else (torch.nn.Conv2d, keras.layers.Conv2D)
    )
    module, other = kind(3, 4, 3), layer(4, 3, name="layer")
    w = weights(module)
    other.build(IMAGES.shape)
    other.set_weights([w["weight"].transpose(2, 3, 1, 0), w["bias"]])
    assert_close(module(torch.tensor(IMAGES.transpose(0, 3, 1, 2))).permute(0, 2, 3, 1), other(IMAGES))
    report = diff(of_torch(tmp_path, module), dump({x.path: x.numpy() for x in other.weights}))
    assert pairs(report) == {"weight": "layer/kernel", "bias": "layer/bias"}
    assert (3, 2, 0, 1) in {row.pair.axes for row in report.rows}


def test_norms_and_embeddings(tmp_path: Path) -> None:
    """Weight, scale or gamma; running, moving or batch statistics; and a counter that only PyTorch has."""
    modules = {"norm": torch.nn.LayerNorm(DIM), "bn": torch.nn.BatchNorm1d(DIM), "embed": torch.nn.Embedding(5, DIM)}
    module = torch.nn.ModuleDict(modules).eval()
    w = weights(module)
    scale = {name: {"scale": w[f"{name}.weight"], "bias": w[f"{name}.bias"]} for name in ("norm", "bn")}
    stats = {"mean": w["bn.running_mean"], "var": w["bn.running_var"]}
    rows = torch.tensor(TOKENS[0])
    assert_close(modules["norm"](rows), nn.LayerNorm(epsilon=1e-5).apply({"params": scale["norm"]}, TOKENS[0]))
    norm = nn.BatchNorm(use_running_average=True)
    assert_close(modules["bn"](rows), norm.apply({"params": scale["bn"], "batch_stats": stats}, TOKENS[0]))
    params = {"layer": {**scale, "embed": {"embedding": w["embed.weight"]}}}
    report = diff(of_torch(tmp_path, module), of_flax({"params": params, "batch_stats": {"layer": {"bn": stats}}}))
    assert report.only_a == ("layer.bn.num_batches_tracked",) and not report.only_b
    found = {row.pair.a: row.pair.b for row in report.rows if row.passes}
    assert len(found) == 7
    assert found["layer.norm.weight"] == "params/layer/norm/scale"
    assert found["layer.bn.running_var"] == "batch_stats/layer/bn/var"
    layer = keras.layers.BatchNormalization(name="bn", epsilon=1e-5)
    layer.build((None, DIM))
    layer.set_weights([w[f"bn.{x}"] for x in ("weight", "bias", "running_mean", "running_var")])
    assert_close(modules["bn"](rows), layer(TOKENS[0], training=False))
    keras_bn = dump({f"layer/{x.path}": x.numpy() for x in layer.weights})
    ours = {name: leaf for name, leaf in of_torch(tmp_path, module).items() if name.startswith("layer.bn.")}
    ours.pop("layer.bn.num_batches_tracked")
    assert pairs(diff(ours, keras_bn))["bn.running_mean"] == "layer/bn/moving_mean"


def attention(w: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Parameters of flax's attention equivalent to those of PyTorch's."""
    params: dict[str, dict[str, np.ndarray]] = {}
    kernels, biases = np.split(w["in_proj_weight"], 3), np.split(w["in_proj_bias"], 3)
    for name, kernel, bias in zip(("query", "key", "value"), kernels, biases, strict=True):
        params[name] = {"kernel": kernel.T.reshape(DIM, HEADS, -1), "bias": bias.reshape(HEADS, -1)}
    kernel = w["out_proj.weight"].T.reshape(HEADS, -1, DIM)
    return params | {"out": {"kernel": kernel, "bias": w["out_proj.bias"]}}


@pytest.mark.parametrize("name", ["layer", "renamed"])
def test_attention(tmp_path: Path, name: str) -> None:
    """Packed, transposed weights against kernels with a head axis, matched by name and by value."""
    module = torch.nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.copy_(torch.randn(tensor.shape))
    params = attention({key: x.numpy() for key, x in module.state_dict().items()})
    tokens = torch.tensor(TOKENS)
    flax = nn.MultiHeadDotProductAttention(HEADS).apply({"params": params}, TOKENS, TOKENS)
    assert_close(module(tokens, tokens, tokens)[0], flax)
    renamed = params if name == "layer" else {f"{part}_of_all": leaves for part, leaves in params.items()}
    report = diff(of_torch(tmp_path, module), of_flax({"params": {name: renamed}}))
    found = pairs(report)
    assert len(found) == 8
    for part, other in zip("qkv", ("query", "key", "value"), strict=True):
        assert found[f"{part}_proj_weight"] in (f"params/layer/{other}/kernel", f"params/renamed/{other}_of_all/kernel")
    assert diff(of_flax({"params": {name: renamed}}), of_torch(tmp_path, module)).passes


def test_swapped_projections_are_named(tmp_path: Path) -> None:
    module = torch.nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.copy_(torch.randn(tensor.shape))
    params = attention({key: x.numpy() for key, x in module.state_dict().items()})
    params["query"], params["key"] = params["key"], params["query"]
    report = diff(of_torch(tmp_path, module), of_flax({"params": {"layer": params}}))
    assert set(report.mixed_up) == {
        (f"layer.{part}_proj_{leaf}", f"params/layer/{other}/{kernel}")
        for part, other in (("q", "key"), ("k", "query"))
        for leaf, kernel in (("weight", "kernel"), ("bias", "bias"))
    }

"""PyTorch's LSTM and GRU agree with flax, flax.nnx, equinox and Keras in outputs, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from flax import nnx

from gradcombine.verify import record
from gradcombine.verify.diff.comparing import Allowed, DiffReport, diff
from gradcombine.verify.diff.dumps import open_dump
from tests.verify.diff.test_command import run

INPUT, HIDDEN, LENGTH, BATCH = 3, 4, 5, 2
X = np.random.default_rng(3).normal(size=(BATCH, LENGTH, INPUT)).astype(np.float32)
GATES = {"LSTM": "ifgo", "GRU": "rzn"}

Arrays = dict[str, np.ndarray]
Ported = tuple[Any, Callable[[Any], Any]]
"""Parameters, and a function from parameters to the outputs of all steps."""


def module(kind: str, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return getattr(torch.nn, kind)(INPUT, HIDDEN, batch_first=True, **options)


def split(kind: str, weights: Arrays, layer: str = "_l0") -> dict[str, dict[str, np.ndarray]]:
    """Kernels and biases of each gate, named as in PyTorch's documentation: ``W["if"]``, ``b["hf"]``."""
    parts = {"W": {}, "b": {}}
    for letter, name in (("W", "weight"), ("b", "bias")):
        for side in "ih":
            blocks = np.split(weights[f"{name}_{side}h{layer}"], len(GATES[kind]))
            parts[letter] |= {side + gate: block for gate, block in zip(GATES[kind], blocks, strict=True)}
    return parts


def one_bias(kind: str, b: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One bias per gate: the sum of both biases, but for GRU's gate n the input bias."""
    return {gate: b["i" + gate] if gate == "n" else b["i" + gate] + b["h" + gate] for gate in GATES[kind]}


def linen_cell(kind: str, weights: Arrays, layer: str = "_l0") -> dict[str, dict[str, np.ndarray]]:
    parts = split(kind, weights, layer)
    cell: dict[str, dict[str, np.ndarray]] = {name: {"kernel": w.T} for name, w in parts["W"].items()}
    for gate, bias in one_bias(kind, parts["b"]).items():
        cell[("h" if kind == "LSTM" else "i") + gate]["bias"] = bias
    if kind == "GRU":
        cell["hn"]["bias"] = parts["b"]["hn"]
    return cell


def linen(kind: str, weights: Arrays) -> Ported:
    model = nn.RNN(nn.OptimizedLSTMCell(HIDDEN) if kind == "LSTM" else nn.GRUCell(HIDDEN))
    return {"cell": linen_cell(kind, weights)}, lambda p: model.apply({"params": p}, X)


def stacked(kind: str, weights: Arrays) -> Ported:
    """The cell of flax.nnx, with one kernel for the input gates and one for the state gates."""
    parts = split(kind, weights)
    if kind == "GRU":  # flax.nnx has no bias inside r (W h + b)
        weights["bias_hh_l0"][2 * HIDDEN :] = 0
    kernels = {side: weights[f"weight_{side}h_l0"].T for side in "ih"}
    bias = np.concatenate(list(one_bias(kind, parts["b"]).values()))
    cell = (nnx.OptimizedLSTMCell if kind == "LSTM" else nnx.GRUCell)(INPUT, HIDDEN, rngs=nnx.Rngs(0))
    graph, _, rest = nnx.split(cell, nnx.Param, ...)
    params: dict[str, Any] = {f"dense_{side}": {"kernel": kernel} for side, kernel in kernels.items()}
    params["dense_h" if kind == "LSTM" else "dense_i"]["bias"] = bias

    def outputs(p: Any) -> Any:
        ported, zeros, found = (
            nnx.merge(graph, nnx.State(jax.tree.map(nnx.Param, p)), rest),
            jnp.zeros((BATCH, HIDDEN)),
            [],
        )
        carry: Any = (zeros, zeros) if kind == "LSTM" else zeros
        for x in X.transpose(1, 0, 2):
            carry, y = ported(carry, x)
            found.append(y)
        return jnp.stack(found, axis=1)

    return {"cell": params}, outputs


def equinox(kind: str, weights: Arrays) -> Ported:
    parts = split(kind, weights)
    cell = getattr(eqx.nn, f"{kind}Cell")(INPUT, HIDDEN, key=jax.random.key(0))
    new = [weights["weight_ih_l0"], weights["weight_hh_l0"], np.concatenate([*one_bias(kind, parts["b"]).values()])]
    places = ["weight_ih", "weight_hh", "bias"] + (["bias_n"] if kind == "GRU" else [])
    new += [parts["b"]["hn"]] if kind == "GRU" else []
    cell = eqx.tree_at(lambda c: [getattr(c, x) for x in places], cell, [jnp.asarray(x) for x in new])
    params, static = eqx.partition({"rnn": cell}, eqx.is_array)

    def outputs(p: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            carry = eqx.combine(p, static)["rnn"](x, carry)
            return carry, carry[0] if kind == "LSTM" else carry

        zeros = jnp.zeros(HIDDEN)
        return jax.vmap(lambda row: jax.lax.scan(step, (zeros, zeros) if kind == "LSTM" else zeros, row)[1])(X)

    return params, outputs


FRAMEWORKS = {"linen": linen, "nnx": stacked, "equinox": equinox}


def state(model: torch.nn.Module) -> Arrays:
    """The parameters as arrays that share the model's memory."""
    return {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}


def loss(outputs: Any) -> Any:
    return ((outputs + 1) ** 3).sum()


def pairs(report: DiffReport) -> dict[str, str]:
    assert report.passes, report
    return {row.pair.a: row.pair.b for row in report.rows}


def saved(path: Path, params: Any, name: str = "params") -> Path:
    with record(path) as recorder:
        recorder(0, **{name: params})
    return path / "step_00000000.npz"


@pytest.mark.parametrize("framework", ["linen", "equinox", pytest.param("nnx", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", GATES)
def test_a_cell_of_jax(tmp_path: Path, kind: str, framework: str) -> None:
    model = module(kind)
    params, outputs = FRAMEWORKS[framework](kind, state(model))
    torch_outputs, _ = model(torch.tensor(X))
    (_, found), gradients = jax.jit(jax.value_and_grad(lambda p: (loss(y := outputs(p)), y), has_aux=True))(params)
    np.testing.assert_allclose(torch_outputs.detach().numpy(), found, rtol=2e-5, atol=2e-6)
    torch.save(torch.nn.ModuleDict({"rnn": model}).state_dict(), tmp_path / "w.pt")
    ported = saved(tmp_path / "ported", params)
    code, text = run(tmp_path / "w.pt", ported)
    lone = framework == "nnx" and kind == "GRU"
    assert code == lone and ("rnn.bias_hh_l0[n] only in A" in " ".join(text.split())) == lone
    loss(torch_outputs).backward()
    torch.save({name: p.grad for name, p in model.named_parameters()}, tmp_path / "grads.pt")
    grads = saved(tmp_path / "grads", gradients)
    report = diff(open_dump(tmp_path / "grads.pt"), open_dump(grads), allowed=Allowed(relative=1e-5), gradients=True)
    assert report.only_a == (("bias_hh_l0[n]",) if lone else ()) and not report.only_b + report.left_out
    assert all(row.passes for row in report.rows) and len(report.rows) == (16 if kind == "LSTM" else 12 - lone)
    assert run(tmp_path / "grads.pt", grads, "--rtol", "1e-5")[0] == lone


def torch_gradients(path: Path, model: torch.nn.Module) -> torch.Tensor:
    outputs, _ = model(torch.tensor(X))
    loss(outputs).backward()
    torch.save({f"rnn.{name}": p.grad for name, p in model.named_parameters()}, path)
    return outputs.detach()


def keras_layers(kind: str, model: torch.nn.Module) -> keras.Model:
    """Two bidirectional layers."""
    weights, layers = state(model), []
    for number in range(2):
        layer = keras.layers.Bidirectional(getattr(keras.layers, kind)(HIDDEN, return_sequences=True))
        layer.build((BATCH, LENGTH, 2 * HIDDEN if number else INPUT))
        for name, cell in (("", layer.forward_layer.cell), ("_reverse", layer.backward_layer.cell)):
            parts = split(kind, weights, f"_l{number}{name}")
            order = "ifgo" if kind == "LSTM" else "zrn"
            kernels = [np.concatenate([parts["W"][side + gate] for gate in order]).T for side in "ih"]
            biases = np.stack([np.concatenate([parts["b"][side + gate] for gate in order]) for side in "ih"])
            cell.set_weights([*kernels, biases.sum(0) if kind == "LSTM" else biases])
        layers.append(layer)
    return keras.Sequential([keras.Input((LENGTH, INPUT)), *layers])


@pytest.mark.parametrize("kind", GATES)
def test_layers_of_keras_in_both_directions(tmp_path: Path, kind: str) -> None:
    """Both Keras' weights file, whose names carry no information, and gradients."""
    model = module(kind, num_layers=2, bidirectional=True)
    layers = keras_layers(kind, model)
    expected = torch_gradients(tmp_path / "grads.pt", model)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    layers.save_weights(tmp_path / "w.weights.h5")
    with tf.GradientTape() as tape:
        outputs = layers(X)
        cost = tf.reduce_sum((outputs + 1) ** 3)
    np.testing.assert_allclose(expected.numpy(), outputs, rtol=2e-5, atol=2e-6)
    assert run(tmp_path / "w.pt", tmp_path / "w.weights.h5")[0] == 0
    found = pairs(diff(open_dump(tmp_path / "w.pt"), open_dump(tmp_path / "w.weights.h5")))
    assert len(found) == 4 * 12
    gate = "f" if kind == "LSTM" else "z"
    assert found[f"weight_ih_l1_reverse[{gate}]"] == f"layers/bidirectional_1/backward_layer/cell/vars/0[{gate}]"
    ours = {
        x.path: y.numpy() for x, y in zip(layers.weights, tape.gradient(cost, layers.trainable_variables), strict=True)
    }
    saved(tmp_path / "run", ours, "gradients")
    assert run(tmp_path / "grads.pt", tmp_path / "run" / "step_00000000.npz", "--rtol", "1e-5")[0] == 0


def test_a_swapped_gate_is_named(tmp_path: Path) -> None:
    """Swapped input and forget gates, which fit all shapes and run without an error."""
    model = module("LSTM")
    cell = linen_cell("LSTM", state(model))
    for side in "ih":
        cell[side + "i"], cell[side + "f"] = cell[side + "f"], cell[side + "i"]
    torch.save(torch.nn.ModuleDict({"rnn": model}).state_dict(), tmp_path / "w.pt")
    code, text = run(tmp_path / "w.pt", saved(tmp_path / "ported", {"cell": cell}))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert code == 1
    for ours, theirs in (("weight_hh_l0[i]", "hf/kernel"), ("weight_ih_l0[f]", "ii/kernel")):
        assert f"rnn.{ours} params/cell/{theirs}" in lines
    assert "rnn.bias_ih_l0[i] + rnn.bias_hh_l0[i] params/cell/hf/bias" in lines


def test_two_equal_biases_are_not_compared_unless_it_is_said_what_they_are(tmp_path: Path) -> None:
    """For values the other bias is their sum, for gradients it is either. Equal biases stay equal in training."""
    model = module("LSTM")
    model.bias_hh_l0.data[:] = model.bias_ih_l0.data
    torch.save(model.state_dict(), tmp_path / "w.pt")
    ported = saved(tmp_path / "ported", {"cell": linen_cell("LSTM", state(model))})
    forgotten = linen_cell("LSTM", state(model) | {"bias_hh_l0": np.zeros(4 * HIDDEN, np.float32)})
    half = saved(tmp_path / "half", {"cell": forgotten})
    for other in (ported, half):
        code, text = run(tmp_path / "w.pt", other)
        assert code == 1 and "4 could not be compared" in text and "--gradients" in text
    assert [run(tmp_path / "w.pt", ported, flag)[0] for flag in ("--values", "--gradients")] == [0, 1]
    assert [run(tmp_path / "w.pt", half, flag)[0] for flag in ("--values", "--gradients")] == [1, 0]


def test_a_reference_has_the_layout_of_one_side(tmp_path: Path) -> None:
    """The reference is a float64 dump of PyTorch or flax; the inaccurate side is named."""
    model = module("GRU").double()
    weights = state(model)
    torch.save(model.state_dict(), tmp_path / "torch64.pt")
    flax64 = saved(tmp_path / "flax64", {"cell": linen_cell("GRU", weights)})
    torch.save(model.float().state_dict(), tmp_path / "torch.pt")
    narrow = {name: x.astype(np.float32) for name, x in weights.items()}
    flax = saved(tmp_path / "flax", {"cell": linen_cell("GRU", narrow)})
    narrow["weight_hh_l0"] = narrow["weight_hh_l0"] * np.float32(1.01)
    off = saved(tmp_path / "off", {"cell": linen_cell("GRU", narrow)})
    for reference in (tmp_path / "torch64.pt", flax64):
        assert run(tmp_path / "torch.pt", flax, "--reference", reference)[0] == 0
        code, text = run(tmp_path / "torch.pt", off, "--reference", reference)
        assert code == 1 and "3 (B is off)" in text

"""Gradients of a training loop in PyTorch: recorded, compared with another framework's, and explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from gradcombine import GradCombineError
from gradcombine.verify import compare, explain, first_divergence, record
from gradcombine.verify.diff.comparing import Allowed
from gradcombine.verify.diff.dumps import open_dump

RATE = 0.1
RNG = np.random.default_rng(0)
BATCHES = [(RNG.normal(size=(8, 3)).astype(np.float32), RNG.normal(size=(8, 2)).astype(np.float32)) for _ in range(3)]
WEIGHT = RNG.normal(size=(2, 3)).astype(np.float32)


def torch_run(trace: Path, decay: float = 0.0) -> None:
    model = torch.nn.ModuleDict({"dense": torch.nn.Linear(3, 2)})
    model["dense"].weight.data = torch.tensor(WEIGHT)
    model["dense"].bias.data.zero_()
    optimizer = torch.optim.SGD(model.parameters(), RATE, weight_decay=decay)
    with record(trace) as recorder:
        for step, (x, y) in enumerate(BATCHES):
            loss = (model["dense"](torch.tensor(x)) - torch.tensor(y)).square().mean()
            loss.backward()
            recorder(step, gradients={name: p.grad for name, p in model.named_parameters()})
            optimizer.step()
            recorder(step, params=dict(model.named_parameters()))
            optimizer.zero_grad(set_to_none=False)  # which overwrites what was recorded, were it no copy


def jax_run(trace: Path) -> None:
    params: Any = {"dense": {"kernel": jnp.asarray(WEIGHT.T), "bias": jnp.zeros(2)}}

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.square(x @ params["dense"]["kernel"] + params["dense"]["bias"][None] - y).mean()

    with record(trace) as recorder:
        for step, (x, y) in enumerate(BATCHES):
            gradients = jax.grad(loss)(params, x, y)
            params = jax.tree.map(lambda p, g: p - RATE * g, params, gradients)
            recorder(step, gradients=gradients, params=params)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_loop_is_compared_with_its_port(tmp_path: Path, decay: float) -> None:
    torch_run(tmp_path / "torch", decay)
    jax_run(tmp_path / "jax")
    close = Allowed(relative=1e-5)
    found = first_divergence(tmp_path / "torch", tmp_path / "jax", allowed={"gradients": close, "params": close})
    if decay:
        assert found is not None
        assert (found.step, found.stage) == (0, "params")
    else:
        assert found is None


def test_tensors_of_a_loop_are_kept_to_the_bit(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    (weight.T @ torch.arange(3.0).bfloat16()).sum().backward()
    with record(tmp_path) as recorder:
        recorder(
            torch.tensor(0),
            gradients=[{"w": weight.grad, "frozen": frozen.grad}, (frozen,)],
            params={"w": weight.T, "n": 3},
        )
    found = {name: entry.whole() for name, entry in open_dump(tmp_path / "step_00000000.npz").items()}
    assert list(found) == ["gradients/0/w", "gradients/1/0", "params/n", "params/w"]
    assert found["gradients/0/w"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found["gradients/0/w"].astype(int), [[0, 0], [1, 1], [2, 2]])
    assert found["params/w"].shape == (2, 3)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.eye(2).to_sparse(), r"leaf \['a'\]\[0\]: expected a dense tensor of numbers.*to_dense"),
        (torch.empty(2, device="meta"), "a meta tensor"),
        (torch.ones(2).to(torch.float8_e5m2), "bfloat16, or one of NumPy's numeric dtypes"),
    ],
)
def test_a_tensor_without_numbers_is_named(tmp_path: Path, tensor: Any, message: str) -> None:
    with pytest.raises(GradCombineError, match=message):
        record(tmp_path)(0, gradients={"a": [tensor]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_compared_as_they_are(dtype: Any) -> None:
    weight = torch.nn.Parameter(torch.tensor(WEIGHT, dtype=dtype))
    same = {"w": jnp.asarray(WEIGHT, str(dtype).removeprefix("torch."))}
    assert compare({"w": weight}, same).equal_bits
    assert compare({"w": weight}, {"w": weight.detach() * 2}).leaves[0].max_ulp > 0


def test_accumulation_in_grad_is_explained() -> None:
    """``.grad`` is a left chain, in the parameter's dtype."""
    weight = torch.nn.Parameter(torch.zeros(500, dtype=torch.bfloat16))
    parts = [torch.tensor(RNG.normal(size=500), dtype=torch.bfloat16) for _ in range(5)]
    for part in parts:
        (weight * part).sum().backward()
    explanation = explain([{"w": part} for part in parts], {"w": weight.grad})
    assert str(explanation) == "the result is, to the bit: sum, added one after another, in bfloat16"

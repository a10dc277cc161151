"""Accumulators in bfloat16 are found in PyTorch steps whose products in bfloat16 hide their rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from gradcombine.verify import Cause, check_step

NARROW = torch.bfloat16
torch.manual_seed(0)
ONE = torch.ones(())
BATCH = {"x": torch.randn(8, 5), "y": torch.randn(8)}


class Net(torch.nn.Module):
    """Has additions of activations, which are not those of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = torch.nn.Linear(5, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        self.register_buffer("offset", torch.randn(8))

    def forward(self, x: Any) -> Any:
        x = self.first(x) + self.offset
        return self.last(x + torch.tanh(self.inner(x)))[:, 0]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def parts(batch: Any, k: int) -> Any:
    return zip(batch["x"].chunk(k), batch["y"].chunk(k), strict=True)


def gradients(model: Any, x: Any, y: Any, k: int) -> Any:
    with torch.autocast("cpu", dtype=NARROW):
        loss = ((model(x).float() - y) ** 2).mean() / k
    return torch.autograd.grad(loss, [*model.parameters()])


def in_flat(total: Any, grads: Any) -> Any:
    """Adds to one buffer of all parameters, of which the accumulators are views."""
    start = 0
    for g in grads:
        total[start : start + g.numel()].add_(g.reshape(-1))
        start += g.numel()
    return total


ADDED: dict[str, Callable[[Any, Any], Any]] = {
    "in place": lambda total, grads: [a.add_(g.to(a.dtype)) for a, g in zip(total, grads, strict=True)],
    "of wide terms": lambda total, grads: [a.add_(g) for a, g in zip(total, grads, strict=True)],
    "as sums": lambda total, grads: [a + g.to(a.dtype) for a, g in zip(total, grads, strict=True)],
    "as differences": lambda total, grads: [a - (-g.to(a.dtype)) for a, g in zip(total, grads, strict=True)],
    "at once": lambda total, grads: torch._foreach_add(
        total, [g.to(a.dtype) for a, g in zip(total, grads, strict=True)]
    ),
    "in one buffer": in_flat,
    "as products": lambda total, grads: [
        a.addcmul_(g.to(a.dtype), ONE.to(a.dtype)) for a, g in zip(total, grads, strict=True)
    ],
    "as quotients, at once": lambda total, grads: torch._foreach_addcdiv(
        total, [g.to(a.dtype) for a, g in zip(total, grads, strict=True)], [ONE.to(a.dtype) for a in total]
    ),
    "by index": lambda total, grads: [
        a.index_add_(0, torch.arange(len(a)), g.to(a.dtype)) for a, g in zip(total, grads, strict=True)
    ],
    "by matrix products": lambda total, grads: [
        a.view(1, -1).addmm_(ONE.to(a.dtype).view(1, 1), g.to(a.dtype).view(1, -1)).view_as(a)
        for a, g in zip(total, grads, strict=True)
    ],
}
MEAN = "as a running mean"


def accumulates(k: int, how: str, dtype: Any) -> Any:
    def step(arguments: Any, batch: Any) -> None:
        model, optimizer = arguments
        params = [*model.parameters()]
        total: Any = [torch.zeros_like(p, dtype=dtype) for p in params]
        if how == "in one buffer":
            total = torch.zeros(sum(p.numel() for p in params), dtype=dtype)
        for i, (x, y) in enumerate(parts(batch, k)):
            if how == MEAN:
                grads = gradients(model, x, y, 1)
                total = [a.lerp_(g.to(a.dtype), 1 / (i + 1)) for a, g in zip(total, grads, strict=True)]
            else:
                total = ADDED[how](total, gradients(model, x, y, k))
        if how == "in one buffer":
            total = [x.view_as(p) for x, p in zip(total.split([p.numel() for p in params]), params, strict=True)]
        for p, a in zip(params, total, strict=True):
            p.grad = a.to(p.dtype)
        optimizer.step()

    return step


@pytest.mark.parametrize("how", [*ADDED, MEAN])
@pytest.mark.parametrize("dtype", [NARROW, torch.float32])
def test_accumulators_beside_autocast(how: str, dtype: Any) -> None:
    model = net()
    arguments = model, torch.optim.AdamW(model.parameters(), 1e-3)
    report = check_step(partial(accumulates, how=how, dtype=dtype), arguments, BATCH, returns="params")
    assert report.cause is (Cause.PRECISION if dtype is NARROW else None), str(report)
    assert dtype is not NARROW or "gradients are added in bfloat16" in report.faults[0].detail


def with_masters(k: int, dtype: Any) -> Any:
    """A model in bfloat16 with float32 masters; its gradients are added in ``.grad``, or in float32."""

    def step(arguments: Any, batch: Any) -> Any:
        model, masters = arguments
        params = [*model.parameters()]
        total = [torch.zeros_like(x) for x in masters]
        for x, y in parts(batch, k):
            (((model(x.to(NARROW)).float() - y) ** 2).mean() / k).backward()
            for a, p in zip(total, params, strict=True) if dtype is torch.float32 else ():
                a += p.grad.float()
                p.grad = None
        with torch.no_grad():
            for master, a, p in zip(masters, total, params, strict=True):
                master -= 0.01 * (a if dtype is torch.float32 else p.grad.float())
                p.copy_(master)
        return model, masters

    return step


@pytest.mark.parametrize("dtype", [NARROW, torch.float32])
def test_accumulators_beside_masters(dtype: Any) -> None:
    masters = [p.detach().clone() for p in net().parameters()]
    report = check_step(partial(with_masters, dtype=dtype), (net().to(NARROW), masters), BATCH, returns="params")
    assert report.cause is (Cause.PRECISION if dtype is NARROW else None), str(report)


@pytest.mark.parametrize("seed", [7, 40])
def test_an_update_whose_gradient_is_rounding_is_no_defect(seed: int) -> None:
    """Adam's first update of an element has the sign of its gradient, whatever its size."""

    def make_step(k: int) -> Any:
        def step(arguments: Any, batch: Any) -> None:
            model, optimizer = arguments
            optimizer.zero_grad()
            for x, y in parts(batch, k):
                with torch.autocast("cpu", dtype=NARROW):
                    loss = torch.nn.functional.cross_entropy(model(x).float(), y, reduction="sum") / 16
                loss.backward()
            optimizer.step()

        return step

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    batch = {"x": torch.randn(16, 6), "y": torch.randint(0, 4, (16,))}
    report = check_step(make_step, (model, torch.optim.AdamW(model.parameters())), batch, returns="params")
    assert report.passes, str(report)


def test_narrow_averages_of_each_update_are_not_those_of_gradients() -> None:
    """A momentum and an average of the parameters in bfloat16, by `lerp_` and `addcmul_` once per window."""

    def make_step(k: int) -> Any:
        def step(arguments: Any, batch: Any) -> Any:
            model, momenta, averages = arguments
            params = [*model.parameters()]
            for x, y in parts(batch, k):
                for p, g in zip(params, gradients(model, x, y, k), strict=True):
                    p.grad = g if p.grad is None else p.grad + g
            with torch.no_grad():
                for p, m, average in zip(params, momenta, averages, strict=True):
                    m.lerp_(p.grad.to(NARROW), 0.1)
                    p -= 0.01 * m.float()
                    average.lerp_(p.to(NARROW), 0.1).addcmul_(m, m)
            return model, momenta, averages

        return step

    model = net()
    zeros = [[torch.zeros_like(p, dtype=NARROW) for p in model.parameters()] for _ in range(2)]
    report = check_step(make_step, (model, *zeros), BATCH, returns="params")
    assert report.cause is None and report.passes, str(report)

"""What is observed in PyTorch steps: hooks and attributes of parameters, clipping, attention without dropout."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from gradcombine import GradCombineError
from gradcombine.verify import Cause, check_step

ROWS = 8
torch.manual_seed(0)
BATCH = {"x": torch.randn(ROWS, 5), "y": torch.randn(ROWS)}


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def window(
    k: int,
    total: Any = ROWS,
    each: Callable[[Any], object] = lambda model: None,
    last: Callable[[Any], object] = lambda model: None,
    optimizer_of: Callable[[Any], Any] = lambda params: torch.optim.SGD(params, 0.1),
) -> Any:
    def step(model: Any, batch: Any) -> None:
        optimizer = optimizer_of(model.parameters())
        for x, y in zip(batch["x"].chunk(k), batch["y"].chunk(k), strict=True):
            (((model(x)[:, 0] - y) ** 2).sum() / (total or len(x))).backward()
            each(model)
        last(model)
        optimizer.step()

    return step


def clip(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_and_log(model: Any) -> None:
    clip(model)
    for p in model.parameters():
        p.grad.norm()


def clip_tagged(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if hasattr(p, "is_clipped")], 0.01)


@pytest.mark.parametrize("optimizer_of", [partial(torch.optim.SGD, lr=0.1), torch.optim.Adam])
@pytest.mark.parametrize("rescaled", [False, True])
def test_statistics_before_clipping_are_allowed_but_no_change_after_it(optimizer_of: Any, rescaled: bool) -> None:
    """Clipped gradients of a window are not the mean of the microbatches' clipped gradients."""
    torch.manual_seed(1)
    layers = [x for _ in range(2) for x in (torch.nn.Linear(5, 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU())]

    def make_step(k: int) -> Any:
        def last(model: Any) -> None:
            clip(model)
            for p in model.parameters() if rescaled and k > 1 else ():
                p.grad.mul_(1.01)

        return window(k, last=last, optimizer_of=optimizer_of)

    report = check_step(make_step, torch.nn.Sequential(*layers, torch.nn.Linear(5, 1)), BATCH, returns="params")
    assert report.allowing("statistics").passes is not rescaled, report
    assert rescaled or report.cause is Cause.STATISTICS, report


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook", "tag"])
def test_hooks_and_attributes_of_parameters_are_kept(register: str) -> None:
    def clamp(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-0.01, 0.01)

    def clamp_grad(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.clamp_(-0.01, 0.01)

    model = net()
    for p in model.parameters():
        if register == "tag":
            vars(p)["is_clipped"] = True
        else:
            getattr(p, register)(clamp if register == "register_hook" else clamp_grad)
    each = clip_tagged if register == "tag" else lambda model: None
    assert not check_step(partial(window, each=each), model, BATCH, returns="params").passes
    assert check_step(partial(window, each=each), net(), BATCH, returns="params").passes


class Divides(torch.optim.SGD):
    """Divides gradients by `divisor` before each step, in a hook that is one of its methods."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.1)
        self.divisor = 1
        self.register_step_pre_hook(self.divide)

    def divide(self, *_: Any) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad /= self.divisor


class Outer(torch.optim.Optimizer):
    """Has another optimizer as an attribute, and a number that its class does not save."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.inner = Divides(self.param_groups)

    @property
    def divisor(self) -> int:
        return self.inner.divisor

    @divisor.setter
    def divisor(self, value: int) -> None:
        self.inner.divisor = value

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def with_optimizer(k: int, total: Any = ROWS, divides: bool = False) -> Any:
    """Calls the optimizer of the parameters, which may divide the gradients by k."""

    def step(params: Any, batch: Any) -> None:
        model, optimizer = params
        optimizer.divisor = k if divides else 1

        def closure() -> Any:
            optimizer.zero_grad()
            pairs = zip(batch["x"].chunk(k), batch["y"].chunk(k), strict=True)
            losses = [((model(x)[:, 0] - y) ** 2).sum() / (total or len(x)) for x, y in pairs]
            torch.stack(losses).sum().backward()
            return torch.stack(losses).sum()

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    return step


@pytest.mark.parametrize("make", [Divides, Outer])
@pytest.mark.parametrize(
    ("total", "divides", "cause"),
    [(ROWS, False, None), (0, True, None), (0, False, Cause.SUM), (ROWS, True, Cause.SCALED)],
)
def test_hooks_of_optimizers_are_kept(make: Any, total: int, divides: bool, cause: Cause | None) -> None:
    """Gradients are those that the hooks leave."""
    model = net()
    make_step = partial(with_optimizer, total=total, divides=divides)
    report = check_step(make_step, (model, make(model.parameters())), BATCH, returns="params")
    assert report.cause is cause and report.passes is (cause is None), report


def test_a_hook_after_each_step_is_kept() -> None:
    def decay(optimizer: Any, *_: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.data.mul_(0.99**optimizer.divisor)

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(decay)
    right, wrong = (
        check_step(partial(with_optimizer, divides=x), (model, optimizer), BATCH, returns="params")
        for x in (False, True)
    )
    assert right.passes, right
    assert wrong.cause is Cause.ADDED, wrong


@pytest.mark.parametrize(("total", "cause"), [(ROWS, None), (0, Cause.SUM)])
def test_attributes_of_optimizers_are_kept(total: int, cause: Cause | None) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=1)
    report = check_step(partial(with_optimizer, total=total), (model, optimizer), BATCH, returns="params")
    assert report.cause is cause and report.passes is (cause is None), report


@pytest.mark.parametrize("scheduled", [False, True])
def test_what_would_change_the_original_optimizer_is_refused(scheduled: bool) -> None:
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 30)
        assert check_step(with_optimizer, (model, optimizer), BATCH, returns="params").passes
    handle = optimizer.register_step_pre_hook(lambda *_: clip(model))
    with pytest.raises(GradCombineError, match=r"use the optimizer they receive.* uses the variable model"):
        check_step(with_optimizer, (model, optimizer), BATCH, returns="params")
    handle.remove()
    of_class = optimizer.step
    optimizer.step = lambda: (clip(model), of_class())
    with pytest.raises(GradCombineError, match=r"step is that of their class.*received SGD with another one"):
        check_step(with_optimizer, (model, optimizer), BATCH, returns="params")


CLIPPED: dict[str, Callable[[Any], object]] = {
    "by norm": clip,
    "by norm, and logged": clip_and_log,
    "by value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.05),
    "by value, one by one": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach=False),
}


@pytest.mark.parametrize("total", [ROWS, 0], ids=["right", "sum"])
@pytest.mark.parametrize("name", CLIPPED)
def test_gradients_are_those_before_clipping(name: str, total: int) -> None:
    report = check_step(partial(window, total=total, last=CLIPPED[name]), net(), BATCH, returns="params")
    assert [fault.cause for fault in report.faults] == ([] if total else [Cause.SUM]), report
    assert report.passes is bool(total), report


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_random_numbers_drawn_in_sequence_are_those_of_one_batch_on_this_device(p: float) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(p), torch.nn.Linear(8, 1))
    report = check_step(window, model, BATCH, returns="params")
    assert report.passes and ("random numbers on other devices" in str(report)) is (p > 0), report


def test_fused_attention_without_dropout_draws_no_numbers() -> None:
    class Attends(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (y[:, None] for y in self.inner(x).chunk(3, -1))
            return self.out(functional.scaled_dot_product_attention(q, k, v)).mean((1, 2, 3))

    def make_step(k: int) -> Any:
        def step(model: Any, batch: Any) -> None:
            for x, y in zip(batch["x"].chunk(k), batch["y"].chunk(k), strict=True):
                with torch.autocast("cpu", torch.bfloat16):
                    out = model(x)
                (((out.float() - y) ** 2).sum() / ROWS).backward()

        return step

    torch.manual_seed(0)
    batch = {"x": torch.randn(ROWS, 6, 8), "y": torch.randn(ROWS)}
    report = check_step(make_step, Attends(), batch)
    assert report.passes, report


@pytest.mark.parametrize("per_microbatch", [False, True])
def test_a_warmup_whose_first_change_is_within_rounding(per_microbatch: bool) -> None:
    def make_step(k: int) -> Any:
        def step(model: Any, batch: Any) -> None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-8)
            for x, y in zip(batch["x"].chunk(k), batch["y"].chunk(k), strict=True):
                (((model(x)[:, 0] - y) ** 2).sum() / ROWS).backward()
                if per_microbatch:
                    optimizer.param_groups[0]["lr"] += 3e-8
            optimizer.step()

        return step

    report = check_step(make_step, net(), BATCH, returns="params")
    assert bool(report.faults) is per_microbatch, report


@pytest.mark.parametrize("right", [True, False])
def test_gradients_that_are_0_at_the_start_are_compared_elsewhere(right: bool) -> None:
    """The second factor of LoRA starts at 0; the optimizer gets the first factor's gradient of the last microbatch."""
    start = {"down": torch.randn(5, 2).requires_grad_(), "up": torch.zeros(2, 1).requires_grad_()}

    def make_step(k: int) -> Any:
        def step(p: Any, batch: Any) -> Any:
            optimizer = torch.optim.AdamW(p.values(), lr=0.1)
            for x, y in zip(batch["x"].chunk(k), batch["y"].chunk(k), strict=True):
                if not right:
                    p["down"].grad = None
                (((x @ p["down"] @ p["up"])[:, 0] - y) ** 2 / ROWS).sum().backward()
            optimizer.step()
            return p

        return step

    report = check_step(make_step, start, BATCH, returns="params")
    assert report.passes is right, report
    assert right or report.faults[0].run == "2 microbatches at perturbed parameters"


class LowRank(torch.nn.Module):
    """Trains two factors, of which the second one starts at 0, so Adam's first update of it has one size."""

    def __init__(self) -> None:
        super().__init__()
        self.base = net().requires_grad_(False)
        self.down, self.up = torch.nn.Parameter(torch.randn(5, 2)), torch.nn.Parameter(torch.zeros(2, 1))

    def forward(self, x: Any) -> Any:
        return self.base(x) + x @ self.down @ self.up


@pytest.mark.parametrize(("seed", "k"), [(0, 4), (3, 2), (4, 2), (6, 4)])
def test_the_size_of_adams_first_update_is_not_that_of_clipping(seed: int, k: int) -> None:
    """Nor do its signs show that examples are missing, or statistics of the microbatches."""

    def make_step(k: int) -> Any:
        def step(model: Any, batch: Any) -> None:
            optimizer = torch.optim.AdamW([model.down, model.up], 1e-2)
            for x, y in zip(batch["x"].split(-(-11 // k)), batch["y"].split(-(-11 // k)), strict=True):
                (((model(x)[:, 0] - y) ** 2).mean() / k).backward()
            optimizer.step()

        return step

    torch.manual_seed(2)
    model = LowRank()
    torch.manual_seed(seed)
    batch = {"x": torch.randn(11, 5), "y": torch.randn(11)}
    report = check_step(make_step, model, batch, returns="params", microbatches=(k,))
    assert report.cause is Cause.MEAN_OF_MEANS, report


def cleared(clip_each: Callable[[Any], object], k: int) -> Any:
    """Clips the sum of the gradients so far, and clears it in place for the next window."""

    def step(model: Any, batch: Any) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        for i, (x, y) in enumerate(zip(batch["x"].chunk(k), batch["y"].chunk(k), strict=True)):
            (((model(x)[:, 0] - y) ** 2).sum() / ROWS).backward()
            clip_each(model)
            if i == k - 1:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)

    return step


def clip_values(model: Any) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def clip_by_hand(model: Any) -> None:
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_(torch.clamp(0.1 / norm, max=1.0))


@pytest.mark.parametrize("clips", [clip, clip_and_log, clip_values, clip_by_hand])
@pytest.mark.parametrize("make_step", [lambda f: partial(window, each=f), lambda f: partial(cleared, f)])
def test_accumulated_gradients_that_are_clipped_at_each_microbatch(make_step: Any, clips: Any) -> None:
    report = check_step(make_step(clips), net(), BATCH, returns="params")
    assert report.cause is Cause.CHANGED_BEFORE, report
    assert "are clipped at each microbatch" in report.faults[0].detail


def log_norms(model: Any) -> None:
    """Does not change gradients."""
    for p in model.parameters():
        p.grad.norm()


def test_norms_that_are_logged_at_each_microbatch_are_not_blamed() -> None:
    report = check_step(partial(window, total=0, each=log_norms), net(), BATCH, returns="params")
    assert report.cause is Cause.SUM, report


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lr": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=10),
    "two schedules": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [1]
    ),
    "betas": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("advances", ["once", "each"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_copied_with_its_optimizer(name: str, advances: str, scaled: bool) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    start = model, optimizer, SCHEDULES[name](optimizer), torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)

    def make_step(k: int) -> Any:
        def step(params: Any, batch: Any) -> None:
            model, optimizer, schedule, scaler = params
            optimizer.zero_grad()
            for x, y in zip(batch["x"].chunk(k), batch["y"].chunk(k), strict=True):
                scaler.scale(((model(x)[:, 0] - y) ** 2).sum() / ROWS).backward()
                if advances == "each":
                    schedule.step()
            scaler.step(optimizer)
            scaler.update()
            if advances == "once":
                schedule.step()

        return step

    report = check_step(make_step, start, BATCH, returns="params")
    assert report.cause is (Cause.COUNTED if advances == "each" else None), report
    assert report.passes is (advances == "once")
    assert not report.faults or re.search(r"^lr of the optimizer is 0\.\d+ instead of 0\.", report.faults[0].detail)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("each", [False, True])
def test_the_steps_of_a_schedule_are_compared(chained: bool, each: bool) -> None:
    """Also while it does not change the rate, and after the optimizer's step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    if chained:
        schedule = torch.optim.lr_scheduler.ChainedScheduler([schedule])

    def make_step(k: int) -> Any:
        def step(params: Any, batch: Any) -> None:
            window(k)(params["model"], batch)
            for _ in range(k if each else 1):
                params["schedule"].step()

        return step

    report = check_step(make_step, {"model": model, "schedule": schedule}, BATCH, returns="params")
    assert report.passes is not each and report.cause is (Cause.COUNTED if each else None), report
    assert not each or report.faults[0].detail.endswith("2 instead of 1, in leaf [0]['schedule']['steps']")


def test_a_module_may_have_an_attribute_named_optimizer() -> None:
    model: Any = net()
    model.optimizer = None
    assert check_step(window, model, BATCH, returns="params").passes


class Attention(torch.nn.Module):
    """Attention whose mask, a buffer, holds infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.query = torch.nn.Linear(1, 1)
        self.register_buffer("mask", torch.tril(torch.full((5, 5), -torch.inf), -1))

    def forward(self, x: Any) -> Any:
        x = x[..., None]
        return (torch.softmax(self.query(x) @ x.mT + self.mask, -1) @ x)[..., 0]


@pytest.mark.parametrize(("total", "cause"), [(ROWS, None), (0, Cause.SUM)])
def test_a_mask_may_be_infinite(total: int, cause: Cause | None) -> None:
    torch.manual_seed(0)
    report = check_step(partial(window, total=total), Attention(), BATCH, returns="params")
    assert report.cause is cause, str(report)


def test_a_loss_scale_may_skip_updates_at_perturbed_parameters_alone() -> None:
    """The scaled gradients of one batch overflow in float16 there, and those of half a batch do not."""

    def make(k: int) -> Any:
        def step(arguments: Any, batch: Any) -> None:
            model, optimizer, scaler = arguments
            for x, y in zip(batch["x"].chunk(k), batch["y"].chunk(k), strict=True):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = ((model(x)[:, 0].float() - y) ** 2).mean() / k
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler("cpu")
    report = check_step(make, (model, optimizer, scaler), BATCH, returns="params")
    assert report.passes, str(report)
    assert any("skips an update" in text for text in report.not_asked), str(report)

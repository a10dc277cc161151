"""`check_step` accepts PyTorch steps unchanged: modules updated in place, optimizers, dicts of tensors."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from gradcombine import GradCombineError
from gradcombine.verify import Cause, Verdict, check_step

WORDS, ROWS, LENGTH = 16, 8, 7
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, WORDS, (ROWS, LENGTH))
REAL = (np.arange(LENGTH) < np.array([7, 3, 6, 4, 2, 5, 7, 3])[:, None]).astype(np.float32)
BATCH = {"tokens": torch.tensor(TOKENS), "real": torch.tensor(REAL)}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, 1e-2),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small operations on two threads take ten times as long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


class Net(torch.nn.Module):
    def __init__(self, norm: Any = torch.nn.LayerNorm) -> None:
        super().__init__()
        self.embed, self.hidden = torch.nn.Embedding(WORDS, 8), torch.nn.Linear(8, 12)
        self.norm, self.out = norm(12), torch.nn.Linear(12, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.hidden(self.embed(tokens)))
        return self.out(self.norm(h.flatten(0, 1)).reshape(h.shape))


class SparseRows(Net):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, 8, sparse=True)


class Attends(torch.nn.Module):
    """Attention with tied embeddings, in which the gradient of the keys' biases is pure rounding noise."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(WORDS, 8), torch.nn.Linear(8, WORDS)
        self.out.weight = self.embed.weight
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.embed(tokens)))


def parts(batch: Any, k: int) -> list[Any]:
    size = -(-len(batch["real"]) // k)
    return [{name: x[i * size : (i + 1) * size] for name, x in batch.items()} for i in range(k)]


def summed(model: Callable[[Any], torch.Tensor], batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, real = torch.as_tensor(batch["tokens"]), torch.as_tensor(batch["real"])[:, 1:]
    each = functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
    return (each * real).sum(), real.sum()


def backward(model: Any, batch: Any, k: int, way: str = "right", autocast: bool = False) -> None:
    """Computes the gradients of a window with the usual training loop."""
    count = sum(part["real"][:, 1:].sum() for part in parts(batch, k))
    for part in parts(batch, k):
        if way == "last":
            model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            total, real = summed(model, part)
        losses = {"means": total / real / k, "sum": total / real, "last": total / real, "divided after": total}
        losses.get(way, total / count).backward()
    if way == "divided after":
        for p in model.parameters():
            p.grad /= count


def window(
    optimizer: str = "adamw", way: str = "right", autocast: bool = False, clip: float = 0.0
) -> Callable[[int], Any]:
    def make_step(k: int) -> Any:
        def step(model: Any, batch: Any) -> None:
            made = OPTIMIZERS[optimizer](model.parameters())
            backward(model, batch, k, way, autocast)
            if clip:
                clip_grad_norm_(model.parameters(), clip)
            made.step()

        return step

    return make_step


def in_closure(way: str) -> Callable[[int], Any]:
    """Gradients that the optimizer computes, as trainers do with closures; those of earlier steps are zeros."""

    def make_step(k: int) -> Any:
        def step(model: Any, batch: Any) -> None:
            made = OPTIMIZERS["adamw"](model.parameters())
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            made.step(lambda: backward(model, batch, k, way))

        return step

    return make_step


def by_hand(rule: str) -> Callable[[int], Any]:
    """A sum of means, hidden by signs without an optimizer, or by clipping without PyTorch's function."""

    def make_step(k: int) -> Any:
        def step(model: Any, batch: Any) -> None:
            params = list(model.parameters())
            backward(model, batch, k, "sum")
            norm = torch.cat([p.grad.flatten() for p in params]).square().sum().sqrt()
            for p in params:
                with torch.no_grad():
                    if rule == "signs":
                        p -= 0.01 * torch.sign(p.grad)
                    else:
                        p.grad *= 0.01 / norm
            if rule == "clips":
                OPTIMIZERS["momentum"](params).step()

        return step

    return make_step


class Routed(torch.nn.Module):
    """One of two experts for each example: without an example, an expert has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(LENGTH, 1) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, total = (x[:, 0] > 0).long(), x.new_zeros(len(x), 1)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                total = total.index_add(0, rows, expert(x[rows]))
        return total


def routed(divides: bool) -> Callable[[int], Any]:
    def make_step(k: int) -> Any:
        def step(model: Any, batch: Any) -> None:
            for x in batch["tokens"].chunk(k):
                (model(x / WORDS - 0.5).square().mean() / (k if divides else 1)).backward()

        return step

    return make_step


class Biased(torch.nn.Module):
    """Attention with a bias of its own for the keys, whose gradient is 0 up to rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(WORDS, 8), torch.nn.Linear(8, WORDS)
        self.query, self.key, self.value = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.out(x + functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x)))


def averaged_module() -> list[Any]:
    """A module and an average of its parameters that is equal to them, until its second update."""
    net = Net()
    return [net, torch.optim.swa_utils.AveragedModel(net)]


def averages(each: bool) -> Callable[[int], Any]:
    """Updates the average before the optimizer's step, once or at each microbatch."""

    def make_step(k: int) -> Any:
        def step(params: Any, batch: Any) -> None:
            model, average = params
            for _ in range(k if each else 1):
                average.update_parameters(model)
            window()(k)(model, batch)

        return step

    return make_step


def held(k: int, clears: bool = True, clips: bool = False) -> Any:
    """A step that takes and returns a module and a stateful optimizer, with the loss as a metric."""

    def step(params: Any, batch: Any) -> Any:
        model, optimizer = params
        backward(model, batch, k)
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if clears or k == 2:
            optimizer.zero_grad()
        total, real = summed(model, batch)
        return model, optimizer, total / real

    return step


def module_and_optimizer() -> Any:
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    backward(model, BATCH, 1)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def functional_gradients(k: int) -> Any:
    model = Net()

    def step(params: Any, batch: Any) -> Any:
        leaves = {name: x.detach().requires_grad_() for name, x in params.items()}
        found = [summed(lambda x: torch.func.functional_call(model, leaves, x), part) for part in parts(batch, k)]
        loss = sum(total for total, _ in found) / sum(real for _, real in found)
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    return step


def engine(k: int, clears: bool = True) -> Any:
    """A step that owns a module and loads the parameters into it."""
    model = Net()

    def step(params: Any, batch: Any) -> Any:
        model.load_state_dict(params)
        if clears:
            model.zero_grad()
        backward(model, batch, k)
        torch.optim.SGD(model.parameters(), 0.1).step()
        return model.state_dict()

    return step


def compiled(k: int) -> Any:
    def step(model: Any, batch: Any) -> None:
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        count = batch["real"][:, 1:].sum()
        for part in parts(batch, k):
            (summed(torch.compile(model, backend="eager"), part)[0] / count).backward()
        optimizer.step()

    return step


def scaled(way: str) -> Callable[[int], Any]:
    """A float16 step with a GradScaler, which skips steps with nonfinite gradients."""

    def make_step(k: int) -> Any:
        def step(model: Any, batch: Any) -> None:
            optimizer, scaler = OPTIMIZERS["adamw"](model.parameters()), torch.amp.GradScaler("cpu", 256.0)
            count = batch["real"][:, 1:].sum()
            for part in parts(batch, k):
                with torch.autocast("cpu", torch.float16):
                    total, real = summed(model, part)
                scaler.scale(total / real / k if way == "means" else total / count).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()

        return step

    return make_step


def gradients(way: str) -> Callable[[int], Any]:
    return lambda k: lambda model, batch: backward(model, batch, k, way)


def arrays(k: int) -> Any:
    """A step on a batch of NumPy arrays that casts its parameters, even float64 ones, to bfloat16."""

    def step(model: Any, batch: Any) -> Any:
        assert isinstance(batch["real"], np.ndarray)
        half = {name: p.bfloat16() for name, p in model.named_parameters()}
        found = [summed(lambda x: torch.func.functional_call(model, half, x).float(), part) for part in parts(batch, k)]
        (sum(total for total, _ in found) / sum(real for _, real in found)).backward()

    return step


RIGHT: dict[str, tuple[Any, Callable[[], Any], Any, str]] = {
    "adamw": (window(), Net, BATCH, "params"),
    "momentum": (window("momentum"), Net, BATCH, "params"),
    "clipped": (window(way="divided after", clip=0.1), Net, BATCH, "params"),
    "bfloat16": (window(), lambda: Net().bfloat16(), BATCH, "params"),
    "autocast": (window(autocast=True), Net, BATCH, "params"),
    "scaled": (scaled("right"), Net, BATCH, "params"),
    "optimizer held": (held, module_and_optimizer, BATCH, "params"),
    "functional": (functional_gradients, lambda: Net().state_dict(), BATCH, "gradients"),
    "module kept": (engine, lambda: Net().state_dict(), BATCH, "params"),
    "gradients left": (gradients("right"), Net, BATCH, "gradients"),
    "attention": (window(), Attends, BATCH, "params"),
    "biased keys": (window(), Biased, BATCH, "params"),
    "averaged": (averages(each=False), averaged_module, BATCH, "params"),
    "in a closure": (in_closure("right"), Net, BATCH, "params"),
    "sparse rows": (window("momentum"), SparseRows, BATCH, "params"),
    "sparse rows, left": (gradients("right"), SparseRows, BATCH, "gradients"),
    "routed": (routed(True), Routed, BATCH, "gradients"),
    "compiled": (compiled, Net, BATCH, "params"),
    "casts": (arrays, Net, {"tokens": TOKENS, "real": REAL}, "gradients"),
    "statistics that stand still": (window(), lambda: Net(torch.nn.BatchNorm1d).eval(), BATCH, "params"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_steps_are_the_same_and_accurate(name: str) -> None:
    make_step, make_params, batch, returns = RIGHT[name]
    report = check_step(make_step, make_params(), batch, returns=returns)
    assert report.passes, report
    assert report.reference == "the same step in float64"


def acted_on(action: str) -> Callable[[int], Any]:
    """A step that performs `action` at each microbatch instead of once per window."""

    def make_step(k: int) -> Any:
        def step(model: Any, batch: Any) -> None:
            params = list(model.parameters())
            optimizer = OPTIMIZERS["momentum" if action == "decays" else "adamw"](params)
            whole = [torch.zeros_like(p) for p in params]
            for part in parts(batch, k):
                model.zero_grad()
                total, real = summed(model, part)
                (total / (real if action == "clips" else batch["real"][:, 1:].sum())).backward()
                if action == "clips":
                    clip_grad_norm_(params, 0.1)
                for sum_of, p in zip(whole, params, strict=True):
                    sum_of += p.grad / (k if action == "clips" else 1)
                    if action == "decays":
                        p.data.mul_(0.99)
                if action == "updates":
                    optimizer.step()
            for sum_of, p in zip(whole, params, strict=True):
                p.grad = sum_of
            if action != "updates":
                optimizer.step()

        return step

    return make_step


WRONG: dict[str, tuple[Any, Callable[[], Any], str, Cause]] = {
    "mean of means": (window(way="means"), Net, "params", Cause.MEAN_OF_MEANS),
    "mean of means, clipped": (window(way="means", clip=0.1), Net, "params", Cause.MEAN_OF_MEANS),
    "mean of means, bfloat16": (window(way="means"), lambda: Net().bfloat16(), "params", Cause.MEAN_OF_MEANS),
    "mean of means, autocast": (window(way="means", autocast=True), Net, "params", Cause.MEAN_OF_MEANS),
    "mean of means, scaled": (scaled("means"), Net, "params", Cause.MEAN_OF_MEANS),
    "mean of means, left": (gradients("means"), Net, "gradients", Cause.MEAN_OF_MEANS),
    "sum": (window(way="sum"), Net, "params", Cause.SUM),
    "sum, clipped": (window(way="sum", clip=0.1), Net, "params", Cause.SUM),
    "sum, in a closure": (in_closure("sum"), Net, "params", Cause.SUM),
    "sum, biased keys": (window(way="sum"), Biased, "params", Cause.SUM),
    "means, sparse rows": (window("momentum", way="means"), SparseRows, "params", Cause.MEAN_OF_MEANS),
    "sum, routed": (routed(False), Routed, "gradients", Cause.SUM),
    "sum, momentum": (window("momentum", way="sum"), Net, "params", Cause.SUM),
    "last microbatch": (window(way="last"), Net, "params", Cause.LOST),
    "clips each": (acted_on("clips"), Net, "params", Cause.CHANGED_BEFORE),
    "decays at each": (acted_on("decays"), Net, "params", Cause.MOVED),
    "updates at each": (acted_on("updates"), Net, "params", Cause.MOVED_EACH),
    "averages at each": (averages(each=True), averaged_module, "params", Cause.COUNTED),
    "statistics": (window(), lambda: Net(torch.nn.BatchNorm1d), "params", Cause.STATISTICS),
    "statistics, gradients": (gradients("right"), lambda: Net(torch.nn.BatchNorm1d), "gradients", Cause.STATISTICS),
    "gradients remain": (partial(held, clears=False), module_and_optimizer, "params", Cause.STATE),
    "gradients remain, clipped": (
        partial(held, clears=False, clips=True),
        module_and_optimizer,
        "params",
        Cause.STATE,
    ),
    "zero_grad missing": (lambda k: engine(k, False), lambda: Net().state_dict(), "params", Cause.STATE),
}


@pytest.mark.parametrize("name", WRONG)
def test_defects_are_named(name: str) -> None:
    make_step, make_params, returns, cause = WRONG[name]
    report = check_step(make_step, make_params(), BATCH, returns=returns)
    assert [fault.cause for fault in report.faults] == [cause], report


def test_gradients_remain_behind_a_fault_by_design() -> None:
    def make_step(k: int) -> Any:
        def step(params: Any, batch: Any) -> None:
            model, optimizer = params
            backward(model, batch, k)
            optimizer.step()

        return step

    model = Net(torch.nn.BatchNorm1d)
    params = model, OPTIMIZERS["adamw"](model.parameters())
    report = check_step(make_step, params, BATCH, returns="params")
    assert {fault.cause for fault in report.faults} == {Cause.STATISTICS, Cause.STATE}, report
    assert not report.allowing("statistics").passes


def test_gradients_that_the_caller_may_clear_are_mentioned() -> None:
    report = check_step(window(), Net(), BATCH, returns="params")
    assert report.passes and "zero_grad" in str(report.not_asked), report


@pytest.mark.parametrize(("rule", "shown"), [("signs", "the same amount"), ("clips", "the same norm")])
def test_hidden_sizes_of_gradients_cannot_be_told(rule: str, shown: str) -> None:
    batch = {"tokens": BATCH["tokens"], "real": torch.ones(ROWS, LENGTH)}
    report = check_step(by_hand(rule), Net(), batch, returns="params")
    assert report.verdict is Verdict.CANNOT_TELL, report
    assert shown in str(report.not_checked)


def test_a_power_iteration_at_each_microbatch_is_by_design() -> None:
    def make_step(k: int) -> Any:
        def step(model: Any, batch: Any) -> None:
            optimizer = torch.optim.AdamW(model.parameters())
            for x in batch["x"].chunk(k):
                ((model(x) - 1) ** 2).sum().div(ROWS).backward()
            optimizer.step()

        return step

    model = torch.nn.Sequential(
        torch.nn.utils.spectral_norm(torch.nn.Linear(5, 7)), torch.nn.Tanh(), torch.nn.Linear(7, 3)
    )
    report = check_step(make_step, model, {"x": torch.randn(ROWS, 5)}, returns="params")
    assert report.cause is Cause.ADVANCED, report
    assert report.allowing("state").passes


def test_random_numbers_are_the_same_in_float64_and_the_program_s_own_stay() -> None:
    def make_step(k: int) -> Any:
        def step(model: Any, batch: Any) -> None:
            def noisy(tokens: torch.Tensor) -> torch.Tensor:
                return functional.dropout(model(tokens), 0.3) + torch.rand(())

            total = sum(summed(noisy, part)[0] for part in parts(batch, k))
            (total / batch["real"][:, 1:].sum()).backward()

        return step

    model, before = Net(), torch.get_rng_state()
    report = check_step(make_step, model, BATCH)
    assert [fault.cause for fault in report.faults] == [Cause.RANDOM], report
    assert report.runs[0].accuracy is not None and report.runs[0].accuracy < 1
    assert torch.equal(before, torch.get_rng_state())


def of_one_term(model: Any, batch: Any) -> Any:
    total, real = summed(model, batch)
    total.backward()
    return {"words": ({name: p.grad for name, p in model.named_parameters()}, real)}


def padded(batch: Any, n: int) -> Any:
    return {name: torch.cat([x, torch.zeros_like(x[:1]).expand(n, -1)]) for name, x in batch.items()}


@pytest.mark.parametrize(("way", "causes"), [("right", []), ("means", [Cause.DENOMINATOR])], ids=["right", "means"])
def test_the_other_functions_of_a_check_get_tensors_too(way: str, causes: list[Cause]) -> None:
    def exact(model: Any, batch: Any) -> Any:
        backward(model.double(), batch, 1)
        return {name: p.grad for name, p in model.named_parameters()}

    others: Any = {"terms": of_one_term, "reference": exact, "pad": padded}

    def make_step(k: int) -> Any:
        def step(model: Any, batch: Any) -> None:
            for name, x in batch.items():
                assert isinstance(x, torch.Tensor), name
            backward(model, batch, k, way)

        return step

    report = check_step(make_step, Net(), BATCH, **others)
    assert [fault.cause for fault in report.faults] == causes, report
    assert report.reference == "the reference argument" and not report.not_asked


def test_what_stays_narrow_cannot_be_told() -> None:
    made_outside = engine(1)
    report = check_step(lambda k: made_outside, Net().state_dict(), BATCH, returns="params")
    assert report.verdict is Verdict.CANNOT_TELL
    assert "narrower than float64 in place" in report.not_checked[-1]


def test_parameters_that_are_given_stay_as_they_are() -> None:
    params = module_and_optimizer()
    before = {name: x.clone() for name, x in params[0].state_dict().items()}
    assert check_step(held, params, BATCH, returns="params").passes
    assert all(torch.equal(x, before[name]) for name, x in params[0].state_dict().items())


class Locked(Net):
    """Has an attribute that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_modules_that_cannot_be_copied_are_named() -> None:
    computed: Any = Net()
    computed.last = 2 * computed.out.weight  # as the old weight_norm does in a forward pass
    for module, received in ((Locked(), "Locked, TypeError: .*lock"), (computed, "Net, RuntimeError: Only Tensors")):
        with pytest.raises(GradCombineError, match=rf"check_step: leaf \['m'\]: .*copy.deepcopy.* received {received}"):
            check_step(window(), {"m": module}, BATCH, returns="params")
    optimizer: Any = OPTIMIZERS["momentum"](Net().parameters())
    optimizer.lock = threading.Lock()
    with pytest.raises(GradCombineError, match=r"leaf \['o'\]: .*copy.deepcopy.* received SGD, TypeError: .*lock"):
        check_step(window(), {"m": Net(), "o": optimizer}, BATCH, returns="params")
    renamed: Any = Net()  # as a Keras Sequential is copied
    renamed.__deepcopy__ = lambda copies: torch.nn.ModuleDict({"net": Net()})
    with pytest.raises(GradCombineError, match=r"leaf \['m'\]: .*copy.deepcopy.* received a copy without"):
        check_step(window(), {"m": renamed}, BATCH, returns="params")


@pytest.mark.parametrize("lazy", [lambda: torch.nn.LazyLinear(2), lambda: torch.nn.LazyBatchNorm1d(affine=False)])
def test_modules_that_are_not_initialized_are_named(lazy: Any) -> None:
    received = rf"leaf \[0\]: expected initialized modules: .* received {type(lazy()).__name__} with uninitialized"
    with pytest.raises(GradCombineError, match=received):
        check_step(window(), [lazy()], BATCH)


def test_the_listing_of_the_page_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "check.md").read_text()
    (listing,) = (x for x in re.findall(r"^```python\n(.*?)^```", page, re.S | re.M) if "import torch" in x)
    exec(compile(listing, "check.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print\(.*\)  # -> (.*)$", listing, re.M) != []

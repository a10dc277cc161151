"""Steps sharded over one to eight devices, correct and with a wrong all-reduce."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from gradcombine.errors import GradCombineError
from gradcombine.verify import Cause, StepReport, check_step
from tests.verify.steps.dividing import parts, stacked

P = jax.sharding.PartitionSpec
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(5, 7)).astype(np.float32), "b": np.zeros(7, np.float32)}
BATCH = {
    "x": RNG.normal(size=(16, 5)).astype(np.float32),
    "y": RNG.normal(size=(16, 7)).astype(np.float32),
    "mask": np.resize(np.float32([1, 1, 1, 0, 1, 0, 1]), 16),
}


def summed(params: Any, batch: Any) -> Any:
    errors = (batch["x"] @ params["w"] + params["b"][None] - batch["y"]) ** 2 * batch["mask"][:, None]
    return errors.sum(), batch["mask"].sum()


AXES = ("rows", "columns")


def make_step(microbatches: int, devices: int = 1, *, combine: str = "psum", over: Any = AXES) -> Any:
    """Shards the batch over a mesh of two axes, and combines the results of the devices over some of them."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]).reshape(-1, 2 - devices % 2), AXES)

    def on_each(params: Any, batch: Any) -> Any:
        grads, tokens = jax.lax.map(lambda x: jax.grad(summed, has_aux=True)(params, x), stacked(batch, microbatches))
        grads, tokens = jax.tree.map(lambda x: x.sum(0), (grads, tokens))
        if combine == "pmean of means":
            return jax.lax.pmean(jax.tree.map(lambda x: x / tokens, grads), over)
        total = jax.lax.psum(tokens, over) if combine == "psum" else jax.lax.pmean(tokens, over)
        return jax.tree.map(lambda x: x / total, jax.lax.psum(grads, over))

    return jax.jit(jax.shard_map(on_each, mesh=mesh, in_specs=(P(), P(AXES)), out_specs=P(), check_vma=False))


def by_the_compiler(microbatches: int, devices: int = 1) -> Any:
    """Shards the batch over the mesh and leaves the collectives to the compiler."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
    split = jax.sharding.NamedSharding(mesh, P("data"))

    @jax.jit
    def step(params: Any, batch: Any) -> Any:
        made = [jax.grad(summed, has_aux=True)(params, part) for part in parts(batch, microbatches)]
        tokens = sum(t for _, t in made)
        return jax.tree.map(lambda *x: sum(x) / tokens, *(g for g, _ in made))

    return lambda params, batch: step(params, jax.device_put(batch, split))


def check(make: Any, **options: Any) -> StepReport:
    with jax.numpy_dtype_promotion("standard"):
        return check_step(make, PARAMS, BATCH, **options)


@pytest.mark.parametrize(
    ("make", "devices"),
    [
        pytest.param(make_step, (8,), marks=pytest.mark.full),
        pytest.param(make_step, (1, 2, 4), marks=pytest.mark.full),
        pytest.param(by_the_compiler, (1, 2, 8), marks=pytest.mark.full),
    ],
)
def test_devices_are_not_accused(make: Any, devices: tuple[int, ...]) -> None:
    report = check(make, microbatches=(1, 2), devices=devices)
    assert report.passes, str(report)
    assert len(report.runs) > len(devices)
    assert all(run.accuracy is not None for run in report.runs)


def filled_up(batch: Any, n: int) -> Any:
    return jax.tree.map(lambda x: np.concatenate([x, np.zeros((n, *x.shape[1:]), x.dtype)]), batch)


@pytest.mark.full
def test_all_divisions_of_uneven_examples() -> None:
    """18 examples on 1 to 8 devices in 1 or 2 microbatches, padded where they do not divide, and reversed."""

    def make(microbatches: int, devices: int = 1) -> Any:
        step, count = make_step(microbatches, devices), microbatches * devices
        return lambda params, batch: step(params, filled_up(batch, -len(batch["x"]) % count))

    batch = jax.tree.map(lambda x: np.concatenate([x, x[:2] / 2]), BATCH)
    with jax.numpy_dtype_promotion("standard"):
        report = check_step(make, PARAMS, batch, microbatches=(1, 2), devices=(1, 2, 4, 8), pad=filled_up)
    assert report.passes, str(report)
    names = [run.name for run in report.runs]
    assert [name for name in names if "8 devices" in name] == [
        "one batch on 8 devices",
        "one batch on 8 devices with 6 rows of padding",
        "2 microbatches on 8 devices",
        "2 microbatches on 8 devices with 14 rows of padding",
        "2 microbatches on 8 devices in reverse order",
    ]
    assert not report.not_checked


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("wrong", "cause", "detail"),
    [
        ({"combine": "pmean of means"}, Cause.MEAN_OF_MEANS, "they weigh from"),
        ({"over": "rows"}, Cause.NOT_EXCHANGED, "over examples 0, 1, 4, 5, 8, 9 and 2 more, divided by their weight"),
        pytest.param(
            *({"combine": "mean of tokens"}, Cause.SUM, "8 times the mean; there are 8 devices"), marks=pytest.mark.full
        ),
        pytest.param({"over": "columns"}, Cause.NOT_EXCHANGED, "over examples 0, 1, 2, 3", marks=pytest.mark.full),
    ],
)
def test_a_defect_of_the_exchange_is_named(wrong: Any, cause: Cause, detail: str) -> None:
    report = check(partial(make_step, **wrong), microbatches=(1,), devices=(8,))
    assert report.cause is cause, str(report)
    assert detail in report.faults[0].detail
    assert report.faults[0].run == "one batch on 8 devices"


def test_a_step_for_one_device_alone_is_refused() -> None:
    with pytest.raises(GradCombineError, match="a make_step for one batch on 2 devices, received TypeError"):
        check(lambda k: make_step(k), microbatches=(1,), devices=(2,))


@pytest.mark.parametrize("infinite", [True, False])
@pytest.mark.parametrize("right", [True, False])
def test_an_infinite_mask_on_devices(right: bool, infinite: bool) -> None:
    """Declared to be replicated, unchecked, but infinite on the first device only if it is not right."""

    def make_step(k: int, devices: int = 1) -> Any:
        del k

        def local(p: Any, part: Any) -> Any:
            first = right or jax.lax.axis_index("d") == 0
            return p[0] + jax.lax.pmean(part.mean(), "d"), jax.numpy.where(first, p[1], 0)

        mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("d",)), jax.sharding.PartitionSpec
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec(), check_vma=False))

    batch, mask = np.random.default_rng(0).normal(size=8).astype(np.float32), np.zeros(3, np.float32)
    mask[0] = -np.inf if infinite else 0
    report = check_step(
        make_step, (np.ones(2, np.float32), mask), batch, microbatches=(1,), devices=(1, 2), returns="params"
    )
    assert report.cause is (None if right or not infinite else Cause.NOT_EXCHANGED), str(report)


@pytest.mark.full
@pytest.mark.parametrize("right", [True, False])
def test_a_result_that_differs_between_devices_is_named(right: bool) -> None:
    """Declared to be replicated, unchecked, but summed onto the first device only."""

    def make_step(k: int, devices: int = 1) -> Any:
        del k

        def local(p: Any, part: Any) -> Any:
            own = part.mean() * p
            mean = jax.lax.pmean(own, "d")
            return mean if right else jax.numpy.where(jax.lax.axis_index("d") == 0, mean, own)

        mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("d",)), jax.sharding.PartitionSpec
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec(), check_vma=False))

    batch = np.random.default_rng(0).normal(size=8).astype(np.float32)
    report = check_step(make_step, np.arange(1, 6, dtype=np.float32), batch, microbatches=(1,), devices=(1, 2))
    assert report.cause is (None if right else Cause.NOT_EXCHANGED), str(report)

"""A share of the campaign: every public name has targets, and some inputs of each are accepted or refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import optax
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import reductions, statefile
from gradcombine.audit import audit_named, target
from gradcombine.audit import audit_report as report
from gradcombine.integrations import horovod
from gradcombine.integrations import keras as for_keras
from gradcombine.integrations import optax as for_optax
from gradcombine.integrations.jax import Loss, grads_by_denominator, train_step, value_and_grad, zero
from gradcombine.integrations.tensorflow import AccumulatedStep
from gradcombine.places.window import Window
from gradcombine.verify import audit, check_microbatches, plan
from gradcombine.verify.diff.mapping import read_rules
from gradcombine.verify.plan import plan_named
from gradcombine.verify.record.flight import read_log
from tests.fuzz import campaign, doors, files, functions, guard
from tests.fuzz.values import Drawn
from tests.spec.hostile import OWN_CODE, Failing

FEW, MORE = 12, 200


def run(names: Callable[[str], bool], room: str, inputs: int) -> dict[str, dict[str, int]]:
    """The defects of so many inputs of each name."""
    defects: dict[str, dict[str, int]] = {}
    with guard.bounded():
        for job in campaign.jobs(room, inputs):
            if names(job.name):
                outcomes = (job.run(Random(f"0:{job.name}:{i}")) for i in range(job.inputs))
                if found := Counter(what for kind, what in outcomes if kind == "defect"):
                    defects[job.name] = dict(found)
    return defects


def test_every_public_name_has_a_target() -> None:
    """Of a new parameter nothing is known; a new door has to be named in the table of doors."""
    assert len(functions.targets()) > 60
    assert len(doors.targets()) >= 20
    named = set(re.findall(r"\w+", Path(doors.__file__).read_text()))
    for module in functions.PUBLIC:
        for name in functions.public(module):
            short = name.rpartition(".")[2]
            if module.startswith(functions.ELSEWHERE) and short not in WITHOUT_ARGUMENTS:
                assert short in named, name


WITHOUT_ARGUMENTS = {"FlushAtEpochEnd", "WeightedTrainStep"}


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile path may be one to write to."""
    monkeypatch.chdir(tmp_path)


def test_a_few_inputs_of_each_function() -> None:
    assert run(lambda name: name not in ("gradcombine.verify.explain", "saved_replicas"), "numpy", FEW) == {}


def test_a_few_files_of_each_reader() -> None:
    slow = ("HLO", "command", "Orbax")
    assert run(lambda name: not any(x in name for x in slow), "files", 2 * FEW) == {}


@pytest.mark.full
@pytest.mark.parametrize("room", ["jax traced", "tensorflow graph", "doors"])
def test_more_inputs_in_the_frameworks(room: str) -> None:
    assert run(lambda name: True, room, MORE) == {}


def test_a_defect_is_found() -> None:
    """Of each kind: another error, no end, a changed argument, much memory."""

    def wrong(value: Any) -> None:
        raise KeyError(value)

    def changing(value: Any) -> None:
        value["w"][...] = 7

    with guard.bounded():
        assert guard.happened(None, lambda: wrong(3))[0] == "defect"
        assert guard.happened(None, lambda: np.zeros(1 << 31, np.uint8).sum(), (OSError,))[0] == "defect"
        value = {"w": np.ones(2)}
        assert guard.happened(value, lambda: changing(value)) == ("defect", "an argument has changed")
        assert guard.happened(value, lambda: gc.add_n([value])) == ("accepted", "")
        assert guard.happened(value, lambda: gc.add_n(3)) == ("refused", "")


def test_a_process_that_is_full_asks_for_another_one_and_loses_no_defect(capfd: pytest.CaptureFixture[str]) -> None:
    job, full = campaign.Job("x", 100, lambda r: ("defect", "bad")), iter([False, True])
    with pytest.raises(SystemExit, match=str(campaign.AGAIN)):
        campaign._work(job, 0, 0, 60, lambda: next(full))
    *said, _ = json.loads(capfd.readouterr().out.splitlines()[-1].removeprefix(":: "))
    assert said == ["at", "x", 64, {"defect": 64}, {"bad": [64, [0, 1, 2]]}]


NO_REGULAR_FILES = {
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "none": lambda _: None,
}


@pytest.mark.parametrize("make", NO_REGULAR_FILES.values(), ids=NO_REGULAR_FILES)
@pytest.mark.parametrize("read", [read_log, read_rules, report.read_baseline])
def test_only_regular_files_are_read(read: Any, make: Any, tmp_path: Path) -> None:
    make(tmp_path / "x")
    with pytest.raises(gc.GradCombineError, match=r"which (is no regular file|does not exist)"):
        read(tmp_path / "x")


TEXTS = {
    "a deep baseline": (report.read_baseline, "[" * 100_000),
    "a baseline of NaN": (report.read_baseline, files.BASELINE.decode().replace("2.5", "NaN")),
    "a baseline of infinity": (report.read_baseline, files.BASELINE.decode().replace("1000", "1e999")),
    "names twice": (report.read_baseline, files.BASELINE.decode().replace('"name"', '"target"', 1)),
    "deep rules": (read_rules, "ignore_a = " + "[" * 100_000),
    "axes of lists": (read_rules, "[[rule]]\na = 'x'\nb = 'y'\ntranspose = [[0]]"),
    "axes of bools": (read_rules, "[[rule]]\na = 'x'\nb = 'y'\ntranspose = [true, 0]"),
    "rules of 5000 digits": (read_rules, "ignore_a = " + "9" * 5000),
    "memory without an end": (
        lambda path: target.find_target(f"{path}:8", compiles=False),
        target.H100.replace("84942979072", "9" * 400),
    ),
}
ROWS = {"no number": b"x 0 ", "5000 digits": b"9" * 5000 + b" 0 ", "two parts": b"0 ", "a negative step": b"-1 0 "}
HEADERS = {
    "leaves of numbers": b'{"gradcombine": "digests", "version": 1, "leaves": 3, "twins": []}',
    "leaves without a shape": b'{"gradcombine": "digests", "version": 1, "leaves": [["w", "float32"]], "twins": []}',
    "no leaves": b'{"gradcombine": "digests", "version": 1}',
    "a deep one": b'{"gradcombine": "digests", "version": ' + b"[" * 100_000,
}


@pytest.mark.parametrize(("read", "text"), TEXTS.values(), ids=TEXTS)
def test_texts_that_are_refused(read: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(gc.GradCombineError):
        read(tmp_path / "x")


@pytest.mark.parametrize("line", [*ROWS.values(), *HEADERS.values()], ids=[*ROWS, *HEADERS])
def test_lines_of_a_log_that_their_checksums_vouch_for(line: bytes, tmp_path: Path) -> None:
    header = files._unchecked(files._log()).split(b"\n")[0]
    lines = [line] if line in HEADERS.values() else [header, line + b"0" * 64]
    (tmp_path / "x").write_bytes(files._checked(b"\n".join(lines)))
    with pytest.raises(gc.GradCombineError):
        read_log(tmp_path / "x")


def refusal(call: Callable[[Any], Any], value: Any) -> str:
    try:
        call(value)
    except gc.GradCombineError as error:
        return str(error)
    return ""


def own(r: Any) -> Any:
    return reductions.sum()


SGD = optax.sgd(0.1)
CALLS: dict[str, Callable[[Any], Any]] = {
    "order of a window": lambda x: for_optax.accumulate(SGD, for_optax.UNTIL_FLUSH, order=x),
    "batch_argnums": lambda x: for_optax.map_replicas(own, gc.LOCAL, batch_argnums=x),
    "use_grad_mean": lambda x: for_optax.MultiSteps(SGD, 2, use_grad_mean=x),
    "max_norm": for_optax.skip_large,
    "a norm of skip_large_updates": lambda x: for_optax.skip_large_updates({"w": np.float32(1)}, 0, None, x),
    "op": lambda x: horovod.AllReduce(gc.LOCAL, x),
    "prescale_factor": lambda x: horovod.AllReduce(gc.LOCAL, prescale_factor=x),
    "process_set": lambda x: horovod.AllReduce(gc.LOCAL, process_set=x),
    "windows": lambda x: check_microbatches(own, 0.0, [[x]], SGD, own),
    "every of costs": lambda x: zero.exchange_costs(reductions.sum(), 0.0, x, 2),
    "replicas of costs": lambda x: zero.exchange_costs(reductions.sum(), 0.0, 2, x),
    "variables": lambda x: AccumulatedStep(own, x, own, 2),
    "inner optimizer": lambda x: for_keras.Accumulate(x, 2),
    "passes": lambda x: horovod.LocalGradientAggregation(x, own),
    "mode": lambda x: horovod.LocalGradientAggregation(2, own, mode=x),
    "gradients": lambda x: horovod.LocalGradientAggregation(2, own).compute_gradients([x], [0.0]),
    "loss": lambda x: check_microbatches(x, 0.0, [[0.0]], SGD, own),
    "target": lambda x: audit(own, target=x),
    "a step": audit,
    "has_aux": lambda x: value_and_grad(Loss(own, has_aux=x), 2),
    "argnums": lambda x: value_and_grad(Loss(own, argnums=x), 2),
    "params": lambda x: train_step(own, SGD).init({"w": x}),
    "a batch": lambda x: value_and_grad(jnp.sum, 1)(np.float32(1), {"x": x}),
    "an optimizer": lambda x: train_step(own, optax.GradientTransformation(x, x)),
    "apply": lambda x: AccumulatedStep(own, [tf.Variable(0.0)], x, 2),
    "a variable": lambda x: AccumulatedStep(own, [x], own, 2),
    "a function of gradients": lambda x: AccumulatedStep(x, [tf.Variable(0.0)], own, 2),
    "reduction of Keras": lambda x: for_keras.Accumulate(keras.optimizers.SGD(), 2, reduction=x),
    "allreduce": lambda x: horovod.LocalGradientAggregation(2, x),
    "size": lambda x: horovod.LocalGradientAggregation(2, own, size=x),
    "max_every": lambda x: gc.accumulate(reductions.sum(), 2, max_every=x),
    "rng_argnum": lambda x: value_and_grad(Loss(own, rng_argnum=x), 2),
    "carry_argnum": lambda x: value_and_grad(Loss(own, carry_argnum=x), 2),
    "interleaved": lambda x: value_and_grad(own, 2, interleaved=x),
    "differentiate": lambda x: train_step(Loss(own, differentiate=x), SGD),
    "sparse_as_dense": lambda x: horovod.AllReduce(gc.LOCAL, sparse_as_dense=x),
    "axis": lambda x: plan(own, 0.0, np.ones(4), SGD, microbatches=2, axis=x),
    "name of a step": audit_named,
    "name of a plan": plan_named,
    "state of MultiSteps": lambda x: for_optax.MultiSteps(SGD, 2).update(1.0, x),
    "accumulators of MultiSteps": lambda x: _multi_steps.update(1.0, _multi_steps.init(0.0)._replace(acc_grads=x)),
    "gradients of MultiSteps": lambda x: _multi_steps.update(x, _multi_steps.init(0.0)),
    "state to ask": lambda x: for_optax.MultiSteps(SGD, 2).has_updated(x),
    "state to adopt": lambda x: for_optax.MultiSteps(SGD, 2).adopt(x),
    "state of a step": lambda x: _step.function(0.0, x, 1.0),
    "window of a step": lambda x: _step.function(0.0, _step.init(0.0)._replace(window=x), 1.0),
    "state of an optimizer": lambda x: _step(0.0, _step.init(0.0)._replace(opt_state=x), 1.0),
    "states": lambda x: AccumulatedStep(own, [tf.Variable(0.0)], own, 2).load_states(x),
    "a state": lambda x: AccumulatedStep(own, [tf.Variable(0.0)], own, 2).load_states([x]),
    "gradients of Keras": lambda x: _keras().apply(x),
    "variables of Keras": lambda x: for_keras.Accumulate("sgd", 2).build([x]),
    "pairs": lambda x: _keras().apply_gradients([x]),
    "config": for_keras.Accumulate.from_config,
    "weights": lambda x: _keras().set_weights([x] * len(_keras().variables)),
    "a window in a store": lambda x: _keras().load_own_variables({"window": np.uint8([1]), "0": x}),
    "faults": gc.faults.require_none,
    "faults to drop": lambda x: gc.faults.drop(reductions.sum(), reductions.sum().init(0.0), x),
    "a table of faults": lambda x: gc.faults.require_none(gc.faults.find(gc.LOCAL)._replace(table=x)),
}
_multi_steps = for_optax.MultiSteps(SGD, 2)
_step = train_step(lambda w, x: w * x, SGD)


@cache
def _keras() -> Any:
    made = for_keras.Accumulate(keras.optimizers.SGD(), 2)
    made.build([keras.Variable(0.0)])
    return made


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_doors_refuse(call: Callable[[Any], Any]) -> None:
    taken = {
        name for name, value in (OWN_CODE | {"text": "text", "a dict": {"a": 1}}).items() if not refusal(call, value)
    }
    assert taken == set()


@pytest.mark.parametrize(
    "settings", [{"dtype": "float8_e8m0fnu"}, {"dtype": "float8_e4m3fn"}, {"name": "a/b"}, {"name": "\ud800"}]
)
def test_a_keras_optimizer_that_its_backend_could_not_hold_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(gc.GradCombineError):
        for_keras.Accumulate("sgd", 2, **settings).apply([tf.constant(1.0)], [keras.Variable(0.0)])


def test_keras_weights_of_which_one_is_wrong_change_none() -> None:
    before = [x.numpy() for x in _keras().variables]
    for at in range(len(before)):
        wrong = [np.full_like(x, 1) for x in before]
        wrong[at] = np.full(np.shape(before[at]), 1j)
        assert refusal(_keras().set_weights, wrong)
        for x, y in zip(_keras().variables, before, strict=True):
            np.testing.assert_array_equal(x.numpy(), y)


def test_a_step_keeps_the_dtypes_of_its_optimizers_state_or_refuses_another_form() -> None:
    """Over the calls of a window, where a conditional asks for it."""

    def counting(more: Callable[[Any], Any]) -> optax.GradientTransformation:
        return optax.GradientTransformation(lambda p: jnp.bfloat16(0), lambda u, s, p=None: (u, more(s)))

    step = train_step(lambda w, x: jnp.mean(w * x), counting(lambda s: s.astype(jnp.float32) + 1), every=1)
    assert step(0.0, step.init(0.0), np.float32([1]))[1].opt_state == jnp.bfloat16(1)
    step = train_step(lambda w, x: jnp.mean(w * x), counting(lambda s: (s, s)), every=1)
    with pytest.raises(gc.GradCombineError, match="a state of the optimizer that it keeps"):
        step(0.0, step.init(0.0), np.float32([1]))


def test_a_scalar_that_jit_does_not_take_is_named() -> None:
    with pytest.raises(gc.GradCombineError, match=r"train_step: leaf \[0\]: .* received ulonglong"):
        train_step(lambda w, x: w * x, SGD)(0.0, _step.init(0.0), np.ulonglong(2))


WITHOUT_END: list[Any] = [np.float32(1)]
WITHOUT_END.append(WITHOUT_END)
FLATTENING: dict[str, Callable[[Any], Any]] = {
    "value_and_grad": lambda x: value_and_grad(own, 2)(x, np.ones(4)),
    "value_and_grad, keywords": lambda x: value_and_grad(own, 2)(0.0, np.ones(4), x=x),
    "init": lambda x: train_step(own, SGD).init(x),
    "train_step": lambda x: train_step(own, SGD, microbatches=2).function(0.0, None, x),
    "grads_by_denominator": lambda x: grads_by_denominator(own, {"a": "b"})(x),
    "plan": lambda x: plan(own, x, np.ones(4), SGD, microbatches=2),
    "audit": lambda x: audit(jax.jit(own), x),
    "MultiSteps": lambda x: _multi_steps.update(1.0, _multi_steps.init(0.0)._replace(inner_opt_state=x)),
    "a state": lambda x: _step.function(0.0, _step.init(0.0)._replace(opt_state=x), 1.0),
}


UNFIT: dict[str, tuple[Any, str]] = {
    "endless": (WITHOUT_END, "more (a tree that contains itself?)"),
    "keys": ({"a": np.float32(1), 1: np.float32(1)}, "dicts whose keys have an order"),
}


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.parametrize("call", FLATTENING.values(), ids=FLATTENING)
def test_a_tree_that_jax_cannot_flatten_leaves_the_depth_of_recursion_to_other_calls(
    call: Callable[[Any], Any], kind: str
) -> None:
    def depth(level: int = 0) -> int:
        try:
            return depth(level + 1)
        except RecursionError:
            return level

    before = depth()
    for _ in range(3):
        assert UNFIT[kind][1] in refusal(call, UNFIT[kind][0])
    assert depth() == before


def test_shapes_and_ledgers_that_no_memory_holds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(gc.GradCombineError, match=r"from 1 to 2\*\*24 microbatches, received 16777217"):
        reductions.numbered(reductions.sum(), 2**24 + 1)
    statefile.save(path := tmp_path / "x.npz", reductions.sum(), reductions.sum().init(np.float32(0)))
    with pytest.raises(gc.GradCombineError, match="a shape that an array can have"):
        statefile.load(path, reductions.sum(), SimpleNamespace(dtype=np.dtype(np.float32), shape=(2**70,)))


def test_a_dtype_that_ends_the_process_in_a_compiler_is_refused() -> None:
    with pytest.raises(gc.GradCombineError, match="expected a dtype that JAX has, received float6_e2m3fn"):
        audit(jax.jit(lambda x: x + 1), np.ones((), ml_dtypes.float6_e2m3fn))


@pytest.mark.parametrize("every", [np.int64(4), np.array(4)])
def test_the_length_of_a_window_is_an_integer(every: Any) -> None:
    assert type(Window(reductions.mean(), every).every) is int


@pytest.mark.parametrize("skip", [for_optax.skip_large(1.0), for_optax.skip_not_finite])
def test_skip_functions_take_gradients_alone(skip: Any) -> None:
    values = OWN_CODE | {"text": "text", "an object": object(), "texts": np.array(["a"])}
    assert {name for name, value in values.items() if not refusal(lambda x: skip({"w": x}, 0, None), value)} == set()


def test_costs_of_accumulators_of_several_arrays_are_refused() -> None:
    with pytest.raises(gc.GradCombineError, match="one array a leaf"):
        zero.exchange_costs(reductions.sum("exact"), np.float32([1]), 2, 2)


def test_arguments_are_the_same_for_the_same_seed() -> None:
    target = functions.targets()["gradcombine.add_n"]
    first, second = (functions.call(target, Drawn(Random("0:gradcombine.add_n:5")))[0] for _ in range(2))
    assert str(first) == str(second)
    assert isinstance(OWN_CODE["a failing dtype"], Failing)


def test_states_and_batches_that_only_jax_knows() -> None:
    """A state of the optimizer that it returns in another form, and an array of what JAX has for no gradient."""
    tx = for_optax.accumulate(SGD, 1)
    params = {"w": np.zeros(2, np.float32)}
    state = tx.init(params)
    with pytest.raises(gc.GradCombineError, match="expected a state of the optimizer that it keeps"):
        tx.update(params, state._replace(inner=[*state.inner]), params)
    with pytest.raises(gc.GradCombineError, match="expected a batch of numbers, received an array of float0"):
        value_and_grad(own, 2)(0.0, np.zeros((4, 2), jax.dtypes.float0))


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_python_float_beyond_float32_is_an_infinite_gradient_of_a_process_set() -> None:
    reduce = horovod.AllReduce(gc.LOCAL, "adasum", process_set=[0], prescale_factor=2)
    assert [x.numpy().tolist() for x in reduce([tf.constant([1.0]), 1e308])] == [[2.0], np.inf]

"""TensorFlow graphs: collectives and loops are counted; each defect is found, and nothing in its defect-free twin."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from gradcombine.audit import audit, audit_file
from gradcombine.audit import audit_report as report
from gradcombine.audit.rules import RULES
from gradcombine.audit.tensorflow.graph import Graph
from gradcombine.errors import GradCombineError

ROWS, WIDTH = 8, 64
X = tf.TensorSpec([ROWS, WIDTH])
Traced = tuple[Any, tuple[Any, ...]]


@cache
def strategy() -> tf.distribute.Strategy:
    """Two replicas that use the same collectives as GPUs."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@cache
def variables() -> dict[str, Any]:
    """Variables with one copy per replica."""
    types = {"w": tf.float32, "sums": tf.float32, "narrow": tf.float16}
    with strategy().scope():
        made = {name: tf.Variable(tf.zeros([WIDTH, WIDTH], dtype), name=name) for name, dtype in types.items()}
    return made | {"calls": tf.Variable(0)}


@pytest.fixture(autouse=True)
def made_before_tracing() -> None:
    variables()


def variable(name: str) -> Any:
    return variables()[name]


def mean(x: Any) -> Any:
    return tf.distribute.get_replica_context().all_reduce("mean", x)


def gradient(x: Any) -> Any:
    return tf.matmul(x, x @ variable("w"), transpose_a=True)


def run(function: Callable[..., Any], *args: Any) -> Any:
    """Runs the function on each replica; returns the first replica's result."""
    made = strategy().run(function, args=args)
    return tf.nest.map_structure(lambda x: strategy().experimental_local_results(x)[0], made)


def replicated(step: Callable[..., Any]) -> Callable[[bool], Traced]:
    """A factory of functions that run ``step(x, defect)`` on the replicas."""
    return lambda defect: (tf.function(lambda x: run(lambda own: step(own, defect), x)), (X,))


def in_a_loop(defect: bool) -> Traced:
    @tf.function
    def step(x: Any) -> None:
        total = tf.zeros([WIDTH, WIDTH])
        for _ in tf.range(4):
            total += run((lambda x: mean(gradient(x))) if defect else gradient, x)
        run(lambda: variable("w").assign_sub(total if defect else mean(0.1 * total)))

    return step, (X,)


@replicated
def at_the_end(x: Any, defect: bool) -> Any:
    """A branch that exchanges is taken in the last iteration, or in all or none of them."""

    def exchanged(v: Any) -> Any:
        return tf.raw_ops.CollectiveReduceV2(
            input=v, group_size=2, group_key=1, instance_key=7, ordering_token=[], merge_op="Add", final_op="Div"
        )

    total, all_or_none = tf.zeros([WIDTH, WIDTH]), variable("calls") > 3
    for i in tf.range(4):
        total += gradient(x)
        if all_or_none if defect else i == 3:
            total = exchanged(total)
    return total


def in_nested_functions(defect: bool) -> Traced:
    """A loop in a branch in a function in a loop."""

    @tf.function
    def inner(x: Any, total: Any) -> Any:
        def added(i: Any, total: Any) -> Any:
            found = run(lambda x: mean(gradient(x)), x)
            return i + 1, total + 0.5 * found if defect else tf.tanh(found) * total

        return tf.while_loop(lambda i, _: i < 3, added, (0, total))[1]

    @tf.function
    def step(x: Any, deep: Any) -> Any:
        total = tf.zeros([WIDTH, WIDTH])
        for _ in tf.range(5):
            total = inner(x, total) if deep else total
        return total

    return step, (X, tf.TensorSpec([], tf.bool))


def in_each_call(defect: bool) -> Traced:
    """Each call is a microbatch; a counter ends the window."""
    sums, calls = variable("sums"), variable("calls")

    @tf.function
    def step(x: Any) -> None:
        run(lambda x: sums.assign_add(mean(gradient(x)) if defect else gradient(x)), x)
        calls.assign_add(1)
        if calls % 4 == 0:
            run(apply)

    def apply() -> None:
        variable("w").assign_sub(0.1 * (sums if defect else mean(tf.identity(sums))))
        sums.assign(tf.zeros_like(sums))

    return step, (X,)


@replicated
def unrolled(x: Any, defect: bool) -> None:
    """Unrolled microbatches; gradients whose norm is taken have to be reduced."""
    grads = [mean(gradient(x * float(i + 1))) for i in range(4)]
    if not defect:
        grads = [g / tf.norm(g) for g in grads]
    variable("w").assign_sub(0.1 * (grads[0] + grads[1] + grads[2] + grads[3]))


def beside_a_loss(defect: bool) -> Traced:
    """The strategy fuses tensors reduced together; the loop stacks some of the results and sums the others."""

    @tf.function
    def step(x: Any) -> Any:
        total, values = tf.zeros([WIDTH, WIDTH]), tf.TensorArray(tf.float32, 4)
        for i in tf.range(4):
            value, found = run(lambda x: tuple(mean([tf.reduce_sum(x), gradient(x)])), x)
            total += found if defect else found / tf.norm(found)
            values = values.write(i, value)
        run(lambda: variable("w").assign_sub(total))
        return values.stack()

    return step, (X,)


@replicated
def twice(x: Any, defect: bool) -> None:
    found = mean(gradient(x))
    variable("w").assign_sub(0.1 * (mean(found) if defect else found))


@replicated
def twice_beside_a_loss(x: Any, defect: bool) -> Any:
    found = gradient(x)
    found, value = mean([mean(found) if defect else found, tf.reduce_sum(x)])
    variable("w").assign_sub(0.1 * found)
    return value


@replicated
def again(x: Any, defect: bool) -> Any:
    """The same gradient is reduced for the update and for its norm; the twin reduces another one."""
    found = gradient(x)
    variable("w").assign_sub(0.1 * mean(found))
    return tf.norm(mean(found if defect else tf.tanh(found)))


@replicated
def together(x: Any, defect: bool) -> Any:
    """As `again`, for gradients that the strategy concatenates."""
    found = [gradient(x), gradient(2.0 * x)]
    reduced = mean(found)
    variable("w").assign_sub(0.1 * (reduced[0] + reduced[1]))
    return tf.norm(tf.add_n(mean(found if defect else [tf.tanh(x) for x in found])))


@replicated
def one_by_one(x: Any, defect: bool) -> Any:
    leaves = [x * float(i) for i in range(20)]
    return [mean(leaf) for leaf in leaves] if defect else mean(leaves)


@replicated
def widened(x: Any, defect: bool) -> Any:
    narrow = tf.cast(x, tf.bfloat16)
    return mean(tf.cast(narrow, tf.float32)) if defect else tf.cast(mean(narrow), tf.float32)


def narrow_sums(defect: bool) -> Traced:
    dtype = tf.bfloat16 if defect else tf.float32

    @tf.function
    def step(x: Any) -> Any:
        total = tf.zeros([ROWS, WIDTH], dtype)
        for i in tf.range(4):
            total += tf.cast(x * tf.cast(i, tf.float32), dtype)
        return total

    return step, (X,)


def narrow_window(defect: bool) -> Traced:
    dtype = tf.float16 if defect else tf.float32
    sums, calls = variable("narrow" if defect else "sums"), variable("calls")

    @tf.function
    def step(x: Any) -> None:
        run(lambda x: sums.assign_add(tf.cast(gradient(x), dtype)), x)
        if calls.assign_add(1) % 4 == 0:
            run(lambda: variable("w").assign_sub(tf.cast(sums, tf.float32)))
            run(lambda: sums.assign(tf.zeros_like(sums)))

    return step, (X,)


@replicated
def by_selects(x: Any, defect: bool) -> None:
    w, calls = variable("w"), variable("calls")
    found = gradient(x)
    full = calls % 4 == 0 if defect else tf.reduce_all(tf.math.is_finite(found))
    w.assign(tf.where(full, w - 0.1 * found, w))


@replicated
def by_branches(x: Any, defect: bool) -> None:
    """Inputs of a branch are computed even if it is not taken; operations inside it are not."""
    w, calls = variable("w"), variable("calls")
    found = gradient(x)
    new, old = w - 0.1 * found, tf.identity(w)
    w.assign(tf.cond(calls % 4 == 0, (lambda: new) if defect else (lambda: old - 0.1 * found), lambda: old))


def until(defect: bool) -> Traced:
    def step(x: Any) -> Any:
        if defect:
            return tf.while_loop(lambda x: tf.reduce_sum(x) > 1, lambda x: (x / 2,), (x,))
        return tf.while_loop(lambda i, x: i < 100_000, lambda i, x: (i + 3, x / 2), (0, x))

    return tf.function(step), (X,)


CASES: dict[str, tuple[Callable[[bool], Traced], str]] = {
    "reduced in a loop": (in_a_loop, "reduced-in-loop"),
    "reduced at the end": (at_the_end, "reduced-in-loop"),
    "reduced in nested functions": (in_nested_functions, "reduced-in-loop"),
    "reduced in each call": (in_each_call, "reduced-in-loop"),
    "reduced in an unrolled window": (unrolled, "reduced-in-loop"),
    "reduced beside a loss": (beside_a_loss, "reduced-in-loop"),
    "averaged twice": (twice, "repeated-collective"),
    "averaged twice, beside a loss": (twice_beside_a_loss, "repeated-collective"),
    "reduced again": (again, "repeated-collective"),
    "reduced again, together": (together, "repeated-collective"),
    "one by one": (one_by_one, "many-small-collectives"),
    "widened": (widened, "wider-exchange"),
    "narrow sums": (narrow_sums, "narrow-accumulator"),
    "narrow sums of replicas": (replicated(lambda x, defect: narrow_sums(defect)[0](x)), "narrow-accumulator"),
    "narrow window": (narrow_window, "narrow-accumulator"),
    "decided by selects": (by_selects, "optimizer-every-microbatch"),
    "decided by branches": (by_branches, "optimizer-every-microbatch"),
    "until something holds": (until, "unknown-trip-count"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("defect", [True, False], ids=["defect", "clean"])
@pytest.mark.parametrize("name", CASES)
def test_a_defect_is_found_and_its_twin_is_clean(name: str, defect: bool) -> None:
    make, expected = CASES[name]
    step, args = make(defect)
    found = audit(step, *args)
    assert [x.name for x in found.findings] == [expected] * defect, found.findings
    assert len(found.judged) < len(RULES)


def test_what_is_exchanged_is_counted_where_it_stands() -> None:
    """Bytes are those that one of the replicas sends, times the iterations of all enclosing loops."""
    step, args = in_nested_functions(True)
    found = audit(step, *args)
    (exchange,) = found.exchanges
    size = 4 * WIDTH * WIDTH
    assert (exchange.kind, exchange.operand, exchange.result, exchange.exact) == ("all-reduce", size, size, True)
    assert (exchange.members, [loop.trips for loop in exchange.loops], exchange.times) == (2, [5, 3], 15)
    assert found.sent == 15 * size  # 2 (n - 1) / n for n = 2 devices
    assert found.program.devices == 2
    assert __file__ in found.program.source(exchange.x)
    (finding,) = found.findings
    # After both loops it would run once instead of 15 times.
    assert (finding.times, finding.sent) == (15, 14 * size)
    assert found.memory is None and found.turns is None and found.bounds["memory"].seconds is None
    assert any("donation-lost" in text for text in found.unread)
    assert found.undecided == [name for name in RULES if name not in found.judged]


def test_sums_of_what_lies_on_several_devices_are_exchanges() -> None:
    to_one = tf.distribute.ReductionToOneDevice()
    replicas = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"], to_one)

    def doubled(x: Any) -> Any:
        return mean(2.0 * x)

    with replicas.scope():
        w = tf.Variable(tf.zeros([ROWS, WIDTH]))
    # The value read from a variable is on the variable's devices.
    for function in (doubled, lambda x: mean(w.read_value())):
        step = tf.function(lambda x, f: replicas.run(f, args=(x,)))
        (exchange,) = audit(step, X, function).exchanges
        assert (exchange.kind, exchange.size, exchange.members) == ("all-reduce", 4 * ROWS * WIDTH, 3)


LONG = tf.constant(0, tf.int64)


def doubled(i: Any) -> Any:
    """40 times: evaluating each use of a value anew would take 2**40 evaluations."""
    for _ in range(40):
        i = i + i
    return i


LOOPS: dict[str, tuple[Callable[[Any], Any], int | None]] = {
    "range": (lambda x: tf.while_loop(lambda i, x: i < 4, lambda i, x: (i + 1, x + 1.0), (0, x)), 4),
    "never": (lambda x: tf.while_loop(lambda i, x: i < 4, lambda i, x: (i + 1, x + 1.0), (4, x)), 0),
    "large": (lambda x: tf.while_loop(lambda i, x: i <= 10**6, lambda i, x: (i + 7, x + 1.0), (0, x)), 142_858),
    "down": (lambda x: tf.while_loop(lambda i, x: i > 0, lambda i, x: (i - 3, x + 1.0), (10, x)), 4),
    "halved": (lambda x: tf.while_loop(lambda i, x: i > 0, lambda i, x: (i // 2, x + 1.0), (100, x)), 7),
    "unequal": (lambda x: tf.while_loop(lambda i, x: i != 6, lambda i, x: (i + 2, x + 1.0), (0, x)), 3),
    "at most": (
        lambda x: tf.while_loop(lambda i, x: i < 9, lambda i, x: (i + 1, x), (0, x), maximum_iterations=5),
        5,
    ),
    "until": (lambda x: tf.while_loop(lambda i, x: x[0, 0] > 0, lambda i, x: (i + 1, x - 1.0), (0, x)), None),
    "either": (
        lambda x: tf.while_loop(lambda i, x: (i < 9) & (x[0, 0] > 0), lambda i, x: (i + 1, x - 1.0), (0, x)),
        None,
    ),
    "a flag": (
        lambda x: tf.while_loop(lambda i, more: more, lambda i, more: (i + 3, i < 50), (0, tf.constant(True))),
        18,
    ),
    "doubled": (lambda x: tf.while_loop(lambda i, x: i < 2**40, lambda i, x: (doubled(i) + 1, x), (LONG, x)), 2),
    "beyond": (lambda x: tf.while_loop(lambda y, x: y < 5, lambda y, x: (y * 1e30 * 1e30, x), (1.0, x)), 1),
    "squared": (lambda x: tf.while_loop(lambda i, x: i < 300, lambda i, x: (i * i, x), (2, x)), 4),
    "scanned": (lambda x: tf.scan(lambda a, b: a + b, x), ROWS - 1),
    "rows": (lambda x: tf.while_loop(lambda i, x: i < tf.shape(x)[0], lambda i, x: (i + 1, x), (0, x)), ROWS),
}


@pytest.mark.parametrize("name", LOOPS)
def test_how_often_a_loop_turns(name: str) -> None:
    function, expected = LOOPS[name]
    program: Any = audit(tf.function(function, autograph=False), X).program
    assert [loop.trips for loop in program.graph_loops] == [expected]


def test_a_length_that_is_not_known_is_no_size() -> None:
    def doubled(x: Any) -> Any:
        return mean(2.0 * x)

    step = tf.function(lambda x: run(doubled, x))
    found = audit(step, tf.TensorSpec([None, WIDTH]))
    (exchange,) = found.exchanges
    assert not exchange.exact and exchange.size > 0
    assert "the size of 1 collective" in found.unread and "many-small-collectives" in found.undecided
    (rows,) = [x.rows for x in report.sections(found) if x.title == "Collectives"]
    assert rows[0].cells[1] == "unknown"


FOUR = {"group_size": 4, "group_key": 1, "final_op": "Id", "ordering_token": []}


def test_collectives_of_one_process_of_many() -> None:
    """As MultiWorkerMirroredStrategy traces them: one graph per process, which knows only the size of each group."""
    four = FOUR | {"merge_op": "Add"}
    size = 4 * ROWS * WIDTH

    @tf.function
    def step(x: Any, key: Any) -> Any:
        raw, two = tf.raw_ops, {"group_size": 2, "group_key": 7}
        return (
            raw.CollectiveReduceV2(input=x, instance_key=key, **four),
            raw.CollectiveReduceScatterV2(input=x, instance_key=key, **four),
            raw.CollectiveGatherV2(input=x, instance_key=key, ordering_token=[], **two),
            raw.CollectiveAllToAllV2(input=x, instance_key=key, ordering_token=[], **two),
            raw.CollectiveBcastSendV2(input=x, instance_key=key, **two),
            raw.NcclAllReduce(input=x, reduction="sum", num_devices=8, shared_name="x"),
            raw.CollectiveReduceV2(input=x, instance_key=key, **four | {"group_size": key}),
        )

    found = audit(step, X, tf.TensorSpec([], tf.int32))
    kinds = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-broadcast", "all-reduce")
    assert [x.kind for x in found.exchanges] == [*kinds, "all-reduce"]
    assert [len(x.groups[0]) if x.groups else None for x in found.exchanges] == [4, 4, 2, 2, 2, 8, None]
    assert found.exchanges[0].sent() == 1.5 * size
    # The last collective reduces the same value as the first, but its group is unknown.
    assert "the group of 1 collective" in found.unread and "repeated-collective" in found.undecided
    assert found.findings == []


@pytest.mark.parametrize(
    ("merge", "expected"), [("Add", ["reduced-in-loop", "repeated-collective"]), ("Max", ["repeated-collective"])]
)
def test_only_sums_can_be_exchanged_later(merge: str, expected: list[str]) -> None:
    """Sums, or maxima, are added in a loop; a sum and, after it, two reductions of this kind of one array."""

    @tf.function
    def step(x: Any, key: Any) -> Any:
        def reduced(x: Any, merge: str = merge) -> Any:
            return tf.raw_ops.CollectiveReduceV2(input=x, instance_key=key, merge_op=merge, **FOUR)

        total = tf.zeros([ROWS, WIDTH])
        for i in tf.range(4):
            total += reduced(x * tf.cast(i, tf.float32))
        return total, reduced(x, "Min"), reduced(x), tf.tanh(reduced(x))

    assert [x.name for x in audit(step, X, tf.TensorSpec([], tf.int32)).findings] == expected


@pytest.mark.parametrize("chained", [True, False])
def test_sums_in_a_loop_that_need_each_other_are_no_finding(chained: bool) -> None:
    @tf.function
    def step(x: Any, key: Any) -> Any:
        for _ in tf.range(3):
            out = x
            for i in range(20):
                of = out if chained else x * float(i)
                out += tf.tanh(tf.raw_ops.CollectiveReduceV2(input=of, instance_key=key, merge_op="Add", **FOUR))
            x = out
        return x

    found = audit(step, X, tf.TensorSpec([], tf.int32)).findings
    assert [x.name for x in found] == ["many-small-collectives"] * (not chained)


def test_what_cannot_be_read_is_said() -> None:
    step = tf.function(lambda x: compiled(tf.numpy_function(lambda a: a, [x], tf.float32)))
    compiled = tf.function(lambda x: x + 1, jit_compile=True)
    found = audit(step, X)
    notes = " ".join(found.unread)
    assert found.undecided == list(RULES)
    assert "the Python code in PyFunc" in notes and "XLA compiles for __inference_" in notes


def test_a_function_that_xla_compiles_is_read_as_compiled() -> None:
    @tf.function(jit_compile=True)
    def products(x: Any, *, narrow: bool = False) -> Any:
        total = tf.zeros([ROWS, WIDTH], tf.bfloat16)
        for _ in tf.range(4):
            x = x @ tf.transpose(x) @ x
            total += tf.cast(x, tf.bfloat16)
        return total if narrow else x

    defect = audit(tf.function(lambda x: products.python_function(x, narrow=True), jit_compile=True), X)
    (finding,) = defect.findings
    assert finding.name == "narrow-accumulator" and finding.source.startswith(f"{__file__}:")
    found = audit(products, X)
    assert (found.name, found.findings, found.memory) == ("products", [], None)
    assert found.flops == {32: 4 * 2 * 2 * ROWS * ROWS * WIDTH}
    assert (found.judged, found.undecided) == (tuple(RULES), ["donation-lost"])


def plain(x: Any) -> Any:
    return x + 1.0


COMPILED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "its signature": (tf.function(plain, jit_compile=True, input_signature=[X]), ()),
    "specs in a structure": (tf.function(lambda x: x["a"] + x["b"][0], jit_compile=True), ({"a": X, "b": [X]},)),
    "a spec and a number": (tf.function(lambda x, n: x * n, jit_compile=True), (X, 3)),
    "a default": (tf.function(lambda x, n=2: x * n, jit_compile=True), (X,)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_arguments_of_a_function_that_xla_compiles(name: str) -> None:
    step, args = COMPILED[name]
    assert [shape.dims for shape in audit(step, *args).program.results] == [(ROWS, WIDTH)]


def test_a_saved_model(tmp_path: Path) -> None:
    class Saved(tf.Module):
        def __init__(self) -> None:
            self.w = tf.Variable(tf.zeros([WIDTH]))

        @tf.function(input_signature=[X])
        def step(self, x: Any) -> Any:
            while tf.reduce_sum(self.w) < 1:
                self.w.assign_add(tf.reduce_sum(x * self.w, 0))
            return x * self.w

    module = Saved()
    tf.saved_model.save(module, str(tmp_path), signatures={"step": module.step})
    found = audit_file(tmp_path)
    assert {x.name for one in found for x in one.findings} == {"unknown-trip-count"}
    proto = tmp_path / "saved_model.pb"
    proto.write_bytes(proto.read_bytes()[:-100])
    with pytest.raises(GradCombineError, match="an undamaged SavedModel"):
        audit_file(proto)


def test_a_function_of_a_graph_with_control_flow_of_version_1() -> None:
    with tf.Graph().as_default() as graph:
        tf.compat.v1.disable_control_flow_v2()
        try:
            tf.while_loop(lambda i: i < 3, lambda i: i + 1, (0,))
        finally:
            tf.compat.v1.enable_control_flow_v2()
    with pytest.raises(GradCombineError, match="a graph with functional control flow"):
        Graph("old", graph.as_graph_def(add_shapes=True))


@pytest.mark.parametrize("concrete", [False, True])
def test_a_concrete_function_is_read_as_its_graph_though_xla_compiles_it(concrete: bool) -> None:
    step, x = tf.function(lambda x: x + 1, jit_compile=True), tf.constant([1.0])
    found = audit(step.get_concrete_function(x)) if concrete else audit(step, x)
    assert isinstance(found.program, Graph) is concrete

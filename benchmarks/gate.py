"""Checks that the library did not become slower relative to its peers: measures the stored ratios again.

    python benchmarks/gate.py [--only PART] [--rounds 15] [--store] [--plant FACTOR]

In each round, the library's and its peers' calls alternate in one process, in alternating order, and each ratio is
formed from consecutive times. Ratios of the CPU time of all threads are compared, since other programs on the machine
hardly affect it; ratios of elapsed time are stored as well. Each ratio is a median with its 95 % interval (order
statistics). It is worse if its interval lies above the stored one by more than a margin, in two measurements, of which
the second has twice the rounds. ``--plant 1.5`` slows the library's calls down by half, and the gate must fail.
``--store`` writes benchmarks/ratios.json, which docs/draw_performance.py draws.

Exit status: 0 if no ratio is worse, 1 if one is, 2 if there is nothing to compare with.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import typer

STORED = Path(__file__).with_name("ratios.json")
MARGIN = 0.1
"""Allowed growth of a ratio beyond its noise, since compilers' choices vary slightly between runs."""
TURN = 0.05
"""Minimum seconds per turn."""
KERAS = "gradient_accumulation_steps"
VERSIONS = ("jax", "optax", "tensorflow", "keras", "numpy")

Call = Callable[[], Any]


class Row(NamedTuple):
    """A ratio of the library's call to a peer's.

    Attributes:
      name: the name of the row.
      own, peer: names of the calls.
      aim: the largest acceptable ratio, if any.
    """

    name: str
    own: str
    peer: str
    aim: float | None = None


class Group(NamedTuple):
    """Calls that alternate, and their ratios."""

    title: str
    make: Callable[[], Mapping[str, Call]]
    rows: Sequence[Row]


class Measured(NamedTuple):
    """A ratio of CPU times, the interval of its median, and the ratio of elapsed times."""

    ratio: float
    low: float
    high: float
    clock: float


def groups() -> Iterator[Group]:
    """All measured groups."""
    from benchmarks import digests, eager, jax_steps, tensorflow_steps

    leaves, elements = 120, 2**17
    adam = f"Adam, a window of 8, {leaves} x {elements:,}"
    step, multi, limit = jax_steps.FUSED, jax_steps.MULTI, jax_steps.LIMIT
    yield Group(
        f"JAX jit: {adam}",
        lambda: _running(jax_steps.accumulating(leaves, elements, (step, jax_steps.COMPOSABLE, multi, limit))),
        (
            Row("train_step(every=8)", step, multi, 1 / 12),
            Row("train_step(every=8)", step, limit, 1.3),
            Row("accumulate, then apply_updates", jax_steps.COMPOSABLE, multi, 1 / 4),
        ),
    )
    yield Group(
        "JAX jit: the gradient of 1,024 examples in 8 microbatches",
        lambda: _running(jax_steps.scanned(768, 1024)),
        (
            Row("value_and_grad(microbatches=8)", "value_and_grad", "a hand-written scan", 1.05),
            Row("value_and_grad(microbatches=8)", "value_and_grad", "optax.microbatch", 1),
        ),
    )
    yield Group(
        "JAX: 200 leaves of 1,000 over 4 devices",
        lambda: _running(jax_steps.exchanged(4, 200, 1000)),
        (Row("all_reduce(mean)", "gc.all_reduce", "psum of one tuple", 1),),
    )
    for name, xla in (("tf.function", False), ("tf.function, XLA", True)):
        yield Group(
            f"{name}: {adam}",
            lambda xla=xla: _windows(tensorflow_steps.steps(leaves * elements, leaves, xla), tensorflow_steps.EVERY),
            (Row("AccumulatedStep", "step", KERAS, 1 / 3 if xla else 1),),
        )
    for framework, name, peers in (
        ("jax", "JAX jit", ("a chain of +", "a tree of +")),
        ("tensorflow", "tf.function", ("tf.add_n", "tf.add_n")),
    ):
        yield Group(
            f"{name}: sum of 8 arrays of 25M",
            lambda framework=framework: tensorflow_steps.sums(framework, 25_000_000)[1],
            tuple(Row(own[3:], own, peer, 1.05) for own, peer in zip(("gc.add_n", "gc.tree_sum"), peers, strict=True)),
        )
    for count in (1, 20, 100, 1000):
        yield Group(
            f"NumPy, eager: {count} x 8",
            lambda count=count: eager.updates(count),
            (Row("update", eager.FAST, eager.ADDITIONS), Row("update, exact", eager.EXACT, eager.FAST, 10)),
        )
    for way in ("JAX jit", "tf.function", "tf.function, XLA"):
        yield Group(
            f"{way}: 64 MB in four leaves",
            lambda way=way: dict(zip(("norm", "digest"), digests.pairs(digests.leaves(64))[way], strict=True)),
            (Row("digest", "digest", "norm", digests.LIMIT),),
        )


def _running(variants: Mapping[str, Any]) -> dict[str, Call]:
    """Calls that continue from the state of the previous call."""

    def call(variant: Any) -> Call:
        held = [variant.state]

        def run() -> None:
            held[0] = variant.run(held[0])

        return run

    return {name: call(variant) for name, variant in variants.items()}


def _windows(calls: Mapping[str, Call], every: int) -> dict[str, Call]:
    def window(call: Call) -> Call:
        return lambda: [call() for _ in range(every)]

    return {KERAS if name == "keras" else name: window(call) for name, call in calls.items()}


def slower(call: Call, factor: float) -> Call:
    """The call, followed by enough CPU time to make it slower by this factor."""

    def run() -> None:
        more = (factor - 1) * spent([call]).processor
        begun = time.process_time()
        while time.process_time() < begun + more:
            pass

    return run


def measure(calls: Mapping[str, Call], rows: Sequence[Row], rounds: int, plant: float = 1.0) -> dict[Row, Measured]:
    """Measures ratios of alternating calls; short calls are repeated to fill `TURN` seconds."""
    own = {row.own for row in rows}
    used = {name: calls[name] for name in calls if name in own | {row.peer for row in rows}}
    used = {name: slower(call, plant) if plant != 1 and name in own else call for name, call in used.items()}
    spent(list(used.values()))  # compiles
    repeats = {name: math.ceil(TURN / max(spent([call]).clock, TURN / 1000)) for name, call in used.items()}
    times: dict[str, list[Spent]] = {name: [] for name in used}
    for turn in range(rounds):
        for name in used if turn % 2 else reversed(used):
            times[name].append(spent([used[name]] * repeats[name]))
    found = dict[Row, Measured]()
    for row in rows:
        each = list(zip(times[row.own], times[row.peer], strict=True))
        share = repeats[row.peer] / repeats[row.own]
        processor, clock = ([share * a[i] / b[i] for a, b in each] for i in range(2))
        found[row] = Measured(statistics.median(processor), *interval(processor), statistics.median(clock))
    return found


class Spent(NamedTuple):
    """CPU seconds of all threads of this process, and elapsed seconds."""

    processor: float
    clock: float


def spent(calls: Sequence[Call]) -> Spent:
    """The time of these calls, one after another."""
    processor, clock = time.process_time(), time.perf_counter()
    for call in calls:
        call()
    return Spent(time.process_time() - processor, time.perf_counter() - clock)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The values between which the true median lies with at least 95 % confidence, for any distribution.

    >>> interval([3, 1, 2, 9, 5, 4, 8, 7, 6])
    (2, 8)
    """
    n = len(values)
    k, outside = 0, 0.5**n
    while outside <= 0.025 and k < n // 2:
        k += 1
        outside += math.comb(n, k) * 0.5**n
    ordered = sorted(values)
    return ordered[max(0, k - 1)], ordered[n - max(1, k)]


def is_worse(now: Measured, before: Measured) -> bool:
    """Whether the ratio grew by more than both intervals and the margin."""
    return now.low > before.high * (1 + MARGIN)


def key(group: Group, row: Row) -> str:
    return f"{group.title}: {row.name} over {row.peer}"


def main(
    only: Annotated[str, typer.Option(help="Measure only groups whose title contains this text.")] = "",
    rounds: Annotated[int, typer.Option(help="Rounds per group.", min=5)] = 15,
    store: Annotated[bool, typer.Option("--store", help="Write the ratios to benchmarks/ratios.json.")] = False,
    plant: Annotated[float, typer.Option(help="Slow the library's calls down by this factor.", min=1)] = 1.0,
) -> None:
    """Measures the stored ratios again, and fails if one is worse."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    content: dict[str, Any] = json.loads(STORED.read_text()) if STORED.exists() else {"rows": []}
    before = {row["name"]: Measured(*(row[field] for field in Measured._fields)) for row in content["rows"]}
    machine = {"processor": platform.machine(), "cores": os.cpu_count()}
    settings = machine | {"versions": {name: version(name) for name in VERSIONS}}
    if not store and content.get("settings") != settings:
        print(f"stored on {content.get('settings')}\nnow on    {settings}")
    rows, worse, compared = [], [], 0
    for group in groups():
        if only not in group.title:
            continue
        calls = group.make()
        found = measure(calls, group.rows, rounds, plant)
        late = [row for row in group.rows if (old := before.get(key(group, row))) and is_worse(found[row], old)]
        if late and not store:
            again = measure(calls, group.rows, 2 * rounds, plant)
            found |= {row: again[row] for row in late}
        print(group.title)
        for row in group.rows:
            name, now = key(group, row), found[row]
            old = before.get(name)
            compared += old is not None
            failed = not store and row in late and old is not None and is_worse(now, old)
            worse += [name] * failed
            was = "" if old is None else f", was {old.ratio:.2f} ({old.low:.2f} to {old.high:.2f})"
            mark = "WORSE" if failed else "ok" if old is not None else "new"
            print(
                f"  {mark:5} {row.name} over {row.peer}: {now.ratio:.2f} ({now.low:.2f} to {now.high:.2f}){was}",
                flush=True,
            )
            aims = {"group": group.title, "own": row.name, "peer": row.peer, "aim": row.aim}
            rows.append({"name": name} | aims | {field: round(x, 4) for field, x in now._asdict().items()})
    if store:
        kept = [row for row in content["rows"] if row["name"] not in {new["name"] for new in rows}] if only else []
        STORED.write_text(json.dumps({"settings": settings, "rounds": rounds, "rows": kept + rows}, indent=1) + "\n")
        print(f"{len(rows)} ratios stored")
    elif not compared:
        print("nothing to compare with")
        raise typer.Exit(2)
    else:
        print("\n".join(f"worse: {name}" for name in worse) or f"none of {compared} ratios is worse")
        raise typer.Exit(1 if worse else 0)


if __name__ == "__main__":
    typer.run(main)

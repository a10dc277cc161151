"""Cost and accuracy of the precisions of a sum: ratios to plain additions, bytes, and errors.

    python benchmarks/numerics.py [--elements 4000000] [--rounds 9]

A ratio is the time of an update, or of the sum of a list of 8, relative to plain additions in the same framework and
mode. All variants of a mode alternate in one process: a ratio is formed in each round from consecutive times, and the
tables show the median and the range over the rounds. Times are not shown, since they depend on the machine. NumPy and
graphs without XLA, where an exact update is slow, run a quarter of the elements in fewer rounds.
"""

from __future__ import annotations

import math
import operator
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Annotated, Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import gradcombine as gc
from gradcombine import reductions

LISTED = 8
REPLICAS = 8
LENGTHS = (64, 512, 4096)
WIDTH = 2000
UPDATES = 4
"""Updates per variant and turn."""
NEVER = 2**30
"""Length of a window that never fills."""

SUMS: dict[str, gc.Reduction] = {
    "fast": reductions.sum(),
    "compensated": reductions.sum("compensated"),
    "exact": reductions.sum("exact"),
    "exact, 2**26 terms": reductions.sum("exact", max_terms=2**26),
}

Update = Callable[[Any, Any], Any]
Total = Callable[[list[Any]], Any]


class Mode(NamedTuple):
    """A framework in one execution mode."""

    name: str
    array: Callable[[np.ndarray], Any]
    streaming: Callable[[Update], Update]
    """Compiles ``update(state, gradient)``; the state may be donated."""
    listed: Callable[[Total], Callable[[Any, list[Any]], Any]]
    """Compiles ``total(values)``; called with the previous result, whose memory may be reused."""
    wait: Callable[[Any], Any]
    slow: bool


def _graph(function: Callable[..., Any], xla: bool) -> Callable[..., Any]:
    return tf.function(function, jit_compile=xla)


def _graph_of_list(total: Total, xla: bool) -> Callable[[Any, list[Any]], Any]:
    compiled = _graph(total, xla)
    return lambda _, values: compiled(values)


def _jit_of_list(total: Total) -> Callable[[Any, list[Any]], Any]:
    # Touching new memory for the first time takes longer than the additions, and not every call gets new memory.
    return jax.jit(lambda _, values: total(values), donate_argnums=0, keep_unused=True)


def _finish(result: Any) -> None:
    for tensor in tf.nest.flatten(result, expand_composites=True)[:1]:
        _ = tf.reshape(tensor, [-1])[:1].numpy()


MODES = (
    Mode("NumPy", np.asarray, lambda f: f, lambda f: lambda _, values: f(values), lambda x: None, True),
    Mode(
        "JAX jit, donated",
        jnp.asarray,
        partial(jax.jit, donate_argnums=0),
        _jit_of_list,
        jax.block_until_ready,
        False,
    ),
    Mode("tf.function", tf.constant, partial(_graph, xla=False), partial(_graph_of_list, xla=False), _finish, True),
    Mode("tf.function, XLA", tf.constant, partial(_graph, xla=True), partial(_graph_of_list, xla=True), _finish, False),
)


class Variant(NamedTuple):
    """A timed call: ``start()`` returns the first state, ``run`` maps a state to the next."""

    start: Callable[[], Any]
    run: Callable[[Any], Any]


def streaming(mode: Mode, gradients: Sequence[np.ndarray], windows: bool) -> dict[str, Variant]:
    """Adds a contribution to a running sum, or to a window of `gradcombine.accumulate`."""
    given = [mode.array(g) for g in gradients[:2]]

    def variant(update: Update, init: Callable[[], Any]) -> Variant:
        step = mode.streaming(update)

        def run(state: Any) -> Any:
            for i in range(UPDATES):
                state = step(state, given[i % 2])
            mode.wait(state)
            return state

        return Variant(init, run)

    def through(reduction: gc.Reduction) -> Variant:
        acc = gc.accumulate(reduction, every=NEVER)
        if windows:
            return variant(lambda state, g: acc.update(g, state), lambda: _own(mode, acc.init(given[0])))
        return variant(reduction.update, lambda: _own(mode, reduction.init(given[0])))

    plain = variant(operator.add, lambda: mode.array(np.zeros_like(gradients[0])))
    return {"plain": plain, **{name: through(reduction) for name, reduction in SUMS.items()}}


def _own(mode: Mode, state: Any) -> Any:
    """The state with copied arrays, since an array shared by two leaves cannot be donated."""
    return jax.tree.map(jnp.copy, state) if mode.name.startswith("JAX") else state


def listed(mode: Mode, gradients: Sequence[np.ndarray]) -> dict[str, Variant]:
    """The sum of a list in one call."""
    given = [mode.array(g) for g in gradients]

    def variant(total: Total) -> Variant:
        compiled = mode.listed(total)

        def run(result: Any) -> Any:
            result = compiled(result, given)
            mode.wait(result)
            return result

        return Variant(lambda: mode.array(np.zeros_like(gradients[0])), run)

    def through(reduction: gc.Reduction) -> Variant:
        return variant(lambda values: gc.combine(reduction, values))

    plain = variant(lambda values: reduce(operator.add, values))
    return {"plain": plain, **{name: through(reduction) for name, reduction in SUMS.items()}}


PLACES = {
    "sum(p).update": partial(streaming, windows=False),
    "accumulate(sum(p)).update": partial(streaming, windows=True),
    f"combine(sum(p), {LISTED} arrays)": listed,
}


class Timed(NamedTuple):
    """Ratios to plain additions by variant, one per round."""

    place: str
    mode: str
    elements: int
    ratios: dict[str, list[float]]


def measure(elements: int, rounds: int) -> Iterator[Timed]:
    """Measures all places and modes; within each, the variants alternate."""
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(elements, np.float32) for _ in range(LISTED)]
    for place, variants_of in PLACES.items():
        for mode in MODES:
            n, turns = (elements // 4, max(2, rounds // 3)) if mode.slow else (elements, rounds)
            variants = variants_of(mode, [g[:n] for g in gradients])
            states = {name: variant.run(variant.start()) for name, variant in variants.items()}  # compiles
            ratios: dict[str, list[float]] = {name: [] for name in variants if name != "plain"}
            for turn in range(turns):
                times = {}
                # Alternate the order, so that no variant is always first or always after the slowest.
                for name, variant in sorted(variants.items(), reverse=turn % 2 == 1):
                    begun = time.perf_counter()
                    states[name] = variant.run(states[name])
                    times[name] = time.perf_counter() - begun
                for name, own in ratios.items():
                    own.append(times[name] / times["plain"])
            yield Timed(place, mode.name, n, ratios)


class Recorder:
    """`gradcombine.LOCAL`, recording the bytes per element of a leaf in each exchange."""

    def __init__(self, elements: int) -> None:
        self.elements, self.exchanges = elements, []

    def __getattr__(self, name: str) -> Any:
        return getattr(gc.LOCAL, name)

    def all_sum(self, arrays: Sequence[Any]) -> list[Any]:
        return self._exchange("all_sum", arrays)

    def all_max(self, arrays: Sequence[Any]) -> list[Any]:
        return self._exchange("all_max", arrays)

    def all_gather(self, arrays: Sequence[Any]) -> list[Any]:
        return self._exchange("all_gather", arrays)

    def reduce_scatter_map(
        self, function: Callable[..., list[Any]], summed: Sequence[Any], common: Sequence[Any]
    ) -> list[Any]:
        results = function(summed, common)
        self._record("reduce-scatter", summed)
        self._record("all-gather of parts", results)
        return results

    def _exchange(self, name: str, arrays: Sequence[Any]) -> list[Any]:
        self._record(name, arrays)
        return getattr(gc.LOCAL, name)(arrays)

    def _record(self, name: str, arrays: Sequence[Any]) -> None:
        if size := _bytes(arrays, self.elements):
            self.exchanges.append((name, size))


def _bytes(arrays: Any, elements: int) -> float:
    """Bytes per element of a leaf, without the scalars of a state."""
    return sum(x.nbytes for x in jax.tree.leaves(arrays) if x.size >= elements) / elements


def sizes() -> Iterator[tuple[str, ...]]:
    """Bytes of state and exchange per element, counted from the arrays."""
    like = np.zeros(1000, np.float32)
    for name, reduction in SUMS.items():
        for order in ("sequential", "tree") if name == "fast" else ("sequential",):
            for call in ("merge_replicas", "all_reduce"):
                recorder = Recorder(like.size)
                state = reduction.update(reduction.init(like), like)
                if call == "all_reduce":
                    gc.all_reduce(reduction, like, over=recorder, order=order)
                else:
                    gc.merge_replicas(reduction, state, over=recorder, order=order)
                exchanges = " + ".join(f"{kind} of {size:g}" for kind, size in recorder.exchanges)
                received = sum(_received(kind, size) for kind, size in recorder.exchanges)
                label = f"{name}, order {order!r}" if name == "fast" else name
                yield label, f"{_bytes(state, like.size):g}", call, exchanges, f"{received:g}"


def _received(kind: str, size: float) -> float:
    """Bytes received by one replica in a ring."""
    whole = (REPLICAS - 1) * size
    return {"all_gather": whole, "all_sum": 2 * whole / REPLICAS, "all_max": 2 * whole / REPLICAS}.get(
        kind, whole / REPLICAS
    )


def accuracy(length: int) -> Iterator[tuple[str, ...]]:
    """Errors against `math.fsum`, which is the exact sum to 2**-29 of a float32 ulp here."""
    values = np.random.default_rng(length).standard_normal((length, WIDTH)).astype(np.float32)
    exact = np.array([math.fsum(column) for column in values.T])
    rounded = exact.astype(np.float32)
    ulp = np.spacing(np.abs(rounded)).astype(np.float64)
    for label, precision, order in (
        ("fast, order 'sequential'", "fast", "sequential"),
        ("fast, order 'tree'", "fast", "tree"),
        ("compensated", "compensated", "sequential"),
        ("exact", "exact", "sequential"),
    ):
        result = gc.combine(reductions.sum(precision), list(values), order=order)
        off = np.abs(result - exact) / ulp
        yield str(length), label, f"{off.max():,.1f}", f"{100 * np.mean(result == rounded):.1f} %"


def _described(ratios: list[float]) -> str:
    return f"{_short(statistics.median(ratios))} ({_short(min(ratios))}-{_short(max(ratios))})"


def _short(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 20 else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


def main(
    elements: Annotated[int, typer.Option(help="Elements of a gradient.", min=4)] = 4_000_000,
    rounds: Annotated[int, typer.Option(help="Rounds; fewer for slow updates.", min=1)] = 9,
) -> None:
    """Prints cost and accuracy of the precisions of a sum: ratios to plain additions, bytes, and errors."""
    console = Console()
    devices = (
        f"JAX on {jax.default_backend()}, TensorFlow on {'gpu' if tf.config.list_physical_devices('GPU') else 'cpu'}"
    )
    costs = Table(
        "call, p: precision",
        "mode",
        "elements",
        *SUMS,
        title=f"Time over plain additions: median (range); {devices}",
    )
    bytes_of = Table(
        "precision",
        "state",
        "call",
        "bytes in each collective",
        f"received, for {REPLICAS} replicas",
        title="Bytes per float32 element",
    )
    errors = Table(
        "N", "precision", "largest error, ulp", "correctly rounded", title=f"Sums of N normal numbers, {WIDTH} elements"
    )
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(PLACES) * len(MODES) + len(LENGTHS))
        for timed in measure(elements, rounds):
            costs.add_row(timed.place, timed.mode, f"{timed.elements:,}", *map(_described, timed.ratios.values()))
            progress.advance(task)
        for row in sizes():
            bytes_of.add_row(*row)
        for length in LENGTHS:
            for row in accuracy(length):
                errors.add_row(*row)
            progress.advance(task)
    for table in (costs, bytes_of, errors):
        console.print(table)


if __name__ == "__main__":
    typer.run(main)

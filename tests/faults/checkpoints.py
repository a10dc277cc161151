"""TensorFlow workers with one `AccumulatedStep` each, which save their windows in separate tf.train.Checkpoints.

All workers restart when one is lost: each reads the newest intact checkpoint of every previous worker. The newest
window among them counts; workers that are behind take the parameters of another worker. The parts of that window are
merged, and the missing microbatches are dealt to the current workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from gradcombine import AccumulateState, ledger, statefile
from gradcombine.integrations.tensorflow import AccumulatedStep
from gradcombine.places.window import OVER
from gradcombine.statefile.recovery import _disjoint  # pyright: ignore[reportPrivateUsage] (there is one such rule)
from tests.faults.tensorflow_engine import TensorFlowEngine
from tests.faults.training import (
    MICROBATCHES,
    SCHEMES,
    WINDOWS,
    Log,
    Run,
    begin,
    bits,
    digest,
    is_finite,
    microbatch,
    on_host,
)

NAMES = tuple(sorted(begin()))
LIKE = [begin()[name] for name in NAMES]
REDUCTION = SCHEMES["exact"].reduction
KEPT = 2
"""Number of checkpoints per worker, so that one is left if the newest is truncated."""


class Trained(NamedTuple):
    """The saved variables of a worker. ``window``: index of the current one; ``combined``: gradients of the last."""

    params: dict[str, Any]
    window: Any
    combined: dict[str, Any]
    step: AccumulatedStep

    def checkpoint(self) -> tf.train.Checkpoint:
        return tf.train.Checkpoint(window=self.window, step=self.step, **self.params)

    def values(self) -> Any:
        return {name: x.numpy() for name, x in self.params.items()}

    def state(self) -> Any:
        """This worker's part of its window; empty if the last window is finished."""
        (state,) = on_host(self.step.states())
        is_over = state.step >= OVER or state.index < int(self.window)
        return state._replace(levels=(REDUCTION.clear(state.levels[0]),)) if is_over else state


def made(engine: TensorFlowEngine, every: int) -> Trained:
    """Creates the variables and the step of a worker, in the scope of the strategy."""
    params = {name: tf.Variable(x) for name, x in begin().items()}
    combined = {name: tf.Variable(x) for name, x in begin().items()}
    window = tf.Variable(0)

    def gradients(x: Any, y: Any, weight: Any) -> Any:
        found = engine.gradient({name: tf.convert_to_tensor(x) for name, x in params.items()}, x, y)
        return [found[name] for name in NAMES], weight

    def apply(found: Any, variables: Any) -> None:
        grads = dict(zip(NAMES, found, strict=True))
        for name, x in combined.items():
            x.assign(grads[name])
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(x)) for x in found])
        after = engine.descend({name: tf.convert_to_tensor(x) for name, x in params.items()}, grads)
        for name, x in zip(NAMES, variables, strict=True):
            x.assign(tf.where(finite, after[name], x))

    step = AccumulatedStep(gradients, [params[name] for name in NAMES], apply, every, reduction=REDUCTION)
    return Trained(params, window, combined, step)


class Found(NamedTuple):
    """The saved state of a run, equal for all workers that read it before any of them writes."""

    window: int
    params: Any
    parts: dict[int, Any]


def recover(engine: TensorFlowEngine, folder: Path) -> Found:
    """Reads the newest intact checkpoint of each worker; returns the parts of the newest window."""
    reader, found = made(engine, MICROBATCHES), list[tuple[int, int, Any, Any]]()
    for own in sorted(folder.glob("worker-*")):
        for index in sorted(own.glob("*.index"), key=_number, reverse=True):
            try:
                reader.checkpoint().restore(str(index.with_suffix(""))).assert_consumed()
            except (tf.errors.OpError, IndexError, ValueError, AssertionError):  # truncated
                continue
            rank = int(own.name.rpartition("-")[2])
            found.append((int(reader.window), rank, reader.values(), reader.state()))
            break
    newest = max([window for window, *_ in found], default=0)
    current = [one for one in found if one[0] == newest]
    params = current[0][2] if current else begin()
    return Found(newest, params, _disjoint({rank: state.levels[0] for _, rank, _, state in current}))


def train(engine: TensorFlowEngine, run: Run) -> str:
    """Runs one of several workers from the saved state of the run to its end."""
    log, every = Log(run), -(-MICROBATCHES // run.size)
    index, params, parts = recover(engine, run.folder)
    for holder, part in parts.items():
        value = dict(zip(NAMES, REDUCTION.finalize(part), strict=True))
        log(recovered=index, holder=holder, numbers=ledger.read(part).held, bits=digest(value))
    with engine.strategy.scope():
        trained = made(engine, every)
    step = tf.function(trained.step) if run.generation % 2 == 0 else trained.step  # eager functions start faster
    engine.wait_for_all()  # otherwise workers that start later would read what this one writes
    for name, x in trained.params.items():
        x.assign(params[name])
    trained.window.assign(index)
    own = run.folder / f"worker-{run.rank}"
    manager = tf.train.CheckpointManager(trained.checkpoint(), str(own), KEPT)
    saves = max([_number(file) for file in own.glob("*.index")], default=0)

    groups = [[parts[rank] for rank in parts if rank % run.size == here] for here in range(run.size)]
    has = [list(ledger.read(REDUCTION.init(LIKE), *group).held) for group in groups]
    dealt = ledger.deal(set(range(MICROBATCHES)).difference(*has), run.size, has)
    held, calls = has[run.rank], max(1, *map(len, dealt))
    (level,) = statefile.resize(REDUCTION, [*groups[run.rank], REDUCTION.init(LIKE)], 1)
    # The position in the window is set by the remaining calls of all workers, not by its contents.
    trained.step.load_states([AccumulateState((level,), np.int32(every - calls), np.int32(index))])
    while index < WINDOWS:
        todo = dealt[run.rank]
        for number in [*todo, *[-1] * (calls - len(todo))]:  # a placeholder, of weight 0
            run.at("compute")
            if number >= 0:
                log(computed=[index, number])
                held = [*held, number]
            x, y, weight = microbatch(index, max(number, 0))
            run.at("merge")
            is_applied, _ = step(
                tf.constant(x), tf.constant(y), tf.constant(weight if number >= 0 else 0), number=tf.constant(number)
            )
            if is_applied:
                values = {name: x.numpy() for name, x in trained.combined.items()}
                account = engine.ledger_of(trained.step.states()[0])
                log(
                    applied=index,
                    missing=account.missing,
                    doubled=account.doubled,
                    bits=digest(values),
                    update=is_finite(values),
                )
                trained.window.assign(index + 1)
            run.at("save")
            saves += 1
            try:
                manager.save(checkpoint_number=saves)
            except tf.errors.OpError:
                log(unsaved=index, numbers=held)
            else:
                log(saved=index, numbers=held)
        index, held, calls = index + 1, [], every
        dealt = ledger.deal(range(MICROBATCHES), run.size)
    return bits(trained.values())


def _number(index: Path) -> int:
    return int(index.stem.rpartition("-")[2])

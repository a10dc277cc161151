"""The training that faults strike: the same on every engine, in one process or in several that save their windows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

import gradcombine as gc
from gradcombine import ledger, reductions, statefile, tree
from gradcombine.reductions import Numbered

WINDOWS, MICROBATCHES, LOGICAL, WIDTH = 4, 8, 4, 17
POISONED = 1
"""A window with a microbatch that is not a number: its update is left out, by all or by none."""


class Engine(Protocol):
    """What a framework lends."""

    def join(self, addresses: Sequence[str], rank: int) -> None:
        """Makes this process one of several."""
        ...

    def wait_for_all(self) -> None: ...

    def gradient(self, params: Any, x: np.ndarray, y: np.ndarray) -> Any: ...

    def descend(self, params: Any, gradients: Any) -> Any: ...

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function of arrays, compiled."""
        ...

    def merge(self, scheme: Scheme, held: Sequence[Any], assignment: ledger.Assignment) -> Any:
        """The window of all processes, on the host. ``held``: as many states on all of them."""
        ...


class Scheme(NamedTuple):
    """How a window keeps its bits.

    Attributes:
      name: ``"exact"``: any process may hold any microbatches. ``"tree"``: logical replicas stay whole.
      reduction: a numbered mean.
      order: of all additions.
    """

    name: str
    reduction: Any
    order: Any

    @property
    def every(self) -> int:
        return MICROBATCHES if self.name == "exact" else MICROBATCHES // LOGICAL


SCHEMES = {
    "exact": Scheme("exact", reductions.numbered(reductions.mean("exact"), MICROBATCHES), "sequential"),
    "tree": Scheme("tree", reductions.numbered(reductions.mean(), MICROBATCHES), "tree"),
}


class Run(NamedTuple):
    """One process of a run.

    Attributes:
      folder: of the windows.
      scheme: a name in `SCHEMES`.
      generation: how often all processes were started before.
      rank, size: which process it is, of how many.
      plant: a defect, or nothing.
      at: called at each place where a fault may strike, with its name.
      returns: how many processes were started one by one before this one, where the others go on.
    """

    folder: Path
    scheme: str
    generation: int
    rank: int
    size: int
    plant: str
    at: Callable[[str], None]
    returns: int = 0


def microbatch(window: int, number: int) -> tuple[np.ndarray, np.ndarray, np.int32]:
    """Examples, and how much they count; their gradients are of many scales, so that an order of additions shows."""
    rng = np.random.default_rng([window, number])
    x = (rng.normal(size=(4, WIDTH)) * 2.0 ** rng.integers(-6, 3)).astype(np.float32)
    y = np.sin(x).sum(1)
    return x, np.full_like(y, np.nan) if (window, number) == (POISONED, 5) else y, np.int32(1 + number % 5)


def begin() -> Any:
    return {"w": np.zeros(WIDTH, np.float32), "b": np.zeros((), np.float32)}


def alone(engine: Engine, scheme: str) -> tuple[str, list[str]]:
    """The bits of the unbroken run, and the digest of each window's gradients: each window is one list."""
    digests = list[str]()
    params, order = begin(), "tree" if scheme == "tree" else "sequential"
    mean = reductions.mean("exact" if scheme == "exact" else "fast")
    for window in range(WINDOWS):
        batches = [microbatch(window, number) for number in range(MICROBATCHES)]
        found = [on_host(engine.gradient(params, x, y)) for x, y, _ in batches]
        combined = gc.combine(mean, found, [weight for *_, weight in batches], order=order)
        digests.append(digest(combined))
        if is_finite(combined):
            params = on_host(engine.descend(params, combined))
    return bits(params), digests


def train(engine: Engine, run: Run) -> str:
    """One of several processes, from what there is of the run to its end."""
    scheme = SCHEMES[run.scheme]
    reduction, like = scheme.reduction, begin()
    acc = gc.accumulate(reduction, scheme.every, order=scheme.order)

    def add(state: Any, value: Any, number: Any, weight: Any) -> Any:
        return acc.update(Numbered(value, number), state, weight)

    # Exact sums take seconds to compile, for a handful of microbatches; NumPy gives the same bits.
    update = (
        engine.compiled(add) if run.scheme == "tree" else lambda state, value, *rest: add(state, on_host(value), *rest)
    )
    folder, log = run.folder, Log(run)
    index, params, parts, _ = statefile.recover(folder, reduction, like, start=like)
    engine.wait_for_all()  # what is written now would be read by those who come later
    is_begun = saved(statefile.begin_window, folder, index, params)
    while index < WINDOWS:
        held, todo, assignment = shares(scheme, acc, parts, run)
        for holder, numbers in todo.items():
            for number in numbers:
                run.at("compute")
                log(computed=[index, number])
                x, y, weight = microbatch(index, number)
                gradients = engine.gradient(params, x, y)
                held[holder] = on_host(update(held[holder], gradients, np.int32(number), weight))
                run.at("save")
                is_begun = is_begun or saved(statefile.begin_window, folder, index, params)
                if is_begun and run.plant != "saved-after-update":
                    saved(statefile.save_part, folder, index, holder, reduction, held[holder])
        run.at("merge")
        padding = max(map(len, assignment)) - len(held)
        merged = engine.merge(scheme, [*held.values(), *[acc.init(like)] * padding], assignment)
        combined, account = acc.value(merged), ledger.read(merged)
        log(applied=index, missing=account.missing, doubled=account.doubled, bits=digest(combined))
        ledger.require_once(merged)
        run.at("apply")
        seen = held[min(held)] if held and run.plant == "skip-not-agreed" else merged
        if is_finite(acc.value(seen)):
            params = on_host(engine.descend(params, combined))
        index += 1
        is_begun = saved(statefile.begin_window, folder, index, params)
        run.at("begin")
        parts = {}
        if run.plant == "saved-after-update":
            for holder, state in held.items():
                statefile.save_part(folder, index, holder, reduction, state)
    return bits(params)


def shares(scheme: Scheme, acc: Any, parts: dict[int, Any], run: Run) -> tuple[dict[int, Any], dict[int, Any], Any]:
    """What this process holds by holder, what it has to do, and the assignment: the same on all processes."""
    if scheme.name == "tree":
        assignment = ledger.deal(range(LOGICAL), run.size)
        mine = assignment[run.rank]
        held = {logical: parts.get(logical, acc.init(begin())) for logical in mine}
        blocks = {logical: range(logical * scheme.every, (logical + 1) * scheme.every) for logical in mine}
        todo = {x: [n for n in blocks[x] if n not in ledger.read(held[x]).held] for x in mine}
        return held, todo, assignment
    groups = [[parts[holder] for holder in sorted(parts)[rank :: run.size]] for rank in range(run.size)]
    has = [[n for part in group for n in ledger.read(part).held] for group in groups]
    missing = sorted(set(range(MICROBATCHES)) - {n for numbers in has for n in numbers})
    dealt = ledger.deal(missing, run.size, has)
    if run.plant == "dealt-twice" and missing:
        dealt = [sorted({*numbers, missing[0]}) for numbers in dealt]
    state = acc.init(begin())
    for part in groups[run.rank]:
        merged = scheme.reduction.merge(state.levels[0], part.levels[0])
        state = state._replace(levels=(merged,), step=state.step + part.step)
    return {run.rank: state}, {run.rank: dealt[run.rank]}, [[rank] for rank in range(run.size)]


def saved(save: Callable[..., None], *args: Any) -> bool:
    """Whether a file was written. On a full disk training goes on: what is not saved is computed again at worst."""
    try:
        save(*args)
    except OSError:
        return False
    return True


def is_finite(values: Any) -> bool:
    return all(np.isfinite(x).all() for x in values.values())


def on_host(values: Any) -> Any:
    """In NumPy arrays, the same containers."""
    leaves, structure = tree.flatten("on_host", values)
    return tree.unflatten(structure, [x if x is None else np.asarray(x) for x in leaves])


def bits(params: Any) -> str:
    return b"".join(np.asarray(params[name]).tobytes() for name in sorted(params)).hex()


def digest(gradients: Any) -> str:
    if not is_finite(gradients):
        return "not finite"
    return hashlib.sha256(bits(gradients).encode()).hexdigest()[:16]


class Log:
    """What this process computed and applied, on the disk before it goes on."""

    def __init__(self, run: Run) -> None:
        path = run.folder / f"log-{run.generation}-{run.returns}-{run.rank}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, **entry: Any) -> None:
        os.write(self._file, json.dumps(entry).encode() + b"\n")

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
    return x, np.full_like(y, np.nan) if (window, number) == (POISONED, 5) else y, weight(number)


def weight(number: int) -> np.int32:
    return np.int32(1 + number % 5)


def begin() -> Any:
    return {"w": np.zeros(WIDTH, np.float32), "b": np.zeros((), np.float32)}


class Unbroken(NamedTuple):
    """The run in which nothing happens, in one process.

    Attributes:
      scheme: a name in `SCHEMES`.
      gradients: by window, of each microbatch.
      updates: by window, whether it was applied: one that is not finite is left out.
      parameters: the bits of the last ones.
    """

    scheme: str
    gradients: list[list[Any]]
    updates: list[bool]
    parameters: str

    def digest(self, window: int, numbers: Sequence[int] = range(MICROBATCHES)) -> str:
        """Of the mean of these microbatches, which are one list."""
        return digest(_mean(self.scheme, self.gradients[window], numbers))


def _mean(scheme: str, gradients: Sequence[Any], numbers: Sequence[int] = range(MICROBATCHES)) -> Any:
    mean = reductions.mean("exact" if scheme == "exact" else "fast")
    weights = [weight(number) for number in numbers]
    return gc.combine(mean, [gradients[number] for number in numbers], weights, order=SCHEMES[scheme].order)


def alone(engine: Engine, scheme: str) -> Unbroken:
    """The unbroken run: each window is one list."""
    params, gradients, updates = begin(), list[list[Any]](), list[bool]()
    for window in range(WINDOWS):
        batches = [microbatch(window, number) for number in range(MICROBATCHES)]
        gradients.append([on_host(engine.gradient(params, x, y)) for x, y, _ in batches])
        combined = _mean(scheme, gradients[-1])
        updates.append(is_finite(combined))
        if updates[-1]:
            params = on_host(engine.descend(params, combined))
    return Unbroken(scheme, gradients, updates, bits(params))


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

    def part(window: int, holder: int, state: Any) -> Any:
        return statefile.save_part, folder, window, holder, reduction, state

    index, params, parts, _ = statefile.recover(folder, reduction, like, start=like)
    log.recovered(index, parts, acc)
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
                if not run.plant.startswith("saved-"):
                    log.saved(index, held[holder], is_begun and saved(*part(index, holder, held[holder])))
        run.at("merge")
        if run.plant == "saved-at-end":
            for holder, state in held.items():
                saved(*part(index, holder, state))
        padding = max(map(len, assignment)) - len(held)
        merged = engine.merge(scheme, [*held.values(), *[acc.init(like)] * padding], assignment)
        combined, account = acc.value(merged), ledger.read(merged)
        seen = held[min(held)] if held and run.plant == "skip-not-agreed" else merged
        is_kept = is_finite(acc.value(seen))
        log(applied=index, missing=account.missing, doubled=account.doubled, bits=digest(combined), update=is_kept)
        ledger.require_once(merged)
        run.at("apply")
        if is_kept:
            params = on_host(engine.descend(params, combined))
        index += 1
        is_begun = saved(statefile.begin_window, folder, index, params)
        run.at("begin")
        parts = {}
        if run.plant == "saved-after-update":
            for holder, state in held.items():
                saved(*part(index, holder, state))
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
    # Whose file a process will replace, it holds: else what another one holds would be on no disk for a while.
    groups = [[parts[holder] for holder in parts if holder % run.size == rank] for rank in range(run.size)]
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

    def recovered(self, window: int, parts: dict[int, Any], acc: Any) -> None:
        """What the parts on the disk hold, and the bits of it."""
        for holder, state in parts.items():
            self(recovered=window, holder=holder, numbers=ledger.read(state).held, bits=digest(acc.value(state)))

    def saved(self, window: int, state: Any, is_saved: bool) -> None:
        self(**{"saved" if is_saved else "unsaved": window}, numbers=ledger.read(state).held)

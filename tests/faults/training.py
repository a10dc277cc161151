"""The training under faults: identical on every engine, in one process or in several that save their windows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

import gradcombine as gc
from gradcombine import faults, ledger, reductions, statefile, tree

WINDOWS, MICROBATCHES, LOGICAL, WIDTH = 4, 8, 4, 17
POISONED = 1
"""A window with a NaN microbatch: all processes must skip its update."""


class Engine(Protocol):
    """Functions that a framework provides."""

    def join(self, addresses: Sequence[str], rank: int) -> None:
        """Makes this process one of several."""
        ...

    def wait_for_all(self) -> None: ...

    def gradient(self, params: Any, x: np.ndarray, y: np.ndarray) -> Any: ...

    def descend(self, params: Any, gradients: Any) -> Any: ...

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles a function of arrays."""
        ...

    def merge(self, scheme: Scheme, held: Sequence[Any], assignment: ledger.Assignment) -> Any:
        """Merges the windows of all processes; on the host. ``held``: an equal number of states on each process."""
        ...

    def find(self, values: Any, window: Any, twins: Any) -> faults.Faults:
        """`gradcombine.resilience.faults.find` over all processes."""
        ...


class Scheme(NamedTuple):
    """How a window gets reproducible bits.

    Attributes:
      name: ``"exact"``: any process may hold any microbatches. ``"tree"``: logical replicas stay whole.
      reduction: a numbered mean.
      order: order of all additions.
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
      folder: directory of the windows.
      scheme: a name in `SCHEMES`.
      generation: number of previous starts of all processes.
      rank, size: rank of the process and number of processes.
      plant: name of a planted defect, or empty.
      at: called with the name of each place where a fault may strike.
      bad: faults of this process from now on.
      policy: policy for bad replicas; empty if all are good.
      returns: number of single processes restarted before this one while the others continued.
    """

    folder: Path
    scheme: str
    generation: int
    rank: int
    size: int
    plant: str
    at: Callable[[str], None]
    bad: list[str]
    policy: str = ""
    returns: int = 0


def microbatch(window: int, number: int, policy: str = "") -> tuple[np.ndarray, np.ndarray, np.int32]:
    """Examples and their weight; their gradients differ in scale, so that the order of additions affects the bits.

    With a policy for bad replicas, no example is NaN.
    """
    rng = np.random.default_rng([window, number])
    x = (rng.normal(size=(4, WIDTH)) * 2.0 ** rng.integers(-6, 3)).astype(np.float32)
    y = np.sin(x).sum(1)
    is_poisoned = (window, number) == (POISONED, 5) and not policy
    return x, np.full_like(y, np.nan) if is_poisoned else y, weight(number)


def weight(number: int) -> np.int32:
    return np.int32(1 + number % 5)


def begin() -> Any:
    return {"w": np.zeros(WIDTH, np.float32), "b": np.zeros((), np.float32)}


class Unbroken(NamedTuple):
    """The run without faults, in one process.

    Attributes:
      scheme: a name in `SCHEMES`.
      gradients: gradients of each microbatch, by window.
      updates: whether the update was applied, by window; an update that is not finite is skipped.
      parameters: bits of the final parameters.
    """

    scheme: str
    gradients: list[list[Any]]
    updates: list[bool]
    parameters: str

    def digest(self, window: int, numbers: Sequence[int] = range(MICROBATCHES)) -> str:
        """Digest of the mean of these microbatches, combined as one list."""
        return digest(_mean(self.scheme, self.gradients[window], numbers))


def _mean(scheme: str, gradients: Sequence[Any], numbers: Sequence[int] = range(MICROBATCHES)) -> Any:
    mean = reductions.mean("exact" if scheme == "exact" else "fast")
    weights = [weight(number) for number in numbers]
    return gc.combine(mean, [gradients[number] for number in numbers], weights, order=SCHEMES[scheme].order)


def alone(engine: Engine, scheme: str, policy: str = "", skipped: Collection[int] = ()) -> Unbroken:
    """The run without faults: each window is one list. ``skipped``: windows that the policy skips."""
    params, gradients, updates = begin(), list[list[Any]](), list[bool]()
    for window in range(WINDOWS):
        batches = [microbatch(window, number, policy) for number in range(MICROBATCHES)]
        gradients.append([on_host(engine.gradient(params, x, y)) for x, y, _ in batches])
        combined = _mean(scheme, gradients[-1])
        updates.append(is_finite(combined) and window not in skipped)
        if updates[-1]:
            params = on_host(engine.descend(params, combined))
    return Unbroken(scheme, gradients, updates, bits(params))


def saved(save: Callable[..., None], *args: Any) -> bool:
    """Whether the file was saved. Training continues on a full disk: unsaved microbatches may be recomputed."""
    try:
        save(*args)
    except OSError:
        return False
    return True


def is_finite(values: Any) -> bool:
    return all(np.isfinite(x).all() for x in values.values())


def on_host(values: Any) -> Any:
    """Converts leaves to NumPy arrays in the same containers."""
    leaves, structure = tree.flatten(values)
    return tree.unflatten(structure, [x if x is None else np.asarray(x) for x in leaves])


def bits(params: Any) -> str:
    return b"".join(np.asarray(params[name]).tobytes() for name in sorted(params)).hex()


def digest(gradients: Any) -> str:
    if not is_finite(gradients):
        return "not finite"
    return hashlib.sha256(bits(gradients).encode()).hexdigest()[:16]


class Log:
    """Logs what this process computed and applied, on the disk before it continues."""

    def __init__(self, run: Run) -> None:
        self._folder = run.folder
        path = run.folder / f"log-{run.generation}-{run.returns}-{run.rank}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, **entry: Any) -> None:
        os.write(self._file, json.dumps(entry).encode() + b"\n")

    def recovered(self, window: int, parts: dict[int, Any], acc: Any) -> None:
        """Logs the contents and bits of the parts on the disk."""
        for holder, state in parts.items():
            found = digest(acc.value(state))
            self(recovered=window, holder=holder, numbers=ledger.read(state).held, bits=found, state=whole(state))

    def save(self, window: int, holder: int, reduction: Any, state: Any) -> bool:
        """Saves a part, after logging it."""
        self(saving=window, state=whole(state))
        return saved(statefile.save_part, self._folder, window, holder, reduction, state)

    def saved(self, window: int, state: Any, is_saved: bool) -> None:
        self(**{"saved" if is_saved else "unsaved": window}, numbers=ledger.read(state).held)


def whole(state: Any) -> str:
    """Digest of all bits of a state."""
    leaves = [x for x in tree.flatten(state)[0] if x is not None]
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves)).hexdigest()[:16]

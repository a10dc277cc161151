"""Writes what a training step works on, from eager code, from a JAX program or from a tf.function."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Container
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from gradcombine import tree
from gradcombine.autograph import ordinary
from gradcombine.backends.registry import is_absent
from gradcombine.errors import GradCombineError
from gradcombine.types import Tree
from gradcombine.verify.trace import hooks

STAGES = ("inputs", "gradients", "combined", "updates", "params")
"""The stages of a step, in the order in which one makes the next."""

_SEPARATORS = re.compile(r"\[['\"]?|['\"]?\]|\.")


def record(directory: str | Path, steps: Container[int] | None = None) -> Recorder:
    """Begins a trace: a directory with one .npz file a step.

    Args:
      directory: made if it is not there; it must not hold a trace already.
      steps: the steps to write, for instance ``range(0, 1000, 100)``; None: all of them.

    Returns:
      A `Recorder`, to be called in each step, and closed (or used as a context manager) at the end.

    Raises:
      GradCombineError: for a directory that holds a trace.

    >>> import tempfile, numpy as np
    >>> from gradcombine.verify import record
    >>> from gradcombine.verify.dumps import open_dump
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with record(directory) as recorder:
    ...         recorder(3, gradients={"w": np.ones(2)}, params={"w": np.zeros(2)})
    ...     list(open_dump(f"{directory}/step_00000003.npz"))
    ['gradients/w', 'params/w']
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.glob("step_*.npz")):
        raise GradCombineError("record", "a directory without a trace", str(path))
    return Recorder(path, steps)


class Recorder:
    """Writes the steps of one run; made by `record`."""

    def __init__(self, directory: Path, steps: Container[int] | None) -> None:
        self._directory, self._steps = directory, steps
        self._written: dict[int, dict[str, np.ndarray]] = {}
        self._conflicts: list[str] = []
        self._lock = threading.Lock()

    @ordinary
    def __call__(self, step: Any, **stages: Tree) -> None:
        """Writes some stages of a step; others of the same step may follow.

        In a traced JAX program, or a tf.function without jit_compile, the values are written as the program runs, by a
        callback to the host: only what is traced is computed again on the next call. Inside pmap or shard_map, or in a
        replica context, the call is made once a replica: hand over values that are the same on all of them.

        Args:
          step: its number, an integer scalar that may be traced.
          **stages: trees of arrays by the names of `STAGES`, the ones that the run has: ``inputs`` (a batch), the
            ``gradients`` of this replica or microbatch, the ``combined`` gradient, the optimizer's ``updates``, and the
            ``params`` after them. A leaf that is None is left out.

        Raises:
          GradCombineError: for another stage.
        """
        unknown = [name for name in stages if name not in STAGES]
        if unknown:
            raise GradCombineError("record", f"stages of {', '.join(STAGES)}", ", ".join(unknown))
        named: dict[str, Any] = {}
        for stage, value in stages.items():
            leaves, structure = tree.flatten("record", value)
            for leaf, path in zip(leaves, structure.paths(), strict=True):
                if not is_absent(leaf):
                    named[_name(stage, path)] = leaf
        hooks.call(list(named.values()), step, self._writer(tuple(named)))

    def close(self) -> None:
        """Waits for the callbacks that are under way.

        Raises:
          GradCombineError: for a stage that came twice in a step, with other bits: replicas that differ.
        """
        hooks.wait()
        if self._conflicts:
            raise GradCombineError("record", "the same values on all replicas", "others", self._conflicts[0])

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del error, trace
        if kind is None:
            self.close()

    def _writer(self, names: tuple[str, ...]) -> Callable[..., None]:
        def write(step: Any, arrays: Any) -> None:
            number = int(step)
            if self._steps is not None and number not in self._steps:
                return
            with self._lock:
                kept = self._written.setdefault(number, {})
                for name, array in zip(names, map(np.asarray, arrays), strict=True):
                    if name in kept and kept[name].tobytes() != array.tobytes():
                        self._conflicts.append(f"{name} of step {number}")
                    # A callback's array may be the buffer of its next call.
                    kept.setdefault(name, array.copy())
                self._save(number, kept)
                for done in [other for other in self._written if other < number - 1]:
                    del self._written[done]

        return write

    def _save(self, step: int, arrays: dict[str, np.ndarray]) -> None:
        """A file is there as a whole or not at all."""
        path = self._directory / f"step_{step:08}.npz"
        draft = path.with_name(f".{path.name}.draft")
        with open(draft, "wb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        os.replace(draft, path)


def _name(stage: str, path: str) -> str:
    words = [word for word in _SEPARATORS.split(path) if word]
    return "/".join([stage, *words])

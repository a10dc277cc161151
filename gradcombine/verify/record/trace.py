"""Runs that leave a trace: a file of arrays for each step, from programs that run or are compiled."""

from __future__ import annotations

import ast
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import ml_dtypes
import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import GradCombineError, invalid, operation, require_path, shown
from gradcombine.tree import Structure
from gradcombine.types import Array, Tree
from gradcombine.verify.diff.dumps import open_dump
from gradcombine.verify.diff.pytorch import converted

STAGES = ("inputs", "gradients", "combined", "updates", "params")
"""The stages of a step, in the order in which one makes the next."""


@operation("record")
def record(directory: str | Path, steps: Container[int] | None = None) -> Recorder:
    """Begins a trace: a directory with one .npz file a step.

    Args:
      directory: made if it is not there; it must not hold a trace already.
      steps: the steps to write, for instance ``range(0, 1000, 100)``, no iterator; None: all of them.

    Returns:
      A `Recorder`, to be called in each step, and closed at the end; it is a context manager, too.

    Raises:
      GradCombineError: for a directory that holds a trace, and for steps that do not tell what is among them.
      OSError: where the directory cannot be made.

    >>> import tempfile, numpy as np
    >>> from gradcombine.verify import record
    >>> from gradcombine.verify.diff.dumps import open_dump
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with record(directory) as recorder:
    ...         recorder(3, gradients={"w": np.ones(2)}, params={"w": np.zeros(2)})
    ...     list(open_dump(f"{directory}/step_00000003.npz"))
    ['gradients/w', 'params/w']
    """
    path = require_path("a directory", directory)
    _among(steps, 0)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.glob("step_*.npz")):
        raise invalid("a directory without a trace", str(path))
    return Recorder(path, steps)


def _among(steps: Container[int] | None, step: int) -> bool:
    if steps is None:
        return True
    try:
        if isinstance(steps, Iterator):  # which would lose what it is asked for
            raise TypeError
        return step in steps
    except Exception:  # of text, of arrays in two dimensions, or whatever a foreign class raises
        raise invalid("steps such as range(0, 1000, 100), or None", shown(steps)) from None


class Recording:
    """Steps of one run, recorded on the host: now where their values are known, else as the program runs.

    A subclass records a step under its ``name``. Errors in a program's callback, which would not
    come through it as they are, are raised by `close`.
    """

    name: str

    def __init__(self) -> None:
        self._problems: list[GradCombineError] = []
        self._lock = threading.Lock()

    @operation()
    def close(self) -> None:
        """Waits for pending callbacks.

        Raises:
          GradCombineError: what went wrong in them.
        """
        jax = sys.modules.get("jax")
        if jax is not None:
            jax.effects_barrier()
        if self._problems:
            raise self._problems[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del error, trace
        try:  # after an error too: the last steps are those that are looked for
            self.close()
        except GradCombineError:
            if kind is None:
                raise

    def _require_step(self, step: Array) -> None:
        """Raises unless the step is an integer scalar, known to be from 0 on or traced."""
        backend = resolve([step])
        number = backend.asarray(step)
        shape, dtype, known = backend.shape(number), backend.dtype(number), backend.concrete(number)
        if shape != () or dtype.kind not in "iu":
            raise invalid("an integer scalar as the step", f"{dtype} of shape {shape}")
        if known is not None and known < 0:
            raise invalid("steps from 0 on", int(known))

    def _on_host(self, step: Array, arrays: Sequence[Array], write: Callable[[int, list[np.ndarray]], None]) -> None:
        """``write(step, arrays)``, with NumPy arrays."""

        def called(number: Array, *values: Array) -> None:
            try:
                self._require_step(np.asarray(number))
                write(int(number), [np.asarray(x) for x in values])
            except GradCombineError as problem:
                self._problems.append(problem)

        backend = resolve([*arrays, step])
        number, *known = (backend.concrete(backend.asarray(x)) for x in (step, *arrays))
        if number is not None and all(x is not None for x in known):
            write(int(number), [np.asarray(x) for x in known])
        elif backend.name == "jax":
            from jax.experimental import io_callback

            io_callback(called, None, step, *arrays)
        else:
            import tensorflow as tf

            tf.numpy_function(called, [step, *arrays], [])  # pyright: ignore[reportUnknownMemberType]


class Recorder(Recording):
    """Writes the steps of one run, a file each; made by `record`.

    `close` raises for a stage that was recorded twice in a step with different bits, as by replicas that differ, and
    for a traced step below 0.
    """

    name = "record"

    @operation("record")
    def __init__(self, directory: Path, steps: Container[int] | None) -> None:
        super().__init__()
        self._directory, self._steps = directory, steps
        self._written: dict[int, dict[str, np.ndarray]] = {}

    @operation("record")
    def __call__(self, step: Array, **stages: Tree) -> None:
        """Writes some stages of a step; others of the same step may follow.

        In a traced JAX program, or a tf.function without jit_compile, the values are written as the program runs, by a
        callback to the host, and values that are not traced are those of the trace. Inside pmap or shard_map, or in a
        replica context, the call is made once for each replica: pass values that are the same on all of them.
        PyTorch's tensors are copied at once: call it between ``backward()`` and ``optimizer.step()``, with
        ``gradients={name: p.grad for name, p in model.named_parameters()}``.

        Args:
          step: its number from 0 on, an integer scalar that may be traced.
          **stages: trees of arrays, by the names of `STAGES` that the run has: ``inputs`` (a batch), the ``gradients``
            of this replica or microbatch, the ``combined`` gradient, the optimizer's ``updates``, and the ``params``
            after them. A leaf that is None is left out. A leaf is named by its stage and keys,
            ``gradients/layer/0/w``; a key that holds a slash, or reads like another, keeps brackets and quotes,
            ``gradients/['dense/w']``.

        Raises:
          GradCombineError: for an unknown stage; for two leaves of one name; for a dtype that .npz files do not keep,
            such as float8; and for a tensor that is sparse, quantized or a part of one.
        """
        unknown = [name for name in stages if name not in STAGES]
        if unknown:
            raise invalid(f"stages of {', '.join(STAGES)}", ", ".join(unknown))
        self._require_step(step)
        named: dict[str, Array] = {}
        for stage, value in stages.items():
            leaves, structure = tree.flatten(converted(value))
            for leaf, path, name in zip(leaves, structure.paths(), names(structure, stage), strict=True):
                if str(getattr(leaf, "dtype", None)).startswith("key<"):
                    raise invalid("numbers (of a random key, its jax.random.key_data)", leaf.dtype, path)
                if not is_absent(leaf):
                    _require_kept(leaf, path)
                    named[name] = leaf
        self._on_host(step, list(named.values()), partial(self._write, list(named)))

    def _write(self, called: list[str], step: int, arrays: list[np.ndarray]) -> None:
        if not _among(self._steps, step):
            return
        with self._lock:
            kept = self._kept(step)
            for name, array in zip(called, arrays, strict=True):
                if name in kept and not _same(kept[name], array):
                    where = f"{name} of step {step}"
                    expected = "the same values on all replicas"
                    self._problems.append(invalid(expected, "different ones", where))
                # A callback's array may be the buffer of its next call.
                kept.setdefault(name, array.copy())
            self._save(step, kept)
            for done in [other for other in self._written if other < step - 1]:
                del self._written[done]

    def _kept(self, step: int) -> dict[str, np.ndarray]:
        """The arrays recorded of a step so far: callbacks need not come in the order of the steps."""
        path = self._path(step)
        if step not in self._written and path.exists():
            self._written[step] = {name: entry.whole() for name, entry in open_dump(path).items()}
        return self._written.setdefault(step, {})

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step:08}.npz"

    def _save(self, step: int, arrays: dict[str, np.ndarray]) -> None:
        """Writes a file as a whole or not at all."""
        path = self._path(step)
        draft = path.with_name(f".{path.name}.draft")
        with open(draft, "wb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        os.replace(draft, path)


def _require_kept(leaf: Array, path: str) -> None:
    """Refuses a dtype that an .npz file would not give back: Python objects, and ml_dtypes that it has no name for."""
    dtype = resolve([leaf]).dtype(leaf)
    if dtype != ml_dtypes.bfloat16 and (dtype.kind not in "biufc" or dtype.type.__module__ != "numpy"):
        raise invalid("bfloat16, or a numeric dtype of NumPy itself", dtype, path)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


LONGEST = (1 << 16) - 1 - len(".npy")
"""The length of a name in a ZIP archive, in bytes, is a 16-bit number."""

_INDEX = re.compile(r"\[(-?\d+)\]")
_FIELD = re.compile(r"\.(\w+)")


def names(structure: Structure, stage: str) -> list[str]:
    """The names of a tree's leaves, in the order of `flatten`: ``"gradients/layer/0/w"``.

    A plain key is written as it is: a word without a slash, an index, the name of a field. Any other, and one that
    reads like its neighbour (``1`` and ``"1"``), is written as in the paths of error messages: ``"['a/b']"``.

    Raises:
      GradCombineError: for two leaves of one name, and for a name that is too long.
    """
    all_names = list(_names(structure, stage))
    seen: set[str] = set()
    for name, path in zip(all_names, structure.paths(), strict=True):
        if name in seen:
            raise invalid("leaves that their paths tell apart", f"two that are {name}", path)
        if len(name.encode()) > LONGEST:
            raise invalid(f"a name of {LONGEST} bytes at most", len(name.encode()))
        seen.add(name)
    return all_names


def _names(structure: Structure, prefix: str) -> Iterator[str]:
    if structure.rebuild is None:
        yield prefix
    plain = [_plain(key) for key in structure.keys]
    times = Counter(plain)
    for key, word, child in zip(structure.keys, plain, structure.children, strict=True):
        yield from _names(child, f"{prefix}/{word if word is not None and times[word] == 1 else key}")


def _plain(key: str) -> str | None:
    """The key without its brackets and quotes; None if it could be taken for another one, or for several."""
    if (matched := _INDEX.fullmatch(key) or _FIELD.fullmatch(key)) is not None:
        return matched[1]
    if not (key.startswith(("['", '["')) and key.endswith(("']", '"]'))):
        return None
    try:
        word = ast.literal_eval(key[1:-1])
    except (SyntaxError, ValueError):
        return None
    legible = isinstance(word, str) and word.isprintable() and "/" not in word
    return word if legible and word and not word.startswith(("[", ".")) else None

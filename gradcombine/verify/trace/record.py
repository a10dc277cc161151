"""Writes what a training step works on, from eager code, from a JAX program or from a tf.function."""

from __future__ import annotations

import ast
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from gradcombine import tree
from gradcombine.autograph import no_autograph
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import GradCombineError, renamed
from gradcombine.tree import Structure
from gradcombine.types import Tree
from gradcombine.verify.dumps import open_dump

STAGES = ("inputs", "gradients", "combined", "updates", "params")
"""The stages of a step, in the order in which one makes the next."""


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
        self._problems: list[GradCombineError] = []
        self._lock = threading.Lock()

    @no_autograph
    def __call__(self, step: Any, **stages: Tree) -> None:
        """Writes some stages of a step; others of the same step may follow.

        In a traced JAX program, or a tf.function without jit_compile, the values are written as the program runs, by a
        callback to the host: only what is traced is computed again on the next call. Inside pmap or shard_map, or in a
        replica context, the call is made once a replica: hand over values that are the same on all of them.

        Args:
          step: its number from 0 on, an integer scalar that may be traced.
          **stages: trees of arrays by the names of `STAGES`, the ones that the run has: ``inputs`` (a batch), the
            ``gradients`` of this replica or microbatch, the ``combined`` gradient, the optimizer's ``updates``, and the
            ``params`` after them. A leaf that is None is left out. A leaf is called by its stage and keys,
            ``gradients/layer/0/w``; a key that holds a slash, or reads like another, keeps brackets and quotes,
            ``gradients/['dense/w']``.

        Raises:
          GradCombineError: for another stage; for leaves that no name tells apart; and for a dtype that .npz files do
            not keep, such as float8.
        """
        unknown = [name for name in stages if name not in STAGES]
        if unknown:
            raise GradCombineError("record", f"stages of {', '.join(STAGES)}", ", ".join(unknown))
        _require_step(step)
        named: dict[str, Any] = {}
        for stage, value in stages.items():
            leaves, structure = tree.flatten("record", value)
            for leaf, path, name in zip(leaves, structure.paths(), names(structure, stage), strict=True):
                if str(getattr(leaf, "dtype", None)).startswith("key<"):
                    raise GradCombineError(
                        "record", "numbers: of a random key, its jax.random.key_data", leaf.dtype, path
                    )
                if not is_absent(leaf):
                    _require_kept(leaf, path)
                    named[name] = leaf
        _call_host(list(named.values()), step, self._writer(tuple(named)))

    def close(self) -> None:
        """Waits for the callbacks that are under way.

        Raises:
          GradCombineError: for a stage that came twice in a step, with other bits: replicas that differ; and for a step
            below 0 that was traced.
        """
        _wait()
        if self._problems:
            raise self._problems[0]

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del error, trace
        if kind is None:
            self.close()

    def _writer(self, called: tuple[str, ...]) -> Callable[..., None]:
        def write(step: Any, arrays: Any) -> None:
            number = int(step)
            if self._steps is not None and number not in self._steps:
                return
            with self._lock:
                if number < 0:
                    self._problems.append(_negative(number))
                    return
                kept = self._kept(number)
                for name, array in zip(called, map(np.asarray, arrays), strict=True):
                    if name in kept and not _same(kept[name], array):
                        where = f"{name} of step {number}"
                        problem = GradCombineError("record", "the same values on all replicas", "others", where)
                        self._problems.append(problem)
                    # A callback's array may be the buffer of its next call.
                    kept.setdefault(name, array.copy())
                self._save(number, kept)
                for done in [other for other in self._written if other < number - 1]:
                    del self._written[done]

        return write

    def _kept(self, step: int) -> dict[str, np.ndarray]:
        """What has come of a step so far: callbacks need not come in the order of the steps."""
        path = self._path(step)
        if step not in self._written and path.exists():
            self._written[step] = {name: entry.whole() for name, entry in open_dump(path).items()}
        return self._written.setdefault(step, {})

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step:08}.npz"

    def _save(self, step: int, arrays: dict[str, np.ndarray]) -> None:
        """A file is there as a whole or not at all."""
        path = self._path(step)
        draft = path.with_name(f".{path.name}.draft")
        with open(draft, "wb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        os.replace(draft, path)


def _require_step(step: Any) -> None:
    backend = resolve("record", [step])
    with renamed("record"):
        number = backend.asarray(step)
    shape, dtype, known = backend.shape(number), backend.dtype(number), backend.concrete(number)
    if shape != () or dtype.kind not in "iu":
        raise GradCombineError("record", "an integer scalar as the step", f"{dtype} of shape {shape}")
    if known is not None and known < 0:
        raise _negative(int(known))


def _negative(step: int) -> GradCombineError:
    # In a file's name the sign would be lost.
    return GradCombineError("record", "steps from 0 on", step)


def _require_kept(leaf: Any, path: str) -> None:
    """Refuses a dtype that an .npz file would not give back: one of Python objects, or of a name that it forgets."""
    dtype = resolve("record", [leaf]).dtype(leaf)
    if dtype != ml_dtypes.bfloat16 and (dtype.kind not in "biufc" or dtype.type.__module__ != "numpy"):
        raise GradCombineError("record", "bfloat16, or a number's dtype that NumPy has itself", dtype, path)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


LONGEST = (1 << 16) - 1 - len(".npy")
"""The bytes of a name in a ZIP archive are counted in 16 bits."""

_INDEX = re.compile(r"\[(-?\d+)\]")
_FIELD = re.compile(r"\.(\w+)")


def names(structure: Structure, stage: str) -> list[str]:
    """The names of a tree's leaves, in the order of `flatten`: ``"gradients/layer/0/w"``.

    A key is written as it is where that is plain: a word without a slash, an index, the name of a field. Any other, and
    one that reads like its neighbour (``1`` and ``"1"``), is written as in the paths that errors name: ``"['a/b']"``.

    Raises:
      GradCombineError: for two leaves of one name, and for a name that is too long.
    """
    found = list(_names(structure, stage))
    seen: set[str] = set()
    for name, path in zip(found, structure.paths(), strict=True):
        if name in seen:
            raise GradCombineError("record", "leaves that their paths tell apart", f"two that are {name}", path)
        if len(name.encode()) > LONGEST:
            raise GradCombineError("record", f"a name of {LONGEST} bytes at most", len(name.encode()))
        seen.add(name)
    return found


def _names(structure: Structure, prefix: str) -> Iterator[str]:
    if structure.rebuild is None:
        yield prefix
    plain = [_plain(key) for key in structure.keys]
    times = Counter(plain)
    for key, word, child in zip(structure.keys, plain, structure.children, strict=True):
        yield from _names(child, f"{prefix}/{word if word is not None and times[word] == 1 else key}")


def _plain(key: str) -> str | None:
    """The key without its brackets and quotes, where it cannot be taken for another one, or for several."""
    if (found := _INDEX.fullmatch(key) or _FIELD.fullmatch(key)) is not None:
        return found[1]
    if not (key.startswith(("['", '["')) and key.endswith(("']", '"]'))):
        return None
    try:
        word = ast.literal_eval(key[1:-1])
    except (SyntaxError, ValueError):
        return None
    legible = isinstance(word, str) and word.isprintable() and "/" not in word
    return word if legible and word and not word.startswith(("[", ".")) else None


@no_autograph
def _call_host(arrays: Sequence[Any], step: Any, write: Callable[[Any, Any], None]) -> None:
    """``write(step, arrays)``, with NumPy arrays: now where the values are known, else as the program runs."""
    backend = resolve("record", [*arrays, step])
    if all(backend.concrete(backend.asarray(x)) is not None for x in (*arrays, step)):
        write(step, arrays)
    elif backend.name == "jax":
        from jax.experimental import io_callback

        io_callback(write, None, step, list(arrays))
    else:
        import tensorflow as tf

        def run(number: Any, *values: Any) -> None:
            write(number, values)

        tf.numpy_function(run, [step, *arrays], [])


def _wait() -> None:
    """Returns when the callbacks of all programs that were started have returned."""
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.effects_barrier()

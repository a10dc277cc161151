"""Traces of a run: a file of arrays per step, written from eager code or from compiled programs."""

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
from typing import Any, ClassVar, Self, cast

import ml_dtypes
import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import GradCombineError, invalid, operation, require_path, shown
from gradcombine.tree import Structure
from gradcombine.types import Array, Tree
from gradcombine.verify.compare.ulp import equal_bits
from gradcombine.verify.diff.dumps import open_dump
from gradcombine.verify.diff.pytorch import converted

STAGES = ("inputs", "gradients", "combined", "updates", "params")
"""Stages of a training step, in the order in which they are computed."""


@operation("record")
def record(directory: str | Path, steps: Container[int] | None = None) -> Recorder:
    """Starts a trace: a directory with one .npz file per step.

    Args:
      directory: created if missing; it must not contain a trace.
      steps: container of the steps to write, for instance ``range(0, 1000, 100)``, but no iterator; None: all steps.

    Returns:
      A `Recorder`, to be called in each step and closed at the end; it is also a context manager.

    Raises:
      GradCombineError: for a directory that contains a trace, and for steps that are not a container of integers.
      OSError: if the directory cannot be created.

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
    _is_selected(steps, 0)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.glob("step_*.npz")):
        raise invalid("a directory without a trace", str(path))
    return Recorder(path, steps)


def _is_selected(steps: Container[int] | None, step: int) -> bool:
    if steps is None:
        return True
    try:
        if isinstance(steps, Iterator):  # ``in`` would consume it
            raise TypeError
        return step in steps
    except Exception:  # of a string, an array of two dimensions or a foreign class
        raise invalid("steps such as range(0, 1000, 100), or None", shown(steps)) from None


class Recording:
    """Base class of recorders: writes concrete values at once, and traced ones in a host callback as the program runs.

    Frameworks wrap errors that a callback raises, so they are collected, and raised by `close`.

    Attributes:
      name: name of the operation in errors.
    """

    # AutoGraph looks for the mark of `no_autograph` on the called object, not on its method.
    autograph_info__: ClassVar[dict[str, Any]] = {}
    name: str

    def __init__(self) -> None:
        self._errors: list[GradCombineError] = []
        self._lock = threading.Lock()
        self._is_closed = False

    @operation()
    def close(self) -> None:
        """Waits for pending callbacks; later calls raise.

        Raises:
          GradCombineError: the first error in a callback.
        """
        jax = sys.modules.get("jax")
        try:
            if jax is not None:
                jax.effects_barrier()
        finally:
            self._is_closed = True
        if self._errors:
            raise self._errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:  # also after an error: the last steps matter most then
            self.close()
        except GradCombineError:
            if kind is None:
                raise

    def _require_open(self) -> None:
        if self._is_closed:
            raise invalid("a recorder that is open", "a closed one")

    def _require_step(self, step: Array) -> None:
        """Raises unless the step is a nonnegative integer scalar; a traced step may turn out negative."""
        backend = resolve([step])
        number = backend.asarray(step)
        shape, dtype, value = backend.shape(number), backend.dtype(number), backend.concrete(number)
        if shape != () or dtype.kind not in "iu":
            raise invalid("an integer scalar as the step", f"{dtype} of shape {shape}")
        if value is not None and value < 0:
            raise invalid("a step of 0 or more", int(value))

    def _on_host(self, step: Array, arrays: Sequence[Array], write: Callable[[int, list[np.ndarray]], None]) -> None:
        """Calls ``write(step, arrays)`` with NumPy arrays, in a callback if a value is traced."""

        def callback(number: Array, *values: Array) -> None:
            self._require_open()
            try:
                self._require_step(np.asarray(number))
                rest = iter(values)
                write(int(number), [np.asarray(next(rest)) if x is None else x for x in known])
            except GradCombineError as error:
                self._errors.append(error)

        backend = resolve([*arrays, step])

        def concrete(x: Array) -> np.ndarray | None:
            """The value, in the dtype of a NumPy array, which JAX may not have; None if it is traced."""
            is_numpy = isinstance(cast("object", x), np.ndarray)
            value = x if is_numpy else backend.concrete(backend.asarray(x))
            return None if value is None else np.asarray(value)

        number, *known = map(concrete, (step, *arrays))
        traced = [x for x, value in zip(arrays, known, strict=True) if value is None]
        if number is not None and not traced:
            write(int(number), [x for x in known if x is not None])
            return
        known = [None if x is None else x.copy() for x in known]  # which may change until the callback
        if backend.name == "jax":
            from jax.experimental import io_callback

            io_callback(callback, None, step, *traced)
        else:
            import tensorflow as tf

            tf.numpy_function(callback, [step, *traced], [])  # pyright: ignore[reportUnknownMemberType]


class Recorder(Recording):
    """Writes one file per step of a run; created by `record`.

    `close` raises if a leaf was recorded twice in a step with different bits, e.g. by replicas that differ, and for a
    negative traced step.
    """

    name = "record"

    def __init__(self, directory: Path, steps: Container[int] | None) -> None:
        super().__init__()
        self._directory, self._steps = directory, steps

    @operation("record")
    def __call__(self, step: Array, **stages: Tree) -> None:
        """Writes stages of a step; later calls may add other stages of the same step.

        In a traced JAX program, or a tf.function without jit_compile, a host callback writes the values as the program
        runs; values that are not traced are constants of the program. Inside pmap or shard_map, or in a replica
        context, each replica makes the call: pass values that are identical on all of them. PyTorch tensors are copied
        at once: call it between ``backward()`` and ``optimizer.step()``, with
        ``gradients={name: p.grad for name, p in model.named_parameters()}``.

        Args:
          step: number of the step, a nonnegative integer scalar that may be traced.
          **stages: pytrees of arrays, by names from `STAGES`: ``inputs`` (a batch), the ``gradients`` of this replica
            or microbatch, the ``combined`` gradient, the optimizer's ``updates``, and the resulting ``params``. Leaves
            that are None are left out. A leaf is named by its stage and keys, ``gradients/layer/0/w``; a key that
            contains a slash, or is ambiguous, keeps brackets and quotes, ``gradients/['dense/w']``.

        Raises:
          GradCombineError: for an unknown stage, and without stages; for two leaves with one name; for a dtype that
            .npz files do not preserve, such as float8; for a sparse, quantized or distributed tensor.
        """
        unknown = [name for name in stages if name not in STAGES]
        if unknown or not stages:
            raise invalid(f"stages of {', '.join(STAGES)}", ", ".join(unknown) or "none")
        self._require_open()
        step = converted(step)
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

    def _write(self, leaves: list[str], step: int, arrays: list[np.ndarray]) -> None:
        if not _is_selected(self._steps, step):
            return
        path = self._directory / f"step_{step:08}.npz"
        with self._lock:
            # Other stages, or the same ones of other replicas; callbacks may be out of order.
            recorded = {name: entry.whole() for name, entry in open_dump(path).items()} if path.exists() else {}
            new: dict[str, np.ndarray] = {}
            for name, array in zip(leaves, arrays, strict=True):
                if name not in recorded:
                    new[name] = array
                elif not equal_bits(array, recorded[name]):
                    where = f"{name} of step {step}"
                    self._errors.append(
                        invalid("the same values in all calls and on all replicas", "different values", where)
                    )
            if new:
                draft = path.with_name(f".{path.name}.draft")
                with open(draft, "wb") as file:
                    np.savez(file, **recorded | new)  # pyright: ignore[reportArgumentType]
                os.replace(draft, path)


def _require_kept(leaf: Array, path: str) -> None:
    """Raises for dtypes that .npz files do not preserve: Python objects, and most of ml_dtypes."""
    dtype = resolve([leaf]).dtype(leaf)
    if dtype != ml_dtypes.bfloat16 and (dtype.kind not in "biufc" or dtype.type.__module__ != "numpy"):
        raise invalid("bfloat16, or one of NumPy's numeric dtypes", dtype, path)


LONGEST = (1 << 16) - 1 - len(".npy")
"""Longest name in a ZIP archive, in bytes: its length is stored in 16 bits."""

_INDEX = re.compile(r"\[(-?\d+)\]")
_FIELD = re.compile(r"\.(\w+)")


def names(structure: Structure, stage: str) -> list[str]:
    """Names of a tree's leaves, in the order of `flatten`: ``"gradients/layer/0/w"``.

    Simple keys are written without brackets: words without a slash, indices, field names. Other keys, and keys that
    would be ambiguous (``1`` and ``"1"``), are written as in the paths of error messages: ``"['a/b']"``.

    Raises:
      GradCombineError: for two leaves with one name, and for a name that is too long.
    """
    all_names = list(_names(structure, stage))
    seen: set[str] = set()
    for name, path in zip(all_names, structure.paths(), strict=True):
        if name in seen:
            raise invalid("leaves with different names", f"two leaves {name}", path)
        if len(name.encode()) > LONGEST:
            raise invalid(f"a name of at most {LONGEST} bytes", len(name.encode()))
        seen.add(name)
    return all_names


def _names(structure: Structure, prefix: str) -> Iterator[str]:
    if structure.rebuild is None:
        yield prefix
    words = [_unquoted(key) for key in structure.keys]
    counts = Counter(words)
    for key, word, child in zip(structure.keys, words, structure.children, strict=True):
        yield from _names(child, f"{prefix}/{word if word is not None and counts[word] == 1 else key}")


def _unquoted(key: str) -> str | None:
    """Returns the key without brackets and quotes; None if the result would be ambiguous as a part of a name."""
    if (matched := _INDEX.fullmatch(key) or _FIELD.fullmatch(key)) is not None:
        return matched[1]
    if not (key.startswith(("['", '["')) and key.endswith(("']", '"]'))):
        return None
    try:
        word = ast.literal_eval(key[1:-1])
    except (SyntaxError, ValueError):
        return None
    is_simple = isinstance(word, str) and word.isprintable() and "/" not in word
    return word if is_simple and word and not word.startswith(("[", ".")) else None

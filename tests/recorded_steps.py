"""The functions that a program compiles, with what it calls them with, to audit them after it has run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import pytest


class Recorded:
    """A compiled function, and the arguments of its first call."""

    def __init__(self, function: Any, described: Callable[[Any], Any]) -> None:
        self.function, self.args, self._described = function, None, described

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.args is None and not named:
            self.args = self._described(args)
        return self.function(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


@contextmanager
def recording(module: Any, name: str, described: Callable[[Any], Any]) -> Iterator[list[Recorded]]:
    """What ``module.name``, ``jax.jit`` or ``tf.function``, makes meanwhile, and what is called."""
    made, compiled = list[Recorded](), getattr(module, name)

    def record(function: Any = None, **settings: Any) -> Any:
        if function is None:
            return partial(record, **settings)
        made.append(Recorded(compiled(function, **settings), described))
        return made[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, name, record)
        yield made


def shapes(args: Any) -> Any:
    """Arrays of JAX as their specs."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else x, args)

"""Records the functions that a program compiles and their first arguments, to audit them after the program has run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import pytest


class Recorded:
    """A compiled function and the arguments of its first call, as ``describe`` returns them."""

    def __init__(self, function: Any, describe: Callable[[Any], Any]) -> None:
        self.function, self.args, self._describe = function, None, describe

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.args is None and not named:
            self.args = self._describe(args)
        return self.function(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


@contextmanager
def recording(module: Any, name: str, describe: Callable[[Any], Any]) -> Iterator[list[Recorded]]:
    """Records all functions that ``module.name`` (``jax.jit`` or ``tf.function``) creates inside the context."""
    recorded, compiled = list[Recorded](), getattr(module, name)

    def record(function: Any = None, **settings: Any) -> Any:
        if function is None:
            return partial(record, **settings)
        recorded.append(Recorded(compiled(function, **settings), describe))
        return recorded[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, name, record)
        yield recorded


def shapes(args: Any) -> Any:
    """Replaces JAX arrays by their specs."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else x, args)

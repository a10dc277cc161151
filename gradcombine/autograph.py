"""Keeps TensorFlow's AutoGraph out of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def no_autograph(function: F) -> F:
    """Marks a function as ordinary Python, which a surrounding tf.function calls without rewriting its source.

    Nothing here branches on a tensor, so a rewrite could only slow the tracing down, tenfold as measured. The mark is
    the one that `tf.autograph.experimental.do_not_convert
    <https://www.tensorflow.org/api_docs/python/tf/autograph/experimental/do_not_convert>`_ leaves, set without
    importing TensorFlow.
    """
    function.autograph_info__ = {}  # pyright: ignore[reportFunctionMemberAccess]
    return function

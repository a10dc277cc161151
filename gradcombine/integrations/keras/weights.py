"""The weight of a microbatch, where it cannot be an argument."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Weights:
    """The weight of the microbatch that a thread computes: tf.distribute runs each replica in a thread of its own."""

    def __init__(self) -> None:
        self._by_thread: dict[int, Any] = {}

    @contextmanager
    def given(self, weight: Any) -> Iterator[None]:
        """Sets this thread's weight inside of a with statement."""
        thread = threading.get_ident()
        before = self._by_thread.get(thread)
        self._by_thread[thread] = weight
        try:
            yield
        finally:
            if before is None:
                del self._by_thread[thread]
            else:
                self._by_thread[thread] = before

    def current(self) -> Any:
        """This thread's weight; 1 where none is set."""
        weight = self._by_thread.get(threading.get_ident())
        return 1 if weight is None else weight

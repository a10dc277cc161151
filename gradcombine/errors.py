"""The one exception of the library."""

from __future__ import annotations

from typing import Any


class GradCombineError(ValueError):
    """Input that cannot be combined.

    Args:
      operation: the public operation that refused, for instance ``"mean"``.
      expected: what would have been accepted.
      received: what came instead.
      path: where in the tree, for instance ``"['decoder']['w']"``; empty for the whole argument.

    >>> raise GradCombineError("mean", "4 weights", 3, path="['w']")
    Traceback (most recent call last):
        ...
    gradcombine.errors.GradCombineError: mean: leaf ['w']: expected 4 weights, received 3
    """

    # TensorFlow's AutoGraph lets an error with this mark through; any other class that it does not know becomes a
    # StagingError on its way out of a tf.function.
    ag_pass_through = True

    def __init__(self, operation: str, expected: str, received: Any, path: str = "") -> None:
        self.operation = operation
        self.expected = expected
        self.received = received
        self.path = path
        where = f"leaf {path}: " if path else ""
        super().__init__(f"{operation}: {where}expected {expected}, received {received}")

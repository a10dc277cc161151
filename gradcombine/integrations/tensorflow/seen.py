"""Marks of the variables that have had a gradient: a small variable of the state, in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from gradcombine.integrations.tensorflow.state import local_variable
from gradcombine.places.time import whole_window
from gradcombine.places.window import Window

_NAME = "seen"


def neutral(window: Window, specs: Any) -> Any:
    """The combined gradients of a window without any, of these shapes and dtypes."""
    return window.reduction.finalize(whole_window(window.reduction, window.init(specs)))


def differs(combined: Any, empty: Any) -> tf.Tensor:
    """Whether the combined gradients of a variable are others than those of an empty window."""
    pairs = zip(tf.nest.flatten(combined), tf.nest.flatten(empty), strict=True)
    return tf.reduce_any([tf.reduce_any(tf.not_equal(x, y)) for x, y in pairs])


class WithSeen(tf.Module):
    """A module whose state says which of some variables have had a gradient, in this process or an earlier one.

    A checkpoint holds it as a tensor of the module itself, not as a variable below it: so one that was saved without it
    restores, and ``assert_consumed()`` finds nothing missing. One that has it as a variable restores as well.

    Attributes:
      seen: for each variable whether it has had a gradient, a boolean vector; None before it is made.
    """

    seen: Any = None
    _restored: Any = None

    def make_seen(self, count: int, each_replica: bool = False) -> None:
        """Makes `seen`, for so many variables; ``each_replica``: written in replica context, and each one's own."""
        empty = tf.zeros([count], tf.bool)
        if each_replica:
            self.seen = local_variable(empty)
        else:
            collections = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
            self.seen = tf.compat.v1.Variable(empty, trainable=False, use_resource=True, collections=collections)
        if self._restored is not None:
            self._restore_from_tensors({_NAME: self._restored})
            self._restored = None

    def see(self, present: Iterable[int]) -> Any:
        """Notes a gradient for these variables; returns the assignment."""
        chosen = set(present)
        mask = tf.constant([i in chosen for i in range(self.seen.shape[0])], tf.bool)
        return self.seen.assign(tf.convert_to_tensor(self.seen) | mask)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        base: Any = super()
        children = base._trackable_children(save_type, **kwargs)
        return {name: x for name, x in children.items() if save_type != "checkpoint" or name != _NAME}

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        base: Any = super()
        return base._lookup_dependency(name, None if name == _NAME else cached_dependencies)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        if self.seen is None:
            return {_NAME: tf.zeros([0], tf.bool)}
        return {_NAME: tf.convert_to_tensor(self.seen)}

    def _export_to_saved_model_graph(self, object_map: Any, tensor_map: Any, options: Any, **_: Any) -> list[Any]:
        object_map[self] = tf.Module()  # has the variable below it, and no tensor
        return []

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        given = restored_tensors[_NAME]
        if self.seen is None:  # the first call makes it
            self._restored = given if tf.executing_eagerly() else None
            return tf.no_op()
        # A module that had not been called yet has saved none.
        missing = self.seen.shape[0] - tf.size(given)
        return self.seen.assign(tf.ensure_shape(tf.pad(given, [[0, missing]]), self.seen.shape))

"""Sums of gradient terms as computed by tf.gradients for each tf.AggregationMethod."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import tensorflow as tf

from gradcombine import foreign_orders
from gradcombine.errors import GradCombineError, invalid, operation, require_integer, require_one_of, shown
from gradcombine.types import Tree

Execution = Literal["function", "graph", "xla"]

_NAMES = {"add_n": 0, "tree": 1, "accumulate_n": 2}


class NotATensorError(GradCombineError, TypeError):
    """Raised for terms that are not tensors; also a TypeError, which TensorFlow raises."""


@operation("aggregate")
def aggregate(
    terms: Sequence[Tree],
    method: int | str | None = None,
    execution: Execution = "function",
    names: Sequence[str] | None = None,
) -> Any:
    """Adds the gradient terms of one tensor as ``tf.gradients(..., aggregation_method=method)`` does.

    ============================  =================  ==============  ============
    method                        ``"function"``     ``"graph"``     ``"xla"``
    ============================  =================  ==============  ============
    ADD_N, DEFAULT, ``"add_n"``   blocks of eight    blocks          left chain
    EXPERIMENTAL_TREE,            blocks of eight    left chain      left chain
    ``"tree"``
    EXPERIMENTAL_ACCUMULATE_N,    blocks of eight    left chain      left chain
    ``"accumulate_n"``
    ============================  =================  ==============  ============

    Args:
      terms: tensors or tf.IndexedSlices of one shape and dtype, in the order of ``ys`` in tf.gradients, or of the uses
        of ``x`` as it traverses them. None is skipped.
      method: a value of tf.AggregationMethod, or one of `gradcombine.add_n`'s names. None: ADD_N.
      execution: ``"function"``: a tf.function, in which Grappler replaces every chain of additions by one AddN and
        sorts its terms by name. ``"graph"``: a session without Grappler. ``"xla"``: ``jit_compile=True``.
      names: with ``"function"``, names of the nodes that produce the terms, as for
        `gradcombine.foreign_orders.addn_blocks`; None: the terms are already sorted.

    Returns:
      None for no terms; a single term unchanged; concatenated IndexedSlices if all terms are IndexedSlices; otherwise a
      dense sum.

    Raises:
      GradCombineError: for an unknown method or execution, and terms that do not match; `NotATensorError`, which is
        also a TypeError, for terms that are not tensors.

    Bits: those of TensorFlow 2.21 on CPU, provided that no term's buffer is reused (see
    `gradcombine.foreign_orders.addn_blocks`). For an order that no compiler changes, call `gradcombine.add_n`.

    References: `tf.AggregationMethod <https://www.tensorflow.org/api_docs/python/tf/AggregationMethod>`_.

    >>> import tensorflow as tf
    >>> terms = [tf.constant(x) for x in (1.0, 1.0, 1.0, 1e8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -1e8)]
    >>> for execution in ("graph", "xla"):
    ...     print(aggregate(terms, tf.AggregationMethod.ADD_N, execution).numpy())
    3.0
    0.0
    """
    order = _order(method, execution, names)
    present = [term for term in terms if term is not None]
    for i, term in enumerate(terms):
        if term is not None and not isinstance(term, (tf.Tensor, tf.IndexedSlices)):
            raise NotATensorError("aggregate", "a tensor, IndexedSlices or None", type(term).__name__, f"[{i}]")
    if len(present) < 2:
        return present[0] if present else None
    if all(isinstance(term, tf.IndexedSlices) for term in present):
        return _concatenated(present)
    return order([tf.convert_to_tensor(term) for term in present])


def _order(method: Any, execution: str, names: Sequence[str] | None) -> Callable[[Sequence[Any]], Any]:
    """The function that adds terms in the order of a method, an execution and the names of the terms."""
    number = 0 if method is None else _NAMES.get(method, method)
    number = require_integer(f"a tf.AggregationMethod value, or one of {list(_NAMES)}", number, 0, 2)
    require_one_of("execution 'function', 'graph' or 'xla'", execution, get_args(Execution))
    if names is not None and execution != "function":
        raise invalid("execution 'function' for names, as only Grappler sorts terms", shown(execution))
    if execution == "function":
        return partial(foreign_orders.addn_blocks, names=names)
    return foreign_orders.addn_blocks if (number, execution) == (0, "graph") else foreign_orders.left_chain


def _concatenated(slices: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Concatenates slices; indices of mixed dtypes become int64."""
    indices = [x.indices for x in slices]
    if len({x.dtype for x in indices}) > 1:
        indices = [tf.cast(x, tf.int64) for x in indices]
    values = tf.concat([x.values for x in slices], axis=0)
    return tf.IndexedSlices(values, tf.concat(indices, axis=0), slices[0].dense_shape)

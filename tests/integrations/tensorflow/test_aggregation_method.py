"""Each tf.AggregationMethod has the bits of tf.gradients."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import foreign_orders
from gradcombine.integrations.tensorflow.aggregation_method import aggregate
from tests.spec.selection import cases

METHODS = ("ADD_N", "EXPERIMENTAL_TREE", "EXPERIMENTAL_ACCUMULATE_N")
MOST = 20
TERMS = [np.float32(x) for x in np.random.default_rng(0).normal(size=(MOST, 129))]


def value_of(method: str) -> int:
    return getattr(tf.AggregationMethod, method)


def gradient(x: Any, terms: Any, method: str) -> Any:
    """d(sum_i identity(x) * terms_i) / dx, i.e. the sum of the terms as TensorFlow adds them."""
    uses = [tf.identity(x) for _ in terms]
    return tf.gradients(uses, x, list(terms), aggregation_method=value_of(method))[0]


@cache
def without_grappler() -> dict[tuple[str, int], np.ndarray]:
    """The sums for all methods and numbers of terms, in one session without graph rewriting."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        x = tf.zeros_like(TERMS[0])
        terms = [tf.compat.v1.placeholder(tf.float32, t.shape) for t in TERMS]
        sums = {(m, n): gradient(x, terms[:n], m) for m in METHODS for n in range(2, MOST + 1)}
        return session.run(sums, dict(zip(terms, TERMS, strict=True)))


def same_bits(received: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.asarray(received).view(np.uint32), np.asarray(expected).view(np.uint32))


@pytest.mark.parametrize("n", range(2, MOST + 1))
@pytest.mark.parametrize("method", METHODS)
def test_in_a_graph(method: str, n: int) -> None:
    terms = [tf.constant(x) for x in TERMS[:n]]
    same_bits(without_grappler()[method, n], aggregate(terms, value_of(method), "graph"))


QUICK = [(method, n) for method in METHODS for n in (2, 9, 10, 11, 12, MOST)]
QUICK_XLA = [*((method, 10) for method in METHODS), ("ADD_N", MOST)]


@pytest.mark.parametrize(("method", "n"), cases(QUICK, METHODS, range(2, MOST + 1)))
def test_in_a_function(method: str, n: int) -> None:
    call = tf.function(lambda x, terms: gradient(x, terms, method), autograph=False)
    x, terms = tf.zeros_like(TERMS[0]), [tf.constant(t) for t in TERMS[:n]]
    traced = call.get_concrete_function(x, terms)
    names = [tensor.op.name for tensor in traced.graph.inputs][1:]
    same_bits(call(x, terms), aggregate(terms, value_of(method), "function", names))


@pytest.mark.parametrize(("method", "n"), cases(QUICK_XLA, METHODS, (2, 9, 10, 17, MOST)))
def test_under_xla(method: str, n: int) -> None:
    call = tf.function(lambda x, terms: gradient(x, terms, method), autograph=False, jit_compile=True)
    terms = [tf.constant(t) for t in TERMS[:n]]
    same_bits(call(tf.zeros_like(TERMS[0]), terms), aggregate(terms, value_of(method), "xla"))


def test_the_orders_differ_on_these_terms() -> None:
    """Ten is the smallest number of terms for which a chain and blocks add in different orders."""
    for n in (9, 10, MOST):
        chain, blocks = (f(TERMS[:n]) for f in (foreign_orders.left_chain, foreign_orders.addn_blocks))
        assert (chain != blocks).any() == (n > 9)


@pytest.mark.parametrize(
    ("method", "name"), [(None, "add_n"), (0, "add_n"), (1, "tree"), (2, "accumulate_n"), ("tree", "tree")]
)
def test_names_and_values_mean_the_same(method: Any, name: str) -> None:
    terms = [tf.constant(x) for x in TERMS]
    same_bits(aggregate(terms, method, "graph"), aggregate(terms, name, "graph"))


@pytest.mark.parametrize("method", METHODS)
def test_add_n_takes_the_enumeration(method: str) -> None:
    """For `gradcombine.add_n`, EXPERIMENTAL_TREE is a tree, unlike in TensorFlow."""
    expected = gc.add_n(TERMS, {"ADD_N": "add_n", "EXPERIMENTAL_TREE": "tree"}.get(method, "accumulate_n"))
    same_bits(gc.add_n(TERMS, value_of(method)), expected)
    same_bits(gc.add_n([tf.constant(x) for x in TERMS], value_of(method)), expected)


def test_default_is_add_n() -> None:
    assert tf.AggregationMethod.DEFAULT == tf.AggregationMethod.ADD_N == 0


def slices(values: Any, indices: Any, dtype: Any = tf.int32) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(indices, dtype), tf.constant([3, 2]))


@pytest.mark.parametrize("widths", [(tf.int32, tf.int32), (tf.int32, tf.int64)])
@pytest.mark.parametrize("method", METHODS)
def test_sparse_terms_stay_sparse(method: str, widths: Any) -> None:
    values, rows = [[[1, 2]], [[3, 4], [5, 6]]], [[2], [0, 2]]

    @tf.function(autograph=False)
    def real(x: Any) -> Any:
        given = [slices(v, r, w) for v, r, w in zip(values, rows, widths, strict=True)]
        return tf.gradients([tf.identity(x) for _ in given], x, given, aggregation_method=value_of(method))[0]

    expected = real(tf.zeros((3, 2)))
    received = aggregate([slices(v, r, w) for v, r, w in zip(values, rows, widths, strict=True)], value_of(method))
    assert isinstance(expected, tf.IndexedSlices) and isinstance(received, tf.IndexedSlices)
    for name in ("values", "indices", "dense_shape"):
        np.testing.assert_array_equal(getattr(received, name), getattr(expected, name), strict=True)


@pytest.mark.parametrize("method", METHODS)
def test_sparse_with_dense_is_dense(method: str) -> None:
    terms = [slices([[1, 2], [3, 4]], [2, 2]), tf.ones((3, 2)), None]
    received = aggregate(terms, value_of(method))
    assert isinstance(received, tf.Tensor)
    np.testing.assert_array_equal(received, [[1, 1], [1, 1], [5, 7]])


def test_few_terms() -> None:
    one = tf.constant(1.0)
    assert aggregate([]) is None and aggregate([None]) is None
    assert aggregate([one]) is one and aggregate([None, one]) is one


@pytest.mark.parametrize("method", [3, -1, True, "sum", 0.5])
def test_an_unknown_method(method: Any) -> None:
    with pytest.raises(gc.GradCombineError, match=r"a tf\.AggregationMethod value"):
        aggregate([tf.constant(1.0)], method)
    with pytest.raises(gc.GradCombineError, match=r"a tf\.AggregationMethod value"):
        gc.add_n([tf.constant(1.0)], method)


def test_what_is_no_tensor_is_a_type_error_too() -> None:
    with pytest.raises(TypeError, match=r"leaf \[1\]: expected a tensor") as caught:
        aggregate([tf.constant(1.0), "x"])
    assert isinstance(caught.value, gc.GradCombineError)


@pytest.mark.parametrize(("execution", "names"), [("eager", None), ("xla", ["a", "b"])])
def test_an_unknown_execution(execution: Any, names: Any) -> None:
    with pytest.raises(gc.GradCombineError, match="aggregate: expected"):
        aggregate([tf.constant(1.0)] * 2, 0, execution, names)


REDUCTIONS = [
    *(gc.reductions.sum(x) for x in ("fast", "compensated", "exact")),
    *(gc.reductions.mean(x) for x in ("fast", "exact")),
    *(gc.reductions.max(), gc.reductions.product(), gc.reductions.moments(), gc.reductions.adasum()),
    *(gc.reductions.zeroed(gc.reductions.sum()), gc.reductions.measured(gc.reductions.sum())),
]


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda reduction: reduction.name)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_graph_of_tensorflow_1_has_the_bits_or_is_refused(reduction: gc.Reduction, weighted: bool) -> None:
    """With tensor equality disabled, ``a == b`` is a bool: whether two tensors are the same object."""
    terms = [np.float32([1, 2, 3e8]), np.float32([0, 2, 3]), np.float32([-1, np.nan, -3e8])]
    weights = [1.0, 0.0, 2.5] if weighted else None
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        try:
            result = gc.combine(reduction, [tf.constant(x) for x in terms], weights)
        except gc.GradCombineError as error:
            if "a tf.Graph of TensorFlow 1" not in str(error):
                raise
            return
        received = session.run(result)
    expected = gc.combine(reduction, terms, weights)
    for x, y in zip(tf.nest.flatten(received), tf.nest.flatten(expected), strict=True):
        np.testing.assert_array_equal(x, np.asarray(y))

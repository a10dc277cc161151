"""Errors for trees that differ name the paths, are short, and take time linear in the size of the tree."""

from __future__ import annotations

from collections import Counter
from functools import reduce
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions, tree

ONE = np.ones(1, np.float32)
MANY = {f"layer{i:04}": {"w": ONE, "b": None} for i in range(3000)}


def without(*names: str) -> Any:
    return {name: leaf for name, leaf in MANY.items() if name not in names}


CHAIN = reduce(lambda inner, _: {"next": inner, "w": ONE}, range(90), {"w": ONE})

DIFFERENT: dict[str, tuple[Any, str, str, str]] = {
    "one missing": (without("layer1234"), "['layer1234']", "a dict of 2", "nothing"),
    "one more": ({**MANY, "zzz": ONE}, "['zzz']", "nothing", "a leaf"),
    "a leaf for a dict": ({**MANY, "layer0007": ONE}, "['layer0007']", "a dict of 2", "a leaf"),
    "a key within": (
        {**MANY, "layer0007": {"w": ONE}},
        "['layer0007']['b']",
        "a leaf",
        "nothing",
    ),
    "five missing": (
        without(*(f"layer000{i}" for i in range(5))),
        "['layer0000']",
        "a dict of 2",
        "nothing; also different: ['layer0001'], ['layer0002'], ['layer0003'] and 1 more",
    ),
    "all missing": (
        {},
        "['layer0000']",
        "a dict of 2",
        "nothing; also different: ['layer0001'], ['layer0002'], ['layer0003'] and 2996 more",
    ),
    "another container": (list(MANY.values()), "(root)", "a dict of 3000", "a list of 3000"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_message_names_the_places_where_trees_differ(case: str) -> None:
    other, path, expected, received = DIFFERENT[case]
    with pytest.raises(gc.GradCombineError) as caught:
        gc.mean([MANY, other])
    assert (caught.value.operation, caught.value.path) == ("mean", path)
    assert caught.value.expected == f"the structure to have {expected} here"
    assert caught.value.received == received
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("same", "nodes"), [(CHAIN, 2 * 91), (MANY, 1 + 3 * 3000)], ids=["a chain", "a wide tree"])
def test_finding_the_difference_visits_each_node_once(same: Any, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing entire subtrees at each level would be quadratic."""
    (_, a), (_, b) = tree.flatten(same), tree.flatten({**same, "zzz": ONE})
    visited, real = Counter[str](), tree._differences  # pyright: ignore[reportPrivateUsage]

    def counted(x: tree.Structure, y: tree.Structure, path: str) -> Any:
        visited[path] += 1
        return real(x, y, path)

    monkeypatch.setattr(tree, "_differences", counted)
    monkeypatch.setattr(tree.Structure, "__eq__", lambda *_: pytest.fail("compares entire subtrees"))
    assert tree.difference(a, b).path == "['zzz']"
    assert (len(visited), set(visited.values())) == (nodes, {1})


@pytest.mark.parametrize(
    ("call", "operation"),
    [
        (lambda trees: gc.add_n(trees), "add_n"),
        (lambda trees: gc.add_n(trees, method="tree"), "add_n"),
        (lambda trees: gc.tree_sum(trees), "tree_sum"),
        (lambda trees: gc.mean(trees), "mean"),
        (lambda trees: gc.combine(reductions.max(), trees), "max"),
    ],
)
@pytest.mark.parametrize("trees", [[], [ONE, {"w": ONE}], ONE, [ONE, np.ones(2, np.float32)], ["text"]])
def test_an_error_names_the_operation_that_was_called(call: Any, operation: str, trees: Any) -> None:
    with pytest.raises(gc.GradCombineError) as caught:
        call(trees)
    names = {operation, "combine"} if operation == "max" else {operation}
    assert caught.value.operation in names


@pytest.mark.parametrize("bad", [{"w": np.ones(3, np.float32)}, {"w": "text"}, {}, {"w": np.ones(2, np.int32)}])
def test_the_parts_of_per_leaf_name_the_whole_path(bad: Any) -> None:
    step = reductions.per_leaf({"grads": reductions.mean(), "loss": reductions.mean()})
    state = step.init({"grads": {"w": np.ones(2, np.float32)}, "loss": ONE})
    with pytest.raises(gc.GradCombineError) as caught:
        step.update(state, {"grads": bad, "loss": ONE})
    assert caught.value.path == "['grads']['w']"


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "update": ({"update": lambda xp, a, x, w: x[:1]}, "float32 of shape (2,) from update", "float32 of shape (1,)"),
    "merge": ({"merge": lambda xp, a, b: (a, b)}, "float32 of shape (2,) from merge", "tuple of "),
    "finalize": ({"finalize": lambda xp, a, totals: [a]}, "an array, or a tuple of arrays, from finalize", "[array("),
}


@pytest.mark.parametrize("role", FAULTS)
def test_what_a_function_of_one_array_returns_is_named_with_its_leaf(role: str) -> None:
    functions, expected, received = FAULTS[role]

    def add(xp: Any, a: Any, b: Any, weight: Any = 1) -> Any:
        return a + b

    sound = {"update": add, "merge": add, "finalize": lambda xp, a, totals: a}

    def at_one_leaf(name: str) -> Any:
        return lambda xp, a, *others: (functions if a.shape == (2,) else sound).get(name, sound[name])(xp, a, *others)

    odd = reductions.elementwise("odd", empty=0, **{name: at_one_leaf(name) for name in sound})
    like = {"a": ONE, "b": {"c": np.ones(2, np.float32)}}
    with pytest.raises(gc.GradCombineError) as caught:
        odd.finalize(odd.merge(odd.update(odd.init(like), like), odd.init(like)))
    assert (caught.value.operation, caught.value.path, caught.value.expected) == ("odd", "['b']['c']", expected)
    assert str(caught.value.received).startswith(received)

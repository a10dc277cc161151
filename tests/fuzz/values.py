"""Values drawn by chance: valid ones that fit together, and what becomes of them by mistake or malice.

Everything is drawn anew for each input, so that nothing that a call does to it is seen by the next one.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections import OrderedDict, UserDict, UserList, deque, namedtuple
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from random import Random
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import gradcombine as gc
from gradcombine import reductions, sparse, tree
from gradcombine.tree import static_absence, static_dtype, static_rows

Odd = namedtuple("Odd", ["_0", "_1"], rename=True)
Pair = namedtuple("Pair", "a b")


class HostileError(Exception):
    """Raised by the values' own methods."""


def _raising(*names: str) -> type:
    def fail(self: Any, *_: Any) -> Any:
        raise OwnError if "__iter__" in names or "__call__" in names else HostileError

    return type("Raising", (), {name: property(fail) if name in ("dtype", "shape") else fail for name in names})


def _answering(**answers: Any) -> Any:
    return type("Answering", (), {name: lambda self, *_, answer=answer: answer for name, answer in answers.items()})()


class Subclass(np.ndarray):
    pass


class Floats(float):
    pass


class Integers(int):
    pass


class Texts(str):
    __slots__ = ()


class Dicts(dict):
    pass


class Lists(list):
    pass


def _spec(**attributes: Any) -> Any:
    return SimpleNamespace(**attributes)


FLOAT32 = np.dtype(np.float32)
DTYPES = [
    np.dtype(x)
    for x in (
        *("?", "b", "B", "h", "H", "i", "I", "q", "Q", "e", "f", "d", "g", "F", "D", "G"),
        *(">f4", ">i8", "O", "U3", "S3", "V4", "V0", "M8[s]", "m8[ns]", "M8"),
        *([("a", "f4"), ("b", "i4")], ("f4", (2,)), [("float0", "V0")], []),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu),
        *(ml_dtypes.int4, ml_dtypes.uint2, ml_dtypes.float4_e2m1fn, ml_dtypes.float6_e2m3fn),
    )
]
NUMBERS = [
    *(
        0,
        1,
        -1,
        2,
        3,
        7,
        8,
        100,
        2**31 - 1,
        2**31,
        -(2**31),
        2**32,
        2**63 - 1,
        2**63,
        -(2**63),
        2**64,
        10**400,
        10**5000,
    ),
    *(0.0, -0.0, 0.5, 1.0, -1.0, 1e-45, 1e-310, 5e-324, 1e38, 1e39, 1e308, math.nan, math.inf, -math.inf, 2.0**31),
    *(True, False, 1j, complex(math.nan, math.inf), Fraction(1, 3), Fraction(10**5000), Decimal(1), Decimal("NaN")),
]
TEXTS = [
    *("", "sum", "mean", "tree", "sequential", "exact", "fast", "float32", "w", "data", "\0", "a" * 10_000, "é\ud800"),
    *("../x", "/dev/null", "%s{}", "[bold]", "nan", "1", "-1", "__class__", "\n"),
]


class OwnError(Exception):
    """Raised by a user's function, and passed on as it is."""


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise OwnError from error

    return called


FUNCTIONS: list[Callable[..., Any]] = [
    _own(len),
    lambda *_, **__: None,
    lambda *_, **__: 2,
    lambda *_, **__: np.float32(2),
    lambda *_, **__: "2",
    lambda *_, **__: {},
    _own(lambda *args, **__: args[0]),
    lambda *args, **__: args,
    _own(lambda: None),
]


def number(r: Random) -> Any:
    choice = r.random()
    if choice < 0.6:
        return r.choice(NUMBERS)
    if choice < 0.8:
        with np.errstate(all="ignore"):
            return r.choice([np.float32, np.float64, np.int32, np.int64, np.uint8, np.bool_, np.float16])(
                r.randrange(9)
            )
    return r.choice([r.randrange(-5, 20), r.uniform(-2, 2), Floats(1), Integers(2)])


def array(r: Random, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Any:
    """An array of any dtype and layout."""
    shape = tuple(r.choice([0, 1, 2, 3]) for _ in range(r.randrange(4))) if shape is None else shape
    dtype = r.choice(DTYPES) if dtype is None else np.dtype(dtype)
    made = np.zeros(shape, dtype)
    if dtype.kind in "fc" or (dtype.kind == "V" and dtype.type.__module__ == "ml_dtypes"):
        flat = made.reshape(-1)
        for i in range(min(flat.size, 4)):
            with np.errstate(all="ignore"), suppress(ValueError, OverflowError):  # 4-bit integers hold no NaN
                flat[i] = r.choice([1, -1, 2.5, -0.0, math.nan, math.inf, 1e-45, 3e38, r.uniform(-2, 2)])
        made = flat.reshape(shape)
    elif dtype.kind in "iu" and made.size:
        made.reshape(-1)[0] = r.choice([0, 1, 2, np.iinfo(dtype).max, np.iinfo(dtype).min])
    elif dtype.kind == "O" and made.size:
        made.reshape(-1)[0] = r.choice([None, 1.0, "a", [], HostileError])
    layout = r.random()
    if layout < 0.7:
        return made
    if layout < 0.75:
        return np.asfortranarray(made)
    if layout < 0.8:
        return made[::-1] if made.ndim else made
    if layout < 0.84:
        made.flags.writeable = False
        return made
    if layout < 0.88:
        return made.view(Subclass)
    if layout < 0.91:
        return np.ma.masked_array(made, np.ones(shape, bool)) if dtype.kind in "iuf" else made
    if layout < 0.93 and made.ndim == 2 and dtype.kind in "f":
        return made.view(np.matrix)
    if layout < 0.96:
        return made[()] if made.ndim == 0 else made.flat[0] if made.size else made
    return np.broadcast_to(made, (2, *made.shape))


def huge(r: Random) -> Any:
    """The spec of an array that no memory holds."""
    shape = r.choice([(2**40,), (2**31, 2**10), (2**59,), (2**20, 2**20), (2**33, 0)])
    return np.broadcast_to(np.zeros((), r.choice(["f4", "f8", "i4"])), shape)


def deep(r: Random) -> Any:
    levels, wrap = r.choice([50, 99, 100, 101, 500, 10_000]), r.choice([0, 1, 2, 3])
    node: Any = np.ones(2, np.float32)
    for _ in range(levels):
        node = [[node], (node,), {"a": node}, Pair(node, None)][wrap]
    return node


def cyclic(r: Random) -> Any:
    kind = r.randrange(3)
    if kind == 0:
        one: list[Any] = [np.float32(1)]
        one.append(one)
        return one
    if kind == 1:
        two: dict[str, Any] = {"w": np.float32(1)}
        two["self"] = {"again": two}
        return two
    three: list[Any] = []
    three.append((three,))
    return three


def _iterator(items: list[Any]) -> Iterator[Any]:
    yield from items
    raise OwnError


JUNK: list[Callable[[Random], Any]] = [
    lambda r: None,
    lambda r: r.choice(TEXTS),
    number,
    number,
    array,
    array,
    lambda r: r.choice([b"", b"text", bytearray(b"ab"), memoryview(b"abcd")]),
    lambda r: r.choice([object(), Ellipsis, NotImplemented, type, object, np, gc, HostileError, HostileError()]),
    lambda r: r.choice([set(), {1.0}, frozenset([1.0]), {"sum"}]),
    lambda r: r.choice([(x for x in [np.ones(2, np.float32)]), iter([]), _iterator([np.float32(1)])]),
    lambda r: r.choice(FUNCTIONS),
    lambda r: r.choice(
        [[], (), {}, OrderedDict(), Odd(1, None), Pair(1, 2), deque([1.0]), UserDict(a=1), UserList([1])]
    ),
    lambda r: r.choice([MappingProxyType({"w": np.float32(1)}), Dicts(w=np.float32(1)), Lists([1.0]), range(3)]),
    lambda r: r.choice(
        [datetime.datetime(2020, 1, 1), datetime.timedelta(1), np.datetime64("NaT"), np.timedelta64(1, "s")]
    ),
    lambda r: _raising(
        r.choice(["__len__", "__iter__", "__array__", "__eq__", "__repr__", "__float__", "__index__"])
    )(),
    lambda r: _raising("__repr__", "__str__", "__hash__", "__bool__", "__eq__", "__call__")(),
    lambda r: _raising(r.choice(["dtype", "shape", "__getattr__"]), "__len__")(),
    lambda r: _answering(
        __len__=r.choice([2**62, -1, 3]), __iter__=iter([]), __array__=1, __index__=r.choice([2, 2**70]), __bool__=True
    ),
    lambda r: _spec(
        dtype=r.choice([FLOAT32, "float32", None, 3, np.float32, np.dtype("O")]),
        shape=r.choice([(2,), None, 3, "ab", (-1,), (2.5,), (None,), [2], (2**70,), ("a",)]),
    ),
    lambda r: sparse.row_sparse(np.int32([1]), np.float32([[3]]), rows=4),
    lambda r: sparse.RowSparse(array(r), array(r), r.choice([static_rows(4), static_rows(-1), 4, None])),
    lambda r: r.choice([static_absence(), static_absence((2,)), static_dtype("float32"), static_rows(2)]),
    lambda r: r.choice(
        [reductions.sum(), reductions.sum, reductions.mean().init(np.float32(0)), gc.LOCAL, gc.Reduction]
    ),
    lambda r: np.random.default_rng(0),
    lambda r: r.choice(DTYPES),
    deep,
    cyclic,
]


def junk(r: Random) -> Any:
    """A value of a kind that is likely to be wrong."""
    return r.choice(JUNK)(r)


KEYS = [
    1,
    1.5,
    "b",
    "",
    "a/b",
    None,
    True,
    (1, "a"),
    ("a",),
    1j,
    b"k",
    frozenset(),
    np.float32(1),
    object,
    "\ud800",
    -1,
]


def mutated(r: Random, value: Any, level: int = 0) -> Any:
    """The value with something wrong somewhere in it."""
    if level > 8 or r.random() < (0.3 if level == 0 else 0.15):
        return junk(r)
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        return kind(_mutated_items(r, list(value.items()), level))
    if kind in (list, tuple):
        return kind(_mutated_list(r, list(value), level))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        if not value or r.random() < 0.1:
            return tuple(value) if r.random() < 0.5 else list(value)
        i = r.randrange(len(value))
        try:
            return kind(*[mutated(r, x, level + 1) if j == i else x for j, x in enumerate(value)])
        except Exception:  # a class that checks its fields
            return junk(r)
    if kind is np.ndarray:
        return _mutated_array(r, value)
    if isinstance(value, (bool, int, float, np.generic)):
        return number(r)
    if isinstance(value, str):
        return r.choice([value.upper(), value + " ", value[:-1], Texts(value), r.choice(TEXTS), value.encode()])
    return junk(r)


def _mutated_items(r: Random, items: list[tuple[Any, Any]], level: int) -> list[tuple[Any, Any]]:
    action = r.random()
    if not items or action < 0.15:
        return [*items, (r.choice(KEYS), junk(r))]
    i = r.randrange(len(items))
    key, child = items[i]
    if action < 0.25:
        return items[:i] + items[i + 1 :]
    if action < 0.4:
        items[i] = r.choice(KEYS), child
    elif action < 0.45:
        return items[::-1]
    else:
        items[i] = key, mutated(r, child, level + 1)
    return items


def _mutated_list(r: Random, items: list[Any], level: int) -> list[Any]:
    action = r.random()
    if not items or action < 0.15:
        return [*items, junk(r)]
    i = r.randrange(len(items))
    if action < 0.25:
        return items[:i]
    if action < 0.3:
        return items * r.choice([0, 2, 50])
    items[i] = mutated(r, items[i], level + 1)
    return items


def _mutated_array(r: Random, value: np.ndarray) -> Any:
    action = r.random()
    if action < 0.3:
        return array(r, value.shape)
    if action < 0.5:
        return array(r, dtype=value.dtype)
    if action < 0.6:
        return value[..., None]
    if action < 0.7:
        return value.astype(value.dtype.newbyteorder(">")) if value.dtype.kind in "iufc" else junk(r)
    if action < 0.8:
        return value.tolist()
    return array(r)


WEIGHTS = [1, 2.5, 0, 3, np.float32(0.5), np.int32(2), np.float64(1e-3), np.array(2.0), 1e-40, 0.0, -0.0]


class Drawn:
    """What one input is made of; what is drawn twice fits together.

    Args:
      r: where the choices come from.
      asarray: a framework's array of a NumPy one; none for NumPy's own.

    Attributes:
      latest: the tree that was drawn last.
    """

    def __init__(self, r: Random, asarray: Callable[[np.ndarray], Any] | None = None) -> None:
        self.r, self._asarray = r, asarray
        self._number = -1
        self.latest: Any = None

    def _setting(self) -> Setting:
        """The same throughout an input."""
        if self._number < 0:
            self._number = self.r.randrange(SETTINGS)
        return _setting(self._number)

    def leaf(self, shape: tuple[int, ...], dtype: str) -> Any:
        r, size = self.r, math.prod(shape)
        if dtype.startswith("i"):
            elements: list[Any] = [r.randrange(-3, 9) for _ in range(size)]
        else:
            elements = [r.choice((1.5, -2.0, 0.0, 1.0, 0.1, 1e-3, 1e4)) for _ in range(size)]
        if size and r.random() < 0.05 and dtype != "int32":
            elements[0] = r.choice([math.nan, math.inf, -0.0, 1e-40])
        made = np.array(elements, dtype).reshape(shape)
        return self._asarray(made) if self._asarray else made

    def form(self) -> Any:
        """Containers, with shapes and dtypes of leaves."""
        return self._setting().form

    def tree(self) -> Any:
        self.latest = self._filled(self.form())
        return self.latest

    def _filled(self, form: Any) -> Any:
        if form is None:
            return None
        if type(form) is tuple and len(form) == 2 and isinstance(form[1], str):
            return self.leaf(*form)
        if isinstance(form, dict):
            return {key: self._filled(child) for key, child in form.items()}
        if isinstance(form, Pair):
            return Pair(*map(self._filled, form))
        return type(form)(map(self._filled, form))

    def trees(self) -> list[Any]:
        return [self.tree() for _ in range(self.r.choice([1, 2, 3, 4, 9]))]

    def weight(self) -> Any:
        return self.r.choice(WEIGHTS)

    def weights(self) -> Any:
        r = self.r
        if r.random() < 0.3:
            return None
        if r.random() < 0.3:
            return np.abs(np.array([self.weight() for _ in range(r.choice([1, 2, 3, 4, 9]))], np.float32))
        return [self.weight() for _ in range(r.choice([1, 2, 3, 4, 9]))]

    def precision(self) -> Any:
        return self.r.choice(["fast", "compensated", "exact"])

    def dtype(self) -> Any:
        return self.r.choice([None, None, None, "float32", "float64", np.float32, np.dtype("f8"), ml_dtypes.bfloat16])

    def order(self) -> Any:
        return self._setting().order

    def every(self) -> Any:
        return self._setting().every

    def reduction(self) -> gc.Reduction:
        """One of the library's."""
        return self._setting().reduction

    def of_a_few(self, make: Callable[[Drawn], Any]) -> Any:
        """What this makes; of NumPy's arrays one of four for a setting: making it takes longer than most calls."""
        if self._asarray:
            return make(self)
        self._setting()
        return _one_of_a_few(make, self._number, self.r.randrange(4))

    def state(self) -> Any:
        """A partial state of the reduction."""
        return self.of_a_few(_state)

    def window(self) -> Any:
        return self.of_a_few(_window)

    def any_state(self) -> Any:
        return self.state() if self.r.random() < 0.5 else self.window()


class Setting(NamedTuple):
    """What the parts of one input have in common."""

    form: Any
    reduction: gc.Reduction
    order: str
    every: int


SETTINGS = 1024


@lru_cache(SETTINGS)
def _setting(number: int) -> Setting:
    r = Random(number)
    reduction = r.choice(REDUCTIONS)(Drawn(r))
    return Setting(_form(r), reduction, r.choice(["sequential", "tree"]), r.choice([1, 2, 3, 4, 8]))


@lru_cache(16 * SETTINGS)
def _one_of_a_few(make: Callable[[Drawn], Any], setting: int, number: int) -> Any:
    d = Drawn(Random(f"{setting}:{number}"))
    d._number = setting
    return make(d)


def _state(d: Drawn) -> Any:
    reduction = d.reduction()
    try:
        state = reduction.init(d.tree())
        for _ in range(d.r.randrange(3)):
            state = reduction.update(state, d.tree(), d.weight())
    except gc.GradCombineError:
        return reductions.sum().init(np.float32([0, 0]))
    return state


def _window(d: Drawn) -> Any:
    acc = gc.accumulate(d.reduction(), d.every(), order=d.order())
    try:
        state = acc.init(d.tree())
        for _ in range(d.r.randrange(4)):
            state = acc.update(d.tree(), state, d.weight())
    except gc.GradCombineError:
        return gc.accumulate(reductions.sum(), every=2).init(np.float32([0, 0]))
    return state


def _form(r: Random) -> Any:
    def leaf() -> Any:
        if r.random() < 0.05:
            return None
        shape = r.choice([(), (2,), (3,), (2, 2), (0,), (1, 3)])
        return shape, r.choice(["float32"] * 6 + ["float64", "float16", "bfloat16", "int32"])

    kinds: list[Callable[[], Any]] = [
        leaf,
        lambda: {"w": leaf()},
        lambda: {"w": leaf(), "b": leaf()},
        lambda: {"layer": {"w": leaf()}, "more": [leaf(), leaf()]},
        lambda: Pair(leaf(), (leaf(),)),
        lambda: [leaf(), {"a": leaf()}],
    ]
    return r.choice(kinds)()


def _own_init(like: Any) -> Any:
    leaves, structure = tree.flatten(like)
    return tree.unflatten(structure, [np.zeros_like(x) for x in leaves])


def _own_update(state: Any, value: Any, weight: Any) -> Any:
    return _own_merge(state, value)


def _own_merge(a: Any, b: Any) -> Any:
    lefts, structure = tree.flatten(a)
    rights = tree.flatten_as(structure, b)
    return tree.unflatten(
        structure, [x if x is None or y is None else x + y for x, y in zip(lefts, rights, strict=True)]
    )


REDUCTIONS: list[Callable[[Drawn], gc.Reduction]] = [
    lambda d: reductions.sum(d.precision()),
    lambda d: reductions.mean(d.precision()),
    lambda d: reductions.sum(),
    lambda d: reductions.mean(),
    lambda d: reductions.max(),
    lambda d: reductions.min(),
    lambda d: reductions.first(),
    lambda d: reductions.last(),
    lambda d: reductions.product(),
    lambda d: reductions.moments(),
    lambda d: reductions.adasum(),
    lambda d: reductions.row_sum(4),
    lambda d: reductions.row_mean(4),
    lambda d: reductions.sparse_as_dense(reductions.mean()),
    lambda d: reductions.checked(reductions.mean()),
    lambda d: reductions.clipped(reductions.mean(), 1.0),
    lambda d: reductions.zeroed(reductions.sum()),
    lambda d: reductions.measured(reductions.mean()),
    lambda d: reductions.differentiable(reductions.mean("exact")),
    lambda d: gc.Reduction(_own_init, _own_update, _own_merge, lambda state: state),
]


def bits(value: Any, most: int = 200) -> list[Any]:
    """What the NumPy arrays in a value hold, as far as it has no more than so many parts."""
    found: list[Any] = []
    nodes = deque([value])
    for _ in range(most):
        if not nodes:
            break
        node = nodes.popleft()
        if isinstance(node, np.ndarray):
            if node.size < 1000 and not node.dtype.hasobject:
                found.append((node.shape, node.dtype, node.tobytes()))
        elif type(node) is dict:
            found.append(len(node))
            nodes.extend(node.values())
        elif isinstance(node, (list, tuple)):
            found.append(len(node))
            nodes.extend(itertools.islice(node, most))
    return found

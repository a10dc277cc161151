"""Parameters that frameworks lay out differently, brought into a common layout.

Attention is packed or split, with or without a separate axis of heads: PyTorch's MultiheadAttention has one
``in_proj_weight`` of shape (3 d, d); flax and Keras have ``query/kernel``, ``key/kernel`` and ``value/kernel`` of shape
(d, heads, d / heads), and ``out/kernel`` of (heads, d / heads, d). The gates of recurrent cells are stacked in one
matrix or stored as one kernel per gate, in various orders:

=========================  ==========================================  ==============  ============================
framework                  kernels                                     order of gates  biases
=========================  ==========================================  ==============  ============================
PyTorch                    ``weight_ih``, ``weight_hh`` (gates h, in)  i f g o, r z n  ``bias_ih`` and ``bias_hh``
equinox                    the same                                    i f g o, r z n  one; GRU also ``bias_n``
flax                       ``ii/kernel`` ... ``ho/kernel`` (in, h)     by name         one per gate; two for GRU's n
flax.nnx, stacked          ``dense_i``, ``dense_h`` (in, gates h)      i f g o, r z n  one; for GRU's n the input's
Keras                      ``kernel``, ``recurrent_kernel``            i f c o, z r h  one; two rows (GRU, reset_after)
=========================  ==========================================  ==============  ============================

Where one side has two biases and the other has one, the values of the two add up to the value of the one, but each of
the two has the gradient of the one.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from gradcombine.formats import Entry, from_array, unread
from gradcombine.verify.diff.dumps import Dump
from gradcombine.verify.diff.mapping import Pair, canonical
from gradcombine.verify.diff.similarity import closest

_PACKED = re.compile(r"(.*?)(?:in_proj|qkv|qkv_proj|c_attn)[_./](weight|bias|kernel)")
_PARTS = "qkv"

_GATES = {1: ("",), 3: ("r", "z", "n"), 4: ("i", "f", "g", "o")}
"""The gates of a plain cell, GRU and LSTM, in PyTorch's order."""

_KERAS_GRU = ("z", "r", "n")

_OF_TORCH = re.compile(r"(.*?)(weight_ih|weight_hh|bias_ih|bias_hh|bias_n|bias)((?:_l\d+)?(?:_reverse)?)")
_OF_FLAX = re.compile(r"(.*[/.]|)(dense_)?([ih])([ifgorzn]?)_?[/.](kernel|bias)(?:[/.]value)?")
_OF_KERAS = re.compile(r"(.*?)(recurrent_kernel|kernel|bias)(?::0)?")
_OF_KERAS_FILES = re.compile(r"(.*cell/)vars/([012])")

_BRACKETS = re.compile(r"/?\['?(.*?)'?\]")

_INDISTINCT = frozenset(
    (
        *("lstm", "gru", "rnn", "cell", "lstmcell", "grucell", "simplecell", "rnncell", "optimized", "simple", "l"),
        *("forward", "backward", "reverse", "bidirectional", "layer", "sequential", "functional", "operations"),
    )
)
_STAGES = frozenset(("gradient", "gradients", "grad", "grads", "combined", "updates"))


def says_gradients(name: str) -> bool:
    """Whether a name indicates gradients rather than values: ``gradients/lstm.bias_ih_l0``, ``torch_grads.pt``."""
    return not _STAGES.isdisjoint(re.findall(r"[a-z]+", name.lower()))


def common(
    a: Dump, b: Dump, fixed: Callable[[str], bool], gradients: bool | None = None
) -> tuple[Dump, Dump, tuple[Pair, ...]]:
    """Brings two dumps into a common layout. Also returns the pairs of leaves that this determines.

    ``attn.in_proj_weight`` is split into ``attn.q_proj_weight``, ``attn.k_proj_weight`` and ``attn.v_proj_weight``
    unless the other dump packs them, too. Axes of length 1 are left out, or two adjacent axes merged, if only then the
    shape is that of the other dump's leaf of this name, or of any leaf there. Recurrent cells are split into gates if
    the dumps lay them out differently. The order of elements does not change.

    Args:
      a, b: the dumps.
      fixed: whether a leaf must not be changed, for instance because a rule names it.
      gradients: whether the dumps contain gradients; None to decide from names and values.
    """
    a, b, pairs = _with_gates(a, b, fixed, gradients)
    paired = {name for pair in pairs for name in pair[:2]}

    def unchanged(name: str) -> bool:
        return name in paired or fixed(name)

    a, b = _split(a, b, unchanged), _split(b, a, unchanged)
    return _merged(a, b, unchanged), _merged(b, a, unchanged), pairs


def _split(dump: Dump, other: Dump, fixed: Callable[[str], bool]) -> Dump:
    """Splits packed queries, keys and values, unless the other dump packs them, too, by its names or shapes."""
    if any(_PACKED.fullmatch(name) for name in other):
        return dump
    shapes = Counter(tuple(sorted(leaf.shape)) for leaf in other.values())
    shapes.subtract(tuple(sorted(leaf.shape)) for leaf in dump.values())
    leaves: dict[str, Entry] = {}
    for name, leaf in dump.items():
        packed = _PACKED.fullmatch(name)
        axis = _packed_axis(leaf.shape)
        names = [] if packed is None else [f"{packed[1]}{part}_proj_{packed[2]}" for part in _PARTS]
        fits = shapes[tuple(sorted(leaf.shape))] >= 0  # as many leaves have this shape there
        if not names or axis is None or fits or leaf.unread or fixed(name) or any(x in dump for x in names):
            leaves[name] = leaf
        else:
            leaves |= zip(names, _parts(leaf, axis, names), strict=True)
    return dump if len(leaves) == len(dump) else leaves


def _packed_axis(shape: tuple[int, ...]) -> int | None:
    """The axis along which queries, keys and values are packed, or None."""
    if len(shape) == 1 and shape[0] % 3 == 0:
        return 0
    if len(shape) == 2 and 3 * min(shape) == max(shape):
        return shape.index(max(shape))
    return None


def _merged(dump: Dump, other: Dump, fixed: Callable[[str], bool]) -> Dump:
    """Merges axes of each leaf whose shape only then occurs in the other dump."""
    counts = Counter(map(canonical, other))
    by_name = {canonical(name): leaf.shape for name, leaf in other.items() if counts[canonical(name)] == 1}
    all_shapes = {tuple(sorted(leaf.shape)) for leaf in other.values()} - {()}

    def merged(name: str, leaf: Entry) -> Entry:
        shape = by_name.get(canonical(name))
        targets = all_shapes if shape is None else {tuple(sorted(shape))}
        if leaf.unread or fixed(name) or tuple(sorted(leaf.shape)) in targets:
            return leaf
        fitting = (merge for merge in _merges(leaf.shape) if tuple(sorted(merge)) in targets)
        return leaf._replace(shape=next(fitting, leaf.shape))

    return {name: merged(name, leaf) for name, leaf in dump.items()}


def _merges(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The possible shapes without axes of length 1, or with two adjacent axes merged: heads, or channels."""
    yield tuple(n for n in shape if n > 1)
    for i in range(len(shape) - 1 if len(shape) in (2, 3) else 0):
        yield (*shape[:i], math.prod(shape[i : i + 2]), *shape[i + 2 :])
    if len(shape) >= 3:  # channels and multiplier of Keras' depthwise convolution
        yield (*shape[:-2], 1, math.prod(shape[-2:]))


def _parts(leaf: Entry, axis: int, names: Sequence[str]) -> Iterator[Entry]:
    """Splits a leaf into equal parts along an axis."""
    shape = tuple(n // len(names) if i == axis else n for i, n in enumerate(leaf.shape))
    for number, name in enumerate(names):

        def load(number: int = number) -> np.ndarray:
            return np.split(leaf.whole(), len(names), axis)[number]

        yield from_array(name, shape, leaf.dtype, load)


# Recurrent cells.


class Cell(NamedTuple):
    """A recurrent cell, split into gates.

    Attributes:
      name: the common part of its leaves' names.
      form: the layout, by framework.
      leaves: the names of its leaves in the dump.
      kernels: the kernels, by ``"i"`` (for the input) or ``"h"`` (for the state) and the gate.
      biases: the biases, by ``"i"``, ``"h"`` or ``"b"`` (one for both) and the gate.
      out_first: whether the output is the first axis of the kernels.
    """

    name: str
    form: str
    leaves: frozenset[str]
    kernels: dict[tuple[str, str], Entry]
    biases: dict[tuple[str, str], Entry]
    out_first: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of gates, and the sizes of input and state."""
        of_input = next(leaf.shape for (part, _), leaf in self.kernels.items() if part == "i")
        return len(self.kernels) // 2, *(of_input[::-1] if self.out_first else of_input)


def _with_gates(
    a: Dump, b: Dump, fixed: Callable[[str], bool], gradients: bool | None
) -> tuple[Dump, Dump, tuple[Pair, ...]]:
    """Splits the cells that two dumps lay out differently into gates. Also returns the pairs of gates.

    Cells of the same shape are paired by the words of their names and their direction; if these do not distinguish
    them, or the words differ, by the numbers in their names; if the numbers differ, too, by values among the cells of
    one direction. Gates are always paired by name.
    """
    cells = list(_cells(a, fixed)), list(_cells(b, fixed))
    paired = [(x, y, reason) for x, y, reason in _paired(*cells) if x.form != y.form]
    sides = dict(a), dict(b)
    for side, split in zip(sides, ([x for x, _, _ in paired], [y for _, y, _ in paired]), strict=True):
        for name in frozenset[str]().union(*(cell.leaves for cell in split)):
            side.pop(name)
    pairs: list[Pair] = []
    for x, y, reason in paired:
        for left, right, axes in _gate_pairs(x, y, gradients):
            for side, leaf in zip(sides, (left, right), strict=True):
                if leaf is not None:
                    side[leaf.name] = leaf
            if left is not None and right is not None:
                pairs.append(Pair(left.name, right.name, axes, reason))
    return *sides, tuple(pairs)


def _cells(dump: Dump, fixed: Callable[[str], bool]) -> Iterator[Cell]:
    groups: defaultdict[tuple[str, str], dict[str, Entry]] = defaultdict(dict)
    for name, leaf in dump.items():
        for form, cell, role in _roles(name):
            if not leaf.unread and not fixed(name):
                groups[form, cell][role] = leaf
    for (form, name), leaves in groups.items():
        cell = _split_cell(name, leaves) if form == "flax" else _stacked_cell(form, name, leaves)
        if cell is not None:
            yield cell


def _roles(name: str) -> Iterator[tuple[str, str, str]]:
    """The possible roles of a leaf in a cell: the cell's form and name, and the role."""
    name = _BRACKETS.sub(r"/\1", name)  # keys that contain slashes, such as the paths of Keras' variables
    if (m := _OF_TORCH.fullmatch(name)) is not None:
        role = {"weight_ih": "i", "weight_hh": "h", "bias_ih": "bias i", "bias_hh": "bias h"}.get(m[2], m[2])
        yield "torch", m[1] + m[3], role
    if (m := _OF_FLAX.fullmatch(name)) is not None:
        stacked = "bias" if m[5] == "bias" else m[3]
        yield ("nnx", m[1], stacked) if m[2] else ("flax", m[1], f"{m[5]} {m[3]} {m[4]}")
    if (m := _OF_KERAS_FILES.fullmatch(name)) is not None:
        yield "keras", m[1], ("i", "h", "bias")[int(m[2])]
    elif (m := _OF_KERAS.fullmatch(name)) is not None:
        yield "keras", m[1], {"kernel": "i", "recurrent_kernel": "h", "bias": "bias"}[m[2]]


def _split_cell(name: str, leaves: dict[str, Entry]) -> Cell | None:
    roles = {tuple(role.split(" ")): leaf for role, leaf in leaves.items()}
    for order in _GATES.values():
        expected = {(part, gate): roles.get(("kernel", part, gate)) for part, gate in product("ih", order)}
        kernels = {key: leaf for key, leaf in expected.items() if leaf is not None and len(leaf.shape) == 2}
        if len(kernels) < len(expected):
            continue
        hidden = kernels["h", order[0]].shape[0]
        biases = {(_role(part, gate), gate): leaf for (kind, part, gate), leaf in roles.items() if kind == "bias"}
        fits = all(leaf.shape[1] == hidden for leaf in kernels.values())
        if fits and all(leaf.shape == (hidden,) and gate in order for (_, gate), leaf in biases.items()):
            names = frozenset(leaf.name for leaf in (*kernels.values(), *biases.values()))
            return Cell(name, "flax", names, kernels, biases, False)
    return None


def _role(part: str, gate: str) -> str:
    """The role of a bias in a cell with one bias per gate. GRU's n keeps two, which are not added."""
    return part if gate == "n" else "b"


def _stacked_cell(form: str, name: str, leaves: dict[str, Entry]) -> Cell | None:
    of_input, of_state = leaves.get("i"), leaves.get("h")
    if of_input is None or of_state is None or (len(of_input.shape), len(of_state.shape)) != (2, 2):
        return None
    axis, out_first = (0, True) if form == "torch" else (1, False)
    rows, hidden = of_state.shape[axis], of_state.shape[1 - axis]
    order = _GATES.get(rows // hidden if hidden and rows % hidden == 0 else 0)
    if order is None or of_input.shape[axis] != rows:
        return None
    if form == "keras" and len(order) == 3:
        order = _KERAS_GRU
    kernels = {
        (part, gate): leaf
        for part in "ih"
        for gate, leaf in zip(order, _blocks(leaves[part], axis, order), strict=True)
    }
    biases: dict[tuple[str, str], Entry] = {}
    for role, leaf in leaves.items():
        if role == "bias" and leaf.shape == (2, rows):
            for row, part in enumerate("ih"):
                of_part = from_array(leaf.name, (rows,), leaf.dtype, lambda leaf=leaf, row=row: leaf.whole()[row])
                blocks = _blocks(of_part, 0, order, str(row))
                biases |= {(part, gate): block for gate, block in zip(order, blocks, strict=True)}
        elif role == "bias_n" and leaf.shape == (hidden,) and len(order) == 3:
            biases["h", "n"] = leaf
        elif role.startswith("bias") and role != "bias_n" and leaf.shape == (rows,):
            part = role.removeprefix("bias").strip()
            blocks = zip(order, _blocks(leaf, 0, order), strict=True)
            biases |= {(part or _role("i", gate), gate): block for gate, block in blocks}
        elif role not in "ih":
            return None
    numbered = form == "torch" and re.search(r"_l\d+(_reverse)?$", name) is not None
    form = "equinox" if "bias" in leaves and form == "torch" else "torch layer" if numbered else form
    return Cell(name, form, frozenset(leaf.name for leaf in leaves.values()), kernels, biases, out_first)


def _blocks(leaf: Entry, axis: int, order: tuple[str, ...], row: str = "") -> Iterator[Entry]:
    """The gates that are stacked in a leaf along an axis; ``row`` is the number of the leaf's row in its file."""
    labels = [", ".join(filter(None, (row, gate))) for gate in order]
    return _parts(leaf, axis, [f"{leaf.name}[{label}]" if label else leaf.name for label in labels])


def _paired(left: list[Cell], right: list[Cell]) -> Iterator[tuple[Cell, Cell, str]]:
    for shape in dict.fromkeys(cell.shape for cell in left):
        rest = [sorted((cell for cell in cells if cell.shape == shape), key=_number) for cells in (left, right)]
        if len(rest[0]) == len(rest[1]) == 1:
            yield rest[0][0], rest[1][0], "gates"
            continue
        for key in (_words_and_direction, _words):
            counts = [Counter(map(key, cells)) for cells in rest]
            matched = [[cell for cell in cells if counts[0][key(cell)] == counts[1][key(cell)]] for cells in rest]
            for value in dict.fromkeys(map(key, matched[0])):
                same = [[cell for cell in cells if key(cell) == value] for cells in matched]
                yield from ((x, y, "gates") for x, y in zip(*same, strict=True))
            rest = [[cell for cell in rest[i] if cell not in matched[i]] for i in (0, 1)]
        numbers = [list(map(_number, cells)) for cells in rest]
        if numbers[0] == numbers[1] and len(set(numbers[0])) == len(numbers[0]):
            yield from ((x, y, "gates") for x, y in zip(*rest, strict=True))
        elif Counter(map(_is_reverse, rest[0])) == Counter(map(_is_reverse, rest[1])):
            for reverse in (False, True):
                yield from _by_values(*([cell for cell in cells if _is_reverse(cell) == reverse] for cells in rest))
        else:
            yield from _by_values(*rest)


def _words_and_direction(cell: Cell) -> tuple[Hashable, ...]:
    return _words(cell), _is_reverse(cell)


def _words(cell: Cell) -> tuple[str, ...]:
    words = canonical(cell.name)
    return tuple(word for word in words if not word.isdigit() and word not in _INDISTINCT)


def _is_reverse(cell: Cell) -> bool:
    return re.search("reverse|backward", cell.name.lower()) is not None


def _number(cell: Cell) -> tuple[tuple[int, ...], bool]:
    return tuple(map(int, re.findall(r"\d+", cell.name))), _is_reverse(cell)


def _by_values(left: list[Cell], right: list[Cell]) -> Iterator[tuple[Cell, Cell, str]]:
    """Pairs the cells with the most kernels alike, regardless of their gates; the rest by order."""
    dumps = [
        {f"{i} {part}{gate}": leaf for i, cell in enumerate(cells) for (part, gate), leaf in cell.kernels.items()}
        for cells in (left, right)
    ]
    votes = Counter((int(x.split()[0]), int(y.split()[0])) for x, y, _ in closest(dumps[0], dumps[1]))
    free = [dict(enumerate(left)), dict(enumerate(right))]
    for (i, j), _ in votes.most_common():
        if i in free[0] and j in free[1]:
            yield free[0].pop(i), free[1].pop(j), "gates, by values"
    if len(left) == len(right):
        yield from ((x, y, "gates, by order") for x, y in zip(*(side.values() for side in free), strict=True))


def _gate_pairs(
    x: Cell, y: Cell, gradients: bool | None
) -> Iterator[tuple[Entry | None, Entry | None, tuple[int, ...] | None]]:
    """Pairs of kernels with their order of axes, and pairs of biases; None for a leaf without a counterpart."""
    axes = None if x.out_first == y.out_first else (1, 0)
    yield from ((leaf, y.kernels[key], axes) for key, leaf in x.kernels.items())
    if gradients is None:
        gradients = any(says_gradients(re.split(r"[./]", cell.name, maxsplit=1)[0]) for cell in (x, y)) or None
    for gate in dict.fromkeys(gate for _, gate in x.kernels):
        left, right = ({part: leaf for (part, of), leaf in cell.biases.items() if of == gate} for cell in (x, y))
        if left.keys() == {"i", "h"} and right.keys() == {"b"}:
            yield from ((two, one, None) for two, one in _two_against_one(x, left, right["b"], gradients))
        elif right.keys() == {"i", "h"} and left.keys() == {"b"}:
            yield from ((one, two, None) for two, one in _two_against_one(y, right, left["b"], gradients))
        else:
            yield from ((left.get(part), right.get(part), None) for part in dict.fromkeys((*left, *right)))


def _two_against_one(
    cell: Cell, two: dict[str, Entry], one: Entry, gradients: bool | None
) -> Iterator[tuple[Entry, Entry]]:
    """Pairs a gate's two biases with a single one: their sum if they are values, each of them if they are gradients."""
    first, second = two["i"], two["h"]
    name = f"{first.name} + {second.name}"
    if gradients is None and _are_equal(cell):
        reason = "equal biases: values are compared by their sum, gradients one by one"
        yield unread(name, f"{reason} (--values, --gradients)", first.shape), one
    elif gradients:
        yield first, one
        yield second, one._replace(name=f"{one.name} (again)")
    else:

        def load() -> np.ndarray:
            with np.errstate(all="ignore"):
                return (first.whole() + second.whole()).astype(first.dtype, copy=False)

        yield from_array(name, first.shape, first.dtype, load), one


def _are_equal(cell: Cell) -> bool:
    """Whether the two biases of each gate have equal bits, as their gradients do, and are not all 0."""
    added = [gate for part, gate in cell.biases if part == "i" and _role(part, gate) == "b"]
    sides = [np.concatenate([cell.biases[part, gate].whole() for gate in added]) for part in "ih"]
    return sides[0].tobytes() == sides[1].tobytes() and bool(np.any(sides[0] != 0))

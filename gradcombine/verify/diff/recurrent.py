"""Gates of recurrent cells: one framework stacks them in a matrix, another has a kernel for each; and in what order.

=========================  ==========================================  ==============  ============================
framework                  kernels                                     order of gates  biases
=========================  ==========================================  ==============  ============================
PyTorch                    ``weight_ih``, ``weight_hh`` (gates h, in)  i f g o, r z n  ``bias_ih`` and ``bias_hh``
equinox                    the same                                    i f g o, r z n  one; ``bias_n`` of GRU
flax                       ``ii/kernel`` ... ``ho/kernel`` (in, h)     by name         one a gate; of GRU's n two
flax.nnx, stacked          ``dense_i``, ``dense_h`` (in, gates h)      i f g o, r z n  one; of GRU's n that of input
Keras                      ``kernel``, ``recurrent_kernel``            i f c o, z r h  one; two rows (GRU, reset_after)
=========================  ==========================================  ==============  ============================

Where one side has two biases and the other one, the one is their sum in value; and each of the two has its gradient.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from gradcombine.formats import Entry, from_array, unread
from gradcombine.verify.diff.dumps import Dump
from gradcombine.verify.diff.mapping import Pair, canonical
from gradcombine.verify.diff.similarity import closest

_GATES = {1: ("",), 3: ("r", "z", "n"), 4: ("i", "f", "g", "o")}
"""Of a plain cell, of GRU and of LSTM, as PyTorch stacks them."""

_KERAS_GRU = ("z", "r", "n")

_OF_TORCH = re.compile(r"(.*?)(weight_ih|weight_hh|bias_ih|bias_hh|bias_n|bias)((?:_l\d+)?(?:_reverse)?)")
_OF_FLAX = re.compile(r"(.*[/.]|)(dense_)?([ih])([ifgorzn]?)_?[/.](kernel|bias)(?:[/.]value)?")
_OF_KERAS = re.compile(r"(.*?)(recurrent_kernel|kernel|bias)(?::0)?")
_OF_KERAS_FILES = re.compile(r"(.*cell/)vars/([012])")

_BRACKETS = re.compile(r"/?\['?(.*?)'?\]")

_TELLING_NOTHING = frozenset(
    (
        *("lstm", "gru", "rnn", "cell", "lstmcell", "grucell", "simplecell", "rnncell", "optimized", "simple", "l"),
        *("forward", "backward", "reverse", "bidirectional", "layer", "sequential", "functional", "operations"),
    )
)
_STAGES = frozenset(("gradient", "gradients", "grad", "grads", "combined", "updates"))


def says_gradients(name: str) -> bool:
    """Whether a name says that there are gradients, not values: ``gradients/lstm.bias_ih_l0``, ``torch_grads.pt``."""
    return not _STAGES.isdisjoint(re.findall(r"[a-z]+", name.lower()))


class Cell(NamedTuple):
    """A recurrent cell, taken apart.

    Attributes:
      name: the part of the names that its leaves have in common.
      form: how its framework lays it out.
      leaves: the names of its leaves in the dump.
      kernels: each gate's, by ``"i"`` (of the input) or ``"h"`` (of the state), and the gate.
      biases: each gate's, by ``"i"``, ``"h"``, or ``"b"`` for the one that stands for both.
      out_first: whether the kernels' first axis is that of the gates.
    """

    name: str
    form: str
    leaves: frozenset[str]
    kernels: dict[tuple[str, str], Entry]
    biases: dict[tuple[str, str], Entry]
    out_first: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of gates, the lengths of the input and of the state."""
        of_input = next(leaf.shape for (part, _), leaf in self.kernels.items() if part == "i")
        return len(self.kernels) // 2, *(of_input[::-1] if self.out_first else of_input)


def gates(
    a: Dump, b: Dump, fixed: Callable[[str], bool], gradients: bool | None
) -> tuple[Dump, Dump, tuple[Pair, ...]]:
    """Both dumps with the cells that they lay out differently taken apart, and which gate is which.

    Cells of one shape are paired by the words of their names and their direction; where these tell nothing, by their
    numbers; where the words differ, by their values. A gate is always paired with the gate of its own name. A leaf that
    is ``fixed`` stays; ``gradients`` is None to tell by the names, and by two biases that differ, what the dumps hold.
    """
    parts: tuple[dict[str, Entry], dict[str, Entry]] = {}, {}
    taken: tuple[set[str], set[str]] = set(), set()
    pairs: list[Pair] = []
    for x, y, reason in _paired(list(_cells(a, fixed)), list(_cells(b, fixed))):
        if x.form == y.form:
            continue
        for side, cell in enumerate((x, y)):
            taken[side].update(cell.leaves)
        for left, right, axes in _atoms(x, y, gradients):
            for side, leaf in enumerate((left, right)):
                if leaf is not None:
                    parts[side][leaf.name] = leaf
            if left is not None and right is not None:
                pairs.append(Pair(left.name, right.name, axes, reason))
    left, right = (
        {name: leaf for name, leaf in dump.items() if name not in taken[i]} | parts[i] for i, dump in enumerate((a, b))
    )
    return left, right, tuple(pairs)


def _cells(dump: Dump, fixed: Callable[[str], bool]) -> Iterator[Cell]:
    groups: defaultdict[tuple[str, str], dict[str, Entry]] = defaultdict(dict)
    for name, leaf in dump.items():
        for form, cell, role in _roles(name):
            if not leaf.unread and not fixed(name):
                groups[form, cell][role] = leaf
    for (form, name), leaves in groups.items():
        made = _split_cell(name, leaves) if form == "flax" else _stacked_cell(form, name, leaves)
        if made is not None:
            yield made


def _roles(name: str) -> Iterator[tuple[str, str, str]]:
    """The forms in which a leaf may belong to a cell: the form, the cell's name, and what the leaf is of it."""
    name = _BRACKETS.sub(r"/\1", name)  # of keys that hold slashes, such as the paths of Keras' variables
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
    found = {tuple(role.split(" ")): leaf for role, leaf in leaves.items()}
    for kind in _GATES.values():
        kernels = {(part, gate): found.get(("kernel", part, gate)) for part, gate in product("ih", kind)}
        known = {key: leaf for key, leaf in kernels.items() if leaf is not None and len(leaf.shape) == 2}
        if len(known) < len(kernels):
            continue
        hidden = known["h", kind[0]].shape[0]
        biases = {(_role(part, gate), gate): leaf for (what, part, gate), leaf in found.items() if what == "bias"}
        fits = all(leaf.shape[1] == hidden for leaf in known.values())
        if fits and all(leaf.shape == (hidden,) and gate in kind for (_, gate), leaf in biases.items()):
            names = frozenset(leaf.name for leaf in (*known.values(), *biases.values()))
            return Cell(name, "flax", names, known, biases, False)
    return None


def _role(part: str, gate: str) -> str:
    """The role of a bias where there is one for both parts; GRU's n has two, which are not added."""
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
                blocks = _blocks(leaf, 1, order, f"{row}, ", lambda x, row=row: x[row])
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


def _blocks(
    leaf: Entry,
    axis: int,
    order: tuple[str, ...],
    prefix: str = "",
    row: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> Iterator[Entry]:
    """The gates that a leaf stacks along an axis."""
    shape = tuple(n // len(order) if i == axis else n for i, n in enumerate(leaf.shape))
    for number, gate in enumerate(order):

        def load(number: int = number) -> np.ndarray:
            return row(np.split(leaf.whole(), len(order), axis)[number])

        name = f"{leaf.name}[{prefix}{gate}]" if gate else leaf.name + (f"[{prefix.rstrip(', ')}]" if prefix else "")
        yield from_array(name, shape[1:] if prefix else shape, leaf.dtype, load)


# Which cell is which.


def _paired(left: list[Cell], right: list[Cell]) -> Iterator[tuple[Cell, Cell, str]]:
    for shape in dict.fromkeys(cell.shape for cell in left):
        rest = [sorted((cell for cell in cells if cell.shape == shape), key=_number) for cells in (left, right)]
        if len(rest[0]) == len(rest[1]) == 1:
            yield rest[0][0], rest[1][0], "gates"
            continue
        for key in (_way, _words):
            times = [Counter(map(key, cells)) for cells in rest]
            told = [[cell for cell in cells if times[0][key(cell)] == times[1][key(cell)]] for cells in rest]
            for one in dict.fromkeys(map(key, told[0])):
                same = [[cell for cell in cells if key(cell) == one] for cells in told]
                yield from ((x, y, "gates") for x, y in zip(*same, strict=True))
            rest = [[cell for cell in rest[i] if cell not in told[i]] for i in (0, 1)]
        yield from _by_values(*rest)


def _way(cell: Cell) -> tuple[Hashable, ...]:
    return _words(cell), _is_reverse(cell)


def _words(cell: Cell) -> tuple[str, ...]:
    words = canonical(cell.name)
    return tuple(word for word in words if not word.isdigit() and word not in _TELLING_NOTHING)


def _is_reverse(cell: Cell) -> bool:
    return re.search("reverse|backward", cell.name.lower()) is not None


def _number(cell: Cell) -> tuple[tuple[int, ...], bool]:
    return tuple(map(int, re.findall(r"\d+", cell.name))), _is_reverse(cell)


def _by_values(left: list[Cell], right: list[Cell]) -> Iterator[tuple[Cell, Cell, str]]:
    """Pairs of cells with the most kernels alike, whichever gates they are of; then by their order."""
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


# Which gate is which.


def _atoms(
    x: Cell, y: Cell, gradients: bool | None
) -> Iterator[tuple[Entry | None, Entry | None, tuple[int, ...] | None]]:
    """Pairs of leaves to compare: kernels with their axes, and biases; None for a leaf without a counterpart."""
    axes = None if x.out_first == y.out_first else (1, 0)
    yield from ((leaf, y.kernels[key], axes) for key, leaf in x.kernels.items())
    if gradients is None:
        gradients = says_gradients(_stage(x)) or says_gradients(_stage(y)) or None
    for gate in dict.fromkeys(gate for _, gate in x.kernels):
        left, right = ({part: leaf for (part, of), leaf in cell.biases.items() if of == gate} for cell in (x, y))
        if left.keys() == {"i", "h"} and right.keys() == {"b"}:
            yield from ((two, one, None) for two, one in _two_and_one(x, left, right["b"], gradients))
        elif right.keys() == {"i", "h"} and left.keys() == {"b"}:
            yield from ((one, two, None) for two, one in _two_and_one(y, right, left["b"], gradients))
        else:
            yield from ((left.get(part), right.get(part), None) for part in dict.fromkeys((*left, *right)))


def _two_and_one(
    cell: Cell, two: dict[str, Entry], one: Entry, gradients: bool | None
) -> Iterator[tuple[Entry, Entry]]:
    """The sum of a gate's two biases against the one that stands for both; each of them, if they are gradients."""
    first, second = two["i"], two["h"]
    name = f"{first.name} + {second.name}"
    if gradients is None and _are_equal(cell):
        reason = "equal biases: their sum is meant if these are values, each of them if they are gradients"
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
    """Whether the two biases of each gate have the same bits, as their gradients have, and are not all 0."""
    added = [gate for part, gate in cell.biases if part == "i" and _role(part, gate) == "b"]
    sides = [np.concatenate([cell.biases[part, gate].whole() for gate in added]) for part in "ih"]
    return sides[0].tobytes() == sides[1].tobytes() and bool(np.any(sides[0] != 0))


def _stage(cell: Cell) -> str:
    return re.split(r"[./]", cell.name, maxsplit=1)[0]

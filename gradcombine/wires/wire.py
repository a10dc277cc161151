"""The settings of a wire: how many bits an element is sent in, how it is rounded, and which leaves stay wide."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from gradcombine.errors import invalid, operation, require_integer, require_one_of, require_type, shown

Rounding = Literal["nearest", "stochastic"]
CastDtype = Literal["bfloat16", "float16", "float8_e4m3", "float8_e5m2"]
Rule: TypeAlias = Callable[[str, tuple[int, ...]], bool]
Wide: TypeAlias = bool | Rule | None

LANES = 128
"""Elements that share a scale, unless asked otherwise: the last axis of a TPU's tiles."""

_BITS = {"bfloat16": (8, 7), "float16": (5, 10), "float8_e4m3": (4, 3), "float8_e5m2": (5, 2)}
"""Of the exponent and of the significand."""

_SENSITIVE = re.compile(r"norm|bias|router|\b(scale|gate)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Wire:
    """How replicas send what they sum: made by `cast` and `blocks`, and given to a reduction as ``wire``.

    Attributes:
      name: the call that makes it, as state files and errors spell it.
      exponent: bits of each element's exponent; 0: integers times the scale of their block.
      significand: bits of the significand, a leading one left out; of integers all but the sign.
      size: how many elements share a scale, a power of two; 0: there are no scales.
      rounding: ``"nearest"`` (ties to even) or ``"stochastic"``.
      seed: of stochastic rounding.
      wide: the leaves that are sent as they are, by path and shape; None: none.
    """

    name: str
    exponent: int
    significand: int
    size: int
    rounding: Rounding = "nearest"
    seed: int = 0
    wide: Callable[[str, tuple[int, ...]], bool] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return self.name

    @property
    def bits(self) -> int:
        """Bits of an element, its share of a scale left out."""
        return 1 + self.exponent + self.significand

    @property
    def block(self) -> int:
        """The multiple that numbers of elements are filled up to."""
        return max(self.size, 1)

    def nbytes(self, elements: int) -> int:
        """Bytes of so many elements, filled up to whole blocks."""
        blocks = -(-elements // self.block)
        return blocks * self.block * self.bits // 8 + blocks * (self.size > 0)

    def keeps(self, path: str, shape: tuple[int, ...]) -> bool:
        """Whether a leaf is sent as it is."""
        return self.wide is not None and bool(self.wide(path, shape))


@operation("cast")
def cast(dtype: CastDtype, rounding: Rounding = "nearest", *, wide: Wide = None, seed: int = 0) -> Wire:
    """Sends floats of 16 or 8 bits.

    ``"bfloat16"`` has the range of float32. The others have less: of each 128 elements the largest one is moved by a
    power of two to the top of it, and what is smaller than the smallest number there becomes 0.

    Args:
      dtype: of what is sent; the names are those of ml_dtypes, ``"float8_e4m3"`` is the one with infinities.
      rounding: ``"nearest"``, ties to even; ``"stochastic"``: up with the probability that makes the expectation exact.
        The random bits are a hash of the element's bits, its place, the replica's rank and ``seed``: the same data
        rounds to the same bits again, in every framework.
      wide: leaves that are sent as they are: a function of path and shape, False for none, True for those that few bits
        harm most, and that cost few bytes: scalars and vectors, and by a word of their path norms, biases, scales,
        routers and gates. None: True for types of 8 bits, False for others.
      seed: an integer of 32 bits, of stochastic rounding.

    Returns:
      A wire for float leaves. NaN and infinity arrive as such on all replicas; numbers below 2**-126 arrive as 0.

    >>> import gradcombine as gc
    >>> gc.reductions.mean(wire=gc.wires.cast("bfloat16"))
    mean(wire=wires.cast('bfloat16'))
    """
    require_one_of(f"a dtype of {list(_BITS)}", dtype, list(_BITS))
    exponent, significand = _BITS[dtype]
    size = 0 if dtype == "bfloat16" else LANES
    return _made("cast", f"{dtype!r}", exponent, significand, size, rounding, wide, seed)


@operation("blocks")
def blocks(
    bits: int = 8, size: int = LANES, rounding: Rounding = "nearest", *, wide: Wide = None, seed: int = 0
) -> Wire:
    """Sends integers of 8 or 4 bits, times a power of two that each block of elements shares.

    The power of two is the least with which the largest element of the block fits. One byte a block says which.

    Args:
      bits: 8 or 4, of which one is the sign.
      size: elements of a block, a power of two from 8 to 4096. Leaves are filled up with zeros to a multiple of it on
        each replica; where that, or their size, makes another way cheaper, they take that (see `bytes_sent`).
      rounding, wide, seed: as for `cast`; by default sensitive leaves stay wide.

    Returns:
      A wire for float leaves. NaN and infinity arrive as such on all replicas; the finite elements of their block, and
      numbers below 2**-126, arrive as 0.

    References: Rouhani et al., `Microscaling Data Formats for Deep Learning <https://arxiv.org/abs/2310.10537>`_, 2023.

    >>> import gradcombine as gc
    >>> gc.wires.blocks(bits=4, size=32)
    wires.blocks(4, size=32)
    """
    if require_integer("8 or 4 bits", bits, 4, 8) not in (4, 8):
        raise invalid("8 or 4 bits", bits)
    size = require_integer("a size that is a power of two from 8 to 4096", size, 8, 4096)
    if size & (size - 1):
        raise invalid("a size that is a power of two from 8 to 4096", size)
    return _made("blocks", f"{int(bits)}, size={size}", 0, int(bits) - 1, size, rounding, wide, seed)


LONGEST = 200
"""Characters of the name of a wire."""


def named(name: Any) -> Wire:
    """The wire of a `Wire.name`, which may come from a file; not of one whose ``wide`` is a function.

    >>> named("wires.blocks(4, size=32)")
    wires.blocks(4, size=32)
    """
    try:
        match ast.parse(name if len(name) <= LONGEST else "", mode="eval").body:
            case ast.Call(ast.Attribute(ast.Name("wires"), ("cast" | "blocks") as kind), args, keywords):
                settings = {str(x.arg): ast.literal_eval(x.value) for x in keywords}
                return (cast if kind == "cast" else blocks)(*map(ast.literal_eval, args), **settings)
            case _:
                raise ValueError(name)
    except Exception:  # of a text that is no Python, or names no settings
        raise invalid("the name of a wire, without a function as wide", shown(name)) from None


def is_sensitive(path: str, shape: tuple[int, ...]) -> bool:
    """Whether a leaf is one of those that few bits harm most, and that cost few bytes: the rule of ``wide=True``.

    Scalars and vectors (biases, scales of norms), and by a word of their path norms, biases, scales, routers and gates
    of any shape, as layers that are stacked for a scan have them. An FP8 exchange that left 0.29 % of the elements
    wide lost 2.13 % of the loss in place of 10.87 % (LoongForge, issue 231).

    >>> is_sensitive("['mlp']['kernel']", (64, 256)), is_sensitive("['moe']['router']['kernel']", (64, 8))
    (False, True)
    """
    return len(shape) < 2 or _SENSITIVE.search(path) is not None


def require_wire(wire: Any) -> Wire:
    """Raises for what is no wire."""
    return require_type('a wire, for instance wires.cast("bfloat16")', wire, Wire)


def _made(
    call: str, form: str, exponent: int, significand: int, size: int, rounding: Rounding, wide: Wide, seed: int
) -> Wire:
    require_one_of(f"a rounding of {list(get_args(Rounding))}", rounding, get_args(Rounding))
    seed = require_integer("a seed from 0 to 2**31 - 1", seed, 0)
    if not (wide is None or wide is True or wide is False or callable(wide)):
        raise invalid("wide as True, False or a function of path and shape", shown(wide))
    narrow = 1 + exponent + significand <= 8
    settings = [form]
    if rounding != "nearest":
        settings += [f"rounding={rounding!r}"] + [f"seed={seed}"] * (seed != 0)
    if callable(wide):
        settings.append(f"wide={getattr(wide, '__qualname__', type(wide).__name__)}")
    elif wide is not None and wide != narrow:
        settings.append(f"wide={wide}")
    rule: Rule | None = is_sensitive if (narrow if wide is None else wide) else None
    if callable(wide):
        rule = wide
    return Wire(f"wires.{call}({', '.join(settings)})", exponent, significand, size, rounding, seed, rule)

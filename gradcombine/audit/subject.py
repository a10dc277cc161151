"""A program under audit, as the rules ask of it: compiled for XLA, or a graph of TensorFlow."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Generic, NamedTuple, Protocol

from gradcombine.audit.elements import Exchange, Loop, Shape, X

COPIED = 1024
"""Bytes of an array from which on its copy counts."""


class Reduced(NamedTuple, Generic[X]):
    """An exchange of gradients of which nothing is made but sums.

    Attributes:
      exchange: which.
      loop: whose iterations add it up; None where calls do.
      size: bytes of the exchange's operands of which this holds.
    """

    exchange: Exchange[X]
    loop: Loop[X] | None
    size: float


class Subject(Protocol[X]):
    """A program, and what rules ask of it.

    Attributes:
      noun: its arrays that last from call to call.
      joins_sums: whether sums that do not wait for one another are exchanged together on its machine.
    """

    noun: str
    joins_sums: bool

    @cached_property
    def exchanges(self) -> list[Exchange[X]]:
        """All collectives, in the program's order."""
        ...

    @cached_property
    def reduced(self) -> list[Reduced[X]]:
        """The exchanges of gradients that a loop, or calls, only add up."""
        ...

    def source(self, x: X) -> str:
        """The line that an operation came from, "file:line"; empty where the program does not tell."""
        ...

    def loops(self) -> Iterable[tuple[Loop[X], int]]:
        """The loops of more than one iteration, and how often each is begun in a call."""
        ...

    def unrolled(self) -> Iterable[Sequence[Exchange[X]]]:
        """Groups of several exchanges that are only added to each other."""
        return ()

    def kept(self) -> Sequence[tuple[X, int]]:
        """Operations whose result a counter keeps or throws away although it is computed anew, and their bytes."""
        ...

    def could_join(self, exchange: Exchange[X]) -> bool:
        """Whether an exchange may be one with others beside it."""
        ...

    def unused(self, exchange: Exchange[X], loop: Loop[X]) -> bool:
        """Whether the iterations of a loop only add up or stack what is exchanged."""
        ...

    def beside(self, exchange: Exchange[X]) -> tuple[Hashable, ...]:
        """The place and devices of an exchange, and how many it waits for: equal for those that could be one."""
        ...

    def converted(self, exchange: Exchange[X]) -> Iterator[tuple[Shape, Shape]]:
        """Conversions right before an exchange: arrays before and after each."""
        ...

    def narrow_sums(self, loop: Loop[X] | None) -> Iterator[tuple[Shape, X]]:
        """Arrays of less than 32 bits that the iterations of a loop, or calls, only add to, and where they do."""
        ...

    def exchanged(self, exchange: Exchange[X]) -> Hashable:
        """The operands of an exchange and how they are exchanged; None where it is not known."""
        ...

    def is_equal(self, exchange: Exchange[X]) -> bool:
        """Whether an earlier exchange has made the operands of an exchange equal on its devices."""
        ...

    def one_turn(self, loop: Loop[X]) -> str:
        """How a loop of unknown length is counted; empty if nothing in it costs anything."""
        ...

"""What a compiled program does in one call: the bytes that it moves, what it copies, computes and exchanges."""

from __future__ import annotations

from collections import Counter

from gradcombine.verify.audit.hlo import Instruction, Module

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all"}
"""Operations that move nothing."""


class Program(Module):
    """A compiled program, and what can be counted in it.

    Args:
      text: as XLA prints it, for instance ``compiled.as_text()``.
    """

    def bytes_moved(self, due: bool) -> int:
        """Read and written by one call; an operation that reads a part of an array counts as reading all of it.

        Args:
          due: whether conditionals take their second branch, and loops of an unknown number of turns turn once.
        """
        return self._moved(self.entry, due)

    def bytes_of_turn(self) -> int:
        """Read and written by one turn of each loop of the entry that turns more than once."""
        entry = self.computations[self.entry].values()
        loops = (x for x in entry if self.repeats(self.entry, x))
        return sum(self._moved(body, True) for x in loops for body in x.called("body"))

    def copies(self, least: int = 1024) -> int:
        """Copies of arrays from so many bytes on."""
        return sum(x.opcode in ("copy", "copy-start") and x.bytes >= least for _, x, _ in self.executed())

    def collectives(self, least: int = 0) -> tuple[Counter[str], Counter[str]]:
        """Those inside of loops that turn more than once, and all others; of results from so many bytes on."""
        found: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        for _, x, looped in self.executed():
            if x.collective and x.bytes >= least:
                found[not looped][x.collective] += 1
        return found

    def conditionals(self) -> int:
        return sum(x.opcode == "conditional" for _, x, _ in self.executed())

    def _moved(self, name: str, due: bool) -> int:
        instructions = self.computations[name]
        total = 0
        for x in instructions.values():
            if x.opcode == "conditional":
                total += self._moved(self.bodies(x)[due], due)
            elif x.opcode == "while":
                trips = self.trips(name, x)
                total += (int(due) if trips is None else trips) * self._moved(x.called("body")[0], due)
            elif x.opcode == "call":
                total += sum(self._moved(body, due) for body in self.bodies(x))
            elif x.opcode not in FREE and not x.opcode.endswith("-done"):
                total += x.bytes + sum(_of(instructions, operand) for operand in x.operands)
        return total


def _of(instructions: dict[str, Instruction], name: str) -> int:
    return instructions[name].bytes if name in instructions else 0

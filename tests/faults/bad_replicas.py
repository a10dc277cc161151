"""Replicas that compute wrong values, and the policies for handling them."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradcombine import GradCombineError, faults, ledger, statefile
from gradcombine.reductions import Numbered
from gradcombine.resilience.faults import KINDS as COLUMNS
from tests.faults.training import MICROBATCHES, WIDTH, Engine, Log, Run, begin

KINDS = {
    "nan": "nan",
    "infinity": "infinity",
    "shape": "structure",
    "stale": "stale",
    "doubled": "doubled",
    "flipped": "differs",
}
"""Faults of replicas, and the column of `gradcombine.resilience.faults.KINDS` that must report each."""
POLICIES = ("raise", "skip", "drop")


class RaisedError(Exception):
    """Raised on all replicas by the policy "raise"; they restart from the parts of replicas without a fault."""


class Replica:
    """Injects this replica's fault, and applies the policy at the end of a window."""

    def __init__(self, engine: Engine, run: Run, log: Log, acc: Any, reduction: Any) -> None:
        self._engine, self._run, self._log, self._acc, self._reduction = engine, run, log, acc, reduction
        self._previous: Any = None

    def params(self, window: int, params: Any) -> Any:
        """The parameters, with one flipped bit if that is the fault."""
        if not self._strikes(window, "flipped"):
            return params
        w = params["w"].copy()
        w.view(np.uint32)[3] ^= 1
        return {**params, "w": w}

    def gradient(self, window: int, value: Any) -> Any:
        for kind, wrong in (("nan", np.nan), ("infinity", -np.inf)):
            if self._strikes(window, kind):
                value = {**value, "w": np.where(np.arange(WIDTH) == 5, np.float32(wrong), value["w"])}
        return value

    def number(self, kind: str, window: int, held: Any, todo: Any) -> int | None:
        """A microbatch of another replica to count here as well, or None."""
        others = sorted({*range(MICROBATCHES)}.difference(ledger.read(held).held, todo))
        return others[-1] if others and self._strikes(window, kind, number=others[-1]) else None

    def require_once(self, window: int, merged: Any, held: dict[int, Any]) -> None:
        """The policy "ledger": no detection, but all replicas raise for a window that holds a microbatch twice."""
        try:
            ledger.require_once(merged)
        except GradCombineError as error:
            own, doubled = ledger.read(*held.values()).held, ledger.read(merged).doubled
            self._log(refused=window, told=str(error), numbers=own if {*own} & {*doubled} else ())
            self._engine.wait_for_all()
            raise RaisedError(str(error)) from None

    def end(self, window: int, state: Any, params: Any) -> tuple[Any, Any, list[int], bool]:
        """Detects faults at the end of a window and handles them identically on all replicas.

        Returns:
          This replica's next state and parameters; the replicas to which missing microbatches may be
          dealt; whether the window is skipped.
        """
        run, behind, own = self._run, 0, state
        if self._previous is not None and self._strikes(window, "stale"):
            state, behind = self._previous, 1
        elif self._strikes(window, "shape"):
            longer = {**begin(), "w": np.zeros(WIDTH + 1, np.float32)}
            state = self._acc.init(longer)
            for number in ledger.read(own).held:
                state = self._acc.update(Numbered(longer, np.int32(number)), state)
        self._previous = own
        # Replicas hold different numbers of microbatches, but all of the same window.
        at = state._replace(step=np.int32(0), index=np.int32(window - behind))
        found = self._engine.find(self._acc.value(state), at, params)
        table: Any = np.asarray(found.table)
        everybody, named = range(run.size), np.flatnonzero(table.any(1)).tolist()
        if not named:
            return state, params, [*everybody], False
        try:
            faults.require_none(found, begin())
        except GradCombineError as error:
            told = str(error)
        else:
            told = ""
        self._log(found=window, table=table.tolist(), told=told, policy=run.policy)
        mine = table[run.rank]
        if run.policy != "skip" and mine.any():
            self._log(dropped=window, numbers=ledger.read(own).held)
            state = faults.drop(self._reduction, state, found)
            if mine[COLUMNS.index("structure")]:
                state = self._acc.init(begin())
            state = state._replace(step=np.int32(0), index=np.int32(0))
            # So that no process restarts from the wrong part.
            statefile.save_part(run.folder, window, run.rank, self._reduction, state)
        if run.policy == "raise":
            self._engine.wait_for_all()
            raise RaisedError(told)
        if mine[COLUMNS.index("differs")]:
            params = statefile.recover(run.folder, self._reduction, begin(), start=begin()).begun
        good = [rank for rank in everybody if rank not in named]
        return state, params, good or [*everybody], run.policy == "skip"

    def _strikes(self, window: int, kind: str, **told: int) -> bool:
        if kind not in self._run.bad:
            return False
        self._run.bad.remove(kind)
        self._log(struck=window, kind=kind, **told)
        return True

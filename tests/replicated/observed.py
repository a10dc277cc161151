"""Observed outcomes of operations on real variables under tf.distribute.MirroredStrategy with two replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

RAISES = "raises"
READS = ("read_cross_replica", "convert_cross_replica", "read_in_scope", "numpy_in_scope")

Outcome = dict[str, Any]
"""``raises``: whether the operation raised. Then, where present, ``result``, ``components``, ``cross`` and ``replica``
(the reads), ``after_cross``, ``SUM`` and ``MEAN``; a read that raises is `RAISES`."""


class Case(NamedTuple):
    """One operation on one type of variable, in one of TensorFlow's two execution modes."""

    key: str
    column: str
    synchronization: str
    aggregation: str
    context: str
    op: str
    outcome: Outcome

    @property
    def on_write(self) -> bool:
        return self.synchronization in ("AUTO", "ON_WRITE")

    @property
    def int32(self) -> bool:
        return self.context.startswith("int32")

    def __str__(self) -> str:
        return f"{self.key}|{self.column}".replace(" ", "_")


def _cases() -> list[Case]:
    found = []
    for row in json.loads(Path(__file__).with_name("variable_semantics.json").read_text())["rows"]:
        synchronization, aggregation, context, op = row["key"].split("|")
        columns = {"eager": row["eager"], "tf_function": row["tf_function"]}
        if columns["tf_function"] == "same as eager":
            columns = {"both": row["eager"]}
        found += [
            Case(row["key"], column, synchronization, aggregation, context, op, outcome(context, op, seen))
            for column, seen in columns.items()
        ]
    return found


def outcome(context: str, op: str, seen: dict[str, Any]) -> Outcome:
    """Converts one observation to an `Outcome`."""
    if "exc" in seen:
        return {"raises": True}
    result = seen.get("result", {"ok": None})
    if op == "reduce":
        return {"raises": False, "SUM": result["SUM"]["ok"], "MEAN": result["MEAN"]["ok"]}
    steps = [result] if "ok" in result or "exc" in result else list(result.values())
    out: Outcome = {"raises": any("exc" in step for step in steps)}
    if context in ("replica_dep", "replica_const") or op == "sequence2":
        out["result"] = result["ok"]
    after = seen.get("after", seen.get("state"))
    out["components"] = after["components"]
    if "read_replica" in after:
        out["replica"] = after["read_replica"]["ok"]
    reads = [after[name] for name in (*READS, "read_cross") if name in after]
    if reads:
        one = reads[0].get("ok", RAISES)
        assert all(read.get("ok", RAISES) == one for read in reads)
        out["cross"] = one
    if "after_cross" in seen:
        out["after_cross"] = seen["after_cross"]
    return out


CASES = _cases()

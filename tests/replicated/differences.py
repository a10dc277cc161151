"""All deliberate differences between the model and TensorFlow's variables. docs/replicated.md explains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.replicated.observed import CASES, Case, Outcome


class Difference(NamedTuple):
    """One rule.

    Attributes:
      name: the first words of the row in docs/replicated.md.
      covers: whether the rule applies to a case.
      ours: the model's outcome in such a case.
    """

    name: str
    covers: Callable[[Case], bool]
    ours: Callable[[Case], Outcome]


def _refused(case: Case) -> Outcome:
    """The call raises, and the variable keeps its initial value."""
    length = 3 if case.op == "scatter_add" else 0
    start = [10.0] * length if length else 10.0
    values = {"components": [start] * 2, "replica": [start] * 2, "cross": start}
    if case.synchronization == "ON_READ" and case.aggregation == "NONE":
        values["cross"] = "raises"
    return {"raises": True} | {name: value for name, value in values.items() if name in case.outcome}


def _as_in(column: str) -> Callable[[Case], Outcome]:
    """TensorFlow's outcome in the other execution mode."""
    return lambda case: next(other.outcome for other in CASES if (other.key, other.column) == (case.key, column))


_REPLICA_WRITES = ("replica_dep", "replica_const", "seq:", "replica:", "replica_pyfloat", "strategy.reduce")

DIFFERENCES = (
    Difference(
        "a write in replica context, ON_WRITE with NONE",
        lambda case: case.on_write and case.aggregation == "NONE" and case.context.startswith(_REPLICA_WRITES),
        _refused,
    ),
    Difference(
        "one value per replica in cross-replica context, ON_WRITE",
        lambda case: case.on_write and case.context in ("update_api_dep", "cross_in_scope_perreplica_value"),
        _refused,
    ),
    Difference(
        "a rejected cross-replica write, ON_READ with NONE, eager",
        lambda case: (
            case.column == "eager"
            and case.key.startswith("ON_READ|NONE|")
            and case.context.startswith(("cross_in_scope", "cross_no_scope", "seq:"))
        ),
        _as_in("tf_function"),
    ),
    Difference(
        "a cross-replica assign of an integer, ON_READ with SUM",
        lambda case: case.key.startswith("ON_READ|SUM|int32"),
        lambda case: case.outcome | {"after_cross": [4, 3]},
    ),
    Difference(
        "a scattered addition, ON_READ",
        lambda case: case.synchronization == "ON_READ" and case.op == "scatter_add",
        lambda case: {"raises": False, "components": [[11.0, 10.0, 10.0], [10.0, 14.0, 10.0]]},
    ),
    Difference(
        "a write inside tf.cond inside tf.function, ON_WRITE",
        lambda case: (
            case.column == "tf_function"
            and case.on_write
            and case.aggregation != "NONE"
            and case.context == "replica_dep_in_tf.cond"
        ),
        _as_in("eager"),
    ),
)


def expected(case: Case) -> Outcome:
    """The model's expected outcome: TensorFlow's, unless a difference is listed."""
    found = [difference for difference in DIFFERENCES if difference.covers(case)]
    assert len(found) <= 1, [difference.name for difference in found]
    return found[0].ours(case) if found else case.outcome

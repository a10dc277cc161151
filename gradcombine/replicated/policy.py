"""How the replicas' values become one, and when: tf.VariableAggregation and tf.VariableSynchronization."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from gradcombine import reductions
from gradcombine.backends.local import LOCAL
from gradcombine.errors import GradCombineError, shown
from gradcombine.reductions.algebra import Reduction


class Aggregation(Enum):
    """How the values that replicas write become one; the names of tf.VariableAggregation."""

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


class Synchronization(Enum):
    """When the replicas' values become one; the names of tf.VariableSynchronization."""

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


_REDUCTIONS: dict[Aggregation, Callable[[], Reduction]] = {
    Aggregation.SUM: reductions.sum,
    Aggregation.MEAN: reductions.mean,
    Aggregation.ONLY_FIRST_REPLICA: reductions.first,
}


class Policy(NamedTuple):
    """One combination of the two.

    Attributes:
      aggregation: as asked for.
      synchronization: ON_WRITE or ON_READ; NONE where there is one copy only.
      reduction: the aggregation as a reduction; None for NONE.
    """

    aggregation: Aggregation
    synchronization: Synchronization
    reduction: Reduction | None

    @property
    def on_read(self) -> bool:
        return self.synchronization is Synchronization.ON_READ

    def __str__(self) -> str:
        return f"aggregation {self.aggregation.value} with synchronization {self.synchronization.value}"


E = TypeVar("E", Aggregation, Synchronization)


def decide(aggregation: Any, synchronization: Any, over: Any) -> Policy:
    """The policy that two settings ask for on these replicas. AUTO is ON_WRITE, as under every strategy of TensorFlow.

    Raises:
      GradCombineError: for unknown names, and for synchronization NONE where there may be several copies.
    """
    how, when = _member(Aggregation, aggregation), _member(Synchronization, synchronization)
    if when is Synchronization.NONE and over is not LOCAL:
        expected = "synchronization on_write or on_read (none is for a variable of which there is one copy, over=LOCAL)"
        raise GradCombineError("replicated.variable", expected, f"none over {over!r}")
    if when is Synchronization.AUTO:
        when = Synchronization.ON_WRITE
    return Policy(how, when, _REDUCTIONS[how]() if how in _REDUCTIONS else None)


def _member(kind: type[E], given: Any) -> E:
    # TensorFlow's members are known by their names, so that TensorFlow need not be there. Both enums have a NONE: the
    # class's name tells VariableAggregation and VariableAggregationV2 from VariableSynchronization.
    name = given if isinstance(given, str) else getattr(given, "name", None)
    right = isinstance(given, str) or kind.__name__ in type(given).__name__
    if not right or not isinstance(name, str) or name.upper() not in kind.__members__:
        names = ", ".join(member.value for member in kind)
        expected = f"one {kind.__name__.lower()} of {names}, or the tf.Variable{kind.__name__} of that name"
        raise GradCombineError("replicated.variable", expected, shown(given))
    return kind[name.upper()]

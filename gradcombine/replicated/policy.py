"""How the replicas' values become one, and when: tf.VariableAggregation and tf.VariableSynchronization."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, TypeVar

from gradcombine import reductions
from gradcombine.errors import invalid, shown
from gradcombine.places.replicas import LOCAL
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

    @property
    def shares(self) -> bool:
        """Whether the components are parts that the value is the sum of."""
        return self.on_read and self.aggregation is Aggregation.SUM

    def require_one_value(self) -> Reduction:
        """Refuses to make one value of components where none is defined; returns what makes it."""
        if self.reduction is None:
            expected = (
                "aggregation sum, mean or only_first_replica, which say what the one value of the components is "
                "(in replica context, each replica reads and writes its own)"
            )
            raise invalid(expected, str(self))
        return self.reduction

    def require_aggregation(self, size: Callable[[], int]) -> None:
        """Refuses a write of several replicas' values to components that have to stay equal.

        ``size``, the number of replicas, is asked for where it matters alone: writes of ON_READ need no replicas.
        """
        if not self.on_read and self.reduction is None and (replicas := size()) > 1:
            expected = (
                "aggregation sum, mean or only_first_replica, which make one value of the replicas' values, or "
                "synchronization on_read, which keeps them apart, or cross.assign and its like for one value for all"
            )
            raise invalid(expected, f"{self}, on {replicas} replicas")

    def require_equal_addends(self) -> None:
        """Refuses one addend for all components where the value is their sum."""
        if self.shares:
            expected = (
                "cross.assign of the new sum, or a write of each replica's own in replica context (the same addend on "
                "every component would count it once a replica)"
            )
            raise invalid(expected, str(self))

    def require_contribution(self, size: Callable[[], int], path: str) -> None:
        """Refuses a Python number where the replicas' values are summed."""
        if self.aggregation is Aggregation.SUM and size() > 1:
            expected = (
                "an array of this replica's own (a Python number says the same on every replica: give it to "
                "cross.assign and its like, or choose aggregation mean or only_first_replica)"
            )
            raise invalid(expected, f"a Python number, for {self}", path)

    def __str__(self) -> str:
        return f"aggregation {self.aggregation.value} with synchronization {self.synchronization.value}"


E = TypeVar("E", Aggregation, Synchronization)


def decide(aggregation: object, synchronization: object, over: object) -> Policy:
    """The policy that two settings ask for on these replicas. AUTO is ON_WRITE, as under every strategy of TensorFlow.

    Raises:
      GradCombineError: for unknown names, and for synchronization NONE where there may be several copies.
    """
    how, when = _member(Aggregation, aggregation), _member(Synchronization, synchronization)
    if when is Synchronization.NONE and over is not LOCAL:
        expected = "synchronization on_write or on_read (none is for a variable of which there is one copy, over=LOCAL)"
        raise invalid(expected, f"none over {over!r}")
    if when is Synchronization.AUTO:
        when = Synchronization.ON_WRITE
    return Policy(how, when, _REDUCTIONS[how]() if how in _REDUCTIONS else None)


def _member(kind: type[E], setting: object) -> E:
    # TensorFlow's members are known by their names, so that TensorFlow need not be there. Both enums have a NONE: the
    # class's name tells VariableAggregation and VariableAggregationV2 from VariableSynchronization.
    name = setting if isinstance(setting, str) else getattr(setting, "name", None)
    right = isinstance(setting, str) or kind.__name__ in type(setting).__name__
    if not right or not isinstance(name, str) or name.upper() not in kind.__members__:
        names = ", ".join(member.value for member in kind)
        expected = f"one {kind.__name__.lower()} of {names}, or the tf.Variable{kind.__name__} of that name"
        raise invalid(expected, shown(setting))
    return kind[name.upper()]

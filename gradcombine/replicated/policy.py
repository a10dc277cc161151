"""How and when the replicas' values are combined: tf.VariableAggregation and tf.VariableSynchronization."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, TypeVar

from gradcombine import reductions
from gradcombine.errors import invalid, shown
from gradcombine.places.replicas import LOCAL
from gradcombine.reductions.algebra import Reduction


class Aggregation(Enum):
    """How the values written by the replicas are combined. Member names are those of tf.VariableAggregation."""

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


class Synchronization(Enum):
    """When the replicas' values are combined. Member names are those of tf.VariableSynchronization."""

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
    """An aggregation and a synchronization.

    Attributes:
      aggregation: as requested.
      synchronization: ON_WRITE or ON_READ; NONE only for a single copy.
      reduction: that implements the aggregation; None for NONE.
    """

    aggregation: Aggregation
    synchronization: Synchronization
    reduction: Reduction | None

    @property
    def on_read(self) -> bool:
        return self.synchronization is Synchronization.ON_READ

    @property
    def shares(self) -> bool:
        """Whether the value of the variable is the sum of its components."""
        return self.on_read and self.aggregation is Aggregation.SUM

    def require_one_value(self) -> Reduction:
        """The reduction that combines the components; raises for aggregation NONE."""
        if self.reduction is None:
            expected = (
                "aggregation sum, mean or only_first_replica, which define a single value of the components "
                "(in replica context, each replica reads and writes its own component)"
            )
            raise invalid(expected, str(self))
        return self.reduction

    def require_aggregation(self, size: Callable[[], int]) -> None:
        """Raises if different values of several replicas would be written to components that have to stay equal.

        ``size`` is called only if it matters: writes with ON_READ need no replicas.
        """
        if not self.on_read and self.reduction is None and (replicas := size()) > 1:
            expected = (
                "aggregation sum, mean or only_first_replica, which combine the replicas' values, or synchronization "
                "on_read, which keeps them separate, or cross.assign (_add, _sub) of one value for all replicas"
            )
            raise invalid(expected, f"{self}, on {replicas} replicas")

    def require_equal_addends(self) -> None:
        """Raises if the value is the sum of the components, to all of which the same number would be added."""
        if self.shares:
            expected = (
                "cross.assign of the new sum, or a write by each replica in replica context (a value added to every "
                "component would count once per replica)"
            )
            raise invalid(expected, str(self))

    def require_contribution(self, size: Callable[[], int], path: str) -> None:
        """Raises for a Python number if the replicas' values are summed."""
        if self.aggregation is Aggregation.SUM and size() > 1:
            expected = (
                "an array with this replica's value (a Python number is the same on every replica: pass it to "
                "cross.assign (_add, _sub), or choose aggregation mean or only_first_replica)"
            )
            raise invalid(expected, f"a Python number, for {self}", path)

    def __str__(self) -> str:
        return f"aggregation {self.aggregation.value} with synchronization {self.synchronization.value}"


E = TypeVar("E", Aggregation, Synchronization)


def decide(aggregation: object, synchronization: object, over: object) -> Policy:
    """Resolves the user's settings to a policy. AUTO becomes ON_WRITE, as in every strategy of TensorFlow.

    Raises:
      GradCombineError: for unknown names, and for synchronization NONE unless ``over`` is LOCAL.
    """
    how, when = _member(Aggregation, aggregation), _member(Synchronization, synchronization)
    if when is Synchronization.NONE and over is not LOCAL:
        expected = "synchronization on_write or on_read (none is for a variable with a single copy, over=LOCAL)"
        raise invalid(expected, f"none over {over!r}")
    if when is Synchronization.AUTO:
        when = Synchronization.ON_WRITE
    return Policy(how, when, _REDUCTIONS[how]() if how in _REDUCTIONS else None)


def _member(kind: type[E], setting: object) -> E:
    # TensorFlow's members are recognized by name, without importing it. Both enums have a NONE: only the class name
    # distinguishes VariableAggregation and VariableAggregationV2 from VariableSynchronization.
    name = setting if isinstance(setting, str) else getattr(setting, "name", None)
    is_kind = isinstance(setting, str) or kind.__name__ in type(setting).__name__
    if not is_kind or not isinstance(name, str) or name.upper() not in kind.__members__:
        names = ", ".join(member.value for member in kind)
        expected = f"one {kind.__name__.lower()} of {names}, or the tf.Variable{kind.__name__} of that name"
        raise invalid(expected, shown(setting))
    return kind[name.upper()]

"""Runs the observed operations on the pure model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gradcombine import GradCombineError, reductions
from gradcombine.replicated import ReplicatedState, ReplicatedVariable
from tests.replicated.observed import RAISES, Case

DEPENDENT = (1.0, 4.0)
CONSTANT = 6.0
START = 10.0


class Place(NamedTuple):
    """The functions that a program uses on one replica.

    Attributes:
      own: ``own(values)``: the replica's value from one value per replica.
      reduce: ``reduce(reduction, value)``: reduces over the replicas.
      cond: ``cond(function, state)``: ``function(state)``, in the framework's conditional.
    """

    own: Callable[[Any], Any]
    reduce: Callable[[Any, Any], Any]
    cond: Callable[[Any, Any], Any]


def replay(case: Case, variable: ReplicatedVariable, place: Place) -> dict[str, Any]:
    """The model's outcome of a case, as an `observed.Outcome`."""
    out: dict[str, Any] = {"raises": False}
    states: list[ReplicatedState] = []
    try:
        states.extend(_steps(case, variable, place, out))
    except GradCombineError:
        out["raises"] = True
    if states:
        out["components"] = states[-1].value
        out["replica"] = variable.read(states[-1])
        try:
            out["cross"] = variable.cross.read(states[-1])
        except GradCombineError:
            out["cross"] = RAISES
    if case.int32 and not out["raises"]:
        out["after_cross"] = variable.cross.assign(states[-1], np.int32(7)).value
    return {name: out[name] for name in ("raises", *out) if name in case.outcome}


def _steps(case: Case, variable: Any, place: Place, out: dict[str, Any]) -> Iterator[ReplicatedState]:
    """Yields the states one by one, so that the ones before an error are known."""
    dtype = np.int32 if case.int32 else np.float32
    dependent, constant = place.own(np.array(DEPENDENT, dtype)), place.own(np.array([CONSTANT] * 2, dtype))
    one, one_each = np.float32(CONSTANT), np.float32(DEPENDENT)
    state = variable.init(np.full(3 if case.op == "scatter_add" else (), START, dtype))
    yield state
    context, op = case.context, case.op
    if op == "create":
        return
    if op == "scatter_add":
        yield variable.assign_add(state, place.own(np.diag(np.float32([*DEPENDENT, 0]))[:2]))
    elif op == "reduce":
        state = variable.assign(state, dependent)
        yield state
        for name, reduction in (("SUM", reductions.sum()), ("MEAN", reductions.mean())):
            out[name] = place.reduce(reduction, variable.read(state))
    elif op == "sequence":
        state = variable.assign(state, dependent)
        yield state
        yield variable.cross.assign_add(state, one)
    elif op == "sequence2":
        middle = variable.assign_add(state, dependent)
        end = variable.assign_add(middle, dependent)
        out["result"] = [variable.read(middle), variable.read(end)]
        yield end
    elif context == "replica_dep_in_tf.cond":
        yield place.cond(lambda before: variable.assign_add(before, dependent), state)
    elif context.startswith("update_api"):
        # strategy.extended.update writes each component separately, like replica context does with ON_READ. With
        # ON_WRITE, one write sets all components.
        each, all_ = (dependent, one_each) if context == "update_api_dep" else (constant, one)
        yield getattr(variable.cross, op)(state, all_) if case.on_write else getattr(variable, op)(state, each)
    elif context.startswith("cross"):
        yield getattr(variable.cross, op)(state, one_each if context.endswith("perreplica_value") else one)
    else:
        value = {"replica_const": constant, "replica_pyfloat": CONSTANT}.get(context, dependent)
        state = getattr(variable, op)(state, value)
        out["result"] = variable.read(state)
        yield state

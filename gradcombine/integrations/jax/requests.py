# pyright: standard
"""Training steps whose microbatches and updates are separate requests, for several sets of parameters."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

import gradcombine as gc
from gradcombine import reductions
from gradcombine.backends.jax_backend import replaced
from gradcombine.backends.protocol import Collective
from gradcombine.errors import (
    invalid,
    operation,
    require_distinct,
    require_given,
    require_integer,
    require_type,
    shown,
    translate_errors,
)
from gradcombine.integrations.jax.arrays import (
    examples,
    explain_rejection,
    place_beside,
    require_transformation,
    require_tree,
)
from gradcombine.integrations.jax.loss import Loss, batch_positions, require_first
from gradcombine.integrations.jax.modules import module_aware_loss, stateless_params, with_params
from gradcombine.integrations.jax.objective import Objective
from gradcombine.integrations.jax.request_programs import RequestPrograms, window_of
from gradcombine.integrations.jax.scan import divide
from gradcombine.integrations.jax.step_functions import StepMetrics, copied, holds_aux, part_specs
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.numbered import NumberedState, ranges
from gradcombine.settings import valid
from gradcombine.statefile import load_replicas, save_replicas
from gradcombine.types import Leaf, Order, Scalar, State, Tree

if TYPE_CHECKING:
    import optax


class Node(NamedTuple):
    """A subtree of a window's canonical tree.

    Attributes:
      level, place: the node holds the microbatches from ``place * 2**level`` to ``(place + 1) * 2**level - 1``. In
        order "sequential" both are 0, and the single node holds all microbatches.
      state: of the reduction, different on each replica.
    """

    level: int
    place: int
    state: State


class Slot(NamedTuple):
    """One set of parameters and its window.

    Attributes:
      params: the parameters.
      opt_state: the optimizer's state.
      window: number of the window, from 0: how often the optimizer has run.
      held: numbers of the microbatches in the window.
      nodes: accumulators of the window; () if it is empty.
    """

    params: Tree
    opt_state: Tree
    window: int = 0
    held: frozenset[int] = frozenset()
    nodes: tuple[Node, ...] = ()


Slots = Mapping[Hashable, Slot]
"""State of a `RequestStep`: a dict that is never mutated. Its numbers are Python integers, its arrays JAX arrays."""


@operation("request_step")
@dataclass(frozen=True)
class RequestStep:
    """A training step in separate requests; made by `request_step`.

    Every method returns a new state, in which all other slots are unchanged. `forward_backward` donates the slot's
    accumulators; `optim_step` donates its parameters and optimizer state, too: continue with the returned state.

    Attributes:
      programs: the compiled programs, for instance ``step.programs.more.lower(...)`` for an audit.
      microbatches: the largest number of microbatches in a window.
    """

    programs: RequestPrograms
    microbatches: int

    def init(self, params: Mapping[Hashable, Tree]) -> Slots:
        """Creates slots by name, each with a copy of its parameters and an empty window.

        Parameters are a tree of arrays, or a module of flax.nnx or equinox without random streams or state.
        """
        slots: Slots = {}
        for slot, tree in require_type("a dict of parameters by slot", params, Mapping).items():
            slots = self.add(slots, slot, tree)
        return slots

    def add(self, state: Slots, slot: Hashable, params: Tree) -> Slots:
        """Adds a slot. If its parameters have the shapes of another slot's, nothing is compiled for it."""
        expected = "a hashable name of a slot that does not exist yet"
        with translate_errors(expected, TypeError, received=shown(slot)):
            if slot in _slots(state):
                raise invalid(expected, shown(slot))
        arrays = copied(stateless_params(params)[0])
        opt_state = place_beside(arrays, copied(self.programs.optimizer.init(arrays)))
        return {**state, slot: Slot(with_params(params, arrays), opt_state)}

    def remove(self, state: Slots, slot: Hashable) -> Slots:
        """Removes a slot."""
        _slot(state, slot)
        return {name: held for name, held in state.items() if name != slot}

    def forward_backward(
        self,
        state: Slots,
        *batch: Tree,
        slot: Hashable,
        number: int | Sequence[int],
        window: int | None = None,
        **kwargs: Tree,
    ) -> Slots:
        """Adds the gradient of a microbatch to the window of a slot, without communication.

        Args:
          state: the slots.
          *batch: arguments of the loss after the parameters.
          slot: name of the slot.
          number: number of the microbatch in its window, from 0. If the window already holds it, nothing is computed or
            changed. A list of m numbers: the batch is divided into m microbatches with these numbers.
          window: number of the window that it belongs to, as in `Slot.window`. A request for a window that has ended
            changes nothing. None: the open window.
          **kwargs: keyword arguments of the loss, the same for all microbatches: for instance shared parameters.

        Raises:
          GradCombineError: for an unknown slot, a number that is not below ``microbatches``, and as `train_step`; the
            state remains valid.
        """
        held = _slot(state, slot)
        expected = f"numbers of microbatches, from 0 to {self.microbatches - 1}"
        numbers = number if isinstance(number, (list, tuple, range)) else [number]
        numbers = [require_integer(expected, n, lowest=0, highest=self.microbatches - 1) for n in numbers]
        require_distinct("each microbatch once", numbers)
        if not self._is_open(held, window):
            return state
        require_tree(batch, kwargs)
        loss_args = [None, *batch]
        positions = batch_positions(self.programs.objective.loss, loss_args)
        microbatches = _divided([loss_args[i] for i in positions], len(numbers))
        for n, microbatch in zip(numbers, microbatches, strict=True):
            if n not in held.held:
                held = self._contributed(held, n, replaced(loss_args, positions, microbatch)[1:], kwargs)
        return {**state, slot: held}

    def optim_step(self, state: Slots, slot: Hashable, window: int | None = None) -> tuple[Slots, StepMetrics]:
        """Ends the window of a slot: all-reduces it over the replicas and runs the optimizer.

        Args:
          state, slot: as for `forward_backward`.
          window: number of the window to end. One that has ended changes nothing, so that a request can be repeated;
            the metrics are then zeros, with ``applied`` False and no aux.

        Raises:
          GradCombineError: for an unknown slot, and for an empty window.
        """
        held = _slot(state, slot)
        if not self._is_open(held, window):
            return state, self.programs.no_metrics()
        _require_filled(held, slot)
        node, (params, _) = self._folded(held.nodes), stateless_params(held.params)
        with explain_rejection(params, held.opt_state, node):
            params, opt_state, _, metrics = self.programs.end(params, held.opt_state, node, np.int32(held.window))
        return {**state, slot: Slot(with_params(held.params, params), opt_state, held.window + 1)}, metrics

    def discard(self, state: Slots, slot: Hashable, window: int | None = None) -> Slots:
        """Empties the window of a slot, whose number stays the same.

        Args:
          state, slot: as for `forward_backward`.
          window: number of the window to empty; one that has ended changes nothing, so that a request can be repeated.
        """
        held = _slot(state, slot)
        if not self._is_open(held, window):
            return state
        return {**state, slot: held._replace(held=frozenset(), nodes=())}

    def save(self, path: str | os.PathLike[str], state: Slots, slot: Hashable) -> None:
        """Saves the window of a slot, merged over the replicas, in a state file that lists its microbatches.

        Save the parameters and the optimizer's state in a checkpoint.
        """
        held = _slot(state, slot)
        _require_filled(held, slot)
        states = [self._saved(node, held.held) for node in held.nodes]
        save_replicas(path, self._numbered(holds_aux(window_of(states[0].value))), states)

    def load(self, path: str | os.PathLike[str], state: Slots, slot: Hashable, *example: Tree, **kwargs: Tree) -> Slots:
        """Replaces the window of a slot by a saved one, on any number of replicas.

        Args:
          path: path of the state file.
          state, slot: as for `forward_backward`.
          *example: arguments of the loss after the parameters, or specs, for a loss with terms or aux; with kwargs.

        Raises:
          GradCombineError: as `gradcombine.statefile.load`.
        """
        held = _slot(state, slot)
        params, rest = stateless_params(held.params)
        loss = self.programs.objective.loss
        if loss.has_aux or loss.terms is not None:
            require_given("an example of the arguments, for a loss with aux or terms", example or kwargs or None)
        like = part_specs(self.programs.objective, params, None, example, kwargs | rest if example else kwargs)
        states = load_replicas(path, self._numbered("aux" in like), like)
        nodes = [self._loaded(x, params) for x in states]
        if self._is_sequential:
            nodes = [Node(0, 0, fold_pairwise(self.programs.merge, [node.state for node in nodes]))]
        numbers = [int(n) for x in states for n in np.flatnonzero(x.counts)]
        return {**state, slot: held._replace(held=frozenset(numbers), nodes=tuple(nodes))}

    def _contributed(self, held: Slot, number: int, batch: Sequence[Tree], kwargs: dict[str, Tree]) -> Slot:
        params, rest = stateless_params(held.params)
        at = params, np.int32(held.window), np.int32(number), batch, kwargs | rest
        with explain_rejection(params, batch, kwargs, held.nodes):
            if self._is_sequential and held.nodes:
                nodes = (Node(0, 0, self.programs.more(held.nodes[0].state, *at)),)
            else:
                place = 0 if self._is_sequential else number
                nodes = self._inserted(held.nodes, Node(0, place, self.programs.begin(*at)))
        return held._replace(held=held.held | {number}, nodes=nodes)

    def _inserted(self, nodes: tuple[Node, ...], node: Node) -> tuple[Node, ...]:
        """Inserts a node, and merges siblings as long as there are any."""
        remaining = {(x.level, x.place): x for x in nodes}
        while (sibling := remaining.pop((node.level, node.place ^ 1), None)) is not None:
            first, later = sorted((node, sibling), key=lambda x: x.place)
            node = Node(node.level + 1, node.place >> 1, self.programs.merge(first.state, later.state))
        return (*remaining.values(), node)

    def _folded(self, nodes: tuple[Node, ...]) -> State:
        """Merges all nodes in the canonical order, without the missing subtrees."""
        waiting = sorted(nodes, key=lambda x: x.level, reverse=True)
        level, states = 0, dict[int, State]()  # the states of one level, by place
        while waiting or len(states) > 1:
            while waiting and waiting[-1].level == level:
                node = waiting.pop()
                states[node.place] = node.state
            parents = dict[int, State]()
            for place in sorted(states):
                earlier = parents.get(place >> 1)
                state = states[place]
                parents[place >> 1] = state if earlier is None else self.programs.merge(earlier, state)
            level, states = level + 1, parents
        (state,) = states.values()
        return state

    def _saved(self, node: Node, held: frozenset[int]) -> NumberedState:
        """Merges a node over the replicas and adds a ledger of its microbatches."""
        counts = np.zeros(self.microbatches, np.int32)
        counts[[n for n in held if self._is_sequential or n >> node.level == node.place]] = 1
        return NumberedState(self.programs.merge_replicas(node.state), counts)

    def _loaded(self, saved: NumberedState, params: Tree) -> Node:
        numbers, state = np.flatnonzero(saved.counts).tolist(), self.programs.place_on_first(saved.value, params)
        if self._is_sequential:
            return Node(0, 0, state)
        level = len(numbers).bit_length() - 1
        node = Node(level, numbers[0] >> level, state)
        if numbers != list(range(node.place << level, node.place + 1 << level)):
            raise invalid("a window saved in order 'tree'", f"a part that holds {ranges(numbers)}")
        return node

    @property
    def _is_sequential(self) -> bool:
        return self.programs.objective.order == "sequential"

    def _numbered(self, has_aux: bool) -> Reduction:
        return reductions.numbered(self.programs.window(has_aux).reduction, self.microbatches)

    def _is_open(self, held: Slot, window: int | None) -> bool:
        """Whether ``window`` is the slot's open window; raises for a future one."""
        if window is None:
            return True
        expected = f"the window {held.window}, or one that has ended"
        return require_integer(expected, window, lowest=0, highest=held.window) == held.window


def _divided(batch: list[Tree], count: int) -> list[list[Leaf]]:
    if count == 1:
        return [batch]
    parts = divide(batch, count)
    if not (parts.full == count and parts.rest is None):
        raise invalid(f"a number of examples that is divisible by {count} microbatches", examples(batch))
    return [jax.tree.map(lambda x, i=i: x[i], parts.stacked) for i in range(count)]


def _slots(state: object) -> Slots:
    return require_type("the slots, from init", state, Mapping)


def _slot(state: object, slot: Hashable) -> Slot:
    slots = _slots(state)
    with translate_errors(f"a slot of {shown(list(slots))}", KeyError, TypeError, received=lambda: shown(slot)):
        return slots[slot]


def _require_filled(held: Slot, slot: Hashable) -> None:
    if not held.nodes:
        raise invalid("a slot that holds microbatches", f"an empty one, {shown(slot)}")


@operation("request_step")
def request_step(
    loss: Callable[..., Tree] | Loss,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int,
    weight: Callable[..., Scalar] | None = None,
    reduction: Reduction | None = None,
    over: Collective = gc.LOCAL,
    order: Order = "sequential",
) -> RequestStep:
    """Builds a training step whose gradients and updates are separate requests, for many sets of parameters at once.

    For services that accumulate on demand: `RequestStep.forward_backward` adds one numbered microbatch to the window of
    a slot (for instance an adapter), and `RequestStep.optim_step` ends the window. Requests may come in any order,
    repeatedly, or for a window that has ended; each number counts once. Slots share the compiled programs: adding one
    does not retrace. A request only touches the arrays of its slot, so that a NaN stays there.

    Args:
      loss, weight, reduction, over: as for `gradcombine.integrations.jax.train_step`. The loss has no carry and no
        "counted" totals. The numbers of window and microbatch are folded into a random key, so that a repeated request
        computes the same gradient.
      optimizer: an optax transformation, run once per window.
      microbatches: the largest number of microbatches in a window, 2**24 or less.
      order: as for `gradcombine.accumulate`. "tree": the bits do not depend on the order of the requests; the window
        has one node per complete subtree of the canonical tree: about log2 of the number of microbatches if they come
        in order, and at most half of it.

    Returns:
      A `RequestStep`.

    Raises:
      GradCombineError: as `train_step`.

    Bits: those of `gradcombine.combine` over the microbatches in the window, in the order of their arrival, or for
    order "tree" in the canonical order of their numbers. In precision "exact" they do not depend on the order.

    Memory: a window takes one accumulator per parameter, from its first microbatch to its end, updated in place.

    >>> import jax.numpy as jnp, optax
    >>> from gradcombine.integrations.jax import request_step
    >>> def loss(w, x):
    ...     return jnp.mean(w * x)
    >>> engine = request_step(loss, optax.sgd(1.0), microbatches=8)
    >>> state = engine.init({"a": jnp.float32(0), "b": jnp.float32(5)})
    >>> state = engine.forward_backward(state, jnp.float32([1, 2, 5]), slot="a", number=1)
    >>> state = engine.forward_backward(state, jnp.float32([4]), slot="a", number=0)
    >>> state = engine.forward_backward(state, jnp.float32([4]), slot="a", number=0)  # sent again
    >>> state, metrics = engine.optim_step(state, slot="a")
    >>> float(state["a"].params), float(state["b"].params)
    (-3.0, 5.0)
    """
    objective = Objective.of(module_aware_loss(Loss.of(loss)), weight, reduction, over, order)
    require_first(objective.loss)
    if objective.loss.carry_argnum is not None:
        raise invalid("a loss without a carry, as requests come in any order", "carry_argnum")
    if objective.loss.totals == "counted":
        raise invalid("totals that are given or unknown, as requests come in any order", "totals='counted'")
    if objective.reduction.microbatches is not None:
        raise invalid("a reduction without a ledger, as the step keeps one", repr(objective.reduction))
    programs = RequestPrograms(objective, require_transformation(optimizer))
    return RequestStep(programs, valid("microbatches", microbatches))

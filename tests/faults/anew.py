"""Training in which all processes restart from their saved windows when one is lost."""

from __future__ import annotations

from typing import Any

import numpy as np

import gradcombine as gc
from gradcombine import ledger, statefile
from gradcombine.reductions import Numbered
from tests.faults.bad_replicas import POLICIES, Replica
from tests.faults.training import (
    LOGICAL,
    MICROBATCHES,
    SCHEMES,
    WINDOWS,
    Engine,
    Log,
    Run,
    Scheme,
    begin,
    bits,
    digest,
    is_finite,
    microbatch,
    on_host,
    saved,
)


def train(engine: Engine, run: Run) -> str:
    """Runs one of several processes from the saved state of the run to its end."""
    scheme = SCHEMES[run.scheme]
    reduction, like = scheme.reduction, begin()
    acc = gc.accumulate(reduction, scheme.every, order=scheme.order)

    def add(state: Any, value: Any, number: Any, weight: Any) -> Any:
        return acc.update(Numbered(value, number), state, weight)

    # Exact sums would take seconds to compile for a few microbatches; NumPy gives the same bits.
    update = engine.compiled(add) if run.scheme == "tree" else add
    folder, log = run.folder, Log(run)
    replica = Replica(engine, run, log, acc, reduction)

    def counted(state: Any, window: int, number: int) -> Any:
        log(computed=[window, number])
        x, y, weight = microbatch(window, number, run.policy)
        gradients = replica.gradient(window, on_host(engine.gradient(params, x, y)))
        return on_host(update(state, gradients, np.int32(number), weight)), gradients, weight

    index, params, parts, _ = statefile.recover(folder, reduction, like, start=like)
    log.recovered(index, parts, acc)
    engine.wait_for_all()  # otherwise processes that start later would read what this one writes
    is_begun = saved(statefile.begin_window, folder, index, params)
    while index < WINDOWS:
        held, todo, assignment = shares(scheme, acc, parts, run)
        parts, is_left_out = {}, False
        while True:
            for holder, number in [(holder, number) for holder, numbers in todo.items() for number in numbers]:
                run.at("compute")
                params = replica.params(index, params)
                held[holder], gradients, weight = counted(held[holder], index, number)
                if (other := replica.number("doubled", index, held[holder], todo[holder])) is not None:
                    held[holder] = add(held[holder], gradients, np.int32(other), weight)
                if (other := replica.number("twice", index, held[holder], todo[holder])) is not None:
                    held[holder], *_ = counted(held[holder], index, other)
                run.at("save")
                is_begun = is_begun or saved(statefile.begin_window, folder, index, params)
                if not run.plant.startswith("saved-"):
                    is_saved = is_begun and log.save(index, holder, reduction, held[holder])
                    log.saved(index, held[holder], is_saved)
            run.at("merge")
            if run.plant == "saved-at-end":
                for holder, state in held.items():
                    log.save(index, holder, reduction, state)
            others = list(range(run.size))
            if run.policy in POLICIES:
                held[run.rank], params, others, is_left_out = replica.end(index, held[run.rank], params)
                if is_left_out:
                    break
            padding = max(map(len, assignment)) - len(held)
            merged = engine.merge(scheme, [*held.values(), *[acc.init(like)] * padding], assignment)
            account = ledger.read(merged)
            if not (run.policy and account.missing):
                break
            dealt = ledger.deal(account.missing, len(others))  # microbatches of dropped replicas
            todo = {run.rank: dealt[others.index(run.rank)] if run.rank in others else []}
        if is_left_out:
            log(skipped=index)
        else:
            combined = acc.value(merged)
            seen = held[min(held)] if held and run.plant == "skip-not-agreed" else merged
            is_kept = is_finite(acc.value(seen))
            if run.policy == "ledger":
                replica.require_once(index, merged, held)
            log(applied=index, missing=account.missing, doubled=account.doubled, bits=digest(combined), update=is_kept)
            ledger.require_once(merged)
            run.at("apply")
            if is_kept:
                params = on_host(engine.descend(params, combined))
        index += 1
        is_begun = saved(statefile.begin_window, folder, index, params)
        run.at("begin")
        if run.plant == "saved-after-update":
            for holder, state in held.items():
                log.save(index, holder, reduction, state)
    return bits(params)


def shares(scheme: Scheme, acc: Any, parts: dict[int, Any], run: Run) -> tuple[dict[int, Any], dict[int, Any], Any]:
    """This process's parts and pending microbatches by holder, and the assignment, which is equal on all processes."""
    if scheme.name == "tree":
        assignment = ledger.deal(range(LOGICAL), run.size)
        mine = assignment[run.rank]
        held = {logical: parts.get(logical, acc.init(begin())) for logical in mine}
        blocks = {logical: range(logical * scheme.every, (logical + 1) * scheme.every) for logical in mine}
        todo = {x: [n for n in blocks[x] if n not in ledger.read(held[x]).held] for x in mine}
        return held, todo, assignment
    # A process holds the part whose file it will replace; otherwise that part would be on no disk for a while.
    groups = [[parts[holder] for holder in parts if holder % run.size == rank] for rank in range(run.size)]
    has = [[n for part in group for n in ledger.read(part).held] for group in groups]
    missing = sorted(set(range(MICROBATCHES)) - {n for numbers in has for n in numbers})
    dealt = ledger.deal(missing, run.size, has)
    if run.plant == "dealt-twice" and missing:
        dealt = [sorted({*numbers, missing[0]}) for numbers in dealt]
    state = acc.init(begin())
    for part in groups[run.rank]:
        merged = scheme.reduction.merge(state.levels[0], part.levels[0])
        state = state._replace(levels=(merged,), step=state.step + part.step)
    return {run.rank: state}, {run.rank: dealt[run.rank]}, [[rank] for rank in range(run.size)]

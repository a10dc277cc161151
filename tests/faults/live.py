"""JAX processes that continue without lost ones and readmit them.

Every process runs the same loop: merge the live processes' windows; deal the microbatches that the merged ledger lacks
and compute them; apply a window when none is missing. A lost process takes its microbatches with it; one that returns
has no window and is dealt some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import gradcombine as gc
from gradcombine import ledger, statefile
from gradcombine.reductions import Numbered
from tests.faults.jax_engine import Processes, descend, gradient
from tests.faults.training import SCHEMES, WINDOWS, Log, Run, begin, bits, digest, is_finite, microbatch, on_host, saved

GROUPS = 16
"""Local devices of each process: Gloo cannot recreate a group of the same devices, so each group uses new ones."""


def join(addresses: Sequence[str], rank: int) -> None:
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_num_cpu_devices", GROUPS)
    jax.distributed.initialize(
        addresses[0], len(addresses), rank, initialization_timeout=30, heartbeat_timeout_seconds=5
    )


class Survivors(Processes):
    """The live processes, as a new group."""

    def __init__(self, devices: Sequence[Any]) -> None:
        known = multihost_utils.live_devices.devices
        # Equal on all of them; a process that returned has a new incarnation.
        group = sum(known[device] for device in devices) // GROUPS % GROUPS
        ranks = sorted({device.process_index for device in devices})
        super().__init__([[x for x in devices if x.process_index == rank][group] for rank in ranks])


def train(run: Run) -> str:
    """Runs one of several processes; with ``returns`` above 0, it rejoins the others."""
    scheme = SCHEMES["exact"]
    reduction, like, log = scheme.reduction, begin(), Log(run)
    acc = gc.accumulate(reduction, scheme.every)
    index, params, parts, _ = statefile.recover(run.folder, reduction, like, start=like)
    is_begun = False
    state, todo = reduction.init(like), list[int]()
    if run.returns == 0:  # All start together, and none writes before the first merge.
        log.recovered(index, parts, acc)
        for holder in parts:
            if holder % run.size == run.rank:
                state = reduction.merge(state, parts[holder].levels[0])
    while index < WINDOWS:
        for number in todo:
            run.at("compute")
            log(computed=[index, number])
            x, y, weight = microbatch(index, number)
            value = on_host(gradient(params, x, y))
            state = reduction.update(state, Numbered(value, np.int32(number)), weight)
            run.at("save")
            is_begun = is_begun or saved(statefile.begin_window, run.folder, index, params)
            window = acc.init(like)._replace(levels=(state,))
            log.saved(index, window, is_begun and log.save(index, run.rank, reduction, window))
        run.at("merge")
        todo = []
        try:
            with multihost_utils.live_devices(jax.devices()) as devices:
                survivors = Survivors(devices)
                (indices,) = survivors.all_gather([np.int32(index)])
                is_stale = index != indices.max()
                merged = gc.merge_replicas(reduction, reduction.clear(state) if is_stale else state, over=survivors)
        except multihost_utils.ProcessFailureError:
            continue
        run.at("merged")
        if is_stale:
            index, params, *_ = statefile.recover(run.folder, reduction, like, start=like)
            state = reduction.init(like)
            continue
        current = [rank for rank, its in zip(survivors.ranks, indices, strict=True) if its == index]
        missing = ledger.read(merged).missing
        if not missing:
            ledger.require_once(merged)
            combined = reduction.finalize(merged)
            update = is_finite(combined)
            doubled = ledger.read(merged).doubled
            log(applied=index, missing=missing, doubled=doubled, bits=digest(combined), update=update)
            run.at("apply")
            if update:
                params = on_host(descend(params, combined))
            index, state, missing = index + 1, reduction.init(like), range(scheme.every)
            is_begun = saved(statefile.begin_window, run.folder, index, params)
        todo = ledger.deal(missing, len(current))[current.index(run.rank)]
    return bits(params)

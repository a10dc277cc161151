"""Runs with random faults; each must count every microbatch once, have the right bits, and end in time."""

from __future__ import annotations

import ctypes
import functools
import itertools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from examples.survive_faults import supervise
from gradcombine import GradCombineError
from tests.faults import anew, bad_replicas, training
from tests.faults.plants import FAULTS, IN_LIBRARY
from tests.faults.strikes import DAMAGE, KINDS, QUIET, REPLICAS, Fault, damage, strike
from tests.faults.training import Engine, Run, Unbroken
from tests.faults.verdict import Outcome, examine
from tests.multi_process.processes import free_addresses

FORK: Any = multiprocessing.get_context("fork")
"""The framework is imported in this process but not started, so forking is cheap."""
REFUSED = 4
"""Exit code of a process in which the library raised: a restart cannot help."""
DEFECTS = (TypeError, NameError, AttributeError, LookupError, AssertionError)
"""Errors that no injected fault causes; a restart would hide them."""


class Plan(NamedTuple):
    """One run: the number of processes of each start, the faults, and a policy.

    With way ``"live"``, all faults strike the first start, but only the first fault of each process; the others go
    on. ``"checkpoint"``: TensorFlow's `AccumulatedStep` and tf.train.Checkpoint.
    """

    scheme: str
    sizes: tuple[int, ...]
    faults: tuple[Fault, ...]
    way: str = ""
    policy: str = ""


def draw_plan(rng: random.Random) -> Plan:
    """Up to three faults of any type, then a start without faults."""
    return with_faults(rng, [rng.choice((*KINDS, *REPLICAS)) for _ in range(rng.choice((1, 1, 2, 3)))])


def with_faults(rng: random.Random, kinds: Sequence[str]) -> Plan:
    """A run with these faults."""
    most, sizes = 48, [rng.randint(2, 4)]
    scheme, policy = rng.choice(("exact", "exact", "tree")), ""
    if any(kind in REPLICAS for kind in kinds):
        scheme, policy = "exact", rng.choice(bad_replicas.POLICIES)
        if "twice" in kinds:
            policy = "ledger"
            kinds = ["twice" if kind in REPLICAS else kind for kind in kinds]
        # A bad replica's saved part is only detected when its window ends: no other fault may come before.
        kinds = sorted(("kill" if kind in QUIET else kind for kind in kinds), key=lambda kind: kind in REPLICAS)
    faults = list[Fault]()
    for kind in kinds:
        size, start = sizes[-1], len(sizes) - 1
        if size == 1 and kind in ("shape", "stale", "doubled", "flipped"):
            kind = "nan"  # a single process cannot be compared with others
        # Two processes pass 11 places per window; a fault at a place that is never reached does not happen.
        faults.append(Fault(kind, rng.randrange(size), rng.randint(0, most // size), rng.random(), start))
        if kind not in QUIET:
            sizes.append(rng.choice((size, rng.randint(1, 4))))
    return Plan(scheme, tuple(sizes), tuple(faults), policy=policy)


def draw_for(plant: str, rng: random.Random, number: int) -> Plan:
    """A run with a planted defect, with faults that reveal a defect of the library."""
    if plant in IN_LIBRARY:
        first = number % len(FAULTS)
        return with_faults(rng, [FAULTS[(first + i) % len(FAULTS)] for i in range(rng.choice((2, 3)))])
    # Defects of the training show when processes restart from saved parts.
    plan = draw_plan(rng)
    return Plan("exact", plan.sizes, tuple(fault._replace(kind="kill") for fault in plan.faults))


def draw_live(rng: random.Random, plan: Plan) -> Plan:
    """The same faults in a run whose processes continue without lost ones; these return, except after a resize."""
    size = max(2, plan.sizes[0])
    faults = tuple(
        fault._replace(kind=_of_processes(fault.kind), rank=rng.randrange(size), after=fault.after // 2)
        for fault in plan.faults
    )
    return Plan("exact", (size,) * len(plan.sizes), faults, "live")


def plan_of_checkpoints(plan: Plan) -> Plan:
    """The same faults in a run whose workers save their windows in TensorFlow checkpoints."""
    # TensorFlow wrote the files, so damage other than truncation is not tested.
    own = {"flip": "cut", "stray": "kill"}
    faults = tuple(x._replace(kind=own.get(x.kind, _of_processes(x.kind))) for x in plan.faults)
    return Plan("exact", plan.sizes, faults, "checkpoint")


def _of_processes(kind: str) -> str:
    return "kill" if kind in REPLICAS else kind


def run_plan(
    plan: Plan,
    engine: Callable[[], Engine],
    unbroken: Callable[..., Unbroken],
    plant: str,
    patience: float,
    limit: float,
) -> Outcome:
    """Executes one run in a temporary directory and examines it."""
    outcome, begun = Outcome(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gradcombine-faults-") as name:
        try:
            run = run_live if plan.way == "live" else run_anew
            run(plan, Place(Path(name), engine, plant, outcome), patience, limit)
        except TimeoutError as error:
            outcome.late.append(str(error))
        except RefusedError:
            pass
        expected = functools.partial(unbroken, plan.scheme, plan.policy)
        examine(Path(name), expected, outcome, plan.policy, goes_on=plan.way == "live")
    outcome.seconds = time.monotonic() - begun
    return outcome


class RefusedError(Exception):
    """The library raised in a process: a restart cannot help."""


class Place(NamedTuple):
    """Directory, engine, planted defect and outcome of a run."""

    folder: Path
    engine: Callable[[], Engine]
    plant: str
    outcome: Outcome

    def start(
        self,
        plan: Plan,
        attempt: int,
        rank: int,
        addresses: Sequence[str],
        faults: Sequence[Fault],
        counters: Any,
        returns: int = 0,
    ) -> Any:
        """Starts one process. ``counters``: places passed by each process, then whether each waits for the others."""
        run = Run(
            self.folder,
            plan.scheme,
            attempt,
            rank,
            len(addresses),
            self.plant,
            lambda place: None,
            [],
            plan.policy,
            returns,
        )
        process = FORK.Process(target=work, args=(self.engine, run, plan.way, addresses, faults, counters))
        process.start()
        self.outcome.starts += 1
        return process


def run_anew(plan: Plan, place: Place, patience: float, limit: float) -> None:
    """Restarts all processes when one is lost."""
    ended: list[Any] = []

    def start(attempt: int) -> tuple[list[Any], Any]:
        require_not_refused(ended)
        size = plan.sizes[min(attempt, len(plan.sizes) - 1)]
        for fault in plan.faults:
            if fault.kind in DAMAGE and fault.start == attempt - 1:
                damage(place.folder, plan.way, plan.scheme, fault)
        faults = [[x for x in plan.faults if (x.start, x.rank) == (attempt, rank)] for rank in range(size)]
        addresses, counters = free_addresses(size), FORK.RawArray("q", 2 * size)
        ended[:] = [place.start(plan, attempt, rank, addresses, faults[rank], counters) for rank in range(size)]
        return ended, getting_on(counters, ended, patience)

    supervise(start, patience, limit)


def run_live(plan: Plan, place: Place, patience: float, limit: float) -> None:
    """Restarts a lost process, which the others admit; restarts all if the first one is lost, which leads."""
    deadline, size = time.monotonic() + limit, plan.sizes[0]
    for attempt in itertools.count():
        addresses, counters, returns = free_addresses(size), FORK.RawArray("q", 2 * size), 0
        faults = {fault.rank: fault for fault in reversed(plan.faults)} if attempt == 0 else {}
        processes = {
            rank: place.start(plan, attempt, rank, addresses, [faults[rank]] if rank in faults else [], counters)
            for rank in range(size)
        }
        progress, seen, until = getting_on(counters, processes.values(), patience), None, 0.0
        try:
            while processes[0].exitcode is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{limit} seconds were not enough: attempt {attempt + 1}, {returns} returns")
                wait([process.sentinel for process in processes.values() if process.exitcode is None], timeout=0.1)
                require_not_refused(processes.values())
                for rank, process in list(processes.items()):
                    if rank == 0 or not process.exitcode:
                        continue
                    fault = faults.pop(rank, None)
                    if fault is not None and fault.kind in DAMAGE:
                        damage(place.folder, plan.way, plan.scheme, fault)
                    del processes[rank]
                    if fault is None or fault.kind != "resize":
                        returns += 1
                        counters[size + rank] = 0
                        processes[rank] = place.start(plan, attempt, rank, addresses, [], counters, returns)
                if (now := progress()) != seen:
                    seen, until = now, time.monotonic() + patience
                elif time.monotonic() > until:  # kill the processes for which the others wait, or all
                    hangs = [process for rank, process in processes.items() if not counters[size + rank]]
                    for process in hangs or processes.values():
                        process.kill()
            if processes[0].exitcode == 0:
                return
        finally:
            for process in processes.values():
                process.kill()
                process.join()
        require_not_refused(processes.values())


def require_not_refused(processes: Iterable[Any]) -> None:
    if any(process.exitcode == REFUSED for process in processes):
        raise RefusedError


def getting_on(counters: Any, processes: Iterable[Any], patience: float) -> Callable[[], Any]:
    """A function whose value changes while processes make progress: places passed and, for a while, CPU time."""
    passed, since = list(counters), time.monotonic()

    def progress() -> Any:
        nonlocal passed, since
        if list(counters) != passed:
            passed, since = list(counters), time.monotonic()
        counts = time.monotonic() - since < 5 * patience
        return passed, [busy(process.pid) for process in processes] if counts else []

    return progress


def busy(pid: int) -> int:
    """CPU time of a process in half seconds: compiling on a busy machine is progress as well."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return (int(fields[11]) + int(fields[12])) * 2 // os.sysconf("SC_CLK_TCK")


def work(
    engine: Callable[[], Engine], run: Run, way: str, addresses: Sequence[str], faults: Any, counters: Any
) -> None:
    """The main function of a process, in a new session and with its output in a file."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with its parent
    name = f"{run.generation}-{run.returns}-{run.rank}"
    says = os.open(run.folder / f"says-{name}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(says, stream)
    passed, code = 0, 1

    def at(place: str) -> None:
        nonlocal passed
        counters[run.rank] += 1
        counters[run.size + run.rank] = 0
        for fault in faults:
            if passed == fault.after:
                strike(fault, run)
        counters[run.size + run.rank] = place == "merge"
        passed += 1

    try:
        IN_LIBRARY.get(run.plant, lambda: None)()
        if way == "live":
            from tests.faults import live as trainer

            trainer.join(addresses, run.rank)
            result = trainer.train(run._replace(at=at))
        else:
            lent = engine()
            lent.join(addresses, run.rank)
            if way == "checkpoint":
                from tests.faults import checkpoints

                result = checkpoints.train(lent, run._replace(at=at))  # pyright: ignore[reportArgumentType]
            else:
                result = anew.train(lent, run._replace(at=at))
            lent.wait_for_all()
        (run.folder / f"result-{name}").write_text(result)
        code = 0
        time.sleep(0.3 * (run.rank == 0))  # the first process leads: without it, the others abort
    except (GradCombineError, *DEFECTS) as error:
        (run.folder / f"refused-{name}").write_text(f"{type(error).__name__}: {error}")
        code = REFUSED
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)  # a regular exit would wait for the lost processes


class Campaign(NamedTuple):
    """Outcomes of all runs."""

    engine: str
    plans: list[Plan]
    outcomes: list[Outcome]

    @property
    def is_good(self) -> bool:
        return all(outcome.is_good for outcome in self.outcomes)

    def __str__(self) -> str:
        counted = {
            "microbatches lost": sum(len(x.lost) for x in self.outcomes),
            "doubled": sum(len(x.doubled) for x in self.outcomes),
            "computed again for no fault": sum(len(x.wasted) for x in self.outcomes),
            "runs with other bits": sum(bool(x.differs) for x in self.outcomes),
            "runs over time": sum(bool(x.late) for x in self.outcomes),
        }
        kinds = Counter(fault.kind for plan in self.plans for fault in plan.faults)
        drawn = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        again = sum(x.again for x in self.outcomes)
        struck = Counter(f"{kind} ({policy})" for x in self.outcomes for kind, policy in x.bad)
        bad = ", ".join(f"{how} {count}" for how, count in sorted(struck.items())) or "none"
        seconds = sorted(x.seconds for x in self.outcomes)
        return (
            f"{self.engine}: {len(self.outcomes)} runs, "
            + ", ".join(f"{name} {count}" for name, count in counted.items())
            + f"\n  faults drawn: {drawn}"
            + f"\n  bad replicas found: {bad}"
            + f"\n  processes started {sum(x.starts for x in self.outcomes)}, microbatches computed again {again}"
            + f"\n  seconds a run: median {seconds[len(seconds) // 2]:.1f}, longest {seconds[-1]:.1f}"
        )


def run_campaign(name: str, first: int, runs: int, seed: int, plant: str, limit: float, patience: float) -> Campaign:
    """Draws and executes runs; prints a line for each."""
    engine, campaign = engine_of(name), Campaign(name, [], [])

    @functools.cache
    def unbroken(scheme: str, policy: str, skipped: frozenset[int]) -> Unbroken:
        with FORK.Pool(1) as pool:  # the framework must not start in this process
            return pool.apply(reference, (engine, scheme, policy, skipped))

    for number in range(first, first + runs):
        rng = random.Random(f"{seed}.{number}")
        plan = draw_for(plant, rng, number) if plant else draw_plan(rng)
        if not plant and name == "jax" and number % 5 in (1, 3):
            plan = draw_live(random.Random(f"{seed}.{number}.live"), plan)
        elif not plant and name == "tensorflow" and number % 5 == 1:
            plan = plan_of_checkpoints(plan)
        outcome = run_plan(plan, engine, unbroken, plant, patience, limit)
        campaign.plans.append(plan)
        campaign.outcomes.append(outcome)
        faults = " ".join(f"{fault.kind}@{fault.rank}+{fault.after}" for fault in plan.faults)
        sizes = "-".join(map(str, plan.sizes))
        said = "; ".join(outcome.said) or "good"
        how = plan.way or plan.policy or plan.scheme
        print(f"{name} {seed}.{number} {how} {sizes} {faults}: {outcome.seconds:.1f} s, {said}", flush=True)
        if plant and not outcome.is_good:
            print(f"{name}: the planted defect {plant!r} was found in run {number - first + 1} of {runs}")
            break
    else:
        if plant:
            print(f"{name}: the planted defect {plant!r} was found in none of {runs} runs")
    return campaign


def reference(engine: Callable[[], Engine], *which: Any) -> Unbroken:
    return training.alone(engine(), *which)


def engine_of(name: str) -> Callable[[], Engine]:
    """Imports a framework, without starting it before the fork."""
    if name == "jax":
        from tests.faults.jax_engine import JaxEngine

        return JaxEngine
    from tests.faults.tensorflow_engine import TensorFlowEngine

    return TensorFlowEngine

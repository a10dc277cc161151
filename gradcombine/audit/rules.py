"""Rules that find defects in a compiled program or, where possible, in a TensorFlow graph."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from typing import Any, NamedTuple

from gradcombine.audit.flow import MOVING, Node
from gradcombine.audit.hlo import Instruction
from gradcombine.audit.program import Program
from gradcombine.audit.search import Search
from gradcombine.audit.subject import (
    COPIED,
    FEW_SCALARS,
    REDUCING,
    SHARE,
    Exchange,
    Fact,
    Shape,
    Subject,
    X,
    size_text,
    times,
)
from gradcombine.audit.tensorflow.graph import Graph

SMALL = 256 * 2**10
"""Most bytes of a collective whose time is dominated by latency."""

MANY = 16
"""Fewest small collectives per call that are reported."""


class Finding(NamedTuple):
    """A defect in a program.

    Attributes:
      name: of the defect, a section of ``findings.md``.
      what: description of this instance.
      source: ``file:line``; empty if unknown.
      times: occurrences per call.
      moved: unnecessary bytes moved in main memory, per call and device.
      sent: unnecessary bytes sent, per call and device.
      flops: unnecessary floating-point operations, per call and device.
    """

    name: str
    what: str
    source: str = ""
    times: int = 1
    moved: int = 0
    sent: float = 0.0
    flops: float = 0.0


class Rule(NamedTuple):
    """A rule, and the facts without which it may miss a defect; without "compiled", it cannot be checked at all."""

    check: Callable[[Any], Iterator[Finding]]
    needs: Set[Fact] = frozenset()


def find(program: Program | Graph, donated: Sequence[int] = ()) -> list[Finding]:
    """Applies all rules to a program.

    Args:
      program: the program.
      donated: indices of donated parameters, in addition to those that the program names.
    """
    subject = Search(program, donated) if isinstance(program, Program) else program
    return [finding for name in judged(program.unknown) for finding in RULES[name].check(subject)]


def judged(unknown: Collection[Fact]) -> tuple[str, ...]:
    """Names of the defects that can be checked without these facts."""
    return tuple(name for name, rule in RULES.items() if not ("compiled" in rule.needs and "compiled" in unknown))


def reduced_in_loop(subject: Subject[X]) -> Iterator[Finding]:
    for exchange, loop, size in sorted(subject.reduced, key=lambda x: x[1] is None):
        avoidable, share = exchange.times, size / (exchange.operand or 1)
        where = "in each call is only accumulated, and read in some later calls"
        if loop is not None:
            avoidable -= times(x for x in exchange.loops if not subject.accumulated(exchange, x)) if loop.trips else 0
            where = f"in {loop} is only accumulated in the loop"
        what = f"{size_text(size)} of " * (share < 1 - SHARE) + f"{exchange} {where}"
        sent = avoidable * share * exchange.sent()
        yield Finding("reduced-in-loop", what, subject.source(exchange.x), exchange.times, sent=sent)
    for exchanges, count, sent in subject.unrolled():
        first, *others = exchanges
        which = f"{first}, and {len(others)} more," if others else f"{count} arrays in one {first}"
        what = f"{which} are only added to each other"
        yield Finding("reduced-in-loop", what, subject.source(first.x), sum(x.times for x in exchanges), sent=sent)


def batch_gathered(search: Search) -> Iterator[Finding]:
    program, flow = search.program, search.flow
    dims = {shape.dims for shape in program.results}
    if not any(x.shapes and x.shapes[0].dims and x.shapes[0].dims in dims for x in program.parameters):
        return  # the model's parameters cannot be distinguished from data
    batch = set[Node]()
    for number, x in enumerate(program.parameters):
        node = flow.node(program.entry, x)
        sharded = flow.equality.classes(node) > 1
        if number not in search.aliased and sharded and x.bytes >= FEW_SCALARS and x.shapes[0].dims not in dims:
            batch.add(node)
    repeated = {flow.node(product.computation, product.x) for product in search.repeated()}
    state = [flow.node(program.entry, x) for x in program.parameters if x.shapes and x.shapes[0].dims in dims]
    # Without products, all devices repeat all work on gathered rows if none of them has a part of the state.
    repeats_all = not search.products and all(flow.equality.classes(node) == 1 for node in state)
    moving = MOVING | {"select", "dynamic-update-slice"}
    for exchange in program.exchanges:
        if exchange.negligible or exchange.kind not in ("all-gather", "all-reduce"):
            continue
        results = flow.leaves(exchange.computation, exchange.x)
        passed = search.moved_from((source for node in results for source in flow.sources[node]), moving)
        # An all-reduce gathers if each device writes its rows into an array of zeros.
        gathers = exchange.kind == "all-gather" or any(
            flow.opcode(x) in ("dynamic-update-slice", "select") for x in passed
        )
        # Row indices of a sharded table, and features over a model axis, are gathered on purpose: no work is repeated.
        if (origin := passed & batch) and gathers and (repeats_all or repeated & flow.reached(results)):
            names = sorted({flow.places[node].x.op_name or flow.places[node].x.name for node in origin})
            yield Finding(
                "batch-gathered",
                f"{exchange} gathers the rows of {', '.join(names)} on every device",
                search.source(exchange.x),
                exchange.times,
                sent=exchange.times * exchange.sent(),
            )


def repeated_work(search: Search) -> Iterator[Finding]:
    program, wasted = search.program, defaultdict[tuple[str, int, str], list[float]](list)
    for x in search.repeated():
        wasted[str(x.x.shapes[0]), x.classes, x.source].append(x.flops * (1 - x.classes / program.devices))
    if sum(map(sum, wasted.values())) <= SHARE * sum(product.flops for product in search.products):
        return
    for (shape, classes, where), flops in wasted.items():
        what = f"{len(flops)} products of {shape}: {program.devices} devices compute {classes} different results"
        yield Finding("repeated-work", what, where, len(flops), flops=sum(flops))


def optimizer_every_microbatch(subject: Subject[X]) -> Iterator[Finding]:
    """Reports state that is computed in every call, but kept unless a counter selects the new value."""
    if discarded := subject.discarded():
        moved = 2 * sum(size for _, size in discarded)
        what = f"{len(discarded)} {subject.noun} are computed in each call, but a counter decides whether they are used"
        yield Finding("optimizer-every-microbatch", what, subject.source(discarded[0][0]), len(discarded), moved=moved)


def donation_lost(search: Search) -> Iterator[Finding]:
    """Reports donated arguments whose buffers are not reused although a result of similar shape exists."""
    program = search.program
    free = [shape for i, shape in enumerate(program.results) if i not in program.aliases]
    lost = defaultdict[tuple[str, str, str], list[Instruction]](list)
    for number in sorted(search.donated - search.aliased):
        if number >= len(program.parameters):
            continue
        x = program.parameters[number]
        like = next((shape for shape in free if _resembles(shape, x.shapes[0])), None)
        if like is not None and x.bytes >= FEW_SCALARS:
            free.remove(like)
            lost[str(x.shapes[0]), str(like), search.source(x)].append(x)
    for (shape, like, source), arguments in lost.items():
        first, more = arguments[0].op_name or arguments[0].name, len(arguments) - 1
        which = f"{first} and {more} more, {shape}, are donated" if more else f"{first}, {shape}, is donated"
        what = f"{which}, but the matching result, {like}, does not reuse the memory"
        yield Finding("donation-lost", what, source, len(arguments), moved=sum(x.bytes for x in arguments))


def copies_at_boundary(search: Search) -> Iterator[Finding]:
    program, flow = search.program, search.flow
    copies = defaultdict[str, list[tuple[Instruction, int]]](list)
    for name, x, loops in program.executed():
        if x.opcode != "copy" or x.bytes < COPIED or len(x.shapes) != 1:
            continue
        computation = program.computations[name]
        if computation[x.operands[0]].shapes[0].layout != x.shapes[0].layout:
            continue
        source = program.origin(computation, x.operands[0])
        origin = computation[source.operands[0]] if source.opcode == "get-tuple-element" else source
        is_argument = origin.opcode == "parameter" and (name != program.entry or int(origin.inside) in search.donated)
        users = {flow.places[user].x.opcode for user in flow.uses[flow.node(name, x)]}
        enters = users & {"while", "conditional", "call", "tuple"} or x.root
        if origin.opcode in ("while", "conditional", "call") or (is_argument and enters):
            donated = name == program.entry and is_argument
            of = "donated arguments" if donated else "values that a loop or a branch carries"
            copies[of].append((x, times(loops)))
    total = sum(size for _, _, size, _ in program.work()) if copies else 0
    for of, copied in copies.items():
        moved = sum(2 * n * x.bytes for x, n in copied)
        if moved > SHARE * total:
            what = f"{len(copied)} copies of {of}, {size_text(sum(x.bytes for x, _ in copied))} in total"
            first = copied[0][0]
            yield Finding("copies-at-boundary", what, search.source(first), sum(n for _, n in copied), moved=moved)


def many_small_collectives(subject: Subject[X]) -> Iterator[Finding]:
    """Reports small exchanges of one type and group that could be merged, within a call or over a loop's iterations."""
    groups = defaultdict[tuple[object, ...], list[tuple[Exchange[X], int]]](list)
    for exchange in subject.exchanges:
        if not exchange.exact or exchange.size > SMALL or exchange.members == 1 or not subject.could_merge(exchange):
            continue
        count = 1
        for loop in reversed(exchange.loops):
            if not subject.only_accumulated(exchange, loop):
                break
            # A loop with an unknown trip count is assumed to run twice.
            count *= 2 if loop.trips is None else loop.trips
        if count > 1 or exchange.kind not in REDUCING or subject.merges_sums:
            groups[exchange.kind, exchange.reduction, *subject.merge_key(exchange)].append((exchange, count))
    for exchanges in groups.values():
        count = sum(n for _, n in exchanges)
        if count >= MANY:
            first = exchanges[0][0]
            size = sum(n * exchange.operand for exchange, n in exchanges)
            what = f"{count} {first.kind}s {first.over}, {size_text(size)} in total, that do not depend on each other"
            yield Finding("many-small-collectives", what, subject.source(first.x), count)


def wider_exchange(subject: Subject[X]) -> Iterator[Finding]:
    for exchange in subject.exchanges:
        if exchange.negligible:
            continue
        pairs = [(a, b) for a, b in subject.converted(exchange) if a.is_float and b.is_float and a.bits < b.bits]
        narrow, wide = (sum(shape.bytes for shape in side) for side in zip(*pairs, strict=True)) if pairs else (0, 0)
        if wide > narrow and wide * 2 > exchange.operand:
            what = f"{exchange} sends {', '.join(sorted({f'{a.kind} as {b.kind}' for a, b in pairs}))}"
            sent = exchange.times * exchange.sent() * min(1.0, (wide - narrow) / exchange.operand)
            yield Finding("wider-exchange", what, subject.source(exchange.x), exchange.times, sent=sent)


def narrow_accumulator(subject: Subject[X]) -> Iterator[Finding]:
    for loop in (*(loop for loop, _ in subject.loops()), None):
        if narrow := list(subject.narrow_sums(loop)):
            counts = Counter(str(shape) for shape, _ in narrow)
            shapes = ", ".join(f"{n} of {shape}" for shape, n in counts.items())
            what = f"{loop or 'each call'} accumulates in {shapes}: addends below half of the last bit are lost"
            yield Finding("narrow-accumulator", what, subject.source(narrow[0][1]), len(narrow))


def repeated_collective(subject: Subject[X]) -> Iterator[Finding]:
    seen = set[object]()
    for exchange in subject.exchanges:
        # Other collectives are inserted by the compiler, out of the user's control.
        if exchange.negligible or exchange.kind not in (*REDUCING, "all-gather"):
            continue
        operands, share, reason = subject.operand_key(exchange), 1.0, ""
        key = exchange.kind, exchange.reduction, operands
        if operands is not None and key in seen:
            reason = "of operands that an earlier one has already exchanged"
        elif exchange.kind != "reduce-scatter" and (size := subject.equal_bytes(exchange)):
            share = min(1.0, size / (exchange.operand or 1))
            reason = "of operands that an earlier one has made equal on all of these devices"
        if reason:
            sent = exchange.times * share * exchange.sent()
            what = f"{size_text(share * exchange.operand)} of " * (share < 1 - SHARE) + f"{exchange} {reason}"
            yield Finding("repeated-collective", what, subject.source(exchange.x), exchange.times, sent=sent)
        seen.add(key)


def unknown_trip_count(subject: Subject[X]) -> Iterator[Finding]:
    for loop, count in subject.loops():
        if loop.trips is None and (note := subject.counted_once(loop)):
            yield Finding("unknown-trip-count", f"{loop}{note}", subject.source(loop.operation), count)


RULES = {
    "reduced-in-loop": Rule(reduced_in_loop),
    "batch-gathered": Rule(batch_gathered, {"compiled", "shardings"}),
    "repeated-work": Rule(repeated_work, {"compiled", "shardings"}),
    "optimizer-every-microbatch": Rule(optimizer_every_microbatch),
    "donation-lost": Rule(donation_lost, {"compiled", "donation"}),
    "copies-at-boundary": Rule(copies_at_boundary, {"compiled"}),
    "many-small-collectives": Rule(many_small_collectives, {"exchanges"}),
    "wider-exchange": Rule(wider_exchange),
    "narrow-accumulator": Rule(narrow_accumulator),
    "repeated-collective": Rule(repeated_collective, {"exchanges", "shardings"}),
    "unknown-trip-count": Rule(unknown_trip_count),
}
"""Rules by the name of their findings, which are the sections of ``findings.md``."""


def _resembles(a: Shape, b: Shape) -> bool:
    """Whether two shapes may belong to one array with another dtype or sharding."""
    pairs = list(zip(a.dims, b.dims, strict=False))
    return len(a.dims) == len(b.dims) > 0 and all(m and n and (m % n == 0 or n % m == 0) for m, n in pairs)

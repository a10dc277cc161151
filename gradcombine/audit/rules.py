"""The defects that an audit knows by name, and how each is found in a compiled program."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gradcombine.audit.flow import LINEAR, MOVING, Node
from gradcombine.audit.hlo import Instruction, Loop, Shape, bits
from gradcombine.audit.program import Exchange, Program, size_text, times
from gradcombine.audit.search import FEW_SCALARS, REDUCING, SCALES, SHARE, SUMS, Search

SMALL = 256 * 2**10
"""Bytes of a collective that takes longer to begin than to run."""

MANY = 16
"""Small collectives of a call that could be one."""

COPIED = 1024
"""Bytes of an array from which on its copy counts."""

FLOATS = ("f", "bf")


class Finding(NamedTuple):
    """One defect.

    Attributes:
      name: of the kind, a section of ``findings.md``.
      what: where and what in this program.
      source: the line of source, ``file:line``; empty where the program does not tell.
      times: how often it happens in a call.
      moved: bytes that it moves needlessly in main memory in a call, on each device.
      sent: bytes that each device sends needlessly in a call.
      flops: operations that each device runs needlessly in a call.
    """

    name: str
    what: str
    source: str = ""
    times: int = 1
    moved: int = 0
    sent: float = 0.0
    flops: float = 0.0


def find(program: Program, donated: Sequence[int] = ()) -> list[Finding]:
    """All that is found in a program.

    Args:
      program: the program.
      donated: the numbers of the entry's parameters that the caller donates, beside those that the program names.
    """
    search = Search(program, frozenset(donated) | {alias.parameter for alias in program.aliases} | set(program.donors))
    return [finding for rule in RULES.values() for finding in rule(search)]


def reduced_in_loop(search: Search) -> Iterator[Finding]:
    def added(exchange: Exchange, size: float, where: str, spared: int) -> Finding:
        share = size / exchange.operand
        part = f"{size_text(size)} of " if share < 1 - SHARE else ""
        what, sent = f"{part}{_exchange(exchange)} {where}", spared * share * exchange.sent()
        return Finding("reduced-in-loop", what, search.source(exchange.x), exchange.times, sent=sent)

    for exchange, loop, size in search.reduced:
        spared = exchange.times - exchange.times // loop.trips if loop.trips else exchange.times
        yield added(exchange, size, f"in {_loop(loop)} is only added to what the loop carries", spared)
    beside = [x for x in search.program.exchanges if x.kind in REDUCING and x.members > 1 and not x.loops]
    gates = _gates(search) if beside else {}
    for exchange in beside if gates else ():
        size = sum(size for part, size in search.parts(exchange) if _waits(search, part, gates))
        if size >= max(FEW_SCALARS, SHARE * exchange.operand):
            yield added(exchange, size, "in each call is only added to what some later calls read", 1)


def batch_gathered(search: Search) -> Iterator[Finding]:
    program, flow = search.program, search.flow
    results = Counter(shape.dims for shape in program.results)
    if not any(x.shapes and x.shapes[0].dims and x.shapes[0].dims in results for x in program.parameters):
        return  # nothing tells parameters of a model from data
    aliased = {alias.parameter for alias in program.aliases}
    batch = set[Node]()
    for number, x in enumerate(program.parameters):
        node = flow.node(program.entry, x)
        sharded = flow.equality.classes(node) > 1
        if number not in aliased and sharded and x.bytes >= FEW_SCALARS and x.shapes[0].dims not in results:
            batch.add(node)
    repeated = {flow.node(product.computation, product.x) for product in search.repeated()}

    def repeats(exchange: Exchange) -> bool:
        """Whether devices compute the same of what was gathered."""
        return bool(repeated & flow.reached(search.nodes(exchange.computation, exchange.x), True, lambda _: True))

    moving = frozenset(MOVING | {"select", "dynamic-update-slice"})
    for exchange in program.exchanges:
        gathers = exchange.kind == "all-gather" or exchange.kind == "all-reduce"
        if not gathers or exchange.operand < FEW_SCALARS or exchange.members == 1:
            continue
        given = [flow.sources[node] for node in search.nodes(exchange.computation, exchange.x)]
        origin = search.moved_from([n for nodes in given for n in nodes], moving) & batch
        # A sum gathers where each device fills its own rows of zeros.
        starts = {flow.opcode(node) for nodes in given for node in search.moved_from(nodes, moving)}
        # Numbers of rows of a table are gathered where the table is split: that is how it is read.
        origin = {node for node in origin if _is_float(flow.places[node].shape)} or (
            origin if repeats(exchange) else ()
        )
        if origin and (exchange.kind == "all-gather" or starts & {"dynamic-update-slice", "select"}):
            names = sorted({flow.places[node].x.op_name or flow.places[node].x.name for node in origin})
            yield Finding(
                "batch-gathered",
                f"{_exchange(exchange)} brings the rows of {', '.join(names)} to every device",
                search.source(exchange.x),
                exchange.times,
                sent=exchange.times * exchange.sent(),
            )


def repeated_work(search: Search) -> Iterator[Finding]:
    program, wasted = search.program, defaultdict[tuple[str, int, str], list[float]](list)
    for x in search.repeated():
        wasted[str(x.x.shapes[0]), x.classes, x.source].append(x.flops * (1 - x.classes / program.devices))
    if sum(map(sum, wasted.values())) <= SHARE * search.flops:
        return
    for (shape, classes, where), flops in wasted.items():
        what = f"{len(flops)} products of {shape}: {program.devices} devices compute {classes} different results"
        yield Finding("repeated-work", what, where, len(flops), flops=sum(flops))


def optimizer_every_microbatch(search: Search) -> Iterator[Finding]:
    """Selects between a new value and the one that is kept, by what integers alone decide: a counter."""
    flow, kept = search.flow, dict[str, tuple[Instruction, int]]()
    entry = {search.flow.node(search.program.entry, x): i for i, x in enumerate(search.program.parameters)}
    aliased = {alias.parameter for alias in search.program.aliases}
    turned = dict[Node, set[Node]]()
    for loop, _ in search.loops():
        body = loop.instruction.called("body")[0]
        for n, result in zip(search.carried(body), flow.results(body), strict=True):
            turned[n] = search.moved_from([result], WHOLE)

    def returns(n: Node, x: Node, computed: set[Node], often: bool) -> bool:
        """Whether the next turn or call begins with what is selected: accumulators are cleared to arguments, too."""
        if n in turned:
            return x in turned[n]
        return n in entry and (entry[n] in aliased or often or not search.adds_up(computed, entry))

    predicates = dict[Node, bool]()
    for node, (_, x, _) in enumerate(flow.places):
        if x.opcode != "select" or not _is_float(x.shapes[0]) or x.bytes < FEW_SCALARS:
            continue
        (predicate,) = search.operands(node, 0)
        if predicate not in predicates:
            predicates[predicate] = _counts(search, predicate)
        if not predicates[predicate]:
            continue
        sides = [search.moved_from(search.operands(node, i), WHOLE) for i in (1, 2)]
        for side, other, chosen in ((*sides, "NE"), (*sides[::-1], "EQ")):
            computed = {flow.opcode(n) for n in other} & (SUMS | SCALES)
            same = {n for n in side - other if flow.places[n].shape.elements == x.shapes[0].elements}
            often = chosen == _compared(search, predicate)
            if computed and (same := {n for n in same if returns(n, node, other, often)}):
                origin = flow.places[min(same)]
                kept[f"{origin.computation}/{origin.x.name}/{origin.leaf}"] = (x, x.bytes)
    if kept:
        first = next(iter(kept.values()))[0]
        moved = 2 * sum(size for _, size in kept.values())
        what = f"{len(kept)} arrays are computed anew in each call, and a counter decides to keep the old ones"
        yield Finding("optimizer-every-microbatch", what, search.source(first), len(kept), moved=moved)


WHOLE = frozenset(MOVING - {"slice", "dynamic-slice", "concatenate", "pad", "all-gather", "all-to-all"})


def donation_lost(search: Search) -> Iterator[Finding]:
    """Donated arguments whose memory no result takes although one of their shape is there."""
    program = search.program
    taken = {alias.output[0] if alias.output else 0 for alias in program.aliases}
    free = [shape for i, shape in enumerate(program.results) if i not in taken]
    lost = defaultdict[tuple[str, str, str], list[Instruction]](list)
    for number in sorted(search.donated - {alias.parameter for alias in program.aliases}):
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
        what = f"{which}, but the result like it is {like} elsewhere"
        yield Finding("donation-lost", what, source, len(arguments), moved=sum(x.bytes for x in arguments))


def copies_at_boundary(search: Search) -> Iterator[Finding]:
    program, flow = search.program, search.flow
    found = dict[str, list[tuple[Instruction, int]]]()
    total = 0
    for name, x, loops in program.executed():
        total += times(loops) * program.traffic(name, x)
        if x.opcode != "copy" or x.bytes < COPIED or len(x.shapes) != 1:
            continue
        of = program.computations[name]
        if of[x.operands[0]].shapes[0].layout != x.shapes[0].layout:
            continue
        source = program.origin(of, x.operands[0])
        origin = of[source.operands[0]] if source.opcode == "get-tuple-element" else source
        given = origin.opcode == "parameter" and (name != program.entry or int(origin.inside) in search.donated)
        after = {flow.places[user].x.opcode for user in flow.uses[flow.node(name, x)]}
        bound = after & {"while", "conditional", "call", "tuple"} or x.root
        if origin.opcode in ("while", "conditional", "call") or (given and bound):
            kind = "a donated argument" if name == program.entry and given else "what a loop or a branch carries"
            found.setdefault(kind, []).append((x, times(loops)))
    for kind, copied in found.items():
        moved = sum(2 * n * x.bytes for x, n in copied)
        if moved > SHARE * total:
            what = f"{len(copied)} copies of {kind}, {size_text(sum(x.bytes for x, _ in copied))} in all"
            first = copied[0][0]
            yield Finding("copies-at-boundary", what, search.source(first), sum(n for _, n in copied), moved=moved)


def many_small_collectives(search: Search) -> Iterator[Finding]:
    """Exchanges of one kind and group that do not wait for one another, or that a loop repeats without using them."""
    alike = defaultdict[tuple[str, str, str, int], list[tuple[Exchange, int]]](list)
    told = [exchange.x for exchange, *_ in search.reduced]
    for exchange in search.program.exchanges:
        permutes = exchange.kind == "collective-permute"
        if exchange.size > SMALL or exchange.members == 1 or permutes or any(exchange.x is x for x in told):
            continue
        nodes = search.nodes(exchange.computation, exchange.x)
        count = 1
        for loop in reversed(exchange.loops):
            body = loop.instruction.called("body")[0]
            reached = search.linear(body, nodes)
            # A loop of unknown length turns at least twice, as far as is known.
            if reached is None or not reached <= search.accumulators(body) | _stacked(search, body):
                break
            count *= loop.trips or 1
        before = search.flow.reached(nodes, False, lambda _: True, search.inside(exchange.computation))
        depth = sum(
            bool(before.intersection(search.nodes(other.computation, other.x)))
            for other in search.program.exchanges
            if other.computation == exchange.computation and other.x is not exchange.x and other.kind == exchange.kind
        )
        # On CPUs XLA leaves sums apart that it exchanges together elsewhere.
        if count > 1 or exchange.kind not in REDUCING or not search.program.for_cpu:
            alike[exchange.computation, exchange.kind, str(exchange.groups), depth].append((exchange, count))
    for exchanges in alike.values():
        count = sum(n for _, n in exchanges)
        if count >= MANY:
            first = exchanges[0][0]
            size = sum(n * exchange.operand for exchange, n in exchanges)
            which = f"{count} {first.kind}s over {first.members} devices"
            what = f"{which}, {size_text(size)} in all, none of which needs another"
            yield Finding("many-small-collectives", what, search.source(first.x), count)


def wider_exchange(search: Search) -> Iterator[Finding]:
    flow = search.flow
    through = frozenset(MOVING - {"convert", "all-gather", "collective-permute", "all-to-all", "while"})
    for exchange in search.program.exchanges:
        # What XLA widens because it has no narrower collective on a machine is not the program's.
        promoted = any(name.endswith("_promoted") for name in exchange.x.called("to_apply"))
        promoted |= exchange.kind not in REDUCING and search.program.for_cpu
        if exchange.operand < FEW_SCALARS or exchange.members == 1 or promoted:
            continue
        name, wide, narrow = exchange.computation, 0, 0
        kinds = set[str]()
        for operand in exchange.x.operands:
            given = search.program.computations[name][operand]
            for node in search.moved_from([flow.node(name, given)], through):
                place = flow.places[node]
                if place.x.opcode != "convert":
                    continue
                before = flow.places[search.operands(node, 0)[0]].shape
                if _is_float(before) and _is_float(place.shape) and bits(before.kind) < bits(place.shape.kind):
                    wide, narrow = wide + place.shape.bytes, narrow + before.bytes
                    kinds.add(f"{before.kind} as {place.shape.kind}")
        if wide > narrow and wide * 2 > exchange.operand:
            what = f"{_exchange(exchange)} sends {', '.join(sorted(kinds))}"
            share = (wide - narrow) / exchange.operand
            sent = exchange.times * exchange.sent() * min(1.0, share)
            yield Finding("wider-exchange", what, search.source(exchange.x), exchange.times, sent=sent)


def narrow_accumulator(search: Search) -> Iterator[Finding]:
    for loop, _ in search.loops():
        body = loop.instruction.called("body")[0]
        narrow = Counter[str]()
        for i in sorted(search.accumulators(body)):
            shape = search.flow.places[search.carried(body)[i]].shape
            if _is_float(shape) and bits(shape.kind) < 32:
                narrow[str(shape)] += 1
        if narrow:
            shapes = ", ".join(f"{n} of {shape}" for shape, n in narrow.items())
            what = f"{_loop(loop)} adds into {shapes}: what is smaller than its last bit is lost"
            yield Finding("narrow-accumulator", what, search.source(loop.instruction), sum(narrow.values()))


def repeated_collective(search: Search) -> Iterator[Finding]:
    flow, program = search.flow, search.program
    seen = dict[tuple[object, ...], Exchange]()
    through = frozenset(LINEAR | SCALES | REDUCING)
    for exchange in program.exchanges:
        # Parts are sent around by the compiler alone, which a program cannot help.
        asked = exchange.kind in REDUCING or exchange.kind == "all-gather"
        if exchange.operand < FEW_SCALARS or exchange.members == 1 or not asked:
            continue
        of = program.computations[exchange.computation]
        origins = tuple(program.origin(of, operand).name for operand in exchange.x.operands)
        shapes = tuple(of[operand].shapes[0].dims for operand in exchange.x.operands)
        how = exchange.x.lists("dimensions"), str(exchange.groups), shapes
        key = (exchange.computation, exchange.kind, how, origins)
        sent = exchange.times * exchange.sent()
        if key in seen:
            what = f"{_exchange(exchange)} of what an earlier one exchanged already"
            yield Finding("repeated-collective", what, search.source(exchange.x), exchange.times, sent=sent)
        elif exchange.kind in ("all-reduce", "all-gather"):
            given = [n for node in search.nodes(exchange.computation, exchange.x) for n in flow.sources[node]]
            equal = all(flow.equality.within(node, exchange.groups) for node in given)
            earlier = search.moved_from(given, through) if equal else set[Node]()
            if any(
                other.x is not exchange.x
                and other.groups == exchange.groups
                and earlier.intersection(search.nodes(other.computation, other.x))
                for other in program.exchanges
            ):
                what = f"{_exchange(exchange)} of what an earlier one has made the same on all of them"
                yield Finding("repeated-collective", what, search.source(exchange.x), exchange.times, sent=sent)
        seen[key] = exchange


def unknown_trip_count(search: Search) -> Iterator[Finding]:
    for loop, loops in search.loops():
        if loop.trips is None:
            body = loop.instruction.called("body")[0]
            inner = list(search.program.executed(body))
            moved = sum(search.program.traffic(name, x) for name, x, _ in inner)
            # What lies in a TPU's fast memory moves nothing.
            if moved >= COPIED or any(True for name, x, _ in inner for _ in search.program.products(name, x)):
                what = f"{_loop(loop)} is counted as one turn, of {size_text(moved)}"
                yield Finding("unknown-trip-count", what, search.source(loop.instruction), times(loops))


RULES: dict[str, Callable[[Search], Iterator[Finding]]] = {
    "reduced-in-loop": reduced_in_loop,
    "batch-gathered": batch_gathered,
    "repeated-work": repeated_work,
    "optimizer-every-microbatch": optimizer_every_microbatch,
    "donation-lost": donation_lost,
    "copies-at-boundary": copies_at_boundary,
    "many-small-collectives": many_small_collectives,
    "wider-exchange": wider_exchange,
    "narrow-accumulator": narrow_accumulator,
    "repeated-collective": repeated_collective,
    "unknown-trip-count": unknown_trip_count,
}
"""By the names that findings have; each is a section of ``findings.md``."""


def _gates(search: Search) -> dict[Node, list[tuple[set[Node], set[Node]]]]:
    """Where a counter decides in a call what becomes of arrays, and what a result there is and is instead.

    These are selects, products with a flag, and conditionals, of whose branches the arguments have no such result.
    """
    flow, found, decides = search.flow, dict[Node, list[tuple[set[Node], set[Node]]]](), dict[Node, bool]()
    for node, (_, x, leaf) in enumerate(flow.places):
        if x.opcode not in ("select", "conditional", "multiply") or not _is_float(x.shapes[leaf]):
            continue
        if x.opcode == "multiply":
            for i in (0, 1):
                flags = search.moved_from(search.operands(node, 1 - i), WHOLE | {"broadcast"})
                if any(_is_flag(search, n) for n in flags):
                    found[node] = [(search.moved_from(search.operands(node, i), WHOLE), set())]
            continue
        (predicate, *_) = search.operands(node, 0)
        if predicate not in decides:
            decides[predicate] = _counts(search, predicate)
        if not decides[predicate]:
            continue
        if x.opcode == "select":
            given = [search.operands(node, i) for i in (1, 2)]
        else:
            branches = search.program.bodies(x)
            given = [flow.results(name)[leaf : leaf + 1] for name in branches]
            for name in branches:
                arguments = [y for y in search.program.computations[name].values() if y.opcode == "parameter"]
                found.update((argument, []) for y in arguments for argument in search.nodes(name, y))
        if len(given) == 2:
            a, b = (search.moved_from(side, WHOLE) for side in given)
            found[node] = [(a, b), (b, a)]
    return found


def _is_flag(search: Search, node: Node) -> bool:
    """Whether this is a number that counters alone decide, 0 by one of their decisions."""
    x, shape = search.flow.places[node].x, search.flow.places[node].shape
    if shape.dims or not _is_float(shape):
        return not shape.dims and _counts(search, node)
    sides = [search.moved_from(search.operands(node, i), WHOLE) for i in (1, 2)] if x.opcode == "select" else []
    zeros = [n for side in sides for n in side if search.flow.opcode(n) == "constant"]
    nothing = any(float(search.flow.places[n].x.inside) == 0 for n in zeros)
    return nothing and _counts(search, search.operands(node, 0)[0])


def _waits(search: Search, part: Node, gates: dict[Node, list[tuple[set[Node], set[Node]]]]) -> bool:
    """Whether calls only add this to an argument, and where a counter says so anything else is made of it."""
    flow, program = search.flow, search.program
    reached = flow.reached([part], True, lambda node: node not in gates)
    if any(node in reached and node not in gates for node in flow.results(program.entry)):
        return False
    held = {flow.node(program.entry, x): x.shapes[0].elements for x in program.parameters}
    for side, other in (pair for gate in reached & gates.keys() for pair in gates[gate]):
        for node in side & reached:
            if flow.opcode(node) in SUMS and search.only_sums(node, part, reached):
                before = search.moved_from([n for i in (0, 1) for n in search.operands(node, i)], WHOLE)
                if any(held.get(n) == flow.places[node].shape.elements for n in before - other):
                    return True
    return False


def _counts(search: Search, predicate: Node) -> bool:
    """Whether integers alone decide: no value of any float is among what it depends on."""
    flow, closure = search.flow, search.closure(predicate)
    shapes = [flow.places[node].shape for node in closure if flow.places[node].x.shapes]
    scalar = any(not shape.dims and shape.kind == "pred" for shape in shapes)
    held = any(flow.places[node].x.opcode == "parameter" for node in closure)
    exchanged = any(flow.places[node].x.collective for node in closure)
    return scalar and held and not exchanged and not any(_is_float(shape) for shape in shapes)


def _compared(search: Search, predicate: Node) -> str:
    """The direction of the comparison that a predicate is; empty for any other one."""
    found = [search.flow.places[n].x for n in search.moved_from([predicate], WHOLE | {"broadcast"})]
    return "".join(x.attributes.partition("direction=")[2][:2] for x in found if x.opcode == "compare")


def _stacked(search: Search, body: str) -> set[int]:
    """The carried arrays of a loop of which each iteration writes one row."""
    found = set[int]()
    for i, (node, result) in enumerate(zip(search.carried(body), search.flow.results(body), strict=True)):
        nodes = search.flow.reached([node], True, lambda _: True, search.inside(body))
        written = search.moved_from([result], frozenset(MOVING))
        kinds = {search.flow.opcode(n) for n in written}
        others = {j for j, other in enumerate(search.flow.results(body)) if other in nodes}
        if "dynamic-update-slice" in kinds and others <= {i}:
            found.add(i)
    return found


def _is_float(shape: Shape) -> bool:
    return shape.kind.startswith(FLOATS)


def _resembles(a: Shape, b: Shape) -> bool:
    """Whether one may be the other in another type, or with other parts of its axes on a device."""
    pairs = list(zip(a.dims, b.dims, strict=False))
    return len(a.dims) == len(b.dims) > 0 and all(m and n and (m % n == 0 or n % m == 0) for m, n in pairs)


def _exchange(exchange: Exchange) -> str:
    return f"{exchange.kind} of {size_text(exchange.size)} over {exchange.members} devices"


def _loop(loop: Loop) -> str:
    return f"a loop of {'an unknown number of' if loop.trips is None else loop.trips} turns"

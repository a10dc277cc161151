"""The defects that an audit knows by name, and how those of them that a graph tells are found in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from gradcombine.audit.hlo import bits
from gradcombine.audit.program import Exchange, size_text, times
from gradcombine.audit.rules import COPIED, MANY, SMALL, Finding
from gradcombine.audit.search import FEW_SCALARS
from gradcombine.audit.tensorflow.graph import LINEAR, OF_FIRST, REDUCING, SELECTS, Graph
from gradcombine.audit.tensorflow.inlined import WRITES, Operation, Turning, Value

Place = Turning | None
"""A loop; None for the calls of the graph, one after another."""


def find(graph: Graph) -> list[Finding]:
    """All that is found in a graph."""
    return [finding for rule in RULES.values() for finding in rule(graph)]


def reduced_in_loop(graph: Graph) -> Iterator[Finding]:
    for x, exchange, turning in _reduced(graph):
        if turning is None:
            where = "in each call is only added to what a later call reads under a condition"
            sent = exchange.times * exchange.sent()
        else:
            where = f"in {_loop(turning)} is only added to what the loop keeps"
            around = times(tuple(loop for loop in x.loops if loop is not turning.loop))
            sent = (exchange.times - (around if turning.trips else 0)) * exchange.sent()
        yield Finding("reduced-in-loop", f"{_text(exchange)} {where}", graph.line(x), exchange.times, sent=sent)
    alike = defaultdict[tuple[object, ...], dict[Operation, Exchange]](dict)
    told = [x for x, _, _ in _reduced(graph)]
    for x, exchange in graph.exchanging:
        few = exchange.exact and exchange.operand < FEW_SCALARS
        if exchange.kind in REDUCING and not few and exchange.members > 1 and x not in told:
            for part in graph.parts(x):
                for last in graph.sums_of(part)[-1:]:
                    alike[graph.key(x), last][x] = exchange
    for group in {tuple(found): found for found in alike.values() if len(found) > 1}.values():
        (first, exchange), *others = group.items()
        what = f"{_text(exchange)}, and {len(others)} more, are only added to each other"
        sent = sum(e.times * e.sent() for _, e in others)
        yield Finding("reduced-in-loop", what, graph.line(first), sum(e.times for e in group.values()), sent=sent)


def optimizer_every_microbatch(graph: Graph) -> Iterator[Finding]:
    """Variables that are computed anew, and keep what they held where a counter says so."""
    found = list[tuple[Operation, int]]()
    for x in graph.operations:
        array = graph.arrays[x.inputs[1]] if x.op in WRITES else None
        if array is None or not array.is_float or (array.exact and array.shape.bytes < FEW_SCALARS):
            continue
        handle = graph.variable(x)
        for decision, (a, b), branches in _choices(graph, x.inputs[1]):
            kept = [any(_reads(graph, v, handle) for v in graph.moved_from([side])) for side in (a, b)]
            made = [_is_computed(graph, side, handle, branches, x) for side in (a, b)]
            if any(a and b for a, b in zip(kept, made[::-1], strict=True)) and _counts(graph, decision):
                found.append((x, array.shape.bytes))
                break
    devices = {x.device for x, _ in found}
    found = [(x, size) for x, size in found if x.device == min(devices)]
    if found:
        moved = 2 * sum(times(x.loops) * size for x, size in found)
        what = f"{len(found)} variables are computed anew in each call, and a counter decides to keep the old ones"
        yield Finding("optimizer-every-microbatch", what, graph.line(found[0][0]), len(found), moved=moved)


def many_small_collectives(graph: Graph) -> Iterator[Finding]:
    """Exchanges of one kind and group that do not wait for one another, or that a loop repeats without using them."""
    alike = defaultdict[tuple[object, ...], list[tuple[Operation, Exchange, int]]](list)
    told = [x for x, _, _ in _reduced(graph)]
    outputs = {v for x, _ in graph.exchanging for v in x.outputs}
    for x, exchange in graph.exchanging:
        if not exchange.exact or exchange.size > SMALL or exchange.members == 1 or x in told:
            continue
        count = 1
        for turning in reversed(x.site.turns):
            sums = graph.sums(x.outputs, turning)
            if sums is None or not all(_adds_only(graph, i, turning) for i in sums.carried):
                break
            if any(not _adds_to(graph, handle, turning) for handle in sums.variables):
                break
            # A loop of unknown length turns at least twice, as far as is known.
            count *= turning.trips if turning.trips is not None else 2
        before = len(graph.closure(graph.given(x)) & outputs)
        alike[x.site, exchange.kind, graph.key(x), before].append((x, exchange, count))
    for exchanges in alike.values():
        count = sum(n for _, _, n in exchanges)
        if count >= MANY:
            first, exchange, _ = exchanges[0]
            size = sum(n * e.operand for _, e, n in exchanges)
            which = f"{count} {exchange.kind}s {_over(exchange)}"
            what = f"{which}, {size_text(size)} in all, none of which needs another"
            yield Finding("many-small-collectives", what, graph.line(first), count)


def wider_exchange(graph: Graph) -> Iterator[Finding]:
    for x, exchange in graph.exchanging:
        wide, narrow, kinds = 0, 0, set[str]()
        for v in graph.moved_from(graph.given(x)):
            cast = graph.producers.get(v)
            if cast is None or cast.op != "Cast":
                continue
            before, after = graph.arrays[cast.inputs[0]], graph.arrays[v]
            if before.is_float and after.is_float and bits(before.kind) < bits(after.kind):
                wide, narrow = wide + after.shape.bytes, narrow + before.shape.bytes
                kinds.add(f"{before.kind} as {after.kind}")
        few = exchange.exact and exchange.operand < FEW_SCALARS
        if not few and exchange.members > 1 and wide > narrow and wide * 2 > exchange.operand:
            share = min(1.0, (wide - narrow) / exchange.operand)
            what = f"{_text(exchange)} sends {', '.join(sorted(kinds))}"
            sent = exchange.times * exchange.sent() * share
            yield Finding("wider-exchange", what, graph.line(x), exchange.times, sent=sent)


def narrow_accumulator(graph: Graph) -> Iterator[Finding]:
    for turning in graph.turnings:
        if turning.trips is not None and turning.trips < 2:
            continue
        narrow = [graph.arrays[v] for v in turning.carried]
        shapes = [str(a.shape) for i, a in enumerate(narrow) if _is_narrow(a.kind) and _adds_only(graph, i, turning)]
        shapes += [_held(graph, handle) for handle in _narrow_variables(graph) if _adds_to(graph, handle, turning)]
        yield from _narrow(shapes, _loop(turning), turning.source)
    lasting = [handle for handle in _narrow_variables(graph) if _adds_to(graph, handle, None)]
    lines = [graph.line(x) for handle in lasting for x in graph.touching[handle] if x.op in WRITES]
    yield from _narrow([_held(graph, handle) for handle in lasting], "each call", "".join(lines[:1]))


def repeated_collective(graph: Graph) -> Iterator[Finding]:
    seen = dict[tuple[object, ...], Operation]()
    for x, exchange in graph.exchanging:
        small = exchange.exact and exchange.operand < FEW_SCALARS
        if small or exchange.members == 1 or exchange.kind not in (*REDUCING, "all-gather"):
            continue
        given, key = graph.given(x), (exchange.kind, graph.key(x))
        origins = tuple(tuple(sorted(graph.origins(v))) for v in given)
        sent = exchange.times * exchange.sent()
        if (key, origins) in seen and all(len(found) == 1 for found in origins):
            what = f"{_text(exchange)} of what an earlier one exchanged already"
            yield Finding("repeated-collective", what, graph.line(x), exchange.times, sent=sent)
        elif exchange.kind != "reduce-scatter":
            earlier = graph.made_equal(x)
            passed = graph.moved_from(given, linear=True) & earlier
            if passed and graph.equal_on_all(x, earlier):
                what = f"{_text(exchange)} of what an earlier one has made the same on all of them"
                yield Finding("repeated-collective", what, graph.line(x), exchange.times, sent=sent)
        seen[key, origins] = x


def unknown_trip_count(graph: Graph) -> Iterator[Finding]:
    for turning in graph.turnings:
        if turning.trips is not None:
            continue
        arrays = [graph.arrays[v] for x in graph.inside(turning) for v in x.outputs]
        made = sum(array.shape.bytes for array in arrays)
        if made >= COPIED or any(array.kind and not array.exact for array in arrays):
            what = f"{_loop(turning)}, {turning.operation.name}, is counted as one turn"
            yield Finding("unknown-trip-count", what, turning.source, times(turning.operation.loops))


RULES: dict[str, Callable[[Graph], Iterator[Finding]]] = {
    "reduced-in-loop": reduced_in_loop,
    "optimizer-every-microbatch": optimizer_every_microbatch,
    "many-small-collectives": many_small_collectives,
    "wider-exchange": wider_exchange,
    "narrow-accumulator": narrow_accumulator,
    "repeated-collective": repeated_collective,
    "unknown-trip-count": unknown_trip_count,
}
"""By the names that findings have. The others need what a graph does not tell: layouts, buffers, equal replicas."""


def _reduced(graph: Graph) -> list[tuple[Operation, Exchange, Place]]:
    """The exchanges of gradients that a loop, or calls, only add up."""
    found = list[tuple[Operation, Exchange, Place]]()
    for x, exchange in graph.exchanging:
        few = exchange.exact and exchange.operand < FEW_SCALARS
        if exchange.kind not in REDUCING or few or exchange.members == 1:
            continue
        for turning in (*x.site.turns, None):
            if turning is not None and turning.trips == 1:
                continue
            parts = [v for v in graph.parts(x) if graph.arrays[v].shape.bytes >= FEW_SCALARS or not exchange.exact]
            if any(_only_added(graph, [v], turning, x) for v in parts):
                found.append((x, exchange, turning))
                break
    return found


def _only_added(graph: Graph, values: list[Value], turning: Place, x: Operation) -> bool:
    sums = graph.sums(values, turning)
    if sums is None or not (sums.carried or sums.variables):
        return False
    carried = all(turning is not None and _adds_only(graph, i, turning) for i in sums.carried)
    return carried and all(_adds_to(graph, handle, turning, x) for handle in sums.variables)


def _adds_only(graph: Graph, index: int, turning: Turning) -> bool:
    """Whether each turn only adds to what a loop carries there."""
    if not graph.arrays[turning.carried[index]].is_float:
        return False
    sums = graph.sums([turning.carried[index]], turning)
    return sums is not None and sums.added and sums.carried == {index} and not sums.variables


def _adds_to(graph: Graph, handle: Value, turning: Place, beside: Operation | None = None) -> bool:
    """Whether each turn, or each call, only adds to a variable; what calls add to, a branch reads and clears."""
    inside = [x for x in graph.touching.get(handle, ()) if turning is None or turning in x.site.turns]
    made = graph.producers.get(handle)
    if turning is not None and made is not None and turning in made.site.turns:
        return False
    around = set(beside.site.branches if beside is not None else ())
    always = [x for x in inside if set(x.site.branches) <= around]
    reads = [x for x in always if x.op == "ReadVariableOp" and not (turning is None and _is_for_branches(graph, x))]
    cleared = [x for x in inside if x.op == "AssignVariableOp" and _clears(graph, x, handle)] if turning is None else []
    if turning is None and not (cleared and _is_read_in_branch(graph, inside, around)):
        return False
    added, through = any(x.op in ("AssignAddVariableOp", "AssignSubVariableOp") for x in inside), set[Value]()
    for x in reads:
        sums = graph.sums(x.outputs, turning)
        if sums is None or sums.carried or sums.variables - {handle}:
            return False
        added, through = added or sums.added, through | sums.values
    for x in always if turning is None else inside:
        if x.op == "AssignVariableOp" and x.inputs[1] not in through and x not in cleared:
            return turning is None and any(_reads(graph, v, handle) for v in graph.closure([x.inputs[1]]))
        if x.op not in (*WRITES, "ReadVariableOp", "VariableShape", "VarIsInitializedOp"):
            return False
    return added or bool(cleared)


def _is_for_branches(graph: Graph, read: Operation) -> bool:
    """Whether only branches use what is read."""
    seen, waiting = set[Value](), list(read.outputs)
    while waiting:
        v = waiting.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in graph.escaping:
            return False
        waiting += graph.targets.get(v, ())
        for x in graph.uses.get(v, ()):
            if set(x.site.branches) <= set(read.site.branches):
                if x.op != "Identity":
                    return False
                waiting += x.outputs
    return True


def _is_read_in_branch(graph: Graph, touching: Iterable[Operation], around: set[tuple[int, int]]) -> bool:
    def used(x: Operation) -> bool:
        return any(graph.uses.get(v) or graph.targets.get(v) for v in x.outputs)

    reads = [x for x in touching if x.op == "ReadVariableOp" and used(x)]
    return any(not set(x.site.branches) <= around or _is_for_branches(graph, x) for x in reads)


def _clears(graph: Graph, x: Operation, handle: Value) -> bool:
    """Whether a variable gets, in a branch, what is not made of what it held."""
    given = graph.moved_from(x.inputs[1:2])
    choices = [side for v in given if v in graph.chosen for side in graph.chosen[v][1]]
    sides = choices or (x.inputs[1:2] if x.site.branches else [])
    return any(not any(_reads(graph, v, handle) for v in graph.moved_from([side], linear=True)) for side in sides)


def _reads(graph: Graph, v: Value, handle: Value | None) -> bool:
    x = graph.producers.get(v)
    return x is not None and x.op == "ReadVariableOp" and handle is not None and graph.variable(x) == handle


def _choices(graph: Graph, value: Value) -> Iterator[tuple[Value, list[Value], int | None]]:
    """The selects and conditionals that a value comes from: what decides, both sides, and how deep branches are."""
    for v in graph.moved_from([value]):
        x = graph.producers.get(v)
        if x is not None and x.op in SELECTS:
            yield x.inputs[0], x.inputs[1:], None
        elif v in graph.chosen and len(graph.chosen[v][1]) == 2:
            decision, sides = graph.chosen[v]
            yield decision, sides, 1


def _is_computed(graph: Graph, side: Value, handle: Value | None, branches: int | None, at: Operation) -> bool:
    """Whether a side of a choice is computed whether it is chosen or not."""
    if branches is not None:
        # What a branch computes by itself runs only there: what it hands on is computed outside.
        made = [graph.producers.get(v) for v in graph.origins(side)]
        if any(x is None or not set(x.site.branches) <= set(at.site.branches) for x in made):
            return False
    computed = graph.moved_from([side])
    sums = (graph.producers.get(v) for v in computed)
    if any(x is not None and (x.op in LINEAR or x.op in OF_FIRST) for x in sums):
        return True
    # What the variable was before a select, and what it is after it was written.
    written = [x for x in graph.touching.get(handle or -1, ()) if x.op in WRITES and x is not at]
    return any(_reads(graph, v, handle) for v in computed) and any(
        set(x.site.branches) <= set(at.site.branches) for x in written
    )


def _counts(graph: Graph, decision: Value) -> bool:
    """Whether integers alone decide, of which one is kept or given."""
    closure = graph.closure([decision])
    kinds = [graph.arrays[v] for v in closure]
    held = any(x.op in ("ReadVariableOp", "Placeholder") for v in closure if (x := graph.producers.get(v)))
    return held and not any(array.is_float for array in kinds)


def _narrow_variables(graph: Graph) -> list[Value]:
    """Handles of variables in a narrow type that are written: of those that each device has, the first one's."""
    written = {h: x for h, xs in graph.touching.items() for x in xs if x.op in WRITES}
    narrow = {h: x for h, x in written.items() if _is_narrow(graph.arrays[x.inputs[1]].kind)}
    first = min((x.device for x in narrow.values()), default="")
    return [handle for handle, x in narrow.items() if x.device == first]


def _held(graph: Graph, handle: Value) -> str:
    return next(str(graph.arrays[x.inputs[1]].shape) for x in graph.touching[handle] if x.op in WRITES)


def _narrow(shapes: list[str], where: str, source: str) -> Iterator[Finding]:
    if shapes:
        counted = ", ".join(f"{shapes.count(shape)} of {shape}" for shape in dict.fromkeys(shapes))
        what = f"{where} adds into {counted}: what is smaller than its last bit is lost"
        yield Finding("narrow-accumulator", what, source, len(shapes))


def _is_narrow(kind: str) -> bool:
    return kind.startswith(("f", "bf")) and bits(kind) < 32


def _over(exchange: Exchange) -> str:
    return f"over {exchange.members} devices" if exchange.groups else "over an unknown number of devices"


def _text(exchange: Exchange) -> str:
    least = "" if exchange.exact else "at least "
    return f"{exchange.kind} of {least}{size_text(exchange.size)} {_over(exchange)} ({exchange.x.name})"


def _loop(turning: Turning) -> str:
    return f"a loop of {'an unknown number of' if turning.trips is None else turning.trips} turns"

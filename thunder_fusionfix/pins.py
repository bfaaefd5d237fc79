"""What every order of a trace's ops has to keep.

Each rule gives *edges*: pairs of positions of which the first runs before the second in the trace and in every order that may
take its place. The rules, from what memory and state ask:

- *value*: an op runs after the ops that give what it takes; a name that is given a second time keeps its readers.
- *memory*: in-place writes keep their order against every other access of the memory that they may change. Reads between two
  writes are free among themselves. What comes from outside may share memory with whatever else does.
- *effect*: random ops, writes, collectives, their waits, host syncs, prints and unknown ops keep their order among themselves,
  so the generator state, the network and the terminal see one sequence, the same on every rank.
- *overlap*: what stands between the start of a collective and its wait stays between them, so that nothing that hid the
  transfer is taken away.
- *fence*: an unknown op stays where it is, as do unpacking, clearing and the return statement: nothing passes it.

The number of edges is linear in the number of ops and of values that they take: chains and fences name neighbours only.

    >>> from thunder_fusionfix.alias import aliases
    >>> from thunder_fusionfix.model import Graph, Op, Ref, Value
    >>> x, y, z = (Value(name, (4,), "f32", "cuda:0") for name in "xyz")
    >>> read = Op("prims.neg", (Ref("x"),), Ref("y"))
    >>> write = Op("prims.copy_", (Ref("y"), Ref("x")), Ref("z"))
    >>> graph = Graph("f", "inference", ("x",), (read, write, Op("return", (Ref("y"),))), {"x": x, "y": y, "z": z})
    >>> for edge in edges(graph, aliases(graph)): print(*edge)
    0 1 value
    0 2 value
    0 1 memory
    0 2 fence
    1 2 fence
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from thunder_fusionfix.alias import Access, Aliases
from thunder_fusionfix.effects import PURE, Kind, effect_of
from thunder_fusionfix.model import CLEAR, DEL, Graph, Op, kept_with_op


class Edge(NamedTuple):
    """Two positions of a Graph whose order must stay."""

    first: int
    then: int
    rule: str  # a key of RULES


def edges(graph: Graph, shared: Aliases) -> tuple[Edge, ...]:
    """All that an order of ``graph``'s ops must keep; ``del``s and clears, which are derived from the order, have no part.

    Args:
        graph: any Graph.
        shared: its `aliases`.
    """
    trace = _Trace(graph, shared)
    return tuple(Edge(first, then, name) for name, rule in RULES.items() for first, then in rule(trace))


def pairs(graph: Graph, shared: Aliases) -> Iterator[tuple[int, int]]:
    """`edges` without their rules; for who only asks what comes before what."""
    trace = _Trace(graph, shared)
    return chain.from_iterable(rule(trace) for rule in RULES.values())


@kept_with_op
def kinds_of(op: Op) -> frozenset[Kind]:
    """What the op and each of its finest sub-ops are; a region, or a composite without a row, is what its sub-ops are."""
    kinds = {effect_of(leaf).kind for leaf in op.leaves}
    own = effect_of(op).kind
    return frozenset(kinds if own in (Kind.REGION, Kind.BARRIER) else kinds | {own})


def is_fence(op: Op) -> bool:
    """True for an op that nothing may pass: unknown, a region that does not show its sub-ops, or a statement of the trace."""
    return _is_fence(kinds_of(op))


def given_twice(graph: Graph) -> tuple[str, ...]:
    """Names that more than one op makes, in order; Thunder does so where two fusions need one value after a write.

    An op that gives back what it takes makes nothing.

    >>> from thunder_fusionfix.model import Ref
    >>> first, second = (Op(op_id, (Ref("x"),), Ref("y")) for op_id in ("prims.neg", "prims.exp"))
    >>> given_twice(Graph("f", "inference", ("x",), (first, second), {}))
    ('y',)
    """
    seen: set[str] = set()
    repeated: dict[str, None] = {}
    for op in graph.ops:
        for name in op.outputs:
            if name in seen and name not in op.inputs:
                repeated[name] = None
            seen.add(name)
    return tuple(repeated)


_HARMLESS = PURE | {Kind.BOOKKEEPING}


def _is_fence(kinds: frozenset[Kind]) -> bool:
    return Kind.BARRIER in kinds or Kind.REGION in kinds or kinds == {Kind.BOOKKEEPING}


@dataclass(frozen=True)
class _Trace:
    """A Graph with what several rules ask."""

    graph: Graph
    shared: Aliases

    @cached_property
    def kinds(self) -> dict[int, frozenset[Kind]]:
        """By position of an op that an order arranges: what it is."""
        return {pos: kinds_of(op) for pos, op in enumerate(self.graph.ops) if op.id not in (DEL, CLEAR)}


# ---------------------------------------------------------------- rules


def _values(trace: _Trace) -> Iterator[tuple[int, int]]:
    ops = trace.graph.ops
    repeated = set(given_twice(trace.graph))
    given: dict[str, int] = {}  # name to the op that gave it last
    readers: dict[str, list[int]] = {}  # of a repeated name, since then
    for pos in trace.kinds:
        for name in ops[pos].inputs:
            if name in given:
                yield given[name], pos
            if name in repeated:
                readers.setdefault(name, []).append(pos)
        for name in ops[pos].outputs:
            if name in ops[pos].inputs:
                continue  # given back, not given anew
            if name in repeated:
                for before in (*readers.pop(name, ()), given.get(name, pos)):
                    if before != pos:
                        yield before, pos
            given[name] = pos


def _memory(trace: _Trace) -> Iterator[tuple[int, int]]:
    for group in sorted(trace.shared.written_groups):
        yield from _in_write_order(trace.shared.accesses[group])


def _in_write_order(accesses: tuple[Access, ...]) -> Iterator[tuple[int, int]]:
    """Each write after all before it, each read after the last write before it."""
    last_write: int | None = None
    reads: list[int] = []  # since the last write
    written = {access.pos for access in accesses if access.writes}
    for pos in dict.fromkeys(access.pos for access in accesses):
        if last_write is not None:
            yield last_write, pos
        if pos not in written:
            reads.append(pos)
            continue
        for read in reads:
            yield read, pos
        last_write, reads = pos, []


def _effects(trace: _Trace) -> Iterator[tuple[int, int]]:
    chain = [pos for pos, kinds in trace.kinds.items() if not kinds <= _HARMLESS]
    yield from pairwise(chain)


def _overlap(trace: _Trace) -> Iterator[tuple[int, int]]:
    """Starts keep their order and so do waits, so the nearest of each is enough."""
    ops = trace.graph.ops
    starts = {name: pos for pos, kinds in trace.kinds.items() if Kind.COLLECTIVE in kinds for name in ops[pos].outputs}
    wait_to_start = {
        pos: starts[name]
        for pos, kinds in trace.kinds.items()
        if Kind.WAIT in kinds
        for name in ops[pos].inputs
        if name in starts
    }
    start_to_wait = {start: wait for wait, start in wait_to_start.items()}
    running: dict[int, int] = {}  # start to its wait, of what runs at the op that is looked at
    for pos in trace.kinds:
        running.pop(wait_to_start.get(pos, -1), None)
        if running:
            yield max(running), pos
            yield pos, min(running.values())
        if pos in start_to_wait:
            running[pos] = start_to_wait[pos]


def _fences(trace: _Trace) -> Iterator[tuple[int, int]]:
    fence: int | None = None
    passed: list[int] = []  # since the last fence
    for pos, kinds in trace.kinds.items():
        if fence is not None:
            yield fence, pos
        if not _is_fence(kinds):
            passed.append(pos)
            continue
        for before in passed:
            yield before, pos
        fence, passed = pos, []


RULES: dict[str, Callable[[_Trace], Iterator[tuple[int, int]]]] = {
    "value": _values,
    "memory": _memory,
    "effect": _effects,
    "overlap": _overlap,
    "fence": _fences,
}

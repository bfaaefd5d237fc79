"""From where to where each name of a trace is bound.

A name is bound from the op that gives it, arguments from the start, until its ``del``; without one until the end. This is about
names: memory that several names share is freed with the last of them (`alias`, `simulate`). A trace without any ``del`` is taken
as if each name were deleted right after its last use, as Thunder's ``del_last_used`` does.

    >>> from thunder_fusionfix.model import Graph, Op, Ref, Value
    >>> ops = (Op("torch.exp", (Ref("x"),), Ref("y")), Op("torch.exp", (Ref("y"),), Ref("z")), Op("return", (Ref("z"),)))
    >>> ranges = live_ranges(Graph("f", "inference", ("x",), ops, {name: Value(name, (2,), "f32") for name in "xyz"}))
    >>> [(r.name, r.start, r.end) for r in ranges.values()]
    [('x', 0, 1), ('y', 0, 2), ('z', 1, 3)]
"""

from __future__ import annotations

from collections.abc import Mapping

from thunder_fusionfix.model import DEL, RETURN, Graph, LiveRange


def live_ranges(graph: Graph) -> Mapping[str, LiveRange]:
    """The range of positions during which each argument and each output of an op is bound, in order of appearance.

    ``start`` is the position of the op that gives the name (0 for an argument), ``end`` that of its ``del``, or ``len(ops)``.
    """
    starts = {name: 0 for name in graph.args}
    for name, pos in graph.producer.items():
        starts.setdefault(name, pos)
    ends = deletes_of(graph) if has_deletes(graph) else _after_last_uses(graph)
    return {name: LiveRange(name, start, ends.get(name, len(graph.ops))) for name, start in starts.items()}


def has_deletes(graph: Graph) -> bool:
    """True where the trace says itself when names are deleted."""
    return any(op.id == DEL for op in graph.ops)


def deletes_of(graph: Graph) -> Mapping[str, int]:
    """Position of the ``del`` of each name that has one."""
    return {name: pos for pos, op in enumerate(graph.ops) if op.id == DEL for name in op.inputs}


def _after_last_uses(graph: Graph) -> Mapping[str, int]:
    """One past the last op that takes or gives each name; nothing for names that are returned."""
    ends = {name: pos + 1 for pos, op in enumerate(graph.ops) for name in (*op.inputs, *op.outputs)}
    returned = graph.ops[-1].inputs if graph.ops and graph.ops[-1].id == RETURN else ()
    return {name: end for name, end in ends.items() if name not in returned}

"""A Graph with a Plan carried out, without a trace: for prices of plans, for pasted traces, for tests.

`edit.apply_plan` does the same to a Thunder trace and is the only judge of what a plan gives; this is its shadow on data. The
two agree on everything that a price or a rule asks: ops, their order, what regions take and give, names of regions, ``del``s.
They differ in the spelling of new ops outside of regions: Thunder prints the executor's name for a prim, here it keeps its own.
Metadata of values that a plan makes come from the rules of `infer`, so an op that those do not know gives a tensor of unknown size.

    >>> from thunder_fusionfix.model import Graph, Op, Ref, Value
    >>> values = {name: Value(name, (4,), "f32", "cuda:0") for name in ("x", "a", "b")}
    >>> body = (Op("prims.exp", (Ref("x"),), Ref("a")), Op("prims.sin", (Ref("x"),), Ref("b")))
    >>> region = Op("nvFusion0", (Ref("x"),), (Ref("a"), Ref("b")), subops=body, is_fusion=True)
    >>> graph = Graph("f", "inference", ("x",), (region, Op("return", ((Ref("a"), Ref("b")),))), values)
    >>> plan = Plan((RegionEdit(0, (Part((0,), ("a",)), Part((1,), ("b",)))),))
    >>> [(op.id, op.outputs) for op in apply_to_graph(graph, plan).ops]
    [('nvFusion0', ('a',)), ('nvFusion1', ('b',)), ('del', ()), ('return', ())]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from thunder_fusionfix.infer import fill
from thunder_fusionfix.model import (
    CLEAR,
    DEL,
    EXPAND,
    OWN,
    RETURN,
    UNPACK,
    Graph,
    NewOp,
    Op,
    Part,
    Plan,
    Ref,
    RegionEdit,
    Repeat,
    Value,
    refs,
    renamed,
)


def apply_to_graph(graph: Graph, plan: Plan, deletes: bool = True) -> Graph:
    """``graph`` with ``plan`` carried out; ``graph`` itself where the plan is empty.

    Args:
        graph: the Graph that the plan was made from.
        plan: edits; see `thunder_fusionfix.model.Plan`.
        deletes: False leaves out the ``del``s, which have no part in the price of an order.
    """
    if plan.is_empty:
        return graph
    parts = {edit.pos: edit for edit in plan.regions}
    placed: dict[int, list[NewOp]] = {}
    for item in plan.placed:
        placed.setdefault(item.pos, []).append(item.op)
    expanded = dict(plan.expanded)
    numbers = _numbers(graph)
    made: list[Op] = []
    ops: list[Op] = []
    for pos in range(len(graph.ops)) if plan.order is None else plan.order:
        new_ops = [_op_of(new) for new in placed.get(pos, ())]
        made += new_ops
        ops += new_ops
        op = graph.ops[pos]
        if op.id in (DEL, CLEAR):
            continue
        if op.id == UNPACK and op.inputs[0] in plan.owned:
            ops.append(Op(OWN, (Ref(op.inputs[0]),)))
        if op.id == UNPACK and op.inputs[0] in expanded:
            ops.append(Op(EXPAND, (Ref(op.inputs[0]), expanded[op.inputs[0]])))
        if pos not in parts:
            ops.append(op)
            continue
        regions = _regions_of(op, parts[pos], numbers)
        made += [subop for region in regions for subop in region.subops]
        ops += regions
    new_names = dict.fromkeys(name for op in made for name in op.outputs if name not in graph.values)
    values = dict(graph.values)
    if new_names:
        values, _ = fill(made, {**graph.values, **{name: Value(name) for name in new_names}})
    placed_ops = with_deletes(ops, values, graph.stage == "backward") if deletes else tuple(ops)
    freed = {name for op in graph.ops if op.id == UNPACK and op.inputs[0] in plan.owned for name in op.outputs}
    return replace(graph, ops=placed_ops, values=values, held=graph.held - freed)


def with_readable_names(graph: Graph) -> Graph:
    """``graph`` with ``new0``, ``new1``, ... in place of a plan's own names (``%0``), which no text of a trace can hold.

    >>> from thunder_fusionfix.model import Placed
    >>> from thunder_fusionfix.parse import parse
    >>> graph = parse("def f(x):\\n  new0 = prims.neg(x)\\n  return new0")
    >>> plan = Plan(placed=(Placed(1, NewOp("prims.exp", (Ref("new0"),), "%0")),))
    >>> [name for op in with_readable_names(apply_to_graph(graph, plan)).ops for name in op.outputs]
    ['new0', 'new1']
    """
    unused = (name for name in (f"new{number}" for number in count()) if name not in graph.values)
    names = {name: next(unused) for name in graph.values if name.startswith("%")}
    if not names:
        return graph

    values = {names.get(name, name): replace(value, name=names.get(name, name)) for name, value in graph.values.items()}
    return replace(graph, ops=tuple(_renamed_op(op, names) for op in graph.ops), values=values)


def with_deletes(ops: Iterable[Op], values: dict[str, Value], clear_collections: bool) -> tuple[Op, ...]:
    """``ops`` without their ``del``s and clears, and with new ones right after the last use of each name.

    Args:
        ops: ops in order, with the return statement.
        values: at least those of the collections.
        clear_collections: whether a collection is cleared before it is deleted, as in backward traces.
    """
    result: list[Op] = []  # from the last to the first
    kept: set[str] = set()
    for op in reversed([op for op in ops if op.id not in (DEL, CLEAR)]):
        if op.id == RETURN:
            kept.update(op.inputs)
            result.append(op)
            continue
        ending = [name for name in dict.fromkeys((*op.outputs, *op.inputs)) if name not in kept]
        kept.update(ending)
        if ending:
            result.append(Op(DEL, tuple(map(Ref, ending))))
        if clear_collections:
            collections = [name for name in ending if values[name].kind == "collection"]
            result += [Op(CLEAR, (Ref(name),)) for name in collections]
        result.append(op)
    return tuple(reversed(result))


def _op_of(op: NewOp) -> Op:
    return Op(op.symbol, op.args, Ref(op.output), op.kwargs)


def _subop_of(region: Op, item: int | NewOp | Repeat) -> Op:
    """What ``item`` stands for in a rebuilt ``region``."""
    if isinstance(item, NewOp):
        return _op_of(item)
    if isinstance(item, int):
        return region.subops[item]
    return _renamed_op(region.subops[item.index], dict(item.renamed))


def _renamed_op(op: Op, names: Mapping[str, str]) -> Op:
    """``op`` over, and giving, other names."""
    return replace(
        op,
        args=tuple(renamed(arg, names) for arg in op.args),
        output=renamed(op.output, names),
        kwargs=tuple((key, renamed(arg, names)) for key, arg in op.kwargs),
        subops=tuple(_renamed_op(subop, names) for subop in op.subops),
    )


def _regions_of(op: Op, edit: RegionEdit, numbers: dict[str, int]) -> list[Op]:
    """The regions that stand where ``op`` stood; the first keeps its number, the others get unused ones."""
    head = op.id.rstrip("0123456789")
    names = [op.id]
    while len(names) < len(edit.parts):
        numbers[head] = numbers.get(head, -1) + 1
        names.append(f"{head}{numbers[head]}")
    return [_region(op, part, name) for part, name in zip(edit.parts, names)]


def _region(op: Op, part: Part, name: str) -> Op:
    body = tuple(_subop_of(op, item) for item in part.body)
    taken = inputs_of(body)
    ordered = dict.fromkeys((*(name for name in refs(op.args) if name in taken), *taken))
    return replace(op, id=name, args=tuple(map(Ref, ordered)), output=tuple(map(Ref, part.outputs)), subops=body)


def inputs_of(body: Sequence[Op]) -> dict[str, None]:
    """What ``body`` takes and does not give itself, in order of first use.

    >>> list(inputs_of([Op("prims.exp", (Ref("x"),), Ref("a")), Op("prims.add", (Ref("a"), Ref("y")), Ref("b"))]))
    ['x', 'y']
    """
    given = {name for op in body for name in op.outputs}
    return dict.fromkeys(name for op in body for name in op.inputs if name not in given)


def _numbers(graph: Graph) -> dict[str, int]:
    """The highest number of each kind of region: {"nvFusion": 17}."""
    highest: dict[str, int] = {}
    for op in graph.ops:
        match = re.fullmatch(r"(.*\D)(\d+)", op.id) if op.is_fusion else None
        if match:
            highest[match[1]] = max(highest.get(match[1], -1), int(match[2]))
    return highest

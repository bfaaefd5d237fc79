"""Tiny Graphs for tests, and a slow replay that judges `simulate`.

`GraphBuilder` writes a Graph as one writes a trace:

    >>> build = GraphBuilder()
    >>> x = build.arg("x", (1024,))
    >>> y = build.op("torch.exp", x, out="y", shape=(1024,))
    >>> build.delete(x).returns(y).ops[-1]
    Op(id='return', args=(Ref(name='y'),), output=None, kwargs=(), subops=(), tags=frozenset(), is_fusion=False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from thunder_fusionfix.model import CLEAR, DEL, RETURN, UNPACK, Arg, Const, Graph, Op, Ref, Value, refs

DEVICE = "cuda:0"
BF16, F32 = Const("dtypes.bfloat16"), Const("dtypes.float32")

Shape = tuple[int, ...]


class GraphBuilder:
    """Collects ops and values; `returns` gives the Graph."""

    def __init__(self, stage: str = "inference", device: str = DEVICE) -> None:
        self.stage, self.device = stage, device
        self.args: list[str] = []
        self.ops: list[Op] = []
        self.values: dict[str, Value] = {}

    def value(self, name: str, shape: Shape, dtype: str = "f32", strides: Shape | None = None) -> Ref:
        self.values[name] = Value(name, shape, dtype, self.device, strides)
        return Ref(name)

    def arg(self, name: str, shape: Shape, dtype: str = "f32", strides: Shape | None = None) -> Ref:
        self.args.append(name)
        return self.value(name, shape, dtype, strides)

    def collection(self, name: str, *content: Ref, arg: bool = False, clear: bool = True) -> Ref:
        """A collection that is unpacked to ``content``, and cleared and deleted after that."""
        self.values.setdefault(name, Value(name, kind="collection"))
        if arg:
            self.args.append(name)
        self.ops.append(Op(UNPACK, (Ref(name),), content))
        for ref in content:
            self.values.setdefault(ref.name, Value(ref.name, kind="collection"))
        if clear:
            self.ops += [Op(CLEAR, (Ref(name),)), Op(DEL, (Ref(name),))]
        return Ref(name)

    def op(self, op_id: str, *args: Arg, out: str, shape: Shape, dtype: str = "f32") -> Ref:
        self.ops.append(Op(op_id, args, self.value(out, shape, dtype)))
        return Ref(out)

    def region(self, name: str, inputs: Sequence[Ref], outputs: Sequence[Ref], body: Callable[[], object]) -> None:
        """A fusion region; ``body`` calls `op` for what stands in it."""
        before, self.ops = self.ops, []
        body()
        subops, self.ops = tuple(self.ops), before
        self.ops.append(Op(name, tuple(inputs), tuple(outputs), subops=subops, is_fusion=True))

    def delete(self, *names: Ref) -> GraphBuilder:
        self.ops.append(Op(DEL, names))
        return self

    def returns(self, *args: Arg, held: Iterable[str] | None = None) -> Graph:
        self.ops.append(Op(RETURN, args))
        if held is None:
            held = self.args if self.stage != "backward" else ()
        name = "backward_fn" if self.stage == "backward" else "computation"
        return Graph(name, self.stage, tuple(self.args), tuple(self.ops), self.values, frozenset(held))


def slow_replay(graph: Graph, size_of: Callable[[str], tuple[str, int]], temporary: Callable[[int], int]) -> list[int]:
    """Bytes alive while each op runs, by walking at each op all that the program can still reach, as a garbage collector does.

    ``size_of`` gives the memory that a name sees, as a key, and its bytes; ``temporary`` the bytes that an op needs for itself.
    """
    lists: dict[str, list[str]] = {name: [] for name, value in graph.values.items() if value.kind == "collection"}
    for op in graph.ops:
        if op.id == UNPACK:
            lists[op.inputs[0]] += op.outputs
    scope = set(graph.args)
    caller = {name for name in (*graph.args, *graph.held) if name in lists or name in graph.held}
    outside = {name for name in graph.args if name not in lists} | {
        name for content in lists.values() for name in content
    }
    made, found = set(outside), []
    for pos, op in enumerate(graph.ops):
        made |= set(op.outputs)
        reached, todo = set(), [*scope, *op.outputs, *(name for name in caller if name in made or name in lists)]
        while todo:
            name = todo.pop()
            todo += [] if name in reached else lists.get(name, [])
            reached.add(name)
        memory = dict(size_of(name) for name in reached if name not in lists and graph.values[name].kind == "tensor")
        found.append(sum(memory.values()) + temporary(pos))
        scope |= set(op.outputs)
        if op.id == CLEAR:
            lists[op.inputs[0]].clear()
        elif op.id == DEL:
            scope -= set(op.inputs)
    return found


def with_deletes(graph: Graph, order: Sequence[int]) -> Graph:
    """``graph`` in another order, with ``del``s and clears where Thunder would place them: backwards, at first sight of a name."""
    returned = set(refs(graph.result)) if graph.result is not None else set()
    ops: list[Op] = []
    for pos in reversed(order):
        op = graph.ops[pos]
        last = [name for name in dict.fromkeys((*op.outputs, *op.inputs)) if name not in returned]
        if last and op.id != RETURN:
            ops.append(Op(DEL, tuple(map(Ref, last))))
            if graph.stage == "backward":
                ops += [Op(CLEAR, (Ref(name),)) for name in last if graph.values[name].kind == "collection"]
        returned |= set(last)
        ops.append(op)
    return Graph(graph.name, graph.stage, graph.args, tuple(reversed(ops)), graph.values, graph.held)

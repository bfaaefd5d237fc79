"""Which cotangents may come as one repeated zero, an expanded scalar with strides of 0, where they are otherwise dense zeros.

torch's own operators read such a tensor as they read any other: ``y.sum().backward()`` sends one. What is not certain of it:

- Who *writes* to it writes one element many times; torch raises.
- A kernel of another library, a collective, or an op that is not known may take strides for what they are not.
- A region of nvFuser's that *resizes* something, by a pad, a slice or a cat, may not compile for it: nvFuser 0.2.36 failed on one that
  pads the gradient of cut logits of bfloat16[2048, 50432] and adds the zeros.
- A gradient that is *returned* goes to callers of ``torch.autograd.grad``, who may write to it.

So a cotangent stays dense where it, or what may have its memory or its repeated dims, comes to one of these. Repeated dims go far: nvFuser
gives what it computes of repeated dims alone with strides of 0 too, and so may a sum over others. They end at a product of matrices,
and where a tensor of the same shape that is not repeated is added.

    >>> from thunder_fusionfix.model import Graph, Ref, Value
    >>> g, y, a = (Value(name, (4, 2), "f32", "cuda:0") for name in "gya")
    >>> add, end = Op("torch.add", (Ref("g"), Ref("y")), Ref("a")), Op("return", (Ref("a"),))
    >>> dense_uses(Graph("f", "backward", ("y", "g"), (add, end), {"g": g, "y": y, "a": a}), ["g"])
    {}
    >>> neg = Op("torch.neg", (Ref("g"),), Ref("a"))
    >>> dense_uses(Graph("f", "backward", ("y", "g"), (neg, end), {"g": g, "y": y, "a": a}), ["g"])
    {'g': 'the trace returns it, or what may have its strides, as a'}
"""

from __future__ import annotations

from collections.abc import Iterable

from thunder_fusionfix.effects import Kind, effect_of, short_name
from thunder_fusionfix.model import EXPAND, RETURN, UNPACK, Arg, Graph, Op, Ref

_BROADCASTS = ("expand", "broadcast_in_dim")  # their output repeats dims whatever their source is
_RESIZES = ("pad", "slice_prim", "slice", "cat")
_PASSES_ON = (Kind.LAYOUT, Kind.REDUCTION, Kind.MOVE)


def names_at(graph: Graph, statement: Op) -> tuple[str | None, ...]:
    """The cotangents at the positions that ``expand_zero_cotangents(collection, positions)`` names; None for what is none."""
    collection, positions = (*statement.inputs, None)[0], statement.args[1] if len(statement.args) > 1 else None
    unpacked: Arg = next((op.output for op in graph.ops if op.id == UNPACK and op.inputs == (collection,)), ())
    given = unpacked if isinstance(unpacked, tuple) else ()
    found: list[str | None] = []
    for at in positions if isinstance(positions, tuple) else (None,):
        item = given[at] if type(at) is int and 0 <= at < len(given) else None
        is_tensor = isinstance(item, Ref) and graph.values[item.name].kind == "tensor"
        found.append(item.name if is_tensor and isinstance(item, Ref) else None)
    return tuple(found)


def repeated_cotangents(graph: Graph) -> frozenset[str]:
    """Cotangents that a backward trace takes as one repeated zero where nobody sends them (`EXPAND`)."""
    return frozenset(name for op in graph.ops if op.id == EXPAND for name in names_at(graph, op) if name is not None)


def dense_uses(graph: Graph, names: Iterable[str]) -> dict[str, str]:
    """Those of ``names`` that must be dense memory, each with the first use that says so.

    Args:
        graph: a backward trace.
        names: cotangents, all of which may come as repeated zeros at once.
    """
    walk = _Walk(graph, {name: frozenset((name,)) for name in names})
    for op in graph.ops:
        walk.visit(op)
    return walk.found


class _Walk:
    """Follows values that may have dims of stride 0, each with the cotangents that it may have them from."""

    def __init__(self, graph: Graph, repeated: dict[str, frozenset[str]]) -> None:
        self.values, self.repeated = graph.values, repeated
        self.found: dict[str, str] = {}

    def visit(self, op: Op) -> None:
        effect = effect_of(op)
        given = [name for name in op.inputs if name in self.repeated]
        if effect.kind is Kind.BOOKKEEPING:
            if op.id == RETURN:
                self.refuse(given, "the trace returns it, or what may have its strides")
        elif effect.kind is Kind.REGION and op.subops:
            if op.id.startswith("nvFusion") and any(short_name(leaf.id) in _RESIZES for leaf in op.leaves):
                self.refuse(given, f"{op.id} resizes something, and may not compile for it")
            for leaf in op.leaves:
                self.visit(leaf)
        elif effect.kind is Kind.FACTORY or (effect.kind is Kind.LAYOUT and short_name(op.id) in _BROADCASTS):
            self.pass_on(op, given)
        elif effect.kind is Kind.POINTWISE:
            if not self.takes_dense(op):
                self.pass_on(op, given)
        elif effect.kind in _PASSES_ON:
            if given:
                self.pass_on(op, given)
        elif effect.kind is not Kind.MATMUL:
            self.refuse(given, f"{op.id} may need dense memory")

    def takes_dense(self, op: Op) -> bool:
        """True for a pointwise op with an operand that repeats nothing in any dim of the output."""
        shapes = {self.values[name].shape for name in op.outputs}
        return any(name not in self.repeated and {self.values[name].shape} == shapes != {None} for name in op.inputs)

    def pass_on(self, op: Op, given: list[str]) -> None:
        origins = frozenset().union(*(self.repeated[name] for name in given))
        for name in op.outputs:
            self.repeated[name] = self.repeated.get(name, frozenset()) | origins

    def refuse(self, given: list[str], why: str) -> None:
        for name in given:
            for origin in sorted(self.repeated[name]):
                self.found.setdefault(origin, why if name == origin else f"{why}, as {name}")

"""What a value is: one expression over the trace's inputs that does not depend on how layouts and regions are arranged.

Def-use and order rules alone would pass a hoisted slice that is off by one. So `verify` asks whether a value is the
same expression before and after a rewrite. Two traces that differ only in where layouts stand give one expression,
because each is brought into a form in which layouts stand nowhere but at the bottom:

- regions and composite ops are opened, so it does not matter who computes an op;
- layouts compose into one `IndexMap` over their source; copies in another memory order do not change a value;
- a layout of an elementwise op is the op of the layouts: ``L(f(a, b)) = f(L(a), L(b))``, and casts are elementwise;
- sums, pads and concatenations work on some dims and repeat over the others, their *rows*. They are written over
  ``[rows, own dims...]``; a layout of rows moves below them, a layout of own dims stays above; a pad's own dims have one order;
- a constant has no layout; an empty tensor has no content;
- a pad seen only where its source shows is the source;
- a cross entropy is seen row by row: rows whose label is padded with the ignored one are left out of it, and the
  ``where`` that gives zeros outside of what such a pad shows is itself a pad (`thunder_fusionfix.losses`);
- a cast to the same dtype is nothing, and so is a detour through a wider float: bf16 -> f32 -> bf16. The narrow
  detour f32 -> bf16 -> f32 stays. A cast of a pad is a pad of the cast where both dtypes hold the fill exactly.

Everything else is an opaque function of its arguments. Reductions over several dims take their elements in one order
of these; in which order a kernel adds is not part of the form. Equal forms mean equal values; the converse does not
hold, and need not: what is not seen to be equal is rejected.

    >>> from thunder_fusionfix.model import Ref
    >>> types = {"x": ((4, 2), "bf16"), "a": ((4, 2), "f32")}
    >>> types |= {"b": ((8,), "f32"), "c": ((8,), "bf16"), "d": ((8,), "f32")}
    >>> values = {name: Value(name, shape, dtype, "cpu") for name, (shape, dtype) in types.items()}
    >>> def cast(source, output):
    ...     return Op("prims.convert_element_type", (Ref(source), Const("dtypes.float32")), Ref(output))
    >>> def flatten(source, output):
    ...     return Op("prims.reshape", (Ref(source), (8,)), Ref(output))
    >>> inside, outside = (cast("x", "a"), flatten("a", "b")), (flatten("x", "c"), cast("c", "d"))
    >>> forms = Forms()
    >>> before = forms.of(Graph("f", "inference", ("x",), inside, values))
    >>> after = forms.of(Graph("f", "inference", ("x",), outside, values))
    >>> before.values["b"] == after.values["d"], forms.text(after.values["d"])
    (True, 'cast f32(x[0 + 8:1])')

Expressions are shared, and every (map, expression) pair is pushed down once, so the work is near linear in practice;
a limit bounds it, and beyond that layouts stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from math import prod
from typing import NamedTuple

from thunder_fusionfix.effects import PURE, Copies, Kind, effect_of, short_name
from thunder_fusionfix.index_map import IndexMap, compose, index_map, made, merged, refine, regrouped, ungrouped
from thunder_fusionfix.layout import Contiguous, Same, Shape, layout_of, row_major
from thunder_fusionfix.losses import CrossEntropy, cross_entropy_of
from thunder_fusionfix.model import (
    CLEAR,
    DEL,
    RETURN,
    Arg,
    Const,
    Graph,
    Op,
    Ref,
    Struct,
    Value,
    kept_with_op,
    number_of,
    refs,
)

PUSH_LIMIT = 500_000  # pairs (map, expression); 28 layers of Qwen2.5 need 1/20 of it

_CASTS = ("convert_element_type", "to", "float", "type_as")
_REDUCTIONS = ("sum", "prod", "amax", "amin", "argmax", "argmin", "var", "std", "var_mean")

# Significant bits, and the exponents e for which all of 2**e * [1, 2) is held with these bits.
_FLOATS: Mapping[str, tuple[int, int, int]] = {
    "f16": (11, -14, 15),
    "bf16": (8, -126, 127),
    "f32": (24, -126, 127),
    "f64": (53, -1022, 1023),
}
_INTS: Mapping[str, tuple[int, int]] = {
    "b8": (0, 1),
    "ui8": (0, 2**8 - 1),
    "i8": (-(2**7), 2**7 - 1),
    "i16": (-(2**15), 2**15 - 1),
    "i32": (-(2**31), 2**31 - 1),
    "i64": (-(2**63), 2**63 - 1),
}

Config = tuple[tuple[int, int, int], ...]
"""Of each dim: elements that a pad puts before it, after it and between its elements."""

Epoch = Callable[[int, str], "int | None"]
"""Of an op's position and a value that it reads: how many writes came before; None for memory that nothing writes."""


class Node(NamedTuple):
    """One expression; equal expressions have one id."""

    op: str  # "leaf", "layout", "pointwise", "rows", "full", "empty", "read", "flat", "item" or "apply"
    label: Hashable  # what else tells two expressions with this op and these children apart
    children: tuple[int, ...]
    shape: Shape | None  # None for what is no tensor, or one of unknown shape
    dtype: str | None


@dataclass(frozen=True)
class Observation:
    """An op whose arguments are seen from outside the trace: one with an effect, or the return statement."""

    pos: int
    op: Op
    args: tuple[int, ...]  # the expressions of the values that it takes, in order


@dataclass(frozen=True)
class GraphForm:
    """The expressions of one Graph; ids belong to the `Forms` that made them."""

    values: Mapping[str, int]  # by name, outside regions
    observed: tuple[Observation, ...]


_HARMLESS = PURE | {Kind.BOOKKEEPING}


@kept_with_op
def has_effect(op: Op) -> bool:
    """True where ``op``, or for a region something in it, does more than compute its outputs, or is not known."""
    if op.is_fusion:
        return any(has_effect(subop) for subop in op.subops) or not op.subops
    kind = effect_of(op).kind
    if kind not in _HARMLESS and not (
        kind is Kind.BARRIER and op.subops
    ):  # what a composite without a row does, its parts say
        return True
    return any(effect_of(leaf).kind not in _HARMLESS for leaf in op.leaves) if op.subops else False


def _is_view(op: Op) -> bool:
    """True for an op that reads no memory: a layout that never copies, or a composite without a row of nothing but these."""
    effect = effect_of(op)
    if effect.kind is Kind.BARRIER and op.subops:
        return all(_is_view(leaf) for leaf in op.leaves)
    return effect.kind is Kind.LAYOUT and effect.copies is Copies.NEVER


@dataclass
class Forms:
    """Expressions of one or more Graphs, in one table, so that equal ones are found equal by id."""

    push_limit: int = PUSH_LIMIT
    nodes: list[Node] = field(default_factory=list)
    _ids: dict[Node, int] = field(default_factory=dict)
    _maps: list[IndexMap] = field(default_factory=list)
    _map_ids: dict[IndexMap, int] = field(default_factory=dict)
    _pushed: dict[tuple[int, int], int] = field(default_factory=dict)  # (map, expression) -> expression
    _computed: dict[tuple[int, tuple[int, ...]], _Computed] = field(default_factory=dict)  # (id of op, what it takes)
    _given: dict[int, _Computed] = field(default_factory=dict)  # id of an op -> its outputs as leaves
    _last: tuple[Graph, GraphForm] | None = None  # the last Graph: what one pass made is what the next is given

    def of(self, graph: Graph, *, new_id: Mapping[str, str] | None = None, epoch: Epoch | None = None) -> GraphForm:
        """The expressions of ``graph``.

        Args:
            graph: any Graph; unknown ops and unknown shapes are opaque.
            new_id: ids of ops that count as another op, and are not opened.
            epoch: makes reads of memory part of the expressions; a read before a write then differs from one after it.
        """
        if new_id or epoch is not None:
            return _Evaluation(self, graph, new_id or {}, epoch).run()
        if self._last is None or self._last[0] is not graph:
            self._last = graph, _Evaluation(self, graph, {}, None).run()
        return self._last[1]

    def where_changed(self, before: Graph, after: Graph) -> tuple[GraphForm, GraphForm] | None:
        """The expressions of two Graphs over what the ops give that both have, the same objects; None where these take other values.

        A pure op gives the same for the same, so what a shared one gives is a leaf, once it is seen that it takes the same expressions
        wherever it stands: the leaves in those are equal, as they stand before it, and so on up to the arguments. Equal expressions are
        equal values here too; of two that are not, `of` may yet see that they are equal, as it looks into all ops.
        """
        shared = _shared_ops(before, after)
        old, new = (_Evaluation(self, graph, {}, None, shared) for graph in (before, after))
        forms = old.run(), new.run()
        return forms if old.is_certain and new.is_certain and old.taken == new.taken else None

    def node(self, op: str, label: Hashable, children: tuple[int, ...], shape: Shape | None, dtype: str | None) -> int:
        """The id of this expression; an empty tensor is the same whatever computes it."""
        if shape is not None and 0 in shape:
            op, label, children = "empty", None, ()
        node = Node(op, label, children, shape, dtype)
        found = self._ids.get(node)
        if found is None:
            found = self._ids[node] = len(self.nodes)
            self.nodes.append(node)
        return found

    def computed(self, op: Op, taken: tuple[int, ...], values: Mapping[str, Value]) -> tuple[int, ...] | None:
        """What the pure ``op`` gives for the expressions that it takes; None where this table has not seen it.

        Graphs before and after a pass share the ops that the pass left alone. They are told by identity, and count as seen only
        where every name in them means the same value.
        """
        seen = self._computed.get((number_of(op), taken))
        return seen.given if seen is not None and seen.values == tuple(map(values.get, op.names)) else None

    def keep(self, op: Op, taken: tuple[int, ...], values: Mapping[str, Value], given: tuple[int, ...]) -> None:
        """Remembers an answer for `computed`."""
        self._computed[number_of(op), taken] = _Computed(op, tuple(map(values.get, op.names)), given)

    def given(self, op: Op, values: Mapping[str, Value]) -> tuple[int, ...]:
        """Leaves for what ``op`` gives."""
        types = tuple(map(values.get, op.outputs))
        known = self._given.get(number_of(op))
        if known is None or known.values != types:
            leaves = [
                self.node(
                    "leaf",
                    ("given", number_of(op), name),
                    (),
                    value.shape if value else None,
                    value.dtype if value else None,
                )
                for name, value in zip(op.outputs, types)
            ]
            known = self._given[number_of(op)] = _Computed(op, types, tuple(leaves))
        return known.given

    # ------------------------------------------------ layouts

    def rearranged(self, index: IndexMap, source: int) -> int:
        """``source`` seen through ``index``, with the layout pushed down as far as it goes."""
        # An explicit stack: expressions are deeper than Python's.
        goal = (self._map_id(index), source)
        stack = [goal]
        while stack:
            key = stack[-1]
            if key in self._pushed:
                stack.pop()
                continue
            needed = [pair for pair in self._below(*key) if pair not in self._pushed]
            if needed and len(self._pushed) < self.push_limit:
                stack += needed
            else:
                self._pushed[key] = self._rebuilt(*key) if not needed else self._on_top(self._maps[key[0]], key[1])
        return self._pushed[goal]

    def _map_id(self, index: IndexMap) -> int:
        found = self._map_ids.get(index)
        if found is None:
            found = self._map_ids[index] = len(self._maps)
            self._maps.append(index)
        return found

    def _below(self, map_id: int, source: int) -> list[tuple[int, int]]:
        """The pairs that pushing this one asks for first."""
        node = self.nodes[source]
        if node.op in ("pointwise", "read"):
            return [(map_id, child) for child in node.children if self.nodes[child].shape is not None]
        if node.op == "layout":
            composed = self._composed(map_id, source)
            return [] if composed is None else [(composed, node.children[0])]
        if node.op == "rows":
            inside = self._inside_pad(map_id, source)
            if inside is not None:
                return [(inside, node.children[0])]
            moved = self._moved_rows(map_id, source)
            return [] if moved is None else list(zip(moved.below, node.children))
        return []

    def _rebuilt(self, map_id: int, source: int) -> int:
        """The pushed expression, once those of `_below` are there."""
        node, index = self.nodes[source], self._maps[map_id]
        if node.op == "pointwise":
            children = tuple(self._pushed.get((map_id, child), child) for child in node.children)
            return self.node(node.op, node.label, children, index.shape, node.dtype)
        if node.op == "read":
            return self.read(node.label, self._pushed[map_id, node.children[0]])  # type: ignore[arg-type]
        if node.op == "layout":
            composed = self._composed(map_id, source)
            if composed is not None:
                return self._pushed[composed, node.children[0]]
            return self._on_top(index, self._flat(source))
        if node.op == "rows":
            inside = self._inside_pad(map_id, source)
            if inside is not None:
                return self._pushed[inside, node.children[0]]
            moved = self._moved_rows(map_id, source)
            if moved is not None:
                children = tuple(self._pushed[pair] for pair in zip(moved.below, node.children))
                assert node.shape is not None
                shape = (moved.num_rows, *node.shape[1:])
                if isinstance(node.label, _Pad):
                    return self.rearranged(moved.above, self._pad(node.label, children[0], shape, node.dtype))
                return self._on_top(moved.above, self.node(node.op, node.label, children, shape, node.dtype))
        return self._on_top(index, source)

    def _composed(self, map_id: int, source: int) -> int | None:
        """This map after that of the layout ``source``; None where there is no such map."""
        inner = self.nodes[source].label
        assert isinstance(inner, IndexMap)
        composed = compose(self._maps[map_id], inner)
        return None if composed is None else self._map_id(composed)

    def _on_top(self, index: IndexMap, source: int) -> int:
        """``source`` under a layout that is not pushed further."""
        node = self.nodes[source]
        if node.shape is not None and index.is_identity(node.shape):
            return source
        if node.op == "full":
            return self.node("full", node.label, (), index.shape, node.dtype)
        if node.op == "flat":  # what was cut where it had no seam may fit again
            layout = self.nodes[node.children[0]]
            assert isinstance(layout.label, IndexMap)
            composed = compose(index, layout.label)
            if composed is not None:
                return self.rearranged(composed, layout.children[0])
        return self.node("layout", index, (source,), index.shape, node.dtype)

    def _flat(self, layout: int) -> int:
        """A layout's elements in row-major order, as a new source for maps that do not compose with it."""
        node = self.nodes[layout]
        assert isinstance(node.label, IndexMap)
        one_dim = made(node.label.offset, [node.label.factors])
        inner = self.node("layout", one_dim, node.children, one_dim.shape, node.dtype)
        return self.node("flat", None, (inner,), one_dim.shape, node.dtype)

    def _moved_rows(self, map_id: int, source: int) -> _MovedRows | None:
        """How a map over ``[rows, own dims...]`` splits into one over rows, below, and the rest; None if not at all."""
        node, index = self.nodes[source], self._maps[map_id]
        assert node.shape is not None
        refined = refine(index, node.shape)
        if refined is None:
            return None
        pieces = [piece for dim in refined.dims for piece in dim]
        if any(piece.steps[0] and any(piece.steps[1:]) for piece in pieces):
            return None
        of_rows = [(piece.size, piece.steps[0]) for piece in pieces if piece.steps[0]]
        num_rows = prod(size for size, _ in of_rows)
        if refined.starts[0] == 0 and num_rows == node.shape[0] and merged(of_rows) == merged([(num_rows, 1)]):
            return None  # the rows are in order already
        below = []
        for child in node.children:
            shape = self.nodes[child].shape
            assert shape is not None
            per_row = prod(shape[1:])
            own = [[factor] for factor in zip(shape[1:], row_major(shape[1:]))]
            rows = [(size, step * per_row) for size, step in of_rows]
            below.append(self._map_id(made(refined.starts[0] * per_row, [rows, *own])))
        return _MovedRows(tuple(below), _above_rows(refined.starts, refined.dims, node.shape, num_rows), num_rows)

    def _inside_pad(self, map_id: int, source: int) -> int | None:
        """The map over a pad's source that does what this one does over the pad; None where it shows any of the fill."""
        node = self.nodes[source]
        shape = self.nodes[node.children[0]].shape
        if not isinstance(node.label, _Pad) or node.shape is None or shape is None:
            return None
        refined = refine(self._maps[map_id], node.shape)
        if refined is None:
            return None
        pieces = [piece for dim in refined.dims for piece in dim]
        starts = list(refined.starts)
        for dim, (low, _, dilation) in enumerate(node.label.config, start=1):
            last = starts[dim] + sum((piece.size - 1) * piece.steps[dim] for piece in pieces)
            if dilation or starts[dim] < low or last >= low + shape[dim]:
                return None
            starts[dim] -= low
        radix = row_major(shape)

        def number(index: Sequence[int]) -> int:
            return sum(a * b for a, b in zip(index, radix))

        dims = [[(piece.size, number(piece.steps)) for piece in dim] for dim in refined.dims]
        return self._map_id(made(number(starts), dims))

    def padded(self, expression: int) -> _Padded | None:
        """``expression`` as a pad of one dim, in whatever shape it is seen; None where it is another expression."""
        node = self.nodes[expression]
        is_layout = node.op == "layout" and isinstance(node.label, IndexMap)
        pad = self.nodes[node.children[0]] if is_layout else node
        if pad.op != "rows" or not isinstance(pad.label, _Pad) or pad.shape is None or len(pad.shape) != 2:
            return None
        ((low, high, dilation),) = pad.label.config
        index = node.label if is_layout else _reshaped(pad.shape)
        assert isinstance(index, IndexMap)
        refined = refine(index, pad.shape)
        if refined is None or refined.starts[1] or dilation or low < 0 or high < 0:
            return None
        pieces = [piece for dim in refined.dims for piece in dim]
        moving = [at for at, piece in enumerate(pieces) if piece.steps[1]]
        if len(moving) != 1 or (pieces[moving[0]].size, pieces[moving[0]].steps) != (pad.shape[1], (0, 1)):
            return None
        kept = pad.shape[1] - low - high
        factors = [(piece.size, piece.steps[0] * kept) if not piece.steps[1] else (kept, 1) for piece in pieces]
        shown = self.rearranged(made(refined.starts[0] * kept, [[factor] for factor in factors]), pad.children[0])
        return _Padded(tuple(piece.size for piece in pieces), moving[0], low, high, pad.label.fill, shown)

    def shown(self, padded: _Padded, expression: int, own: Shape = ()) -> int:
        """What is left of ``expression``, [whatever gives `sizes`, own dims...], where ``padded`` shows its source; flat but for own dims."""
        sizes = (*padded.sizes, *own)
        steps = row_major(sizes)
        cut = [*sizes]
        cut[padded.dim] -= padded.low + padded.high
        factors = list(zip(cut, steps))
        rows = len(padded.sizes)
        dims = [factors[:rows], *([factor] for factor in factors[rows:])]
        return self.rearranged(made(padded.low * steps[padded.dim], dims), expression)

    # ------------------------------------------------ operations

    def cast(self, dtype: str | None, source: int) -> int:
        """``source`` converted to ``dtype``."""
        node = self.nodes[source]
        if dtype is not None and node.dtype == dtype:
            return source
        is_detour = node.label == "cast" and _widens(self.nodes[node.children[0]].dtype, node.dtype)
        if is_detour and dtype in _FLOATS:
            return self.cast(dtype, node.children[0])
        if node.op == "full" and _holds(node.dtype, node.label) and _holds(dtype, node.label):
            return self.node("full", _number(node.label, dtype), (), node.shape, dtype)
        pads = self._pads_of(source)
        if pads is not None and _holds(node.dtype, pads.fill) and _holds(dtype, pads.fill):
            return self._cast_below_pad(dtype, source, pads)
        return self.node("pointwise", "cast", (source,), node.shape, dtype)

    def _pads_of(self, source: int) -> _Pad | None:
        """The pad that ``source`` is, or a layout of; None where it is another expression."""
        node = self.nodes[source]
        pad = self.nodes[node.children[0]] if node.op == "layout" else node
        if pad.op == "rows" and isinstance(pad.label, _Pad):
            return pad.label
        return None

    def _cast_below_pad(self, dtype: str | None, source: int, pad: _Pad) -> int:
        node = self.nodes[source]
        if node.op == "layout":
            assert isinstance(node.label, IndexMap)
            return self.rearranged(node.label, self._cast_below_pad(dtype, node.children[0], pad))
        assert node.shape is not None
        label = _Pad(_number(pad.fill, dtype), pad.config)
        return self._pad(label, self.cast(dtype, node.children[0]), node.shape, dtype)

    def _pad(self, label: _Pad, source: int, shape: Shape, dtype: str | None) -> int:
        """A pad of the dims of ``source`` after its rows, to ``shape``; which of them comes first makes no difference.

        They are brought into the order of their amounts and sizes, and among equal ones into that whose source was seen first.
        """
        before, num_own = self.nodes[source].shape, len(label.config)
        assert before is not None
        keys = [*zip(label.config, shape[1:])]
        orders = [tuple(sorted(range(num_own), key=keys.__getitem__))]
        if num_own <= 4:
            ties = permutations(range(num_own))
            orders = [order for order in ties if all(keys[one] <= keys[then] for one, then in pairwise(order))]
        turned = [regrouped(before, ((0,), *((dim + 1,) for dim in order))) for order in orders]
        source, order = min((self.rearranged(index, source), order) for index, order in zip(turned, orders))
        sorted_shape = (shape[0], *(shape[dim + 1] for dim in order))
        sorted_label = _Pad(label.fill, tuple(label.config[dim] for dim in order))
        node = self.node("rows", sorted_label, (source,), sorted_shape, dtype)
        back = ((0,), *((order.index(dim) + 1,) for dim in range(num_own)))
        return self._on_top(regrouped(sorted_shape, back), node)

    def read(self, epochs: tuple[int, ...], source: int) -> int:
        """``source`` read from memory after so many writes to it; reads at the same moment are one read."""
        node = self.nodes[source]
        if node.op == "layout":
            assert isinstance(node.label, IndexMap)
            return self.node("layout", node.label, (self.read(epochs, node.children[0]),), node.shape, node.dtype)
        if node.op == "read":
            earlier: tuple[int, ...] = node.label  # type: ignore[assignment]
            later = epochs[1:] if earlier[-1] == epochs[0] else epochs
            return self.node("read", earlier + later, node.children, node.shape, node.dtype)
        return self.node("read", epochs, (source,), node.shape, node.dtype)

    def rows(self, label: Hashable, sources: Sequence[int], own: tuple[tuple[int, ...], ...], out: Value) -> int:
        """An op that works on the dims ``own`` of its sources, each group as one dim, and repeats over the others.

        The output either keeps all own dims (``out`` has the sources' rank) or none.
        """
        assert out.shape is not None
        own_dims = tuple(dim for group in own for dim in group)
        rank = len(self.nodes[sources[0]].shape or ())
        others = tuple(dim for dim in range(rank) if dim not in own_dims)
        children = tuple(
            self.rearranged(regrouped(self.nodes[source].shape or (), (others, *own)), source) for source in sources
        )
        if len(out.shape) == rank:
            shape = (prod(out.shape[dim] for dim in others), *(out.shape[dim] for dim in own_dims))
            order = (others, *((dim,) for dim in own_dims))
        else:
            shape, order = (prod(out.shape),), (tuple(range(len(out.shape))),)
        if isinstance(label, _Pad):
            made_rows = self._pad(label, children[0], shape, out.dtype)
        else:
            made_rows = self.node("rows", label, children, shape, out.dtype)
        return self.rearranged(ungrouped(out.shape, order), made_rows)

    # ------------------------------------------------ text

    def text(self, expression: int, depth: int = 4) -> str:
        """The expression for people, cut at ``depth``."""
        node = self.nodes[expression]
        if node.op == "leaf":
            return str(node.label[-1]) if isinstance(node.label, tuple) else str(node.label)
        if depth == 0 and node.children:
            return "..."
        inside = ", ".join(self.text(child, depth - 1) for child in node.children)
        if node.op == "layout" and isinstance(node.label, IndexMap):
            dims = ", ".join(" ".join(f"{size}:{step}" for size, step in dim) or "1:0" for dim in node.label.dims)
            return f"{inside}[{node.label.offset} + {dims}]"
        if node.label == "cast":
            return f"cast {node.dtype}({inside})"
        label = node.op if node.label is None else f"{node.op} {_plain(node.label)}"
        return f"{label}({inside})"


class _Computed(NamedTuple):
    """What an op gave."""

    op: Op  # kept alive, so that its id stays its own
    values: tuple[Value | None, ...]  # of the names in the op
    given: tuple[int, ...]  # expressions of its outputs


@dataclass(frozen=True, slots=True)
class _MovedRows:
    """A map over ``[rows, own dims...]``, split."""

    below: tuple[int, ...]  # for each child: the map that picks and orders its rows
    above: IndexMap  # over the new rows and the own dims
    num_rows: int  # after the split


@dataclass(frozen=True, slots=True)
class _Pad:
    """Label of a pad's expression."""

    fill: Hashable
    config: Config  # of each own dim

    def __str__(self) -> str:
        return f"pad {self.fill} {self.config}"


@dataclass(frozen=True, slots=True)
class _Padded:
    """A pad of one dim, in the shape in which its expression shows it."""

    sizes: Shape  # the expression's dims, split so that the padded one stands alone
    dim: int  # of ``sizes``: the padded one
    low: int
    high: int
    fill: Hashable
    source: int  # the padded expression; ``sizes`` without the fill


def _above_rows(starts: Sequence[int], dims: Sequence[Sequence], shape: Shape, num_rows: int) -> IndexMap:
    """The map over ``[num_rows, own dims...]`` once the rows stand in the order in which the output takes them."""
    radix = row_major(shape)
    step = num_rows * radix[0]
    result = []
    for pieces in dims:
        factors = []
        for piece in pieces:
            if piece.steps[0]:
                step //= piece.size
                factors.append((piece.size, step))
            else:
                factors.append((piece.size, sum(a * b for a, b in zip(piece.steps[1:], radix[1:]))))
        result.append(factors)
    return made(sum(a * b for a, b in zip(starts[1:], radix[1:])), result)


def _plain(label: Hashable) -> str:
    if isinstance(label, tuple):
        return "(" + ", ".join(map(_plain, label)) + ")"
    return str(label)


# ---------------------------------------------------------------- numbers


def _holds(dtype: str | None, number: Hashable) -> bool:
    """True where ``dtype`` has exactly this number; False where that is not certain.

    >>> _holds("bf16", 0.5), _holds("bf16", 0.1), _holds("f16", 1e6), _holds("i32", 0.5), _holds("bf16", float("-inf"))
    (True, False, False, False, True)
    """
    value = number.value if isinstance(number, _Literal) else number
    if dtype is None or not isinstance(value, (bool, int, float)):
        return False
    try:
        as_float = float(value)
    except OverflowError:
        return False
    if dtype in _INTS:
        low, high = _INTS[dtype]
        return math.isfinite(as_float) and value == int(value) and low <= value <= high
    if dtype not in _FLOATS:
        return False
    if not math.isfinite(as_float) or value == 0:
        return True
    bits, lowest, highest = _FLOATS[dtype]
    fraction, exponent = math.frexp(as_float)  # 0.5 <= |fraction| < 1
    return as_float == value and lowest <= exponent - 1 <= highest and (fraction * 2**bits).is_integer()


def _widens(narrow: str | None, wide: str | None) -> bool:
    """True where every float of dtype ``narrow`` is one of ``wide``."""
    if narrow is None or wide is None or narrow not in _FLOATS or wide not in _FLOATS:
        return False
    (bits, low, high), (wide_bits, wide_low, wide_high) = _FLOATS[narrow], _FLOATS[wide]
    smallest, wide_smallest = low - (bits - 1), wide_low - (wide_bits - 1)  # exponents of the smallest subnormals
    return bits <= wide_bits and wide_low <= low and wide_smallest <= smallest and high <= wide_high


@dataclass(frozen=True, slots=True)
class _Literal:
    """A number or other literal that keeps 1, 1.0 and True, 0.0 and -0.0 apart, and nan equal to itself."""

    type: str
    text: str
    value: object = field(compare=False)

    def __str__(self) -> str:
        return self.text


def _literal(value: object) -> _Literal:
    return _Literal(type(value).__name__, repr(value), value)


def _number(number: Hashable, dtype: str | None) -> Hashable:
    """A fill as the dtype that it gets holds it, so that 0 and 0.0 are one fill."""
    value = number.value if isinstance(number, _Literal) else number
    if not isinstance(value, (bool, int, float)) or not _holds(dtype, value):
        return _literal(value)
    return _literal(float(value) if dtype in _FLOATS else int(value))


# ---------------------------------------------------------------- Graph -> expressions


def _shared_ops(before: Graph, after: Graph) -> frozenset[int]:
    """Ids of the pure ops that both Graphs hold, as one object, and of such sub-ops of the others."""
    old, new = ({number_of(op): op for op in graph.ops} for graph in (before, after))
    shared = old.keys() & new.keys()
    old_leaves, new_leaves = (
        {number_of(leaf): leaf for number, op in ops.items() if number not in shared for leaf in op.leaves}
        for ops in (old, new)
    )
    old.update(old_leaves)
    shared |= old_leaves.keys() & new_leaves.keys()
    return frozenset(
        number
        for number in shared
        if not has_effect(old[number]) and effect_of(old[number]).kind is not Kind.BOOKKEEPING
    )


@dataclass
class _Evaluation:
    """One walk over a Graph's ops."""

    forms: Forms
    graph: Graph
    new_id: Mapping[str, str]
    epoch: Epoch | None
    shared: frozenset[int] = frozenset()  # ids of ops that are not opened
    taken: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by id of those: the expressions that they take
    is_certain: bool = True  # each of those takes the same wherever it stands
    observed: list[Observation] = field(default_factory=list)
    made: dict[str, tuple[int, bool]] = field(
        default_factory=dict
    )  # a value to the writes before it, and is it no view

    def run(self) -> GraphForm:
        env: dict[str, int] = {name: self.leaf(name) for name in self.graph.args}
        for pos, op in enumerate(self.graph.ops):
            if op.id not in (DEL, CLEAR):
                self.visit(pos, op, env)
        return GraphForm(env, tuple(self.observed))

    def leaf(self, name: str) -> int:
        value = self.graph.values.get(name)
        return self.forms.node("leaf", name, (), value.shape if value else None, value.dtype if value else None)

    def visit(self, pos: int, op: Op, env: dict[str, int]) -> None:
        """Gives the outputs of one op of the trace their expressions."""
        if self.is_shared(op, env):
            return
        taken = {name: env[name] if name in env else self.leaf(name) for name in op.inputs}
        effect = effect_of(op)
        if self.epoch is not None:
            is_view = _is_view(op)
            if not is_view:
                taken = {name: self.read(self.epoch(pos, name), name, source) for name, source in taken.items()}
            seen = [self.made.get(name, (0, False)) for name in op.inputs] if is_view else []
            for name in op.outputs:
                self.made[name] = (
                    seen[0] if seen else (self.epoch(pos + 1, name) or 0, effect.kind is not Kind.BOOKKEEPING)
                )
        if op.id == RETURN:
            self.observe(pos, op, taken)
        elif effect.kind is Kind.BOOKKEEPING:
            env.update((name, self.leaf(name)) for name in op.outputs)
        else:
            local = dict(taken)
            self.recall_or(self.evaluate, pos, op, local)
            env.update((name, local[name]) for name in op.outputs)

    def read(self, epoch: int | None, name: str, source: int) -> int:
        """What is in the memory of ``name`` after ``epoch`` writes to it: ``source`` itself where none came since that was made.

        Of what was computed it is told when that was: memory of its own does not see a write that a view made then would see.
        """
        made, is_computed = self.made.get(name, (0, False))
        if epoch is None or epoch == made:
            return source
        return self.forms.read((made, epoch) if is_computed else (epoch,), source)

    def is_shared(self, op: Op, env: dict[str, int]) -> bool:
        """True for one of `shared`, which then gives expressions of its own."""
        number = number_of(op) if self.shared else 0
        if number not in self.shared:
            return False
        taken = tuple([env[name] if name in env else self.leaf(name) for name in op.inputs])
        if self.taken.setdefault(number, taken) != taken:
            self.is_certain = False
        env.update(zip(op.outputs, self.forms.given(op, self.graph.values)))
        return True

    def recall_or(self, evaluate: Callable, pos: int, op: Op, env: dict[str, int]) -> None:
        """Puts the outputs of ``op``, which depend on its inputs alone, into ``env``; asks ``evaluate`` where they are not known."""
        if has_effect(op) or self.new_id:
            evaluate(pos, op, env)
            return
        values, taken = self.graph.values, tuple([env[name] for name in op.inputs])
        if (
            self.shared and op.subops
        ):  # in terms of what its shared sub-ops give, which is true of these two Graphs alone
            evaluate(pos, op, env)
            return
        given = self.forms.computed(op, taken, values)
        if given is None:
            evaluate(pos, op, env)
            self.forms.keep(op, taken, values, tuple([env[name] for name in op.outputs]))
        else:
            env.update(zip(op.outputs, given))

    def observe(self, pos: int, op: Op, env: Mapping[str, int]) -> None:
        names = [*refs(op.args), *(name for _, arg in op.kwargs for name in refs(arg))]
        self.observed.append(Observation(pos, op, tuple(env[name] for name in names)))

    def evaluate(self, pos: int, op: Op, env: dict[str, int]) -> None:
        """Puts the outputs of an op, or of a sub-op, into ``env``."""
        if self.is_shared(op, env):
            return
        for name in op.inputs:
            if name not in env:
                env[name] = self.leaf(name)
        is_named = bool(self.new_id) and (op.id in self.new_id or op.id in self.new_id.values())
        if has_effect(op) and not (op.is_fusion and op.subops):
            self.observe(pos, op, env)
            for name in op.outputs:
                self.bind(env, name, "leaf", ("effect", name), ())
        elif op.subops and not is_named:
            local = dict(env)
            for subop in op.subops:
                self.evaluate(pos, subop, local)
            env.update((name, local[name] if name in local else self.leaf(name)) for name in op.outputs)
        elif not set(op.outputs) <= set(op.inputs):  # an op that gives back its input gives nothing new
            self.recall_or(self.apply, pos, op, env)

    def bind(self, env: dict[str, int], name: str, op: str, label: Hashable, children: tuple[int, ...]) -> None:
        value = self.graph.values.get(name) or Value(name, kind="other")
        env[name] = self.forms.node(op, label, children, value.shape, value.dtype)

    def apply(self, pos: int, op: Op, env: dict[str, int]) -> None:
        """The outputs of a pure op without sub-ops."""
        loss = cross_entropy_of(op)
        if loss is not None and self.cross_entropy(loss, env):
            return
        if len(op.outputs) == 1:
            out = self.graph.values.get(op.outputs[0])
            if out is not None and out.shape is not None and out.kind == "tensor":
                known = self.known(op, env, out)
                if known is not None:
                    env[out.name] = known
                    return
        children: list[int] = []
        label = (self.callee(op), *self.pattern(op, env, children))
        if len(op.outputs) == 1:
            kind = "pointwise" if self.is_pointwise(op, env) else "apply"
            self.bind(env, op.outputs[0], kind, label, tuple(children))
            return
        call = self.forms.node("apply", label, tuple(children), None, None)
        for index, name in enumerate(op.outputs):
            self.bind(env, name, "item", index, (call,))

    def callee(self, op: Op) -> str:
        """The op's name, one for a prim and for the implementation that torch's executor registers for it."""
        replaced = self.new_id.get(op.id, op.id)
        return f"prims.{short_name(replaced)}" if _has_prim_signature(replaced) else replaced

    def pattern(self, op: Op, env: Mapping[str, int], children: list[int]) -> tuple[Hashable, ...]:
        """The arguments with values left out; the values go to ``children``."""

        def walk(arg: Arg) -> Hashable:
            if isinstance(arg, Ref):
                children.append(env[arg.name])
                return "_"
            if isinstance(arg, tuple):
                return tuple(walk(item) for item in arg)
            if isinstance(arg, Struct):
                return tuple((name, walk(item)) for name, item in arg.items)
            return arg.text if isinstance(arg, Const) else _literal(arg)

        args = tuple(walk(arg) for arg in op.args)
        return args, tuple((name, walk(arg)) for name, arg in sorted(op.kwargs, key=lambda item: item[0]))

    def is_pointwise(self, op: Op, env: Mapping[str, int]) -> bool:
        """True where each output element comes from the elements at its own index."""
        out = self.graph.values.get(op.outputs[0])
        if effect_of(op).kind is not Kind.POINTWISE or out is None or out.shape is None:
            return False
        tensors = [
            name for name in op.inputs if name not in self.graph.values or self.graph.values[name].kind == "tensor"
        ]
        return bool(tensors) and all(self.forms.nodes[env[name]].shape == out.shape for name in tensors)

    # ------------------------------------------------ ops with a rule of their own

    def known(self, op: Op, env: Mapping[str, int], out: Value) -> int | None:
        """The output of a layout, cast, constant, pad, concatenation or reduction; None for other and unclear ops."""
        name = short_name(op.id)
        if name == "full":
            return self.full(op, out)
        if name == "cat":
            return self.cat(op, env, out)
        if name == "where":
            return self.where(op, env, out)
        first = op.args[0] if op.args else None
        source = env.get(first.name) if isinstance(first, Ref) else None
        value = self.graph.values.get(first.name) if isinstance(first, Ref) else None
        if source is None or value is None or self.forms.nodes[source].shape is None:
            return None
        if effect_of(op).kind is Kind.LAYOUT:
            return self.layout(op, source, value, out)
        if name in _CASTS and (value.shape, value.device) == (out.shape, out.device):
            return self.forms.cast(out.dtype, source)
        if name == "pad":
            return self.pad(op, source, value, out)
        if name in _REDUCTIONS and _has_prim_signature(op.id):
            return self.reduction(op, name, source, value, out)
        return None

    def layout(self, op: Op, source: int, value: Value, out: Value) -> int | None:
        if value.dtype != out.dtype or value.device != out.device or value.shape is None:
            return None
        if short_name(op.id) in ("contiguous", "stride_order") and value.shape == out.shape:
            return source  # in which order elements lie in memory does not change a value
        layout = layout_of(op, self.graph.values)
        if layout is None:
            return None
        if isinstance(layout, (Same, Contiguous)):
            return source if value.shape == out.shape else None
        index = index_map(layout, value.shape)
        return None if index is None or index.shape != out.shape else self.forms.rearranged(index, source)

    def full(self, op: Op, out: Value) -> int | None:
        fill = op.args[1] if len(op.args) > 1 else op.kwarg("fill_value")
        if not isinstance(fill, (bool, int, float)):
            return None
        return self.forms.node("full", _number(fill, out.dtype), (), out.shape, out.dtype)

    def cat(self, op: Op, env: Mapping[str, int], out: Value) -> int | None:
        parts = op.args[0] if op.args else None
        given = op.args[1] if len(op.args) > 1 else op.kwarg("dim", 0)
        dims = _ints((given,))
        if not isinstance(parts, tuple) or dims is None or not out.shape:
            return None
        dim = dims[0] % len(out.shape)
        sources = [env[part.name] for part in parts if isinstance(part, Ref)]
        shapes = [self.forms.nodes[source].shape or () for source in sources]
        fits = all(
            len(shape) == len(out.shape) and _without(shape, dim) == _without(out.shape, dim) for shape in shapes
        )
        if (
            not sources
            or len(sources) != len(parts)
            or not fits
            or sum(shape[dim] for shape in shapes) != out.shape[dim]
        ):
            return None
        return self.forms.rows("cat", sources, ((dim,),), out)

    def where(self, op: Op, env: Mapping[str, int], out: Value) -> int | None:
        """``where(pad(True, False), a, 0)`` is a pad by 0 of what is left of ``a``; None for any other."""
        if len(op.args) != 3 or not (isinstance(op.args[0], Ref) and isinstance(op.args[1], Ref)) or out.shape is None:
            return None
        condition, source, other = env[op.args[0].name], env[op.args[1].name], op.args[2]
        mask = self.forms.padded(condition)
        if mask is None or isinstance(other, Ref) or other != 0 or self.forms.nodes[source].shape != out.shape:
            return None
        inner = self.forms.nodes[mask.source]
        is_mask = (inner.op, inner.label, mask.fill) == ("full", _number(True, "b8"), _number(False, "b8"))
        if not is_mask or self.forms.nodes[condition].shape != out.shape:
            return None
        cut = list(mask.sizes)
        cut[mask.dim] -= mask.low + mask.high
        left = self.forms.rearranged(_reshaped(tuple(cut)), self.forms.shown(mask, source))
        label = _Pad(_number(other, out.dtype), ((mask.low, mask.high, 0),))
        padded = self.forms.rows(label, [left], ((mask.dim,),), Value(out.name, mask.sizes, out.dtype))
        return self.forms.rearranged(_reshaped(out.shape), padded)

    def cross_entropy(self, loss: CrossEntropy, env: dict[str, int]) -> bool:
        """Gives the outputs of a cross entropy their expressions; False where its shapes are not those of one."""
        logits, target = env[loss.logits], env[loss.target]
        shape, rows = self.forms.nodes[logits].shape, self.forms.nodes[target].shape
        if shape is None or len(shape) != 2 or rows != shape[:1]:
            return False
        if loss.gradient is not None:
            return self.cross_entropy_gradient(loss, env, shape)
        for name, what in ((loss.a_max, "row maximum"), (loss.log_sum_exp, "row log_sum_exp")):
            env[name] = self.forms.rows((what, "nv_cross_entropy"), [logits], ((1,),), self.graph.values[name])
        ignored, dtype = self.forms.padded(target), self.forms.nodes[target].dtype
        is_held = _holds(dtype, loss.ignore_index)  # a label of -100 is a class where labels are bytes
        if ignored is not None and is_held and ignored.fill == _number(loss.ignore_index, dtype):
            logits = self.forms.shown(ignored, logits, shape[1:])
            target = self.forms.rearranged(
                _reshaped((prod(self.forms.nodes[ignored.source].shape or ()),)), ignored.source
            )
        self.bind(env, loss.scalar, "apply", ("nv_cross_entropy loss", loss.ignore_index), (logits, target))
        self.bind(env, loss.count, "apply", ("nv_cross_entropy count", loss.ignore_index), (target,))
        return True

    def cross_entropy_gradient(self, loss: CrossEntropy, env: dict[str, int], shape: Shape) -> bool:
        """Each element of the gradient comes from its logit, its class, and from what belongs to its row or to all rows."""
        assert loss.gradient is not None
        of_rows = [env[name] for name in (loss.target, loss.a_max, loss.log_sum_exp)]
        of_all = [env[name] for name in (loss.scalar, loss.count)]
        shapes = [self.forms.nodes[part].shape for part in (*of_rows, *of_all)]
        if shapes != [shape[:1]] * 3 + [()] * 2:
            return False
        rows, classes = shape
        iota = self.forms.node("apply", ("iota", "nv_cross_entropy"), (), (classes,), "i64")
        children = [env[loss.logits], self.forms.rearranged(made(0, [[(rows, 0)], [(classes, 1)]]), iota)]
        children += [self.forms.rearranged(made(0, [[(rows, 1)], [(classes, 0)]]), part) for part in of_rows]
        children += [self.forms.rearranged(made(0, [[(rows, 0)], [(classes, 0)]]), part) for part in of_all]
        self.bind(env, loss.gradient, "pointwise", ("nv_cross_entropy gradient", loss.ignore_index), tuple(children))
        return True

    def pad(self, op: Op, source: int, value: Value, out: Value) -> int | None:
        shape = value.shape or ()
        read = _pad_arguments(op, len(shape))
        if read is None or value.dtype != out.dtype:
            return None
        fill, config = read
        padded = zip(shape, config)
        if out.shape != tuple(low + high + size + max(size - 1, 0) * inner for size, (low, high, inner) in padded):
            return None
        own = tuple((dim,) for dim, one in enumerate(config) if one != (0, 0, 0))
        label = _Pad(_number(fill, out.dtype), tuple(one for one in config if one != (0, 0, 0)))
        return self.forms.rows(label, [source], own, out) if own else source

    def reduction(self, op: Op, name: str, source: int, value: Value, out: Value) -> int | None:
        shape = value.shape or ()
        given = op.args[1] if len(op.args) == 2 else None
        dims = _ints(given if isinstance(given, tuple) else (given,))
        if not dims or not shape:
            return None
        own = tuple(sorted({dim % len(shape) for dim in dims}))
        if len(own) != len(dims) or out.shape != tuple(size for dim, size in enumerate(shape) if dim not in own):
            return None
        options = tuple((key, _literal(arg)) for key, arg in sorted(op.kwargs, key=lambda item: item[0]))
        return self.forms.rows((name, options), [source], (own,), out)


def _reshaped(shape: Shape) -> IndexMap:
    """The map that gives elements in row-major order this shape."""
    return made(0, [[factor] for factor in zip(shape, row_major(shape))])


def _without(shape: Shape, dim: int) -> Shape:
    return shape[:dim] + shape[dim + 1 :]


def _has_prim_signature(op_id: str) -> bool:
    return op_id.startswith("prims.") or (op_id.startswith("torch_") and op_id.endswith("_impl"))


def _pad_arguments(op: Op, rank: int) -> tuple[Arg, Config] | None:
    """The fill and (low, high, dilation) of each dim; None where they are not plain numbers."""
    if _has_prim_signature(op.id):
        if len(op.args) != 3 or op.kwargs or not isinstance(op.args[2], tuple):
            return None
        fill, triples = op.args[1], [_ints(one) for one in op.args[2]]
    else:
        pairs = _ints(op.args[1] if len(op.args) > 1 else op.kwarg("pad"))
        mode = op.args[2] if len(op.args) > 2 else op.kwarg("mode", "constant")
        fill = op.args[3] if len(op.args) > 3 else op.kwarg("value")
        fill = 0 if fill is None else fill
        if pairs is None or mode != "constant" or len(pairs) % 2 or len(pairs) > 2 * rank:
            return None
        padded = [(low, high, 0) for low, high in zip(pairs[::2], pairs[1::2])]  # torch counts from the last dim
        triples = [*[(0, 0, 0)] * (rank - len(padded)), *padded[::-1]]
    config = tuple((one[0], one[1], one[2]) for one in triples if one is not None and len(one) == 3)
    if len(config) != rank or not isinstance(fill, (bool, int, float)):
        return None
    return fill, config


def _ints(arg: Arg) -> tuple[int, ...] | None:
    """The argument as a tuple of ints; None where it is anything else."""
    if not isinstance(arg, tuple):
        return None
    found = tuple(item for item in arg if isinstance(item, int) and not isinstance(item, bool))
    return found if len(found) == len(arg) else None

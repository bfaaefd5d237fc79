"""Which values share memory, how certain that is, and with which strides they see it.

Two questions are asked of sharing, and they err on different sides. *Price*: does this value cost bytes of its own? Values that
share for certain have one `Storage`; a layout that may be a view or a copy is priced as a copy. *Safety*: may a write to one
value change another? There every doubt counts as yes: storages that may share are one *group*, and order among the accesses of
a group must be kept where one of them writes.

What is known:

- strides start at arguments that carry them, pass through layout ops, and are row-major after matmuls, factories and what else
  torch makes dense; nvFuser's outputs are taken for row-major, as its allocator makes them. Unknown stays unknown.
- an output of a fusion region that is a layout, a copy or a cast to its own dtype of an *input*, or of another *output*, has the
  memory of that input or output (seen with nvFuser 0.2.36 for transpose, reshape, slice and expand); so it is with Inductor.
- an output of an nvFusion that views a value that the region computes and keeps to itself keeps that value, whole: one row of a
  layer norm holds all rows (seen with nvFuser 0.2.36 for slices of a cast, a layer norm, a softmax and a sum, and for the slice,
  reshape and transpose of a gradient: ViT's class token and patches). Inductor computes the slice alone.
- dims that a broadcast repeats take no memory, in torch's views and in the outputs of both compilers.
- ``copy_`` gives its destination, also inside a region; an operation without a row in `effects` may do anything to its inputs.

Values that come from outside may share memory with one another, which no trace tells: all of them are one group.

    >>> from thunder_fusionfix.model import Graph, Op, Ref, Value
    >>> x, y, z = (Value(name, (4, 2), "f32", "cuda:0") for name in "xyz")
    >>> ops = (Op("torch.permute", (Ref("x"), (1, 0)), Ref("y")), Op("torch.exp", (Ref("x"),), Ref("z")))
    >>> shared = aliases(Graph("f", "inference", ("x",), ops, {"x": x, "y": y, "z": z}))
    >>> shared.sharing("x", "y"), shared.sharing("x", "z")
    (<Sharing.CERTAIN: 'shares memory'>, <Sharing.NONE: 'apart'>)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from math import prod
from typing import NamedTuple

from thunder_fusionfix.effects import ATTENTION, FLASH, Copies, Effect, Kind, effect_of
from thunder_fusionfix.layout import Shape, Strides, Viewed, is_row_major, layout_of, row_major, source_of
from thunder_fusionfix.model import CLEAR, DEL, Graph, NewOp, Op, Value, kept_with_op, refs

# Kinds whose outputs may be their inputs whatever the row says: unknown ops, dropout that is off.
_MAY_GIVE_INPUTS = frozenset({Kind.BARRIER, Kind.RANDOM})
_REARRANGE = frozenset({Kind.LAYOUT, Kind.POINTWISE})  # of these `rearranged` tells which give their input

_EFFICIENT_ATTENTION = "sdpaex_grad_forward_scaled_dot_product_efficient_attention"
_CUDNN_ATTENTION = "cudnn_sdpa_fwd"

# Thunder's torch implementation fills a new tensor, also where nothing has to move.
_ALWAYS_COPIES = re.compile("torch_stride_order_prim_impl$")


class Sharing(Enum):
    """Whether two values have memory in common."""

    CERTAIN = "shares memory"
    POSSIBLE = "may share memory"
    NONE = "apart"


class Storage(NamedTuple):
    """One piece of memory and every value that sees it for certain."""

    id: int
    root: str  # the value that first had it
    names: tuple[str, ...]  # in order of appearance; the root is the first
    nbytes: int | None  # bytes, not rounded; None where shape or dtype is not known
    is_outside: bool  # there before the first op: an argument, or what a collection holds
    group: int  # storages with the same group may share memory


class Access(NamedTuple):
    """One op that reads or writes a group of storages."""

    pos: int  # position of the op in the Graph
    name: str  # the value through which it does
    writes: bool  # an unknown op is taken to write all that it is given


@dataclass(frozen=True)
class Aliases:
    """The memory of a Graph's tensors."""

    storages: tuple[Storage, ...]
    storage_of: Mapping[str, int]  # every tensor's name to the id of its storage
    strides: Mapping[str, Strides | None]  # elements; None where not known
    touched: tuple[
        tuple[int, Sequence[str], frozenset[str]], ...
    ]  # ops by position: tensors they take, and those they write

    @cached_property
    def accesses(self) -> Mapping[int, tuple[Access, ...]]:
        """By group: its accesses, in trace order."""
        found: dict[int, list[Access]] = {}
        for pos, names, written in self.touched:
            for name in names:
                found.setdefault(self.group_of(name), []).append(Access(pos, name, name in written))
        return {group: tuple(accesses) for group, accesses in sorted(found.items())}

    def sharing(self, one: str, other: str) -> Sharing:
        """Whether the tensors ``one`` and ``other`` share memory."""
        first, second = self.storage_of[one], self.storage_of[other]
        if first == second:
            return Sharing.CERTAIN
        return Sharing.POSSIBLE if self.storages[first].group == self.storages[second].group else Sharing.NONE

    def group_of(self, name: str) -> int:
        """The group of storages that the tensor ``name`` may share memory with."""
        return self.storages[self.storage_of[name]].group

    def bytes_of(self, names: Iterable[str], *, of_caller: bool = False) -> int:
        """Bytes of the distinct storages of ``names``; those that the caller owns count with ``of_caller`` only."""
        ids = {self.storage_of[name] for name in names if name in self.storage_of}
        return sum(self.storages[id].nbytes or 0 for id in ids if of_caller or not self.storages[id].is_outside)

    def is_written(self, name: str) -> bool:
        """True where some op may write to memory that ``name`` may see; False for what is no tensor."""
        return name in self.storage_of and self.group_of(name) in self.written_groups

    @cached_property
    def written_groups(self) -> frozenset[int]:
        """Groups to whose memory some op may write."""
        return frozenset(self.group_of(name) for _, names, written in self.touched for name in names if name in written)


def aliases(graph: Graph, forward: Graph | Aliases | None = None) -> Aliases:
    """The storages, strides and accesses of ``graph``.

    Args:
        graph: any Graph.
        forward: for a backward Graph, the forward that saved its tensors, or its aliases. It tells which saved tensors share
            one storage, and their strides; without it each saved tensor is counted on its own.
    """
    return _Walk(graph, aliases(forward) if isinstance(forward, Graph) else forward).run()


@dataclass
class _Walk:
    """One pass over a Graph's ops that finds the memory of every tensor."""

    graph: Graph
    forward: Aliases | None
    storage_of: dict[str, int] = field(default_factory=dict)
    strides: dict[str, Strides | None] = field(default_factory=dict)
    roots: list[str] = field(default_factory=list)  # by storage id
    names: list[list[str]] = field(default_factory=list)
    nbytes: list[int | None] = field(default_factory=list)
    outside: list[bool] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)  # union-find over storage ids: may share
    touched: list[tuple[int, Sequence[str], frozenset[str]]] = field(default_factory=list)

    def run(self) -> Aliases:
        for name in self.graph.args:
            self.bring_in(name)
        for pos, op in enumerate(self.graph.ops):
            self.visit(pos, op)
        groups = [self.find(id) for id in range(len(self.roots))]
        columns = zip(self.roots, self.names, self.nbytes, self.outside, groups)
        storages = tuple(
            Storage(id, root, tuple(names), nbytes, outside, group)
            for id, (root, names, nbytes, outside, group) in enumerate(columns)
        )
        return Aliases(storages, self.storage_of, self.strides, tuple(self.touched))

    # ------------------------------------------------ storages

    def is_tensor(self, name: str) -> bool:
        value = self.graph.values.get(name)
        return value is not None and value.kind == "tensor"

    def add(self, name: str, nbytes: int | None, strides: Strides | None, *, outside: bool = False) -> int:
        """A new storage, first seen as ``name``."""
        id = len(self.roots)
        self.roots.append(name)
        self.names.append([name])
        self.nbytes.append(nbytes)
        self.outside.append(outside)
        self.parent.append(id)
        self.storage_of[name] = id
        self.strides[name] = strides
        return id

    def share(self, name: str, source: str, strides: Strides | None) -> None:
        """``name`` is the memory of ``source``, seen with ``strides``."""
        id = self.storage_of[source]
        self.storage_of[name] = id
        self.strides[name] = strides
        self.names[id].append(name)

    def bring_in(self, name: str) -> None:
        """``name`` comes from outside: an argument, or a tensor that was saved."""
        if not self.is_tensor(name) or name in self.storage_of:
            return
        value = self.graph.values[name]
        strides = value.strides
        if self.forward is not None and name in self.forward.storage_of:
            strides = strides if strides is not None else self.forward.strides[name]
            saved = self.forward.storages[self.forward.storage_of[name]]
            for other in saved.names:
                if other in self.storage_of:
                    self.share(name, other, strides)
                    return
            id = self.add(name, saved.nbytes, strides, outside=True)
        else:
            id = self.add(name, span_bytes(value, strides), strides, outside=True)
        self.may_share(id, self.outside.index(True))

    def may_share(self, one: int, other: int) -> None:
        one, other = self.find(one), self.find(other)
        self.parent[max(one, other)] = min(one, other)

    def find(self, id: int) -> int:
        while self.parent[id] != id:
            self.parent[id] = self.parent[self.parent[id]]
            id = self.parent[id]
        return id

    # ------------------------------------------------ ops

    def visit(self, pos: int, op: Op) -> None:
        if op.id in (DEL, CLEAR):
            return
        known = self.storage_of
        inputs = [name for name in op.inputs if name in known]
        outputs = [name for name in op.outputs if name not in known and self.is_tensor(name)]
        effect = effect_of(op)
        if effect.kind is Kind.REGION or _is_told_by_parts(op, effect):
            written = self.visit_region(op, inputs, outputs)
        else:
            written = self.visit_single(op, effect, inputs, outputs)
        self.touched.append((pos, inputs, written))

    def visit_single(self, op: Op, effect: Effect, inputs: list[str], outputs: list[str]) -> frozenset[str]:
        """Places the outputs of an op that is no region; gives the inputs that it writes."""
        if effect.kind is Kind.BOOKKEEPING:
            for name in outputs:
                self.bring_in(name)
            return frozenset()
        if effect.writes:
            return self.visit_write(op, effect, inputs, outputs)
        if effect.kind is Kind.WAIT:
            return self.visit_wait(inputs, outputs)
        if len(outputs) == 1 and inputs:
            made = rearranged(op, self.graph.values, self.strides)
            if made is not None:
                self.place(outputs[0], made)
                return frozenset()
        for name in outputs:
            id = self.add_dense(name, computed_strides(op, self.graph.values, self.strides, name))
            if _may_give_inputs(effect):
                for source in inputs:
                    self.may_share(id, self.storage_of[source])
        return frozenset(inputs) if effect.kind is Kind.BARRIER else frozenset()

    def visit_write(self, op: Op, effect: Effect, inputs: list[str], outputs: list[str]) -> frozenset[str]:
        """An op that writes an argument gives that argument; where it is not found, each input may be it."""
        written = [name for name in _destinations(op, effect) if name in inputs]
        for name in outputs:
            if written:
                self.share(name, written[0], self.strides[written[0]])
                continue
            id = self.add_dense(name, None)
            for source in inputs:
                self.may_share(id, self.storage_of[source])
        return frozenset(written or inputs)

    def visit_wait(self, inputs: list[str], outputs: list[str]) -> frozenset[str]:
        """A wait gives the memory of its transfers. What a transfer in place fills is somebody's memory, written until then."""
        for name in outputs:
            if len(inputs) == 1:
                self.share(name, inputs[0], self.strides[inputs[0]])
            else:
                self.add_dense(name, None)
        return frozenset(name for name in inputs if self.roots[self.storage_of[name]] != name)

    def add_dense(self, name: str, strides: Strides | None) -> int:
        return self.add(name, span_bytes(self.graph.values[name], strides), strides)

    def place(self, name: str, made: Made) -> None:
        """Gives ``name`` the memory that a layout op makes or shares."""
        if made.viewed is Viewed.YES:
            self.share(name, made.source, made.strides)
            return
        id = self.add_dense(name, made.strides)
        self.may_share(id, self.storage_of[made.source])  # strides of the next run may make it a view

    def visit_region(self, op: Op, inputs: list[str], outputs: list[str]) -> frozenset[str]:
        """Places the outputs of a fusion region; gives the inputs that it writes."""
        if not op.subops:
            for name in outputs:
                id = self.add_dense(name, None)
                for source in inputs:
                    self.may_share(id, self.storage_of[source])
            return frozenset(inputs)
        inside = inside_of(op, self.graph.values, self.strides)
        found = inside.values
        for name in sorted(outputs, key=lambda name: name in found and found[name].anchor != name):  # anchors first
            seen = found.get(name)
            if seen is None:
                self.add_dense(name, None)
            elif seen.anchor is not None and seen.anchor != name and seen.anchor in self.storage_of:
                self.share(name, seen.anchor, seen.strides)
            elif (whole := inside.kept_whole(name)) is not None:
                self.add(name, self.graph.values[whole].nbytes, seen.strides)
            else:
                self.add_dense(name, seen.strides)
        for name in outputs:
            for other in inside.may_share.get(name, ()):
                if other in self.storage_of:
                    self.may_share(self.storage_of[name], self.storage_of[other])
        if not op.is_fusion:  # an executor may give views where its parts make memory
            for name in outputs:
                for other in (*inputs, outputs[0]):
                    self.may_share(self.storage_of[name], self.storage_of[other])
        return inside.written


def _may_give_inputs(effect: Effect) -> bool:
    """True for an op that computes, but may give an input, or a view of one, where there is nothing to compute."""
    return effect.kind in _MAY_GIVE_INPUTS or (effect.kind not in _REARRANGE and effect.copies is Copies.MAYBE)


def _is_told_by_parts(op: Op, effect: Effect) -> bool:
    """True for a composite without a row, or one that writes: batch_norm, seen as one op, changes its running averages."""
    if not op.subops:
        return False
    return effect.kind is Kind.BARRIER or any(effect_of(leaf).writes for leaf in op.leaves)


def reach_caller(graph: Graph, placed: Iterable[NewOp] = ()) -> frozenset[str]:
    """Values that the caller gets, and those of which it may get a view once the ops ``placed`` stand in the trace.

    What a forward trace saves is not the caller's. The caller may write to what it gets, and what shares memory with it then changes.
    """
    result = graph.result[:1] if graph.stage == "forward" and isinstance(graph.result, tuple) else graph.result
    sources: dict[str, list[str]] = {}
    for op in graph.ops:
        for leaf in op.leaves:
            effect = effect_of(leaf)
            if effect.kind in _REARRANGE and effect.copies is not Copies.ALWAYS:
                for name in leaf.outputs:
                    sources.setdefault(name, []).extend(leaf.inputs[:1])
    for new in placed:
        sources.setdefault(new.output, []).extend(refs(new.args[:1]))
    found, left = set[str](), list(refs(result))
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += sources.get(name, ())
    return frozenset(found)


# ---------------------------------------------------------------- single ops


class Made(NamedTuple):
    """What a layout op, or a cast, makes of its source."""

    source: str
    viewed: Viewed
    strides: Strides | None  # of the output


def rearranged(op: Op, values: Mapping[str, Value], strides: Mapping[str, Strides | None]) -> Made | None:
    """How the output of a layout op sees its source; None for an op that computes.

    A cast to the dtype that its source has gives the source itself and counts as a layout. ``strides`` are those of the names
    that ``op`` takes.
    """
    effect = effect_of(op)
    if effect.kind is not Kind.LAYOUT and effect.copies is Copies.ALWAYS:
        return None
    source = source_of(op)
    if source is None or source not in strides or len(op.outputs) != 1:
        return None
    before, after = values.get(source), values.get(op.outputs[0])
    if before is None or after is None or before.kind != "tensor":
        return None
    seen = strides[source]
    layout = layout_of(op, values)
    if layout is not None and before.shape is not None:
        viewed = Viewed.NO if _ALWAYS_COPIES.match(op.id) else layout.view(before.shape, seen)
        return Made(source, viewed, layout.strides_after(before.shape, seen))
    if effect.kind is Kind.LAYOUT:
        viewed = {Copies.NEVER: Viewed.YES, Copies.MAYBE: Viewed.UNKNOWN, Copies.ALWAYS: Viewed.NO}[effect.copies]
        return Made(source, viewed, None)
    if effect.copies is Copies.NEVER:
        return Made(source, Viewed.YES, None)
    if effect.kind is Kind.POINTWISE and effect.copies is Copies.MAYBE and not op.kwarg("copy"):
        if before.dtype is None or after.dtype is None:
            return Made(source, Viewed.UNKNOWN, None)
        if (before.dtype, before.device) == (after.dtype, after.device):
            return Made(source, Viewed.YES, seen)
    return None


def computed_strides(
    op: Op, values: Mapping[str, Value], strides: Mapping[str, Strides | None], output: str
) -> Strides | None:
    """Strides that torch gives the tensor ``output``, which ``op`` computes; None where they are not certain."""
    shape = values[output].shape
    if shape is None:
        return None
    kind = effect_of(op).kind
    tensors = [name for name in op.inputs if name in strides and values[name].kind == "tensor"]
    if op.id == _CUDNN_ATTENTION:  # Thunder allocates what cuDNN fills, whatever the query's order
        return row_major(shape) if output in op.outputs[:2] else None
    if op.id in (_EFFICIENT_ATTENTION, FLASH, ATTENTION):
        return _attention_strides(op, shape, strides) if output == op.outputs[0] else None
    if kind is Kind.MATMUL:
        # With the larger rank on the right torch folds the transposed product and gives a transposed result.
        ranks = [len(values[name].shape or ()) for name in refs(op.args[:2]) if name in tensors]
        return row_major(shape) if len(ranks) == 2 and ranks[0] >= ranks[1] else None
    if kind not in (Kind.POINTWISE, Kind.REDUCTION, Kind.MOVE, Kind.FACTORY):
        return None
    full = [name for name in tensors if kind is not Kind.POINTWISE or len(values[name].shape or ()) == len(shape)]
    return row_major(shape) if all(_is_dense(values[name].shape, strides[name]) for name in full) else None


def _attention_strides(op: Op, shape: Shape, strides: Mapping[str, Strides | None]) -> Strides | None:
    """Strides of an attention's result, [batch, heads, length, width].

    Both kernels of torch work on [batch, length, heads, width]. The efficient one gives a transposed view of such a tensor, the
    flash one a tensor in the memory order of its query (aten/src/ATen/native/transformers/cuda/attention.cu), as cuDNN's does;
    Thunder pads widths that are no multiple of 8 for it.
    """
    query = source_of(op)
    if len(shape) != 4 or query is None:
        return None
    if op.id == _EFFICIENT_ATTENTION:
        batch, length, heads, width = row_major((shape[0], shape[2], shape[1], shape[3]))
        return batch, heads, length, width
    return _packed_as(shape, strides.get(query)) if shape[3] % 8 == 0 else None


def _packed_as(shape: Shape, strides: Strides | None) -> Strides | None:
    """Strides of a new tensor whose dims lie in the order in which those of one with ``strides`` do; None where that is no order.

    >>> _packed_as((2, 3, 4, 8), (300, 8, 70, 1))
    (96, 8, 24, 1)
    """
    if strides is None or len({stride for size, stride in zip(shape, strides) if size != 1} - {0}) < sum(
        size != 1 for size in shape
    ):
        return None
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim]))
    packed = dict(zip(order, row_major(tuple(shape[dim] for dim in order))))
    return tuple(packed[dim] for dim in range(len(shape)))


def _is_dense(shape: Shape | None, strides: Strides | None) -> bool:
    return shape is not None and strides is not None and is_row_major(shape, strides)


def span_bytes(value: Value, strides: Strides | None) -> int | None:
    """Bytes that a new tensor of this shape takes: dims of stride 0 repeat elements and take none."""
    if strides is None or 0 not in strides or value.shape is None or value.itemsize is None:
        return value.nbytes
    return value.itemsize * prod(size if stride else min(size, 1) for size, stride in zip(value.shape, strides))


# ---------------------------------------------------------------- regions


class Seen(NamedTuple):
    """A value inside a region.

    ``anchor`` is the region's input or output whose memory it is: itself where it is an output with memory of its own, None
    where it never gets memory unless the compiler writes it out.
    """

    anchor: str | None
    strides: Strides | None
    root: str | None = None  # the value of which it is a view, or itself; None for inputs and what they give


@dataclass(frozen=True)
class Inside:
    """The memory of a region's values, as seen from the region's inputs and outputs."""

    values: Mapping[str, Seen]  # every name that the region's leaves take or give
    may_share: Mapping[str, tuple[str, ...]]  # an output to the inputs and outputs whose memory it may have
    written: frozenset[str]  # inputs that the region writes

    def kept_whole(self, output: str) -> str | None:
        """The value that the region writes out whole because ``output``, which has memory of its own, is a view of it."""
        seen = self.values[output]
        return seen.root if seen.anchor == output != seen.root else None


def inside_of(op: Op, values: Mapping[str, Value], strides: Mapping[str, Strides | None]) -> Inside:
    """What each leaf of the fusion region ``op`` makes, given the ``strides`` of the region's inputs."""
    return _inside_of(op, tuple(map(values.get, op.names)), tuple(map(strides.get, op.inputs)))


@kept_with_op
def _inside_of(op: Op, named: tuple[Value | None, ...], strides: tuple[Strides | None, ...]) -> Inside:
    """`inside_of`; ``named`` are the values of ``op.names``, ``strides`` those of ``op.inputs``."""
    walk = _InsideWalk(op, {value.name: value for value in named if value is not None})
    walk.seen = {name: Seen(name, own) for name, own in zip(op.inputs, strides)}
    for leaf in op.leaves:
        walk.visit(leaf)
    may_share = {name: tuple(other for other in walk.doubts.get(name, ()) if other != name) for name in op.outputs}
    return Inside(walk.seen, may_share, frozenset(walk.written & set(op.inputs)))


@dataclass
class _InsideWalk:
    """One pass over a region's leaves."""

    region: Op
    values: Mapping[str, Value]
    seen: dict[str, Seen] = field(default_factory=dict)
    doubts: dict[str, tuple[str, ...]] = field(default_factory=dict)  # a value to the anchors that it may share with
    written: set[str] = field(default_factory=set)  # anchors
    viewed: dict[str, str] = field(default_factory=dict)  # a root that is no output to the output that keeps it

    @cached_property
    def is_nvfusers(self) -> bool:
        return self.region.id.startswith("nvFusion")

    def visit(self, leaf: Op) -> None:
        effect = effect_of(leaf)
        strides = {name: self.seen[name].strides for name in leaf.inputs if name in self.seen}
        made = None if effect.writes else self.made(leaf, strides)
        reached = self.reached(leaf.inputs)
        destinations = self.reached(tuple(_destinations(leaf, effect))) or reached
        for name in leaf.outputs:
            if name in self.seen:
                continue
            if effect.writes:
                self.seen[name] = self.destination(leaf, effect)
                self.doubts[name] = destinations
            elif made is not None:
                self.seen[name] = self.rearrange(name, made)
                self.doubts[name] = self.reached((made.source,))
            else:
                self.seen[name] = Seen(self.own(name), self.computed(leaf, name, strides), name)
                self.doubts[name] = reached if _may_give_inputs(effect) else ()
        if effect.writes:
            self.written.update(destinations)
        elif effect.kind is Kind.BARRIER:
            self.written.update(reached)

    def own(self, name: str) -> str | None:
        """The anchor of a value that is new memory: itself where it leaves the region."""
        return name if name in self.region.outputs else None

    def made(self, leaf: Op, strides: Mapping[str, Strides | None]) -> Made | None:
        """`rearranged`; to nvFuser a pad by nothing is a view."""
        source = source_of(leaf)
        if self.is_nvfusers and source is not None and source in strides and _pads_nothing(leaf):
            return Made(source, Viewed.YES, strides[source])
        return rearranged(leaf, self.values, strides)

    def rearrange(self, name: str, made: Made) -> Seen:
        if made.viewed is not Viewed.YES:
            return Seen(self.own(name), made.strides, name)
        source = self.seen[made.source]
        if source.anchor is not None or name not in self.region.outputs:
            return Seen(source.anchor, made.strides, source.root)
        if not self.is_nvfusers or source.root is None:
            return Seen(name, _packed(self.values[name], made.strides), name)
        return Seen(self.viewed.setdefault(source.root, name), made.strides, source.root)

    def computed(self, leaf: Op, name: str, strides: Mapping[str, Strides | None]) -> Strides | None:
        """nvFuser makes what it computes row-major; Inductor keeps the strides that torch would give."""
        if not self.is_nvfusers:
            return computed_strides(leaf, self.values, strides, name)
        shape = self.values[name].shape
        return None if shape is None else row_major(shape)

    def destination(self, leaf: Op, effect: Effect) -> Seen:
        """What a write gives back: the value that it wrote."""
        found = [self.seen[name] for name in _destinations(leaf, effect) if name in self.seen]
        return found[0] if found else Seen(None, None)

    def reached(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Inputs and outputs of the region whose memory ``names`` have or may have."""
        found: dict[str, None] = {}
        for name in names:
            anchor = self.seen[name].anchor if name in self.seen else None
            if anchor is not None:
                found[anchor] = None
            found.update(dict.fromkeys(self.doubts.get(name, ())))
        return tuple(found)


def _destinations(op: Op, effect: Effect) -> list[str]:
    """Names of the arguments that a writing op changes, where they are given by position."""
    return [name for index in effect.writes for name in refs(op.args[index : index + 1])]


def _pads_nothing(op: Op) -> bool:
    """True for ``prims.pad`` by (0, 0, 0) along every dim."""
    widths = op.args[2] if op.id == "prims.pad" and len(op.args) > 2 else None
    return isinstance(widths, tuple) and all(width == (0, 0, 0) for width in widths)


def _packed(value: Value, strides: Strides | None) -> Strides | None:
    """Row-major strides of a new tensor that keeps repeated dims at stride 0, as compilers allocate such outputs."""
    if value.shape is None or strides is None:
        return None
    kept = tuple(size if stride else 1 for size, stride in zip(value.shape, strides))
    return tuple(step if stride else 0 for step, stride in zip(row_major(kept), strides))

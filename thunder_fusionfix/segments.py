"""What a fusion region writes to memory besides its outputs.

nvFuser compiles a region to one kernel where it can. Where it cannot, it cuts the region into segments, and what crosses a cut is
written out whole. Inductor makes no such cuts for the layouts that matter here: a TorchCompile region has no temporaries.

The rule, for nvFuser 0.2.36:

1. A ``stride_order`` between something computed in the region (a cast is enough) and further compute is a cut: its source is
   written out, in the dtype that the source has by then. So is a ``reshape`` in a region that reduces, unless it only adds or
   drops dims of size 1; a region of elementwise ops reads through it. A ``pad`` of something computed is a cut too.
2. Past a cut, a reshape that is a view of what was written costs nothing more; ``stride_order``, and a reshape that is no view,
   write a second tensor.
3. A written tensor lives from the segment that writes it to the last segment that reads it, so two neighbours are alive at
   once. The region's outputs count for the whole region.
4. Layouts of a region *input*, with nothing computed before them, cost nothing if they are views.

Evidence: measured on an H200, extra bytes over bf16[1, 4096, 152064] logits (float, slice, stride_order, reshape and
nv_cross_entropy in one region); f32[1, 4095, 152064] is 2,491 MB, the bf16 gradient 1,246 MB:

- forward: 4,983 MB = two f32 tensors (the slice, and its ``stride_order``);
- backward: 6,229 MB = two f32 tensors and the gradient;
- slice, contiguous and view done outside as views, only the cast inside: forward 0.04 MB, backward 3,737 MB = one f32 tensor (the
  gradient before its reshape and pad) and the gradient;
- reshape done after the pad, cast before it: 2,491 MB = one bf16 tensor (before the pad) and the gradient;
- whole logits, labels shifted instead (cast, reshape and nv_cross_entropy): forward 0.06 MB where the reshape only drops the
  batch of 1, 2,491 MB at batch 2; backward, all elementwise, nothing but the gradient at either.

Left out: values that a later segment needs besides the ones written at cuts (nvFuser computes many of them again), cuts for
other reasons (several reductions over different dims, cat), and buffers of reductions across blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from thunder_fusionfix.alias import Aliases, inside_of, rearranged
from thunder_fusionfix.effects import Kind, effect_of, is_layout, short_name
from thunder_fusionfix.layout import Strides, Viewed, row_major, source_of
from thunder_fusionfix.model import Graph, Op, Value, kept_with_op

# composites that reduce, by short name
_REDUCING = frozenset({"nv_cross_entropy_fwd", "cross_entropy", "softmax", "log_softmax", "layer_norm", "rms_norm"})


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor that a region writes only for itself."""

    name: str  # the value inside the region
    nbytes: int  # not rounded; 0 where not known
    cut_by: str  # id of the sub-op that made it necessary: "prims.reshape"
    cut_at: str  # what that sub-op gives
    start: int  # segment that writes it
    end: int  # one past the last segment that reads it


@dataclass(frozen=True, slots=True)
class Temporaries:
    """The memory that a region needs while it runs, besides its inputs and outputs."""

    boundaries: tuple[Boundary, ...]
    at_peak: tuple[tuple[str, int], ...]  # name and bytes of those alive in the segment that needs the most

    @property
    def peak_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.at_peak)


NOTHING = Temporaries((), ())


def temporaries_of(op: Op, values: Mapping[str, Value], strides: Mapping[str, Strides | None]) -> Temporaries:
    """What the region ``op`` writes besides its outputs; ``strides`` are those of its inputs."""
    if not op.id.startswith("nvFusion"):
        return NOTHING
    return _temporaries(op, tuple(map(values.get, op.names)))


@kept_with_op
def _temporaries(op: Op, named: tuple[Value | None, ...]) -> Temporaries:
    """`temporaries_of` a region of nvFuser's; ``named`` are the values of ``op.names``."""
    boundaries = _Cuts(op, {value.name: value for value in named if value is not None}).run()
    best: tuple[Boundary, ...] = ()
    for segment in sorted({boundary.start for boundary in boundaries}):
        alive = tuple(b for b in boundaries if b.start <= segment < b.end)
        if sum(b.nbytes for b in alive) > sum(b.nbytes for b in best):
            best = alive
    return Temporaries(boundaries, tuple((b.name, b.nbytes) for b in best))


@dataclass
class _Cuts:
    """One walk over a region's leaves that finds where nvFuser cuts it."""

    region: Op
    values: Mapping[str, Value]
    segment: dict[str, int] = field(default_factory=dict)  # a value to the segment that computes it
    computed: set[str] = field(default_factory=set)  # values that are more than a layout of an input
    seen_in: dict[str, tuple[str, Strides | None]] = field(
        default_factory=dict
    )  # a value to the written tensor it views
    written: dict[str, tuple[Op, int]] = field(
        default_factory=dict
    )  # to the sub-op that forced it and the writing segment
    last_read: dict[str, int] = field(default_factory=dict)  # a written tensor to a segment

    def run(self) -> tuple[Boundary, ...]:
        self.segment = dict.fromkeys(self.region.inputs, 0)
        for leaf in self.region.leaves:
            self.visit(leaf)
        return tuple(
            Boundary(
                name,
                nbytes=self.values[name].nbytes or 0,
                cut_by=leaf.id,
                cut_at=leaf.outputs[0],
                start=start,
                end=max(self.last_read.get(name, start), start) + 1,
            )
            for name, (leaf, start) in self.written.items()
            if name not in self.region.outputs
        )

    def visit(self, leaf: Op) -> None:
        sources = [name for name in leaf.inputs if name in self.segment]
        source = source_of(leaf)
        if source in self.computed and source not in self.seen_in and self.is_cut(leaf):
            self.write(source, leaf, self.segment[source])
        here = max((self.segment[name] for name in sources), default=0)
        for name in sources:
            if name in self.seen_in:
                tensor, _ = self.seen_in[name]
                here = max(here, self.written[tensor][1] + 1)
                self.last_read[tensor] = max(self.last_read.get(tensor, 0), here)
        for name in leaf.outputs:
            self.segment[name] = here
        if not is_layout(leaf) or not self.computed.isdisjoint(sources):
            self.computed.update(leaf.outputs)
        if is_layout(leaf) and source in self.seen_in and len(leaf.outputs) == 1:
            self.rearrange(leaf, source, here)

    def write(self, name: str, leaf: Op, segment: int) -> None:
        """``name`` is written out by ``segment`` because of ``leaf``."""
        shape = self.values[name].shape
        self.seen_in[name] = (name, None if shape is None else row_major(shape))
        self.written[name] = (leaf, segment)

    def rearrange(self, leaf: Op, source: str, here: int) -> None:
        """The layout ``leaf`` past a cut: a view of what was written, or a second tensor."""
        tensor, strides = self.seen_in[source]
        made = rearranged(leaf, self.values, {source: strides})
        if made is not None and made.viewed is Viewed.YES and short_name(leaf.id) != "stride_order":
            self.seen_in[leaf.outputs[0]] = (tensor, made.strides)
        elif self.feeds_compute(leaf):
            self.write(leaf.outputs[0], leaf, here)

    def is_cut(self, leaf: Op) -> bool:
        """True for a sub-op that nvFuser cannot read through to what its source is computed from."""
        name = short_name(leaf.id)
        if name == "pad":
            return True
        if name == "stride_order":
            return self.feeds_compute(leaf)
        return name == "reshape" and self.reduces and not self.drops_units(leaf) and self.feeds_compute(leaf)

    @cached_property
    def reduces(self) -> bool:
        return any(
            effect_of(leaf).kind is Kind.REDUCTION or short_name(leaf.id) in _REDUCING for leaf in self.region.leaves
        )

    def drops_units(self, leaf: Op) -> bool:
        """True where a reshape only adds or drops dims of size 1."""
        before, after = (self.values[name].shape or () for name in (leaf.inputs[0], leaf.outputs[0]))
        return [size for size in before if size != 1] == [size for size in after if size != 1]

    @cached_property
    def users(self) -> Mapping[str, tuple[Op, ...]]:
        found: dict[str, list[Op]] = {}
        for leaf in self.region.leaves:
            for name in leaf.inputs:
                found.setdefault(name, []).append(leaf)
        return {name: tuple(leaves) for name, leaves in found.items()}

    def feeds_compute(self, leaf: Op) -> bool:
        """True where an op that computes takes the output of ``leaf``, at once or through further layouts."""
        todo = list(leaf.outputs)
        while todo:
            for user in self.users.get(todo.pop(), ()):
                if not is_layout(user):
                    return True
                todo.extend(user.outputs)
        return False


# ---------------------------------------------------------------- what each layout costs


class Cost(Enum):
    """What a layout op in a region costs."""

    BYTES = "bytes"  # a tensor is written that a view would not need
    LAUNCH = "a launch"  # a passenger: its output is the memory of an input or of another output
    NOTHING = "nothing"  # an index map inside a kernel


@dataclass(frozen=True, slots=True)
class LayoutCost:
    """One layout op of a region and its price."""

    pos: int  # position of the region
    region: str  # its id
    output: str  # the value that the layout op gives
    op_id: str  # "prims.reshape"
    cost: Cost
    nbytes: int  # bytes that are written for it; 0 unless ``cost`` is BYTES


def layout_costs(graph: Graph, shared: Aliases) -> tuple[LayoutCost, ...]:
    """Every layout op in the fusion regions of ``graph`` with what it costs, in trace order; a ``shallow_copy`` is none."""
    return tuple(
        cost
        for pos, op in enumerate(graph.ops)
        if op.is_fusion
        for cost in _costs_in(pos, op, graph.values, shared.strides)
    )


def _costs_in(
    pos: int, region: Op, values: Mapping[str, Value], strides: Mapping[str, Strides | None]
) -> Iterator[LayoutCost]:
    inside = inside_of(region, values, strides)
    written: dict[str, int] = {}  # a sub-op's output to the bytes that are written because of it
    for boundary in temporaries_of(region, values, strides).boundaries:
        written[boundary.cut_at] = written.get(boundary.cut_at, 0) + boundary.nbytes
    for leaf in region.leaves:
        if not is_layout(leaf) or len(leaf.outputs) != 1 or short_name(leaf.id) == "shallow_copy":
            continue
        (output,) = leaf.outputs
        cost, nbytes = Cost.NOTHING, written.get(output, 0)
        if nbytes:
            cost = Cost.BYTES
        elif output in region.outputs:
            source = inside.values.get(source_of(leaf) or "")
            is_copy = inside.values[output].anchor == output and source is not None and source.anchor is not None
            cost, nbytes = (Cost.BYTES, values[output].nbytes or 0) if is_copy else (Cost.LAUNCH, 0)
        yield LayoutCost(pos, region.id, output, leaf.id, cost, nbytes)

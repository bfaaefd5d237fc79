"""What a fusion region writes to memory besides its outputs.

nvFuser compiles a region to one kernel where it can. Where it cannot, it cuts the region into segments, and what crosses a cut is
written out whole. Inductor makes no such cuts for the layouts that matter here: a TorchCompile region has no temporaries.

The rule, for nvFuser 0.2.36:

1. A ``reshape`` or ``stride_order`` between something computed in the region (a cast is enough) and further compute is a cut:
   its source is written out, in the dtype that the source has by then. A ``pad`` of something computed is a cut too.
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
- reshape done after the pad, cast before it: 2,491 MB = one bf16 tensor (before the pad) and the gradient.

Left out: values that a later segment needs besides the ones written at cuts (nvFuser computes many of them again), cuts for
other reasons (several reductions over different dims, cat), and buffers of reductions across blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thunder_fusionfix.alias import rearranged
from thunder_fusionfix.effects import is_layout, short_name
from thunder_fusionfix.layout import Strides, Viewed, row_major, source_of
from thunder_fusionfix.model import Op, Value

_CUTTING = frozenset({"reshape", "stride_order"})


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor that a region writes only for itself."""

    name: str  # the value inside the region
    nbytes: int  # not rounded; 0 where not known
    cut_by: str  # id of the sub-op that made it necessary: "prims.reshape"
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
    boundaries = _boundaries(op, values)
    best: tuple[Boundary, ...] = ()
    for segment in sorted({boundary.start for boundary in boundaries}):
        alive = tuple(b for b in boundaries if b.start <= segment < b.end)
        if sum(b.nbytes for b in alive) > sum(b.nbytes for b in best):
            best = alive
    return Temporaries(boundaries, tuple((b.name, b.nbytes) for b in best))


def _boundaries(op: Op, values: Mapping[str, Value]) -> tuple[Boundary, ...]:
    leaves = op.leaves
    users: dict[str, list[Op]] = {}
    for leaf in leaves:
        for name in leaf.inputs:
            users.setdefault(name, []).append(leaf)
    segment: dict[str, int] = {name: 0 for name in op.inputs}  # that computes a value
    computed: dict[str, bool] = {name: False for name in op.inputs}
    memory: dict[str, tuple[str, Strides | None]] = {}  # what is written past a cut, and the strides that see it
    written: dict[str, tuple[str, int]] = {}  # a boundary to the cutting sub-op and the segment that writes it
    last_read: dict[str, int] = {}
    for leaf in leaves:
        sources = [name for name in leaf.inputs if name in segment]
        here = max((segment[name] for name in sources), default=0)
        source = source_of(leaf)
        layout = is_layout(leaf)
        is_cut = (
            source in segment
            and computed[source]
            and (short_name(leaf.id) == "pad" or (short_name(leaf.id) in _CUTTING and _feeds_compute(leaf, users)))
        )
        output = leaf.outputs[0] if len(leaf.outputs) == 1 else None
        if is_cut and source is not None:
            if source not in memory:
                shape = values[source].shape
                memory[source] = (source, None if shape is None else row_major(shape))
                written.setdefault(source, (leaf.id, segment[source]))
            here = max(here, written[memory[source][0]][1] + 1)
        for name in sources:
            if name in memory:
                held = memory[name][0]
                here = max(here, written[held][1] + 1)
                last_read[held] = max(last_read.get(held, 0), here)
        for name in leaf.outputs:
            segment[name] = here
            computed[name] = not layout or any(computed[name] for name in sources)
        if layout and output is not None and source in memory and source is not None:
            held, seen = memory[source]
            made = rearranged(leaf, values, {source: seen})
            if made is not None and made.viewed is Viewed.YES and short_name(leaf.id) != "stride_order":
                memory[output] = (held, made.strides)
            elif _feeds_compute(leaf, users):
                shape = values[output].shape
                memory[output] = (output, None if shape is None else row_major(shape))
                written[output] = (leaf.id, here)
    outputs = frozenset(op.outputs)
    return tuple(
        Boundary(name, values[name].nbytes or 0, cut_by, start, max(last_read.get(name, start), start) + 1)
        for name, (cut_by, start) in written.items()
        if name not in outputs
    )


def _feeds_compute(leaf: Op, users: Mapping[str, list[Op]]) -> bool:
    """True where an op that computes takes the output of ``leaf``, at once or through further layouts."""
    todo = list(leaf.outputs)
    while todo:
        for user in users.get(todo.pop(), ()):
            if not is_layout(user):
                return True
            todo.extend(user.outputs)
    return False

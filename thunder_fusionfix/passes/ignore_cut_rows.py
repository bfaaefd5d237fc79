"""Rows that are cut off before a cross entropy stay, and are ignored by their label instead.

Stage: final, forward or backward, before layouts leave regions. Needs: nvFuser regions with their sub-ops. Keeps: every name that
is used outside regions, what is saved for the backward, and the value of each. Changes: over which rows the loss is computed;
adds small ops between regions.

The loss of a causal LM drops the last position of each sequence and flattens what is left. At batch 2 and more that is a copy of
the logits, in the forward and again in the backward; at any batch the gradient is written twice: before and after its pad.

    t1 = prims.slice_prim(logits, ...)                  # logits: "cuda:0 bf16[2, 2048, 152064]"
    t2 = prims.reshape(t1, (4094, 152064))              # a copy
    loss, m, s, n = nv_cross_entropy_fwd(t2, target)    # target: "cuda:0 i64[4094]"
    ...
    t5 = nv_cross_entropy_bwd(g, t2, target, m, s, n)
    t6 = prims.pad(prims.reshape(t5, (2, 2047, 152064)), 0, ...)

A row whose label is ``ignore_index`` adds nothing to the loss, to its count or to a gradient. So the loss of all rows, the cut ones
with that label, is the same loss, all logits seen as rows are a view at any batch, and no gradient needs a pad:

    t2 = prims.reshape(logits, (4096, 152064))          # a view
    t3 = pad(target, ignore_index)                      # "cuda:0 i64[4096]"
    loss, m', s', n = nv_cross_entropy_fwd(t2, t3)      # m, s: those of m', s' that were there before
    ...
    t6 = reshape(where(is_kept, nv_cross_entropy_bwd(g, t2, t3, pad(m), pad(s), n), 0))

The ``where`` is for logits that are no numbers: 0 * nan would reach the gradient of a row that the user cut off. Newer releases of
transformers shift and pad the labels themselves; this makes the older form cost the same.

The forward and the backward are rewritten each by itself: what is saved between them has the shape that it had.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from thunder_fusionfix.document import megabytes
from thunder_fusionfix.effects import Kind, effect_of, short_name
from thunder_fusionfix.facts import Facts
from thunder_fusionfix.index_map import IndexMap, compose, index_map, refine
from thunder_fusionfix.layout import Contiguous, Layout, Reshape, Same, Shape, as_prim, layout_of
from thunder_fusionfix.losses import CrossEntropy, cross_entropy_of
from thunder_fusionfix.model import (
    Arg,
    Const,
    Decision,
    NewOp,
    Op,
    Part,
    Placed,
    Plan,
    Ref,
    RegionEdit,
    Repeat,
    fuel_left,
)

NAME = "ignore_cut_rows"
CAST = "prims.convert_element_type"
MAX_ROWS = 1.25
"""All rows may be this many times those that are left: what is saved is a copy of those, what it costs is to read the others."""

LABELS = {"i32": 2**31 - 1, "i64": 2**63 - 1}
"""The largest label of each dtype that labels may have here: among bytes -100 is a class."""

ADDED = frozenset({"full", "where"})
"""Ops that the pass adds besides layouts, casts and pads, by short name."""


def plan_ignore_cut_rows(facts: Facts, fuel: int | None = None) -> Plan:
    """The plan that lets cross entropies see the rows that were cut off before them.

    Args:
        facts: the trace and what is known of it.
        fuel: at most this many rewrites; None for no limit.
    """
    fresh = (f"%{i}" for i in itertools.count())
    plans: list[Plan] = []
    for pos, op in enumerate(facts.graph.ops):
        if op.id.startswith("nvFusion") and any(map(cross_entropy_of, op.subops)):
            left = fuel_left(fuel, (decision for plan in plans for decision in plan.decisions))
            plans.append(_Rewrite(facts, pos, op, fresh, left).plan())
    return Plan(
        regions=tuple(edit for plan in plans for edit in plan.regions),
        placed=tuple(placed for plan in plans for placed in plan.placed),
        decisions=tuple(decision for plan in plans for decision in plan.decisions),
    )


class _Refused(Exception):
    """The loss stays as it is; the message says why."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What happens to a tensor [dims..., classes] on its way to rows: one of its dims loses entries at its ends.

    >>> from thunder_fusionfix.layout import Slice
    >>> cut_of((2, 8, 5), _composed([Slice((0, 0, 0), (2, 7, 5), (1, 1, 1)), Reshape((14, 5))], (2, 8, 5)))
    Cut(dims=(2, 8), dim=1, low=0, kept=7)
    """

    dims: Shape  # without classes
    dim: int  # the one that is cut
    low: int  # entries that it loses at its start
    kept: int  # entries that are left

    @property
    def rows(self) -> int:
        return prod(self.dims)

    @property
    def high(self) -> int:
        """Entries that the dim loses at its end."""
        return self.dims[self.dim] - self.low - self.kept

    def around(self, size: int) -> Shape:
        """The rows with ``size`` entries in the cut dim, as a shape that shows this dim and no more than that."""
        before, after = prod(self.dims[: self.dim]), prod(self.dims[self.dim + 1 :])
        return (*(before,) * (before > 1), size, *(after,) * (after > 1))

    @property
    def axis(self) -> int:
        """Where the cut dim stands in `around`."""
        return int(prod(self.dims[: self.dim]) > 1)


def cut_of(shape: Shape, index: IndexMap) -> Cut | None:
    """The cut that a layout does to a tensor of ``shape`` on its way to [rows, classes]; None for anything else."""
    if 0 in shape or len(index.shape) != 2 or 0 in index.shape or index.shape[1] != shape[-1]:
        return None
    refined = refine(index, shape)
    if refined is None:
        return None
    rows, classes = refined.dims
    *leading, last = range(len(shape))
    if [(piece.size, piece.steps) for piece in classes] != [(shape[-1], _unit(last, len(shape)))]:
        return None
    kept = {dim: 1 for dim in leading}
    order = []
    for piece in rows:
        dims = [dim for dim in leading if piece.steps == _unit(dim, len(shape))]
        if not dims:
            return None
        order.append(dims[0])
        kept[dims[0]] = piece.size
    cut = [dim for dim in leading if kept[dim] != shape[dim]]
    if order != sorted(set(order)) or len(cut) != 1:
        return None
    (dim,) = cut
    return Cut(shape[:-1], dim, refined.starts[dim], kept[dim])


def _unit(dim: int, rank: int) -> tuple[int, ...]:
    return tuple(int(other == dim) for other in range(rank))


# ---------------------------------------------------------------- one region


@dataclass
class _Rewrite:
    """The rewrite of one region, loss by loss."""

    facts: Facts
    pos: int
    op: Op
    fresh: Iterator[str]
    fuel: int | None
    items: dict[int, list[NewOp | Repeat]] = field(default_factory=dict)  # what stands for a sub-op from now on
    placed: list[Placed] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outputs = [name for name in self.op.outputs if name not in self.op.inputs]
        self.definition = {name: index for index, subop in enumerate(self.op.subops) for name in subop.outputs}
        self.users: dict[str, list[int]] = {}
        for index, subop in enumerate(self.op.subops):
            for name in subop.inputs:
                self.users.setdefault(name, []).append(index)

    def plan(self) -> Plan:
        for index, subop in enumerate(self.op.subops):
            loss = cross_entropy_of(subop)
            if loss is not None:
                self.rewrite(index, loss)
        if not self.items:
            return Plan(decisions=tuple(self.decisions))
        edit = RegionEdit(self.pos, (Part(tuple(self.body()), tuple(self.outputs)),))
        return Plan((edit,), tuple(self.placed), None, tuple(self.decisions))

    def rewrite(self, index: int, loss: CrossEntropy) -> None:
        """Lets one loss see all rows, or says why not; a loss without cut rows is not spoken of."""
        try:
            found = self.cut(loss.logits)
            if found is None:
                return
            source, casts, cut = found
            self.check(loss, source, cut)
            if loss.gradient is None:
                self.rewrite_forward(index, loss, source, casts, cut)
            else:
                self.rewrite_backward(index, loss, source, casts, cut)
        except _Refused as why:
            self.decide(f"the rows before {loss.logits} stay cut off", str(why), False)

    def rewrite_forward(self, index: int, loss: CrossEntropy, source: str, casts: Sequence[Arg], cut: Cut) -> None:
        stats = (loss.a_max, loss.log_sum_exp)
        if any(name in self.users for name in stats):
            raise _Refused("the region computes with the maxima of the rows")
        target = self.labels_outside(loss.target, cut, loss.ignore_index)
        full = {name: next(self.fresh) for name in stats}
        ops, logits = self.all_rows(source, casts, cut, is_forward=True)
        renamed = {loss.logits: logits, loss.target: self.padded(target, cut, loss.ignore_index), **full}
        self.items[index] = [*ops, Repeat(index, tuple(renamed.items()))]
        for name in stats:
            if name in self.outputs:
                self.outputs[self.outputs.index(name)] = full[name]
                self.cut_again(full[name], name, cut)
        self.decide(*self.told(loss, source, cut, "all logits as rows are a view; without these rows they are a copy"))

    def rewrite_backward(self, index: int, loss: CrossEntropy, source: str, casts: Sequence[Arg], cut: Cut) -> None:
        assert loss.gradient is not None
        stats = (loss.a_max, loss.log_sum_exp)
        if any(name in self.definition or self.facts.aliases.is_written(name) for name in stats):
            raise _Refused("the maxima of the rows are not saved as they are")
        pad, narrowing = self.pad_of(loss.gradient, cut)
        target = self.labels_outside(loss.target, cut, loss.ignore_index)
        ops, logits = self.all_rows(source, casts, cut, is_forward=False)
        renamed = {loss.logits: logits, loss.target: self.padded(target, cut, loss.ignore_index)}
        renamed |= {name: self.padded(self.around_cut(name, cut), cut, 0.0) for name in stats}
        renamed[loss.gradient] = gradient = next(self.fresh)
        ops = [*ops, Repeat(index, tuple(renamed.items()))]
        rows, classes = cut.rows, self.shape(source)[-1]
        mask = self.new(ops, "prims.broadcast_in_dim", (Ref(self.mask(cut, source)), (rows, classes), (0,)))
        current = self.new(ops, "prims.where", (Ref(mask), Ref(gradient), 0.0))
        for dtype in narrowing:
            current = self.new(ops, CAST, (Ref(current), dtype))
        output = self.op.subops[pad].outputs[0]
        ops.append(NewOp("prims.reshape", (Ref(current), self.shape(output)), output))
        self.items[pad] = ops
        self.decide(*self.told(loss, source, cut, "the gradient is written once, for all rows: no pad of it"))

    # ------------------------------------------------ what is there

    def cut(self, logits: str) -> tuple[str, tuple[Arg, ...], Cut] | None:
        """The value that rows were cut from, the casts on the way to ``logits``, and the cut; None where nothing was cut."""
        layouts: list[Layout] = []
        casts: list[Arg] = []
        current, best = logits, None
        while current in self.definition:
            subop = self.op.subops[self.definition[current]]
            layout = layout_of(subop, self.facts.graph.values)
            if layout is not None:
                layouts.insert(0, layout)
            elif subop.id == CAST and isinstance(subop.args[0], Ref):
                casts.insert(0, subop.args[1])
            else:
                break
            if len(self.users[current]) > 1 or current in self.outputs:
                if best is None:
                    return None
                break
            current = subop.inputs[0]
            index = _composed(layouts, self.shape(current))
            cut = None if index is None else cut_of(self.shape(current), index)
            if cut is not None:
                best = current, tuple(casts), cut
        return best

    def check(self, loss: CrossEntropy, source: str, cut: Cut) -> None:
        value = self.facts.graph.values[source]
        nbytes = prod(self.shape(loss.logits)) * (value.itemsize or 0)
        if nbytes < self.facts.config.cut_rows_min_bytes:
            raise _Refused(f"{megabytes(nbytes)} MB of logits: the launches for labels and maxima would cost more")
        if cut.dims[cut.dim] > MAX_ROWS * cut.kept:
            raise _Refused(
                f"{cut.rows} rows for a loss of {self.shape(loss.logits)[0]} would cost more than the copies"
            )
        if loss.gradient is None and cut.axis == 0:
            raise _Refused("the rows that are left lie together: a view, nothing to win")
        if self.fuel is not None and sum(decision.applied for decision in self.decisions) >= self.fuel:
            raise _Refused("no fuel is left")
        if self.facts.aliases.is_written(source):
            raise _Refused(f"{source} is changed in place by this trace")
        if self.is_rearranged(source):
            raise _Refused(f"{source} is itself cut or turned in the region: its rows do not lie together")
        if any(not effect_of(leaf).is_pure for leaf in self.op.leaves if effect_of(leaf).kind is not Kind.BOOKKEEPING):
            raise _Refused("the region draws random numbers, writes in place or holds an op that is not known")

    def pad_of(self, gradient: str, cut: Cut) -> tuple[int, list[Arg]]:
        """The sub-op that puts zeros for the cut rows into ``gradient``, and the casts before it."""
        layouts: list[Layout] = []
        casts: list[Arg] = []
        current = gradient
        while len(self.users.get(current, ())) == 1 and current not in self.outputs:
            (index,) = self.users[current]
            subop = self.op.subops[index]
            if short_name(subop.id) == "pad" and subop.inputs == (current,):
                shape = self.shape(current)
                seen_as = _composed(layouts, self.shape(gradient))
                if seen_as is not None and seen_as.keeps_order(prod(shape)) and _undoes(subop, shape, cut):
                    return index, casts
                break
            layout = layout_of(subop, self.facts.graph.values) if subop.inputs == (current,) else None
            if layout is not None:
                layouts.append(layout)
            elif subop.id == CAST:
                casts.append(subop.args[1])
            else:
                break
            (current,) = subop.outputs
        raise _Refused("no pad in the region puts zeros for these rows into the gradient")

    def labels_outside(self, name: str, cut: Cut, ignore_index: int) -> str:
        """The labels of the rows that are left, as `Cut.around` shows them, made outside the region from an input of it."""
        layouts: list[Layout] = []
        current = name
        while current in self.definition:
            subop = self.op.subops[self.definition[current]]
            layout = layout_of(subop, self.facts.graph.values)
            if layout is None:
                raise _Refused(f"{name}, the labels, is computed in the region")
            layouts.insert(0, layout)
            current = subop.inputs[0]
        if self.facts.aliases.is_written(current):
            raise _Refused(f"{current} is changed in place by this trace")
        if abs(ignore_index) > LABELS.get(self.facts.graph.values[current].dtype or "", -1):
            raise _Refused(f"{current}, the labels, may not hold the ignored one, {ignore_index}")
        shape, wanted = self.shape(current), cut.around(cut.kept)
        layouts = [layout for layout in layouts if not isinstance(layout, (Same, Contiguous))]
        while layouts and not (shape == wanted and all(isinstance(layout, Reshape) for layout in layouts)):
            symbol, args = as_prim(layout := layouts.pop(0), len(shape))
            current, shape = self.place(self.pos, symbol, (Ref(current), *args)), layout.shape_after(shape)
        return current if layouts or shape == wanted else self.around_cut(current, cut)

    # ------------------------------------------------ what is new

    def all_rows(
        self, source: str, casts: Sequence[Arg], cut: Cut, is_forward: bool
    ) -> tuple[list[NewOp | Repeat], str]:
        """Ops that make [rows, classes] of ``source`` in the region, and what they give.

        The forward reduces, so a reshape after a cast would be a cut of the region: there it stands outside where it can.
        """
        ops: list[NewOp | Repeat] = []
        current, shape = source, (cut.rows, self.shape(source)[-1])
        is_outside = is_forward and source not in self.definition
        if self.shape(source) != shape and is_outside:
            current = self.place(self.pos, "prims.reshape", (Ref(current), shape))
        for dtype in casts:
            current = self.new(ops, CAST, (Ref(current), dtype))
        if self.shape(source) != shape and not is_outside:
            current = self.new(ops, "prims.reshape", (Ref(current), shape))
        return ops, current

    def around_cut(self, name: str, cut: Cut) -> str:
        """``name``, [rows that are left], as `Cut.around` shows it."""
        shape = cut.around(cut.kept)
        return name if len(shape) == 1 else self.place(self.pos, "prims.reshape", (Ref(name), shape))

    def padded(self, name: str, cut: Cut, fill: Arg) -> str:
        """[all rows]: ``name``, in the shape that `Cut.around` shows, with ``fill`` for the rows that were cut off; outside."""
        shape = cut.around(cut.kept)
        config: list[Arg] = [(0, 0, 0)] * len(shape)
        config[cut.axis] = (cut.low, cut.high, 0)
        name = self.place(self.pos, "prims.pad", (Ref(name), fill, tuple(config)))
        return name if len(shape) == 1 else self.place(self.pos, "prims.reshape", (Ref(name), (cut.rows,)))

    def mask(self, cut: Cut, source: str) -> str:
        """True for each row that is left."""
        device = Const(f'devices.Device("{self.facts.graph.values[source].device}")')
        options = (("device", device), ("dtype", Const("dtypes.bool8")))
        return self.padded(self.place(self.pos, "prims.full", (cut.around(cut.kept), True), options), cut, False)

    def cut_again(self, full: str, name: str, cut: Cut) -> None:
        """Gives ``name`` after the region: the entries of ``full`` for the rows that were left."""
        whole = cut.around(cut.dims[cut.dim])
        current = self.place(self.pos + 1, "prims.reshape", (Ref(full), whole)) if len(whole) > 1 else full
        starts, ends = [0] * len(whole), list(whole)
        starts[cut.axis], ends[cut.axis] = cut.low, cut.low + cut.kept
        args = (Ref(current), tuple(starts), tuple(ends), (1,) * len(whole))
        if len(whole) == 1:
            self.placed.append(Placed(self.pos + 1, NewOp("prims.slice_prim", args, name)))
            return
        current = self.place(self.pos + 1, "prims.slice_prim", args)
        self.placed.append(Placed(self.pos + 1, NewOp("prims.reshape", (Ref(current), self.shape(name)), name)))

    def new(self, ops: list[NewOp | Repeat], symbol: str, args: tuple[Arg, ...]) -> str:
        ops.append(NewOp(symbol, args, output := next(self.fresh)))
        return output

    def place(self, pos: int, symbol: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...] = ()) -> str:
        """A new op outside the region; gives its output."""
        self.placed.append(Placed(pos, NewOp(symbol, args, output := next(self.fresh), kwargs)))
        return output

    def body(self) -> list[int | NewOp | Repeat]:
        """The ops that the outputs need, in order."""
        needed, kept = set(self.outputs), []
        for index in reversed(range(len(self.op.subops))):
            for item in reversed(self.items.get(index, [index])):
                inputs, outputs = self.operands(item)
                if not needed.isdisjoint(outputs):
                    needed.update(inputs)
                    kept.append(item)
        return kept[::-1]

    def operands(self, item: int | NewOp | Repeat) -> tuple[Sequence[str], Sequence[str]]:
        if isinstance(item, NewOp):
            return [arg.name for arg in item.args if isinstance(arg, Ref)], (item.output,)
        subop = self.op.subops[item if isinstance(item, int) else item.index]
        names = {} if isinstance(item, int) else dict(item.renamed)
        return [names.get(name, name) for name in subop.inputs], [names.get(name, name) for name in subop.outputs]

    # ------------------------------------------------ small questions

    def shape(self, name: str) -> Shape:
        return self.facts.graph.values[name].shape or ()

    def is_rearranged(self, name: str) -> bool:
        """True where ``name`` is made in the region by a layout, apart from casts."""
        while name in self.definition:
            subop = self.op.subops[self.definition[name]]
            layout = layout_of(subop, self.facts.graph.values)
            if layout is not None and not isinstance(layout, Same):
                return True
            if layout is None and subop.id != CAST:
                return False
            name = subop.inputs[0]
        return False

    def told(self, loss: CrossEntropy, source: str, cut: Cut, why: str) -> tuple[str, str, bool, int]:
        nbytes = prod(self.shape(loss.logits)) * (self.facts.graph.values[source].itemsize or 0)
        lost = cut.rows - cut.rows // cut.dims[cut.dim] * cut.kept
        rows = "1 row" if lost == 1 else f"{lost} rows"
        return f"{rows} of {source}, cut off before the loss, ignored by label instead", why, True, nbytes

    def decide(self, what: str, reason: str, applied: bool, won: int = 0) -> None:
        self.decisions.append(Decision(NAME, self.pos, self.op.id, what, reason, applied, won))


def _composed(layouts: Sequence[Layout], shape: Shape) -> IndexMap | None:
    """What the chain does to a tensor of ``shape``, as one map."""
    whole = index_map(Same(), shape)
    for layout in layouts:
        one = None if whole is None else index_map(layout, whole.shape)
        whole = None if one is None or whole is None else compose(one, whole)
    return whole


def _undoes(pad: Op, shape: Shape, cut: Cut) -> bool:
    """True where ``pad`` of a tensor of ``shape`` puts zeros where the rows were that ``cut`` took."""
    if len(pad.args) != 3 or pad.args[1] != 0 or isinstance(pad.args[1], bool) or not isinstance(pad.args[2], tuple):
        return False
    padded = [dim for dim, amounts in enumerate(pad.args[2]) if amounts != (0, 0, 0)]
    if len(padded) != 1 or pad.args[2][padded[0]] != (cut.low, cut.high, 0):
        return False
    (dim,) = padded
    return shape[dim] == cut.kept and prod(shape[:dim]) == prod(cut.dims[: cut.dim])

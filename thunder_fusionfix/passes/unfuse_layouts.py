"""Layout ops leave fusion regions, so that torch takes views of the stored tensors and nvFuser sees plain compute.

Stage: final, forward or backward, after the fusions were made. Needs: fusion regions with their sub-ops. Keeps: every name
that is used outside regions, what is saved for the backward, and the value of each. Changes: what regions take, compute and
give; adds layout ops between regions.

A view op is free, until nvFuser gets it between a cast and a computation: then it splits the region there and writes the
whole tensor in the widened dtype at the split. A causal-LM loss pays two float32 copies of its logits so:

    [loss] = nvFusion0(logits)                          # logits: "cuda:0 bf16[1, 4096, 152064]"
      # t1 = prims.convert_element_type(logits, f32)    #     t1: "cuda:0 f32[1, 4096, 152064]"
      # t2 = prims.slice_prim(t1, ...)                  #     t2: "cuda:0 f32[1, 4095, 152064]"
      # t3 = prims.reshape(t2, (4095, 152064))          #     t3: "cuda:0 f32[4095, 152064]"
      # ...

Layouts commute with every elementwise op, so the same value is a cast of two views of the bf16 tensor:

    t4 = torch_slice_prim_impl(logits, ...)             # t4: "cuda:0 bf16[1, 4095, 152064]", a view
    t5 = torch_prims_reshape_impl(t4, (4095, 152064))   # t5: "cuda:0 bf16[4095, 152064]", a view
    [loss] = nvFusion0(t5)
      # t3 = prims.convert_element_type(t5, f32)

Four moves, each with its rule; whatever stays gets a reason:

- *hoist*: layouts of a region input, past casts. Only as views, or as a copy that is smaller than the boundaries it saves.
- *sink*: layouts of a computed region output, past casts and past pads of dims that they do not touch.
- *passenger*: a region output that is only layouts of a region input goes next to its first consumer.
- *dissolve*: a region that computes nothing any more is gone.

A layout between two computations stays, and so does an expand that feeds compute: nvFuser reads it in registers.
Lightning Thunder's issue on Qwen2.5's memory under nvFuser named the cure: keep pure layout ops out of nvFuser.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from thunder_fusionfix.document import megabytes
from thunder_fusionfix.effects import Kind, effect_of, is_layout, short_name
from thunder_fusionfix.facts import Facts
from thunder_fusionfix.layout import (
    Broadcast,
    Contiguous,
    Layout,
    Permute,
    Reshape,
    Same,
    Shape,
    Slice,
    Squeeze,
    Strides,
    Viewed,
    as_prim,
    dim_groups,
    layout_of,
    row_major,
)
from thunder_fusionfix.lift import Lifted, lift
from thunder_fusionfix.model import (
    DEL,
    Arg,
    Const,
    Decision,
    Graph,
    NewOp,
    Op,
    Part,
    Placed,
    Plan,
    Ref,
    RegionEdit,
    Value,
    fuel_left,
    refs,
)
from thunder_fusionfix.pins import given_twice
from thunder_fusionfix.segments import temporaries_of

NAME = "unfuse_layouts"
CAST = "prims.convert_element_type"
PAD = "prims.pad"

# Bytes. nvFuser 0.2.36 fails to compile a loss over two sequences that cuts its labels inside the fusion (an assert in its
# val_graph.cpp), so a small copy is made outside even where it would cost nothing inside.
SMALL_COPY = 2**20


@dataclass(frozen=True, slots=True)
class Derived:
    """A value that is casts of layouts of one region input; the two kinds commute, so each keeps its own order."""

    source: str
    layouts: tuple[Layout, ...] = ()
    casts: tuple[Arg, ...] = ()  # dtype constants
    path: tuple[int, ...] = ()  # sub-ops from the source to the value


def plan_unfuse_layouts(facts: Facts, fuel: int | None = None) -> Plan:
    """The plan that takes layout ops out of the fusion regions of a final trace.

    Args:
        facts: the trace and what is known of it.
        fuel: at most this many rewrites; None for no limit.
    """
    repeated = given_twice(facts.graph)
    if repeated:
        reason = f"the trace gives {repeated[0]} twice: which of the two a rebuilt region would take is not certain"
        return Plan(decisions=(Decision(NAME, 0, facts.graph.name, "the regions stay", reason, False),))
    graph, strides = facts.graph, facts.aliases.strides
    written = frozenset(name for name in facts.aliases.storage_of if facts.aliases.is_written(name))
    fresh = (f"%{i}" for i in itertools.count())
    shared = _names_of_several(graph)
    plans: list[Plan] = []
    for pos, op in enumerate(graph.ops):
        if not op.is_fusion or not any(is_layout(subop) for subop in op.subops):
            continue
        left = fuel_left(fuel, (decision for plan in plans for decision in plan.decisions))
        plans.append(_Rewrite(graph, pos, op, strides, written, fresh, left, shared).plan())
    return Plan(
        regions=tuple(edit for plan in plans for edit in plan.regions),
        placed=tuple(placed for plan in plans for placed in plan.placed),
        decisions=tuple(decision for plan in plans for decision in plan.decisions),
    )


def _names_of_several(graph: Graph) -> frozenset[str]:
    """Names that more than one op of the trace makes, inside of it or as its output."""
    makers: dict[str, set[int]] = {}
    for pos, op in enumerate(graph.ops):
        for name in (*op.outputs, *(name for subop in op.subops for name in subop.outputs)):
            makers.setdefault(name, set()).add(pos)
    return frozenset(name for name, positions in makers.items() if len(positions) > 1)


def counted_layouts(op: Op) -> tuple[Op, ...]:
    """The layout ops that stand in a region; ``shallow_copy`` is none, it renames."""
    return tuple(subop for subop in op.subops if _is_counted(subop))


def _is_counted(subop: Op) -> bool:
    return is_layout(subop) and short_name(subop.id) != "shallow_copy"


# ---------------------------------------------------------------- what a value is


def _is_cast(op: Op) -> bool:
    return op.id == CAST and isinstance(op.args[0], Ref)


def derived_values(inputs: Sequence[str], subops: Sequence[Op], values: Mapping[str, Value]) -> dict[str, Derived]:
    """The values of a region that are only layouts and casts of one of its inputs, the inputs themselves included."""
    derived = {name: Derived(name) for name in inputs if values[name].kind == "tensor"}
    for index, subop in enumerate(subops):
        if len(subop.outputs) != 1 or not subop.inputs or subop.inputs[0] not in derived:
            continue
        before = derived[subop.inputs[0]]
        path = (*before.path, index)
        layout = layout_of(subop, values)
        if layout is not None:
            derived[subop.outputs[0]] = replace(before, layouts=(*before.layouts, layout), path=path)
        elif _is_cast(subop):
            derived[subop.outputs[0]] = replace(before, casts=(*before.casts, subop.args[1]), path=path)
    return derived


def _without_same(layouts: Sequence[Layout]) -> tuple[Layout, ...]:
    return tuple(layout for layout in layouts if not isinstance(layout, Same))


def _hoistable_prefix(layouts: Sequence[Layout]) -> tuple[Layout, ...]:
    """The layouts before the first expand; those that only order memory are left out, compute does not see them."""
    prefix = itertools.takewhile(lambda layout: not isinstance(layout, Broadcast), layouts)
    return tuple(layout for layout in prefix if not isinstance(layout, (Same, Contiguous)))


def _walk(layouts: Sequence[Layout], shape: Shape, strides: Strides | None) -> Iterator[tuple[Shape, Viewed]]:
    """Shape after each layout and whether torch makes it a view."""
    for layout in layouts:
        viewed = layout.view(shape, strides)
        strides, shape = layout.strides_after(shape, strides), layout.shape_after(shape)
        yield shape, viewed


# ---------------------------------------------------------------- one region


@dataclass
class _Rewrite:
    """The rewrite of one region, built up move by move."""

    graph: Graph
    pos: int
    op: Op
    strides: Mapping[str, Strides | None]
    written: frozenset[str]
    fresh: Iterator[str]
    fuel: int | None
    shared: frozenset[str]  # names that other regions have inside, too: Thunder rebuilds a value in several
    given: dict[str, list[NewOp]] = field(default_factory=dict)  # value -> the ops that give it inside from now on
    outside: set[str] = field(default_factory=set)  # values that are given outside the region from now on
    placed: list[Placed] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    hoisted: dict[tuple[str, tuple[Layout, ...]], str] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    why_kept: dict[str, str] = field(default_factory=dict)  # value -> why the layouts that it is made of stay

    def __post_init__(self) -> None:
        # Thunder's CSE can make a region that gives one of its own inputs: the name is there without it
        self.outputs = [name for name in self.op.outputs if name not in self.op.inputs]
        self.values = self.graph.values
        self.returned = frozenset(refs(self.graph.result))
        self.inputs = list(self.op.inputs)
        self.subops = self.op.subops
        self.items: list[int | NewOp] = list(range(len(self.subops)))  # how to make each of the sub-ops
        self.trailing: list[Placed] = []  # reshapes of carried outputs, after all else
        self.is_nvfuser = self.op.id.startswith("nvFusion")
        temporaries = temporaries_of(self.op, self.values, self.strides)
        self.written_inside = {boundary.name: boundary.nbytes for boundary in temporaries.boundaries}
        self._index()

    def _index(self) -> None:
        self.definition = {name: index for index, subop in enumerate(self.subops) for name in subop.outputs}
        self.users: dict[str, list[int]] = {}
        for index, subop in enumerate(self.subops):
            for name in subop.inputs:
                self.users.setdefault(name, []).append(index)
        self.derived = derived_values(self.inputs, self.subops, self.values)

    def plan(self) -> Plan:
        if any(not effect_of(leaf).is_pure for subop in self.subops for leaf in subop.leaves if self._matters(leaf)):
            self._keep_all("the region draws random numbers, writes in place or holds an op that is not known")
            return Plan(decisions=tuple(self.decisions))
        self._move_passengers()
        if self.is_nvfuser:
            self._carry()
            self._hoist()
            self._sink()
        body = self._body()
        self._place_what_the_region_takes()
        self._explain_the_rest(body)
        if not any(decision.applied for decision in self.decisions):
            return Plan(decisions=tuple(self.decisions))
        parts = (Part(tuple(body), tuple(self.outputs)),) if self.outputs else ()
        if not parts:
            self._decide("dissolved: nothing is left to compute", "every output is a layout of an input", True)
        return Plan((RegionEdit(self.pos, parts),), (*self.placed, *self.trailing), None, tuple(self.decisions))

    def _matters(self, leaf: Op) -> bool:
        """Composite ops such as a fused cross entropy are opaque to us but pure by the table; so are bookkeeping lines."""
        return effect_of(leaf).kind is not Kind.BOOKKEEPING

    # ------------------------------------------------------------ moves

    def _move_passengers(self) -> None:
        """Outputs that are only layouts of an input go outside, next to their first consumer."""
        passengers = []
        for name in self.outputs:
            value = self.derived.get(name)
            if value is None or value.casts or not value.path:
                continue
            if value.source in self.written:
                self._refuse(name, f"{value.source} is changed in place by this trace")
            elif name in self.users and any(self.subops[i].outputs[0] not in self.derived for i in self.users[name]):
                continue  # feeds compute too: hoisted with what feeds compute
            elif self._has_fuel():
                passengers.append(name)
        # in the order of the region: one may be made of another
        passengers.sort(key=lambda name: self.derived[name].path)
        needed: dict[str, int] = {}
        for name in reversed(passengers):
            base, layouts = self._passenger_chain(name, passengers)
            consumers = [pos for pos in self.graph.consumers.get(name, ()) if self.graph.ops[pos].id != DEL]
            pos = min((needed.get(name, len(self.graph.ops)), *consumers))
            if self._shrinks(base, layouts):
                pos = self.pos + 1  # a small copy of a large tensor: the large one must not wait for the consumer
            needed[name] = pos
            if base in passengers:
                needed[base] = min(needed.get(base, len(self.graph.ops)), pos)
        for name in passengers:
            base, layouts = self._passenger_chain(name, passengers)
            self._place(base, layouts, name, needed[name])
            self.outputs.remove(name)
            self.outside.add(name)
            self._decide(
                f"{name} = {_spell(layouts)} of {base} moved next to its first consumer",
                "a passenger: no computation of the region needs it; costs a launch, not bytes",
                True,
            )

    def _passenger_chain(self, name: str, passengers: Sequence[str]) -> tuple[str, tuple[Layout, ...]]:
        """The value that ``name`` is best made from, and the layouts from there."""
        layouts: list[Layout] = []
        for index in reversed(self.derived[name].path):
            subop = self.subops[index]
            if subop.outputs[0] != name and subop.outputs[0] in passengers:
                return subop.outputs[0], tuple(reversed(layouts))
            layout = layout_of(subop, self.values)
            assert layout is not None
            layouts.append(layout)
        return self.derived[name].source, tuple(reversed(layouts))

    def _shrinks(self, base: str, layouts: Sequence[Layout]) -> bool:
        """True where the chain may copy and its result is smaller than what it is made from."""
        shape = self._shape(base)
        steps = list(_walk(layouts, shape, self.strides.get(base)))
        copies = any(viewed is not Viewed.YES for _, viewed in steps)
        return copies and prod(steps[-1][0]) < prod(shape)

    def _carry(self) -> None:
        """Computation is carried past reshapes that merge dims, where those could not be views outside."""
        index = 0
        while index < len(self.subops):
            subop = self.subops[index]
            if (
                isinstance(layout_of(subop, self.values), Reshape)
                and self._is_worth_carrying(subop)
                and self._has_fuel()
            ):
                lifted = lift(self.subops, index, self.values, self.inputs, self.outputs, self.fresh)
                if lifted is not None and self._all_views(lifted) and not self.written.intersection(lifted.outputs):
                    self._take(lifted, subop)
                    continue
            index += 1

    def _is_worth_carrying(self, reshape: Op) -> bool:
        """True where the reshape is not a view of a region input and feeds compute."""
        result = reshape.outputs[0]
        if result in self.outside or not self._feeds(result):
            return False
        value = self.derived.get(result)
        if value is None:
            return True
        if value.source in self.written:
            return False
        prefix = _hoistable_prefix(value.layouts)
        steps = _walk(prefix, self._shape(value.source), self.strides.get(value.source))
        return any(viewed is not Viewed.YES for _, viewed in steps)

    def _all_views(self, lifted: Lifted) -> bool:
        """True where every input that has to be split for the carried computation is split as a view."""
        return all(
            name not in self.written and Reshape(shape).view(self._shape(name), self.strides.get(name)) is Viewed.YES
            for name, shape in lifted.inputs.values()
        )

    def _take(self, lifted: Lifted, reshape: Op) -> None:
        """Goes on with the carried computation."""
        self.values = {**self.values, **lifted.values}
        for name, (source, shape) in lifted.inputs.items():
            self._place(source, (Reshape(shape),), name, self.pos)
            self.inputs.append(name)
        for old, new in lifted.outputs.items():
            self.outputs[self.outputs.index(old)] = new
            shape = self._shape(old)
            self.trailing.append(Placed(self.pos + 1, NewOp("prims.reshape", (Ref(new), shape), old)))
            self.outside.add(old)
        self.items = [lifted.new_ops.get(i) or self.items[lifted.origin[i]] for i in range(len(lifted.subops))]
        self.subops = lifted.subops
        won = self.values[reshape.outputs[0]].nbytes or 0
        self._index()
        self._decide(
            f"carried the computation past {reshape.outputs[0]} = reshape of {reshape.inputs[0]}",
            "it merges dims that no op after it looks at as one; as a view it would be a copy",
            True,
            won,
        )

    def _feeds(self, name: str) -> bool:
        """True where something other than a chain of layouts and casts to an output takes the value."""
        for index in self.users.get(name, ()):
            subop = self.subops[index]
            if not (is_layout(subop) or _is_cast(subop)) or self._feeds(subop.outputs[0]):
                return True
        return False

    def _hoist(self) -> None:
        """Layouts of inputs that feed compute leave, past casts."""
        for name, value in self.derived.items():
            if name in self.outside or not value.path or not self._is_frontier(name):
                continue
            prefix = _hoistable_prefix(value.layouts)
            ordered_only = not prefix and any(isinstance(layout, Contiguous) for layout in value.layouts)
            if not prefix and not ordered_only:
                continue
            if name in self.outputs and not value.casts and not self._feeds_compute(name):
                continue  # a passenger that was refused
            if name in self.outputs and any(isinstance(layout, Contiguous) for layout in value.layouts):
                self._refuse(name, "its memory, a copy in an order of its own, is what the region gives")
                continue
            reason, won, ok = self._hoist_pays(name, value, prefix)
            if not ok or not self._has_fuel():
                self._refuse(name, reason)
                continue
            moved = f"{_spell(prefix) or 'stride_order'} of {value.source}"
            self._hoist_one(name, value, prefix)
            past = " past " + ", ".join("convert_element_type" for _ in value.casts) if value.casts else ""
            self._decide(f"hoisted {moved}{past} ({name})", reason, True, won)

    def _hoist_pays(self, name: str, value: Derived, prefix: tuple[Layout, ...]) -> tuple[str, int, bool]:
        """(reason, bytes won at the region, whether to hoist)."""
        if value.source in self.written:
            return f"{value.source} is changed in place by this trace", 0, False
        shape = self._shape(value.source)
        if prod(shape) == 0 or prod(self._shape(name)) == 0:
            return "no elements: nothing to win", 0, False
        rearranged = [
            self.subops[index].outputs[0]
            for index in value.path
            if isinstance(layout_of(self.subops[index], self.values), (Reshape, Contiguous))
        ]
        # the most that nvFuser can write here, a tensor for each of them, and what it is known to write
        at_most = sum(self.values[made].nbytes or 0 for made in rearranged)
        made = {output for index in value.path for output in self.subops[index].outputs}
        written = sum(nbytes for boundary, nbytes in self.written_inside.items() if boundary in made)
        steps = list(_walk(prefix, shape, self.strides.get(value.source)))
        if all(viewed is Viewed.YES for _, viewed in steps):
            return "a view of the stored tensor outside", written, True
        copied = prod(steps[-1][0]) * (self.values[value.source].itemsize or 0)
        known = "copies" if any(viewed is Viewed.NO for _, viewed in steps) else "may copy"
        reason = (
            f"outside it {known} {megabytes(copied)} MB in the stored dtype; "
            f"inside nvFuser writes {megabytes(written)} to {megabytes(at_most)} MB"
        )
        return reason, written - copied, at_most > copied and (written > copied or copied <= SMALL_COPY)

    def _hoist_one(self, name: str, value: Derived, prefix: tuple[Layout, ...]) -> None:
        # layouts from the first expand on stay inside, on top of the casts; an order of memory has no meaning there
        rest = value.layouts[len(list(itertools.takewhile(lambda x: not isinstance(x, Broadcast), value.layouts))) :]
        rest = tuple(layout for layout in _without_same(rest) if not isinstance(layout, Contiguous))
        inner = [("cast", cast) for cast in value.casts] + [("layout", layout) for layout in rest]
        if not inner and name in self.shared:
            inner = [("layout", Same())]  # another region has the name too: it must not be given outside twice
        if not inner:
            self._place(value.source, prefix or (Same(),), name, self.pos)
            self.outside.add(name)
            self.outputs = [output for output in self.outputs if output != name]
            return
        current = self._hoisted_view(value.source, prefix)
        ops: list[NewOp] = []
        ndim = len(_shape_after(prefix, self._shape(value.source)))
        for i, (what, item) in enumerate(inner):
            output = name if i == len(inner) - 1 else next(self.fresh)
            if what == "cast":
                ops.append(NewOp(CAST, (Ref(current), item), output))  # type: ignore[arg-type]
            else:
                symbol, args = as_prim(item, ndim)  # type: ignore[arg-type]
                ops.append(NewOp(symbol, (Ref(current), *args), output))
                ndim = len(item.shape) if isinstance(item, (Broadcast, Reshape)) else ndim
            current = output
        self.given[name] = ops

    def _hoisted_view(self, source: str, prefix: tuple[Layout, ...]) -> str:
        """Name of the layouts ``prefix`` of ``source`` outside the region; made once."""
        if not prefix:
            return source
        key = (source, prefix)
        if key not in self.hoisted:
            name = next(self.fresh)
            self._place(source, prefix, name, self.pos)
            self.hoisted[key] = name
        return self.hoisted[key]

    def _sink(self) -> None:
        """Layouts that end in a computed output leave; what stands after them moves before them.

        The last outputs go first: an output that others are made from can only leave once they have.
        """
        sunk: list[tuple[str, list[_Step], str]] = []
        for name in sorted(self.outputs, key=lambda output: -self.definition.get(output, -1)):
            if name in self.outside or name in self.given or name not in self.definition:
                continue
            chain = self._sink_chain(name)
            if chain is None:
                continue
            base, inner, outer = chain
            if base in self.written or name in self.written:
                self._refuse(name, "it is changed in place by this trace")
                continue
            if self._is_taken_inside(name):
                self._refuse(name, "the region computes with it and gives it too")
                continue
            reason, won, ok = self._sink_pays(name, base, inner, outer)
            if not ok or not self._has_fuel():
                self._refuse(name, reason)
                continue
            result = base
            if inner:
                result = next(self.fresh)
                self.given[result] = self._rename_last(inner, base, result)
            if result not in self.outputs:
                self.outputs.insert(self.outputs.index(name), result)
            self.outputs.remove(name)
            self.outside.add(name)
            sunk.append((result, outer, name))
            past = f" past {', '.join(short_name(step.symbol) for step in inner)}" if inner else ""
            self._decide(f"sunk {_spell_steps(outer)}{past} ({name})", reason, True, won)
        for result, outer, name in reversed(sunk):
            self._place_steps(result, outer, name, self.pos + 1)

    def _is_taken_inside(self, name: str) -> bool:
        """True where the region, as it is now, takes ``name``; looks at the whole only where something may take it."""
        has_users = name in self.users or any(name in _inputs(op) for ops in self.given.values() for op in ops)
        return has_users and name in self._taken_inside()

    def _taken_inside(self) -> set[str]:
        """Names that the region, as it is now, takes."""
        taken: set[str] = set()
        for item in self._body():
            taken.update(self.op.subops[item].inputs if isinstance(item, int) else _inputs(item))
        return taken

    def _sink_chain(self, name: str) -> tuple[str, list[NewOp], list[_Step]] | None:
        """What ``name`` is made from, the ops that stay inside, and the steps that go outside; None where nothing can go.

        Walks from the output towards the computation. Casts and pads stay inside; a layout goes outside when it can pass
        all that stays and stands after it.
        """
        inner: list[NewOp] = []  # casts and pads, in the order in which they run
        outer: list[_Step] = []
        best: tuple[str, list[NewOp], list[_Step]] | None = None
        current = name
        while current in self.definition and (current == name or current not in self.outputs):
            subop = self.subops[self.definition[current]]
            source = subop.inputs[0] if subop.inputs else None
            if source is None or source in self.given or current in self.given:
                break
            layout = layout_of(subop, self.values)
            if isinstance(layout, Same):
                current = source
                continue
            if layout is not None:
                passed = _pass_below(layout, self._shape(source), inner)
                if passed is None:
                    moved = self._pad_outside(layout, source, inner, outer)
                    return moved or best
                inner, step = passed
                outer = [_Step(layout=step), *outer]
                best = (source, list(inner), list(outer))
            elif _is_cast(subop):
                inner = [NewOp(CAST, subop.args, ""), *inner]
            elif subop.id == PAD and isinstance(subop.args[1], (int, float)):
                inner = [NewOp(PAD, subop.args, ""), *inner]
            else:
                break
            current = source
        return best

    def _pad_outside(
        self, layout: Layout, source: str, inner: list[NewOp], outer: list[_Step]
    ) -> tuple[str, list[NewOp], list[_Step]] | None:
        """The chain with its pads outside too, for a reshape that cannot pass them; pads by 0 commute with casts."""
        pads = [step for step in inner if step.symbol == PAD]
        casts = [step for step in inner if step.symbol == CAST]
        if not isinstance(layout, (Reshape, Permute)) or not pads or any(pad.args[1] != 0 for pad in pads):
            return None
        if not all(map(_is_to_float, casts)):
            return None  # the pad's number is of the type that it pads
        steps = [_Step(layout=layout), *(_Step(pad=pad.args[1:]) for pad in _pads_of_zero(inner, bool(casts))), *outer]
        return source, casts, steps

    def _sink_pays(self, name: str, base: str, inner: list[NewOp], outer: list[_Step]) -> tuple[str, int, bool]:
        """(reason, bytes won at the region, whether to sink)."""
        output, source = self.values[name], self.values[base]
        if output.nbytes is None or source.nbytes is None or 0 in (output.nbytes, source.nbytes):
            return "no elements, or their number is not known", 0, False
        layouts = [step.layout for step in outer]
        if any(isinstance(layout, Contiguous) for layout in layouts):
            return "its memory, in an order of its own, is what the region gives", 0, False
        if inner and any(isinstance(layout, Permute) for layout in layouts) and name in self.returned:
            return "it is returned: outside it would lie in memory in another order", 0, False
        if any(isinstance(layout, Slice) for layout in layouts):
            return f"outside, the whole {base} would be kept for a slice of it", 0, False
        if any(isinstance(layout, Broadcast) and prod(layout.shape) != source.numel for layout in layouts):
            return "an expand of a computed value: written by the kernel that computes it", 0, False
        if any(step.pad is not None for step in outer):
            stored = prod(self._shape(base)) * (output.itemsize or 0)
            won = source.nbytes - stored
            reason = (
                f"a reshape before a pad splits the region and writes {megabytes(source.nbytes)} MB; "
                f"outside {megabytes(stored)} MB are written"
            )
            return reason, won, won > 0
        shape = self._shape(base)
        for step in inner:
            shape = _padded(shape, step.args[2]) if step.symbol == PAD else shape
        steps = list(_walk([layout for layout in layouts if layout is not None], shape, row_major(shape)))
        if any(viewed is not Viewed.YES for _, viewed in steps):
            return "outside it would be a copy", 0, False
        pads = any(step.symbol == PAD for step in inner)
        won = source.nbytes if pads and any(isinstance(layout, Reshape) for layout in layouts) else 0
        return "a view of the region's output outside", won, True

    def _rename_last(self, inner: Sequence[NewOp], base: str, result: str) -> list[NewOp]:
        """The ops ``inner`` on top of ``base``; narrowing casts come before pads by 0, so that less is written."""
        ordered = list(inner)
        if all(step.args[1] == 0 if step.symbol == PAD else _is_to_float(step) for step in inner):
            casts = [step for step in inner if step.symbol == CAST]
            ordered = [*casts, *_pads_of_zero(inner, bool(casts))]
        current, ops = base, []
        for i, step in enumerate(ordered):
            output = result if i == len(ordered) - 1 else next(self.fresh)
            ops.append(NewOp(step.symbol, (Ref(current), *step.args[1:]), output))
            current = output
        return ops

    def _place_what_the_region_takes(self) -> None:
        """Passengers that the region still computes with are placed before it, with what they are made from."""
        taken = self._taken_inside()
        for i in reversed(range(len(self.placed))):
            if self.placed[i].op.output in taken and self.placed[i].pos > self.pos:
                self.placed[i] = replace(self.placed[i], pos=self.pos)
                taken.update(_inputs(self.placed[i].op))

    # ------------------------------------------------------------ small questions

    def _shape(self, name: str) -> Shape:
        return self.values[name].shape or ()

    def _has_fuel(self) -> bool:
        return self.fuel is None or sum(decision.applied for decision in self.decisions) < self.fuel

    def _is_frontier(self, name: str) -> bool:
        """True where something other than further casts and layouts takes the value."""
        return name in self.outputs or self._feeds_compute(name)

    def _feeds_compute(self, name: str) -> bool:
        users = self.users.get(name, ())
        return any(output not in self.derived for index in users for output in self.subops[index].outputs)

    # ------------------------------------------------------------ what is left

    def _body(self) -> list[int | NewOp]:
        """The ops that the outputs still need, in the old order; new ops stand where the value stood that they give."""
        needed = set(self.outputs)
        kept: list[int | NewOp] = []
        extra = {name: ops for name, ops in self.given.items() if name not in self.definition}
        anchored: dict[int, list[NewOp]] = {}
        for ops in extra.values():
            base = next(name for name in _inputs(ops[0]))
            anchored.setdefault(self.definition.get(base, -1), []).extend(ops)
        for index in reversed(range(-1, len(self.subops))):
            for op in reversed(anchored.get(index, ())):
                if op.output in needed:
                    kept.append(op)
                    needed.update(_inputs(op))
            if index < 0:
                continue
            subop = self.subops[index]
            if not needed.intersection(subop.outputs) or self.outside.intersection(subop.outputs):
                continue
            ops = [op for name in subop.outputs for op in self.given.get(name, ())]
            for op in reversed(ops):
                kept.append(op)
                needed.update(_inputs(op))
            if not ops:
                kept.append(self.items[index])
                needed.update(subop.inputs)
        return list(reversed(kept))

    def _explain_the_rest(self, body: Sequence[int | NewOp]) -> None:
        """One decision for each layout op that stays, saying whether it costs bytes."""
        stay = set(body)
        for index, subop in enumerate(self.subops):
            if self.items[index] not in stay or not _is_counted(subop):
                continue
            name = subop.outputs[0]
            what = f"{name} = {short_name(subop.id)} stays"
            self._decide(what, self._why_it_stays(subop, name), False)

    def _why_it_stays(self, subop: Op, name: str) -> str:
        refused = next((self.why_kept[value] for value in self._downstream(name) if value in self.why_kept), None)
        layout = layout_of(subop, self.values)
        if refused is not None:
            return refused
        if layout is None:
            return "its index map is not understood"
        if not self.is_nvfuser:
            return "inside a torch.compile region: Inductor reads it as an index, no bytes"
        if isinstance(layout, Broadcast):
            return "an expand that feeds compute: read in registers, no bytes"
        if isinstance(layout, (Reshape, Contiguous)):
            return f"between two computations: nvFuser may write {megabytes(self.values[name].nbytes or 0)} MB here"
        return "between two computations: no bytes, it changes how the kernel reads"

    def _downstream(self, name: str) -> Iterator[str]:
        yield name
        for index in self.users.get(name, ()):
            subop = self.subops[index]
            if is_layout(subop) or _is_cast(subop):
                yield from self._downstream(subop.outputs[0])

    # ------------------------------------------------------------ writing down

    def _place(self, source: str, layouts: Sequence[Layout], name: str, pos: int) -> None:
        self._place_steps(source, [_Step(layout=layout) for layout in _without_same(layouts) or (Same(),)], name, pos)

    def _place_steps(self, source: str, steps: Sequence[_Step], name: str, pos: int) -> None:
        """Places the steps on ``source`` before ``pos``; the last gives ``name``."""
        current, ndim = source, len(self._shape(source)) if source in self.values else 0
        for i, step in enumerate(steps):
            output = name if i == len(steps) - 1 else next(self.fresh)
            if step.pad is not None:
                symbol, args = PAD, step.pad
            else:
                assert step.layout is not None
                symbol, args = as_prim(step.layout, ndim)
                ndim = len(args[0]) if symbol in ("prims.reshape", "prims.broadcast_in_dim") else ndim  # type: ignore[arg-type]
            self.placed.append(Placed(pos, NewOp(symbol, (Ref(current), *args), output)))
            current = output

    def _decide(self, what: str, reason: str, applied: bool, won: int = 0) -> None:
        self.decisions.append(Decision(NAME, self.pos, self.op.id, what, reason, applied, won))

    def _refuse(self, name: str, reason: str) -> None:
        self.why_kept[name] = reason

    def _keep_all(self, reason: str) -> None:
        for subop in counted_layouts(self.op):
            self._decide(f"{subop.outputs[0]} = {short_name(subop.id)} stays", reason, False)


@dataclass(frozen=True, slots=True)
class _Step:
    """One op that goes outside: a layout, or a pad with its arguments after the tensor."""

    layout: Layout | None = None
    pad: tuple[Arg, ...] | None = None


def _pads_of_zero(steps: Sequence[NewOp], is_float: bool) -> list[NewOp]:
    """The pads among ``steps``; with 0.0 where what they pad is floating-point from now on."""
    pads = [step for step in steps if step.symbol == PAD]
    return [replace(pad, args=(pad.args[0], 0.0, *pad.args[2:])) for pad in pads] if is_float else pads


def _is_to_float(cast: NewOp) -> bool:
    """True for a cast to a floating-point dtype, which holds 0.0 as the dtype before it does."""
    dtype = cast.args[1]
    return isinstance(dtype, Const) and re.fullmatch(r"dtypes\.b?float\d+", dtype.text) is not None


def _inputs(op: NewOp) -> Iterator[str]:
    return (arg.name for arg in op.args if isinstance(arg, Ref))


def _shape_after(layouts: Sequence[Layout], shape: Shape) -> Shape:
    for layout in layouts:
        shape = layout.shape_after(shape)
    return shape


def _padded(shape: Shape, config: Arg) -> Shape:
    """The shape after a pad by ``((low, high, dilation), ...)``."""
    sizes = []
    for size, (low, high, dilation) in zip(shape, _amounts(config)):
        sizes.append(size + low + high + max(size - 1, 0) * dilation)
    return tuple(sizes)


def _amounts(config: Arg) -> tuple[tuple[int, int, int], ...]:
    """A pad's ``((low, high, dilation), ...)`` as numbers."""
    assert isinstance(config, tuple)
    return config  # type: ignore[return-value]


def _pass_below(layout: Layout, shape: Shape, inner: Sequence[NewOp]) -> tuple[list[NewOp], Layout] | None:
    """The ops ``inner`` rewritten to run before ``layout``, and the layout to run after them; None where it cannot pass.

    ``shape`` is the shape that the layout is applied to. Casts pass everything; a pad passes where each padded dim is a dim
    of its own on both sides of the layout.
    """
    if not isinstance(layout, (Reshape, Permute, Squeeze, Broadcast, Slice, Contiguous)):
        return None
    rewritten = []
    for step in inner:
        if step.symbol != PAD:
            rewritten.append(step)
            continue
        passed = _pass_pad(layout, shape, step)
        if passed is None:
            return None
        pad, layout = passed
        rewritten.append(pad)
        shape = _padded(shape, pad.args[2])
    return rewritten, layout


def _pass_pad(layout: Layout, shape: Shape, pad: NewOp) -> tuple[NewOp, Layout] | None:
    """``pad(layout(x))`` as ``layout'(pad'(x))`` for x of ``shape``; None where a padded dim is not a dim of x."""
    config = _amounts(pad.args[2])
    out_shape = layout.shape_after(shape)
    source_dim = _dims_that_stay(layout, shape, out_shape)
    inner: list[Arg] = [(0, 0, 0)] * len(shape)
    for dim, amounts in enumerate(config):
        if amounts == (0, 0, 0):
            continue
        if dim not in source_dim:
            return None
        inner[source_dim[dim]] = amounts
    new_pad = NewOp(PAD, (pad.args[0], pad.args[1], tuple(inner)), "")
    if isinstance(layout, Reshape):
        return new_pad, Reshape(_padded(out_shape, config))
    return new_pad, layout


def _dims_that_stay(layout: Layout, shape: Shape, out_shape: Shape) -> dict[int, int]:
    """Output dim -> the input dim that it is, for dims that the layout moves as a whole."""
    if isinstance(layout, Permute):
        return dict(enumerate(layout.dims))
    if isinstance(layout, Squeeze):
        kept = [dim for dim in range(len(shape)) if dim not in layout.dims]
        return dict(enumerate(kept))
    if isinstance(layout, Reshape) and 0 not in shape:
        return {outs[0]: ins[0] for ins, outs in dim_groups(shape, out_shape) if len(ins) == len(outs) == 1}
    return {}


def _spell(layouts: Sequence[Layout]) -> str:
    return ", ".join(short_name(as_prim(layout, 0)[0]) for layout in _without_same(layouts) or layouts)


def _spell_steps(steps: Sequence[_Step]) -> str:
    return ", ".join("pad" if step.layout is None else _spell([step.layout]) for step in steps)

"""Says of one trace where its memory goes: the peak, what is alive there and why, which regions only rearrange, what would help.

All of it comes from the Graph, so it works for a trace that was pasted and cannot run here. The plan is what the final passes
would do, carried out on the Graph and priced again; a step is kept as in a compile, if the verifier accepts it and the peak
does not rise.

Where the text does not tell a size it counts as 0, and `Explanation.notes` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from thunder_fusionfix.alias import Aliases
from thunder_fusionfix.apply import apply_to_graph, with_readable_names
from thunder_fusionfix.config import FusionFixConfig
from thunder_fusionfix.diff import TraceDiff, diff
from thunder_fusionfix.effects import is_layout
from thunder_fusionfix.errors import FusionFixError
from thunder_fusionfix.facts import Facts
from thunder_fusionfix.layout import Viewed, layout_of, source_of
from thunder_fusionfix.liveness import live_ranges
from thunder_fusionfix.match import BOOKKEEPING
from thunder_fusionfix.model import CLEAR, DEL, RETURN, UNPACK, Decision, Graph, Holder, Op, Value
from thunder_fusionfix.parse import listed
from thunder_fusionfix.passes import PASSES
from thunder_fusionfix.simulate import Prices
from thunder_fusionfix.sources import Source, sources
from thunder_fusionfix.unparse import type_text
from thunder_fusionfix.verify import GRAPH_RULES, verify

SCHEMA = "thunder_fusionfix.explain/1"
NUM_HOLDERS = 10
# A text may hold what no trace of Thunder's does, and a pass may not expect it; a compile keeps its input then, too.
_FAILURES = (FusionFixError, ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Kept:
    """One storage that is alive at the peak, and why."""

    name: str
    nbytes: int  # as the allocator counts
    type: str  # as traces print it; empty where not known
    made_by: str  # "argument", "saved tensor", "cotangent", or the op that makes it
    made_pos: int | None  # None: there before the first op
    needed_by: str  # the next op that takes it after the peak, or why it is alive without one
    needed_pos: int | None
    freed_pos: int | None  # position of the `del` that frees it; None: alive at the end
    names: tuple[str, ...]  # all that share the storage


@dataclass(frozen=True, slots=True)
class Taken:
    """One tensor that a region takes from before."""

    name: str
    nbytes: int | None  # None: not known
    known_by: str  # "shape", "number of elements" or "nothing"
    origin: str  # "saved tensor", "argument", "cotangent", or the op that makes it


@dataclass(frozen=True, slots=True)
class LayoutRegion:
    """A fusion region that computes nothing: layout ops only."""

    name: str
    pos: int
    num_ops: int
    takes: tuple[Taken, ...]  # largest first
    output_bytes: int
    num_views: int  # outputs that torch gives as views for certain
    view_bytes: int
    num_maybe: int  # outputs that are views or copies, depending on strides
    maybe_bytes: int
    num_copies: int
    copy_bytes: int
    nearest_use: int | None  # steps to the first op that takes an output; None: no such op in the text


@dataclass(frozen=True)
class Explanation:
    """What `explain` finds; bytes are those of the simulator."""

    source: Source
    start_bytes: int
    peak_bytes: int
    peak_pos: int
    lower_bound_bytes: int
    holders: tuple[Kept, ...]  # the largest at the peak, largest first
    num_holders: int  # all of them
    layout_regions: tuple[LayoutRegion, ...]
    decisions: tuple[
        Decision, ...
    ]  # of the passes, applied and refused; position -1: at an op that an earlier pass made
    planned: Graph  # the trace after the plan; the trace itself where there is none
    planned_peak_bytes: int
    notes: tuple[str, ...]
    undone: tuple[str, ...] = ()  # of the notes those on passes that have no plan that could be kept

    @property
    def graph(self) -> Graph:
        return self.source.graph

    @property
    def peak_op(self) -> str:
        return self.graph.ops[self.peak_pos].id if self.graph.ops else ""

    @property
    def applied(self) -> tuple[Decision, ...]:
        return tuple(decision for decision in self.decisions if decision.applied)

    def to_diff(self) -> TraceDiff:
        """The trace against itself after the plan."""
        return diff(self.graph, self.planned)

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data; the layout is documented in docs/json.md and named by ``schema``."""
        return {
            "schema": SCHEMA,
            "name": self.graph.name,
            "stage": self.graph.stage,
            "file": self.source.name,
            "first_line": self.source.first_line if self.source.is_text else None,
            "num_ops": len(self.graph.ops),
            "start_bytes": self.start_bytes,
            "peak_bytes": self.peak_bytes,
            "peak_pos": self.peak_pos,
            "peak_op": self.peak_op,
            "peak_line": self.source.line_of(self.peak_pos),
            "lower_bound_bytes": self.lower_bound_bytes,
            "num_holders": self.num_holders,
            "holders": [asdict(holder) for holder in self.holders],
            "layout_regions": [asdict(region) for region in self.layout_regions],
            "decisions": [asdict(decision) for decision in self.decisions],
            "planned_peak_bytes": self.planned_peak_bytes,
            "notes": list(self.notes),
        }


def explain_trace(trace: Any, config: FusionFixConfig | None = None) -> tuple[Explanation, ...]:
    """An `Explanation` of each trace in ``trace``.

    Args:
        trace: as for `thunder_fusionfix.sources.sources`.
        config: options of the passes whose plan is shown; defaults where None.

    Raises:
        UsageError: there is no such file, or no trace in it.
    """
    found = sources(trace)
    forwards = [source.graph for source in found if source.graph.stage == "forward"]
    return tuple(explain(source, forward=_forward_of(source.graph, forwards), config=config) for source in found)


def explain(source: Source, forward: Graph | None = None, config: FusionFixConfig | None = None) -> Explanation:
    """What is to say about one trace.

    Args:
        source: the trace and its text.
        forward: for a backward trace, the forward that saved its tensors, where it is known.
        config: options of the passes; defaults where None.
    """
    facts = Facts(source.graph, config or FusionFixConfig(), forward)
    timeline = facts.timeline
    decisions, planned, notes = _plan(facts)
    return Explanation(
        source,
        timeline.start_bytes,
        timeline.peak_bytes,
        timeline.peak_pos,
        timeline.lower_bound_bytes,
        tuple(_kept(source.graph, holder, timeline.peak_pos) for holder in timeline.holders[:NUM_HOLDERS]),
        len(timeline.holders),
        tuple(_layout_regions(source.graph, facts.aliases)),
        decisions,
        planned.graph,
        planned.timeline.peak_bytes,
        (*source.graph.notes, *_region_notes(source.graph), *notes),
        notes,
    )


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """One storage and the positions ``[start, end)`` at which it is alive."""

    name: str
    nbytes: int
    start: int
    end: int


def live_storages(prices: Prices) -> tuple[LiveStorage, ...]:
    """Every storage that takes memory, with its life, by name of the value that first had it."""
    graph, ranges = prices.graph, live_ranges(prices.graph)
    found = []
    for storage, size, is_kept in zip(prices.aliases.storages, prices.sizes, prices.is_kept):
        known = [ranges[name] for name in storage.names if name in ranges]
        if not size or not known:
            continue
        end = len(graph.ops) if is_kept else max(one.end for one in known) + 1
        start = 0 if storage.is_outside else known[0].start
        found.append(LiveStorage(storage.root, size, start, min(end, len(graph.ops))))
    return tuple(found)


# ---------------------------------------------------------------- parts


def _forward_of(graph: Graph, forwards: Sequence[Graph]) -> Graph | None:
    """The forward that saved what a backward takes: the one with the same names; None where none or several fit."""
    if graph.stage != "backward":
        return None
    fitting = [forward for forward in forwards if graph.saved and set(graph.saved) <= set(forward.saved)]
    return fitting[0] if len(fitting) == 1 else None


def _region_notes(graph: Graph) -> Iterator[str]:
    closed = [op.id for op in graph.ops if op.is_fusion and not op.subops]
    if closed:
        yield (
            f"no sub-ops are shown for {listed(closed)}: it may change what it takes, so the passes leave what it shares alone; "
            "str(trace) prints sub-ops, trace.python() does not"
        )


def _kept(graph: Graph, holder: Holder, at: int) -> Kept:
    """Why a storage is alive at position ``at``."""
    value = graph.values.get(holder.name)
    made_pos = graph.producer.get(holder.name)
    if made_pos is not None and graph.ops[made_pos].id == UNPACK:
        made_pos = None
    if made_pos is None and holder.producer == graph.ops[at].id and holder.name not in graph.args:
        made_pos = at  # a temporary of the op at the peak
    users = sorted({pos for name in holder.names for pos in graph.consumers.get(name, ())})
    later = [pos for pos in users if pos >= at and graph.ops[pos].id not in (DEL, CLEAR, UNPACK)]
    deletes = [pos for pos in users if graph.ops[pos].id == DEL]
    is_freed = len({name for pos in deletes for name in graph.ops[pos].inputs} & set(holder.names)) == len(holder.names)
    freed_pos = max(deletes) if is_freed and not graph.held.intersection(holder.names) else None
    needed_pos = later[0] if later else None
    return Kept(
        holder.name,
        holder.nbytes,
        _type(value) if value is not None else "",
        "before the text" if holder.producer == "argument" and graph.stage == "backward" else holder.producer,
        made_pos,
        _reason(graph, holder, at, needed_pos, freed_pos),
        needed_pos,
        freed_pos,
        holder.names,
    )


def _type(value: Value) -> str:
    """The type as traces print it; dtype and number of elements where no more is known."""
    typed = type_text(value)
    if typed is not None:
        return typed.partition(": ")[2].strip('"')
    return f"{value.dtype}, {value.numel:,} elements" if value.numel is not None and value.dtype is not None else ""


def _reason(graph: Graph, holder: Holder, at: int, needed_pos: int | None, freed_pos: int | None) -> str:
    if needed_pos == at:
        return "used or made right here" if graph.ops[at].id != RETURN else "returned"
    if holder.producer == graph.ops[at].id and holder.name not in graph.producer:
        return "a temporary inside the region" if graph.ops[at].is_fusion else "a temporary of this op"
    if needed_pos is not None:
        return "returned" if graph.ops[needed_pos].id == RETURN else graph.ops[needed_pos].id
    if graph.held.intersection(holder.names):
        return "the caller owns it"
    if graph.producer.get(holder.name) == at:
        return "used or made right here"
    return "unknown: nothing in the text takes or deletes it" if freed_pos is None else "waits for its del"


def _layout_regions(graph: Graph, shared: Aliases) -> Iterator[LayoutRegion]:
    for pos, op in enumerate(graph.ops):
        shown = {name for leaf in op.leaves for name in leaf.outputs}
        if op.is_fusion and op.subops and shown.issuperset(op.outputs) and all(map(is_layout, op.leaves)):
            yield _layout_region(graph, shared, pos, op)


def _layout_region(graph: Graph, shared: Aliases, pos: int, op: Op) -> LayoutRegion:
    verdicts = _viewed(graph, shared, op)
    groups = {
        verdict: [name for name in op.outputs if verdicts.get(name, Viewed.UNKNOWN) is verdict] for verdict in Viewed
    }
    sizes = {verdict: sum(graph.values[name].nbytes or 0 for name in names) for verdict, names in groups.items()}
    taken = [_taken(graph, name) for name in op.inputs if graph.values[name].kind == "tensor"]
    uses = [
        use for name in op.outputs for use in graph.consumers.get(name, ()) if graph.ops[use].id not in (DEL, CLEAR)
    ]
    steps = sum(1 for between in graph.ops[pos : min(uses)] if between.id not in BOOKKEEPING) if uses else None
    return LayoutRegion(
        name=op.id,
        pos=pos,
        num_ops=len(op.leaves),
        takes=tuple(sorted(taken, key=lambda one: -(one.nbytes or 0))),
        output_bytes=sum(sizes.values()),
        num_views=len(groups[Viewed.YES]),
        view_bytes=sizes[Viewed.YES],
        num_maybe=len(groups[Viewed.UNKNOWN]),
        maybe_bytes=sizes[Viewed.UNKNOWN],
        num_copies=len(groups[Viewed.NO]),
        copy_bytes=sizes[Viewed.NO],
        nearest_use=steps,
    )


def _viewed(graph: Graph, shared: Aliases, region: Op) -> dict[str, Viewed]:
    """For each value of a region of layouts, whether torch would give it as a view of a region input."""
    verdicts: dict[str, Viewed] = {}
    for leaf in region.leaves:
        layout, source = layout_of(leaf, graph.values), source_of(leaf)
        shape = graph.values[source].shape if source is not None else None
        if layout is None or source is None or shape is None:
            verdict = Viewed.UNKNOWN
        else:
            verdict = layout.view(shape, shared.strides.get(source))
        worse = (Viewed.NO, Viewed.UNKNOWN, Viewed.YES)
        before = verdicts.get(source or "", Viewed.YES)
        for name in leaf.outputs:
            verdicts[name] = min(verdict, before, key=worse.index)
    return verdicts


def _taken(graph: Graph, name: str) -> Taken:
    value: Value = graph.values[name]
    known_by = "nothing" if value.nbytes is None else "shape" if value.shape is not None else "number of elements"
    pos = graph.producer.get(name)
    if pos is not None and graph.ops[pos].id != UNPACK:
        origin = graph.ops[pos].id
    elif pos is not None and not set(graph.ops[pos].inputs) & set(graph.args[1:2]):
        origin = "saved tensor"
    elif pos is not None:
        origin = "cotangent"
    else:
        origin = "argument" if graph.stage != "backward" else "saved tensor"  # a cut text: made before its first line
    return Taken(name, value.nbytes, known_by, origin)


def _plan(facts: Facts) -> tuple[tuple[Decision, ...], Facts, tuple[str, ...]]:
    """What the final passes decide, at positions of the trace as it is; the facts after those plans that are kept; notes."""
    first, decisions, notes = facts, list[Decision](), list[str]()
    if any(fault for rule in GRAPH_RULES for fault in rule.find(first.graph)):
        return (
            (),
            first,
            ("no plan: the trace is not sound, or cut amid an op; `check` names the rules that it breaks",),
        )
    for item in PASSES:
        if not getattr(facts.config, item.name):
            continue
        try:
            plan = item.plan(facts, None)
            after = Facts(with_readable_names(apply_to_graph(facts.graph, plan)), facts.config, facts.forward)
            if not plan.is_empty:
                verify(facts.graph, after.graph, item.admits(facts.graph, plan))
            rises = after.timeline.peak_bytes > facts.timeline.peak_bytes
        except _FAILURES as error:
            notes.append(
                f"no plan of {item.name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
            continue
        decisions += [replace(one, pos=_first_pos(one.pos, facts.graph, first.graph)) for one in plan.decisions]
        if not rises:
            facts = after
    return tuple(decisions), facts, tuple(notes)


def _first_pos(pos: int, graph: Graph, first: Graph) -> int:
    """Where the op at ``pos`` of a planned trace stands in the first one; -1 for an op that a plan made."""
    if graph is first or not 0 <= pos < len(graph.ops):
        return pos
    return next((first.producer[name] for name in graph.ops[pos].outputs if name in first.producer), -1)

"""Compares two traces: what moved, left a region, appeared or went, and what that does to lifetimes, saved bytes and the peak.

Operations are matched by structure (`match`), so names and region numbers do not count: a trace and its renamed copy are the
same. Two traces are the same if their canonical forms are, statement by statement with names in order of first appearance; a
difference that no other list covers is named in `TraceDiff.other`.

Laws: ``diff(a, a)`` and ``diff(a, renamed a)`` are empty; an empty diff means equal canonical forms; ``diff(b, a)`` is
``diff(a, b).mirrored()``, since both are made in one direction that only the traces' structure decides.

Positions are indices into ``Graph.ops``. *Steps* are operations without ``del``, unpacking and clearing, so that a distance or
a lifetime says how much runs in between. Sizes are bytes; a size that is not known counts as 0 and is counted in
``Side.num_unknown``.

    >>> from thunder_fusionfix.parse import parse
    >>> lines = ["t1 = prims.exp(a)", "t2 = prims.neg(b)", "t3 = prims.add(t1, t2)", "return t3"]
    >>> before, after = (parse("def f(a, b):\\n  " + "\\n  ".join(lines[i] for i in order)) for order in ((0, 1, 2, 3), (1, 0, 2, 3)))
    >>> [(op.id_before, op.from_pos, op.to_pos, op.distance_before, op.distance_after) for op in diff(before, after).moved]
    [('prims.exp', 0, 1, 2, 1)]
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from thunder_fusionfix.liveness import live_ranges
from thunder_fusionfix.match import BOOKKEEPING, Atom, Flow, Matching, match, operation
from thunder_fusionfix.model import DEL, UNPACK, Arg, Graph, Holder, Op, Ref, Struct, Value
from thunder_fusionfix.simulate import Prices
from thunder_fusionfix.unparse import arg_text, type_text

SCHEMA = "thunder_fusionfix.diff/1"
NUM_HOLDERS = 10  # largest live tensors that are listed at a peak


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two traces as a whole."""

    name: str
    stage: str
    num_ops: int
    start_bytes: int  # allocated before the first op
    peak_bytes: int
    peak_pos: int
    peak_op: str  # the op at the peak, as the trace prints it
    lower_bound_bytes: int  # no order of the trace's ops needs less
    saved_bytes: (
        int  # what a forward allocates and saves for the backward, or all that a backward takes; each storage once
    )
    num_unknown: int  # tensors whose bytes are not known
    holders: tuple[Holder, ...]  # the largest alive at the peak


@dataclass(frozen=True, slots=True)
class MovedOp:
    """An operation or region that stands at another place among those that both traces have."""

    id_before: str  # as the trace prints its callee
    id_after: str
    name_before: str  # first output
    name_after: str
    from_pos: int
    to_pos: int
    distance_before: int  # steps to the first op that takes an output
    distance_after: int


@dataclass(frozen=True, slots=True)
class Crossing:
    """A finest op that stands in another region than before, or in none."""

    what: str  # the operation, under whichever spelling: "transpose"
    name_before: str  # first output
    name_after: str
    region_before: str | None  # None: on its own
    region_after: str | None
    pos_before: int  # of the op, or of its region
    pos_after: int
    distance_before: int  # steps to the first op outside its region that takes an output
    distance_after: int
    nbytes: int  # of its outputs, after


@dataclass(frozen=True, slots=True)
class Partition:
    """One region of one trace whose ops stand in several regions of the other."""

    whole: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """A finest op that only one of the traces has."""

    what: str  # as the trace prints its callee
    name: str
    pos: int
    region: str | None
    nbytes: int  # of its outputs
    copy_of: str | None = None  # output of the equal op that both traces have, where this is a second instance of it


@dataclass(frozen=True, slots=True)
class ChangedOp:
    """A matched op that is not quite the same: other constants, types, operands, or another callee."""

    what: str  # the operation
    name_before: str
    name_after: str
    pos_before: int
    pos_after: int
    aspect: str  # "arguments", "type", "operands" or "callee"
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A value that lives for another number of steps than before; only steps that both traces have count."""

    name_before: str
    name_after: str
    nbytes: int
    steps_before: int
    steps_after: int


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A value that only one of the traces saves for the backward."""

    name: str
    nbytes: int
    type: str


@dataclass(frozen=True, slots=True)
class RegionSize:
    """What a fusion region takes, gives and does."""

    name: str
    pos: int
    num_inputs: int
    num_outputs: int
    num_ops: int
    input_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True)
class RegionChange:
    """A region whose size differs, or that only one trace has."""

    before: RegionSize | None
    after: RegionSize | None


@dataclass(frozen=True, slots=True)
class OtherDifference:
    """A difference that none of the lists covers, as each trace has it."""

    what: str  # "stage", "arguments", "result" or "statement"
    before: str
    after: str


@dataclass(frozen=True)
class TraceDiff:
    """All differences of two traces; see the module's docstring for what counts."""

    before: Side
    after: Side
    moved: tuple[MovedOp, ...] = ()
    left: tuple[Crossing, ...] = ()  # in a region before, on their own after
    entered: tuple[Crossing, ...] = ()
    regrouped: tuple[Crossing, ...] = ()  # in another region than before
    split: tuple[Partition, ...] = ()
    merged: tuple[Partition, ...] = ()
    duplicated: tuple[Instance, ...] = ()  # more instances after of what both traces have
    deduplicated: tuple[Instance, ...] = ()
    added: tuple[Instance, ...] = ()
    gone: tuple[Instance, ...] = ()
    changed: tuple[ChangedOp, ...] = ()
    lifetimes: tuple[Lifetime, ...] = ()  # largest change in bytes times steps first
    saved_more: tuple[SavedValue, ...] = ()
    saved_less: tuple[SavedValue, ...] = ()
    regions: tuple[RegionChange, ...] = ()
    other: tuple[OtherDifference, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True where the traces are the same but for names."""
        return not any(getattr(self, name) for name in self.lists())

    @classmethod
    def lists(cls) -> tuple[str, ...]:
        """Names of the fields that list differences."""
        return tuple(one.name for one in fields(cls) if one.name not in ("before", "after"))

    def mirrored(self) -> TraceDiff:
        """The same differences seen from the other side."""
        return TraceDiff(
            self.after,
            self.before,
            tuple(sorted((_swapped(one) for one in self.moved), key=lambda one: one.from_pos)),
            tuple(sorted(map(_swapped, self.entered), key=_crossing_order)),
            tuple(sorted(map(_swapped, self.left), key=_crossing_order)),
            tuple(sorted(map(_swapped, self.regrouped), key=_crossing_order)),
            self.merged,
            self.split,
            self.deduplicated,
            self.duplicated,
            self.gone,
            self.added,
            tuple(sorted(map(_swapped, self.changed), key=_change_order)),
            tuple(map(_swapped, self.lifetimes)),
            self.saved_less,
            self.saved_more,
            tuple(sorted((RegionChange(one.after, one.before) for one in self.regions), key=_region_order)),
            tuple(map(_swapped, self.other)),
        )

    def to_dict(self) -> dict[str, Any]:
        """The diff as plain data; the layout is documented in docs/json.md and named by ``schema``."""
        return {"schema": SCHEMA, "is_empty": self.is_empty, **asdict(self)}


def diff(before: Graph, after: Graph) -> TraceDiff:
    """The differences between two traces; near-linear in their sizes.

    Args:
        before: one trace.
        after: the other.
    """
    forms = canonical(before), canonical(after)
    if forms[0] == forms[1]:
        return TraceDiff(side_of(before), side_of(after))
    if forms[0] > forms[1]:  # one direction for both orders of the arguments
        return _Differ(after, before, forms[::-1]).run().mirrored()
    return _Differ(before, after, forms).run()


# ---------------------------------------------------------------- canonical form


def canonical(graph: Graph) -> tuple[str, ...]:
    """The trace's statements with names in order of first appearance and types; equal for renamed copies."""
    numbers: dict[str, str] = {}

    def name_of(name: str) -> str:
        return numbers.setdefault(name, f"v{len(numbers)}")

    def text(arg: Arg) -> str:
        if isinstance(arg, Ref):
            return name_of(arg.name)
        if isinstance(arg, tuple):
            return f"({','.join(map(text, arg))})"
        if isinstance(arg, Struct):
            return f"{{{','.join(f'{key!r}:{text(item)}' for key, item in arg.items)}}}"
        return arg_text(arg)

    def lines(op: Op, depth: int) -> Iterable[str]:
        args = ",".join((*map(text, op.args), *(f"{key}={text(arg)}" for key, arg in op.kwargs)))
        callee = operation(op) if op.is_fusion else op.id
        types = ";".join(_shape_text(graph.values[name]) for name in op.outputs)
        yield f"{'.' * depth}{callee}({args})->{text(op.output)}:{types}"
        for subop in op.subops:
            yield from lines(subop, depth + 1)

    arguments = ",".join(f"{name_of(name)}:{_shape_text(graph.values[name])}" for name in graph.args)
    return (f"{graph.stage}({arguments})", *(line for op in graph.ops for line in lines(op, 0)))


def _shape_text(value: Value) -> str:
    shape = value.shape if value.shape is not None else value.known_numel
    return f"{value.kind} {value.device} {value.dtype}{shape}"


# ---------------------------------------------------------------- one trace


def side_of(graph: Graph) -> Side:
    """Peak, holders and saved bytes of one trace."""
    prices = Prices(graph)
    timeline = prices.timeline()
    at_peak = graph.ops[timeline.peak_pos].id if graph.ops else ""
    return Side(
        graph.name,
        graph.stage,
        len(graph.ops),
        timeline.start_bytes,
        timeline.peak_bytes,
        timeline.peak_pos,
        at_peak,
        timeline.lower_bound_bytes,
        prices.aliases.bytes_of(graph.saved, of_caller=graph.stage != "forward"),  # a backward takes all of its tensors
        len(timeline.unknown),
        timeline.holders[:NUM_HOLDERS],
    )


def region_size(graph: Graph, pos: int) -> RegionSize:
    """What the region at ``pos`` takes, gives and does."""
    op = graph.ops[pos]
    inputs, outputs = (sum(graph.values[name].nbytes or 0 for name in names) for names in (op.inputs, op.outputs))
    num_ops = len(op.leaves) if op.subops else 0
    return RegionSize(op.id, pos, len(op.inputs), len(op.outputs), num_ops, inputs, outputs)


class _Steps:
    """Positions of a trace counted in steps: operations without bookkeeping."""

    def __init__(self, graph: Graph, counted: Iterable[int]) -> None:
        marks = set(counted)
        self.before = [0]  # by position: how many counted ops stand before it
        for pos in range(len(graph.ops)):
            self.before.append(self.before[-1] + (pos in marks))

    def between(self, start: int, end: int) -> int:
        return self.before[end] - self.before[start]


# ---------------------------------------------------------------- two traces


class _Differ:
    """Makes the diff of two Graphs whose canonical forms differ."""

    def __init__(self, before: Graph, after: Graph, forms: Sequence[tuple[str, ...]]) -> None:
        self.graphs = (before, after)
        self.forms = forms
        self.matching: Matching = match(before, after)
        self.flows: tuple[Flow, Flow] = (self.matching.before, self.matching.after)
        self.pairs = [(self.flows[0].atoms[a], self.flows[1].atoms[b]) for a, b in self.matching.atoms]
        self.partner = self._partners()  # regions, by position
        self.units = self._units()  # positions of operations and regions that both traces have
        self.steps = tuple(
            _Steps(graph, (pos for pos, op in enumerate(graph.ops) if op.id not in BOOKKEEPING))
            for graph in self.graphs
        )

    def run(self) -> TraceDiff:
        before, after = self.graphs
        left, entered, regrouped = self._crossings()
        split, merged = self._partitions()
        duplicated, added = self._instances(1)
        deduplicated, gone = self._instances(0)
        saved_more, saved_less = self._saved()
        result = TraceDiff(
            side_of(before),
            side_of(after),
            self._moved(),
            left,
            entered,
            regrouped,
            split,
            merged,
            duplicated,
            deduplicated,
            added,
            gone,
            self._changed(),
            self._lifetimes(),
            saved_more,
            saved_less,
            self._regions(),
            self._interface(),
        )
        return replace(result, other=self._first_difference()) if result.is_empty else result

    # ------------------------------------------------------------ places

    def _partners(self) -> dict[int, int]:
        """Regions that are each other's continuation: those that share most ops, largest shares first."""
        shared = Counter((a.region, b.region) for a, b in self.pairs if a.region is not None and b.region is not None)
        partner: dict[int, int] = {}
        taken: set[int] = set()
        for (one, other), _ in sorted(shared.items(), key=lambda item: (-item[1], item[0])):
            assert one is not None and other is not None
            if one not in partner and other not in taken:
                partner[one] = other
                taken.add(other)
        return partner

    def _units(self) -> dict[int, int]:
        units = dict(self.partner)
        taken = set(units.values())
        for a, b in self.pairs:
            alone = a.region is None and b.region is None
            if alone and a.pos not in units and b.pos not in taken:
                units[a.pos] = b.pos
                taken.add(b.pos)
        return dict(sorted(units.items()))

    def _region_name(self, side: int, atom: Atom) -> str | None:
        return None if atom.region is None else self.graphs[side].ops[atom.region].id

    def _distance(self, side: int, atom: Atom) -> int:
        """Steps to the first op outside of the atom's own that takes an output; to the end where none does."""
        flow, graph = self.flows[side], self.graphs[side]
        users = [flow.atoms[taker].pos for value in atom.gives for taker, _ in flow.takers[value]]
        later = [pos for pos in users if pos > atom.pos]
        return (
            self.steps[side].between(atom.pos, min(later))
            if later
            else self.steps[side].between(atom.pos, len(graph.ops))
        )

    def _unit_distance(self, side: int, pos: int) -> int:
        graph = self.graphs[side]
        users = [
            user
            for name in graph.ops[pos].outputs
            for user in graph.consumers.get(name, ())
            if user > pos and graph.ops[user].id not in (DEL, UNPACK)
        ]
        return self.steps[side].between(pos, min(users, default=len(graph.ops)))

    # ------------------------------------------------------------ lists

    def _moved(self) -> tuple[MovedOp, ...]:
        before, after = self.graphs
        stays = set(_longest_increasing(list(self.units.values())))
        moved = []
        for index, (one, other) in enumerate(self.units.items()):
            if index in stays:
                continue
            names = (_first(before.ops[one].outputs), _first(after.ops[other].outputs))
            distances = self._unit_distance(0, one), self._unit_distance(1, other)
            moved.append(MovedOp(before.ops[one].id, after.ops[other].id, *names, one, other, *distances))
        return tuple(moved)

    def _crossings(self) -> tuple[tuple[Crossing, ...], tuple[Crossing, ...], tuple[Crossing, ...]]:
        left: list[Crossing] = []
        entered: list[Crossing] = []
        regrouped: list[Crossing] = []
        for a, b in self.pairs:
            if a.region is None and b.region is None:
                continue
            if a.region is not None and b.region is not None and self.partner.get(a.region) == b.region:
                continue
            crossing = Crossing(
                operation(a.op),
                _first(a.op.outputs),
                _first(b.op.outputs),
                self._region_name(0, a),
                self._region_name(1, b),
                a.pos,
                b.pos,
                self._distance(0, a),
                self._distance(1, b),
                _bytes(self.graphs[1], b.op.outputs),
            )
            (left if b.region is None else entered if a.region is None else regrouped).append(crossing)
        left.sort(key=_crossing_order)
        entered.sort(key=_crossing_order)
        regrouped.sort(key=_crossing_order)
        return tuple(left), tuple(entered), tuple(regrouped)

    def _partitions(self) -> tuple[tuple[Partition, ...], tuple[Partition, ...]]:
        parts: tuple[dict[int, set[int]], dict[int, set[int]]] = (defaultdict(set), defaultdict(set))
        for a, b in self.pairs:
            if a.region is not None and b.region is not None:
                parts[0][a.region].add(b.region)
                parts[1][b.region].add(a.region)

        def named(side: int) -> tuple[Partition, ...]:
            ops, others = self.graphs[side].ops, self.graphs[1 - side].ops
            return tuple(
                Partition(ops[whole].id, tuple(others[part].id for part in sorted(found)))
                for whole, found in sorted(parts[side].items())
                if len(found) > 1
            )

        return named(0), named(1)

    def _instances(self, side: int) -> tuple[tuple[Instance, ...], tuple[Instance, ...]]:
        """Atoms that only one side has: second instances of matched ones, and the others."""
        matched = self.matching.to_before if side else self.matching.to_after
        numbers = self.matching.histories_after if side else self.matching.histories_before
        flow = self.flows[side]
        original = {numbers[atom.index]: atom for atom in reversed(flow.atoms) if atom.index in matched}
        copies: list[Instance] = []
        others: list[Instance] = []
        for atom in flow.atoms:
            if atom.index in matched:
                continue
            twin = original.get(numbers[atom.index])
            instance = Instance(
                atom.op.id,
                _first(atom.op.outputs),
                atom.pos,
                self._region_name(side, atom),
                _bytes(self.graphs[side], atom.op.outputs),
                None if twin is None else _first(twin.op.outputs),
            )
            (others if twin is None else copies).append(instance)
        return tuple(copies), tuple(others)

    def _changed(self) -> tuple[ChangedOp, ...]:
        changed = []
        for a, b in self.pairs:
            for aspect, before, after in self._aspects(a, b):
                names = _first(a.op.outputs), _first(b.op.outputs)
                changed.append(ChangedOp(operation(a.op), *names, a.pos, b.pos, aspect, before, after))
        return tuple(sorted(changed, key=_change_order))

    def _aspects(self, a: Atom, b: Atom) -> Iterator[tuple[str, str, str]]:
        """In what a matched pair differs, and how it reads before and after."""
        if a.label != b.label and _without_values(a.op) != _without_values(b.op):
            yield "arguments", _call_text(a.op), _call_text(b.op)
        before, after = _types_text(self.graphs[0], a.op), _types_text(self.graphs[1], b.op)
        if before != after:
            yield "type", before, after
        if [self.matching.values.get(value) for value in a.takes] != list(b.takes):
            yield "operands", ", ".join(_operands(a, self.flows[0])), ", ".join(_operands(b, self.flows[1]))
        before, after = self.graphs[0].ops[a.pos].id, self.graphs[1].ops[b.pos].id
        if a.region is None and b.region is None and before != after:
            yield "callee", before, after

    def _lifetimes(self) -> tuple[Lifetime, ...]:
        before, after = self.graphs
        steps = _Steps(before, self.units), _Steps(after, self.units.values())
        ranges = live_ranges(before), live_ranges(after)
        top = tuple({value: name for name, value in flow.top.items()} for flow in self.flows)
        changes = []
        for one, other in self.matching.values.items():
            mine, theirs = ranges[0].get(top[0].get(one, "")), ranges[1].get(top[1].get(other, ""))
            if mine is None or theirs is None or after.values[theirs.name].kind != "tensor":
                continue
            lengths = steps[0].between(mine.start, mine.end), steps[1].between(theirs.start, theirs.end)
            if lengths[0] != lengths[1]:
                changes.append(Lifetime(mine.name, theirs.name, after.values[theirs.name].nbytes or 0, *lengths))
        changes.sort(key=lambda one: -one.nbytes * abs(one.steps_after - one.steps_before))
        return tuple(changes)

    def _saved(self) -> tuple[tuple[SavedValue, ...], tuple[SavedValue, ...]]:
        saved = tuple(
            dict.fromkeys(flow.top[name] for name in graph.saved) for flow, graph in zip(self.flows, self.graphs)
        )
        both = {(one, other) for one, other in self.matching.values.items() if one in saved[0] and other in saved[1]}
        common = ({one for one, _ in both}, {other for _, other in both})

        def only(side: int) -> tuple[SavedValue, ...]:
            found = [self.flows[side].value(value) for value in saved[side] if value not in common[side]]
            return tuple(SavedValue(value.name, value.nbytes or 0, type_text(value) or value.name) for value in found)

        return only(1), only(0)

    def _regions(self) -> tuple[RegionChange, ...]:
        sizes = tuple(
            {pos: region_size(graph, pos) for pos, op in enumerate(graph.ops) if op.is_fusion} for graph in self.graphs
        )
        changes = [
            RegionChange(size, sizes[1].get(self.partner.get(pos, -1)))
            for pos, size in sizes[0].items()
            if pos not in self.partner or _extent(size) != _extent(sizes[1][self.partner[pos]])
        ]
        partners = set(self.partner.values())
        changes += [RegionChange(None, size) for pos, size in sizes[1].items() if pos not in partners]
        return tuple(sorted(changes, key=_region_order))

    def _interface(self) -> tuple[OtherDifference, ...]:
        """Arguments and results that differ: what a caller would see."""
        before, after = self.graphs
        found = []
        if before.stage != after.stage:
            found.append(OtherDifference("stage", before.stage, after.stage))
        arguments = tuple(", ".join(_types_of(graph, name) for name in graph.args) for graph in self.graphs)
        if arguments[0] != arguments[1]:
            found.append(OtherDifference("arguments", *arguments))
        results = [graph.result if isinstance(graph.result, tuple) else () for graph in self.graphs]
        if before.stage == after.stage == "forward":
            results = [result[:1] for result in results]  # what is saved has lists of its own
        return (*found, *self._results(tuple(results[0]), tuple(results[1])))

    def _results(self, one: Arg, other: Arg) -> Iterator[OtherDifference]:
        """Results that are not made by matched ops, or not gathered in the same way."""
        if isinstance(one, Ref) and isinstance(other, Ref):
            tops = self.flows[0].top.get(one.name, -1), self.flows[1].top.get(other.name, -1)
            if self.matching.values.get(tops[0]) != tops[1]:
                yield OtherDifference("result", self._maker_text(0, one.name), self._maker_text(1, other.name))
        elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
            for mine, theirs in zip(one, other):
                yield from self._results(mine, theirs)
        elif isinstance(one, Struct) and isinstance(other, Struct) and _keys(one) == _keys(other):
            for (_, mine), (_, theirs) in zip(one.items, other.items):
                yield from self._results(mine, theirs)
        elif arg_text(one) != arg_text(other):
            yield OtherDifference("result", arg_text(one), arg_text(other))

    def _maker_text(self, side: int, name: str) -> str:
        graph = self.graphs[side]
        maker = graph.ops[graph.producer[name]].id if name in graph.producer else "an argument"
        return f'{name} "{_types_of(graph, name)}" of {maker}'

    def _first_difference(self) -> tuple[OtherDifference, ...]:
        one, other = self.forms
        index = next((i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))
        texts = (form[index] if index < len(form) else "the end" for form in self.forms)
        return (OtherDifference("statement", *texts),)


# ---------------------------------------------------------------- helpers


def _longest_increasing(numbers: Sequence[int]) -> list[int]:
    """Indices of a longest increasing subsequence, in n log n."""
    tails: list[int] = []  # index of the last element of the best subsequence of each length
    tail_numbers: list[int] = []
    previous = [-1] * len(numbers)
    for index, number in enumerate(numbers):
        at = bisect_left(tail_numbers, number)
        previous[index] = tails[at - 1] if at else -1
        tails[at : at + 1] = [index]
        tail_numbers[at : at + 1] = [number]
    chain, index = [], tails[-1] if tails else -1
    while index >= 0:
        chain.append(index)
        index = previous[index]
    return chain[::-1]


def _keys(struct: Struct) -> list[str]:
    return [key for key, _ in struct.items]


def _first(names: Sequence[str]) -> str:
    return names[0] if names else ""


def _bytes(graph: Graph, names: Iterable[str]) -> int:
    return sum(graph.values[name].nbytes or 0 for name in names)


def _without_values(op: Op) -> str:
    """The call with every value named alike, to compare constants."""
    anonymous = Op(operation(op), _anonymous(op.args), None, tuple((key, _anonymous(arg)) for key, arg in op.kwargs))  # type: ignore[arg-type]
    return _call_text(anonymous)


def _anonymous(arg: Arg) -> Arg:
    if isinstance(arg, Ref):
        return Ref("_")
    if isinstance(arg, tuple):
        return tuple(map(_anonymous, arg))
    if isinstance(arg, Struct):
        return Struct(tuple((key, _anonymous(item)) for key, item in arg.items))
    return arg


def _call_text(op: Op) -> str:
    return ", ".join((*map(arg_text, op.args), *(f"{key}={arg_text(arg)}" for key, arg in op.kwargs)))


def _operands(atom: Atom, flow: Flow) -> list[str]:
    return [flow.names[value] for value in atom.takes]


def _types_text(graph: Graph, op: Op) -> str:
    return ", ".join(_types_of(graph, name) for name in op.outputs)


def _types_of(graph: Graph, name: str) -> str:
    value = graph.values[name]
    return (type_text(value) or f'{name}: "{_shape_text(value)}"').partition(": ")[2].strip('"')


def _extent(size: RegionSize) -> tuple[int, ...]:
    return size.num_inputs, size.num_outputs, size.num_ops, size.input_bytes, size.output_bytes


def _crossing_order(one: Crossing) -> tuple[int, int, str, str]:
    return one.pos_before, one.pos_after, one.name_before, one.name_after


def _change_order(one: ChangedOp) -> tuple[int | str, ...]:
    return one.pos_before, one.pos_after, one.aspect, one.name_before, one.name_after, one.before, one.after


def _region_order(one: RegionChange) -> tuple[int, int]:
    return (
        one.before.pos if one.before is not None else 1 << 62,
        one.after.pos if one.after is not None else 1 << 62,
    )


def _swapped(one: Any) -> Any:
    """A record with its before and after exchanged."""
    twins = {}
    for name in (field.name for field in fields(one)):
        for mine, theirs in (("before", "after"), ("from_", "to_")):
            if mine in name and hasattr(one, name.replace(mine, theirs)):
                twins[name], twins[name.replace(mine, theirs)] = (
                    getattr(one, name.replace(mine, theirs)),
                    getattr(one, name),
                )
    return replace(one, **twins)

"""Which operation of one trace is which of another, told by structure: names and region numbers mean nothing.

A trace is taken apart into *atoms*: the finest sub-ops of each operation, whether they stand in a fusion region or alone. An
atom that leaves a region is therefore the same atom before and after, and so is one that another executor runs.

Two atoms are the same if they sit in the same place of the data flow. The *history* of an atom is its operation, its constants,
its types and the histories of what it takes; its *future* is its operation and the futures of what takes its outputs. Both are
numbered by hash-consing over both traces at once, so equal numbers mean equal histories, exactly and in linear time. Matching
goes from certain to plausible, each step linear or n log n:

1. equal history and future, in order where several atoms share both;
2. equal history, or equal future, where only one atom on each side has it;
3. neighbours of matched atoms: the same operation at the same operand, where only one on each side fits;
4. what is left, between the same matched neighbours, first with equal types, then with equal sizes, then by operation alone;
   and last what is left in order, by equal types, by equal sizes, and within regions that share most ops.

Inputs of the traces (arguments, saved tensors) are matched by the operands that they are, then by type in order.

This is the scheme of tree differs such as GumTree (Falleri et al. 2014), with value numbers in place of subtree hashes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from thunder_fusionfix.effects import short_name
from thunder_fusionfix.model import CLEAR, DEL, EXPAND, OWN, RETURN, UNPACK, Arg, Graph, Op, Ref, Struct, Value, refs

BOOKKEEPING = frozenset((DEL, CLEAR, OWN, EXPAND, RETURN, UNPACK))
_SPELLINGS = {"permute": "transpose", "view": "reshape"}  # of one operation by torch and by prims


@dataclass(frozen=True, slots=True)
class Atom:
    """One finest operation."""

    index: int  # in Flow.atoms
    pos: int  # position of the operation that it is, or is part of
    op: Op
    takes: tuple[int, ...]  # values, in argument order, repeats included
    gives: tuple[int, ...]
    region: int | None  # position of the fusion region that it stands in
    label: Hashable  # operation, constants and types of its outputs


@dataclass(slots=True)
class Flow:
    """The data flow of a Graph, in numbers: atoms and the values between them."""

    graph: Graph
    atoms: list[Atom] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of each value, as first seen
    maker: list[tuple[int, int] | None] = field(default_factory=list)  # (atom, which output); None for inputs
    roles: list[str] = field(default_factory=list)  # of inputs: "argument" or "unpacked"
    takers: list[list[tuple[int, int]]] = field(default_factory=list)  # (atom, which operand)
    returned: dict[int, list[int]] = field(default_factory=dict)  # value: which parts of the result hold it
    top: dict[str, int] = field(default_factory=dict)  # name outside of regions: value

    def value(self, index: int) -> Value:
        return self.graph.values[self.names[index]]

    @property
    def inputs(self) -> list[int]:
        return [index for index, maker in enumerate(self.maker) if maker is None]


def flow_of(graph: Graph) -> Flow:
    """The data flow of ``graph``."""
    flow = Flow(graph)
    for name in graph.args:
        flow.top[name] = _new_value(flow, name, None, "argument")
    for pos, op in enumerate(graph.ops):
        if op.id == UNPACK:
            for name in op.outputs:
                flow.top[name] = _new_value(flow, name, None, "unpacked")
        elif op.id == RETURN:
            for part, arg in enumerate(op.args):
                for name in refs(arg):
                    flow.returned.setdefault(_seen(flow, {}, name), []).append(part)
        elif op.id not in BOOKKEEPING:
            inner: dict[str, int] = {}  # names that only the region's own sub-ops see
            for leaf in op.leaves:
                _add_atom(flow, inner, pos, leaf, pos if op.is_fusion else None)
            for name in op.outputs:
                if name not in inner:  # sub-ops that do not say where an output comes from
                    inner[name] = _new_value(flow, name, None, "unpacked")
                flow.top[name] = inner[name]
    return flow


def _add_atom(flow: Flow, inner: dict[str, int], pos: int, op: Op, region: int | None) -> None:
    index = len(flow.atoms)
    takes = tuple(_seen(flow, inner, name) for name in _operands(op))
    for operand, value in enumerate(takes):
        flow.takers[value].append((index, operand))
    gives = []
    for output, name in enumerate(op.outputs):
        inner[name] = _new_value(flow, name, (index, output), "")
        gives.append(inner[name])
    types = tuple(_type(flow.graph.values[name]) for name in op.outputs)
    label = (operation(op), _constants(op.args), tuple((k, _constants(arg)) for k, arg in op.kwargs), types)
    flow.atoms.append(Atom(index, pos, op, takes, tuple(gives), region, label))


def _seen(flow: Flow, inner: dict[str, int], name: str) -> int:
    """The value that a name means at this place; a name that nothing made before is an input."""
    found = inner.get(name, flow.top.get(name))
    if found is None:
        found = flow.top[name] = _new_value(flow, name, None, "argument")
    return found


def _new_value(flow: Flow, name: str, maker: tuple[int, int] | None, role: str) -> int:
    flow.names.append(name)
    flow.maker.append(maker)
    flow.roles.append(role)
    flow.takers.append([])
    return len(flow.names) - 1


def operation(op: Op) -> str:
    """What an operation is, under whichever spelling and region number.

    >>> [operation(Op(i, ())) for i in ("torch.permute", "prims.transpose", "torch_prims_reshape_impl", "nvFusion12")]
    ['transpose', 'transpose', 'reshape', 'nvFusion']
    """
    if op.is_fusion or op.id.startswith(("nvFusion", "TorchCompile", "CUDAGraph")):
        return op.id.rstrip("0123456789")
    name = short_name(op.id)
    return _SPELLINGS.get(name, name)


def _operands(op: Op) -> Iterable[str]:
    yield from refs(op.args)
    for _, arg in op.kwargs:
        yield from refs(arg)


def _constants(arg: Arg) -> Hashable:
    """An argument with all values taken for one, and with numbers told apart from booleans."""
    if isinstance(arg, Ref):
        return Ref
    if isinstance(arg, tuple):
        return tuple(map(_constants, arg))
    if isinstance(arg, Struct):
        return tuple((key, _constants(item)) for key, item in arg.items)
    return (type(arg).__name__, repr(arg))


def _type(value: Value) -> tuple[Hashable, ...]:
    return value.kind, value.shape if value.shape is not None else value.known_numel, value.dtype, value.device


# ---------------------------------------------------------------- numbering


class _Numbers:
    """Numbers for structures: equal structures get equal numbers."""

    def __init__(self) -> None:
        self.of: dict[Hashable, int] = {}

    def __getitem__(self, structure: Hashable) -> int:
        return self.of.setdefault(structure, len(self.of))


def histories(flow: Flow, numbers: _Numbers) -> list[int]:
    """A number per atom for all that leads to it; inputs count by role and type."""
    values = [0] * len(flow.names)
    for index in flow.inputs:
        values[index] = numbers["input", flow.roles[index], _type(flow.value(index))]
    result = []
    for atom in flow.atoms:
        number = numbers["history", atom.label, tuple(values[value] for value in atom.takes)]
        for output, value in enumerate(atom.gives):
            values[value] = numbers["output", number, output]
        result.append(number)
    return result


def futures(flow: Flow, numbers: _Numbers) -> list[int]:
    """A number per atom for all that follows from it; results count by the part of the result that they are in."""
    result = [0] * len(flow.atoms)

    def future_of(value: int) -> int:
        uses = tuple(sorted((result[taker], operand) for taker, operand in flow.takers[value]))
        return numbers["uses", uses, tuple(flow.returned.get(value, ()))]

    for atom in reversed(flow.atoms):
        result[atom.index] = numbers["future", atom.label, tuple(map(future_of, atom.gives))]
    return result


# ---------------------------------------------------------------- matching

_Relation = Callable[[Flow, Atom], Hashable]  # atoms that it gives one key for may be taken for each other


@dataclass(frozen=True)
class Matching:
    """Which atom and value of ``before`` is which of ``after``."""

    before: Flow
    after: Flow
    atoms: tuple[tuple[int, int], ...]  # by atom of ``before``
    values: dict[int, int]  # of ``before`` to ``after``, inputs included
    histories_before: Sequence[int]
    histories_after: Sequence[int]

    @cached_property
    def to_after(self) -> dict[int, int]:
        return dict(self.atoms)

    @cached_property
    def to_before(self) -> dict[int, int]:
        return {after: before for before, after in self.atoms}


def match(before: Graph, after: Graph) -> Matching:
    """The atoms and values of two Graphs matched by structure."""
    return _Matcher(flow_of(before), flow_of(after)).run()


class _Matcher:
    def __init__(self, before: Flow, after: Flow) -> None:
        self.flows = (before, after)
        self.pairs: tuple[dict[int, int], dict[int, int]] = ({}, {})  # atoms, both ways
        self.values: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self.queue: deque[tuple[int, int]] = deque()  # pairs of values whose neighbours are to be looked at

    def run(self) -> Matching:
        before, after = self.flows
        numbers = _Numbers()
        history = (histories(before, numbers), histories(after, numbers))
        future = (futures(before, numbers), futures(after, numbers))
        both = tuple(list(zip(*numbered)) for numbered in zip(history, future))
        self.pair_groups(_numbered(both), only_equal=True)
        self.pair_groups(_numbered(history), only_single=True)
        self.pair_groups(_numbered(future), only_single=True)
        self.match_inputs_by_use()
        for relation in (_label, _operation_and_sizes, _operation):
            self.spread(relation)
        self.pair_groups(_numbered(history), only_equal=True)
        for relation in (_label, _operation_and_sizes):
            self.pair_between_neighbours(relation)
            self.spread(relation)
        self.match_inputs_by_use()
        self.pair_between_neighbours(_operation)
        for relation in (_label, _operation_and_sizes):
            self.pair_groups(self.related(relation))
        self.pair_within_regions()
        self.match_inputs_by_use()
        self.match_inputs_by_type()
        pairs = tuple(sorted(self.pairs[0].items()))
        return Matching(before, after, pairs, dict(sorted(self.values[0].items())), *history)

    # ------------------------------------------------------------ pairs

    def related(self, relation: _Relation) -> Callable[[int, Atom], Hashable]:
        return lambda side, atom: relation(self.flows[side], atom)

    def is_free(self, side: int, atom: int) -> bool:
        return atom not in self.pairs[side]

    def pair(self, one: int, other: int) -> None:
        self.pairs[0][one], self.pairs[1][other] = other, one
        first, second = self.flows[0].atoms[one], self.flows[1].atoms[other]
        for mine, theirs in zip(first.gives, second.gives):
            self.pair_values(mine, theirs)
        for mine, theirs in zip(first.takes, second.takes):
            self.queue.append((mine, theirs))

    def pair_values(self, one: int, other: int) -> None:
        if one not in self.values[0] and other not in self.values[1]:
            self.values[0][one], self.values[1][other] = other, one
            self.queue.append((one, other))

    def pair_groups(
        self, key: Callable[[int, Atom], Hashable], *, only_equal: bool = False, only_single: bool = False
    ) -> None:
        """Pairs free atoms of one key, in order: all, or only where both sides have as many, or only where both have one."""
        groups: tuple[dict[Hashable, list[int]], ...] = (defaultdict(list), defaultdict(list))
        for side, flow in enumerate(self.flows):
            for atom in flow.atoms:
                if self.is_free(side, atom.index):
                    groups[side][key(side, atom)].append(atom.index)
        for structure, mine in groups[0].items():
            theirs = groups[1].get(structure, [])
            if only_single and not (len(mine) == len(theirs) == 1):
                continue
            if only_equal and len(mine) != len(theirs):
                continue
            for one, other in zip(mine, theirs):
                self.pair(one, other)

    def spread(self, relation: _Relation) -> None:
        """Pairs free neighbours of matched values that ``relation`` does not tell apart, where only one on each side fits."""
        self.queue.extend(self.values[0].items())
        self.queue.extend(
            pair
            for one, other in self.pairs[0].items()
            for pair in zip(self.flows[0].atoms[one].takes, self.flows[1].atoms[other].takes)
        )
        seen: set[tuple[int, int]] = set()  # a value with many takers is looked at once a round
        while self.queue:
            one, other = self.queue.popleft()
            self.spread_to_maker(one, other, relation)
            if self.values[0].get(one) == other and (one, other) not in seen:
                seen.add((one, other))
                self.spread_to_takers(one, other, relation)

    def spread_to_maker(self, one: int, other: int, relation: _Relation) -> None:
        makers = (self.flows[0].maker[one], self.flows[1].maker[other])
        if makers[0] is None or makers[1] is None or makers[0][1] != makers[1][1]:
            return
        mine, theirs = makers[0][0], makers[1][0]
        if self.is_free(0, mine) and self.is_free(1, theirs) and self.are_alike(mine, theirs, relation):
            self.pair(mine, theirs)

    def spread_to_takers(self, one: int, other: int, relation: _Relation) -> None:
        found: list[dict[Hashable, list[int]]] = []
        for side, value in enumerate((one, other)):
            flow = self.flows[side]
            groups: dict[Hashable, list[int]] = defaultdict(list)
            for taker, operand in flow.takers[value]:
                if self.is_free(side, taker):
                    groups[relation(flow, flow.atoms[taker]), operand].append(taker)
            found.append(groups)
        for key, mine in found[0].items():
            theirs = found[1].get(key, [])
            if len(mine) == len(theirs) == 1 and self.is_free(0, mine[0]) and self.is_free(1, theirs[0]):
                self.pair(mine[0], theirs[0])

    def are_alike(self, one: int, other: int, relation: _Relation) -> bool:
        before, after = self.flows
        return relation(before, before.atoms[one]) == relation(after, after.atoms[other])

    def pair_between_neighbours(self, relation: _Relation) -> None:
        """Pairs free atoms that lie between the same matched atoms, reached over free ones, in order."""
        below = [self._nearest(side, forward=True) for side in (0, 1)]
        above = [self._nearest(side, forward=False) for side in (0, 1)]

        def key(side: int, atom: Atom) -> Hashable:
            return relation(self.flows[side], atom), below[side][atom.index], above[side][atom.index]

        self.pair_groups(key)
        self.pair_groups(
            lambda side, atom: (relation(self.flows[side], atom), below[side][atom.index]), only_equal=True
        )

    def pair_within_regions(self) -> None:
        """Pairs free atoms of one operation and dtype in regions that share most of their matched atoms, in order."""
        before, after = self.flows
        shared: dict[tuple[int, int], int] = defaultdict(int)
        for one, other in self.pairs[0].items():
            regions = before.atoms[one].region, after.atoms[other].region
            if regions[0] is not None and regions[1] is not None:
                shared[regions[0], regions[1]] += 1
        partner: tuple[dict[int, int], dict[int, int]] = ({}, {})
        for (mine, theirs), _ in sorted(shared.items(), key=lambda item: (-item[1], item[0])):
            if mine not in partner[0] and theirs not in partner[1]:
                partner[0][mine], partner[1][theirs] = theirs, theirs

        def key(side: int, atom: Atom) -> Hashable:
            region = partner[side].get(atom.region, -1) if atom.region is not None else -1
            dtypes = tuple(self.flows[side].value(value).dtype for value in atom.gives)
            return (operation(atom.op), dtypes, region) if region >= 0 else (side, atom.index)

        self.pair_groups(key)

    def _nearest(self, side: int, *, forward: bool) -> dict[int, int]:
        """For each free atom, the first matched atom that follows from it (or leads to it), by its number on the first side."""
        flow = self.flows[side]
        result: dict[int, int] = {}
        for atom in reversed(flow.atoms) if forward else flow.atoms:
            if not self.is_free(side, atom.index):
                continue
            if forward:
                near = [taker for value in atom.gives for taker, _ in flow.takers[value]]
            else:
                near = [maker[0] for value in atom.takes if (maker := flow.maker[value]) is not None]
            numbers = [(self.pairs[1][n] if side else n) if n in self.pairs[side] else result.get(n, -1) for n in near]
            result[atom.index] = min((number for number in numbers if number >= 0), default=-1)
        return result

    # ------------------------------------------------------------ inputs

    def match_inputs_by_use(self) -> None:
        """Pairs inputs that are the same operands of matched atoms, most agreements first."""
        votes: dict[tuple[int, int], int] = defaultdict(int)
        before, after = self.flows
        for one, other in self.pairs[0].items():
            for mine, theirs in zip(before.atoms[one].takes, after.atoms[other].takes):
                if before.maker[mine] is None and after.maker[theirs] is None:
                    votes[mine, theirs] += 1
        for (mine, theirs), _ in sorted(votes.items(), key=lambda item: (-item[1], item[0])):
            self.pair_values(mine, theirs)

    def match_inputs_by_type(self) -> None:
        groups: tuple[dict[Hashable, list[int]], ...] = (defaultdict(list), defaultdict(list))
        for side, flow in enumerate(self.flows):
            for value in flow.inputs:
                if value not in self.values[side]:
                    groups[side][flow.roles[value], _type(flow.value(value))].append(value)
        for key, mine in groups[0].items():
            for one, other in zip(mine, groups[1].get(key, [])):
                self.pair_values(one, other)


def _numbered(numbers: Sequence[Sequence[Hashable]]) -> Callable[[int, Atom], Hashable]:
    """The key that gives an atom its number; ``numbers`` has one list of them per side."""
    return lambda side, atom: numbers[side][atom.index]


def _label(flow: Flow, atom: Atom) -> Hashable:
    return atom.label


def _operation_and_sizes(flow: Flow, atom: Atom) -> Hashable:
    return operation(atom.op), tuple(flow.value(value).numel for value in atom.gives)


def _operation(flow: Flow, atom: Atom) -> Hashable:
    return operation(atom.op)

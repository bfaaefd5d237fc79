"""Fusion regions are cut into pieces where memory is held because a region does too much at one place.

Stage: final, forward or backward. Needs: fusion regions with their sub-ops. Keeps: every name that is used outside regions and
its value. Changes: one region becomes several with unused numbers; cheap sub-ops that two pieces need are done in both.

A region takes all its inputs and gives all its outputs at one time. Thunder's ``dataflow`` fusion puts what is ready into one
region, so ten independent relus give ten tensors of which nine wait:

    [t1, t2, ...] = nvFusion0(x1, x2, ...)     # t1: "cuda:0 f32[4096, 4096]", and so are all
      # t1 = prims.maximum(x1, 0.0)
      # t2 = prims.maximum(x2, 0.0)
    y1 = torch.matmul(t1, t1)
    y2 = torch.matmul(t2, t2)

Cut in two, each piece can go to its consumer, which is what `reorder` then does:

    [t1] = nvFusion0(x1)
      # t1 = prims.maximum(x1, 0.0)
    y1 = torch.matmul(t1, t1)
    [t2] = nvFusion10(x2)
      # t2 = prims.maximum(x2, 0.0)
    y2 = torch.matmul(t2, t2)

A cut alone wins little, so cuts are priced together with the best order of the pieces. The steps: regions that hold memory at
the peak are cut as finely as may be, as long as the peak falls; then pieces that the peak does not need apart are joined again,
so that each launch more is paid for by bytes. Regions away from the peak are left alone.

Where outputs share sub-ops, a cut is possible in two ways, and the cheaper one is taken: the later piece does cheap sub-ops again
from the region's inputs, or it takes an output of the earlier piece. Shared sub-ops that are not cheap keep their outputs together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from thunder_fusionfix.apply import apply_to_graph
from thunder_fusionfix.document import megabytes
from thunder_fusionfix.effects import effect_of
from thunder_fusionfix.facts import Facts
from thunder_fusionfix.model import Decision, Graph, Op, Part, Plan, RegionEdit
from thunder_fusionfix.normal_form import has_effect
from thunder_fusionfix.pins import given_twice
from thunder_fusionfix.schedule import Order, Problem, quick_order, settle
from thunder_fusionfix.simulate import Prices

NAME = "split_regions"
COMPILERS = ("nvFusion", "TorchCompile")  # whose regions can be fused again in pieces
CHEAP_OPS = 8  # most sub-ops that are done again for one value rather than keeping its users in one piece
# A call of an nvFusion costs 150 us of host time, more than its kernel, and a small model's step waits for the host. So each region more
# has to lower the peak by this share of it, and by the option `split_min_bytes`.
LAUNCH_SHARE = 1 / 200
ROUNDS = 8  # times that the peak is looked at anew after cuts, for each of the two ways to cut
WHAT_IF_OPS = 12_000  # and not more often than this many ops allow: one look at 10,000 ops takes about a second
FRUITLESS_ROUNDS = 2  # of them in a row that do not lower it: two regions may have to be cut before it falls
EXPLAINED = 5  # regions whose staying whole gets a reason
JOIN_VISITS = (
    100_000  # orders that are priced to join pieces, times the length of the trace; about a quarter of a second
)

Pieces = tuple[tuple[str, ...], ...]  # the outputs that each piece of one region gives


def plan_split_regions(facts: Facts, fuel: int | None = None) -> Plan:
    """The plan that cuts the fusion regions of a final trace where that lowers the peak.

    Args:
        facts: the trace and what is known of it.
        fuel: at most this many regions are cut; None for no limit.
    """
    repeated = given_twice(facts.graph)
    if repeated:
        reason = f"the trace gives {repeated[0]} twice: pieces and their names could not be told apart"
        return Plan(decisions=(Decision(NAME, 0, facts.graph.name, "all regions stay whole", reason, False),))
    start = best = Cut(facts, {pos: Region(pos, op) for pos, op in enumerate(facts.graph.ops) if op.is_fusion}, {})
    looks = max(1, WHAT_IF_OPS // (len(facts.prices.steps) or 1))
    seen: set[tuple[RegionEdit, ...]] = {()}
    for recompute in (True, False):
        fine = _cut_finely(start, recompute, looks, seen)
        if fine is not start:
            best = min(best, fine, _joined(fine), key=lambda cut: cut.cost)
    best = best.limited(fuel)
    if not best.pieces or not _pays(start, best):
        return Plan(decisions=tuple(_refusals(start)))
    return Plan(regions=best.edits, decisions=(*_decisions(start, best), *_refusals(best)))


# ---------------------------------------------------------------- one region


@dataclass(frozen=True)
class Region:
    """A fusion region and the ways to cut it."""

    pos: int
    op: Op

    @cached_property
    def definition(self) -> Mapping[str, int]:
        """Index of the sub-op that gives a name."""
        return {name: index for index, subop in enumerate(self.op.subops) for name in subop.outputs}

    @cached_property
    def why_whole(self) -> str | None:
        """Why the region cannot be cut at all; None where it can be."""
        if not self.op.id.startswith(COMPILERS):
            return "its compiler is not known to take pieces"
        if any(has_effect(subop) for subop in self.op.subops):
            return "it draws random numbers, writes in place or holds an op that is not known"
        if not self.definition.keys() >= set(self.op.outputs):
            return "it gives back one of its inputs"
        if len(self.op.outputs) < 2:
            return "it has one output"
        return None

    @cached_property
    def cheap(self) -> Mapping[str, frozenset[int]]:
        """By value that a few cheap sub-ops make of the region's inputs: these sub-ops."""
        found: dict[str, frozenset[int]] = {name: frozenset() for name in self.op.inputs}
        for index, subop in enumerate(self.op.subops):
            if all(name in found for name in subop.inputs) and _is_cheap(subop):
                needed = frozenset({index}).union(*(found[name] for name in subop.inputs))
                if len(needed) <= CHEAP_OPS:
                    found.update((name, needed) for name in subop.outputs)
        return found

    def finest(self, recompute: bool) -> Pieces:
        """The outputs in as many pieces as may be.

        Args:
            recompute: whether a piece makes cheap outputs of other pieces again from the region's inputs, or takes them.
        """
        if self.why_whole is not None:
            return (self.op.outputs,)
        users: dict[int, list[str]] = {}  # sub-op to the outputs that need it
        for name in self.op.outputs:
            for index in self._slice((name,), self._stops((name,), recompute)):
                users.setdefault(index, []).append(name)
        together = _Together(self.op.outputs)
        for index, names in users.items():
            if not all(name in self.cheap for name in self.op.subops[index].outputs):
                together.join(names)
        while True:
            pieces = together.groups()
            looping = self._looping(pieces, recompute)
            if not looping:
                return pieces
            together.join(looping)

    def parts(self, pieces: Pieces, recompute: bool) -> tuple[Part, ...]:
        """What each piece computes, in an order in which they can run."""
        bodies = {piece: self._slice(piece, self._stops(piece, recompute)) for piece in pieces}
        return tuple(Part(tuple(sorted(bodies[piece])), piece) for piece in self._sorted(pieces, recompute))

    def _stops(self, piece: Sequence[str], recompute: bool) -> frozenset[str]:
        """Outputs of other pieces that ``piece`` takes rather than makes."""
        return frozenset(
            name for name in self.op.outputs if name not in piece and not (recompute and name in self.cheap)
        )

    def _slice(self, names: Sequence[str], stops: frozenset[str]) -> frozenset[int]:
        """The sub-ops that ``names`` need, given ``stops``."""
        found: set[int] = set()
        todo = [name for name in names if name in self.definition]
        while todo:
            index = self.definition[todo.pop()]
            if index not in found:
                found.add(index)
                todo += [name for name in self.op.subops[index].inputs if name in self.definition and name not in stops]
        return frozenset(found)

    def _takes(self, piece: Sequence[str], recompute: bool) -> set[str]:
        """The outputs of other pieces that ``piece`` takes."""
        stops = self._stops(piece, recompute)
        body = self._slice(piece, stops)
        return {name for index in body for name in self.op.subops[index].inputs if name in stops}

    def _sorted(self, pieces: Pieces, recompute: bool) -> Pieces:
        """The pieces in an order in which each comes after those that it takes from; those in a loop are left out."""
        giver = {name: piece for piece in pieces for name in piece}
        needs = {piece: {giver[name] for name in self._takes(piece, recompute)} for piece in pieces}
        done: list[tuple[str, ...]] = []
        left = list(pieces)
        while left:
            ready = next((piece for piece in left if needs[piece] <= set(done)), None)
            if ready is None:
                break
            done.append(ready)
            left.remove(ready)
        return tuple(done)

    def _looping(self, pieces: Pieces, recompute: bool) -> list[str]:
        """Outputs of pieces that take from each other in a circle."""
        ordered = set(self._sorted(pieces, recompute))
        return [name for piece in pieces if piece not in ordered for name in piece]


def _is_cheap(op: Op) -> bool:
    return all(effect_of(leaf).cheap and effect_of(leaf).is_pure for leaf in op.leaves)


class _Together:
    """Which of some names must stay in one piece."""

    def __init__(self, names: Sequence[str]) -> None:
        self.group = {name: [name] for name in names}

    def join(self, names: Sequence[str]) -> None:
        for name in names[1:]:
            first, other = self.group[names[0]], self.group[name]
            if first is not other:
                first += other
                self.group.update((moved, first) for moved in other)

    def groups(self) -> Pieces:
        """The groups, names in the order that was given."""
        found: dict[int, list[str]] = {}
        for name, group in self.group.items():
            found.setdefault(id(group), []).append(name)
        return tuple(tuple(names) for names in found.values())


# ---------------------------------------------------------------- one way to cut a trace


@dataclass(frozen=True)
class Cut:
    """A trace with some regions cut, in an order that a quick search gives."""

    facts: Facts
    regions: Mapping[int, Region]
    pieces: Mapping[int, Pieces]  # by position of the regions that are cut
    recompute: bool = True

    @cached_property
    def edits(self) -> tuple[RegionEdit, ...]:
        return tuple(
            RegionEdit(pos, self.regions[pos].parts(pieces, self.recompute))
            for pos, pieces in sorted(self.pieces.items())
        )

    @cached_property
    def graph(self) -> Graph:
        return apply_to_graph(self.facts.graph, Plan(regions=self.edits), deletes=False)

    @cached_property
    def prices(self) -> Prices:
        return Prices(self.graph, self.facts.forward) if self.pieces else self.facts.prices

    @cached_property
    def problem(self) -> Problem:
        return Problem(self.prices) if self.pieces else self.facts.problem

    @cached_property
    def order(self) -> Order:
        if not self.facts.config.reorder:
            return list(range(len(self.problem)))
        return quick_order(self.problem)

    @cached_property
    def peak(self) -> int:
        """Bytes, in the best order that was tried."""
        return self.problem.peak_of(self.order)

    @cached_property
    def best_peak(self) -> int:
        """Bytes, in the order that `reorder` will find."""
        if not self.facts.config.reorder:
            return self.peak
        return self.problem.best_peak

    @property
    def num_launches(self) -> int:
        """Launches more than the trace has without cuts."""
        return sum(len(pieces) - 1 for pieces in self.pieces.values())

    @property
    def launch_bytes(self) -> int:
        """What one launch more has to win."""
        return max(int(self.facts.timeline.peak_bytes * LAUNCH_SHARE), self.facts.config.split_min_bytes)

    @property
    def cost(self) -> int:
        """The peak with the launches that it takes, in bytes."""
        return self.peak + self.num_launches * self.launch_bytes

    def with_pieces(self, pieces: Mapping[int, Pieces], recompute: bool) -> Cut:
        return Cut(self.facts, self.regions, {pos: found for pos, found in pieces.items() if len(found) > 1}, recompute)

    def limited(self, fuel: int | None) -> Cut:
        """The same with at most ``fuel`` regions cut, the first ones."""
        if fuel is None or len(self.pieces) <= fuel:
            return self
        return self.with_pieces(dict(sorted(self.pieces.items())[:fuel]), self.recompute)

    @cached_property
    def holding(self) -> Mapping[int, int]:
        """Whole regions that hold memory at the peak which they need not hold there: position to bytes."""
        graph, problem = self.graph, self.problem
        live = problem.live_of(self.order)
        peak_at = live.index(self.peak)
        whole = {region.op.id: pos for pos, region in self.regions.items() if pos not in self.pieces}
        found: dict[int, int] = {}
        ids = [graph.ops[problem.steps[step]].id for step in self.order]
        index = {step: at for at, step in enumerate(self.order)}
        for id, users in enumerate(problem.users):
            if not users or not problem.sizes[id]:
                continue
            at = [index[step] for step in users]
            if max(at) < peak_at or min(at) > peak_at and not self.prices.is_outside[id]:
                continue
            at.sort()
            first = -1 if self.prices.is_outside[id] else at[0]
            makes_early = first >= 0 and (len(at) < 2 or at[1] > peak_at or at[0] == peak_at)
            takes_late = at[-1] >= peak_at and not self.prices.is_kept[id]
            for is_held, where in ((makes_early, at[0]), (takes_late, at[-1])):
                if is_held and ids[where] in whole:
                    pos = whole[ids[where]]
                    found[pos] = found.get(pos, 0) + problem.sizes[id]
        return found


def _cut_finely(start: Cut, recompute: bool, looks: int, seen: set[tuple[RegionEdit, ...]]) -> Cut:
    """The regions that hold memory at the peak cut as finely as may be, as long as the peak falls.

    Args:
        start: the trace without cuts.
        recompute: see `Region.finest`.
        looks: how many cuts may be priced in all, those in ``seen`` included.
        seen: cuts that need not be priced again; those that are priced here come in.
    """
    best = current = start
    fruitless = 0
    for _ in range(ROUNDS):
        finest = {
            pos: current.regions[pos].finest(recompute)
            for pos, held_bytes in current.holding.items()
            if held_bytes > current.launch_bytes
        }
        current = start.with_pieces({**current.pieces, **finest}, recompute)
        if current.edits in seen or len(seen) > looks:
            break
        seen.add(current.edits)
        fruitless = 0 if current.peak < best.peak else fruitless + 1
        best = min(best, current, key=lambda cut: cut.peak)
        if fruitless >= FRUITLESS_ROUNDS:
            break
    return best


# ---------------------------------------------------------------- joining pieces


def _joined(cut: Cut) -> Cut:
    """``cut`` with pieces of one region joined where that costs less than the launch that it saves; as it is where there are too many.

    Works on the order of the pieces: two that are joined run one right after the other. Pieces that have not moved do so.
    """
    problem, peak = cut.problem, cut.peak
    trials = JOIN_VISITS // max(1, len(problem))
    if trials < cut.num_launches:
        return cut
    order = settle(problem, cut.order, peak)
    step_at = {pos: step for step, pos in enumerate(problem.steps)}
    joined: dict[int, Pieces] = {}
    groups: list[list[int]] = []  # steps that are one launch from now on, of all regions
    for pos, pieces in cut.pieces.items():
        piece_of = {step_at[cut.graph.producer[piece[0]]]: piece for piece in pieces}
        index = {step: at for at, step in enumerate(order)}
        first, *rest = sorted(piece_of, key=lambda step: index[step])
        own = [[first]]
        for step in rest:
            group = [*own[-1], step]
            best: tuple[int, Order] | None = None
            for trial in _side_by_side(problem, order, own[-1], step) if trials > 0 else ():
                trials -= 1
                trial_peak = _joined_peak(problem, trial, [*groups, *own[:-1], group])
                if trial_peak <= peak + cut.launch_bytes and (best is None or trial_peak < best[0]):
                    best = trial_peak, trial
            if best is None:
                own.append([step])
            else:
                peak, order = best
                own[-1] = group
        groups += own
        joined[pos] = tuple(tuple(name for step in group for name in piece_of[step]) for group in own)
    return cut.with_pieces(joined, cut.recompute)


def _joined_peak(problem: Problem, order: Order, groups: Sequence[Sequence[int]]) -> int:
    """The peak of ``order`` where each group, whose steps run one right after another, is one launch.

    One launch takes all its outputs before it lets go of any input.
    """
    live = problem.live_of(order)
    peak = max(live)
    index = {step: at for at, step in enumerate(order)} if groups else {}
    for group in groups:
        first = group[0]
        before = live[index[first]] - problem.made_bytes[first] - problem.temporary_bytes[first]
        made = sum(problem.made_bytes[step] for step in group)
        peak = max(peak, before + made + max(problem.temporary_bytes[step] for step in group))
    return peak


def _side_by_side(problem: Problem, order: Order, group: Sequence[int], step: int) -> Iterator[Order]:
    """Orders in which ``step`` runs right after ``group``, whose steps run one after another before it."""
    first, end, at = order.index(group[0]), order.index(group[-1]) + 1, order.index(step)
    between = order[end:at]
    if not between:
        yield order
        return
    needed = {then for member in group for then in problem.after[member]}
    if needed.isdisjoint(between):
        yield [*order[:first], *between, *order[first:end], *order[at:]]
    if set(problem.before[step]).isdisjoint(between):
        yield [*order[:end], step, *between, *order[at + 1 :]]


# ---------------------------------------------------------------- decisions


def _pays(start: Cut, best: Cut) -> bool:
    return best.best_peak + best.num_launches * best.launch_bytes < start.best_peak


def _decisions(start: Cut, best: Cut) -> Iterator[Decision]:
    """One decision for each region that is cut."""
    for edit in best.edits:
        op = best.facts.graph.ops[edit.pos]
        pieces = " | ".join(_some(part.outputs) for part in edit.parts)
        times = Counter(item for part in edit.parts for item in part.body)
        twice = [item for item, count in times.items() if count > 1]
        repeated = f"; {len(twice)} cheap sub-ops are done more than once" if twice else ""
        yield Decision(
            pass_name=NAME,
            pos=edit.pos,
            where=op.id,
            what=f"cut into {len(edit.parts)} regions: {pieces}",
            reason=(
                f"with the pieces in their order the peak falls from {megabytes(start.best_peak)} to {megabytes(best.best_peak)} MB, "
                f"for {best.num_launches} more launch{'es' * (best.num_launches != 1)} in all{repeated}"
            ),
            applied=True,
            bytes_won=start.holding.get(edit.pos, 0),
        )


def _refusals(cut: Cut) -> Iterator[Decision]:
    """Why the regions that hold the most memory at the peak stay whole."""
    large = [(pos, held_bytes) for pos, held_bytes in cut.holding.items() if held_bytes > cut.launch_bytes]
    for pos, held_bytes in sorted(sorted(large, key=lambda item: (-item[1], item[0]))[:EXPLAINED]):
        region = cut.regions[pos]
        if region.why_whole is not None:
            reason = region.why_whole
        elif len(region.finest(True)) < 2 and len(region.finest(False)) < 2:
            reason = "its outputs share sub-ops that are not cheap"
        else:
            reason = f"cut, with its pieces in their order, it saves less than {megabytes(cut.launch_bytes)} MB for each launch"
        yield Decision(
            NAME, pos, region.op.id, f"stays whole; holds {megabytes(held_bytes)} MB at the peak", reason, False
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

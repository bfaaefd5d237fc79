"""Layout ops that a fusion would only carry stay out of it: they are bound for torch before the fusion executor looks.

nvFuser's pass takes every layout prim that it can. One whose input comes from outside the region and whose result only leaves it
is a passenger: the region computes nothing with it. A passenger makes its region larger and its kernel harder to find, holds its
input until the region returns, and, merged with others by a pass that goes by dataflow, runs where the region runs instead of
where it is needed. Torch does the same for free, or with the same copy.

    before                                             after
    [t7, t9] = nvFusion0(t3, t5)                       [t9] = nvFusion0(t5)
      # t7 = prims.transpose(t3, (1, 0))               t7 = torch.permute(t3, (1, 0))
      # t9 = prims.exp(t5)                             t8 = torch.matmul(t6, t7)
    t8 = torch.matmul(t6, t7)

Which layouts are passengers only a dry run of the fusion pass can tell: an op that feeds compute in one graph is a passenger in
the next, and to claim every layout splits regions and raises what is saved.

Stage: joint (executor entry), before the later fusion executors. Needs: the dry run. Keeps: every value, and what is saved: the
input of a passenger exists outside of regions already, and its result is taken by ops outside of regions alone. Changes: who runs
the layout, and where: right before the first op that takes it, so that no run of fusible ops is cut in two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from thunder_fusionfix.joint import FIXED, Insert, JointFacts, JointPlan, Moved, equal_values, is_layout_chain
from thunder_fusionfix.model import Decision, Graph, Op

NAME = "claim_layouts"


def plan_claim_layouts(facts: JointFacts, other: JointPlan, fuel: int | None = None) -> JointPlan:
    """Which layouts to bind for torch; at most ``fuel`` of them. What ``other`` moves stays where it puts it."""
    finder = _Finder(facts, other)
    claims = finder.claims()[:fuel]
    left = finder.left_to_torch() if other.inserts else []
    decisions = [finder.decision(pos) for pos in claims]
    for pos in finder.passengers:
        if pos not in claims:
            decisions.append(finder.decision(pos, finder.why_not(facts.joint.ops[pos]) or "no fuel"))
    return JointPlan(tuple(finder.moves(claims)), claims=tuple(sorted({*claims, *left})), decisions=tuple(decisions))


def passengers(region: Op) -> Iterator[Op]:
    """Layout sub-ops of ``region`` that make one of its outputs of one of its inputs, and that nothing else in it needs.

    >>> from thunder_fusionfix.model import Ref
    >>> turn = Op("prims.transpose", (Ref("a"), (1, 0)), Ref("b"))
    >>> region = Op("nvFusion0", (Ref("a"),), (Ref("b"), Ref("c")), subops=(turn, Op("prims.exp", (Ref("a"),), Ref("c"))))
    >>> [op.outputs for op in passengers(region)]
    [('b',)]
    """
    carried = set(region.inputs)  # inputs, and layouts of them
    needed: set[str] = set()  # values that compute takes
    layouts: list[Op] = []
    for op in region.subops:
        if is_layout_chain(op) and set(op.inputs) <= carried:
            carried.update(op.outputs)
            layouts.append(op)
        else:
            needed.update(op.inputs)
    wanted = set(region.outputs)
    found = []
    for op in reversed(layouts):
        if needed.isdisjoint(op.outputs) and not wanted.isdisjoint(op.outputs):
            wanted.update(op.inputs)
            found.append(op)
        else:
            needed.update(op.inputs)
    yield from reversed(found)


def passengers_of(graph: Graph) -> Mapping[str, str]:
    """Every value of ``graph`` that a region of nvFuser's carries for ops outside of regions alone, and the region.

    A value that another region takes only to carry it on counts too.
    """
    regions = [op for op in graph.ops if op.is_fusion and op.id.startswith("nvFusion")]
    candidates = [(region.id, op) for region in regions for op in passengers(region)]
    found: dict[str, str] = {}
    while True:
        new = {
            name: region
            for region, op in candidates
            if not any(_feeds_fusion(graph, name, found) for name in op.outputs)
            for name in op.outputs
            if name not in found
        }
        if not new:
            return found
        found.update(new)


def _feeds_fusion(graph: Graph, name: str, carried: Mapping[str, str]) -> bool:
    """True where a region computes with ``name``: it takes it for more than values that are ``carried``."""
    regions = (graph.ops[user] for user in graph.consumers.get(name, ()) if graph.ops[user].is_fusion)
    return any(
        not region.subops or any(name in op.inputs and not set(op.outputs) <= carried.keys() for op in region.subops)
        for region in regions
    )


@dataclass
class _Finder:
    """Finds the layouts that torch should run."""

    facts: JointFacts
    other: JointPlan

    @cached_property
    def carried(self) -> Mapping[str, str]:
        """Passengers of the dry run and what equals them: a fusion pass merges equal ops, and would carry the one left over."""
        found = passengers_of(self.facts.fused)
        first = equal_values(
            self.facts.joint, lambda site, op: site.sub < 0 and is_layout_chain(op) and self.may_move(op)
        )
        regions = {first.get(name, name): region for name, region in found.items()}
        equals = {name: regions[same] for name, same in first.items() if same in regions}
        return {**regions, **equals, **found}

    def claims(self) -> list[int]:
        """Passengers that torch may run."""
        return [pos for pos in self.passengers if self.why_not(self.facts.joint.ops[pos]) is None]

    @cached_property
    def passengers(self) -> tuple[int, ...]:
        """Layouts that a fusion would carry."""
        return tuple(
            pos
            for pos, op in enumerate(self.facts.joint.ops)
            if not self.carried.keys().isdisjoint(op.outputs)
            and not op.is_fusion
            and not any(_feeds_fusion(self.facts.fused, name, self.carried) for name in op.outputs)
        )

    def left_to_torch(self) -> list[int]:
        """Layouts that the dry run leaves to torch, a run of them standing alone: clones put beside them must not change that."""
        fused = self.facts.fused
        return [
            pos
            for pos, op in enumerate(self.facts.joint.ops)
            if self.facts.is_fusible(pos)
            and len(op.outputs) == 1
            and (found := fused.producer.get(op.outputs[0])) is not None
            and not fused.ops[found].is_fusion
            and self.why_not(op) is None
        ]

    def why_not(self, op: Op) -> str | None:
        """Why torch may not run the layout ``op`` where it stands; None where it may."""
        if op.is_fusion or not is_layout_chain(op):
            return "it is not layouts alone"
        if op.tags & FIXED:
            return f"it is tagged {', '.join(sorted(op.tags & FIXED))}"
        shared = self.facts.aliases
        if any(shared.storage_of.get(name) in self.written for name in (*op.inputs, *op.outputs)):
            return "what it sees is written to, or may be by an op that is not known"
        return None

    def may_move(self, op: Op) -> bool:
        """True where nothing may write to what the layout ``op`` sees, so that it may run later."""
        shared = self.facts.aliases
        return not any(shared.is_written(name) for name in (*op.inputs, *op.outputs))

    @cached_property
    def written(self) -> frozenset[int]:
        """Storages that an op writes, or may write for all that is known of it."""
        shared = self.facts.aliases
        return frozenset(
            shared.storage_of[access.name]
            for accesses in shared.accesses.values()
            for access in accesses
            if access.writes
        )

    @cached_property
    def placed(self) -> frozenset[int]:
        """What the other plan moves already."""
        return frozenset(insert.what.pos for insert in self.other.inserts if isinstance(insert.what, Moved))

    def moves(self, claims: Sequence[int]) -> Iterator[Insert]:
        """Each claimed op right before the first op that takes its result, so that no run of fusible ops is cut in two."""
        moving = frozenset(claims) - self.placed
        moving = frozenset(pos for pos in moving if self.may_move(self.facts.joint.ops[pos]))
        for pos in sorted(moving):
            yield Insert(self.facts.first_user(pos, moving), Moved(pos))

    def decision(self, pos: int, why_not: str | None = None) -> Decision:
        """What is done about the passenger at ``pos``."""
        op = self.facts.joint.ops[pos]
        name = next(name for name in op.outputs if name in self.carried)
        region, of = self.carried[name], op.inputs[0] if op.inputs else name
        if why_not is not None:
            return Decision(
                NAME, pos, region, f"{op.id} of {of} stays in {region}, which computes nothing with it", why_not, False
            )
        why = f"{region} would carry {name} and compute nothing with it"
        return Decision(NAME, pos, region, f"{op.id} of {of} is left to torch", why, True)

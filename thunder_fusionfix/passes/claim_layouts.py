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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from thunder_fusionfix.joint import FIXED, Insert, JointFacts, JointPlan, Moved, is_layout_chain
from thunder_fusionfix.model import Decision, Graph, Op

NAME = "claim_layouts"


def plan_claim_layouts(facts: JointFacts, other: JointPlan, fuel: int | None = None) -> JointPlan:
    """Which layouts to bind for torch; at most ``fuel`` of them, and none that ``other`` moves or renames."""
    finder = _Finder(facts, other)
    claims = finder.claims()[:fuel]
    moved = tuple(Insert(finder.target(pos, claims), Moved(pos)) for pos in claims if finder.target(pos, claims) != pos + 1)
    left = finder.left_to_torch() if other.inserts else []
    decisions = tuple(finder.decision(pos) for pos in claims)
    return JointPlan(inserts=moved, claims=tuple(sorted({*claims, *left})), decisions=decisions)


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
    """Every value of ``graph`` that a fusion region of nvFuser's carries, and the region."""
    return {
        name: op.id
        for op in graph.ops
        if op.is_fusion and op.id.startswith("nvFusion")
        for carried in passengers(op)
        for name in carried.outputs
    }


@dataclass
class _Finder:
    """Finds the passengers that may be claimed."""

    facts: JointFacts
    other: JointPlan

    def claims(self) -> list[int]:
        carried = passengers_of(self.facts.fused)
        return [
            pos
            for pos, op in enumerate(self.facts.joint.ops)
            if len(op.outputs) == 1
            and op.outputs[0] in carried
            and self.may_bind(pos, op)
            and self.feeds_no_fusion(op)
        ]

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
            and self.may_bind(pos, op)
        ]

    def may_bind(self, pos: int, op: Op) -> bool:
        """True for a layout that torch may run where it stands."""
        if op.is_fusion or op.tags & FIXED or pos in self.touched or not is_layout_chain(op):
            return False
        return not any(self.is_written(name) for name in (*op.inputs, *op.outputs))

    def feeds_no_fusion(self, op: Op) -> bool:
        fused = self.facts.fused
        return not any(fused.ops[user].is_fusion for name in op.outputs for user in fused.consumers.get(name, ()))

    @cached_property
    def touched(self) -> frozenset[int]:
        moved = {insert.what.pos for insert in self.other.inserts if isinstance(insert.what, Moved)}
        return frozenset(moved)

    def is_written(self, name: str) -> bool:
        shared = self.facts.aliases
        return name in shared.storage_of and shared.is_written(name)

    def target(self, pos: int, claims: list[int]) -> int:
        """Where the claimed op at ``pos`` goes: before the first op that takes its result, claimed ones followed."""
        users = [user for user in self.facts.joint.consumers.get(self.facts.joint.ops[pos].outputs[0], ()) if user != pos]
        return min((self.target(user, claims) if user in claims else user for user in users), default=pos + 1)

    def decision(self, pos: int) -> Decision:
        op = self.facts.joint.ops[pos]
        name = op.outputs[0]
        region = passengers_of(self.facts.fused)[name]
        what = f"{op.id} of {op.inputs[0] if op.inputs else name} is left to torch"
        return Decision(NAME, pos, region, what, f"{region} would carry {name} and compute nothing with it", True)

"""The final passes, in the order in which they run. To add one: a file here, a line in `PASSES`, an option in `config`, a test
file; CONTRIBUTING.md goes through it step by step.

Order: what the trace may free counts for all that follow, so that comes first; rows that a loss keeps need no layouts, so they come before
these; layouts leave regions before the rest, because a region that lost them takes repeated zeros, splits and moves more freely; cuts come
before the order, because the pieces of a region stand where it stood until they are moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from thunder_fusionfix.facts import Facts
from thunder_fusionfix.model import Graph, Plan
from thunder_fusionfix.passes.expand_zero_cotangents import plan_expand_zero_cotangents
from thunder_fusionfix.passes.ignore_cut_rows import ADDED, plan_ignore_cut_rows
from thunder_fusionfix.passes.own_cotangents import plan_own_cotangents
from thunder_fusionfix.passes.reorder import plan_reorder
from thunder_fusionfix.passes.split_regions import plan_split_regions
from thunder_fusionfix.passes.unfuse_layouts import plan_unfuse_layouts
from thunder_fusionfix.verify import Allow


@dataclass(frozen=True, slots=True)
class Pass:
    """One final pass: how it decides, and which changes the verifier has to admit."""

    name: str  # the option that switches it, its file and its provenance
    plan: Callable[[Facts, int | None], Plan]  # facts and the fuel that is left
    allow: Allow

    def admits(self, graph: Graph, plan: Plan) -> Allow:
        """What the verifier has to admit for ``plan``: `allow`, and the sub-ops that the plan has in two pieces of a region."""
        clones = {
            name
            for edit in plan.regions
            for item, count in Counter(
                item for part in edit.parts for item in part.body if isinstance(item, int)
            ).items()
            if count > 1
            for name in graph.ops[edit.pos].subops[item].outputs
        }
        return replace(self.allow, may_clone=self.allow.may_clone | clones) if clones else self.allow


PASSES: tuple[Pass, ...] = (
    Pass("own_cotangents", plan_own_cotangents, Allow(may_own_cotangents=True)),
    Pass("ignore_cut_rows", plan_ignore_cut_rows, Allow(may_rewrite_regions=True, may_add=ADDED)),
    Pass("unfuse_layouts", plan_unfuse_layouts, Allow(may_rewrite_regions=True)),
    Pass("expand_zero_cotangents", plan_expand_zero_cotangents, Allow(may_expand_cotangents=True)),
    Pass("split_regions", plan_split_regions, Allow(may_split_regions=True)),
    Pass("reorder", plan_reorder, Allow(may_reorder=True)),
)

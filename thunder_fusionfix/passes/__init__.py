"""The final passes, in the order in which they run. To add one: a file here, a line in `PASSES`, a test file.

Order: layouts leave regions first, because a region that lost them splits and moves more freely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thunder_fusionfix.facts import Facts
from thunder_fusionfix.model import Plan
from thunder_fusionfix.passes.unfuse_layouts import plan_unfuse_layouts
from thunder_fusionfix.verify import Allow


@dataclass(frozen=True, slots=True)
class Pass:
    """One final pass: how it decides, and which changes the verifier has to admit."""

    name: str  # the option that switches it, its file and its provenance
    plan: Callable[[Facts, int | None], Plan]  # facts and the fuel that is left
    allow: Allow


PASSES: tuple[Pass, ...] = (
    Pass("unfuse_layouts", plan_unfuse_layouts, Allow(may_rewrite_regions=True)),
)

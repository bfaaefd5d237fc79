"""Everything that a pass may ask about one trace, worked out once and only where it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from thunder_fusionfix.alias import Aliases, aliases
from thunder_fusionfix.config import FusionFixConfig
from thunder_fusionfix.model import Graph, Timeline
from thunder_fusionfix.simulate import simulate


@dataclass(frozen=True)
class Facts:
    """A Graph with its aliases and its timeline, and the options of the run."""

    graph: Graph
    config: FusionFixConfig = field(default_factory=FusionFixConfig)

    @cached_property
    def aliases(self) -> Aliases:
        return aliases(self.graph)

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.graph)

"""Everything that a pass may ask about one trace, worked out once and only where it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from thunder_fusionfix.alias import Aliases
from thunder_fusionfix.config import FusionFixConfig
from thunder_fusionfix.model import Graph, Timeline
from thunder_fusionfix.schedule import Problem, Schedule, best_order
from thunder_fusionfix.simulate import Prices


@dataclass(frozen=True)
class Facts:
    """A Graph with its aliases, its prices and its timeline, and the options of the run."""

    graph: Graph
    config: FusionFixConfig = field(default_factory=FusionFixConfig)
    forward: Graph | Aliases | None = None  # for a backward trace: the forward that saved its tensors, or its aliases

    @cached_property
    def aliases(self) -> Aliases:
        return self.prices.aliases

    @cached_property
    def prices(self) -> Prices:
        return Prices(self.graph, self.forward)

    @cached_property
    def problem(self) -> Problem:
        return Problem(self.prices)

    @cached_property
    def schedule(self) -> Schedule:
        """The best order, whatever the number of moves."""
        return best_order(self.problem)

    @cached_property
    def timeline(self) -> Timeline:
        return self.prices.timeline()

"""The cheapest set of values to keep, so that wanted values can be made again from it.

Values form a graph: each is made from its inputs, or cannot be made at all and has to be kept if it is needed. Keeping a value
has a price. What must be kept at least is a minimum vertex cut between the values that cannot be made and those that are wanted (Ford
and Fulkerson, 1956; PyTorch's `min_cut_rematerialization_partition` asks the same question). Of all minimum cuts this is the one
next to the wanted values, so the least is made again.

    >>> made_from = {"product": ("gate", "up"), "cast": ("product",)}
    >>> sorted(min_cut({"gate": 0, "up": 0, "product": 8, "cast": 4}, made_from, ["cast"]))
    ['gate', 'up']
    >>> sorted(min_cut({"gate": 3, "up": 3, "product": 8, "cast": 4}, made_from, ["cast"]))
    ['cast']

Each search starts at a wanted value and ends at the first value that cannot be made: its reach is the neighbourhood of one layer,
so the whole is near-linear in the length of a trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

INFINITE = 1 << 62

_Node = tuple[str, bool]  # a value as something given (True) or as something made (False)


def min_cut(
    prices: Mapping[str, int], made_from: Mapping[str, Sequence[str]], wanted: Iterable[str], max_steps: int = 2_000_000
) -> frozenset[str] | None:
    """The values to keep; None where no set of finite price exists, or the search takes more than ``max_steps``.

    Args:
        prices: of keeping each value; a value without one cannot be kept.
        made_from: inputs of each value that can be made again; a value that is not in it must be kept where it is needed.
        wanted: values that must be kept or made.
    """
    return _Flow(prices, made_from, tuple(dict.fromkeys(wanted)), max_steps).cut()


class _Flow:
    """A flow from the values that cannot be made to those that are wanted; each value carries its price at most."""

    def __init__(
        self, prices: Mapping[str, int], made_from: Mapping[str, Sequence[str]], wanted: tuple[str, ...], max_steps: int
    ):
        self.prices, self.made_from, self.wanted, self.steps_left = prices, made_from, wanted, max_steps
        self.through: dict[str, int] = {}  # flow through a value
        self.along: dict[str, dict[str, int]] = {}  # flow from a value to one that is made from it

    def cut(self) -> frozenset[str] | None:
        for name in self.wanted:
            while True:
                path = self.search([(name, True)])[1]
                if self.steps_left < 0:
                    return None
                if path is None:
                    break
                if not self.push(path):
                    return None
        reached = self.search([(name, True) for name in self.wanted])[0]
        return frozenset(name for name, given in reached if given and (name, False) not in reached)

    def search(self, starts: list[_Node]) -> tuple[dict[_Node, _Node | None], list[_Node] | None]:
        """Nodes from which more could flow to ``starts``, and a path from one that cannot be made, where there is one."""
        came_from: dict[_Node, _Node | None] = {start: None for start in starts}
        stack = list(starts)
        while stack:
            self.steps_left -= 1
            node = stack.pop()
            name, given = node
            if not given and name not in self.made_from:
                path: list[_Node] = [node]
                while (after := came_from[path[-1]]) is not None:
                    path.append(after)
                return came_from, path
            for before in self.before(name, given):
                if before not in came_from:
                    came_from[before] = node
                    stack.append(before)
        return came_from, None

    def before(self, name: str, given: bool) -> list[_Node]:
        """Nodes that could send more to this one."""
        if given:
            back = [(user, False) for user, flow in self.along.get(name, {}).items() if flow > 0]
            return [*back, (name, False)] if self.left(name) > 0 else back
        back = [(name, True)] if self.through.get(name, 0) > 0 else []
        return back + [(source, True) for source in self.made_from[name]]

    def left(self, name: str) -> int:
        return self.prices.get(name, INFINITE) - self.through.get(name, 0)

    def push(self, path: list[_Node]) -> bool:
        """Sends as much as fits along ``path``; False where nothing bounds it."""
        pairs = list(itertools.pairwise(path))
        amount = min(self.room(*pair) for pair in pairs)
        if amount >= INFINITE // 2:
            return False
        for (one, one_given), (other, other_given) in pairs:
            if one == other:
                self.through[one] = self.through.get(one, 0) + (amount if other_given else -amount)
            elif one_given:
                flows = self.along.setdefault(one, {})
                flows[other] = flows.get(other, 0) + amount
            else:
                self.along[other][one] -= amount
        return True

    def room(self, one: _Node, other: _Node) -> int:
        """What may yet flow from ``one`` to ``other``."""
        if one[0] == other[0]:
            return self.left(one[0]) if other[1] else self.through[one[0]]
        return INFINITE if one[1] else self.along[other[0]][one[0]]

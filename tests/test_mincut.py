"""min_cut: the cheapest set of values to keep, judged by trying every set."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from thunder_fusionfix.mincut import min_cut


def can_make(wanted: str, kept: frozenset[str], made_from: dict[str, tuple[str, ...]]) -> bool:
    if wanted in kept:
        return True
    return wanted in made_from and all(can_make(source, kept, made_from) for source in made_from[wanted])


def cheapest(prices: dict[str, int], made_from: dict[str, tuple[str, ...]], wanted: list[str]) -> int:
    """The price of the best of all sets."""
    sets = (frozenset(some) for size in range(len(prices) + 1) for some in combinations(prices, size))
    return min(
        sum(prices[name] for name in kept) for kept in sets if all(can_make(name, kept, made_from) for name in wanted)
    )


@pytest.mark.parametrize("seed", range(200))
def test_cut_of_a_random_graph_is_sound_and_the_cheapest(seed: int) -> None:
    """Everything wanted can be made of what is kept, and no set costs less."""
    rng = random.Random(seed)
    names = [f"v{index}" for index in range(rng.randint(1, 8))]
    made_from = {
        name: tuple(rng.sample(names[:index], rng.randint(1, min(index, 3))))
        for index, name in enumerate(names)
        if index and rng.random() < 0.75
    }
    prices = {name: rng.randint(0, 6) for name in names}
    wanted = [name for name in names if rng.random() < 0.4] or [names[-1]]
    kept = min_cut(prices, made_from, wanted)
    assert kept is not None
    assert all(can_make(name, kept, made_from) for name in wanted)
    assert sum(prices[name] for name in kept) == cheapest(prices, made_from, wanted)


def test_of_equal_cuts_the_one_next_to_what_is_wanted_is_taken() -> None:
    """Where a value costs as much as what it is made from, it is kept and nothing is made again."""
    assert min_cut({"x": 4, "y": 4}, {"y": ("x",)}, ["y"]) == {"y"}


def test_value_without_a_price_is_not_kept() -> None:
    """What may not be kept is never in the cut; where nothing else would do, there is none."""
    assert min_cut({"y": 4, "z": 9}, {"y": ("x",), "z": ("y",)}, ["z"]) == {"y"}
    assert min_cut({}, {"y": ("x",)}, ["y"]) is None


def test_value_made_from_nothing_is_not_kept() -> None:
    """A constant is made again."""
    assert min_cut({"ones": 8}, {"ones": ()}, ["ones"]) == frozenset()


def test_search_that_takes_too_long_gives_nothing() -> None:
    """The number of steps is bounded."""
    chain = {f"v{index}": (f"v{index - 1}",) for index in range(1, 100)}
    prices = {name: 1 for name in ("v0", *chain)}
    assert min_cut(prices, chain, ["v99"], max_steps=5) is None
    assert min_cut(prices, chain, ["v99"]) == {"v99"}

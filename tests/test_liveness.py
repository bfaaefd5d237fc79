"""Ranges of names."""

from __future__ import annotations

import random

from helpers import GraphBuilder, with_deletes
from strategies import random_graph

from thunder_fusionfix.liveness import live_ranges
from thunder_fusionfix.model import CLEAR, DEL, LiveRange


def test_live_ranges_deleted_name_ends_at_its_del() -> None:
    """A name is bound from the op that gives it to the position of its ``del``."""
    build = GraphBuilder()
    x = build.arg("x", (4,))
    y = build.op("torch.exp", x, out="y", shape=(4,))
    z = build.op("torch.exp", y, out="z", shape=(4,))
    ranges = live_ranges(build.delete(y).returns(z))
    assert ranges["x"] == LiveRange("x", 0, 4), "an argument without a del is bound to the end"
    assert ranges["y"] == LiveRange("y", 0, 2)
    assert ranges["z"] == LiveRange("z", 1, 4)


def test_live_ranges_without_any_del_end_after_the_last_use() -> None:
    """A trace that deletes nothing is read as if names went right after their last use, the returned ones never."""
    build = GraphBuilder()
    x = build.arg("x", (4,))
    y = build.op("torch.exp", x, out="y", shape=(4,))
    unused = build.op("torch.sin", y, out="unused", shape=(4,))
    ranges = live_ranges(build.returns(y))
    assert ranges["x"].end == 1
    assert ranges["y"].end == 3
    assert ranges[unused.name] == LiveRange("unused", 1, 2)


def test_live_ranges_random_graphs_agree_with_the_dels_that_thunder_would_place() -> None:
    """Deriving the ends and reading them from placed ``del``s give the same order of ends."""
    rng = random.Random(0)
    for _ in range(100):
        graph = random_graph(rng, rng.randint(1, 15), deletes=False)
        steps = [pos for pos, op in enumerate(graph.ops) if op.id not in (DEL, CLEAR)]
        placed = with_deletes(graph, steps)
        derived, read = live_ranges(graph), live_ranges(placed)
        new_pos = [pos for pos, op in enumerate(placed.ops) if op.id not in (DEL, CLEAR)]
        for name, one in derived.items():
            if name in {n for op in graph.ops for n in (*op.inputs, *op.outputs)}:
                assert read[name].start == new_pos[one.start] or name in graph.args
                if one.end < len(graph.ops):
                    assert new_pos[one.end - 1] < read[name].end <= new_pos[one.end]
                else:
                    assert read[name].end == len(placed.ops)

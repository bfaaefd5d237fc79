"""What an order has to keep: each rule with a case where it holds ops and the nearest one where it does not."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from helpers import GraphBuilder
from strategies import random_graph

from thunder_fusionfix.alias import aliases
from thunder_fusionfix.model import CLEAR, DEL, Graph, Op, Ref
from thunder_fusionfix.normal_form import has_effect
from thunder_fusionfix.pins import edges, given_twice, is_fence

SHAPE = (64,)


def pairs(graph: Graph, rule: str) -> set[tuple[int, int]]:
    return {(edge.first, edge.then) for edge in edges(graph, aliases(graph)) if edge.rule == rule}


def reaches(graph: Graph, first: int, then: int) -> bool:
    """True where the edges, taken together, keep ``first`` before ``then``."""
    after: dict[int, set[int]] = {}
    for edge in edges(graph, aliases(graph)):
        after.setdefault(edge.first, set()).add(edge.then)
    todo, seen = [first], set()
    while todo:
        pos = todo.pop()
        if pos == then:
            return True
        if pos not in seen:
            seen.add(pos)
            todo += after.get(pos, ())
    return False


def test_value_an_op_runs_after_its_producers_only() -> None:
    """A value is made before it is taken; independent ops are free."""
    build = GraphBuilder()
    x = build.arg("x", SHAPE)
    a = build.op("prims.exp", x, out="a", shape=SHAPE)
    b = build.op("prims.sin", x, out="b", shape=SHAPE)
    graph = build.returns(build.op("prims.add", a, b, out="c", shape=SHAPE))
    assert pairs(graph, "value") == {(0, 2), (1, 2), (2, 3)}
    assert not reaches(graph, 0, 1)


def test_value_a_name_given_again_keeps_the_readers_of_the_first() -> None:
    """Where a trace gives a name twice, who took the first still takes the first."""
    build = GraphBuilder()
    x = build.arg("x", SHAPE)
    build.op("prims.exp", x, out="a", shape=SHAPE)
    build.op("prims.neg", Ref("a"), out="b", shape=SHAPE)
    build.op("prims.sin", x, out="a", shape=SHAPE)
    build.op("prims.cos", Ref("a"), out="c", shape=SHAPE)
    graph = build.returns(Ref("b"), Ref("c"))
    assert given_twice(graph) == ("a",)
    assert reaches(graph, 0, 2) and reaches(graph, 1, 2) and reaches(graph, 2, 3)
    assert given_twice(collective(overlapped=True)) == ()


def test_value_a_region_that_gives_back_its_input_makes_nothing() -> None:
    """Such a region is one reader more; others of the same tensor may run before or after it."""
    build = GraphBuilder()
    x = build.arg("x", SHAPE)
    a = build.op("prims.exp", x, out="a", shape=SHAPE)
    build.region("nvFusion0", [a], [Ref("a"), Ref("b")], lambda: build.op("prims.neg", a, out="b", shape=SHAPE))
    build.op("prims.cos", a, out="c", shape=SHAPE)
    graph = build.returns(Ref("b"), Ref("c"))
    assert given_twice(graph) == ()
    assert reaches(graph, 0, 1) and reaches(graph, 0, 2)
    assert not reaches(graph, 1, 2)


def test_memory_a_write_stays_between_the_reads_around_it() -> None:
    """Reads before a write stay before it, also through a view, and reads after it after; two reads are free."""
    build = GraphBuilder()
    x, y = build.arg("x", (8, 8)), build.arg("y", (8, 8))
    build.op("prims.exp", x, out="before", shape=(8, 8))
    view = build.op("torch.permute", x, (1, 0), out="view", shape=(8, 8))
    build.op("prims.sin", view, out="seen", shape=(8, 8))
    build.op("prims.copy_", y, x, out="written", shape=(8, 8))
    build.op("prims.cos", view, out="after", shape=(8, 8))
    build.op("prims.abs", x, out="after2", shape=(8, 8))
    graph = build.returns(*(Ref(name) for name in ("before", "seen", "after", "after2")))
    assert all(reaches(graph, read, 3) for read in (0, 2))
    assert all(reaches(graph, 3, read) for read in (4, 5))
    assert not reaches(graph, 4, 5) and not reaches(graph, 0, 2)


def test_memory_what_may_be_a_view_counts_as_one() -> None:
    """A reshape may give its argument's memory, so a read of it stays on its side of a write; a computed tensor is free."""
    build = GraphBuilder()
    x, y = build.arg("x", (8, 8)), build.arg("y", (8, 8))
    flat = build.op("torch.reshape", x, (64,), out="flat", shape=(64,))
    own = build.op("prims.exp", x, out="own", shape=(8, 8))
    build.op("prims.copy_", y, x, out="written", shape=(8, 8))
    build.op("prims.neg", flat, out="a", shape=(64,))
    build.op("prims.neg", own, out="b", shape=(8, 8))
    graph = build.returns(Ref("a"), Ref("b"))
    assert reaches(graph, 2, 3)
    assert not reaches(graph, 2, 4)


def test_memory_arguments_may_share_memory() -> None:
    """Nobody says that two arguments are apart, so a write to one holds the reads of the other."""
    build = GraphBuilder()
    x, y, z = (build.arg(name, SHAPE) for name in "xyz")
    build.op("prims.exp", z, out="a", shape=SHAPE)
    build.op("prims.copy_", y, x, out="written", shape=SHAPE)
    graph = build.returns(Ref("a"))
    assert reaches(graph, 0, 1)


def test_memory_without_writes_holds_nothing() -> None:
    """Reads alone give no edges."""
    build = GraphBuilder()
    x = build.arg("x", SHAPE)
    a, b = (build.op("prims.exp", x, out=name, shape=SHAPE) for name in "ab")
    assert pairs(build.returns(a, b), "memory") == set()


@pytest.mark.parametrize("op_id", ["prims.uniform", "torch.dropout", "prims.print", "prims.item"])
def test_effect_ops_keep_their_order_among_themselves(op_id: str) -> None:
    """Two draws, prints or syncs stay in order, also where one is inside a region; a pure op passes both."""
    build = GraphBuilder()
    x = build.arg("x", SHAPE)
    build.op(op_id, x, out="a", shape=SHAPE)
    build.op("prims.exp", x, out="pure", shape=SHAPE)
    build.region("nvFusion0", [x], [Ref("b")], lambda: build.op("prims.uniform", SHAPE, 0.0, 1.0, out="b", shape=SHAPE))
    graph = build.returns(Ref("a"), Ref("b"), Ref("pure"))
    assert reaches(graph, 0, 2)
    assert not reaches(graph, 0, 1) and not reaches(graph, 1, 2)


def collective(overlapped: bool) -> Graph:
    """A gather whose wait comes after a computation (``overlapped``) or before it."""
    build = GraphBuilder()
    x = build.arg("x", SHAPE)
    future = build.op("torch_all_gather_prim_impl", x, out="future", shape=SHAPE)
    steps = [
        lambda: build.op("prims.exp", x, out="work", shape=SHAPE),
        lambda: build.op("torch_wait_prim_impl", future, out="gathered", shape=SHAPE),
    ]
    for step in steps if overlapped else reversed(steps):
        step()
    build.op("prims.sin", x, out="later", shape=SHAPE)
    return build.returns(Ref("gathered"), Ref("work"), Ref("later"))


def test_overlap_work_between_start_and_wait_stays_there() -> None:
    """What hid the transfer goes on hiding it; what did not may come and go."""
    graph = collective(overlapped=True)
    assert reaches(graph, 0, 1) and reaches(graph, 1, 2)
    assert not reaches(graph, 2, 3) and not reaches(graph, 0, 3)
    graph = collective(overlapped=False)
    assert not reaches(graph, 0, 2) and not reaches(graph, 1, 2)


def test_overlap_two_transfers_at_once_keep_starts_waits_and_the_work_between() -> None:
    """Work under two transfers stays under both."""
    build = GraphBuilder()
    x = build.arg("x", SHAPE)
    futures = [build.op("torch_all_gather_prim_impl", x, out=f"f{i}", shape=SHAPE) for i in range(2)]
    build.op("prims.exp", x, out="work", shape=SHAPE)
    for i, future in enumerate(futures):
        build.op("torch_wait_prim_impl", future, out=f"g{i}", shape=SHAPE)
    graph = build.returns(Ref("g0"), Ref("g1"), Ref("work"))
    assert all(reaches(graph, start, 2) for start in (0, 1))
    assert all(reaches(graph, 2, wait) for wait in (3, 4))
    assert reaches(graph, 0, 1) and reaches(graph, 3, 4)


def test_memory_all_reduce_in_place_keeps_reads_on_their_sides() -> None:
    """A sum in the memory of its argument is a write from the start to the wait; no read may come between, or change sides."""
    build = GraphBuilder()
    x = build.op("prims.full", SHAPE, 1.0, out="x", shape=SHAPE)
    build.op("prims.exp", x, out="before", shape=SHAPE)
    future = build.op("torch_all_reduce_prim_impl", x, "sum", "world", True, True, out="future", shape=SHAPE)
    build.op("torch_wait_prim_impl", future, out="sum", shape=SHAPE)
    build.op("prims.sin", x, out="after", shape=SHAPE)
    graph = build.returns(Ref("before"), Ref("sum"), Ref("after"))
    assert reaches(graph, 1, 2) and reaches(graph, 3, 4)
    cloned = replace(
        graph, ops=tuple(replace(op, args=(*op.args[:4], False)) if op.args[-1:] == (True,) else op for op in graph.ops)
    )
    assert not reaches(cloned, 1, 2) and not reaches(cloned, 3, 4)


def test_fence_nothing_passes_an_unknown_op() -> None:
    """An unknown op may do anything to anything, so what came before stays before."""
    build = GraphBuilder()
    x = build.arg("x", SHAPE)
    build.op("prims.exp", x, out="a", shape=SHAPE)
    build.op("mystery.op", x, out="b", shape=SHAPE)
    build.op("prims.sin", x, out="c", shape=SHAPE)
    graph = build.returns(Ref("a"), Ref("b"), Ref("c"))
    assert reaches(graph, 0, 1) and reaches(graph, 1, 2)


def test_fence_a_region_that_shows_nothing_is_unknown() -> None:
    """A region without sub-ops is a fence; one that shows pure sub-ops is none."""
    assert is_fence(Op("nvFusion0", (Ref("x"),), (Ref("a"),), is_fusion=True))
    body = (Op("prims.exp", (Ref("x"),), Ref("a")),)
    assert not is_fence(Op("nvFusion0", (Ref("x"),), (Ref("a"),), subops=body, is_fusion=True))


def test_fence_unpacking_comes_first_and_the_return_last() -> None:
    """A backward trace opens and clears its collections before anything else runs."""
    build = GraphBuilder("backward")
    saved, cotangent = build.value("s", SHAPE), build.value("g", SHAPE)
    build.collection("saved_for_backward", saved, arg=True)
    build.collection("cotangents", cotangent, arg=True)
    a = build.op("prims.mul", saved, cotangent, out="a", shape=SHAPE)
    b = build.op("prims.neg", cotangent, out="b", shape=SHAPE)
    graph = build.returns(a, b)
    steps = [pos for pos, op in enumerate(graph.ops) if op.id not in (DEL, CLEAR)]
    first, second, *work, last = steps
    assert reaches(graph, first, second)
    assert all(reaches(graph, second, pos) and reaches(graph, pos, last) for pos in work)


def test_edges_random_graphs_all_point_forward_and_chain_every_effect() -> None:
    """The trace's own order keeps all edges, and ops with an effect are one chain."""
    for seed in range(200):
        rng = random.Random(seed)
        graph = random_graph(rng, 12, stage=rng.choice(("inference", "forward", "backward")))
        assert all(edge.first < edge.then for edge in edges(graph, aliases(graph)))
        effects = [pos for pos, op in enumerate(graph.ops) if op.id not in (DEL, CLEAR) and has_effect(op)]
        assert set(pairwise(effects)) <= pairs(graph, "effect")


def test_edges_number_grows_with_the_ops_only() -> None:
    """Chains and fences name neighbours: twice the ops, at most some more than twice the edges."""

    def num_edges(num_ops: int) -> int:
        build = GraphBuilder()
        x = build.arg("x", SHAPE)
        for i in range(num_ops):
            build.op(("prims.exp", "prims.uniform", "mystery.op")[i % 3], x, out=f"t{i}", shape=SHAPE)
        graph = build.returns(x)
        return len(edges(graph, aliases(graph)))

    assert num_edges(600) < 2.2 * num_edges(300)

"""Plans carried out on Graphs: what they give, and that a trace edited by Thunder's own means reads the same."""

from __future__ import annotations

import random

import pytest
from dags import merged, random_dag
from helpers import GraphBuilder, with_deletes
from strategies import random_graph

from thunder_fusionfix.apply import apply_to_graph, inputs_of
from thunder_fusionfix.model import (
    CLEAR,
    DEL,
    EXPAND,
    OWN,
    UNPACK,
    Const,
    Graph,
    NewOp,
    Op,
    Part,
    Placed,
    Plan,
    Ref,
    RegionEdit,
)
from thunder_fusionfix.simulate import Prices, hold_cotangents
from thunder_fusionfix.verify import check_graph

SHAPE = (64,)


def two_in_one() -> Graph:
    """One region of two independent sub-ops, another behind it with a higher number."""
    build = GraphBuilder()
    x, y = build.arg("x", SHAPE), build.arg("y", SHAPE)

    def body() -> None:
        build.op("prims.exp", x, out="a", shape=SHAPE)
        build.op("prims.mul", y, x, out="b", shape=SHAPE)

    build.region("nvFusion3", [x, y], [Ref("a"), Ref("b")], body)
    build.region("nvFusion7", [Ref("b")], [Ref("c")], lambda: build.op("prims.neg", Ref("b"), out="c", shape=SHAPE))
    return build.returns(Ref("a"), Ref("c"))


def test_apply_empty_plan_gives_the_graph() -> None:
    """Nothing to do returns the same object."""
    graph = two_in_one()
    assert apply_to_graph(graph, Plan()) is graph


def test_apply_owned_cotangents_are_no_longer_held() -> None:
    """The statement stands before the unpacking, and a ``del`` of what is unpacked frees from then on."""
    build = GraphBuilder("backward")
    build.collection("saved_for_backward", build.value("y", SHAPE), arg=True)
    build.collection("cotangents", build.value("g", SHAPE), arg=True)
    build.op("torch.mul", Ref("y"), Ref("g"), out="a", shape=SHAPE)
    graph = hold_cotangents(build.delete(Ref("y"), Ref("g")).returns(Ref("a"), held=("y",)))
    assert graph.held == {"y", "g"}
    owned = apply_to_graph(graph, Plan(owned=("cotangents",)))
    assert owned.held == hold_cotangents(owned).held == {"y"}
    assert [op.id for op in owned.ops if op.inputs == ("cotangents",)] == [OWN, UNPACK, CLEAR, DEL]
    check_graph(owned)


def test_apply_zeros_stand_right_before_the_unpacking() -> None:
    """With their positions, after the statement that takes cotangents over."""
    build = GraphBuilder("backward")
    build.collection("saved_for_backward", build.value("y", SHAPE), arg=True)
    build.collection("cotangents", build.value("g", SHAPE), arg=True)
    build.op("torch.mul", Ref("y"), Ref("g"), out="a", shape=SHAPE)
    graph = build.delete(Ref("y"), Ref("g")).returns(Ref("a"))
    after = apply_to_graph(graph, Plan(owned=("cotangents",), expanded=(("cotangents", (0,)),)))
    assert [op.id for op in after.ops if op.inputs == ("cotangents",)] == [OWN, EXPAND, UNPACK, CLEAR, DEL]
    assert next(op for op in after.ops if op.id == EXPAND).args == (Ref("cotangents"), (0,))
    check_graph(after)


def test_apply_split_names_inputs_and_outputs() -> None:
    """The first piece keeps its number, the others get unused ones; each takes only what it needs, in the old order."""
    graph = two_in_one()
    after = apply_to_graph(graph, Plan((RegionEdit(0, (Part((0,), ("a",)), Part((1,), ("b",)))),)))
    regions = [(op.id, op.inputs, op.outputs, len(op.subops)) for op in after.ops if op.is_fusion]
    assert regions == [
        ("nvFusion3", ("x",), ("a",), 1),
        ("nvFusion8", ("x", "y"), ("b",), 1),
        ("nvFusion7", ("b",), ("c",), 1),
    ]
    check_graph(after)


def test_apply_order_moves_ops_and_derives_deletes() -> None:
    """Ops stand in the plan's order, each name is deleted right after its last use, what is returned never."""
    build = GraphBuilder()
    x = build.arg("x", SHAPE)
    a = build.op("prims.exp", x, out="a", shape=SHAPE)
    b = build.op("prims.sin", x, out="b", shape=SHAPE)
    graph = build.returns(build.op("prims.neg", a, out="c", shape=SHAPE), b)
    after = apply_to_graph(graph, Plan(order=(0, 2, 1, 3)))
    assert [(op.id, op.outputs or op.inputs) for op in after.ops] == [
        ("prims.exp", ("a",)),
        ("prims.neg", ("c",)),
        (DEL, ("a",)),
        ("prims.sin", ("b",)),
        (DEL, ("x",)),
        ("return", ("c", "b")),
    ]


def test_apply_new_ops_get_their_metadata_from_rules() -> None:
    """A layout placed outside and a cast inside have shapes and dtypes, although the plan gives none."""
    graph = two_in_one()
    plan = Plan(
        regions=(
            RegionEdit(
                1, (Part((NewOp("prims.convert_element_type", (Ref("%0"), Const("dtypes.bfloat16")), "c"),), ("c",)),)
            ),
        ),
        placed=(Placed(1, NewOp("prims.reshape", (Ref("b"), (8, 8)), "%0")),),
    )
    after = apply_to_graph(graph, plan)
    assert (after.values["%0"].shape, after.values["%0"].dtype) == ((8, 8), "f32")
    assert [op.id for op in after.ops if op.id != DEL] == ["nvFusion3", "prims.reshape", "nvFusion7", "return"]


def test_apply_dissolved_region_is_gone() -> None:
    """A region edit without parts leaves nothing."""
    build = GraphBuilder()
    x = build.arg("x", SHAPE)
    build.region("nvFusion0", [x], [Ref("a")], lambda: build.op("prims.exp", x, out="a", shape=SHAPE))
    graph = build.returns(x)
    after = apply_to_graph(graph, Plan((RegionEdit(0, ()),)))
    assert [op.id for op in after.ops] == ["return"]


def test_apply_random_orders_delete_as_thunder_does() -> None:
    """Random graphs in their own order: deletes and clears are where an independent walk from the end puts them."""
    for seed in range(150):
        rng = random.Random(seed)
        graph = random_graph(rng, 12, stage=rng.choice(("inference", "forward", "backward")))
        steps = tuple(pos for pos, op in enumerate(graph.ops) if op.id not in (DEL, CLEAR))
        after = apply_to_graph(graph, Plan(order=steps))
        assert after.ops == with_deletes(graph, steps).ops


def test_apply_split_apart_and_priced_as_without_regions() -> None:
    """Regions cut into single sub-ops need what the ops need without regions."""
    for seed in range(40):
        graph = merged(random_dag(random.Random(seed), 12), random.Random(seed))
        edits = [
            RegionEdit(pos, tuple(Part((index,), subop.outputs) for index, subop in enumerate(op.subops)))
            for pos, op in enumerate(graph.ops)
            if op.is_fusion
        ]
        after = apply_to_graph(graph, Plan(tuple(edits)))
        flat = Graph(
            graph.name,
            graph.stage,
            graph.args,
            tuple(sub for op in graph.ops for sub in (op.subops if op.is_fusion else (op,))),
            graph.values,
            graph.held,
        )
        assert Prices(after).timeline().peak_bytes == Prices(flat).timeline().peak_bytes


def test_inputs_of_are_what_is_not_made_inside() -> None:
    """In order of first use, each once."""
    body = [Op("prims.add", (Ref("x"), Ref("y")), Ref("a")), Op("prims.mul", (Ref("a"), Ref("x")), Ref("b"))]
    assert list(inputs_of(body)) == ["x", "y"]


@pytest.mark.nvfuser
def test_apply_agrees_with_the_edited_trace() -> None:
    """A split and an order, on a Graph and on Thunder's trace: the same ops, regions, values and deletes."""
    import torch

    from thunder_fusionfix.capture import capture
    from thunder_fusionfix.edit import apply_plan
    from thunder_fusionfix.facts import Facts
    from thunder_fusionfix.passes.reorder import plan_reorder
    from thunder_fusionfix.passes.split_regions import plan_split_regions
    from thunder_fusionfix.read import read

    def towers(a, *inputs):
        for t in inputs:
            a = torch.relu(torch.relu(t) @ t) @ a
        return a

    args = [torch.empty(1024, 1024, device="meta") for _ in range(5)]
    part = capture(towers, args, fusion_type="dataflow").parts[0]
    trace, graph = part.forward, read(part.forward)
    for plan_of in (plan_split_regions, plan_reorder):
        plan = plan_of(Facts(graph))
        assert not plan.is_empty
        with part.compiling():
            trace = apply_plan(trace, graph, plan, "test")
        graph, expected = read(trace), apply_to_graph(graph, plan)
        assert [op.id for op in graph.ops] == [op.id for op in expected.ops]
        assert [op.args for op in graph.ops] == [op.args for op in expected.ops]
        assert [op.outputs for op in graph.ops] == [op.outputs for op in expected.ops]
        assert [op.subops for op in graph.ops if op.is_fusion] == [op.subops for op in expected.ops if op.is_fusion]
        assert graph.values == expected.values

"""split_regions: where a region is cut and how, where it stays whole and why, and that programs give the same numbers."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from dags import UNIT, merged, random_dag
from helpers import F32, GraphBuilder
from strategies import random_graph

from thunder_fusionfix.apply import apply_to_graph
from thunder_fusionfix.config import FusionFixConfig
from thunder_fusionfix.execute import compare as execute_both
from thunder_fusionfix.facts import Facts
from thunder_fusionfix.model import Decision, Graph, Plan, Ref
from thunder_fusionfix.passes import PASSES, Pass
from thunder_fusionfix.passes.split_regions import Region, plan_split_regions
from thunder_fusionfix.schedule import schedule
from thunder_fusionfix.simulate import Prices, simulate
from thunder_fusionfix.verify import verify

LARGE, SMALL = (4 * UNIT,), (1,)
TENSOR = 4 * UNIT * 4  # bytes of a large one
(SPLIT,) = (item for item in PASSES if item.name == "split_regions")
EAGER_CUTS = FusionFixConfig(split_min_bytes=0)


def towers(num_towers: int, compiler: str = "nvFusion") -> Graph:
    """Issue 1337's program: all first relus in one region, all second ones in another."""
    build = GraphBuilder()
    total = build.arg("total", LARGE)
    xs = [build.arg(f"x{i}", LARGE) for i in range(num_towers)]

    def relus(inputs: list[Ref], prefix: str, number: int) -> list[Ref]:
        outputs = [Ref(f"{prefix}{i}") for i in range(len(inputs))]
        build.region(
            f"{compiler}{number}",
            inputs,
            outputs,
            lambda: [
                build.op("prims.abs", x, out=out.name, shape=LARGE) for x, out in zip(inputs, outputs, strict=True)
            ],
        )
        return outputs

    firsts = relus(xs, "a", 0)
    seconds = [build.op("torch.matmul", first, first, out=f"b{i}", shape=LARGE) for i, first in enumerate(firsts)]
    for i, third in enumerate(relus(seconds, "c", 1)):
        total = build.op("torch.matmul", third, total, out=f"total{i}", shape=LARGE)
    return build.returns(total)


def applied(plan: Plan) -> list[Decision]:
    return [decision for decision in plan.decisions if decision.applied]


def peak_after(graph: Graph, plan: Plan) -> int:
    """Bytes with the plan carried out and the ops in their best order."""
    return schedule(apply_to_graph(graph, plan)).peak_bytes


# ---------------------------------------------------------------- where and how


@pytest.mark.parametrize("compiler", ["nvFusion", "TorchCompile"])
def test_towers_need_three_tensors(compiler: str) -> None:
    """Twenty tensors over the arguments become three, whichever compiler the regions are for."""
    graph = towers(10, compiler)
    plan = plan_split_regions(Facts(graph))
    start = simulate(graph).start_bytes
    assert simulate(graph).peak_bytes - start == 20 * TENSOR
    assert peak_after(graph, plan) - start == 3 * TENSOR
    assert {decision.where for decision in applied(plan)} == {f"{compiler}0", f"{compiler}1"}


def test_towers_second_relus_need_pieces_of_their_own_and_the_first_share_one() -> None:
    """No more pieces than the peak asks for: the first two relus run at once, for the third tensor is there anyway."""
    plan = plan_split_regions(Facts(towers(10)))
    num_pieces = {edit.pos: len(edit.parts) for edit in plan.regions}
    assert num_pieces[0] == 9
    assert sum(num_pieces.values()) == 19


def test_cut_has_to_win_what_a_launch_costs() -> None:
    """Where a launch has to win more than a tensor, nothing is cut, and the reason says so."""
    plan = plan_split_regions(Facts(towers(10), FusionFixConfig(split_min_bytes=2 * TENSOR)))
    assert plan.is_empty
    assert any("for each launch" in decision.reason for decision in plan.decisions)


def test_cut_without_the_pass_that_moves_pieces_is_priced_in_place() -> None:
    """With `reorder` switched off, pieces stand where the region stood: only the region whose inputs they free is cut."""
    graph = towers(10)
    plan = plan_split_regions(Facts(graph, FusionFixConfig(reorder=False)))
    assert [edit.pos for edit in plan.regions] == [11]
    assert simulate(apply_to_graph(graph, plan)).peak_bytes < simulate(graph).peak_bytes


def test_region_away_from_the_peak_is_left_alone() -> None:
    """Two independent parts that hold little, far from the peak, stay in one launch."""
    build = GraphBuilder()
    x = build.arg("x", LARGE)
    outputs = [Ref("a"), Ref("b")]
    build.region(
        "nvFusion0", [x], outputs, lambda: [build.op("prims.abs", x, out=o.name, shape=LARGE) for o in outputs]
    )
    c = build.op("torch.matmul", *outputs, out="c", shape=LARGE)
    wide = build.op("torch.matmul", c, c, out="wide", shape=(64 * UNIT,))
    graph = build.returns(build.op("torch.sum", wide, out="small", shape=SMALL))
    assert plan_split_regions(Facts(graph)).is_empty


def shared_cast(share: str = "prims.convert_element_type") -> Graph:
    """One cast, or another sub-op, of x feeds an output that is taken at once and one that is taken far later."""
    build = GraphBuilder()
    x = build.arg("x", LARGE, "bf16")

    def body() -> None:
        shared = build.op(share, x, *([F32] if "convert" in share else []), out="shared", shape=LARGE)
        build.op("prims.abs", shared, out="near", shape=LARGE)
        build.op("prims.exp", shared, out="far", shape=LARGE)

    build.region("nvFusion0", [x], [Ref("near"), Ref("far")], body)
    wide = build.op("torch.matmul", Ref("near"), Ref("near"), out="wide", shape=(16 * UNIT,))
    small = build.op("torch.sum", wide, out="small", shape=SMALL)
    return build.returns(small, build.op("torch.matmul", Ref("far"), small, out="last", shape=SMALL))


def test_connected_region_is_cut_and_the_cheap_op_done_twice() -> None:
    """An output that serves only a far consumer is made there, with the cast of x again."""
    graph = shared_cast()
    plan = plan_split_regions(Facts(graph))
    (edit,) = plan.regions
    assert [part.outputs for part in edit.parts] == [("near",), ("far",)]
    assert [part.body for part in edit.parts] == [(0, 1), (0, 2)]
    assert "done more than once" in applied(plan)[0].reason
    assert peak_after(graph, plan) == schedule(graph).peak_bytes - TENSOR
    after = apply_to_graph(graph, plan)
    verify(apply_to_graph(graph, Plan(order=tuple(range(len(graph.ops))))), after, SPLIT.admits(graph, plan))
    assert SPLIT.admits(graph, plan).may_clone == {"shared"}


def test_connected_region_stays_whole_where_the_shared_op_is_not_cheap() -> None:
    """A cumulative sum is not done twice."""
    plan = plan_split_regions(Facts(shared_cast("prims.cumsum")))
    assert plan.is_empty
    assert any("not cheap" in decision.reason for decision in plan.decisions)


def test_piece_takes_an_output_of_another_where_that_is_cheaper() -> None:
    """The later piece takes the float32 tensor that is there anyway rather than the float64 one that would have to wait."""
    build = GraphBuilder()
    x = build.op("torch.full", out="x", shape=LARGE, dtype="f64")

    def body() -> None:
        build.op("prims.convert_element_type", x, F32, out="near", shape=LARGE)
        build.op("prims.exp", Ref("near"), out="far", shape=LARGE)

    build.region("nvFusion0", [x], [Ref("near"), Ref("far")], body)
    wide = build.op("torch.matmul", Ref("near"), Ref("near"), out="wide", shape=(48 * UNIT,))
    small = build.op("torch.sum", wide, out="small", shape=SMALL)
    later = build.op("torch.matmul", Ref("near"), small, out="later", shape=SMALL)
    graph = build.returns(later, build.op("torch.matmul", Ref("far"), later, out="last", shape=SMALL))
    plan = plan_split_regions(Facts(graph))
    (edit,) = plan.regions
    assert [part.body for part in edit.parts] == [(0,), (1,)]
    assert peak_after(graph, plan) == schedule(graph).peak_bytes - TENSOR


# ---------------------------------------------------------------- regions that are not cut


@pytest.mark.parametrize("effect", ["prims.uniform", "prims.copy_", "mystery.op"])
def test_region_with_effects_stays_whole(effect: str) -> None:
    """A region that draws, writes or holds an unknown op is not taken apart."""
    build = GraphBuilder()
    x, y = build.arg("x", SMALL), build.arg("y", SMALL)

    def body() -> None:
        build.op(effect, x, y, out="a", shape=SMALL)
        build.op("prims.exp", x, out="b", shape=SMALL)

    build.region("nvFusion0", [x, y], [Ref("a"), Ref("b")], body)
    region = Region(0, build.returns(Ref("a"), Ref("b")).ops[0])
    assert "random numbers, writes in place" in (region.why_whole or "")
    assert region.finest(True) == (("a", "b"),)


def test_region_of_another_compiler_or_with_one_output_stays_whole() -> None:
    """What cannot be fused again in pieces says why."""
    build = GraphBuilder()
    x = build.arg("x", SMALL)
    outputs = [Ref("a"), Ref("b")]
    build.region(
        "CUDAGraph0", [x], outputs, lambda: [build.op("prims.abs", x, out=o.name, shape=SMALL) for o in outputs]
    )
    build.region("nvFusion1", [x], [Ref("c")], lambda: build.op("prims.abs", x, out="c", shape=SMALL))
    graph = build.returns(*outputs, Ref("c"))
    assert [Region(pos, op).why_whole for pos, op in enumerate(graph.ops[:2])] == [
        "its compiler is not known to take pieces",
        "it has one output",
    ]


def test_finest_pieces_never_take_from_each_other_in_a_circle() -> None:
    """Outputs that share a costly sub-op stay together, and so does what stands between them."""
    build = GraphBuilder()
    x = build.arg("x", SMALL)

    def body() -> None:
        build.op("prims.cumsum", x, out="base", shape=SMALL)
        build.op("prims.exp", Ref("base"), out="first", shape=SMALL)
        build.op("prims.cumsum", Ref("first"), out="middle", shape=SMALL)
        build.op("prims.add", Ref("middle"), Ref("base"), out="last", shape=SMALL)

    build.region("nvFusion0", [x], [Ref("first"), Ref("middle"), Ref("last")], body)
    region = Region(0, build.returns(Ref("first"), Ref("middle"), Ref("last")).ops[0])
    assert region.finest(False) == (("first", "middle", "last"),)


def test_fuel_counts_regions() -> None:
    """Each region that is cut takes one unit."""
    facts = Facts(towers(10))
    assert [len(plan_split_regions(facts, fuel).regions) for fuel in (0, 2, 5)] == [0, 2, 2]


# ---------------------------------------------------------------- laws


def test_random_graphs_are_cut_soundly_and_never_for_nothing() -> None:
    """What is cut passes the verifier, computes the same on the CPU, and needs less; with effects and all stages."""
    cut = 0
    for seed in range(250):
        rng = random.Random(seed)
        graph = random_graph(rng, rng.randint(6, 24), stage=rng.choice(("inference", "forward", "backward")))
        graph = apply_to_graph(graph, Plan(order=Prices(graph).steps))
        plan = plan_split_regions(Facts(graph, EAGER_CUTS))
        if plan.is_empty:
            continue
        cut += 1
        after = apply_to_graph(graph, plan)
        verify(graph, after, SPLIT.admits(graph, plan))
        assert execute_both(graph, after).differing == ()
        assert schedule(after).peak_bytes < schedule(graph).peak_bytes
        assert simulate(after).peak_bytes <= simulate(graph).peak_bytes
    assert cut > 10


def test_random_merges_are_taken_apart() -> None:
    """Where regions cost 1.1 x of the same ops without regions, the median of that gap closed is 80 % or more."""
    closed = []
    for seed in range(150):
        rng = random.Random(seed)
        apart = random_dag(rng, 12)
        graph = merged(apart, rng)
        whole, best = schedule(graph).peak_bytes, schedule(apart).peak_bytes
        plan = plan_split_regions(Facts(graph, EAGER_CUTS))
        if whole > 1.1 * best:
            closed.append((whole - peak_after(graph, plan)) / (whole - best))
    assert len(closed) > 25
    assert statistics.median(closed) >= 0.8
    assert min(closed) >= 0


def test_trace_that_gives_a_name_twice_is_left_alone() -> None:
    """Thunder makes such traces; no plan is made for one, and the reason names the name."""
    graph = towers(4)
    again = replace(graph.ops[0], output=graph.ops[0].output)
    plan = plan_split_regions(Facts(replace(graph, ops=(graph.ops[0], again, *graph.ops[1:]))))
    assert plan.is_empty
    assert "gives a0 twice" in plan.decisions[0].reason


# ---------------------------------------------------------------- real programs


@pytest.mark.nvfuser
def test_towers_under_thunder_need_three_tensors() -> None:
    """Issue 1337 with Thunder's dataflow fusion, through both passes: 20 tensors before, 3 after, at the lower bound."""
    import torch

    from thunder_fusionfix.capture import capture
    from thunder_fusionfix.transform import FusionFixTransform

    def program(a: torch.Tensor, *t0s: torch.Tensor) -> torch.Tensor:
        for t0 in t0s:
            t1 = torch.relu(t0)
            t2 = t1 @ t1
            t3 = torch.relu(t2)
            a = t3 @ a
        return a

    fix = FusionFixTransform(strict=True)
    inputs = [torch.empty(4096, 4096, device="meta") for _ in range(11)]
    capture(program, inputs, transforms=[fix], fusion_type="dataflow")
    (report,) = fix.reports
    tensor_bytes = 4096 * 4096 * 4
    assert (report.before.peak_bytes - report.before.start_bytes) // tensor_bytes == 20
    assert (report.after.peak_bytes - report.after.start_bytes) // tensor_bytes == 3
    assert report.after.peak_bytes == report.after.lower_bound_bytes
    names = [op.id for op in report.graph_after.ops if op.is_fusion]
    assert len(names) == len(set(names)) == 19


@pytest.mark.nvfuser
@pytest.mark.parametrize("seed", [12, 13])
def test_random_program_gives_what_plain_thunder_gives(seed: int) -> None:
    """Outputs, gradients and arguments changed in place are plain Thunder's to the last bit."""
    from programs import EQUAL, compare, random_program

    verdict, _ = compare(random_program(seed), "dataflow", seed)
    assert verdict == EQUAL


def test_admits_clones_of_the_plan_alone() -> None:
    """A pass admits sub-ops in two pieces where its plan has them there, and nothing else."""
    graph = shared_cast()
    item = Pass("any", plan_split_regions, SPLIT.allow)
    assert item.admits(graph, Plan()).may_clone == frozenset()
    assert item.admits(graph, plan_split_regions(Facts(graph))).may_clone == {"shared"}

"""reorder: what moves and why, what does not, and that programs give the same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dags import UNIT
from helpers import GraphBuilder

from thunder_fusionfix.document import megabytes
from thunder_fusionfix.facts import Facts
from thunder_fusionfix.model import Decision, Graph, Plan, Ref
from thunder_fusionfix.passes.reorder import bytes_won, plan_reorder
from thunder_fusionfix.schedule import schedule
from thunder_fusionfix.simulate import Prices, simulate

LARGE, SMALL = (UNIT,), (1,)


def early_producer(barrier: str = "torch.matmul", early: str = "torch.matmul") -> Graph:
    """`early` makes a tensor that only the last op takes; a wider one comes and goes between them."""
    build = GraphBuilder()
    x = build.arg("x", LARGE)
    first = build.op(early, x, out="first", shape=LARGE)
    wide = build.op(barrier, x, out="wide", shape=(4 * UNIT,))
    small = build.op("torch.sum", wide, out="small", shape=SMALL)
    return build.returns(build.op("torch.matmul", first, x, out="last", shape=LARGE), small)


def applied(plan: Plan) -> list[Decision]:
    return [decision for decision in plan.decisions if decision.applied]


def test_plan_early_producer_goes_to_its_consumer() -> None:
    """The one move that lowers the peak, with from where to where, why, and the bytes that it takes from the peak."""
    graph = early_producer()
    plan = plan_reorder(Facts(graph))
    assert simulate(graph, plan.order).peak_bytes == simulate(graph).peak_bytes - (1 << 20)
    (move,) = applied(plan)
    assert (move.pos, move.where, move.bytes_won) == (0, "torch.matmul", 1 << 20)
    assert move.what == "first moved later, from 0 to before torch.matmul (3)"
    peaks = [megabytes(simulate(graph, order).peak_bytes) for order in (None, plan.order)]
    assert f"peak {peaks[0]} -> {peaks[1]} MB" in move.reason


def test_plan_no_better_order_says_so() -> None:
    """Where nothing is to be won the plan is empty, and a reason says how that is known."""
    build = GraphBuilder()
    x = build.arg("x", LARGE)
    plan = plan_reorder(Facts(build.returns(build.op("prims.exp", x, out="y", shape=LARGE))))
    assert plan.is_empty
    assert [decision.what for decision in plan.decisions] == ["the order stays"]
    assert "lower bound" in plan.decisions[0].reason


@pytest.mark.parametrize("op_id", ["mystery.op", "prims.uniform"])
def test_plan_pinned_ops_stay(op_id: str) -> None:
    """An unknown op between them keeps both sides; two draws keep their order."""
    graph = early_producer(barrier="mystery.op") if op_id == "mystery.op" else early_producer(op_id, op_id)
    assert plan_reorder(Facts(graph)).is_empty


def test_plan_one_draw_moves_past_pure_ops() -> None:
    """The nearest case to two draws: one has no order to keep, so it may move."""
    assert not plan_reorder(Facts(early_producer(early="prims.uniform"))).is_empty


def test_plan_says_which_rule_pins_what_the_peak_holds() -> None:
    """What stays alive over the peak for an order's sake names the rule."""
    plan = plan_reorder(Facts(early_producer("prims.uniform", "prims.uniform")))
    (reason,) = [d.reason for d in plan.decisions if d.what.startswith("first stays alive")]
    assert "rule `effect`" in reason


def test_plan_write_keeps_its_reads() -> None:
    """A read of what is then overwritten does not move past the write, although that would save memory."""
    build = GraphBuilder()
    x, y = build.arg("x", LARGE), build.arg("y", LARGE)
    first = build.op("torch.matmul", x, out="first", shape=LARGE)
    build.op("prims.copy_", y, x, out="written", shape=LARGE)
    wide = build.op("torch.matmul", y, out="wide", shape=(4 * UNIT,))
    small = build.op("torch.sum", wide, out="small", shape=SMALL)
    graph = build.returns(build.op("torch.matmul", first, y, out="last", shape=LARGE), small)
    plan = plan_reorder(Facts(graph))
    order = plan.order or tuple(range(len(graph.ops)))
    assert order.index(0) < order.index(1)


def towers(num_towers: int) -> Graph:
    build = GraphBuilder()
    total = build.arg("total", LARGE)
    xs = [build.arg(f"x{i}", LARGE) for i in range(num_towers)]
    firsts = [build.op("prims.exp", x, out=f"a{i}", shape=LARGE) for i, x in enumerate(xs)]
    for i, first in enumerate(firsts):
        second = build.op("torch.matmul", first, first, out=f"b{i}", shape=LARGE)
        total = build.op("torch.matmul", second, total, out=f"total{i}", shape=LARGE)
    return build.returns(total)


def test_bytes_won_add_up_to_what_left_the_old_peak() -> None:
    """The bytes of all moves are the bytes that the op at the old peak no longer sees."""
    prices = Prices(towers(8))
    found = schedule(prices.graph, prices)
    before, after = prices.live_of(prices.steps), prices.live_of(found.order)
    at = before.index(max(before))
    now = found.order.index(prices.steps[at])
    assert sum(bytes_won(prices, found).values()) == before[at] - after[now]


def test_plan_fuel_counts_moves() -> None:
    """At most ``fuel`` ops move; with enough of it the plan is the whole one."""
    facts = Facts(towers(6))
    whole = plan_reorder(facts)
    for fuel in range(len(applied(whole)) + 1):
        plan = plan_reorder(facts, fuel)
        assert len(applied(plan)) <= fuel
        assert plan.is_empty == (not applied(plan))
    assert plan.order == whole.order


def test_plan_returned_tensors_are_never_called_free() -> None:
    """A tensor that is returned is alive to the end, wherever it is made: its maker only moves to run later."""
    build = GraphBuilder()
    x = build.arg("x", LARGE)
    result = build.op("torch.matmul", x, out="result", shape=LARGE)
    wide = build.op("torch.matmul", x, out="wide", shape=(4 * UNIT,))
    graph = build.returns(result, build.op("torch.sum", wide, out="small", shape=SMALL))
    plan = plan_reorder(Facts(graph))
    assert plan.order == (1, 2, 0, 3)
    assert Ref("result") in graph.ops[-1].args


def test_trace_that_gives_a_name_twice_is_left_alone() -> None:
    """Thunder makes such traces; no plan is made for one, and the reason names the name."""
    graph = towers(4)
    again = replace(graph.ops[0], output=graph.ops[0].output)
    plan = plan_reorder(Facts(replace(graph, ops=(graph.ops[0], again, *graph.ops[1:]))))
    assert plan.is_empty
    assert "gives a0 twice" in plan.decisions[0].reason


# ---------------------------------------------------------------- real programs


@pytest.mark.nvfuser
def test_checkpointed_blocks_are_recomputed_one_by_one() -> None:
    """Under activation checkpointing the backward needs about one block at a time, not all of them."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    from thunder_fusionfix.capture import capture
    from thunder_fusionfix.transform import FusionFixTransform

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ModuleList(nn.Linear(64, 1024, bias=False) for _ in range(4))
            self.down = nn.ModuleList(nn.Linear(1024, 64, bias=False) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for up, down in zip(self.up, self.down, strict=True):
                x = checkpoint(lambda y, up=up, down=down: y + down(torch.tanh(up(y))), x, use_reentrant=False)
            return x

    fix = FusionFixTransform(strict=True, unfuse_layouts=False)
    with torch.device("meta"):
        model, x = Blocks(), torch.empty(4096, 64, requires_grad=True)
    capture(model, [x], transforms=[fix], dynamo=False, fusion_type="dataflow")
    backward = next(report for report in fix.reports if report.stage == "backward")
    act_bytes = 4096 * 1024 * 4
    assert backward.before.peak_bytes > 4 * act_bytes
    assert backward.after.peak_bytes < 3.5 * act_bytes
    assert sum(decision.pass_name == "reorder" and decision.applied for decision in backward.decisions) >= 3
    assert backward.kept_input is None


@pytest.mark.nvfuser
@pytest.mark.parametrize("seed", range(2))
def test_random_program_gives_what_plain_thunder_gives(seed: int) -> None:
    """Outputs, gradients and arguments changed in place are plain Thunder's to the last bit."""
    from programs import EQUAL, compare, random_program

    verdict, _ = compare(random_program(seed), "dataflow" if seed % 2 else "consecutive", seed)
    assert verdict == EQUAL

"""claim_layouts: passengers leave fusions for torch, next to who takes them, and nothing else does."""

from __future__ import annotations

import pytest
import thunder
import torch
from cpu_nvfuser import nvfuser_on_cpu
from runs import assert_equal, copied, run

from thunder_fusionfix._thunder import nvfuser_version
from thunder_fusionfix.executor import fusionfix_ex
from thunder_fusionfix.model import Graph, Op, Ref, Value
from thunder_fusionfix.passes.claim_layouts import NAME, passengers, passengers_of
from thunder_fusionfix.read import read

needs_nvfuser = pytest.mark.skipif(nvfuser_version() is None, reason="nvFuser is not installed")
OPTIONS = {"fusionfix_strict": True, "fusionfix_recompute_cheap": False}


def op(callee: str, output: str, *inputs: object) -> Op:
    return Op(callee, tuple(Ref(arg) if isinstance(arg, str) else arg for arg in inputs), Ref(output))


def region(inputs: str, outputs: str, *body: Op, name: str = "nvFusion0") -> Op:
    refs = tuple(Ref(output) for output in outputs)
    return Op(name, tuple(Ref(arg) for arg in inputs), refs, subops=body, is_fusion=True)


TURN, EXP = op("prims.transpose", "b", "a", (1, 0)), op("prims.exp", "c", "a")


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (region("a", "bc", TURN, EXP), "b"),  # beside compute of the same input
        (region("ax", "bc", TURN, op("prims.exp", "c", "x")), "b"),  # beside compute of another one
        (region("a", "bc", TURN, op("prims.exp", "c", "b")), ""),  # compute takes it
        (region("a", "bc", EXP, op("prims.transpose", "b", "c", (1, 0))), ""),  # a layout of what was computed
        (region("a", "cd", TURN, op("prims.reshape", "d", "b", (4, 4)), EXP), "bd"),  # a chain, its middle inside
        (region("a", "c", TURN, EXP), ""),  # nobody wants it
    ],
)
def test_passenger_is_a_layout_of_an_input_that_only_leaves(found: Op, why: str) -> None:
    """The yes-cases and the nearest no-cases."""
    assert "".join(name for one in passengers(found) for name in one.outputs) == why


def graph_of(*ops: Op) -> Graph:
    values = {name: Value(name, (4, 4), "f32", "cuda:0") for name in "axbcdefgh"}
    return Graph("computation", "inference", ("a", "x"), ops, values)


def test_passenger_that_another_region_computes_with_is_none() -> None:
    """A layout that feeds compute in the next region stays where the fusion pass put it."""
    first, product = region("a", "bc", TURN, EXP), op("torch.matmul", "d", "b", "b")
    assert passengers_of(graph_of(first, product)) == {"b": "nvFusion0"}
    second = region("b", "e", op("prims.sin", "e", "b"), name="nvFusion1")
    assert passengers_of(graph_of(first, second)) == {}


def test_passenger_that_another_region_only_carries_on_counts() -> None:
    """Carried twice is carried all the same."""
    first = region("a", "bc", TURN, EXP)
    again = region("bx", "de", op("prims.reshape", "d", "b", (16,)), op("prims.exp", "e", "x"), name="nvFusion1")
    graph = graph_of(first, again, op("torch.matmul", "f", "d", "d"))
    assert passengers_of(graph) == {"b": "nvFusion0", "d": "nvFusion1"}


# ---------------------------------------------------------------- with the real fusion pass


def turned_beside_compute(x, w):
    """The transpose of x has nothing to do with the pointwise ops around it."""
    y = torch.tanh(x) * 2
    turned = x.t()
    return torch.sigmoid(y) @ (turned @ w)


def chunks(x, w):
    left, right = x.split(4, dim=1)
    return torch.tanh(x).sum() + (left @ w).sum() + (right @ w).sum()


PROGRAMS = {"turned": (turned_beside_compute, [(8, 8), (8, 8)]), "chunks": (chunks, [(8, 8), (4, 4)])}


def traces(fn, args, executors, fusion_type):
    with nvfuser_on_cpu():
        options = OPTIONS if "fusionfix" in executors else {}
        jitted = thunder.jit(fn, executors=executors, fusion_type=fusion_type, **options)
        jitted(*args)
        backward = thunder.last_backward_traces(jitted)
        return [read(trace) for trace in (thunder.last_traces(jitted)[-1], *backward[-1:])]


@needs_nvfuser
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_passenger_is_left_and_numbers_are_the_same(name: str, fusion_type: str, needs_grad: bool) -> None:
    """nvFuser's own pass carries some; after the entry it carries none, with as many regions and the same results."""
    fn, shapes = PROGRAMS[name]
    args = [torch.randn(shape, requires_grad=needs_grad) for shape in shapes]
    plain = traces(fn, copied(args), ("nvfuser",), fusion_type)
    ours = traces(fn, copied(args), ("fusionfix", "nvfuser"), fusion_type)
    assert not any(passengers_of(graph) for graph in ours)
    assert [num_regions(graph) for graph in ours] == [num_regions(graph) for graph in plain]
    want = run(fn, copied(args), fusion_type)
    assert_equal(run(fn, copied(args), fusion_type, executors=("fusionfix", "nvfuser"), **OPTIONS), want, 0.0)


@needs_nvfuser
def test_there_is_something_to_claim() -> None:
    """The programs above would show nothing if plain Thunder carried nothing."""
    fn, shapes = PROGRAMS["turned"]
    args = [torch.randn(shape) for shape in shapes]
    assert any(passengers_of(graph) for graph in traces(fn, args, ("nvfuser",), "consecutive"))
    fusionfix_ex.reports.clear()
    traces(fn, args, ("fusionfix", "nvfuser"), "consecutive")
    decisions = [one for report in fusionfix_ex.reports for one in report.decisions if one.pass_name == NAME]
    assert decisions and all(one.applied and "compute nothing with it" in one.reason for one in decisions)


def num_regions(graph: Graph) -> int:
    return sum(one.is_fusion for one in graph.ops)


@needs_nvfuser
def test_view_of_what_is_written_is_not_claimed() -> None:
    """An in-place update of the tensor that a passenger sees keeps it where Thunder put it, and the numbers too."""

    def fn(x, w):
        turned = x.t()
        y = turned @ w
        x.mul_(2.0)
        return y + torch.tanh(x), x.t() @ w

    args = [torch.randn(4, 4), torch.randn(4, 4)]
    for fusion_type in ("dataflow", "consecutive"):
        want = run(fn, copied(args), fusion_type)
        assert_equal(run(fn, copied(args), fusion_type, executors=("fusionfix", "nvfuser"), **OPTIONS), want, 0.0)

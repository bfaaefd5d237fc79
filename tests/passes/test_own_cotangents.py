"""own_cotangents: what is taken over and why, what is not, and that programs give the same numbers."""

from __future__ import annotations

import warnings

import pytest
import torch
from cpu_nvfuser import nvfuser_on_cpu
from helpers import GraphBuilder
from runs import assert_equal, copied, run
from thunder.core.transform_common import Transform
from thunder.dynamo import ThunderCompiler
from torch.utils.checkpoint import checkpoint

from thunder_fusionfix import FusionFixTransform
from thunder_fusionfix.config import FusionFixConfig
from thunder_fusionfix.facts import Facts
from thunder_fusionfix.model import OWN, UNPACK, Graph, Ref
from thunder_fusionfix.parse import parse
from thunder_fusionfix.passes.own_cotangents import plan_own_cotangents
from thunder_fusionfix.simulate import hold_cotangents, simulate

LARGE = (FusionFixConfig().own_min_bytes // 4,)  # of f32


def backward(shape=LARGE, returned: bool = False, held: bool = True) -> Graph:
    """A cotangent g that is used once, before two larger tensors come and go."""
    build = GraphBuilder("backward")
    build.collection("saved_for_backward", build.value("y", (4,)), arg=True)
    build.collection("cotangents", build.value("g", shape), arg=True)
    a = build.op("torch.sum", Ref("g"), out="a", shape=(1,))
    if not returned:
        build.delete(Ref("g"))
    b = build.op("torch.expand", a, out="b", shape=(1,))
    c = build.op("torch.matmul", b, b, out="c", shape=(2 * LARGE[0],))
    d = build.op("torch.sum", c, out="d", shape=(1,))
    build.delete(c)
    graph = build.returns(d, Ref("g")) if returned else build.returns(d)
    return hold_cotangents(graph) if held else graph


def test_plan_takes_over_what_the_engine_holds() -> None:
    """One statement, with the tensor, the reason and the bytes."""
    plan = plan_own_cotangents(Facts(backward()))
    assert plan.owned == ("cotangents",)
    (decision,) = plan.decisions
    assert (decision.applied, decision.where, decision.what) == (True, "cotangents", "took over g")
    assert decision.bytes_won == FusionFixConfig().own_min_bytes


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (backward(held=False), None),
        (backward(shape=(LARGE[0] - 1,)), None),
        (backward(returned=True), "the trace returns them"),
    ],
    ids=["nobody-holds-them", "too-small", "returned"],
)
def test_plan_leaves_the_rest(graph: Graph, reason: str | None) -> None:
    """Where autograd is split nobody holds them; a small one is not worth a line; what is returned is kept anyway."""
    plan = plan_own_cotangents(Facts(graph))
    assert plan.is_empty
    assert [decision.reason for decision in plan.decisions] == ([reason] if reason else [])


def test_plan_without_fuel_does_nothing() -> None:
    """And says why."""
    plan = plan_own_cotangents(Facts(backward()), 0)
    assert plan.is_empty and [decision.reason for decision in plan.decisions] == ["no fuel is left"]


def test_statement_is_read_back_from_text() -> None:
    """A pasted trace that owns its cotangents is priced as one."""
    text = (
        "def backward_fn(saved_for_backward, cotangents):\n"
        "  own_cotangents(cotangents)\n"
        "  g, = cotangents\n"
        '  # g: "cuda:0 f32[1024]"\n'
        "  clear_mutable_collection(cotangents)\n"
        "  del cotangents\n"
        '  a = torch.exp(g)  # a: "cuda:0 f32[1024]"\n'
        "  del g\n"
        '  b = torch.exp(a)  # b: "cuda:0 f32[1024]"\n'
        "  return (b,)\n"
    )
    graph = parse(text)
    assert [op.id for op in graph.ops[:2]] == [OWN, UNPACK] and graph.values["cotangents"].kind == "collection"
    assert simulate(hold_cotangents(graph)).peak_bytes == 2 * 4096
    plain = parse(text.replace("  own_cotangents(cotangents)\n", ""))
    assert simulate(hold_cotangents(plain)).peak_bytes == 3 * 4096


# ---------------------------------------------------------------- end to end


class Cut(torch.nn.Module):
    """A product that ThunderFX cuts from the loss: the gradient of what is between is a cotangent of the first part."""

    def __init__(self, shape=(1024, 1024)):
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 1024)
        self.shape = shape  # in which the second part sees it

    def forward(self, x):
        y = self.second(torch.nn.functional.silu(self.first(x)) * 2)
        torch._dynamo.graph_break()
        y = y.reshape(self.shape)
        return (y.softmax(-1) * y).sum()


class Seen(Transform):
    def __init__(self):
        self.traces = []

    def transform_trace_post_optimization(self, computation_trace, **kwargs):
        self.traces.append(computation_trace)
        return computation_trace


def gradients(*transforms, shape=(1024, 1024), **options):
    """Loss and gradients of `Cut` under ThunderFX."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Cut(shape), torch.randn(1024, 32)
    with nvfuser_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend = ThunderCompiler(executors=("nvfuser",), transforms=list(transforms), **options)
        loss = torch.compile(model, backend=backend)(x)
        loss.backward()
    return {"loss": loss.detach(), **{name: weight.grad for name, weight in model.named_parameters()}}


def test_backward_under_thunderfx_owns_the_gradient_between_two_parts() -> None:
    """The statement stands in the trace, the estimate falls by the gradient, the numbers are plain Thunder's to the last bit."""
    fix, seen = FusionFixTransform(strict=True, own_min_bytes=2**20), Seen()
    assert_equal(gradients(fix, seen), gradients())
    texts = [str(trace) for trace in seen.traces if "own_cotangents(cotangents)" in str(trace)]
    assert len(texts) == 1
    (decision,) = (d for report in fix.reports for d in report.decisions if d.pass_name == "own_cotangents")
    assert decision.applied and decision.bytes_won == 1024 * 1024 * 4


@pytest.mark.parametrize("shape", [(1024, 1024), (32, 32, 1024)], ids=["as-it-is", "a-view"])
def test_backward_that_owns_takes_over_at_run_time(monkeypatch, shape) -> None:
    """The gradient between the parts, also where the second part's backward ends in a reshape and so gives a view."""
    from thunder_fusionfix import cotangents

    taken = []
    take = cotangents._take
    monkeypatch.setattr(cotangents, "_take", lambda given, at: (taken.append(given[at].nbytes), take(given, at)))
    got = gradients(FusionFixTransform(strict=True, own_min_bytes=2**20), shape=shape)
    assert taken == [1024 * 1024 * 4]
    assert_equal(got, gradients(shape=shape))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_compile_within_a_checkpoint_is_right(use_reentrant: bool, monkeypatch) -> None:
    """The checkpoint counts what is saved while the compile asks how the engine counts."""
    from thunder_fusionfix import cotangents

    def gradients(*transforms):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer, x = torch.nn.Linear(32, 1024), torch.randn(1024, 32, requires_grad=True)

        def forward(x):
            return torch.nn.functional.silu(layer(x).sin() * 2)

        with nvfuser_on_cpu(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            backend = ThunderCompiler(executors=("nvfuser",), transforms=list(transforms))
            compiled = torch.compile(forward, backend=backend)
            y = checkpoint(lambda x: compiled(x) + 1, x, use_reentrant=use_reentrant)
            (y.softmax(-1) * y).sum().backward()
        return {"x": x.grad, **{name: weight.grad for name, weight in layer.named_parameters()}}

    plain = gradients()
    monkeypatch.setattr(cotangents, "_alone", {})
    fix = FusionFixTransform(strict=True, own_min_bytes=2**20)
    assert_equal(gradients(fix), plain)
    assert any(d.applied for report in fix.reports for d in report.decisions if d.pass_name == "own_cotangents")


def test_option_switches_it_off() -> None:
    """No statement, no decision."""
    fix, seen = FusionFixTransform(strict=True, own_min_bytes=2**20, own_cotangents=False), Seen()
    assert_equal(gradients(fix, seen), gradients())
    assert not any("own_cotangents" in str(trace) for trace in seen.traces)
    assert not any(d.pass_name == "own_cotangents" for report in fix.reports for d in report.decisions)


def test_split_autograd_has_nothing_to_take_over() -> None:
    """``thunder.jit`` frees cotangents itself."""
    fix = FusionFixTransform(strict=True, own_min_bytes=2**20)
    args = [torch.randn(1024, 64, requires_grad=True), torch.randn(64, 512, requires_grad=True)]
    assert_equal(run(torch.matmul, copied(args), "dataflow", fix), run(torch.matmul, copied(args)))
    assert not any(d.pass_name == "own_cotangents" for report in fix.reports for d in report.decisions)


class CUDAGraphTransform(Transform):
    """Stands for Thunder's, which records nothing without a GPU."""


def test_cuda_graphs_leave_cotangents_to_the_engine() -> None:
    """A recorded backward reads its cotangents from memory of its own, so the statement must not be in it."""
    fix, seen = FusionFixTransform(strict=True, own_min_bytes=2**20), Seen()
    gradients(fix, CUDAGraphTransform(), seen)
    assert not any("own_cotangents" in str(trace) for trace in seen.traces)
    (decision,) = (d for report in fix.reports for d in report.decisions if d.pass_name == "own_cotangents")
    assert not decision.applied and "CUDA graphs" in decision.reason

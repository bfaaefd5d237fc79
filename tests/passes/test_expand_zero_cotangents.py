"""expand_zero_cotangents: which cotangents may come as one zero and which stay dense, and that programs give the same numbers."""

from __future__ import annotations

import warnings

import pytest
import thunder
import torch
from cpu_nvfuser import nvfuser_on_cpu
from helpers import GraphBuilder
from runs import assert_equal
from thunder.core.transform_common import Transform
from thunder.dynamo import ThunderCompiler

from thunder_fusionfix import FusionFixTransform, undefined
from thunder_fusionfix.facts import Facts
from thunder_fusionfix.model import EXPAND, OWN, UNPACK, Graph, Ref
from thunder_fusionfix.parse import parse
from thunder_fusionfix.passes.expand_zero_cotangents import MIN_BYTES, plan_expand_zero_cotangents
from thunder_fusionfix.simulate import simulate

LARGE = (MIN_BYTES // 4,)  # of f32


def backward(shape=LARGE, dtype: str = "f32", use: str = "torch.sum") -> Graph:
    """Two cotangents: a scalar, and g, which is used once."""
    build = GraphBuilder("backward")
    build.collection("saved_for_backward", build.value("y", (4,)), arg=True)
    build.collection("cotangents", build.value("l", ()), build.value("g", shape, dtype), arg=True)
    a = build.op(use, Ref("g"), out="a", shape=())
    b = build.op("torch.matmul", a, Ref("l"), out="b", shape=())
    return build.returns(b)


def test_plan_lets_a_large_cotangent_come_as_one_zero() -> None:
    """One statement, with the position, the tensor, the reason and the bytes."""
    plan = plan_expand_zero_cotangents(Facts(backward()))
    assert plan.expanded == (("cotangents", (1,)),)
    (decision,) = plan.decisions
    assert (decision.applied, decision.where, decision.what) == (True, "cotangents", "g may come as one repeated zero")
    assert "1.0 MB of zeros that are not filled" in decision.reason


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (backward(shape=(LARGE[0] - 1,)), None),
        (backward(dtype="i64"), None),
        (backward(use="mylib.fused"), "mylib.fused may need dense memory"),
    ],
    ids=["too-small", "no-floats", "unknown-use"],
)
def test_plan_leaves_the_rest(graph: Graph, reason: str | None) -> None:
    """Small ones are filled as before; what may need dense memory says so."""
    plan = plan_expand_zero_cotangents(Facts(graph))
    assert plan.is_empty
    assert [decision.reason for decision in plan.decisions] == ([reason] if reason else [])


def test_plan_without_fuel_does_nothing() -> None:
    """And says why."""
    plan = plan_expand_zero_cotangents(Facts(backward()), 0)
    assert plan.is_empty and [decision.reason for decision in plan.decisions] == ["no fuel is left"]


def test_statement_is_read_back_from_text() -> None:
    """With its positions, which count what is no tensor; a trace alone is priced with dense zeros; a second run adds nothing."""
    text = (
        "def backward_fn(saved_for_backward, cotangents):\n"
        "  expand_zero_cotangents(cotangents, (2,))\n"
        "  l, _, g, = cotangents\n"
        '  # l: "cuda:0 f32[]"\n'
        '  # g: "cuda:0 f32[1024, 1024]"\n'
        "  clear_mutable_collection(cotangents)\n"
        "  del cotangents\n"
        '  a = torch.matmul(g, g)  # a: "cuda:0 f32[1024, 1024]"\n'
        "  del g, l\n"
        "  return (a,)\n"
    )
    graph = parse(text)
    assert [op.id for op in graph.ops[:2]] == [EXPAND, UNPACK] and graph.values["cotangents"].kind == "collection"
    plain = text.replace("  expand_zero_cotangents(cotangents, (2,))\n", "")
    assert simulate(graph).peak_bytes == simulate(parse(plain)).peak_bytes
    assert plan_expand_zero_cotangents(Facts(parse(plain))).expanded == (("cotangents", (2,)),)
    assert plan_expand_zero_cotangents(Facts(graph)).is_empty


# ---------------------------------------------------------------- end to end


class Beside(torch.nn.Module):
    """A loss, and the logits and hidden states that it was made of."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 256), torch.nn.Linear(256, 1024)

    def forward(self, x):
        hidden = torch.nn.functional.silu(self.first(x)) * 2
        logits = self.second(hidden)
        return (logits.softmax(-1) * logits).sum(), logits, hidden, logits.argmax(-1)


class Seen(Transform):
    def __init__(self):
        self.traces = []

    def transform_trace_post_optimization(self, computation_trace, **kwargs):
        self.traces.append(computation_trace)
        return computation_trace


LOSSES = {
    "loss": lambda loss, logits, hidden, best: loss,
    "loss and logits": lambda loss, logits, hidden, best: loss + logits.square().mean(),
    "logits": lambda loss, logits, hidden, best: logits.square().mean(),
    "hidden states": lambda loss, logits, hidden, best: hidden.sum(),
    "all": lambda loss, logits, hidden, best: loss + logits.sum() + hidden.square().sum(),
}


def gradients(*transforms, losses=("loss",), way="thunderfx", executors=("nvfuser",), **options):
    """Loss and gradients of steps of `Beside`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x, found = Beside(), torch.randn(1024, 32), {}
    with nvfuser_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "thunderfx":
            backend = ThunderCompiler(executors=executors, transforms=list(transforms), **options)
            step = torch.compile(model, backend=backend)
        else:
            step = thunder.jit(model, executors=executors, transforms=list(transforms), **options)
        for at, name in enumerate(losses):
            model.zero_grad()
            LOSSES[name](*step(x)).backward()
            found |= {f"{at} {key}": weight.grad for key, weight in model.named_parameters()}
    return found


@pytest.fixture
def filled(monkeypatch) -> list[tuple[int, int]]:
    """By backward that was given an `Undefined`: how many gradients came as repeated zeros, and how many as dense ones of 1 MiB."""
    found = []
    call = undefined.Filled.__call__

    def look(self, saved, cotangents):
        backward, seen = self.backward, []

        def looking(saved, cotangents):
            undefined.expand(cotangents, positions)
            large = [one for one in cotangents if isinstance(one, torch.Tensor) and one.numel() * 4 >= MIN_BYTES]
            seen.extend(one.stride() for one in large)
            return backward(saved, cotangents)

        positions = tuple(range(len(cotangents)))
        result = call(undefined.Filled(looking, self.likes, self.patterns), saved, cotangents)
        found.append((seen.count((0, 0)), len(seen)))
        return result

    monkeypatch.setattr(undefined.Filled, "__call__", look)
    return found


@pytest.mark.parametrize("executors", [("nvfuser",), ("fusionfix", "nvfuser")], ids=["plain", "entry"])
@pytest.mark.parametrize("way", ["thunderfx", "jit"])
def test_outputs_beside_a_loss_get_no_zeros(way: str, executors, filled) -> None:
    """The statement stands in the backward; both gradients come as repeated zeros; the numbers are plain Thunder's to the last bit."""
    fix, seen = FusionFixTransform(strict=True), Seen()
    got = gradients(fix, seen, way=way, executors=executors)
    assert filled == [(2, 2)]
    texts = [str(trace) for trace in seen.traces if f"{EXPAND}(cotangents, (1, 2))" in str(trace)]
    assert len(texts) == 1
    assert_equal(got, gradients(FusionFixTransform(expand_zero_cotangents=False), way=way, executors=executors))
    assert len(filled) == 1, "without the pass autograd fills them"
    (decision,) = (d for report in fix.reports for d in report.decisions if d.pass_name == EXPAND)
    assert decision.applied


@pytest.mark.parametrize("way", ["thunderfx", "jit"])
def test_what_a_step_uses_may_change(way: str) -> None:
    """One compile, steps that call backward on other outputs: each gradient is plain Thunder's."""
    losses = [*LOSSES, *reversed(LOSSES)]
    assert_equal(gradients(FusionFixTransform(strict=True), losses=losses, way=way), gradients(losses=losses, way=way))


@pytest.mark.parametrize("way", ["thunderfx", "jit"])
def test_plain_thunder_in_the_same_process_is_left_alone(way: str, filled) -> None:
    """Also after a compile that has the statement."""
    gradients(FusionFixTransform(strict=True), way=way)
    filled.clear()
    gradients(way=way)
    assert not filled


def test_option_switches_it_off(filled) -> None:
    """No statement, no decision."""
    fix, seen = FusionFixTransform(strict=True, expand_zero_cotangents=False), Seen()
    gradients(fix, seen)
    assert not any(EXPAND in str(trace) for trace in seen.traces) and not filled
    assert not any(d.pass_name == EXPAND for report in fix.reports for d in report.decisions)


def test_debug_execute_runs_a_trace_with_the_statement() -> None:
    """It is no operation to it."""
    assert_equal(gradients(FusionFixTransform(strict=True, debug_execute=True)), gradients())


def test_cotangents_that_come_are_still_taken_over() -> None:
    """Both statements stand in one trace, in this order."""
    seen = Seen()
    got = gradients(FusionFixTransform(strict=True, own_min_bytes=2**20), seen, losses=("loss", "logits"))
    assert_equal(got, gradients(losses=("loss", "logits")))
    (text,) = (text for text in map(str, seen.traces) if EXPAND in text)
    own, expand = (text.index(f"  {name}(cotangents") for name in (OWN, EXPAND))
    assert own < expand < text.index(" = cotangents")


class CUDAGraphTransform(Transform):
    """Stands for Thunder's, which records nothing without a GPU."""


def test_cuda_graphs_leave_zeros_to_autograd(filled) -> None:
    """A recorded backward copies its cotangents to memory of its own."""
    fix, seen = FusionFixTransform(strict=True), Seen()
    gradients(fix, CUDAGraphTransform(), seen)
    assert not any(EXPAND in str(trace) for trace in seen.traces) and not filled
    (decision,) = (d for report in fix.reports for d in report.decisions if d.pass_name == EXPAND)
    assert not decision.applied and "CUDA graphs" in decision.reason


def test_gradient_that_is_a_cotangent_is_dense() -> None:
    """A caller of `torch.autograd.grad` may write to it, as with plain Thunder."""

    def loss_and_view(a, b):
        return ((a * a).sin() * 2).sum(), b.transpose(0, 1)

    fix = FusionFixTransform(strict=True)
    a, b = torch.randn(16, 16, requires_grad=True), torch.randn(1024, 512, requires_grad=True)
    with nvfuser_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss, _ = thunder.jit(loss_and_view, executors=("nvfuser",), transforms=[fix])(a, b)
        _, gradient = torch.autograd.grad(loss, (a, b))
    gradient.add_(1)
    torch.testing.assert_close(gradient, torch.ones(1024, 512))
    (decision,) = (d for report in fix.reports for d in report.decisions if d.pass_name == EXPAND)
    assert not decision.applied and "stays dense" in decision.what

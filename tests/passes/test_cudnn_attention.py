"""cudnn_attention: which kernel runs, that a backward follows its forward, what is swapped in a trace, and numbers through Thunder."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import thunder
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from helpers import GraphBuilder

import thunder_fusionfix  # noqa: F401
from thunder_fusionfix._thunder import ltorch, nvfuser_version, replaced, sdpaex
from thunder_fusionfix.alias import aliases
from thunder_fusionfix.capture import Capture, capture
from thunder_fusionfix.effects import ATTENTION, ATTENTION_BACKWARD, FLASH, FLASH_BACKWARD, effect_of
from thunder_fusionfix.executor import fusionfix_ex
from thunder_fusionfix.joint import JointReport
from thunder_fusionfix.model import Graph, Op, Ref
from thunder_fusionfix.models import load_model
from thunder_fusionfix.parse import parse
from thunder_fusionfix.passes import cudnn_attention
from thunder_fusionfix.passes.cudnn_attention import (
    fusionfix_attention,
    fusionfix_attention_backward,
    plan_cudnn_attention,
)
from thunder_fusionfix.predict import step_parts
from thunder_fusionfix.step import simulate_step

CUDNN, FLASH_CHOICE, EFFICIENT, MATH, ERROR = 3, 1, 2, 0, -1  # torch.nn.attention.SDPBackend


# ---------------------------------------------------------------- kernels for the CPU


class Kernels:
    """Stands in for torch's kernels and chooser; notes what is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, choice: int) -> None:
        self.choice = choice
        self.calls: list[str] = []
        self.asked: list[tuple[Any, ...]] = []
        self.given: list[tuple[torch.Tensor, ...]] = []  # to cuDNN's forward
        self.taken: list[tuple[torch.Tensor, ...]] = []  # by its backward
        monkeypatch.setattr(torch, "_fused_sdp_choice", self.choose)
        monkeypatch.setattr(cudnn_attention, "_cudnn_attention", self.cudnn)
        monkeypatch.setattr(cudnn_attention, "_cudnn_attention_backward", self.cudnn_backward)
        monkeypatch.setattr(cudnn_attention, "_flash_attention", self.flash)
        monkeypatch.setattr(cudnn_attention, "_flash_attention_backward", self.flash_backward)

    def choose(self, query, key, value, mask, dropout_p, is_causal, *, scale):
        self.asked.append((mask, dropout_p, is_causal, scale))
        return self.choice

    def cudnn(self, query, key, value, bias, sums, dropout_p, is_causal, debug, *, scale):
        self.calls.append("cudnn")
        self.given.append((query, key, value))
        assert bias is None and sums is True and debug is False and dropout_p == 0.0
        out, logsumexp = attended(query, key, value, is_causal, scale)
        seed = torch.empty((), dtype=torch.int64)
        return out, logsumexp[..., None], None, None, query.shape[2], key.shape[2], seed, seed.clone(), None

    def flash(self, query, key, value, dropout_p, is_causal, scale):
        self.calls.append("flash")
        out, logsumexp = attended(query, key, value, is_causal, scale)
        seed = torch.zeros(2, dtype=torch.int64)
        return out, logsumexp, None, None, query.shape[2], key.shape[2], seed, torch.empty(0), torch.empty(0)

    def cudnn_backward(self, grad, query, key, value, out, sums, seed, offset, bias, q, k, max_q, max_k, *rest, scale):
        self.calls.append("cudnn backward")
        self.taken.append((grad, query, key, value, out))
        assert bias is None and sums.dim() == 4 and (max_q, max_k) == (query.shape[2], key.shape[2])
        dropout_p, is_causal = rest
        assert dropout_p == 0.0
        return gradients(grad, query, key, value, is_causal, scale)

    def flash_backward(self, grad, query, key, value, out, sums, q, k, max_q, max_k, dropout_p, is_causal, *rest):
        self.calls.append("flash backward")
        seed, _, scale = rest
        assert sums.dim() == 3 and seed.shape == (2,)
        return (one for one in gradients(grad, query, key, value, is_causal, scale))  # an iterator, as Thunder's


def attended(query, key, value, is_causal, scale):
    scores = query.float() @ key.float().mT * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return (torch.softmax(scores, -1) @ value.float()).to(query.dtype), scores.logsumexp(-1)


def gradients(grad, query, key, value, is_causal, scale):
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in (query, key, value)]
        return torch.autograd.grad(attended(*leaves, is_causal, scale)[0], leaves, grad)


def qkv(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for _ in range(3)]


# ---------------------------------------------------------------- the operators


@pytest.mark.parametrize(
    ("choice", "kernel"),
    [(CUDNN, "cudnn"), (FLASH_CHOICE, "flash"), (EFFICIENT, "flash"), (MATH, "flash"), (ERROR, "flash")],
)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_forward_runs_cudnn_where_torch_would_and_else_what_thunder_ran(choice, kernel, is_causal, scale, monkeypatch):
    """One question for each call, about this call; the answer is the same attention."""
    kernels, args = Kernels(monkeypatch, choice), qkv(1, 2, 16, 8)
    outputs = fusionfix_attention(*args, 0.0, is_causal, scale=scale)
    assert kernels.calls == [kernel] and kernels.asked == [(None, 0.0, is_causal, scale)] and len(outputs) == 9
    torch.testing.assert_close(
        outputs[0], F.scaled_dot_product_attention(*args, is_causal=is_causal, scale=scale), atol=2e-2, rtol=2e-2
    )


@pytest.mark.parametrize(
    ("shapes", "dropout_p", "is_causal", "kernel"),
    [
        (((1, 2, 16, 8),) * 3, 0.0, True, "cudnn"),
        (((1, 2, 16, 128),) * 3, 0.0, True, "cudnn"),
        (((1, 2, 16, 8), (1, 2, 24, 8), (1, 2, 24, 8)), 0.0, False, "cudnn"),
        (((1, 2, 16, 8),) * 3, 0.1, True, "flash"),  # would draw other numbers
        (((1, 2, 16, 136),) * 3, 0.0, True, "flash"),  # too wide to know
        (((1, 2, 16, 8), (1, 2, 24, 8), (1, 2, 24, 8)), 0.0, True, "flash"),  # masks that line up elsewhere
    ],
)
def test_each_guard_keeps_thunders_kernel_by_itself(shapes, dropout_p, is_causal, kernel, monkeypatch) -> None:
    """Although torch would choose cuDNN: the case that may, with one thing changed."""
    kernels = Kernels(monkeypatch, CUDNN)
    monkeypatch.setattr(f"{__name__}.attended", lambda query, *rest: (query, query[..., 0]))
    fusionfix_attention(*(torch.zeros(shape) for shape in shapes), dropout_p, is_causal, scale=None)
    assert kernels.calls == [kernel] and bool(kernels.asked) == (kernel == "cudnn")


@pytest.mark.parametrize(("choice", "other"), [(CUDNN, FLASH_CHOICE), (FLASH_CHOICE, CUDNN)])
def test_backward_goes_the_way_of_its_forward_whatever_torch_says_by_then(choice, other, monkeypatch) -> None:
    """The user's context, or the strides, may be others in the backward: it does not ask."""
    kernels, args = Kernels(monkeypatch, choice), qkv(1, 2, 16, 8)
    out, sums, *rest, seed, offset, _ = fusionfix_attention(*args, 0.0, True, scale=None)
    kernels.choice = other
    grad = torch.ones_like(out)
    given = tuple(fusionfix_attention_backward(grad, *args, out, sums, *rest, 0.0, True, seed, offset, scale=None))
    forward, backward = kernels.calls
    assert backward == f"{forward} backward" and len(kernels.asked) == 1
    for got, want in zip(given, gradients(grad, *args, True, None), strict=True):
        assert torch.equal(got, want)


def test_backward_of_cudnn_gets_dense_rows(monkeypatch) -> None:
    """An expanded gradient, as of a sum, and tensors with another innermost dim are copied; what is fine is handed on as it is."""
    kernels, (query, key, value) = Kernels(monkeypatch, CUDNN), qkv(1, 2, 16, 8)
    out, sums, *rest, seed, offset, _ = fusionfix_attention(query, key, value, 0.0, False, scale=None)
    grad, turned = torch.ones((), dtype=out.dtype).expand(out.shape), key.mT.contiguous().mT
    given = fusionfix_attention_backward(
        grad, query, turned, value, out, sums, *rest, 0.0, False, seed, offset, scale=None
    )
    (taken,) = kernels.taken
    assert all(one.stride(-1) == 1 for one in taken) and taken[1] is query and taken[3] is value and taken[4] is out
    for got, want in zip(given, gradients(grad, query, key, value, False, None), strict=True):
        assert torch.equal(got, want)


def base(elements: int) -> torch.Tensor:
    """Numbers at an address that is a multiple of 16."""
    made = torch.randn(elements).to(torch.bfloat16)
    assert made.data_ptr() % 16 == 0
    return made


UNALIGNED = {
    "start": lambda: base(257)[1:].view(1, 2, 16, 8),
    "start, heads inside": lambda: base(260)[4:].view(1, 16, 2, 8).transpose(1, 2),
    "rows": lambda: base(16 * 2 * 9).view(1, 16, 2, 9)[..., :8].transpose(1, 2),
    "columns": lambda: base(256).view(1, 2, 8, 16).mT,
    "one number": lambda: base(1)[0].expand(1, 2, 16, 8),
}
ALIGNED = {
    "dense": lambda: base(256).view(1, 2, 16, 8),
    "heads inside": lambda: base(256).view(1, 16, 2, 8).transpose(1, 2),
    "packed": lambda: base(768).view(1, 16, 3, 2, 8)[:, :, 1].transpose(1, 2),
    "one head": lambda: base(16 * 8).view(1, 1, 16, 8).expand(1, 2, 16, 8),
    "a dim of one with any stride": lambda: base(256).as_strided((1, 2, 16, 8), (3, 128, 8, 1)),
}


@pytest.mark.parametrize("name", [*UNALIGNED, *ALIGNED])
@pytest.mark.parametrize("at", range(4))
def test_cudnn_gets_aligned_rows(name, at, monkeypatch) -> None:
    """Query, key, value or the gradient: what cuDNN would misread is copied, forward and backward; what is fine is not."""
    kernels, tensors = Kernels(monkeypatch, CUDNN), [*qkv(1, 2, 16, 8), *qkv(1, 2, 16, 8)[:1]]
    tensors[at] = given = (UNALIGNED | ALIGNED)[name]()
    *args, grad = tensors
    out, sums, *rest, seed, offset, _ = fusionfix_attention(*args, 0.0, True, scale=None)
    grads = fusionfix_attention_backward(grad, *args, out, sums, *rest, 0.0, True, seed, offset, scale=None)
    forward, (taken_grad, *taken) = kernels.given[0], kernels.taken[0][:4]
    for got in (*forward, taken_grad, *taken):
        assert got.stride(-1) == 1 and got.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for size, stride in zip(got.shape[:-1], got.stride()[:-1], strict=True) if size > 1)
    if at < 3:
        assert torch.equal(forward[at], given) and torch.equal(taken[at], given)
        assert (forward[at] is given) == (taken[at] is given) == (name in ALIGNED)
        if name == "start, heads inside":
            assert forward[at].stride() == given.stride()
    assert torch.equal(taken_grad, grad) and taken_grad.stride() == out.stride()
    for got, want in zip(grads, gradients(grad, *args, True, None), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("operator", ["fusionfix_attention", "fusionfix_attention_backward"])
def test_what_thunder_ran_runs_with_the_arguments_as_they_came(operator, monkeypatch) -> None:
    """Thunder's own implementation, by its parameters' names."""
    name = {
        "fusionfix_attention": "_grad_forward_scaled_dot_product_flash_attention_impl",
        "fusionfix_attention_backward": "_scaled_dot_product_flash_attention_backward_impl",
    }[operator]
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **kwargs: FLASH_CHOICE)
    names = list(inspect.signature(getattr(sdpaex, name)).parameters)
    fn = getattr(cudnn_attention, operator)
    assert list(inspect.signature(fn).parameters) == names
    given = {one: torch.full((1, 1, 1, 8)[: 3 if one == "logsumexp" else 4], at) for at, one in enumerate(names)}
    given |= {"dropout_p": 0.0, "is_causal": True, "scale": 0.5, "max_q": 1, "max_k": 2}
    given = {one: given[one] for one in names}
    monkeypatch.setattr(sdpaex, name, lambda *args: dict(zip(names, args, strict=True)))
    scale = given.pop("scale")
    assert fn(*given.values(), scale=scale) == {**given, "scale": scale}


def test_module_can_be_imported_first() -> None:
    """Thunder's import has ours imported, so that no module of the executor's may need Thunder to be imported."""
    for module in ("passes.cudnn_attention", "executor", "joint_pipeline"):
        subprocess.run([sys.executable, "-c", f"import thunder_fusionfix.{module}"], check=True, timeout=120)


# ---------------------------------------------------------------- the plan


def forward(build: GraphBuilder, at: int, *qkv: Ref, dropout_p: Any = 0.0, scale: Any = None) -> list[Ref]:
    """A flash forward as Thunder prints it; its tensors: result, log-sum-exp, ..."""
    names = ("out", "sums", "cum_q", "cum_k", "seed", "offset", "mask")
    out, sums, *rest = (build.value(f"{name}{at}", (1, 2, 64, 16), "bf16") for name in names)
    outputs = (out, sums, *rest[:2], 64, 64, *rest[2:])
    build.ops.append(Op(FLASH, (*qkv, dropout_p, True), outputs, (("scale", scale),)))
    return [out, sums, *rest]


def backward(build: GraphBuilder, at: int, qkv: list[Ref], given: list[Ref], is_causal=True, scale=None) -> list[Ref]:
    outputs = tuple(build.value(f"{name}{at}", (1, 2, 64, 16), "bf16") for name in ("dq", "dk", "dv"))
    out, sums, cum_q, cum_k, seed, offset, _ = given
    args = (
        build.value("grad", (1, 2, 64, 16), "bf16"),
        *qkv,
        out,
        sums,
        cum_q,
        cum_k,
        64,
        64,
        0.0,
        is_causal,
        seed,
        offset,
    )
    build.ops.append(Op(FLASH_BACKWARD, args, outputs, (("scale", scale),)))
    return list(outputs)


@pytest.fixture
def build() -> GraphBuilder:
    build = GraphBuilder()
    for name in "qkv":
        build.arg(name, (1, 2, 64, 16), "bf16")
    return build


QKV = [Ref("q"), Ref("k"), Ref("v")]


def test_plan_swaps_both_halves_and_forwards_without_a_backward(build) -> None:
    """One decision for what is of one shape, with the number of attentions."""
    first = forward(build, 0, *QKV)
    second = forward(build, 1, first[0], *QKV[1:])
    grads = backward(build, 0, QKV, first)
    plan = plan_cudnn_attention(build.returns(second[0], *grads))
    assert plan.swaps == ((0, ATTENTION), (1, ATTENTION), (2, ATTENTION_BACKWARD))
    (decision,) = plan.decisions
    assert decision.applied and decision.what == "2 attention op(s) choose cuDNN or flash at run time: [1, 2, 64, 16]"
    assert plan_cudnn_attention(GraphBuilder().returns()).is_empty


def refused(build: GraphBuilder, *results: Ref) -> str:
    plan = plan_cudnn_attention(build.returns(*results))
    (decision,) = plan.decisions
    assert plan.is_empty and not decision.applied and "stay with the flash kernel" in decision.what
    return decision.reason


def test_plan_leaves_dropout_alone(build) -> None:
    """It draws; so may what is no number."""
    for dropout_p in (0.1, Ref("q")):
        mine = GraphBuilder()
        for name in "qkv":
            mine.arg(name, (1, 2, 64, 16), "bf16")
        given = forward(mine, 0, *QKV, dropout_p=dropout_p)
        assert "other numbers" in refused(mine, *backward(mine, 0, QKV, given))


def test_plan_leaves_alone_what_somebody_else_sees(build) -> None:
    """The log-sum-exp is returned: its shape would tell which kernel ran."""
    given = forward(build, 0, *QKV)
    assert refused(build, given[0], given[1]).startswith("the caller takes")


def test_plan_leaves_alone_what_another_op_takes(build) -> None:
    """Even where there is a backward of its own beside it."""
    given = forward(build, 0, *QKV)
    grads = backward(build, 0, QKV, given)
    assert refused(build, *grads, build.op("torch.exp", given[1], out="e", shape=(1, 2, 64, 16))).startswith(
        "torch.exp takes"
    )


@pytest.mark.parametrize("which", ["query", "result", "causal", "scale"])
def test_plan_leaves_alone_a_backward_that_is_not_its_own(which, build) -> None:
    """A pair is one attention: the same tensors and numbers in both halves."""
    given = forward(build, 0, *QKV)
    taken = [Ref("k"), *QKV[1:]] if which == "query" else QKV
    given = [Ref("q"), *given[1:]] if which == "result" else given
    options = {"causal": {"is_causal": False}, "scale": {"scale": 0.5}}.get(which, {})
    assert "its backward" in refused(build, *backward(build, 0, taken, given, **options))


def test_plan_uses_no_more_fuel_than_there_is() -> None:
    """One piece for each kind of attention that is swapped."""
    build = GraphBuilder()
    for name, length in (("q", 64), ("r", 32)):
        build.arg(name, (1, 2, length, 16), "bf16")
    outs = [forward(build, at, *(Ref(name),) * 3)[0] for at, name in enumerate("qrq")]
    graph = build.returns(*outs)
    assert plan_cudnn_attention(graph).swaps == ((0, ATTENTION), (1, ATTENTION), (2, ATTENTION))
    plan = plan_cudnn_attention(graph, fuel=1)
    assert plan.swaps == ((0, ATTENTION), (2, ATTENTION)) and [one.applied for one in plan.decisions] == [True, False]
    assert plan.decisions[1].reason == "no fuel is left"
    assert plan_cudnn_attention(graph, fuel=0).is_empty


@pytest.mark.parametrize("strides", [(2048, 1024, 16, 1), (2048, 16, 32, 1), None])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_memory_and_effects_are_those_of_what_is_replaced(strides, dropout_p) -> None:
    """The same kind, and the same strides of the result; none where those of the query do not tell."""
    found = []
    for ours, thunders in ((FLASH, FLASH), (ATTENTION, FLASH)):
        build = GraphBuilder()
        query = build.arg("q", (1, 2, 64, 16), "bf16", strides=strides)
        given = forward(build, 0, query, query, query, dropout_p=dropout_p)
        op = build.ops[-1]
        assert op.id == thunders
        build.ops[-1] = Op(ours, op.args, op.output, op.kwargs)
        known = aliases(build.returns(given[0]))
        found.append((effect_of(build.ops[0]), known.strides["out0"], known.strides["sums0"], known.storage_of["out0"]))
    assert found[0] == found[1]
    assert effect_of(Op(ATTENTION_BACKWARD, ())) == effect_of(Op(FLASH_BACKWARD, ()))


# ---------------------------------------------------------------- real traces

needs_nvfuser = pytest.mark.skipif(nvfuser_version() is None, reason="nvFuser is not installed")


@functools.cache
def captured(grad: bool = True, **options: Any) -> tuple[Capture, tuple[JointReport, ...]]:
    """One layer of real width, and what the entry did; options are compile options of Thunder."""
    program = load_model("qwen2.5-7b", layers=1)
    fusionfix_ex.reports.clear()
    executors = ("sdpa", "torchcompile_cat", "fusionfix", "nvfuser")
    options = {"fusionfix_strict": True, **options}
    found = capture(program.fn, program.args, program.kwargs, executors=executors, grad=grad, **options)
    return found, tuple(fusionfix_ex.reports)


def attentions(graph: Graph) -> list[str]:
    return [op.id for op in graph.ops if "attention" in op.id]


@needs_nvfuser
@pytest.mark.parametrize("budget", [{}, {"fusionfix_memory_budget": "9GB"}], ids=["", "budget"])
def test_real_width_swaps_the_pair_and_changes_nothing_else(budget) -> None:
    """Saved bytes, the peak and every other op are those without the option; the text reads back as the same trace."""
    (without, reports), (with_it, reports_with) = (
        captured(fusionfix_cudnn_attention=False, **budget),
        captured(**budget),
    )
    old, new = step_parts(without), step_parts(with_it)
    assert attentions(old[0].forward) == [FLASH] and attentions(old[0].backward) == [FLASH_BACKWARD]
    assert attentions(new[0].forward) == [ATTENTION] and attentions(new[0].backward) == [ATTENTION_BACKWARD]
    assert simulate_step(old).peak_bytes == simulate_step(new).peak_bytes
    assert [one.saved_after_bytes for one in reports] == [one.saved_after_bytes for one in reports_with]
    ids = {FLASH: ATTENTION, FLASH_BACKWARD: ATTENTION_BACKWARD}
    for before, after in zip(old, new, strict=True):
        for one, other in ((before.forward, after.forward), (before.backward, after.backward)):
            assert [ids.get(op.id, op.id) for op in one.ops] == [op.id for op in other.ops]
            assert one.result == other.result
    told = [one for report in reports_with for one in report.decisions if one.pass_name == cudnn_attention.NAME]
    assert [one.applied for one in told] == [True] and told[0].what.startswith(
        "1 attention op(s) choose cuDNN or flash"
    )
    assert not any(one.pass_name == cudnn_attention.NAME for report in reports for one in report.decisions)
    for trace, graph in ((with_it.parts[0].forward, new[0].forward), (with_it.parts[0].backward, new[0].backward)):
        assert attentions(parse(str(trace))) == attentions(graph)


@needs_nvfuser
def test_switched_off_by_name_and_without_fuel_the_trace_is_as_before() -> None:
    """Two ways to keep Thunder's kernel."""
    for options in ({"fusionfix_cudnn_attention": False}, {"fusionfix_entry_fuel": 0}):
        found, _ = captured(**options)
        graphs = [part.forward for part in step_parts(found)] + [part.backward for part in step_parts(found)]
        assert {name for graph in graphs for name in attentions(graph)} == {FLASH, FLASH_BACKWARD}


@needs_nvfuser
def test_inference_swaps_the_forward() -> None:
    """A trace without a backward."""
    program = load_model("qwen2.5-7b", layers=1)
    model = program.fn
    fusionfix_ex.reports.clear()
    executors = ("sdpa", "torchcompile_cat", "fusionfix", "nvfuser")
    with torch.no_grad():
        found = capture(
            frozen(model), program.args, program.kwargs, executors=executors, grad=False,
            fusionfix_strict=True, fusionfix_cudnn_attention=True,
        )  # fmt: skip
    (part, *_) = step_parts(found)
    assert part.backward is None and attentions(part.forward) == [ATTENTION]


def frozen(model: Any) -> Any:
    for weight in getattr(model, "parameters", tuple)():
        weight.requires_grad_(False)
    return model


# ---------------------------------------------------------------- through Thunder


@pytest.fixture
def attention_on_cpu() -> Iterator[None]:
    """Lets Thunder's executor "sdpa" take CPU tensors, for the flash kernel."""
    impl = sdpaex.sdpa_ex.implmap[ltorch.scaled_dot_product_attention.id]
    flash = sdpaex.SpdaBackend.FLASH_ATTENTION
    with (
        replaced(impl, "checker", lambda *args, **kwargs: True),
        replaced(sdpaex, "_fused_sdp_choice", lambda *args: flash),
    ):
        yield


def block(x, w, is_causal):
    q, k, v = F.linear(x, w).view(2, 16, 3, 2, 8).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return F.scaled_dot_product_attention(y, k, y, scale=0.25).transpose(1, 2).reshape(2, 16, 16)


@pytest.mark.parametrize(("choice", "kernel"), [(CUDNN, "cudnn"), (FLASH_CHOICE, "flash")])
@pytest.mark.parametrize("is_causal", [True, False])
def test_outputs_and_gradients_through_thunder_are_eagers(
    choice, kernel, is_causal, attention_on_cpu, monkeypatch
) -> None:
    """Two attentions, None and numbers among what is saved; the kernel that torch chooses runs forward and backward."""
    kernels = Kernels(monkeypatch, choice)
    torch.manual_seed(0)
    leaves = [torch.randn(2, 16, 16), torch.randn(48, 16) / 4]
    want = outcome(block, [leaf.clone() for leaf in leaves], is_causal)
    jitted = thunder.jit(block, executors=("sdpa", "fusionfix"), fusionfix_strict=True, fusionfix_cudnn_attention=True)
    got = outcome(jitted, [leaf.bfloat16() for leaf in leaves], is_causal)
    assert kernels.calls == [kernel, kernel, f"{kernel} backward", f"{kernel} backward"] and len(kernels.asked) == 2
    for one, exact in zip(got, want, strict=True):
        assert torch.linalg.vector_norm(one.float() - exact) / torch.linalg.vector_norm(exact) < 2e-2


def test_a_checkpoint_repeats_the_forward_as_it_was(attention_on_cpu, monkeypatch) -> None:
    """Thunder makes what is checkpointed once more in the backward, our operators too, and their backward takes the second."""

    def kept_little(x, w, is_causal):
        return torch.utils.checkpoint.checkpoint(block, x, w, is_causal, use_reentrant=False) * 2

    kernels = Kernels(monkeypatch, CUDNN)
    torch.manual_seed(0)
    leaves = [torch.randn(2, 16, 16), torch.randn(48, 16) / 4]
    want = outcome(kept_little, [leaf.clone() for leaf in leaves], True)
    jitted = thunder.jit(
        kept_little, executors=("sdpa", "fusionfix"), fusionfix_strict=True, fusionfix_cudnn_attention=True
    )
    got = outcome(jitted, [leaf.bfloat16() for leaf in leaves], True)
    assert kernels.calls == ["cudnn"] * 4 + ["cudnn backward"] * 2
    for one, exact in zip(got, want, strict=True):
        assert torch.linalg.vector_norm(one.float() - exact) / torch.linalg.vector_norm(exact) < 2e-2


def outcome(fn, leaves, is_causal) -> list[torch.Tensor]:
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = fn(*leaves, is_causal)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]

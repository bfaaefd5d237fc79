"""pad_matmuls: which products are claimed, what the report says of them, and gradients through padded products."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import thunder
import torch
import torch.nn.functional as F

import thunder_fusionfix  # noqa: F401
from thunder_fusionfix import executor, products
from thunder_fusionfix._thunder import Device, DTensorProxy, TensorProxy, TraceCtx, dtypes, tracectx
from thunder_fusionfix.config import FusionFixConfig
from thunder_fusionfix.executor import fusionfix_ex
from thunder_fusionfix.folding import COPY_LIMIT
from thunder_fusionfix.matmul_copies import LINEAR, MATMUL
from thunder_fusionfix.model import Graph, Op, Ref, Value
from thunder_fusionfix.padding import FRUGAL_LIMIT, PAD_LIMIT, pad_what_is_misaligned
from thunder_fusionfix.passes import pad_matmuls
from thunder_fusionfix.passes.fold_matmuls import fusionfix_linear, fusionfix_matmul, plan_fold_matmuls
from thunder_fusionfix.passes.pad_matmuls import is_claimed, plan_pad_matmuls

# ---------------------------------------------------------------- claims


@pytest.fixture
def trace() -> Iterator[None]:
    with tracectx(TraceCtx(None)):
        yield


def proxy(*shape: Any, dtype: Any = dtypes.bfloat16, device: str = "cuda:0") -> TensorProxy:
    return TensorProxy(shape=shape, device=Device(device), dtype=dtype, requires_grad=False)


def given(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    monkeypatch.setattr(executor, "current_config", lambda: FusionFixConfig(**options))


YES = [
    ((1024, 768), (50257, 768)),
    ((1, 1024, 768), (50257, 768)),
    ((4096, 28), (18944, 28)),
    ((1, 4096, 18944), (28, 18944)),
]
NO = [
    ((1024, 768), (50264, 768)),  # aligned
    ((4096, 28), (28, 28)),  # small
    ((4095, 1024), (8, 1024)),  # an odd number of rows alone, and a small output
]


@pytest.mark.parametrize(("x", "w"), YES)
@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16], ids=str)
def test_misaligned_linear_layers_are_claimed(x, w, dtype, trace, monkeypatch) -> None:
    """Two-byte floats on a GPU, of a size that pays."""
    given(monkeypatch, fold_matmuls=False)
    assert executor._can_linear(proxy(*x, dtype=dtype), proxy(*w, dtype=dtype))
    assert executor._can_linear(proxy(*x, dtype=dtype), proxy(*w, dtype=dtype), proxy(w[0], dtype=dtype))


@pytest.mark.parametrize(("x", "w"), NO)
def test_aligned_and_small_linear_layers_are_not_claimed(x, w, trace, monkeypatch) -> None:
    """What cannot pay stays as it was."""
    given(monkeypatch)
    assert not executor._can_linear(proxy(*x), proxy(*w))


@pytest.mark.parametrize(
    ("left", "right", "claimed"),
    [
        ((1, 28, 4096, 1), (1, 28, 1, 4096), True),
        ((28, 4096, 28), (28, 28, 4096), True),
        ((28, 4096, 4096), (28, 4096, 28), True),
        ((1024, 50257), (50257, 768), True),
        ((28, 4096, 128), (28, 128, 4096), False),
        ((2, 256, 6), (2, 6, 256), False),
        ((28, 4096, 28), (1, 28, 4096), False),  # broadcast
        ((2, 14, 4096, 28), (28, 28, 4096), False),  # broadcast
    ],
)
def test_claimed_matmuls(left, right, claimed, trace, monkeypatch) -> None:
    """Of two matrices, and of tensors with equal leading dims."""
    given(monkeypatch)
    assert executor._can_matmul(proxy(*left), proxy(*right)) == claimed
    assert is_claimed(left, right, PAD_LIMIT) == claimed


@pytest.mark.parametrize(
    "spoiled",
    [
        {"dtype": dtypes.float32},
        {"dtype": dtypes.float64},
        {"dtype": dtypes.int16},
        {"device": "cpu"},
    ],
    ids=str,
)
def test_each_guard_refuses_by_itself(spoiled, trace, monkeypatch) -> None:
    """The yes-case with one thing changed; vectors, DTensors and unknown sizes too."""
    given(monkeypatch)
    good, bad = proxy(1024, 768), proxy(50257, 768, **spoiled)
    assert executor._can_linear(good, proxy(50257, 768))
    assert not executor._can_linear(good, bad) and not executor._can_linear(bad, good)
    assert not executor._can_matmul(good, proxy(768, 50257, **spoiled))
    assert not executor._can_matmul(proxy(768), proxy(768, 50257))
    assert not executor._can_linear(proxy(768), proxy(50257, 768))
    assert not executor._can_linear(good, proxy(50257, 768), 1.0)


def test_kinds_of_tensors_that_are_not_ordinary_are_not_claimed(trace, monkeypatch) -> None:
    """A subclass of TensorProxy, as DTensors are, stays with who knows it."""
    given(monkeypatch)

    class Other(TensorProxy):
        pass

    assert issubclass(DTensorProxy, TensorProxy)
    other = Other(shape=(50257, 768), device=Device("cuda:0"), dtype=dtypes.bfloat16)
    assert not executor._can_linear(proxy(1024, 768), other)


def test_option_switches_it_off_and_a_memory_budget_limits_it(trace, monkeypatch) -> None:
    """Off by its option; small copies where the user asked for memory; and on by default."""
    operands = proxy(1024, 768), proxy(50257, 768)
    for options, limits in (
        ({}, (COPY_LIMIT, PAD_LIMIT)),
        ({"fold_matmuls": False}, (None, PAD_LIMIT)),
        ({"pad_matmuls": False}, (COPY_LIMIT, 0)),
        ({"memory_budget": "1GB"}, (0, FRUGAL_LIMIT)),
    ):
        given(monkeypatch, **options)
        assert executor._can_linear(*operands) == bool(limits[1])
        assert executor._limits(*operands, is_linear=True) == limits


# ---------------------------------------------------------------- the operators


def forced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Lets CPU tensors of 2-byte floats be claimed and padded whatever it costs; the sizes of what is."""
    seen: list[tuple[int, ...]] = []

    def choose(left, left_strides, right, right_strides, limit, itemsize):
        padding = pad_what_is_misaligned(left, left_strides, right, right_strides, limit, itemsize)
        if padding is not None and left[:-2] == right[:-2]:
            seen.append((*left, right[-1]))
            return padding
        return None

    def may_be_padded(left, right):
        return left.dtype in (torch.bfloat16, torch.float16) and not torch.is_grad_enabled()

    monkeypatch.setattr(products, "choose_padding", choose)
    monkeypatch.setattr(products, "may_be_padded", may_be_padded)
    monkeypatch.setattr(executor, "_may_pad", lambda tensor: tensor.dtype in (dtypes.bfloat16, dtypes.float16))
    monkeypatch.setattr(
        pad_matmuls,
        "may_pad",
        lambda left, right, limit: any(size % 8 for size in (*left[-2:], right[-1])),
    )
    return seen


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return (torch.linalg.vector_norm(got.double() - want) / torch.linalg.vector_norm(want)).item()


@pytest.mark.parametrize("copy_limit", [None, 0, COPY_LIMIT])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_operators_pad_whatever_folds(copy_limit, dtype, monkeypatch) -> None:
    """Linear layers and matmuls of any rank, from both sides, padded after the fold, equal float64."""
    seen = forced(monkeypatch)
    torch.manual_seed(0)
    w, bias = torch.randn(9, 12).to(dtype), torch.randn(9).to(dtype)
    with torch.no_grad():
        for x in (
            torch.randn(5, 12),
            torch.randn(4, 6, 12),
            torch.randn(1, 7, 12).transpose(0, 1),
            torch.randn(6, 4, 12).transpose(0, 1),
            torch.randn(2, 3, 5, 12),
            torch.randn(0, 3, 12),
        ):
            x = x.to(dtype)
            want = F.linear(x.double(), w.double(), bias.double())
            got = fusionfix_linear(x, w, bias, copy_limit, PAD_LIMIT)
            pairs = [(got, want)]
            pairs.append((fusionfix_matmul(x, w.t(), copy_limit, PAD_LIMIT), x.double() @ w.t().double()))
            pairs.append((fusionfix_matmul(w, x.mT, copy_limit, PAD_LIMIT), w.double() @ x.mT.double()))
            for got, want in pairs:
                assert got.shape == want.shape and got.dtype is dtype and got.is_contiguous()
                assert copy_limit is None or not got._is_view()  # ATen's own result is a view of a product by index
                assert not want.numel() or relative(got, want) < 1e-2
        assert {one[:2] for one in seen} >= {(5, 12), (24, 12)}
        q = torch.randn(2, 3, 7, 5).to(dtype)
        assert relative(fusionfix_matmul(q, q.mT, copy_limit, PAD_LIMIT), q.double() @ q.mT.double()) < 1e-2
        assert (2, 3, 7, 5, 7) in seen
        vector = torch.randn(12).to(dtype)
        assert fusionfix_linear(vector, w, bias, copy_limit, PAD_LIMIT).shape == (9,)


def test_operators_leave_autograd_to_aten(monkeypatch) -> None:
    """Where autograd records nothing is padded, and gradients flow."""
    seen = forced(monkeypatch)
    x = torch.randn(5, 12, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(9, 12, dtype=torch.bfloat16, requires_grad=True)
    fusionfix_linear(x, w, None, COPY_LIMIT, PAD_LIMIT).sum().backward()
    fusionfix_matmul(x, w.t(), COPY_LIMIT, PAD_LIMIT).sum().backward()
    assert not seen and x.grad is not None and w.grad is not None


def test_without_a_pad_limit_nothing_is_padded(monkeypatch) -> None:
    """Traces of before, and claims for folds alone."""
    seen = forced(monkeypatch)
    x, w = torch.randn(4, 6, 12, dtype=torch.bfloat16), torch.randn(9, 12, dtype=torch.bfloat16)
    with torch.no_grad():
        fusionfix_linear(x, w, None, COPY_LIMIT)
        fusionfix_matmul(x, w.t())
        fusionfix_matmul(x, x.mT)
    assert not seen


# ---------------------------------------------------------------- through Thunder


def narrow_block(x, qkv, out, up, down):
    """Attention of 3 heads of width 5, and an MLP, with a residual stream of 15: nothing is a multiple of 8."""
    batch, length, width = x.shape
    q, k, v = F.linear(x, qkv).view(batch, length, 3, 3, 5).permute(2, 0, 3, 1, 4)
    scores = torch.softmax((q @ k.transpose(-1, -2)).float() * 5**-0.5, -1).to(x.dtype)
    x = x + F.linear((scores @ v).transpose(1, 2).reshape(batch, length, width), out)
    return x + F.linear(torch.nn.functional.silu(F.linear(x, up)), down)


def block_args(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 11, 15), (45, 15), (15, 15), (33, 15), (15, 33)]
    return [(torch.randn(shape) / shape[-1] ** 0.5).to(dtype).requires_grad_() for shape in shapes]


def results(fn, args) -> list[torch.Tensor]:
    leaves = [arg.detach().clone().requires_grad_() for arg in args]
    out = fn(*leaves)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_outputs_and_gradients_of_a_padded_model_are_as_near_to_float64(dtype, monkeypatch) -> None:
    """Every product of forward and backward runs padded; outputs and gradients are no further off than plain Thunder's."""
    seen = forced(monkeypatch)
    fusionfix_ex.reports.clear()
    args = block_args(dtype)
    want = results(narrow_block, [arg.detach().double() for arg in args])
    plain = results(thunder.jit(narrow_block, executors=("torch",)), args)
    assert not seen
    jitted = thunder.jit(narrow_block, executors=("fusionfix", "torch"), fusionfix_strict=True)
    padded = results(jitted, args)
    assert len(seen) >= 3 * 6 - 2  # 4 linear layers and 2 products of attention, each with two gradients
    assert all("torch.matmul" not in str(traces[-1]) for traces in (thunder.last_traces(jitted),))
    for exact, reference, got in zip(want, plain, padded, strict=True):
        assert got.dtype is dtype and got.shape == exact.shape
        assert relative(got, exact) < max(1.5 * relative(reference, exact), 2e-3)
    told = [one for report in fusionfix_ex.reports for one in report.decisions if one.pass_name == "pad_matmuls"]
    assert told and sum(int(one.what.split()[0]) for one in told) >= 16


def test_outputs_may_be_written_to(monkeypatch) -> None:
    """In-place ops of the caller on a result, which autograd forbids where the result is a view."""
    forced(monkeypatch)
    x = torch.randn(1, 7, 12).transpose(0, 1).to(torch.bfloat16).requires_grad_()
    w = torch.randn(9, 12, dtype=torch.bfloat16, requires_grad=True)
    for limits in ({}, {"fusionfix_pad_matmuls": False}):
        out = thunder.jit(lambda x, w: F.linear(x, w), executors=("fusionfix", "torch"), **limits)(x, w)
        out.add_(1.0)
        out.sum().backward()
    assert x.grad is not None


def test_switched_off_nothing_is_claimed(monkeypatch) -> None:
    """The options of both passes off: torch runs every product."""
    seen = forced(monkeypatch)
    jitted = thunder.jit(
        narrow_block,
        executors=("fusionfix", "torch"),
        fusionfix_pad_matmuls=False,
        fusionfix_fold_matmuls=False,
    )
    results(jitted, block_args(torch.bfloat16))
    text = str(thunder.last_traces(jitted)[-1]) + str(thunder.last_backward_traces(jitted)[-1])
    assert not seen and "fusionfix_linear" not in text and "fusionfix_matmul" not in text


# ---------------------------------------------------------------- the report


def graph_of(*limits: tuple[int | None, int]) -> Graph:
    values = {name: Value(name, (1, 1024, 768), "bf16", "cuda:0") for name in ("x", "y")}
    values |= {"w": Value("w", (50257, 768), "bf16", "cuda:0"), "q": Value("q", (4, 28, 28), "bf16", "cuda:0")}
    values |= {f"t{at}": Value(f"t{at}", (1, 1024, 50257), "bf16", "cuda:0") for at in range(len(limits))}
    ops = [
        Op(LINEAR, (Ref("x"), Ref("w"), None, *limit), Ref(f"t{at}"))
        if at % 2 == 0
        else Op(MATMUL, (Ref("q"), Ref("q"), *limit), Ref(f"t{at}"))
        for at, limit in enumerate(limits)
    ]
    return Graph("f", "inference", ("x", "w", "q"), (*ops, Op("return", (Ref("t0"),))), values)


def test_report_says_what_may_run_padded_and_why() -> None:
    """One decision for products of one reason; each pass tells of its own."""
    graph = graph_of((COPY_LIMIT, PAD_LIMIT), (COPY_LIMIT, PAD_LIMIT), (None, PAD_LIMIT), (COPY_LIMIT, 0))
    first, second = plan_pad_matmuls(graph)
    assert (
        first.pos == 0
        and first.what.startswith("2 product(s) run padded")
        and "[1, 1024, 768] @ [50257, 768]" in first.what
    )
    assert first.reason.startswith("50257 is no multiple of 8") and first.applied
    assert second.pos == 1 and second.reason.startswith("28 is no multiple of 8")
    (fold,) = plan_fold_matmuls(graph)
    assert fold.pos == 0 and fold.what.startswith("1 product(s)")
    assert plan_pad_matmuls(graph_of((COPY_LIMIT, 0))) == ()


def test_option_is_a_field_of_the_config() -> None:
    """On by default, under the pass's name."""
    (field,) = (field for field in dataclasses.fields(FusionFixConfig) if field.name == pad_matmuls.NAME)
    assert field.default is True

"""Attention that chooses its kernel, on a GPU: the kernel that torch chooses runs, and results and gradients are as near to float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import thunder_fusionfix  # noqa: F401
from thunder_fusionfix.passes import cudnn_attention

pytestmark = pytest.mark.gpu

SHAPE = (2, 4, 512)  # batch, heads, length


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that run, in order, among those that the operators can call."""
    calls: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        fn = getattr(cudnn_attention, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return fn(*args, **kwargs)

        return called

    for name in ("_cudnn_attention", "_cudnn_attention_backward", "_flash_attention", "_flash_attention_backward"):
        monkeypatch.setattr(cudnn_attention, name, noting(name))
    return calls


def inputs(width: int, dtype: torch.dtype, strided: bool, *, length: int = SHAPE[2]) -> list[torch.Tensor]:
    """Query, key, value and a gradient; ``strided``: as projections of [batch, length, heads, width] give them."""
    batch, heads, _ = SHAPE
    torch.manual_seed(0)
    made = [torch.randn(batch, length, heads, width, device="cuda").to(dtype).transpose(1, 2) for _ in range(4)]
    return made if strided else [one.contiguous() for one in made]


def attend(query, key, value, is_causal):
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def outcome(fn, tensors: list[torch.Tensor], is_causal: bool) -> list[torch.Tensor]:
    *leaves, grad = (one.detach() for one in tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = fn(*leaves, is_causal)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def compiled(**options):
    return thunder.jit(attend, executors=("sdpa", "fusionfix"), fusionfix_strict=True, **options)


def exact(tensors: list[torch.Tensor], is_causal: bool) -> list[torch.Tensor]:
    with sdpa_kernel(SDPBackend.MATH):
        return outcome(attend, [one.float() for one in tensors], is_causal)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return (torch.linalg.vector_norm(got.float() - want) / torch.linalg.vector_norm(want)).item()


def torch_chooses_cudnn(tensors: list[torch.Tensor], is_causal: bool) -> bool:
    return torch._fused_sdp_choice(*tensors[:3], None, 0.0, is_causal) == cudnn_attention._CUDNN


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize("width", [64, 80, 128, 100, 192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_and_gradients_are_as_near_to_float32_as_those_of_flash(is_causal, strided, width, dtype, ran):
    """And the kernel is the one that torch chooses, forward and backward; 100 and 192 are left to flash."""
    tensors = inputs(width, dtype, strided)
    chosen = torch_chooses_cudnn(tensors, is_causal) and width <= cudnn_attention.MOST_WIDTH
    want, flash = exact(tensors, is_causal), outcome(compiled(fusionfix_cudnn_attention=False), tensors, is_causal)
    assert not ran
    got = outcome(compiled(fusionfix_cudnn_attention=True), tensors, is_causal)
    kernel = "_cudnn_attention" if chosen else "_flash_attention"
    assert ran == [kernel, f"{kernel}_backward"]
    assert chosen == (width in (64, 80, 128)) or torch.cuda.get_device_capability()[0] != 9
    for mine, thunders, reference in zip(got, flash, want, strict=True):
        assert mine.shape == thunders.shape and mine.dtype is dtype
        assert distance(mine, reference) < max(1.5 * distance(thunders, reference), 1e-3)


def test_cudnn_kernels_are_on_the_gpus_list(ran):
    """What the profiler saw: no flash kernel of torch's where cuDNN was chosen."""
    tensors = inputs(128, torch.bfloat16, True)
    if not torch_chooses_cudnn(tensors, True):
        pytest.skip("torch does not choose cuDNN on this GPU")
    fn = compiled(fusionfix_cudnn_attention=True)
    outcome(fn, tensors, True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        outcome(fn, tensors, True)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert any("cudnn" in name for name in names) and not any("pytorch_flash" in name for name in names), names


def test_users_choice_of_a_kernel_counts_and_the_backward_follows(ran):
    """The forward in a context that forbids cuDNN, the backward outside; and the other way round."""
    tensors = inputs(64, torch.bfloat16, True)
    fn, want = compiled(fusionfix_cudnn_attention=True), exact(tensors, True)
    for inside in (True, False):
        ran.clear()
        *leaves, grad = (one.detach() for one in tensors)
        leaves = [leaf.requires_grad_() for leaf in leaves]
        if inside:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = fn(*leaves, True)
            out.backward(grad)
        else:
            out = fn(*leaves, True)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out.backward(grad)
        assert ran[1] == f"{ran[0]}_backward" and (not inside or ran[0] == "_flash_attention")
        for got, reference in zip([out, *(leaf.grad for leaf in leaves)], want, strict=True):
            assert distance(got, reference) < 1e-2


@pytest.mark.parametrize("off", [1, 2, 4])
@pytest.mark.parametrize("at", ["query", "key", "value", "gradient", "all"])
def test_tensors_at_unaligned_addresses_are_read_right(off, at, ran):
    """``off`` elements from an aligned address. torch's own attention is off by the whole norm there, or fails."""
    tensors = inputs(64, torch.bfloat16, True)
    if not torch_chooses_cudnn(tensors, True):
        pytest.skip("torch does not choose cuDNN on this GPU")
    want = exact(tensors, True)
    batch, heads, length, width = tensors[0].shape
    for pos, name in enumerate(("query", "key", "value", "gradient")):
        if at in (name, "all"):
            room = torch.empty(tensors[pos].numel() + off, dtype=torch.bfloat16, device="cuda")
            moved = room[off:].view(batch, length, heads, width).transpose(1, 2)
            tensors[pos] = moved.copy_(tensors[pos])
    got = outcome(compiled(fusionfix_cudnn_attention=True), tensors, True)
    assert ran == ["_cudnn_attention", "_cudnn_attention_backward"]
    for mine, reference in zip(got, want, strict=True):
        assert distance(mine, reference) < 1e-2


@pytest.mark.parametrize("extra", [1, 4, 8])
def test_rows_that_are_not_packed_are_read_right(extra, ran):
    """Rows of 64 in room for more, so that only each eighth one is aligned, or all are."""
    tensors = inputs(64, torch.bfloat16, True)
    want = exact(tensors, True)
    batch, heads, length, width = tensors[0].shape
    for pos in range(4):
        room = torch.empty(batch, length, heads, width + extra, dtype=torch.bfloat16, device="cuda")
        tensors[pos] = room[..., :width].transpose(1, 2).copy_(tensors[pos])
    got = outcome(compiled(fusionfix_cudnn_attention=True), tensors, True)
    for mine, reference in zip(got, want, strict=True):
        assert distance(mine, reference) < 1e-2


@pytest.mark.parametrize("kind", ["expanded", "turned", "other order"])
def test_gradients_of_any_strides_are_taken(kind, ran):
    """As sums, transposed consumers and other layouts hand them back."""
    tensors = inputs(64, torch.bfloat16, True)
    grad = {
        "expanded": torch.randn(64, device="cuda", dtype=torch.bfloat16).expand(tensors[3].shape),
        "turned": tensors[3].mT.contiguous().mT,
        "other order": tensors[3].contiguous(),
    }[kind]
    tensors[3] = grad
    got, want = outcome(compiled(fusionfix_cudnn_attention=True), tensors, True), exact(tensors, True)
    for mine, reference in zip(got, want, strict=True):
        assert distance(mine, reference) < 1e-2


def test_a_cuda_graph_records_it(ran):
    """Neither operator reads the device: forward and backward are recorded and replayed on other numbers."""
    *qkv, grad = inputs(128, torch.bfloat16, True)
    rest = (0.0, True)

    def step():
        out, sums, cum_q, cum_k, max_q, max_k, seed, offset, _ = cudnn_attention.fusionfix_attention(*qkv, *rest)
        args = (grad, *qkv, out, sums, cum_q, cum_k, max_q, max_k, *rest, seed, offset)
        return [out, *cudnn_attention.fusionfix_attention_backward(*args)]

    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = step()
        for tensor in qkv:
            tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        for got, want in zip(recorded, step(), strict=True):
            torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)


def test_inference_runs_the_forward_alone(ran):
    """A trace without a backward, and lengths that differ."""
    query, key, value, _ = inputs(64, torch.bfloat16, True)
    long = inputs(64, torch.bfloat16, True, length=768)
    for others in ((key, value), long[1:3]):
        with torch.no_grad():
            got = compiled(fusionfix_cudnn_attention=True)(query, *others, False)
            with sdpa_kernel(SDPBackend.MATH):
                want = attend(*(one.float() for one in (query, *others)), False)
        assert distance(got, want) < 1e-2
    assert len(ran) == 2 and not any(name.endswith("_backward") for name in ran)

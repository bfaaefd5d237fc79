"""Attention runs the kernel that torch would choose for it: cuDNN's, where torch's own chooser says so.

The trap. Thunder's executor "sdpa" knows the flash kernel and the memory-efficient one of torch, and binds one of them while it traces.
torch, compiled or not, asks ``torch._fused_sdp_choice`` at each call, and on a Hopper GPU the answer is cuDNN for most of what models
run. `benchmarks/run_all.py` measures what that takes: "4 layers, real width", with and without the option.

The cure. Each pair of flash forward and flash backward of a trace, and each flash forward without a backward, is bound to operators of
our own, with the same arguments and outputs:

    t5, t6, ... = sdpafx_grad_forward_scaled_dot_product_efficient_attention(q, k, v, 0.0, True, scale=None)
    t9, ... = sdpafx_scaled_dot_product_efficient_attention_backward(g, q, k, v, t5, t6, ..., 0.0, True, ..., scale=None)

    t5, t6, ... = fusionfix_attention(q, k, v, 0.0, True, scale=None)             # at run time: torch's choice, cuDNN or what Thunder ran
    t9, ... = fusionfix_attention_backward(g, q, k, v, t5, t6, ..., 0.0, True, ..., scale=None)    # the way that its forward took

The backward does not ask again, since what the choice depends on (strides, a context of the user's, deterministic algorithms) may have
changed by then. It tells from the log-sum-exp, which is ``[batch, heads, length, 1]`` after cuDNN's forward and ``[batch, heads, length]``
after the flash one. Where no backward of the trace takes it, nothing else may see which it is.

Stage: joint, inference. Needs: dropout 0, no mask (the flash kernel has none). Keeps: arguments, outputs, dtypes, the result's strides,
what is saved and its bytes. Copies: tensors that cuDNN would misread, `_as_cudnn_reads`; where such a copy lies in another order of dims
the result does too. Changes: the order of sums, within the distance of both kernels from float32. Left alone: dropout, which would draw
other numbers; a forward whose outputs anything but its own backward takes; memory-efficient attention, which Thunder chooses for masks
and float32. Invariants: no way reads the device, so a CUDA graph can record it. Predictions count the workspace of the backward, of the
kernel that needs more (`attention_workspace`), but not `_as_cudnn_reads`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from thunder_fusionfix.effects import ATTENTION, ATTENTION_BACKWARD, FLASH, FLASH_BACKWARD
from thunder_fusionfix.joint import JointPlan
from thunder_fusionfix.layout import Shape, Strides
from thunder_fusionfix.model import RETURN, Decision, Graph, Op, Ref, refs

NAME = "cudnn_attention"
REPLACES = ((FLASH, ATTENTION), (FLASH_BACKWARD, ATTENTION_BACKWARD))
"""Operators of Thunder's, and those of ours that compute the same."""

MOST_WIDTH = 128
"""Head dim that cuDNN's kernels take forward and backward on every GPU that has them. For wider heads the chooser asks whether a
gradient is wanted, which tensors do not tell while Thunder runs."""

# ---------------------------------------------------------------- the operators

_cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_cudnn_attention_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
_CUDNN = int(SDPBackend.CUDNN_ATTENTION)


def fusionfix_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Any:
    """The attention of ``query`` to ``key``, and what its backward needs.

    Args:
        query, key, value: ``[batch, heads, length, width]``, float16 or bfloat16.
        dropout_p, is_causal, scale: as of ``torch.nn.functional.scaled_dot_product_attention``.

    Returns:
        The nine outputs of ``aten::_scaled_dot_product_flash_attention``: result, log-sum-exp (of 4 dims where cuDNN ran, else of 3),
        two tensors or None, two lengths, seed, offset, debug mask.
    """
    if _prefers_cudnn(query, key, value, dropout_p, is_causal, scale):
        query, key, value = map(_as_cudnn_reads, (query, key, value))
        return _cudnn_attention(query, key, value, None, True, 0.0, is_causal, False, scale=scale)
    return _flash_attention(query, key, value, dropout_p, is_causal, scale)


def fusionfix_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    scale: float | None = None,
) -> Any:
    """The gradients of query, key and value, by the kernel that gave ``logsumexp``; see `fusionfix_attention`."""
    if not _is_of_cudnn(logsumexp):
        return _flash_attention_backward(
            *(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k),
            *(dropout_p, is_causal, philox_seed, philox_offset, scale),
        )
    query, key, value, out = map(_as_cudnn_reads, (query, key, value, out))
    grad_out = _lying_as(grad_out, out)
    return _cudnn_attention_backward(
        *(grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, None, cum_seq_q, cum_seq_k),
        *(max_q, max_k, dropout_p, is_causal),
        scale=scale,
    )


def _flash_attention(*args: Any) -> Any:
    from thunder_fusionfix._thunder import (
        sdpaex,  # not above: Thunder's import has `executor` imported, which imports this module
    )

    return sdpaex._grad_forward_scaled_dot_product_flash_attention_impl(*args)


def _flash_attention_backward(*args: Any) -> Any:
    from thunder_fusionfix._thunder import sdpaex

    return sdpaex._scaled_dot_product_flash_attention_backward_impl(*args)


def _prefers_cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> bool:
    """True where torch would run cuDNN's kernel, which then does what the flash kernel does."""
    if dropout_p != 0.0 or max(query.shape[-1], value.shape[-1]) > MOST_WIDTH:
        return False
    if is_causal and query.shape[-2] != key.shape[-2]:  # the kernels would line the masks up at other corners
        return False
    return torch._fused_sdp_choice(query, key, value, None, 0.0, is_causal, scale=scale) == _CUDNN


def _is_of_cudnn(logsumexp: torch.Tensor) -> bool:
    return logsumexp.dim() == 4


ALIGNMENT = 16
"""Bytes of which a multiple is the address of each row that cuDNN's kernels read."""


def _as_cudnn_reads(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with dense rows at aligned addresses; a copy where it has others, of the same order of dims if that will do.

    torch does not look. With query, key or value at an address 2, 4 or 8 bytes off, results are off by their whole norm and no error
    comes, in eager too; with such a gradient cuDNN fails (torch 2.11, cuDNN 9.19; `tests/gpu` holds both).
    """
    if _is_aligned(tensor):
        return tensor
    copy = tensor.clone()
    return copy if _is_aligned(copy) else tensor.clone(memory_format=torch.contiguous_format)


def _is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % ALIGNMENT == 0 and _steps_are_aligned(
        tensor.shape, tensor.stride(), ALIGNMENT // tensor.element_size()
    )


@lru_cache(maxsize=4096)
def _steps_are_aligned(shape: Shape, strides: Strides, elements: int) -> bool:
    """True for dense rows that start multiples of ``elements`` apart."""
    steps = (stride for size, stride in zip(shape[:-1], strides[:-1], strict=True) if size > 1)
    return strides[-1] == 1 and all(step % elements == 0 for step in steps)


def _lying_as(gradient: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``gradient`` with the strides of ``out``: cuDNN's backward reads it by those, whatever its own are (torch 2.11, cuDNN 9.19).

    With others the gradients were off by 1.4 of their norm; `tests/gpu` holds it.
    """
    if gradient.stride() == out.stride() and _is_aligned(gradient):
        return gradient
    return torch.empty_strided(out.shape, out.stride(), dtype=gradient.dtype, device=gradient.device).copy_(gradient)


# ---------------------------------------------------------------- the plan


def plan_cudnn_attention(graph: Graph, fuel: int | None = None) -> JointPlan:
    """Which flash attention of a joint or inference trace chooses its kernel at run time.

    Args:
        graph: the trace.
        fuel: at most this many kinds of attention; None for no limit.
    """
    found: dict[
        tuple[str, str | None], list[tuple[int, ...]]
    ] = {}  # shapes, why not: positions of forward and backward
    for pos, op in enumerate(graph.ops):
        if op.id == FLASH:
            backward, why_not = _backward_of(op, graph)
            found.setdefault((_shapes(op, graph), why_not), []).append((pos, *backward))
    swaps, decisions, left = list[tuple[int, str]](), list[Decision](), fuel
    for (shapes, why_not), pairs in found.items():
        if why_not is None and left == 0:
            why_not = "no fuel is left"
        if why_not is None:
            left = None if left is None else left - 1
            swaps += [(pair[0], ATTENTION) for pair in pairs]
            swaps += [(pos, ATTENTION_BACKWARD) for pair in pairs for pos in pair[1:]]
        does = "choose cuDNN or flash at run time" if why_not is None else "stay with the flash kernel"
        what = f"{len(pairs)} attention op(s) {does}: {shapes}"
        why = why_not or "torch asks which kernel is fast for the tensors that come; Thunder bound one while it traced"
        decisions.append(Decision(NAME, pairs[0][0], graph.ops[pairs[0][0]].id, what, why, applied=why_not is None))
    return JointPlan(swaps=tuple(sorted(swaps)), decisions=tuple(decisions))


def _backward_of(forward: Op, graph: Graph) -> tuple[tuple[int, ...], str | None]:
    """Positions of the flash backwards that take what ``forward`` gives, and why all of it is left alone; None where it is not."""
    if not _is_without_dropout(forward):
        return (), "its dropout is not known to be 0: another kernel would draw other numbers"
    result, logsumexp, *_ = outputs = forward.outputs
    users = sorted({user for name in outputs[1:] for user in graph.consumers.get(name, ())})
    for op in (graph.ops[user] for user in users):
        if op.id != FLASH_BACKWARD:
            taker = "the caller" if op.id == RETURN else op.id
            return (), f"{taker} takes what the flash kernel leaves for its backward"
        if op.args[1:6] != (*forward.args[:3], Ref(result), Ref(logsumexp)):
            return (), "its backward takes other tensors than it"
        if op.args[10:12] != forward.args[3:5] or op.kwarg("scale") != forward.kwarg("scale"):
            return (), "its backward has another dropout, mask or scale"
    return tuple(users), None


def _is_without_dropout(op: Op) -> bool:
    """True for a flash forward as Thunder binds it, with two numbers after query, key and value, of which the first is 0."""
    return len(op.args) == 5 and op.args[3] == 0.0 and isinstance(op.args[4], bool) and len(op.outputs) > 1


def _shapes(op: Op, graph: Graph) -> str:
    shapes = (list(graph.values[name].shape or ()) for name in refs(op.args[:3]))
    return " ".join(dict.fromkeys(map(str, shapes)))

"""Linear layers and matmuls of an N-D tensor with a 2-D one, run as one 2-D product where that is faster.

The trap. ATen runs ``x[..., K] @ w[K, N]`` as one ``mm`` if the leading dims of ``x`` fold by a strict stride rule, or if ``w``
requires grad; otherwise it expands ``w`` and runs one product per leading index. Whatever Thunder executes runs under no_grad,
so a weight that an op made (every autocast copy, every dequantized or merged weight) never requires grad, and frozen weights and
inference do not either. With one row per product that is a hundred times slower (pytorch issue 118548). And where ``w`` is a
parameter that does require grad, ATen folds even if that copies ``x``, which can be slower than the products that it avoids.

The cure decides at run time, from the real strides, between four ways to do the same sums:

    way     calls               when
    ATEN    linear / matmul     ATen folds by itself without a copy, or one product per leading index is best
    VIEW    view, mm            the leading dims are one dim by torch's view rule (ATen's rule trips over unit dims)
    BATCH   view, bmm           they are two dims, and one product per index of the other one has longer rows
    COPY    reshape, mm         neither, or the rows of each product are too few; at most `copy_limit` bytes

``x[33600, 1, 2056]`` with strides (2056, 69081600, 1) is a VIEW. ``x[64, 512, 1024]`` of a sequence-first tensor stays with ATen,
64 products of 512 rows, also where ATen would rather copy it; ``x[512, 8, 1024]`` of a batch-first one is a BATCH of 8 products of
512 rows. A product of two matrices, whole or folded, is padded where its rows do not start at multiples of 16 bytes and that is faster
(`thunder_fusionfix.products`). The result is always dense and row-major, as ATen's is without grad, and no view: users may
write to it.

Invariants: no way reads the device, so a CUDA graph can record it; the way depends on shapes, strides, dtype and the limit alone.
Where autograd records, ATen's own path runs.

Stage: the operators of the executor entry; `thunder_fusionfix.executor` registers them. Needs: tensors of one dtype. Keeps: shapes,
dtypes, row-major results. Changes: the order of sums, within ATen's own spread between ``mm`` and ``bmm``.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear as aten_linear

from thunder_fusionfix.effects import short_name
from thunder_fusionfix.folding import COPY_LIMIT, Choice, Way, aten_folds, choose
from thunder_fusionfix.matmul_copies import product_of, shapes_of
from thunder_fusionfix.model import Decision, Graph
from thunder_fusionfix.products import as_result, padded_product

NAME = "fold_matmuls"

# ---------------------------------------------------------------- the operators


def fusionfix_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    copy_limit: int | None = COPY_LIMIT,
    pad_limit: int = 0,
) -> torch.Tensor:
    """``torch.nn.functional.linear(x, w, bias)``, done in the cheapest of four ways; see the module.

    Args:
        x, w, bias: ``[..., K]``, ``[N, K]`` and ``[N]``.
        copy_limit: bytes that a fold may copy; None folds nothing that ATen does not fold.
        pad_limit: bytes that padding may copy (`padding`); 0 pads nothing.
    """
    if _left_to_aten(x):
        return aten_linear(x, w, bias)
    if x.dim() < 3 or aten_folds(shape := x.shape, strides := x.stride()):
        return _linear(x, w, bias, pad_limit) if pad_limit else aten_linear(x, w, bias)
    if copy_limit is None:
        return aten_linear(x, w, bias)
    choice = choose(shape, strides, w.shape[0], x.element_size(), bias is not None, copy_limit)
    if choice.way is Way.ATEN:
        return aten_linear(x, _unfolded(w), bias)
    if choice.way is Way.BATCH:
        return _batch(x, w.t(), bias, choice)
    folded = x.view(-1, shape[-1]) if choice.way is Way.VIEW else x.reshape(-1, shape[-1])
    return as_result(_linear(folded, w, bias, pad_limit), *shape[:-1], w.shape[0])


def fusionfix_matmul(
    a: torch.Tensor, b: torch.Tensor, copy_limit: int | None = COPY_LIMIT, pad_limit: int = 0
) -> torch.Tensor:
    """``torch.matmul(a, b)``; of an N-D tensor with a 2-D one done in the cheapest of four ways; limits as `fusionfix_linear`."""
    if _left_to_aten(a):
        return torch.matmul(a, b)
    if a.dim() > 2 and b.dim() == 2:
        return _matmul_nd_2d(a, b, copy_limit, pad_limit)
    if a.dim() == 2 and b.dim() > 2:
        return torch.matmul(a, b) if copy_limit is None else _matmul_2d_nd(a, b, copy_limit, pad_limit)
    return _matmul(a, b, pad_limit)


def _matmul_nd_2d(x: torch.Tensor, w: torch.Tensor, copy_limit: int | None, pad_limit: int) -> torch.Tensor:
    if aten_folds(shape := x.shape, strides := x.stride()):
        padded = padded_product(x.flatten(0, -2), w, None, pad_limit) if pad_limit else None
        return torch.matmul(x, w) if padded is None else padded.resize_(*shape[:-1], w.shape[1])
    if copy_limit is None:
        return torch.matmul(x, w)
    choice = choose(shape, strides, w.shape[1], x.element_size(), False, copy_limit)
    if choice.way is Way.ATEN:
        return torch.matmul(x, _unfolded(w))
    if choice.way is Way.BATCH:
        return _batch(x, w, None, choice)
    folded = x.view(-1, shape[-1]) if choice.way is Way.VIEW else x.reshape(-1, shape[-1])
    return as_result(_matmul(folded, w, pad_limit), *shape[:-1], w.shape[1])


def _matmul_2d_nd(w: torch.Tensor, x: torch.Tensor, copy_limit: int, pad_limit: int) -> torch.Tensor:
    """``w[N, K] @ x[..., K, cols]``: the transposed product, folded where the columns of each are few."""
    turned = x.mT
    choice = choose(turned.shape, turned.stride(), w.shape[0], x.element_size(), False, copy_limit, transposed=True)
    if choice.way is Way.ATEN:
        return torch.matmul(_unfolded(w), x)
    folded = turned.view(-1, w.shape[1]) if choice.way is Way.VIEW else turned.reshape(-1, w.shape[1])
    product = _matmul(folded, w.t(), pad_limit).view(*turned.shape[:-1], w.shape[0]).mT.contiguous()
    return as_result(product, *product.shape)


def _linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, pad_limit: int) -> torch.Tensor:
    """A linear layer of what ATen folds by itself, padded where that is faster."""
    if pad_limit and x.dim() > 1:
        padded = padded_product(x.flatten(0, -2), w.t(), bias, pad_limit)
        if padded is not None:
            return padded.resize_(*x.shape[:-1], w.shape[0])
    return aten_linear(x, w, bias)


def _matmul(a: torch.Tensor, b: torch.Tensor, pad_limit: int) -> torch.Tensor:
    """A product as it stands, padded where that is faster."""
    padded = padded_product(a, b, None, pad_limit) if pad_limit and min(a.dim(), b.dim()) > 1 else None
    return torch.matmul(a, b) if padded is None else padded


def _batch(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, choice: Choice) -> torch.Tensor:
    """One product per index of the batch dim of ``choice``, written into a row-major output."""
    (depth, num_out), shape = w.shape, x.shape
    pairs = x.view(choice.outer, choice.inner, depth)
    if choice.swapped:
        out = x.new_empty((choice.outer, choice.inner, num_out))
        torch.bmm(pairs.transpose(0, 1), w.expand(choice.inner, depth, num_out), out=out.transpose(0, 1))
    else:
        out = torch.bmm(pairs, w.expand(choice.outer, depth, num_out))
    if bias is not None:
        out.add_(bias)
    return as_result(out, *shape[:-1], num_out)


def _unfolded(w: torch.Tensor) -> torch.Tensor:
    """``w`` as one that does not require grad: for one that does, ATen makes the very copy that was not worth it."""
    return w.detach() if w.requires_grad else w


def _left_to_aten(x: torch.Tensor) -> bool:
    """True where autograd records, and for what the ways are not written for."""
    return torch.is_grad_enabled() or x.layout is not torch.strided or x.is_complex()


# ---------------------------------------------------------------- the report


def plan_fold_matmuls(graph: Graph) -> tuple[Decision, ...]:
    """What was claimed, and why it may be slow without: one decision for the products of ``graph`` that share a reason."""
    by_reason: dict[str, list[int]] = {}
    for pos, op in enumerate(graph.ops):
        product = product_of(op)
        if product is None or product.copy_limit is None:
            continue
        dims = [len(graph.values[name].shape or ()) for name in (product.left, product.right)]
        if min(dims) == 2 < max(dims):
            by_reason.setdefault(_why(op.inputs, graph), []).append(pos)
    return tuple(
        Decision(NAME, found[0], graph.ops[found[0]].id, _what(found, graph), why, applied=True)
        for why, found in by_reason.items()
    )


def _what(found: list[int], graph: Graph) -> str:
    return f"{len(found)} product(s) choose their kernel at run time: {shapes_of(found, graph)}"


def _why(names: tuple[str, ...], graph: Graph) -> str:
    matrix = next((name for name in names if len(graph.values[name].shape or ()) == 2), None)
    if matrix is not None and matrix in graph.producer:
        made_by = short_name(graph.ops[graph.producer[matrix]].id)
        return f"the 2-D tensor is made by {made_by} and never requires grad: ATen folds no tensor with gaps"
    return "the 2-D tensor is an argument: ATen folds if it requires grad, whatever the copy costs, and else not"

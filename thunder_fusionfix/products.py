"""Matrix products whose operands are padded first where `padding.choose_padding` says that it is faster.

    left[8192, 768] @ right[768, 50257], the right operand a transposed view; 1 piece shown of 17:

        right32 = empty(50264, 768).T;  right32[:, :50257] = right        (once)
        piece = left[:480] @ right32                                      ([480, 50264]: its rows start at multiples of 16 bytes)
        out[:480] = piece[:, :50257]

The result is dense and row-major, in the shape and dtype that ATen gives. Nothing reads the device, so that a CUDA graph can record it:
what is done depends on shapes, strides, dtype, device and the limit alone.
"""

from __future__ import annotations

import torch

from thunder_fusionfix.padding import Padding, choose_padding

_PADDED = (torch.float16, torch.bfloat16)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def padded_product(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, limit: int
) -> torch.Tensor | None:
    """``left @ right + bias``, padded; None where that is not faster, or not for us to do.

    Args:
        left: ``[..., M, K]``, two dims or more.
        right: ``[..., K, N]`` with the same leading dims.
        bias: ``[N]``, for two matrices only.
        limit: bytes that copies may take; 0 pads nothing.
    """
    if not limit or not may_be_padded(left, right):
        return None
    padding = choose_padding(left.shape, left.stride(), right.shape, right.stride(), limit, left.element_size())
    return None if padding is None else multiplied(left, right, bias, padding)


def as_result(out: torch.Tensor, *shape: int) -> torch.Tensor:
    """The dense ``out`` in ``shape``, and no view to autograd, which forbids to write to an output that is one."""
    return torch.ops.aten._unsafe_view(out, shape)


def may_be_padded(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True for ordinary tensors of 2-byte floats on a GPU, where autograd does not record and autocast would change nothing."""
    return (
        left.is_cuda
        and right.device == left.device
        and left.dtype in _PADDED
        and right.dtype is left.dtype
        and type(left) in _PLAIN
        and type(right) in _PLAIN
        and left.layout is right.layout is torch.strided
        and not torch.is_grad_enabled()
        and not (torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is not left.dtype)
    )


def multiplied(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, padding: Padding) -> torch.Tensor:
    """``left @ right + bias``, done as ``padding`` says: dense and row-major."""
    depth, num_out = right.shape[-2:]
    fills = padding.depth != depth
    if padding.right:
        copy = _copied(right, padding.depth, padding.cols, padding.right_turned)
        if fills:
            copy[..., depth:, :].zero_()
        right = copy
    if bias is not None and padding.cols != num_out:
        wide = bias.new_empty(padding.cols)
        wide[:num_out].copy_(bias)
        bias = wide
    if padding.pieces > 1:
        return _in_pieces(left, right, bias, padding, num_out)
    rows = left.shape[-2]
    product = _product(_left(left, padding.rows, padding), right, bias)
    out = product[..., :rows, :num_out].contiguous()
    return as_result(out, *out.shape)


def _in_pieces(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, padding: Padding, num_out: int
) -> torch.Tensor:
    """Two matrices, `padding.rows` rows at a time, each piece written where it belongs."""
    rows, cuts = left.shape[0], padding.cols != num_out
    room = -(-rows // 8) * 8 if padding.left_turned and not cuts else rows  # the last piece may have padded rows
    out = left.new_empty((room, num_out))
    for start in range(0, rows, padding.rows):
        piece = left[start : start + padding.rows]
        taken = piece.shape[0]
        padded_rows = -(-taken // 8) * 8 if padding.left and padding.left_turned else taken
        piece = _left(piece, padded_rows, padding)
        if cuts:
            out[start : start + taken].copy_(_product(piece, right, bias)[:taken, :num_out])
        else:
            _product(piece, right, bias, out[start : start + padded_rows])
    return as_result(out[:rows], rows, num_out)


def _left(left: torch.Tensor, rows: int, padding: Padding) -> torch.Tensor:
    """The left operand, or these of its rows, as the product takes it."""
    if not padding.left:
        return left
    depth = left.shape[-1]
    copy = _copied(left, rows, padding.depth, padding.left_turned)
    if padding.depth != depth:
        copy[..., depth:].zero_()
    return copy


def _copied(matrix: torch.Tensor, rows: int, cols: int, turned: bool) -> torch.Tensor:
    """``matrix`` in the corner of a new ``[..., rows, cols]``, whose other elements may hold anything."""
    leading = matrix.shape[:-2]
    copy = matrix.new_empty((*leading, cols, rows)).mT if turned else matrix.new_empty((*leading, rows, cols))
    copy[..., : matrix.shape[-2], : matrix.shape[-1]].copy_(matrix)
    return copy


def _product(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    if left.dim() > 2:
        return torch.matmul(left, right)
    return torch.mm(left, right, out=out) if bias is None else torch.addmm(bias, left, right, out=out)

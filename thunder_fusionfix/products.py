"""Matrix products whose operands are padded first where `padding.choose_padding` says that it is faster.

    x[4096, 28] @ w[28, 18944], both K-dense: w a transposed view

        out = [x | 0][4096, 32] @ [w | 0][32, 18944]

    x[8192, 768] @ w[768, 50257], w a transposed view; one piece of rows shown

        out[:, 50256:] = x @ w[:, 50256:]
        piece[512, 50256] = x[:512] @ w[:, :50256]      its rows start at multiples of 16 bytes; those of out do not
        out[:512, :50256] = piece

    dy[1024, 50257] @ w[50257, 768], one piece of rows shown

        out = dy[:, 50256:] @ w[50256:]
        out[:512] += copy(dy[:512, :50256]) @ w[:50256]

The result is dense and row-major, in the shape and dtype that ATen gives. Nothing reads the device, so that a CUDA graph can record it:
what is done depends on shapes, strides, dtype, device and the limit alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import constant_pad_nd, split_with_sizes

from thunder_fusionfix.padding import Padding, choose_padding, up

_PADDED = (torch.float16, torch.bfloat16)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_unsafe_view = torch.ops.aten._unsafe_view.default

SMALL_BYTES = 4 * 2**20
"""Copies below this are cleared whole: that takes the GPU no longer than a launch, and the host one call instead of four."""


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
    return _unsafe_view(out, shape)


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
    rows, num_out = left.shape[-2], right.shape[-1]
    if padding.right:
        right = _copied(right, padding.depth, padding.cols, padding.right_turned, -2)
    if bias is not None and padding.cols > num_out:
        wide = bias.new_empty(padding.cols)
        wide.narrow(0, 0, num_out).copy_(bias)
        bias = wide
    if padding.pieces > 1 or padding.cols < num_out or padding.depth < left.shape[-1]:
        return _in_pieces(left, right, bias, padding, num_out)
    if padding.left:
        left = _copied(left, padding.rows, padding.depth, padding.left_turned, -1)
    product = _product(left, right, bias)
    del left, right  # copies end here
    if product.shape[-2:] == (rows, num_out):
        return product
    if product.dim() == 2 and padding.cols == num_out:  # the rows that are cut stand behind the others
        return product.resize_(rows, num_out)
    out = product.as_strided((*product.shape[:-2], rows, num_out), product.stride()).contiguous()
    return as_result(out, *out.shape) if out._is_view() else out


def _in_pieces(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, padding: Padding, num_out: int
) -> torch.Tensor:
    """Two matrices, `padding.rows` rows at a time, each piece written where it belongs; what is done apart first."""
    (rows, depth), cuts, pads_rows = left.shape, padding.cols != num_out, padding.left and padding.left_turned
    room = up(rows) if pads_rows and not cuts else rows  # the last piece may have padded rows
    adds = padding.depth < depth
    if adds:  # the smaller sum is rounded first
        sizes = padding.depth, depth - padding.depth
        (left, last_left), (right, last_right) = split_with_sizes(left, sizes, 1), split_with_sizes(right, sizes)
        out = _product(last_left, last_right, bias)
    else:
        out = left.new_empty((room, num_out))
    columns, cols = out, min(padding.cols, num_out)
    if cols < num_out:
        sizes = cols, num_out - cols
        (right, last_right), (columns, last) = split_with_sizes(right, sizes, 1), split_with_sizes(out, sizes, 1)
        last_bias = None
        if bias is not None:
            bias, last_bias = split_with_sizes(bias, sizes)
        _product(left, last_right, last_bias, last)
    for piece, target in zip(_pieces(left, padding), _pieces(columns, padding), strict=True):
        if padding.left:
            made = up(piece.shape[0]) if pads_rows else piece.shape[0]
            piece = _copied(piece, made, padding.depth, padding.left_turned, -1)
        if cuts:
            product = _product(piece, right, bias)
            if product.shape != target.shape:
                product = product.as_strided(target.shape, product.stride())
            target.copy_(product)
            del product  # before the next is made
        else:
            _product(piece, right, target if adds else bias, target)
    return out if room == rows else out.resize_(rows, num_out)


def _pieces(matrix: torch.Tensor, padding: Padding) -> Sequence[torch.Tensor]:
    """Its rows, `padding.rows` at a time, and at last what is left."""
    if padding.pieces == 1:
        return (matrix,)
    before = padding.pieces - 1
    return split_with_sizes(matrix, [padding.rows] * before + [matrix.shape[0] - padding.rows * before])


def _copied(matrix: torch.Tensor, rows: int, cols: int, turned: bool, depth_dim: int) -> torch.Tensor:
    """``matrix`` in the corner of a new ``[..., rows, cols]``; behind it zeros along ``depth_dim``, and anything elsewhere."""
    *leading, num_rows, num_cols = matrix.shape
    depth, num_depth = (rows, num_rows) if depth_dim == -2 else (cols, num_cols)
    if rows == num_rows and cols == num_cols:
        dense = torch.contiguous_format
        return matrix.mT.clone(memory_format=dense).mT if turned else matrix.clone(memory_format=dense)
    if depth != num_depth and matrix.numel() * matrix.element_size() < SMALL_BYTES:
        if turned:
            return constant_pad_nd(matrix.mT, (0, rows - num_rows, 0, cols - num_cols)).mT
        return constant_pad_nd(matrix, (0, cols - num_cols, 0, rows - num_rows))
    copy = matrix.new_empty((*leading, cols, rows)).mT if turned else matrix.new_empty((*leading, rows, cols))
    copy.as_strided(matrix.shape, copy.stride()).copy_(matrix)
    if depth != num_depth:
        copy.narrow(depth_dim, num_depth, depth - num_depth).zero_()
    return copy


def _product(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    if left.dim() > 2:
        return torch.matmul(left, right)
    return torch.mm(left, right, out=out) if bias is None else torch.addmm(bias, left, right, out=out)

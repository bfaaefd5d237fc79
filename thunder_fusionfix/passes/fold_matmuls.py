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
512 rows. The result is always dense and row-major, as ATen's is without grad.

Invariants: no way reads the device, so a CUDA graph can record it; the way depends on shapes, strides, dtype and the limit alone.
Where autograd records, ATen's own path runs.

Stage: the operators of the executor entry; `thunder_fusionfix.executor` registers them. Needs: tensors of one dtype. Keeps: shapes,
dtypes, row-major results. Changes: the order of sums, within ATen's own spread between ``mm`` and ``bmm``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod

import torch
from torch.nn.functional import linear as aten_linear

from thunder_fusionfix.effects import short_name
from thunder_fusionfix.layout import Shape, Strides, view_strides
from thunder_fusionfix.model import Decision, Graph, Value

NAME = "fold_matmuls"
LINEAR, MATMUL = "fusionfix_linear", "fusionfix_matmul"

COPY_LIMIT = 128 * 2**20
"""Bytes that a fold may copy at most. A copy is only ever chosen where both leading dims are short, so real ones stay below."""

# ---------------------------------------------------------------- the price
#
# Measured on one H200, torch 2.11, without bias (ms):
#
#     x                        strides of            dtype  w              bmm     mm of the folded x   chosen
#     [33600, 1, 2056]         a unit dim in front   fp16   [4112, 2056]   79.9    0.88                 VIEW
#     [2100, 1, 2056]          a unit dim in front   fp16   [4112, 2056]   5.11    0.08-0.10            VIEW
#     [64, 512, 1024]          sequence first        fp16   [4096, 1024]   0.45    0.52                 ATEN, 64 products
#
# `benchmarks/linear_table.py` prints these rows again, and more of the same kind.

MIN_ROWS = 96
"""Rows that a product costs at least, per index of the batch. From the first row: 79.9 / 0.88 = 91."""

TILE_ROWS = 64
"""Rows come in tiles of the kernel: the smallest that cuBLAS uses for these shapes."""

FLOPS_PER_BYTE = {2: 350.0, 4: 25.0, 8: 20.0}
"""By bytes of an element: multiply-adds that a product does while a copy moves one byte. From the third row: the copy of 134 MB
took 0.07 ms, 1.9 TB/s, beside 2.7e14 / 0.45 ms = 6.1e14 operations a second."""

LAUNCH = 8e6
"""Bytes that a copy moves in the 4 microseconds that one more kernel costs: what is small stays one kernel."""

COPY_MUST_WIN = 0.9
"""A copy takes memory as well as time, so it must be at least this much faster than the best way without one."""


class Way(Enum):
    """How one product is done."""

    ATEN = "aten"
    VIEW = "view"
    BATCH = "batch"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class Choice:
    """One way, with what it needs to be run."""

    way: Way
    outer: int = 1  # for BATCH: the leading dims are viewed as [outer, inner]
    inner: int = 1
    swapped: bool = False  # for BATCH: one product per index of inner instead of outer


ATEN = Choice(Way.ATEN)


def aten_folds(shape: Shape, strides: Strides) -> bool:
    """True where ATen runs one ``mm`` without a copy, whatever ``w`` is: its own rule, unit dims included.

    >>> aten_folds((4, 3, 5), (15, 5, 1)), aten_folds((4, 1, 5), (5, 20, 1))
    (True, False)
    """
    for dim in range(len(shape) - 2):
        if strides[dim] != strides[dim + 1] * shape[dim + 1]:
            return False
    return True


@lru_cache(maxsize=4096)
def choose(
    shape: Shape,
    strides: Strides,
    num_out: int,
    itemsize: int,
    has_bias: bool,
    copy_limit: int,
    transposed: bool = False,
) -> Choice:
    """The cheapest way to multiply ``x`` of this shape and these strides with a ``[K, num_out]`` matrix.

    Args:
        shape: of ``x``, three dims or more, ``[..., rows, K]``.
        strides: of ``x``, in elements.
        num_out: columns of the other matrix.
        itemsize: bytes of an element.
        has_bias: a bias is added: for nothing in a folded product, by a pass over the output otherwise.
        copy_limit: bytes that a copy of ``x`` may take.
        transposed: the caller wants the result with its last two dims swapped and row-major: ``w[N, K] @ x.mT``.

    >>> choose((33600, 1, 2056), (2056, 69081600, 1), 4112, 2, False, COPY_LIMIT).way
    <Way.VIEW: 'view'>
    >>> choose((64, 512, 1024), (1024, 65536, 1), 4096, 2, False, COPY_LIMIT).way
    <Way.ATEN: 'aten'>
    >>> choose((512, 8, 1024), (1024, 524288, 1), 4096, 2, False, COPY_LIMIT)
    Choice(way=<Way.BATCH: 'batch'>, outer=512, inner=8, swapped=True)
    >>> choose((40, 40, 1024), (1024, 40960, 1), 4096, 2, False, COPY_LIMIT).way
    <Way.COPY: 'copy'>
    """
    *leading, depth = shape
    rows = prod(leading)
    if rows == 0 or depth == 0 or num_out == 0:
        return ATEN
    price = _Price(depth, num_out, itemsize, has_bias)
    aten, aten_copies = price.aten(shape, strides)
    turns = transposed and shape[-2] != 1  # a folded product is then copied into the order that the caller wants
    turning = price.output_pass(rows) if turns else 0.0
    if turns and rows * num_out * itemsize > copy_limit:
        return ATEN

    # the first of equals is taken: what copies nothing first
    ways: list[tuple[float, Choice]] = []
    folded = view_strides(shape, strides, (rows, depth))
    if folded is not None:
        ways.append((price.folded(rows, folded) + turning, Choice(Way.VIEW)))
    ways.append((aten, ATEN))
    if not transposed:
        ways += price.batches(shape, strides)
    if folded is None and (aten_copies or rows * depth * itemsize <= copy_limit):
        copied = price.copy(rows) + price.products(1, rows) + turning
        ways.append((copied / (1.0 if aten_copies else COPY_MUST_WIN), Choice(Way.COPY)))
    return min(ways, key=lambda way: way[0])[1]


@dataclass(frozen=True, slots=True)
class _Price:
    """Prices in bytes that a copy would move in the same time."""

    depth: int
    num_out: int
    itemsize: int
    has_bias: bool

    def products(self, batch: int, rows: int) -> float:
        """``batch`` products with ``rows`` rows each."""
        tiled = max(MIN_ROWS, -(-rows // TILE_ROWS) * TILE_ROWS)
        return 2.0 * batch * tiled * self.depth * self.num_out / FLOPS_PER_BYTE.get(self.itemsize, 20.0)

    def copy(self, rows: int) -> float:
        """A copy of ``rows`` rows of the input: read and written."""
        return LAUNCH + 2.0 * rows * self.depth * self.itemsize

    def output_pass(self, rows: int) -> float:
        """One pass over the output: read and written."""
        return LAUNCH + 2.0 * rows * self.num_out * self.itemsize

    def folded(self, rows: int, strides: Strides) -> float:
        """One product over a view; ``mm`` copies what BLAS cannot read in place."""
        return self.products(1, rows) + (0.0 if _blas_reads(rows, self.depth, *strides) else self.copy(rows))

    def batched(self, batch: int, rows: int, strides: Strides) -> float:
        """``batch`` products over a view whose rows and columns have ``strides``, and the bias."""
        reads = _blas_reads(rows, self.depth, *strides)
        bias = self.output_pass(batch * rows) if self.has_bias else 0.0
        return self.products(batch, rows) + bias + (0.0 if reads else self.copy(batch * rows))

    def aten(self, shape: Shape, strides: Strides) -> tuple[float, bool]:
        """ATen's way without grad, and whether it copies the input."""
        batch, rows = prod(shape[:-2]), shape[-2]
        merges = view_strides(shape, strides, (batch, rows, self.depth))
        inner = merges[1:] if merges is not None else (self.depth, 1)
        price = self.batched(batch, rows, inner) + (0.0 if merges is not None else self.copy(batch * rows))
        return price, merges is None or not _blas_reads(rows, self.depth, *inner)

    def batches(self, shape: Shape, strides: Strides) -> list[tuple[float, Choice]]:
        """Every way to see the leading dims as two dims, and to take either as the batch."""
        found = []
        for split in range(1, len(shape) - 1):
            outer, inner = prod(shape[:split]), prod(shape[split:-1])
            merged = view_strides(shape, strides, (outer, inner, self.depth))
            if merged is None or 1 in (outer, inner):
                continue
            if split < len(shape) - 2:  # else this is ATen's way
                found.append((self.batched(outer, inner, merged[1:]), Choice(Way.BATCH, outer, inner)))
            by_inner = (merged[0], merged[2])
            found.append((self.batched(inner, outer, by_inner), Choice(Way.BATCH, outer, inner, swapped=True)))
        return found


def _blas_reads(rows: int, depth: int, row_stride: int, depth_stride: int) -> bool:
    """True where BLAS takes a ``[rows, depth]`` matrix with these strides as it lies, plain or transposed."""
    plain = depth_stride == 1 or depth == 1
    if plain and (rows == 1 or row_stride >= max(1, depth)):
        return True
    return (row_stride == 1 or rows == 1) and (depth == 1 or depth_stride >= max(1, rows))


# ---------------------------------------------------------------- the operators


def fusionfix_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, copy_limit: int = COPY_LIMIT
) -> torch.Tensor:
    """``torch.nn.functional.linear(x, w, bias)``, done in the cheapest of four ways; see the module."""
    if x.dim() < 3 or aten_folds(shape := x.shape, strides := x.stride()) or _left_to_aten(x):
        return aten_linear(x, w, bias)
    choice = choose(shape, strides, w.shape[0], x.element_size(), bias is not None, copy_limit)
    if choice.way is Way.ATEN:
        return aten_linear(x, _unfolded(w), bias)
    if choice.way is Way.BATCH:
        return _batch(x, w.t(), bias, choice)
    folded = x.view(-1, shape[-1]) if choice.way is Way.VIEW else x.reshape(-1, shape[-1])
    return aten_linear(folded, w, bias).view(*shape[:-1], w.shape[0])


def fusionfix_matmul(a: torch.Tensor, b: torch.Tensor, copy_limit: int = COPY_LIMIT) -> torch.Tensor:
    """``torch.matmul(a, b)`` of an N-D tensor with a 2-D one, done in the cheapest of four ways; see the module."""
    if a.dim() > 2 and b.dim() == 2:
        return _matmul_nd_2d(a, b, copy_limit)
    if a.dim() == 2 and b.dim() > 2:
        return _matmul_2d_nd(a, b, copy_limit)
    return torch.matmul(a, b)


def _matmul_nd_2d(x: torch.Tensor, w: torch.Tensor, copy_limit: int) -> torch.Tensor:
    if aten_folds(shape := x.shape, strides := x.stride()) or _left_to_aten(x):
        return torch.matmul(x, w)
    choice = choose(shape, strides, w.shape[1], x.element_size(), False, copy_limit)
    if choice.way is Way.ATEN:
        return torch.matmul(x, _unfolded(w))
    if choice.way is Way.BATCH:
        return _batch(x, w, None, choice)
    folded = x.view(-1, shape[-1]) if choice.way is Way.VIEW else x.reshape(-1, shape[-1])
    return torch.mm(folded, w).view(*shape[:-1], w.shape[1])


def _matmul_2d_nd(w: torch.Tensor, x: torch.Tensor, copy_limit: int) -> torch.Tensor:
    """``w[N, K] @ x[..., K, cols]``: the transposed product, folded where the columns of each are few."""
    if _left_to_aten(x):
        return torch.matmul(w, x)
    turned = x.mT
    choice = choose(turned.shape, turned.stride(), w.shape[0], x.element_size(), False, copy_limit, transposed=True)
    if choice.way is Way.ATEN:
        return torch.matmul(_unfolded(w), x)
    folded = turned.view(-1, w.shape[1]) if choice.way is Way.VIEW else turned.reshape(-1, w.shape[1])
    return torch.mm(folded, w.t()).view(*turned.shape[:-1], w.shape[0]).mT.contiguous()


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
    return out.view(*shape[:-1], num_out)


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
        if short_name(op.id) in (LINEAR, MATMUL):
            by_reason.setdefault(_why(op.inputs, graph), []).append(pos)
    return tuple(
        Decision(NAME, found[0], graph.ops[found[0]].id, _what(found, graph), why, applied=True)
        for why, found in by_reason.items()
    )


def _what(found: list[int], graph: Graph) -> str:
    """How many products, and the first few."""
    shapes = [
        " @ ".join(str(list(graph.values[name].shape or ())) for name in graph.ops[pos].inputs[:2]) for pos in found
    ]
    distinct = list(dict.fromkeys(shapes))
    more = f" and {len(distinct) - 3} more" if len(distinct) > 3 else ""
    return f"{len(found)} product(s) choose their kernel at run time: {', '.join(distinct[:3])}{more}"


def _why(names: tuple[str, ...], graph: Graph) -> str:
    matrix = next((name for name in names if len(graph.values[name].shape or ()) == 2), None)
    if matrix is not None and matrix in graph.producer:
        made_by = short_name(graph.ops[graph.producer[matrix]].id)
        return f"the 2-D tensor is made by {made_by} and never requires grad: ATen folds no tensor with gaps"
    return "the 2-D tensor is an argument: ATen folds if it requires grad, whatever the copy costs, and else not"


def worst_copy_bytes(value: Value, copy_limit: int) -> int:
    """Bytes that a fold of ``value`` copies at most; 0 where it is larger than the limit, so that no fold copies it."""
    nbytes = value.nbytes or 0
    return nbytes if nbytes <= copy_limit else 0

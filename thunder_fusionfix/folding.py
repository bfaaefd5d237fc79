"""Which way to multiply an N-D tensor with a 2-D one is the cheapest: a price on shapes and strides alone.

`thunder_fusionfix.passes.fold_matmuls` has the four ways and runs them; `thunder_fusionfix.matmul_copies` asks what they copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod

from thunder_fusionfix.layout import Shape, Strides, view_strides

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

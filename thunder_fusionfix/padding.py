"""Whether a matrix product whose rows do not start at multiples of 16 bytes is faster with its operands padded, and how.

The trap. Tensor cores read and write rows in pieces of 16 bytes. A product of 2-byte elements with an inner size of 28, 2050 or
50257 is left by cuBLAS to kernels that run up to seven times slower. What has to be a multiple of 8 is, as BLAS sees them, the dim
of each operand and of the output that lies densely, and its leading dimension; the other dim may be anything, so a transposed view
has needs of its own. Strides alone do not help: a K of 28 in rows of 32 elements is as slow as one in rows of 28.

The cure copies into a padded buffer what is misaligned, and nothing else:

    dim    padded where                                       with               costs
    K      it lies densely in an operand                      zeros, both sides  a copy of both operands
    N      it lies densely in the right operand or the output anything           a copy of the right operand, one of the output
    M      it lies densely in the left operand                anything           a copy of the left operand; of a 2-D output the
                                                                                 rows that are cut stand behind the others

A large right operand that lies well by itself is not copied: the last N % 8 columns of the output are a product of their own, and so are
the last K % 8 terms of the sums, to which the others are added.

Zeros meet zeros, so infinities and NaNs stay where they were. What stands in padded columns and rows is cut off with them. Products
of two matrices are done a few rows at a time where copies would be large: the right operand is copied once, if at all, and then each
piece of the left one and of the output, so that nothing of the size of logits is ever held twice, but for those of a few tokens.

The price is a roofline with the constants below; what is not clearly faster stays as it is. Everything here is arithmetic on shapes
and strides: `thunder_fusionfix.products` runs the products, `thunder_fusionfix.passes.pad_matmuls` says which are looked at, and
`thunder_fusionfix.simulate` counts the copies. Source: Inductor's pad_mm pads the same products, by timing both ways at compile time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from thunder_fusionfix.layout import Shape, Strides

ALIGNED = 8
"""Elements of 2 bytes in 16 bytes. Wider ones gain nothing: in float32 a padded product took 0.98-1.18 of the time."""

PAD_LIMIT = 256 * 2**20
"""Bytes that the copies of one product may take at any moment. Logits are larger, so they are copied in pieces."""

FRUGAL_LIMIT = 16 * 2**20
"""The same where the user asked for memory. The estimates count it."""

PIECE_BYTES = 64 * 2**20
"""Bytes of the copies of one piece: the left operand's rows and the output's. With 32, 64 and 128 MiB the first three rows of the table
below take 0.267, 0.303, 0.257; 0.256, 0.248, 0.240; and 0.250, 0.235, 0.235 ms."""

WHOLE_BYTES, WHOLE_ROWS = 128 * 2**20, 2048
"""Copies of up to so many bytes are made at once where the left operand has at most so many rows in memory: the first three rows of the
table, fastest with 128 MiB. They take the GPU a quarter of a millisecond each, and a small model's step waits for the host, to which
every further piece is two or three launches. The memory is no more than their loss holds in its backward: logits and their gradient."""

SPLIT_BYTES = 8 * 2**20
"""A right operand from this size on is not copied for the sake of a few columns of the output, or of K: these are done apart. With
the copy the first two rows of the table take 0.294 and 0.291 ms instead of 0.256 and 0.248, and 77 MB more."""

ROWS = 128
"""Rows of a piece are a multiple of this: whole tiles."""

MUST_WIN = 0.85
"""A padded product takes memory as well as time, so it must be at least this much faster by estimate."""

# ---------------------------------------------------------------- the price
#
# Measured on one H200, torch 2.11, bf16 (ms); "aligned" is the product alone, of operands that were padded before:
#
#     left              right             what is misaligned         plain    aligned   copies
#     [1024, 768]       [768, 50257]^T    the output's N             0.843    0.123     0.041 right, 0.118 output
#     [1024, 50257]     [50257, 768]      K of the left              0.616    0.117     0.118 left, 0.041 right
#     [50257, 1024]^T   [1024, 768]       M of the left              0.576    0.115     0.118 left
#     [8192, 2050]      [2050, 2050]^T    K of both, N; all even     0.336    0.106     0.042 left, 0.009 right, 0.041 output
#     [8192, 2052]      [2052, 4100]^T    the same; by 4             0.565    0.210     0.041 left, 0.017 right, 0.078 output
#     [4096, 28]        [28, 152064]^T    K of both                  0.680    0.379     0.003 left, 0.009 right
#     [65536, 300]      [300, 300]^T      K of both, N               0.101    0.031     0.048 left, 0.003 right, 0.048 output
#     28 x [4096, 1]    [1, 4096]^T       K of both                  0.740    0.280     0.003 each
#     28 x [4096, 4096] [4096, 28]        N                          0.369    0.237     0.008 right, 0.007 output
#     28 x [4096, 4096] [4096, 1]         N of 1                     0.220    0.224     (a matrix times a vector: never padded)
#
# `benchmarks/padded_products.py` prints such rows again; tests/test_padding.py holds the decisions for all that were measured.

MISALIGNED_FLOPS_PER_MS = {1: 145e9, 2: 220e9, 4: 250e9}
"""By the largest power of 2 that divides the worst size: rows 1-3, 4 and 5 (94-137, 205 and 215-244), rounded against padding."""

ALIGNED_FLOPS_PER_MS = 650e9
"""Rows 1-5: 640-690."""

MISALIGNED_READ_BYTES_PER_MS, MISALIGNED_WRITE_BYTES_PER_MS = 2.75e9, 2.2e9
"""What a misaligned product reads (row 9, the left operand) and writes (rows 6 and 8, the output, beside its sums) at most."""

ALIGNED_BYTES_PER_MS = 4.0e9
"""What an aligned product reads and writes; of 4.8e9 by data sheet."""

COPY_BYTES_PER_MS, DENSE_COPY_BYTES_PER_MS = 1.75e9, 3.75e9
"""What a copy into rows of another length moves, and one into rows of the same length (the right operand of row 1)."""

LAUNCH_MS = 0.002
"""What one more kernel takes at least: the smallest copies took 0.0019-0.0029."""

TILE, PROCESSORS = 64, 132
"""Kernels work on tiles of at least so many rows and columns; as many of 4 tiles at once as the GPU has processors."""

LEAST_FILL = {False: 0.75, True: 0.25}
"""Share of the full speed that a product with few tiles keeps, for a misaligned one and an aligned one.
From [513, 8192] @ [8192, 513]: 0.0485 and 0.0238-0.0262 ms, 89 and 165-180 of the full 145e9 and 650e9, tiles included."""

SPLIT_DEPTH = 4096
"""Sums as long as this are done by several processors each: [1024, 50257] @ [50257, 768], 48 of 132, ran at full speed."""


@dataclass(frozen=True, slots=True)
class Padding:
    """How one product is padded: sizes after padding, and what is copied."""

    rows: int  # M, of one piece where there are several
    depth: int  # K; less than it was where the rest is done apart
    cols: int  # N; likewise
    left: bool  # the left operand is copied
    right: bool  # the right operand is copied
    left_turned: bool  # the left operand's rows lie densely, not its columns; so does its copy
    right_turned: bool
    nbytes: int  # that are alive at once besides operands and result: copies, and the output before it is cut
    pieces: int = 1  # of two matrices: how many times `rows` it takes


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One operand as BLAS takes it."""

    rows: int
    cols: int
    turned: bool  # its rows lie densely
    is_read_in_place: bool
    has_odd_lead: bool  # its leading dimension is no multiple of `ALIGNED`

    @property
    def dense(self) -> int:
        return self.rows if self.turned else self.cols


def up(size: int) -> int:
    """The next multiple of `ALIGNED`.

    >>> up(28), up(32)
    (32, 32)
    """
    return -(-size // ALIGNED) * ALIGNED


def _matrix(shape: Shape, strides: Strides) -> _Matrix:
    """How BLAS takes the last two dims: plain, transposed, or as a dense copy; by ATen's rules."""
    rows, cols = shape[-2:]
    row_stride, col_stride = strides[-2:]
    plain = (col_stride == 1 or cols == 1) and row_stride >= max(1, cols)
    turned = (row_stride == 1 or rows == 1) and col_stride >= max(1, rows)
    if plain and turned:  # one row or column: taken for whatever is aligned, so that nothing is padded for nothing
        turned = not rows % ALIGNED and bool(cols % ALIGNED)
        plain = not turned
    if plain:
        return _Matrix(rows, cols, False, True, rows > 1 and bool(row_stride % ALIGNED))
    if turned:
        return _Matrix(rows, cols, True, True, cols > 1 and bool(col_stride % ALIGNED))
    return _Matrix(rows, cols, False, False, bool(cols % ALIGNED))


@lru_cache(maxsize=4096)
def choose_padding(
    left: Shape, left_strides: Strides, right: Shape, right_strides: Strides, limit: int = PAD_LIMIT, itemsize: int = 2
) -> Padding | None:
    """How ``left @ right`` is padded; None where it is not.

    Args:
        left: ``[..., M, K]``.
        left_strides: in elements.
        right: ``[..., K, N]`` with the same leading dims.
        right_strides: in elements.
        limit: bytes that all copies may take at one moment.
        itemsize: bytes of an element; only 2 is ever padded.

    >>> choose_padding((8192, 768), (768, 1), (768, 50257), (1, 768)).cols
    50256
    >>> choose_padding((4096, 28), (28, 1), (28, 18944), (1, 28)).depth
    32
    >>> choose_padding((4096, 28), (28, 1), (28, 28), (1, 28)) is None  # a launch costs more
    True
    >>> choose_padding((4096, 18944), (18944, 1), (18944, 32), (1, 18944)) is None  # nothing is misaligned
    True
    """
    (rows, depth), cols, batch = left[-2:], right[-1], prod(left[:-2])
    if itemsize != 2 or not limit or 0 in (batch, rows, depth, cols) or 1 in (rows, cols) or left[:-2] != right[:-2]:
        return None
    padding = pad_what_is_misaligned(left, left_strides, right, right_strides, limit, itemsize)
    if padding is None or padding.nbytes > limit:
        return None
    price = _Price(batch, rows, depth, cols, _matrix(left, left_strides), _matrix(right, right_strides), itemsize)
    return padding if price.padded(padding) <= MUST_WIN * price.plain() else None


def pad_what_is_misaligned(
    left: Shape, left_strides: Strides, right: Shape, right_strides: Strides, limit: int = PAD_LIMIT, itemsize: int = 2
) -> Padding | None:
    """The padding that aligns ``left @ right``, whatever it costs; None where nothing is misaligned.

    >>> pad_what_is_misaligned((6, 5), (5, 1), (5, 16), (16, 1))
    Padding(rows=6, depth=8, cols=16, left=True, right=True, left_turned=False, right_turned=False, nbytes=352, pieces=1)
    """
    a, b = _matrix(left, left_strides), _matrix(right, right_strides)
    (rows, depth), cols, batch = left[-2:], right[-1], prod(left[:-2])
    pads_depth = bool(depth % ALIGNED) and (b.turned or not a.turned)
    pads_cols = bool(cols % ALIGNED)  # the output is row-major: its N lies densely
    pads_rows = a.turned and bool(rows % ALIGNED)
    takes_left = pads_depth or pads_rows or a.has_odd_lead
    takes_right = pads_depth or pads_cols or b.has_odd_lead
    if not (takes_left or takes_right):
        return None
    m, k, n = (up(size) if pads else size for size, pads in ((rows, pads_rows), (depth, pads_depth), (cols, pads_cols)))
    splits = False
    if len(left) == 2 and not b.has_odd_lead and itemsize * depth * cols >= SPLIT_BYTES:
        if pads_cols and not pads_depth and b.turned and cols > ALIGNED:
            splits, n = True, cols - cols % ALIGNED
        elif pads_depth and not pads_cols and b.is_read_in_place and not b.turned and depth >= max(rows, ALIGNED):
            splits, k = True, depth - depth % ALIGNED
    takes_right = takes_right and not splits
    cuts_output = n != cols or (m != rows and len(left) > 2)
    per_row = itemsize * (k * takes_left + n * cuts_output)
    right_bytes = itemsize * batch * k * n * takes_right
    pieces, nbytes = 1, right_bytes + batch * m * per_row
    is_short = (depth if a.turned else rows) <= WHOLE_ROWS
    most = min(WHOLE_BYTES if is_short else PIECE_BYTES, limit - right_bytes)
    if len(left) == 2 and m * per_row > most:
        most = min(most, PIECE_BYTES)
        pieces = -(-m // max(most // per_row // ROWS * ROWS, ROWS))
        m = -(-m // (pieces * ROWS)) * ROWS
        pieces, nbytes = -(-rows // m), right_bytes + m * per_row
    elif cuts_output and not splits:  # the result is made when the operands' copies are gone
        uncut = itemsize * batch * m * n
        nbytes = max(nbytes - itemsize * batch * rows * cols, uncut)
    return Padding(m, k, n, takes_left, takes_right, a.turned, b.turned, nbytes, pieces)


def may_pad(left: Shape, right: Shape, limit: int = PAD_LIMIT) -> bool:
    """True where some layout of dense operands would be padded: what is known before strides are.

    >>> may_pad((1, 4096, 3584), (3584, 3584)), may_pad((1024, 768), (768, 50257))
    (False, True)
    """
    if len(right) == 2:
        left = (prod(left[:-1]), left[-1])
    elif len(left) == 2:  # w @ x is x.mT @ w.mT, folded
        left, right = (prod(right[:-2]) * right[-1], left[1]), (left[1], left[0])
    sizes = (*left[-2:], right[-1])
    if all(size % ALIGNED == 0 for size in sizes):
        return False
    return any(
        choose_padding(left, left_strides, right, right_strides, limit) is not None
        for left_strides in layouts(left)
        for right_strides in layouts(right)
    )


def layouts(shape: Shape) -> tuple[Strides, Strides]:
    """Strides of a dense tensor of ``shape`` with its last dim densest, and with the one before it densest.

    >>> layouts((2, 3, 4))
    ((12, 4, 1), (12, 1, 3))
    """
    *leading, rows, cols = shape
    outer = [rows * cols * prod(leading[dim + 1 :]) for dim in range(len(leading))]
    return (*outer, cols, 1), (*outer, 1, rows)


@dataclass(frozen=True, slots=True)
class _Price:
    """Milliseconds of one product, plain and padded; see the table above."""

    batch: int
    rows: int
    depth: int
    cols: int
    left: _Matrix
    right: _Matrix
    itemsize: int

    def plain(self) -> float:
        """As it is: the sums, then the output, written in small pieces; or what is read, if that takes longer."""
        sizes = [self.left.dense, self.right.dense, self.cols]
        worst = min((size & -size for size in sizes if size % ALIGNED), default=4)
        flops = self._flops(self.rows, self.depth, self.cols, is_aligned=False)
        sums = flops / MISALIGNED_FLOPS_PER_MS[worst]
        output = self._bytes(self.rows, self.cols) / MISALIGNED_WRITE_BYTES_PER_MS
        inputs = self._bytes(self.rows, self.depth) + self._bytes(self.depth, self.cols)
        copies = sum(
            self._copy(matrix.rows, matrix.cols, is_dense=False)
            for matrix in (self.left, self.right)
            if not matrix.is_read_in_place
        )
        return max(sums + output, inputs / MISALIGNED_READ_BYTES_PER_MS, LAUNCH_MS) + copies

    def padded(self, padding: Padding) -> float:
        """The copies, the aligned product, and the cut."""
        rows, depth, cols = padding.rows, padding.depth, padding.cols
        flops = self._flops(rows, depth, cols, is_aligned=True)
        moved = self._bytes(rows, depth) + self._bytes(depth, cols) + self._bytes(rows, cols)
        product = padding.pieces * max(flops / ALIGNED_FLOPS_PER_MS, moved / ALIGNED_BYTES_PER_MS, LAUNCH_MS)
        pads_depth = depth > self.depth
        if padding.left:
            dense = rows if padding.left_turned else depth
            product += self._copy(self.rows, self.depth, is_dense=dense == self.left.dense)
            product += padding.pieces * LAUNCH_MS * (1 + pads_depth) - LAUNCH_MS
        if padding.right:
            dense = depth if padding.right_turned else cols
            product += self._copy(self.depth, self.cols, is_dense=dense == self.right.dense) + LAUNCH_MS * pads_depth
        if depth < self.depth:  # the last terms, and what is added to them
            product += LAUNCH_MS + 2 * self._bytes(self.rows, self.cols) / MISALIGNED_WRITE_BYTES_PER_MS
        if cols < self.cols:  # the last columns
            product += LAUNCH_MS + self._bytes(self.rows, self.depth) / MISALIGNED_READ_BYTES_PER_MS
        if cols != self.cols or (rows != self.rows and self.batch > 1):
            product += self._copy(self.rows, self.cols, is_dense=False) + LAUNCH_MS * (padding.pieces - 1)
        return product

    def _bytes(self, rows: int, cols: int) -> float:
        return float(self.itemsize * self.batch * rows * cols)

    def _copy(self, rows: int, cols: int, *, is_dense: bool) -> float:
        return LAUNCH_MS + 2 * self._bytes(rows, cols) / (DENSE_COPY_BYTES_PER_MS if is_dense else COPY_BYTES_PER_MS)

    def _flops(self, rows: int, depth: int, cols: int, *, is_aligned: bool) -> float:
        """Operations at full speed that take as long: whole tiles, in whole rounds, with what too few tiles leave idle."""
        tall, wide = (-(-size // TILE) for size in (rows, cols))
        rounds = self.batch * tall * wide / 4 / PROCESSORS * max(1, depth // SPLIT_DEPTH)
        fill = max(rounds, LEAST_FILL[is_aligned]) if rounds < 1 else rounds / -(-rounds // 1)
        return 2.0 * self.batch * tall * wide * TILE * TILE * depth / fill

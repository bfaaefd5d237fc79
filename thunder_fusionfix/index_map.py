"""What a chain of layout operations does, as one function from indices to elements, in a form that is unique.

Number the elements of a tensor in row-major order. A layout then is a function that gives, for each index of its
output, the number of an element of its source. For chains of permutes, slices, squeezes, broadcasts and most reshapes
it is a sum of digits: an output dim is split into factors (size, step), outermost first, and every step of a factor's
digit adds ``step``. With factors of size 1 left out, and neighbours merged that count on evenly, the factors are
unique: two chains do the same if and only if their maps are equal.

    >>> flipped = index_map(Permute((1, 0)), (2, 3))
    >>> flipped
    IndexMap(offset=0, dims=(((3, 1),), ((2, 3),)))
    >>> flat = compose(index_map(Reshape((6,)), (3, 2)), flipped)  # a transposed matrix, flattened
    >>> flat
    IndexMap(offset=0, dims=(((3, 1), (2, 3)),))
    >>> compose(index_map(Reshape((3, 2)), (6,)), flat) == flipped
    True

Some reshapes cut a factor where it has no seam (a transposed 4x6, flattened and cut into 8x3); they have no such map,
and `compose` says None. Hierarchical layouts with these laws of merging and composition are those of NVIDIA's CuTe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod

from thunder_fusionfix.layout import (
    CACHED,
    Broadcast,
    Contiguous,
    Layout,
    Permute,
    Reshape,
    Same,
    Shape,
    Slice,
    Squeeze,
    row_major,
)

Factor = tuple[int, int]
"""(size, step): a digit that counts to size, and what one step of it adds to the element's number."""


@dataclass(frozen=True)
class IndexMap:
    """From indices of an output to numbers of elements of a source."""

    offset: int  # the element at index 0, 0, ...
    dims: tuple[tuple[Factor, ...], ...]  # of each output dim: its factors, outermost first, merged, none of size 1

    @cached_property
    def shape(self) -> Shape:
        """Shape of the output."""
        return tuple(prod(size for size, _ in dim) for dim in self.dims)

    @cached_property
    def factors(self) -> tuple[Factor, ...]:
        """The factors of the output's own row-major numbering, merged."""
        return merged(factor for dim in self.dims for factor in dim)

    def is_identity(self, shape: Shape) -> bool:
        """True where the map leaves a source of ``shape`` as it is."""
        return self.offset == 0 and self.shape == shape and self.keeps_order(prod(shape))

    def keeps_order(self, numel: int) -> bool:
        """True where the output has the source's ``numel`` elements in the source's order, whatever its shape."""
        return self.offset == 0 and self.factors == (((numel, 1),) if numel > 1 else ())

    def number(self, index: Sequence[int]) -> int:
        """Number of the source element at ``index`` of the output."""
        result = self.offset
        for position, dim in zip(index, self.dims):
            for size, step in reversed(dim):
                position, digit = divmod(position, size)
                result += digit * step
        return result


def merged(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """``factors`` with those of size 1 left out and neighbours merged that count on evenly.

    >>> merged([(2, 12), (1, 7), (3, 4), (4, 1)])
    ((24, 1),)
    """
    result: list[Factor] = []
    for size, step in factors:
        if size == 1:
            continue
        if result and result[-1][1] == size * step:
            result[-1] = (result[-1][0] * size, step)
        else:
            result.append((size, step))
    return tuple(result)


@lru_cache(maxsize=CACHED)
def regrouped(shape: Shape, groups: tuple[tuple[int, ...], ...]) -> IndexMap:
    """The map that permutes the dims of ``shape`` and merges those of each group into one.

    >>> regrouped((2, 3, 4), ((0, 2), (1,))).shape
    (8, 3)
    """
    steps = row_major(shape)
    return made(0, [[(shape[dim], steps[dim]) for dim in group] for group in groups])


@lru_cache(maxsize=CACHED)
def ungrouped(shape: Shape, groups: tuple[tuple[int, ...], ...]) -> IndexMap:
    """The way back from ``regrouped(shape, groups)`` to ``shape``."""
    order = [dim for group in groups for dim in group]
    steps = row_major(tuple(shape[dim] for dim in order))
    factors = {dim: (shape[dim], step) for dim, step in zip(order, steps)}
    return made(0, [[factors[dim]] for dim in range(len(shape))])


def made(offset: int, dims: Iterable[Iterable[Factor]]) -> IndexMap:
    """The IndexMap of these factors; all maps to an empty output of one shape are one."""
    result = IndexMap(offset, tuple(merged(dim) for dim in dims))
    if 0 not in result.shape:
        return result
    return IndexMap(0, tuple(((size, 0),) if size != 1 else () for size in result.shape))


@lru_cache(maxsize=CACHED)
def index_map(layout: Layout, shape: Shape) -> IndexMap | None:
    """What ``layout`` does to a tensor of ``shape``; None where it does not fit the shape."""
    steps = row_major(shape)
    if isinstance(layout, (Same, Contiguous)):
        return made(0, [[factor] for factor in zip(shape, steps)])
    if isinstance(layout, Reshape):
        fits = prod(layout.shape) == prod(shape)
        return made(0, [[factor] for factor in zip(layout.shape, row_major(layout.shape))]) if fits else None
    if isinstance(layout, Permute):
        fits = sorted(layout.dims) == list(range(len(shape)))
        return made(0, [[(shape[dim], steps[dim])] for dim in layout.dims]) if fits else None
    if isinstance(layout, Squeeze):
        if any(not 0 <= dim < len(shape) or shape[dim] != 1 for dim in layout.dims):
            return None
        return made(0, [[(shape[dim], steps[dim])] for dim in range(len(shape)) if dim not in layout.dims])
    if isinstance(layout, Slice):
        return _sliced(layout, shape, steps)
    return _broadcast(layout, shape, steps)


def _sliced(layout: Slice, shape: Shape, steps: tuple[int, ...]) -> IndexMap | None:
    if not len(layout.starts) == len(layout.ends) == len(layout.steps) == len(shape):
        return None
    bounds = zip(layout.starts, layout.ends, layout.steps, shape)
    if any(not (0 <= start <= size and 0 <= end <= size and step > 0) for start, end, step, size in bounds):
        return None
    offset = sum(start * step for start, step in zip(layout.starts, steps))
    sizes = layout.shape_after(shape)
    return made(offset, [[(size, step * by)] for size, step, by in zip(sizes, steps, layout.steps)])


def _broadcast(layout: Broadcast, shape: Shape, steps: tuple[int, ...]) -> IndexMap | None:
    dims = layout.dims
    if len(dims) != len(shape) or any(not 0 <= dim < len(layout.shape) for dim in dims):
        return None
    if any(after <= before for before, after in pairwise(dims)):  # Thunder's prim asks for ascending dims
        return None
    factors = [(size, 0) for size in layout.shape]
    for source, dim in enumerate(dims):
        if shape[source] == layout.shape[dim]:
            factors[dim] = (shape[source], steps[source])
        elif shape[source] != 1:
            return None
    return made(0, [[factor] for factor in factors])


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a factor that moves within dims: each of ``size`` steps adds ``steps[j]`` to the index of dim j."""

    size: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refined:
    """An index map as one into the index space of its source instead of the numbers of its elements."""

    starts: tuple[int, ...]  # the index that the output's first element comes from
    dims: tuple[tuple[Piece, ...], ...]  # of each output dim: its pieces, outermost first


@lru_cache(maxsize=CACHED)
def refine(index: IndexMap, shape: Shape) -> Refined | None:
    """``index`` as a map into the index space of a source of ``shape``; None where a digit would carry over.

    >>> refine(IndexMap(4, (((2, 4),), ((3, 1),))), (3, 4))
    Refined(starts=(1, 0), dims=((Piece(size=2, steps=(1, 0)),), (Piece(size=3, steps=(0, 1)),)))
    """
    radix = row_major(shape)
    starts = _digits(index.offset, shape, radix)
    room = [size - 1 - start for size, start in zip(shape, starts)]
    dims = []
    for dim in index.dims:
        pieces: list[Piece] = []
        for factor in reversed(dim):
            for piece in _pieces(factor, shape, radix):
                room = [left - (piece.size - 1) * step for left, step in zip(room, piece.steps)]
                pieces.append(piece)
        dims.append(tuple(reversed(pieces)))
    return None if any(left < 0 for left in room) else Refined(starts, tuple(dims))


def _digits(number: int, shape: Shape, radix: tuple[int, ...]) -> tuple[int, ...]:
    """The index at which an element of this number stands; a step too long for the outermost dim stays there, uncut."""
    return tuple(number // step if dim == 0 else number // step % shape[dim] for dim, step in enumerate(radix))


def _pieces(factor: Factor, shape: Shape, radix: tuple[int, ...]) -> Iterator[Piece]:
    """A factor cut at the seams of ``shape``, innermost first."""
    size, step = factor
    while size > 1:
        digits = _digits(step, shape, radix)
        moving = [dim for dim, digit in enumerate(digits) if digit]
        fits = size
        if len(moving) == 1 and shape[moving[0]] % digits[moving[0]] == 0:
            fits = shape[moving[0]] // digits[moving[0]]  # as often as the step goes into the dim
        if not 1 < fits < size or size % fits:
            yield Piece(size, digits)  # whole; where it would carry, the caller sees that there is no room
            return
        yield Piece(fits, digits)
        size, step = size // fits, step * fits


@lru_cache(maxsize=CACHED)
def compose(outer: IndexMap, inner: IndexMap) -> IndexMap | None:
    """``inner``, then ``outer``, as one map; None where there is none.

    ``outer`` numbers the elements of ``inner``'s output.
    """
    if prod(outer.shape) == 0:
        return outer
    factors = inner.factors
    refined = refine(outer, tuple(size for size, _ in factors))
    if refined is None:
        return None
    steps = [step for _, step in factors]
    offset = inner.offset + sum(start * step for start, step in zip(refined.starts, steps))
    return made(
        offset,
        [[(piece.size, sum(a * b for a, b in zip(piece.steps, steps))) for piece in dim] for dim in refined.dims],
    )

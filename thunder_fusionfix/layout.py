"""Layout operations as data: what each does to a shape, to strides, and whether torch makes a view of it or a copy.

A layout operation gives the same elements under another index map. Whether that is free depends on strides, and one cached
trace serves inputs of several strides, so there are three answers: a view for certain, a copy for certain, not known.

    >>> chain = (Slice((0, 0), (4, 2), (1, 1)), Reshape((8,)))
    >>> layout = chain[0]; layout.shape_after((4, 3)), layout.strides_after((4, 3), (3, 1))
    ((4, 2), (3, 1))
    >>> chain[1].view((4, 2), (3, 1)), chain[1].view((4, 2), (2, 1)), chain[1].view((4, 2), None)
    (<Viewed.NO: 'copy'>, <Viewed.YES: 'view'>, <Viewed.UNKNOWN: 'unknown'>)

The stride rule of `Reshape` is the one of ``torch.Tensor.view``: every group of input dims that a group of output dims is made
from must itself be contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod

from thunder_fusionfix.effects import is_layout, short_name
from thunder_fusionfix.model import Arg, Op, Ref, Value, kept_with_op

CACHED = 1 << 14  # layers repeat: a trace has few shapes and layouts, and asks for them thousands of times

Shape = tuple[int, ...]
Strides = tuple[int, ...]


class Viewed(Enum):
    """Whether torch gives a view."""

    YES = "view"
    NO = "copy"
    UNKNOWN = "unknown"


@lru_cache(maxsize=CACHED)
def row_major(shape: Shape) -> Strides:
    """Strides of a dense tensor of ``shape`` whose last dim varies fastest, in elements.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=CACHED)
def is_row_major(shape: Shape, strides: Strides) -> bool:
    """True where the elements lie densely in row-major order; strides of unit dims do not matter.

    >>> is_row_major((1, 3), (99, 1)), is_row_major((2, 3), (1, 2))
    (True, False)
    """
    if prod(shape) == 0:
        return True
    return all(size == 1 or stride == dense for size, stride, dense in zip(shape, strides, row_major(shape)))


@dataclass(frozen=True, slots=True)
class Same:
    """The tensor itself (``shallow_copy``, ``detach``)."""

    def shape_after(self, shape: Shape) -> Shape:
        return shape

    def strides_after(self, shape: Shape, strides: Strides | None) -> Strides | None:
        return strides

    def view(self, shape: Shape, strides: Strides | None) -> Viewed:
        return Viewed.YES


@dataclass(frozen=True, slots=True)
class Permute:
    """Output dim ``i`` is input dim ``dims[i]``."""

    dims: tuple[int, ...]

    def shape_after(self, shape: Shape) -> Shape:
        return tuple(shape[dim] for dim in self.dims)

    def strides_after(self, shape: Shape, strides: Strides | None) -> Strides | None:
        return None if strides is None else tuple(strides[dim] for dim in self.dims)

    def view(self, shape: Shape, strides: Strides | None) -> Viewed:
        return Viewed.YES


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``starts[d]:ends[d]:steps[d]`` of each dim ``d``."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    steps: tuple[int, ...]

    def shape_after(self, shape: Shape) -> Shape:
        return tuple(len(range(*bounds)) for bounds in zip(self.starts, self.ends, self.steps))

    def strides_after(self, shape: Shape, strides: Strides | None) -> Strides | None:
        return None if strides is None else tuple(stride * step for stride, step in zip(strides, self.steps))

    def view(self, shape: Shape, strides: Strides | None) -> Viewed:
        return Viewed.YES


@dataclass(frozen=True, slots=True)
class Squeeze:
    """Without the unit dims ``dims``."""

    dims: tuple[int, ...]

    def shape_after(self, shape: Shape) -> Shape:
        return tuple(size for dim, size in enumerate(shape) if dim not in self.dims)

    def strides_after(self, shape: Shape, strides: Strides | None) -> Strides | None:
        return None if strides is None else tuple(stride for dim, stride in enumerate(strides) if dim not in self.dims)

    def view(self, shape: Shape, strides: Strides | None) -> Viewed:
        return Viewed.YES


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Input dim ``i`` is output dim ``dims[i]`` of ``shape``; other dims, and unit dims, are repeated."""

    shape: Shape
    dims: tuple[int, ...]

    def shape_after(self, shape: Shape) -> Shape:
        return self.shape

    def strides_after(self, shape: Shape, strides: Strides | None) -> Strides | None:
        if strides is None:
            return None
        after = [0] * len(self.shape)
        for source, dim in enumerate(self.dims):
            after[dim] = strides[source] if shape[source] == self.shape[dim] else 0
        return tuple(after)

    def view(self, shape: Shape, strides: Strides | None) -> Viewed:
        return Viewed.YES

    def repeats(self, shape: Shape) -> bool:
        """True where an element of the input appears more than once: more than new unit dims."""
        return prod(self.shape) != prod(shape)


@dataclass(frozen=True, slots=True)
class Contiguous:
    """The same index map, with memory in the order ``order``: dim ``i`` is ``order[i]``-th from the innermost.

    None is row-major.
    """

    order: tuple[int, ...] | None = None

    def is_row_major(self, ndim: int) -> bool:
        return self.order is None or self.order == tuple(reversed(range(ndim)))

    def shape_after(self, shape: Shape) -> Shape:
        return shape

    def strides_after(self, shape: Shape, strides: Strides | None) -> Strides | None:
        if self.is_row_major(len(shape)):
            if strides is not None and is_row_major(shape, strides):
                return strides
            return row_major(shape)
        assert self.order is not None
        inner_first = sorted(range(len(shape)), key=lambda dim: self.order[dim])  # type: ignore[index]
        after, step = [0] * len(shape), 1
        for dim in inner_first:
            after[dim] = step
            step *= max(shape[dim], 1)
        return tuple(after)

    def view(self, shape: Shape, strides: Strides | None) -> Viewed:
        if strides is None:
            return Viewed.UNKNOWN
        if self.is_row_major(len(shape)):
            return Viewed.YES if is_row_major(shape, strides) else Viewed.NO
        return Viewed.YES if strides == self.strides_after(shape, None) else Viewed.NO


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same elements in row-major order under another shape."""

    shape: Shape

    def shape_after(self, shape: Shape) -> Shape:
        return self.shape

    def strides_after(self, shape: Shape, strides: Strides | None) -> Strides | None:
        if strides is None:
            return None
        viewed = view_strides(shape, strides, self.shape)
        return row_major(self.shape) if viewed is None else viewed

    def view(self, shape: Shape, strides: Strides | None) -> Viewed:
        if strides is None:
            same_but_units = [size for size in shape if size != 1] == [size for size in self.shape if size != 1]
            return Viewed.YES if same_but_units or prod(shape) <= 1 else Viewed.UNKNOWN
        return Viewed.NO if view_strides(shape, strides, self.shape) is None else Viewed.YES


Layout = Same | Permute | Slice | Squeeze | Broadcast | Contiguous | Reshape


def view_strides(shape: Shape, strides: Strides, new_shape: Shape) -> Strides | None:
    """Strides under which ``new_shape`` is a view of a tensor with ``shape`` and ``strides``; None where there is none.

    >>> view_strides((2, 3, 4), (12, 4, 1), (6, 4))
    (4, 1)
    >>> view_strides((2, 3, 4), (16, 4, 1), (6, 4)) is None
    True
    """
    if prod(new_shape) == 0:
        return row_major(new_shape)
    result = [0] * len(new_shape)
    out_dim = len(new_shape) - 1
    # walk input dims from the innermost; a chunk is a run of dims that are contiguous among themselves
    chunk_numel, chunk_stride = 1, strides[-1] if strides else 1
    for dim in reversed(range(len(shape))):
        chunk_numel *= shape[dim]
        joins_next = dim > 0 and (shape[dim - 1] == 1 or strides[dim - 1] == chunk_numel * chunk_stride)
        if joins_next:
            continue
        view_numel = 1
        while out_dim >= 0 and (view_numel < chunk_numel or new_shape[out_dim] == 1):
            result[out_dim] = view_numel * chunk_stride
            view_numel *= new_shape[out_dim]
            out_dim -= 1
        if view_numel != chunk_numel:
            return None
        if dim > 0:
            chunk_numel, chunk_stride = 1, strides[dim - 1]
    while out_dim >= 0:  # a 0-d input has no chunk
        result[out_dim] = 1
        out_dim -= 1
    return tuple(result)


def dim_groups(shape: Shape, new_shape: Shape) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """The finest pairs (input dims, output dims) whose sizes have equal products, outermost first.

    A dim alone on both sides is one that the reshape does not touch; unit dims join no group but stand alone, with nothing
    on the other side.

    >>> dim_groups((6, 5), (1, 2, 3, 5))
    (((), (0,)), ((0,), (1, 2)), ((1,), (3,)))
    """
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i, j = 0, 0
    while i < len(shape) or j < len(new_shape):
        if j < len(new_shape) and new_shape[j] == 1:
            groups.append(((), (j,)))
            j += 1
            continue
        if i < len(shape) and shape[i] == 1:
            groups.append(((i,), ()))
            i += 1
            continue
        left, right = [i], [j]
        left_numel, right_numel = shape[i], new_shape[j]
        while left_numel != right_numel:
            if left_numel < right_numel:
                i += 1
                left.append(i)
                left_numel *= shape[i]
            else:
                j += 1
                right.append(j)
                right_numel *= new_shape[j]
        groups.append((tuple(left), tuple(right)))
        i, j = i + 1, j + 1
    return tuple(groups)


def source_of(op: Op) -> str | None:
    """Name of the tensor that a layout op rearranges; None where it takes none (a broadcast number)."""
    first = op.args[0] if op.args else None
    return first.name if isinstance(first, Ref) else None


def layout_of(op: Op, values: Mapping[str, Value]) -> Layout | None:
    """The layout that ``op`` applies; None where it is no layout op or its arguments are not plain numbers that fit.

    Reads prims and the torch, ltorch and executor spellings that traces print. A torch spelling whose rule is not written
    here is read from the shapes of input and output where that is certain.
    """
    if not is_layout(op):
        return None
    source = source_of(op)
    if source is None or len(op.outputs) != 1:
        return None
    before, after = values.get(source), values.get(op.outputs[0])
    if before is None or after is None or before.shape is None or after.shape is None:
        return None
    return _layout_between(op, before.shape, after.shape)


@kept_with_op
def _layout_between(op: Op, before: Shape, after: Shape) -> Layout | None:
    layout = _as_written(op, before, after)
    return layout if layout is not None and _fits(layout, before, after) else None


_RESHAPES = frozenset(
    {"reshape", "view", "flatten", "unflatten", "ravel", "reshape_as", "view_as", "unsqueeze", "squeeze"}
)


def _as_written(op: Op, before: Shape, after: Shape) -> Layout | None:
    """The layout that the arguments of ``op`` name, whether or not it fits the shapes."""
    name = short_name(op.id)
    if name in ("shallow_copy", "detach", "alias", "fusionfix_after"):
        return Same()
    if name in ("transpose", "permute", "swapaxes", "swapdims"):
        dims = _permutation(op, name, len(before))
        return None if dims is None else Permute(dims)
    if name == "slice_prim":
        starts, ends, steps = _ints_at(op, 1), _ints_at(op, 2), _ints_at(op, 3) or (1,) * len(before)
        return None if starts is None or ends is None else Slice(starts, ends, steps)
    if name == "broadcast_in_dim":
        shape, dims = _ints_at(op, 1), _ints_at(op, 2)
        return None if shape is None or dims is None else Broadcast(shape, dims)
    if name == "squeeze" and op.id.startswith("prims."):
        dims = _ints_at(op, 1)
        return None if dims is None else Squeeze(dims)
    if name == "stride_order":
        return Contiguous(_ints_at(op, 1))
    if name == "contiguous":
        return Contiguous() if _is_plain_contiguous(op) else None
    if name in _RESHAPES:
        return Reshape(after)
    if name == "expand":
        return Broadcast(after, tuple(range(len(after) - len(before), len(after))))
    return None


def _fits(layout: Layout, before: Shape, after: Shape) -> bool:
    """True where ``layout`` applies to a tensor of shape ``before`` and gives one of shape ``after``.

    Traces that Thunder made always do; text that was typed or cut may say anything.
    """
    ndim = len(before)
    if isinstance(layout, Slice):
        if not len(layout.starts) == len(layout.ends) == len(layout.steps) == ndim or min(layout.steps, default=1) < 1:
            return False
    elif isinstance(layout, Squeeze):
        if any(not 0 <= dim < ndim or before[dim] != 1 for dim in layout.dims):
            return False
    elif isinstance(layout, Broadcast):
        if len(layout.dims) != ndim or any(not 0 <= dim < len(layout.shape) for dim in layout.dims):
            return False
        if any(size not in (1, layout.shape[dim]) for size, dim in zip(before, layout.dims)):
            return False
    elif isinstance(layout, Contiguous):
        if layout.order is not None and sorted(layout.order) != list(range(ndim)):
            return False
    elif isinstance(layout, Reshape) and prod(before) != prod(after):
        return False
    return layout.shape_after(before) == after


def _ints_at(op: Op, index: int) -> tuple[int, ...] | None:
    """The argument at ``index`` as a tuple of plain ints; None where there is none."""
    return _ints(op.args[index]) if index < len(op.args) else None


def _ints(arg: Arg) -> tuple[int, ...] | None:
    """The argument as a tuple of plain ints; None where it holds anything else."""
    if isinstance(arg, tuple) and all(isinstance(item, int) for item in arg):
        return arg  # type: ignore[return-value]
    return None


def _permutation(op: Op, name: str, ndim: int) -> tuple[int, ...] | None:
    """The dims of a transpose or permute: as one tuple, as separate ints, or as the two dims that are swapped."""
    dims = _ints(op.args[1]) if len(op.args) == 2 else _ints(op.args[1:])
    if dims is None:
        dims = _ints(op.kwarg("dims"))
    if dims is None:
        return None
    dims = tuple(dim % ndim for dim in dims) if ndim else dims
    if name != "permute" and not op.id.startswith("prims.") and len(op.args) == 3:
        swapped = list(range(ndim))
        swapped[dims[0]], swapped[dims[1]] = dims[1], dims[0]
        return tuple(swapped)
    return dims if sorted(dims) == list(range(ndim)) else None


def _is_plain_contiguous(op: Op) -> bool:
    """True for ``contiguous`` in row-major order; the printed trace hides other memory formats behind a name."""
    leaf = op.leaves[-1]
    if short_name(leaf.id) == "stride_order" and len(leaf.args) > 1:
        order = _ints(leaf.args[1])
        return order is not None and order == tuple(reversed(range(len(order))))
    return op.kwarg("memory_format") is None


def as_prim(layout: Layout, ndim: int) -> tuple[str, tuple[Arg, ...]]:
    """Thunder's prim for ``layout`` of a tensor with ``ndim`` dims, and its arguments after the tensor.

    >>> as_prim(Permute((1, 0)), 2)
    ('prims.transpose', ((1, 0),))
    """
    if isinstance(layout, Permute):
        return "prims.transpose", (layout.dims,)
    if isinstance(layout, Slice):
        return "prims.slice_prim", (layout.starts, layout.ends, layout.steps)
    if isinstance(layout, Squeeze):
        return "prims.squeeze", (layout.dims,)
    if isinstance(layout, Broadcast):
        return "prims.broadcast_in_dim", (layout.shape, layout.dims)
    if isinstance(layout, Contiguous):
        return "prims.stride_order", (layout.order or tuple(reversed(range(ndim))),)
    if isinstance(layout, Reshape):
        return "prims.reshape", (layout.shape,)
    return "prims.shallow_copy", ()

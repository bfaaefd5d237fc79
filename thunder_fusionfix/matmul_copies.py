"""What the entry's matmuls copy while they run: the operand that a fold copies, padded operands, an output before it is cut.

Where the strides of both operands are known this is what will be copied; where they are not, the most that it is over the dense
tensors that models make: leading dims in any order, or the last two dims swapped. It is memory of the op alone, as the temporaries of
a fusion region are. What ATen itself copies, with or without the entry, is not counted.

    >>> from thunder_fusionfix.model import Op, Ref, Value
    >>> op = Op("fusionfix_linear", (Ref("x"), Ref("w"), None, 2**27, 2**28), Ref("y"))
    >>> values = {"x": Value("x", (1, 1024, 768), "bf16", "cuda:0"), "w": Value("w", (50257, 768), "bf16", "cuda:0"),
    ...           "y": Value("y", (1, 1024, 50257), "bf16", "cuda:0")}
    >>> copies_of(op, values, {"x": (786432, 768, 1), "w": (768, 1)}).at_peak
    (('copies for y', 102924288),)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from math import prod

from thunder_fusionfix.effects import short_name
from thunder_fusionfix.folding import Way, aten_folds, choose
from thunder_fusionfix.layout import Shape, Strides, row_major, view_strides
from thunder_fusionfix.model import Graph, Op, Ref, Value
from thunder_fusionfix.padding import choose_padding, layouts
from thunder_fusionfix.segments import NOTHING, Temporaries

LINEAR, MATMUL = "fusionfix_linear", "fusionfix_matmul"
_MOST_DIMS = 5  # of a tensor whose dims are tried in every order


@dataclass(frozen=True, slots=True)
class Product:
    """One call of the entry's operators; see `passes.fold_matmuls`."""

    left: str
    right: str
    is_linear: bool  # the right operand is ``[N, K]``
    has_bias: bool
    copy_limit: int | None
    pad_limit: int


def product_of(op: Op) -> Product | None:
    """The product that ``op`` is; None where it is none of the entry's."""
    name = short_name(op.id)
    if name not in (LINEAR, MATMUL):
        return None
    left, right, *rest = op.args
    if not (isinstance(left, Ref) and isinstance(right, Ref)):
        return None
    bias = rest.pop(0) if name == LINEAR and rest else None
    copy_limit, pad_limit = (*rest, None, None)[:2]
    return Product(
        left.name,
        right.name,
        name == LINEAR,
        bias is not None,
        copy_limit if isinstance(copy_limit, int) else None,
        pad_limit if isinstance(pad_limit, int) else 0,
    )


def shapes_of(found: Sequence[int], graph: Graph) -> str:
    """The operands' shapes of the products at these positions, each once, the first few."""
    shapes = [
        " @ ".join(str(list(graph.values[name].shape or ())) for name in graph.ops[pos].inputs[:2]) for pos in found
    ]
    distinct = list(dict.fromkeys(shapes))
    more = f" and {len(distinct) - 3} more" if len(distinct) > 3 else ""
    return f"{', '.join(distinct[:3])}{more}"


def copies_of(op: Op, values: Mapping[str, Value], strides: Mapping[str, Strides | None]) -> Temporaries:
    """The memory that ``op`` needs for copies while it runs; nothing where it is none of the entry's products."""
    product = product_of(op)
    if product is None:
        return NOTHING
    left, right = values[product.left], values[product.right]
    if left.shape is None or right.shape is None or not left.itemsize:
        return NOTHING
    nbytes = _most(
        product,
        left.shape,
        strides.get(product.left),
        right.shape,
        strides.get(product.right),
        left.itemsize,
    )
    return Temporaries((), ((f"copies for {op.outputs[0]}", nbytes),)) if nbytes else NOTHING


@lru_cache(maxsize=4096)
def _most(
    product: Product,
    left: Shape,
    left_strides: Strides | None,
    right: Shape,
    right_strides: Strides | None,
    itemsize: int,
) -> int:
    """The most bytes that the product copies at one moment, over all strides that its operands may have."""
    if min(len(left), len(right)) < 2:
        return 0
    return max(
        _copied(product, left, one, right, other, itemsize)
        for one in _orders(left, left_strides)
        for other in _orders(right, right_strides)
    )


def _orders(shape: Shape, strides: Strides | None) -> Iterator[Strides]:
    """The strides; where they are not known, those of dense tensors with leading dims in any order or the last two swapped."""
    if strides is not None:
        yield strides
        return
    yield from layouts(shape)
    last = len(shape) - 1
    for leading in permutations(range(last)) if last < _MOST_DIMS else ():
        order = (*leading, last)
        dense = row_major(tuple(shape[dim] for dim in order))
        yield tuple(dense[order.index(dim)] for dim in range(len(shape)))


def _copied(
    product: Product, left: Shape, left_strides: Strides, right: Shape, right_strides: Strides, itemsize: int
) -> int:
    """Bytes that the product copies at one moment with these strides: as `passes.fold_matmuls` runs it."""
    if product.is_linear:
        right, right_strides = right[::-1], right_strides[::-1]
    limit, before = product.copy_limit, 0
    if len(left) > 2 and len(right) == 2:
        rows, num_out = prod(left[:-1]), right[1]
        folded = view_strides(left, left_strides, (rows, left[-1]))
        if not aten_folds(left, left_strides):
            if limit is None:
                return 0
            way = choose(left, left_strides, num_out, itemsize, product.has_bias, limit).way
            if way in (Way.ATEN, Way.BATCH):
                return 0
            if way is Way.COPY:
                before, folded = rows * left[-1] * itemsize, None
        left, left_strides = (rows, left[-1]), folded or (left[-1], 1)
    elif len(left) == 2 and len(right) > 2:
        if limit is None:
            return 0
        turned, turned_strides = _swapped(right), _swapped(right_strides)
        way = choose(turned, turned_strides, left[0], itemsize, False, limit, transposed=True).way
        if way is Way.ATEN:
            return 0
        rows = prod(turned[:-1])
        folded = view_strides(turned, turned_strides, (rows, turned[-1])) if way is Way.VIEW else None
        before = rows * turned[-1] * itemsize if folded is None else 0
        after = rows * left[0] * itemsize if right[-1] != 1 else 0  # the result, before it is turned
        left, right, right_strides = (rows, turned[-1]), left[::-1], left_strides[::-1]
        left_strides = folded or (turned[-1], 1)
        return max(before + _padded(product, left, left_strides, right, right_strides, itemsize), before + after)
    return before + _padded(product, left, left_strides, right, right_strides, itemsize)


def _padded(
    product: Product, left: Shape, left_strides: Strides, right: Shape, right_strides: Strides, itemsize: int
) -> int:
    padding = choose_padding(left, left_strides, right, right_strides, product.pad_limit, itemsize)
    return 0 if padding is None else padding.nbytes


def _swapped(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """``sizes`` with the last two swapped."""
    return (*sizes[:-2], sizes[-1], sizes[-2])

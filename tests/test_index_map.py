"""Laws of `index_map`: a map says what the layouts do, and one function has one map."""

from __future__ import annotations

import itertools
import random
from math import prod

import pytest

from thunder_fusionfix.index_map import IndexMap, compose, index_map, made, merged, refine, regrouped, ungrouped
from thunder_fusionfix.layout import Broadcast, Layout, Permute, Reshape, Same, Slice, Squeeze

Elements = tuple[tuple[int, ...], tuple[int, ...]]  # a shape, and the number of the source's element at each index


def indices(shape: tuple[int, ...]) -> itertools.product:
    return itertools.product(*map(range, shape))


def apply_slowly(layout: Layout, elements: Elements) -> Elements:
    """What ``layout`` does, index by index."""
    shape, numbers = elements
    at = dict(zip(indices(shape), numbers))
    after = layout.shape_after(shape)
    if isinstance(layout, Reshape):
        return after, numbers

    def source(index: tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(layout, Permute):
            return tuple(index[layout.dims.index(dim)] for dim in range(len(shape)))
        if isinstance(layout, Slice):
            return tuple(start + i * step for start, i, step in zip(layout.starts, index, layout.steps))
        if isinstance(layout, Broadcast):
            return tuple(index[dim] if shape[i] != 1 else 0 for i, dim in enumerate(layout.dims))
        if isinstance(layout, Squeeze):
            kept = iter(index)
            return tuple(0 if dim in layout.dims else next(kept) for dim in range(len(shape)))
        return index

    return after, tuple(at[source(index)] for index in indices(after))


def random_layout(rng: random.Random, shape: tuple[int, ...]) -> Layout:
    """A layout that fits ``shape``."""
    kind = rng.choice(("permute", "slice", "squeeze", "broadcast", "reshape", "reshape"))
    dims = list(range(len(shape)))
    if kind == "permute":
        return Permute(tuple(rng.sample(dims, len(dims))))
    if kind == "slice":
        bounds = [
            (rng.randint(0, size), size, rng.choice((1, 1, 2))) if rng.random() < 0.5 else (0, size, 1)
            for size in shape
        ]
        return Slice(*(tuple(one[i] for one in bounds) for i in range(3)))
    if kind == "squeeze":
        return Squeeze(tuple(dim for dim in dims if shape[dim] == 1 and rng.random() < 0.6))
    if kind == "broadcast":
        new = rng.randint(0, len(shape))
        out = [*shape[:new], rng.choice((1, 2, 3)), *shape[new:]]
        where = tuple(dim if dim < new else dim + 1 for dim in dims)
        for dim in dims:
            if shape[dim] == 1 and rng.random() < 0.4:
                out[where[dim]] = 3
        return Broadcast(tuple(out), where)
    return Reshape(random_shape(rng, prod(shape)))


def random_shape(rng: random.Random, numel: int) -> tuple[int, ...]:
    """A shape of ``numel`` elements."""
    if numel == 0:
        return rng.choice(((0,), (2, 0), (0, 3)))
    sizes = []
    while numel > 1 and rng.random() < 0.85:
        sizes.append(rng.choice([size for size in range(1, numel + 1) if numel % size == 0]))
        numel //= sizes[-1]
    return (*sizes, numel) if numel > 1 else tuple(sizes)


def test_chain_of_layouts_has_map_that_gives_its_elements() -> None:
    """Composing maps is doing one layout after the other."""
    rng = random.Random(0)
    num_composed = 0
    for _ in range(1500):
        shape = tuple(rng.choice((1, 2, 3, 4, 6)) for _ in range(rng.randint(0, 3)))
        elements: Elements = (shape, tuple(range(prod(shape))))
        whole = index_map(Same(), shape)
        for _ in range(rng.randint(1, 6)):
            if prod(elements[0]) > 500:
                break
            layout = random_layout(rng, elements[0])
            one = index_map(layout, elements[0])
            assert one is not None and whole is not None
            composed = compose(one, whole)
            if composed is None:
                break
            elements, whole = apply_slowly(layout, elements), composed
            assert whole.shape == elements[0]
            assert tuple(whole.number(index) for index in indices(whole.shape)) == elements[1], (layout, whole)
            num_composed += 1
    assert num_composed > 3000


def test_two_chains_that_do_the_same_have_one_map() -> None:
    """The map is unique, so equality of maps is equality of functions."""
    rng = random.Random(1)
    known: dict[tuple[tuple[int, ...], Elements], IndexMap] = {}
    num_met_again = 0
    for _ in range(3000):
        source = rng.choice(((6,), (2, 3), (4, 6), (2, 2, 3)))
        elements: Elements = (source, tuple(range(prod(source))))
        whole = index_map(Same(), source)
        for _ in range(rng.randint(1, 5)):
            layout = random_layout(rng, elements[0])
            one = index_map(layout, elements[0])
            assert one is not None and whole is not None
            composed = compose(one, whole)
            if composed is None or prod(composed.shape) > 200:
                break
            elements, whole = apply_slowly(layout, elements), composed
            num_met_again += (source, elements) in known
            assert known.setdefault((source, elements), whole) == whole
    assert num_met_again > 1000


def test_reshape_across_seam_has_no_map() -> None:
    """A transposed 4x6 flattened and cut into 8x3 is no sum of digits; cut into 6x4 it is the transpose again."""
    transposed = index_map(Permute((1, 0)), (4, 6))
    assert transposed is not None
    flat = index_map(Reshape((24,)), (6, 4))
    assert flat is not None
    whole = compose(flat, transposed)
    assert whole is not None
    cut, back = index_map(Reshape((8, 3)), (24,)), index_map(Reshape((6, 4)), (24,))
    assert cut is not None and back is not None
    assert compose(cut, whole) is None
    assert compose(back, whole) == transposed


@pytest.mark.parametrize(
    "layout, shape",
    [
        (Reshape((5,)), (2, 3)),
        (Permute((0, 0)), (2, 2)),
        (Squeeze((0,)), (2, 1)),
        (Slice((0,), (4,), (1,)), (3,)),
        (Slice((-1,), (3,), (1,)), (3,)),
        (Broadcast((2, 3), (0,)), (3,)),
        (Broadcast((3,), (0, 0)), (3, 1)),
    ],
)
def test_layout_that_does_not_fit_has_no_map(layout: Layout, shape: tuple[int, ...]) -> None:
    """A layout whose arguments do not fit the shape is not understood."""
    assert index_map(layout, shape) is None


def test_regrouped_and_ungrouped_are_inverse() -> None:
    """Merging dims in another order and taking them apart again changes nothing."""
    for groups in (((0, 2), (1,)), ((2,), (1,), (0,)), ((), (0, 1, 2)), ((1,), (0, 2))):
        there, back = regrouped((2, 3, 4), groups), ungrouped((2, 3, 4), groups)
        whole = compose(back, there)
        assert whole is not None and whole.is_identity((2, 3, 4))


def test_refine_refuses_digit_that_carries() -> None:
    """A step that leaves its dim would count on in the next one, so there is no map between index spaces."""
    assert refine(made(1, [[(3, 1)]]), (2, 4)) is not None
    assert refine(made(2, [[(3, 1)]]), (2, 4)) is None


def test_maps_to_nothing_are_one() -> None:
    """What selects no element has one form per shape, wherever it would have started."""
    assert made(5, [[(0, 3)], [(2, 1)]]) == made(0, [[(0, 1)], [(2, 7)]])


def test_merged_keeps_what_does_not_count_on() -> None:
    """Factors merge only where the outer one goes on where the inner one ends."""
    assert merged([(2, 3), (3, 1)]) == ((6, 1),)
    assert merged([(2, 4), (3, 1)]) == ((2, 4), (3, 1))

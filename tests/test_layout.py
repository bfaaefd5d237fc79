"""Layout ops as data, judged by torch's own views."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch
from helpers import GraphBuilder

from thunder_fusionfix.layout import (
    Broadcast,
    Contiguous,
    Permute,
    Reshape,
    Same,
    Slice,
    Squeeze,
    Viewed,
    as_prim,
    dim_groups,
    is_row_major,
    layout_of,
    row_major,
    view_strides,
)
from thunder_fusionfix.model import Const, Op, Ref, Value


def strided(rng: random.Random, most_dims: int = 4) -> torch.Tensor:
    """A tensor of up to ``most_dims`` dims: sliced, stepped, permuted or dense, of size 0 now and then."""
    ndim = rng.randint(0, most_dims)
    sizes = [rng.choice((0, 1, 2, 3)) if rng.random() < 0.1 else rng.choice((1, 2, 3, 4)) for _ in range(ndim)]
    tensor = torch.empty([2 * size for size in sizes])
    for dim, size in enumerate(sizes):
        if rng.random() < 0.3:
            tensor = tensor[(slice(None),) * dim + (slice(0, 2 * size, 2),)]
        else:
            tensor = tensor.narrow(dim, 0, size)
    if rng.random() < 0.5:
        tensor = tensor.contiguous()
    if rng.random() < 0.2:
        tensor = tensor.expand(rng.randint(1, 3), *tensor.shape)
    dims = list(range(tensor.ndim))
    if rng.random() < 0.5:
        rng.shuffle(dims)
    return tensor.permute(dims)


def other_shape(rng: random.Random, numel: int) -> tuple[int, ...]:
    """A random shape with ``numel`` elements."""
    if not numel:
        return (0, rng.randint(1, 3))
    sizes: list[int] = []
    while numel > 1 and rng.random() < 0.8:
        sizes.append(rng.choice([size for size in range(1, numel + 1) if not numel % size]))
        numel //= sizes[-1]
    if numel > 1 or rng.random() < 0.3:
        sizes.append(numel)
    if rng.random() < 0.5:
        sizes.insert(rng.randint(0, len(sizes)), 1)
    return tuple(sizes)


def same_map(strides: tuple[int, ...], tensor: torch.Tensor) -> bool:
    """True where ``strides`` address the elements of ``tensor`` as its own do; those of unit dims never matter."""
    return not tensor.numel() or all(a == b or n == 1 for a, b, n in zip(strides, tensor.stride(), tensor.shape))


def test_view_strides_random_tensors_agree_with_torch_view() -> None:
    """There are strides for the new shape exactly where torch makes a view, and they are torch's."""
    rng = random.Random(0)
    views = copies = 0
    for _ in range(4000):
        tensor = strided(rng)
        shape = other_shape(rng, tensor.numel())
        found = view_strides(tuple(tensor.shape), tuple(tensor.stride()), shape)
        try:
            view = tensor.view(shape)
        except RuntimeError:
            assert found is None, (tensor.shape, tensor.stride(), shape)
            copies += 1
            continue
        assert found is not None, (tensor.shape, tensor.stride(), shape)
        assert same_map(found, view), (tensor.shape, tensor.stride(), shape)
        views += 1
    assert min(views, copies) > 500


def test_layouts_random_tensors_agree_with_torch_on_shape_strides_and_memory() -> None:
    """Each layout's shape, strides and answer to "is it a view" are what torch does."""
    rng = random.Random(1)
    answers: set[tuple[str, Viewed]] = set()
    for _ in range(2500):
        tensor = strided(rng)
        ndim = tensor.ndim
        starts = tuple(rng.randint(0, size) for size in tensor.shape)
        steps = tuple(rng.randint(1, 2) for _ in range(ndim))
        units = tuple(dim for dim, size in enumerate(tensor.shape) if size == 1)
        dims = tuple(rng.sample(range(ndim), ndim))
        new = other_shape(rng, tensor.numel())
        pairs = (
            (Same(), tensor),
            (Permute(dims), tensor.permute(dims)),
            (
                Slice(starts, tuple(tensor.shape), steps),
                tensor[tuple(map(slice, starts, tensor.shape, steps))] if ndim else tensor,
            ),
            (Squeeze(units), tensor.squeeze(units)),
            (Broadcast((2, *tensor.shape), tuple(range(1, ndim + 1))), tensor.expand(2, *tensor.shape)),
            (Contiguous(), tensor.contiguous()),
            (Reshape(new), tensor.reshape(new)),
        )
        for layout, result in pairs:
            shape, strides = tuple(tensor.shape), tuple(tensor.stride())
            assert layout.shape_after(shape) == tuple(result.shape), layout
            after = layout.strides_after(shape, strides)
            assert after is not None
            assert same_map(after, result), (layout, shape, strides)
            if tensor.numel():
                is_view = result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                assert layout.view(shape, strides) is (Viewed.YES if is_view else Viewed.NO), (layout, shape, strides)
                answers.add((type(layout).__name__, layout.view(shape, strides)))
    assert {
        ("Reshape", Viewed.NO),
        ("Reshape", Viewed.YES),
        ("Contiguous", Viewed.NO),
        ("Contiguous", Viewed.YES),
    } < answers


def test_layouts_without_strides_say_unknown_where_strides_decide() -> None:
    """Views that never copy are views for any strides; a reshape that only adds unit dims is one too."""
    assert Permute((1, 0)).view((2, 3), None) is Viewed.YES
    assert Contiguous().view((2, 3), None) is Viewed.UNKNOWN
    assert Reshape((6,)).view((2, 3), None) is Viewed.UNKNOWN
    assert Reshape((2, 1, 3)).view((2, 3), None) is Viewed.YES
    assert Permute((1, 0)).strides_after((2, 3), None) is None
    assert Contiguous().strides_after((2, 3), None) == (3, 1)


def test_contiguous_of_another_order_is_the_order_of_the_strides() -> None:
    """``order[i]`` counts from the innermost dim: (0, 2, 1) puts dim 0 innermost and dim 1 outermost."""
    layout = Contiguous((0, 2, 1))
    assert layout.strides_after((2, 3, 4), None) == (1, 8, 2)
    assert layout.view((2, 3, 4), (1, 8, 2)) is Viewed.YES
    assert layout.view((2, 3, 4), (12, 4, 1)) is Viewed.NO


def test_broadcast_repeats_only_where_elements_appear_more_than_once() -> None:
    """A new dim of size 1 repeats nothing."""
    assert not Broadcast((1, 3), (1,)).repeats((3,))
    assert Broadcast((2, 3), (1,)).repeats((3,))


def test_row_major_strides_are_those_of_a_new_tensor() -> None:
    """Strides of unit and empty dims do not matter for being row-major."""
    for shape in ((), (1,), (2, 3), (2, 1, 3), (4, 0, 2)):
        assert is_row_major(shape, row_major(shape))
        assert is_row_major(shape, tuple(torch.empty(shape).stride()))
    assert is_row_major((2, 1), (1, 77))
    assert not is_row_major((2, 2), (1, 2))


def test_dim_groups_have_equal_products_and_cover_all_dims_once() -> None:
    """Every dim of both shapes is in exactly one group, and both sides of a group hold the same number of elements."""
    rng = random.Random(2)
    for _ in range(500):
        shape = tuple(rng.choice((1, 2, 3, 4, 6)) for _ in range(rng.randint(1, 4)))
        new = other_shape(rng, prod(shape))
        groups = dim_groups(shape, new)
        assert [dim for left, _ in groups for dim in left] == list(range(len(shape)))
        assert [dim for _, right in groups for dim in right] == list(range(len(new)))
        assert all(prod(shape[d] for d in left) == prod(new[d] for d in right) for left, right in groups)
        for left, right in groups:
            heads = {prod(shape[d] for d in left[:cut]) for cut in range(1, len(left))}
            assert not heads & {prod(new[d] for d in right[:cut]) for cut in range(1, len(right))} - {1}, (
                "not the finest"
            )


# ---------------------------------------------------------------- read from ops


SOURCE = Value("x", (2, 1, 3), "f32")


@pytest.mark.parametrize(
    ("op_id", "args", "after", "expected"),
    [
        ("prims.transpose", ((2, 1, 0),), (3, 1, 2), Permute((2, 1, 0))),
        ("torch.permute", ((2, 1, 0),), (3, 1, 2), Permute((2, 1, 0))),
        ("torch.permute", ((-1, 1, 0),), (3, 1, 2), Permute((2, 1, 0))),
        ("torch.transpose", (0, 2), (3, 1, 2), Permute((2, 1, 0))),
        ("torch.transpose", (0, -1), (3, 1, 2), Permute((2, 1, 0))),
        ("prims.slice_prim", ((0, 0, 1), (2, 1, 3)), (2, 1, 2), Slice((0, 0, 1), (2, 1, 3), (1, 1, 1))),
        ("torch_slice_prim_impl", ((0, 0, 0), (2, 1, 3), (1, 1, 2)), (2, 1, 2), Slice((0, 0, 0), (2, 1, 3), (1, 1, 2))),
        ("prims.squeeze", ((1,),), (2, 3), Squeeze((1,))),
        ("torch.squeeze", (1,), (2, 3), Reshape((2, 3))),
        ("prims.broadcast_in_dim", ((2, 4, 1, 3), (0, 2, 3)), (2, 4, 1, 3), Broadcast((2, 4, 1, 3), (0, 2, 3))),
        ("prims.reshape", ((6,),), (6,), Reshape((6,))),
        ("torch_prims_reshape_impl", ((-1,),), (6,), Reshape((6,))),
        ("prims.stride_order", ((2, 1, 0),), (2, 1, 3), Contiguous((2, 1, 0))),
        ("Tensor.contiguous", (), (2, 1, 3), Contiguous()),
        ("prims.shallow_copy", (), (2, 1, 3), Same()),
        ("prims.exp", (), (2, 1, 3), None),
        ("torch.transpose", (Const("n"), 2), (3, 1, 2), None),
    ],
)
def test_layout_of_reads_the_spellings_that_traces_print(op_id, args, after, expected) -> None:
    """Prims, torch's own names and the executor's: one layout; anything that is not plain numbers is none."""
    values = {"x": SOURCE, "y": Value("y", after, "f32")}
    found = layout_of(Op(op_id, (Ref("x"), *args), Ref("y")), values)
    assert found == expected
    if found is not None:
        assert found.shape_after(SOURCE.shape) == after


@pytest.mark.parametrize(
    ("op_id", "args", "after"),
    [
        ("prims.transpose", ((0, 0, 1),), (2, 2, 1)),
        ("prims.slice_prim", ((0, 0), (2, 1)), (2, 1, 3)),
        ("prims.slice_prim", ((0, 0, 0), (2, 1, 3), (1, 1, 0)), (2, 1, 3)),
        ("prims.slice_prim", (), (2, 1, 3)),
        ("prims.squeeze", ((0,),), (1, 3)),
        ("prims.squeeze", ((5,),), (2, 1)),
        ("prims.broadcast_in_dim", ((4, 1, 3), (0, 1, 2)), (4, 1, 3)),
        ("prims.broadcast_in_dim", ((2, 1, 3), (0, 1)), (2, 1, 3)),
        ("prims.broadcast_in_dim", ((2, 1, 3), (0, 1, 7)), (2, 1, 3)),
        ("prims.reshape", ((7,),), (7,)),
        ("prims.stride_order", ((1, 0),), (2, 1, 3)),
        ("prims.shallow_copy", (), (6,)),
        ("Tensor.expand", ((3,),), (3,)),
    ],
)
def test_layout_of_arguments_that_do_not_fit_the_shapes_is_none(op_id, args, after) -> None:
    """Text that was typed or cut may say anything; it is not taken for a layout."""
    values = {"x": SOURCE, "y": Value("y", after, "f32")}
    assert layout_of(Op(op_id, (Ref("x"), *args), Ref("y")), values) is None


def test_layout_of_contiguous_in_channels_last_is_not_taken_for_row_major() -> None:
    """The memory format is behind a name; its sub-op tells the order."""
    build = GraphBuilder()
    x = build.arg("x", (2, 3, 4, 5))
    y = build.value("y", (2, 3, 4, 5))
    last = Op("prims.stride_order", (x, (3, 0, 2, 1)), y)
    plain = Op("prims.stride_order", (x, (3, 2, 1, 0)), y)
    kwargs = (("memory_format", Const("_torch_memory_format_0")),)
    assert layout_of(Op("Tensor.contiguous", (x,), y, kwargs, (last,)), build.values) is None
    assert layout_of(Op("Tensor.contiguous", (x,), y, kwargs, (plain,)), build.values) == Contiguous()
    assert layout_of(Op("Tensor.contiguous", (x,), y, kwargs), build.values) is None


@pytest.mark.parametrize(
    "layout",
    [Same(), Permute((1, 0)), Slice((0, 0), (2, 2), (1, 1)), Squeeze(()), Broadcast((4, 2, 3), (1, 2)), Reshape((6,))],
    ids=lambda layout: type(layout).__name__,
)
def test_as_prim_is_read_back_as_the_same_layout(layout) -> None:
    """Writing a layout as Thunder's prim and reading the prim gives the layout."""
    op_id, args = as_prim(layout, 2)
    values = {"x": Value("x", (2, 3), "f32"), "y": Value("y", layout.shape_after((2, 3)), "f32")}
    assert layout_of(Op(op_id, (Ref("x"), *args), Ref("y")), values) == layout

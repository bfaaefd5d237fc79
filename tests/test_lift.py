"""lift: a computation carried past a reshape that merges dims gives the same numbers, or is left alone."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from thunder_fusionfix.execute import run_region
from thunder_fusionfix.lift import Lifted, Merge, lift, merge_of
from thunder_fusionfix.model import Arg, Const, Op, Ref, Value

Shape = tuple[int, ...]


class Region:
    """Builds the ops of a region that starts with the reshape of ``x`` from ``shape`` to ``merged``."""

    def __init__(self, shape: Shape, merged: Shape) -> None:
        self.values: dict[str, Value] = {}
        self.ops: list[Op] = []
        self.inputs = ["x"]
        self.value("x", shape)
        self.merged = self.op("prims.reshape", Ref("x"), merged, shape=merged)

    def value(self, name: str, shape: Shape, dtype: str = "f32") -> str:
        self.values[name] = Value(name, shape, dtype, "cpu")
        return name

    def input(self, name: str, shape: Shape) -> str:
        self.inputs.append(name)
        return self.value(name, shape)

    def op(self, op_id: str, *args: Arg, shape: Shape, dtype: str = "f32") -> str:
        name = self.value(f"t{len(self.ops)}", shape, dtype)
        self.ops.append(Op(op_id, args, Ref(name)))
        return name

    def shape(self, name: str) -> Shape:
        shape = self.values[name].shape
        assert shape is not None
        return shape

    def lifted(self, *outputs: str) -> Lifted | None:
        fresh = (f"%{number}" for number in itertools.count())
        return lift(self.ops, 0, self.values, self.inputs, outputs, fresh)


def check_same(region: Region, lifted: Lifted, outputs: list[str]) -> None:
    """Both computations run on the same numbers; carried outputs and split inputs are reshaped as a pass would."""
    torch.manual_seed(0)
    given = {name: torch.randn(region.shape(name)) for name in region.inputs}
    old = Op("old", tuple(map(Ref, region.inputs)), tuple(map(Ref, outputs)), subops=tuple(region.ops))
    want = run_region(old, region.values, given)

    split = {name: given[source].reshape(shape) for name, (source, shape) in lifted.inputs.items()}
    names = [lifted.outputs.get(name, name) for name in outputs]
    new = Op("new", tuple(map(Ref, (*given, *split))), tuple(map(Ref, names)), subops=lifted.subops)
    got = run_region(new, {**region.values, **lifted.values}, {**given, **split})
    for output, name in zip(outputs, names, strict=True):
        assert lifted.values.get(name, region.values.get(name)).shape == tuple(got[name].shape)
        torch.testing.assert_close(got[name].reshape(region.shape(output)), want[output])


# ---------------------------------------------------------------- which reshapes


@pytest.mark.parametrize(
    ("shape", "new_shape", "merge"),
    [
        ((2, 3, 5), (6, 5), Merge(0, (2, 3))),
        ((2, 3, 5), (2, 15), Merge(1, (3, 5))),
        ((2, 3, 5), (30,), Merge(0, (2, 3, 5))),
        ((2, 3, 4, 5), (2, 12, 5), Merge(1, (3, 4))),
        ((6, 5), (2, 3, 5), None),  # splits
        ((2, 3, 5), (2, 3, 5), None),  # nothing
        ((2, 3, 5, 7), (6, 35), None),  # two merges
        ((4, 3), (2, 6), None),  # splits and merges
        ((2, 0, 3), (0, 3), None),  # no elements
    ],
)
def test_merge_of_knows_reshapes_that_merge_one_group(shape, new_shape, merge):
    """One group of neighbouring dims becomes one dim, and nothing else changes."""
    assert merge_of(shape, new_shape) == merge


def test_merge_of_gives_back_the_shape():
    """With the merged dim split again the shape is the old one, for random shapes and groups."""
    rng = random.Random(0)
    for _ in range(300):
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(2, 5)))
        first = rng.randrange(len(shape) - 1)
        last = rng.randint(first + 2, len(shape))
        size = torch.Size(shape[first:last]).numel()
        new_shape = (*shape[:first], size, *shape[last:])
        merge = merge_of(shape, new_shape)
        if merge is not None:  # unit dims may make it no merge at all
            assert (*new_shape[: merge.dim], *merge.sizes, *new_shape[merge.dim + 1 :]) == shape
            assert len(merge.sizes) >= 2
        else:
            assert 1 in shape


# ---------------------------------------------------------------- what is carried


def rows() -> Region:
    """The rows of a batch as one list: what a language model's loss does to its logits."""
    return Region((2, 3, 5), (6, 5))


def test_elementwise_ops_and_reductions_over_other_dims_are_carried():
    """The ops of a row-wise softmax run over the dims before the merge; the reshape is gone."""
    region = rows()
    most = region.op("prims.amax", Ref(region.merged), (1,), shape=(6,))
    wide = region.op("prims.broadcast_in_dim", Ref(most), (6, 5), (0,), shape=(6, 5))
    centred = region.op("prims.sub", Ref(region.merged), Ref(wide), shape=(6, 5))
    exp = region.op("prims.exp", Ref(centred), shape=(6, 5))
    total = region.op("prims.sum", Ref(exp), (1,), shape=(6,))
    lifted = region.lifted(exp, total)
    assert lifted is not None and not any(op.id == "prims.reshape" for op in lifted.subops)
    assert {lifted.values[name].shape for name in lifted.outputs.values()} == {(2, 3, 5), (2, 3)}
    check_same(region, lifted, [exp, total])


def test_reshape_back_to_the_old_dims_falls_away():
    """Splitting the very dims that were merged is nothing any more; its value keeps its name and is no reshape."""
    region = rows()
    doubled = region.op("prims.mul", Ref(region.merged), 2.0, shape=(6, 5))
    back = region.op("prims.reshape", Ref(doubled), (2, 3, 5), shape=(2, 3, 5))
    end = region.op("prims.exp", Ref(back), shape=(2, 3, 5))
    lifted = region.lifted(end)
    assert lifted is not None and [op.id for op in lifted.subops] == ["prims.mul", "prims.shallow_copy", "prims.exp"]
    assert lifted.outputs == {}
    check_same(region, lifted, [end])


def test_pad_of_another_dim_is_carried():
    """A pad that leaves the merged dim alone goes before the reshape."""
    region = rows()
    padded = region.op("prims.pad", Ref(region.merged), 0.0, ((0, 0, 0), (1, 2, 0)), shape=(6, 8))
    lifted = region.lifted(padded)
    assert lifted is not None and lifted.values[lifted.outputs[padded]].shape == (2, 3, 8)
    check_same(region, lifted, [padded])


def test_operand_of_the_region_is_split_outside():
    """Another input over the merged dim is taken as a reshape of it, which the pass places outside."""
    region = rows()
    weight = region.input("w", (6, 5))
    product = region.op("prims.mul", Ref(region.merged), Ref(weight), shape=(6, 5))
    again = region.op("prims.add", Ref(product), Ref(weight), shape=(6, 5))
    lifted = region.lifted(again)
    assert lifted is not None and list(lifted.inputs.values()) == [("w", (2, 3, 5))]
    check_same(region, lifted, [again])


def test_ops_that_do_not_see_the_merge_stay():
    """What does not come from the reshape is the region's own op, at its place in the order."""
    region = rows()
    region.input("y", (4,))
    other = region.op("prims.exp", Ref("y"), shape=(4,))
    doubled = region.op("prims.mul", Ref(region.merged), 2.0, shape=(6, 5))
    lifted = region.lifted(other, doubled)
    assert lifted is not None and lifted.origin == {0: 1} and set(lifted.new_ops) == {1}
    check_same(region, lifted, [other, doubled])


# ---------------------------------------------------------------- what is not


def over_the_merged_dim(region):
    return region.op("prims.sum", Ref(region.merged), (0,), shape=(5,))


def permuted(region):
    return region.op("prims.transpose", Ref(region.merged), (1, 0), shape=(5, 6))


def sliced(region):
    return region.op("prims.slice_prim", Ref(region.merged), (1, 0), (5, 5), (1, 1), shape=(4, 5))


def padded_rows(region):
    return region.op("prims.pad", Ref(region.merged), 0.0, ((0, 1, 0), (0, 0, 0)), shape=(7, 5))


def merged_with_more(region):
    return region.op("prims.reshape", Ref(region.merged), (30,), shape=(30,))


def split_otherwise(region):
    return region.op("prims.reshape", Ref(region.merged), (3, 2, 5), shape=(3, 2, 5))


def unknown(region):
    return region.op("prims.no_such_op", Ref(region.merged), shape=(6, 5))


def operand_from_inside(region):
    region.input("y", (6, 5))
    inner = region.op("prims.exp", Ref("y"), shape=(6, 5))
    return region.op("prims.mul", Ref(region.merged), Ref(inner), shape=(6, 5))


def several_outputs(region):
    names = region.value("a", (6, 5)), region.value("b", (6, 5))
    region.ops.append(Op("prims.var_mean", (Ref(region.merged), (1,)), tuple(map(Ref, names))))
    return names[0]


@pytest.mark.parametrize(
    "user",
    [
        over_the_merged_dim,
        permuted,
        sliced,
        padded_rows,
        merged_with_more,
        split_otherwise,
        unknown,
        operand_from_inside,
        several_outputs,
    ],
)
def test_one_user_that_needs_the_merged_dim_leaves_all_as_it_is(user):
    """Whole closures are carried or nothing is, also where another user could be."""
    region = rows()
    fine = region.op("prims.exp", Ref(region.merged), shape=(6, 5))
    assert region.lifted(fine) is not None
    assert region.lifted(fine, user(region)) is None


@pytest.mark.parametrize(("shape", "merged"), [((6, 5), (2, 3, 5)), ((2, 3, 5, 7), (6, 35)), ((0, 3, 5), (0, 5))])
def test_reshape_that_is_no_single_merge_is_left(shape, merged):
    """Nothing is carried past a split, two merges or an empty tensor."""
    region = Region(shape, merged)
    assert region.lifted(region.op("prims.exp", Ref(region.merged), shape=merged)) is None


def test_reshape_that_nothing_takes_is_left():
    """Without a user and without an output there is nothing to win."""
    region = rows()
    region.input("y", (4,))
    assert region.lifted(region.op("prims.exp", Ref("y"), shape=(4,))) is None


# ---------------------------------------------------------------- the law


def random_region(seed: int) -> tuple[Region, list[str]]:
    """A reshape that merges dims, and random ops over its result, most of which can be carried."""
    rng = random.Random(seed)
    shape = tuple(rng.choice((1, 2, 2, 2, 2, 3, 3, 3)) for _ in range(rng.randint(3, 4)))
    first = rng.randrange(len(shape) - 1)
    last = min(len(shape), first + rng.randint(2, 3))
    merged = (*shape[:first], torch.Size(shape[first:last]).numel(), *shape[last:])
    region = Region(shape, merged)
    region.input("w", merged)
    names, dim_of = [region.merged], {region.merged: first}  # the values made so far, and where the merged dim stands
    for _ in range(rng.randint(1, 6)):
        name = rng.choice(names)
        now, dim = region.shape(name), dim_of[name]
        peers = [other for other in names if region.shape(other) == now and dim_of[other] == dim]
        move = rng.randrange(7)
        if move == 0:
            made = region.op("prims.add", Ref(name), Ref(rng.choice(peers)), shape=now)
        elif move == 1 and now == merged:
            made = region.op("prims.mul", Ref("w"), Ref(name), shape=now)
        elif move == 2 and len(now) > 1:
            over = rng.choice([d for d in range(len(now)) if d != dim])
            made = region.op(
                "prims." + rng.choice(["sum", "amax", "amin"]), Ref(name), (over,), shape=_without(now, over)
            )
            dim -= over < dim
        elif move == 3 and len(now) < 4:
            at = rng.randint(0, len(now))
            wide = (*now[:at], 2, *now[at:])
            dims = tuple(d + (d >= at) for d in range(len(now)))
            made = region.op("prims.broadcast_in_dim", Ref(name), wide, dims, shape=wide)
            dim += dim >= at
        elif move == 4 and len(now) > 1:
            over = rng.choice([d for d in range(len(now)) if d != dim])
            config = tuple((1, 2, 0) if d == over else (0, 0, 0) for d in range(len(now)))
            longer = tuple(size + 3 * (d == over) for d, size in enumerate(now))
            made = region.op("prims.pad", Ref(name), 1.5, config, shape=longer)
        elif move == 5:
            split = (*now[:dim], *shape[first:last], *now[dim + 1 :])
            made = region.op("prims.exp", Ref(region.op("prims.reshape", Ref(name), split, shape=split)), shape=split)
            continue  # over the old dims: nothing more is made of it here
        else:
            made = region.op("prims." + rng.choice(["tanh", "neg", "sin"]), Ref(name), shape=now)
        names.append(made)
        dim_of[made] = dim
    made = [op.outputs[0] for op in region.ops[1:]]
    taken = {name for op in region.ops for name in op.inputs}
    outputs = [name for name in made if name not in taken or rng.random() < 0.3]
    return region, outputs


def _without(shape: Shape, dim: int) -> Shape:
    return shape[:dim] + shape[dim + 1 :]


def test_random_regions_compute_the_same_when_carried():
    """For random regions, whatever is carried gives the same numbers; and most can be carried, so that the law says something."""
    num_carried = 0
    for seed in range(400):
        region, outputs = random_region(seed)
        lifted = region.lifted(*outputs)
        if lifted is not None:
            num_carried += 1
            check_same(region, lifted, outputs)
    assert num_carried > 200


def test_wrongly_carried_region_is_told_by_running_it():
    """The judge above can fail: a carried reduction over a neighbouring dim gives other numbers."""
    region = Region((2, 3, 3), (6, 3))
    total = region.op("prims.sum", Ref(region.merged), (1,), shape=(6,))
    lifted = region.lifted(total)
    assert lifted is not None
    carried = lifted.subops[0]
    wrong = Op(carried.id, (carried.args[0], (1,)), carried.output)
    with pytest.raises(AssertionError):
        check_same(region, Lifted((wrong,), {}, {}, lifted.values, lifted.outputs, lifted.inputs), [total])


def test_dtype_of_a_carried_cast_is_kept():
    """A cast is carried with its dtype, which the new value has too."""
    region = rows()
    cast = region.op(
        "prims.convert_element_type", Ref(region.merged), Const("dtypes.float64"), shape=(6, 5), dtype="f64"
    )
    lifted = region.lifted(cast)
    assert lifted is not None and lifted.values[lifted.outputs[cast]].dtype == "f64"
    check_same(region, lifted, [cast])

"""Who shares memory with whom, judged by hand and by torch's own tensors."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from helpers import BF16, F32, GraphBuilder
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_fusionfix.alias import Sharing, aliases, reach_caller
from thunder_fusionfix.effects import FLASH
from thunder_fusionfix.model import Graph, NewOp, Op, Ref, Value

# ---------------------------------------------------------------- single ops


def test_sharing_view_is_certain_with_the_strides_of_the_view() -> None:
    """A permuted tensor has the memory of its source, and its strides permuted."""
    build = GraphBuilder()
    x = build.arg("x", (4, 2), strides=(2, 1))
    y = build.op("torch.permute", x, (1, 0), out="y", shape=(2, 4))
    found = aliases(build.returns(y))
    assert found.sharing("x", "y") is Sharing.CERTAIN
    assert found.strides["y"] == (1, 2)
    assert found.storages[found.storage_of["y"]].names == ("x", "y")


def test_sharing_computed_output_is_apart() -> None:
    """An op that computes gives new memory."""
    build = GraphBuilder()
    x = build.arg("x", (4, 2))
    y = build.op("torch.exp", x, out="y", shape=(4, 2))
    found = aliases(build.returns(y))
    assert found.sharing("x", "y") is Sharing.NONE


@pytest.mark.parametrize(
    ("strides", "sharing", "nbytes"),
    [((2, 1), Sharing.CERTAIN, 32), ((1, 4), Sharing.POSSIBLE, 32), (None, Sharing.POSSIBLE, 32)],
    ids=["view", "copy", "unknown"],
)
def test_sharing_reshape_depends_on_strides_and_a_copy_stays_possible(strides, sharing, nbytes) -> None:
    """A reshape shares where it is a view; else it is priced as a copy, yet may share: another run may have other strides."""
    build = GraphBuilder()
    x = build.arg("x", (4, 2), strides=strides)
    y = build.op("torch.reshape", x, (8,), out="y", shape=(8,))
    found = aliases(build.returns(y))
    assert found.sharing("x", "y") is sharing
    assert found.storages[found.storage_of["y"]].nbytes == nbytes


def test_sharing_contiguous_of_unknown_strides_is_row_major_whatever_they_are() -> None:
    """``contiguous`` gives row-major strides whether it copies or not."""
    build = GraphBuilder()
    x = build.arg("x", (4, 2))
    y = build.op("Tensor.contiguous", x, out="y", shape=(4, 2))
    found = aliases(build.returns(y))
    assert found.strides["y"] == (2, 1)
    assert found.sharing("x", "y") is Sharing.POSSIBLE


def test_sharing_torch_stride_order_copies_also_what_is_in_order_already() -> None:
    """Thunder's torch implementation of stride_order always makes a new tensor."""
    build = GraphBuilder()
    x = build.arg("x", (4, 2), strides=(2, 1))
    y = build.op("torch_stride_order_prim_impl", x, (1, 0), out="y", shape=(4, 2))
    found = aliases(build.returns(y))
    assert found.sharing("x", "y") is not Sharing.CERTAIN


def test_sharing_cast_to_the_same_dtype_is_the_argument_itself() -> None:
    """torch gives a tensor back that a cast would not change; a cast that changes it is new memory."""
    build = GraphBuilder()
    x = build.arg("x", (4, 2), strides=(2, 1))
    same = build.op("torch.Tensor.to", x, F32, out="same", shape=(4, 2))
    other = build.op("torch.Tensor.to", x, BF16, out="other", shape=(4, 2), dtype="bf16")
    found = aliases(build.returns(same, other))
    assert found.sharing("x", "same") is Sharing.CERTAIN
    assert found.sharing("x", "other") is Sharing.NONE


def test_sharing_copy_gives_its_destination_and_writes_it() -> None:
    """``copy_`` returns the tensor that it wrote, and is a write to that storage only."""
    build = GraphBuilder()
    x = build.op("torch.ones", (4,), out="x", shape=(4,))
    buffer = build.op("torch.zeros", (4,), out="buffer", shape=(4,))
    new = build.op("copy_", x, buffer, out="new", shape=(4,))
    found = aliases(build.returns(new))
    assert found.sharing("buffer", "new") is Sharing.CERTAIN
    assert found.is_written("buffer")
    assert not found.is_written("x")
    assert [(access.pos, access.writes) for access in found.accesses[found.group_of("buffer")]] == [
        (2, True),
        (3, False),
    ]


def test_sharing_write_whose_destination_is_given_by_keyword_may_write_any_input() -> None:
    """Newer Thunder names the destination; where it is not found by position, every input may be it."""
    build = GraphBuilder()
    x = build.op("torch.ones", (4,), out="x", shape=(4,))
    buffer = build.op("torch.zeros", (4,), out="buffer", shape=(4,))
    build.ops.append(Op("prims.copy_to_out_", (x,), build.value("new", (4,)), kwargs=(("out", buffer),)))
    found = aliases(build.returns(Ref("new")))
    assert found.is_written("buffer")
    assert found.sharing("new", "buffer") is Sharing.POSSIBLE


def test_sharing_unknown_op_may_do_anything_to_what_it_is_given() -> None:
    """The outputs of an op without a row may share with its inputs, and it counts as a write to them."""
    build = GraphBuilder()
    x = build.op("torch.ones", (4,), out="x", shape=(4,))
    apart = build.op("torch.zeros", (4,), out="apart", shape=(4,))
    y = build.op("some_lib.mystery", x, out="y", shape=(4,))
    found = aliases(build.returns(y, apart))
    assert found.sharing("x", "y") is Sharing.POSSIBLE
    assert found.is_written("x")
    assert not found.is_written("apart")


def composite(name: str, *parts: tuple[str, tuple, str, tuple[int, ...]]) -> GraphBuilder:
    """A function of ``x`` and ``mean`` with one op that consists of ``parts``: id, arguments, output and shape."""
    build = GraphBuilder()
    x, mean = build.arg("x", (4,)), build.arg("mean", (4,))
    a, b = build.op("torch.exp", x, out="a", shape=(4,)), build.op("torch.exp", mean, out="b", shape=(4,))
    build.region(
        name,
        [a, b],
        [Ref(part[2]) for part in parts],
        lambda: [build.op(i, *args, out=o, shape=s) for i, args, o, s in parts],
    )
    build.ops[-1] = replace(build.ops[-1], is_fusion=False)
    return build


def test_sharing_composite_without_a_row_is_told_by_its_parts() -> None:
    """``split`` gives views of what it is given and writes nothing; its outputs may be one memory."""
    parts = [("prims.slice_prim", (Ref("a"), (start,), (start + 2,)), f"half{start}", (2,)) for start in (0, 2)]
    found = aliases(composite("torch.split", *parts).returns(Ref("half0"), Ref("half2")))
    assert [found.sharing("a", name) for name in ("half0", "half2", "x")] == [Sharing.CERTAIN] * 2 + [Sharing.NONE]
    assert not found.is_written("a") and not found.is_written("b")


def test_sharing_composite_that_writes_inside_writes_what_it_is_given() -> None:
    """``batch_norm`` as one op of torch's changes its running averages, though it gives only the norm."""
    parts = [("prims.neg", (Ref("a"),), "y", (4,)), ("prims.copy_", (Ref("y"), Ref("b")), "new", (4,))]
    found = aliases(composite("torch.nn.functional.batch_norm", *parts).returns(Ref("y")))
    assert [access.writes for access in found.accesses[found.group_of("b")] if access.name == "b"] == [True]
    assert found.sharing("b", "mean") is Sharing.NONE


def test_sharing_all_reduce_of_torch_distributed_writes_its_argument() -> None:
    """Thunder's ``all_reduce_`` is a sum into new memory and a copy back."""
    parts = [
        ("thunder.distributed.prims.all_reduce", (Ref("a"), "sum", "world", False), "sum", (4,)),
        ("prims.copy_", (Ref("sum"), Ref("a")), "new", (4,)),
    ]
    found = aliases(composite("ltorch.all_reduce_", *parts).returns(Ref("new")))
    assert found.sharing("new", "a") is Sharing.CERTAIN
    assert [access.writes for access in found.accesses[found.group_of("a")] if access.name == "a"] == [True]


def test_sharing_wait_gives_the_memory_of_its_transfer() -> None:
    """What a collective fills is there when the wait returns: one storage, written by nobody whom the trace shows."""
    build = GraphBuilder()
    x = build.arg("x", (4,))
    future = build.op("torch_all_reduce_prim_impl", x, "sum", "world", True, False, out="future", shape=(4,))
    y = build.op("torch_wait_prim_impl", future, out="y", shape=(4,))
    found = aliases(build.returns(y))
    assert found.sharing("future", "y") is Sharing.CERTAIN and found.sharing("x", "y") is Sharing.NONE
    assert not any(access.writes for accesses in found.accesses.values() for access in accesses)


def test_sharing_all_reduce_without_a_clone_writes_its_argument_until_the_wait() -> None:
    """Start and wait both count as writes, so no read of that memory comes between them or leaves its side."""
    build = GraphBuilder()
    x = build.op("torch.ones", (4,), out="x", shape=(4,))
    future = build.op("torch_all_reduce_prim_impl", x, "sum", "world", True, True, out="future", shape=(4,))
    y = build.op("torch_wait_prim_impl", future, out="y", shape=(4,))
    found = aliases(build.returns(y))
    assert found.sharing("x", "y") is Sharing.CERTAIN
    assert [(access.pos, access.writes) for access in found.accesses[found.group_of("x")]] == [
        (1, True),
        (2, True),
        (3, False),
    ]


def test_sharing_gradient_of_a_view_may_be_its_cotangent() -> None:
    """``swapaxes_vjp`` gives the cotangent with swapped dims: a write to one may be seen in the other."""
    build = GraphBuilder()
    g = build.op("torch.ones", (4, 2), out="g", shape=(4, 2))
    x = build.op("swapaxes_vjp", ((Ref("x"), 0, 1), ()), g, out="gx", shape=(2, 4))
    found = aliases(build.returns(x))
    assert found.sharing("g", "gx") is Sharing.POSSIBLE and not found.is_written("g")


def test_sharing_arguments_may_share_with_one_another() -> None:
    """No trace says whether two tensors of the caller overlap."""
    build = GraphBuilder()
    x, y = build.arg("x", (4,)), build.arg("y", (4,))
    z = build.op("torch.add", x, y, out="z", shape=(4,))
    found = aliases(build.returns(z))
    assert found.sharing("x", "y") is Sharing.POSSIBLE
    assert found.sharing("x", "z") is Sharing.NONE


def test_storage_of_expanded_argument_counts_no_repeats() -> None:
    """A dim of stride 0 takes no memory."""
    build = GraphBuilder()
    x = build.arg("x", (1000, 4), strides=(0, 1))
    found = aliases(build.returns(x))
    assert found.storages[found.storage_of["x"]].nbytes == 16


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        ((3072, 256, 64, 1), (3072, 768, 64, 1)),  # row-major but for gaps
        ((3072, 64, 256, 1), (3072, 64, 256, 1)),  # heads innermost but one, as a transposed projection has them
        ((0, 64, 256, 1), None),  # a repeated dim has no place in the order
        (None, None),
    ],
)
def test_flash_attention_gives_its_result_in_the_order_of_its_query(strides, expected) -> None:
    """So the permute and contiguous that follow are views where the query was permuted."""
    build = GraphBuilder()
    q = build.arg("q", (2, 4, 12, 64), strides=strides)
    out = build.op(FLASH, q, q, q, out="out", shape=(2, 4, 12, 64))
    found = aliases(build.returns(out))
    assert found.strides["out"] == expected


# ---------------------------------------------------------------- regions


def region(name: str, outputs: str, body) -> Graph:
    """A region ``name`` over x: f32[4, 2] (row-major) that computes c = exp(x) and then ``body``."""
    build = GraphBuilder()
    x = build.arg("x", (4, 2), strides=(2, 1))

    def inside() -> None:
        c = build.op("prims.exp", x, out="c", shape=(4, 2))
        body(build, x, c)

    build.region(name, (x,), tuple(map(Ref, outputs.split())), inside)
    return build.returns(*map(Ref, outputs.split()))


COMPILERS = pytest.mark.parametrize("name", ["nvFusion0", "TorchCompile0"])


@COMPILERS
def test_region_output_that_is_a_view_of_an_input_aliases_the_input(name) -> None:
    """transpose, slice and reshape of a region input come back with its memory and a view's strides."""

    def body(build, x, c):
        t = build.op("prims.transpose", x, (1, 0), out="t", shape=(2, 4))
        build.op("prims.slice_prim", t, (0, 1), (2, 3), (1, 1), out="s", shape=(2, 2))
        build.op("prims.reshape", x, (8,), out="r", shape=(8,))

    found = aliases(region(name, "t s r c", body))
    assert {found.storage_of[n] for n in "xtsr"} == {0}
    assert (found.strides["t"], found.strides["s"], found.strides["r"]) == ((1, 2), (1, 2), (1,))
    assert found.sharing("x", "c") is Sharing.NONE


@COMPILERS
def test_region_reshape_of_an_input_that_is_no_view_is_one_copy(name) -> None:
    """A reshape of transposed dims is new memory, which is shared by what lies on top of it."""

    def body(build, x, c):
        t = build.op("prims.transpose", x, (1, 0), out="t", shape=(2, 4))
        r = build.op("prims.reshape", t, (8,), out="r", shape=(8,))
        build.op("prims.reshape", r, (8, 1), out="u", shape=(8, 1))

    found = aliases(region(name, "r u", body))
    assert found.sharing("x", "r") is Sharing.POSSIBLE
    assert found.sharing("r", "u") is Sharing.CERTAIN
    assert [storage.root for storage in found.storages] == ["x", "r"]


@COMPILERS
def test_region_layout_and_copy_of_a_computed_output_alias_that_output(name) -> None:
    """shallow_copy and transpose of a value that is an output too have its memory."""

    def body(build, x, c):
        build.op("prims.shallow_copy", c, out="d", shape=(4, 2))
        build.op("prims.transpose", c, (1, 0), out="t", shape=(2, 4))

    found = aliases(region(name, "c d t", body))
    assert found.storage_of["c"] == found.storage_of["d"] == found.storage_of["t"]
    assert found.strides["t"] == (1, 2)


def test_inductors_layout_of_a_computed_value_that_is_no_output_has_memory_of_its_own() -> None:
    """Where the computed value itself never leaves, its transpose is written row-major, and the next layout aliases that."""

    def body(build, x, c):
        t = build.op("prims.transpose", c, (1, 0), out="t", shape=(2, 4))
        build.op("prims.transpose", t, (1, 0), out="u", shape=(4, 2))

    found = aliases(region("TorchCompile0", "t u", body))
    assert found.strides["t"] == (4, 1)
    assert found.sharing("t", "u") is Sharing.CERTAIN
    assert found.strides["u"] == (1, 4)
    assert found.sharing("x", "t") is Sharing.NONE


@pytest.mark.parametrize("outputs", ["t u", "u t", "t", "s t"])
def test_nvfusers_layouts_of_a_computed_value_that_is_no_output_keep_that_value(outputs) -> None:
    """They are views of it, in whatever order they leave, and it is written whole for one row of it."""

    def body(build, x, c):
        t = build.op("prims.transpose", c, (1, 0), out="t", shape=(2, 4))
        build.op("prims.transpose", t, (1, 0), out="u", shape=(4, 2))
        build.op("prims.slice_prim", c, (1, 0), (2, 2), (1, 1), out="s", shape=(1, 2))

    found = aliases(region("nvFusion0", outputs, body))
    names = outputs.split()
    assert len({found.storage_of[name] for name in names}) == 1
    assert found.storages[found.storage_of["t"]].nbytes == 32
    assert {name: found.strides[name] for name in names} == {
        name: {"t": (1, 2), "u": (2, 1), "s": (2, 1)}[name] for name in names
    }
    assert all(found.sharing("x", name) is Sharing.NONE for name in names)


def test_a_slice_costs_nvfuser_the_whole_and_inductor_itself() -> None:
    """A row of what a region computes: nvFuser writes all rows and gives a view, Inductor computes the row."""

    def body(build, x, c):
        build.op("prims.slice_prim", c, (1, 0), (2, 2), (1, 1), out="s", shape=(1, 2))

    def nbytes(name):
        found = aliases(region(name, "s", body))
        return found.storages[found.storage_of["s"]].nbytes

    assert (nbytes("nvFusion0"), nbytes("TorchCompile0")) == (32, 8)


def test_a_slice_that_is_computed_with_leaves_alone() -> None:
    """A cast after the slice is new memory, of the slice's size."""

    def body(build, x, c):
        s = build.op("prims.slice_prim", c, (1, 0), (2, 2), (1, 1), out="s", shape=(1, 2))
        build.op("prims.convert_element_type", s, BF16, out="n", shape=(1, 2), dtype="bf16")

    found = aliases(region("nvFusion0", "n", body))
    assert found.storages[found.storage_of["n"]].nbytes == 4


@pytest.mark.parametrize("width", [0, 1])
def test_nvfusers_pad_by_nothing_is_a_view(width) -> None:
    """A convolution's pad of (0, 0) gives the input; a pad of anything is new memory."""

    def body(build, x, c):
        build.op("prims.pad", x, 0.0, ((0, width, 0), (0, 0, 0)), out="p", shape=(4 + width, 2))

    found = aliases(region("nvFusion0", "p c", body))
    assert found.sharing("x", "p") is (Sharing.NONE if width else Sharing.CERTAIN)


@COMPILERS
def test_region_views_that_leave_before_what_they_view_share_its_memory(name) -> None:
    """The order of a region's outputs says nothing of who views whom."""

    def body(build, x, c):
        build.op("prims.transpose", c, (1, 0), out="t", shape=(2, 4))

    found = aliases(region(name, "t c", body))
    assert found.sharing("t", "c") is Sharing.CERTAIN
    assert len({found.storage_of[name] for name in ("t", "c")}) == 1


def test_region_cast_of_an_input_as_a_passenger_is_a_new_tensor() -> None:
    """A widened copy of a saved tensor is written out where the region stands."""

    def body(build, x, c):
        build.op("prims.convert_element_type", x, BF16, out="n", shape=(4, 2), dtype="bf16")

    found = aliases(region("nvFusion0", "c n", body))
    assert found.sharing("x", "n") is Sharing.NONE
    assert found.storages[found.storage_of["n"]].nbytes == 16


@COMPILERS
def test_region_broadcast_output_takes_the_memory_of_what_it_repeats(name) -> None:
    """A repeated dim of an output is allocated once."""

    def body(build, x, c):
        build.op("prims.broadcast_in_dim", c, (100, 4, 2), (1, 2), out="b", shape=(100, 4, 2))

    found = aliases(region(name, "b", body))
    assert found.storages[found.storage_of["b"]].nbytes == 32
    assert found.strides["b"] == (0, 2, 1)


def test_region_copy_into_an_input_is_a_write_to_that_input() -> None:
    """``copy_`` inside a region writes the region's input, through views too, and its output is that input."""
    build = GraphBuilder()
    x = build.op("torch.ones", (4,), out="x", shape=(4,))
    buffer = build.op("torch.zeros", (2, 2), out="buffer", shape=(2, 2))

    def body() -> None:
        view = build.op("prims.reshape", buffer, (4,), out="view", shape=(4,))
        build.op("prims.copy_", x, view, out="new", shape=(4,))

    build.region("nvFusion0", (x, buffer), (Ref("new"),), body)
    found = aliases(build.returns(Ref("new")))
    assert found.sharing("new", "buffer") is Sharing.CERTAIN
    assert found.is_written("buffer")
    assert not found.is_written("x")


def test_region_that_shows_nothing_may_do_anything() -> None:
    """A fusion without sub-ops, as in cut text, may write and alias all its inputs."""
    build = GraphBuilder()
    x = build.op("torch.ones", (4,), out="x", shape=(4,))
    y = build.value("y", (4,))
    build.ops.append(Op("CUDAGraph1", (x,), y, is_fusion=True))
    found = aliases(build.returns(y))
    assert found.sharing("x", "y") is Sharing.POSSIBLE
    assert found.is_written("x")


# ---------------------------------------------------------------- strides of what torch computes


def test_strides_after_matmul_are_row_major_unless_the_larger_rank_is_on_the_right() -> None:
    """torch folds a 2-D times N-D product transposed, so its result's strides are not known."""
    build = GraphBuilder()
    a, b = build.arg("a", (5, 4, 2)), build.arg("b", (2, 3))
    c, d = build.arg("c", (3, 4)), build.arg("d", (5, 4, 2))
    left = build.op("torch.matmul", a, b, out="left", shape=(5, 4, 3))
    right = build.op("torch.matmul", c, d, out="right", shape=(5, 3, 2))
    found = aliases(build.returns(left, right))
    assert found.strides["left"] == (12, 3, 1)
    assert found.strides["right"] is None


def test_strides_after_pointwise_ops_follow_dense_operands_only() -> None:
    """torch keeps the layout of its operands: row-major gives row-major, anything else is not claimed."""
    build = GraphBuilder()
    dense, turned = build.arg("dense", (4, 2), strides=(2, 1)), build.arg("turned", (4, 2), strides=(1, 4))
    y = build.op("torch.exp", dense, out="y", shape=(4, 2))
    z = build.op("torch.exp", turned, out="z", shape=(4, 2))
    found = aliases(build.returns(y, z))
    assert found.strides["y"] == (2, 1)
    assert found.strides["z"] is None


@pytest.mark.parametrize(
    ("prefix", "run"),
    [
        ("sdpaex", lambda q: torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True)[0]),
        ("sdpafx", lambda q: torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)[0]),
    ],
    ids=["efficient", "flash"],
)
def test_strides_after_attention_are_those_of_torchs_kernels(prefix, run) -> None:
    """The efficient kernel gives a transposed result, the flash one a result in the order of its query."""
    shape = (2, 3, 16, 8)
    with FakeTensorMode():
        expected = run(torch.empty(shape, dtype=torch.bfloat16, device="cuda")).stride()
    build = GraphBuilder()
    q = build.arg("q", shape, "bf16", strides=(384, 128, 8, 1))
    op_id = f"{prefix}_grad_forward_scaled_dot_product_efficient_attention"
    outputs = (build.value("out", shape, "bf16"), build.value("sums", (2, 3, 32)))
    build.ops.append(Op(op_id, (q, q, q), outputs))
    found = aliases(build.returns(outputs))
    assert found.strides["out"] == expected
    assert found.strides["sums"] is None


# ---------------------------------------------------------------- forward and backward


def forward_and_backward() -> tuple[Graph, Graph]:
    """A forward that saves a tensor, its transpose and a parameter; the backward that takes them."""
    build = GraphBuilder("forward")
    w = build.arg("w", (4, 4))
    y = build.op("torch.matmul", w, w, out="y", shape=(4, 4))
    t = build.op("torch.permute", y, (1, 0), out="t", shape=(4, 4))
    forward = build.returns((y,), ((w, y, t), ()))
    back = GraphBuilder("backward")
    for name in ("C0", "C1"):
        back.values[name] = Value(name, kind="collection")
    saved = [back.value(name, (4, 4)) for name in ("w", "y", "t")]
    back.collection("saved_for_backward", Ref("C0"), Ref("C1"), arg=True)
    back.collection("cotangents", back.value("g", (4, 4)), arg=True)
    back.collection("C0", *saved)
    grad = back.op("torch.matmul", saved[2], Ref("g"), out="grad", shape=(4, 4))
    return forward, back.returns(grad, held=("w",))


def test_aliases_backward_with_its_forward_knows_that_saved_tensors_share() -> None:
    """Two saved tensors with one storage are one storage in the backward, with the strides that the forward gave them."""
    forward, backward = forward_and_backward()
    known, alone = aliases(backward, forward), aliases(backward)
    assert known.sharing("y", "t") is Sharing.CERTAIN
    assert known.strides["t"] == (1, 4)
    assert alone.sharing("y", "t") is Sharing.POSSIBLE
    assert len(alone.storages) == len(known.storages) + 1


# ---------------------------------------------------------------- judged by torch


def test_aliases_random_torch_programs_agree_with_real_storages_and_strides() -> None:
    """Where strides of the arguments are known, certain sharing and known strides are those of torch's tensors."""
    rng = random.Random(0)
    shared = apart = 0
    for _ in range(300):
        graph, tensors = random_torch_program(rng)
        found = aliases(graph)
        memory = {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            strides = found.strides[name]
            assert strides is not None
            assert all(a == b or size == 1 for a, b, size in zip(strides, tensor.stride(), tensor.shape)), graph.ops
        for one, other in itertools.combinations(tensors, 2):
            is_same = memory[one] == memory[other]
            assert is_same == (found.sharing(one, other) is Sharing.CERTAIN), (one, other, graph.ops)
            shared, apart = shared + is_same, apart + (not is_same)
    assert min(shared, apart) > 1000, "both answers are tried"


def random_torch_program(rng: random.Random) -> tuple[Graph, dict[str, torch.Tensor]]:
    """A chain of torch layout ops, matmuls and pointwise ops, as a Graph and run."""
    shape = tuple(rng.choice((1, 2, 3, 4)) for _ in range(3))
    tensors = {"x": torch.rand(shape)}
    values = {"x": Value("x", shape, "f32", "cpu", tensors["x"].stride())}
    ops: list[Op] = []

    def add(op_id: str, source: str, args: tuple, result: torch.Tensor, dtype: str = "f32") -> None:
        name = f"t{len(ops)}"
        ops.append(Op(op_id, (Ref(source), *args), Ref(name)))
        values[name] = Value(name, tuple(result.shape), dtype, "cpu")
        tensors[name] = result

    for _ in range(rng.randint(1, 8)):
        source = rng.choice(list(tensors))
        x = tensors[source]
        kind = rng.choice(("permute", "reshape", "slice", "contiguous", "to", "exp", "expand", "unsqueeze", "cat"))
        if kind == "permute":
            dims = tuple(rng.sample(range(x.ndim), x.ndim))
            add("torch.permute", source, (dims,), x.permute(dims))
        elif kind == "reshape":
            new = rng.choice([(x.numel(),), (*x.shape[:-2], -1), (1, *x.shape), (*x.shape[:1], -1)])
            new = tuple(torch.empty(x.shape).reshape(new).shape)
            add("torch.reshape", source, (new,), x.reshape(new))
        elif kind == "slice" and x.ndim:
            starts = tuple(rng.randint(0, size - 1) for size in x.shape)
            where = tuple(slice(start, size) for start, size in zip(starts, x.shape))
            add("torch_slice_prim_impl", source, (starts, tuple(x.shape), (1,) * x.ndim), x[where])
        elif kind == "contiguous":
            add("Tensor.contiguous", source, (), x.contiguous())
        elif kind == "to":
            add("torch.Tensor.to", source, (F32,), x.to(torch.float32))
        elif kind == "exp" and x.is_contiguous():
            add("torch.exp", source, (), x.exp())
        elif kind == "expand" and x.ndim < 5:
            add("Tensor.expand", source, ((2, *x.shape),), x.expand(2, *x.shape))
        elif kind == "unsqueeze" and x.ndim < 5:
            add("torch.unsqueeze", source, (0,), x.unsqueeze(0))
        elif kind == "cat" and x.is_contiguous() and x.ndim:
            name = f"t{len(ops)}"
            ops.append(Op("torch.cat", ((Ref(source), Ref(source)), 0), Ref(name)))
            tensors[name] = torch.cat((x, x), 0)
            values[name] = Value(name, tuple(tensors[name].shape), "f32", "cpu")
    ops.append(Op("return", (Ref(rng.choice(list(tensors))),)))
    return Graph("f", "inference", ("x",), tuple(ops), values, frozenset("x")), tensors


# ---------------------------------------------------------------- what the caller gets


def test_what_the_caller_gets_a_view_of_reaches_it() -> None:
    """Through layouts, inside of regions and out of them, and through those that a plan places; not through what computes."""
    build = GraphBuilder()
    x = build.arg("x", (4, 2))
    t = build.op("torch.permute", x, (1, 0), out="t", shape=(2, 4))

    def body() -> None:
        build.op("prims.reshape", t, (8,), out="r", shape=(8,))
        build.op("prims.exp", x, out="c", shape=(4, 2))

    build.region("nvFusion0", (t, x), (Ref("r"), Ref("c")), body)
    graph = build.returns(Ref("r"))
    assert reach_caller(graph) == {"r", "t", "x"}
    placed = (NewOp("prims.stride_order", (Ref("%0"), (0,)), "r"), NewOp("prims.reshape", (Ref("c"), (8,)), "%0"))
    assert reach_caller(graph, placed) == {"r", "t", "x", "%0", "c"}


def test_what_a_forward_saves_is_not_the_callers() -> None:
    """Its result is a pair: what the caller gets, and what is saved."""
    build = GraphBuilder("forward")
    x = build.arg("x", (4, 2))
    y = build.op("torch.exp", x, out="y", shape=(4, 2))
    z = build.op("torch.sin", x, out="z", shape=(4, 2))
    assert reach_caller(build.returns((y,), ((z,), ()))) == {"y"}

"""Which cotangents may come as repeated zeros: how far repeated dims go, and which uses ask for dense memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import GraphBuilder

from thunder_fusionfix.model import Graph, Op, Ref
from thunder_fusionfix.repeated import dense_uses

SHAPE = (4, 8)


def backward(*ops: tuple, returned: str) -> Graph:
    """A backward that takes the saved y of [4, 8], v of [8] and the cotangent g of [4, 8]; ``ops`` are (callee, args, output, shape)."""
    build = GraphBuilder("backward")
    build.collection("saved_for_backward", build.value("y", SHAPE), build.value("v", (8,)), arg=True)
    build.collection("cotangents", build.value("g", SHAPE), arg=True)
    for callee, args, out, shape in ops:
        build.op(callee, *[Ref(arg) if isinstance(arg, str) else arg for arg in args], out=out, shape=shape)
    return build.returns(Ref(returned))


READ_ONLY = {
    "a product": (("torch.matmul", ("g", "v"), "d", (4,)),),
    "a dense tensor is added": (("torch.add", ("g", "y"), "d", SHAPE),),
    "a layout, then a product": (
        ("torch.transpose", ("g", 0, 1), "t", (8, 4)),
        ("torch.matmul", ("t", "y"), "d", (8, 8)),
    ),
    "a cast, then a dense tensor": (("torch.to", ("g",), "c", SHAPE), ("torch.mul", ("y", "c"), "d", SHAPE)),
    "nothing": (("torch.exp", ("y",), "d", SHAPE),),
}

DENSE = {
    "itself": ((), "g", "the trace returns it"),
    "a view": ((("torch.transpose", ("g", 0, 1), "d", (8, 4)),), "d", "the trace returns"),
    "a cast": ((("torch.to", ("g",), "d", SHAPE),), "d", "the trace returns"),
    "what is computed of it alone": ((("torch.neg", ("g",), "d", SHAPE),), "d", "the trace returns"),
    "its sum over rows": ((("torch.sum", ("g", (0,)), "d", (8,)),), "d", "the trace returns"),
    "a smaller tensor is added": ((("torch.add", ("g", "v"), "d", SHAPE),), "d", "the trace returns"),
    "a repeated tensor is added": (
        (("torch.expand", ("v", SHAPE), "e", SHAPE), ("torch.add", ("g", "e"), "d", SHAPE)),
        "d",
        "the trace returns",
    ),
    "a write to it": ((("copy_", ("y", "g"), "d", SHAPE),), "y", "copy_ may need dense memory"),
    "a write to a view of it": (
        (("torch.transpose", ("g", 0, 1), "t", (8, 4)), ("copy_", ("y", "t"), "d", (8, 4))),
        "y",
        "copy_ may need dense memory",
    ),
    "an unknown op": ((("mylib.fused", ("g",), "d", SHAPE),), "d", "mylib.fused may need dense memory"),
    "a kernel of its own": ((("cudnn_sdpa_bwd", ("g",), "d", SHAPE),), "d", "cudnn_sdpa_bwd may need dense memory"),
    "a collective": ((("torch.all_reduce", ("g",), "d", SHAPE),), "d", "torch.all_reduce may need dense memory"),
}


@pytest.mark.parametrize("case", READ_ONLY)
def test_cotangent_that_is_only_read_may_be_repeated(case: str) -> None:
    """By products, and by what adds a dense tensor of its shape."""
    assert dense_uses(backward(*READ_ONLY[case], returned="d"), ["g"]) == {}


@pytest.mark.parametrize("case", DENSE)
def test_cotangent_must_be_dense(case: str) -> None:
    """It is written, given away, or read by what may not know strides of 0."""
    ops, returned, why = DENSE[case]
    found = dense_uses(backward(*ops, returned=returned), ["g"])
    assert list(found) == ["g"] and found["g"].startswith(why)


@pytest.mark.parametrize(("inside", "is_dense"), [("prims.neg", True), ("prims.add", False)])
def test_region_is_looked_into(inside: str, is_dense: bool) -> None:
    """nvFuser gives what it computes of repeated dims alone as repeated; a region that shows nothing may do anything."""
    graph = backward((inside, ("g",) if is_dense else ("g", "y"), "d", SHAPE), returned="d")
    at = next(at for at, op in enumerate(graph.ops) if op.id == inside)
    leaf = graph.ops[at]
    for subops, want in (((leaf,), is_dense), ((), True)):
        region = Op("nvFusion0", (Ref("g"), Ref("y")), (Ref("d"),), subops=subops, is_fusion=True)
        ops = (*graph.ops[:at], region, *graph.ops[at + 1 :])
        assert bool(dense_uses(Graph("b", "backward", graph.args, ops, graph.values), ["g"])) == want


def test_two_cotangents_that_may_both_be_repeated_do_not_make_their_sum_dense() -> None:
    """Both are found where their sum is returned."""
    graph = backward(("torch.add", ("g", "y"), "d", SHAPE), returned="d")
    assert set(dense_uses(graph, ["g", "y"])) == {"g", "y"}


@pytest.mark.parametrize(
    ("name", "resize", "is_dense"),
    [
        ("nvFusion0", "prims.pad", True),
        ("nvFusion0", "prims.slice_prim", True),
        ("nvFusion0", "prims.cat", True),
        ("nvFusion0", "prims.neg", False),
        ("TorchCompile0", "prims.pad", False),
    ],
)
def test_nvfusers_regions_that_resize_get_dense_zeros(name: str, resize: str, is_dense: bool) -> None:
    """Whatever it is that they resize."""
    graph = backward((resize, ("y",), "r", SHAPE), ("prims.add", ("g", "r"), "d", SHAPE), returned="d")
    subops = tuple(op for op in graph.ops if op.id in (resize, "prims.add"))
    region = Op(name, (Ref("g"), Ref("y")), (Ref("d"),), subops=subops, is_fusion=True)
    ops = tuple(op for op in graph.ops if op.id != "prims.add")
    at = next(at for at, op in enumerate(ops) if op.id == resize)
    fused = replace(graph, ops=(*ops[:at], region, *ops[at + 1 :]))
    assert bool(dense_uses(fused, ["g"])) == is_dense

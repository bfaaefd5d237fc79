"""What fusion regions write for themselves, against bytes measured on an H200."""

from __future__ import annotations

import pytest
from helpers import BF16, F32, GraphBuilder

from thunder_fusionfix.alias import aliases
from thunder_fusionfix.model import Graph, Op, Ref, Value
from thunder_fusionfix.segments import Cost, Temporaries, layout_costs, temporaries_of
from thunder_fusionfix.simulate import simulate

SEQ, VOCAB = 4096, 152064
MB = 1e6


def loss_forward(*, layouts_inside: bool) -> Graph:
    """The causal-LM loss over bf16[1, 4096, 152064] logits, with its slice, contiguous and view in the region or before it."""
    build = GraphBuilder("forward")
    logits = build.arg("logits", (1, SEQ, VOCAB), "bf16", strides=(SEQ * VOCAB, VOCAB, 1))
    labels = build.arg("labels", (1, SEQ), "i64", strides=(SEQ, 1))
    inputs = (logits, labels)
    if not layouts_inside:
        inputs = (_flat_outside(build, logits), labels)

    def body() -> None:
        if layouts_inside:
            flat = _flat_inside(build, logits)
        else:
            flat = build.op("prims.convert_element_type", inputs[0], F32, out="flat", shape=(SEQ - 1, VOCAB))
        short = build.op("prims.slice_prim", labels, (0, 1), (1, SEQ), (1, 1), out="l", shape=(1, SEQ - 1), dtype="i64")
        target = build.op("prims.reshape", short, (SEQ - 1,), out="target", shape=(SEQ - 1,), dtype="i64")
        _cross_entropy_forward(build, flat, target)

    build.region("nvFusion0", inputs, tuple(map(Ref, ("loss", "a_max", "log_sum", "count"))), body)
    saved = (labels, logits, Ref("a_max"), Ref("log_sum"), Ref("count"))
    return build.returns((Ref("loss"),), (saved, ()))


def loss_backward(*, layouts_inside: bool, reshape_before_pad: bool = True) -> Graph:
    """The gradient of that loss with respect to the logits."""
    build = GraphBuilder("backward")
    logits = build.value("logits", (1, SEQ, VOCAB), "bf16", strides=(SEQ * VOCAB, VOCAB, 1))
    others = [build.value("target", (SEQ - 1,), "i64"), build.value("a_max", (SEQ - 1,))]
    others += [build.value("log_sum", (SEQ - 1,)), build.value("count", ())]
    for name in ("C0", "C1"):
        build.values[name] = Value(name, kind="collection")
    build.collection("saved_for_backward", Ref("C0"), Ref("C1"), arg=True)
    build.collection("cotangents", build.value("g", ()), arg=True)
    build.collection("C0", logits, *others)
    inputs = (logits, *others, Ref("g"))
    if not layouts_inside:
        inputs = (_flat_outside(build, logits), *others, Ref("g"))

    def body() -> None:
        if layouts_inside:
            flat = _flat_inside(build, logits)
        else:
            flat = build.op("prims.convert_element_type", inputs[0], F32, out="flat", shape=(SEQ - 1, VOCAB))
        grad = build.op(
            "thunder.executors.nvfuserex_impl.nv_cross_entropy_bwd",
            Ref("g"),
            flat,
            *others,
            out="d",
            shape=(SEQ - 1, VOCAB),
        )
        if reshape_before_pad:
            whole = build.op("prims.reshape", grad, (1, SEQ - 1, VOCAB), out="whole", shape=(1, SEQ - 1, VOCAB))
            low_high = ((0, 0, 0), (0, 1, 0), (0, 0, 0))
            padded = build.op("prims.pad", whole, 0.0, low_high, out="padded", shape=(1, SEQ, VOCAB))
            build.op("prims.convert_element_type", padded, BF16, out="grad", shape=(1, SEQ, VOCAB), dtype="bf16")
        else:
            small = build.op(
                "prims.convert_element_type", grad, BF16, out="small", shape=(SEQ - 1, VOCAB), dtype="bf16"
            )
            build.op("prims.pad", small, 0.0, ((0, 1, 0), (0, 0, 0)), out="grad", shape=(SEQ, VOCAB), dtype="bf16")

    build.region("nvFusion0", inputs, (Ref("grad"),), body)
    return build.returns((Ref("grad"), None), held=("logits", "target"))


def _flat_outside(build: GraphBuilder, logits: Ref) -> Ref:
    """torch's views of the bf16 logits."""
    starts, ends = (0, 0, 0), (1, SEQ - 1, VOCAB)
    short = build.op("torch_slice_prim_impl", logits, starts, ends, (1, 1, 1), out="short", shape=ends, dtype="bf16")
    return build.op("torch.reshape", short, (SEQ - 1, VOCAB), out="view", shape=(SEQ - 1, VOCAB), dtype="bf16")


def _flat_inside(build: GraphBuilder, logits: Ref) -> Ref:
    """The same, after a cast, as the region has it."""
    starts, ends = (0, 0, 0), (1, SEQ - 1, VOCAB)
    wide = build.op("prims.convert_element_type", logits, F32, out="wide", shape=(1, SEQ, VOCAB))
    short = build.op("prims.slice_prim", wide, starts, ends, (1, 1, 1), out="short", shape=ends)
    ordered = build.op("prims.stride_order", short, (2, 1, 0), out="ordered", shape=ends)
    return build.op("prims.reshape", ordered, (SEQ - 1, VOCAB), out="flat", shape=(SEQ - 1, VOCAB))


def _cross_entropy_forward(build: GraphBuilder, flat: Ref, target: Ref) -> None:
    outputs = [build.value("loss", ()), build.value("a_max", (SEQ - 1,))]
    outputs += [build.value("log_sum", (SEQ - 1,)), build.value("count", ())]
    op_id = "thunder.executors.nvfuserex_impl.nv_cross_entropy_fwd"
    build.ops.append(Op(op_id, (flat, target, None, None, -100, None, "mean", 0.0), tuple(outputs)))


def temporaries(graph: Graph) -> Temporaries:
    region = next(op for op in graph.ops if op.is_fusion)
    return temporaries_of(region, graph.values, aliases(graph).strides)


# ---------------------------------------------------------------- measured


@pytest.mark.parametrize(
    ("graph", "measured_mb"),
    [
        pytest.param(loss_forward(layouts_inside=True), 4983, id="forward, plain"),
        pytest.param(loss_backward(layouts_inside=True), 6229, id="backward, plain"),
        pytest.param(loss_forward(layouts_inside=False), 0.04, id="forward, layouts outside"),
        pytest.param(loss_backward(layouts_inside=False), 3737, id="backward, layouts outside"),
        pytest.param(
            loss_backward(layouts_inside=False, reshape_before_pad=False),
            2491,
            id="backward, no reshape before the pad",
        ),
    ],
)
def test_simulate_loss_regions_agree_with_measured_bytes(graph, measured_mb) -> None:
    """The peak over the logits (bf16[1, 4096, 152064], not held twice) is within 1 % of what an H200 needed."""
    logits = 2 * SEQ * VOCAB
    labels = 8 * SEQ if graph.stage == "forward" else 0
    over = (simulate(graph).peak_bytes - logits - labels) / MB
    assert over == pytest.approx(measured_mb, rel=0.01, abs=0.01)


@pytest.mark.parametrize(("batch", "measured_mb"), [(1, 0.06), (2, 2491)])
def test_simulate_loss_with_shifted_labels_agrees_with_measured_bytes(batch, measured_mb) -> None:
    """Whole logits, cast and reshaped before the loss: free where the reshape only drops a batch of 1."""
    build = GraphBuilder("forward")
    shape = (batch, SEQ // batch, VOCAB)
    logits = build.arg("logits", shape, "bf16", strides=(SEQ // batch * VOCAB, VOCAB, 1))
    target = build.arg("target", (SEQ,), "i64", strides=(1,))

    def body() -> None:
        wide = build.op("prims.convert_element_type", logits, F32, out="wide", shape=shape)
        flat = build.op("prims.reshape", wide, (SEQ, VOCAB), out="flat", shape=(SEQ, VOCAB))
        _cross_entropy_forward(build, flat, target)

    outputs = tuple(map(Ref, ("loss", "a_max", "log_sum", "count")))
    build.region("nvFusion0", (logits, target), outputs, body)
    timeline = simulate(build.returns((Ref("loss"),), ((logits, target, *outputs[1:]), ())))
    assert (timeline.peak_bytes - timeline.start_bytes) / MB == pytest.approx(measured_mb, rel=0.01, abs=0.03)


def test_temporaries_plain_loss_are_two_wide_tensors_of_neighbouring_segments() -> None:
    """The sliced float32 logits, and the reordered ones that the reshape then views."""
    found = temporaries(loss_forward(layouts_inside=True))
    nbytes = 4 * (SEQ - 1) * VOCAB
    assert found.at_peak == (("short", nbytes), ("ordered", nbytes))
    assert [(b.name, b.cut_by, b.start, b.end) for b in found.boundaries] == [
        ("short", "prims.stride_order", 0, 2),
        ("ordered", "prims.stride_order", 1, 3),
    ]


# ---------------------------------------------------------------- the rule, case by case


def chain(
    *steps: tuple[str, tuple, tuple[int, ...]], name: str = "nvFusion0", cast: bool = True, then: str = "prims.sum"
) -> Graph:
    """A region over bf16[8, 4]: an optional cast, then ``steps`` (id, args, shape), then one more op."""
    build = GraphBuilder()
    x = build.arg("x", (8, 4), "bf16", strides=(4, 1))

    def body() -> None:
        dtype = "f32" if cast else "bf16"
        last = build.op("prims.convert_element_type", x, F32, out="wide", shape=(8, 4)) if cast else x
        for number, (op_id, args, shape) in enumerate(steps):
            last = build.op(op_id, last, *args, out=f"s{number}", shape=shape, dtype=dtype)
        shape = build.values[last.name].shape
        build.op(then, last, (0,), out="y", shape=shape[1:] if then == "prims.sum" else shape)

    build.region(name, (x,), (Ref("y"),), body)
    return build.returns(Ref("y"))


RESHAPE = ("prims.reshape", ((32,),), (32,))
UNITS = ("prims.reshape", ((1, 8, 4),), (1, 8, 4))
REORDER = ("prims.stride_order", ((1, 0),), (8, 4))
TURN = ("prims.transpose", ((1, 0),), (4, 8))
PAD = ("prims.pad", (0.0, ((0, 1, 0), (0, 0, 0))), (9, 4))
WIDE = 8 * 4 * 4  # bytes of f32[8, 4]


@pytest.mark.parametrize(
    ("graph", "names"),
    [
        pytest.param(chain(RESHAPE), ["wide"], id="reshape before a reduction"),
        pytest.param(chain(RESHAPE, then="prims.exp"), [], id="reshape before elementwise ops"),
        pytest.param(chain(UNITS), [], id="reshape that adds a dim of size 1"),
        pytest.param(chain(REORDER), ["wide", "s0"], id="stride_order before a reduction"),
        pytest.param(chain(REORDER, then="prims.exp"), ["wide", "s0"], id="stride_order before elementwise ops"),
        pytest.param(chain(TURN, RESHAPE), ["s0"], id="reshape of a transpose, written in its order"),
        pytest.param(chain(REORDER, TURN, RESHAPE), ["wide", "s0", "s2"], id="reshape that copies what was written"),
        pytest.param(chain(PAD, then="prims.exp"), ["wide"], id="pad of something computed"),
        pytest.param(chain(RESHAPE, cast=False), [], id="reshape of an input"),
        pytest.param(chain(PAD, cast=False), [], id="pad of an input"),
        pytest.param(chain(TURN), [], id="transpose"),
        pytest.param(chain(RESHAPE, then="prims.shallow_copy"), [], id="reshape that is returned"),
        pytest.param(chain(REORDER, name="TorchCompile0"), [], id="Inductor"),
    ],
)
def test_temporaries_of_a_chain_are_written_where_nvfuser_cannot_read_through_a_layout(graph, names) -> None:
    """A cut needs something computed before it and after it; a view past a cut costs nothing more; Inductor makes none."""
    assert [b.name for b in temporaries(graph).boundaries] == names
    assert temporaries(graph).peak_bytes == WIDE * min(len(names), 2)


def test_temporaries_output_of_the_region_is_not_counted_twice() -> None:
    """What a cut writes out is no temporary where the region gives it anyway."""
    build = GraphBuilder()
    x = build.arg("x", (8, 4), "bf16", strides=(4, 1))

    def body() -> None:
        wide = build.op("prims.convert_element_type", x, F32, out="wide", shape=(8, 4))
        flat = build.op("prims.reshape", wide, (32,), out="flat", shape=(32,))
        build.op("prims.sum", flat, (0,), out="y", shape=())

    build.region("nvFusion0", (x,), (Ref("wide"), Ref("y")), body)
    assert temporaries(build.returns(Ref("wide"), Ref("y"))).peak_bytes == 0


# ---------------------------------------------------------------- what each layout costs


def test_layout_costs_tell_bytes_from_launches_from_nothing() -> None:
    """A cutting reshape and a copying one cost bytes, a passenger a launch, an index map inside a kernel nothing."""
    build = GraphBuilder()
    x = build.arg("x", (8, 4), "bf16", strides=(4, 1))

    def body() -> None:
        wide = build.op("prims.convert_element_type", x, F32, out="wide", shape=(8, 4))
        flat = build.op("prims.reshape", wide, (32,), out="flat", shape=(32,))
        build.op("prims.sum", flat, (0,), out="y", shape=())
        turned = build.op("prims.transpose", x, (1, 0), out="turned", shape=(4, 8), dtype="bf16")
        build.op("prims.reshape", turned, (32,), out="copy", shape=(32,), dtype="bf16")
        other = build.op("prims.transpose", wide, (1, 0), out="other", shape=(4, 8))
        build.op("prims.sin", other, out="z", shape=(4, 8))

    build.region("nvFusion0", (x,), tuple(map(Ref, ("y", "turned", "copy", "z"))), body)
    graph = build.returns(*map(Ref, ("y", "turned", "copy", "z")))
    found = {cost.output: (cost.cost, cost.nbytes) for cost in layout_costs(graph, aliases(graph))}
    assert found == {
        "flat": (Cost.BYTES, WIDE),
        "turned": (Cost.LAUNCH, 0),
        "copy": (Cost.BYTES, 64),
        "other": (Cost.NOTHING, 0),
    }

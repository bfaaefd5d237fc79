"""A step is what its parts need, one after another, and what stands beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thunder_fusionfix.alias import aliases
from thunder_fusionfix.devices import CONTEXT_BYTES, DEVICES, find, fits
from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.model import CLEAR, DEL, EXPAND, RETURN, UNPACK, Graph, Op, Ref, Struct, Value
from thunder_fusionfix.predict import Prediction, step_text
from thunder_fusionfix.results import Spec
from thunder_fusionfix.step import StepPart, held_in_a_step, simulate_step

KB = 4096  # bytes of every tensor below: f32[1024]


def tensors(*names: str) -> dict[str, Value]:
    return {name: Value(name, (1024,), "f32", "cuda:0") for name in names}


def collections(*names: str) -> dict[str, Value]:
    return {name: Value(name, kind="collection") for name in names}


def r(*names: str) -> tuple[Ref, ...]:
    return tuple(Ref(name) for name in names)


def forward(args: str, ops: list[Op], outputs: str, saved: str, values: str) -> Graph:
    """A forward as Thunder prints it: it returns its outputs and what it saves."""
    given = Struct(
        (("output", r(*outputs.split())), ("flat_args", r(*args.split())), ("flat_output", r(*outputs.split())))
    )
    end = Op(RETURN, (given, (r(*saved.split()), ())))
    return Graph("computation", "forward", tuple(args.split()), (*ops, end), tensors(*values.split()))


def backward(saved: str, cotangents: str, ops: list[Op], gradients: tuple[str | None, ...], values: str) -> Graph:
    """A backward as Thunder prints it: it opens two collections and returns a gradient, or None, for each argument."""
    opening = [
        Op(UNPACK, r("saved_for_backward"), r("C0", "C1")),
        Op(CLEAR, r("saved_for_backward")),
        Op(CLEAR, r("C1")),
        Op(DEL, r("C1", "saved_for_backward")),
        Op(UNPACK, r("cotangents"), r(*cotangents.split())),
        Op(CLEAR, r("cotangents")),
        Op(DEL, r("cotangents")),
        Op(UNPACK, r("C0"), r(*saved.split())),
        Op(CLEAR, r("C0")),
        Op(DEL, r("C0")),
    ]
    end = Op(RETURN, (tuple(Ref(name) if name else None for name in gradients),))
    known = {**tensors(*values.split()), **collections("saved_for_backward", "cotangents", "C0", "C1")}
    return Graph("backward_fn", "backward", ("saved_for_backward", "cotangents"), (*opening, *ops, end), known)


def model() -> StepPart:
    """h = sin(exp(w * x)); saves exp's output; one parameter w, one input x."""
    ops = [
        Op("torch.mul", r("w", "x"), Ref("a")),
        Op("torch.exp", r("a"), Ref("b")),
        Op(DEL, r("a")),
        Op("torch.sin", r("b"), Ref("h")),
    ]
    back = [
        Op("torch.cos", r("b"), Ref("c")),
        Op(DEL, r("b")),
        Op("torch.mul", r("c", "g"), Ref("d")),
        Op(DEL, r("c", "g")),
        Op("torch.mul", r("d", "x"), Ref("gw")),
        Op(DEL, r("d", "x")),
    ]
    return StepPart(
        "thunder_0 of graph 0",
        forward("w x", ops, "h", "b x", "w x a b h"),
        backward("b x", "g", back, ("gw", None), "w x b g c d gw"),
    )


def loss() -> StepPart:
    """l = relu(h); saves h."""
    return StepPart(
        "thunder_0 of graph 1",
        forward("l_h_", [Op("torch.relu", r("l_h_"), Ref("l"))], "l", "l_h_", "l_h_ l"),
        backward(
            "l_h_", "gl", [Op("torch.mul", r("l_h_", "gl"), Ref("gh")), Op(DEL, r("l_h_", "gl"))], ("gh",), "l_h_ gl gh"
        ),
    )


def test_step_of_one_part_by_hand():
    """Forward: w, x, w's gradient, a and b, then b and h. Backward: b, h and g, then c, d, gw as they come and go."""
    step = simulate_step([model()], optimizer="keep-gradients", workspace_bytes=0)
    assert step.base == {"parameters": KB, "inputs": KB, "gradients": KB, "optimizer state": 0, "cuBLAS workspaces": 0}
    assert step.phases[0].peak_bytes == 3 * KB + 2 * KB  # a and b; then b and h
    assert step.saved_bytes == 2 * KB  # b, and h in the program's hands
    # b, h, g and c at the first op; g is held to the end: h, g, c, d and later h, g, d, gw
    assert step.phases[1].peak_bytes == 3 * KB + 4 * KB
    assert step.peak_bytes == 7 * KB and step.peak_phase.name == "backward of thunder_0 of graph 0"


def test_step_gradient_between_parts_lives_until_the_receiving_backward_returns():
    """Under ThunderFX the gradient that the loss sends is there until the model's backward ends."""
    parts = [model(), loss()]
    held = simulate_step(parts, workspace_bytes=0)
    split = simulate_step(parts, workspace_bytes=0, split_autograd=True)
    assert [phase.name for phase in held.phases] == [
        "forward of thunder_0 of graph 0",
        "forward of thunder_0 of graph 1",
        "backward of thunder_0 of graph 1",
        "backward of thunder_0 of graph 0",
    ]
    last = len(held.phases[-1].live_bytes) - 1
    assert held.phases[-1].live_bytes[last] - split.phases[-1].live_bytes[last] == KB


def beside(statement: bool, shape: tuple[int, ...] = ()) -> StepPart:
    """h = exp(w), l = sum(h) of ``shape``: a loss and its logits, whose gradients gl and gh the backward takes."""
    ops = [Op("torch.exp", r("w"), Ref("h")), Op("torch.sum", r("h"), Ref("l"))]
    back = [
        Op("torch.mul", r("h", "gl"), Ref("a")),
        Op(DEL, r("gl")),
        Op("torch.mul", r("h", "gh"), Ref("b")),
        Op(DEL, r("gh", "h")),
        Op("torch.add", r("a", "b"), Ref("gw")),
        Op(DEL, r("a", "b")),
    ]
    first = forward("w", ops, "h l", "h", "w h l")
    second = backward("h", "gh gl", back, ("gw",), "w h gh gl a b gw")
    first, second = (
        replace(graph, values={**graph.values, **{name: replace(graph.values[name], shape=shape) for name in names}})
        for graph, names in ((first, ("l",)), (second, ("gl",)))
    )
    at = [op.id for op in second.ops].index(UNPACK, 1)
    said = (Op(EXPAND, (Ref("cotangents"), (0,))),) if statement else ()
    return StepPart("thunder_0 of graph 0", first, replace(second, ops=(*second.ops[:at], *said, *second.ops[at:])))


def test_step_gradient_that_nobody_sends_is_one_zero_where_the_backward_says_so():
    """A block of 512 bytes instead of the logits' size; else as autograd fills it."""
    dense, repeated = (simulate_step([beside(said)], workspace_bytes=0) for said in (False, True))
    assert dense.phases[1].peak_bytes - repeated.phases[1].peak_bytes == KB - 512
    assert dense.phases[0] == repeated.phases[0]


def test_step_gradient_that_is_sent_counts_in_full():
    """By a later part, or by a program without a loss of one element, which calls backward on all outputs."""
    for others, shape in (([], (1024,)), ([taker()], ())):
        dense, repeated = (simulate_step([beside(said, shape), *others], workspace_bytes=0) for said in (False, True))
        assert dense.phases[-1].peak_bytes == repeated.phases[-1].peak_bytes


def taker() -> StepPart:
    """A later part that sends the logits a gradient."""
    back = [Op("torch.mul", r("l_h_", "gk"), Ref("gh")), Op(DEL, r("l_h_", "gk"))]
    return StepPart(
        "thunder_0 of graph 1",
        forward("l_h_", [Op("torch.relu", r("l_h_"), Ref("k"))], "k", "l_h_", "l_h_ k"),
        backward("l_h_", "gk", back, ("gh",), "l_h_ gk gh"),
    )


def test_step_start_of_the_backward_is_the_first_tenth_of_its_calls():
    """Of four calls in the backwards the first one is the first tenth: the loss's, where everything is still saved."""
    step = simulate_step([model(), loss()], workspace_bytes=0)
    assert step.backward_start_bytes == step.phases[2].peak_bytes


def test_step_output_taken_by_another_graph_is_counted_once():
    """The logits are the model's output and what the loss saves: one tensor, alive to the end of the step."""
    step = simulate_step([model(), loss()], workspace_bytes=0)
    assert step.saved_bytes == 3 * KB  # b, h, l
    names = [holder.name for holder in step.holders]
    assert len(names) == len(set(names))
    # in the loss's backward: w and x, b saved by the model, h, l, the cotangent gl, and gh
    assert step.phases[2].peak_bytes == 2 * KB + 5 * KB


def test_step_output_passed_inside_one_graph_ends_with_its_last_use():
    """Between two parts of one graph the program holds nothing: what is saved ends where its backward drops it."""
    within = StepPart("thunder_2 of graph 0", loss().forward, loss().backward)
    one, two = simulate_step([model(), within], workspace_bytes=0), simulate_step([model(), loss()], workspace_bytes=0)
    assert two.phases[-1].peak_bytes - one.phases[-1].peak_bytes == KB
    assert one.phases[1].peak_bytes == two.phases[1].peak_bytes


def test_step_holders_at_the_peak_add_up_to_the_peak():
    """Nothing at the peak is without a name."""
    for parts in ([model()], [model(), loss()]):
        step = simulate_step(parts, workspace_bytes=512)
        assert sum(holder.nbytes for holder in step.holders) == step.peak_bytes


def test_step_with_an_optimizer_has_state_and_no_gradients_from_before():
    """AdamW keeps two averages and takes one root; gradients are made anew in each step and are there when it runs."""
    plain = simulate_step([model()], optimizer="keep-gradients", workspace_bytes=0)
    adamw = simulate_step([model()], optimizer="adamw", workspace_bytes=0)
    assert adamw.base["gradients"] == 0 and adamw.base["optimizer state"] == 2 * KB
    assert adamw.phases[0].peak_bytes == plain.phases[0].peak_bytes - KB + 2 * KB
    # w, x, two averages, the gradient, one root, and the output, which the program has until the step ends
    assert adamw.phases[-1].name == "optimizer" and adamw.phases[-1].peak_bytes == 7 * KB
    assert adamw.peak_of("optimizer") == 7 * KB and plain.peak_of("optimizer") == 0


def test_step_workspaces_are_counted_for_each_thread_that_multiplies():
    """No matmul, no cuBLAS handle; a forward and a backward that multiply have one each."""
    assert simulate_step([model()], workspace_bytes=1 << 20).base["cuBLAS workspaces"] == 0
    product = forward("w", [Op("torch.matmul", r("w", "w"), Ref("h"))], "h", "", "w h")
    part = StepPart("f", product, None)
    assert simulate_step([part], workspace_bytes=1 << 20).base["cuBLAS workspaces"] == 1 << 20


def test_step_parameter_used_by_two_parts_has_one_gradient():
    """A weight that two parts take is one tensor with one gradient."""
    again = model()
    parts = [again, StepPart("thunder_0 of graph 1", again.forward, again.backward)]
    step = simulate_step(parts, optimizer="keep-gradients", workspace_bytes=0)
    assert step.base["parameters"] == step.base["gradients"] == KB


def test_step_with_a_region_that_hides_memory_is_a_lower_bound():
    """Inductor's matmuls inside a region need buffers that the Graph does not show: the prediction says so."""
    product = Op("torch.matmul", r("w", "w"), Ref("h"))
    hidden = Op("TorchCompile0", r("w"), r("h"), subops=(product,), is_fusion=True)
    shown = Op("TorchCompile0", r("w"), r("h"), subops=(Op("torch.exp", r("w"), Ref("h")),), is_fusion=True)
    for op, expected in ((hidden, True), (shown, False), (product, False)):
        step = simulate_step([StepPart("f", forward("w", [op], "h", "", "w h"), None)])
        assert step.is_lower_bound is expected and bool(step.notes) is expected


def test_step_wrong_options_are_named():
    """An unknown optimizer, or nothing to run, is the caller's mistake."""
    with pytest.raises(UsageError, match="adamw"):
        simulate_step([model()], optimizer="lion")
    with pytest.raises(UsageError, match="part"):
        simulate_step([])


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_device_is_smaller_than_its_name_says_and_fits_to_the_byte(device):
    """What torch reports is below the number in the name, in GiB or GB, and above nine tenths of it."""
    said = int(device.name.rpartition("-")[2].removesuffix("gb"))
    assert 0.9 * said * 10**9 < device.capacity_bytes <= said * 2**30
    room = device.capacity_bytes - CONTEXT_BYTES
    assert fits(room, device) and not fits(room + 1, device)


def test_device_unknown_name_lists_the_known():
    """A wrong --device says what there is."""
    with pytest.raises(UsageError, match="h100-80gb"):
        find("h1000")


def test_held_in_a_step_are_the_outputs_that_were_saved() -> None:
    """What the program has in its hands while the backward runs is not freed by it; nothing else that was saved is held."""
    ops = [Op("torch.mul", r("w", "x"), Ref("a")), Op("torch.exp", r("a"), Ref("h"))]
    fore = forward("w x", ops, "h", "w a h", "w x a h")
    back = backward("w a h", "g", [Op("torch.mul", r("a", "h"), Ref("gw"))], ("gw", None), "w a h g gw")
    assert held_in_a_step(back, fore, aliases(fore)).held == {"h"}


def test_step_text_tells_shapes_and_leaves_out_what_is_next_to_nothing() -> None:
    """What is alive at the peak is named with its dtype and shape; what would show as 0 MB is one line with the rest."""
    large, small = Value("large", (1024, 1024), "f32", "cuda:0"), Value("small", (8,), "f32", "cuda:0")
    ops = (Op("torch.exp", (Ref("x"),), Ref("large")), Op("torch.sum", (Ref("large"),), Ref("small")))
    graph = Graph(
        "f", "inference", ("x",), (*ops, Op(RETURN, (Ref("small"),))), {"large": large, "small": small, "x": small}
    )
    parts = (StepPart("f of graph 0", graph, None),)
    shown = step_text(Spec("m"), Prediction(simulate_step(parts, workspace_bytes=0), parts, (), 0.0), find("h100-80gb"))
    assert "large: f32[1024, 1024]" in shown and "small:" not in shown and " more" in shown

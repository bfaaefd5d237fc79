"""joint: who runs forward and backward, judged by Thunder's own split, and what counts as one value."""

from __future__ import annotations

import pytest
import thunder
import torch
import torch.nn.functional as F
from cpu_nvfuser import nvfuser_on_cpu

from thunder_fusionfix._thunder import FusionExecutor, nvfuser_version
from thunder_fusionfix.errors import UnsupportedTraceError
from thunder_fusionfix.joint import (
    JointFacts,
    Site,
    effects_of,
    equal_values,
    executed,
    is_layout_chain,
    op_at,
    opened,
    sites,
    split,
)
from thunder_fusionfix.model import Graph, Op, Ref, Struct, Value
from thunder_fusionfix.read import read


class Watcher(FusionExecutor):
    """Stands last in the list and keeps the joint trace as it is split."""

    def __init__(self) -> None:
        super().__init__("watcher")
        self.seen: list[Graph] = []

    def can_fuse(self, bsym: object) -> bool:
        return False

    def fusion_pass(self, trace):
        self.seen.append(read(trace))
        return trace


def block(x, w, mask, buffer):
    h = F.layer_norm(x @ w, (8,))
    h = torch.where(mask, F.gelu(h), 0.0)
    buffer.add_(h.detach().sum())
    return h @ w, (h * x).sum(), mask


def joint_of(fn, *args, fusion_type="dataflow"):
    """The joint Graph that is split, and the forward Graph that Thunder makes of it."""
    watcher = Watcher()
    with nvfuser_on_cpu():
        jitted = thunder.jit(fn, executors=("nvfuser", watcher), fusion_type=fusion_type)
        jitted(*args)
        return watcher.seen[-1], read(thunder.last_traces(jitted)[-1])


@pytest.mark.skipif(nvfuser_version() is None, reason="nvFuser is not installed")
@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
def test_split_agrees_with_thunder(fusion_type: str) -> None:
    """What the rule saves is what Thunder's forward trace returns for the backward."""
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    joint, forward = joint_of(block, x, w, torch.rand(4, 8) > 0.5, torch.zeros(()), fusion_type=fusion_type)
    halves = split(joint)
    # the executors of last resort rename what they claim: compare kinds, not names
    assert described(joint, halves.saved) == described(forward, forward.saved)
    assert sorted((*halves.forward, *halves.backward)) == [
        pos for pos, op in enumerate(joint.ops) if op.id not in ("return", "prims.get_grad")
    ]


def described(graph: Graph, names: tuple[str, ...]) -> list[tuple]:
    values = (graph.values[name] for name in names)
    return sorted((value.shape or (), value.dtype or "", value.kind) for value in values)


# ---------------------------------------------------------------- small graphs

F32 = {name: Value(name, (4, 4), "f32", "cuda:0") for name in ("x", "a", "b", "c", "d", "e", "g", "h")}


def graph_of(*ops: Op, outputs: tuple[str, ...], grads: tuple[str, ...]) -> Graph:
    """A joint Graph with the argument x."""
    result = Struct(
        (
            ("output", tuple(Ref(name) for name in grads)),
            ("flat_args", (Ref("x"),)),
            ("fw_flat_out", tuple(Ref(name) for name in outputs)),
        )
    )
    return Graph("computation", "joint", ("x",), (*ops, Op("return", (result,))), F32)


def op(callee: str, output: str, *inputs: object) -> Op:
    return Op(callee, tuple(Ref(arg) if isinstance(arg, str) else arg for arg in inputs), Ref(output))


MLP = graph_of(
    op("prims.exp", "a", "x"),
    op("prims.neg", "b", "a"),
    op("prims.sin", "e", "x"),  # stands among the forward, is needed by the backward alone
    op("prims.get_grad", "g", "b"),
    op("prims.mul", "c", "g", "e"),
    op("prims.mul", "d", "c", "a"),
    outputs=("b",),
    grads=("d",),
)


def test_split_goes_by_dataflow_and_not_by_position() -> None:
    """An op that only the backward needs runs backward wherever it stands; its forward inputs are saved."""
    halves = split(MLP)
    assert halves.forward == (0, 1)
    assert halves.backward == (2, 4, 5)
    assert halves.saved == ("x", "a")


def test_in_place_copy_into_a_forward_value_runs_forward() -> None:
    """Its result is not needed, its effect is."""
    graph = graph_of(
        op("prims.exp", "a", "x"),
        Op("prims.copy_", (Ref("a"), Ref("x")), Ref("b")),
        op("prims.get_grad", "g", "a"),
        outputs=("a",),
        grads=("g",),
    )
    assert split(graph).forward == (0, 1)


def test_executed_order_is_forward_then_backward() -> None:
    """Each half keeps its order, and the return statement stays last."""
    assert [one.outputs for one in executed(MLP).ops] == [("a",), ("b",), ("g",), ("e",), ("c",), ("d",), ()]


def test_split_of_another_trace_is_refused() -> None:
    """A trace without gradients has no halves."""
    graph = Graph("f", "inference", ("x",), (op("prims.exp", "a", "x"), Op("return", (Ref("a"),))), F32)
    with pytest.raises(UnsupportedTraceError, match="not a joint"):
        split(graph)


def test_equal_values_are_found_through_equal_inputs() -> None:
    """The same op of the same or of equal values is one value; another constant makes another one."""
    graph = graph_of(
        op("prims.exp", "a", "x"),
        op("prims.exp", "b", "x"),
        op("prims.add", "c", "a", 1.0),
        op("prims.add", "d", "b", 1.0),
        op("prims.add", "e", "b", 1),
        outputs=("c",),
        grads=(),
    )
    assert equal_values(graph, lambda site, one: True) == {"b": "a", "d": "c"}
    assert equal_values(graph, lambda site, one: one.id != "prims.exp") == {}


def test_regions_are_opened_and_unknown_composites_judged_by_their_parts() -> None:
    """Sites name sub-ops of regions; a composite without a row is what it is made of."""
    inner = op("prims.exp", "b", "a")
    region = Op("nvFusion0", (Ref("a"),), Ref("b"), subops=(inner,), is_fusion=True)
    strange = Op("ltorch.strange", (Ref("x"),), Ref("a"), subops=(op("prims.transpose", "a", "x", (1, 0)),))
    graph = graph_of(strange, region, outputs=("b",), grads=())
    assert [site for site, _ in sites(graph)] == [Site(0), Site(1, 0), Site(2)]
    assert op_at(graph, Site(1, 0)) is inner
    assert is_layout_chain(strange) and not is_layout_chain(inner)
    assert [one.id for one in opened(graph).ops][:2] == ["prims.transpose", "nvFusion0"]
    random = Op("ltorch.dropout", (Ref("x"),), Ref("a"), subops=(op("prims.mul", "a", "x", "x"),))
    assert not all(effect.is_pure for effect in effects_of(random))


def test_saved_bytes_count_each_storage_once_and_no_argument() -> None:
    """A view of what is saved takes nothing, and arguments are the caller's."""
    graph = graph_of(
        op("prims.exp", "a", "x"),
        op("prims.transpose", "b", "a", (1, 0)),
        op("prims.get_grad", "g", "a"),
        op("prims.mul", "c", "g", "a"),
        op("prims.mul", "d", "c", "b"),
        op("prims.mul", "e", "d", "x"),
        outputs=("a", "b"),
        grads=("e",),
    )
    facts = JointFacts(graph, graph)
    assert set(facts.after.saved) == {"a", "b", "x"}
    assert facts.saved_bytes == 64

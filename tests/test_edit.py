"""apply_plan: each kind of edit makes a trace that runs and gives the same numbers, and the trace that was given stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import thunder
import torch
from cpu_nvfuser import calls, nvfuser_on_cpu
from thunder.core.trace import from_trace
from thunder.core.transform_common import Transform
from thunder.core.transforms import TraceTag
from thunder.executors.passes import del_last_used

from thunder_fusionfix.edit import _Editor, apply_plan
from thunder_fusionfix.errors import UnsupportedTraceError
from thunder_fusionfix.model import CLEAR, DEL, Const, Graph, NewOp, Part, Placed, Plan, Ref, RegionEdit, Repeat
from thunder_fusionfix.read import Reader, read
from thunder_fusionfix.verify import Allow, check_graph, verify

pytestmark = pytest.mark.nvfuser

ANYTHING = Allow(may_reorder=True, may_split_regions=True, may_rewrite_regions=True)


@dataclass
class Edit(Transform):
    """Carries out the plan that ``plan_of`` makes of each trace's Graph."""

    plan_of: Callable[[Graph], Plan]

    def transform_trace_post_optimization(self, computation_trace, **kwargs):
        self.given, self.executors_list = computation_trace, kwargs.get("executors_list")
        graph = read(computation_trace)
        self.made = apply_plan(computation_trace, graph, self.plan_of(graph), "a test")
        return self.made


def edited(fn, args, plan_of, **options):
    """The hook after ``fn(*args)`` ran with its trace edited; the result is compared with eager's."""
    hook = Edit(plan_of)
    with nvfuser_on_cpu():
        got = thunder.jit(fn, executors=("nvfuser",), transforms=[hook], **options)(*args)
    torch.testing.assert_close(got, fn(*args))
    return hook


def region_of(graph: Graph) -> tuple[int, int]:
    """Position of the first region, and how many ops it holds."""
    pos = next(pos for pos, op in enumerate(graph.ops) if op.is_fusion)
    return pos, len(graph.ops[pos].subops)


def chain(x):
    """One region of three ops whose intermediates nobody else needs."""
    return torch.exp(torch.tanh(x) * 2)


def branches(x, y):
    """One region of two independent ops."""
    return torch.exp(x), torch.tanh(y)


# ---------------------------------------------------------------- what stays as it is


def split_all(graph: Graph) -> Plan:
    """Each op of the first region in a region of its own."""
    pos, count = region_of(graph)
    subops = graph.ops[pos].subops
    return Plan((RegionEdit(pos, tuple(Part((index,), subops[index].outputs) for index in range(count))),))


def test_edit_leaves_the_given_trace_as_it_was():
    """Text, bound symbols, proxies, names and scopes of the input are the very objects that they were."""
    seen = {}

    def plan_of(graph):
        trace = seen["hook"].given
        seen["text"], seen["names"], seen["scopes"] = str(trace), set(trace.names), len(trace.scopes)
        seen["bsyms"] = list(trace.bound_symbols)
        seen["parts"] = [(bsym.args, bsym.output, bsym.subsymbols) for bsym in trace.bound_symbols]
        return split_all(graph)

    hook = seen["hook"] = Edit(plan_of)
    with nvfuser_on_cpu():
        thunder.jit(chain, executors=("nvfuser",), transforms=[hook])(torch.randn(3, 4))
    given = hook.given
    assert hook.made is not given and str(hook.made) != seen["text"]
    assert str(given) == seen["text"] and given.names == seen["names"] and len(given.scopes) == seen["scopes"]
    assert all(one is other for one, other in zip(given.bound_symbols, seen["bsyms"], strict=True))
    for bsym, (args, output, subsymbols) in zip(given.bound_symbols, seen["parts"], strict=True):
        assert bsym.args is args and bsym.output is output and bsym.subsymbols is subsymbols


def test_reader_gives_an_edited_trace_as_if_it_read_it_anew():
    """What was read before is not read again, and the Graph is the one of a new reading."""
    hook = edited(lambda x, y: (chain(x) @ y).exp(), [torch.randn(3, 4), torch.randn(4, 5)], split_all)
    reader = Reader()
    before, after = reader.read(hook.given), reader.read(hook.made)
    assert after == read(hook.made) and before == read(hook.given)
    kept = {id(part) for op in before.ops for part in op.leaves} & {id(part) for op in after.ops for part in op.leaves}
    assert len(kept) >= len(before.ops) // 2
    assert reader.proxies(hook.made).keys() == after.values.keys()


def test_deletes_are_those_of_thunder():
    """Thunder's own pass, asked to place the ``del``s of an edited trace, places the same."""

    def step(x, y):
        return (chain(x) @ y).exp().sum()

    hook = Edit(split_all)
    with nvfuser_on_cpu():
        x, y = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
        thunder.jit(step, executors=("nvfuser",), transforms=[hook])(x, y).backward()
    assert hook.made is not hook.given and TraceTag.BACKWARD in hook.made.tags
    bare = from_trace(hook.made)
    bare.bound_symbols = [bsym for bsym in hook.made.bound_symbols if bsym.sym.name != CLEAR]
    theirs = del_last_used(bare, clear_mutable_collections=True)
    assert [str(bsym) for bsym in hook.made.bound_symbols] == [str(bsym) for bsym in theirs.bound_symbols]


def test_empty_plan_gives_the_same_object():
    """Nothing to do: the trace itself."""
    hook = edited(chain, [torch.randn(3, 4)], lambda graph: Plan())
    assert hook.made is hook.given


def test_edited_trace_says_what_made_it():
    """The provenance is the one that was given, as a comment that leaves the printed trace valid Python."""
    hook = edited(chain, [torch.randn(3, 4)], split_all)
    assert str(hook.made).startswith("# Constructed by a test\n")
    compile(str(hook.made), "trace", "exec")


# ---------------------------------------------------------------- regions


def test_region_in_parts_runs_each_part():
    """Parts of a region have names of their own: two with one name would run the same code."""
    hook = edited(chain, [torch.randn(3, 4)], split_all)
    graph = read(hook.made)
    names = [op.id for op in graph.ops if op.is_fusion]
    assert names == ["nvFusion0", "nvFusion1", "nvFusion2"]
    assert [name.split(":")[0] for name in calls] == names
    verify(read(hook.given), graph, ANYTHING)


def test_new_regions_take_numbers_that_no_region_has():
    """A part that is added after nvFusion1 exists becomes nvFusion2, wherever it stands."""

    def two_regions(x, w):
        return torch.tanh(torch.exp(torch.exp(x) * 2) @ w) * 3

    hook = edited(two_regions, [torch.randn(3, 3), torch.randn(3, 3)], split_all)
    names = [op.id for op in read(hook.made).ops if op.is_fusion]
    assert names == ["nvFusion0", "nvFusion2", "nvFusion3", "nvFusion1"]


def test_region_without_parts_is_gone():
    """A dissolved region leaves its ops to those that are placed instead."""

    def flipped(x):
        return torch.transpose(x, 0, 1).reshape(-1)

    def dissolve(graph):
        pos, _ = region_of(graph)
        new = [NewOp(sub.id, sub.args, sub.outputs[0]) for sub in graph.ops[pos].subops]
        return Plan((RegionEdit(pos, ()),), tuple(Placed(pos, op) for op in new))

    hook = edited(flipped, [torch.randn(3, 4)], dissolve, nv_enable_shape_only_fusion=True)
    assert any(op.is_fusion for op in read(hook.given).ops)
    assert not any(op.is_fusion for op in read(hook.made).ops) and not calls


def test_region_takes_and_gives_what_its_part_says():
    """Inputs follow the ops of a part, in the old order where they were inputs before; outputs are those that are asked for."""

    def first_only(graph):
        pos, count = region_of(graph)
        subops = graph.ops[pos].subops
        late = [index for index in range(count) if set(subops[index].inputs) <= {"y"}]
        early = [index for index in range(count) if index not in late]
        outputs = graph.ops[pos].outputs
        parts = [
            Part(
                tuple(part),
                tuple(name for name in outputs if name in {out for index in part for out in subops[index].outputs}),
            )
            for part in (late, early)
        ]
        return Plan((RegionEdit(pos, tuple(parts)),))

    hook = edited(branches, [torch.randn(3), torch.randn(4)], first_only)
    first, second = (op for op in read(hook.made).ops if op.is_fusion)
    assert first.inputs == ("y",) and second.inputs == ("x",)


def test_op_in_a_region_can_be_replaced():
    """A NewOp takes the place of a sub-op and gives its value under the old name."""

    def rewritten(graph):
        pos, count = region_of(graph)
        subops = graph.ops[pos].subops
        at = next(index for index, sub in enumerate(subops) if sub.id == "prims.mul")
        doubled = NewOp("prims.add", (subops[at].args[0], subops[at].args[0]), subops[at].outputs[0])
        body = tuple(doubled if index == at else index for index in range(count))
        return Plan((RegionEdit(pos, (Part(body, graph.ops[pos].outputs),)),))

    hook = edited(chain, [torch.randn(3, 4)], rewritten)
    assert [sub.id for op in read(hook.made).ops for sub in op.subops if op.is_fusion].count("prims.add") == 1


# ---------------------------------------------------------------- ops outside, and order


def test_placed_ops_stand_before_their_position_and_are_bound_for_torch():
    """What is placed runs right before the op at its position, in the order given, with executors of last resort."""

    def hoisted(graph):
        pos, count = region_of(graph)
        twice = (
            NewOp("prims.transpose", (Ref("x"), (1, 0)), "%0"),
            NewOp("prims.transpose", (Ref("%0"), (1, 0)), "%1"),
        )
        tanh = NewOp("prims.tanh", (Ref("%1"),), graph.ops[pos].subops[0].outputs[0])
        part = Part((tanh, *range(1, count)), graph.ops[pos].outputs)
        return Plan((RegionEdit(pos, (part,)),), tuple(Placed(pos, op) for op in twice))

    hook = edited(chain, [torch.randn(3, 4)], hoisted)
    graph = read(hook.made)
    pos, _ = region_of(graph)
    assert [op.id for op in graph.ops[:pos]] == ["torch.permute", DEL, "torch.permute", DEL][:pos] or [
        op.id for op in graph.ops[:pos] if op.id != DEL
    ] == ["torch.permute", "torch.permute"]
    assert not any("prims" in op.id for op in graph.ops)


@pytest.mark.parametrize(
    "symbol, args", [("transpose", ((1, 0),)), ("reshape", ((2, 6),)), ("pad", (0.0, ((0, 1, 0),) * 2))]
)
def test_placed_ops_of_one_kind_are_bound_as_each_would_be_alone(symbol, args, monkeypatch):
    """Of equal ops over tensors of equal metadata one is asked for, and the trace is as if each had been."""

    def placed(graph):
        end = len(graph.ops) - 1
        ops = [NewOp(f"prims.{symbol}", (Ref(name), *args), f"%{name}") for name in ("x", "y", "z")]
        other = NewOp(f"prims.{symbol}", (Ref("w"), *args), "%w")
        zero = NewOp("prims.pad", (Ref("z"), -0.0, ((0, 1, 0),) * 2), "%0")  # 0.0 and -0.0 are equal to Python
        return Plan(placed=tuple(Placed(end, op) for op in (*ops, other, zero)))

    def program(x, y, z, w):
        return torch.exp(x) + y + z + w

    inputs = [torch.randn(3, 4) for _ in range(3)] + [torch.randn(3, 4, dtype=torch.float64)]
    asked, claim = [], _Editor._claim
    monkeypatch.setattr(_Editor, "_claim", lambda self, bsym, given: asked.append(bsym) or claim(self, bsym, given))
    alike = edited(program, inputs, placed).made
    assert len(asked) == 3
    monkeypatch.setattr(_Editor, "_source", lambda self, op: None)
    alone = edited(program, inputs, placed).made
    assert len(asked) == 3 + 5
    assert [str(bsym) for bsym in alike.bound_symbols] == [str(bsym) for bsym in alone.bound_symbols]
    assert read(alike) == read(alone)


def test_order_moves_ops_and_places_deletes_anew():
    """Ops stand in the order asked for, each name is deleted right after its last use, and the trace is sound."""

    def two_products(a, b):
        return a @ a @ b, b @ b @ a

    def turned(graph):
        steps = [pos for pos, op in enumerate(graph.ops) if op.id not in (DEL, CLEAR)]
        *products, result = steps
        return Plan(order=(*products[2:], *products[:2], result))

    hook = Edit(turned)
    args = [torch.randn(3, 3), torch.randn(3, 3)]
    torch.testing.assert_close(thunder.jit(two_products, executors=(), transforms=[hook])(*args), two_products(*args))
    before, after = read(hook.given), read(hook.made)
    first, second, third, fourth = (op.outputs for op in before.ops[:-1] if op.id != DEL)
    assert [op.outputs for op in after.ops[:-1] if op.id != DEL] == [third, fourth, first, second]
    assert [op.args for op in after.ops if op.id == DEL] == [(Ref(third[0]),), (Ref(first[0]),)]
    check_graph(after)
    verify(before, after, ANYTHING)


def test_backward_trace_clears_its_collections_once():
    """In a backward trace collections are cleared where they were, no more and no less often."""
    hook = Edit(lambda graph: split_all(graph) if graph.stage == "backward" else Plan())
    x = torch.randn(3, 4, requires_grad=True)
    with nvfuser_on_cpu():
        out = thunder.jit(chain, executors=("nvfuser",), transforms=[hook])(x)
        out.sum().backward()
    before, after = read(hook.given), read(hook.made)
    assert hook.made is not hook.given
    old, new = ([op.args for op in graph.ops if op.id == CLEAR] for graph in (before, after))
    assert old == new and old
    check_graph(after)
    expected = x.detach().clone().requires_grad_(True)
    chain(expected).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


# ---------------------------------------------------------------- what cannot be done


def replacing(op: NewOp) -> Callable[[Graph], Plan]:
    """A plan that puts ``op`` before the first region."""
    return lambda graph: Plan(placed=(Placed(region_of(graph)[0], op),))


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (NewOp("prims.no_such_op", (Ref("x"),), "%0"), "prims.no_such_op is no prim"),
        (NewOp("torch.exp", (Ref("x"),), "%0"), "torch.exp is no prim"),
        (NewOp("prims.convert_element_type", (Ref("x"), Const("dtypes.float3")), "%0"), "dtypes.float3 is no dtype"),
        (NewOp("prims.convert_element_type", (Ref("x"), Const("devices.cpu")), "%0"), "devices.cpu is no dtype"),
        (NewOp("prims.transpose", (Ref("x"), (1, 0)), "x"), "the trace says"),
    ],
)
def test_plan_that_thunder_cannot_carry_out_is_refused(op, message):
    """An op, a dtype or metadata that does not fit is an error that names it, not a trace."""
    hook = Edit(replacing(op))
    with nvfuser_on_cpu(), pytest.raises(UnsupportedTraceError, match=message):
        thunder.jit(chain, executors=("nvfuser",), transforms=[hook])(torch.randn(3, 4))


# ---------------------------------------------------------------- ops repeated over other operands


def exponential(x):
    return torch.exp(x)


def padded_first(graph: Graph) -> Plan:
    """``exp`` of ``x`` over two rows more, which a slice takes off again after the region."""
    pos = next(pos for pos, op in enumerate(graph.ops) if op.is_fusion)
    (subop,) = graph.ops[pos].subops
    (output,) = subop.outputs
    body = (Repeat(0, (("x", "%0"), (output, "%1"))),)
    return Plan(
        (RegionEdit(pos, (Part(body, ("%1",)),)),),
        (
            Placed(pos, NewOp("prims.pad", (Ref("x"), 0.5, ((0, 2, 0), (0, 0, 0))), "%0")),
            Placed(pos + 1, NewOp("prims.slice_prim", (Ref("%1"), (0, 0), (3, 4), (1, 1)), output)),
        ),
    )


def test_repeated_op_has_the_shapes_of_its_new_operands():
    """Thunder's own meta makes the outputs; the value outside has the name and the numbers that it had."""
    hook = edited(exponential, [torch.randn(3, 4)], padded_first)
    graph = read(hook.made)
    (region,) = (op for op in graph.ops if op.is_fusion)
    assert [graph.values[name].shape for name in (*region.inputs, *region.outputs)] == [(5, 4), (5, 4)]
    assert graph.result == read(hook.given).result


def test_repeated_op_must_fit_a_name_that_the_trace_knows():
    """An output that keeps its name keeps its shape, or the edit is refused."""

    def plan_of(graph):
        plan = padded_first(graph)
        (edit,), (pad, _) = plan.regions, plan.placed
        (output,) = graph.ops[edit.pos].outputs
        return Plan((RegionEdit(edit.pos, (Part((Repeat(0, (("x", "%0"),)),), (output,)),)),), (pad,))

    with nvfuser_on_cpu(), pytest.raises(UnsupportedTraceError, match=r"exp for \w+ gives \(\(5, 4\)"):
        thunder.jit(exponential, executors=("nvfuser",), transforms=[Edit(plan_of)])(torch.randn(3, 4))


def test_new_op_takes_keyword_arguments():
    """Devices and dtypes are told as a trace prints them."""

    def plan_of(graph):
        pos = next(pos for pos, op in enumerate(graph.ops) if op.is_fusion)
        options = (("device", Const('devices.Device("cpu")')), ("dtype", Const("dtypes.float32")))
        (output,) = graph.ops[pos].outputs
        return Plan(
            (RegionEdit(pos, ()),),
            (Placed(pos, NewOp("prims.full", ((3, 4), 1.0), output, options)),),
        )

    def fn(x):
        return torch.exp(x) ** 0.0

    hook = edited(fn, [torch.randn(3, 4)], plan_of)
    assert [op.id for op in read(hook.made).ops if op.outputs] == ["torch.full"]


def test_objects_that_cannot_be_written_down_keep_their_names():
    """A memory format, say: in a trace with another order, an op that did not change reads as the same op."""

    def fn(x):
        return torch.exp(x) * 2, torch.permute(x, (1, 0)).contiguous(memory_format=torch.contiguous_format)

    class Swap(Edit):
        def transform_trace_post_optimization(self, computation_trace, **kwargs):
            self.made = super().transform_trace_post_optimization(computation_trace, **kwargs)
            verify(read(self.given), read(self.made), Allow(may_reorder=True))
            return self.made

    def backwards(graph: Graph) -> Plan:
        """The last op that can be computed at any time comes first."""
        pos = next(pos for pos, op in enumerate(graph.ops) if "permute" in op.id)
        copy = next(pos for pos, op in enumerate(graph.ops) if "contiguous" in op.id)
        rest = [one for one in range(len(graph.ops)) if one not in (pos, copy)]
        return Plan(order=(pos, copy, *rest))

    hook = Swap(backwards)
    x = torch.randn(3, 4)
    with nvfuser_on_cpu():
        got = thunder.jit(fn, executors=("torch",), transforms=[hook])(x)
    torch.testing.assert_close(got, fn(x))
    assert any("memory_format" in str(op.kwargs) for op in read(hook.made).ops)

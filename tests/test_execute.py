"""Laws of `execute`: prims do what Thunder's torch executor does, unknown ops are fixed functions, and a difference is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import thunder
import torch
from thunder.core import dtypes, prims

from thunder_fusionfix.errors import UnsupportedTraceError
from thunder_fusionfix.execute import compare, run_graph, run_region
from thunder_fusionfix.parse import parse
from thunder_fusionfix.read import read

CPU = thunder.core.devices.Device("cpu")

PRIMS: dict[str, Callable] = {
    "transpose": lambda x: prims.transpose(x, (2, 0, 1)),
    "reshape": lambda x: prims.reshape(x, (4, 6)),
    "slice": lambda x: prims.slice_prim(x, (0, 1, 0), (2, 3, 4), (1, 1, 2)),
    "squeeze": lambda x: prims.squeeze(prims.slice_prim(x, (0, 1, 0), (2, 2, 4), (1, 1, 1)), (1,)),
    "broadcast": lambda x: prims.broadcast_in_dim(x, (2, 5, 3, 4), (0, 2, 3)),
    "pad": lambda x: prims.pad(x, 1.5, ((0, 2, 1), (-1, 0, 0), (1, 1, 2))),
    "cat": lambda x: prims.cat([x, prims.neg(x)], 1),
    "sum": lambda x: prims.sum(x, (0, 2)),
    "amax": lambda x: prims.amax(x, (1,)),
    "prod": lambda x: prims.prod(x, (2,)),
    "var": lambda x: prims.var(x, (0, 1), correction=1),
    "argmax": lambda x: prims.argmax(x, 1),
    "cast down and up": lambda x: prims.convert_element_type(
        prims.convert_element_type(x, dtypes.bfloat16), dtypes.float32
    ),
    "cast to int": lambda x: prims.convert_element_type(prims.mul(x, 10.0), dtypes.int64),
    "division of integers": lambda x: prims.div(prims.convert_element_type(prims.mul(x, 10.0), dtypes.int64), 3),
    "where": lambda x: prims.where(prims.gt(x, 0.0), x, -float("inf")),
    "full": lambda x: prims.add(x, prims.full((2, 3, 4), 0.1, device=CPU, dtype=dtypes.float32)),
    "iota": lambda x: prims.take(x, prims.iota(2, start=1, step=1, device=CPU, dtype=dtypes.int64), 1),
    "matmul": lambda x: prims.matmul(x, prims.transpose(x, (0, 2, 1))),
    "pow and rsqrt": lambda x: prims.rsqrt(prims.pow(x, 2.0)),
}


@pytest.mark.parametrize("name", PRIMS)
def test_prim_does_what_thunder_does(name: str) -> None:
    """The table of prims agrees with Thunder's torch executor to the last bit."""
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    jitted = thunder.jit(PRIMS[name])
    expected = jitted(x)
    graph = read(thunder.last_traces(jitted)[0])  # before executors claim its ops
    env = {graph.args[0]: x}
    for op in graph.ops:
        env.update(run_region(op, graph.values, env))
    got = env[graph.ops[-1].inputs[0]]
    assert got.dtype == expected.dtype and torch.equal(got, expected)


def trace(*lines: str) -> str:
    """A trace over two small tensors that returns its last value."""
    head = 'def f(x, y):\n  # x: "cpu f32[2, 3]"\n  # y: "cpu f32[2, 3]"\n'
    return head + "".join(f"  {line}\n" for line in lines) + f"  return {lines[-1].split(' = ')[0]}\n"


def test_compare_equal_programs_differ_nowhere() -> None:
    """Two spellings of one program give the same values, and all that both know is compared."""
    one = parse(trace("a = prims.add(x, y)", "b = prims.transpose(a, (1, 0))"))
    other = parse(trace("c = prims.transpose(x, (1, 0))", "d = prims.transpose(y, (1, 0))", "b = prims.add(c, d)"))
    result = compare(one, other)
    assert result.compared == ("x", "y", "b") and result.differing == () and result.skipped is None


def test_compare_names_values_that_differ() -> None:
    """A wrong value and what depends on it are named, what stands before it is not."""
    one = parse(trace("a = prims.neg(x)", "b = prims.sub(a, y)", "c = prims.exp(b)"))
    other = parse(trace("a = prims.neg(x)", "b = prims.sub(y, a)", "c = prims.exp(b)"))
    assert compare(one, other).differing == ("b", "c")


def test_compare_exact_sees_rounding_that_tolerance_forgives() -> None:
    """A detour through bfloat16 is within the tolerance of the next bfloat16 op, but not equal."""
    b = 'b = prims.convert_element_type({}, dtypes.bfloat16)  # b: "cpu bf16[2, 3]"'
    one = parse(trace("a = prims.exp(x)", b.format("a")))
    other = parse(trace("c = prims.convert_element_type(x, dtypes.bfloat16)", "b = prims.exp(c)"))
    assert compare(one, other).differing == ()
    assert compare(one, other, exact=True).differing == ("b",)


@pytest.mark.parametrize(
    "text, why",
    [
        ('def f(x):\n  # x: "cpu f32[1000, 1000]"\n  y = prims.exp(x)\n  return y\n', "1000000 elements"),
        ("def f(x):\n  y = prims.exp(x)\n  return y\n", "not known"),
    ],
)
def test_compare_skips_what_it_cannot_run_and_says_why(text: str, why: str) -> None:
    """Too large and unknown tensors are no proof of anything, and the answer does not pretend so."""
    result = compare(parse(text), parse(text))
    assert result.compared == () and result.skipped is not None and why in result.skipped


def test_unknown_op_is_fixed_function_of_all_it_takes() -> None:
    """An op that is not in the table gives the same for the same, and something else for another input or option."""
    loss = 'b = torch.nn.functional.cross_entropy({}, {}, label_smoothing={})  # b: "cpu f32[]"'
    calls = [("x", "y", 0.1), ("x", "y", 0.1), ("x", "y", 0.2), ("y", "x", 0.1)]
    first, again, other_option, swapped = (run_graph(parse(trace(loss.format(*call))))["b"] for call in calls)
    assert torch.equal(first, again)
    assert not torch.equal(first, other_option) and not torch.equal(first, swapped)


def test_unknown_elementwise_op_commutes_with_layouts() -> None:
    """An elementwise op without a rule is still elementwise."""
    one = parse(trace("a = prims.zeta(x, y)", "b = prims.transpose(a, (1, 0))"))
    other = parse(trace("c = prims.transpose(x, (1, 0))", "d = prims.transpose(y, (1, 0))", "b = prims.zeta(c, d)"))
    assert compare(one, other, exact=True).differing == ()


def test_effects_are_not_run_but_stand_for_one_value() -> None:
    """The output of a random op is the same in both traces, and a write changes nothing."""
    text = trace('a = uniform_like(x)  # a: "cpu f32[2, 3]"', "t = copy_(a, y)", "b = prims.add(a, y)")
    first, again = run_graph(parse(text)), run_graph(parse(text))
    assert torch.equal(first["a"], again["a"]) and torch.equal(first["y"], again["y"])


def test_run_region_input_of_other_shape_raises() -> None:
    """A tensor that is not what the trace says is refused, not computed with."""
    graph = parse('def f(x):\n  # x: "cpu f32[2, 3]"\n  [y] = nvFusion0(x)\n    # y = prims.exp(x)\n  return y\n')
    assert run_region(graph.ops[0], graph.values, {"x": torch.zeros(2, 3)})["y"].eq(1).all()
    with pytest.raises(UnsupportedTraceError, match=r"takes x of shape \(2, 3\), given is \(3, 2\)"):
        run_region(graph.ops[0], graph.values, {"x": torch.zeros(3, 2)})
    with pytest.raises(UnsupportedTraceError, match="given is None"):
        run_region(graph.ops[0], graph.values, {})


def test_compare_runs_real_tensors_inside_of_a_fake_mode():
    """A capture traces with fake tensors; what is compared there is computed all the same."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = parse('def f(x):\n  # x: "cpu f32[3]"\n  y = prims.exp(x)  # y: "cpu f32[3]"\n  return y')
    after = parse('def f(x):\n  # x: "cpu f32[3]"\n  y = prims.neg(x)  # y: "cpu f32[3]"\n  return y')
    with FakeTensorMode():
        assert compare(before, before).differing == ()
        assert compare(before, after).differing == ("y",)


@pytest.mark.parametrize("limits", ["1024", "1024, 4096", "None, 4096"])
def test_the_entry_s_matmuls_are_run_as_what_they_compute(limits):
    """Their last arguments, what a fold and padding may copy, change no number."""
    text = 'def f(x, w):\n  # x: "cpu f32[3, 4]"\n  # w: "cpu f32[2, 4]"\n  y = {}  # y: "cpu f32[3, 2]"\n  return y'
    one = parse(text.format(f"fusionfix_linear(x, w, None, {limits})"))
    assert compare(one, parse(text.format("torch.nn.functional.linear(x, w, None)"))).differing == ()
    text = 'def f(x, w):\n  # x: "cpu f32[3, 4]"\n  # w: "cpu f32[4, 2]"\n  y = {}  # y: "cpu f32[3, 2]"\n  return y'
    one = parse(text.format(f"fusionfix_matmul(x, w, {limits})"))
    assert compare(one, parse(text.format("torch.matmul(x, w)"))).differing == ()

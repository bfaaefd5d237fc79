"""Laws of `normal_form`: equal forms mean equal values, and layouts in other places mean equal forms."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thunder_fusionfix.execute import run_graph
from thunder_fusionfix.model import Arg, Const, Graph, Op, Ref, Value
from thunder_fusionfix.normal_form import Forms, _holds, _widens, has_effect
from thunder_fusionfix.parse import parse

NAMES = {"f32": "float32", "bf16": "bfloat16", "f64": "float64", "f16": "float16"}
TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64, "f16": torch.float16}


@dataclass
class Program:
    """Prims over a few small tensors, full of layouts; every new value has its right shape and dtype."""

    rng: random.Random
    values: dict[str, Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    def leaf(self, shape: tuple[int, ...], dtype: str = "f32") -> str:
        return self.value(shape, dtype)

    def value(self, shape: tuple[int, ...], dtype: str) -> str:
        name = f"t{len(self.values)}"
        self.values[name] = Value(name, shape, dtype, "cpu")
        return name

    def emit(self, op_id: str, args: tuple[Arg, ...], shape: tuple[int, ...], dtype: str) -> str:
        name = self.value(shape, dtype)
        self.ops.append(Op(op_id, args, Ref(name)))
        return name

    def graph(self, args: tuple[str, ...]) -> Graph:
        return Graph("f", "inference", args, tuple(self.ops), self.values)

    # ------------------------------------------------ single ops

    def layout(self, source: str, kind: str | None = None) -> str:
        value, rng = self.values[source], self.rng
        assert value.shape is not None and value.dtype is not None
        shape, rank = value.shape, len(value.shape)
        kind = kind or rng.choice(("transpose", "reshape", "slice", "squeeze", "broadcast", "order"))
        if kind == "transpose":
            dims = tuple(rng.sample(range(rank), rank))
            return self.emit("prims.transpose", (Ref(source), dims), tuple(shape[dim] for dim in dims), value.dtype)
        if kind == "reshape":
            new = rng.choice(factorings(value.numel or 0))
            return self.emit("prims.reshape", (Ref(source), new), new, value.dtype)
        if kind == "slice":
            starts = tuple(rng.choice((0, 0, 0, 1)) if size > 1 else 0 for size in shape)
            ends = tuple(rng.choice((size, size, max(size - 1, start + 1))) for size, start in zip(shape, starts))
            new = tuple(end - start for start, end in zip(starts, ends))
            return self.emit("prims.slice_prim", (Ref(source), starts, ends, (1,) * rank), new, value.dtype)
        if kind == "squeeze":
            units = tuple(dim for dim in range(rank) if shape[dim] == 1)
            new = tuple(size for size in shape if size != 1)
            return self.emit("prims.squeeze", (Ref(source), units), new, value.dtype)
        if kind == "broadcast":
            at = rng.randint(0, rank)
            new = (*shape[:at], rng.choice((1, 2)), *shape[at:])
            where = tuple(dim if dim < at else dim + 1 for dim in range(rank))
            return self.emit("prims.broadcast_in_dim", (Ref(source), new, where), new, value.dtype)
        return self.emit("prims.stride_order", (Ref(source), tuple(range(rank))), shape, value.dtype)

    def pointwise(self, source: str, kind: str | None = None) -> str:
        value = self.values[source]
        assert value.shape is not None and value.dtype is not None
        kind = kind or self.rng.choice(("neg", "mul", "bf16", "f32", "f64", "f16"))
        if kind == "neg":
            return self.emit("prims.neg", (Ref(source),), value.shape, value.dtype)
        if kind == "mul":
            return self.emit("prims.mul", (Ref(source), 1.1), value.shape, value.dtype)
        return self.emit("prims.convert_element_type", (Ref(source), Const(f"dtypes.{NAMES[kind]}")), value.shape, kind)

    def other(self, source: str) -> str:
        """A sum, maximum, pad, mask, concatenation or addition."""
        value, rng = self.values[source], self.rng
        assert value.shape is not None and value.dtype is not None
        shape, rank = value.shape, len(value.shape)
        kind = rng.choice(("sum", "amax", "pad", "pad", "cat", "add", "add", "full", "masked"))
        if kind == "masked" and any(size > 1 for size in shape):
            return self.masked(source, rng.choice([dim for dim in range(rank) if shape[dim] > 1]))
        if kind in ("sum", "amax") and rank:
            dims = tuple(sorted(rng.sample(range(rank), rng.randint(1, rank))))
            new = tuple(size for dim, size in enumerate(shape) if dim not in dims)
            return self.emit(f"prims.{kind}", (Ref(source), dims), new, value.dtype)
        if kind == "pad" and rank:
            config = tuple(
                rng.choice(((0, 0, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (0, -1, 0))) for _ in shape
            )
            new = tuple(low + high + size + (size - 1) * inner for size, (low, high, inner) in zip(shape, config))
            if min(new) >= 1:
                return self.emit("prims.pad", (Ref(source), rng.choice((0.0, 0.5, 0.1)), config), new, value.dtype)
        alike = [name for name, other in self.values.items() if (other.shape, other.dtype) == (shape, value.dtype)]
        partner = rng.choice(alike)
        if kind == "cat" and rank:
            dim = rng.randrange(rank)
            new = (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :])
            return self.emit("prims.cat", ((Ref(source), Ref(partner)), dim), new, value.dtype)
        if kind == "full":
            args: tuple[Arg, ...] = (shape, self.rng.choice((0.5, 0.1)))
            return self.emit("prims.full", args, shape, value.dtype)
        return self.emit("prims.add", (Ref(source), Ref(partner)), shape, value.dtype)

    def masked(self, source: str, dim: int) -> str:
        """``source`` with zeros, or nearly, outside of what a padded mask of that dim shows."""
        value, rng = self.values[source], self.rng
        assert value.shape is not None and value.dtype is not None
        low, high = rng.choice(((0, 1), (1, 0)))
        inner = tuple(size - (at == dim) for at, size in enumerate(value.shape))
        config = tuple((low, high, 0) if at == dim else (0, 0, 0) for at in range(len(inner)))
        mask = self.emit("prims.full", (inner, rng.choice((True, True, False))), inner, "b8")
        mask = self.emit("prims.pad", (Ref(mask), rng.choice((False, False, True)), config), value.shape, "b8")
        other = rng.choice((0.0, 0.0, 0.5))
        return self.emit("prims.where", (Ref(mask), Ref(source), other), value.shape, value.dtype)


def factorings(numel: int) -> list[tuple[int, ...]]:
    """Shapes of up to three dims with ``numel`` elements."""
    pairs = [(a, numel // a) for a in range(1, numel + 1) if numel % a == 0]
    triples = [(a, b, numel // (a * b)) for a, _ in pairs for b, _ in pairs if numel % (a * b) == 0]
    return [(numel,), *pairs, *triples]


def random_program(rng: random.Random, num_ops: int) -> Graph:
    """A program whose values often coincide: few shapes, and every op takes an early value as likely as a late one."""
    program = Program(rng)
    leaves = tuple(program.leaf((2, 3)) for _ in range(2))
    for _ in range(num_ops):
        source = rng.choice(
            [name for name, value in program.values.items() if (value.numel or 0) <= 24 and value.dtype != "b8"]
        )
        rng.choice((program.layout, program.layout, program.pointwise, program.other))(source)
    return program.graph(leaves)


def bits(tensor: torch.Tensor) -> tuple[object, ...]:
    """The tensor's type and elements, so that equal means equal to the last bit."""
    return tuple(tensor.shape), tensor.dtype, tuple(tensor.double().flatten().tolist())


def test_equal_forms_mean_equal_values() -> None:
    """Values of one program that have one form come out equal to the last bit."""
    rng = random.Random(0)
    num_coincidences = 0
    for _ in range(120):
        graph = random_program(rng, 40)
        found, form, first = run_graph(graph), Forms().of(graph), {}
        for name, tensor in found.items():
            other = first.setdefault(form.values[name], name)
            num_coincidences += other != name
            assert bits(found[other]) == bits(tensor), f"{other} and {name} of {graph.ops}"
    assert num_coincidences > 800


def test_mask_of_a_pad_is_the_pad_of_what_it_shows() -> None:
    """``where(pad(True, False), x, 0)`` is ``pad(slice(x), 0)``, in whatever shape the mask is seen; bit for bit."""
    rng = random.Random(3)
    for _ in range(60):
        program = Program(rng)
        shape = tuple(rng.choice(((2, 3, 2), (4, 3), (3, 2, 1), (5,))))
        dim, (low, high) = rng.randrange(len(shape)), rng.choice(((0, 1), (1, 0)))
        dim = dim if shape[dim] > 1 else 0
        inner = tuple(size - (at == dim) for at, size in enumerate(shape))
        config = tuple((low, high, 0) if at == dim else (0, 0, 0) for at in range(len(shape)))
        x, flat = program.leaf(shape), ((12 if shape == (2, 3, 2) or shape == (4, 3) else 6 if len(shape) == 3 else 5),)
        starts = tuple(low if at == dim else 0 for at in range(len(shape)))
        ends = tuple(start + size for start, size in zip(starts, inner))
        cut = program.emit("prims.slice_prim", (Ref(x), starts, ends, (1,) * len(shape)), inner, "f32")
        padded = program.emit("prims.pad", (Ref(cut), 0.0, config), shape, "f32")
        mask = program.emit("prims.full", (inner, True), inner, "b8")
        mask = program.emit("prims.pad", (Ref(mask), False, config), shape, "b8")
        mask = program.emit("prims.reshape", (Ref(mask), flat), flat, "b8")
        seen = program.emit("prims.reshape", (Ref(x), flat), flat, "f32")
        masked = program.emit("prims.where", (Ref(mask), Ref(seen), 0.0), flat, "f32")
        masked = program.emit("prims.reshape", (Ref(masked), shape), shape, "f32")
        form, found = Forms().of(program.graph((x,))), run_graph(program.graph((x,)))
        assert bits(found[padded]) == bits(found[masked])
        assert form.values[padded] == form.values[masked]


def test_fewer_pushes_mean_fewer_equal_forms_but_no_wrong_ones() -> None:
    """Where the limit stops the work, what is found equal is still equal."""
    rng = random.Random(1)
    for _ in range(40):
        graph = random_program(rng, 40)
        found, form, first = run_graph(graph), Forms(push_limit=rng.choice((0, 5, 20))).of(graph), {}
        for name, tensor in found.items():
            assert bits(found[first.setdefault(form.values[name], name)]) == bits(tensor)


def test_order_of_layouts_and_pointwise_ops_does_not_matter() -> None:
    """However a chain of layouts and a chain of elementwise ops are interleaved, the end has one form."""
    rng = random.Random(2)
    for _ in range(200):
        layouts = [
            rng.choice(("transpose", "reshape", "slice", "broadcast", "order")) for _ in range(rng.randint(1, 5))
        ]
        pointwise = [rng.choice(("neg", "mul", "bf16", "f32", "f64")) for _ in range(rng.randint(1, 4))]
        seed, forms, ends = rng.random(), Forms(), []
        for _ in range(3):
            program = Program(random.Random(seed))
            current = x = program.leaf((2, 3, 4))
            rest = {"layout": list(layouts), "pointwise": list(pointwise)}
            while rest["layout"] or rest["pointwise"]:
                kind = rng.choice([kind for kind, left in rest.items() if left])
                current = getattr(program, kind)(current, rest[kind].pop(0))
            ends.append(forms.of(program.graph((x,))).values[current])
        assert len(set(ends)) == 1, [forms.text(end, 20) for end in ends]


def test_permutes_and_pads_of_several_dims_commute() -> None:
    """Padded first or permuted first, also where dims of one size are padded alike: one form, and torch's own numbers."""
    rng = random.Random(5)
    for _ in range(120):
        shape = tuple(rng.choice((2, 2, 3)) for _ in range(rng.randint(2, 4)))
        amounts = tuple(rng.choice(((0, 0, 0), (1, 0, 0), (1, 0, 0), (0, 2, 0), (1, -1, 1))) for _ in shape)
        goal, is_sum = tuple(rng.sample(range(len(shape)), len(shape))), rng.random() < 0.5
        forms, ends, numbers = Forms(), [], []
        for _ in range(3):
            program = Program(random.Random(0))
            x = program.leaf(shape)
            end = padded_and_permuted(program, x, amounts, goal, is_sum, rng)
            graph = program.graph((x,))
            ends.append(forms.of(graph).values[end])
            numbers.append(bits(run_graph(graph)[end]))
        assert len(set(numbers)) == 1
        assert len(set(ends)) == 1, [forms.text(end, 20) for end in ends]


def padded_and_permuted(
    program: Program,
    x: str,
    amounts: Sequence[tuple[int, int, int]],
    goal: Sequence[int],
    is_sum: bool,
    rng: random.Random,
) -> str:
    """A pad of ``x``, or of a sum with itself turned around, cast and permuted to ``goal`` in a random order of the steps."""

    def permuted(name: str, dims: Sequence[int]) -> str:
        value = program.values[name]
        return program.emit(
            "prims.transpose", (Ref(name), tuple(dims)), tuple(value.shape[dim] for dim in dims), value.dtype
        )

    rank = len(goal)
    if is_sum and len(set(program.values[x].shape)) == 1:
        x = program.emit("prims.add", (Ref(x), Ref(permuted(x, range(rank)[::-1]))), program.values[x].shape, "f32")
    dims = list(range(rank))  # which dim of ``x`` each one is by now
    steps = ["pad", "cast", *["permute"] * rng.randint(0, 2)]
    rng.shuffle(steps)
    for step in (*steps, "last permute"):
        value = program.values[x]
        if step == "cast":
            x = program.pointwise(x, "bf16")
        elif step == "pad":
            config = tuple(amounts[dim] for dim in dims)
            new = tuple(low + high + size + (size - 1) * inner for size, (low, high, inner) in zip(value.shape, config))
            x = program.emit("prims.pad", (Ref(x), 0.5, config), new, value.dtype)
        else:
            wanted = list(goal) if step == "last permute" else rng.sample(range(rank), rank)
            x = permuted(x, [dims.index(dim) for dim in wanted])
            dims = wanted
    return x


def test_regions_do_not_matter() -> None:
    """A program in one region, or cut into any two, has the forms that it has without regions."""
    rng = random.Random(3)
    for _ in range(40):
        graph = random_program(rng, 12)
        forms = Forms()
        plain = forms.of(graph)
        cut = rng.randint(1, len(graph.ops) - 1)
        parts = (graph.ops[:cut], graph.ops[cut:])
        regions = []
        for number, part in enumerate(parts):
            given = {name for op in part for name in op.outputs}
            taken = dict.fromkeys(name for op in part for name in op.inputs if name not in given)
            outputs = tuple(Ref(name) for op in part for name in op.outputs)
            regions.append(Op(f"nvFusion{number}", tuple(map(Ref, taken)), outputs, subops=part, is_fusion=True))
        assert forms.of(replace(graph, ops=tuple(regions))).values == plain.values


@pytest.mark.parametrize(
    "one, other",
    [
        ("prims.transpose(x, (1, 0, 2))", "torch.permute(x, (1, 0, 2))"),
        ("prims.transpose(x, (1, 0, 2))", "torch.transpose(x, 0, 1)"),
        ("prims.reshape(x, (6, 4))", "torch.reshape(x, (-1, 4))"),
        ("prims.reshape(x, (6, 4))", "torch_prims_reshape_impl(x, (6, 4))"),
        ("prims.slice_prim(x, (0, 1, 0), (2, 3, 4), (1, 1, 1))", "torch_slice_prim_impl(x, [0, 1, 0], [2, 3, 4], [1, 1, 1])"),
        ("prims.stride_order(x, (2, 1, 0))", "Tensor.contiguous(x)"),
        ("prims.shallow_copy(x)", "Tensor.contiguous(x, memory_format=_torch_memory_format_1)"),
        ("prims.pad(x, 0.0, ((0, 0, 0), (1, 2, 0), (0, 0, 0)))", "torch_pad_prim_impl(x, 0, ((0, 0, 0), (1, 2, 0), (0, 0, 0)))"),
        ("prims.pad(x, 0.0, ((0, 0, 0), (1, 2, 0), (0, 0, 0)))", "torch.nn.functional.pad(x, (0, 0, 1, 2))"),
        ("prims.convert_element_type(x, dtypes.bfloat16)", "Tensor.to(x, torch.bfloat16)"),
        ("prims.convert_element_type(x, dtypes.float32)", "prims.shallow_copy(x)"),
        ("prims.cat((x, x), -1)", "prims.cat((x, x), 2)"),
        ("prims.sum(x, (1, 0))", "prims.sum(x, (0, -2))"),
    ],
)  # fmt: skip
def test_spellings_of_one_op_have_one_form(one: str, other: str) -> None:
    """A prim, torch's name for it and the executor's name for it are one op."""
    shapes = {
        "transpose": "f32[3, 2, 4]",
        "reshape": "f32[6, 4]",
        "slice": "f32[2, 2, 4]",
        "pad": "f32[2, 6, 4]",
        "bfloat16": "bf16[2, 3, 4]",
        "cat": "f32[2, 3, 8]",
        "sum": "f32[4]",
    }
    typed = next((shape for key, shape in shapes.items() if key in one), "f32[2, 3, 4]")
    forms = Forms()
    ends = [
        forms.of(parse(f'def f(x):\n  # x: "cpu f32[2, 3, 4]"\n  y = {op}  # y: "cpu {typed}"\n  return y\n')).values[
            "y"
        ]
        for op in (one, other)
    ]
    assert ends[0] == ends[1], [forms.text(end) for end in ends]


@pytest.mark.parametrize(
    "one, other",
    [
        ("prims.full((2, 3), 1, device=0)", "prims.full((2, 3), 1.5, device=0)"),
        ("prims.mul(x, 2)", "prims.mul(x, 3)"),
        ("prims.add(x, 0.0)", "prims.add(x, -0.0)"),
        ("prims.argmax(x, 0)", "prims.argmax(x, 1)"),
        ("prims.var(x, (0,), correction=0)", "prims.var(x, (0,), correction=1)"),
        ("prims.cat((x, x), 0)", "prims.cat((x, x, x), 0)"),
        ("torch.sum(x, 0)", "torch.prod(x, 0)"),
        ("torch.select(x, 0, 0)", "torch.select(x, 0, 1)"),
        ("prims.slice_prim(x, (0, 0), (2, 3), (1, 2))", "prims.slice_prim(x, (0, 0), (2, 3), (1, 1))"),
    ],
)
def test_different_ops_have_different_forms(one: str, other: str) -> None:
    """What is not the same is not equal, down to an option, the sign of a zero and an index."""
    forms = Forms()
    ends = [
        forms.of(parse(f'def f(x):\n  # x: "cpu f32[2, 3]"\n  y = {op}\n  return y\n')).values["y"]
        for op in (one, other)
    ]
    assert ends[0] != ends[1]


def test_unknown_shape_is_opaque() -> None:
    """Text that was cut tells no shapes: an op then equals itself and nothing else."""
    forms = Forms()
    y, z, again = (
        forms.of(parse(f"def f(x):\n  y = prims.reshape(x, {shape})\n  return y\n")).values["y"]
        for shape in ("(2, 3)", "(3, 2)", "(2, 3)")
    )
    assert y == again != z


def test_deep_expression_needs_no_stack_and_linear_work() -> None:
    """A layout of a chain far deeper than Python's stack is pushed through it in one go, each op once."""
    program = Program(random.Random(0))
    current = x = program.leaf((2, 3))
    for _ in range(20_000):
        current = program.pointwise(current, "neg")
    current = program.layout(current, "reshape")
    forms = Forms()
    form = forms.of(program.graph((x,)))
    assert form.values[current] in range(len(forms.nodes))
    assert len(forms.nodes) <= 40_010


def test_shared_values_do_not_multiply_work() -> None:
    """A value that every later one takes twice has 2**n paths; the work stays linear."""
    program = Program(random.Random(0))
    current = x = program.leaf((2, 3))
    for _ in range(300):
        current = program.emit("prims.add", (Ref(current), Ref(current)), (2, 3), "f32")
    program.emit("prims.transpose", (Ref(current), (1, 0)), (3, 2), "f32")
    forms = Forms()
    forms.of(program.graph((x,)))
    assert len(forms.nodes) < 700


def test_reads_of_written_memory_tell_before_from_after() -> None:
    """With epochs a read before a write is another expression than one after it; reads at one moment are one."""
    text = 'def f(x):\n  # x: "cpu f32[2, 3]"\n  a = prims.neg(x)\n  b = prims.transpose(x, (1, 0))\n  c = prims.neg(b)\n  return c\n'
    graph, forms = parse(text), Forms()

    def end(epochs: tuple[int | None, ...]) -> tuple[int, int]:
        values = forms.of(graph, epoch=lambda pos, name: epochs[pos]).values
        return values["a"], values["c"]

    assert end((0, 0, 0, 0)) == end((0, 1, 0, 0)), "a view reads nothing where it is made"
    assert end((0, 0, 1, 1))[0] == end((0, 0, 0, 0))[0]
    assert end((0, 0, 1, 1))[1] != end((0, 0, 0, 0))[1]
    assert end((None,) * 4) == tuple(forms.of(graph).values[name] for name in ("a", "c"))


HALVES = """
def f(x, y):
  # x: "cpu f32[2, 3]"
  # y: "cpu f32[2, 3]"
  [c] = nvFusion0(x)
    # a = prims.exp(x)  # a: "cpu f32[2, 3]"
    # b = prims.neg(a)  # b: "cpu f32[2, 3]"
    # c = prims.mul(b, 2.0)  # c: "cpu f32[2, 3]"
  [d] = nvFusion1(y)
    # d = prims.sin(y)  # d: "cpu f32[2, 3]"
  e = torch.add(c, d)  # e: "cpu f32[2, 3]"
  return e
"""


def with_subops(graph: Graph, pos: int, *subops: Op) -> Graph:
    """``graph`` with these ops in its region at ``pos``, and the very objects of ``graph`` beside it."""
    region = replace(graph.ops[pos], subops=subops)
    return replace(graph, ops=(*graph.ops[:pos], region, *graph.ops[pos + 1 :]))


def test_where_changed_takes_shared_ops_as_they_are() -> None:
    """Where the same ops take the same, only the others are opened."""
    before, forms = parse(HALVES), Forms()
    exp, neg, mul = before.ops[0].subops
    changed = forms.where_changed(before, with_subops(before, 0, exp, neg, replace(mul)))
    assert changed is not None
    old, new = changed
    assert old.values == new.values
    assert [forms.text(old.values[name]) for name in "ced"] == ["pointwise (prims.mul, (_, 2.0), ())(b)", "e", "d"]


def test_where_changed_is_not_certain_of_an_op_that_takes_another_value() -> None:
    """An op may be the same object and take another value, inside a region, under a name that is given anew there."""
    before, forms = parse(HALVES), Forms()
    exp, neg, mul = before.ops[0].subops
    after = with_subops(before, 0, replace(exp, id="prims.sin"), neg, mul)
    assert forms.where_changed(before, after) is None
    assert forms.of(before).values["c"] != forms.of(after).values["c"]


def test_where_changed_is_not_certain_of_an_op_that_stands_twice_over_two_values() -> None:
    """One object in two regions, over two values of one name, gives two values: no leaf stands for both."""
    before, forms = parse(HALVES), Forms()
    exp, neg, mul = before.ops[0].subops
    sine = replace(before.ops[1].subops[0], output=Ref("a"))
    double = replace(mul, args=(Ref("b"), 3.0), output=Ref("d"))
    both = with_subops(before, 1, sine, neg, double)
    swapped = with_subops(with_subops(both, 0, replace(exp), neg, mul), 1, replace(sine), neg, double)
    assert forms.where_changed(both, swapped) is None
    assert forms.of(both).values["c"] == forms.of(swapped).values["c"], "which is where all ops are looked into"


def test_where_changed_leaves_nothing_behind_that_other_graphs_take_for_known() -> None:
    """What a region gives in terms of shared sub-ops is no expression of that region elsewhere."""
    before, forms = parse(HALVES), Forms()
    exp, neg, mul = before.ops[0].subops
    after = with_subops(before, 0, exp, neg, replace(mul, args=(2.0, Ref("b"))))
    forms.where_changed(before, after)
    for graph in (before, after):
        fresh = Forms()
        assert forms.text(forms.of(graph).values["e"]) == fresh.text(fresh.of(graph).values["e"])


def test_text_shows_expression() -> None:
    """A form can be read: leaves by name, layouts as offset and factors."""
    graph = parse(
        'def f(x):\n  # x: "cpu bf16[4, 2]"\n  a = prims.convert_element_type(x, dtypes.float32)\n'
        "  b = prims.slice_prim(a, (1, 0), (3, 2), (1, 1))\n  c = prims.transpose(b, (1, 0))\n  d = prims.mul(c, 2.0)\n  return d\n"
    )
    forms = Forms()
    assert forms.text(forms.of(graph).values["d"]) == "pointwise (prims.mul, (_, 2.0), ())(cast f32(x[2 + 2:1, 2:2]))"


def test_has_effect_asks_what_is_inside() -> None:
    """A region has an effect if one of its ops has; one that shows nothing is not known."""
    draw, add = Op("prims.uniform", ((2,), 0.0, 1.0), Ref("a")), Op("prims.add", (Ref("x"), Ref("x")), Ref("b"))
    assert has_effect(Op("nvFusion0", (), (Ref("a"),), subops=(add, draw), is_fusion=True))
    assert not has_effect(Op("nvFusion0", (), (Ref("b"),), subops=(add,), is_fusion=True))
    assert has_effect(Op("nvFusion0", (), (Ref("b"),), is_fusion=True))
    assert has_effect(Op("mylib.add", (Ref("x"),), Ref("b")))


@given(st.floats(width=64), st.sampled_from(sorted(TORCH)))
def test_holds_claims_only_what_dtype_holds(number: float, dtype: str) -> None:
    """A number that a dtype is said to hold exactly survives the conversion."""
    if _holds(dtype, number):
        there = torch.tensor(number, dtype=torch.float64).to(TORCH[dtype]).double()
        assert torch.allclose(there, torch.tensor(number, dtype=torch.float64), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("wide", ["bf16", "f16", "f32", "f64"])
def test_widens_is_true_for_floats_that_hold_all_of_the_narrow_one(dtype: str, wide: str) -> None:
    """Every one of the 65,536 values of the narrow dtype comes back from the wide one, or the answer is no."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(TORCH[dtype])
    back = every.to(TORCH[wide]).to(TORCH[dtype])
    comes_back = bool(((back == every) | (every.isnan() & back.isnan())).all())
    assert _widens(dtype, wide) == comes_back

"""Laws of `share`: equal regions get one fusion, others never do, and a shared fusion gives every region its own results."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import cpu_nvfuser
import pytest
import thunder
import torch
from thunder.core import dtypes, prims
from thunder.core.devices import Device
from thunder.core.proxies import AnyProxy, IntegerProxy, TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, get_tracectx, tracectx
from thunder.executors import torch_compile
from thunder.executors.torchex import ex as torch_executor
from thunder.extend import ImplInfo, deregister_executor, register_executor
from torch.distributed.tensor import Replicate, Shard

from thunder_fusionfix import canonical as canonical_form
from thunder_fusionfix import share
from thunder_fusionfix._thunder import DTensorProxy, nvfuser_registered, replaced
from thunder_fusionfix.canonical import canonical
from thunder_fusionfix.errors import UnsupportedTraceError, UsageError
from thunder_fusionfix.transform import FusionFixTransform

f32, bf16 = dtypes.float32, dtypes.bfloat16
Program = tuple[Callable, ...]  # a function, and for each of its arguments what makes one, given a prefix for names
Parts = tuple[list[Any], list[Any], list[Any]]  # bound symbols, inputs, outputs


# ---------------------------------------------------------------- what belongs to a key


def tensor(name: str = "a", shape: Sequence[Any] = (4, 4), dtype: Any = f32, device: str = "cpu") -> Callable:
    return lambda prefix: TensorProxy(prefix + name, shape=tuple(shape), dtype=dtype, device=Device(device))


def number(value: int | None) -> Callable:
    return lambda prefix: IntegerProxy(prefix + "n", value=value)


def dtensor(ranks: Sequence[int], placement: Any) -> Callable:
    mesh = SimpleNamespace(device_type="cuda", mesh=torch.tensor(ranks), mesh_dim_names=("tp",))

    def make(prefix: str) -> DTensorProxy:
        spec = AnyProxy(SimpleNamespace(device_mesh=mesh, mesh=mesh, placements=(placement,)), name=f"{prefix}spec")
        local = TensorProxy(prefix + "local", shape=(2, 4), dtype=f32, device=Device("cuda:0"))
        whole = {"shape": (4, 4), "dtype": f32, "device": Device("cuda:0")}
        return DTensorProxy(prefix + "a", local_tensor=local, spec=spec, **whole)

    return make


def traced(fn: Callable, *inputs: Callable[[str], Any], prefix: str = "") -> Parts:
    """The parts of a region that runs ``fn``; with another ``prefix``, no name in it is the same."""
    trace = TraceCtx(None)
    with tracectx(trace):
        proxies = [make(prefix) for make in inputs]
        for _ in range(10 * len(prefix)):
            trace.make_name(prefix="t")
        outputs = fn(*proxies)
    return trace.bound_symbols, proxies, list(outputs) if isinstance(outputs, tuple) else [outputs]


def key(parts: Parts) -> Any:
    return canonical(share.region_of(*parts)).key


def times(constant: Any) -> Callable:
    """Bound without its meta, which takes constants of one type only."""

    def fn(a: Any) -> Any:
        product = TensorProxy(like=a)
        get_tracectx().bound_symbols.append(prims.mul.bind(a, constant, output=product))
        return product

    return fn


def times_number(a: Any, n: Any) -> Any:
    return times(n)(a)


def noise(seed: int, offset: int) -> Callable:
    return lambda a: prims.uniform_philox(a.shape, 0.0, 1.0, device=a.device, dtype=f32, seed=seed, offset=offset)


def draws(first: str, second: str) -> Callable:
    def fn(a: Any) -> Any:
        drawn = {name: prims.uniform(a.shape, 0.0, 1.0, device=a.device, dtype=f32) for name in (first, second)}
        return prims.add(a, drawn["x"]), prims.mul(a, drawn["y"])

    return fn


def read_then_write(a: Any, b: Any) -> Any:
    return prims.add(b, a), prims.copy_(a, b, grad_enabled=False)


def write_then_read(a: Any, b: Any) -> Any:
    return (prims.copy_(a, b, grad_enabled=False), prims.add(b, a))[::-1]


NEG_OF_ANOTHER = Symbol("neg", meta=prims.neg.meta, id=prims.neg.id, is_prim=True)
CUBE = tensor(shape=(4, 4, 4))

# The second of a pair differs from the first in one thing.
PAIRS: dict[str, tuple[Program, Program]] = {
    "a constant": ((times(2.0), tensor()), (times(3.0), tensor())),
    "a constant's type": ((times(2.0), tensor()), (times(2), tensor())),
    "a zero's sign": ((times(0.0), tensor()), (times(-0.0), tensor())),
    "the dtype of an input": ((prims.neg, tensor()), (prims.neg, tensor(dtype=bf16))),
    "a dtype's weakness": ((prims.neg, tensor()), (prims.neg, tensor(dtype=dtypes.float32_))),
    "the dtype of a cast": (
        (lambda a: prims.convert_element_type(a, bf16), tensor()),
        (lambda a: prims.convert_element_type(a, dtypes.float16), tensor()),
    ),
    "a shape": ((prims.neg, tensor()), (prims.neg, tensor(shape=(4, 8)))),
    "a device": ((prims.neg, tensor(device="cuda:0")), (prims.neg, tensor(device="cuda:1"))),
    "the order of equal-typed inputs": (
        (lambda a, b: prims.sub(prims.exp(a), b), tensor("a"), tensor("b")),
        (lambda a, b: prims.sub(b, prims.exp(a)), tensor("a"), tensor("b")),
    ),
    "which input comes again": (
        (lambda a, b: prims.sub(prims.sub(prims.exp(a), b), b), tensor("a"), tensor("b")),
        (lambda a, b: prims.sub(prims.sub(prims.exp(a), b), a), tensor("a"), tensor("b")),
    ),
    "a permutation": (
        (lambda a: prims.transpose(a, (0, 2, 1)), CUBE),
        (lambda a: prims.transpose(a, (1, 0, 2)), CUBE),
    ),
    "a slice's start": (
        (lambda a: prims.slice_prim(a, (0, 0), (2, 4)), tensor()),
        (lambda a: prims.slice_prim(a, (1, 0), (3, 4)), tensor()),
    ),
    "the operation": ((prims.sin, tensor()), (prims.cos, tensor())),
    "whose operation it is": ((prims.neg, tensor()), (NEG_OF_ANOTHER, tensor())),
    "what is returned": (
        (lambda a: prims.neg(prims.exp(a)), tensor()),
        (lambda a: (prims.neg(b := prims.exp(a)), b), tensor()),
    ),
    "a seed": ((noise(1, 0), tensor()), (noise(2, 0), tensor())),
    "an offset": ((noise(1, 0), tensor()), (noise(1, 4), tensor())),
    "which draw comes first": ((draws("x", "y"), tensor()), (draws("y", "x"), tensor())),
    "a write before a read": (
        (read_then_write, tensor("a"), tensor("b")),
        (write_then_read, tensor("a"), tensor("b")),
    ),
    "a number's value": ((times_number, tensor(), number(2)), (times_number, tensor(), number(3))),
    "a mesh": (
        (prims.neg, dtensor((0, 1), Shard(0))),
        (prims.neg, dtensor((2, 3), Shard(0))),
    ),
    "a placement": (
        (prims.neg, dtensor((0, 1), Shard(0))),
        (prims.neg, dtensor((0, 1), Replicate())),
    ),
}


def collisions() -> set[str]:
    return {name for name, (one, other) in PAIRS.items() if key(traced(*one)) == key(traced(*other))}


def test_key_of_regions_that_differ_in_one_thing_differs() -> None:
    """Nothing that decides what a region computes is missing from its key."""
    assert collisions() == set()


PURE = share.effect_of(share.TraceOp("neg", ()))
REAL_TYPE_TEXT, REAL_CONSTANT_TEXT = share.type_text, share.constant_text


def _text_without_dtype(proxy: Any) -> str:
    return f"{proxy.device.device_str()} {tuple(proxy.shape)}"


def _text_without_shape(proxy: Any) -> str:
    return f"{proxy.device.device_str()} {proxy.dtype!r} {proxy.ndim}"


def _text_without_device(proxy: Any) -> str:
    return f"{proxy.dtype!r} {tuple(proxy.shape)}"


def _type_text_without_mesh(proxy: Any) -> str:
    return share._tensor_text(proxy) if isinstance(proxy, DTensorProxy) else REAL_TYPE_TEXT(proxy)


def _type_text_without_numbers(proxy: Any) -> str:
    return "number" if isinstance(proxy, IntegerProxy) else REAL_TYPE_TEXT(proxy)


def _op_of_sorted_arguments(label: str, takes: tuple, gives: tuple, identity: Any) -> Any:
    return canonical_form.Op(label, tuple(sorted(takes)), gives, identity)


def _region_that_returns_everything(types: tuple, inputs: tuple, ops: tuple, outputs: tuple) -> Any:
    return canonical_form.Region(types, inputs, ops, ())


# A way to forget something, and what it makes collide.
MUTANTS: dict[str, tuple[str, Any, set[str]]] = {
    "constants": (
        "constant_text",
        lambda value: "",
        {"a constant", "a slice's start", "a permutation", "a seed", "an offset"},
    ),
    "constants' types": (
        "constant_text",
        lambda value: f"{complex(value)}" if isinstance(value, (int, float)) else REAL_CONSTANT_TEXT(value),
        {"a constant's type"},
    ),
    "signs of zero": (
        "constant_text",
        lambda value: REAL_CONSTANT_TEXT(value + 0.0 if type(value) is float else value),
        {"a zero's sign"},
    ),
    "dtypes of tensors": ("_tensor_text", _text_without_dtype, {"the dtype of an input", "a dtype's weakness"}),
    "shapes": ("_tensor_text", _text_without_shape, {"a shape"}),
    "devices": ("_tensor_text", _text_without_device, {"a device"}),
    "meshes and placements": ("type_text", _type_text_without_mesh, {"a mesh", "a placement"}),
    "numbers": ("type_text", _type_text_without_numbers, {"a number's value"}),
    "order of arguments": ("Op", _op_of_sorted_arguments, {"the order of equal-typed inputs"}),
    "outputs": ("Region", _region_that_returns_everything, {"what is returned"}),
    "symbols": ("Same", lambda held: "", {"whose operation it is"}),
    "order of effects": ("effect_of", lambda op: PURE, {"which draw comes first", "a write before a read"}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_key_that_forgets_something_collides(mutant: str) -> None:
    """The pairs are able to fail: whatever a key may forget, they find out."""
    name, forgetful, expected = MUTANTS[mutant]
    with replaced(share, name, forgetful):
        assert expected <= collisions()


@pytest.mark.parametrize("pair", PAIRS)
def test_key_of_a_region_with_other_names_is_the_same(pair: str) -> None:
    """Names are no part of a key: the nearest yes-case to each pair."""
    for program in PAIRS[pair]:
        assert key(traced(*program)) == key(traced(*program, prefix="other_"))


def _symbolic(prefix: str) -> TensorProxy:
    proxy = tensor()(prefix)
    proxy._shape = (IntegerProxy(prefix + "n", value=4), 4)
    return proxy


def _with_object(a: Any) -> Any:
    negated = TensorProxy(like=a)
    get_tracectx().bound_symbols.append(prims.neg.bind(a, output=negated, _call_ctx={"neg": object()}))
    return negated


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ((prims.exp, _symbolic), "symbolic"),
        ((times(torch.ones(1)), tensor()), "type Tensor"),
        ((times(object()), tensor()), "type object"),
        ((_with_object, tensor()), "only this trace knows"),
        ((lambda a: prims.neg(tensor("elsewhere")("")), tensor()), "takes elsewhere"),
        ((lambda a: tensor("elsewhere")(""), tensor()), "returns elsewhere"),
    ],
    ids=[
        "symbolic shape",
        "tensor constant",
        "object",
        "own callable",
        "value from elsewhere",
        "result from elsewhere",
    ],
)
def test_region_that_a_key_cannot_hold_is_refused(program: Program, why: str) -> None:
    """What only a call can tell, or what is known by its address alone, is not shared."""
    with pytest.raises(UnsupportedTraceError, match=why):
        share.region_of(*traced(*program))


# ---------------------------------------------------------------- what a shared fusion gives


class Interpreted:
    """A shared fusion that runs its ops with torch."""

    def __init__(self, form: Any, parts: Parts):
        self.form = form
        self.run = cpu_nvfuser._torch_callable(*parts)


class InterpretedRegion(share._SharedRegion):
    kind = "interpreted"
    made = 0

    def _options(self) -> Any:
        return ()

    def _share(self, form: Any) -> Interpreted:
        InterpretedRegion.made += 1
        return Interpreted(form, self._parts)

    def _use(self, shared: Interpreted) -> Callable:
        return lambda *args: shared.run(*args)

    def _unshared(self) -> Callable:
        return cpu_nvfuser._torch_callable(*self._parts)


OPS: dict[str, Callable] = {
    "subtract": prims.sub,
    "negate": lambda x, _: prims.neg(x),
    "double": lambda x, _: prims.mul(x, 2.0),
    "triple": lambda x, _: prims.mul(x, 3.0),
    "transpose": lambda x, _: prims.transpose(x, (1, 0)),
}


def random_program(rng: random.Random) -> Callable:
    """Up to three ops from few, on two tensors of one type, so that many programs are equal up to order."""
    steps = [
        (rng.choice(list(OPS)), rng.randrange(2 + step), rng.randrange(2 + step)) for step in range(rng.randint(1, 3))
    ]
    returned = rng.sample(range(2, 2 + len(steps)), rng.randint(1, len(steps)))

    def fn(a: Any, b: Any) -> tuple:
        values = [a, b]
        for op, left, right in steps:
            values.append(OPS[op](values[left], values[right]))
        return tuple(values[pos] for pos in returned)

    return fn


def random_parts(rng: random.Random, number: int) -> Parts:
    bsyms, inputs, outputs = traced(random_program(rng), tensor("a"), tensor("b"), prefix=f"r{number}_")
    used = {proxy.name for bsym in bsyms for proxy in bsym.flat_proxy_args}
    inputs = [proxy for proxy in inputs if proxy.name in used]
    rng.shuffle(inputs)
    return bsyms, inputs, outputs


def wrong_results(num_programs: int, seed: int) -> tuple[int, int]:
    """How many of these random regions a shared fusion served wrongly, and how many fusions there were."""
    rng = random.Random(seed)
    InterpretedRegion.made = 0
    regions = []
    wrong = 0
    for num in range(num_programs):
        parts = random_parts(rng, num)
        regions.append(InterpretedRegion(*parts))  # kept, so that what it shares stays alive
        args = [torch.tensor([[1.0, 10.0], [100.0, 1000.0]]) * 7**pos + pos for pos in range(len(parts[1]))]
        args = [torch.nn.functional.pad(arg, (0, 2, 0, 2)) for arg in args]
        expected = cpu_nvfuser._torch_callable(*parts)(*args)
        wrong += not all(map(torch.equal, regions[-1](*args), expected))
    return wrong, InterpretedRegion.made


def test_shared_region_of_random_programs_gives_its_own_results() -> None:
    """Hundreds of regions share fewer fusions, with inputs and outputs in many orders, and each gets what it would compute."""
    wrong, fusions = wrong_results(150, seed=0)
    assert wrong == 0
    assert 20 < fusions < 150


@pytest.mark.parametrize("mutant", ["constants", "order of arguments", "outputs"])
def test_shared_region_with_a_forgetful_key_gives_wrong_results(mutant: str) -> None:
    """The law above is able to fail."""
    name, forgetful, _ = MUTANTS[mutant]
    with replaced(share, name, forgetful):
        try:
            wrong, _ = wrong_results(100, seed=0)
        except IndexError:  # a region of more outputs than the one that serves it
            wrong = 1
    assert wrong > 0


@pytest.mark.parametrize("forgotten", ["argument_order", "result_order"])
def test_shared_region_that_forgets_an_order_gives_wrong_results(forgotten: str) -> None:
    """Keys alone are not enough: arguments and results have to change places."""

    def given(self: Any, other: Any) -> tuple[int, ...]:
        return tuple(range(len(self.inputs if forgotten == "argument_order" else self.outputs)))

    with replaced(canonical_form.Canonical, forgotten, given):
        assert wrong_results(100, seed=0)[0] > 0


def twins() -> tuple[Parts, Parts]:
    """``exp(a) - b`` twice, with other names and the inputs the other way round."""
    one = traced(lambda a, b: prims.sub(prims.exp(a), b), tensor("a"), tensor("b"))
    other = traced(lambda b, a: prims.sub(prims.exp(a), b), tensor("b"), tensor("a"), prefix="other_")
    return one, other


def test_shared_fusion_lives_as_long_as_its_regions() -> None:
    """The registry holds nothing itself."""
    parts, other_parts = twins()
    region, other = InterpretedRegion(*parts), InterpretedRegion(*other_parts)
    args = torch.ones(4, 4), torch.zeros(4, 4)
    region(*args)
    shared = weakref.ref(share._registry._shared[("interpreted", ((), key(parts)))])
    other(*args)
    del region
    gc.collect()
    assert shared() is not None
    del other
    gc.collect()
    assert shared() is None


def test_shared_region_keeps_no_tensor_alive() -> None:
    """What goes in and what comes out belongs to the caller."""
    region = InterpretedRegion(*twins()[0])
    args = [torch.ones(4, 4), torch.zeros(4, 4)]
    results = region(*args)
    watched = [weakref.ref(each) for each in (*args, *results)]
    del args, results
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Results of the calls, which start at one moment, each in a thread of its own."""
    start, results = threading.Barrier(len(calls)), [None] * len(calls)

    def run(pos: int) -> None:
        start.wait()
        results[pos] = calls[pos]()

    threads = [threading.Thread(target=run, args=(pos,)) for pos in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_shared_regions_called_first_at_once_make_one_fusion() -> None:
    """Two regions of one key, and one region twice, at one moment: one fusion, and everyone's own results."""
    args = torch.full((4, 4), 2.0), torch.ones(4, 4)
    InterpretedRegion.made = 0
    one, other = (InterpretedRegion(*parts) for parts in twins())
    results = at_once(lambda: one(*args), lambda: other(*args[::-1]), lambda: one(*args))
    assert all(torch.equal(result[0], args[0].exp() - args[1]) for result in results)
    assert InterpretedRegion.made == 1


def test_sharing_counts_regions_and_fusions() -> None:
    """What the benchmark prints: each region once, when it is first called, and each fusion once."""
    before = share.sharing().get("interpreted", (0, 0))
    regions = [InterpretedRegion(*parts) for parts in twins()]
    for region in regions * 2:
        region(torch.ones(4, 4), torch.ones(4, 4))
    after = share.sharing()["interpreted"]
    assert (after[0] - before[0], after[1] - before[1]) == (2, 1)


# ---------------------------------------------------------------- regions for torch.compile


@contextlib.contextmanager
def counted_compiles() -> Iterator[list[Any]]:
    """Collects the functions given to torch.compile, which Dynamo compiles as ever, for its backend that runs FX graphs."""
    real, given = torch.compile, []
    gc.collect()

    def compile_and_count(fn: Callable, **options: Any) -> Callable:
        given.append(fn)
        return real(fn, **{**options, "backend": "eager"})

    with replaced(torch, "compile", compile_and_count):
        yield given


@pytest.fixture
def cat_executor() -> Iterator[Any]:
    """The executor that gives RoPE to torch.compile, for CPU tensors."""
    executor = torch_compile.TorchCompileExecutor("torchcompile_cat_cpu", required_ops={prims.cat.id})
    ids = (prims.cat.id, prims.neg.id, prims.slice_prim.id, prims.mul.id, prims.add.id)
    executor._implmap = {op: ImplInfo() for op in ids if op in torch_executor.implmap}
    register_executor(executor)
    yield executor
    deregister_executor(executor)


def rotated(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """RoPE's rotation of halves and a matmul, once for each weight."""
    for weight in weights:
        x = (torch.cat([-x[:, 4:], x[:, :4]], 1) * 0.5 + x) @ weight
    return x


def step(fn: Callable, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The result of ``fn`` and the gradients of its inputs."""
    inputs = [each.detach().clone().requires_grad_() for each in inputs]
    result = fn(*inputs)
    result.sum().backward()
    return [result.detach(), *(each.grad for each in inputs)]


def weights(num_layers: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [0.3 * torch.randn(8, 8) for _ in range(num_layers + 1)]


def test_torch_compile_regions_of_equal_layers_compile_once(cat_executor: Any) -> None:
    """Four layers take no more functions than two, and results and gradients are those of plain Thunder."""
    counts = {}
    for num_layers in (2, 4):
        gc.collect()  # what an earlier function shares lives as long as that function
        inputs = weights(num_layers)
        with counted_compiles() as given:
            shared = step(thunder.jit(rotated, executors=(cat_executor,), fusionfix_share_fusions=True), inputs)
        counts[num_layers] = len(given)
        with counted_compiles():
            plain = step(thunder.jit(rotated, executors=(cat_executor,)), inputs)
        assert all(map(torch.equal, shared, plain))
    assert 0 < counts[2] == counts[4]


def test_torch_compile_region_compiled_by_inductor_serves_all_layers(cat_executor: Any) -> None:
    """The same with torch.compile's own backend."""
    inputs = weights(4)
    fn = thunder.jit(rotated, executors=(cat_executor,), fusionfix_share_fusions=True)
    with torch.no_grad():
        torch.testing.assert_close(fn(*inputs), rotated(*inputs))


def compiled_region(parts: Parts, mode: str | None = None) -> Any:
    make = share._sharing_torch_compile(inspect.unwrap(torch_compile.make_compiled))
    with replaced(share, "is_wanted", lambda: True):
        return make(*parts, mode=mode)


def test_torch_compile_region_is_not_compiled_before_it_is_called() -> None:
    """Thunder makes each region's callable three times; what is never called costs nothing."""
    with counted_compiles() as given:
        region = compiled_region(twins()[0])
        assert given == []
        region(torch.ones(4, 4), torch.ones(4, 4))
        assert len(given) == 1


LAYOUTS = {
    "strides": (torch.ones(4, 4), torch.ones(4, 8)[:, ::2]),
    "need of a gradient": (torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)),
    "class": (torch.ones(4, 4), torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)),
}


@pytest.mark.parametrize("what", LAYOUTS)
def test_torch_compile_regions_of_two_layouts_get_two_functions(what: str) -> None:
    """What Dynamo would compile anew never meets in one code object, where its limit would end the program."""
    one, other = LAYOUTS[what]
    second = torch.zeros(4, 4)
    with counted_compiles() as given:
        first_region, second_region = map(compiled_region, twins())
        for _ in range(2):
            for arg in (one, other):
                assert torch.equal(first_region(arg, second)[0], arg.exp())
                assert torch.equal(second_region(second, arg)[0], arg.exp())
        assert len(given) == 2


def test_torch_compile_region_called_with_one_tensor_twice_gets_a_function_for_that() -> None:
    """Dynamo compiles for arguments that are one tensor; so do we tell them apart."""
    one, other = torch.ones(4, 4), torch.zeros(4, 4)
    assert share.layout_of([one, other]) != share.layout_of([one, one])
    assert share.layout_of([one, one, other]) != share.layout_of([one, other, one])


def test_torch_compile_region_of_many_layouts_never_reaches_dynamos_limit() -> None:
    """More layouts than Dynamo compiles one code object for, from regions that share: all right, and bounded."""
    limit = torch._dynamo.config.recompile_limit
    second = torch.zeros(4, 4)
    with counted_compiles() as given, replaced(share, "MAX_LAYOUTS", limit + 3):
        regions = [compiled_region(parts) for parts in twins()]
        for step_length in range(1, limit + 6):
            arg = torch.rand(4, 4 * step_length)[:, ::step_length]
            assert torch.equal(regions[0](arg, second)[0], arg.exp())
        assert len(given) == limit + 4  # one for each layout up to the bound, one for all others


def test_torch_compile_region_holds_neither_tensors_nor_the_compile(cat_executor: Any) -> None:
    """A shared function outlives the model that it was made for, and the model's memory does not."""

    class Rotated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(weights(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return rotated(x, *self.weights)

    with counted_compiles() as given:
        models = [thunder.jit(Rotated(), executors=(cat_executor,), fusionfix_share_fusions=True) for _ in range(2)]
        x = torch.ones(2, 8)
        results = [each(x) for each in models]
        assert torch.equal(*results)
        num_functions = len(given)
        watched = [weakref.ref(x), *(weakref.ref(weight) for weight in models[0]._model.weights)]
        del results, x, models[0]
        gc.collect()
        assert [ref() for ref in watched] == [None] * len(watched)
        models[0](torch.ones(2, 8))
        assert len(given) == num_functions


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_torch_compile_region_with_cuda_graphs_is_not_shared(mode: str) -> None:
    """A CUDA graph's memory belongs to one place in the program."""
    assert not isinstance(compiled_region(twins()[0], mode=mode), share.SharedTorchCompile)


def test_torch_compile_region_that_takes_a_number_is_not_shared() -> None:
    """Dynamo compiles for each value of a number: each region has to have its own limit."""
    before = share.sharing().get("torch.compile", (0, 0))
    with counted_compiles() as given:
        for prefix in ("", "other_"):
            region = compiled_region(traced(times_number, tensor(), number(2), prefix=prefix))
            assert torch.equal(region(torch.ones(4, 4), 2)[0], torch.full((4, 4), 2.0))
    after = share.sharing()["torch.compile"]
    assert len(given) == 2 and (after[0] - before[0], after[1] - before[1]) == (2, 2)


# ---------------------------------------------------------------- regions for nvFuser


class Definition:
    """What nvFuser's definition is to Thunder's wrapper; runs its ops with torch."""

    _selected_device = None

    def __init__(self, parts: Parts, descriptors: Any):
        self.descriptors = descriptors
        self.run = cpu_nvfuser._torch_callable(*parts)

    def execute(self, args: Sequence[Any], **options: Any) -> list[Any]:
        with torch.no_grad():
            return list(self.run(*args))


@contextlib.contextmanager
def nvfuser_that_runs_on_cpu() -> Iterator[tuple[Any, list[Definition]]]:
    """Thunder's nvFuser executor with its own wrappers, and the definitions that it makes, which torch runs."""
    definitions: list[Definition] = []
    gc.collect()

    def create_fd(bsyms: Any, descriptors: Any, inputs: Any, outputs: Any) -> Definition:
        definitions.append(Definition((bsyms, inputs, outputs), descriptors))
        return definitions[-1]

    with nvfuser_registered():
        import thunder.executors.nvfuserex_impl as impl

        create = share._sharing_nvfuser(inspect.unwrap(impl.create_fusion_definition_wrapper))
        with (
            cpu_nvfuser.nvfuser_on_cpu() as executor,
            replaced(impl, "create_fusion_definition_wrapper", create),
            replaced(impl, "create_fd", create_fd),
        ):
            yield executor, definitions


def gated(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for weight in weights:
        x = (torch.sigmoid(x) * x - 0.5) @ weight + x
    return x


@pytest.mark.nvfuser
@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
def test_nvfuser_regions_of_equal_layers_are_defined_once(fusion_type: str) -> None:
    """Five layers take no more definitions than three, and results and gradients are those of plain Thunder."""
    counts = {}
    with nvfuser_that_runs_on_cpu() as (executor, definitions):
        for num_layers in (3, 5):
            gc.collect()
            inputs = weights(num_layers)
            options = {"executors": (executor,), "fusion_type": fusion_type}
            definitions.clear()
            shared = step(thunder.jit(gated, **options, fusionfix_share_fusions=True), inputs)
            counts[num_layers] = len(definitions)
            definitions.clear()
            plain = step(thunder.jit(gated, **options), inputs)
            assert len(definitions) > counts[num_layers] > 0
            assert all(map(torch.equal, shared, plain))
    assert counts[3] == counts[5]


@pytest.mark.nvfuser
def test_nvfuser_region_is_defined_anew_for_other_strides() -> None:
    """Strides are no part of a region and every part of a definition."""
    parts, other_parts = twins()
    a, b = torch.rand(4, 4), torch.rand(4, 4)
    with nvfuser_that_runs_on_cpu() as (_, definitions), replaced(share, "is_wanted", lambda: True):
        import thunder.executors.nvfuserex_impl as impl

        region = impl.create_fusion_definition_wrapper(parts[0], "one", *parts[1:])
        other = impl.create_fusion_definition_wrapper(other_parts[0], "other", *other_parts[1:])
        for left, right in ((a, b), (a.t(), b), (a, b.t()), (a, b)):
            assert torch.equal(region(left, right)[0], left.exp() - right)
            assert torch.equal(other(right, left)[0], left.exp() - right)
        assert len(definitions) == 3
        assert len({definition.descriptors for definition in definitions}) == 3
        assert region.last_used is other.last_used is definitions[0]
        assert other.name == "other" and region.cache_info().misses == 3


@pytest.mark.nvfuser
def test_nvfuser_region_called_first_at_once_is_defined_once() -> None:
    """A definition takes its time; who comes meanwhile waits for it."""
    parts, other_parts = twins()
    args = torch.rand(4, 4), torch.rand(4, 4)
    with nvfuser_that_runs_on_cpu() as (_, definitions), replaced(share, "is_wanted", lambda: True):
        import thunder.executors.nvfuserex_impl as impl

        define = impl.create_fd

        def slowly(*args: Any) -> Any:
            time.sleep(0.05)
            return define(*args)

        with replaced(impl, "create_fd", slowly):
            region = impl.create_fusion_definition_wrapper(parts[0], "one", *parts[1:])
            other = impl.create_fusion_definition_wrapper(other_parts[0], "other", *other_parts[1:])
            results = at_once(lambda: region(*args), lambda: other(*args[::-1]))
    assert len(definitions) == 1
    assert all(torch.equal(result[0], args[0].exp() - args[1]) for result in results)


@pytest.mark.nvfuser
def test_nvfuser_region_with_other_options_is_not_shared() -> None:
    """nvFuser's options decide what it compiles; who keeps a region's inputs wants them under its own name."""
    with nvfuser_that_runs_on_cpu() as (executor, definitions):
        kept = []
        for options in ({}, {"nv_enable_options": ["kernel_db"]}, {"nv_disable_options": ["kernel_reuse"]}):
            kept.append(thunder.jit(gated, executors=(executor,), fusionfix_share_fusions=True, **options))
            step(kept[-1], weights(2))
        per_option = len(definitions) // 3
        assert len(definitions) == 3 * per_option > 0
        repro = thunder.jit(gated, executors=(executor,), fusionfix_share_fusions=True, nv_store_fusion_inputs=True)
        step(repro, weights(2))
        fusions = [
            bsym._call_ctx[bsym.sym.name] for bsym in thunder.last_traces(repro)[-1].bound_symbols if bsym.sym.is_fusion
        ]
        assert fusions and not any(isinstance(fusion, share.SharedFusion) for fusion in fusions)
        assert all(fusion.last_inputs is not None for fusion in fusions)


@pytest.mark.nvfuser
def test_nvfuser_definition_is_made_ready_to_execute_from_any_thread() -> None:
    """With nvFuser itself: regions in another order have one definition, whose executor cache exists before its first call."""
    cuda = functools.partial(tensor, device="cuda:0")
    parts = traced(lambda a, b: prims.sub(prims.exp(a), b), cuda("a"), cuda("b"))
    other_parts = traced(lambda b, a: prims.sub(prims.exp(a), b), cuda("b"), cuda("a"), prefix="other_")
    row_major, column_major = ((True, True), (1, 0), ()), ((True, True), (0, 1), ())
    with nvfuser_registered(), replaced(share, "is_wanted", lambda: True):
        import thunder.executors.nvfuserex_impl as impl

        make = share._sharing_nvfuser(inspect.unwrap(impl.create_fusion_definition_wrapper))
        one, other = make(parts[0], "one", *parts[1:]), make(other_parts[0], "other", *other_parts[1:])
        assert one._find() is one.wrapper and other._find() is other.wrapper
        definition = one.wrapper.get_fd((row_major, row_major))
        assert other.wrapper.get_fd((row_major, row_major)) is definition
        assert other.wrapper.get_fd((row_major, column_major)) is not definition
        assert definition.fec.fusion() is not None and not hasattr(definition, "_fusion")
        assert (one._arguments, other._arguments) == (None, (1, 0))


# ---------------------------------------------------------------- when it is on


@pytest.mark.parametrize(
    ("asked", "transforms", "executors", "expected"),
    [
        (None, [], ["nvfuser"], False),
        (True, [], ["nvfuser"], True),
        (None, [FusionFixTransform()], ["nvfuser"], True),
        (None, [], ["fusionfix", "nvfuser"], True),
        (False, [FusionFixTransform()], ["nvfuser"], False),
        (None, [FusionFixTransform(share_fusions=False)], ["fusionfix"], False),
        (True, [FusionFixTransform(share_fusions=False)], [], False),
        (False, [FusionFixTransform(share_fusions=True)], [], True),
    ],
)
def test_wanted_goes_with_the_plugin_and_with_the_option(
    asked: bool | None, transforms: list, executors: list, expected: bool
) -> None:
    """On with the transform or the entry; the option alone decides, and the transform's own argument before it."""
    assert share.wanted(asked, transforms, executors) is expected


def test_wanted_under_untested_versions_is_off_unless_asked_for() -> None:
    """Another Thunder may mean something else by a region."""
    with replaced(share, "_untested", lambda: True):
        assert not share.wanted(None, [FusionFixTransform()], [])
        assert share.wanted(True, [], [])


def test_wanted_with_a_wrong_option_raises() -> None:
    """A wrong option is named, with what is legal."""
    with pytest.raises(UsageError, match="share_fusions='yes': True or False"):
        share.wanted("yes", [], [])  # type: ignore[arg-type]


def test_compile_twice_gives_the_same_text_and_the_same_sharing(cat_executor: Any) -> None:
    """A shared fusion is not seen in a trace, and nothing depends on what came before."""
    texts, counts = [], []
    for option in (True, True, False):
        with counted_compiles():
            before = share.sharing().get("torch.compile", (0, 0))
            fn = thunder.jit(rotated, executors=(cat_executor,), fusionfix_share_fusions=option)
            step(fn, weights(3))
            after = share.sharing()["torch.compile"]
        counts.append((after[0] - before[0], after[1] - before[1]))
        trace = str(thunder.last_traces(fn)[-1]) + str(thunder.last_backward_traces(fn)[-1])
        texts.append(re.sub("#.*", "", trace))  # comments tell how long it took
        del fn
        gc.collect()
    assert texts[0] == texts[1] == texts[2]
    assert counts[0] == counts[1] and counts[0][0] > counts[0][1] > 0 and counts[2] == (0, 0)

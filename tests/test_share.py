"""Laws of `share`: equal regions get one fusion, others never do, and a shared fusion gives every region its own results."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import random
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

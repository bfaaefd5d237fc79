"""Runs what a Graph computes on small CPU tensors: the second judge of a rewrite, independent of normal forms.

`verify` reasons about expressions; this module computes. Both traces get the same random inputs, by name, and every
value that both know outside of regions must come out the same. Nothing is exec'ed: each sub-op is looked up by name
in a table of torch calls.

- An op that is not in the table is a fixed smooth function of its arguments: elementwise where `effects` says so,
  else one that mixes all elements. Fused attention and the like thus take part, as unknown functions that see every
  change of their inputs.
- Ops with an effect are not run: their outputs are random, by name, and nothing is written. Order is `verify`'s
  business.
- Indices are taken modulo the size that they index, since random ones mean nothing.
- Tensors are run at their real shapes. Where one has more than ``max_numel`` elements nothing is compared, and the
  answer says so.

    >>> from thunder_fusionfix.model import Ref
    >>> values = {"x": Value("x", (2, 3), "f32", "cuda:0"), "y": Value("y", (3,), "f32", "cuda:0")}
    >>> added = Op("prims.sum", (Ref("x"), (0,)), Ref("y"))
    >>> region = Op("nvFusion0", (Ref("x"),), (Ref("y"),), subops=(added,), is_fusion=True)
    >>> run_region(region, values, {"x": torch.ones(2, 3)})
    {'y': tensor([2., 2., 2.])}
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from thunder_fusionfix._thunder import real_tensors
from thunder_fusionfix.effects import Kind, effect_of, short_name
from thunder_fusionfix.errors import UnsupportedTraceError
from thunder_fusionfix.losses import CrossEntropy, cross_entropy_of
from thunder_fusionfix.model import CLEAR, DEL, EXPAND, OWN, RETURN, Arg, Const, Graph, Op, Ref, Struct, Value
from thunder_fusionfix.normal_form import has_effect

MAX_NUMEL = 1 << 18  # elements of the largest tensor: a region of some hundred ops then takes well below a second

_DTYPES: Mapping[str, torch.dtype] = {
    "b8": torch.bool,
    "i8": torch.int8,
    "ui8": torch.uint8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "c64": torch.complex64,
    "c128": torch.complex128,
}

# Room for another order of additions, relative to the largest element.
_TOLERANCE: Mapping[torch.dtype, float] = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of running two traces on the same inputs."""

    compared: tuple[str, ...]  # values that both know, in the order of the later trace
    differing: tuple[str, ...]
    skipped: str | None = None  # why nothing was compared


def compare(
    before: Graph, after: Graph, *, exact: bool = False, max_numel: int = MAX_NUMEL, seed: int = 0
) -> Comparison:
    """Runs both traces on equal random inputs and compares every value that both know outside of regions.

    Args:
        before: a trace.
        after: the same trace rewritten.
        exact: bit for bit; else with room for another order of additions.
        max_numel: elements of the largest tensor that is run.
        seed: of the random inputs.
    """
    for graph in (before, after):
        why_not = _why_not(graph, max_numel)
        if why_not is not None:
            return Comparison((), (), why_not)
    with real_tensors():  # a capture has none of its own
        old, new = run_graph(before, seed), run_graph(after, seed)
        compared = tuple(name for name in new if name in old)
        is_same = _equal if exact else _close
        differing = tuple(name for name in compared if not is_same(old[name], new[name]))
    return Comparison(compared, differing)


def run_graph(graph: Graph, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of ``graph`` outside of regions, from random inputs that depend on names and ``seed`` only."""
    found: dict[str, Any] = {}
    for name in graph.args:
        found[name] = _random(graph.values[name], seed)
    for op in graph.ops:
        if op.id in (DEL, CLEAR, OWN, EXPAND, RETURN):
            continue
        given = {name: found[name] if name in found else _random(graph.values[name], seed) for name in op.inputs}
        found.update(_run(op, graph.values, given, seed))
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def run_region(op: Op, values: Mapping[str, Value], inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs of a region, or of any op, for these CPU tensors.

    Args:
        op: the region with its sub-ops.
        values: metadata of every value in it.
        inputs: a tensor for each of the op's inputs, with the shape and dtype that ``values`` tells.

    Raises:
        UnsupportedTraceError: an input is missing or has another shape.
    """
    for name in op.inputs:
        given = inputs.get(name)
        if given is None or tuple(given.shape) != values[name].shape:
            shape = None if given is None else tuple(given.shape)
            raise UnsupportedTraceError(f"{op.id} takes {name} of shape {values[name].shape}, given is {shape}")
    return _run(op, values, inputs, seed=0)


# ---------------------------------------------------------------- values


def _why_not(graph: Graph, max_numel: int) -> str | None:
    for name, value in graph.values.items():
        if value.kind != "tensor":
            continue
        if value.shape is None or value.dtype not in _DTYPES:
            return f"shape or dtype of {name} is not known here"
        if prod(value.shape) > max_numel:
            return f"{name} has {prod(value.shape)} elements, more than the {max_numel} that are run"
    return None


def _random(value: Value, seed: int) -> Any:
    """A tensor that depends on the value's name, type and ``seed`` only; for what is no tensor, None."""
    if value.kind != "tensor" or value.shape is None or value.dtype is None:
        return None
    generator = torch.Generator().manual_seed(zlib.crc32(f"{value.name} {seed}".encode()))
    dtype = _DTYPES[value.dtype]
    if dtype is torch.bool:
        return torch.rand(value.shape, generator=generator) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(value.shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 7, value.shape, generator=generator).to(dtype)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    same_type = one.shape == other.shape and one.dtype == other.dtype
    return same_type and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    tolerance = _TOLERANCE.get(one.dtype)
    if tolerance is None or one.numel() == 0:
        return torch.equal(one, other)
    finite = one.isfinite()
    if not torch.equal(torch.where(finite, 0, one).nan_to_num(), torch.where(finite, 0, other).nan_to_num()):
        return False
    scale = torch.where(finite, one, 0).abs().max().double()
    apart = torch.where(finite, one.double() - other.double(), 0).abs().max()
    return bool(apart <= tolerance * scale)


# ---------------------------------------------------------------- ops


def _run(op: Op, values: Mapping[str, Value], given: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The outputs of ``op`` by name."""
    if has_effect(op) and not (op.is_fusion and op.subops) or effect_of(op).kind is Kind.BOOKKEEPING:
        return {name: _random(values[name], seed) for name in op.outputs}
    if op.subops:
        local = dict(given)
        for subop in op.subops:
            local.update(_run(subop, values, local, seed))
        return {name: local[name] for name in op.outputs}
    if set(op.outputs) <= set(op.inputs):
        return {name: given[name] for name in op.outputs}
    return _run_single(op, values, given)


def _run_single(op: Op, values: Mapping[str, Value], given: Mapping[str, Any]) -> dict[str, Any]:
    outs = [values[name] for name in op.outputs]
    rule = _RULES.get(short_name(op.id)) if _is_prim(op.id) else None
    if rule is not None and len(outs) == 1:
        args = [_argument(arg, given) for arg in op.args]
        kwargs = {name: _argument(arg, given) for name, arg in op.kwargs}
        result = rule(outs[0], *args, **kwargs)
        return {outs[0].name: result if outs[0].dtype is None else result.to(_DTYPES[outs[0].dtype])}
    loss = cross_entropy_of(op)
    if loss is not None:
        return {name: result.to(_DTYPES[values[name].dtype or "f32"]) for name, result in _cross_entropy(loss, given)}
    torch_call = _TORCH.get(op.id)
    if torch_call is not None and len(outs) == 1:
        return {outs[0].name: torch_call(*(_argument(arg, given) for arg in op.args))}
    return {out.name: _unknown(op, out, index, given) for index, out in enumerate(outs)}


def _is_prim(op_id: str) -> bool:
    return op_id.startswith("prims.") or (op_id.startswith("torch_") and op_id.endswith("_impl"))


def _argument(arg: Arg, given: Mapping[str, Any]) -> Any:
    if isinstance(arg, Ref):
        tensor = given[arg.name]
        return tensor.contiguous() if isinstance(tensor, torch.Tensor) else tensor  # one kernel for all layouts
    if isinstance(arg, tuple):
        return tuple(_argument(item, given) for item in arg)
    if isinstance(arg, Struct):
        return {name: _argument(item, given) for name, item in arg.items}
    return arg.text if isinstance(arg, Const) else arg


def _unknown(op: Op, out: Value, index: int, given: Mapping[str, Any]) -> Any:
    """A smooth function of all tensors that ``op`` takes, fixed by its name, other arguments and the output's index."""
    if out.kind != "tensor" or out.shape is None or out.dtype is None:
        return None
    spelled = repr(
        (op.id, [_spelled(arg) for arg in op.args], [(name, _spelled(arg)) for name, arg in op.kwargs], index)
    )
    generator = torch.Generator().manual_seed(zlib.crc32(spelled.encode()))
    tensors = [given[name].double().nan_to_num() for name in op.inputs if isinstance(given.get(name), torch.Tensor)]
    is_elementwise = effect_of(op).kind is Kind.POINTWISE and all(tensor.shape == out.shape for tensor in tensors)
    if is_elementwise:
        weights = torch.randn(len(tensors) + 1, generator=generator, dtype=torch.float64)
        mixed = weights[0] + sum(weight * tensor for weight, tensor in zip(weights[1:], tensors))
        result = torch.sin(mixed).expand(out.shape)
    else:
        base = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        mixed = torch.zeros((), dtype=torch.float64)
        for tensor in tensors:
            if tensor.numel():
                mixed = mixed + (tensor * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)).mean()
        result = base * (2 + torch.sin(3 * mixed))
    return (
        (result > 0) if out.dtype == "b8" else (result * 4 if out.dtype[0] in "iu" else result).to(_DTYPES[out.dtype])
    )


def _spelled(arg: Arg) -> object:
    if isinstance(arg, Ref):
        return "_"
    if isinstance(arg, tuple):
        return tuple(_spelled(item) for item in arg)
    if isinstance(arg, Struct):
        return tuple((name, _spelled(item)) for name, item in arg.items)
    return arg.text if isinstance(arg, Const) else repr(arg)


# ---------------------------------------------------------------- prims: (metadata of the output, *args, **kwargs)


def _slice(out: Value, a: torch.Tensor, starts: Any, ends: Any, steps: Any = None) -> torch.Tensor:
    steps = steps or (1,) * a.dim()
    return a[tuple(slice(*bounds) for bounds in zip(starts, ends, steps))]


def _broadcast(out: Value, a: torch.Tensor, shape: Any, dims: Any) -> torch.Tensor:
    spread = [1] * len(shape)
    for source, dim in enumerate(dims):
        spread[dim] = a.shape[source]
    return a.reshape(spread).expand(tuple(shape))


def _pad(out: Value, a: torch.Tensor, fill: Any, config: Any) -> torch.Tensor:
    """Between, before and after the elements of each dim stands the fill; negative counts cut off."""
    result = a
    for dim, (low, high, dilation) in enumerate(config):
        size = result.shape[dim]
        spread = list(result.shape)
        spread[dim] = size + max(size - 1, 0) * dilation
        inner = torch.full(spread, fill, dtype=a.dtype)
        inner[(slice(None),) * dim + (slice(None, None, dilation + 1),)] = result
        for count, at_front in ((low, True), (high, False)):
            if count < 0:
                inner = inner.narrow(dim, -count if at_front else 0, inner.shape[dim] + count)
            elif count:
                edge = list(inner.shape)
                edge[dim] = count
                filled = torch.full(edge, fill, dtype=a.dtype)
                inner = torch.cat([filled, inner] if at_front else [inner, filled], dim)
        result = inner
    return result


def _full(out: Value, shape: Any, fill: Any, device: Any = None, dtype: Any = None) -> torch.Tensor:
    return torch.full(tuple(shape), fill, dtype=_DTYPES[out.dtype or "f32"])


def _iota(
    out: Value, length: int, start: int = 0, step: int = 1, device: Any = None, dtype: Any = None
) -> torch.Tensor:
    return torch.arange(length, dtype=torch.int64) * step + start


def _take(out: Value, a: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    return a.index_select(dim, index.reshape(-1).remainder(a.shape[dim])).reshape(out.shape or ())


def _div(out: Value, a: Any, b: Any) -> torch.Tensor:
    integers = out.dtype is not None and not _DTYPES[out.dtype].is_floating_point
    return torch.div(torch.as_tensor(a), b, rounding_mode="trunc" if integers else None)


def _where(out: Value, condition: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
    dtype = _DTYPES[out.dtype or "f32"]
    return torch.where(condition, torch.as_tensor(a, dtype=dtype), torch.as_tensor(b, dtype=dtype))


def _over_dims(name: str) -> Callable[..., torch.Tensor]:
    return lambda out, a, dims, **options: getattr(torch, name)(a, tuple(dims), **options)


def _prod(out: Value, a: torch.Tensor, dims: Any) -> torch.Tensor:
    for dim in sorted(dims, reverse=True):
        a = a.prod(dim)
    return a


def _plain(name: str) -> Callable[..., torch.Tensor]:
    return lambda out, *args: getattr(torch, name)(
        *(torch.as_tensor(arg) if i == 0 else arg for i, arg in enumerate(args))
    )


def _cross_entropy(loss: CrossEntropy, given: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The outputs of a cross entropy, as `losses` tells what it is."""
    logits, labels = given[loss.logits], given[loss.target]
    is_kept = labels != loss.ignore_index
    classes = torch.where(is_kept, labels.long().remainder(logits.shape[1]), 0)[:, None]
    if loss.gradient is None:
        a_max = logits.amax(1)
        log_sum_exp = (logits - a_max[:, None]).exp().sum(1).log()
        losses = a_max + log_sum_exp - logits.gather(1, classes)[:, 0]
        yield loss.scalar, torch.where(is_kept, losses, 0).sum() / is_kept.sum()
        yield loss.a_max, a_max
        yield loss.log_sum_exp, log_sum_exp
        yield loss.count, is_kept.sum()
        return
    softmax = (logits - given[loss.a_max][:, None] - given[loss.log_sum_exp][:, None]).exp()
    gradient = softmax - torch.zeros_like(softmax).scatter_(1, classes, 1.0)
    yield loss.gradient, torch.where(is_kept[:, None], gradient, 0) * given[loss.scalar] / given[loss.count]


_UNARY = [
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "bitwise_not",
    "ceil",
    "cos",
    "cosh",
    "digamma",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "isfinite",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "neg",
    "reciprocal",
    "round",
    "rsqrt",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
]
_BINARY = [
    "add",
    "atan2",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "eq",
    "fmod",
    "ge",
    "gt",
    "le",
    "lt",
    "maximum",
    "minimum",
    "mul",
    "ne",
    "nextafter",
    "pow",
    "remainder",
    "sub",
]

_RULES: Mapping[str, Callable[..., torch.Tensor]] = {
    **{name: _plain(name) for name in (*_UNARY, *_BINARY)},
    **{name: _over_dims(name) for name in ("sum", "amax", "amin", "var", "std")},
    "argmax": lambda out, a, dim: torch.argmax(a, dim),
    "argmin": lambda out, a, dim: torch.argmin(a, dim),
    "broadcast_in_dim": _broadcast,
    "cat": lambda out, tensors, dim: torch.cat(tensors, dim),
    "convert_element_type": lambda out, a, dtype: torch.as_tensor(a),  # the caller converts to the output's dtype
    "div": _div,
    "full": _full,
    "iota": _iota,
    "linear": lambda out, a, w, bias: torch.nn.functional.linear(a, w, bias),
    "matmul": lambda out, a, b: torch.matmul(a, b),
    "pad": _pad,
    "prod": _prod,
    "reshape": lambda out, a, shape: a.reshape(tuple(shape)),
    "shallow_copy": lambda out, a: a,
    "slice_prim": _slice,
    "squeeze": lambda out, a, dims: a.squeeze(tuple(dims)),
    "stride_order": lambda out, a, order=None: a,
    "take": _take,
    "transpose": lambda out, a, dims: a.permute(tuple(dims)),
    "where": _where,
}

# torch's own spellings, where a trace shows no prims below them.
_TORCH: Mapping[str, Callable[..., torch.Tensor]] = {
    "torch.permute": lambda a, dims: a.permute(tuple(dims)),
    "torch.reshape": lambda a, shape: a.reshape(tuple(shape)),
    "torch.squeeze": lambda a, *dims: a.squeeze(*dims),
    "torch.matmul": torch.matmul,
    "torch.nn.functional.linear": torch.nn.functional.linear,
    "fusionfix_matmul": lambda a, b, *limits: torch.matmul(a, b),
    "fusionfix_linear": lambda a, w, bias=None, *limits: torch.nn.functional.linear(a, w, bias),
}

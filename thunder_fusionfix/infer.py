"""Infers shapes, dtypes and devices that a text does not tell, from the rules of the operations around a value.

Pasted traces are cut: a saved tensor comes from lines that are missing, a fusion's outputs have no type comment, old Thunder
prints none at all. Many operations fix their operands' sizes all the same, in both directions: a transpose gives its input's
shape from its output's, a reshape gives at least the number of elements, arithmetic prims have operands of one shape and
dtype. A rule states only what is certain; what no rule gives stays None.

Rules run forward and backward over the operations until nothing new is found, at most `SWEEPS` times, so time is linear in
the number of operations.

    >>> op = Op("prims.transpose", (Ref("x"), (1, 0)), Ref("y"))
    >>> values, notes = fill((op,), {"x": Value("x"), "y": Value("y", (2, 3), "bf16", "cuda:0")})
    >>> values["x"].shape, values["x"].dtype, notes
    ((3, 2), 'bf16', ('inferred by op rules: x',))
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import prod

from thunder_fusionfix.effects import Kind, effect_of, short_name
from thunder_fusionfix.model import DTYPE_BYTES, Arg, Const, Op, Ref, Value, refs

SWEEPS = 6  # a chain in one direction needs one; values between chains of both directions need more

# Elementwise ops whose output is not of their operands' dtype.
_PREDICATES = frozenset(
    ("eq", "ne", "lt", "le", "gt", "ge", "isfinite", "isnan", "isinf", "signbit")
    + ("logical_not", "logical_and", "logical_or", "logical_xor")
)
_OTHER_DTYPE = frozenset(("bitcast", "real", "imag", "abs"))  # abs, of complex numbers
_SAME_TENSOR = ("shallow_copy", "detach", "stride_order", "contiguous", "clone", "dropout", "alias")
_SAME_SHAPE = (
    "softmax",
    "log_softmax",
    "layer_norm",
    "rms_norm",
    "cumsum",
    "tril",
    "triu",
    "masked_fill",
    "flip",
    "roll",
)
_MOVES_DEVICE = frozenset(("to", "device_put", "copy_"))
# Per backward op: indices of arguments that have the output's shape and dtype.
_LIKE_OUTPUT = {
    "nll_loss_backward": (1,),
    "log_softmax_backward": (0, 1),
    "silu_backward": (0, 1),
    "gelu_backward": (0, 1),
    "threshold_backward": (0, 1),
    "nv_cross_entropy_bwd": (1,),
}
_DTYPE_NAMES = {"bool": "b8", "bfloat": "bf", "float": "f", "int": "i", "uint": "ui", "complex": "c"}
_DTYPE = re.compile(r"(?:thunder\.)?(?:dtypes|torch)\.(bool|bfloat|float|uint|int|complex)(\d*(?:_e\w+)?)_?\Z")
_DEVICE = re.compile(r"""(?:devices\.Device|torch\.device)\((?:type=)?["'](\w+(?::\d+)?)["'](?:, index=(\d+))?\)\Z""")

Facts = dict[str, Value]


def fill(ops: Iterable[Op], values: Mapping[str, Value]) -> tuple[dict[str, Value], tuple[str, ...]]:
    """The values with all that the operations' rules add, and notes for people on what was inferred or stays unknown."""
    facts = dict(values)
    missing = {name for name, value in facts.items() if value.kind == "tensor" and not _complete(value)}
    if not missing:
        return facts, ()
    flat = [op for op in _flat(ops) if not missing.isdisjoint(op.inputs) or not missing.isdisjoint(op.outputs)]
    for _ in range(SWEEPS):
        before = {name: facts[name] for name in missing}
        for op in flat:
            _apply(op, facts)
        for op in reversed(flat):
            _apply(op, facts)
        if all(facts[name] == before[name] for name in missing):
            break
    return facts, _notes(missing, facts)


def dtype_of(arg: Arg) -> str | None:
    """The short dtype name ("bf16") that a printed dtype means; None for anything else.

    >>> dtype_of(Const("dtypes.bfloat16")), dtype_of(Const("torch.float8_e4m3fn")), dtype_of(Const("torch.bool"))
    ('bf16', 'f8_e4m3fn', 'b8')
    """
    match = _DTYPE.match(arg.text) if isinstance(arg, Const) else None
    if match is None:
        return None
    name = "b8" if match.group(1) == "bool" else _DTYPE_NAMES[match.group(1)] + match.group(2)
    return name if name in DTYPE_BYTES else None


def device_of(arg: Arg) -> str | None:
    """The device ("cuda:0") that a printed device means; None for anything else."""
    if isinstance(arg, str):
        return arg
    match = _DEVICE.match(arg.text) if isinstance(arg, Const) else None
    if match is None:
        return None
    return match.group(1) + (f":{match.group(2)}" if match.group(2) else "")


def _complete(value: Value) -> bool:
    return value.shape is not None and value.dtype is not None and value.device is not None


def _flat(ops: Iterable[Op]) -> Iterable[Op]:
    for op in ops:
        yield op
        yield from _flat(op.subops)


def _notes(missing: Iterable[str], facts: Facts) -> tuple[str, ...]:
    shaped, counted, unknown = [], [], []
    for name in sorted(missing):
        value = facts[name]
        if value.shape is not None and value.dtype is not None:
            shaped.append(name)
        elif value.nbytes is not None:
            counted.append(name)
        else:
            unknown.append(name)
    groups = (
        ("inferred by op rules", shaped),
        ("only the number of elements is known, by op rules", counted),
        ("size not known", unknown),
    )
    return tuple(f"{title}: {_some(names)}" for title, names in groups if names)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# ---------------------------------------------------------------- rules


def _learn(
    facts: Facts,
    name: str | None,
    *,
    shape: tuple[int, ...] | None = None,
    numel: int | None = None,
    dtype: str | None = None,
    device: str | None = None,
) -> None:
    """Adds to what is known of a tensor; nothing that is known changes."""
    value = facts.get(name) if name is not None else None
    if value is None or value.kind != "tensor":
        return
    changes: dict[str, object] = {}
    fits = shape is not None and min(shape, default=0) >= 0 and value.known_numel in (None, prod(shape))
    if fits and value.shape is None:
        changes |= {"shape": shape, "known_numel": None}
    if numel is not None and value.numel is None and numel >= 0 and "shape" not in changes:
        changes["known_numel"] = numel
    if dtype is not None and value.dtype is None:
        changes["dtype"] = dtype
    if device is not None and value.device is None:
        changes["device"] = device
    if changes:
        facts[value.name] = replace(value, **changes)  # type: ignore[arg-type]


def _apply(op: Op, facts: Facts) -> None:
    """Adds what the rules of one operation tell about its inputs and outputs."""
    name = short_name(op.id)
    outputs = [facts[output] for output in op.outputs]
    inputs = [facts[source] for source in op.inputs if facts[source].kind == "tensor"]
    if name not in _MOVES_DEVICE:
        _share_device(facts, inputs, outputs)
    rule = _RULES.get(name)
    if rule is not None:
        rule(op, facts)
    elif len(outputs) == 1 and name in _LIKE_OUTPUT:
        for index in _LIKE_OUTPUT[name]:
            _equate(facts, _ref(op, index), op.outputs[0], dtype=True)
    elif len(outputs) == 1 and effect_of(op).kind is Kind.POINTWISE:
        _pointwise(op, facts, name)


def _share_device(facts: Facts, inputs: list[Value], outputs: list[Value]) -> None:
    """All tensors of an operation are on one device, but for numbers on the CPU."""
    devices = {value.device for value in (*inputs, *outputs) if value.device is not None and value.shape != ()}
    if len(devices) != 1:
        return
    device = devices.pop()
    for value in (*inputs, *outputs):
        if value.device is None:
            _learn(facts, value.name, device=device)


def _ref(op: Op, index: int) -> str | None:
    arg = op.args[index] if index < len(op.args) else None
    return arg.name if isinstance(arg, Ref) else None


def _out(op: Op) -> str | None:
    return op.outputs[0] if len(op.outputs) == 1 else None


def _ints(arg: Arg) -> tuple[int, ...] | None:
    if isinstance(arg, tuple) and all(isinstance(item, int) for item in arg):
        return arg  # type: ignore[return-value]
    return None


def _equate(facts: Facts, first: str | None, second: str | None, *, dtype: bool) -> None:
    """Two tensors have one shape, and one dtype where ``dtype``."""
    if first is None or second is None or facts[first].kind != "tensor" or facts[second].kind != "tensor":
        return
    for source, target in ((facts[first], second), (facts[second], first)):
        _learn(facts, target, shape=source.shape, numel=source.known_numel, dtype=source.dtype if dtype else None)


def _pointwise(op: Op, facts: Facts, name: str) -> None:
    output = op.outputs[0]
    tensors = [arg.name for arg in op.args if isinstance(arg, Ref) and facts[arg.name].kind == "tensor"]
    is_prim = op.id.startswith("prims.")
    if is_prim or len(tensors) == 1:  # prims do not broadcast
        for tensor in tensors:
            _equate(facts, tensor, output, dtype=False)
    else:
        _learn(facts, output, shape=_broadcast([facts[tensor].shape for tensor in tensors]))
    if name in _PREDICATES:
        _learn(facts, output, dtype="b8")
    elif name == "where" and is_prim:
        for index in (1, 2):
            _equate(facts, _ref(op, index), output, dtype=True)
    elif name not in _OTHER_DTYPE and name != "where" and (is_prim or len(tensors) == 1):
        dtypes = {facts[tensor].dtype for tensor in (*tensors, output)} - {None}
        if all(
            dtype[0] not in "iu" for dtype in dtypes if dtype
        ):  # true division and the like turn integers into floats
            for tensor in tensors:
                _equate(facts, tensor, output, dtype=True)


def _broadcast(shapes: list[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """The shape that operands are broadcast to; None where one is not known or they do not fit."""
    known = [shape for shape in shapes if shape is not None]
    if not known or len(known) != len(shapes):
        return None
    ndim = max(len(shape) for shape in known)
    result = []
    for sizes in zip(*((1,) * (ndim - len(shape)) + shape for shape in known)):
        larger = {size for size in sizes if size != 1}
        if len(larger) > 1:
            return None
        result.append(larger.pop() if larger else 1)
    return tuple(result)


def _same_tensor(op: Op, facts: Facts) -> None:
    _equate(facts, _ref(op, 0), _out(op), dtype=True)


def _same_shape(op: Op, facts: Facts) -> None:
    _equate(facts, _ref(op, 0), _out(op), dtype=False)


def _convert(op: Op, facts: Facts) -> None:
    _same_shape(op, facts)
    targets = [*op.args[1:], *(arg for _, arg in op.kwargs)]
    dtype = next((found for found in map(dtype_of, targets) if found is not None), None)
    _learn(facts, _out(op), dtype=dtype)


def _permute(op: Op, facts: Facts) -> None:
    source, output = _ref(op, 0), _out(op)
    if source is None or output is None:
        return
    before, after = facts[source], facts[output]
    _learn(facts, output, dtype=before.dtype, numel=before.numel)
    _learn(facts, source, dtype=after.dtype, numel=after.numel)
    shape = before.shape if before.shape is not None else after.shape
    if shape is None:
        return
    dims = _ints(op.args[1]) if len(op.args) == 2 else _ints(op.args[1:])
    if dims is None or not all(-len(shape) <= dim < len(shape) for dim in dims):
        return
    dims = tuple(dim % len(shape) for dim in dims)
    if (
        short_name(op.id) != "permute" and len(op.args) == 3 and not op.id.startswith("prims.")
    ):  # torch.transpose(x, 0, 2)
        swapped = list(range(len(shape)))
        swapped[dims[0]], swapped[dims[1]] = dims[1], dims[0]
        dims = tuple(swapped)
    if sorted(dims) != list(range(len(shape))):
        return
    if before.shape is not None:
        _learn(facts, output, shape=tuple(before.shape[dim] for dim in dims))
    elif after.shape is not None:
        restored = [0] * len(dims)
        for out_dim, dim in enumerate(dims):
            restored[dim] = after.shape[out_dim]
        _learn(facts, source, shape=tuple(restored))


def _reshape(op: Op, facts: Facts) -> None:
    source, output = _ref(op, 0), _out(op)
    if source is None or output is None:
        return
    before, after = facts[source], facts[output]
    shape = _ints(op.args[1]) if len(op.args) == 2 else _ints(op.args[1:])
    if shape is not None and shape.count(-1) == 1 and before.numel is not None:
        rest = -prod(shape)
        shape = tuple(before.numel // rest if size == -1 else size for size in shape) if rest > 0 else None
    if shape is not None and -1 not in shape:
        _learn(facts, output, shape=shape)
        _learn(facts, source, numel=prod(shape))
    _learn(facts, output, dtype=before.dtype, numel=before.numel)
    _learn(facts, source, dtype=after.dtype, numel=after.numel)


def _to_shape(op: Op, facts: Facts) -> None:
    """``broadcast_in_dim(x, shape, dims)`` and ``expand(x, shape)``."""
    source, output = _ref(op, 0), _out(op)
    shape = _ints(op.args[1]) if len(op.args) > 1 else None
    if shape is not None and -1 not in shape:
        _learn(facts, output, shape=shape)
    if source is not None and output is not None:
        _learn(facts, output, dtype=facts[source].dtype)
        _learn(facts, source, dtype=facts[output].dtype)


def _slice(op: Op, facts: Facts) -> None:
    source, output = _ref(op, 0), _out(op)
    if source is None or output is None:
        return
    _learn(facts, output, dtype=facts[source].dtype)
    _learn(facts, source, dtype=facts[output].dtype)
    bounds = [_ints(arg) for arg in op.args[1:4]]
    if len(bounds) < 2 or bounds[0] is None or bounds[1] is None:
        return
    steps = bounds[2] if len(bounds) > 2 and bounds[2] is not None else (1,) * len(bounds[0])
    if len(bounds[0]) == len(bounds[1]) == len(steps) and all(step > 0 for step in steps):
        sizes = tuple(len(range(*one)) for one in zip(bounds[0], bounds[1], steps) if max(map(abs, one)) < 2**62)
        if len(sizes) == len(steps):
            _learn(facts, output, shape=sizes)


def _same_numel(op: Op, facts: Facts) -> None:
    source, output = _ref(op, 0), _out(op)
    if source is None or output is None:
        return
    before, after = facts[source], facts[output]
    _learn(facts, output, dtype=before.dtype, numel=before.numel)
    _learn(facts, source, dtype=after.dtype, numel=after.numel)


def _unsqueeze(op: Op, facts: Facts) -> None:
    """``unsqueeze(x, dim)``: a unit dim more."""
    source, output = _ref(op, 0), _out(op)
    dim = op.args[1] if len(op.args) > 1 else op.kwarg("dim")
    if source is not None and output is not None and isinstance(dim, int):
        before, after = facts[source].shape, facts[output].shape
        ndim = len(before) + 1 if before is not None else len(after) if after is not None else 0
        if -ndim <= dim < ndim:
            at = dim % ndim
            if before is not None:
                _learn(facts, output, shape=(*before[:at], 1, *before[at:]))
            elif after is not None and after[at] == 1:
                _learn(facts, source, shape=(*after[:at], *after[at + 1 :]))
    _same_numel(op, facts)


def _split(op: Op, facts: Facts) -> None:
    """``split(x, sizes or size, dim)``: parts of one dim, in order."""
    source = _ref(op, 0)
    sizes = op.args[1] if len(op.args) > 1 else None
    dim = op.args[2] if len(op.args) > 2 else op.kwarg("dim", 0)
    shape = facts[source].shape if source is not None else None
    if source is None or not isinstance(op.output, tuple):
        return
    dtype = facts[source].dtype
    parts = _ints(sizes)
    if isinstance(sizes, int) and shape and isinstance(dim, int) and -len(shape) <= dim < len(shape) and sizes > 0:
        whole = shape[dim]
        parts = tuple(min(sizes, whole - start) for start in range(0, min(whole, sizes * len(op.output)), sizes))
    for index, output in enumerate(op.output):
        if not isinstance(output, Ref):
            continue
        fits = shape and isinstance(dim, int) and -len(shape) <= dim < len(shape) and parts and index < len(parts)
        if fits and shape and isinstance(dim, int) and parts:
            axis = dim % len(shape)
            _learn(facts, output.name, shape=(*shape[:axis], parts[index], *shape[axis + 1 :]))
        _learn(facts, output.name, dtype=dtype)


def _reduce(op: Op, facts: Facts) -> None:
    """``sum(x, dims)`` of prims, which drop the dims; several outputs have one shape (``var_mean``)."""
    source = _ref(op, 0)
    dims = _ints(op.args[1]) if len(op.args) > 1 else None
    if source is None:
        return
    before = facts[source]
    shape = None
    if before.shape is not None and dims is not None and op.id.startswith("prims."):
        gone = {dim % len(before.shape) for dim in dims} if before.shape else set()
        shape = tuple(size for dim, size in enumerate(before.shape) if dim not in gone)
    is_float = before.dtype is not None and before.dtype[0] in "fb" and before.dtype != "b8"
    for output in op.outputs:
        _learn(facts, output, shape=shape, dtype=before.dtype if is_float else None)


def _cat(op: Op, facts: Facts) -> None:
    parts, output = op.args[0] if op.args else None, _out(op)
    if not isinstance(parts, tuple) or output is None:
        return
    known = [facts[name] for name in refs(parts)]
    dtypes = {value.dtype for value in known}
    if len(dtypes) == 1:
        _learn(facts, output, dtype=dtypes.pop())
    dim = op.args[1] if len(op.args) > 1 else op.kwarg("dim", 0)
    shapes = [value.shape for value in known]
    first = shapes[0] if shapes else None
    if first is None or not isinstance(dim, int) or not -len(first) <= dim < len(first):
        return
    axis = dim % len(first)
    sizes = [shape[axis] for shape in shapes if shape is not None and len(shape) == len(first)]
    if len(sizes) == len(known):
        _learn(facts, output, shape=(*first[:axis], sum(sizes), *first[axis + 1 :]))


def _pad(op: Op, facts: Facts) -> None:
    source, output = _ref(op, 0), _out(op)
    config = op.args[2] if len(op.args) > 2 else None
    if source is None or output is None:
        return
    before, after = facts[source], facts[output]
    _learn(facts, output, dtype=before.dtype)
    _learn(facts, source, dtype=after.dtype)
    triples = [_ints(item) for item in config] if isinstance(config, tuple) else []
    if not all(triple is not None and len(triple) == 3 and triple[2] == 0 for triple in triples):
        return
    grown = [triple[0] + triple[1] for triple in triples if triple is not None]
    if before.shape is not None and len(before.shape) == len(grown):
        _learn(facts, output, shape=tuple(size + more for size, more in zip(before.shape, grown)))
    elif after.shape is not None and len(after.shape) == len(grown):
        _learn(facts, source, shape=tuple(size - more for size, more in zip(after.shape, grown)))


def _matmul(op: Op, facts: Facts) -> None:
    left, right, output = _ref(op, 0), _ref(op, 1), _out(op)
    if left is None or right is None or output is None:
        return
    _one_dtype(facts, (left, right, output))
    a, b = facts[left].shape, facts[right].shape
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return
    batch = _broadcast([a[:-2], b[:-2]])
    if batch is not None:
        _learn(facts, output, shape=(*batch, a[-2], b[-1]))


def _linear(op: Op, facts: Facts) -> None:
    source, weight, output = _ref(op, 0), _ref(op, 1), _out(op)
    if source is None or weight is None or output is None:
        return
    _one_dtype(facts, (source, weight, output))
    x, w, y = facts[source].shape, facts[weight].shape, facts[output].shape
    if x and w and len(w) == 2:
        _learn(facts, output, shape=(*x[:-1], w[0]))
    if y and w and len(w) == 2:
        _learn(facts, source, shape=(*y[:-1], w[1]))
    if x and y:
        _learn(facts, weight, shape=(y[-1], x[-1]))


def _one_dtype(facts: Facts, names: Iterable[str]) -> None:
    names = tuple(names)
    dtypes = {facts[name].dtype for name in names if facts[name].dtype is not None}
    if len(dtypes) == 1:
        dtype = dtypes.pop()
        for name in names:
            _learn(facts, name, dtype=dtype)


def _full(op: Op, facts: Facts) -> None:
    """``full(shape, ...)`` and ``uniform(shape, ...)``, with ``device=`` and ``dtype=``."""
    shape = _ints(op.args[0]) if op.args else None
    _learn(facts, _out(op), shape=shape, dtype=dtype_of(op.kwarg("dtype")), device=device_of(op.kwarg("device")))


def _copy(op: Op, facts: Facts) -> None:
    _equate(facts, _ref(op, 0), _ref(op, 1), dtype=False)
    _equate(facts, _ref(op, 1), _out(op), dtype=True)


def _update_aliases(op: Op, facts: Facts) -> None:
    """``(a1, b1) = update_aliases((a, b))``: new names for tensors that a write may have changed."""
    sources = [name for arg in op.args for name in refs(arg)]
    for source, output in zip(sources, refs(op.output)):
        _equate(facts, source, output, dtype=True)


def _nv_cross_entropy_fwd(op: Op, facts: Facts) -> None:
    """``loss, max, log_sum_exp, count = nv_cross_entropy_fwd(logits, target, ...)``: the mean loss and what backward needs."""
    logits, target = _ref(op, 0), _ref(op, 1)
    if logits is None or target is None or not isinstance(op.output, tuple) or len(op.output) != 4:
        return
    loss, maximum, log_sum_exp, count = (item.name if isinstance(item, Ref) else None for item in op.output)
    _learn(facts, loss, shape=(), dtype=facts[logits].dtype)
    _learn(facts, maximum, shape=facts[target].shape, dtype="f32")
    _learn(facts, log_sum_exp, shape=facts[target].shape, dtype="f32")
    _learn(facts, count, shape=(), dtype="f32")


_Rule = Callable[[Op, Facts], None]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_SAME_TENSOR, _same_tensor),
    **dict.fromkeys(_SAME_SHAPE, _same_shape),
    **dict.fromkeys(("convert_element_type", "to", "float", "type_as"), _convert),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "permute"), _permute),
    **dict.fromkeys(("reshape", "view"), _reshape),
    **dict.fromkeys(("broadcast_in_dim", "expand"), _to_shape),
    **dict.fromkeys(("squeeze", "flatten", "unflatten"), _same_numel),
    "unsqueeze": _unsqueeze,
    "split": _split,
    **dict.fromkeys(("sum", "amax", "amin", "prod", "var", "var_mean"), _reduce),
    **dict.fromkeys(("matmul", "mm", "spmm", "bmm"), _matmul),
    **dict.fromkeys(("full", "uniform"), _full),
    "slice_prim": _slice,
    "cat": _cat,
    "pad": _pad,
    "linear": _linear,
    "copy_": _copy,
    "update_aliases": _update_aliases,
    "nv_cross_entropy_fwd": _nv_cross_entropy_fwd,
}

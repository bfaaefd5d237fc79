"""Reads a Thunder trace as a Graph.

Nothing of the trace is changed but the names that printing it would give to its constant objects. The Graph equals the one
that `parse` makes of ``str(trace)``, apart from strides, tags and what the caller holds, which a printed trace does not tell.

Strides: Thunder's TensorProxy has none. Under ThunderFX the compiled function is a GraphModule whose placeholders carry an
example value; `example_strides` takes them from there. Strides of other values follow in `alias`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from thunder_fusionfix._thunder import (
    BoundSymbol,
    BoundSymbolTag,
    CollectionProxy,
    ContextObject,
    FutureTensorProxy,
    NumberProxy,
    PrimIDs,
    Proxy,
    TensorProxy,
    TraceCtx,
    TraceTag,
    get_compile_data,
    get_compile_stats,
    prettyprint,
    tracectx,
    tree_iter,
)
from thunder_fusionfix.errors import UnsupportedTraceError
from thunder_fusionfix.model import CLEAR, DEL, RETURN, UNPACK, Arg, Const, Graph, Op, Ref, Struct, Value
from thunder_fusionfix.simulate import hold_cotangents

_STATEMENTS = {
    PrimIDs.RETURN: RETURN,
    PrimIDs.DEL: DEL,
    PrimIDs.UNPACK_SEQUENCE: UNPACK,
}


def read(trace: TraceCtx, *, strides: Mapping[str, tuple[int, ...]] | None = None, held: Iterable[str] = ()) -> Graph:
    """The Graph of ``trace``.

    Args:
        trace: any trace of Thunder's, before or after the split, with or without ``del`` statements.
        strides: strides in elements of arguments, by name, where they are known.
        held: names that the caller owns until the trace returns, beyond a forward trace's own arguments and, where the compile
            that runs now says so (`engine_holds_cotangents`), a backward trace's cotangents.

    Raises:
        UnsupportedTraceError: the trace holds values whose size only a run can tell (symbolic values).
    """
    values: dict[str, Value] = {}
    strides = strides or {}

    def note(proxy: Proxy) -> None:
        if proxy.name not in values:
            values[proxy.name] = _value(proxy, strides.get(proxy.name))

    with tracectx(trace):
        ops = tuple(_op(bsym, note) for bsym in positioned(trace))
    args = _signature(trace, note)
    stage = _stage(trace)
    owned = frozenset(held) | (frozenset(args) if stage != "backward" else frozenset())
    siginfo = trace.siginfo() if trace._siginfo is not None or trace.fn is not None else None
    graph = Graph(siginfo.name if siginfo is not None else "computation", stage, args, ops, values, held=owned)
    return hold_cotangents(graph) if engine_holds_cotangents() else graph


def positioned(trace: TraceCtx) -> list[BoundSymbol]:
    """The bound symbols of ``trace`` that are ops of its Graph, by position.

    Left out is what prints as comments alone: comments, the signature, and the unpacking of an empty collection.
    """
    return [bsym for bsym in trace.bound_symbols if not _prints_nothing(bsym)]


def _prints_nothing(bsym: BoundSymbol) -> bool:
    if bsym.sym.id in (PrimIDs.COMMENT, PrimIDs.UNPACK_TRIVIAL):
        return True
    return bsym.sym.id is PrimIDs.UNPACK_SEQUENCE and not bsym.flat_proxy_outs


def example_strides() -> dict[str, tuple[int, ...]]:
    """Strides in elements of the arguments of the function that Thunder compiles now, by proxy name.

    Under ThunderFX the compiled function is a GraphModule; elsewhere, and outside a compile, nothing is known: ``{}``.
    Names that Thunder had to change are left out.
    """
    compile_data = get_compile_data()
    graph = getattr(getattr(compile_data, "fn", None), "graph", None)
    found: dict[str, tuple[int, ...]] = {}
    for node in getattr(graph, "nodes", ()):
        example = node.meta.get("example_value") if node.op == "placeholder" else None
        stride = getattr(example, "stride", None)
        steps = stride() if stride is not None else None
        if steps is not None and all(isinstance(step, int) for step in steps):
            found[node.target] = tuple(steps)
    return found


def engine_holds_cotangents() -> bool:
    """True where autograd's engine holds the cotangents of the function that Thunder compiles now until its backward returns.

    So it does where Thunder's autograd function is not split in two, which is ThunderFX's default and not that of ``thunder.jit``.
    """
    options = getattr(get_compile_data(), "compile_options", {})
    return bool(options.get("thunderfx_disable_split_autograd", False))


def forward_trace() -> TraceCtx | None:
    """The forward trace of the compile that runs now, as it was handed over last; None outside a compile.

    Its arguments belong to the caller during the backward, and it tells which saved tensors share memory.
    """
    traces = getattr(get_compile_stats(), "last_traces", None)
    return traces[-1] if traces else None


def _stage(trace: TraceCtx) -> str:
    if TraceTag.BACKWARD in trace.tags:
        return "backward"
    if TraceTag.AUGMENTED_FORWARD in trace.tags:
        return "forward"
    last = trace.bound_symbols[-1] if trace.bound_symbols else None
    returns_both = last is not None and last.args and isinstance(last.args[0], dict) and "fw_flat_out" in last.args[0]
    return "joint" if returns_both else "inference"


def _signature(trace: TraceCtx, note: Any) -> tuple[str, ...]:
    """Names of the arguments: those that the trace unpacks trivially, else the proxies of ``trace.args``."""
    unpacked = [bsym.output for bsym in trace.bound_symbols if bsym.sym.id is PrimIDs.UNPACK_TRIVIAL]
    proxies = [proxy for proxy in tree_iter(unpacked or trace.args or ()) if isinstance(proxy, Proxy)]
    for proxy in proxies:
        note(proxy)
    return tuple(dict.fromkeys(proxy.name for proxy in proxies))


def _op(bsym: BoundSymbol, note: Any) -> Op:
    for proxy in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs):
        note(proxy)
    op_id = _STATEMENTS.get(bsym.sym.id) or _callee(bsym)
    return Op(
        id=op_id,
        args=tuple(_arg(arg) for arg in bsym._arg_printables[: 1 if op_id == UNPACK else None]),  # not its length
        output=None if op_id in (RETURN, DEL, CLEAR) else _names_only(_arg(bsym.output)),
        kwargs=tuple((name, _arg(arg)) for name, arg in bsym._kwarg_printables.items()),
        subops=tuple(_op(subsymbol, note) for subsymbol in bsym.subsymbols),
        tags=_tags(bsym),
        is_fusion=bool(bsym.sym.is_fusion),
    )


def _names_only(output: Arg) -> Arg:
    """An output without its literals, which a trace prints as ``_``."""
    if isinstance(output, tuple):
        return tuple(_names_only(item) for item in output)
    if isinstance(output, Struct):
        return Struct(tuple((name, _names_only(item)) for name, item in output.items))
    return output if isinstance(output, Ref) else None


def _callee(bsym: BoundSymbol) -> str:
    """The callee as the trace prints it."""
    name = bsym.name_with_module()
    return CLEAR if name.rsplit(".", 1)[-1] == CLEAR else name


def _tags(bsym: BoundSymbol) -> frozenset[str]:
    names = {tag.name for tag in bsym.sym.tags or ()}
    if BoundSymbolTag.BACKWARD in bsym.tags:
        names.add("BACKWARD")
    if BoundSymbolTag.RECOMPUTE_IN_BACKWARD in bsym.tags:
        names.add("RECOMPUTE_IN_BACKWARD")
    return frozenset(names)


def _arg(printable: Any) -> Arg:
    """One argument, output or part of one as plain data."""
    if isinstance(printable, Proxy):
        return Ref(printable.name)
    if printable is None or isinstance(printable, (bool, int, float, complex, str)):
        return printable
    if isinstance(printable, (tuple, list)):
        return tuple(_arg(item) for item in printable)
    if isinstance(printable, dict):
        return Struct(tuple((str(name), _arg(item)) for name, item in printable.items()))
    if isinstance(printable, ContextObject):
        return Const(printable.name)
    inner = (
        [proxy for proxy in tree_iter(vars(printable)) if isinstance(proxy, Proxy)]
        if hasattr(printable, "__dict__")
        else []
    )
    if inner:  # a dataclass of the user's: its tensors must not get lost
        return tuple(Ref(proxy.name) for proxy in inner)
    return Const(prettyprint(printable))


def _value(proxy: Proxy, strides: tuple[int, ...] | None) -> Value:
    if isinstance(proxy, (TensorProxy, FutureTensorProxy)):
        shape = tuple(proxy._shape)  # `shape` records an op in the trace where sizes are symbolic
        if not all(isinstance(size, int) for size in shape):
            raise UnsupportedTraceError("symbolic values, sizes that only a run can tell")
        dtype, device = proxy.dtype.shortname(), proxy.device.device_str()
        return Value(proxy.name, shape, dtype, device, strides if strides and len(strides) == len(shape) else None)
    if isinstance(proxy, NumberProxy):
        return Value(proxy.name, kind="number")
    if isinstance(proxy, CollectionProxy):
        return Value(proxy.name, kind="collection")
    return Value(proxy.name, kind="other")

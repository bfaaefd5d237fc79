"""Reads a Thunder trace as a Graph.

Nothing of the trace is changed but the names that printing it would give to its constant objects. The Graph equals the one
that `parse` makes of ``str(trace)``, apart from strides, tags and what the caller holds, which a printed trace does not tell.

Strides: Thunder's TensorProxy has none. Under ThunderFX the compiled function is a GraphModule whose placeholders carry an
example value; `example_strides` takes them from there. Strides of other values follow in `alias`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import ReferenceType, ref

from thunder_fusionfix._thunder import (
    BoundSymbol,
    BoundSymbolTag,
    CollectionProxy,
    ContextObject,
    Device,
    FutureTensorProxy,
    NumberProxy,
    PrimIDs,
    Proxy,
    Symbol,
    TensorProxy,
    TraceCtx,
    TraceTag,
    dtypes,
    get_compile_data,
    get_compile_stats,
    get_tracectx,
    prettyprint,
    to_printable,
    tracectx,
    tree_iter,
)
from thunder_fusionfix.errors import UnsupportedTraceError
from thunder_fusionfix.model import (
    CLEAR,
    DEL,
    EXPAND,
    OWN,
    RETURN,
    UNPACK,
    Arg,
    Const,
    Graph,
    Op,
    Ref,
    Struct,
    Value,
    number_of,
)
from thunder_fusionfix.simulate import hold_cotangents

_STATEMENTS = {
    PrimIDs.RETURN: RETURN,
    PrimIDs.DEL: DEL,
    PrimIDs.UNPACK_SEQUENCE: UNPACK,
}
_LITERALS = frozenset({type(None), bool, int, float, complex, str})

Asked = TypeVar("Asked")
Found = TypeVar("Found")


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
    return Reader(strides).read(trace, held)


class Reader:
    """Reads traces that were made from one another; what they share is read once.

    Bound symbols are immutable, and `edit` takes those that it leaves alone over into the new trace. A reader gives one `Op`, the same
    object, for one bound symbol, so a trace that differs in ten ops takes the time of ten ops, and whoever compares two Graphs sees at
    once what is the same in both. The list of bound symbols itself is taken from each trace anew.
    """

    def __init__(self, strides: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """``strides``: as of `read`."""
        self._strides = strides or {}
        self._op_of = _Memory(self._read_op, _content)
        self._line_of = _Memory(self._op_of)  # of a bound symbol that stands in a trace; traces share the objects
        self._named = _Memory(self._read_proxy)
        self._symbol_of = _Memory(_symbol)
        self._text_of = _Memory(prettyprint)
        self._dtype_of = _Memory(dtypes.dtype.shortname)
        self._device_of = _Memory(Device.device_str)
        self._last: tuple[ReferenceType[TraceCtx], list[_Line]] | None = None  # the trace that was read last

    def read(self, trace: TraceCtx, held: Iterable[str] = ()) -> Graph:
        """The Graph of ``trace``; see the function `read`."""
        ops: list[Op] = []
        values: dict[str, Value] = {}
        for op, named in self._lines(trace):
            ops.append(op)
            for one in named:
                values.setdefault(one.ref.name, one.value)
        signature = [self._named(proxy) for proxy in _signature(trace)]
        for one in signature:
            values.setdefault(one.ref.name, one.value)
        args = tuple(dict.fromkeys(one.ref.name for one in signature))
        stage = _stage(trace)
        owned = frozenset(held) | (frozenset(args) if stage != "backward" else frozenset())
        siginfo = trace.siginfo() if trace._siginfo is not None or trace.fn is not None else None
        name = siginfo.name if siginfo is not None else "computation"
        graph = Graph(name, stage, args, tuple(ops), values, held=owned)
        return hold_cotangents(graph) if engine_holds_cotangents() else graph

    def proxies(self, trace: TraceCtx) -> dict[str, Proxy]:
        """Every proxy of ``trace`` by name, those of sub-ops included; of several with one name the first."""
        found: dict[str, Proxy] = {}
        known = self._last is not None and self._last[0]() is trace
        for _, named in self._last[1] if self._last is not None and known else self._lines(trace):
            for one in named:
                found.setdefault(one.ref.name, one.proxy)
        for proxy in _signature(trace):
            found.setdefault(proxy.name, proxy)
        return found

    def _lines(self, trace: TraceCtx) -> list[_Line]:
        with tracectx(trace):
            lines = [self._line_of(bsym) for bsym in positioned(trace)]
        self._last = ref(trace), lines
        return lines

    def _read_op(self, bsym: BoundSymbol) -> _Line:
        """The op, and all that it and its sub-ops name."""
        names: _Names = {}
        symbol = self._symbol_of(bsym.sym)
        op_id = symbol.statement or (symbol.callee if bsym._call_ctx is None else bsym.name_with_module())
        args = tuple([self._arg(arg, names) for arg in bsym.args])
        kwargs = tuple([(name, self._arg(arg, names)) for name, arg in bsym.kwargs.items()])
        output = self._arg(bsym.output, names)
        inside = [self._op_of(subsymbol) for subsymbol in bsym.subsymbols]
        for _, named in inside:
            for one in named:
                names.setdefault(one.ref.name, one)
        op = Op(
            id=op_id,
            args=args[:1] if op_id == UNPACK else args,  # not its length
            output=None if op_id in (RETURN, DEL, CLEAR, OWN, EXPAND) else _names_only(output),
            kwargs=kwargs,
            subops=tuple([subop for subop, _ in inside]),
            tags=symbol.tags | _own_tags(bsym) if bsym.tags else symbol.tags,
            is_fusion=bool(bsym.sym.is_fusion),
        )
        return op, tuple(names.values())

    def _arg(self, arg: Any, names: _Names) -> Arg:
        """One argument, output or part of one as plain data; what it names goes to ``names``."""
        kind = type(arg)
        if kind in _LITERALS:
            return arg
        if isinstance(arg, Proxy):
            named = self._named(arg)
            names.setdefault(named.ref.name, named)
            return named.ref
        if kind is tuple or kind is list:
            return (
                tuple(arg) if _LITERALS.issuperset(map(type, arg)) else tuple([self._arg(item, names) for item in arg])
            )
        if kind is dict:
            return Struct(tuple((str(name), self._arg(item, names)) for name, item in arg.items()))
        if isinstance(arg, (dtypes.dtype, Device)):
            return Const(self._text_of(arg))
        return self._printed(to_printable(get_tracectx(), arg, import_ctx={}, object_ctx={}), names)

    def _printed(self, printable: Any, names: _Names) -> Arg:
        """What the trace prints in the place of an object of another kind."""
        if isinstance(printable, (bool, int, float, complex, str)):
            return printable
        if isinstance(printable, (tuple, list)):
            return tuple(self._arg(item, names) for item in printable)
        if isinstance(printable, dict):
            return Struct(tuple((str(name), self._arg(item, names)) for name, item in printable.items()))
        if isinstance(printable, ContextObject):
            return Const(printable.name)
        parts = tree_iter(vars(printable)) if hasattr(printable, "__dict__") else ()
        inner = [self._arg(part, names) for part in parts if isinstance(part, Proxy)]
        if inner:  # a dataclass of the user's: its tensors must not get lost
            return tuple(inner)
        return Const(prettyprint(printable))

    def _read_proxy(self, proxy: Proxy) -> _Named:
        return _Named(proxy, Ref(proxy.name), self._value(proxy))

    def _value(self, proxy: Proxy) -> Value:
        if isinstance(proxy, (TensorProxy, FutureTensorProxy)):
            shape = tuple(proxy._shape)  # `shape` records an op in the trace where sizes are symbolic
            if not all(isinstance(size, int) for size in shape):
                raise UnsupportedTraceError("symbolic values, sizes that only a run can tell")
            strides = self._strides.get(proxy.name)
            known = strides if strides and len(strides) == len(shape) else None
            return Value(proxy.name, shape, self._dtype_of(proxy.dtype), self._device_of(proxy.device), known)
        if isinstance(proxy, NumberProxy):
            return Value(proxy.name, kind="number")
        if isinstance(proxy, CollectionProxy):
            return Value(proxy.name, kind="collection")
        return Value(proxy.name, kind="other")


class _Named(NamedTuple):
    """What stands for a proxy in a Graph."""

    proxy: Proxy
    ref: Ref
    value: Value


_Names = dict[str, _Named]
_Line = tuple[Op, tuple[_Named, ...]]
"""An op, and all that it and its sub-ops name."""


class _Memory(Generic[Asked, Found]):
    """A function that is asked once for each object; objects are told by identity and kept, so that no id is given again."""

    def __init__(self, find: Callable[[Asked], Found], key: Callable[[Asked], Hashable] = number_of) -> None:
        self._find, self._key = find, key
        self._found: dict[Hashable, tuple[Asked, Found]] = {}

    def __call__(self, asked: Asked) -> Found:
        key = self._key(asked)
        known = self._found.get(key)
        if known is None:
            known = self._found[key] = asked, self._find(asked)
        return known[1]


def _content(bsym: BoundSymbol) -> Hashable:
    """The same for a bound symbol and its copies: Thunder copies what stands in a region each time that it fuses one."""
    if bsym.subsymbols:
        return number_of(bsym)
    output = bsym.output
    given = tuple(map(number_of, output)) if type(output) is tuple or type(output) is list else number_of(output)
    return number_of(bsym.sym), number_of(bsym.args), number_of(bsym.kwargs), given, frozenset(bsym.tags)


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


def _signature(trace: TraceCtx) -> list[Proxy]:
    """The arguments: those that the trace unpacks trivially, else ``trace.args``."""
    unpacked = [bsym.output for bsym in trace.bound_symbols if bsym.sym.id is PrimIDs.UNPACK_TRIVIAL]
    return [proxy for proxy in tree_iter(unpacked or trace.args or ()) if isinstance(proxy, Proxy)]


@dataclass(frozen=True, slots=True)
class _Symbol:
    """What all bound symbols of one symbol have in common."""

    statement: str | None  # the model's name of a statement of the trace
    callee: str  # as the trace prints it
    tags: frozenset[str]


def _symbol(symbol: Symbol) -> _Symbol:
    statement = _STATEMENTS.get(symbol.id)
    name = BoundSymbol(symbol, (), {}, None).name_with_module()
    callee = CLEAR if name.rsplit(".", 1)[-1] == CLEAR else name
    return _Symbol(statement, callee, frozenset(tag.name for tag in symbol.tags or ()))


def _own_tags(bsym: BoundSymbol) -> frozenset[str]:
    tags = ((BoundSymbolTag.BACKWARD, "BACKWARD"), (BoundSymbolTag.RECOMPUTE_IN_BACKWARD, "RECOMPUTE_IN_BACKWARD"))
    return frozenset(name for tag, name in tags if tag in bsym.tags)


def _names_only(output: Arg) -> Arg:
    """An output without its literals, which a trace prints as ``_``."""
    if isinstance(output, Ref):
        return output
    if isinstance(output, tuple):
        return tuple([_names_only(item) for item in output])
    if isinstance(output, Struct):
        return Struct(tuple((name, _names_only(item)) for name, item in output.items))
    return None

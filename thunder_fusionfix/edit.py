"""Applies a Plan to a final trace. The only place that makes bound symbols and proxies.

The input trace, its bound symbols and its proxies stay as they are: new bound symbols come from Thunder's own symbols and
metas or from `from_bsym`, a changed region is fused again by the executor that made it, and ``del`` statements are derived
anew as Thunder's `del_last_used` does. A new op outside regions is bound for torch as Thunder binds what no executor claimed.

What the plan leaves alone is not looked into: the names of an op come from its Graph, the proxies from the reader of the trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thunder_fusionfix._thunder import (
    BoundSymbol,
    CollectionProxy,
    PrimIDs,
    Proxy,
    TensorProxy,
    TraceCtx,
    TraceProvenance,
    TraceTag,
    clear_mutable_collection,
    contiguous,
    dtypes,
    from_trace,
    get_always_executors,
    keep_object_names,
    prims,
    to_device,
    tracectx,
    tree_flatten,
    tree_map,
    tree_unflatten,
    variableify,
)
from thunder_fusionfix.alias import reach_caller
from thunder_fusionfix.cotangents import own_cotangents
from thunder_fusionfix.errors import UnsupportedTraceError
from thunder_fusionfix.model import (
    CLEAR,
    DEL,
    UNPACK,
    Arg,
    Const,
    Graph,
    NewOp,
    Part,
    Plan,
    Ref,
    Repeat,
    number_of,
    refs,
)
from thunder_fusionfix.read import Reader, positioned
from thunder_fusionfix.undefined import expand_zero_cotangents


@dataclass(frozen=True, slots=True)
class _Region:
    """What a FusionExecutor's `fuse` asks of a region."""

    inputs: tuple[Any, ...]  # variableified proxies
    outputs: tuple[Any, ...]
    bound_symbols: tuple[BoundSymbol, ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """One bound symbol of the new trace."""

    bsym: BoundSymbol
    names: tuple[str, ...]  # of the values that it gives and takes


def apply_plan(trace: TraceCtx, graph: Graph, plan: Plan, provenance: str, reader: Reader | None = None) -> TraceCtx:
    """A new trace with ``plan`` carried out; ``trace`` itself where the plan is empty.

    Args:
        trace: the trace that ``graph`` was read from.
        graph: its Graph, to which the plan's positions refer.
        plan: edits; see `thunder_fusionfix.model.Plan`.
        provenance: what the new trace says made it.
        reader: the one that read ``graph``, where the caller has it.

    Raises:
        UnsupportedTraceError: the plan needs an op, a dtype or an executor that cannot be made here.
    """
    if plan.is_empty:
        return trace
    new_trace = from_trace(trace)
    new_trace.names = set(trace.names)
    bsyms = positioned(trace)
    editor = _Editor(new_trace, graph, (reader or Reader()).proxies(trace), plan)
    regions = {edit.pos: edit.parts for edit in plan.regions}
    expanded = dict(plan.expanded)
    placed: dict[int, list[NewOp]] = {}
    for item in plan.placed:
        placed.setdefault(item.pos, []).append(item.op)

    known = set(map(number_of, bsyms))
    lines = [
        editor.line(bsym) for bsym in trace.bound_symbols if number_of(bsym) not in known
    ]  # comments and the signature
    positions: Iterable[int] = range(len(graph.ops)) if plan.order is None else plan.order
    for pos in positions:
        for new in placed.get(pos, ()):
            lines += map(editor.line, editor.outside(new))
        op = graph.ops[pos]
        if op.id in (DEL, CLEAR):
            continue
        if op.id == UNPACK and op.inputs[0] in plan.owned:
            lines.append(editor.line(editor.own(op.inputs[0])))
        if op.id == UNPACK and op.inputs[0] in expanded:
            lines.append(editor.line(editor.expand(op.inputs[0], expanded[op.inputs[0]])))
        if pos in regions:
            lines += map(editor.line, editor.rebuild(bsyms[pos], regions[pos]))
        else:
            lines.append(_Line(bsyms[pos], (*op.outputs, *op.inputs)))

    deletes = {op.inputs: bsyms[pos] for pos, op in enumerate(graph.ops) if op.id == DEL}
    new_trace.bound_symbols = _with_deletes(lines, editor.proxies, deletes, TraceTag.BACKWARD in trace.tags)
    keep_object_names(new_trace, trace)
    new_trace.set_provenance(TraceProvenance(provenance))
    return new_trace


def _with_deletes(
    lines: Sequence[_Line],
    proxies: Mapping[str, Proxy],
    deletes: Mapping[tuple[str, ...], BoundSymbol],
    clear_collections: bool,
) -> list[BoundSymbol]:
    """The lines with a ``del`` right after the last use of each name; what is returned is not deleted.

    Args:
        lines: the new trace without ``del``s.
        proxies: of all names.
        deletes: ``del``s of the old trace by their names; they are used again where they fit.
        clear_collections: whether a collection is cleared before it is deleted, as in backward traces.
    """
    result: list[BoundSymbol] = []  # from the last to the first
    kept: set[str] = set()
    for line in reversed(lines):
        ending = tuple(dict.fromkeys(name for name in line.names if name not in kept))
        kept.update(ending)
        if ending and line.bsym.sym.id is not PrimIDs.RETURN:
            ended = [proxies[name] for name in ending]
            result.append(deletes.get(ending) or BoundSymbol(prims.python_del, tuple(ended), {}, None))
            collections = [proxy for proxy in ended if clear_collections and isinstance(proxy, CollectionProxy)]
            result += [clear_mutable_collection.bind(proxy, output=None) for proxy in collections]
        result.append(line.bsym)
    return result[::-1]


@dataclass(frozen=True, slots=True)
class _Bound:
    """How a new op of one tensor was bound for torch: an equal op of a tensor with the same metadata is bound alike."""

    bsym: BoundSymbol
    source: TensorProxy  # one of its arguments, and all that it takes
    output: TensorProxy  # what its symbol's meta made
    num_names: int  # that the trace gave away for it


class _Editor:
    """Makes bound symbols for one new trace."""

    def __init__(self, new_trace: TraceCtx, graph: Graph, proxies: dict[str, Proxy], plan: Plan):
        self.trace = new_trace
        self.of_caller = reach_caller(graph, (item.op for item in plan.placed))
        self.proxies = proxies  # by name; what is made comes in
        self.counters = _counters(graph)
        self.bound: dict[Hashable, _Bound] = {}

    def line(self, bsym: BoundSymbol) -> _Line:
        """``bsym`` as a line of the new trace."""
        named = {proxy.name: proxy for proxy in (*bsym.flat_proxy_outs, *bsym.flat_proxy_args)}
        for name, proxy in named.items():
            self.proxies.setdefault(name, proxy)
        return _Line(bsym, tuple(named))

    def outside(self, op: NewOp) -> list[BoundSymbol]:
        """``op`` bound for torch, giving the trace's own proxy where the trace has one of that name."""
        source = self._source(op)
        is_callers = op.output in self.of_caller
        key = None if source is None else (_bound_by(op, source), is_callers)
        if source is not None and key in self.bound:
            return [self._bind_alike(self.bound[key], op, source)]
        num_names = len(self.trace.names)
        made = self._make(op)
        claimed = self._claim(made, is_callers)
        swap = {}
        last = claimed[-1].output
        if last is not made.output:
            swap[variableify(last)] = made.output
            claimed = [bsym.from_bsym_swap_proxies(swap) for bsym in claimed]
            if source is not None and len(claimed) == 1 and _is_of_one(claimed[0], source, made.output):
                self.bound[key] = _Bound(claimed[0], source, last, len(self.trace.names) - num_names)
        return claimed

    def _source(self, op: NewOp) -> TensorProxy | None:
        """The tensor that ``op`` takes; None where it takes something else or more."""
        names = refs(op.args)
        source: Any = self.proxies[names[0]] if len(names) == 1 and not op.kwargs else None
        return source if type(source) is TensorProxy and source.grad is None else None

    def _bind_alike(self, bound: _Bound, op: NewOp, source: TensorProxy) -> BoundSymbol:
        """What `outside` gives for ``op``, an equal op of whose kind it bound before; the trace gives as many names away."""
        with tracectx(self.trace):
            made = TensorProxy(like=bound.output)
            for _ in range(bound.num_names - 1):
                self.trace.make_name(prefix=made.prefix)
        return _over(source, bound.bsym, bound.source, self._known_as(made, op.output, op.symbol))

    def own(self, collection: str) -> BoundSymbol:
        """The statement by which the trace takes over the cotangents in ``collection``."""
        return own_cotangents.bind(self.proxies[collection], output=None)

    def expand(self, collection: str, positions: tuple[int, ...]) -> BoundSymbol:
        """The statement by which gradients that nobody sent come as repeated zeros at ``positions`` of ``collection``."""
        return expand_zero_cotangents.bind(self.proxies[collection], positions, output=None)

    def rebuild(self, bsym: BoundSymbol, parts: Sequence[Part]) -> list[BoundSymbol]:
        """The regions that stand where ``bsym`` stood; the first keeps its number, the others get unused ones."""
        executor = bsym.sym.executor
        if executor is None or not hasattr(executor, "fuse"):
            raise UnsupportedTraceError(f"{bsym.sym.name}: its executor {executor} cannot fuse again")
        head = bsym.sym.name.rstrip("0123456789")
        numbers = [int(bsym.sym.name[len(head) :])]
        while len(numbers) < len(parts):
            self.counters[head] = self.counters.get(head, -1) + 1
            numbers.append(self.counters[head])
        return [self._fuse(bsym, part, number) for part, number in zip(parts, numbers)]

    def _fuse(self, bsym: BoundSymbol, part: Part, number: int) -> BoundSymbol:
        body = [self._inside(bsym, item) for item in part.body]
        made = {proxy.name for sub in body for proxy in sub.flat_proxy_outs}
        taken = {proxy.name: proxy for sub in body for proxy in sub.flat_proxy_args if proxy.name not in made}
        old_order = [proxy.name for proxy in bsym.args if isinstance(proxy, Proxy) and proxy.name in taken]
        names = dict.fromkeys((*old_order, *taken))
        region = _Region(
            inputs=tuple(variableify(taken[name]) for name in names),
            outputs=tuple(variableify(self.proxies[name]) for name in part.outputs),
            bound_symbols=tuple(body),
        )
        fused = bsym.sym.executor.fuse(region, number)
        return fused.from_bsym(
            header=bsym.header,
            source_filename=bsym.source_filename,
            source_positions=bsym.source_positions,
            tags=set(bsym.tags),
        )

    def _inside(self, region: BoundSymbol, item: int | NewOp | Repeat) -> BoundSymbol:
        """What ``item`` stands for in the rebuilt ``region``."""
        if isinstance(item, NewOp):
            return self._make(item)
        return region.subsymbols[item] if isinstance(item, int) else self._repeat(region.subsymbols[item.index], item)

    def _make(self, op: NewOp) -> BoundSymbol:
        """The prim of ``op`` with its output made by the prim's own meta."""
        symbol = getattr(prims, op.symbol.removeprefix("prims."), None)
        if symbol is None or not op.symbol.startswith("prims."):
            raise UnsupportedTraceError(f"{op.symbol} is no prim of this Thunder")
        args = tuple(self._argument(arg) for arg in op.args)
        made = self._record(symbol, args, {name: self._argument(arg) for name, arg in op.kwargs})[-1]
        output = self._known_as(made.output, op.output, op.symbol)
        return made if output is made.output else made.from_bsym(output=output)

    def _repeat(self, bsym: BoundSymbol, item: Repeat) -> BoundSymbol:
        """``bsym`` over other operands, its outputs made by its own meta."""
        names = dict(item.renamed)

        def operand(arg: Any) -> Any:
            return self.proxies[names.get(arg.name, arg.name)] if isinstance(arg, Proxy) else arg

        made = self._record(bsym.sym, tree_map(operand, bsym.args), tree_map(operand, bsym.kwargs))[-1]
        flat, structure = tree_flatten(made.output)
        if len(flat) != len(bsym.flat_outs):
            raise UnsupportedTraceError(
                f"{bsym.sym.name} gives {len(flat)} values, the trace has {len(bsym.flat_outs)}"
            )
        outputs = [
            self._known_as(new, names.get(old.name, old.name), bsym.sym.name) for old, new in zip(bsym.flat_outs, flat)
        ]
        return made.from_bsym(output=tree_unflatten(outputs, structure), tags=set(bsym.tags))

    def _known_as(self, made: Proxy, name: str, symbol: str) -> Proxy:
        """The trace's own proxy of this name; ``made`` where there is none, which has the name from now on."""
        known = self.proxies.setdefault(name, made)
        if known is not made:
            _check_same(symbol, name, made, known)
        return known

    def _record(
        self, symbol: Callable, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> list[BoundSymbol]:
        """The bound symbols that calling ``symbol`` records."""
        scope: list[BoundSymbol] = []
        with tracectx(self.trace):
            self.trace.push_scope(scope)
            try:
                symbol(*args, **(kwargs or {}))
            finally:
                self.trace.pop_scope()
        return scope

    def _claim(self, bsym: BoundSymbol, is_callers: bool) -> list[BoundSymbol]:
        """What Thunder's executors of last resort run for ``bsym``."""
        for symbol, args in of_last_resort(bsym, is_callers):
            claimed = self._record(symbol, args, bsym.kwargs)
            if claimed:
                return claimed
        raise UnsupportedTraceError(f"no executor of last resort runs {bsym.sym.name}")

    def _argument(self, arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return self.proxies[arg.name]
        if isinstance(arg, tuple):
            return tuple(self._argument(item) for item in arg)
        return _constant(arg.text) if isinstance(arg, Const) else arg


def of_last_resort(bsym: BoundSymbol, is_callers: bool) -> Iterator[tuple[Callable, Sequence[Any]]]:
    """The symbols by which Thunder's executors of last resort run ``bsym``, and their arguments.

    A row-major ``stride_order`` is run as ``contiguous``, which gives its input where that is row-major; Thunder's own copies always,
    and so it has to be where ``is_callers``: the caller may write to what it gets.
    """
    if bsym.sym.id is PrimIDs.STRIDE_ORDER and not is_callers:
        tensor, order = bsym.args
        if tuple(order) == tuple(reversed(range(tensor.ndim))):
            yield contiguous, (tensor,)
    for executor in get_always_executors():
        if executor.can_execute(bsym):
            yield executor.get_execution_transform(bsym) or executor.implmap[bsym.sym.id].symbol, bsym.args


def _bound_by(op: NewOp, source: TensorProxy) -> Hashable:
    """All that tells how ``op``, which takes ``source`` alone, is bound: the op, its other arguments, the tensor's metadata."""
    given = [repr(arg) if not isinstance(arg, Ref) else "_" for arg in op.args]
    kind = (source.distparallel_type, source.thunder_fsdp_padding_size)
    return op.symbol, *given, tuple(source.shape), source.true_dtype, source.device, source.requires_grad, *kind


def _is_of_one(bsym: BoundSymbol, source: TensorProxy, output: Any) -> bool:
    """True where ``bsym`` and all in it take ``source`` as one of their arguments, and no other proxy, and give ``output``."""
    takes_one = sum(arg is source for arg in bsym.args) == len(bsym.flat_proxy_args) == 1
    gives_one = type(output) is TensorProxy and bsym.output is output and output is not source
    return takes_one and gives_one and all(_is_of_one(one, source, output) for one in bsym.subsymbols)


def _over(source: TensorProxy, bsym: BoundSymbol, old_source: TensorProxy, output: Proxy) -> BoundSymbol:
    """``bsym``, which is of one tensor, over another one."""
    return bsym.from_bsym(
        args=tuple(source if arg is old_source else arg for arg in bsym.args),
        output=output,
        subsymbols=tuple(_over(source, one, old_source, output) for one in bsym.subsymbols),
    )


def _constant(text: str) -> Any:
    """The dtype or device that a trace prints so."""
    device = re.fullmatch(r"devices\.Device\(\"(\w+(?::\d+)?)\"\)", text)
    if device is not None:
        return to_device(device[1])
    dtype = getattr(dtypes, text.removeprefix("dtypes."), None) if text.startswith("dtypes.") else None
    if dtype is None:
        raise UnsupportedTraceError(f"{text} is no dtype or device of this Thunder")
    return dtype


def _counters(graph: Graph) -> dict[str, int]:
    """The highest number of each kind of region in the trace: {"nvFusion": 17}."""
    highest: dict[str, int] = {}
    for op in graph.ops:
        match = re.fullmatch(r"(.*\D)(\d+)", op.id) if op.is_fusion else None
        if match:
            highest[match[1]] = max(highest.get(match[1], -1), int(match[2]))
    return highest


def _check_same(symbol: str, name: str, made: Any, known: Proxy) -> None:
    """Raises where the symbol's own meta gives other metadata than the trace says that the value has."""
    if not isinstance(made, TensorProxy) or not isinstance(known, TensorProxy):
        raise UnsupportedTraceError(f"{symbol} gives {made}, the trace says {known}")
    said, got = (tuple(known.shape), known.dtype, known.device), (tuple(made.shape), made.dtype, made.device)
    if said != got:
        raise UnsupportedTraceError(f"{symbol} for {name} gives {got}, the trace says {said}")

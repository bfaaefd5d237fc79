"""Applies a JointPlan to a joint trace, and prepares one for a dry run.

As in `edit`, the input trace, its bound symbols and its proxies stay as they are. A clone is its original with other proxies, made
as Thunder makes those of a checkpoint: `from_bsym_swap_proxies` with renamed outputs, and the tag that says "backward".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from thunder_fusionfix._thunder import (
    BoundSymbol,
    BoundSymbolTag,
    Proxy,
    TraceCtx,
    TraceProvenance,
    from_trace,
    keep_object_names,
    tracectx,
    tree_iter,
    variableify,
)
from thunder_fusionfix.edit import of_last_resort
from thunder_fusionfix.errors import UnsupportedTraceError
from thunder_fusionfix.joint import Anchor, Clone, Insert, JointPlan, Site
from thunder_fusionfix.read import positioned


def copied(trace: TraceCtx) -> TraceCtx:
    """A trace that passes may change without a trace on ``trace``: Thunder's own ``dce`` changes bound symbols in place."""
    copy = from_trace(trace)
    copy.names = set(trace.names)
    copy.bound_symbols = [_copied(bsym) for bsym in trace.bound_symbols]
    return copy


def _copied(bsym: BoundSymbol) -> BoundSymbol:
    return bsym.from_bsym(subsymbols=[_copied(sub) for sub in bsym.subsymbols], tags=set(bsym.tags))


def fusible_sites(trace: TraceCtx, can_fuse: Callable[[BoundSymbol], bool]) -> frozenset[Site]:
    """Sites of the ops of ``trace``, those inside regions included, for which ``can_fuse`` holds."""
    found: set[Site] = set()
    for pos, bsym in enumerate(positioned(trace)):
        if not bsym.sym.is_fusion:
            if can_fuse(bsym):
                found.add(Site(pos))
            continue
        found.update(Site(pos, sub) for sub, inner in enumerate(bsym.subsymbols) if can_fuse(inner))
    return frozenset(found)


def apply_joint_plan(
    trace: TraceCtx,
    plan: JointPlan,
    after: Callable[[Any, Any], Any],
    provenance: str,
    operators: Mapping[str, Any] = MappingProxyType({}),
    of_caller: frozenset[str] = frozenset(),
) -> TraceCtx:
    """A new trace with ``plan`` carried out; ``trace`` itself where the plan is empty.

    Args:
        trace: the trace that the plan was made for.
        plan: edits; see `thunder_fusionfix.joint`.
        after: the symbol that an `Anchor` calls, with a tensor and the value that it waits for.
        provenance: what the new trace says made it.
        operators: the symbols that swaps name.
        of_caller: values that the caller gets, or gets views of; see `alias.reach_caller`.

    Raises:
        UnsupportedTraceError: a region cannot give more than it gives, or no executor of last resort runs a claimed op.
    """
    if plan.is_empty:
        return trace
    new_trace = from_trace(trace)
    new_trace.names = set(trace.names)
    editor = _Editor(trace, new_trace, after, of_caller)
    inserts: dict[int, list[Insert]] = {}
    for insert in plan.inserts:
        inserts.setdefault(insert.before, []).append(insert)
    moved = {insert.what.pos for insert in plan.inserts if not isinstance(insert.what, (Anchor, Clone))}
    exports: dict[int, list[str]] = {}
    for pos, name in plan.exports:
        exports.setdefault(pos, []).append(name)
    renamed = {pos: dict(names) for pos, names in plan.renamed}
    swaps = dict(plan.swaps)

    bsyms = positioned(trace)
    pos_of = {id(bsym): pos for pos, bsym in enumerate(bsyms)}
    result: list[BoundSymbol] = []

    def kept(pos: int) -> list[BoundSymbol]:
        bsym = bsyms[pos]
        if pos in exports:
            bsym = editor.with_outputs(bsym, exports[pos])
        if pos in renamed:
            bsym = editor.with_inputs(bsym, renamed[pos])
        if pos in swaps:
            bsym = bsym.from_bsym(sym=operators[swaps[pos]], subsymbols=())
        return editor.claimed(bsym) if pos in plan.claims else [bsym]

    for bsym in trace.bound_symbols:
        if id(bsym) not in pos_of:  # prints as a comment, if at all
            result.append(bsym)
            continue
        pos = pos_of[id(bsym)]
        for insert in inserts.get(pos, ()):
            if isinstance(insert.what, Anchor):
                result.append(editor.anchor(insert.what))
            elif isinstance(insert.what, Clone):
                made = editor.clone(insert.what, bsyms)
                result += editor.claimed(made) if insert.what.is_claimed else [made]
            else:
                result += kept(insert.what.pos)
        if pos not in moved:
            result += kept(pos)
    new_trace.bound_symbols = result
    keep_object_names(new_trace, trace)
    new_trace.set_provenance(TraceProvenance(provenance))
    return new_trace


@dataclass(frozen=True, slots=True)
class _Region:
    """What a FusionExecutor's `fuse` asks of a region."""

    inputs: tuple[Any, ...]  # variableified proxies
    outputs: tuple[Any, ...]
    bound_symbols: tuple[BoundSymbol, ...]


class _Editor:
    """Makes bound symbols for one new trace."""

    def __init__(
        self, trace: TraceCtx, new_trace: TraceCtx, after: Callable[[Any, Any], Any], of_caller: frozenset[str]
    ):
        self.trace = new_trace
        self.of_caller = of_caller
        self.after = after
        self.proxies = _proxies(trace)

    def anchor(self, what: Anchor) -> BoundSymbol:
        (made,) = self.recorded(self.after, (self.proxies[what.source], self.proxies[what.token]))
        self.proxies[what.output] = made.output
        made.tags.add(BoundSymbolTag.BACKWARD)
        return made

    def clone(self, what: Clone, bsyms: list[BoundSymbol]) -> BoundSymbol:
        original = bsyms[what.site.pos]
        if what.site.sub >= 0:
            original = original.subsymbols[what.site.sub]
        names = dict(what.names)
        swap = {}
        for proxy in original.flat_proxy_args:
            if proxy.name in names:
                swap[variableify(proxy)] = self.proxies[names[proxy.name]]
        taken = {proxy.name for proxy in original.flat_proxy_args}
        for proxy in _given(original):
            if proxy.name in taken or variableify(proxy) in swap:
                continue
            with tracectx(self.trace):
                new = proxy.replace_name(
                    f"bw_{proxy.name}", disambiguate=True
                )  # as Thunder names what a checkpoint repeats
            new.tags.clear()  # a tag of the original, "recompute me", has been obeyed
            swap[variableify(proxy)] = new
            if proxy.name in names:
                self.proxies[names[proxy.name]] = new
        made = original.from_bsym_swap_proxies(swap)
        return made.from_bsym(tags={BoundSymbolTag.BACKWARD})

    def with_inputs(self, bsym: BoundSymbol, names: Mapping[str, str]) -> BoundSymbol:
        """``bsym`` with other arguments."""
        swap = {variableify(self.proxies[old]): self.proxies[new] for old, new in names.items()}
        swapped = bsym.from_bsym_swap_proxies(swap, skip_output=True)
        return swapped.from_bsym(tags=set(bsym.tags))

    def with_outputs(self, bsym: BoundSymbol, names: Iterable[str]) -> BoundSymbol:
        """The region ``bsym``, giving ``names`` as well."""
        executor = bsym.sym.executor
        if executor is None or not hasattr(executor, "fuse"):
            raise UnsupportedTraceError(f"{bsym.sym.name}: its executor {executor} cannot fuse again")
        wanted = {proxy.name for proxy in bsym.flat_proxy_outs} | set(names)
        given = {proxy.name: proxy for sub in bsym.subsymbols for proxy in sub.flat_proxy_outs if proxy.name in wanted}
        if set(given) != wanted:
            raise UnsupportedTraceError(f"{bsym.sym.name} does not compute {sorted(wanted)}")
        number = int(bsym.sym.name[len(bsym.sym.name.rstrip("0123456789")) :])
        region = _Region(
            inputs=tuple(variableify(proxy) for proxy in bsym.flat_proxy_args),
            outputs=tuple(variableify(proxy) for proxy in given.values()),
            bound_symbols=tuple(bsym.subsymbols),
        )
        fused = executor.fuse(region, number)
        return fused.from_bsym(header=bsym.header, source_filename=bsym.source_filename, tags=set(bsym.tags))

    def claimed(self, bsym: BoundSymbol) -> list[BoundSymbol]:
        """The prims of ``bsym`` as executors of last resort run them, without sub-symbols, which a fusion would look through."""
        if bsym.sym.executor is not None:
            return [bsym.from_bsym(subsymbols=())]
        if bsym.subsymbols:
            return [claimed for sub in bsym.subsymbols for claimed in self.claimed(sub.from_bsym(tags=set(bsym.tags)))]
        is_callers = any(proxy.name in self.of_caller for proxy in bsym.flat_proxy_outs)
        for symbol, args in of_last_resort(bsym, is_callers):
            made = self.recorded(symbol, args, bsym.kwargs)
            swap = {variableify(made[-1].output): bsym.output} if made else {}
            return [
                one.from_bsym_swap_proxies(swap).from_bsym(subsymbols=(), header=bsym.header, tags=set(bsym.tags))
                for one in made
            ]
        raise UnsupportedTraceError(f"no executor of last resort runs {bsym.sym.name}")

    def recorded(
        self, symbol: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any] | None = None
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


def _given(bsym: BoundSymbol) -> Iterable[Proxy]:
    """Proxies that ``bsym`` or anything inside it gives, in order."""
    found: dict[str, Proxy] = {}

    def visit(one: BoundSymbol) -> None:
        for proxy in one.flat_proxy_outs:
            found.setdefault(proxy.name, proxy)
        for sub in one.subsymbols:
            visit(sub)

    visit(bsym)
    return list(found.values())


def _proxies(trace: TraceCtx) -> dict[str, Proxy]:
    """Every proxy of the trace by name, those inside regions included; what an op gives comes before what others take."""
    found: dict[str, Proxy] = {}

    def visit(bsyms: Iterable[BoundSymbol]) -> None:
        for bsym in bsyms:
            for proxy in (*bsym.flat_proxy_outs, *bsym.flat_proxy_args):
                found.setdefault(proxy.name, proxy)
            visit(bsym.subsymbols)

    visit(trace.bound_symbols)
    for proxy in tree_iter(trace.args or ()):
        if isinstance(proxy, Proxy):
            found.setdefault(proxy.name, proxy)
    return found

"""Runs the final passes over one trace: read, plan, apply, verify, price; and keeps the input where anything is in doubt.

    TraceCtx --read--> Graph --pass--> Plan --edit--> TraceCtx' --read--> Graph' --verify--> kept, or the pass undone

A rewrite is kept only if the verifier accepts it and the simulated peak does not rise. A failure of ours costs the user one
warning and a lost optimisation, never a training step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from thunder_fusionfix._thunder import (
    TraceCtx,
    TraceTag,
    untested_versions,
    warn_untested_versions,
)
from thunder_fusionfix.alias import aliases
from thunder_fusionfix.config import FusionFixConfig
from thunder_fusionfix.cotangents import why_not as why_not_own
from thunder_fusionfix.document import megabytes
from thunder_fusionfix.edit import apply_plan
from thunder_fusionfix.errors import FusionFixError, UnsupportedTraceError, VerifyError
from thunder_fusionfix.execute import compare
from thunder_fusionfix.facts import Facts
from thunder_fusionfix.garbage import collected_later
from thunder_fusionfix.model import Decision, Graph, Plan, Report, fuel_left
from thunder_fusionfix.normal_form import Forms
from thunder_fusionfix.passes import PASSES, Pass
from thunder_fusionfix.read import Reader, example_strides, forward_trace
from thunder_fusionfix.step import held_in_a_step
from thunder_fusionfix.undefined import why_not as why_not_expand
from thunder_fusionfix.verify import verify

WHY_NOT: dict[str, Callable[[], str | None]] = {
    "own_cotangents": why_not_own,
    "expand_zero_cotangents": why_not_expand,
}  # a pass to why it cannot run in this compile

_warned: set[str] = set()  # messages that this process has shown
_readers: WeakKeyDictionary[TraceCtx, Reader] = (
    WeakKeyDictionary()
)  # of fixed traces: a backward asks for its forward again


def fix_trace(trace: TraceCtx, config: FusionFixConfig | None = None) -> tuple[TraceCtx, Report | None]:
    """The fixed trace and what was done; ``trace`` itself where nothing was.

    Args:
        trace: a final trace, forward, backward or without gradients.
        config: options; defaults where None.

    Returns:
        The trace to run, and a report; None for a trace without fusion regions.

    Raises:
        FusionFixError: with ``config.strict`` only, where a check or a pass failed; the message names the pass.
    """
    config = config or FusionFixConfig()
    if not any(bsym.sym.is_fusion for bsym in trace.bound_symbols):
        return trace, None
    if untested_versions() and not config.untested_versions:
        warn_untested_versions()
        return trace, None
    try:
        with collected_later():
            return _fix(trace, config)
    except Exception as error:  # whatever it is, the user's step goes on with the trace that Thunder made
        if config.strict:
            raise error if isinstance(error, FusionFixError) else FusionFixError(_told(error)) from error
        _warn_once(f"thunder_fusionfix left a trace as it is: {_told(error)}")
        return trace, None


def _fix(trace: TraceCtx, config: FusionFixConfig) -> tuple[TraceCtx, Report]:
    started = time.perf_counter()
    forward = _forward_graph(trace)
    held = forward.args if forward is not None else ()
    saved = aliases(forward) if forward is not None else None
    reader = Reader(example_strides())

    def facts_of(some_trace: TraceCtx) -> Facts:
        graph = reader.read(some_trace, held)
        if forward is not None and saved is not None:
            graph = held_in_a_step(graph, forward, saved)
        return Facts(graph, config, saved)

    state = _State(trace, facts_of(trace), reader, Forms())
    first = state.facts
    for item in PASSES:
        if getattr(config, item.name):
            state = _after(item, state, facts_of)
    report = Report(
        stage=first.graph.stage,
        before=first.timeline,
        after=state.facts.timeline,
        graph_before=first.graph,
        graph_after=state.facts.graph,
        decisions=state.decisions,
        seconds=time.perf_counter() - started,
        kept_input=state.kept_input,
    )
    _readers[state.trace] = reader
    return state.trace, report


@dataclass(frozen=True, slots=True)
class _State:
    """Where the passes stand."""

    trace: TraceCtx
    facts: Facts  # of the trace
    reader: Reader
    forms: Forms  # what the verifier knows of its values
    decisions: tuple[Decision, ...] = ()
    kept_input: str | None = None  # why the last pass that was undone was

    @property
    def fuel(self) -> int | None:
        """Rewrites that may yet be made; None for no limit."""
        return fuel_left(self.facts.config.fuel, self.decisions)


def _after(item: Pass, state: _State, facts_of: Callable[[TraceCtx], Facts]) -> _State:
    """``state`` after one pass; with the trace as it was where the pass fails, is refused or does not pay."""
    graph, config = state.facts.graph, state.facts.config
    plan = Plan()
    try:
        plan = item.plan(state.facts, state.fuel)
        why_not_here = WHY_NOT[item.name]() if item.name in WHY_NOT and not plan.is_empty else None
        if why_not_here is not None:
            plan = Plan(decisions=_refused(plan.decisions, why_not_here))
        if plan.is_empty:
            return replace(state, decisions=state.decisions + plan.decisions)
        trace = apply_plan(state.trace, graph, plan, _provenance(item, plan), state.reader)
        facts = facts_of(trace)
        if config.verify:
            verify(graph, facts.graph, item.admits(graph, plan), forms=state.forms)
        if config.debug_execute:
            _compare_by_running(graph, facts.graph)
        why_not = _why_not(state.facts, facts)
    except Exception as error:  # a fault of one pass costs that pass, not the others and not the user's step
        if config.strict:
            raise _strict_error(item, graph, error) from error
        why_not = _told(error)
        _warn_once(f"thunder_fusionfix: pass `{item.name}` was undone, the trace is as it was before it ({why_not})")
    if why_not is None:
        return replace(state, trace=trace, facts=facts, decisions=state.decisions + plan.decisions)
    undone = _refused(plan.decisions, f"pass undone: {why_not}")
    return replace(state, decisions=state.decisions + undone, kept_input=why_not)


def _refused(decisions: Iterable[Decision], why: str) -> tuple[Decision, ...]:
    """``decisions`` with nothing applied."""
    return tuple(
        replace(decision, applied=False, reason=why) if decision.applied else decision for decision in decisions
    )


def _forward_graph(trace: TraceCtx) -> Graph | None:
    """The Graph of the forward that saved what ``trace`` takes; None where ``trace`` is no backward, or nobody knows it."""
    if TraceTag.BACKWARD not in trace.tags:
        return None
    forward = forward_trace()
    if forward is None:
        return None
    return (_readers.get(forward) or Reader(example_strides())).read(forward)


def _why_not(before: Facts, after: Facts) -> str | None:
    """Why a verified rewrite is not kept: its price."""
    old, new = before.timeline.peak_bytes, after.timeline.peak_bytes
    return f"the simulated peak would rise from {megabytes(old)} to {megabytes(new)} MB" if new > old else None


def _compare_by_running(before: Graph, after: Graph) -> None:
    """Raises `VerifyError` where both traces, run on small random CPU tensors, give other numbers; large ones are not run."""
    compared = compare(before, after)
    if compared.differing:
        names = ", ".join(compared.differing)
        raise VerifyError(f"run on random tensors, the new trace gives other numbers for {names}")


def _provenance(item: Pass, plan: Plan) -> str:
    applied = sum(decision.applied for decision in plan.decisions)
    return f"thunder_fusionfix {item.name} ({applied} rewrites)"


def _strict_error(item: Pass, graph: Graph, error: Exception) -> FusionFixError:
    """``error`` with the pass and the stage in front, of its own class where that is one of ours."""
    place = f"pass `{item.name}`, {graph.stage}"
    for kind in (UnsupportedTraceError, VerifyError):
        if isinstance(error, kind):
            return kind(f"{place}: {error}")
    return FusionFixError(f"{place}: {_told(error)}")


def _told(error: Exception) -> str:
    """The error's text; what is none of ours tells its class too."""
    return str(error) if isinstance(error, FusionFixError) else f"{type(error).__name__}: {error}"


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)

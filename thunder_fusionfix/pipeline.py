"""Runs the final passes over one trace: read, plan, apply, verify, price; and keeps the input where anything is in doubt.

    TraceCtx --read--> Graph --pass--> Plan --edit--> TraceCtx' --read--> Graph' --verify--> kept, or the pass undone

A rewrite is kept only if the verifier accepts it and the simulated peak does not rise. A failure of ours costs the user one
warning and a lost optimisation, never a training step.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

from thunder_fusionfix._thunder import TraceCtx, TraceTag, untested_versions, warn_untested_versions
from thunder_fusionfix.config import FusionFixConfig
from thunder_fusionfix.edit import apply_plan
from thunder_fusionfix.errors import FusionFixError, UnsupportedTraceError
from thunder_fusionfix.facts import Facts
from thunder_fusionfix.model import Decision, Graph, Plan, Report
from thunder_fusionfix.passes import PASSES, Pass
from thunder_fusionfix.read import example_strides, forward_trace, read
from thunder_fusionfix.verify import verify

_warned: set[str] = set()  # messages that this process has shown


def fix_trace(trace: TraceCtx, config: FusionFixConfig | None = None) -> tuple[TraceCtx, Report | None]:
    """The fixed trace and what was done; ``trace`` itself where nothing was.

    Args:
        trace: a final trace, forward, backward or without gradients.
        config: options; defaults where None.

    Returns:
        The trace to run, and a report; None for a trace without fusion regions.

    Raises:
        FusionFixError: with ``config.strict`` only, where a check failed.
    """
    config = config or FusionFixConfig()
    if not any(bsym.sym.is_fusion for bsym in trace.bound_symbols):
        return trace, None
    if untested_versions() and not config.untested_versions:
        warn_untested_versions()
        return trace, None
    try:
        return _fix(trace, config)
    except UnsupportedTraceError as error:
        return _give_up(trace, config, error)
    except Exception as error:  # whatever it is, the user's step goes on with the trace that Thunder made
        return _give_up(trace, config, error)


def _fix(trace: TraceCtx, config: FusionFixConfig) -> tuple[TraceCtx, Report]:
    started = time.perf_counter()
    strides, forward = example_strides(), _forward_graph(trace)

    def facts_of(some_trace: TraceCtx) -> Facts:
        held = forward.args if forward is not None else ()
        return Facts(read(some_trace, strides=strides, held=held), config, forward)

    facts = first = facts_of(trace)
    decisions: list[Decision] = []
    kept_input: str | None = None
    for item in PASSES:
        if not getattr(config, item.name):
            continue
        fuel = None if config.fuel is None else config.fuel - sum(decision.applied for decision in decisions)
        plan = item.plan(facts, fuel)
        if plan.is_empty:
            decisions += plan.decisions
            continue
        try:
            new_trace = apply_plan(trace, facts.graph, plan, _provenance(item, plan))
            new_facts = facts_of(new_trace)
            if config.verify:
                verify(facts.graph, new_facts.graph, item.admits(facts.graph, plan))
            why_not = _why_not(facts, new_facts)
        except Exception as error:
            if config.strict:
                raise
            why_not = f"{type(error).__name__}: {error}"
            _warn_once(f"thunder_fusionfix: pass `{item.name}` was undone, the trace is as it was before it ({why_not})")
        if why_not is not None:
            kept_input = why_not
            decisions += [replace(decision, applied=False, reason=f"pass undone: {why_not}") for decision in plan.decisions]
            continue
        trace, facts = new_trace, new_facts
        decisions += plan.decisions
    report = Report(
        stage=facts.graph.stage,
        before=first.timeline,
        after=facts.timeline,
        graph_before=first.graph,
        graph_after=facts.graph,
        decisions=tuple(decisions),
        seconds=time.perf_counter() - started,
        kept_input=kept_input,
    )
    return trace, report


def _forward_graph(trace: TraceCtx) -> Graph | None:
    """The Graph of the forward that saved what ``trace`` takes; None where ``trace`` is no backward, or nobody knows it."""
    if TraceTag.BACKWARD not in trace.tags:
        return None
    forward = forward_trace()
    return None if forward is None else read(forward, strides=example_strides())


def _why_not(before: Facts, after: Facts) -> str | None:
    """Why a verified rewrite is not kept: its price."""
    old, new = before.timeline.peak_bytes, after.timeline.peak_bytes
    return f"the simulated peak would rise from {old} to {new} bytes" if new > old else None


def _provenance(item: Pass, plan: Plan) -> str:
    applied = sum(decision.applied for decision in plan.decisions)
    return f"thunder_fusionfix {item.name} ({applied} rewrites)"


def _give_up(trace: TraceCtx, config: FusionFixConfig, error: Exception) -> tuple[TraceCtx, None]:
    if config.strict:
        raise error if isinstance(error, FusionFixError) else FusionFixError(f"{type(error).__name__}: {error}") from error
    _warn_once(f"thunder_fusionfix left a trace as it is: {type(error).__name__}: {error}")
    return trace, None


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)

"""Runs the joint passes over one trace: read, dry-run the later executors, plan, apply, verify; or keep the input.

    TraceCtx --read--> Graph --passes--> JointPlan --edit_joint--> TraceCtx' --read--> Graph' --verify--> kept
       \\--copy, later fusion passes--> TraceCtx --read--> Graph of what would be saved

The dry run happens once per compile; twice where the trace writes in place, and once more for each level under a budget. Thunder's rematerialization and its reordering by
dataflow know nothing of memory, so another set of candidates may make them read a tensor after it was overwritten: there what
they make of the new trace is compared with what they make of the old one. A failure of ours costs the user one warning and a lost
optimisation, never a step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thunder_fusionfix._thunder import FusionExecutor, TraceCtx, untested_versions, warn_untested_versions
from thunder_fusionfix.config import FusionFixConfig
from thunder_fusionfix.edit_joint import apply_joint_plan, copied, fusible_sites
from thunder_fusionfix.errors import FusionFixError, VerifyError
from thunder_fusionfix.joint import JointFacts, JointPlan, JointReport, executed, split
from thunder_fusionfix.model import Decision, Graph, Timeline
from thunder_fusionfix.passes.claim_layouts import plan_claim_layouts
from thunder_fusionfix.passes.fold_matmuls import plan_fold_matmuls
from thunder_fusionfix.passes.recompute_cheap import DEFAULT, LEVELS, Level, plan_recompute_cheap
from thunder_fusionfix.read import read
from thunder_fusionfix.simulate import simulate
from thunder_fusionfix.verify import PAIR_RULES, Allow, verify

BUDGET = "memory_budget"  # what decisions about the budget as a whole are filed under

_warned: set[str] = set()  # messages that this process has shown


@dataclass(frozen=True, slots=True)
class Entry:
    """What the executor entry is in one compile."""

    config: FusionFixConfig
    later: tuple[FusionExecutor, ...]  # fusion executors that see the trace after us, in order
    after: Callable[[Any, Any], Any]  # the symbol of an `Anchor`
    fuel: int | None = None  # rewrites that may yet be made


def fix_joint(trace: TraceCtx, entry: Entry) -> tuple[TraceCtx, JointReport]:
    """The trace to hand on and what was done; ``trace`` itself where nothing was.

    Raises:
        FusionFixError: with ``config.strict`` only, where a check failed.
    """
    started = time.perf_counter()
    try:
        if untested_versions() and not entry.config.untested_versions:
            warn_untested_versions()
            return trace, _nothing("inference", started, "versions that were not tested")
        return _fix(trace, entry, started)
    except Exception as error:  # whatever it is, the user's step goes on with the trace that Thunder made
        if entry.config.strict:
            raise (
                error if isinstance(error, FusionFixError) else FusionFixError(f"{type(error).__name__}: {error}")
            ) from error
        reason = f"{type(error).__name__}: {error}"
        _warn_once(f"thunder_fusionfix left a joint trace as it is: {reason}")
        return trace, _nothing("joint", started, reason)


def _fix(trace: TraceCtx, entry: Entry, started: float) -> tuple[TraceCtx, JointReport]:
    graph = read(trace)
    dry_started = time.perf_counter()
    facts = JointFacts(graph, *_dry_run(trace, graph, entry.later))
    dry_run_seconds = time.perf_counter() - dry_started

    budget = entry.config.memory_budget_bytes if graph.stage == "joint" else None
    notes: tuple[Decision, ...] = ()
    if budget is None:
        done = _attempt(trace, facts, entry, DEFAULT)
    else:
        done, notes = _within(budget, trace, facts, entry)
    saved = facts.saved_bytes if graph.stage == "joint" else 0
    won = sum(decision.bytes_won for decision in done.decisions if decision.applied)
    decisions = (*plan_fold_matmuls(graph), *done.decisions, *notes)
    seconds = time.perf_counter() - started
    return done.trace, JointReport(
        graph.stage, saved, saved - won, decisions, seconds, dry_run_seconds, done.kept_input
    )


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One plan, carried out."""

    trace: TraceCtx  # the input where the plan is empty or was not kept
    decisions: tuple[Decision, ...]
    kept_input: str | None = None


def _attempt(trace: TraceCtx, facts: JointFacts, entry: Entry, level: Level) -> _Attempt:
    plan = _plan(facts, entry, level)
    if plan.is_empty:
        return _Attempt(trace, plan.decisions)
    applied = sum(decision.applied for decision in plan.decisions)
    new_trace = apply_joint_plan(trace, plan, entry.after, f"thunder_fusionfix entry ({applied} rewrites)")
    why_not = _why_not(facts, new_trace, entry)
    if why_not is None:
        return _Attempt(new_trace, plan.decisions)
    undone = tuple(replace(one, applied=False, reason=f"undone: {why_not}") for one in plan.decisions)
    return _Attempt(trace, undone, why_not)


def _within(budget: int, trace: TraceCtx, facts: JointFacts, entry: Entry) -> tuple[_Attempt, tuple[Decision, ...]]:
    """The first of `LEVELS` whose estimated peak fits ``budget``, else the one with the lowest; and what to tell of it.

    A lower budget takes the same level or one with a lower peak. Each level costs one more dry run.
    """
    best: tuple[int, _Attempt, Level, Timeline] | None = None
    for level in LEVELS:
        done = _attempt(trace, facts, entry, level)
        graph = facts.fused if done.trace is trace else _dry_run(done.trace, read(done.trace), entry.later)[0]
        timeline = simulate(executed(graph))
        if best is None or timeline.peak_bytes < best[0]:
            best = (timeline.peak_bytes, done, level, timeline)
        if best[0] <= budget:
            break
    assert best is not None
    peak, done, level, timeline = best
    held = ", ".join(f"{holder.name} ({holder.nbytes} bytes, {holder.producer})" for holder in timeline.holders[:6])
    fits = peak <= budget
    why = "fits" if fits else f"does not fit; the largest that the peak holds: {held}"
    what = f"memory budget of {budget} bytes: estimated peak of this trace {peak} bytes, by {level.name}"
    return done, (Decision(BUDGET, timeline.peak_pos, facts.joint.name, what, why, fits),)


def _dry_run(trace: TraceCtx, graph: Graph, later: Sequence[FusionExecutor]) -> tuple[Graph, frozenset]:
    """The Graph that the later executors would make of ``trace``, and the sites that one of them would take."""
    if not later:
        return graph, frozenset()
    fusible = fusible_sites(trace, lambda bsym: any(executor.can_fuse(bsym) for executor in later))
    fused = copied(trace)
    for executor in later:
        fuel = getattr(executor, "_optimization_fuel", None)  # nvFuser's: a dry run burns none
        fused = executor.fusion_pass(fused)
        if fuel is not None:
            executor._optimization_fuel = fuel
    return read(fused), fusible


def _plan(facts: JointFacts, entry: Entry, level: Level) -> JointPlan:
    """What both joint passes want; the layouts that one rebuilds are not the other's to claim."""
    config, fuel = entry.config, entry.fuel
    has_backward = facts.joint.stage == "joint"
    plan = plan_recompute_cheap(facts, config, fuel, level) if config.recompute_cheap and has_backward else JointPlan()
    if config.claim_layouts:
        left = None if fuel is None else fuel - sum(decision.applied for decision in plan.decisions)
        claimed = plan_claim_layouts(facts, plan, left)
        plan = replace(
            plan,
            inserts=plan.inserts + claimed.inserts,
            claims=claimed.claims,
            decisions=plan.decisions + claimed.decisions,
        )
    return plan


def _why_not(facts: JointFacts, new_trace: TraceCtx, entry: Entry) -> str | None:
    """Why the new trace is not kept: it is another program, or the later executors would make another one of it."""
    new = read(new_trace)
    try:
        if entry.config.verify:
            verify(facts.joint, new, _allowed(facts.joint, new, entry.config))
        if new.stage == "joint":
            _check_halves(facts, new)
    except Exception as error:
        if entry.config.strict:
            raise
        _warn_once(f"thunder_fusionfix: the entry's plan was undone, the trace is as it was ({error})")
        return f"{type(error).__name__}: {error}"
    if _writes(facts) and entry.later:
        return _misread_memory(facts, _dry_run(new_trace, new, entry.later)[0], entry.config)
    return None


def _check_halves(facts: JointFacts, new: Graph) -> None:
    """Raises where something that ran backward would run forward."""
    late = {name for pos in facts.before.backward for name in facts.joint.ops[pos].outputs}
    early = sorted(late.intersection(split(new).available))
    if early:
        raise VerifyError(f"joint trace: {', '.join(early)} ran backward before and would run forward")


def _writes(facts: JointFacts) -> bool:
    return any(access.writes for accesses in facts.aliases.accesses.values() for access in accesses)


def _misread_memory(facts: JointFacts, new: Graph, config: FusionFixConfig) -> str | None:
    """What the later executors would read before or after another write than they did; None where nothing."""
    before, after = (executed(graph) if graph.stage == "joint" else graph for graph in (facts.fused, new))
    rules = [rule for rule in PAIR_RULES if rule.name == "write-order"]
    try:
        verify(before, after, _allowed(before, after, config), rules)
    except VerifyError as error:
        return f"a later executor would read memory that the program writes at another moment: {error.args[0].splitlines()[0]}"
    return None


def _allowed(before: Graph, after: Graph, config: FusionFixConfig) -> Allow:
    """What a joint plan may change: where ops stand, who runs layouts, and what is done twice, under names of its own."""
    clones = frozenset(name for name in after.values if name not in before.values)
    under_budget = config.memory_budget is not None
    return Allow(may_reorder=True, may_rewrite_regions=True, may_clone=clones, may_repeat_work=under_budget)


def _nothing(stage: str, started: float, why: str | None) -> JointReport:
    return JointReport(stage, 0, 0, (), time.perf_counter() - started, 0.0, why)


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=5)

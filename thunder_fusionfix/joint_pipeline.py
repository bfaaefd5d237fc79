"""Runs the joint passes over one trace: read, dry-run the later executors, plan, apply, verify; or keep the input.

    TraceCtx --read--> Graph --passes--> JointPlan --edit_joint--> TraceCtx' --read--> Graph' --verify--> kept
       \\--copy, later fusion passes--> TraceCtx --read--> Graph of what would be saved

The dry run happens once per compile; twice where the trace writes in place. Thunder's rematerialization and its reordering by
dataflow know nothing of memory, so another set of candidates may make them read a tensor after it was overwritten: there what
they make of the new trace is compared with what they make of the old one. A failure of ours costs the user one warning and a lost
optimisation, never a step.

Under a memory budget plans are judged by the estimated peak of what a dry run, and then our transform where it is in use, make of
them. The default comes first. If it does not fit, `recompute_cheap.Further` is taken in parts: an eighth, half, all of the bytes that
it frees, until one fits; then `BISECTIONS` steps look for less. These are 8 dry runs at most, each about 0.3 s for a layer of a
transformer, and no two for the same plan. A lower budget never gives a higher estimated peak: it goes through the same parts, of
which only those count that are lower than all before; and less is taken only where its peak is no lower than that of the more. So
where two budgets part ways, the higher one ends at that plan's peak or above, and the lower one below.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from thunder_fusionfix._thunder import FusionExecutor, TraceCtx, untested_versions, warn_untested_versions
from thunder_fusionfix.alias import reach_caller
from thunder_fusionfix.apply import apply_to_graph
from thunder_fusionfix.config import FusionFixConfig
from thunder_fusionfix.document import megabytes
from thunder_fusionfix.edit_joint import apply_joint_plan, copied, fusible_sites
from thunder_fusionfix.errors import FusionFixError, UnsupportedTraceError, VerifyError
from thunder_fusionfix.facts import Facts
from thunder_fusionfix.garbage import collected_later
from thunder_fusionfix.joint import Budget, JointFacts, JointPlan, JointReport, executed, split
from thunder_fusionfix.model import Decision, Graph, Timeline, fuel_left
from thunder_fusionfix.passes import PASSES, claim_layouts, cudnn_attention, recompute_cheap
from thunder_fusionfix.passes.claim_layouts import plan_claim_layouts
from thunder_fusionfix.passes.cudnn_attention import plan_cudnn_attention
from thunder_fusionfix.passes.fold_matmuls import plan_fold_matmuls
from thunder_fusionfix.passes.pad_matmuls import plan_pad_matmuls
from thunder_fusionfix.passes.recompute_cheap import Further, num_matmuls, plan_recompute_cheap
from thunder_fusionfix.read import Reader
from thunder_fusionfix.verify import PAIR_RULES, Allow, verify

BUDGET = "memory_budget"  # what decisions about the budget as a whole are filed under

BEFORE_THE_ORDER = ("ignore_cut_rows", "unfuse_layouts")  # final passes that a budget reckons with

_warned: set[str] = set()  # messages that this process has shown


@dataclass(frozen=True, slots=True)
class Entry:
    """What the executor entry is in one compile."""

    config: FusionFixConfig
    later: tuple[FusionExecutor, ...]  # fusion executors that see the trace after us, in order
    after: Callable[[Any, Any], Any]  # the symbol of an `Anchor`
    fuel: int | None = None  # rewrites that may yet be made
    is_fixed_later: bool = False  # our transform gets the final traces: a budget is judged by what it leaves
    operators: Mapping[str, Any] = field(default_factory=dict)  # the symbols that swaps name
    reader: Reader = field(default_factory=Reader)  # of all traces of this compile


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
        with collected_later():
            return _fix(trace, entry, started)
    except Exception as error:  # whatever it is, the user's step goes on with the trace that Thunder made
        if entry.config.strict:
            raise (error if isinstance(error, FusionFixError) else FusionFixError(_reason(error))) from error
        reason = _reason(error)
        _warn_once(f"thunder_fusionfix left a joint trace as it is: {reason}")
        return trace, _nothing("joint", started, reason)


def _fix(trace: TraceCtx, entry: Entry, started: float) -> tuple[TraceCtx, JointReport]:
    graph = entry.reader.read(trace)
    dry_started = time.perf_counter()
    facts = JointFacts(graph, *_dry_run(trace, graph, entry))
    dry_run_seconds = time.perf_counter() - dry_started

    limit = entry.config.memory_budget_bytes if graph.stage == "joint" else None
    notes: tuple[Decision, ...] = ()
    budget = None
    if limit is None:
        done = _attempt(trace, facts, entry, _plan(facts, entry))
        if entry.config.memory_budget is not None:
            notes = (
                Decision(BUDGET, 0, graph.name, "memory budget", "no gradient is asked for: nothing is saved", False),
            )
    else:
        done, notes, budget = _within(limit, trace, facts, entry)
    saved = facts.saved_bytes if graph.stage == "joint" else 0
    saved_after = saved - sum(decision.bytes_won for decision in done.decisions if decision.applied)
    if budget is not None and done.fused is not None:
        saved_after = JointFacts(graph, done.fused).saved_bytes
    decisions = (*plan_fold_matmuls(graph), *plan_pad_matmuls(graph), *done.decisions, *notes)
    seconds = time.perf_counter() - started
    return done.trace, JointReport(
        graph.stage, saved, saved_after, decisions, seconds, dry_run_seconds, done.kept_input, budget
    )


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One plan, carried out."""

    trace: TraceCtx  # the input where the plan is empty or was not kept
    decisions: tuple[Decision, ...]
    kept_input: str | None = None
    fused: Graph | None = None  # what a dry run made of `trace`, where there was one

    @property
    def num_rebuilds(self) -> int:
        return sum(one.applied and one.pass_name == recompute_cheap.NAME for one in self.decisions)


def _attempt(trace: TraceCtx, facts: JointFacts, entry: Entry, plan: JointPlan, is_trial: bool = False) -> _Attempt:
    """``plan``, carried out; a trial is dry-run too, as its peak is asked for."""
    if plan.is_empty:
        return _Attempt(trace, plan.decisions, fused=facts.fused)
    applied = sum(decision.applied for decision in plan.decisions)
    with _blaming(*dict.fromkeys(one.pass_name for one in plan.decisions if one.applied)):
        made_by = f"thunder_fusionfix entry ({applied} rewrites)"
        new_trace = apply_joint_plan(trace, plan, entry.after, made_by, entry.operators, reach_caller(facts.joint))
        why_not, fused = _why_not(facts, new_trace, entry, is_trial)
    if why_not is None:
        return _Attempt(new_trace, plan.decisions, fused=fused)
    undone = tuple(replace(one, applied=False, reason=f"undone: {why_not}") for one in plan.decisions)
    return _Attempt(trace, undone, why_not, facts.fused)


# ---------------------------------------------------------------- a memory budget


STEPS = 64
"""Parts of what could be freed beside the default that a budget may ask for."""

RUNGS = (STEPS // 8, STEPS // 2, STEPS)
BISECTIONS = 4
NOTHING = -1  # instead of parts: not even the default's rebuilds


@dataclass(frozen=True, slots=True)
class _Tried:
    """One part of what could be freed, and what it comes to."""

    done: _Attempt
    timeline: Timeline
    num_matmuls: int = 0  # repeated

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes


class _Trials:
    """Tries plans; those that change the same are tried once."""

    def __init__(self, trace: TraceCtx, facts: JointFacts, entry: Entry) -> None:
        self.trace, self.facts, self.entry = trace, facts, entry
        self.known: dict[JointPlan, _Tried] = {}

    @cached_property
    def further(self) -> Further:
        with _blaming(recompute_cheap.NAME):
            return Further(self.facts, self.entry.config)

    @cached_property
    def before_bytes(self) -> int:
        """The estimated peak with nothing rebuilt."""
        return _timeline(self.facts.fused, self.entry).peak_bytes

    def run(self, parts: int = 0) -> _Tried:
        """The default and ``parts`` of `STEPS` of what could be freed beside it; `NOTHING` at all."""
        entry = self.entry
        if parts == NOTHING:
            entry = replace(entry, config=replace(entry.config, recompute_cheap=False))
        further = self.further if parts > 0 and entry.config.recompute_cheap else None
        plan = _plan(self.facts, entry, further, parts / STEPS)
        edits = replace(plan, decisions=())
        if edits not in self.known:
            done = _attempt(self.trace, self.facts, entry, plan, is_trial=True)
            fused = done.fused or self.facts.fused
            matmuls = 0 if done.kept_input else num_matmuls(self.facts, plan)
            self.known[edits] = _Tried(done, _timeline(fused, entry), matmuls)
        return self.known[edits]


def _within(
    limit: int, trace: TraceCtx, facts: JointFacts, entry: Entry
) -> tuple[_Attempt, tuple[Decision, ...], Budget]:
    """The least that fits ``limit`` bytes, else the least with the lowest peak that there is; and what to tell of it."""
    trials = _Trials(trace, facts, entry)
    best = searched(limit, trials)
    rebuilds, tried = best.done.num_rebuilds, len(trials.known)
    budget = Budget(limit, trials.before_bytes, best.peak_bytes, rebuilds, best.num_matmuls, tried)
    return best.done, (_told(budget, best.timeline, facts),), budget


def _timeline(fused: Graph, entry: Entry) -> Timeline:
    """What the program needs that a dry run made, after the final passes that lower it by more than an order does.

    `reorder` is left out, as it would mix the halves, and with it what only an order makes good.
    """
    facts = Facts(executed(fused), entry.config)
    for item in PASSES if entry.is_fixed_later else ():
        if item.name not in BEFORE_THE_ORDER or not getattr(entry.config, item.name):
            continue
        try:
            after = Facts(apply_to_graph(facts.graph, item.plan(facts, None)), entry.config)
            facts = after if after.timeline.peak_bytes <= facts.timeline.peak_bytes else facts
        except (FusionFixError, KeyError, ValueError):
            continue  # what a pass cannot do now it may do later; the estimate is higher
    return facts.timeline


def searched(limit: int, trials: _Trials) -> _Tried:
    """The least that fits ``limit`` bytes; what has the lowest peak where nothing does."""
    best, low = trials.run(), 0
    if best.peak_bytes <= limit:
        return best
    for high in RUNGS:
        tried = trials.run(high)
        best = tried if tried.peak_bytes < best.peak_bytes else best
        if best.peak_bytes <= limit:
            return _least(limit, best, low, high, trials)
        low = high
    # what is made again may need more than what is saved, as in one layer alone
    if trials.before_bytes < best.peak_bytes:
        tried = trials.run(NOTHING)
        best = tried if tried.peak_bytes < best.peak_bytes else best
    return best


def _least(limit: int, best: _Tried, low: int, high: int, trials: _Trials) -> _Tried:
    """The least between ``low`` parts, which did not fit, and ``high``, which came to ``best``, that fits too and is no lower."""
    for _ in range(BISECTIONS):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        tried = trials.run(middle)
        if best.peak_bytes <= tried.peak_bytes <= limit:
            best, high = tried, middle
        else:
            low = middle
    return best


def _told(budget: Budget, timeline: Timeline, facts: JointFacts) -> Decision:
    """The decision about the budget: whether it is met, how, and if not, what holds the memory."""
    what = (
        f"memory budget of {megabytes(budget.limit_bytes)} MB: estimated peak of this trace "
        f"{megabytes(budget.before_bytes)} -> {megabytes(budget.peak_bytes)} MB by {budget.num_rebuilds} rebuild(s) "
        f"that repeat {budget.num_matmuls} matmul(s)"
    )
    holders = ", ".join(f"{one.name} ({megabytes(one.nbytes)} MB, {one.producer})" for one in timeline.holders[:6])
    why = "fits" if budget.is_met else f"does not fit; the peak holds {holders}"
    return Decision(BUDGET, timeline.peak_pos, facts.joint.name, what, why, budget.is_met)


# ---------------------------------------------------------------- plans


def _dry_run(trace: TraceCtx, graph: Graph, entry: Entry) -> tuple[Graph, frozenset]:
    """The Graph that the later executors would make of ``trace``, and the sites that one of them would take."""
    if not entry.later:
        return graph, frozenset()
    fusible = fusible_sites(trace, lambda bsym: any(executor.can_fuse(bsym) for executor in entry.later))
    fused = copied(trace)
    for executor in entry.later:
        fuel = getattr(executor, "_optimization_fuel", None)  # nvFuser's: a dry run burns none
        fused = executor.fusion_pass(fused)
        if fuel is not None:
            executor._optimization_fuel = fuel
    return entry.reader.read(fused), fusible


def _plan(facts: JointFacts, entry: Entry, further: Further | None = None, share: float = 0.0) -> JointPlan:
    """What the joint passes want, and ``share`` of what is there ``further``; what one rebuilds is not the other's to claim."""
    config, fuel = entry.config, entry.fuel
    plan = JointPlan()
    if config.recompute_cheap and facts.joint.stage == "joint":
        with _blaming(recompute_cheap.NAME):
            plan = further.plan(share, fuel) if further else plan_recompute_cheap(facts, config, fuel)
    if config.claim_layouts:
        left = fuel_left(fuel, plan.decisions)
        with _blaming(claim_layouts.NAME):
            claimed = plan_claim_layouts(facts, plan, left)
        plan = replace(
            plan,
            inserts=plan.inserts + claimed.inserts,
            claims=claimed.claims,
            decisions=plan.decisions + claimed.decisions,
        )
    if config.cudnn_attention:
        left = fuel_left(fuel, plan.decisions)
        with _blaming(cudnn_attention.NAME):
            swapped = plan_cudnn_attention(facts.joint, left)
        plan = replace(plan, swaps=swapped.swaps, decisions=plan.decisions + swapped.decisions)
    return plan


@contextlib.contextmanager
def _blaming(*passes: str) -> Iterator[None]:
    """Puts the names of ``passes`` in front of an error, of its own class where that is one of ours."""
    try:
        yield
    except Exception as error:
        place = f"{', '.join(f'pass `{name}`' for name in passes)}, joint"
        for kind in (UnsupportedTraceError, VerifyError):
            if isinstance(error, kind):
                raise kind(f"{place}: {error}") from error
        told = error if isinstance(error, FusionFixError) else f"{type(error).__name__}: {error}"
        raise FusionFixError(f"{place}: {told}") from error


def _why_not(facts: JointFacts, new_trace: TraceCtx, entry: Entry, is_trial: bool) -> tuple[str | None, Graph | None]:
    """Why the new trace is not kept: it is another program, or the later executors would make another one of it, or fail.

    Beside it what a dry run made of the new trace, where one was needed.
    """
    may_be_misread = bool(_writes(facts) and entry.later)
    fused = None
    new = entry.reader.read(new_trace)
    try:
        if entry.config.verify:
            verify(facts.joint, new, _allowed(facts.joint, new, entry.config))
        if new.stage == "joint":
            _check_halves(facts, new)
        if may_be_misread or is_trial:
            fused = _dry_run(new_trace, new, entry)[0]
    except Exception as error:
        if entry.config.strict:
            raise
        _warn_once(f"thunder_fusionfix: the entry's plan was undone, the trace is as it was ({error})")
        return f"{type(error).__name__}: {error}", None
    return _misread_memory(facts, fused, entry.config) if may_be_misread and fused is not None else None, fused


def _check_halves(facts: JointFacts, new: Graph) -> None:
    """Raises where something that ran backward would run forward."""
    late = {name for pos in facts.before.backward for name in facts.joint.ops[pos].outputs}
    early = sorted(late.intersection(split(new).available))
    if early:
        raise VerifyError(f"joint trace: {', '.join(early)} ran backward before and would run forward")


def _writes(facts: JointFacts) -> bool:
    return bool(facts.aliases.written_groups)


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
    pairs = cudnn_attention.REPLACES if config.cudnn_attention else ()
    return Allow(
        may_reorder=True,
        may_rewrite_regions=True,
        may_clone=clones,
        may_replace=pairs,
        may_repeat_work=under_budget,
    )


def _nothing(stage: str, started: float, why: str | None) -> JointReport:
    return JointReport(stage, 0, 0, (), time.perf_counter() - started, 0.0, why)


def _reason(error: Exception) -> str:
    """The error's text; what is none of ours tells its class too."""
    return str(error) if isinstance(error, FusionFixError) else f"{type(error).__name__}: {error}"


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=5)

"""The pipeline keeps the user's trace where anything is in doubt: broken plans, failing passes, prices, versions, unknown sizes."""

from __future__ import annotations

import gc
import warnings
import weakref
from dataclasses import replace

import pytest
import thunder
import torch
from cpu_nvfuser import nvfuser_on_cpu
from runs import assert_equal, copied, run
from thunder.core.transform_common import Transform

from thunder_fusionfix import _thunder, pipeline
from thunder_fusionfix.config import FusionFixConfig
from thunder_fusionfix.errors import FusionFixError, UnsupportedTraceError, VerifyError
from thunder_fusionfix.model import UNPACK, Decision, NewOp, Part, Plan, RegionEdit, refs
from thunder_fusionfix.passes import PASSES, Pass
from thunder_fusionfix.passes.unfuse_layouts import plan_unfuse_layouts
from thunder_fusionfix.pipeline import fix_trace
from thunder_fusionfix.text import normalised
from thunder_fusionfix.transform import FusionFixTransform
from thunder_fusionfix.verify import Allow

pytestmark = pytest.mark.nvfuser

REWRITES = Allow(may_rewrite_regions=True)


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch):
    """Each test sees the warnings that a new process would show."""
    monkeypatch.setattr(pipeline, "_warned", set())
    _thunder.warn_untested_versions.cache_clear()
    yield
    _thunder.warn_untested_versions.cache_clear()


def program(x):
    """A slice before compute, which becomes a view outside of the region."""
    return torch.exp(x[1:-1] * 2) + 1


def argument():
    torch.manual_seed(0)
    return torch.randn(6, 3)


class Handed(Transform):
    """Runs `fix_trace` on the trace that Thunder hands over, and keeps both and the report."""

    def __init__(self, **options):
        self.config = FusionFixConfig.from_options(options)

    def transform_trace_post_optimization(self, computation_trace, **kwargs):
        self.given = computation_trace
        self.fixed, self.report = fix_trace(computation_trace, self.config)
        return self.fixed


def fixed_by(*passes, fn=program, args=None, monkeypatch=None, **options):
    """What `fix_trace` made of the trace of ``fn``, and ours as strings of warnings; the result is checked against eager."""
    if passes:
        monkeypatch.setattr(pipeline, "PASSES", passes)
    hook = Handed(**options)
    args = [argument()] if args is None else args
    with nvfuser_on_cpu(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got = thunder.jit(fn, executors=("nvfuser",), transforms=[hook])(*copied(args))
    torch.testing.assert_close(got, fn(*args))
    return hook, [str(warning.message) for warning in seen if "thunder_fusionfix" in str(warning.message)]


def shifted(facts, fuel):
    """The plan of unfuse_layouts with each hoisted slice one row too far up: the worst kind of bug, a wrong number."""
    plan = plan_unfuse_layouts(facts, fuel)
    placed = []
    for item in plan.placed:
        op = item.op
        if op.symbol == "prims.slice_prim":
            source, starts, ends, strides = op.args
            op = NewOp(op.symbol, (source, (starts[0] - 1, *starts[1:]), (ends[0] - 1, *ends[1:]), strides), op.output)
        placed.append(replace(item, op=op))
    assert tuple(placed) != plan.placed
    return replace(plan, placed=tuple(placed))


WRONG = Pass("unfuse_layouts", shifted, REWRITES)


# ---------------------------------------------------------------- what is kept


def test_trace_that_is_fixed_says_by_what(monkeypatch):
    """A rewritten trace is a new object whose provenance names the pass, and whose report has its Graphs and peaks."""
    hook, told = fixed_by()
    assert hook.fixed is not hook.given and not told
    assert str(hook.fixed).startswith("# Constructed by thunder_fusionfix unfuse_layouts (1 rewrites)")
    report = hook.report
    assert report.kept_input is None and report.after.peak_bytes <= report.before.peak_bytes
    assert [op.id for op in report.graph_before.ops] != [op.id for op in report.graph_after.ops]


def test_trace_without_regions_is_handed_back():
    """Nothing to do: the same object, no report."""
    hook, told = fixed_by(fn=lambda a: a @ a.t())
    assert hook.fixed is hook.given and hook.report is None and not told


def test_pass_that_finds_nothing_hands_back_the_same_object(monkeypatch):
    """A pass with an empty plan leaves the very trace, and its decisions are reported."""
    why = Decision("unfuse_layouts", 0, "nvFusion0", "nothing", "there is nothing", applied=False)
    hook, _ = fixed_by(
        Pass("unfuse_layouts", lambda facts, fuel: Plan(decisions=(why,)), REWRITES), monkeypatch=monkeypatch
    )
    assert hook.fixed is hook.given
    assert hook.report.decisions == (why,)


def test_what_was_read_is_let_go_with_its_trace():
    """A backward finds what its forward's fix has read, and a program that is gone leaves nothing behind."""
    hook, _ = fixed_by()
    assert hook.fixed in pipeline._readers
    trace = weakref.ref(hook.fixed)
    del hook
    gc.collect()
    assert trace() is None


def test_two_compiles_of_one_program_give_the_same_text():
    """What the passes make depends on nothing but the trace."""
    texts = [normalised(str(fixed_by()[0].fixed)) for _ in range(2)]
    assert texts[0] == texts[1]


# ---------------------------------------------------------------- broken passes


def test_wrong_slice_leaves_the_users_trace_with_one_warning(monkeypatch):
    """A plan that reads other rows is caught: the trace is kept, the decisions say so, two compiles warn once."""
    hook, told = fixed_by(WRONG, monkeypatch=monkeypatch)
    assert hook.fixed is hook.given
    assert len(told) == 1 and "pass `unfuse_layouts` was undone" in told[0]
    assert hook.report.kept_input is not None
    undone = [decision for decision in hook.report.decisions if decision.reason.startswith("pass undone: ")]
    assert undone and not any(decision.applied for decision in hook.report.decisions)
    assert fixed_by(WRONG, monkeypatch=monkeypatch)[1] == []


def test_wrong_slice_raises_under_strict_and_names_the_pass(monkeypatch):
    """Under ``strict`` the breach is an error that names the pass, the stage and the rule."""
    with pytest.raises(VerifyError, match=r"^pass `unfuse_layouts`, inference: .*rule"):
        fixed_by(WRONG, monkeypatch=monkeypatch, strict=True)


def test_wrong_slice_is_caught_by_running_both_traces(monkeypatch):
    """``debug_execute`` alone, without the rules, finds other numbers too; a right plan passes it."""
    with pytest.raises(VerifyError, match="pass `unfuse_layouts`.* gives other numbers"):
        fixed_by(WRONG, monkeypatch=monkeypatch, strict=True, verify=False, debug_execute=True)
    monkeypatch.undo()
    hook, told = fixed_by(debug_execute=True, strict=True)
    assert hook.fixed is not hook.given and not told


def fails(facts, fuel):
    raise LookupError("no such thing")


def test_pass_that_fails_costs_itself_alone(monkeypatch):
    """An error in one pass is a warning that names it; the passes after it run on."""
    broken = Pass("reorder", fails, Allow(may_reorder=True))
    (working,) = (item for item in PASSES if item.name == "unfuse_layouts")
    hook, told = fixed_by(broken, working, monkeypatch=monkeypatch)
    assert "unfuse_layouts" in str(hook.fixed)
    assert len(told) == 1 and "pass `reorder` was undone" in told[0] and "LookupError: no such thing" in told[0]


def test_pass_that_fails_raises_under_strict_and_names_the_pass(monkeypatch):
    """Under ``strict`` whatever a pass raises becomes an error of ours that names the pass."""
    with pytest.raises(FusionFixError, match="^pass `reorder`, inference: LookupError: no such thing"):
        fixed_by(Pass("reorder", fails, Allow(may_reorder=True)), monkeypatch=monkeypatch, strict=True)


def test_plan_that_cannot_be_applied_is_undone(monkeypatch):
    """A plan that needs an op that Thunder does not have costs itself alone, and under ``strict`` names the pass."""

    def impossible(facts, fuel):
        plan = plan_unfuse_layouts(facts, fuel)
        return replace(
            plan, placed=tuple(replace(item, op=replace(item.op, symbol="prims.nothing")) for item in plan.placed)
        )

    hook, told = fixed_by(Pass("unfuse_layouts", impossible, REWRITES), monkeypatch=monkeypatch)
    assert hook.fixed is hook.given and "prims.nothing is no prim" in told[0]
    with pytest.raises(UnsupportedTraceError, match="pass `unfuse_layouts`.*prims.nothing is no prim"):
        fixed_by(Pass("unfuse_layouts", impossible, REWRITES), monkeypatch=monkeypatch, strict=True)


def test_plan_that_costs_memory_is_undone_without_a_word(monkeypatch):
    """A right plan that raises the simulated peak is not kept; that is no fault, so nobody is warned, strict or not."""

    def early(x, y):
        return ((x * 2).sum() + y.sum()).reshape(1) * (y * 3)

    def all_parts(facts, fuel):
        """Each op of a region in a region of its own: every intermediate is written."""
        parts = []
        for pos, op in enumerate(facts.graph.ops):
            if op.is_fusion:
                taken = {name for later in op.subops for name in later.inputs} | set(op.outputs)
                parts.append(
                    RegionEdit(
                        pos,
                        tuple(
                            Part((index,), tuple(name for name in sub.outputs if name in taken))
                            for index, sub in enumerate(op.subops)
                        ),
                    )
                )
        return Plan(tuple(parts), decisions=(Decision("split_regions", 0, "all", "cut", "to see", applied=True),))

    hook, told = fixed_by(
        Pass("split_regions", all_parts, Allow(may_split_regions=True)),
        fn=early,
        args=[torch.randn(64, 64), torch.randn(64, 64)],
        monkeypatch=monkeypatch,
        strict=True,
    )
    assert hook.fixed is hook.given and not told
    assert "peak would rise" in hook.report.kept_input
    assert [decision.applied for decision in hook.report.decisions] == [False]


# ---------------------------------------------------------------- options, versions, sizes


def test_pass_that_is_switched_off_does_not_run(monkeypatch):
    """An option named after a pass keeps it from being asked at all."""
    hook, told = fixed_by(Pass("reorder", fails, Allow()), monkeypatch=monkeypatch, reorder=False, strict=True)
    assert hook.fixed is hook.given and hook.report.decisions == () and not told


def test_fuel_is_shared_by_the_passes(monkeypatch):
    """Each pass is told what the ones before it have left."""
    told = []

    def spends(facts, fuel):
        told.append(fuel)
        return Plan(decisions=(Decision("reorder", 0, "", "", "", applied=True),))

    item = Pass("reorder", spends, Allow())
    fixed_by(item, item, monkeypatch=monkeypatch, fuel=3)
    fixed_by(item, monkeypatch=monkeypatch)
    assert told == [3, 2, None]


def test_untested_version_passes_through_with_one_warning(monkeypatch):
    """Outside the tested releases the trace is the same object, and one warning names the release and the way to insist."""
    monkeypatch.setitem(_thunder.TESTED, "lightning-thunder", ("9.9",))
    hook, told = fixed_by()
    assert hook.fixed is hook.given and hook.report is None
    assert len(told) == 1 and "lightning-thunder" in told[0] and "9.9" in told[0]
    assert fixed_by()[1] == []
    hook, told = fixed_by(untested_versions=True)
    assert hook.fixed is not hook.given and not told


def symbolic(hook, x):
    """The result of `program` compiled once for all sizes."""
    with nvfuser_on_cpu(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The 'symbolic values' cache option")
        return thunder.jit(program, executors=("nvfuser",), transforms=[hook], cache="symbolic values")(x)


def test_symbolic_values_pass_through_with_one_note(monkeypatch):
    """Sizes that only a run can tell: the trace is the same object and still runs, and one note in all says so."""
    told = []
    monkeypatch.setattr(pipeline.warnings, "warn", lambda message, **kwargs: told.append(message))
    for shape in ((6, 3), (5, 4)):
        hook, x = Handed(), torch.randn(shape)
        torch.testing.assert_close(symbolic(hook, x), program(x))
        assert hook.fixed is hook.given and hook.report is None
    assert [message for message in told if "thunder_fusionfix" in message] == [
        "thunder_fusionfix left a trace as it is: symbolic values, sizes that only a run can tell"
    ]


def test_trace_that_cannot_be_read_raises_under_strict():
    """Under ``strict`` nothing is left as it is in silence."""
    with pytest.raises(UnsupportedTraceError, match="symbolic values"):
        symbolic(Handed(strict=True), torch.randn(6, 3))


def test_backward_is_priced_with_the_forward_that_saved_its_tensors():
    """What the forward's arguments hold is held in the backward too, so that a `del` of a parameter frees nothing."""

    def step(x, w):
        return (x.exp() * 2).t() @ w

    fix = FusionFixTransform(strict=True)
    args = [torch.randn(4, 5, requires_grad=True), torch.randn(4, 3, requires_grad=True)]
    plain = run(step, copied(args))
    assert_equal(run(step, copied(args), "dataflow", fix), plain)
    backward = next(report for report in fix.reports if report.stage == "backward")
    assert {"x", "w"} <= backward.graph_before.held


@pytest.mark.parametrize("disabled", [True, False])
def test_backward_is_priced_with_what_the_program_and_autograd_hold(disabled):
    """Outputs that the forward saved are alive to the end of the backward, and under ThunderFX the cotangents too."""

    def step(x, w):
        return ((x.exp() * 2) @ w).exp()

    fix = FusionFixTransform(strict=True)
    args = [torch.randn(4, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True)]
    run(step, args, "dataflow", fix, thunderfx_disable_split_autograd=disabled)
    forward, backward = (report.graph_before for report in fix.reports)
    given = {name for op in backward.ops if op.id == UNPACK and backward.args[1] in op.inputs for name in op.outputs}
    outputs = {name for name in refs(forward.result[0]) if name in backward.saved and name not in forward.args}
    assert given and outputs and outputs <= backward.held
    assert (given <= backward.held) == disabled

"""FusionFixTransform wherever Thunder takes a transform: by every way to compile, beside others, with every kind of option."""

from __future__ import annotations

import warnings

import pytest
import thunder
import torch
from cpu_nvfuser import calls, nvfuser_on_cpu
from runs import assert_equal, copied, run
from thunder.core.transform_common import Transform
from thunder.dev_utils.debug_transform import DebugTransform
from thunder.dynamo import ThunderCompiler, thunderfx

from thunder_fusionfix.capture import capture
from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.transform import FusionFixTransform

pytestmark = pytest.mark.nvfuser


def scores(x, w):
    """A transpose of a computed tensor, which nvFuser takes into its region forward and backward."""
    return torch.matmul((x.exp() * 2).t(), w)


def arguments():
    torch.manual_seed(0)
    return [torch.randn(4, 5, requires_grad=True), torch.randn(4, 3, requires_grad=True)]


def applied(fix):
    """Rewrites of each trace, by stage."""
    return {report.stage: sum(decision.applied for decision in report.decisions) for report in fix.reports}


class Watch(Transform):
    """Keeps the traces that it is handed, and changes nothing."""

    def __init__(self):
        self.traces = []

    def transform_trace_post_optimization(self, computation_trace, **kwargs):
        self.traces.append(computation_trace)
        return computation_trace


# ---------------------------------------------------------------- ways to compile


WAYS = {
    "thunder.jit": lambda fix: thunder.jit(scores, executors=("nvfuser",), transforms=[fix]),
    "ThunderCompiler": lambda fix: torch.compile(
        scores, backend=ThunderCompiler(executors=("nvfuser",), transforms=[fix])
    ),
    "thunderfx": lambda fix: thunderfx(scores, executors=("nvfuser",), transforms=[fix]),
}


@pytest.mark.parametrize("way", WAYS)
def test_transform_fixes_forward_and_backward_by_every_way_to_compile(way):
    """Both traces are rewritten, the rewritten regions run, and outputs and gradients are eager's."""
    fix, args = FusionFixTransform(strict=True), arguments()
    with nvfuser_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = WAYS[way](fix)(*args)
        out.sum().backward()
        ran = list(calls)
    assert all(number > 0 for number in applied(fix).values()) and list(applied(fix)) == ["forward", "backward"]
    assert len(ran) == 2 and not any("transpose" in name for name in ran)
    expected = arguments()
    want = scores(*expected)
    want.sum().backward()
    torch.testing.assert_close(out, want)
    for got, leaf in zip(args, expected):
        torch.testing.assert_close(got.grad, leaf.grad)


def test_transform_without_gradients_reports_one_trace():
    """Where nothing requires a gradient there is one trace, of the stage "inference"."""
    fix = FusionFixTransform(strict=True)
    run(scores, [arg.detach() for arg in arguments()], "dataflow", fix)
    assert list(applied(fix)) == ["inference"]


# ---------------------------------------------------------------- beside others


def test_other_transforms_before_and_after_see_the_trace_in_turn():
    """One before is handed Thunder's trace, one after it the fixed one."""
    before, fix, after = Watch(), FusionFixTransform(strict=True), Watch()
    run(scores, arguments(), "dataflow", before, fix, after)
    assert len(before.traces) == len(after.traces) == 2
    for old, new in zip(before.traces, after.traces):
        assert "unfuse_layouts" not in str(old) and str(new).startswith("# Constructed by thunder_fusionfix")


@pytest.mark.parametrize("is_first", [True, False])
def test_transform_works_beside_one_that_adds_calls(is_first):
    """With Thunder's debug transform on either side, every result is what plain Thunder gives."""

    def debug():
        return DebugTransform(pre_callback=lambda bsym, *args, **kwargs: f"before {bsym.sym.name}")

    plain = run(scores, copied(arguments()), "dataflow", debug())
    fix = FusionFixTransform(strict=True)
    transforms = (fix, debug()) if is_first else (debug(), fix)
    assert_equal(run(scores, copied(arguments()), "dataflow", *transforms), plain)
    assert len(fix.reports) == 2
    if is_first:
        assert all(applied(fix).values())


def test_transform_given_twice_changes_nothing_more():
    """The second of two finds nothing to do and hands on the same objects."""
    first, between, second, last = FusionFixTransform(strict=True), Watch(), FusionFixTransform(strict=True), Watch()
    run(scores, arguments(), "dataflow", first, between, second, last)
    assert all(applied(first).values()) and not any(applied(second).values())
    assert all(one is other for one, other in zip(between.traces, last.traces, strict=True))


# ---------------------------------------------------------------- executors


@pytest.mark.parametrize("executors", [(), ("sdpa",), ("torch",)])
def test_trace_without_regions_is_the_same_object(executors):
    """Without a fusion executor there is nothing to do: no report, and the trace that was given."""
    before, fix, after = Watch(), FusionFixTransform(strict=True), Watch()
    run(scores, arguments(), "dataflow", before, fix, after, executors=executors)
    assert fix.reports == []
    assert all(one is other for one, other in zip(before.traces, after.traces, strict=True))


@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
@pytest.mark.parametrize(
    "executors",
    [("torchcompile_cat",), ("torchcompile_cat", "nvfuser"), ("sdpa", "torchcompile_cat", "fusionfix", "nvfuser")],
)
def test_transform_works_with_every_list_of_executors(executors, fusion_type):
    """Regions of nvFuser, of torch.compile, and of both in one trace are looked at; what is left has a reason."""

    def rotated(x, w):
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return torch.matmul((turned * 2 + x).t().exp(), w)

    fix = FusionFixTransform(strict=True)
    capture(
        rotated, [torch.empty(6, 4), torch.empty(6, 3)], executors=executors, transforms=[fix], fusion_type=fusion_type
    )
    (report,) = fix.reports
    assert any(op.is_fusion for op in report.graph_before.ops)
    assert report.kept_input is None and report.decisions and all(decision.reason for decision in report.decisions)


# ---------------------------------------------------------------- options


def test_unknown_option_names_itself_and_the_legal_ones():
    """A misspelt argument fails where it is given, in one line."""
    with pytest.raises(
        UsageError, match=r"no option 'unfuse_layout'; its options are .*unfuse_layouts, .*fuel"
    ) as error:
        FusionFixTransform(unfuse_layout=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"), [("fuel", -1), ("strict", "yes"), ("verify", None), ("memory_budget", "much")]
)
def test_wrong_value_of_an_option_is_named(name, value):
    """A wrong argument fails where it is given and says which it is."""
    with pytest.raises(UsageError, match=name):
        FusionFixTransform(**{name: value})


@pytest.mark.parametrize(
    ("option", "message"), [("fusionfix_unfuse_layout", "no option 'unfuse_layout'"), ("fusionfix_fuel", "fuel='no'")]
)
def test_wrong_compile_option_fails_the_compile(option, message):
    """An option with our prefix that Thunder was given is checked too, a misspelt one included."""
    with pytest.raises(UsageError, match=message):
        run(scores, arguments(), "dataflow", FusionFixTransform(), **{option: "no"})


def test_compile_option_with_prefix_is_honoured():
    """``fusionfix_unfuse_layouts=False`` given to Thunder switches the pass off."""
    fix = FusionFixTransform(strict=True)
    run(scores, arguments(), "dataflow", fix, fusionfix_unfuse_layouts=False)
    decided = {decision.pass_name for report in fix.reports for decision in report.decisions}
    assert len(fix.reports) == 2 and "unfuse_layouts" not in decided


def test_argument_wins_over_compile_option():
    """What the transform was given counts where both are given."""
    fix = FusionFixTransform(strict=True, unfuse_layouts=True)
    run(scores, arguments(), "dataflow", fix, fusionfix_unfuse_layouts=False)
    assert all(applied(fix).values())


def test_compile_options_are_in_thunders_list():
    """Thunder's own listing of compile options names ours, whether given or not."""
    fix = FusionFixTransform()
    with nvfuser_on_cpu():
        jitted = thunder.jit(scores, executors=("nvfuser",), transforms=[fix])
        jitted(*arguments())
    reasons = thunder.compile_stats(jitted).last_compile_reasons
    assert "fusionfix_unfuse_layouts" in reasons and "fusionfix_fuel" in reasons


# ---------------------------------------------------------------- reports


def test_reports_of_all_functions_that_one_transform_serves_accumulate():
    """One object may serve many compiles; its reports stand in the order in which the traces were made."""
    fix = FusionFixTransform(strict=True)
    run(scores, arguments(), "dataflow", fix)
    run(scores, [arg.detach() for arg in arguments()], "consecutive", fix)
    assert [report.stage for report in fix.reports] == ["forward", "backward", "inference"]
    assert all(report.seconds > 0 for report in fix.reports)


def test_report_tells_each_trace_what_was_done_and_what_stays():
    """The text has a part for each trace, its peaks, its rewrites and its refusals; one sentence where there is no trace."""
    fix = FusionFixTransform(strict=True)
    assert fix.report() == "no trace with fusion regions was compiled"
    run(scores, arguments(), "dataflow", fix)
    text = fix.report()
    for words in ("forward trace: peak", "backward trace: peak", "sunk transpose", "left as it is"):
        assert words in text


def test_transform_prints_as_it_is_made():
    """The transform's repr names its options, so that a list of transforms can be read."""
    assert repr(FusionFixTransform(fuel=3)) == "thunder_fusionfix.FusionFixTransform(fuel=3)"

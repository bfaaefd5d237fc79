"""recompute_cheap: what is rebuilt instead of saved, what must not be, and that outputs and gradients stay the same."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import thunder
import torch
import torch.nn.functional as F
from cpu_nvfuser import nvfuser_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import assert_equal, copied, distance, run
from thunder.core import rematerialization
from torch.utils.checkpoint import checkpoint

from thunder_fusionfix import joint_pipeline
from thunder_fusionfix._thunder import nvfuser_version, replaced
from thunder_fusionfix.alias import aliases
from thunder_fusionfix.effects import short_name
from thunder_fusionfix.errors import FusionFixError
from thunder_fusionfix.executor import fusionfix_ex
from thunder_fusionfix.joint import opened
from thunder_fusionfix.joint_pipeline import BISECTIONS, NOTHING, RUNGS, STEPS
from thunder_fusionfix.passes.recompute_cheap import NAME, _Search
from thunder_fusionfix.read import read

pytestmark = pytest.mark.skipif(nvfuser_version() is None, reason="nvFuser is not installed")

PLAIN, ENTRY = ("nvfuser",), ("fusionfix", "nvfuser")


def gated_mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def cast_and_back(x):
    return torch.tanh(x.to(torch.bfloat16).float())


def masked(x, w):
    h = x @ w
    return torch.where(h > 0, h * 2, h.exp()).t() @ x


PROGRAMS = {
    "gated_mlp": (gated_mlp, [(6, 8), (12, 8), (12, 8), (8, 12)]),
    "masked": (masked, [(4, 5), (5, 5)]),
}


def arguments(shapes):
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def saved_bytes(fn, args, executors):
    """Bytes that the forward of ``fn`` saves, its arguments left out."""
    with nvfuser_on_cpu():
        jitted = thunder.jit(fn, executors=executors, fusion_type="dataflow", fusionfix_recompute_min_bytes=0)
        jitted(*args)
        graph = read(thunder.last_traces(jitted)[-1])
    return sum(graph.values[name].nbytes or 0 for name in graph.saved if name not in graph.args)


@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_with_the_entry_gives_what_plain_thunder_gives(name, fusion_type):
    """Outputs and every gradient are plain Thunder's, and what is rebuilt is rebuilt from the same numbers."""
    fn, shapes = PROGRAMS[name]
    args = arguments(shapes)
    options = {"fusionfix_recompute_min_bytes": 0}
    plain = run(fn, copied(args), fusion_type, executors=PLAIN)
    assert_equal(run(fn, copied(args), fusion_type, executors=ENTRY, **options), plain)


def test_gated_mlp_saves_less_with_the_entry():
    """The product of a gated MLP is rebuilt from its two factors, which are saved anyway."""
    args = arguments(PROGRAMS["gated_mlp"][1])
    assert saved_bytes(gated_mlp, args, ENTRY) < saved_bytes(gated_mlp, args, PLAIN)


def test_output_that_the_caller_holds_is_not_rebuilt():
    """Dropping what the caller gets anyway frees nothing: it stays saved, and nothing is saved in its place."""
    args = arguments([(3, 4)])
    assert saved_bytes(cast_and_back, args, ENTRY) <= saved_bytes(cast_and_back, args, PLAIN)


# ---------------------------------------------------------------- what must be seen to hold


OPTIONS = {"fusionfix_strict": True, "fusionfix_recompute_min_bytes": 0}


def traces(fn, args, executors=ENTRY, fusion_type="dataflow", **options):
    """The final forward and backward Graphs of ``fn``."""
    with nvfuser_on_cpu():
        jitted = thunder.jit(fn, executors=executors, fusion_type=fusion_type, **{**OPTIONS, **options})
        jitted(*args)
        return read(thunder.last_traces(jitted)[-1]), read(thunder.last_backward_traces(jitted)[-1])


def large(graph, least: int):
    """Saved tensors of at least so many elements that are no arguments."""
    return [name for name in graph.saved if name not in graph.args and (graph.values[name].numel or 0) >= least]


def applied():
    return [one for report in fusionfix_ex.reports for one in report.decisions if one.applied and one.pass_name == NAME]


@pytest.fixture(autouse=True)
def _fresh_reports():
    fusionfix_ex.reports.clear()


def assert_gradients_equal_float64(fn, args, fusion_type="dataflow", **options):
    """Outputs and gradients with the entry are those of eager in float64, within float32's spread."""
    wide = [arg.detach().double().requires_grad_(arg.requires_grad) for arg in args]
    want = run(fn, wide, None)
    got = run(fn, copied(args), fusion_type, executors=ENTRY, **{**OPTIONS, **options})
    assert list(got) == list(want)
    for name, value in want.items():
        assert distance(got[name], value) < 1e-5, name


@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
def test_gated_mlp_saves_two_large_tensors_instead_of_three(fusion_type):
    """gate and up stay; their product is made again, once, right after the gradient that comes before it."""
    args = arguments(PROGRAMS["gated_mlp"][1])
    assert len(large(traces(gated_mlp, args, PLAIN, fusion_type)[0], 72)) >= 3
    forward, backward = traces(gated_mlp, args, ENTRY, fusion_type)
    assert len(large(forward, 72)) == 2
    (after,) = (pos for pos, op in enumerate(backward.ops) if op.id == "fusionfix_after")
    token = backward.ops[after].inputs[1]
    assert backward.producer[token] < after and backward.ops[backward.producer[token]].id == "torch.matmul"
    assert sum(decision.bytes_won for decision in applied()) >= 6 * 12 * 4
    assert_gradients_equal_float64(gated_mlp, args, fusion_type)


def grouped_keys(num_copies):
    """A function of keys that several heads share, as grouped-query attention has them, and its arguments."""

    def fn(x, w, v):
        keys = (x @ w).reshape(2, 1, 6, 4).expand(2, num_copies, 6, 4).reshape(2 * num_copies, 6, 4)
        return keys @ v @ keys.mT

    return fn, arguments([(2, 6, 8), (8, 4), (2 * num_copies, 4, 4)])


@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
def test_expanded_keys_are_made_again_from_the_ones_before(fusion_type):
    """What a copy repeats is not saved repeated: of four copies one stays, and the report says exactly what that frees."""
    fn, args = grouped_keys(4)
    plain, ours = (traces(fn, args, executors, fusion_type)[0] for executors in (PLAIN, ENTRY))
    (report,) = fusionfix_ex.reports
    keys = 2 * 6 * 4 * 4
    assert distinct_bytes(plain) - distinct_bytes(ours) == 3 * keys
    assert report.saved_before_bytes - report.saved_after_bytes == 3 * keys
    assert_gradients_equal_float64(fn, args, fusion_type)


def test_two_copies_of_keys_stay_saved():
    """Writing both copies twice for the half that it frees does not pay."""
    fn, args = grouped_keys(2)
    plain, ours = (traces(fn, args, executors)[0] for executors in (PLAIN, ENTRY))
    assert distinct_bytes(plain) == distinct_bytes(ours) and not applied()


def distinct_bytes(graph):
    """Bytes that a forward Graph saves beside its arguments; what shares memory counts once."""
    shared = aliases(opened(graph))
    memory = {shared.storage_of[name] for name in graph.saved if name in shared.storage_of}
    return sum(shared.storages[one].nbytes for one in memory if not shared.storages[one].is_outside)


def tower(x, *weights):
    for gate, up, down in zip(weights[::3], weights[1::3], weights[2::3]):
        x = x + gated_mlp(x, gate, up, down)
    return x


@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
def test_rebuilds_of_layers_are_not_gathered(fusion_type):
    """With many layers, no fusion makes more than one layer's product again: each waits for its own gradient."""
    args = arguments([(6, 8), *[(12, 8), (12, 8), (8, 12)] * 4])
    _, backward = traces(tower, args, ENTRY, fusion_type)
    products = [
        sum(leaf.outputs[0].startswith("bw_") and leaf.id == "prims.mul" for leaf in op.leaves)
        for op in backward.ops
        if op.is_fusion
    ]
    anchors = [op for op in backward.ops if op.id == "fusionfix_after"]
    assert len(anchors) >= 4 and len({op.inputs[1] for op in anchors}) == len(anchors)
    assert sum(products) >= 4 and max(products) <= 2  # silu and the product itself
    assert_gradients_equal_float64(tower, args, fusion_type)


def counts(graph, *names):
    return sum(short_name(leaf.id) in names for op in graph.ops for leaf in op.leaves)


@pytest.mark.parametrize("budget", [{}, {"fusionfix_memory_budget": 1}], ids=["default", "budget"])
def test_random_op_is_never_repeated(budget):
    """Dropout between cheap ops: what needs its mask keeps it, and the generator is drawn from as often as before."""

    def fn(x, w):
        h = F.dropout(F.silu(x @ w), 0.5) * 2
        return (h.exp() @ w) * h

    args = arguments([(4, 6, 8), (8, 8)])
    draws = "uniform", "uniform_philox", "get_and_update_rng_state"
    # nvFuser's pass would take the generator's state from a GPU
    with replaced(rematerialization, "replace_uniform", lambda trace: trace):
        (plain_fw, plain_bw), (fw, bw) = traces(fn, args, PLAIN), traces(fn, args, ENTRY, **budget)
        assert counts(fw, *draws) == counts(plain_fw, *draws) == 1
        assert counts(bw, *draws) == counts(plain_bw, *draws) == 0
        want = run(fn, copied(args), "dataflow")
        assert_equal(run(fn, copied(args), "dataflow", executors=ENTRY, **OPTIONS, **budget), want, 1e-6)


def test_nothing_is_made_again_from_memory_that_is_written():
    """A buffer that the forward updates in place is no source, before or after the update."""

    def fn(x, w, seen):
        h = torch.sigmoid(seen) * (x @ w)
        seen.add_(h.detach().mean((0, 1)))
        return (h * torch.sigmoid(seen)) @ w

    args = [*arguments([(4, 6, 8), (8, 8)]), torch.zeros(8)]
    for fusion_type in ("dataflow", "consecutive"):
        # plain Thunder's gradients are not eager's here: it reads the buffer in the backward, after the update
        want = run(fn, copied(args), fusion_type)
        for budget in ({}, {"fusionfix_memory_budget": 1}):
            assert_equal(run(fn, copied(args), fusion_type, executors=ENTRY, **OPTIONS, **budget), want, 0.0)
    assert not any("seen" in decision.what for decision in applied())


def test_tied_weights_and_shared_inputs_get_one_gradient_each():
    """One parameter used by two layers, one activation by three ops."""

    def fn(x, w):
        h = F.silu(x @ w) * (x @ w.t())
        return (h @ w) * h + F.linear(h, w)

    assert_gradients_equal_float64(fn, arguments([(4, 6, 8), (8, 8)]))
    assert applied()


@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
def test_checkpoint_is_respected(fusion_type):
    """What the user asked to compute again is not saved instead, and saved bytes never grow."""

    def fn(x, gate, up, down):
        return checkpoint(gated_mlp, torch.tanh(x), gate, up, down, use_reentrant=False) * 2

    args = arguments(PROGRAMS["gated_mlp"][1])
    plain, ours = (saved(traces(fn, args, executors, fusion_type)[0]) for executors in (PLAIN, ENTRY))
    assert ours <= plain
    assert_gradients_equal_float64(fn, args, fusion_type)


def saved(graph):
    return sum(graph.values[name].nbytes or 0 for name in graph.saved if name not in graph.args)


def test_small_tensors_stay_saved_by_default():
    """A kernel costs more than a few bytes: below the bound of 1 MiB nothing is made again."""
    args = arguments(PROGRAMS["gated_mlp"][1])
    assert traces(gated_mlp, args, ENTRY, fusionfix_recompute_min_bytes=2**20)[0].saved
    assert not applied()


def test_autocast_gradients_are_as_near_to_float64_as_plain_thunders():
    """Under bf16 autocast, twice the distance of plain Thunder at most."""
    args = arguments(PROGRAMS["gated_mlp"][1])
    wide = run(gated_mlp, [arg.detach().double().requires_grad_() for arg in args], None)
    found = []
    for executors in (PLAIN, ENTRY):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(run(gated_mlp, copied(args), "dataflow", executors=executors, **OPTIONS))
    plain, ours = ({name: distance(result[name], wide[name]) for name in wide} for result in found)
    assert all(ours[name] <= 2 * plain[name] + 1e-6 for name in wide)


def rounded_between(narrow, wide):
    """A function whose activations are made of a product that is rounded to ``narrow``, and computed with in ``wide``."""

    def fn(x, w, *heads):
        h = (x @ w).to(narrow)
        parts = [act(h.to(wide) * 4).to(narrow) for act in (torch.sin, torch.cos, torch.tanh)]
        return sum(part @ head for part, head in zip(parts, heads))

    return fn


@pytest.mark.parametrize("through_rounding", [False, True], ids=["before", "after"])
def test_rebuild_starts_before_the_rounding_that_the_forward_left_out(through_rounding, monkeypatch):
    """nvFuser's pass computes with what was not rounded. A rebuild from the rounded value, which is saved, would make gradients
    that are further from float64 than plain Thunder's; so nothing is made again here."""
    fn, exact = rounded_between(torch.bfloat16, torch.float32), rounded_between(torch.float64, torch.float64)
    x, w, *heads = arguments([(64, 16), (16, 32), *[(32, 8)] * 3])
    args = [x, w, *(head.detach().bfloat16().requires_grad_() for head in heads)]
    want = run(exact, [arg.detach().double().requires_grad_() for arg in args], None)
    plain = run(fn, copied(args), "dataflow")
    if through_rounding:
        monkeypatch.setattr(_Search, "unrounded", lambda self, op: frozenset())
    ours = run(fn, copied(args), "dataflow", executors=ENTRY, **OPTIONS)
    further = times_further(ours, plain, want)
    assert bool(applied()) == through_rounding
    assert (further > 3) if through_rounding else (further < 1.1)


def test_rebuild_through_a_rounding_takes_both_casts():
    """Where the value before the rounding can be made, both casts are repeated, so that the pass leaves them out again."""

    def fn(x, y, *heads):
        h = (x.float() * y.float()).to(torch.bfloat16)
        parts = [act(h.float() * 4).to(torch.bfloat16) for act in (torch.sin, torch.cos, torch.tanh)]
        return sum(part @ head for part, head in zip(parts, heads))

    args = [arg.detach().bfloat16().requires_grad_() for arg in arguments([(64, 32), (64, 32), *[(32, 8)] * 3])]
    wide = [arg.detach().double().requires_grad_() for arg in args]
    want = run(lambda x, y, a, b, c: (x * y * 4).sin() @ a + (x * y * 4).cos() @ b + (x * y * 4).tanh() @ c, wide, None)
    plain = run(fn, copied(args), "dataflow")
    ours = run(fn, copied(args), "dataflow", executors=ENTRY, **OPTIONS)
    assert len(applied()) >= 3 and all(re.search("made again from (x, y|y, x) ", one.what) for one in applied())
    assert times_further(ours, plain, want) < 1.1


def times_further(ours, plain, want):
    """How many times further from ``want`` the worst output or gradient is than plain Thunder's."""
    names = [name for name in want if not name.startswith("argument")]
    return max(distance(ours[name], want[name]) / distance(plain[name], want[name]) for name in names)


# ---------------------------------------------------------------- a budget

TOWER = [(64, 32), *[(96, 32), (96, 32), (32, 96)] * 4]
LAYERS = [(64, 32), *[(96, 32), (96, 32), (32, 96)] * 12]


def budgets_tried(fn, args, limits, monkeypatch, fusion_type="dataflow"):
    """For each of ``limits``, a share of the way from the lowest estimated peak to that without a budget, what is taken for it.

    All of one compile, so that no plan is tried twice.
    """
    found = []
    search = joint_pipeline.searched

    def watched(limit, trials):
        most, least = trials.run().peak_bytes, search(0, trials).peak_bytes
        for share in limits:
            bytes_limit = least + int(share * (most - least))
            found.append((bytes_limit, search(bytes_limit, trials)))
        return search(limit, trials)

    with monkeypatch.context() as patched:
        patched.setattr(joint_pipeline, "searched", watched)
        traces(fn, args, ENTRY, fusion_type, fusionfix_memory_budget=1)
    return found


@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
def test_lower_budget_never_gives_a_higher_estimated_peak(fusion_type, monkeypatch):
    """From what is needed without a budget down to the least: each is met, with no more made again than before and no less freed."""
    limits = [part / 8 for part in range(9)]
    found = budgets_tried(tower, arguments(LAYERS), limits, monkeypatch, fusion_type)
    peaks = [tried.peak_bytes for _, tried in found]
    assert all(peak <= limit for peak, (limit, _) in zip(peaks, found))
    assert peaks == sorted(peaks) and len(set(peaks)) > 3
    assert found[-1][1].num_matmuls == 0


def test_budget_takes_no_more_rebuilds_than_it_needs(monkeypatch):
    """Half of what can be won takes fewer rebuilds than all of it, though more than are made without a budget."""
    (_, least), (_, some), (_, enough) = budgets_tried(tower, arguments(TOWER), [0, 0.5, 1], monkeypatch)
    assert enough.done.num_rebuilds < some.done.num_rebuilds < least.done.num_rebuilds


def test_budget_below_the_default_is_met_without_going_far_below(monkeypatch):
    """Of equal layers only as many are computed again as a budget needs, and more of their matmuls the lower it is."""
    found = []
    search = joint_pipeline.searched

    def watched(limit, trials):
        default = trials.run()
        found.append((default.peak_bytes, default))
        for share in (0.97, 0.95, 0.92, 0.89, 0.86, 0.83):
            bytes_limit = int(share * default.peak_bytes)
            found.append((bytes_limit, search(bytes_limit, trials)))
        return search(limit, trials)

    with monkeypatch.context() as patched:
        patched.setattr(joint_pipeline, "searched", watched)
        traces(tower, arguments(LAYERS), ENTRY, fusionfix_memory_budget=1)
    assert all(0.95 * limit <= tried.peak_bytes <= limit for limit, tried in found)
    matmuls = [tried.num_matmuls for _, tried in found]
    assert matmuls == sorted(matmuls) and matmuls[0] == 0 < matmuls[1] and len(set(matmuls)) > 4
    default, *further = (rebuilt(tried.done.decisions) for _, tried in found)
    assert default and all(default <= names for names in further)


def rebuilt(decisions):
    """Names of what is made again."""
    return {one.what.split()[0] for one in decisions if one.applied and one.pass_name == NAME}


def narrow_and_wide(x, *weights):
    """Layers of a narrow and a wide part: what the wide one takes could be made again by the matmul of the narrow one."""
    for inner, outer, up, down in zip(weights[::4], weights[1::4], weights[2::4], weights[3::4]):
        x = x + F.linear(torch.tanh(F.linear(x, inner)), outer)
        x = x + F.linear(F.silu(F.linear(torch.sin(x), up)), down)
    return x


@pytest.mark.parametrize("num_layers", [2, 4])
def test_repeated_matmuls_start_from_what_is_saved(num_layers, monkeypatch):
    """However many layers there are and whatever is dropped, no chain goes through the matmul of another layer or part."""
    monkeypatch.setattr(joint_pipeline, "searched", lambda limit, trials: trials.run(STEPS))
    shapes = [(64, 8), *[(8, 8), (8, 8), (96, 8), (8, 96)] * num_layers]
    args = [(arg.detach() / 4).requires_grad_() for arg in arguments(shapes)]
    _, backward = traces(narrow_and_wide, args, ENTRY, fusionfix_memory_budget=1)
    plain = counts(traces(narrow_and_wide, args, PLAIN)[1], "linear", "matmul")
    told = fusionfix_ex.reports[0].budget
    assert told.num_matmuls == counts(backward, "linear", "matmul") - plain
    assert num_layers <= told.num_matmuls <= 2 * num_layers
    assert_gradients_equal_float64(narrow_and_wide, args, fusionfix_memory_budget=1)


def test_what_is_dropped_is_said_once():
    """What the decisions win together is what the later executors save less, within what is too small to look at."""
    traces(tower, arguments(TOWER), ENTRY, fusionfix_memory_budget=1)
    (report,) = fusionfix_ex.reports
    won = sum(decision.bytes_won for decision in applied())
    assert won == pytest.approx(report.saved_before_bytes - report.saved_after_bytes, rel=0.1)


def test_budget_that_is_not_met_names_what_holds_the_peak():
    """In MB, beside how far the entry went and what that came to."""
    traces(gated_mlp, arguments(TOWER[:4]), ENTRY, fusionfix_memory_budget=1)
    (report,) = fusionfix_ex.reports
    (decision,) = (one for one in report.decisions if one.pass_name == "memory_budget")
    told = report.budget
    assert not told.is_met and not decision.applied and told.peak_bytes <= told.before_bytes
    assert told.num_trials <= 1 + len(RUNGS) + BISECTIONS == 8
    assert re.search(r"does not fit; the peak holds \w+ \([\d.]+ MB, ", decision.reason)
    assert f"by {told.num_rebuilds} rebuild(s) that repeat {told.num_matmuls} matmul(s)" in decision.what


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 8), min_size=STEPS + 2, max_size=STEPS + 2),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_search_keeps_the_law_for_any_peaks(peaks, limits):
    """Whatever the parts come to, a lower limit ends at no higher peak, and one that the default or a rung fits is met."""

    class Trials:
        before_bytes = peaks[NOTHING]

        def run(self, parts=0):
            return SimpleNamespace(peak_bytes=peaks[parts])

    low, high = (joint_pipeline.searched(limit, Trials()).peak_bytes for limit in sorted(limits))
    assert low <= high
    assert high <= max(limits) or high == min(peaks[parts] for parts in (NOTHING, 0, *RUNGS))


def test_budget_does_without_a_plan_that_later_executors_fail_on(monkeypatch):
    """Thunder's rematerialization fails on some traces. Such a plan is undone; those that work stay, and the step goes on."""
    dry_run, calls = joint_pipeline._dry_run, []

    def fails_on_a_rung(*args):
        calls.append(args)
        if len(calls) == 3:  # after the trace itself and the default
            raise KeyError("t150")
        return dry_run(*args)

    monkeypatch.setattr(joint_pipeline, "_dry_run", fails_on_a_rung)
    args, options = arguments(TOWER[:7]), {"fusionfix_memory_budget": 1, "fusionfix_strict": False}
    assert_gradients_equal_float64(tower, args, **options)
    (report,) = fusionfix_ex.reports
    assert len(calls) > 3 and report.kept_input is None
    assert report.budget.num_rebuilds and report.budget.peak_bytes < report.budget.before_bytes
    calls.clear()
    with pytest.raises(FusionFixError, match="t150"):
        traces(tower, args, fusionfix_memory_budget=1)


def test_budget_repeats_matmuls_of_one_layer_and_gradients_stay():
    """Under a budget of nothing the MLP's projections are computed again, each layer from its own input."""
    args = arguments(TOWER[:7])
    options = {"fusionfix_memory_budget": 1}
    forward, backward = traces(tower, args, ENTRY, **options)
    assert saved(forward) < saved(traces(tower, args, ENTRY)[0])
    plain = counts(traces(tower, args, PLAIN)[1], "linear", "matmul")
    assert plain < counts(backward, "linear", "matmul") <= plain + 2 * 2
    assert_gradients_equal_float64(tower, args, **options)

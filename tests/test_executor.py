"""The entry "fusionfix": its registration, options, fuel, order in the list, claims, and what it does when anything is in doubt."""

from __future__ import annotations

import warnings

import pytest
import thunder
import torch
import torch.nn.functional as F
from cpu_nvfuser import nvfuser_on_cpu
from programs import random_program
from runs import assert_equal, copied, distance, run

import thunder_fusionfix  # noqa: F401
from thunder_fusionfix import executor, joint_pipeline
from thunder_fusionfix._thunder import FUEL_LEVEL, OperatorExecutor, get_executor, ltorch, nvfuser_version
from thunder_fusionfix.errors import FusionFixError, UsageError, VerifyError
from thunder_fusionfix.executor import FusionFixExecutor, fusionfix_ex
from thunder_fusionfix.folding import COPY_LIMIT
from thunder_fusionfix.passes import recompute_cheap
from thunder_fusionfix.transform import FusionFixTransform

needs_nvfuser = pytest.mark.skipif(nvfuser_version() is None, reason="nvFuser is not installed")
ENTRY = ("fusionfix", "nvfuser")
ALL = {"fusionfix_strict": True, "fusionfix_recompute_min_bytes": 0}


def gated_mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def mlp_args(*shape: int) -> list[torch.Tensor]:
    shapes = [shape or (3, 6, 8), (12, 8), (12, 8), (8, 12)]
    return [torch.randn(one, requires_grad=True) for one in shapes]


def compiled(fn, args, executors=ENTRY, fusion_type="dataflow", **options):
    """The final forward and backward text of ``fn``, once it has run forward."""
    with nvfuser_on_cpu():
        jitted = thunder.jit(fn, executors=executors, fusion_type=fusion_type, **options)
        jitted(*args)
        backward = thunder.last_backward_traces(jitted)
        return str(thunder.last_traces(jitted)[-1]), str(backward[-1]) if backward else ""


def decisions(name: str | None = None):
    return [one for report in fusionfix_ex.reports for one in report.decisions if name in (None, one.pass_name)]


@pytest.fixture(autouse=True)
def _fresh():
    fusionfix_ex.reports.clear()
    executor._warned.clear()
    joint_pipeline._warned.clear()
    yield
    fusionfix_ex.set_fuel(FUEL_LEVEL.UNLIMITED)


# ---------------------------------------------------------------- what Thunder sees


def test_import_registers_the_entry_by_name() -> None:
    """Thunder finds it as "fusionfix"; it claims ops and sees traces."""
    assert get_executor("fusionfix") is fusionfix_ex
    assert not fusionfix_ex.can_fuse(None)  # type: ignore[arg-type]


def test_entry_works_without_nvfuser() -> None:
    """With torch alone, what is saved shrinks where that pays, and gradients are eager's."""
    args = mlp_args()
    want = run(gated_mlp, copied(args), None)
    got = run(gated_mlp, copied(args), "dataflow", executors=("fusionfix", "torch"), **ALL)
    assert_equal(got, want)
    (report,) = fusionfix_ex.reports
    assert report.kept_input is None and report.dry_run_seconds < report.seconds


@needs_nvfuser
@pytest.mark.parametrize("order", [ENTRY, ("nvfuser", "fusionfix")])
def test_either_order_gives_the_same_numbers(order) -> None:
    """Behind nvFuser the entry finds less to do, and does no harm."""
    args = mlp_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equal(
            run(gated_mlp, copied(args), "dataflow", executors=order, **ALL), run(gated_mlp, copied(args), None)
        )


@needs_nvfuser
@pytest.mark.parametrize("order", [ENTRY, ("nvfuser", "fusionfix"), ("fusionfix", "torch"), ("fusionfix",)])
def test_budget_works_in_any_order_and_without_nvfuser(order) -> None:
    """Outputs and gradients are eager's in float64, and less is saved; without gradients the report says that nothing is to be won."""

    def twice(x, *weights):
        return gated_mlp(gated_mlp(x, *weights) + x, *weights)

    args = [torch.randn(shape, requires_grad=True) for shape in [(64, 32), (96, 32), (96, 32), (32, 96)]]
    want = run(twice, [arg.detach().double().requires_grad_() for arg in args], None)
    got = run(twice, copied(args), "dataflow", executors=order, **ALL, fusionfix_memory_budget=1)
    assert all(distance(got[name], value) < 1e-5 for name, value in want.items())
    report = fusionfix_ex.reports[-1]
    assert report.budget is not None and report.saved_after_bytes < report.saved_before_bytes
    frozen = [arg.detach() for arg in args]
    out = run(twice, frozen, "dataflow", executors=order, **ALL, fusionfix_memory_budget=1)
    assert distance(out["output 0"], want["output 0"]) < 1e-5
    assert fusionfix_ex.reports[-1].budget is None
    assert "no gradient" in decisions("memory_budget")[-1].reason


@needs_nvfuser
def test_entry_behind_nvfuser_says_what_is_lost() -> None:
    """One warning, that names the right order."""
    args = mlp_args()
    with pytest.warns(UserWarning, match='put "fusionfix" before "nvfuser"'):
        compiled(gated_mlp, args, ("nvfuser", "fusionfix"))


def test_executor_with_gradient_rules_of_its_own_must_come_first() -> None:
    """A claim hides rules of executors behind it; the warning names the executor."""
    other = OperatorExecutor("own_linear")
    symbol = other.register_operator("own_linear_op", like=ltorch.linear, fn=F.linear)
    other.register_implementation(ltorch.linear, symbol, grad_transform=lambda x, w, bias=None: None)
    executor_list = (fusionfix_ex, other)
    with pytest.warns(UserWarning, match='put "own_linear" before "fusionfix"'):
        executor._warn_of_order(executor_list)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        executor._warn_of_order((other, fusionfix_ex))


# ---------------------------------------------------------------- claims


@needs_nvfuser
def test_products_of_nd_and_2d_tensors_are_claimed_and_others_are_not() -> None:
    """A claim shows its limits and has no sub-symbols; 2-D products stay torch's."""
    forward, backward = compiled(gated_mlp, mlp_args())
    assert forward.count(f", None, {COPY_LIMIT}, 0)") == 3 and "prims.linear" not in forward
    assert "fusionfix_matmul" not in backward and "torch.matmul" in backward
    forward, _ = compiled(gated_mlp, mlp_args(6, 8))
    assert "fusionfix_linear" not in forward
    fold = decisions("fold_matmuls")
    assert len(fold) == 1 and "3 product(s)" in fold[0].what


@needs_nvfuser
def test_claims_can_be_switched_off_and_obey_the_budget() -> None:
    """No claim with the option off; no copies where the user asked for memory."""
    forward, _ = compiled(gated_mlp, mlp_args(), fusionfix_fold_matmuls=False)
    assert "fusionfix_linear" not in forward
    forward, _ = compiled(gated_mlp, mlp_args(), fusionfix_memory_budget="1GB")
    assert ", None, 0, 0)" in forward


@needs_nvfuser
def test_matmul_of_both_sides_is_claimed_in_inference() -> None:
    """N-D @ 2-D and 2-D @ N-D, by the ltorch id."""

    def both(x, w):
        return x @ w, w @ x.mT

    x, w = torch.randn(6, 4, 8).transpose(0, 1), torch.randn(8, 8)
    forward, _ = compiled(both, (x, w))
    assert forward.count("= fusionfix_matmul(") == 2
    assert_equal(run(both, (x, w), "dataflow", executors=ENTRY), run(both, (x, w), None))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_trained_frozen_and_autocast_linears_agree_with_eager(dtype: torch.dtype) -> None:
    """Forward and gradients of a sequence-first linear layer, as near to float64 as eager is."""
    x = torch.randn(7, 1, 16).transpose(0, 1).to(dtype)
    for trained in (True, False):
        for cast in (True, False):
            if cast and dtype is not torch.float32:
                continue
            layer = torch.nn.Linear(16, 12).to(dtype).requires_grad_(trained)
            results = []
            for fn in (layer, thunder.jit(layer, executors=("fusionfix", "torch"))):
                leaf = x.clone().requires_grad_()
                with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                    out = fn(leaf)
                out.sum().backward()
                results.append([out.detach(), leaf.grad, *(p.grad for p in layer.parameters() if trained)])
                layer.zero_grad()
            tolerance = 2e-2 if cast or dtype is torch.bfloat16 else 1e-5
            for want, got in zip(*results, strict=True):
                torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- fuel and options


@needs_nvfuser
def test_fuel_bounds_the_rewrites() -> None:
    """None, one, all: by the option and by `set_fuel`; what is burnt is gone."""

    def applied(**options) -> int:
        fusionfix_ex.reports.clear()
        compiled(gated_mlp, mlp_args(), **ALL, **options)
        return sum(one.applied for one in decisions() if one.pass_name != "fold_matmuls")

    every = applied()
    assert every >= 1
    assert applied(fusionfix_entry_fuel=0) == 0
    assert applied(fusionfix_entry_fuel=1) == 1
    fusionfix_ex.set_fuel(every)
    assert applied() == every
    assert applied() == 0 and not fusionfix_ex.get_fuel()


def test_fuel_comes_from_the_environment_and_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number there is the bound; a negative one is an error."""
    monkeypatch.setenv(executor.FUEL_VARIABLE, "2")
    fresh = FusionFixExecutor()
    assert fresh.get_fuel(2) and not fresh.get_fuel()
    with pytest.raises(ValueError, match=">= 0"):
        fresh.set_fuel(-1)


@needs_nvfuser
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"fusionfix_memory_budget": "lots"}, "memory_budget: 'lots' is no size"),
        ({"fusionfix_memroy_budget": "1GB"}, "no option 'memroy_budget'; its options are .*memory_budget"),
    ],
)
def test_wrong_option_is_told_by_name(option, message) -> None:
    """A budget that is no size, and a name that is no option, fail as they do with the transform."""
    with pytest.raises(UsageError, match=message):
        compiled(gated_mlp, mlp_args(), **option)


# ---------------------------------------------------------------- doubt


@needs_nvfuser
def test_failing_pass_costs_the_optimisation_and_not_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours: one warning, the trace as it was, the right numbers; an error under strict."""

    def broken(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(joint_pipeline, "plan_recompute_cheap", broken)
    args = mlp_args()
    with pytest.warns(UserWarning, match="broken on purpose"):
        compiled(gated_mlp, args)
    assert fusionfix_ex.reports[-1].kept_input is not None
    with pytest.raises(FusionFixError, match="^pass `recompute_cheap`, joint: RuntimeError: broken on purpose"):
        compiled(gated_mlp, args, fusionfix_strict=True)


@needs_nvfuser
def test_wrong_plan_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone that takes another tensor than its original is found by the verifier; the input trace is kept."""
    real = recompute_cheap._Writer.clone

    def swapped(self, site, place, is_claimed):
        real(self, site, place, is_claimed)
        last = self.inserts[-1]
        names = tuple((old, new if "%" in new else "x") for old, new in last.what.names)
        self.inserts[-1] = type(last)(last.before, type(last.what)(last.what.site, names, last.what.is_claimed))

    def square(x, w):
        return F.linear(F.linear(x, w).exp() * F.linear(x, w * 2).sin(), w)

    args = [torch.randn(3, 8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)]
    compiled(square, args, **{**ALL, "fusionfix_strict": False})
    assert fusionfix_ex.reports[-1].kept_input is None
    assert any(one.applied for one in decisions("recompute_cheap"))
    fusionfix_ex.reports.clear()
    monkeypatch.setattr(recompute_cheap._Writer, "clone", swapped)
    with pytest.warns(UserWarning, match="undone"):
        compiled(square, args, fusionfix_recompute_min_bytes=0)
    assert fusionfix_ex.reports[-1].kept_input is not None
    assert not any(one.applied for one in decisions("recompute_cheap"))
    with pytest.raises(VerifyError, match="^pass `recompute_cheap`.*, joint: "):
        compiled(square, args, **ALL)


@needs_nvfuser
def test_plan_that_makes_thunder_read_overwritten_memory_is_not_kept() -> None:
    """Program 93: with other candidates, Thunder's rematerialization would read an argument that the forward has overwritten."""
    program = random_program(93)
    want = run(program.fn, copied(program.args), "dataflow")
    got = run(program.fn, copied(program.args), "dataflow", executors=ENTRY, **ALL)
    assert_equal(got, want, 0.0)
    assert any("at another moment" in (report.kept_input or "") for report in fusionfix_ex.reports)


@needs_nvfuser
@pytest.mark.parametrize("seed", [41, 205])
@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
def test_random_programs_agree_to_the_last_bit(seed: int, fusion_type: str) -> None:
    """Views, in-place ops, random draws and late joins: with the entry as without it, also under a budget of nothing."""
    program = random_program(seed)
    want = run(program.fn, copied(program.args), fusion_type)
    for budget in ({}, {"fusionfix_memory_budget": 1}):
        got = run(program.fn, copied(program.args), fusion_type, executors=ENTRY, **ALL, **budget)
        assert_equal(got, want, 0.0)


# ---------------------------------------------------------------- with the transform


def with_transform(fix, **options):
    with nvfuser_on_cpu():
        jitted = thunder.jit(
            gated_mlp, executors=("fusionfix", "nvfuser"), fusion_type="dataflow", transforms=[fix], **options
        )
        jitted(*mlp_args())


@needs_nvfuser
def test_options_of_the_transform_reach_the_entry():
    """One place for options: what the transform was given holds before the fusions too, and wins over what Thunder was given."""
    for minimum, fires in ((0, True), (2**20, False)):
        fix = FusionFixTransform(recompute_min_bytes=minimum, strict=True)
        with_transform(fix, fusionfix_recompute_min_bytes=2**20 - minimum)
        (report,) = fix.entry_reports
        assert any(one.applied and one.pass_name == "recompute_cheap" for one in report.decisions) == fires


@needs_nvfuser
def test_report_of_the_transform_has_what_the_entry_did():
    """One report for both: the entry's part comes first, with its decisions and their reasons."""
    fix = FusionFixTransform(recompute_min_bytes=0, strict=True)
    with_transform(fix)
    text = fix.report()
    assert text.startswith('joint trace, by the entry "fusionfix": saved for the backward')
    assert (
        "is made again from" in text and "forward trace: peak" in text and fix.entry_reports[0] in fusionfix_ex.reports
    )


# ---------------------------------------------------------------- a budget with the transform


def causal_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As of Hugging Face: cast, cut off the last position, flatten."""
    cut = logits.float()[:, :-1].contiguous()
    return torch.nn.functional.cross_entropy(cut.view(-1, cut.shape[-1]), labels[:, 1:].reshape(-1))


@needs_nvfuser
def test_budget_reckons_with_what_the_transform_will_do() -> None:
    """Its estimate of the loss is lower where our transform gets the final traces, by the float32 copies that leave the fusion."""
    args = [torch.randn(2, 65, 512, dtype=torch.bfloat16, requires_grad=True), torch.randint(512, (2, 65))]
    peaks = []
    for transforms in ((), (FusionFixTransform(strict=True),)):
        run(causal_loss, copied(args), "dataflow", *transforms, executors=ENTRY, fusionfix_memory_budget=1)
        budget = fusionfix_ex.reports[-1].budget
        assert budget is not None
        peaks.append(budget.before_bytes)
    copy = 2 * 64 * 512 * 4
    assert peaks[1] <= peaks[0] - copy

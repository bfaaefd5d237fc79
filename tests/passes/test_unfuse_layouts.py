"""unfuse_layouts on traces with nvFuser's real regions: what moves, what stays and why, and that the numbers are the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import thunder
import torch
import torch.nn.functional as F
from cpu_nvfuser import nvfuser_on_cpu
from runs import assert_same_as_plain

from thunder_fusionfix._thunder import nvfuser_version
from thunder_fusionfix.capture import capture
from thunder_fusionfix.model import Report
from thunder_fusionfix.passes.unfuse_layouts import counted_layouts
from thunder_fusionfix.transform import FusionFixTransform

pytestmark = pytest.mark.skipif(nvfuser_version() is None, reason="nvFuser is not installed")

VOCAB = 11


def cut_loss(logits, labels):
    ahead = logits.float()[..., :-1, :].contiguous().view(-1, VOCAB)
    return F.cross_entropy(ahead, labels[..., 1:].contiguous().view(-1))


def reports_of(fn: Callable, args: Sequence[torch.Tensor], **options) -> dict[str, Report]:
    """The report of each stage of ``fn``, traced as on a GPU."""
    fix = FusionFixTransform(strict=True, **options)
    capture(fn, list(args), transforms=[fix], fusion_type="dataflow")
    return {report.stage: report for report in fix.reports}


def layouts_left(report: Report) -> list[str]:
    return [subop.id for op in report.graph_after.ops if op.is_fusion for subop in counted_layouts(op)]


def logits_and_labels(batch: int, seq: int = 6) -> list[torch.Tensor]:
    logits = torch.empty(batch, seq, VOCAB, dtype=torch.bfloat16, requires_grad=True)
    return [logits, torch.zeros(batch, seq, dtype=torch.int64)]


# ---------------------------------------------------------------- what moves


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_loss_any_batch_keeps_no_layout_in_its_regions(batch):
    """The causal-LM loss casts views of the stored logits: no layout op is left in a region, at any batch."""
    for report in reports_of(cut_loss, logits_and_labels(batch)).values():
        assert layouts_left(report) == []
        assert report.after.peak_bytes <= report.before.peak_bytes


def test_loss_batch_one_takes_the_pad_inside_and_the_reshape_outside():
    """A reshape that adds a batch of one moves past the pad of the rows."""
    after = reports_of(cut_loss, logits_and_labels(1))["backward"].graph_after
    region = next(op for op in after.ops if op.is_fusion)
    assert [subop.id for subop in region.subops][-2:] == ["prims.convert_element_type", "prims.pad"]


def test_loss_batch_two_takes_the_pad_outside():
    """A pad that the reshape cannot pass leaves together with the reshape."""
    after = reports_of(cut_loss, logits_and_labels(2))["backward"].graph_after
    region = next(op for op in after.ops if op.is_fusion)
    assert all(subop.id != "prims.pad" for subop in region.subops)
    assert any("pad" in op.id for op in after.ops if not op.is_fusion)


def test_transposed_output_is_sunk():
    """A region gives the computed tensor; its transpose is a view outside."""

    def fn(x, w):
        return (x.exp() * 2).t() @ w

    report = reports_of(fn, [torch.empty(4, 5), torch.empty(4, 3)])["inference"]
    assert layouts_left(report) == []


def test_expand_that_feeds_compute_stays_with_a_reason():
    """nvFuser reads an expand in registers: it stays, and the report says why."""

    def fn(x, bias):
        return (x + bias).relu() * 2

    report = reports_of(fn, [torch.empty(4, 5), torch.empty(5)])["inference"]
    kept = [decision for decision in report.decisions if not decision.applied]
    assert layouts_left(report) == ["prims.broadcast_in_dim"]
    assert "expand that feeds compute" in kept[0].reason


def test_every_layout_that_is_left_has_a_reason():
    """No layout op stays in a region without a decision that names it."""

    def fn(x, w):
        y = torch.softmax(x.reshape(2, 3, 4).transpose(1, 2).float(), -1)
        return (y.transpose(0, 1) * w).reshape(-1).exp()

    for report in reports_of(fn, [torch.empty(6, 4), torch.empty(2, 3)]).values():
        named = {decision.what.split(" = ")[0] for decision in report.decisions if not decision.applied}
        for op in report.graph_after.ops:
            for subop in counted_layouts(op) if op.is_fusion else ():
                assert subop.outputs[0] in named or subop.outputs[0] not in report.graph_before.values


def test_shape_only_regions_are_dissolved():
    """With shape-only fusion on, a region of nothing but layouts is gone afterwards."""

    def fn(x, w):
        return x.reshape(6, 4).t() @ w

    fix = FusionFixTransform(strict=True)
    capture(fn, [torch.empty(2, 3, 4), torch.empty(6, 3)], transforms=[fix], nv_enable_shape_only_fusion=True)
    before, after = fix.reports[0].graph_before, fix.reports[0].graph_after
    assert any(op.is_fusion for op in before.ops)
    assert not any(op.is_fusion for op in after.ops)


def test_input_that_is_written_later_is_not_hoisted():
    """A view of what an op changes in place would show the change: such layouts stay."""

    def fn(state):
        flipped = (state.t() + 1).exp()
        state.copy_(flipped.t() * 2)
        return flipped

    for report in reports_of(fn, [torch.empty(4, 4)]).values():
        assert not any(decision.applied for decision in report.decisions)


def test_fuel_bounds_the_rewrites():
    """``fuel=n`` applies at most n rewrites, so that a wrong result can be bisected."""
    applied = [
        sum(
            decision.applied
            for report in reports_of(cut_loss, logits_and_labels(1), fuel=fuel).values()
            for decision in report.decisions
        )
        for fuel in (0, 1)
    ]
    assert applied == [0, 2]  # one for each trace


def test_trace_without_regions_is_the_same_object():
    """Where there is no region the trace passes through untouched and no report is kept."""
    fix = FusionFixTransform()
    captured = capture(lambda a, b: a @ b, [torch.empty(2, 3), torch.empty(3, 2)], transforms=[fix])
    assert fix.reports == [] and captured.forward is not None


# ---------------------------------------------------------------- that the numbers are the same


def lifts(x, w):
    y = torch.exp(x[:, :-1].reshape(-1, x.shape[-1]) * 0.5)
    return y.sum(1), w * 2


def casts_around_transposes(x, g):
    y = x.double().transpose(1, 2)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
    y = y.to(x.dtype) * g
    return y.transpose(1, 2).flatten(2), y.transpose(-1, -2).double().sum(-1)


def passengers(x, w):
    return (x * 2).sum(), x.t() @ w, x.reshape(-1)[:5] * 3


def passengers_of_passengers(x):
    z = x.t()
    return torch.addmm(
        x.sum(0), x @ z.t().t(), z.t()
    )  # its region gives the last transpose before the one it is made of


def slices_in_a_loop(x, w):
    return torch.cat([F.gelu(part @ w) for part in x.split(2)], 0)


PROGRAMS = {
    "lifts": (lifts, [(3, 5, 4), (4,)]),
    "casts": (casts_around_transposes, [(2, 5, 3, 4), (3, 1, 4)]),
    "passengers": (passengers, [(4, 6), (4, 3)]),
    "passengers of passengers": (passengers_of_passengers, [(4, 6)]),
    "slices": (slices_in_a_loop, [(6, 4), (4, 3)]),
    "loss": (lambda x: cut_loss(x, torch.remainder(torch.arange(12).view(1, 12), VOCAB)), [(1, 12, VOCAB)]),
}


@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_gives_what_plain_thunder_gives(name, fusion_type):
    """Outputs and every gradient are plain Thunder's, and the pass did something."""
    fn, shapes = PROGRAMS[name]
    args = [torch.randn(shape, requires_grad=True) for shape in shapes]
    fix = assert_same_as_plain(fn, args, fusion_type)
    assert name in ("slices", "passengers") or any(
        decision.applied for report in fix.reports for decision in report.decisions
    )


UNARY = (torch.exp, torch.tanh, torch.neg, lambda t: t.double(), lambda t: t.float(), lambda t: t * 0.5)


def random_program(seed: int) -> tuple[Callable, list[torch.Tensor]]:
    """A program of layouts, casts, elementwise ops, reductions and a matmul, in an order that the seed draws."""
    shape = random.Random(seed).choice([(2, 3, 4), (1, 4, 6), (3, 2, 2, 4)])

    def fn(x, w):
        rng = random.Random(seed)
        outputs, value, base_numel = [], x, x.numel()
        for _ in range(rng.randint(4, 9)):
            move = rng.randint(0, 7)
            if move == 0 and value.ndim > 1:
                dims = list(range(value.ndim))
                rng.shuffle(dims)
                value = value.permute(dims)
            elif move == 1 and value.numel() % 2 == 0:
                value = value.reshape(2, -1)
            elif move == 2 and value.ndim > 1:
                value = value.flatten(0, 1)
            elif move == 3 and value.shape[0] > 1:
                value = value[: value.shape[0] - 1] if rng.random() < 0.5 else value[1:]
            elif move == 4 and value.ndim > 1:
                value = value - value.mean(-1, keepdim=True)
            elif move == 5:
                value = value.unsqueeze(rng.randint(0, value.ndim)) if value.ndim < 5 else value.squeeze()
            else:
                value = rng.choice(UNARY)(value)
            if rng.random() < 0.3:
                outputs.append(value)
        flat = value.reshape(-1).float()
        outputs.append(F.pad(flat, (0, 2))[: flat.shape[0]] * w)
        outputs.append((flat.reshape(1, -1) @ flat.reshape(-1, 1)).sum() + base_numel)
        return tuple(outputs)

    return fn, [torch.randn(shape, requires_grad=True), torch.randn((), requires_grad=True)]


@pytest.mark.parametrize("seed", range(30))
def test_random_program_gives_what_plain_thunder_gives(seed):
    """Random chains of layouts, casts, elementwise ops and reductions compute the same with and without the pass."""
    torch.manual_seed(seed)
    fn, args = random_program(seed)
    assert_same_as_plain(fn, args, "dataflow" if seed % 2 else "consecutive")


# ---------------------------------------------------------------- found by trying to break it


def copy_that_is_returned(x):
    copied = x.t().contiguous()
    return copied, copied * 2


def value_in_two_regions(x, w):
    def inner(h):
        return torch.tanh(h.t().exp().reshape(4, 3) @ w).t()

    return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False) * 2


def padded_on_two_dims(x):
    return F.pad((x * 3).t(), (1, 2, 3, 1), value=-2.5)


def padded_then_cast(x):
    return F.pad((x * 3).t(), (1, 2), value=0.0).to(torch.int64), F.pad((x * 3).reshape(2, 2, 3), (1, 2)).to(torch.bool)


@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
@pytest.mark.parametrize("fn", [copy_that_is_returned, value_in_two_regions, padded_on_two_dims, padded_then_cast])
def test_program_that_once_broke_gives_what_plain_thunder_gives(fn, fusion_type):
    """Returned copies, values that several regions rebuild, pads on two dims and pads before integer casts."""
    shapes = [(4, 3)] if fn is padded_then_cast else [(3, 4), (3, 3)][: 2 if fn is value_in_two_regions else 1]
    assert_same_as_plain(fn, [torch.randn(shape, requires_grad=True) for shape in shapes], fusion_type)


@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
def test_permute_sinks_past_a_pad_of_several_dims(fusion_type):
    """A padded transpose is the transpose of a pad, also where both dims are padded."""

    def fn(x, w):
        return F.pad(torch.exp(x).t(), (1, 2, 3, 1), value=-2.5) @ w

    fix = assert_same_as_plain(fn, [torch.randn(3, 4), torch.randn(6, 5)], fusion_type)
    assert any("sunk transpose" in one.what and one.applied for report in fix.reports for one in report.decisions)


def test_copy_that_is_returned_shares_no_memory_with_the_argument():
    """``contiguous`` of a transposed argument is a copy, also where the region computes with it."""
    x = torch.randn(3, 4)
    with nvfuser_on_cpu():
        copied, _ = thunder.jit(
            copy_that_is_returned, executors=("nvfuser",), transforms=[FusionFixTransform(strict=True)]
        )(x)
    assert copied.is_contiguous()
    assert copied.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def copies_of_copies(x):
    """Thunder makes one value of the first two."""
    first, second = x.contiguous(), x.contiguous()
    return first, second.contiguous().view(-1), x.exp()


def copies_of_transposes(x):
    first, second = x.t().contiguous(), x.t().contiguous()
    return first, second.contiguous().t(), x.exp()


ENTRIES = [((), True), (("fusionfix",), False), (("fusionfix",), True)]
WAYS = pytest.mark.parametrize(("entry", "passes"), ENTRIES, ids=["transform", "entry", "both"])


def jitted_as(fn: Callable, entry: Sequence[str], passes: bool) -> Callable:
    transforms = [FusionFixTransform(strict=True)] if passes else []
    return thunder.jit(fn, executors=(*entry, "nvfuser"), transforms=transforms)


@WAYS
@pytest.mark.parametrize("fn", [copies_of_copies, copies_of_transposes])
def test_copies_that_are_returned_share_memory_with_nothing(fn, entry, passes):
    """In eager neither do they; ``contiguous`` of what another output is would give that output."""
    x = torch.randn(4, 4) if fn is copies_of_transposes else torch.randn(4, 4).t()
    with nvfuser_on_cpu():
        memory = {one.untyped_storage().data_ptr() for one in (x, *jitted_as(fn, entry, passes)(x))}
    assert len(memory) == 4


@WAYS
def test_copy_that_is_returned_may_be_written_to(entry, passes):
    """Autograd takes no writes to views that a function of its gives, and a cut of rows would be one."""

    def fn(x):
        return x[1:].contiguous(), x + 1

    leaf = torch.randn(4, 4, requires_grad=True)
    with nvfuser_on_cpu():
        cut, more = jitted_as(fn, entry, passes)(leaf * 2)
        cut.mul_(3)
        (cut.sum() + more.sum()).backward()
    expected = torch.full((4, 4), 8.0)
    expected[0] = 2.0
    torch.testing.assert_close(leaf.grad, expected)


@WAYS
def test_copy_that_only_the_trace_takes_is_made_where_it_has_to_be(entry, passes):
    """Torch's ``contiguous`` looks at the tensor that it is given; Thunder's own op copies in any case."""

    def fn(x):
        return x.t().contiguous() @ x, x.exp()

    x = torch.randn(4, 4)
    with nvfuser_on_cpu():
        jitted = jitted_as(fn, entry, passes)
        torch.testing.assert_close(jitted(x), fn(x))
    assert "contiguous" in [bsym.sym.name for bsym in thunder.last_traces(jitted)[-1].bound_symbols]

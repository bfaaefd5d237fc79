"""Laws of `widen_losses`: a loss of 16-bit logits is nvFuser's, as near to float64 as eager's, and all other losses are as they were."""

from __future__ import annotations

import cpu_nvfuser
import pytest
import thunder
import torch
import torch.nn.functional as F
from cpu_nvfuser import nvfuser_on_cpu
from runs import distance

from thunder_fusionfix._thunder import nvfuser_version
from thunder_fusionfix.transform import FusionFixTransform

pytestmark = pytest.mark.skipif(nvfuser_version() is None, reason="nvFuser is not installed")
ENTRY = ("fusionfix", "nvfuser")
CLASSES = 37


def data(dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (4 * torch.randn(batch, 24 // batch, CLASSES)).to(dtype)
    labels = torch.randint(0, CLASSES, (batch, 24 // batch))
    labels[0, 2:5] = -100
    return logits, labels


def flat(logits, labels, **options):
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), **options)


def next_token(logits, labels):
    return F.cross_entropy(logits[:, :-1].contiguous().view(-1, CLASSES), labels[:, 1:].reshape(-1))


def outcome(fn, logits, labels, executors=None, **options):
    """Loss, gradient, and the names of all ops of the final traces, those inside of regions included."""
    x = logits.detach().clone().requires_grad_()
    if executors is None:
        loss = fn(x, labels)
        loss.backward()
        return loss.detach(), x.grad, ()
    with nvfuser_on_cpu():
        jitted = thunder.jit(fn, executors=executors, **options)
        loss = jitted(x, labels)
        loss.backward()
        traces = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
    ops = [sub for trace in traces for bsym in trace.bound_symbols for sub in (bsym, *bsym.subsymbols)]
    return loss.detach(), x.grad, [op.sym.name for op in ops]


CASES = [
    (flat, 1, False),
    (flat, 3, False),
    (flat, 3, True),
    (next_token, 1, False),
    (next_token, 1, True),
    (next_token, 3, True),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("fn", "batch", "transforms"), CASES)
def test_a_loss_of_16_bits_is_nvfusers_and_as_exact_as_eagers(fn, batch, transforms, dtype):
    """Loss and gradient in the logits' dtype, as far from float64 as their rounding, and eager no nearer."""
    logits, labels = data(dtype, batch)
    passes = [FusionFixTransform(strict=True, cut_rows_min_bytes=0)] if transforms else []
    loss, gradient, names = outcome(fn, logits, labels, ENTRY, transforms=passes)
    assert cpu_nvfuser.calls
    assert {"nv_cross_entropy_fwd", "nv_cross_entropy_bwd"} <= set(names)
    assert not {"log_softmax", "nll_loss", "torch_nll_loss_backward_impl"} & set(names)
    assert (loss.dtype, gradient.dtype) == (dtype, dtype)
    exact = outcome(fn, logits.double(), labels)
    eager = outcome(fn, logits, labels)
    rounding = torch.finfo(dtype).eps / 2
    for got, want, other in zip((loss, gradient), exact, eager):
        assert distance(got, want) <= max(rounding, distance(other, want))


def test_its_backward_makes_no_second_tensor_of_the_logits_size():
    """Beside the gradient; the backward of a negative log likelihood gives one to that of the log-softmax."""
    logits, labels = data()

    def made(**options) -> int:
        with nvfuser_on_cpu():
            jitted = thunder.jit(flat, executors=ENTRY, **options)
            jitted(logits.detach().requires_grad_(), labels)
            ops = thunder.last_backward_traces(jitted)[-1].bound_symbols
        computed = [op for op in ops if op.sym.is_fusion or "nll_loss" in op.sym.name]
        return sum(out.numel == logits.numel() for op in computed for out in op.flat_proxy_outs)

    assert (made(), made(fusionfix_widen_losses=False)) == (1, 2)


LEFT = {
    "label smoothing": {"label_smoothing": 0.1},
    "weights": {"weight": torch.rand(CLASSES, dtype=torch.bfloat16)},
    "ignored class": {"ignore_index": 3},
    "no reduction": {"reduction": "none"},
}


@pytest.mark.parametrize("name", LEFT)
def test_other_losses_are_traced_as_they_were(name):
    """nvFuser's own cross entropy does not take them in float32 either."""
    logits, labels = data()
    labels[labels < 0] = 0

    def traced(**options) -> list[str]:
        with nvfuser_on_cpu():
            jitted = thunder.jit(lambda x, y: flat(x, y, **LEFT[name]), executors=ENTRY, **options)
            jitted(logits, labels)
            return [bsym.sym.name for bsym in thunder.last_traces(jitted)[0].bound_symbols]

    assert traced() == traced(fusionfix_widen_losses=False)
    assert "to" not in traced()


@pytest.mark.parametrize(
    ("dtype", "executors", "options"),
    [
        (torch.float32, ENTRY, {}),
        (torch.bfloat16, ("nvfuser",), {}),
        (torch.bfloat16, ("fusionfix",), {}),
        (torch.bfloat16, ENTRY, {"fusionfix_widen_losses": False}),
    ],
    ids=["float32", "without the entry", "without nvFuser", "switched off"],
)
def test_a_loss_is_widened_where_that_is_asked_for_and_pays(dtype, executors, options):
    """No cast of the whole logits where nvFuser would not fuse it."""
    logits, labels = data(dtype)
    with nvfuser_on_cpu():
        jitted = thunder.jit(flat, executors=executors, **options)
        jitted(logits.detach().requires_grad_(), labels)
        assert "to" not in [bsym.sym.name for bsym in thunder.last_traces(jitted)[0].bound_symbols]


def prompt_cut(logits, labels):
    return F.cross_entropy(logits[:, 4:].contiguous().view(-1, CLASSES), labels[:, 4:].reshape(-1))


def classes_cut(logits, labels):
    return F.cross_entropy(logits[..., :-1].reshape(-1, CLASSES - 1), labels.view(-1).clamp(max=CLASSES - 2))


def turned(logits, labels):
    return F.cross_entropy(logits.transpose(0, 1).reshape(-1, CLASSES), labels.t().reshape(-1))


def computed(logits, labels):
    return next_token(logits * 2, labels)


@pytest.mark.parametrize(
    ("fn", "batch", "options", "widened"),
    [
        (next_token, 3, {"cut_rows_min_bytes": 0}, True),
        (next_token, 3, {}, False),  # too small for the pass
        (next_token, 3, None, False),  # no transform, no pass
        (next_token, 3, {"cut_rows_min_bytes": 0, "ignore_cut_rows": False}, False),
        (next_token, 3, {"cut_rows_min_bytes": 0, "fuel": 1}, False),  # nobody knows for what it will do
        (prompt_cut, 3, {"cut_rows_min_bytes": 0}, False),  # half of the rows
        (classes_cut, 3, {"cut_rows_min_bytes": 0}, False),
        (computed, 3, {}, False),
        (computed, 1, {}, True),
        (prompt_cut, 1, {}, True),
        (turned, 3, {}, False),
    ],
)
def test_a_cut_loss_is_widened_where_nvfuser_can_compile_its_backward(fn, batch, options, widened):
    """nvFuser 0.2.36 fails on rows that are cut out of two sequences, and a pass mends that, or does not."""
    logits, labels = data(batch=batch)
    passes = [] if options is None else [FusionFixTransform(**options)]
    names = outcome(fn, logits, labels, ENTRY, transforms=passes)[2]
    assert ("nv_cross_entropy_fwd" in names) == widened


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_labels_that_eager_refuses_are_refused(dtype):
    """nvFuser's own cross entropy would take them."""
    logits, labels = data()
    labels = labels.clamp(0, 1).to(dtype)
    for executors in (None, ("nvfuser",), ENTRY):
        with pytest.raises(RuntimeError, match="Long"):
            outcome(flat, logits, labels, executors)


def test_arguments_may_come_by_name():
    """As torch takes them."""
    logits, labels = data()

    def fn(x, y):
        return F.cross_entropy(input=x.view(-1, CLASSES), target=y.view(-1), ignore_index=-100, reduction="mean")

    _, gradient, names = outcome(fn, logits, labels, ENTRY)
    assert "nv_cross_entropy_fwd" in names
    assert distance(gradient, outcome(flat, logits.double(), labels)[1]) < 5e-3

"""What the entry traces otherwise, on a GPU: addmm as a linear layer, and losses of 16-bit logits in float32."""

from __future__ import annotations

import pytest
import thunder
import torch
import torch.nn.functional as F
from runs import distance

from thunder_fusionfix.transform import FusionFixTransform

pytestmark = pytest.mark.gpu
ENTRY = ("fusionfix", "nvfuser")


def both(fn):
    return thunder.jit(fn, executors=ENTRY, transforms=[FusionFixTransform()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_addmm_is_the_same_product(dtype):
    """The forward bit for bit, and gradients that are no further from float64 than eager's."""
    torch.manual_seed(0)
    args = [torch.randn(shape, device="cuda", dtype=dtype) for shape in ((1536,), (640, 512), (512, 1536))]
    weight = torch.randn(640, 1536, device="cuda", dtype=dtype)

    def outcome(fn, wide: bool = False):
        leaves = [(arg.double() if wide else arg).detach().requires_grad_() for arg in args]
        out = fn(*leaves)
        (out * weight.to(out.dtype)).sum().backward()
        return out.detach(), [leaf.grad for leaf in leaves]

    fn = lambda bias, x, w: torch.addmm(bias, x, w)
    (out, got), (eager, theirs), (_, exact) = outcome(both(fn)), outcome(fn), outcome(fn, wide=True)
    assert torch.equal(out, eager)
    for gradient, other, want in zip(got, theirs, exact, strict=True):
        assert distance(gradient, want) <= 1.1 * distance(other, want) + 1e-7
        assert gradient.stride() == other.stride()


@pytest.mark.parametrize("cut", [False, True], ids=["all rows", "next token"])
@pytest.mark.parametrize("classes", [1000, 50257])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_of_16_bits_is_exact_and_makes_its_gradient_alone(dtype, batch, classes, cut):
    """No further from float64 than eager's, with ignored labels; beside its gradient the backward makes no tensor of that size."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(batch, 1024, classes, device="cuda")).to(dtype)
    labels = torch.randint(0, classes, (batch, 1024), device="cuda")
    labels[:, 3:7] = -100

    def fn(x, y):
        if cut:
            x, y = x[:, :-1].contiguous(), y[:, 1:].contiguous()
        return F.cross_entropy(x.view(-1, classes), y.view(-1))

    def outcome(fn, x):
        x = x.detach().requires_grad_()
        loss = fn(x, labels)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss.backward()
        return loss.detach(), x.grad, torch.cuda.max_memory_allocated() - before

    compiled = both(fn)
    outcome(compiled, logits)
    *got, needed = outcome(compiled, logits)
    *eager, _ = outcome(fn, logits)
    *exact, _ = outcome(fn, logits.double())
    rounding = torch.finfo(dtype).eps / 2
    for mine, other, want in zip(got, eager, exact, strict=True):
        assert mine.dtype is dtype
        assert distance(mine, want) <= max(rounding, distance(other, want))
    if classes > 1000:  # smaller logits are cut as they were
        assert needed <= 1.05 * logits.nbytes

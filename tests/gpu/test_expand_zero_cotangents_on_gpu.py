"""A large output that backward is not called on costs a step nothing but one zero, with nvFuser's own kernels."""

from __future__ import annotations

import pytest
import thunder
import torch
from thunder.dynamo import ThunderCompiler

from thunder_fusionfix import FusionFixTransform

pytestmark = pytest.mark.gpu

ROWS, WIDTH, WIDE = 4096, 256, 32768
LOGITS_BYTES = ROWS * WIDE * 2


class Beside(torch.nn.Module):
    """A loss and its logits; the backward's own tensors are made in pieces, so that the zeros' share of the peak is seen."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDE, bias=False)

    def forward(self, x):
        hidden = torch.nn.functional.silu(self.first(x))
        logits = self.second(hidden)
        return logits.float().square().mean() + hidden.float().sum() * 1e-3, logits


def trained(way, uses_logits=False, executors=("sdpa", "nvfuser"), **options):
    """Gradients of a second step, and the most that its backward allocated; ``way`` None is eager."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Beside().to("cuda", torch.bfloat16)
    transforms = [FusionFixTransform(strict=True, **options)]
    step = model
    if way == "thunderfx":
        step = torch.compile(model, backend=ThunderCompiler(executors=executors, transforms=transforms))
    elif way == "jit":
        step = thunder.jit(model, executors=executors, transforms=transforms)
    x = torch.randn(ROWS, WIDTH, device="cuda").bfloat16()
    for _ in range(2):  # the first one compiles
        model.zero_grad()
        loss, logits = step(x)
        if uses_logits:
            loss = loss + logits.float().mean()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), [weight.grad for weight in model.parameters()]


@pytest.mark.parametrize("executors", [("sdpa", "nvfuser"), ("fusionfix", "sdpa", "nvfuser")], ids=["plain", "entry"])
@pytest.mark.parametrize("way", ["thunderfx", "jit"])
def test_logits_that_nobody_uses_get_no_zeros(way, executors):
    """The peak falls by most of their size, and the gradients are eager's."""
    without, gradients_without = trained(way, executors=executors, expand_zero_cotangents=False)
    with_it, gradients = trained(way, executors=executors)
    assert without - with_it > 0.8 * LOGITS_BYTES
    _, eager = trained(None)
    for got, plain, want in zip(gradients, gradients_without, eager, strict=True):
        assert torch.equal(got, plain)
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-3)


@pytest.mark.parametrize("way", ["thunderfx", "jit"])
def test_logits_that_are_used_get_their_gradient(way):
    """The same traces; nvFuser compiles for dense ones too."""
    _, gradients = trained(way, uses_logits=True)
    _, eager = trained(None, uses_logits=True)
    for got, want in zip(gradients, eager, strict=True):
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-3)

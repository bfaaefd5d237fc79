"""The gradient between two parts is freed after its last use, as the allocator sees it."""

from __future__ import annotations

import pytest
import torch
from thunder.dynamo import ThunderCompiler

from thunder_fusionfix import FusionFixTransform

pytestmark = pytest.mark.gpu

ROWS, WIDTH, NARROW, WIDE = 2048, 1024, 64, 16384
GRADIENT = ROWS * WIDE * 2  # bytes of what one part gives the other


def backward_peak(**options):
    """Bytes that the backward needs above what there was before it, the loss, and the gradients.

    The first part's backward makes two more tensors of the gradient's size, long after the last use of the gradient.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(WIDTH, WIDE),
        torch.nn.GELU(),
        torch.nn.Linear(WIDE, NARROW),
        torch.nn.Linear(NARROW, WIDE),
    ]
    first = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)

    def step(x):
        logits = first(x)
        torch._dynamo.graph_break()
        return logits.float().logsumexp(-1).sum()

    backend = ThunderCompiler(executors=("sdpa", "nvfuser"), transforms=[FusionFixTransform(strict=True, **options)])
    compiled, x = torch.compile(step, backend=backend), torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):  # the first one compiles
        first.zero_grad()
        loss = compiled(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, loss.detach(), [weight.grad for weight in first.parameters()]


def test_own_cotangents_frees_the_gradient_between_two_parts():
    """The same numbers, and a peak that is lower by the gradient."""
    with_it, loss, gradients = backward_peak()
    without, loss_without, gradients_without = backward_peak(own_cotangents=False)
    assert torch.equal(loss, loss_without)
    for got, want in zip(gradients, gradients_without, strict=True):
        torch.testing.assert_close(got, want)
    assert with_it <= without - 0.9 * GRADIENT

"""The gradient between two parts is taken over from the engine where nvFuser made it."""

from __future__ import annotations

import pytest
import torch
from thunder.dynamo import ThunderCompiler

from thunder_fusionfix import FusionFixTransform, cotangents

pytestmark = pytest.mark.gpu

ROWS, WIDTH, WIDE = 2048, 1024, 16384


def step_of(first):
    """A program that ThunderFX cuts in two; the gradient between the parts is [ROWS, WIDE], in the second part's backward a view."""

    def step(x):
        logits = first(x)
        torch._dynamo.graph_break()
        logits = logits.view(2, ROWS // 2, WIDE)[:, :-1].contiguous().view(-1, WIDE)
        return logits.float().logsumexp(-1).sum()

    return step


def trained(**options):
    """The loss and the gradients of a second step, and the most that its backward allocated."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.SiLU(), torch.nn.Linear(WIDTH, WIDE))
    first = first.to("cuda", torch.bfloat16)
    backend = ThunderCompiler(executors=("sdpa", "nvfuser"), transforms=[FusionFixTransform(strict=True, **options)])
    compiled, x = torch.compile(step_of(first), backend=backend), torch.randn(ROWS, WIDTH, device="cuda").bfloat16()
    for _ in range(2):  # the first one compiles
        first.zero_grad()
        loss = compiled(x)
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), loss.detach(), [weight.grad for weight in first.parameters()]


def test_own_cotangents_takes_over_the_gradient_between_two_parts(monkeypatch):
    """In each of both steps, from nvFuser's own kernels; the numbers are the same, and no more memory is needed."""
    taken, take = [], cotangents._take
    monkeypatch.setattr(cotangents, "_take", lambda given, at: (taken.append(given[at].nbytes), take(given, at)))
    with_it, loss, gradients = trained()
    assert taken == 2 * [ROWS * WIDE * 2]
    without, loss_without, gradients_without = trained(own_cotangents=False)
    assert len(taken) == 2 and with_it <= without
    assert torch.equal(loss, loss_without)
    for got, want in zip(gradients, gradients_without, strict=True):
        torch.testing.assert_close(got, want)

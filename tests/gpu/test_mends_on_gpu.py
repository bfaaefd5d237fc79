"""What importing the package mends in Thunder, on a GPU: losses that nvFuser's rule for `cross_entropy` was not written for."""

from __future__ import annotations

import pytest
import thunder
import torch
import torch.nn.functional as F

import thunder_fusionfix

pytestmark = pytest.mark.gpu

OPTIONS = {
    "plain": {},
    "label smoothing": {"label_smoothing": 0.1},
    "class weights": {"weight": "weights"},
    "ignored label": {"ignore_index": 3},
}


@pytest.mark.parametrize("transforms", [False, True], ids=["plain", "fixed"])
@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize(
    ("dtype", "classes", "bound"),
    [(torch.float32, 1000, 1e-5), (torch.bfloat16, 1000, 1e-2), (torch.bfloat16, 50257, 1e-2)],
    ids=str,
)
def test_cross_entropy_and_its_gradient_are_those_of_eager(dtype, classes, bound, name, transforms):
    """Against eager in float64 on the same numbers; bfloat16 by the rounding of its results."""
    torch.manual_seed(0)
    logits = torch.randn(96, classes, device="cuda").to(dtype)
    labels = torch.randint(0, classes, (96,), device="cuda")
    labels[:5] = 3
    weights = torch.rand(classes, device="cuda").to(dtype) + 0.5

    def outcome(compiled: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = (one.detach() if compiled else one.double() for one in (logits, weights))
        x = x.requires_grad_()
        options = {key: w if value == "weights" else value for key, value in OPTIONS[name].items()}

        def loss(x, y, options):
            return F.cross_entropy(x, y, **options)

        passes = [thunder_fusionfix.FusionFixTransform()] if transforms else []
        fn = thunder.jit(loss, executors=["nvfuser"], transforms=passes) if compiled else loss
        out = fn(x, labels, options)
        (grad,) = torch.autograd.grad(out, x)
        return out.detach().double(), grad.double()

    for got, want in zip(outcome(True), outcome(False), strict=True):
        assert torch.linalg.vector_norm(got - want) <= bound * torch.linalg.vector_norm(want)

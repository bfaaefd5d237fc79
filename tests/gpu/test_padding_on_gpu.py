"""Padded products on a GPU: the operators' own decisions, through Thunder and in a CUDA graph."""

from __future__ import annotations

import pytest
import thunder
import torch
import torch.nn.functional as F

import thunder_fusionfix  # noqa: F401
from thunder_fusionfix import products
from thunder_fusionfix.folding import COPY_LIMIT
from thunder_fusionfix.padding import PAD_LIMIT
from thunder_fusionfix.passes.fold_matmuls import fusionfix_linear

pytestmark = pytest.mark.gpu


def layer(x, w, bias):
    return F.linear(x, w, bias)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return (torch.linalg.vector_norm(got.double() - want) / torch.linalg.vector_norm(want)).item()


def results(fn, args, grad):
    leaves = [arg.detach().clone().requires_grad_() for arg in args]
    out = fn(*leaves)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.filterwarnings(
    "ignore:Attempting to run cuBLAS"
)  # the first product of a process may be one of autograd's thread
def test_a_vocabulary_of_50257_is_padded_forward_and_backward(monkeypatch) -> None:
    """All three products of the layer run padded; output and gradients are no further from float64 than plain Thunder's."""
    seen = []
    real = products.multiplied
    monkeypatch.setattr(products, "multiplied", lambda *args: seen.append(args[-1]) or real(*args))
    x = torch.randn(1, 1024, 768, device="cuda", dtype=torch.bfloat16)
    w, bias = (torch.randn(50257, *rest, device="cuda", dtype=torch.bfloat16) * 768**-0.5 for rest in ((768,), ()))
    grad = torch.randn(1, 1024, 50257, device="cuda", dtype=torch.bfloat16)
    want = results(layer, [one.double() for one in (x, w, bias)], grad)
    plain = results(thunder.jit(layer, executors=("torch",)), (x, w, bias), grad)
    padded = results(thunder.jit(layer, executors=("fusionfix", "torch")), (x, w, bias), grad)
    assert len(seen) == 3
    for exact, reference, got in zip(want, plain, padded, strict=True):
        assert relative(got, exact) < max(1.1 * relative(reference, exact), 2e-3)


def test_a_cuda_graph_records_padded_products() -> None:
    """Replayed with other numbers in the same memory, the graph gives their product."""
    x = torch.randn(8192, 768, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(50257, 768, device="cuda", dtype=torch.bfloat16) * 768**-0.5
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        fusionfix_linear(x, w, None, COPY_LIMIT, PAD_LIMIT)
        with torch.cuda.graph(graph):
            out = fusionfix_linear(x, w, None, COPY_LIMIT, PAD_LIMIT)
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert relative(out[:64], x[:64].double() @ w.t().double()) < 3e-3

"""`share` with nvFuser's own kernels."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch
from thunder.core import dtypes, prims
from thunder.core.devices import Device
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx

from thunder_fusionfix import share
from thunder_fusionfix._thunder import nvfuser_impl, replaced

pytestmark = pytest.mark.gpu


def gated(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for weight in weights:
        x = (torch.sigmoid(x) * x - 0.5) @ weight + x
    return x


def step(fn: Callable, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    inputs = [each.detach().clone().requires_grad_() for each in inputs]
    result = fn(*inputs)
    result.sum().backward()
    return [result.detach(), *(each.grad for each in inputs)]


@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
def test_nvfuser_kernels_of_equal_layers_compile_once(fusion_type: str) -> None:
    """Six layers take no more fusions than four, and results and gradients are bit for bit those of plain Thunder."""
    torch.manual_seed(0)
    counts = {}
    for num_layers in (4, 6):
        gc.collect()
        inputs = [0.05 * torch.randn(256, 256, device="cuda") for _ in range(num_layers + 1)]
        options = {"executors": ("nvfuser",), "fusion_type": fusion_type}
        before = share.sharing().get("nvFuser", (0, 0))
        fn = thunder.jit(gated, **options, fusionfix_share_fusions=True)
        shared = step(fn, inputs)
        regions, counts[num_layers] = (now - then for now, then in zip(share.sharing()["nvFuser"], before))
        plain = step(thunder.jit(gated, **options), inputs)
        assert regions > counts[num_layers] > 0
        assert all(map(torch.equal, shared, plain))
        del fn
    assert counts[4] == counts[6]


def region(first: str, second: str) -> Any:
    """The callable of ``exp(a) - b`` on CUDA tensors, called with its inputs in the given order."""
    impl = nvfuser_impl()
    trace = TraceCtx(None)
    with tracectx(trace):
        inputs = {
            name: TensorProxy(f"{first}{name}", shape=(512, 512), dtype=dtypes.float32, device=Device("cuda:0"))
            for name in (first, second)
        }
        result = prims.sub(prims.exp(inputs["a"]), inputs["b"])
    with replaced(share, "is_wanted", lambda: True):
        return impl.create_fusion_definition_wrapper(trace.bound_symbols, first, list(inputs.values()), [result])


def test_nvfuser_regions_called_first_at_once_from_two_threads() -> None:
    """One definition, compiled by whoever comes first, and everyone's own results; also with other strides meanwhile."""
    a, b = torch.rand(512, 512, device="cuda"), torch.rand(512, 512, device="cuda")
    expected, expected_transposed = a.exp() - b, a.t().exp() - b
    one, other = region("a", "b"), region("b", "a")
    start = threading.Barrier(2)
    wrong: list[str] = []

    def run(call: Callable, order: int) -> None:
        start.wait()
        for _ in range(20):
            for left, result in ((a, expected), (a.t(), expected_transposed)):
                found = call(*(left, b)[::order])[0]
                torch.cuda.synchronize()
                if not torch.allclose(found, result):
                    wrong.append(f"order {order}")

    threads = [threading.Thread(target=run, args=(one, 1)), threading.Thread(target=run, args=(other, -1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert one.last_used is other.last_used


def test_nvfuser_shared_fusion_keeps_no_memory() -> None:
    """What a call took and gave is free once the caller lets it go, while the shared fusion lives on."""
    one, other = region("a", "b"), region("b", "a")
    args = [torch.rand(512, 512, device="cuda") for _ in range(2)]
    one(*args), other(*args)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    results = [one(*args), other(*args)]
    assert torch.cuda.memory_allocated() - before == 2 * 512 * 512 * 4
    del results
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    del args
    gc.collect()
    assert torch.cuda.memory_allocated() == before - 2 * 512 * 512 * 4

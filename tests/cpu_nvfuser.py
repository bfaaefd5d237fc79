"""Runs Thunder's real nvFuser fusion pass for CPU tensors, and the fusions with torch, op by op.

nvFuser takes CUDA tensors only and compiles for a GPU; which ops it fuses, merges, rematerializes and names is decided in
Python, from shapes, dtypes and devices. Here its checks are told that a CPU is as good, and a fusion, when called, is defined for
nvFuser itself, which checks ops, shapes and dtypes, and then runs the torch implementations of its sub-ops in order. So programs are
executed with the regions that nvFuser would get, and a region that nvFuser cannot take fails. nvFuser's
own cross entropy, which torch does not have, is written out here as its definition in Thunder has it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.passes import transform_for_execution
from thunder.executors.torchex import ex as torch_executor
from thunder.extend import OperatorExecutor

from thunder_fusionfix._thunder import nvfuser_registered, replaced

calls: list[str] = []  # the fusions that ran, by annotation, for tests that want to know whether any did


@contextlib.contextmanager
def nvfuser_on_cpu() -> Iterator[Any]:
    """nvFuser's executor, fusing CPU ops and running them with torch while the context is open; None without nvFuser."""
    with nvfuser_registered() as executor:
        if executor is None:
            yield None
            return
        import thunder.executors.nvfuserex_impl as impl

        supported = impl._lcdtype_to_nvdtype_map
        calls.clear()
        with (
            replaced(impl, "is_supported_device", lambda device: True),
            replaced(impl, "is_supported_devicetype", lambda devicetype: True),
            replaced(impl, "is_supported_tensor", lambda a, **kwargs: a.dtype in supported and a.ndim <= 8),
            replaced(impl, "device_supports_fp8", lambda: True),
            replaced(impl, "cpu", None),  # a definition that says "CPU tensor" for one with dims is refused
            replaced(impl, "_select_device", lambda *args: None),
            replaced(impl, "create_fusion_definition_wrapper", _interpreter),
            replaced(type(executor), "has_cuda_input_or_output", lambda self, bsym: True),
        ):
            yield executor


def _interpreter(bsyms: Sequence[Any], name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable:
    """A callable that runs ``bsyms`` with torch; made when it is first called, since most fusions never are."""
    made: list[Callable] = []

    def run(*args: torch.Tensor) -> Any:
        if not made:
            _define(bsyms, inputs, outputs, args)
            made.append(_torch_callable(bsyms, inputs, outputs))
        calls.append(name)
        with torch.no_grad():
            return made[0](*args)

    return run


def _define(bsyms: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], args: Sequence[Any]) -> None:
    """Defines the fusion as nvFuser would be asked to compile it; raises where it cannot be."""
    import thunder.executors.nvfuserex_impl as impl

    impl.create_fd(list(bsyms), impl.to_runtime_descriptors(args), list(inputs), list(outputs))


def _torch_callable(bsyms: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable:
    trace = TraceCtx(None)
    trace.args = list(inputs)
    trace.kwargs = {}
    trace.names = {proxy.name for proxy in inputs}
    with tracectx(trace):
        for proxy in inputs:
            prims.unpack_trivial(proxy, name=proxy.name)
    trace.bound_symbols += list(bsyms)
    trace.bound_symbols.append(prims.python_return.bind(list(outputs), output=None))
    trace.names |= {proxy.name for bsym in bsyms for proxy in bsym.flat_proxy_outs}
    trace._siginfo = SigInfo("region")
    trace._siginfo.args = [(proxy.name, None) for proxy in inputs]
    executors = (_losses(), torch_executor)
    return transform_for_execution(trace, executors).python_callable(include_decorators=False)


@functools.cache
def _losses() -> OperatorExecutor:
    """Runs nvFuser's two cross entropy ops with torch."""
    with nvfuser_registered():  # a module that cannot be imported outside of it on a machine without a GPU
        from thunder.executors import nvfuserex_impl as impl

    executor = OperatorExecutor("cpu_losses", version="1")
    for symbol, function in (
        (impl.nv_cross_entropy_fwd, _cross_entropy),
        (impl.nv_cross_entropy_bwd, _cross_entropy_gradient),
    ):
        made = executor.register_operator(f"cpu_{symbol.name}", meta=symbol.meta, fn=function)
        executor.register_implementation(symbol, made)
    return executor


def _cross_entropy(a, /, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing):
    is_kept = target != ignore_index
    chosen = a.gather(1, torch.where(is_kept, target, 0)[:, None])[:, 0]
    a_max = a.amax(1)
    log_sum_exp = (a - a_max[:, None]).exp().sum(1).log()
    losses = torch.where(is_kept, -(chosen - a_max - log_sum_exp), 0.0)
    count = is_kept.sum().float()
    return (losses.sum() / count).to(a.dtype), a_max.float(), log_sum_exp.float(), count


def _cross_entropy_gradient(g, a, *, target, a_max, max_log_sum_exp, valid_indices, ignore_index, label_smoothing):
    share = g / valid_indices
    softmax = (a - a_max[:, None] - max_log_sum_exp[:, None]).exp()
    is_class = torch.arange(a.shape[1])[None] == target[:, None]
    gradient = torch.where(is_class, -share, 0.0) - softmax * torch.where(
        (target != ignore_index)[:, None], -share, 0.0
    )
    return gradient.to(a.dtype)

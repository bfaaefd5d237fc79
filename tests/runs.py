"""Runs a program eagerly or under Thunder with nvFuser's regions on the CPU, and compares what two runs gave.

    plain = run(fn, copied(args), "dataflow")
    fix = FusionFixTransform(strict=True)
    assert_equal(run(fn, copied(args), "dataflow", fix), plain)

A run changes its arguments in place where the program does, so give each run its own: `copied`, or build them twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import thunder
import torch
from cases import backward_of, tensors_of
from cpu_nvfuser import nvfuser_on_cpu

from thunder_fusionfix.transform import FusionFixTransform

Results = Mapping[str, torch.Tensor]  # "output 0", "argument 1", "gradient of argument 1", "buffer seen", ...
SEED = 20_240


def copied(args: Sequence[Any]) -> list[Any]:
    """Leaves with the values of ``args`` that share no memory with them."""
    return [
        arg.detach().clone().requires_grad_(arg.requires_grad) if isinstance(arg, torch.Tensor) else arg for arg in args
    ]


def run(
    fn: Callable,
    args: Sequence[Any],
    fusion_type: str | None = "dataflow",
    *transforms: Any,
    executors: Sequence[Any] = ("nvfuser",),
    **options: Any,
) -> Results:
    """Outputs, gradients and final values of arguments and buffers of ``fn(*args)`` and of its backward.

    Args:
        fn: a function or a module.
        args: its arguments; what it changes in place stays changed.
        fusion_type: of Thunder's; None runs ``fn`` eagerly.
        transforms: for ``thunder.jit``.
        executors: for ``thunder.jit``.
        options: for ``thunder.jit``.
    """
    torch.manual_seed(SEED)
    if fusion_type is None:
        return _run(fn, fn, args)
    with nvfuser_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jitted = thunder.jit(fn, executors=executors, fusion_type=fusion_type, transforms=list(transforms), **options)
        return _run(jitted, fn, args)


def _run(compiled: Callable, fn: Callable, args: Sequence[Any]) -> Results:
    found = compiled(*args)
    outputs = tensors_of(found)
    if any(output.requires_grad for output in outputs):
        backward_of(found)
    results = {f"output {index}": output for index, output in enumerate(outputs)}
    holders = {f"argument {index}": arg for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    results |= holders
    if isinstance(fn, torch.nn.Module):
        holders |= dict(fn.named_parameters())
        results |= {f"buffer {name}": buffer for name, buffer in compiled.named_buffers()}
    results |= {f"gradient of {name}": leaf.grad for name, leaf in holders.items() if leaf.grad is not None}
    return {name: value.detach().clone() for name, value in results.items()}


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``want``, in float64; 0 for empty tensors."""
    norm = torch.linalg.vector_norm(want.double())
    return (torch.linalg.vector_norm(got.double() - want.double()) / (norm if norm > 0 else 1.0)).item()


def assert_equal(got: Results, want: Results, tolerance: float = 1e-5) -> None:
    """Fails where a result is missing, of another type, or further than ``tolerance`` away."""
    assert list(got) == list(want)
    for name, value in want.items():
        assert got[name].shape == value.shape, name
        assert got[name].dtype == value.dtype, name
        apart = distance(got[name], value)
        assert apart <= tolerance, f"{name} is {apart:.1e} away"


def assert_same_as_plain(fn: Callable, args: Sequence[Any], fusion_type: str, **options: Any) -> FusionFixTransform:
    """The transform of a strict run of ``fn``, which gave what plain Thunder gives."""
    fix = FusionFixTransform(strict=True)
    plain = run(fn, copied(args), fusion_type, **options)
    assert_equal(run(fn, copied(args), fusion_type, fix, **options), plain)
    return fix

"""Shows which ATen products a program's matmuls become: eager with and without grad, under Thunder, and with "fusionfix".

    python examples/matmul_dispatch.py                      # linear layers whose inputs have awkward strides
    python examples/matmul_dispatch.py my_model.py:build    # your own; build() gives (module or function, args[, kwargs])

The question is an old one (pytorch issue 118548): why is a model's forward ten times slower under ``no_grad``? ATen folds an N-D
input into one ``mm`` only if its strides are dense or if the weight requires grad; otherwise it expands the weight and runs one
``bmm`` with a product per leading index. Whatever Thunder executes runs under ``no_grad``, and a weight that autocast has cast
never requires grad: there the slow way is taken in training too.

No GPU is needed: what ATen is asked to do does not depend on the device. Each cell names the ATen calls that multiply, copy or
cast, in order, with the shapes that they multiply.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import thunder
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

import thunder_fusionfix  # noqa: F401  (registers the executor "fusionfix")
from thunder_fusionfix.models import Program, load_model

SHOWN = ("mm", "addmm", "bmm", "baddbmm", "clone", "_to_copy")


class Calls(TorchDispatchMode):
    """Notes the calls of `SHOWN` while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in SHOWN:
            self.seen.append(described(name, args))
        return func(*args, **(kwargs or {}))


def described(name: str, args: Any) -> str:
    shapes = ["x".join(map(str, arg.shape)) for arg in args if isinstance(arg, torch.Tensor)]
    return f"{name} {' @ '.join(shapes[-2:])}" if "mm" in name else name


def calls_of(run: Callable[[], Any]) -> str:
    """The calls that ``run()`` makes, once it has been warmed up."""
    run()
    with Calls() as calls:
        run()
    return ", ".join(calls.seen)


def run(fn: Callable, program: Program, grad: bool, autocast: bool) -> Any:
    cast = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with torch.set_grad_enabled(grad), cast:
        return fn(*program.args, **program.kwargs)


def ways(fn: Callable) -> dict[str, tuple[Callable, bool]]:
    """What to run, by name, and whether with gradients on."""
    return {
        "eager, grad": (fn, True),
        "eager, no grad": (fn, False),
        "Thunder": (thunder.jit(fn, executors=["torch"]), True),
        "Thunder, fusionfix": (thunder.jit(fn, executors=["fusionfix", "torch"]), True),
    }


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, w, b)


def linears() -> list[Program]:
    """Linear layers; the first dims of x are swapped in memory, as where sequence-first meets batch-first."""
    torch.manual_seed(0)
    frozen, bias = torch.randn(24, 16), torch.randn(24)
    trained = frozen.clone().requires_grad_()
    one = torch.randn(1, 40, 16).transpose(0, 1)  # [40, 1, 16]: dense, but for a unit dim that ATen's rule trips over
    many = torch.randn(6, 512, 16).transpose(0, 1)  # [512, 6, 16]: a fold would have to copy
    return [
        Program("x[40, 1, 16], weight trained", linear, (one, trained)),
        Program("x[40, 1, 16], weight frozen", linear, (one, frozen)),
        Program("x[512, 6, 16], weight trained", linear, (many, trained)),
        Program("x[512, 6, 16], weight frozen", linear, (many, frozen)),
        Program("x[512, 6, 16], frozen, with bias", linear, (many, frozen, bias)),
    ]


def main() -> None:
    programs = [load_model(name) for name in sys.argv[1:]] or linears()
    table = Table(title="ATen calls", show_lines=True)
    for column in ("program", "autocast", *ways(linear)):
        table.add_column(column, overflow="fold")
    for program in programs:
        for autocast in (False, True):
            cells = [calls_of(partial(run, fn, program, grad, autocast)) for fn, grad in ways(program.fn).values()]
            table.add_row(program.name, "bf16" if autocast else "off", *cells)
    Console(width=170).print(table)


if __name__ == "__main__":
    main()

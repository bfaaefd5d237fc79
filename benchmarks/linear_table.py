"""Measures linear layers on a GPU: plain Thunder, Thunder with the entry "fusionfix", and one mm or bmm by hand.

    python benchmarks/linear_table.py [--calls 20] [--out linear.json]

Each row is ``linear(x, w)`` with a strided x. *frozen*: w needs no gradient, forward only. *trained*: w and x need one,
forward and backward. *autocast*: the same in float32 under bf16 autocast, where Thunder casts w itself.

The bar is 1.1 of the better of two ways by hand (`by_hand`): *mm* folds x, *bmm* makes a product per leading index. Both do
all that the row asks for: under autocast the casts of x and w to bf16 and of the gradients back, as autocast does them.

Two times a row and column. *device* ms: what the GPU works for one call. The GPU sleeps first, until the host has queued all
calls; events around them then see no gap that the host made (`device_ms` starts over with a longer sleep where it was too
short). *host* ms: what the host takes to queue one call. A call alone takes about the larger of the two.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import thunder
import torch
import torch.nn.functional as F
from cuda_times import times
from table_file import table_file

import thunder_fusionfix  # noqa: F401  (registers the executor "fusionfix", mends Thunder under nvFuser 0.2.36)
from thunder_fusionfix.measure import GpuLock

EXECUTORS = {
    "plain": ("sdpa", "torchcompile_cat", "nvfuser"),
    "fusionfix": ("sdpa", "torchcompile_cat", "fusionfix", "nvfuser"),
}
FORMS = {"frozen": torch.float16, "trained": torch.float16, "autocast": torch.float32}  # with the dtype of x and w
WAYS = ("mm", "bmm")
BAR = 1.1

# name, shape of x, shape of w; x is made with its first two dims swapped in memory
CASES = (
    ("x[33600,1,2056] w[4112,2056]", (33600, 1, 2056), (4112, 2056)),
    ("x[2100,1,2056] w[4112,2056]", (2100, 1, 2056), (4112, 2056)),
    ("x[64,512,1024] w[4096,1024]", (64, 512, 1024), (4096, 1024)),
    ("x[512,8,1024] w[4096,1024]", (512, 8, 1024), (4096, 1024)),
)


def strided(shape: tuple[int, ...], dtype: torch.dtype, grad: bool, device: str = "cuda") -> torch.Tensor:
    """A random tensor of ``shape`` whose first two dims are swapped in memory."""
    first, second, width = shape
    base = torch.randn(second, first, width, device=device, dtype=dtype)
    return base.transpose(0, 1).detach().requires_grad_(grad)


# ---------------------------------------------------------------- what is timed


def by_hand(way: str, form: str, x: torch.Tensor, w: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The output, and but for "frozen" the gradients of x and w, all of it in the products that ``way`` names.

    Args:
        way: "mm" folds the leading dims of x; "bmm" makes one product for each index of the first.
        form: a key of `FORMS`.
        x: [a, b, k], any strides.
        w: [n, k].
        grad: of the output, [a, b, n], contiguous, in the dtype of the output.
    """
    low = torch.bfloat16 if form == "autocast" else x.dtype
    cast, weight = x.to(low), w.to(low)

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if way == "bmm":
            return torch.bmm(left, right.expand(left.shape[0], *right.shape))
        return torch.mm(left.reshape(-1, left.shape[-1]), right).view(*left.shape[:-1], -1)

    out = product(cast, weight.t())
    if form == "frozen":
        return (out,)
    grad_w = torch.mm(grad.reshape(-1, grad.shape[-1]).t(), cast.reshape(-1, x.shape[-1]))
    return out, product(grad, weight).to(x.dtype), grad_w.to(w.dtype)


def compiled(executors: tuple[str, ...], form: str, x: torch.Tensor, w: torch.Tensor, grad: torch.Tensor) -> Callable:
    """One call, or one step, of Thunder's program."""
    linear = thunder.jit(lambda x, w: F.linear(x, w), executors=executors)
    if form == "frozen":
        return lambda: linear(x, w)

    def step() -> None:
        x.grad = w.grad = None
        with torch.autocast(x.device.type, torch.bfloat16, enabled=form == "autocast"):
            out = linear(x, w)
        out.backward(grad)

    return step


def measure(case: str, form: str, x_shape: tuple[int, ...], w_shape: tuple[int, ...], calls: int) -> dict[str, Any]:
    """One row."""
    needs_grad, dtype, lock = form != "frozen", FORMS[form], GpuLock()
    torch.manual_seed(0)
    row: dict[str, Any] = {"case": case, "form": form}
    with lock.shared():
        x = strided(x_shape, dtype, needs_grad)
        w = (torch.randn(w_shape, device="cuda", dtype=dtype) * w_shape[1] ** -0.5).requires_grad_(needs_grad)
        low = torch.bfloat16 if form == "autocast" else dtype
        grad = torch.ones(*x_shape[:-1], w_shape[0], device="cuda", dtype=low)
        steps = {name: compiled(executors, form, x, w, grad) for name, executors in EXECUTORS.items()}
        for step in steps.values():
            step()
        if form == "frozen" and x.numel() < 2**25:
            want, got = F.linear(x.double(), w.double()), steps["fusionfix"]()
            row["distance"] = (torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want)).item()
            del want, got
        constant = x.detach(), w.detach(), grad
        steps |= {way: lambda way=way: by_hand(way, form, *constant) for way in WAYS}
    with lock.alone():
        row |= {name: times(step, calls) for name, step in steps.items()}
    return judged(row)


def judged(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its reference, how near to that ours comes, and the verdict."""
    best = min(WAYS, key=lambda way: row[way]["device"])
    ratio = row["fusionfix"]["device"] / row[best]["device"]
    return {**row, "best": best, "of_best": ratio, "verdict": "met" if ratio <= BAR else "missed"}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    names = (*WAYS, *EXECUTORS)
    lines = [f"{'':41}{'device ms':>{10 * len(names)}}{'of best':>10}{'':8}{'host ms':>20}"]
    lines.append(
        f"{'case':31}{'form':10}" + "".join(f"{name:>10}" for name in names) + f"{'':18}{'plain':>10}{'fusionfix':>10}"
    )
    for row in rows:
        line = f"{row['case']:31}{row['form']:10}"
        if "error" in row:
            lines.append(line + row["error"])
            continue
        line += "".join(f"{row[name]['device']:>10.3f}" for name in names)
        line += f"{row['of_best']:>10.2f} {row['verdict']:7}"
        lines.append(line + "".join(f"{row[name]['host']:>10.3f}" for name in EXECUTORS))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20, help="timed calls")
    parser.add_argument("--out")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with table_file(args.out, "linear_table") as file:
        for case, x_shape, w_shape in CASES:
            for form in FORMS:
                named = {"case": case, "form": form}
                file.add_measured(named, partial(measure, case, form, x_shape, w_shape, args.calls))
                gc.collect()
                torch.cuda.empty_cache()
    print("", table(file.rows), sep="\n")


if __name__ == "__main__":
    main()

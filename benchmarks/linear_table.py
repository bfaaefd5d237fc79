"""Measures linear layers on a GPU: plain Thunder, Thunder with the entry "fusionfix", and one mm or bmm by hand.

    python benchmarks/linear_table.py [--steps 20] [--out linear.json]

Each row is ``linear(x, w)`` with a strided x. *frozen*: w needs no gradient, forward only. *trained*: w and x need one, forward and
backward. *autocast*: the same in float32 under bf16 autocast, where Thunder casts w itself. The bar is 1.1 of the better of one `mm` of
the folded x and one `bmm` per leading index (forward), and of the three products of forward and backward done as `mm` (trained).
Times are medians in ms by CUDA events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable

import thunder
import torch
import torch.nn.functional as F

import thunder_fusionfix  # noqa: F401  (registers the executor "fusionfix", mends Thunder under nvFuser 0.2.36)

PLAIN = ("sdpa", "torchcompile_cat", "nvfuser")
ENTRY = ("sdpa", "torchcompile_cat", "fusionfix", "nvfuser")

# name, shape of x, shape of w; x is made with its first two dims swapped in memory
ROWS = (
    ("x[33600,1,2056] w[4112,2056]", (33600, 1, 2056), (4112, 2056)),
    ("x[2100,1,2056] w[4112,2056]", (2100, 1, 2056), (4112, 2056)),
    ("x[64,512,1024] w[4096,1024]", (64, 512, 1024), (4096, 1024)),
    ("x[512,8,1024] w[4096,1024]", (512, 8, 1024), (4096, 1024)),
)


def strided(shape: tuple[int, ...], dtype: torch.dtype, grad: bool = False) -> torch.Tensor:
    """A random tensor of ``shape`` whose first two dims are swapped in memory."""
    first, second, width = shape
    base = torch.randn(second, first, width, device="cuda", dtype=dtype)
    return base.transpose(0, 1).detach().requires_grad_(grad)


def median_ms(call: Callable[[], object], steps: int) -> float:
    times = []
    for _ in range(steps + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def frozen(executors: tuple[str, ...], x: torch.Tensor, w: torch.Tensor) -> Callable[[], object]:
    compiled = thunder.jit(F.linear, executors=executors)
    return lambda: compiled(x, w)


def trained(executors: tuple[str, ...], x: torch.Tensor, w: torch.Tensor, autocast: bool) -> Callable[[], object]:
    compiled = thunder.jit(lambda x, w: F.linear(x, w), executors=executors)
    grad = None

    def step() -> None:
        nonlocal grad
        x.grad = w.grad = None
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            out = compiled(x, w)
        grad = torch.ones_like(out) if grad is None else grad
        out.backward(grad)

    return step


def by_hand(x: torch.Tensor, w: torch.Tensor, steps: int) -> dict[str, float]:
    """One mm of the folded x; one bmm with a product per leading index; the three mm's of forward and backward."""
    flat, wt = x.reshape(-1, x.shape[-1]), w.t()
    grad = torch.ones(flat.shape[0], w.shape[0], device="cuda", dtype=x.dtype)

    def both() -> None:
        folded = x.reshape(-1, x.shape[-1])
        torch.mm(folded, wt)
        torch.mm(grad, w)
        torch.mm(grad.t(), folded)

    times = {
        "mm": median_ms(lambda: torch.mm(x.reshape(-1, x.shape[-1]), wt), steps),
        "mm_step": median_ms(both, steps),
    }
    times["bmm"] = median_ms(lambda: torch.bmm(x, wt.expand(x.shape[0], *wt.shape)), max(3, steps // 4))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    print(f"{'case':32}{'form':10}{'best by hand':>13}{'plain':>9}{'fusionfix':>11}{'of best':>9}")
    for name, x_shape, w_shape in ROWS:
        for form, dtype in (("frozen", torch.float16), ("trained", torch.float16), ("autocast", torch.float32)):
            needs_grad = form != "frozen"
            x = strided(x_shape, dtype, needs_grad)
            w = (torch.randn(w_shape, device="cuda", dtype=dtype) * w_shape[1] ** -0.5).requires_grad_(needs_grad)
            low = torch.bfloat16 if form == "autocast" else dtype
            hand = by_hand(x.detach().to(low), w.detach().to(low), args.steps)
            best = hand["mm_step"] if needs_grad else min(hand["mm"], hand["bmm"])
            row = {"case": name, "form": form, "by_hand": hand, "best": best}
            for label, executors in (("plain", PLAIN), ("fusionfix", ENTRY)):
                call = trained(executors, x, w, form == "autocast") if needs_grad else frozen(executors, x, w)
                call()
                steps = args.steps if median_ms(call, 1) < 20 else 3
                row[label] = median_ms(call, steps)
            want = F.linear(x.detach().double(), w.detach().double()) if x.numel() < 2**25 else None
            if want is not None and form == "frozen":
                got = frozen(ENTRY, x, w)()
                row["distance"] = (torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want)).item()
            rows.append(row)
            ratio = row["fusionfix"] / best
            print(f"{name:32}{form:10}{best:13.3f}{row['plain']:9.3f}{row['fusionfix']:11.3f}{ratio:9.2f}", flush=True)
            del x, w
            torch.cuda.empty_cache()
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()

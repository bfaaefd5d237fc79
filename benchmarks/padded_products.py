"""Measures matrix products whose rows do not start at multiples of 16 bytes: plain, always padded, and as the entry decides.

    python benchmarks/padded_products.py [--calls 20] [--out padded_products.json]

A *layer* of T tokens from K to N has three products: x @ w.T, dy @ w and dy.T @ x. *Attention* of B heads over S tokens with a head of D
has q @ k.T, P @ v and P.T @ g; "beside" says that the heads of a token lie beside each other. Columns: *plain* is torch.matmul,
*always* pads whatever is misaligned, *ours* is the operator of the entry, which decides; device ms as `cuda_times.times` takes them.
*of best* is ours in terms of the better of the two others, and the bar is 1.1 of it, for what takes at least 0.02 ms: below, launches
of the host decide. *distance* and *plain's* are relative norms of the difference to float64. *copies* are MB that ours allocated while it
ran, besides its result, as measured and as `simulate` counts them.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from cuda_times import times
from table_file import table_file

from thunder_fusionfix.folding import COPY_LIMIT
from thunder_fusionfix.matmul_copies import MATMUL, copies_of
from thunder_fusionfix.measure import GpuLock
from thunder_fusionfix.model import Op, Ref, Value
from thunder_fusionfix.padding import PAD_LIMIT, pad_what_is_misaligned
from thunder_fusionfix.passes.fold_matmuls import fusionfix_matmul
from thunder_fusionfix.products import multiplied

BAR, LEAST_MS = 1.1, 0.02
DTYPE = torch.bfloat16

# tokens, K, N: narrow models, vocabularies, classifiers, and widths that are even but no multiple of 8
LAYERS = (
    (4096, 28, 28),
    (4096, 28, 18944),
    (4096, 18944, 28),
    (4096, 28, 152064),
    (1024, 768, 50257),
    (8192, 768, 50257),
    (4096, 1000, 4001),
    (8192, 2050, 2050),
    (8192, 2052, 4100),
    (8192, 513, 513),
    (65536, 300, 300),
    (16384, 12, 1000),
    (1576, 768, 1001),
    (256, 1001, 1001),
)
# heads, tokens, width of a head
HEADS = ((28, 4096, 1), (28, 4096, 28), (12, 1024, 20), (16, 2048, 100), (32, 2048, 65), (2, 256, 6))

Operands = tuple[torch.Tensor, torch.Tensor]


def layer_products(tokens: int, depth: int, num_out: int, device: str = "cuda") -> dict[str, Operands]:
    """The three products of a linear layer, by name."""
    x, w, dy = (
        torch.randn(shape, device=device, dtype=DTYPE)
        for shape in ((tokens, depth), (num_out, depth), (tokens, num_out))
    )
    return {"x @ w.T": (x, w.t()), "dy @ w": (dy, w), "dy.T @ x": (dy.t(), x)}


def attention_products(heads: int, length: int, width: int, device: str = "cuda") -> dict[str, Operands]:
    """The products of attention, by name; of the scores twice, for heads apart and beside each other."""
    q = torch.randn(heads, length, width, device=device, dtype=DTYPE)
    beside = torch.randn(length, heads, width, device=device, dtype=DTYPE).transpose(0, 1)
    p = torch.rand(heads, length, length, device=device, dtype=DTYPE)
    return {"q @ k.T": (q, q.mT), "q @ k.T beside": (beside, beside.mT), "P @ v": (p, q), "P.T @ g": (p.mT, q)}


def counted_mb(left: torch.Tensor, right: torch.Tensor) -> float:
    """What `simulate` counts for the copies of the product."""
    values = {name: Value(name, tuple(one.shape), "bf16", "cuda:0") for name, one in (("l", left), ("r", right))}
    op = Op(MATMUL, (Ref("l"), Ref("r"), COPY_LIMIT, PAD_LIMIT), Ref("y"))
    return copies_of(op, values, {"l": left.stride(), "r": right.stride()}).peak_bytes / 1e6


@torch.no_grad()
def measure(case: str, product: str, left: torch.Tensor, right: torch.Tensor, calls: int) -> dict[str, Any]:
    """One row."""
    padding = pad_what_is_misaligned(left.shape, left.stride(), right.shape, right.stride())
    ways = {
        "plain": lambda: torch.matmul(left, right),
        "always": lambda: torch.matmul(left, right) if padding is None else multiplied(left, right, None, padding),
        "ours": lambda: fusionfix_matmul(left, right, COPY_LIMIT, PAD_LIMIT),
    }
    row: dict[str, Any] = {"case": case, "product": product, "counted_mb": counted_mb(left, right)}
    lock = GpuLock()
    with lock.shared():
        plain = ways["plain"]()  # its workspace is allocated once
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        ours = ways["ours"]()
        row["copies_mb"] = (torch.cuda.max_memory_allocated() - before - plain.nbytes) / 1e6
        row |= distances(plain, ours, left, right)
        del plain, ours
    with lock.alone():
        row |= {name: times(way, calls)["device"] for name, way in ways.items()}
    return judged(row)


def distances(plain: torch.Tensor, ours: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> dict[str, float]:
    """How far both results are from float64, by a few rows of each matrix."""
    rows = slice(0, left.shape[-2], -(-left.shape[-2] // 256))
    exact = left[..., rows, :].double() @ right.double()
    norm = torch.linalg.vector_norm(exact)

    def distance(found: torch.Tensor) -> float:
        return (torch.linalg.vector_norm(found[..., rows, :] - exact) / norm).item()

    return {"distance": distance(ours), "plain_distance": distance(plain)}


def judged(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with what ours is in terms of the better way, and the verdict."""
    best = min(row["plain"], row["always"])
    of_best = row["ours"] / best
    return {**row, "of_best": of_best, "verdict": "met" if of_best <= BAR or best < LEAST_MS else "missed"}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    numbers = ("plain", "always", "ours", "of best")
    head = f"{'case':24}{'product':16}" + "".join(f"{name:>9}" for name in numbers)
    lines = [
        head + f"{'':8}{'distance':>10}{'plain_s':>10}{'copies MB':>11}{'counted':>9}".replace("plain_s", "plain's")
    ]
    for row in rows:
        line = f"{row['case']:24}{row['product']:16}"
        if "error" in row:
            lines.append(line + row["error"])
            continue
        line += "".join(f"{row[name]:>9.4f}" for name in numbers[:3]) + f"{row['of_best']:>9.2f} {row['verdict']:7}"
        line += (
            f"{row['distance']:>10.1e}{row['plain_distance']:>10.1e}{row['copies_mb']:>11.1f}{row['counted_mb']:>9.1f}"
        )
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20, help="timed calls")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    cases = {f"layer {t}x{k}->{n}": (layer_products, (t, k, n)) for t, k, n in LAYERS}
    cases |= {f"attention {b}x{s}x{d}": (attention_products, (b, s, d)) for b, s, d in HEADS}
    with table_file(args.out, "padded_products") as file:
        for case, (make, sizes) in cases.items():
            for product, operands in make(*sizes).items():
                named = {"case": case, "product": product}
                file.add_measured(named, partial(measure, case, product, *operands, args.calls))
            gc.collect()
            torch.cuda.empty_cache()
    print("", table(file.rows), sep="\n")


if __name__ == "__main__":
    main()

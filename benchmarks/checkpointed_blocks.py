"""Measures transformer blocks under `torch.utils.checkpoint` on a GPU: peak memory of a training step, and time.

    python benchmarks/checkpointed_blocks.py [--blocks 8] [--variant plain fusionfix eager ...] [--out blocks.json]

Checkpointing keeps only each block's input and computes the block again in the backward pass. Thunder places the second
computation of every block at the start of the backward, where all of it is alive at once; it was reported at three times eager.

Peaks are MB (1e6) over parameters and input. Variants run one after another in one process; Thunder's compile equal fusions once
(``fusionfix_share_fusions``, which changes neither kernels nor order), else eight equal blocks take minutes to compile.
`eager, no checkpoint` is what checkpointing saves from.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from cuda_times import milliseconds
from table_file import table_file
from thunder.dynamo import ThunderCompiler
from torch import nn
from torch.utils.checkpoint import checkpoint

import thunder_fusionfix  # noqa: F401  (mends Thunder under nvFuser 0.2.36)
from thunder_fusionfix.measure import GpuLock
from thunder_fusionfix.share import install
from thunder_fusionfix.transform import FusionFixTransform

EXECUTORS = ("sdpa", "torchcompile_cat", "nvfuser")
SHARED = {"fusionfix_share_fusions": True}


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        packed = self.qkv(self.norm_attention(x)).view(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class Blocks(nn.Module):
    def __init__(self, num_blocks: int, width: int, heads: int, is_checkpointed: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(num_blocks))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x


def compiled(name: str, model: Blocks) -> tuple[Callable, FusionFixTransform | None]:
    """The model as the variant ``name`` runs it, and the transform that holds the report of ours."""
    if name == "plain":
        return torch.compile(model, backend=ThunderCompiler(executors=EXECUTORS, **SHARED)), None
    if name == "fusionfix":
        fix = FusionFixTransform(strict=True)
        return torch.compile(model, backend=ThunderCompiler(executors=EXECUTORS, transforms=[fix], **SHARED)), fix
    if name == "torch.compile":
        return torch.compile(model), None
    return model, None


VARIANTS = ("eager", "fusionfix", "plain", "torch.compile", "eager, no checkpoint")


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The row of one variant."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Blocks(args.blocks, args.width, args.heads, name != "eager, no checkpoint").bfloat16()
        x = torch.randn(args.batch, args.seq, args.width, dtype=torch.bfloat16, requires_grad=True)
    run, fix = compiled(name, model)

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        x.grad = None
        loss = run(x).float().square().mean()
        loss.backward()
        return loss.detach()

    lock = GpuLock()
    with lock.shared():
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        row: dict[str, Any] = {"variant": name, "first_step_s": time.perf_counter() - started}
        for _ in range(3):
            step()
        model.zero_grad(set_to_none=True)
        x.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        row["loss"] = step().item()
        row["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
        row["grad_norm"] = torch.linalg.vector_norm(x.grad.float()).item()
        torch.cuda.empty_cache()
    with lock.alone():
        row["ms"] = statistics.median(milliseconds(step, args.steps))
    if fix is not None:
        row["traces"] = [
            {
                "stage": report.stage,
                "predicted_mb_before": report.before.peak_bytes / 1e6,
                "predicted_mb": report.after.peak_bytes / 1e6,
                "bound_mb": report.after.lower_bound_bytes / 1e6,
                "moved": sum(decision.applied and decision.pass_name == "reorder" for decision in report.decisions),
                "seconds": report.seconds,
            }
            for report in fix.reports
        ]
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = [f"{'variant':24}{'peak MB':>10}{'ms':>9}{'first step s':>14}"]
    for row in rows:
        numbers = "" if "error" in row else f"{row['peak_mb']:10.0f}{row['ms']:9.2f}{row['first_step_s']:14.1f}"
        lines.append(f"{row['variant']:24}" + (numbers or row["error"]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--variant", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    install()
    with table_file(args.out, "checkpointed_blocks") as file:
        for name in args.variant:
            file.add_measured({"variant": name}, partial(measure, name, args))
            gc.collect()
            torch.cuda.empty_cache()
    print("", table(file.rows), sep="\n")


if __name__ == "__main__":
    main()

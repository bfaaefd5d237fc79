"""Measures the causal-LM loss alone on a GPU: extra memory in forward, peak in backward, time.

    python benchmarks/loss.py [--out loss.json] [--case 1x4096 ...]

Each case is bf16 logits [batch, seq, 152064]. `cut` is the older loss of Hugging Face models (the logits lose their last
position), `shift` the newer one (the labels are padded and shifted). Variants run one after another in one process: plain
Thunder, Thunder with the transform, the torchcompile executor, torch.compile, eager. Bytes are MB (1e6) over what was
allocated before the call.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from table_file import table_file
from thunder.dynamo import ThunderCompiler

import thunder_fusionfix  # noqa: F401  (mends Thunder under nvFuser 0.2.36)
from thunder_fusionfix.measure import GpuLock
from thunder_fusionfix.transform import FusionFixTransform

VOCAB = 152064
EXECUTORS = ("sdpa", "torchcompile_cat", "nvfuser")
WARM_UP_STEPS, TIMED_STEPS = 4, 8


def cut_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    ahead = logits.float()[..., :-1, :].contiguous().view(-1, VOCAB)
    return F.cross_entropy(ahead, labels[..., 1:].contiguous().view(-1))


def shift_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    gold = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, VOCAB), gold.view(-1), ignore_index=-100)


def variants(loss: Callable) -> dict[str, Callable[[], Callable]]:
    return {
        "plain": lambda: torch.compile(loss, backend=ThunderCompiler(executors=EXECUTORS)),
        "fusionfix": lambda: torch.compile(loss, backend=ThunderCompiler(executors=EXECUTORS, transforms=[FIX])),
        "torchcompile executor": lambda: torch.compile(
            loss, backend=ThunderCompiler(executors=("sdpa", "torchcompile"))
        ),
        "torch.compile": lambda: torch.compile(loss),
        "eager": lambda: loss,
    }


FIX = FusionFixTransform(strict=True)


def measure(fn: Callable, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Peak MB over the inputs in forward and in backward, and the median of the step in ms."""
    lock = GpuLock()
    with lock.shared():
        for _ in range(WARM_UP_STEPS):
            run_step(fn, logits, labels)
    with lock.alone():
        steps = [run_step(fn, logits, labels) for _ in range(TIMED_STEPS)]
    found = {name: max(step[name] for step in steps) for name in ("forward_mb", "backward_mb")}
    return {**found, "ms": statistics.median(step["ms"] for step in steps), "loss": steps[-1]["loss"]}


def run_step(fn: Callable, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """One forward and backward."""
    logits.grad = None
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    out = fn(logits, labels)
    forward_peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out.backward()
    end.record()
    torch.cuda.synchronize()
    return {
        "forward_mb": (forward_peak - base) / 1e6,
        "backward_mb": (torch.cuda.max_memory_allocated() - base) / 1e6,
        "ms": start.elapsed_time(end),
        "loss": out.item(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = [f"{'case':14}{'variant':24}{'forward MB':>12}{'backward MB':>13}{'ms':>8}{'grad distance':>15}"]
    for row in rows:
        head = f"{row['case']:14}{row['variant']:24}"
        lines.append(
            head + row["error"].splitlines()[0]
            if "error" in row
            else head
            + f"{row['forward_mb']:12.2f}{row['backward_mb']:13.1f}{row['ms']:8.2f}{row['grad_distance']:15.5f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument(
        "--case", nargs="*", default=["cut:1x4096", "cut:2x2048", "cut:4x1024", "shift:1x4096", "shift:2x2048"]
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with table_file(args.out, "loss") as file:
        for case in args.case:
            measure_case(case, file.add)
    print("", table(file.rows), sep="\n")


def measure_case(case: str, add: Callable[[dict[str, Any]], None]) -> None:
    """All variants of one case, as "cut:2x2048"."""
    kind, size = case.split(":")
    batch, seq = map(int, size.split("x"))
    loss = {"cut": cut_loss, "shift": shift_loss}[kind]
    torch.manual_seed(0)
    logits = torch.randn(batch, seq, VOCAB, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, VOCAB, (batch, seq), device="cuda")
    wide = logits.detach().float().requires_grad_()
    loss(wide, labels).backward()
    for name, build in variants(loss).items():
        torch._dynamo.reset()
        row: dict[str, Any] = {"case": case, "variant": name}
        try:
            row |= measure(build(), logits, labels)
            distance = torch.linalg.vector_norm(logits.grad.float() - wide.grad) / torch.linalg.vector_norm(wide.grad)
            row["grad_distance"] = distance.item()
        except Exception as error:  # noqa: BLE001 -- one variant's failure must not cost the others
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        add(row)
    del logits, labels, wide
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

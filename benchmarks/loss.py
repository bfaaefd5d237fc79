"""Measures the causal-LM loss alone on a GPU: extra memory in forward, peak in backward, time.

    python benchmarks/loss.py [--out loss.json] [--case 1x4096 ...]

Each case is bf16 logits [batch, seq, 152064]. `cut` is the older loss of Hugging Face models (the logits lose their last
position), `shift` the newer one (the labels are padded and shifted). Variants run one after another in one process: plain
Thunder, Thunder with the transform, torch.compile, eager. Bytes are MB (1e6) over what was allocated before the call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from thunder.dynamo import ThunderCompiler

import thunder_fusionfix  # noqa: F401  (mends Thunder under nvFuser 0.2.36)
from thunder_fusionfix.transform import FusionFixTransform

VOCAB = 152064
EXECUTORS = ("sdpa", "torchcompile_cat", "nvfuser")


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


def measure(fn: Callable, logits: torch.Tensor, labels: torch.Tensor, steps: int = 12) -> dict[str, float]:
    """Peak MB over the inputs in forward and in backward, and the median of the step in ms."""
    forward_mb = backward_mb = 0.0
    times = []
    for step in range(steps):
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
        if step >= 4:
            times.append(start.elapsed_time(end))
            forward_mb = max(forward_mb, (forward_peak - base) / 1e6)
            backward_mb = max(backward_mb, (torch.cuda.max_memory_allocated() - base) / 1e6)
        value = out.item()
        del out
    return {"forward_mb": forward_mb, "backward_mb": backward_mb, "ms": statistics.median(times), "loss": value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument(
        "--case", nargs="*", default=["cut:1x4096", "cut:2x2048", "cut:4x1024", "shift:1x4096", "shift:2x2048"]
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for case in args.case:
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
            row = {"case": case, "variant": name}
            try:
                row |= measure(build(), logits, labels)
                distance = torch.linalg.vector_norm(logits.grad.float() - wide.grad) / torch.linalg.vector_norm(
                    wide.grad
                )
                row["grad_distance"] = distance.item()
            except Exception as error:  # noqa: BLE001 -- one variant's failure must not cost the others
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            rows.append(row)
            print(json.dumps(row), flush=True)
        del logits, labels, wide
        torch.cuda.empty_cache()
    print(f"\n{'case':14}{'variant':24}{'forward MB':>12}{'backward MB':>13}{'ms':>8}{'grad distance':>15}")
    for row in rows:
        if "error" in row:
            print(f"{row['case']:14}{row['variant']:24}{row['error']}")
        else:
            print(
                f"{row['case']:14}{row['variant']:24}{row['forward_mb']:12.2f}{row['backward_mb']:13.1f}{row['ms']:8.2f}"
                f"{row['grad_distance']:15.5f}"
            )
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()

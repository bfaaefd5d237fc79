"""Measures Lightning Thunder issue 1337's program on a GPU: peak memory in tensors over the inputs, and time.

    python benchmarks/towers.py [--n 4096] [--towers 10] [--steps 20] [--out towers.json] [--only inference|training]

    for t0 in t0s:            # float32[n, n]
        t1 = relu(t0); t2 = t1 @ t1; t3 = relu(t2); a = t3 @ a

Thunder's fusion type "dataflow" puts all first relus into one fusion and all second ones into another, so that every tower is
alive at once. The training form is the same with gradients for `a` and every `t0`; its backward starts from a gradient of ones.

Peaks are requested bytes over what is allocated before the step (inputs and, in training, nothing else: gradients are None), in
multiples of one tensor. *bound* is what no order of the final trace's ops can go below, *predicted* what the simulator says, both
the larger of forward and backward. Variants are timed in turns within one process, medians of CUDA events.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import thunder
import torch
from cuda_times import milliseconds
from table_file import table_file

import thunder_fusionfix  # noqa: F401  (mends Thunder under nvFuser 0.2.36)
from thunder_fusionfix.measure import GpuLock
from thunder_fusionfix.model import UNPACK, Report
from thunder_fusionfix.transform import FusionFixTransform

EXECUTORS = ("sdpa", "torchcompile_cat", "nvfuser")
ROUNDS = 4  # turns in which the variants are timed

Step = Callable[[], torch.Tensor]


def towers(a: torch.Tensor, *t0s: torch.Tensor) -> torch.Tensor:
    for t0 in t0s:
        t1 = torch.relu(t0)
        t2 = t1 @ t1
        t3 = torch.relu(t2)
        a = t3 @ a
    return a


def variants() -> dict[str, tuple[Callable, FusionFixTransform | None]]:
    """The compiled program of each variant, and the transform that holds the report of ours."""
    ours = {fusion_type: FusionFixTransform(strict=True) for fusion_type in ("dataflow", "consecutive")}
    plain = {name: thunder.jit(towers, executors=EXECUTORS, fusion_type=name) for name in ours}
    fixed = {
        name: thunder.jit(towers, executors=EXECUTORS, fusion_type=name, transforms=[fix]) for name, fix in ours.items()
    }
    return {
        "plain, dataflow": (plain["dataflow"], None),
        "fusionfix, dataflow": (fixed["dataflow"], ours["dataflow"]),
        "plain, consecutive": (plain["consecutive"], None),
        "fusionfix, consecutive": (fixed["consecutive"], ours["consecutive"]),
        "torch.compile": (torch.compile(towers), None),
        "eager": (towers, None),
    }


def make_step(fn: Callable, inputs: list[torch.Tensor], ones: torch.Tensor | None) -> Step:
    """One call of the program; with ``ones``, also its backward."""

    def step() -> torch.Tensor:
        for tensor in inputs:
            tensor.grad = None
        out = fn(*inputs)
        if ones is not None:
            out.backward(ones)
        return out.detach()

    return step


def peak_bytes(step: Step, inputs: list[torch.Tensor]) -> int:
    """Requested bytes over what is there before the step."""
    for tensor in inputs:
        tensor.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def over_inputs(report: Report) -> tuple[int, int]:
    """Predicted peak and lower bound of one trace over what is there before the step: inputs and the gradient of ones."""
    graph = report.graph_after
    there = set(graph.args) | graph.held
    there |= {name for op in graph.ops if op.id == UNPACK and op.inputs == graph.args[1:2] for name in op.outputs}
    nbytes = sum(graph.values[name].nbytes or 0 for name in there if name in graph.values)
    return report.after.peak_bytes - nbytes, report.after.lower_bound_bytes - nbytes


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (torch.linalg.vector_norm(one.double() - other.double()) / torch.linalg.vector_norm(other.double())).item()


def measure(mode: str, n: int, num_towers: int, steps: int) -> Iterator[dict[str, Any]]:
    """One row for each variant."""
    lock = GpuLock()
    with lock.shared():
        prepared = prepare(mode, n, num_towers)
    times: dict[str, list[float]] = {name: [] for name, (step, _) in prepared.items() if step}
    with lock.alone():
        for _ in range(ROUNDS):
            for name, found in times.items():
                step = prepared[name][0]
                assert step is not None
                found += milliseconds(step, max(1, steps // ROUNDS))
    for name, (_, row) in prepared.items():
        yield {**row, "ms": statistics.median(times[name])} if name in times else row


def prepare(mode: str, n: int, num_towers: int) -> dict[str, tuple[Step | None, dict[str, Any]]]:
    """Each variant's step, None where it failed, and its row but for the time."""
    training = mode == "training"
    torch.manual_seed(0)
    # of this size the values neither grow nor shrink from tower to tower
    inputs = [torch.randn(n, n, device="cuda") for _ in range(num_towers + 1)]
    for tensor in inputs[1:]:
        tensor.mul_(2.5 / n)
    for tensor in inputs:
        tensor.grad = None
        tensor.requires_grad_(training)
    ones = torch.ones(n, n, device="cuda") if training else None
    tensor_bytes = n * n * 4

    made: dict[str, tuple[Step | None, dict[str, Any]]] = {}
    expected: list[torch.Tensor] = []
    built = variants()
    for name, (fn, fix) in reversed(built.items()):  # eager first: the others are compared with it
        row: dict[str, Any] = {"mode": mode, "variant": name}
        step: Step | None = make_step(fn, inputs, ones)
        try:
            got = [step(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]
            expected = expected or [tensor.clone() for tensor in got]
            row["distance"] = max(map(distance, got, expected))
            del got
            for _ in range(3):
                step()
            row["peak_tensors"] = peak_bytes(step, inputs) / tensor_bytes
        except Exception as error:  # noqa: BLE001 - one variant's failure must not cost the others
            row["error"], step = f"{type(error).__name__}: {error}"[:300], None
        if fix is not None and fix.reports:
            row["predicted_tensors"], row["bound_tensors"] = (
                max(found) / tensor_bytes for found in zip(*map(over_inputs, fix.reports), strict=True)
            )
            row["pass_seconds"] = sum(report.seconds for report in fix.reports)
        made[name] = step, row
    return {name: made[name] for name in built}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    titles = ("peak", "predicted", "bound", "ms", "distance")
    lines = [f"{'mode':12}{'variant':26}" + "".join(f"{title:>12}" for title in titles)]
    for row in rows:
        columns = [row.get(name) for name in ("peak_tensors", "predicted_tensors", "bound_tensors", "ms", "distance")]
        shown = [
            "" if value is None else f"{value:.2e}" if at == 4 else f"{value:.2f}" for at, value in enumerate(columns)
        ]
        line = f"{row['mode']:12}{row['variant']:26}" + "".join(f"{text:>12}" for text in shown)
        lines.append(line + (f"  {row['error']}" if "error" in row else ""))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--towers", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=("inference", "training"))
    parser.add_argument("--out")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    modes = [args.only] if args.only else ["inference", "training"]
    with table_file(args.out, "towers") as file:
        for mode in modes:
            for row in measure(mode, args.n, args.towers, args.steps):
                file.add(row)
            gc.collect()
            torch.cuda.empty_cache()
    print("", table(file.rows), sep="\n")


if __name__ == "__main__":
    main()

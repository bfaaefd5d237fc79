"""What a memory budget costs and whether it is met, by estimate, without a GPU.

    python benchmarks/budget.py [--model qwen2.5-7b:layers=2,hidden_size=28 ...] [--share 0.9 0.8 0.7] [--out FILE]

Each model is captured with the transform and the entry, once without a budget and once for each share of that peak as
``fusionfix_memory_budget``. A budget bounds one compiled function, so of each model the function with the highest peak is told; what
others and the optimizer need is not in it. (ThunderFX cuts GPT-2 at every addmm: its functions are parts of a layer.) "peak" is the
larger of the estimated peaks of its final forward and backward traces. "entry" is what the entry reckons with: the same before
`reorder` and `split_regions` have made it less, and with the function's results, which the caller may hold, counted all along. "rebuilds" and "matmuls", those
that are repeated, say how far it went. Where a budget is not met, what holds the peak is listed: no rebuild frees arguments, results that the caller gets,
or what one op takes and gives.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from table_file import table_file

from thunder_fusionfix.capture import Capture, capture
from thunder_fusionfix.document import megabytes
from thunder_fusionfix.executor import fusionfix_ex
from thunder_fusionfix.model import Timeline
from thunder_fusionfix.models import load_model
from thunder_fusionfix.predict import step_parts
from thunder_fusionfix.simulate import simulate
from thunder_fusionfix.transform import FusionFixTransform

EXECUTORS = ("sdpa", "torchcompile_cat", "fusionfix", "nvfuser")
MODELS = ("qwen2.5-7b:layers=4,hidden_size=28", "llama-3.2-1b:layers=4,batch=4", "gpt2:layers=4,batch=8")
SHARES = (0.9, 0.8, 0.7)
NUM_HOLDERS = 6


@dataclass(frozen=True, slots=True)
class Row:
    """One model under one budget; bytes."""

    model: str
    function: int  # which of the functions that Thunder compiles
    share: float | None  # of the peak without a budget; None: no budget
    budget: int | None
    peak: int
    entry_peak: int | None
    rebuilds: int
    matmuls: int  # that are repeated
    trials: int  # plans that were judged by a dry run
    seconds: float  # of the entry
    held: str  # what the peak holds, largest first


def sizes_of(text: str) -> tuple[str, dict[str, int]]:
    """A model's name and sizes from "gpt2:layers=2,seq=512"."""
    name, _, sizes = text.partition(":")
    pairs = (pair.split("=") for pair in sizes.split(",") if pair)
    return name, {size: int(number) for size, number in pairs}


def captured(text: str, budget: int | None) -> Capture:
    name, sizes = sizes_of(text)
    program = load_model(name, **sizes)
    options: dict[str, Any] = {} if budget is None else {"fusionfix_memory_budget": budget}
    fusionfix_ex.reports.clear()
    return capture(
        program.fn,
        program.args,
        program.kwargs,
        executors=EXECUTORS,
        transforms=[FusionFixTransform(strict=True)],
        fusionfix_strict=True,
        **options,
    )


def timelines_of(got: Capture) -> list[Timeline]:
    """For each function that Thunder compiles the higher of the timelines of its final traces."""
    compiled = {part.name for part in got.parts}
    found = []
    for part in step_parts(got):
        if part.name not in compiled:  # a piece that torch.compile gets
            continue
        both = [simulate(part.forward)]
        if part.backward is not None:
            both.append(simulate(part.backward, forward=part.forward))
        found.append(max(both, key=lambda timeline: timeline.peak_bytes))
    return found


def measured(text: str, share: float | None, first: Row | None) -> Row:
    """One model without a budget, or with ``share`` of the peak of the row without one."""
    budget = None if share is None or first is None else int(share * first.peak)
    got = captured(text, budget)
    timelines = timelines_of(got)
    index = max(range(len(timelines)), key=lambda one: timelines[one].peak_bytes) if first is None else first.function
    report, timeline = fusionfix_ex.reports[index], timelines[index]
    applied = sum(one.applied and one.pass_name == "recompute_cheap" for one in report.decisions)
    held = ", ".join(
        f"{one.name} {megabytes(one.nbytes)} MB ({one.producer})" for one in timeline.holders[:NUM_HOLDERS]
    )
    told = report.budget
    matmuls, trials, entry = (0, 0, None) if told is None else (told.num_matmuls, told.num_trials, told.peak_bytes)
    return Row(text, index, share, budget, timeline.peak_bytes, entry, applied, matmuls, trials, report.seconds, held)


def rows_of(text: str, shares: list[float]) -> list[Row]:
    first = measured(text, None, None)
    return [first, *(measured(text, share, first) for share in shares)]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    heads = ("budget MB", "peak MB", "entry MB", "rebuilds", "matmuls", "trials", "s")
    lines = [f"{'model':36} {' '.join(f'{head:>10}' for head in heads)}"]
    for row in map(_row_of, rows):
        budget, entry = ("" if size is None else megabytes(size) for size in (row.budget, row.entry_peak))
        verdict = "" if row.budget is None else "met" if row.peak <= row.budget else "missed"
        cells = (budget, megabytes(row.peak), entry, row.rebuilds, row.matmuls, row.trials, f"{row.seconds:.1f}")
        lines.append(f"{row.model:36} {' '.join(f'{cell:>10}' for cell in cells)}  {verdict}".rstrip())
        lines += [f"    held by {row.held}"] if verdict == "missed" else []
    return "\n".join(lines)


def _row_of(row: dict[str, Any]) -> Row:
    return Row(**row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=MODELS, help="a name, with sizes after a colon")
    parser.add_argument("--share", type=float, nargs="+", default=SHARES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with table_file(args.out, "budget") as file:
        for text in args.model:
            for row in rows_of(text, args.share):
                file.add(asdict(row), shown=False)
                print(table([asdict(row)]).split("\n", 1)[1], flush=True)
    print("", table(file.rows), sep="\n")


if __name__ == "__main__":
    main()

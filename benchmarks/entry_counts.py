"""What the executor entry alone changes in what nvFuser makes, without a GPU: passengers, saved bytes, launches.

    python benchmarks/entry_counts.py [--model qwen2.5-7b:layers=2 ...] [--min-bytes 0] [--only PROGRAM ...] [--out FILE]

Each model, and each program of ``tests/cases.py``, is captured for both fusion types with plain nvFuser and with the entry before it, no
transform. A *passenger* is a layout that an nvFusion makes of one of its inputs for ops outside of fusions alone. *Saved* is what the
forward keeps for the backward beside its arguments, memory that tensors share once. A *launch* is an op that runs a kernel: all
but views and bookkeeping, a fusion being one.

The bars: no passengers; no more saved; and launches at most those of plain and one for each thing that the entry gives to torch. A row
that misses one is marked, and followed by what the entry says of its function.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from table_file import table_file

from thunder_fusionfix.capture import Capture, capture
from thunder_fusionfix.executor import fusionfix_ex
from thunder_fusionfix.models import Program, load_model
from thunder_fusionfix.passes.claim_layouts import passengers_of
from thunder_fusionfix.predict import step_parts
from thunder_fusionfix.report import summarize
from thunder_fusionfix.simulate import simulate

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from cases import CASES

PLAIN = ("sdpa", "torchcompile_cat", "nvfuser")
ENTRY = ("sdpa", "torchcompile_cat", "fusionfix", "nvfuser")
FUSION_TYPES = ("dataflow", "consecutive")
MODELS = ("qwen2.5-7b:layers=2", "qwen2.5-7b:layers=2,hidden_size=28")


@dataclass(frozen=True, slots=True)
class Counts:
    """One program under one executor list, all its functions added up."""

    passengers: tuple[str, ...]
    saved_bytes: int
    launches: int


def counted(got: Capture) -> Counts:
    graphs = [graph for part in step_parts(got) for graph in (part.forward, part.backward) if graph is not None]
    summaries = [summarize(graph, simulate(graph)) for graph in graphs]
    return Counts(
        tuple(name for graph in graphs for name in passengers_of(graph)),
        sum(summary.saved_bytes or 0 for summary in summaries),
        sum(summary.num_launches for summary in summaries),
    )


def programs(models: list[str], only: list[str] | None) -> Iterator[tuple[Program, bool]]:
    """What to capture, and whether by torch.compile."""
    for text in models:
        name, _, sizes = text.partition(":")
        pairs = (pair.split("=") for pair in sizes.split(",") if pair)
        program = load_model(name, **{size: int(number) for size, number in pairs})
        yield Program(text, program.fn, program.args, program.kwargs), True
    for name, case in CASES.items():
        if only is None or name in only:
            yield Program(name, *case.build()), False


def row_of(name: str, plain: Counts, ours: Counts) -> dict[str, Any]:
    """One row: both counts, which bars are missed, and why."""
    decisions = [one for report in fusionfix_ex.reports for one in report.decisions]
    given = sum(one.applied and one.pass_name in ("claim_layouts", "recompute_cheap") for one in decisions)
    bars = {
        "passengers": bool(ours.passengers),
        "saved": ours.saved_bytes > plain.saved_bytes,
        "launches": ours.launches > plain.launches + given,
    }
    missed = [name for name, is_missed in bars.items() if is_missed]
    why = [f"carried: {carried}" for carried in ours.passengers] + [
        f"{'done' if one.applied else 'left'}: {one.pass_name}, {one.where}: {one.what} ({one.reason})"
        for one in decisions
    ]
    return {
        "name": name,
        "passengers": [len(plain.passengers), len(ours.passengers)],
        "saved_bytes": [plain.saved_bytes, ours.saved_bytes],
        "launches": [plain.launches, ours.launches],
        "given": given,
        "missed": missed,
        "why": why if missed else [],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = [f"{'':50} {'passengers':>11} {'saved bytes':>31} {'launches':>11} {'given':>5}"]
    for row in rows:
        (before, after), (saved, still), (calls, more) = row["passengers"], row["saved_bytes"], row["launches"]
        line = (
            f"{row['name']:50} {before:>5} {after:>5} {saved:>15,} {still:>15,} {calls:>5} {more:>5} {row['given']:>5}"
        )
        lines.append(f"{line}  {', '.join(row['missed'])}".rstrip())
        lines += [f"    {why}" for why in row["why"]]
    good = sum(not row["missed"] for row in rows)
    return "\n".join([*lines, f"{good} of {len(rows)} within the bars"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=MODELS, help="a name, with sizes after a colon")
    parser.add_argument("--only", nargs="+", help="of the programs of tests/cases.py")
    parser.add_argument("--min-bytes", type=int, default=2**20, help="fusionfix_recompute_min_bytes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with table_file(args.out, "entry_counts") as file:
        for program, dynamo in programs(args.model, args.only):
            for fusion_type in FUSION_TYPES:
                found = counts_of(program, fusion_type, dynamo, args.min_bytes)
                if len(found) == 2:
                    file.add(row_of(f"{program.name} {fusion_type}", *found), shown=False)
                    print(table(file.rows[-1:]).splitlines()[1], flush=True)
    print("", table(file.rows), sep="\n")


def counts_of(program: Program, fusion_type: str, dynamo: bool | None, min_bytes: int) -> list[Counts]:
    """Of plain nvFuser and of the entry before it; fewer where Thunder cannot compile the program."""
    found: list[Counts] = []
    for executors in (PLAIN, ENTRY):
        options = {"fusionfix_recompute_min_bytes": min_bytes} if executors is ENTRY else {}
        fusionfix_ex.reports.clear()
        try:
            got = capture(
                program.fn,
                program.args,
                program.kwargs,
                executors=executors,
                fusion_type=fusion_type,
                dynamo=dynamo,
                **options,
            )
        except Exception as error:  # noqa: BLE001 -- what Thunder cannot compile is no row
            print(f"{program.name} {fusion_type}: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
            return found
        found.append(counted(got))
    return found


if __name__ == "__main__":
    main()

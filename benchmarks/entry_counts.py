"""What the executor entry alone changes in what nvFuser makes, without a GPU: passengers, saved bytes, launches.

    python benchmarks/entry_counts.py [--model qwen2.5-7b:layers=2 ...] [--min-bytes 0] [--only PROGRAM ...]

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


def show(name: str, plain: Counts, ours: Counts) -> bool:
    """Prints one row; False where a bar is missed."""
    decisions = [one for report in fusionfix_ex.reports for one in report.decisions]
    given = sum(one.applied and one.pass_name in ("claim_layouts", "recompute_cheap") for one in decisions)
    missed = [
        word
        for word, is_missed in (
            ("passengers", bool(ours.passengers)),
            ("saved", ours.saved_bytes > plain.saved_bytes),
            ("launches", ours.launches > plain.launches + given),
        )
        if is_missed
    ]
    print(
        f"{name:50} {len(plain.passengers):>5} {len(ours.passengers):>5} {plain.saved_bytes:>15,} {ours.saved_bytes:>15,}"
        f" {plain.launches:>5} {ours.launches:>5} {given:>5}  {', '.join(missed)}",
        flush=True,
    )
    if missed:
        for carried in ours.passengers:
            print(f"    carried: {carried}")
        for one in decisions:
            print(f"    {'done' if one.applied else 'left'}: {one.pass_name}, {one.where}: {one.what} ({one.reason})")
    return not missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=MODELS, help="a name, with sizes after a colon")
    parser.add_argument("--only", nargs="+", help="of the programs of tests/cases.py")
    parser.add_argument("--min-bytes", type=int, default=2**20, help="fusionfix_recompute_min_bytes")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{'':50} {'passengers':>11} {'saved bytes':>31} {'launches':>11} {'given':>5}")
    rows = good = 0
    for program, dynamo in programs(args.model, args.only):
        for fusion_type in FUSION_TYPES:
            found = []
            for executors in (PLAIN, ENTRY):
                options = {"fusionfix_recompute_min_bytes": args.min_bytes} if executors is ENTRY else {}
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
                    break
                found.append(counted(got))
            if len(found) == 2:
                rows += 1
                good += show(f"{program.name} {fusion_type}", *found)
    print(f"{good} of {rows} within the bars")


if __name__ == "__main__":
    main()

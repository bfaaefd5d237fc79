"""Prints README's results from the JSON files that `fusionfix bench` wrote to docs/results/. None is typed by hand.

    python benchmarks/results_table.py                      # print
    python benchmarks/results_table.py --write README.md    # put them between the marks in README.md
    python benchmarks/results_table.py --check README.md    # exit 1 where README.md shows something else

Each goal is printed with its ratio, and a miss is called one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from thunder_fusionfix.results import Run, machine, measured_of, megabytes
from thunder_fusionfix.variants import OURS, VARIANTS

RESULTS = Path(__file__).parent.parent / "docs" / "results"
BEGIN, END = "<!-- results: python benchmarks/results_table.py --write README.md -->", "<!-- end of results -->"


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio that a variant of this project is to stay below."""

    model: str  # beginning of the results file's name
    quantity: str  # "peak" or "step"
    against: tuple[str, ...]  # variants; the first one that was measured
    at_most: float
    of_all: bool = False  # the worst variant of this project's counts, not the recommended one


RECOMMENDED = ("both", "transform", "entry")  # the first one that was measured stands for the project

GOALS = (
    Goal("qwen2.5-7b-layers28-hidden28-", "peak", ("torchcompile", "torchcompile-shared"), 0.95),
    Goal("qwen2.5-7b-layers28-hidden28-", "peak", ("plain", "plain-shared"), 0.80),
    Goal("qwen2.5-7b-layers28-hidden28-", "step", ("torchcompile", "torchcompile-shared"), 1.00),
    Goal("qwen2.5-7b-layers8-hidden28-", "peak", ("torchcompile",), 0.90),
    Goal("qwen2.5-7b-layers8-hidden28-", "peak", ("plain",), 0.82),
    Goal("qwen2.5-7b-layers8-hidden28-", "step", ("torchcompile",), 1.02),
    Goal("qwen2.5-7b-layers4-hidden3584-", "peak", ("torch-compile",), 0.90),
    Goal("qwen2.5-7b-layers4-hidden3584-", "step", ("torch-compile",), 1.00),
    Goal("", "peak", ("plain", "plain-shared"), 1.01, of_all=True),  # no model larger or slower than plain
    Goal("", "step", ("plain", "plain-shared"), 1.01, of_all=True),
)
PREDICTION_WITHIN = 0.02


def load(folder: Path) -> list[tuple[str, Run]]:
    """Every run in ``folder``, by name."""
    return [(file.stem, Run.load(file)) for file in sorted(folder.glob("*.json"))]


def table(runs: Sequence[tuple[str, Run]]) -> Iterator[str]:
    """A row for each variant of each run, with peak and step against plain Thunder's."""
    yield "| model | variant | peak MB | of plain | step ms | of plain | predicted peak | gradient distance |"
    yield "|---|---|---|---|---|---|---|---|"
    for _, run in runs:
        plain = measured_of(run, "plain") or measured_of(run, "plain-shared")
        for name, variant in VARIANTS.items():
            if name not in run.variants:
                continue
            yield f"| {run.spec.title} | {variant.label} | " + " | ".join(_cells(run, name, plain)) + " |"


def _cells(run: Run, name: str, plain: object) -> Iterator[str]:
    measured = measured_of(run, name)
    if not measured.get("peak_bytes"):
        yield from (run.variants[name].get("status", "not measured"), "-", "-", "-", "-", "-")
        return
    predicted = run.predictions.get(name, {}).get("peak_bytes")
    yield megabytes(measured["peak_bytes"])
    yield _ratio_text(_ratio("peak", measured, plain))
    yield f"{measured['step_ms']['median']:.1f}" if measured.get("step_ms") else "-"
    yield _ratio_text(_ratio("step", measured, plain))
    yield "-" if predicted is None else f"{predicted / measured['peak_bytes'] - 1:+.1%}"
    distance = measured.get("gradient_distance")
    yield "-" if distance is None else f"{distance:.1e}"


def _ratio(quantity: str, mine: object, theirs: object) -> float | None:
    top, bottom = _quantity(quantity, mine), _quantity(quantity, theirs)
    return top / bottom if top and bottom else None


def _quantity(quantity: str, measured: object) -> float | None:
    assert isinstance(measured, dict)
    if quantity == "peak":
        return measured.get("peak_bytes")
    return (measured.get("step_ms") or {}).get("median")


def _ratio_text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def goals(runs: Sequence[tuple[str, Run]]) -> Iterator[str]:
    """A row for each goal and run that it is about: which variant stands for us, its ratio, whether it is met."""
    yield "| goal | model | variant | reached | |"
    yield "|---|---|---|---|---|"
    for goal in GOALS:
        for name, run in runs:
            if not name.startswith(goal.model):
                continue
            other = next((other for other in goal.against if _quantity(goal.quantity, measured_of(run, other))), None)
            ratios = {
                mine: _ratio(goal.quantity, measured_of(run, mine), measured_of(run, other)) for mine in OURS if other
            }
            reached = {mine: ratio for mine, ratio in ratios.items() if ratio is not None}
            if not reached or other is None:
                continue
            shown = next(name for name in RECOMMENDED if name in reached)
            if goal.of_all:
                shown = max(reached, key=lambda mine: reached[mine])
            verdict = "met" if reached[shown] <= goal.at_most else "**missed**"
            aim = f"{goal.quantity} <= {goal.at_most:.2f} x {VARIANTS[other].label}"
            yield f"| {aim} | {run.spec.title} | {VARIANTS[shown].label} | {reached[shown]:.3f} | {verdict} |"


def predictions(runs: Sequence[tuple[str, Run]]) -> Iterator[str]:
    """One line on how far the predictions are off, and a line for each that is off by more than it should."""
    off = {}
    for _, run in runs:
        for name, prediction in run.predictions.items():
            peak = measured_of(run, name).get("peak_bytes")
            if peak and prediction.get("peak_bytes") and not prediction.get("is_lower_bound"):
                off[f"{run.spec.title}, {VARIANTS[name].label}"] = prediction["peak_bytes"] / peak - 1
    if not off:
        return
    good = sum(abs(miss) <= PREDICTION_WITHIN for miss in off.values())
    yield (
        f"Predicted peak within {PREDICTION_WITHIN:.0%} of the measured one: {good} of {len(off)}. Predictions that "
        "are lower bounds (Inductor's buffers inside whole functions are not counted) are left out of this count."
    )
    yield ""
    yield from (f"- **missed**: {what}: {miss:+.1%}" for what, miss in off.items() if abs(miss) > PREDICTION_WITHIN)


def text(folder: Path) -> str:
    """Everything, as Markdown."""
    runs = load(folder)
    machines = dict.fromkeys(machine(run) for _, run in runs)
    parts = [table(runs), goals(runs), predictions(runs), machines]
    return "\n\n".join("\n".join(part).strip() for part in parts).strip() + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--check", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    shown = text(args.results)
    target = args.write or args.check
    if target is None:
        print(shown, end="")
        return 0
    before = target.read_text()
    if before.count(BEGIN) != 1 or before.count(END) != 1:
        print(f"error: {target} needs one line `{BEGIN}` and one line `{END}`", file=sys.stderr)
        return 2
    head, rest = before.split(BEGIN)
    after = f"{head}{BEGIN}\n{shown}{END}{rest.split(END)[1]}"
    if args.write:
        target.write_text(after)
        return 0
    if after != before:
        print(f"{target} does not show what is in {args.results}; run with --write {target}", file=sys.stderr)
    return int(after != before)


if __name__ == "__main__":
    sys.exit(main())

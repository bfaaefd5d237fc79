"""Prints README's results from the JSON files that `fusionfix bench` wrote to docs/results/. None is typed by hand.

    python benchmarks/results_table.py                      # print
    python benchmarks/results_table.py --write README.md    # put them between the marks in README.md
    python benchmarks/results_table.py --check README.md    # exit 1 where README.md shows something else

Each goal is printed with its ratio, and a miss is called one. What was not measured, or only in part, is said to be so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thunder_fusionfix.results import OK, Run, Spec, machine, measured_of, megabytes
from thunder_fusionfix.variants import OURS, find, ordered

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

    @property
    def aim(self) -> str:
        return f"{self.quantity} <= {self.at_most:.2f}"


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
    """Every run in ``folder``: those that goals are about first, in the goals' order, then by name; those without one of ours last."""
    runs = [(file.stem, Run.load(file)) for file in sorted(folder.glob("*.json"))]
    about = [goal.model for goal in GOALS if goal.model]

    def place(named: tuple[str, Run]) -> tuple[bool, int]:
        name, run = named
        return not _has_ours(run), next((at for at, model in enumerate(about) if name.startswith(model)), len(about))

    return sorted(runs, key=place)


def _has_ours(run: Run) -> bool:
    return any(find(name).is_ours and measured_of(run, name) for name in run.variants)


def table(runs: Sequence[tuple[str, Run]]) -> Iterator[str]:
    """For each run a table, a row for each variant, with peak and step against plain Thunder's.

    Runs without a measurement of ours are a line each: what was measured for others' sake, and what failed, with the reason.
    """
    others = [run for _, run in runs if run.variants and not _has_ours(run)]
    for _, run in runs:
        if not _has_ours(run):
            continue
        plain = measured_of(run, "plain") or measured_of(run, "plain-shared")
        yield from (
            f"**{run.spec.title}**",
            "",
            "| variant | peak MB | of plain | step ms | of plain | kernels ms | predicted peak | gradient distance |",
            "|---|---|---|---|---|---|---|---|",
        )
        for name in ordered(run.variants):
            status = run.variants[name].get("status", "not measured")
            label = find(name).label + ("" if status == OK else f" ({status})")
            yield f"| {label} | " + " | ".join(_cells(run, name, plain)) + " |"
        yield ""
    for run in others:
        yield f"- {run.spec.title}: {'; '.join(_others(run))}"


def _others(run: Run) -> Iterator[str]:
    """What there is of a run without a measurement of ours: peak and step of each variant, or why there is none."""
    failed: dict[str, list[str]] = {}
    for name in ordered(run.variants):
        record, measured = run.variants[name], measured_of(run, name)
        if record.get("status") == OK:
            step = f", step {measured['step_ms']['median']:.1f} ms" if measured.get("step_ms") else ""
            yield f"{find(name).label}: peak {megabytes(measured['peak_bytes'])} MB{step}"
        else:
            reason = str(record.get("reason", "")).split(", please report")[0]
            failed.setdefault(f"{record.get('status')}, {reason}", []).append(find(name).label)
    yield from (f"{' and '.join(labels)}: {why}" for why, labels in failed.items())


def _cells(run: Run, name: str, plain: object) -> Iterator[str]:
    measured = measured_of(run, name)
    if not measured.get("peak_bytes"):
        yield from "-------"
        return
    predicted = run.predictions.get(name, {}).get("peak_bytes")
    yield megabytes(measured["peak_bytes"])
    yield _ratio_text(_ratio("peak", measured, plain))
    yield f"{measured['step_ms']['median']:.1f}" if measured.get("step_ms") else "-"
    yield _ratio_text(_ratio("step", measured, plain))
    yield f"{measured['kernel_ms']:.1f}" if measured.get("kernel_ms") else "-"
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
    """A row for each goal and run that it is about: which variant stands for us, its ratio, whether it is met.

    No variant with options of its own stands for us: one under a memory budget gives time for memory on purpose. But where ours misses,
    one that does not is shown below it, with its options.

    A goal about one model that cannot be judged is a row too, with what is missing.
    """
    yield "| goal | model | variant | reached | |"
    yield "|---|---|---|---|---|"
    for goal in GOALS:
        about = [run for name, run in runs if name.startswith(goal.model)]
        for run in about:
            yield from _goal_rows(goal, run, runs)
        if not about:
            label = find(goal.against[0]).label
            yield f"| {goal.aim} x {label} | {goal.model.removesuffix('-')} | - | - | not measured |"


def _goal_rows(goal: Goal, run: Run, runs: Sequence[tuple[str, Run]]) -> Iterator[str]:
    theirs, whose = _opponent(goal, run, runs)
    mine = {name: _quantity(goal.quantity, measured_of(run, name)) for name in OURS}
    reached = {name: value / theirs for name, value in mine.items() if value and theirs}
    if not reached:
        if not goal.of_all:
            missing = RECOMMENDED[0] if theirs else goal.against[0]
            status = run.variants.get(missing, {}).get("status", "not measured")
            why = f"{find(missing).label}: {f'no {goal.quantity}' if status == OK else status}"
            yield f"| {goal.aim} x {whose} | {run.spec.title} | - | - | not measured ({why}) |"
        return
    shown = next(name for name in RECOMMENDED if name in reached)
    if goal.of_all:
        shown = max(reached, key=lambda name: reached[name])
    verdict = "met" if reached[shown] <= goal.at_most else "**missed**"
    row = f"| {goal.aim} x {whose} | {run.spec.title} |"
    yield f"{row} {find(shown).label} | {reached[shown]:.3f} | {verdict} |"
    if goal.of_all or reached[shown] <= goal.at_most or not theirs:
        return
    for name in ordered(run.variants):
        value = _quantity(goal.quantity, measured_of(run, name))
        if name not in OURS and find(name).is_ours and value and value / theirs <= goal.at_most:
            yield f"{row} {find(name).label} | {value / theirs:.3f} | met with these options |"


def _opponent(goal: Goal, run: Run, runs: Sequence[tuple[str, Run]]) -> tuple[float | None, str]:
    """The quantity to compare with, and whose it is: the first variant measured, or else extrapolated over the layers."""
    for name in goal.against:
        if value := _quantity(goal.quantity, measured_of(run, name)):
            return value, find(name).label
    for name in goal.against:
        value, layers = _extrapolated(goal.quantity, name, run.spec, runs)
        if value:
            return value, f"{find(name).label} (a line through {layers} layers)"
    return None, find(goal.against[0]).label


def _extrapolated(quantity: str, name: str, spec: Spec, runs: Sequence[tuple[str, Run]]) -> tuple[float | None, str]:
    """What the least-squares line through the same model with fewer layers says of ``spec``; needs two such runs."""
    found = {
        run.spec.layers: value
        for _, run in runs
        if run.spec.layers and replace(run.spec, layers=spec.layers) == spec and run.spec.layers < (spec.layers or 0)
        if (value := _quantity(quantity, measured_of(run, name)))
    }
    if len(found) < 2:
        return None, ""
    slope, start = statistics.linear_regression(list(found), list(found.values()))
    return start + slope * spec.layers, ", ".join(map(str, sorted(found)))


def predictions(runs: Sequence[tuple[str, Run]]) -> Iterator[str]:
    """One line on how far the predictions are off, and a line for each that is off by more than it should."""
    off = {}
    for _, run in runs:
        for name, prediction in run.predictions.items():
            peak = measured_of(run, name).get("peak_bytes")
            if peak and prediction.get("peak_bytes") and not prediction.get("is_lower_bound"):
                off[f"{run.spec.title}, {find(name).label}"] = prediction["peak_bytes"] / peak - 1
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
    machines = dict.fromkeys(machine(run) for _, run in runs if run.variants)
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

"""What `bench` writes down: one JSON file a run, and the tables that are printed from it.

A *run* is one program at one size on one machine. It holds a record for each *variant*, one way to run the program, and
a prediction for each variant that Thunder compiles. A prediction is written before the measurement that it is about,
with the time of both beside them.

    >>> spec = Spec("qwen2.5-7b", layers=8, hidden_size=28, seq=4096, batch=1)
    >>> spec.slug
    'qwen2.5-7b-layers8-hidden28-seq4096-batch1'
    >>> run = Run(spec, "fusionfix bench qwen2.5-7b", "2026-01-01T00:00:00+00:00")
    >>> run.variants["plain"] = {"status": OK, "measured": {"peak_bytes": 2 * MB, "step_ms": {"median": 1.0}}}
    >>> print(markdown(run).splitlines()[4])
    | plain Thunder | 2 | - | - | - | - | - | 1.0 | - | - | - | - | - |

Bytes are counted in 1 and shown in MB (1e6). Records are plain dicts, as JSON keeps them; a field that could not be
measured is None, with the reason in ``notes``.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.variants import find, is_variant, ordered

SCHEMA = 1
MB = 1_000_000

OK = "ok"
FAILED = "failed"
OUT_OF_MEMORY = "out of memory"
TIMEOUT = "timeout"
CUT = "cut short"  # ended by the run's end or budget; what had been measured by then is in the record
SKIPPED = "skipped"  # the variant does not exist here


@dataclass(frozen=True, slots=True)
class Spec:
    """The program that a run measures. None leaves a size as the model has it."""

    model: str  # a named configuration, or "file.py:function"
    layers: int | None = None
    hidden_size: int | None = None
    seq: int | None = None  # tokens
    batch: int | None = None
    optimizer: str = "none"  # a name in `step.OPTIMIZERS`

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of `models.load_model`."""
        return {
            "name": self.model,
            "layers": self.layers,
            "hidden_size": self.hidden_size,
            "seq": self.seq,
            "batch": self.batch,
        }

    @property
    def slug(self) -> str:
        """A name for files."""
        name = "".join(char if char.isalnum() or char in ".-" else "-" for char in self.model.split("/")[-1])
        sizes = {"layers": self.layers, "hidden": self.hidden_size, "seq": self.seq, "batch": self.batch}
        parts = [f"{word}{size}" for word, size in sizes.items() if size is not None]
        return "-".join([name, *parts, *([self.optimizer] if self.optimizer != "none" else [])])

    @property
    def title(self) -> str:
        """The same for people."""
        words = [
            f"{self.layers} layers" if self.layers is not None else "",
            f"hidden size {self.hidden_size}" if self.hidden_size is not None else "",
            f"sequence {self.seq}" if self.seq is not None else "",
            f"batch {self.batch}" if self.batch is not None else "",
            f"optimizer {self.optimizer}" if self.optimizer != "none" else "",
        ]
        return ", ".join([self.model, *filter(None, words)])


@dataclass
class Run:
    """One results file."""

    spec: Spec
    command: str
    started: str  # ISO 8601
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    predictions: dict[str, dict[str, Any]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes the file so that an interruption leaves the old one or the new one, never half of one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = _flat(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)) + "\n"
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: Path) -> Run:
        """The run that `save` wrote.

        Raises:
            UsageError: the file is not one of bench's, or of another release's schema.
        """
        try:
            data = json.loads(path.read_text())
            if data["schema"] != SCHEMA:
                raise UsageError(
                    f"{path}: results schema {data['schema']}, this release reads {SCHEMA}; give another --out"
                )
            return cls(Spec(**data["spec"]), data["command"], data["started"], data["variants"], data["predictions"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{path} is no results file of bench ({type(error).__name__}: {error})") from error


def _flat(text: str) -> str:
    """Indented JSON with each innermost list and object in one line. (A line never ends within a string.)"""
    return re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda match: re.sub(r"\n *", " ", match[0]), text)


# ---------------------------------------------------------------- tables

COLUMNS = (
    "variant", "peak MB", "reserved MB", "predicted MB", "off", "saved MB", "backward start MB", "step ms", "spread ms",
    "kernels ms", "first step s", "launches", "gradient distance",
)  # fmt: skip


def rows(run: Run) -> list[tuple[str, ...]]:
    """The cells of one run's table, a row for each variant that was tried, under `COLUMNS`."""
    return [_row(run, name) for name in ordered((*run.variants, *run.predictions))]


def _row(run: Run, name: str) -> tuple[str, ...]:
    record, measured = run.variants.get(name, {}), measured_of(run, name)
    shown = _cells(measured, run.predictions.get(name, {}))
    status = record.get("status", "not measured")
    return (find(name).label + ("" if status == OK else f" ({status})"), *shown)


def _cells(measured: Mapping[str, Any], prediction: Mapping[str, Any]) -> tuple[str, ...]:
    predicted = prediction.get("peak_bytes")
    at_least = ">= " if prediction.get("is_lower_bound") else ""
    step = measured.get("step_ms") or {}
    peak, first = measured.get("peak_bytes"), measured.get("first_step_s")
    distance = measured.get("gradient_distance")
    return (
        megabytes(peak),
        megabytes(measured.get("reserved_bytes")),
        at_least + megabytes(predicted),
        "-" if predicted is None or not peak else f"{predicted / peak - 1:+.1%}",
        megabytes(measured.get("saved_bytes")),
        megabytes(measured.get("backward_start_bytes")),
        _number(step.get("median"), 1),
        _number(step.get("spread"), 2),
        _number(measured.get("kernel_ms"), 1),
        _number(first, 0),
        _number(measured.get("launches"), 0),
        "-" if distance is None else f"{distance:.2e}",
    )


def measured_of(run: Run, name: str) -> Mapping[str, Any]:
    """What was measured of a variant; empty where nothing was."""
    return run.variants.get(name, {}).get("measured") or {}


def megabytes(nbytes: int | None) -> str:
    """Bytes as MB with thousands separators; "-" for None."""
    return "-" if nbytes is None else f"{nbytes / MB:,.0f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def ratios(run: Run) -> list[str]:
    """Peak and step of each fusionfix variant against each other variant, one line a fusionfix variant."""
    lines, names = [], ordered(run.variants)
    for name in (name for name in names if find(name).is_ours):
        mine = measured_of(run, name)
        parts = []
        for other in (name for name in names if not find(name).is_ours):
            theirs = measured_of(run, other)
            if mine.get("peak_bytes") and theirs.get("peak_bytes"):
                peak = mine["peak_bytes"] / theirs["peak_bytes"]
                step = (
                    mine["step_ms"]["median"] / theirs["step_ms"]["median"]
                    if mine.get("step_ms") and theirs.get("step_ms")
                    else None
                )
                parts.append(f"{find(other).label} {peak:.3f} / {'-' if step is None else f'{step:.3f}'}")
        if parts:
            lines.append(f"{find(name).label}, peak / step against " + ", ".join(parts))
    return lines


def _label(name: str) -> str:
    return find(name).label if is_variant(name) else name


def notes(run: Run) -> list[str]:
    """What a reader must know of a run: failures with their reason, and what could not be measured."""
    lines = []
    for name, record in run.variants.items():
        if record.get("status") != OK:
            lines.append(f"{_label(name)}: {record.get('status')}: {record.get('reason', '')}")
        lines += [f"{_label(name)}: {note}" for note in record.get("notes", ())]
    for name, prediction in run.predictions.items():
        if "reason" in prediction:
            lines.append(f"{_label(name)}: no prediction: {prediction['reason']}")
    shared = [note for prediction in run.predictions.values() for note in prediction.get("notes", ())]
    return lines + list(dict.fromkeys(shared))


def machine(run: Run) -> str:
    """GPU and versions that the measurements were made with, in a line; every one where they differ."""
    found = []
    for record in run.variants.values():
        versions = record.get("environment") or {}
        gpu, date = versions.get("gpu"), str(record.get("date", ""))[:10]
        if gpu:
            packages = ", ".join(
                f"{name} {version}" for name, version in (versions.get("packages") or {}).items() if version
            )
            found.append(f"{gpu}; {packages}; {date}")
    return " | ".join(dict.fromkeys(found)) or "no measurement"


def markdown(run: Run) -> str:
    """One run as Markdown: title, table, ratios, notes."""
    lines = [f"### {run.spec.title}", "", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells) + " |" for cells in rows(run)]
    lines += [
        "",
        *(f"- {line}" for line in (*ratios(run), *notes(run))),
        "",
        f"{machine(run)}. Command: `{run.command}`.",
    ]
    return "\n".join(lines) + "\n"


def plain_table(run: Run) -> str:
    """The same for a terminal without colours, columns padded."""
    table: Sequence[Sequence[str]] = [COLUMNS, *rows(run)]
    widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
    lines = [run.spec.title]
    for row in table:
        lines.append(
            "  ".join(
                cell.ljust(width) if not at else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths))
            )
        )
    return "\n".join([*lines, *ratios(run), *notes(run), machine(run)])


# ---------------------------------------------------------------- picture

_GREEN = "#0b6e4f"  # fusionfix
_RED = "#b23a48"  # plain Thunder, what there is to beat
_GREY = "#5b6770"


def draw(run: Run, path: Path) -> bool:
    """Draws peak memory against step time, a point a variant; False, and no file, where nothing was measured.

    A ring where it was predicted shows how far the prediction is off.
    """
    points = []
    for name in ordered(run.variants):
        measured = measured_of(run, name)
        if measured.get("peak_bytes") and measured.get("step_ms"):
            points.append((name, measured["step_ms"]["median"], measured["peak_bytes"] / 1e9))
    if not points:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for name, milliseconds, gigabytes in points:
        color = _GREEN if find(name).is_ours else _RED if name.startswith("plain") else _GREY
        predicted = run.predictions.get(name, {}).get("peak_bytes")
        if predicted is not None:
            axes.plot(milliseconds, predicted / 1e9, "o", markersize=13, markerfacecolor="none", markeredgecolor=color)
        axes.plot(milliseconds, gigabytes, "o", markersize=7, color=color)
    _name_points(axes, points)
    axes.set_xlabel("step, ms (median)")
    axes.set_ylabel("peak allocated, GB")
    axes.set_title(run.spec.title, fontsize=10, loc="left")
    axes.margins(0.18)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    ringed = " Ring: predicted before the measurement." if run.predictions else ""
    figure.supxlabel(f"{machine(run)}.{ringed} Lower left is better.", fontsize=6.5, color="#444444", wrap=True)
    figure.savefig(path, dpi=160)
    return True


def _name_points(axes: Any, points: Sequence[tuple[str, float, float]]) -> None:
    """Writes each point's name beside it, names of close points one above the other."""
    least, most = min(y for _, _, y in points), max(y for _, _, y in points)
    apart = max(most - least, 0.05 * most) * 0.055
    right = max(x for _, x, _ in points)
    left = min(x for _, x, _ in points)
    used: list[tuple[float, float]] = []
    for name, x, y in sorted(points, key=lambda point: point[2]):
        at = y
        while any(abs(at - other) < apart and abs(x - where) < 0.35 * max(right - left, 1e-9) for where, other in used):
            at += apart / 4
        used.append((x, at))
        is_right = x > left + 0.6 * (right - left) and right > left
        axes.annotate(
            find(name).label,
            (x, y),
            (x, at),
            textcoords="data",
            fontsize=8,
            va="center",
            ha="right" if is_right else "left",
        ).set_x(x + (-1 if is_right else 1) * 0.035 * max(right - left, 0.1 * right))

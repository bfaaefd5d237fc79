"""What a user points at, a trace or a model, and what `capture`, `explain` and `fix` make of it.

A *target* is a file with saved or printed traces, standard input, a model's name, or file.py:function. Traces are explained and
fixed as Graphs, without Thunder; a model is captured, and fixed on Thunder's own traces. Both end in the same answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.model_names import check_name
from thunder_fusionfix.sources import choose, looks_like_file, sources

if TYPE_CHECKING:  # what takes torch or matplotlib is imported where it is needed
    from thunder_fusionfix.capture import Capture
    from thunder_fusionfix.explain import Explanation
    from thunder_fusionfix.model import Graph, Report, Timeline
    from thunder_fusionfix.overview import Overview
    from thunder_fusionfix.report import Curve

FIX_SCHEMA = "thunder_fusionfix.fix/1"
Tell = Callable[[str], None]  # is told in a few words what goes on


def _silent(words: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Target:
    """A trace or a model as the user named it, and how to capture a model."""

    name: str
    layers: int | None = None
    hidden_size: int | None = None
    seq: int | None = None
    batch: int | None = None
    fusion_type: str | None = None
    executors: str | None = None  # with commas between
    dynamo: bool | None = None

    @property
    def is_trace(self) -> bool:
        """True for a file or standard input, False for a model."""
        return ":" not in self.name and looks_like_file(self.name)

    @property
    def slug(self) -> str:
        """A name for files."""
        name = "".join(char if char.isalnum() or char in ".-_" else "-" for char in Path(self.name).name)
        sizes = {"layers": self.layers, "hidden": self.hidden_size, "seq": self.seq, "batch": self.batch}
        return "-".join([name, *(f"{word}{size}" for word, size in sizes.items() if size is not None)])

    def check(self) -> None:
        """Raises `UsageError` for what can be seen to be wrong before anything heavy is imported."""
        options = {option: value for option, value in asdict(self).items() if option != "name" and value is not None}
        if self.is_trace:
            if options:
                option = next(iter(options)).replace("_", "-")
                raise UsageError(f"--{option} is for models; {self.name} is a trace: leave it out")
            return
        check_name(self.name)
        for option in ("layers", "hidden_size", "seq", "batch"):
            if options.get(option, 1) < 1:
                raise UsageError(f"--{option.replace('_', '-')} {options[option]}: at least 1")
        if self.fusion_type not in (None, "dataflow", "consecutive"):
            raise UsageError(f"--fusion-type {self.fusion_type}: dataflow or consecutive")

    def capture(self, transforms: Sequence[Any] = (), tell: Tell = _silent) -> Capture:
        """The model's traces.

        Raises:
            UsageError: the model, a size or an option is wrong.
        """
        self.check()
        tell("importing Thunder")
        from thunder_fusionfix.capture import EXECUTORS, capture
        from thunder_fusionfix.models import load_model

        tell("building the model")
        program = load_model(
            self.name, layers=self.layers, hidden_size=self.hidden_size, seq=self.seq, batch=self.batch
        )
        return capture(
            program.fn,
            program.args,
            program.kwargs,
            executors=EXECUTORS if self.executors is None else tuple(filter(None, self.executors.split(","))),
            fusion_type=self.fusion_type,
            dynamo=self.dynamo,
            transforms=transforms,
            progress=tell,
        )


# ---------------------------------------------------------------- explain


@dataclass(frozen=True)
class Explained:
    """An explanation of each trace, in order."""

    explanations: tuple[Explanation, ...]
    notes: tuple[str, ...] = ()  # on where the traces come from

    @property
    def labels(self) -> tuple[str, ...]:
        """What each trace is called: the label under which it was saved, or its file and line."""
        sources = [one.source for one in self.explanations]
        return tuple(one.label or f"{one.name}:{one.first_line}" for one in sources)

    @cached_property
    def programs(self) -> tuple[Overview, Overview] | None:
        """The program that the traces make up, before and after the passes; None where they are no forwards with backwards."""
        from thunder_fusionfix.overview import overview_of_graphs

        before = overview_of_graphs(zip(self.labels, (one.graph for one in self.explanations)))
        after = overview_of_graphs(zip(self.labels, (one.planned for one in self.explanations)))
        if before is None or after is None or not any(part.backward is not None for part in before.parts):
            return None
        return before, after

    @property
    def peak_first(self) -> tuple[Explanation, ...]:
        """The explanations, with that of the trace that runs at the program's peak before the others."""
        graphs = [one.graph for one in self.explanations]
        return tuple(self.explanations[index] for index in _peak_first(self.labels, graphs, self.programs))

    def curves(self) -> dict[str, Curve]:
        """What to draw: the program's step, or the trace with the highest peak."""
        from thunder_fusionfix.report import curve

        if self.programs is not None:
            return _step_curves(self.programs)
        highest = max(range(len(self.explanations)), key=lambda index: self.explanations[index].peak_bytes)
        one = self.explanations[highest]
        before, after = self.pair(highest)
        return {"before": curve(one.graph, before), "after": curve(one.planned, after)}

    def pair(self, index: int) -> tuple[Timeline, Timeline]:
        """The timelines of one trace before and after the passes."""
        from thunder_fusionfix.simulate import simulate

        one, earlier = self.explanations[index], self.explanations[max(index - 1, 0)]
        is_pair = one.graph.stage == "backward" and earlier.graph.stage == "forward"
        forward = earlier.graph if is_pair else None
        return simulate(one.graph, forward=forward), simulate(one.planned, forward=forward)


def explain_target(target: Target, trace: str | None = None, tell: Tell = _silent) -> Explained:
    """Where the memory of a target goes, trace by trace.

    Args:
        target: a trace or a model.
        trace: of several traces, which: a number from 1, a name or a stage.
        tell: is told what goes on.

    Raises:
        UsageError: the target or an option is wrong.
    """
    from thunder_fusionfix.explain import explain, explain_trace

    target.check()
    if target.is_trace:
        tell(f"reading {target.name}")
        return Explained(explain_trace(choose(sources(target.name), trace)))
    captured = target.capture(tell=tell)
    forward_of = {}
    found = []
    for part in _overview(captured).parts:
        for stage, graph in (("forward", part.forward), ("backward", part.backward)):
            if graph is not None:
                (source,) = sources(graph)
                found.append(replace(source, name=f"{part.name} {stage}"))
                forward_of[found[-1].name] = part.forward if stage == "backward" else None
    chosen = choose(found, trace)
    return Explained(tuple(explain(source, forward=forward_of[source.name]) for source in chosen), captured.notes)


# ---------------------------------------------------------------- fix


@dataclass(frozen=True)
class Fixed:
    """What the passes did to a program, or to traces that make up none."""

    reports: tuple[Report, ...]
    labels: tuple[str, ...]  # of the reports
    programs: tuple[Overview, Overview] | None  # before and after
    notes: tuple[str, ...] = ()
    captured: Capture | None = None  # after the passes; None for traces

    @property
    def peak_first(self) -> tuple[tuple[str, Report], ...]:
        """Each report with its title, that of the trace that runs at the program's peak before the others."""
        from thunder_fusionfix.overview import phase_of

        graphs = [report.graph_before for report in self.reports]
        order = _peak_first(self.labels, graphs, self.programs)
        return tuple((phase_of(self.labels[index]), self.reports[index]) for index in order)

    def curves(self) -> dict[str, Curve]:
        """What to draw: the program's step, or the trace with the highest peak; nothing where nothing was looked at."""
        from thunder_fusionfix.report import curve

        if self.programs is not None:
            return _step_curves(self.programs)
        if not self.reports:
            return {}
        highest = max(self.reports, key=lambda report: report.before.peak_bytes)
        return {
            "before": curve(highest.graph_before, highest.before),
            "after": curve(highest.graph_after, highest.after),
        }

    def save(self, out: Path) -> list[Path]:
        """Writes the fixed traces; the files.

        Raises:
            UsageError: a file cannot be written.
        """
        if self.programs is not None:
            return save_program(self.programs[1], self.captured, out)
        from thunder_fusionfix import store

        store.save({label: report.graph_after for label, report in zip(self.labels, self.reports)}, out)
        return [out]

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, named by ``schema``."""
        from thunder_fusionfix.overview import comparison_of

        before, after = map(comparison_of, self.programs) if self.programs is not None else (None, None)
        return {
            "schema": FIX_SCHEMA,
            "before": before,
            "after": after,
            "traces": [_report_dict(label, report) for label, report in zip(self.labels, self.reports)],
            "notes": list(self.notes),
        }


def fix_target(target: Target, trace: str | None = None, tell: Tell = _silent) -> Fixed:
    """Runs the final passes on a target.

    Args:
        target: a trace or a model.
        trace: of a file with several traces, which.
        tell: is told what goes on.

    Raises:
        UsageError: the target or an option is wrong.
    """
    target.check()
    if target.is_trace:
        return _fix_graphs(target, trace, tell)
    if trace is not None:
        raise UsageError("--trace is for files with several traces; a model is fixed as a whole: leave it out")
    tell("importing Thunder")
    from thunder_fusionfix.transform import FusionFixTransform

    transform = FusionFixTransform()
    captured = target.capture([transform], tell)
    programs = (_overview(captured, before=True), _overview(captured))
    # the transform reports on traces with regions, in the order in which Thunder compiles
    fused = [label for label, graph in programs[0].labelled().items() if any(op.is_fusion for op in graph.ops)]
    numbers = [f"{index} {report.stage}" for index, report in enumerate(transform.reports, start=1)]
    labels = tuple(fused if len(fused) == len(numbers) else numbers)
    return Fixed(tuple(transform.reports), labels, programs, captured.notes, captured)


def _fix_graphs(target: Target, trace: str | None, tell: Tell) -> Fixed:
    from thunder_fusionfix.model import Report

    start = time.perf_counter()
    explained = explain_target(target, trace, tell)
    seconds = (time.perf_counter() - start) / len(explained.explanations)
    reports = {
        label: Report(one.graph.stage, *explained.pair(index), one.graph, one.planned, one.decisions, seconds)
        for index, (label, one) in enumerate(zip(explained.labels, explained.explanations))
        if any(op.is_fusion for op in one.graph.ops)
    }
    undone = tuple(f"{label}: {note}" for label, one in zip(reports, explained.explanations) for note in one.undone)
    return Fixed(tuple(reports.values()), tuple(reports), explained.programs, (*explained.notes, *undone))


def _report_dict(label: str, report: Report) -> Mapping[str, Any]:
    return {
        "label": label,
        "stage": report.stage,
        "peak_bytes_before": report.before.peak_bytes,
        "peak_bytes_after": report.after.peak_bytes,
        "kept_input": report.kept_input,
        "seconds": report.seconds,
        "decisions": [asdict(decision) for decision in report.decisions],
    }


# ---------------------------------------------------------------- programs and files


def _overview(captured: Capture, *, before: bool = False) -> Overview:
    from thunder_fusionfix.overview import overview_of

    return overview_of(captured, before=before)


def _step_curves(programs: tuple[Overview, Overview]) -> dict[str, Curve]:
    before, after = programs
    return {"before": before.curve, "after": after.curve}


def _peak_first(
    labels: Sequence[str], graphs: Sequence[Graph], programs: tuple[Overview, Overview] | None
) -> list[int]:
    """The places of traces, with the place of that which runs at the program's peak before the others.

    It goes by its label, or is the very Graph where it was read from a text without labels.
    """
    if programs is None:
        return list(range(len(labels)))
    label = programs[0].peak_label
    peak = programs[0].labelled()[label]
    return sorted(range(len(labels)), key=lambda index: labels[index] != label and graphs[index] is not peak)


def save_program(overview: Overview, captured: Capture | None, out: Path) -> list[Path]:
    """Writes a program's traces as Graphs to ``out`` and, where Thunder made them, as it prints them beside it; the files.

    Raises:
        UsageError: a file cannot be written.
    """
    from thunder_fusionfix import store
    from thunder_fusionfix.text import sections

    store.save(overview.labelled(), out)
    if captured is None:
        return [out]
    traces = {
        f"{part.name} {stage}": f"{trace}\n"
        for part in captured.parts
        for stage, trace in (("forward", part.forward), ("backward", part.backward))
        if trace is not None
    }
    text = out.with_suffix(".txt")
    try:
        text.write_text(sections(traces), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{text}: cannot be written ({error.strerror})") from error
    return [out, text]

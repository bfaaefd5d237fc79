"""A program as a whole, before and after the passes: the memory of one training step, and the numbers side by side.

A `report` speaks of one trace, and a program has several: forward and backward of the model, of its loss, and what stands between
them. Here they are put together: `step` prices the step, and the rest adds up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from thunder_fusionfix.document import Block, Heading, Line, Table, megabytes
from thunder_fusionfix.model import Graph, Holder, Timeline
from thunder_fusionfix.report import Curve, Summary, op_text, shares_text, summarize, why_alive
from thunder_fusionfix.simulate import simulate
from thunder_fusionfix.step import Phase, StepPart, StepTimeline, simulate_step

FORWARD, BACKWARD = " forward", " backward"  # ends of the labels under which a part's Graphs are saved


@dataclass(frozen=True)
class Overview:
    """One program, with its final traces as Graphs."""

    parts: tuple[StepPart, ...]

    @cached_property
    def step(self) -> StepTimeline:
        """The memory of one training step."""
        return simulate_step(self.parts)

    @cached_property
    def timeline(self) -> Timeline:
        """The step as one Timeline, over the ops of all traces that compute, in the order in which they run."""
        live = tuple(nbytes for phase in self.step.phases for nbytes in _by_computation(phase))
        at = max(range(len(live)), key=lambda pos: (live[pos], -pos), default=0)
        start = sum(self.step.base.values())
        # what stands before the step is the only bound that holds for the traces together
        return Timeline(live, max(live, default=start), at, start, start, self.step.holders, self.step.unknown)

    @cached_property
    def curve(self) -> Curve:
        """The step as it is drawn."""
        phases = tuple((phase.name, len(_by_computation(phase))) for phase in self.step.phases)
        return Curve(self.timeline, self._peak_op(), phases)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """All traces: each part's forward and backward."""
        return tuple(self.labelled().values())

    def labelled(self) -> dict[str, Graph]:
        """All traces under the labels that `parts_of_graphs` understands."""
        found: dict[str, Graph] = {}
        for part in self.parts:
            found[part.name + FORWARD] = part.forward
            if part.backward is not None:
                found[part.name + BACKWARD] = part.backward
        return found

    @cached_property
    def summaries(self) -> tuple[Summary, ...]:
        """Each trace in numbers."""
        found = []
        for part in self.parts:
            found.append(summarize(part.forward, simulate(part.forward)))
            if part.backward is not None:
                found.append(summarize(part.backward, simulate(part.backward, forward=part.forward)))
        return tuple(found)

    def sentence(self) -> str:
        """What holds the peak of the whole step, in a sentence."""
        step = self.step
        place = f"{step.peak_phase.name}, at {self._peak_op()}"
        told = shares_text(step.holders, self._why_alive)
        return f"The peak of a step, {megabytes(step.peak_bytes)} MB, is in the {place}: {told}."

    @property
    def peak_label(self) -> str:
        """The label of the trace that runs at the step's peak."""
        return label_of(self.step.peak_phase.name)

    def _peak_op(self) -> str:
        return op_text(self.labelled()[self.peak_label], self.step.peak_phase.peak_pos)

    def _why_alive(self, holder: Holder) -> str:
        """Why a holder is alive at the step's peak; what stands beside the running trace goes by its own name."""
        if holder.producer in ("backward", *(part.name for part in self.parts)) or holder.name in self.step.base:
            return holder.name
        if holder.producer == "before the step":
            return "there before the step"
        return why_alive(self.labelled()[self.peak_label], self.step.peak_phase.peak_pos, holder)


def label_of(phase: str) -> str:
    """The label of the trace that runs in a phase.

    >>> label_of("backward of thunder_0 of graph 1")
    'thunder_0 of graph 1 backward'
    """
    stage, _, name = phase.partition(" of ")
    return f"{name} {stage}"


def phase_of(label: str) -> str:
    """The phase in which the trace of that label runs; what is no such label is left as it is.

    >>> phase_of("thunder_0 of graph 1 backward"), phase_of("trace.txt:3")
    ('backward of thunder_0 of graph 1', 'trace.txt:3')
    """
    name, _, stage = label.rpartition(" ")
    return f"{stage} of {name}" if f" {stage}" in (FORWARD, BACKWARD) and name else label


def _by_computation(phase: Phase) -> tuple[int, ...]:
    """The most live bytes at each op that computes and since the one before: views and ``del``s would only stretch it."""
    ends = sorted({*(pos + 1 for pos in phase.calls), len(phase.live_bytes)})
    return tuple(max(phase.live_bytes[start:end]) for start, end in zip((0, *ends), ends))


def overview_of(captured: Any, *, before: bool = False) -> Overview:
    """The final traces of a `capture.Capture`; with ``before`` as they were before the given transforms."""
    from thunder_fusionfix.predict import step_parts

    if before:
        earlier = (replace(part, forward=part.forward_before, backward=part.backward_before) for part in captured.parts)
        captured = replace(captured, parts=tuple(earlier))
    return Overview(step_parts(captured))


def overview_of_graphs(labelled: Iterable[tuple[str, Graph]]) -> Overview | None:
    """The program whose traces are ``labelled``, each backward after its forward; None where they are not such pairs."""
    parts: list[StepPart] = []
    for label, graph in labelled:
        if graph.stage != "backward":
            parts.append(StepPart(label.removesuffix(FORWARD), graph, None))
        elif parts and parts[-1].backward is None and parts[-1].forward.stage == "forward":
            parts[-1] = replace(parts[-1], backward=graph)
        else:
            return None
    return Overview(tuple(parts)) if parts else None


# ---------------------------------------------------------------- before and after


def comparison_blocks(title: str, before: Overview, after: Overview) -> list[Block]:
    """Heading, the peak in a sentence, and the table before -> after."""
    change = (
        100 * (after.step.peak_bytes - before.step.peak_bytes) / before.step.peak_bytes if before.step.peak_bytes else 0
    )
    peaks = f"peak of a training step {megabytes(before.step.peak_bytes)} -> {megabytes(after.step.peak_bytes)} MB"
    return [
        Heading(f"{title}: {peaks} ({change:+.1f} %)", is_main=True),
        Line(f"before: {before.sentence()}"),
        Line(f"after:  {after.sentence()}"),
        comparison_table(before, after),
    ]


def comparison_table(before: Overview, after: Overview) -> Table:
    """The numbers of both, a row a number."""
    old, new = comparison_of(before), comparison_of(after)
    rows = tuple((label, _shown(key, old[key]), _shown(key, new[key])) for key, label in _LABELS.items())
    return Table(("", "before", "after"), rows, right=(1, 2))


# What the numbers of `comparison_of` are for people.
_LABELS = {
    "peak_bytes": "peak, MB",
    "backward_start_bytes": "peak in the first tenth of the backward, MB",
    "saved_bytes": "kept from forward to backward, MB",
    "num_layouts": "layout ops in fusions",
    "layout_bytes": "written by layout ops in fusions, MB",
    "num_fusions": "fusions",
    "num_launches": "ops that launch kernels",
}


def comparison_of(overview: Overview) -> Mapping[str, int]:
    """The numbers of a program; docs/json.md says what each is."""
    step, summaries = overview.step, overview.summaries
    return {
        "peak_bytes": step.peak_bytes,
        "backward_start_bytes": step.backward_start_bytes,
        "saved_bytes": step.saved_bytes,
        "num_layouts": sum(sum(summary.layouts.values()) for summary in summaries),
        "layout_bytes": sum(summary.layout_bytes for summary in summaries),
        "num_fusions": sum(summary.num_regions for summary in summaries),
        "num_launches": sum(summary.num_launches for summary in summaries),
    }


def _shown(key: str, number: int) -> str:
    return megabytes(number) if key.endswith("_bytes") else f"{number:,}"

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
from thunder_fusionfix.effects import Kind, effect_of
from thunder_fusionfix.model import Graph, Timeline
from thunder_fusionfix.report import Summary, peak_sentence, summarize
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
        live = tuple(nbytes for phase in self.step.phases for nbytes in self._by_computation(phase))
        at = max(range(len(live)), key=lambda pos: (live[pos], -pos), default=0)
        start = sum(self.step.base.values())
        # what stands before the step is the only bound that holds for the traces together
        return Timeline(live, max(live, default=start), at, start, start, self.step.holders, self.step.unknown)

    def _by_computation(self, phase: Phase) -> tuple[int, ...]:
        """The most live bytes at each op that computes and since the one before: views and ``del``s would only stretch it."""
        graph = self._graph_of(phase)
        calls = (pos for pos in phase.calls if graph is None or effect_of(graph.ops[pos]).kind is not Kind.LAYOUT)
        ends = sorted({*(pos + 1 for pos in calls), len(phase.live_bytes)})
        return tuple(max(phase.live_bytes[start:end]) for start, end in zip((0, *ends), ends))

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
        """What holds the step's peak, in a sentence."""
        graph = self._graph_of(self.step.peak_phase) or self.parts[0].forward
        forward = self._forward_of(graph) if graph.stage == "backward" else None
        timeline = simulate(graph, forward=forward)
        words = peak_sentence(graph, timeline)
        return f"The step needs most in the {self.step.peak_phase.name}. Of that trace: {words[0].lower()}{words[1:]}"

    def _graph_of(self, phase: Phase) -> Graph | None:
        """The trace that runs in a phase ("backward of net"); None for the optimizer."""
        stage, _, name = phase.name.partition(" of ")
        return self.labelled().get(f"{name} {stage}")

    def _forward_of(self, backward: Graph) -> Graph:
        return next(part.forward for part in self.parts if part.backward is backward)


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
    rows = tuple((label, _shown(label, old[label]), _shown(label, new[label])) for label in old)
    return Table(("", "before", "after"), rows, right=(1, 2))


def comparison_of(overview: Overview) -> Mapping[str, int]:
    """The numbers of a program, by what they are; bytes where the label ends in "MB"."""
    step, summaries = overview.step, overview.summaries
    return {
        "peak, MB": step.peak_bytes,
        "peak at the start of the backward, MB": step.backward_start_bytes,
        "kept from forward to backward, MB": step.saved_bytes,
        "layout ops in fusions": sum(sum(summary.layouts.values()) for summary in summaries),
        "written by layout ops in fusions, MB": sum(summary.layout_bytes for summary in summaries),
        "fusions": sum(summary.num_regions for summary in summaries),
        "ops that launch kernels": sum(summary.num_launches for summary in summaries),
    }


def _shown(label: str, number: int) -> str:
    return megabytes(number) if label.endswith("MB") else f"{number:,}"


def timelines(before: Overview, after: Overview | None = None) -> dict[str, Timeline]:
    """What `report.draw_timeline` draws of a program."""
    return {"before": before.timeline, "after": after.timeline} if after is not None else {"step": before.timeline}

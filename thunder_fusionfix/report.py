"""What a Timeline and a Report say to people: in a sentence, as a table, and as a picture.

Sizes are MB of 1e6 bytes, as torch users print ``torch.cuda.max_memory_allocated() / 1e6``; everywhere else they are bytes.

    >>> from thunder_fusionfix.model import Graph, Op, Ref, Value
    >>> from thunder_fusionfix.simulate import simulate
    >>> values = {name: Value(name, (1_000_000,), "f32", "cuda:0") for name in "xyz"}
    >>> ops = (Op("torch.exp", (Ref("x"),), Ref("y")), Op("torch.mul", (Ref("x"), Ref("y")), Ref("z")), Op("return", (Ref("z"),)))
    >>> graph = Graph("f", "inference", ("x",), ops, values, held=frozenset("x"))
    >>> print(peak_sentence(graph, simulate(graph)))
    The peak of 12.0 MB is at torch.mul (op 1 of 3): 4.0 MB arguments (x), 4.0 MB made for ops to come (y), 4.0 MB results (z).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thunder_fusionfix.alias import Aliases, Sharing, aliases
from thunder_fusionfix.document import (
    MB,
    Block,
    Heading,
    Line,
    Table,
    markdown,
    megabytes,
    plain,
    signed_megabytes,
)
from thunder_fusionfix.effects import Kind, effect_of
from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.layout import source_of
from thunder_fusionfix.model import RETURN, Decision, Graph, Holder, Op, Report, Timeline
from thunder_fusionfix.segments import Cost, layout_costs
from thunder_fusionfix.simulate import start_of_backward_peak

NUM_HOLDERS = 8  # rows of a table of holders; the rest is one more row
NAME_WIDTH = 44  # characters of a name before its middle is left out

_NO_LAUNCH = frozenset({Kind.BOOKKEEPING, Kind.LAYOUT})


# ---------------------------------------------------------------- in words


def peak_sentence(graph: Graph, timeline: Timeline) -> str:
    """What held the peak of ``graph``, in one sentence: who takes how much, the largest share first."""
    if not timeline.holders:
        return "The trace needs no GPU memory."
    at = timeline.peak_pos
    shares = sorted(_shares(graph, timeline), key=lambda share: -share.nbytes)
    told = [share for share in shares if share.nbytes >= 0.02 * timeline.peak_bytes]
    rest = timeline.peak_bytes - sum(share.nbytes for share in told)
    parts = [f"{megabytes(share.nbytes)} MB {share.words()}" for share in told]
    parts += [f"{megabytes(rest)} MB else"] if rest else []
    place = f"{graph.ops[at].id} (op {at} of {len(graph.ops)})"
    return f"The peak of {megabytes(timeline.peak_bytes)} MB is at {place}: {', '.join(parts)}."


@dataclass(frozen=True, slots=True)
class _Share:
    """The part of a peak that is there for one reason."""

    reason: str
    holders: tuple[Holder, ...]

    @property
    def nbytes(self) -> int:
        return sum(holder.nbytes for holder in self.holders)

    def words(self) -> str:
        names = [short_name(holder.name) for holder in self.holders[:2]]
        more = len(self.holders) - len(names)
        return f"{self.reason} ({', '.join(names)}{f' and {more} more' if more else ''})"


def _shares(graph: Graph, timeline: Timeline) -> list[_Share]:
    by_reason: dict[str, list[Holder]] = {}
    for holder in timeline.holders:
        by_reason.setdefault(_reason(graph, timeline, holder), []).append(holder)
    return [_Share(reason, tuple(holders)) for reason, holders in by_reason.items()]


def _reason(graph: Graph, timeline: Timeline, holder: Holder) -> str:
    """Why a holder is alive at the peak."""
    at = graph.ops[timeline.peak_pos]
    if is_temporary(graph, holder):
        return f"that {at.id} writes only for itself, where nvFuser cuts it"
    if holder.producer in ("argument", "saved tensor", "cotangent"):
        return {"argument": "arguments", "saved tensor": "saved by the forward", "cotangent": "gradients given"}[
            holder.producer
        ]
    if holder.last_use == RETURN:
        return "results"
    return "at work in this op" if holder.last_use == at.id and holder.producer == at.id else "made for ops to come"


def is_temporary(graph: Graph, holder: Holder) -> bool:
    """True for what a region writes only for itself: no value of the trace has it."""
    return holder.name not in graph.producer and holder.name not in graph.args


def short_name(name: str) -> str:
    """``name``, with its middle left out where it is long.

    >>> short_name("L_self_modules_model_modules_layers_modules_0_modules_self_attn_modules_q_proj_parameters_weight_")
    'L_self_modules_model_m…q_proj_parameters_weight_'
    """
    if len(name) <= NAME_WIDTH + 4:
        return name
    return f"{name[: NAME_WIDTH // 2]}…{name[-(NAME_WIDTH // 2 + 3) :]}"


# ---------------------------------------------------------------- counted


@dataclass(frozen=True, slots=True)
class Summary:
    """One trace in numbers."""

    peak_bytes: int
    lower_bound_bytes: int
    start_of_backward_bytes: int | None  # peak of the first tenth of a backward trace; None for another trace
    num_regions: int
    num_launches: int  # ops that run at least one kernel
    layouts: Mapping[Cost, int]  # layout ops in regions, by what they cost
    layout_bytes: int  # what those that write anything write
    saved_bytes: int | None  # what a forward keeps for the backward beside its arguments; None for another trace


def summarize(graph: Graph, timeline: Timeline) -> Summary:
    """``graph`` in numbers."""
    shared = aliases(graph)
    costs = layout_costs(graph, shared)
    return Summary(
        peak_bytes=timeline.peak_bytes,
        lower_bound_bytes=timeline.lower_bound_bytes,
        start_of_backward_bytes=start_of_backward_peak(timeline) if graph.stage == "backward" else None,
        num_regions=sum(op.is_fusion for op in graph.ops),
        num_launches=sum(_launches(op, shared) for op in graph.ops),
        layouts=Counter(cost.cost for cost in costs),
        layout_bytes=sum(cost.nbytes for cost in costs),
        saved_bytes=_saved_bytes(graph, shared) if graph.stage == "forward" else None,
    )


def _launches(op: Op, shared: Aliases) -> bool:
    """True for an op that runs a kernel: all but views and bookkeeping."""
    kind = effect_of(op).kind
    if kind is not Kind.LAYOUT:
        return kind not in _NO_LAUNCH
    source = source_of(op)
    if source is None or source not in shared.storage_of:
        return True
    return any(shared.sharing(source, name) is not Sharing.CERTAIN for name in op.outputs if name in shared.storage_of)


def _saved_bytes(graph: Graph, shared: Aliases) -> int:
    saved = {shared.storage_of[name] for name in graph.saved if name in shared.storage_of}
    return sum(shared.storages[id].nbytes or 0 for id in saved if not shared.storages[id].is_outside)


# ---------------------------------------------------------------- tables


def timeline_blocks(graph: Graph, timeline: Timeline, title: str = "") -> list[Block]:
    """A Timeline for people: the peak in a sentence, then who holds it."""
    blocks: list[Block] = [Heading(title or f"{graph.stage} trace", is_main=True)]
    blocks.append(Line(peak_sentence(graph, timeline)))
    if timeline.unknown:
        names = ", ".join(map(short_name, timeline.unknown[:5]))
        blocks.append(Line(f"counted as 0, their sizes are not known: {names}", "faint"))
    rows = [
        (short_name(holder.name), megabytes(holder.nbytes), holder.producer, holder.last_use)
        for holder in timeline.holders[:NUM_HOLDERS]
    ]
    rest = timeline.holders[NUM_HOLDERS:]
    if rest:
        rows.append((f"{len(rest)} more", megabytes(sum(holder.nbytes for holder in rest)), "", ""))
    blocks.append(Table(("tensor", "MB", "made by", "last taken by"), tuple(rows), right=(1,)))
    return blocks


def report_blocks(report: Report) -> list[Block]:
    """What the passes did to one trace: the answer, before and after in numbers, each rewrite, each refusal."""
    before, after = (
        summarize(graph, timeline)
        for graph, timeline in ((report.graph_before, report.before), (report.graph_after, report.after))
    )
    applied = [decision for decision in report.decisions if decision.applied]
    peaks = f"peak {megabytes(before.peak_bytes)} -> {megabytes(after.peak_bytes)} MB"
    change = f" ({_percent(before.peak_bytes, after.peak_bytes)})" if before.peak_bytes != after.peak_bytes else ""
    words = f"{len(applied)} rewrite{'s' * (len(applied) != 1)}"
    blocks: list[Block] = [
        Heading(f"{report.stage} trace: {peaks}{change}, {words}, {report.seconds * 1e3:.0f} ms", is_main=True)
    ]
    if report.kept_input is not None:
        blocks.append(Line(f"a pass was undone: {report.kept_input}", "bad"))
    blocks.append(Line(f"before: {peak_sentence(report.graph_before, report.before)}"))
    if applied:
        blocks.append(Line(f"after:  {peak_sentence(report.graph_after, report.after)}"))
    blocks.append(comparison_table(before, after))
    blocks += decision_blocks(report.decisions)
    return blocks


def comparison_table(before: Summary, after: Summary) -> Table:
    """Both traces in numbers, one below the other."""
    rows: list[tuple[str, str, str]] = []

    def row(label: str, old: int | None, new: int | None, show: Any = str) -> None:
        if old is not None and new is not None:
            rows.append((label, show(old), show(new)))

    row("peak, MB", before.peak_bytes, after.peak_bytes, megabytes)
    row("no order needs less than, MB", before.lower_bound_bytes, after.lower_bound_bytes, megabytes)
    row(
        "peak at the start of the backward, MB",
        before.start_of_backward_bytes,
        after.start_of_backward_bytes,
        megabytes,
    )
    row("saved for the backward, MB", before.saved_bytes, after.saved_bytes, megabytes)
    row("layout ops in fusions", sum(before.layouts.values()), sum(after.layouts.values()))
    for cost, label in (
        (Cost.BYTES, "  that write a tensor"),
        (Cost.LAUNCH, "  that cost a launch only"),
        (Cost.NOTHING, "  that cost nothing"),
    ):
        row(label, before.layouts.get(cost, 0), after.layouts.get(cost, 0))
    row("written by those, MB", before.layout_bytes, after.layout_bytes, megabytes)
    row("fusions", before.num_regions, after.num_regions)
    row("ops that launch kernels", before.num_launches, after.num_launches)
    return Table(("", "before", "after"), tuple(rows), right=(1, 2))


def decision_blocks(decisions: Sequence[Decision]) -> list[Block]:
    """Each rewrite with what it won where it stands; refusals by reason, with where each was."""
    blocks: list[Block] = []
    applied = [decision for decision in decisions if decision.applied]
    if applied:
        done = tuple(
            (str(number), one.pass_name, one.where, one.what, signed_megabytes(-one.bytes_won), one.reason)
            for number, one in enumerate(applied, start=1)
        )
        blocks += [Heading("done"), Table(("", "pass", "in", "what", "MB there", "why"), done, right=(0, 4))]
    refused: dict[tuple[str, str], list[Decision]] = {}
    for one in decisions:
        if not one.applied:
            refused.setdefault((one.pass_name, one.reason), []).append(one)
    if refused:
        left = tuple(
            (
                str(len(found)),
                pass_name,
                listed(dict.fromkeys(one.where for one in found)),
                listed(one.what for one in found),
                reason,
            )
            for (pass_name, reason), found in refused.items()
        )
        blocks += [Heading("left as it is"), Table(("", "pass", "in", "what", "why"), left, right=(0,))]
    return blocks


def listed(items: Iterable[str], most: int = 4) -> str:
    """The first few of ``items`` and how many more there are.

    >>> listed(["a", "b", "c"]), listed("abcdef")
    ('a, b, c', 'a, b, c, d and 2 more')
    """
    names = list(items)
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def report_text(report: Report) -> str:
    """The report as plain text."""
    return plain(report_blocks(report))


def report_markdown(report: Report) -> str:
    """The report as Markdown."""
    return markdown(report_blocks(report))


def timeline_text(graph: Graph, timeline: Timeline, title: str = "") -> str:
    """The timeline as plain text."""
    return plain(timeline_blocks(graph, timeline, title))


def _percent(before: int, after: int) -> str:
    return f"{100 * (after - before) / before:+.1f} %" if before else "new"


# ---------------------------------------------------------------- a picture

_COLOURS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce")  # before, after, and two more
_INK, _FAINT = "#1c1917", "#78716c"
_IN_BAR = 6  # holders that a bar tells apart
_BAR_CHARACTERS = 138  # of the small print that fit into the widest bar


def draw_timeline(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Writes a picture of live memory over the ops, one line a Timeline, with the peaks and who holds them.

    Args:
        timelines: by label, in the order to draw: before, then after.
        path: the file; its suffix says what kind (.png, .svg, .pdf).

    Raises:
        UsageError: the suffix is of no kind that can be drawn, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = len(timelines)
    figure = Figure(figsize=(11, 4.7 + 0.75 * rows), dpi=150, facecolor="white", layout="constrained")
    canvas = FigureCanvasAgg(figure)
    kinds = canvas.get_supported_filetypes()
    if Path(path).suffix.lower().lstrip(".") not in kinds:
        raise UsageError(f"{path}: no picture is of that kind; end it in .png, .svg or .pdf")
    upper, lower = figure.subplots(2, 1, height_ratios=(4.2, 0.75 * rows + 0.3))
    _draw_lines(upper, timelines)
    _draw_bars(lower, timelines)
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error


def _coloured(timelines: Mapping[str, Timeline]) -> Iterator[tuple[str, Timeline, str]]:
    for index, (label, timeline) in enumerate(timelines.items()):
        yield label, timeline, _COLOURS[index % len(_COLOURS)]


def _draw_lines(axes: Any, timelines: Mapping[str, Timeline]) -> None:
    """Live memory over the ops: an area and a line a timeline, each peak marked."""
    top = max((timeline.peak_bytes for timeline in timelines.values()), default=0) / MB or 1.0
    longest = max((len(timeline.live_bytes) for timeline in timelines.values()), default=1)
    for label, timeline, colour in _coloured(timelines):
        live = [nbytes / MB for nbytes in timeline.live_bytes] or [timeline.start_bytes / MB]
        # one more point, so that the last op has its width too
        axes.fill_between(range(len(live) + 1), [*live, live[-1]], step="post", color=colour, alpha=0.10, linewidth=0)
        axes.step(range(len(live) + 1), [*live, live[-1]], where="post", color=colour, linewidth=1.8, label=label)
        _mark_peak(axes, timeline, colour, longest)
        _mark_bound(axes, timeline, colour)
    axes.set_xlim(0, longest)
    axes.set_ylim(0, 1.16 * top)
    axes.set_ylabel("live GPU memory, MB", color=_FAINT)
    axes.set_xlabel("operation of the trace", color=_FAINT)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if top >= 10 else f"{value:g}")
    axes.grid(axis="y", color="#e7e5e4", linewidth=0.8)
    axes.set_axisbelow(True)
    _plain_frame(axes)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.008, 1.0),
        ncols=3,
        frameon=False,
        labelcolor=_INK,
        fontsize=11,
        handlelength=1.6,
    )


def _mark_peak(axes: Any, timeline: Timeline, colour: str, longest: int) -> None:
    """A dot at the peak, with its size and place beside it."""
    from matplotlib.patheffects import withStroke

    x, y = timeline.peak_pos + 0.5, timeline.peak_bytes / MB
    axes.plot([x], [y], "o", color=colour, markersize=6.5, markeredgecolor="white", markeredgewidth=1.3, zorder=5)
    to_left = x > 0.72 * longest
    axes.annotate(
        f"{megabytes(timeline.peak_bytes)} MB at op {timeline.peak_pos}",
        (x, y),
        xytext=(-9 if to_left else 9, 6),
        textcoords="offset points",
        ha="right" if to_left else "left",
        color=colour,
        fontsize=11,
        fontweight="bold",
        zorder=6,
        path_effects=[withStroke(linewidth=3.5, foreground="white")],
    )


def _mark_bound(axes: Any, timeline: Timeline, colour: str) -> None:
    """The lower bound as a dotted line, where there is a gap that can be seen and the bound says more than the start."""
    if not timeline.start_bytes < timeline.lower_bound_bytes <= 0.97 * timeline.peak_bytes:
        return
    y = timeline.lower_bound_bytes / MB
    axes.axhline(y, color=colour, linewidth=1.1, linestyle=(0, (1, 2.5)), alpha=0.9)
    words = f" no order needs less: {megabytes(timeline.lower_bound_bytes)} MB"
    axes.annotate(words, (0, y), xytext=(2, 3), textcoords="offset points", color=colour, fontsize=8.5)


def _draw_bars(axes: Any, timelines: Mapping[str, Timeline]) -> None:
    """Who is alive at each peak: one bar a timeline, its parts named where they are wide enough."""
    widest = max((timeline.peak_bytes for timeline in timelines.values()), default=0) / MB or 1.0
    for row, (_, timeline, colour) in enumerate(_coloured(timelines)):
        left = 0.0
        for index, (name, made_by, nbytes) in enumerate(_parts(timeline.holders)):
            width = nbytes / MB
            alpha = max(0.30, 0.92 - 0.13 * index)
            axes.barh(row, width, left=left, height=0.8, color=colour, alpha=alpha, edgecolor="white", linewidth=1.4)
            fits = int(width / widest * _BAR_CHARACTERS)
            if fits >= 4:
                lines = (_cut(name, fits), made_by if len(made_by) <= fits else "", megabytes(nbytes))
                text = "\n".join(line for line in lines if line)
                ink = "white" if alpha > 0.55 else _INK
                axes.text(
                    left + width / 2, row, text, ha="center", va="center", fontsize=7.5, color=ink, linespacing=1.3
                )
            left += width
    axes.set_ylim(len(timelines) - 0.5, -0.5)
    axes.set_xlim(0, widest)
    axes.set_yticks(range(len(timelines)), list(timelines), color=_INK)
    axes.set_xticks([])
    axes.set_title("alive at the peak, MB", loc="left", fontsize=10, color=_FAINT, pad=4)
    _plain_frame(axes)
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0)


def _parts(holders: Sequence[Holder]) -> list[tuple[str, str, int]]:
    """Name, maker and bytes of the largest holders, and of the rest as one."""
    parts = [(holder.name, holder.producer, holder.nbytes) for holder in holders[:_IN_BAR]]
    rest = holders[_IN_BAR:]
    return parts + ([(f"{len(rest)} more", "", sum(holder.nbytes for holder in rest))] if rest else [])


def _cut(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}…"


def _plain_frame(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#d6d3d1")
    axes.tick_params(colors=_FAINT, labelsize=9)

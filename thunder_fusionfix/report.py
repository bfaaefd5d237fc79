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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
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
from thunder_fusionfix.joint import JointReport
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
    told = shares_text(timeline.holders, lambda holder: why_alive(graph, at, holder))
    return f"The peak of {megabytes(timeline.peak_bytes)} MB is at {op_text(graph, at)}: {told}."


def op_text(graph: Graph, pos: int) -> str:
    """Which op stands at a position, the same in sentences and pictures: ``nvFusion1 (op 10 of 13)``, counted from 0."""
    return f"{graph.ops[pos].id} (op {pos} of {len(graph.ops)})" if graph.ops else "the start"


def shares_text(holders: Sequence[Holder], reason_of: Callable[[Holder], str]) -> str:
    """How much is alive for which reason, the largest share first; shares below two per cent as one.

    Args:
        holders: what is alive at a peak.
        reason_of: why a holder is.
    """
    by_reason: dict[str, list[Holder]] = {}
    for holder in holders:
        by_reason.setdefault(reason_of(holder), []).append(holder)
    shares = sorted((_Share(reason, tuple(found)) for reason, found in by_reason.items()), key=lambda one: -one.nbytes)
    total = sum(share.nbytes for share in shares)
    told = [share for share in shares if share.nbytes >= 0.02 * total]
    rest = total - sum(share.nbytes for share in told)
    parts = [f"{megabytes(share.nbytes)} MB {share.words()}" for share in told]
    return ", ".join([*parts, *([f"{megabytes(rest)} MB else"] if rest else [])])


@dataclass(frozen=True, slots=True)
class _Share:
    """The part of a peak that is there for one reason."""

    reason: str
    holders: tuple[Holder, ...]

    @property
    def nbytes(self) -> int:
        return sum(holder.nbytes for holder in self.holders)

    def words(self) -> str:
        if [holder.name for holder in self.holders] == [self.reason]:
            return self.reason
        names = [short_name(holder.name) for holder in self.holders[:2]]
        more = len(self.holders) - len(names)
        return f"{self.reason} ({', '.join(names)}{f' and {more} more' if more else ''})"


def why_alive(graph: Graph, pos: int, holder: Holder) -> str:
    """Why a holder is alive at the op at ``pos``."""
    at = graph.ops[pos]
    if is_temporary(graph, holder):
        where = ", where nvFuser cuts it" if at.is_fusion else ""
        return f"that {at.id} writes only for itself{where}"
    if holder.producer in ("argument", "saved tensor", "cotangent"):
        return {"argument": "arguments", "saved tensor": "saved by the forward", "cotangent": "incoming gradients"}[
            holder.producer
        ]
    if holder.last_use == RETURN:
        return "results"
    return "at work in this op" if holder.last_use == at.id and holder.producer == at.id else "made for ops to come"


def is_temporary(graph: Graph, holder: Holder) -> bool:
    """True for what an op writes only for itself: no value of the trace has it."""
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
    start_of_backward_bytes: (
        int | None
    )  # the most at the first tenth of a backward's computing ops; None for another trace
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
        start_of_backward_bytes=start_of_backward_peak(graph, timeline) if graph.stage == "backward" else None,
        num_regions=sum(op.is_fusion for op in graph.ops),
        num_launches=sum(_launches(op, shared) for op in graph.ops),
        layouts=Counter(cost.cost for cost in costs),
        layout_bytes=sum(cost.nbytes for cost in costs),
        saved_bytes=shared.bytes_of(graph.saved) if graph.stage == "forward" else None,
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


def report_blocks(report: Report, title: str = "") -> list[Block]:
    """What the passes did to one trace: the answer, before and after in numbers, each rewrite, each refusal.

    Args:
        report: of the trace.
        title: what the trace is called; by default its stage.
    """
    before, after = (
        summarize(graph, timeline)
        for graph, timeline in ((report.graph_before, report.before), (report.graph_after, report.after))
    )
    applied = [decision for decision in report.decisions if decision.applied]
    peaks = f"peak {megabytes(before.peak_bytes)} -> {megabytes(after.peak_bytes)} MB"
    change = f" ({_percent(before.peak_bytes, after.peak_bytes)})" if before.peak_bytes != after.peak_bytes else ""
    words = f"{len(applied)} rewrite{'s' * (len(applied) != 1)}"
    blocks: list[Block] = [
        Heading(
            f"{title or f'{report.stage} trace'}: {peaks}{change}, {words}, {report.seconds * 1e3:.0f} ms", is_main=True
        )
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
        "peak in the first tenth of the backward, MB",
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
                listed((one.what for one in found), 2),
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


def entry_blocks(report: JointReport) -> list[Block]:
    """What the entry did to one trace before its fusions were made."""
    applied = sum(decision.applied for decision in report.decisions)
    saved = f"saved for the backward {megabytes(report.saved_before_bytes)} -> {megabytes(report.saved_after_bytes)} MB"
    what = f"{saved} by a dry run, " if report.stage == "joint" else ""
    words = f"{applied} rewrite{'s' * (applied != 1)}, {report.seconds * 1e3:.0f} ms"
    blocks: list[Block] = [Heading(f'{report.stage} trace, by the entry "fusionfix": {what}{words}', is_main=True)]
    if report.kept_input is not None:
        blocks.append(Line(f"left as it was: {report.kept_input}", "bad"))
    return blocks + decision_blocks(report.decisions)


def entry_text(report: JointReport) -> str:
    """The entry's report as plain text."""
    return plain(entry_blocks(report))


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
_LEAST_IN_BAR = 0.03  # of the widest bar, that a holder must take to be told apart
_BAR_CHARACTERS = 138  # of the small print that fit into the widest bar
_PHASE_CHARACTERS = 110  # of the print below the axis that fit beside each other
_LEAST_PHASE = 0.12  # of the axis: where the peak is, is often a phase of one op


@dataclass(frozen=True, slots=True)
class Curve:
    """Live memory as it is drawn: of one trace, or of a whole step."""

    timeline: Timeline
    peak_op: str  # the op at the peak, as the text names it
    phases: tuple[tuple[str, int], ...] = ()  # of a step: names, and how many points of the timeline each has, in order


def curve(graph: Graph, timeline: Timeline) -> Curve:
    """One trace as it is drawn."""
    return Curve(timeline, op_text(graph, timeline.peak_pos))


def draw_timeline(curves: Mapping[str, Curve], path: str | Path) -> None:
    """Writes a picture of live memory over the ops, a line each, with the peaks and who holds them.

    Args:
        curves: by label, in the order to draw: before, then after.
        path: the file; its suffix says what kind (.png, .svg, .pdf).

    Raises:
        UsageError: the suffix is of no kind that can be drawn, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = len(curves)
    figure = Figure(figsize=(11, 4.9 + 0.85 * rows), dpi=150, facecolor="white", layout="constrained")
    canvas = FigureCanvasAgg(figure)
    kinds = canvas.get_supported_filetypes()
    if Path(path).suffix.lower().lstrip(".") not in kinds:
        raise UsageError(f"{path}: no picture is of that kind; end it in .png, .svg or .pdf")
    upper, lower = figure.subplots(2, 1, height_ratios=(4.4, 0.85 * rows + 0.3))
    _draw_lines(upper, curves)
    _draw_bars(lower, curves)
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error


def _coloured(curves: Mapping[str, Curve]) -> Iterator[tuple[str, Curve, str]]:
    for index, (label, drawn) in enumerate(curves.items()):
        yield label, drawn, _COLOURS[index % len(_COLOURS)]


def _draw_lines(axes: Any, curves: Mapping[str, Curve]) -> None:
    """Live memory over the ops: an area and a line each, every peak marked."""
    top = max((drawn.timeline.peak_bytes for drawn in curves.values()), default=0) / MB or 1.0
    widths = _phase_widths(curves.values())
    longest = sum(width for _, width in widths) or max(
        (len(one.timeline.live_bytes) for one in curves.values()), default=1
    )
    marked: list[tuple[float, float]] = []
    for label, drawn, colour in _coloured(curves):
        timeline = drawn.timeline
        live = [nbytes / MB for nbytes in timeline.live_bytes] or [timeline.start_bytes / MB]
        edges = _edges(drawn, dict(widths)) if widths else [float(pos) for pos in range(len(live) + 1)]
        # one more point, so that the last op has its width too
        axes.fill_between(edges, [*live, live[-1]], step="post", color=colour, alpha=0.10, linewidth=0)
        axes.step(edges, [*live, live[-1]], where="post", color=colour, linewidth=1.8, label=label)
        x, y = (edges[timeline.peak_pos] + edges[timeline.peak_pos + 1]) / 2 / longest, timeline.peak_bytes / MB / top
        is_beside = any(abs(x - other_x) < 0.4 and abs(y - other_y) < 0.07 for other_x, other_y in marked)
        _mark_peak(axes, drawn, (x * longest, y * top), colour, to_left=x > 0.5, below=is_beside)
        marked.append((x, y))
        _mark_bound(axes, timeline, colour)
    axes.set_xlim(0, longest)
    axes.set_ylim(0, 1.16 * top)
    axes.set_ylabel("live GPU memory, MB", color=_FAINT)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if top >= 10 else f"{value:g}")
    axes.grid(axis="y", color="#e7e5e4", linewidth=0.8)
    axes.set_axisbelow(True)
    _plain_frame(axes)
    if widths:
        _name_phases(axes, widths, longest)
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("op of the trace, counted from 0", color=_FAINT)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.008, 1.0),
        ncols=3,
        frameon=False,
        labelcolor=_INK,
        fontsize=11,
        handlelength=1.6,
    )


def _phase_widths(curves: Iterable[Curve]) -> tuple[tuple[str, float], ...]:
    """Each phase of a step with its width on the axis, the same for all that is drawn; nothing for single traces."""
    phases = [drawn.phases for drawn in curves]
    names = [tuple(name for name, _ in found) for found in phases]
    if not names or not names[0] or len(set(names)) > 1:
        return ()
    counts = [max(found[at][1] for found in phases) for at in range(len(names[0]))]
    least = min(_LEAST_PHASE, 0.8 / len(counts)) * sum(counts)
    return tuple((name, max(count, least)) for name, count in zip(names[0], counts))


def _edges(drawn: Curve, widths: Mapping[str, float]) -> list[float]:
    """Where on the axis each point of a step begins, and the last one ends: a phase's points share its width."""
    edges, start = [0.0], 0.0
    for name, count in drawn.phases:
        edges += [start + widths[name] * (index + 1) / count for index in range(count)]
        start += widths[name]
    return edges


def _name_phases(axes: Any, widths: Sequence[tuple[str, float]], longest: float) -> None:
    """The phases below the axis, with a line between two of them."""
    starts = [sum(width for _, width in widths[:at]) for at in range(len(widths) + 1)]
    for start in starts[1:-1]:
        axes.axvline(start, color="#d6d3d1", linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
    texts = [
        "\n".join(_wrapped(name.replace(" of ", "\n", 1), int(width / longest * _PHASE_CHARACTERS), 3))
        for name, width in widths
    ]
    axes.set_xticks([start + width / 2 for start, (_, width) in zip(starts, widths)], texts)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("ops that compute, in the order in which they run; each phase as wide as it needs", color=_FAINT)


def _mark_peak(axes: Any, drawn: Curve, at: tuple[float, float], colour: str, *, to_left: bool, below: bool) -> None:
    """A dot at the peak, with its size and place beside it."""
    from matplotlib.patheffects import withStroke

    axes.plot(*([part] for part in at), "o", color=colour, markersize=6.5, markeredgecolor="white", zorder=5)
    axes.annotate(
        f"{megabytes(drawn.timeline.peak_bytes)} MB at {drawn.peak_op}",
        at,
        xytext=(-9 if to_left else 9, -15 if below else 6),
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


def _draw_bars(axes: Any, curves: Mapping[str, Curve]) -> None:
    """Who is alive at each peak: one bar each, its parts named where they are wide enough."""
    widest = max((drawn.timeline.peak_bytes for drawn in curves.values()), default=0) / MB or 1.0
    for row, (_, drawn, colour) in enumerate(_coloured(curves)):
        left = 0.0
        for index, (name, made_by, nbytes) in enumerate(_parts(drawn.timeline.holders, _LEAST_IN_BAR * widest * MB)):
            width = nbytes / MB
            alpha = max(0.30, 0.92 - 0.13 * index)
            axes.barh(row, width, left=left, height=0.84, color=colour, alpha=alpha, edgecolor="white", linewidth=1.4)
            fits = int(width / widest * _BAR_CHARACTERS)
            if fits >= 5:
                maker = made_by if len(made_by) <= fits and made_by not in name else ""
                lines = (*_wrapped(name, fits, 2 if maker else 3), maker, megabytes(nbytes))
                text = "\n".join(line for line in lines if line)
                ink = "white" if alpha > 0.55 else _INK
                axes.text(
                    left + width / 2, row, text, ha="center", va="center", fontsize=7.5, color=ink, linespacing=1.25
                )
            left += width
    axes.set_ylim(len(curves) - 0.5, -0.5)
    axes.set_xlim(0, widest)
    axes.set_yticks(range(len(curves)), list(curves), color=_INK)
    axes.set_xticks([])
    axes.set_title("alive at the peak, MB", loc="left", fontsize=10, color=_FAINT, pad=4)
    _plain_frame(axes)
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0)


def _parts(holders: Sequence[Holder], least_bytes: float) -> list[tuple[str, str, int]]:
    """Name, maker and bytes of the largest holders, and of the rest as one."""
    told = [holder for holder in holders[:_IN_BAR] if holder.nbytes >= least_bytes]
    rest = holders[len(told) :]
    parts = [(holder.name, holder.producer, holder.nbytes) for holder in told]
    return parts + ([(f"{len(rest)} more", "", sum(holder.nbytes for holder in rest))] if rest else [])


def _wrapped(text: str, width: int, most: int) -> list[str]:
    """``text`` in at most ``most`` lines of ``width`` characters, cut at blanks where it can be; what is too long is cut off.

    >>> _wrapped("saved by thunder_0 of graph 0", 14, 2)
    ['saved by', 'thunder_0 of…']
    >>> _wrapped("l_self_modules_weight", 14, 2)
    ['l_self_modules', '_weight']
    """
    lines = [line for part in text.split("\n") for line in wrap(part, max(width, 1))]
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"{lines[most - 1][: max(width, 1) - 1]}…"]


def _plain_frame(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#d6d3d1")
    axes.tick_params(colors=_FAINT, labelsize=9)

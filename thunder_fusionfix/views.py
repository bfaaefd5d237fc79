"""What explanations, diffs and verdicts say to people, as blocks of a `document`; the answer comes first, details after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from thunder_fusionfix.diff import Crossing, Instance, RegionChange, Side, TraceDiff
from thunder_fusionfix.document import Block, Code, Heading, Line, Table, megabytes, signed_megabytes
from thunder_fusionfix.explain import Explanation, LayoutRegion
from thunder_fusionfix.match import BOOKKEEPING
from thunder_fusionfix.model import Graph
from thunder_fusionfix.report import listed
from thunder_fusionfix.sources import Source
from thunder_fusionfix.verify import Fault, Rule

LEAST_COMMON = 0.2  # of the ops of the larger trace that both must have, or a diff says that they are strangers
MAX_ROWS = 20  # rows of a table before the rest is only counted; --json has all


@dataclass(frozen=True, slots=True)
class Verdict:
    """One rule that a trace, or a pair of traces, broke."""

    rule: Rule
    fault: Fault
    source: Source  # the trace that `fault.pos` belongs to


# ---------------------------------------------------------------- explain


def explanation_blocks(found: Explanation) -> list[Block]:
    """Peak, its holders and why each lives, regions of layouts only, the plan, and what is not known."""
    place = found.source.line_text(found.peak_pos) if found.graph.ops else "the start"
    blocks: list[Block] = [
        Heading(
            f"{found.source.title}: peak of this trace {megabytes(found.peak_bytes)} MB at {found.peak_op}, {place}",
            is_main=True,
        ),
        Line(
            f"{found.graph.stage} trace of {len(found.graph.ops)} ops; {megabytes(found.start_bytes)} MB before the first op; "
            f"no order of these ops needs less than {megabytes(found.lower_bound_bytes)} MB"
        ),
        Heading(f"alive at the peak ({len(found.holders)} of {found.num_holders}, largest first)"),
        *limited(
            Table(
                ("tensor", "MB", "type", "made by", "needed next by"),
                tuple(
                    (
                        holder.name,
                        megabytes(holder.nbytes),
                        holder.type or "?",
                        holder.made_by,
                        _next_use(holder.needed_by, holder.needed_pos, found),
                    )
                    for holder in found.holders
                ),
                right=(1,),
            )
        ),
    ]
    if not found.holders:
        blocks.append(Line("nothing whose size is known", "faint"))
    for region in found.layout_regions:
        blocks += _layout_region_blocks(region, found)
    blocks += _plan_blocks(found)
    blocks += note_blocks(found.notes)
    return blocks


def _next_use(needed_by: str, pos: int | None, found: Explanation) -> str:
    if pos is None or pos == found.peak_pos or needed_by == "returned":
        return needed_by
    return f"{needed_by}, {found.source.line_text(pos)}"


def _layout_region_blocks(region: LayoutRegion, found: Explanation) -> list[Block]:
    origins = Counter(
        one.origin if one.origin in ("saved tensor", "argument", "cotangent") else "other value" for one in region.takes
    )
    kinds = ", ".join(_counted(number, origin) for origin, number in origins.most_common())
    taken_bytes = sum(one.nbytes or 0 for one in region.takes)
    unknown = sum(one.nbytes is None for one in region.takes)
    rows = tuple(
        (one.name, megabytes(one.nbytes) if one.nbytes is not None else "?", one.known_by, one.origin)
        for one in region.takes[:MAX_ROWS]
    )
    blocks: list[Block] = [
        Heading(f"{region.name} holds layout ops only ({found.source.line_text(region.pos)})"),
        Line(
            f"its {region.num_ops} ops compute nothing; it takes {kinds}: {megabytes(taken_bytes)} MB"
            + (f", and {unknown} of unknown size" if unknown else "")
        ),
        Table(("takes", "MB", "known by", "is"), rows, right=(1,)),
        Line(
            f"it gives {megabytes(region.output_bytes)} MB at once"
            + (f", {region.nearest_use} steps before the first op that takes any of it" if region.nearest_use else "")
            + ": a fusion that copies its outputs, as older nvFuser did, needs as much more memory here"
        ),
        Line("dissolved, each op runs in torch right before the op that takes it, and nothing is made here:"),
        Line(f"  {region.num_views} outputs, {megabytes(region.view_bytes)} MB: views for certain, no memory"),
    ]
    if region.num_maybe:
        blocks.append(
            Line(
                f"  {region.num_maybe} outputs, {megabytes(region.maybe_bytes)} MB: views where the input's strides allow, "
                "else copies that live from their consumer's step on"
            )
        )
    if region.num_copies:
        blocks.append(
            Line(f"  {region.num_copies} outputs, {megabytes(region.copy_bytes)} MB: copies, made later than now")
        )
    return blocks


def _plan_blocks(found: Explanation) -> list[Block]:
    applied = found.applied
    if not found.decisions:
        return [Heading("plan"), Line("the passes find nothing to change in this trace", "faint")]
    peaks = f"peak {megabytes(found.peak_bytes)} -> {megabytes(found.planned_peak_bytes)} MB"
    blocks: list[Block] = [Heading(f"plan for this trace: {_counted(len(applied), 'rewrite')}, {peaks} by estimate")]
    rows = [
        (
            found.source.line_text(one.pos),
            one.where,
            one.what,
            megabytes(one.bytes_won),
        )
        for one in sorted(applied, key=lambda one: -one.bytes_won)
    ]
    blocks += limited(Table(("at", "in", "what", "MB won there"), tuple(rows), right=(3,)))
    refused: dict[tuple[str, str], list[str]] = {}
    for one in found.decisions:
        if not one.applied:
            refused.setdefault((one.pass_name, one.reason), []).append(f"{one.where}: {one.what}")
    for (pass_name, reason), places in sorted(refused.items(), key=lambda item: -len(item[1])):
        blocks.append(Line(f"{pass_name} refused {len(places)}: {reason} ({listed(places, 1)})", "faint"))
    return blocks


# ---------------------------------------------------------------- diff

# What a list of a diff counts, for one and for several.
_LISTS = {
    "moved": ("moved", "moved"),
    "left": ("left a fusion", "left a fusion"),
    "entered": ("entered a fusion", "entered a fusion"),
    "regrouped": ("in another fusion", "in another fusion"),
    "split": ("fusion split", "fusions split"),
    "merged": ("fusion merged", "fusions merged"),
    "duplicated": ("duplicated", "duplicated"),
    "deduplicated": ("no longer duplicated", "no longer duplicated"),
    "added": ("added", "added"),
    "gone": ("gone", "gone"),
    "changed": ("change", "changes"),
    "lifetimes": ("lifetime", "lifetimes"),
    "saved_more": ("saved more", "saved more"),
    "saved_less": ("saved less", "saved less"),
    "regions": ("fusion of another size", "fusions of another size"),
    "other": ("other difference", "other differences"),
}


def diff_blocks(found: TraceDiff, before: Source, after: Source) -> list[Block]:
    """The change in peak first, then what moved, left, appeared, went and changed."""
    if found.is_empty:
        return [
            Heading(f"{before.title} and {after.title} are the same", is_main=True),
            Line(f"peak {megabytes(found.before.peak_bytes)} MB at {found.before.peak_op}"),
        ]
    change = found.after.peak_bytes - found.before.peak_bytes
    blocks: list[Block] = [
        Heading(
            f"peak {megabytes(found.before.peak_bytes)} -> {megabytes(found.after.peak_bytes)} MB ({signed_megabytes(change)}), "
            f"saved {megabytes(found.before.saved_bytes)} -> {megabytes(found.after.saved_bytes)} MB",
            is_main=True,
        ),
        Line(f"before: {before.title}, {_peak_text(found.before, before)}"),
        Line(f"after:  {after.title}, {_peak_text(found.after, after)}"),
        Line(
            ", ".join(
                _counted(len(getattr(found, name)), *_LISTS[name]) for name in found.lists() if getattr(found, name)
            )
        ),
    ]
    blocks += _unrelated_blocks(found, before.graph, after.graph)
    blocks += _holder_blocks(found)
    blocks += _titled(
        "moved",
        ["op", "name", "from", "to", "steps to consumer"],
        (
            (
                one.id_after,
                one.name_after,
                str(one.from_pos),
                str(one.to_pos),
                f"{one.distance_before} -> {one.distance_after}",
            )
            for one in found.moved
        ),
    )
    for title, crossings in (
        ("left a fusion", found.left),
        ("entered a fusion", found.entered),
        ("in another fusion", found.regrouped),
    ):
        blocks += _titled(
            title, ["op", "name", "from", "to", "MB", "steps to consumer"], map(_crossing_row, crossings), right=(4,)
        )
    for title, partitions in (("split", found.split), ("merged", found.merged)):
        rows = ((one.whole, ", ".join(one.parts)) for one in partitions)
        blocks += _titled(title, ("fusion", "into" if title == "split" else "from"), rows)
    for title, instances in (
        ("duplicated", found.duplicated),
        ("no longer duplicated", found.deduplicated),
        ("added", found.added),
        ("gone", found.gone),
    ):
        blocks += _titled(title, ["op", "name", "at", "in", "MB", "copy of"], map(_instance_row, instances), right=(4,))
    blocks += _titled(
        "changed",
        ["op", "name", "what", "before", "after"],
        ((one.what, one.name_after, one.aspect, _short(one.before), _short(one.after)) for one in found.changed),
    )
    blocks += _titled(
        "fusions", ["fusion", "inputs", "outputs", "ops", "MB in", "MB out"], map(_region_row, found.regions)
    )
    blocks += _titled(
        "lifetimes, by bytes times steps",
        ["value", "MB", "steps before", "steps after"],
        (
            (one.name_after, megabytes(one.nbytes), str(one.steps_before), str(one.steps_after))
            for one in found.lifetimes
        ),
        right=(1, 2, 3),
    )
    for title, saved in (
        ("saved for the backward, new", found.saved_more),
        ("saved for the backward, no longer", found.saved_less),
    ):
        blocks += _titled(
            title, ("value", "MB", "type"), ((one.name, megabytes(one.nbytes), one.type) for one in saved), right=(1,)
        )
    blocks += _titled(
        "other differences",
        ("of", "before", "after"),
        ((one.what, _short(one.before), _short(one.after)) for one in found.other),
    )
    return blocks


def _unrelated_blocks(found: TraceDiff, before: Graph, after: Graph) -> list[Block]:
    """Says so where the traces have next to nothing in common: they are hardly of one program."""
    sizes = [sum(len(op.leaves) for op in graph.ops if op.id not in BOOKKEEPING) for graph in (before, after)]
    matched = max(sizes[0] - len(found.gone) - len(found.deduplicated), 0)
    if matched >= LEAST_COMMON * max(sizes):
        return []
    words = f"only {matched} of {max(sizes):,} ops are in both: these are hardly two traces of one program; wrong file?"
    return [Line(words, "bad")]


def _peak_text(side: Side, source: Source) -> str:
    text = f"{side.num_ops} ops, peak at {side.peak_op} ({source.place(side.peak_pos)})"
    return text + (f", {side.num_unknown} tensors of unknown size count as 0" if side.num_unknown else "")


def _holder_blocks(found: TraceDiff) -> list[Block]:
    """The largest live tensors at both peaks, side by side."""
    num = max(len(found.before.holders), len(found.after.holders))
    cells = [
        [(one.name, megabytes(one.nbytes)) for one in side.holders] + [("", "")] * (num - len(side.holders))
        for side in (found.before, found.after)
    ]
    rows = tuple((*one, *other) for one, other in zip(*cells))
    return [Heading("largest live tensors at the peak"), Table(("before", "MB", "after", "MB"), rows, right=(1, 3))]


def _crossing_row(one: Crossing) -> tuple[str, ...]:
    before, after = one.region_before or f"op {one.pos_before}", one.region_after or f"op {one.pos_after}"
    return (
        one.what,
        one.name_after,
        before,
        after,
        megabytes(one.nbytes),
        f"{one.distance_before} -> {one.distance_after}",
    )


def _instance_row(one: Instance) -> tuple[str, ...]:
    return one.what, one.name, str(one.pos), one.region or "-", megabytes(one.nbytes), one.copy_of or "-"


def _region_row(one: RegionChange) -> tuple[str, ...]:
    name = " -> ".join(dict.fromkeys(size.name if size is not None else "none" for size in (one.before, one.after)))

    def cell(field: str, *, is_size: bool = False) -> str:
        numbers = [getattr(size, field) if size is not None else 0 for size in (one.before, one.after)]
        texts = [megabytes(number) if is_size else str(number) for number in numbers]
        return texts[0] if texts[0] == texts[1] else f"{texts[0]} -> {texts[1]}"

    counts = (cell("num_inputs"), cell("num_outputs"), cell("num_ops"))
    return name, *counts, cell("input_bytes", is_size=True), cell("output_bytes", is_size=True)


# ---------------------------------------------------------------- check


def verdict_blocks(verdicts: Sequence[Verdict], checked: Sequence[Source]) -> list[Block]:
    """Every broken rule with its law and ten lines around the place; or that nothing is wrong."""
    names = " against ".join(source.title for source in checked)
    if not verdicts:
        blocks: list[Block] = [Heading(f"{names}: no rule is broken", is_main=True)]
    else:
        blocks = [Heading(f"{names}: {_counted(len(verdicts), 'fault')}", is_main=True)]
    for verdict in verdicts[:MAX_ROWS]:
        lines, marked = verdict.source.context(verdict.fault.pos)
        blocks.append(
            Heading(
                f"{verdict.source.place(verdict.fault.pos)}: {verdict.rule.name}: {_short(verdict.fault.text, 200)}"
            )
        )
        blocks.append(Line(f"law: {verdict.rule.law}", "faint"))
        blocks.append(Code(tuple(_short(line, 160) for line in lines), marked))
    if len(verdicts) > MAX_ROWS:
        blocks.append(Line(f"and {len(verdicts) - MAX_ROWS} more; --json has all", "faint"))
    for source in checked:
        blocks += note_blocks(source.graph.notes)
    return blocks


# ---------------------------------------------------------------- shared


def note_blocks(notes: Iterable[str]) -> list[Block]:
    """What was inferred or is not known of a pasted text."""
    lines = [Line(note, "faint") for note in notes]
    return [Heading("what the text does not tell"), *lines] if lines else []


def limited(table: Table) -> Iterator[Block]:
    """The table, cut after `MAX_ROWS` rows with a line that counts the rest."""
    if not table.rows:
        return
    yield Table(table.header, table.rows[:MAX_ROWS], table.right)
    if len(table.rows) > MAX_ROWS:
        yield Line(f"and {len(table.rows) - MAX_ROWS} more; --json has all", "faint")


def _titled(
    title: str, header: Sequence[str], rows: Iterable[tuple[str, ...]], right: tuple[int, ...] = ()
) -> list[Block]:
    found = tuple(rows)
    return [Heading(f"{title} ({len(found)})"), *limited(Table(tuple(header), found, right))] if found else []


def _short(text: str, width: int = 72) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _counted(number: int, one: str, several: str | None = None) -> str:
    """A number with what it counts: ``1 fault``, ``3 faults``."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"

"""Traces from wherever a user has them: a file or pasted text, a saved Graph, a Graph, a trace of Thunder's own.

Whatever it came from, a `Source` knows the trace's Graph and its printed lines, so that every tool can point at a line.

    >>> (source,) = sources("def f(x):\\n  t1 = prims.neg(x)\\n  return t1\\n")
    >>> source.title, source.text_of(0)
    ('f (<text>:1)', ('  t1 = prims.neg(x)',))
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thunder_fusionfix.diff import TraceDiff, diff
from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.model import Graph
from thunder_fusionfix.model_names import NAMES
from thunder_fusionfix.parse import parse_document
from thunder_fusionfix.store import FORMAT, load_graphs
from thunder_fusionfix.text import label_above
from thunder_fusionfix.unparse import graph_lines

STDIN = "-"
_SUFFIXES = (".txt", ".py", ".md", ".json", ".log", ".trace")


@dataclass(frozen=True)
class Source:
    """One trace and its printed lines."""

    graph: Graph
    name: str  # of the file, or what stands for it
    first_line: int  # of the trace in the file, from 1
    lines: tuple[str, ...]  # of the whole file
    op_lines: tuple[tuple[int, int], ...]  # per op: its first and last line, from 1
    is_text: bool = True  # False: a Graph, whose lines were printed here and stand in no file

    @property
    def title(self) -> str:
        return (
            f"{self.graph.name} ({self.name}:{self.first_line})" if self.is_text else f"{self.graph.name} ({self.name})"
        )

    @property
    def label(self) -> str | None:
        """Under which label `fusionfix` saved the trace, as "net forward"; None for a trace from elsewhere."""
        return label_above(self.lines, self.first_line) if self.is_text else self.name.rpartition("#")[2] or None

    def line_of(self, pos: int) -> int | None:
        """The line of the file at which an op stands; None where it stands in none."""
        return self.op_lines[pos][0] if self.is_text and self.op_lines else None

    def place(self, pos: int) -> str:
        """Where an op stands: ``trace.txt:12``, or ``trace.json#net forward, op 3``."""
        line = self.line_of(pos)
        return f"{self.name}:{line}" if line is not None else f"{self.name}, op {pos}"

    def line_text(self, pos: int) -> str:
        """Where an op stands within the file, ``line 12`` or ``op 3``; a dash for no position of the trace."""
        if not 0 <= pos < len(self.graph.ops):
            return "-"
        line = self.line_of(pos)
        return f"line {line}" if line is not None else f"op {pos}"

    def text_of(self, pos: int) -> tuple[str, ...]:
        """The lines of an op, with its sub-ops."""
        first, last = self.op_lines[pos]
        return self.lines[first - 1 : last]

    def context(self, pos: int, num_lines: int = 10) -> tuple[tuple[str, ...], int]:
        """About ``num_lines`` lines around an op, and which of them is its first."""
        first = self.op_lines[pos][0] if self.op_lines else 1
        start = max(0, min(first - 1 - num_lines // 2, len(self.lines) - num_lines))
        return self.lines[start : start + num_lines], first - 1 - start


def sources(trace: Any) -> tuple[Source, ...]:
    """All traces in ``trace``, in order; at least one.

    Args:
        trace: a TraceCtx of Thunder's, a Graph, a path, ``"-"`` for standard input, or the text of a printed trace itself
            (a string of several lines). Files hold printed traces with anything around them, or Graphs that were saved.

    Raises:
        UsageError: there is no such file, or no trace in it.
        UnsupportedTraceError: a TraceCtx that `read` refuses.
    """
    if isinstance(trace, Source):
        return (trace,)
    if isinstance(trace, Graph):
        return (_of_graph(trace, "<graph>"),)
    if isinstance(trace, (list, tuple)) and trace:
        return tuple(source for one in trace for source in sources(one))
    if hasattr(trace, "bound_symbols"):
        return (_of_trace(trace),)
    if isinstance(trace, str) and "\n" in trace:
        return _of_text(trace, "<text>")
    if isinstance(trace, str) and trace == STDIN:
        return _of_text(sys.stdin.read(), "<stdin>")
    if isinstance(trace, (str, Path)):
        return _of_file(Path(trace))
    raise UsageError(
        f"{type(trace).__name__} is no trace; give a trace of Thunder's, a Graph, a path or the printed text"
    )


def choose(found: Sequence[Source], wanted: str | None) -> tuple[Source, ...]:
    """The sources that ``wanted`` names: by number from 1, by name, stage or label; all of them for None.

    Raises:
        UsageError: nothing has that number or name.
    """
    if wanted is None:
        return tuple(found)
    if wanted.isdigit() and 0 < int(wanted) <= len(found):
        return (found[int(wanted) - 1],)
    chosen = tuple(one for one in found if wanted in (one.graph.name, one.graph.stage, one.label))
    if not chosen:
        there = ", ".join(f"{number} {one.title}" for number, one in enumerate(found, start=1))
        raise UsageError(f"--trace {wanted}: give a number, a name or a stage; there is {there}")
    return chosen


def paired(before: Sequence[Source], after: Sequence[Source]) -> tuple[tuple[Source, Source], ...]:
    """Traces to compare: of one stage those with the same label, else in order; the only ones of both sides in any case.

    Raises:
        UsageError: no trace of one side has a counterpart.
    """
    if len(before) == len(after) == 1:
        return ((before[0], after[0]),)
    left = list(after)
    mates: dict[int, Source] = {}
    for is_mate in (_same_label, _same_stage):
        for index, one in enumerate(before):
            mate = next((other for other in left if index not in mates and is_mate(one, other)), None)
            if mate is not None:
                mates[index] = mate
                left = [other for other in left if other is not mate]
    pairs = [(before[index], mates[index]) for index in sorted(mates)]
    if not pairs:
        raise UsageError(
            f"{after[0].name}: no trace of a stage that {before[0].name} has; choose one of each with --trace"
        )
    return tuple(pairs)


def _same_stage(one: Source, other: Source) -> bool:
    return one.graph.stage == other.graph.stage


def _same_label(one: Source, other: Source) -> bool:
    return one.label is not None and one.label == other.label and _same_stage(one, other)


def diff_traces(before: Any, after: Any) -> TraceDiff:
    """The differences between two traces.

    Args:
        before: a TraceCtx, a Graph, a path or printed text, with one trace.
        after: the same.

    Returns:
        The diff; ``is_empty`` where the traces are the same but for names.

    Raises:
        UsageError: there is no such file, or it does not hold exactly one trace.

    Example: ``diff_traces(thunder.last_traces(f)[-2], thunder.last_traces(f)[-1])``
    """
    return diff(_only(sources(before)).graph, _only(sources(after)).graph)


def _only(found: Sequence[Source]) -> Source:
    if len(found) > 1:
        raise UsageError(f"{found[1].title}: {len(found)} traces where one is wanted")
    return found[0]


def _of_trace(trace: Any) -> Source:
    from thunder_fusionfix.read import read

    graph, text = read(trace), str(trace)
    (parsed,) = parse_document(text, name="<trace>")
    if len(parsed.op_lines) != len(graph.ops):
        return _of_graph(graph, "<trace>")
    return Source(graph, "<trace>", parsed.first_line, tuple(text.split("\n")), parsed.op_lines)


def _of_graph(graph: Graph, name: str) -> Source:
    lines, places = graph_lines(graph)
    return Source(graph, name, 1, tuple(lines), tuple(places), is_text=False)


def _of_text(text: str, name: str) -> tuple[Source, ...]:
    lines = tuple(line.rstrip("\r") for line in text.split("\n"))
    return tuple(
        Source(parsed.graph, name, parsed.first_line, lines, parsed.op_lines)
        for parsed in parse_document(text, name=name)
    )


def _of_file(path: Path) -> tuple[Source, ...]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise UsageError(
            f"{path}: there is no such file; give a saved or printed trace, or - for standard input"
        ) from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); give a file with a trace") from error
    if text.lstrip().startswith("{") and f'"{FORMAT}"' in text[:200]:
        return tuple(_of_graph(graph, f"{path}#{label}") for label, graph in load_graphs(path).items())
    return _of_text(text, str(path))


def looks_like_file(target: str) -> bool:
    """True for what a user means as a file rather than as the name of a model."""
    if target in NAMES:  # a folder of that name may lie about
        return Path(target).is_file()
    return target == STDIN or Path(target).exists() or target.endswith(_SUFFIXES) or "/" in target

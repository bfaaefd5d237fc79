"""The verbs for traces at hand: `explain` one, `check` one or a pair, `diff` two. No GPU, no Thunder, nothing is executed.

A trace is a file with a printed trace and anything around it (an issue, a log), a file of saved Graphs, or ``-`` for standard
input. Exit codes: 0 same or fine, 1 differs or fails, 2 wrong usage, with one line that names the file and the line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any

import typer

from thunder_fusionfix.config import FusionFixConfig
from thunder_fusionfix.diff import diff
from thunder_fusionfix.document import Block, Heading, Line, markdown, show
from thunder_fusionfix.errors import FusionFixError, UsageError
from thunder_fusionfix.explain import Explanation, explain_trace
from thunder_fusionfix.model import Graph
from thunder_fusionfix.page import page
from thunder_fusionfix.passes import PASSES
from thunder_fusionfix.sources import Source, choose, looks_like_file, paired, sources
from thunder_fusionfix.verify import GRAPH_RULES, PAIR_RULES, Allow, Pair
from thunder_fusionfix.views import Verdict, diff_blocks, explanation_blocks, verdict_blocks

CHECK_SCHEMA = "thunder_fusionfix.check/1"
SAME, DIFFERS, WRONG_USAGE = 0, 1, 2

# What `explain` calls with a target that is no file: the traces of a model, as `sources` takes them.
ModelTraces = Callable[[str], Any]

Trace = Annotated[
    str, typer.Argument(metavar="TRACE", help="File with a printed or saved trace; - for standard input.")
]
Before = Annotated[str, typer.Argument(metavar="A", help="File with the trace before; - for standard input.")]
After = Annotated[str, typer.Argument(metavar="B", help="File with the trace after.")]
Second = Annotated[
    str | None, typer.Argument(metavar="[B]", help="File with the trace after a rewrite, to judge against the first.")
]
Which = Annotated[
    str | None, typer.Option("--trace", "-t", help="Of a file with several traces: number from 1, name or stage.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON, as described in docs/json.md.")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Markdown, to paste into an issue.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a page with the memory timeline that opens offline.")]
Allowed = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        help="What B may change; may be given several times: fix (all that the passes of `fix` may do), or one of "
        "reorder, rewrite-regions, split-regions, repeat-cheap-ops, own-cotangents, expand-zero-cotangents, keep-longer.",
    ),
]

ALLOW_FIX = "fix"
_ALLOWANCES = {
    "reorder": "may_reorder",
    "rewrite-regions": "may_rewrite_regions",
    "split-regions": "may_split_regions",
    "repeat-cheap-ops": "may_clone",
    "own-cotangents": "may_own_cotangents",
    "expand-zero-cotangents": "may_expand_cotangents",
    "keep-longer": "may_keep_longer",
}


def register(app: typer.Typer, model_traces: ModelTraces | None = None) -> None:
    """Adds the verbs to ``app``.

    Args:
        app: the command.
        model_traces: gives the traces of a model by its name; None where `explain` is to take traces only.
    """
    _register_explain(app, model_traces)
    register_diff_and_check(app)


def _register_explain(app: typer.Typer, model_traces: ModelTraces | None) -> None:
    @app.command("explain")
    def explain_verb(
        target: Trace, trace: Which = None, as_json: AsJson = False, as_markdown: AsMarkdown = False, html: Html = None
    ) -> None:
        """Where the memory peak is, what holds it and why, and what the passes would do about it."""
        with usage_errors():
            found = model_traces(target) if model_traces is not None and not looks_like_file(target) else target
            explanations = explain_trace(choose(sources(found), trace), FusionFixConfig())
            emit_explanations(explanations, as_json=as_json, as_markdown=as_markdown, html=html)


def register_diff_and_check(app: typer.Typer) -> None:
    """Adds the verbs `diff` and `check` to ``app``, for a command with an `explain` of its own."""

    @app.command("diff")
    def diff_verb(
        before: Before,
        after: After,
        trace: Which = None,
        as_json: AsJson = False,
        as_markdown: AsMarkdown = False,
        html: Html = None,
    ) -> None:
        """What moved, left a fusion, was split, duplicated, appeared or went, and the change in bytes and lifetimes."""
        with usage_errors():
            first, second = choose(sources(before), trace), choose(sources(after), trace)
            pairs = paired(first, second)
            left = tell_unpaired(first, second, pairs)
            found = [(diff(one.graph, other.graph), one, other) for one, other in pairs]
            blocks = list(chain.from_iterable(diff_blocks(*one) for one in found))
            emit(blocks, [one.to_dict() for one, _, _ in found], as_json=as_json, as_markdown=as_markdown)
            if html is not None:
                write_page(html, pairs[0], blocks, f"{before} against {after}")
            raise typer.Exit(SAME if not left and all(one.is_empty for one, _, _ in found) else DIFFERS)

    @app.command("check")
    def check_verb(
        before: Trace,
        after: Second = None,
        trace: Which = None,
        allow: Allowed = None,
        as_json: AsJson = False,
        as_markdown: AsMarkdown = False,
    ) -> None:
        """The verifier's rules on one trace, or on a rewritten trace B against the trace A that it came from."""
        with usage_errors():
            first, left = choose(sources(before), trace), False
            if after is None:
                checked: list[tuple[Source, ...]] = [(one,) for one in first]
            else:
                second = choose(sources(after), trace)
                checked = list(paired(first, second))
                left = tell_unpaired(first, second, checked)
            results = [(verdicts_on(one, allowance_of(allow or (), one[0].graph)), one) for one in checked]
            blocks = list(chain.from_iterable(verdict_blocks(verdicts, one) for verdicts, one in results))
            blocks += _fix_hint(results)
            data = [verdicts_to_dict(verdicts, one) for verdicts, one in results]
            emit(blocks, data, as_json=as_json, as_markdown=as_markdown)
            raise typer.Exit(SAME if not left and not any(verdicts for verdicts, _ in results) else DIFFERS)


def tell_unpaired(first: Sequence[Source], second: Sequence[Source], pairs: Iterable[tuple[Source, ...]]) -> bool:
    """Says on standard error which traces have no counterpart; True where there are any."""
    together = {id(one) for pair in pairs for one in pair}
    left = [one.title for one in (*first, *second) if id(one) not in together]
    if left:
        print(f"not compared, the other file has no counterpart: {', '.join(left)}", file=sys.stderr)
    return bool(left)


def emit_explanations(
    explanations: Sequence[Explanation], *, as_json: bool = False, as_markdown: bool = False, html: Path | None = None
) -> None:
    """Prints explanations in the wanted form, and writes the page where one is wanted.

    Raises:
        UsageError: the page cannot be written.
    """
    blocks = list(chain.from_iterable(map(explanation_blocks, explanations)))
    emit(blocks, [one.to_dict() for one in explanations], as_json=as_json, as_markdown=as_markdown)
    if html is not None:
        shown = [one.source for one in explanations[:2]]
        write_page(html, shown, blocks, f"memory of {', '.join(one.graph.name for one in shown)}")


def emit(blocks: Iterable[Block], data: Sequence[dict[str, Any]], *, as_json: bool, as_markdown: bool) -> None:
    """Prints a report: as JSON (one object for one trace, a list for several), as Markdown, or for the terminal."""
    if as_json:
        print(json.dumps(data[0] if len(data) == 1 else list(data), indent=1))
    elif as_markdown:
        print(markdown(blocks))
    else:
        from rich.console import Console

        show(blocks, Console(highlight=False))


def write_page(path: Path, traces: Sequence[Source], blocks: Iterable[Block], title: str) -> None:
    """Writes the HTML page of one or two traces to ``path``.

    Raises:
        UsageError: the file cannot be written.
    """
    content = page(traces, blocks, title)
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error


def allowance_of(names: Iterable[str], before: Graph) -> Allow:
    """The `Allow` that the user's words mean for a rewrite of ``before``.

    Raises:
        UsageError: a word that means nothing.
    """
    given = tuple(names)
    unknown = [name for name in given if name != ALLOW_FIX and name not in _ALLOWANCES]
    if unknown:
        raise UsageError(f"--allow {unknown[0]}: one of {', '.join([ALLOW_FIX, *_ALLOWANCES])}")
    admitted: dict[str, Any] = {_ALLOWANCES[name]: True for name in given if name != ALLOW_FIX}
    if ALLOW_FIX in given:
        admitted["may_clone"] = True
        for allow, field in product((item.allow for item in PASSES), fields(Allow)):
            if more := getattr(allow, field.name):  # a flag, a set or a tuple of what is admitted
                known = admitted.get(field.name, type(more)())
                admitted[field.name] = known + more if isinstance(more, tuple) else known | more
    if "may_clone" in admitted:  # the verifier takes names, and looks itself whether what makes them is cheap
        admitted["may_clone"] = frozenset(name for op in before.ops for leaf in op.leaves for name in leaf.outputs)
    return Allow(**admitted)


def _fix_hint(results: Sequence[tuple[list[Verdict], tuple[Source, ...]]]) -> list[Block]:
    """Says so where all that is wrong with a rewritten trace is what the passes of `fix` may do."""
    faulty = [pair for verdicts, pair in results if verdicts and len(pair) == 2]
    if not faulty or any(verdicts_on(pair, allowance_of([ALLOW_FIX], pair[0].graph)) for pair in faulty):
        return []
    return [
        Heading("all of this is what the passes of `fix` may change"),
        Line(f"with --allow {ALLOW_FIX} no rule is broken", "good"),
    ]


def verdicts_on(checked: Sequence[Source], allow: Allow) -> list[Verdict]:
    """Every breach of the verifier's rules in one trace, or in the second trace and against the first.

    Where a text ends without a return statement, it may end amid the sub-ops of its last op: nothing is said of those.
    """
    last = checked[-1]
    cut_at = len(last.graph.ops) - 1 if last.graph.result is None else -1  # sub-ops of the last op may be missing
    faults = [(rule, fault) for rule in GRAPH_RULES for fault in rule.find(last.graph)]
    found = [
        Verdict(rule, fault, last) for rule, fault in faults if fault.pos != cut_at or not last.graph.ops[cut_at].subops
    ]
    if len(checked) == 2 and not found:  # a trace that is not sound has no meaning to compare
        pair = Pair(checked[0].graph, last.graph, allow)
        for rule in PAIR_RULES:
            found += [Verdict(rule, fault, checked[0] if fault.in_before else last) for fault in rule.find(pair)]
    return found


def verdicts_to_dict(verdicts: Sequence[Verdict], checked: Sequence[Source]) -> dict[str, Any]:
    """The verdicts as plain data; docs/json.md describes the layout."""
    return {
        "schema": CHECK_SCHEMA,
        "traces": [one.title for one in checked],
        "is_sound": not verdicts,
        "faults": [
            {
                "rule": one.rule.name,
                "law": one.rule.law,
                "text": one.fault.text,
                "pos": one.fault.pos,
                "file": one.source.name,
                "line": one.source.line_of(one.fault.pos),
                "names": list(one.fault.names),
            }
            for one in verdicts
        ],
        "notes": [note for one in checked for note in one.graph.notes],
    }


@contextmanager
def usage_errors() -> Iterator[None]:
    """Ends the command with exit code 2 and one line on standard error where the project raises an error of its own."""
    try:
        yield
    except FusionFixError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(WRONG_USAGE) from error

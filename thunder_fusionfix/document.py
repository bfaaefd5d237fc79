"""A short report as data, and its three forms: plain text, Markdown to paste into an issue, and colour on a terminal.

A report is a list of blocks. Whoever makes one says what it is (heading, sentence, table, lines of code); here is decided how
it looks, once. Plain text has no borders and no escape codes, so that it can be piped.

    >>> print(plain([Heading("peak"), Line("at nvFusion0"), Table(("tensor", "MB"), (("t1", "12.0"), ("t22", "3.5")), right=(1,))]))
    peak
      at nvFusion0
      tensor    MB
      t1      12.0
      t22      3.5
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Heading:
    text: str
    is_main: bool = False  # the answer, above all


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    tone: str = ""  # "good", "bad", "faint" or nothing


@dataclass(frozen=True, slots=True)
class Table:
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()  # columns set to the right


@dataclass(frozen=True, slots=True)
class Code:
    lines: tuple[str, ...]
    marked: int | None = None  # index of the line that it is about


Block = Heading | Line | Table | Code
_STYLES = {"good": "green", "bad": "red", "faint": "dim", "": ""}


def megabytes(nbytes: int) -> str:
    """Bytes for people, in MB of 1e6 bytes.

    >>> megabytes(1_245_708_288), megabytes(229_376), megabytes(0), megabytes(4_096), megabytes(-512)
    ('1,245.7', '0.2', '0', '0.004', '-0.001')
    """
    size = abs(nbytes) / MB
    text = "0" if nbytes == 0 else f"{size:,.1f}" if size >= 0.1 else f"{max(size, 0.001):.3f}"
    return f"-{text}" if nbytes < 0 else text


def signed_megabytes(nbytes: int) -> str:
    """A change in bytes, with its sign."""
    return ("+" if nbytes > 0 else "") + megabytes(nbytes)


def plain(blocks: Iterable[Block]) -> str:
    """The report as plain text, without a final newline."""
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, Heading):
            lines += ["", block.text] if lines else [block.text]
        elif isinstance(block, Line):
            lines.append(f"  {block.text}")
        elif isinstance(block, Table):
            lines += [f"  {line}" for line in _aligned(block)]
        else:
            lines += [f"  {'>' if index == block.marked else ' '} {line}" for index, line in enumerate(block.lines)]
    return "\n".join(lines)


def markdown(blocks: Iterable[Block]) -> str:
    """The report as GitHub Markdown, without a final newline."""
    lines: list[str] = []
    for block in blocks:
        if lines:
            lines.append("")
        if isinstance(block, Heading):
            lines.append(f"{'##' if block.is_main else '###'} {_escaped(block.text)}")
        elif isinstance(block, Line):
            lines.append(_escaped(block.text))
        elif isinstance(block, Table):
            lines.append(_row(block.header))
            lines.append("|" + "|".join("---:" if i in block.right else "---" for i in range(len(block.header))) + "|")
            lines += map(_row, block.rows)
        else:
            lines += [
                "```",
                *(f"{'>' if i == block.marked else ' '} {line}" for i, line in enumerate(block.lines)),
                "```",
            ]
    return "\n".join(lines)


def show(blocks: Iterable[Block], console: Any) -> None:
    """Prints the report on a rich console: coloured on a terminal, plain text elsewhere."""
    from rich.padding import Padding
    from rich.table import Table as RichTable
    from rich.text import Text

    if not console.is_terminal:
        console.file.write(plain(blocks) + "\n")
        return
    is_first = True
    for block in blocks:
        if isinstance(block, Heading):
            if not is_first:
                console.print()
            console.print(Text(block.text, style="bold cyan" if block.is_main else "bold"))
        elif isinstance(block, Line):
            console.print(Padding(Text(block.text, style=_STYLES[block.tone]), (0, 0, 0, 2)))
        elif isinstance(block, Table):
            table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
            for index, name in enumerate(block.header):
                table.add_column(
                    f"  {name}" if index == 0 else name, justify="right" if index in block.right else "left"
                )
            for row in block.rows:
                table.add_row(*(Text(f"  {cell}" if i == 0 else cell) for i, cell in enumerate(row)))
            console.print(table)
        else:
            for index, line in enumerate(block.lines):
                is_marked = index == block.marked
                text = Text(f"  {'>' if is_marked else ' '} {line}", style="bold yellow" if is_marked else "dim")
                console.print(text, soft_wrap=True)
        is_first = False


def _aligned(table: Table) -> list[str]:
    rows = [table.header, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.header))]
    return [_cells(row, widths, table.right) for row in rows]


def _cells(row: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    cells = (cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths)))
    return "  ".join(cells).rstrip()


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"


def _escaped(text: str) -> str:
    """The text without what Markdown would take for markup, names with underscores above all."""
    for mark in "\\|_*<>[]`":
        text = text.replace(mark, "\\" + mark)
    return text

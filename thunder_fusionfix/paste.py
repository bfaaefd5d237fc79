"""Finds printed traces in whatever people paste: a file, a terminal, an issue with prose, code and quotes around it.

A trace prints as a Python function, so its lines are easy to know; what surrounds them is not. This module knows what people
and their tools do to text (Markdown fences, ``>`` quoting, prompts, diff marks, log prefixes, ``[... omitted ...]``) and gives
`parse` one `Region` per stretch of text that may be a trace: its lines joined where a statement runs over several, each with
the number that it has in the file. It decides nothing about operations, and nothing of the text is ever executed.

Every step looks at a line a bounded number of times, so time is linear in the length of the text.

    >>> for region in regions("words\\n```py\\n> t1, \\\\\\n>  = C0\\n```\\n"):
    ...     print([(line.first, line.last, line.text) for line in region.lines])
    [(1, 1, 'words')]
    [(3, 4, 't1, = C0')]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# A statement may be broken over this many lines (signatures of large models); more is no statement.
MAX_JOINED_LINES = 4096

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ENTITIES = (("&quot;", '"'), ("&#34;", '"'), ("&#39;", "'"), ("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&"))
_TYPOGRAPHY = {
    **dict.fromkeys(map(ord, "\u201c\u201d\u201e\u00ab\u00bb"), '"'),
    **dict.fromkeys(map(ord, "\u2018\u2019"), "'"),
    **dict.fromkeys(map(ord, "\u00a0\u2007\u202f"), " "),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\ufeff")),
    ord("\u2026"): "...",
}
_QUOTE = re.compile(r"[ \t]{0,3}(?:>[ \t]?)+")
_RANK = re.compile(r"[ \t]*\[?rank ?\d+\]?: ?")
_PROMPT = re.compile(r"[ \t]*(?:In|Out) ?\[\d*\]: ?")
_DOCTEST = re.compile(r"[ \t]*\.\.\. (?=[ \t]*[\w#@\[(])")
_FENCE = re.compile(r"[ \t]*(?:```+|~~~+)[ \t]*([\w+-]*)")
_ELISION_WORDS = ("omitted", "omitting", "snip", "truncated", "elided", "skipped", "more lines", "lines omitted")
_COMMENTED_CODE = re.compile(r"[ \t]*#[ \t]*(?:def \w+\(.*\):|@torch\.no_grad\(\))[ \t]*$")
_TARGETS = re.compile(r"[ \t]*(?:[^\W\d]\w*,[ \t]*)+$")
_BRACKETS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\\.|[()\[\]{}]|#.*""")
# What a line that others may continue begins with: prose with an open bracket must not swallow the trace below it.
_OPENS = re.compile(r"(?:# *)?(?:(?:def|return|del) |[^\W\d][\w.]*\(|[\[(]?[\w, .]*[\])]?(?:: \"[^\"]*\")? = )")
_STARTS = re.compile(
    r"#|@|def |del |return\b|import |from |[^\W\d]\w*(?:: \"[^\"]*\")? = |[\[(][\w, ]*[\])] = |[\w, ]*, = |\w+_collection\("
)


@dataclass(frozen=True, slots=True)
class Line:
    """One logical line: a statement with its continuations, or a comment."""

    first: int  # number of its first line in the text, from 1
    last: int  # of its last line
    indent: int  # columns before the first character
    text: str  # without indent
    cut: bool = False  # a bracket stays open: the line was cut


@dataclass(slots=True)
class Region:
    """A stretch of text without prose, which may hold a trace."""

    lines: list[Line] = field(default_factory=list)
    elided: list[int] = field(default_factory=list)  # numbers of lines that say that something was left out


def is_elision(text: str) -> bool:
    """True where a line only says that lines were left out.

    >>> [is_elision(text) for text in ("...", "# ... more", "[... omitted ...]", "<snip>", "t1 = f(x)  # ...")]
    [True, True, True, True, False]
    """
    if len(text) > 120:
        return False
    bare = text.strip(" \t#[](){}<>*-/|_:;,!`").lower()
    if "=" in bare or "(" in bare:
        return False
    return bare.startswith("..") or (not bare and ".." in text) or bare.startswith(_ELISION_WORDS)


def regions(text: str) -> Iterator[Region]:
    """Yields the regions of ``text`` between Markdown fences, in order; empty ones are left out."""
    region = Region()
    for item in _logical(_cleaned(text)):
        if item is None:
            if region.lines:
                yield region
            region = Region()
        elif not item.text:
            continue
        elif is_elision(item.text):
            region.elided.append(item.first)
        else:
            region.lines.append(item)
    if region.lines:
        yield region


def _cleaned(text: str) -> list[tuple[int, str] | None]:
    """Lines with their numbers, without what was put before them; None for a fence; blank lines are left out."""
    if not text.isascii():
        text = text.translate(_TYPOGRAPHY)
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "&quot;" in text or "&gt;" in text or "&lt;" in text or "&#3" in text:
        for entity, character in _ENTITIES:
            text = text.replace(entity, character)
    cleaned: list[tuple[int, str] | None] = []
    in_diff = False
    for number, line in enumerate(text.split("\n"), start=1):
        line = _without_prefix(line.rstrip())
        if not line or line.isspace():
            continue
        stripped = line.lstrip()
        if stripped.startswith(("```", "~~~")):
            fence = _FENCE.match(line)
            in_diff = fence is not None and fence.group(1) == "diff" and not in_diff
            cleaned.append(None)
            continue
        if in_diff:
            if line[0] == "-" or line.startswith(("@@", "+++")):
                continue
            line = line[1:] if line[0] in "+ " else line
        cleaned.append((number, line))
    return _uncommented(cleaned)


def _without_prefix(line: str) -> str:
    """The line without quote marks, prompts and log prefixes."""
    start = line[:16].lstrip()[:4]
    if start.startswith(">"):
        match = _QUOTE.match(line)
        line = line[match.end() :] if match else line
    if start.startswith(("[ran", "rank")):
        match = _RANK.match(line)
        line = line[match.end() :] if match else line
    if start.startswith(("In ", "In[", "Out")):
        match = _PROMPT.match(line)
        line = line[match.end() :] if match else line
    if start.startswith("... "):
        match = _DOCTEST.match(line)
        line = line[match.end() :] if match else line
    return line.expandtabs(4) if line.startswith(("\t", " \t")) else line


def _uncommented(lines: list[tuple[int, str] | None]) -> list[tuple[int, str] | None]:
    """Traces that stand in a source file as comments, with their comment marks taken off."""
    if not any(line is not None and _COMMENTED_CODE.match(line[1]) for line in lines):
        return lines
    result: list[tuple[int, str] | None] = []
    margin: int | None = None  # column of the comment mark of the trace that we are in
    for line in lines:
        if line is None:
            margin = None
            result.append(None)
            continue
        number, text = line
        column = len(text) - len(text.lstrip())
        if margin is None and _COMMENTED_CODE.match(text):
            margin = column
        elif margin is not None and not (column == margin and text[column : column + 1] == "#"):
            margin = None
        if margin is not None:
            text = text[:margin] + text[margin + 1 :].removeprefix(" ")
        if text and not text.isspace():
            result.append((number, text))
    return result


def _logical(lines: list[tuple[int, str] | None]) -> Iterator[Line | None]:
    """Joins lines that a backslash, an open bracket or a list of targets continues."""
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        if line is None:
            yield None
            continue
        number, text = line
        body = text.lstrip()
        indent = len(text) - len(body)
        if not _continues(body):
            yield Line(number, number, indent, body)
            continue
        parts, last, depth = [], number, 0
        while True:
            continued = body.endswith("\\")
            body = body[:-1].rstrip() if continued else body
            parts.append(body)
            depth += _depth(body)
            if not (continued or depth > 0 or _TARGETS.match(body)):
                break
            following = lines[index] if index < len(lines) else None
            if following is None or len(parts) >= MAX_JOINED_LINES:
                break
            last_seen, body = following[0], following[1].strip()
            if not continued and _STARTS.match(body):
                break
            index, last = index + 1, last_seen
            if is_elision(body):
                body = "..., \\" if depth > 0 else "\\"
        yield Line(number, last, indent, " ".join(part for part in parts if part), cut=depth > 0)


def _continues(body: str) -> bool:
    """True where a line is code that the next line may continue."""
    if body.endswith("\\") or _TARGETS.match(body):
        return not body.startswith("#")
    return _OPENS.match(body) is not None and _depth(body) > 0


def _depth(text: str) -> int:
    """Brackets that stay open, apart from those in strings and comments."""
    opened = text.count("(") + text.count("[") + text.count("{")
    closed = text.count(")") + text.count("]") + text.count("}")
    if opened == closed:
        return 0
    depth = 0
    for token in _BRACKETS.findall(text):
        if token in "([{":
            depth += 1
        elif token in ")]}":
            depth -= 1
        elif token.startswith("#"):
            break
    return depth

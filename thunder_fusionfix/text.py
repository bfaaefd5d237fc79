"""Printed traces without what differs from one machine or run to the next, for golden files and differences.

Out go the times that passes took, the comments that quote the user's source with its path, blank lines, and whatever else is an
absolute path or an address. What is left says the same: `parse` gives an equal Graph.

    >>> print(normalised('''# Constructed by Delete Last Used (took 3 milliseconds)
    ... def computation(x):
    ...   # x: "cuda:0 f32[2]"
    ...
    ...   # /home/me/train.py:7: \\ty = x + x
    ...   y = prims.add(x, x)  # y: "cuda:0 f32[2]"
    ...   return (y,)'''), end="")
    # Constructed by Delete Last Used
    def computation(x):
      # x: "cuda:0 f32[2]"
      y = prims.add(x, x)  # y: "cuda:0 f32[2]"
      return (y,)

Invariants: normalising twice changes nothing more; the text ends with one newline.

`sections` and `split_sections` put the traces of a program into one file and get them out again, each under its label.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_TIME = re.compile(r" \(took [\d.]+ \w+\)")
_SOURCE = re.compile(r"\s*# .+:\d+: \t")  # Thunder sets a tab between the place and the line that it quotes
_PATH = re.compile(r"(?<![\w./])/(?:[^\s/'\"(),:=]+/)+")  # division is a call in a trace, so that a slash is a path's
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
_SECTION = "# ---- "


def normalised(text: str) -> str:
    """The text of a printed trace without times, quoted source, paths and addresses."""
    lines = (line.rstrip() for line in text.split("\n") if line.strip() and not _SOURCE.match(line))
    return "".join(f"{_ADDRESS.sub('0x', _PATH.sub('', _TIME.sub('', line)))}\n" for line in lines)


def sections(texts: Mapping[str, str]) -> str:
    """Several normalised texts as one, each under a line with its label.

    >>> print(sections({"loss forward": "def f():\\n", "loss backward": "def g():\\n"}), end="")
    # ---- loss forward
    def f():
    # ---- loss backward
    def g():
    """
    return "".join(f"{_SECTION}{label}\n{text}" for label, text in texts.items())


def split_sections(text: str) -> dict[str, str]:
    """The texts that `sections` put together, by label.

    >>> split_sections(sections({"loss forward": "def f():\\n", "loss backward": "def g():\\n"}))
    {'loss forward': 'def f():\\n', 'loss backward': 'def g():\\n'}
    """
    found: dict[str, str] = {}
    for part in re.split(rf"^{_SECTION}", text, flags=re.MULTILINE)[1:]:
        label, _, body = part.partition("\n")
        found[label] = body
    return found


def label_above(lines: Sequence[str], line: int) -> str | None:
    """The label that `sections` gave to the text which ``line``, counted from 1, belongs to; None where there is none.

    >>> label_above(("# ---- loss forward", "def f():", "  return None"), 3)
    'loss forward'
    """
    return next((one.removeprefix(_SECTION) for one in reversed(lines[:line]) if one.startswith(_SECTION)), None)

"""docs/json.md and what `--json` prints: the same fields, neither more nor less."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from test_overview import PROGRAM
from test_tools_cli import AFTER, BEFORE, BROKEN

from thunder_fusionfix import diff, explain
from thunder_fusionfix.cli import main
from thunder_fusionfix.model import Decision, Holder

DESCRIBED = (Path(__file__).parent.parent / "docs" / "json.md").read_text()

# What the lists of a layout hold, where a small example leaves them empty.
HELD = {
    "explain": {
        "holders": explain.Kept,
        "layout_regions": explain.LayoutRegion,
        "takes": explain.Taken,
        "decisions": Decision,
    },
    "diff": {
        "before": diff.Side,
        "after": diff.Side,
        "holders": Holder,
        "moved": diff.MovedOp,
        "changed": diff.ChangedOp,
        **dict.fromkeys(("left", "entered", "regrouped"), diff.Crossing),
        **dict.fromkeys(("split", "merged"), diff.Partition),
        **dict.fromkeys(("duplicated", "deduplicated", "added", "gone"), diff.Instance),
        **dict.fromkeys(("saved_more", "saved_less"), diff.SavedValue),
        "lifetimes": diff.Lifetime,
        "regions": diff.RegionChange,
        "other": diff.OtherDifference,
    },
}


def section(verb: str) -> str:
    """What docs/json.md says of a verb's layout."""
    (found,) = re.findall(rf"^## `thunder_fusionfix\.{verb}/1`\n(.*?)(?=^## |\Z)", DESCRIBED, re.DOTALL | re.MULTILINE)
    return found


def names_in(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


def documented(verb: str) -> tuple[set[str], dict[str, set[str]]]:
    """The fields at the top of a layout, and for each list or object in it those of its items."""
    text = section(verb)
    top = {name for row in re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE) for name in names_in(row)}
    inner: dict[str, set[str]] = {}
    for owners, words in re.findall(r"^One of ([^:]+): (.*?)\n(?=\n|\Z)", text, re.DOTALL | re.MULTILINE):
        inner |= {owner: set(names_in(words)) for owner in names_in(owners)}
    return top, inner


@pytest.fixture
def written(tmp_path, monkeypatch, capsys):
    """By verb: an object as `--json` prints it."""
    monkeypatch.chdir(tmp_path)
    for name, text in {"before": BEFORE, "after": AFTER, "broken": BROKEN, "program": PROGRAM}.items():
        Path(f"{name}.txt").write_text(text)
    fused = 'def f(x):\n  # x: "cuda:0 f32[4]"\n  [t1] = nvFusion0(x)\n    # t1 = prims.neg(x)  # t1: "cuda:0 f32[4]"\n  return t1\n'
    Path("fused.txt").write_text(PROGRAM.replace("def computation", fused + "\ndef computation"))
    lines = {
        "explain": ["explain", "before.txt"],
        "diff": ["diff", "before.txt", "after.txt"],
        "check": ["check", "broken.txt"],
        "fix": ["fix", "fused.txt"],
        "capture": ["capture", "causal-lm-loss", "--seq", "16"],
        "doctor": ["doctor"],
    }
    found = {}
    for verb, line in lines.items():
        assert main([*line, "--json"]) in (0, 1)
        found[verb] = json.loads(capsys.readouterr().out)
    return found


def items_of(value: Any) -> set[str] | None:
    """The fields of an object, or of the first object in a list."""
    if isinstance(value, list):
        value = value[0] if value else None
    return set(value) if isinstance(value, dict) else None


def test_every_layout_is_documented_field_by_field(written):
    """What a verb prints and what docs/json.md says of it have the same names, at the top and in each list."""
    for verb, data in written.items():
        top, inner = documented(verb)
        assert data["schema"] == f"thunder_fusionfix.{verb}/1"
        assert set(data) == top, verb
        held = {name: {field.name for field in fields(kind)} for name, kind in HELD.get(verb, {}).items()}
        held |= {name: items for name, value in data.items() if (items := items_of(value)) is not None}
        assert held == inner, verb


def test_every_verb_with_json_has_a_layout(written):
    """A verb that learns `--json` is documented too."""
    from test_cli import OPTIONS

    assert {verb for verb, options in OPTIONS.items() if "--json" in options} == set(written)

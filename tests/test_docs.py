"""README and CONTRIBUTING say what there is: each pass, each verb, commands that can be typed, files that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from test_cli import OPTIONS

import thunder_fusionfix

PACKAGE = Path(thunder_fusionfix.__file__).parent
ROOT = PACKAGE.parent
README, CONTRIBUTING = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))


def test_readme_has_a_row_for_every_pass():
    """A pass that is not in the table is one that no user knows of."""
    rows = set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE))
    assert {path.stem for path in (PACKAGE / "passes").glob("[!_]*.py")} <= rows


def test_readme_has_a_row_for_every_verb():
    """So is a verb."""
    assert set(re.findall(r"^\| `fusionfix (\w+)", README, re.MULTILINE)) == set(OPTIONS)


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_commands_in_the_documents_have_options_that_exist(text):
    """What a reader copies is understood: every `fusionfix VERB ... --option` names a verb and options of it."""
    lines = re.findall(r"^fusionfix ([^#\n]+)", text, re.MULTILINE) + re.findall(r"`fusionfix ([^`]+)`", text)
    assert len(lines) > 5
    for line in lines:
        verb, *words = shlex.split(line.replace("\n", " "))
        assert verb in OPTIONS, line
        if verb != "bench":
            assert {word for word in words if word.startswith("--")} - {"--help"} <= OPTIONS[verb], line


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_files_that_the_documents_name_exist(text):
    """Links and paths lead somewhere; `hoist_rope` and `small` are the reader's own."""
    linked = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    named = re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|md|toml))`", text)
    mine = re.compile(r"hoist_rope|small|my_model|pasted")
    for name in (*linked, *(name for name in named if not mine.search(name))):
        assert any((folder / name).exists() for folder in (ROOT, PACKAGE, ROOT / "tests")), name

"""Prints docs/benchmarks/README.md from the JSON files that the scripts here wrote. None is typed by hand.

    python benchmarks/programs_table.py                                     # print
    python benchmarks/programs_table.py --write docs/benchmarks/README.md

Each table is the one that its script prints, under the first line of what the script says of itself.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kernels

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
SCRIPTS = (
    "loss",
    "linear_table",
    "padded_products",
    "towers",
    "checkpointed_blocks",
    "first_step",
    "budget",
    "entry_counts",
)


def sections(folder: Path) -> Iterator[str]:
    """One for each script that has a results file, with command, machine and versions."""
    for name in SCRIPTS:
        file = folder / f"{name}.json"
        if file.exists():
            yield section(importlib.import_module(name), json.loads(file.read_text()))


def section(script: Any, found: dict[str, Any]) -> str:
    """The table of one script."""
    about = script.__doc__.splitlines()[0]
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items() if version)
    show = getattr(script, "report", script.table)
    cut = "" if found["is_complete"] else " The run was cut short; rows are missing."
    machine = f"{found.get('gpu', 'no GPU')}; {packages}; {found['date'][:10]}. Command: `{found['command']}`.{cut}"
    return f"## {about}\n\n{machine}\n\n```text\n{show(found['rows'])}\n```\n"


def text(folder: Path) -> str:
    """The whole page."""
    head = (
        "# What the scripts in benchmarks/ printed\n\n"
        "The JSON files beside this one hold every row; each script says at its head what its columns mean. Printed by\n"
        "`python benchmarks/programs_table.py --write docs/benchmarks/README.md`.\n"
    )
    return "\n".join([head, *sections(folder), *kernel_sections(folder.parent / "results")])


def kernel_sections(folder: Path) -> Iterator[str]:
    """Where the time of one step goes, for each model that `fusionfix bench` measured."""
    for file in sorted(folder.glob("*.json")):
        shown = kernels.table(json.loads(file.read_text()), [])
        if shown.splitlines()[0].count("|") > 3:  # two variants at least, so that there is something to compare
            yield f"## Kernels of one step: {file.stem}\n\nPrinted by `python benchmarks/kernels.py docs/results/{file.name}`.\n\n{shown}\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    shown = text(args.results)
    if args.write:
        args.write.write_text(shown)
    else:
        print(shown, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

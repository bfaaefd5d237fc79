"""Where the models split under ThunderFX, and why: for each the Thunder functions that it becomes. Needs no GPU.

    python benchmarks/splits.py                             # print, for the release of transformers that is installed
    python benchmarks/splits.py --write docs/models.md      # put it into that file, beside other releases

The models have two layers; more repeat what the second one does.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from thunder_fusionfix.capture import Capture, capture
from thunder_fusionfix.models import MODELS, load_model

EXECUTORS = ("sdpa", "torchcompile_cat")  # where a program is split does not depend on who fuses
MODELS_HERE = ("qwen2.5-7b", "llama-3.2-1b", "mixtral-small", "gpt2", "gpt-neox", "vit")


def rows(names: Sequence[str]) -> Iterator[str]:
    """The table, a row for each model and reason."""
    yield "| model | Thunder functions, with their operations | split by | at | why |"
    yield "|---|---|---|---|---|"
    for name in names:
        program = load_model(name, layers=2 if MODELS[name].sizes.layers else None)
        try:
            captured = capture(program.fn, program.args, program.kwargs, dynamo=True, executors=EXECUTORS)
        except Exception as error:  # noqa: BLE001 - one model's failure must not cost the others
            yield f"| {name} | fails | | | {type(error).__name__}: {_cell(str(error))} |"
            continue
        yield from _rows(name, captured)


def _rows(name: str, captured: Capture) -> Iterator[str]:
    sizes = ", ".join(str(len(part.fused.bound_symbols)) for part in captured.parts)
    first = f"{name} | {len(captured.parts)} ({sizes})"
    if not captured.splits:
        yield f"| {first} | | | one function |"
    for split in captured.splits:
        times = f"{split.times} x " if split.times > 1 else ""
        yield f"| {first} | {split.by} | {times}{split.what} | {_cell(split.why)} |"
        first = " | "


def _cell(text: str) -> str:
    """``text`` in one line of a table, without what a reader cannot use."""
    line = re.sub(r"IntegerProxy name=\w+, value=(-?\d+), static=[\w.]+", r"\1", " ".join(text.split()))
    return (line if len(line) <= 160 else line[:157] + "...").replace("|", "\\|")


def section(release: str, names: Sequence[str]) -> str:
    """A release's part of the file."""
    return "\n".join([f"## transformers {release}", "", *rows(names), ""])


def put(text: str, release: str, new: str) -> str:
    """``text`` with the section of ``release`` replaced, or added at its end."""
    head, *sections = re.split(r"(?m)^(?=## transformers )", text)
    kept = [part for part in sections if not part.startswith(f"## transformers {release}\n")]
    return "\n\n".join(part.strip() for part in (head, *sorted([*kept, new]))) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS_HERE, help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--write", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    import transformers

    found = section(transformers.__version__, args.models)
    print(found)
    if args.write:
        args.write.write_text(put(args.write.read_text(), transformers.__version__, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``make demo``: what the plugin does, on two real programs, in half a minute and without a GPU.

Both are traced live with nvFuser's own fusion pass; where nvFuser cannot be installed, the traces that ship with the project are
used instead. Sizes are those of the simulator, which `bench` checks against a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from thunder_fusionfix.cli import progress, quiet
from thunder_fusionfix.document import Block, Code, Heading, Line, megabytes, show
from thunder_fusionfix.errors import FusionFixError
from thunder_fusionfix.overview import comparison_table
from thunder_fusionfix.report import draw_timeline
from thunder_fusionfix.targets import Fixed, Target, fix_target

OUT = Path("fusionfix-out")
SHIPPED = Path(__file__).parent.parent / "traces"  # beside the package in the repository, where `make demo` runs

INTRODUCTION = (
    "Lightning Thunder turns a PyTorch program into a trace, and nvFuser turns groups of its operations into fusions: one GPU",
    "kernel instead of many. Some operations only rearrange: slice, reshape, transpose. PyTorch does them as views, for nothing.",
    "Inside a fusion the same operations can force it to write whole tensors to memory, often where memory is scarcest.",
    "thunder_fusionfix takes them out where a view does, checks that the result is the same, and says what it did.",
)

# The recommended use, line by line as in README.
RECIPE = (
    "from thunder.dynamo import ThunderCompiler",
    'from thunder_fusionfix import FusionFixTransform  # importing it also registers the executor "fusionfix"',
    "fix = FusionFixTransform()",
    'backend = ThunderCompiler(executors=("sdpa", "torchcompile_cat", "fusionfix", "nvfuser"), transforms=[fix])',
    "model = torch.compile(model, backend=backend)",
)


@dataclass(frozen=True, slots=True)
class Show:
    """One program of the demo."""

    title: str
    target: Target
    shipped: str  # folder in traces/, for where nvFuser is not installed
    picture: str  # file name

    def fixed(self) -> Fixed:
        """The program before and after the passes: captured here, or as it was shipped."""
        if not has_nvfuser():
            return fix_target(Target(str(SHIPPED / self.shipped / "before.txt")))
        with progress() as tell:
            return fix_target(self.target, tell=tell)


SHOWS = (
    Show(
        "The loss of a language model: logits of 4,096 tokens and 152,064 words, in bf16",
        Target("causal-lm-loss"),
        "causal-lm-loss",
        "loss.png",
    ),
    Show(
        "A training step of Qwen2.5-7B, 2 of its 28 layers, 4,096 tokens",
        Target("qwen2.5-7b", layers=2),
        "qwen2.5-7b-2-layers",
        "qwen2.5-7b.png",
    ),
)


def main() -> int:
    """Prints the demo and writes its pictures; 0 where all went well."""
    from rich.console import Console

    console = Console(highlight=False)
    quiet()
    show([Heading("thunder_fusionfix", is_main=True), *(Line(text) for text in INTRODUCTION)], console)
    try:
        for number, item in enumerate(SHOWS, start=1):
            console.print()
            show(blocks_of(number, item), console)
    except FusionFixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not has_nvfuser():
        print("\nnvFuser is not installed here: these are the traces that ship with the project, not live ones.")
    console.print()
    show(next_steps(), console)
    return 0


def next_steps() -> Iterator[Block]:
    """How to use what was shown, and where to look further."""
    yield Heading("How to use it")
    yield Line("In a training script, on a machine with an NVIDIA GPU:")
    yield Code(RECIPE)
    yield Line(
        'Above you saw what the transform does alone; "fusionfix" in the list of executors does more, before fusions are made.'
    )
    yield Heading("Where to look further, without a GPU")
    command = command_here()
    yield Line(f"{command} fix qwen2.5-7b --layers 4    # another size, with every decision and its reason")
    yield Line(f"{command} explain trace.txt            # a trace from anywhere: a log, an issue")
    yield Line(f"{command} --help                       # all the rest")


def command_here() -> str:
    """How the command is called here: by its path where it is in the environment of the repository."""
    script = Path(sys.executable).with_name("fusionfix")
    return str(script.relative_to(Path.cwd())) if script.is_relative_to(Path.cwd()) and script.exists() else "fusionfix"


def has_nvfuser() -> bool:
    """True where programs can be captured live."""
    from thunder_fusionfix._thunder import nvfuser_version  # imports Thunder, which has to be kept quiet first

    return nvfuser_version() is not None


def blocks_of(number: int, item: Show) -> Iterator[Block]:
    """One program: what held its memory, before and after, and what was done."""
    fixed = item.fixed()
    assert fixed.programs is not None, "a program that was captured is a whole one"
    before, after = fixed.programs
    yield Heading(f"{number}. {item.title}", is_main=True)
    yield Line(f"Before: {before.sentence()}")
    yield Line(f"After:  {after.sentence()}")
    yield comparison_table(before, after)
    applied = [decision for report in fixed.reports for decision in report.decisions if decision.applied]
    yield Line(f"{len(applied)} rewrites, each checked; those that won the most:")
    for decision in sorted((one for one in applied if one.bytes_won > 0), key=lambda one: -one.bytes_won)[:3]:
        won = megabytes(decision.bytes_won)
        yield Line(f"  in {decision.where}, {won} MB less there: {decision.what} ({decision.reason})")
    yield Line("Each layout op that stays has its reason too: `fix` prints them all.")
    OUT.mkdir(exist_ok=True)
    draw_timeline(fixed.curves(), OUT / item.picture)
    yield Line(f"Picture of the memory over the step: {OUT / item.picture}", "good")


if __name__ == "__main__":
    raise SystemExit(main())

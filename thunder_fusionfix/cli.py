"""The command ``fusionfix``: one verb a question, each verb an adapter. See ``fusionfix --help``.

A verb reads its options, calls what answers, and prints. Exit codes: 0 fine, 1 differs or fails, 2 wrong usage with one line on
standard error that says what to do. A further verb is a function under ``@app.command()`` here, or a module with a function
that takes ``app`` and adds its own (`tools_cli`).

Nothing heavy is imported before a verb needs it: ``--help`` and the verbs for saved or pasted traces run without torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thunder_fusionfix import __version__
from thunder_fusionfix.document import Block, Line
from thunder_fusionfix.errors import FusionFixError, UsageError
from thunder_fusionfix.model_names import NAMES
from thunder_fusionfix.targets import Target, explain_target, fix_target, save_program
from thunder_fusionfix.tools_cli import (
    AsJson,
    AsMarkdown,
    Html,
    Which,
    emit,
    register_diff_and_check,
    write_page,
)

if TYPE_CHECKING:
    from thunder_fusionfix.capture import Capture
    from thunder_fusionfix.overview import Overview
    from thunder_fusionfix.report import Curve

CAPTURE_SCHEMA = "thunder_fusionfix.capture/1"
FINE, FAILED, WRONG_USAGE = 0, 1, 2
PICTURES = (".png", ".svg", ".pdf")
PAGES = (".html", ".htm")

app = typer.Typer(
    name="fusionfix",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Finds and fixes layout ops that cost memory in Lightning Thunder's fusions, and shows what it did.",
)

_MODELS = f"file.py:function, or one of {', '.join(NAMES)}"

TargetName = Annotated[
    str,
    typer.Argument(
        metavar="TRACE|MODEL",
        help=f"A file with a saved or printed trace, - for standard input, or a model: {_MODELS}.",
    ),
]
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help=f"{_MODELS}.")]
Layers = Annotated[int | None, typer.Option("--layers", help="Layers of a named model.")]
HiddenSize = Annotated[int | None, typer.Option("--hidden-size", help="Hidden size of a named model.")]
Seq = Annotated[int | None, typer.Option("--seq", help="Tokens a sequence; for vision models patches.")]
Batch = Annotated[int | None, typer.Option("--batch", help="Sequences or images a step.")]
FusionType = Annotated[
    str | None, typer.Option("--fusion-type", help="dataflow or consecutive; by default what Thunder takes.")
]
Executors = Annotated[
    str | None, typer.Option("--executors", help="Thunder's executor list: sdpa,torchcompile_cat,nvfuser by default.")
]
Dynamo = Annotated[
    bool | None,
    typer.Option(
        "--dynamo/--no-dynamo", help="Through torch.compile as ThunderFX, or thunder.jit; by default for modules."
    ),
]
Step = Annotated[bool, typer.Option("--step", help="What a whole training step needs, and whether it fits --device.")]
Device = Annotated[str | None, typer.Option("--device", help="With --step: the GPU, h100-80gb by default.")]
Optimizer = Annotated[
    str | None, typer.Option("--optimizer", help="With --step: what follows the backward, none by default.")
]
Out = Annotated[Path | None, typer.Option("--out", help="File for the traces, ending in .json; a .txt goes beside it.")]
Picture = Annotated[Path | None, typer.Option("--picture", help="Draw the memory timeline: FILE.png, .svg or .pdf.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"fusionfix {__version__}")
        raise typer.Exit(FINE)


# ---------------------------------------------------------------- verbs


@app.command("capture")
def capture_verb(
    model: ModelName,
    layers: Layers = None,
    hidden_size: HiddenSize = None,
    seq: Seq = None,
    batch: Batch = None,
    fusion_type: FusionType = None,
    executors: Executors = None,
    dynamo: Dynamo = None,
    out: Out = None,
    picture: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Trace a model without a GPU, with nvFuser's real fusion pass, and save its traces."""
    target = Target(model, layers, hidden_size, seq, batch, fusion_type, executors, dynamo)
    out = out or Path(f"{target.slug}.json")
    check_writable(out, (".json",))
    check_picture(picture)
    with progress() as tell:
        captured = target.capture(tell=tell)
    from thunder_fusionfix.overview import overview_of

    overview = overview_of(captured)
    files = save_program(overview, captured, out)
    blocks = capture_blocks(captured, overview, files)
    emit(blocks, [capture_dict(captured, overview, files)], as_json=as_json, as_markdown=False)
    draw({"step": overview.curve}, picture)


@app.command("explain")
def explain_verb(
    name: TargetName,
    layers: Layers = None,
    hidden_size: HiddenSize = None,
    seq: Seq = None,
    batch: Batch = None,
    fusion_type: FusionType = None,
    executors: Executors = None,
    dynamo: Dynamo = None,
    step: Step = False,
    device: Device = None,
    optimizer: Optimizer = None,
    trace: Which = None,
    picture: Picture = None,
    html: Html = None,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Where the memory peak is, what holds it and why, and what the passes would do about it."""
    from thunder_fusionfix.views import explanation_blocks

    target = Target(name, layers, hidden_size, seq, batch, fusion_type, executors, dynamo)
    check_picture(picture)
    check_page(html)
    if step:
        given = {"--trace": trace, "--picture": picture, "--html": html, "--json": as_json, "--markdown": as_markdown}
        if extra := [option for option, value in given.items() if value]:
            raise UsageError(f"--step prints one table: leave {extra[0]} out (bench --predict-only writes it as JSON)")
        print(explain_step(target, device, optimizer))
        return
    if device is not None or optimizer is not None:
        raise UsageError("--device and --optimizer go with --step: add it")
    with progress() as tell:
        explained = explain_target(target, trace, tell)
    blocks = [
        *comparison(name, explained.programs),
        *(block for one in explained.peak_first for block in explanation_blocks(one)),
        *note_blocks(explained.notes),
    ]
    emit(blocks, [one.to_dict() for one in explained.explanations], as_json=as_json, as_markdown=as_markdown)
    if html is not None:
        shown, num_traces = [one.source for one in explained.peak_first[:2]], len(explained.explanations)
        more = f": two of its {num_traces} traces, that with the peak among them" if num_traces > 2 else ""
        write_page(html, shown, blocks, f"memory of {name}{more}")
    draw(explained.curves() if picture is not None else {}, picture)


@app.command("fix")
def fix_verb(
    name: TargetName,
    layers: Layers = None,
    hidden_size: HiddenSize = None,
    seq: Seq = None,
    batch: Batch = None,
    fusion_type: FusionType = None,
    executors: Executors = None,
    dynamo: Dynamo = None,
    trace: Which = None,
    out: Out = None,
    picture: Picture = None,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Run the passes, print what each changed and why it kept or refused a rewrite, peak before and after."""
    from thunder_fusionfix.report import report_blocks

    target = Target(name, layers, hidden_size, seq, batch, fusion_type, executors, dynamo)
    check_picture(picture)
    if out is not None:
        check_writable(out, (".json",))
    with progress() as tell:
        fixed = fix_target(target, trace, tell)
    blocks = [
        *comparison(name, fixed.programs),
        *(block for title, report in fixed.peak_first for block in report_blocks(report, f"{title} alone")),
        *([] if fixed.reports else [Line("no trace has fusion regions: nothing to fix")]),
        *note_blocks(fixed.notes),
    ]
    if out is not None:
        blocks.append(Line(f"fixed traces saved: {', '.join(map(str, fixed.save(out)))}"))
    emit(blocks, [fixed.to_dict()], as_json=as_json, as_markdown=as_markdown)
    draw(fixed.curves() if picture is not None else {}, picture)


register_diff_and_check(app)


@app.command(
    "bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench_verb(context: typer.Context) -> None:
    """Measure a model on a GPU: plain nvFuser, torchcompile, torch.compile, eager and fusionfix, beside predictions."""
    from thunder_fusionfix import bench

    raise typer.Exit(bench.main(context.args))


@app.command("doctor")
def doctor_verb(as_json: AsJson = False) -> None:
    """Which versions are installed, whether they fit together, and which options cost memory."""
    from thunder_fusionfix.doctor import diagnose, diagnosis_blocks

    with progress() as tell:
        tell("importing torch and Thunder")
        diagnosis = diagnose()
    emit(diagnosis_blocks(diagnosis), [diagnosis.to_dict()], as_json=as_json, as_markdown=False)
    raise typer.Exit(FINE if diagnosis.fits else FAILED)


# ---------------------------------------------------------------- steps, pictures, files


def comparison(title: str, programs: tuple[Overview, Overview] | None) -> list[Block]:
    """A program before and after the passes; nothing where the traces make up none."""
    if programs is None:
        return []
    from thunder_fusionfix.overview import comparison_blocks

    return comparison_blocks(title, *programs)


def explain_step(target: Target, device: str | None, optimizer: str | None) -> str:
    """What a training step of a model needs, phase by phase.

    Raises:
        UsageError: the target is a trace, or a name is wrong.
    """
    if target.is_trace:
        raise UsageError(f"--step is for models; {target.name} is a trace: leave it out")
    from thunder_fusionfix import predict
    from thunder_fusionfix.devices import DEFAULT, find
    from thunder_fusionfix.results import Spec
    from thunder_fusionfix.step import OPTIMIZERS

    target.check()
    find(device or DEFAULT)
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise UsageError(f"--optimizer {optimizer}: one of {', '.join(OPTIMIZERS)}")
    spec = Spec(target.name, target.layers, target.hidden_size, target.seq, target.batch, optimizer or "none")
    with progress() as tell:
        return predict.explain_step(spec, device=device or DEFAULT, progress=tell)


def check_picture(path: Path | None) -> None:
    """Raises `UsageError` where no picture can be written to ``path``; before the work, not after it."""
    if path is not None:
        check_writable(path, PICTURES)


def check_page(path: Path | None) -> None:
    """Raises `UsageError` where no page can be written to ``path``, likewise."""
    if path is not None:
        check_writable(path, PAGES)


def check_writable(path: Path, suffixes: Sequence[str]) -> None:
    """Raises `UsageError` where ``path`` does not end in one of ``suffixes`` or cannot be made."""
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"{path}: end the file's name in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.parent}; make it first")


def draw(curves: dict[str, Curve], path: Path | None) -> None:
    """Writes the picture, where one is wanted."""
    if path is None or not curves:
        return
    from thunder_fusionfix.report import draw_timeline

    draw_timeline(curves, path)
    print(f"picture: {path}", file=sys.stderr)


# ---------------------------------------------------------------- capture's answer


def capture_blocks(captured: Capture, overview: Overview, files: Sequence[Path]) -> list[Block]:
    from thunder_fusionfix.document import Heading, Table, megabytes

    rows = []
    for part in captured.parts:
        regions = [
            sum(bsym.sym.is_fusion for bsym in trace.bound_symbols) for trace in (part.forward, part.backward) if trace
        ]
        rows.append((part.name, *(str(count) for count in [*regions, "-"][:2]), f"{part.seconds.total:.1f}"))
    return [
        Heading(
            f"captured in {captured.seconds:.1f} s; a step needs {megabytes(overview.step.peak_bytes)} MB", is_main=True
        ),
        Line(overview.sentence()),
        Table(("Thunder function", "fusions forward", "backward", "compile s"), tuple(rows), right=(1, 2, 3)),
        Line(f"saved: {', '.join(map(str, files))}"),
        Line(f"next: fusionfix explain {files[0]}, fusionfix fix {files[0]}"),
        *note_blocks(captured.notes),
    ]


def capture_dict(captured: Capture, overview: Overview, files: Sequence[Path]) -> dict[str, Any]:
    """The answer as plain data; docs/json.md describes the layout."""
    return {
        "schema": CAPTURE_SCHEMA,
        "files": [str(path) for path in files],
        "peak_bytes": overview.step.peak_bytes,
        "parts": [{"name": part.name, "seconds": asdict(part.seconds)} for part in captured.parts],
        "notes": list(captured.notes),
        "seconds": captured.seconds,
    }


def note_blocks(notes: Sequence[str]) -> list[Block]:
    return [Line(f"note: {note}", "faint") for note in notes]


# ---------------------------------------------------------------- the terminal


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A bar on standard error with what is going on and for how long; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(bar_width=24, pulse_style="cyan"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda words: bar.update(task, description=words)


def quiet() -> None:
    """Keeps what torch, Thunder and transformers say about each other off the terminal; our own warnings stay."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # logs, with a traceback, what it raises too; a filter, because torch sets the levels of its loggers when it is imported
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(_none)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", message="thunder_fusionfix")


def _none(record: logging.LogRecord) -> bool:
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    try:
        with warnings.catch_warnings():
            quiet()
            code = app(args=argv, prog_name="fusionfix", standalone_mode=False)
        return code if isinstance(code, int) else FINE
    except FusionFixError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USAGE if isinstance(error, UsageError) else FAILED
    except SystemExit as end:  # argparse's way to end after `bench --help`
        return end.code if isinstance(end.code, int) else WRONG_USAGE
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own: an unknown verb, a value that is no number
            print(f"error: {_typer_words(error)}", file=sys.stderr)
            return WRONG_USAGE
        if "FUSIONFIX_DEBUG" in os.environ:
            raise
        words = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        hint = "`fusionfix doctor` looks at what is installed; " if isinstance(error, ImportError) else ""
        print(f"error: {words} ({hint}FUSIONFIX_DEBUG=1 shows where)", file=sys.stderr)
        return FAILED


def _typer_words(error: Any) -> str:
    """What typer says of wrong usage, in one line that ends with where to look."""
    words = " ".join(error.format_message().split()).rstrip(".")
    if "integer" in words:  # the libraries that typer stands on each say it in another way
        words = f"{error.param.opts[0]}: give a whole number"
    context = getattr(error, "ctx", None)
    return f"{words}; see {context.command_path if context is not None else 'fusionfix'} --help"


def run() -> None:
    """The console script."""
    code = main()
    sys.stdout.flush()
    raise SystemExit(code)

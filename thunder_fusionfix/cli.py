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
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thunder_fusionfix import __version__
from thunder_fusionfix.document import Block, Line
from thunder_fusionfix.errors import FusionFixError, UsageError
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
    from thunder_fusionfix.explain import Explanation
    from thunder_fusionfix.model import Report, Timeline
    from thunder_fusionfix.overview import Overview
    from thunder_fusionfix.sources import Source

FINE, FAILED, WRONG_USAGE = 0, 1, 2
PICTURES = (".png", ".svg", ".pdf")
FIX_SCHEMA = "thunder_fusionfix.fix/1"

app = typer.Typer(
    name="fusionfix",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Finds and fixes layout ops that cost memory in Lightning Thunder's fusions, and shows what it did.",
)

# The keys of `models.MODELS`, which takes torch to import.
MODEL_NAMES = [
    *("qwen2.5-7b", "qwen2.5-0.5b", "llama-3.2-1b", "llama-3-8b", "mixtral-small", "gpt2", "gpt-neox", "vit"),
    *("causal-lm-loss", "causal-lm-loss-shifted-labels"),
]
_MODELS = f"file.py:function, or one of {', '.join(MODEL_NAMES)}"

Target = Annotated[
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
    wanted = Wanted(model, layers, hidden_size, seq, batch, fusion_type, executors, dynamo)
    out = out or Path(f"{wanted.slug}.json")
    check_writable(out, (".json",))
    check_picture(picture)
    captured = wanted.capture()
    overview = _overview(captured)
    files = save(overview, captured, out)
    draw({"step": overview.timeline}, picture)
    emit(
        _capture_blocks(captured, overview, files),
        [_capture_dict(captured, overview, files)],
        as_json=as_json,
        as_markdown=False,
    )


@app.command("explain")
def explain_verb(
    target: Target,
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

    wanted = Wanted(target, layers, hidden_size, seq, batch, fusion_type, executors, dynamo)
    check_picture(picture)
    if step:
        print(explain_step(wanted, device, optimizer))
        return
    if device is not None or optimizer is not None:
        raise UsageError("--device and --optimizer go with --step: add it")
    explanations, notes = explanations_of(wanted, trace)
    program = _programs(explanations)
    blocks = [block for one in explanations for block in explanation_blocks(one)]
    if program is not None:
        blocks = [*_comparison(wanted.target, *program), *blocks]
    blocks += _note_blocks(notes)
    emit(blocks, [one.to_dict() for one in explanations], as_json=as_json, as_markdown=as_markdown)
    if html is not None:
        write_page(html, [one.source for one in explanations[:2]], blocks, f"memory of {wanted.target}")
    draw(_timelines(explanations, program), picture)


@app.command("fix")
def fix_verb(
    target: Target,
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

    wanted = Wanted(target, layers, hidden_size, seq, batch, fusion_type, executors, dynamo)
    check_picture(picture)
    if out is not None:
        check_writable(out, (".json",))
    fixed = fix(wanted, trace)
    blocks = _comparison(wanted.target, *fixed.programs) if fixed.programs else []
    blocks += [block for report in fixed.reports for block in report_blocks(report)]
    if not fixed.reports:
        blocks.append(Line("no trace has fusion regions: nothing to fix"))
    blocks += _note_blocks(fixed.notes)
    if out is not None:
        blocks.append(Line(f"fixed traces saved: {', '.join(map(str, fixed.save(out)))}"))
    emit(blocks, [fixed.to_dict()], as_json=as_json, as_markdown=as_markdown)
    draw(fixed.timelines(), picture)


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

    diagnosis = diagnose()
    emit(diagnosis_blocks(diagnosis), [asdict(diagnosis)], as_json=as_json, as_markdown=False)
    raise typer.Exit(FINE if diagnosis.fits else FAILED)


# ---------------------------------------------------------------- what is wanted


@dataclass(frozen=True, slots=True)
class Wanted:
    """A trace or a model as the user named it, and how to capture a model."""

    target: str
    layers: int | None = None
    hidden_size: int | None = None
    seq: int | None = None
    batch: int | None = None
    fusion_type: str | None = None
    executors: str | None = None
    dynamo: bool | None = None

    @property
    def is_trace(self) -> bool:
        from thunder_fusionfix.sources import looks_like_file

        return ":" not in self.target and looks_like_file(self.target)

    @property
    def slug(self) -> str:
        """A name for files."""
        name = "".join(char if char.isalnum() or char in ".-_" else "-" for char in Path(self.target).name)
        sizes = {"layers": self.layers, "hidden": self.hidden_size, "seq": self.seq, "batch": self.batch}
        return "-".join([name, *(f"{word}{size}" for word, size in sizes.items() if size is not None)])

    def check_trace_options(self) -> None:
        """Raises `UsageError` where an option for models is given with a trace."""
        given = [name for name in ("layers", "hidden_size", "seq", "batch", "fusion_type", "executors", "dynamo")
                 if getattr(self, name) is not None]  # fmt: skip
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} is for models; {self.target} is a trace: leave it out")

    def capture(self, transforms: Sequence[Any] = ()) -> Capture:
        """The model's traces.

        Raises:
            UsageError: the model, a size or an option is wrong.
        """
        with progress() as tell:
            tell("importing Thunder")
            from thunder_fusionfix.capture import EXECUTORS, capture
            from thunder_fusionfix.models import load_model

            tell("building the model")
            program = load_model(
                self.target, layers=self.layers, hidden_size=self.hidden_size, seq=self.seq, batch=self.batch
            )
            names = tuple(filter(None, self.executors.split(","))) if self.executors is not None else EXECUTORS
            return capture(
                program.fn,
                program.args,
                program.kwargs,
                executors=names,
                fusion_type=self.fusion_type,
                dynamo=self.dynamo,
                transforms=transforms,
                progress=tell,
            )


def explain_step(wanted: Wanted, device: str | None, optimizer: str | None) -> str:
    """What a training step of a model needs, phase by phase.

    Raises:
        UsageError: the target is a trace, or a name is wrong.
    """
    if wanted.is_trace:
        raise UsageError(f"--step is for models; {wanted.target} is a trace: leave it out")
    from thunder_fusionfix import predict
    from thunder_fusionfix.devices import DEFAULT
    from thunder_fusionfix.results import Spec

    spec = Spec(wanted.target, wanted.layers, wanted.hidden_size, wanted.seq, wanted.batch, optimizer or "none")
    with progress() as tell:
        return predict.explain_step(spec, device=device or DEFAULT, progress=tell)


def explanations_of(wanted: Wanted, trace: str | None) -> tuple[list[Explanation], Sequence[str]]:
    """An explanation of each trace, and notes on where they come from."""
    from thunder_fusionfix.explain import explain, explain_trace
    from thunder_fusionfix.sources import choose, sources

    if wanted.is_trace:
        wanted.check_trace_options()
        return list(explain_trace(choose(sources(wanted.target), trace))), ()
    captured = wanted.capture()
    found: list[tuple[Source, Any]] = []
    for part in _overview(captured).parts:
        for stage, graph in (("forward", part.forward), ("backward", part.backward)):
            if graph is not None:
                (source,) = sources(graph)
                found.append((replace(source, name=f"{part.name} {stage}"), part.forward))
    chosen = choose([source for source, _ in found], trace)
    forward_of = {id(source): forward for source, forward in found}
    return [
        explain(source, forward=forward_of[id(source)] if source.graph.stage == "backward" else None)
        for source in chosen
    ], captured.notes


# ---------------------------------------------------------------- fix


@dataclass(frozen=True)
class Fixed:
    """What the passes did to a program or to some traces."""

    reports: tuple[Report, ...]
    labels: tuple[str, ...]  # of the reports
    programs: tuple[Overview, Overview] | None  # before and after, where the traces make up a program
    notes: tuple[str, ...] = ()
    captured: Any = None  # after the passes; None for traces

    def timelines(self) -> dict[str, Timeline]:
        if self.programs is not None:
            before, after = self.programs
            return {"before": before.timeline, "after": after.timeline}
        highest = max(self.reports, key=lambda report: report.before.peak_bytes, default=None)
        return {"before": highest.before, "after": highest.after} if highest is not None else {}

    def save(self, out: Path) -> list[Path]:
        if self.programs is not None:
            return save(self.programs[1], self.captured, out)
        from thunder_fusionfix import store

        store.save({label: report.graph_after for label, report in zip(self.labels, self.reports)}, out)
        return [out]

    def to_dict(self) -> dict[str, Any]:
        from thunder_fusionfix.overview import comparison_of

        before, after = self.programs or (None, None)
        return {
            "schema": FIX_SCHEMA,
            "before": dict(comparison_of(before)) if before is not None else None,
            "after": dict(comparison_of(after)) if after is not None else None,
            "traces": [
                {
                    "label": label,
                    "stage": report.stage,
                    "peak_bytes_before": report.before.peak_bytes,
                    "peak_bytes_after": report.after.peak_bytes,
                    "kept_input": report.kept_input,
                    "seconds": report.seconds,
                    "decisions": [asdict(decision) for decision in report.decisions],
                }
                for label, report in zip(self.labels, self.reports)
            ],
            "notes": list(self.notes),
        }


def fix(wanted: Wanted, trace: str | None = None) -> Fixed:
    """Runs the final passes: on Thunder's own traces for a model, on Graphs for traces that were saved or pasted."""
    if wanted.is_trace:
        return _fix_graphs(wanted, trace)
    if trace is not None:
        raise UsageError("--trace is for files with several traces; a model is fixed as a whole: leave it out")
    from thunder_fusionfix.transform import FusionFixTransform

    transform = FusionFixTransform()
    captured = wanted.capture([transform])
    labels = tuple(f"{index} {report.stage}" for index, report in enumerate(transform.reports, start=1))
    programs = (_overview(captured, before=True), _overview(captured))
    return Fixed(tuple(transform.reports), labels, programs, captured.notes, captured)


def _fix_graphs(wanted: Wanted, trace: str | None) -> Fixed:
    start = time.perf_counter()
    explanations, notes = explanations_of(wanted, trace)
    seconds = (time.perf_counter() - start) / len(explanations)
    with_regions = [one for one in explanations if any(op.is_fusion for op in one.graph.ops)]
    reports = tuple(_report_of(one, seconds) for one in with_regions)
    return Fixed(reports, tuple(map(_label, with_regions)), _programs(explanations), tuple(notes))


def _report_of(explanation: Explanation, seconds: float) -> Report:
    from thunder_fusionfix.model import Report
    from thunder_fusionfix.simulate import simulate

    before, after = simulate(explanation.graph), simulate(explanation.planned)
    graphs = explanation.graph, explanation.planned
    return Report(explanation.graph.stage, before, after, *graphs, explanation.decisions, seconds)


# ---------------------------------------------------------------- overviews, pictures, files


def _overview(captured: Capture, *, before: bool = False) -> Overview:
    from thunder_fusionfix.overview import overview_of

    return overview_of(captured, before=before)


def _label(explanation: Explanation) -> str:
    """What a trace is called: the label under which it was saved, or its file and line."""
    from thunder_fusionfix.text import label_above

    source = explanation.source
    saved = source.name.rpartition("#")[2] if "#" in source.name else label_above(source.lines, source.first_line)
    return saved or f"{source.name}:{source.first_line}"


def _programs(explanations: Sequence[Explanation]) -> tuple[Overview, Overview] | None:
    """The program that the explained traces make up, before and after; None where they are no pairs of a program."""
    from thunder_fusionfix.overview import overview_of_graphs

    before = overview_of_graphs((_label(one), one.graph) for one in explanations)
    after = overview_of_graphs((_label(one), one.planned) for one in explanations)
    if before is None or after is None or not any(part.backward is not None for part in before.parts):
        return None
    return before, after


def _comparison(title: str, before: Overview, after: Overview) -> list[Block]:
    from thunder_fusionfix.overview import comparison_blocks

    return comparison_blocks(title, before, after)


def _timelines(explanations: Sequence[Explanation], programs: tuple[Overview, Overview] | None) -> dict[str, Timeline]:
    if programs is not None:
        return {"before": programs[0].timeline, "after": programs[1].timeline}
    from thunder_fusionfix.simulate import simulate

    highest = max(explanations, key=lambda one: one.peak_bytes)
    return {"before": simulate(highest.graph), "after": simulate(highest.planned)}


def check_picture(path: Path | None) -> None:
    """Raises `UsageError` where no picture can be written to ``path``; before the work, not after it."""
    if path is not None:
        check_writable(path, PICTURES)


def check_writable(path: Path, suffixes: Sequence[str]) -> None:
    """Raises `UsageError` where ``path`` does not end in one of ``suffixes`` or cannot be made."""
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"{path}: end the file's name in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.parent}; make it first")


def draw(timelines: dict[str, Timeline], path: Path | None) -> None:
    """Writes the picture, where one is wanted."""
    if path is None or not timelines:
        return
    from thunder_fusionfix.report import draw_timeline

    draw_timeline(timelines, path)
    print(f"picture: {path}", file=sys.stderr)


def save(overview: Overview, captured: Capture, out: Path) -> list[Path]:
    """Writes the traces as Graphs to ``out``, and as Thunder prints them beside it.

    Raises:
        UsageError: a file cannot be written.
    """
    from thunder_fusionfix import store
    from thunder_fusionfix.text import sections

    store.save(overview.labelled(), out)
    if captured is None:
        return [out]
    text = out.with_suffix(".txt")
    printed = {}
    for part in captured.parts:
        for stage, trace in (("forward", part.forward), ("backward", part.backward)):
            if trace is not None:
                printed[f"{part.name} {stage}"] = f"{trace}\n"
    try:
        text.write_text(sections(printed), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{text}: cannot be written ({error.strerror})") from error
    return [out, text]


# ---------------------------------------------------------------- capture's answer


def _capture_blocks(captured: Capture, overview: Overview, files: Sequence[Path]) -> list[Block]:
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
        *_note_blocks(captured.notes),
    ]


def _capture_dict(captured: Capture, overview: Overview, files: Sequence[Path]) -> dict[str, Any]:
    return {
        "files": [str(path) for path in files],
        "peak_bytes": overview.step.peak_bytes,
        "parts": [{"name": part.name, "seconds": asdict(part.seconds)} for part in captured.parts],
        "notes": list(captured.notes),
        "seconds": captured.seconds,
    }


def _note_blocks(notes: Sequence[str]) -> list[Block]:
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
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", message="thunder_fusionfix")


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
    except SystemExit as end:  # argparse's way to end, in `bench`
        return end.code if isinstance(end.code, int) else WRONG_USAGE
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own: an unknown verb, a value that is no number
            print(f"error: {' '.join(error.format_message().split())}; see fusionfix --help", file=sys.stderr)
            return WRONG_USAGE
        if "FUSIONFIX_DEBUG" in os.environ:
            raise
        first_line = (str(error).strip().splitlines() or [""])[0]
        print(f"error: {type(error).__name__}: {first_line} (FUSIONFIX_DEBUG=1 shows where)", file=sys.stderr)
        return FAILED


def run() -> None:
    """The console script."""
    code = main()
    sys.stdout.flush()
    raise SystemExit(code)

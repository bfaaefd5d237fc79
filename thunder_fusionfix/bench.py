"""`fusionfix bench`: one program, all the ways to run it, side by side on this machine's GPU.

Each variant is measured in a fresh process (`measure`) with an empty compiler cache on disk, so that none inherits
anything of another's, and none takes another down with it. The results file is written after each step of the way, and
what it holds already is not done again:

    predict (no GPU needed) -> results file -> measure -> results file -> table, Markdown, picture

A variant that is ended in the middle, by ``--budget``, by a signal or by a crash, leaves in the file what was measured
by then: memory is measured before time.

    $ fusionfix bench qwen2.5-7b --layers 8 --hidden-size 28 --seq 4096
    $ python -m thunder_fusionfix.bench qwen2.5-7b --layers 8 --hidden-size 28 --seq 4096    # the same

A prediction is in the file before its measurement starts. ``--predict-only`` makes predictions on a machine without a
GPU; a measurement with the same ``--out`` takes them from there.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from thunder_fusionfix.errors import FusionFixError, UsageError
from thunder_fusionfix.measure import LOCKED_GPU, STATE, WAITING, Job, now, visible_gpu
from thunder_fusionfix.model_names import NAMES, check_name
from thunder_fusionfix.predict import resolved
from thunder_fusionfix.results import (
    CUT,
    FAILED,
    OK,
    OUT_OF_MEMORY,
    SKIPPED,
    TIMEOUT,
    Run,
    Spec,
    draw,
    markdown,
    plain_table,
)
from thunder_fusionfix.step import OPTIMIZERS
from thunder_fusionfix.variants import DEFAULT, VARIANTS, WRITTEN, find

OUT = Path("fusionfix-out/bench")
PREDICT_TIMEOUT_S = 900.0

# What the processes run.
PREDICT, MEASURE = "thunder_fusionfix.predict", "thunder_fusionfix.measure"

Progress = Callable[[str, str], None]  # called with a variant and what it does now


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure."""

    variants: tuple[str, ...] = DEFAULT
    out: Path = OUT  # a directory
    steps: int = 20  # timed steps, at least
    timeout_s: float = 1800.0  # of one variant, waiting for the GPU not counted
    budget_s: float = float("inf")  # of everything; what runs then is ended
    jobs: int = 1  # processes that compile at the same time; timing is always alone
    predict: bool = True
    distance: bool = True  # compare with eager float32
    again: bool = False  # measure also what the file holds already
    retry: bool = False  # measure also what failed

    def __post_init__(self) -> None:
        for name in self.variants:
            find(name)
        for name, least in (("steps", 1), ("jobs", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name} {getattr(self, name)}: at least {least}")
        for name in ("timeout", "budget"):
            if getattr(self, f"{name}_s") <= 0:
                raise UsageError(f"--{name} {getattr(self, f'{name}_s')}: seconds, more than 0")


def bench(
    spec: Spec,
    options: Options,
    *,
    measuring: bool = True,
    command: str = "",
    progress: Progress = lambda variant, state: None,
) -> Run:
    """Predicts and measures what the results file lacks, and gives the whole run.

    Args:
        spec: the program.
        options: how.
        measuring: False makes predictions only, which needs no GPU.
        command: as the user gave it, for the record.
        progress: called at each change of a variant's state.

    Raises:
        UsageError: there is no GPU, or the results file belongs to another program or is in use.
    """
    if measuring:
        require_gpu()
    spec = resolved(spec)
    path = results_path(spec, options.out)
    with _only_writer(path):
        run = Run.load(path) if path.exists() else Run(spec, command, now())
        if run.spec != spec:
            raise UsageError(f"{path} is about {run.spec.title}; give another --out")
        run.command = command or run.command
        try:
            _work(run, path, options, progress, measuring=measuring)
        finally:  # also where it is interrupted: what is there is shown
            run.save(path)
            path.with_suffix(".md").write_text(markdown(run))
            draw(run, path.with_suffix(".png"))
    return run


def results_path(spec: Spec, out: Path) -> Path:
    """Where the results of ``spec`` lie under the directory ``out``."""
    return out / f"{spec.slug}.json"


def require_gpu() -> None:
    """Raises `UsageError` where there is no GPU to measure on."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "bench measures on an NVIDIA GPU and torch sees none here; "
            "`fusionfix explain MODEL --step` and `bench --predict-only` need no GPU"
        )


@contextlib.contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Keeps a second bench from writing the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"another bench is writing {path}; wait for it or give another --out") from None
        yield
    path.with_suffix(".lock").unlink(missing_ok=True)


# ---------------------------------------------------------------- what is to do


def source_digest() -> str:
    """Twelve hex digits of everything in this package that a compiled program depends on."""
    about_results_only = {
        "bench.py",
        "cli.py",
        "devices.py",
        "measure.py",
        "predict.py",
        "report.py",
        "results.py",
        "step.py",
    }
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for file in sorted(package.rglob("*.py")):
        if file.name not in about_results_only:
            digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def is_done(record: dict[str, Any] | None, variant: str, options: Options) -> bool:
    """True where the results file holds what a measurement would give again."""
    if record is None or options.again or record.get("status") == CUT:
        return False
    if record.get("status") != OK:
        return not options.retry and record.get("source") == source_digest()
    return not find(variant).is_ours or record.get("source") == source_digest()


@dataclass(frozen=True, slots=True)
class _Task:
    """One process to run: a prediction or a measurement of one variant."""

    what: str  # PREDICT or MEASURE
    job: Job
    timeout_s: float


def _tasks(run: Run, options: Options, *, measuring: bool) -> list[_Task]:
    """What the results file lacks: all predictions, then all measurements."""
    source = source_digest()
    jobs = [
        Job(run.spec, variant, options.steps, options.distance)
        for variant in options.variants
        if not is_done(run.variants.get(variant), variant, options)
    ]
    predict = [
        _Task(PREDICT, job, PREDICT_TIMEOUT_S)
        for job in jobs
        if options.predict
        and find(job.variant).executors is not None
        and run.predictions.get(job.variant, {}).get("source") != source
    ]
    return predict + ([_Task(MEASURE, job, options.timeout_s) for job in jobs] if measuring else [])


def _work(run: Run, path: Path, options: Options, progress: Progress, *, measuring: bool) -> None:
    """Runs all tasks, and writes each record to the file as it comes."""
    tasks = _tasks(run, options, measuring=measuring)
    source = source_digest()
    company: list[_Task] = []  # ran out of memory beside others: once more, alone

    def keep(task: _Task, record: dict[str, Any]) -> None:
        variant, record = task.job.variant, {**record, "source": source}
        if task.what == PREDICT:
            if record["status"] != CUT:
                run.predictions[variant] = {**record, "date": now()}
        elif record["status"] == CUT and run.variants.get(variant, {}).get("status") == OK:
            return  # half a measurement replaces no whole one
        elif record["status"] == OUT_OF_MEMORY and options.jobs > 1 and task not in company:
            company.append(task)
            return
        else:
            run.variants[variant] = record
            if options.jobs > 1 and record["status"] == OK and task not in company:
                record["notes"].append(
                    f"up to {options.jobs} processes compiled side by side: first steps take longer so"
                )
        run.save(path)

    deadline = time.monotonic() + options.budget_s
    _run_all(tasks, options.jobs, keep, progress, deadline)
    _run_all(tuple(company), 1, keep, progress, deadline)


# ---------------------------------------------------------------- processes


@dataclass
class _Process:
    """One worker process and how far it is."""

    task: _Task
    popen: subprocess.Popen[str]
    out: Path
    state: str = "starting"
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    used_s: float = 0.0  # waiting for the GPU not counted
    ended_by: str = ""  # TIMEOUT or CUT, where we ended it
    seen_ns: int = 0  # the latest part of its record that was kept
    follower: threading.Thread | None = None

    @property
    def doing(self) -> str:
        return f"while in state {self.state!r}"

    def ended_as(self, status: str) -> str:
        """The state to show at its end; a prediction is not the end of its variant."""
        return f"predicted: {status}" if self.task.what == PREDICT else status

    def end(self) -> None:
        """After the process: reads the rest of what it printed and closes its pipes."""
        if self.follower is not None:
            self.follower.join(timeout=5)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()

    def new_part(self) -> dict[str, Any] | None:
        """Its record so far, where there is more than at the last call."""
        try:
            written = self.out.stat().st_mtime_ns
            if written == self.seen_ns:
                return None
            self.seen_ns = written
            return json.loads(self.out.read_text())
        except (OSError, ValueError):
            return None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)  # with the compilers' own processes; `measure.join_parent`
        self.popen.kill()
        self.popen.wait()


def _run_all(
    tasks: Sequence[_Task],
    workers: int,
    keep: Callable[[_Task, dict[str, Any]], None],
    progress: Progress,
    deadline: float = float("inf"),
) -> None:
    """Runs the tasks in order, ``workers`` at a time, one variant's one after another; ``keep`` gets each record.

    It gets the record of a process that still runs each time that the process has measured more. After ``deadline``
    (of `time.monotonic`) nothing is started and what runs is ended.
    """
    waiting = list(tasks)
    running: list[_Process] = []
    with tempfile.TemporaryDirectory(prefix="fusionfix-", ignore_cleanup_errors=True) as scratch:
        try:
            while running or (waiting and time.monotonic() < deadline):
                for task in _startable(waiting, running)[: workers - len(running)]:
                    if time.monotonic() < deadline:
                        waiting.remove(task)
                        running.append(_start(task, Path(scratch), progress))
                before = time.monotonic()
                time.sleep(0.1)
                for process in tuple(running):
                    process.used_s += time.monotonic() - before if process.state != WAITING else 0.0
                    over = process.used_s > process.task.timeout_s
                    if (over or time.monotonic() > deadline) and process.popen.poll() is None:
                        process.ended_by = TIMEOUT if over else CUT
                        process.kill()
                    if process.popen.poll() is not None:
                        running.remove(process)
                        process.end()
                        record = _record_of(process)
                        keep(process.task, record)
                        progress(process.task.job.variant, process.ended_as(record["status"]))
                    elif (part := process.new_part()) and part["status"] == CUT:
                        keep(process.task, part)
        finally:
            for process in running:
                process.kill()
                process.end()


def _startable(waiting: Sequence[_Task], running: Sequence[_Process]) -> list[_Task]:
    """Tasks before which nothing of the same variant is still to be done."""
    busy = {process.task.job.variant for process in running}
    found = []
    for task in waiting:
        if task.job.variant not in busy:
            found.append(task)
        busy.add(task.job.variant)
    return found


def _start(task: _Task, scratch: Path, progress: Progress) -> _Process:
    name = "".join(char if char.isalnum() or char in "-." else f"_{ord(char):x}_" for char in task.job.variant)
    out = scratch / f"{name}-{task.what}.json"
    environment = dict(os.environ)
    if task.what == PREDICT:
        environment[LOCKED_GPU] = visible_gpu()  # it takes no processor from who times there
        environment["CUDA_VISIBLE_DEVICES"] = ""  # nothing of a prediction comes from a GPU
    else:  # a first step compiles everything: nothing is found that another variant, or an earlier run, left on disk
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / f"{name}-cache")
    popen = subprocess.Popen(
        [sys.executable, "-m", task.what, task.job.to_json(), str(out)],
        stdin=subprocess.PIPE,  # closed when we end: the worker ends then
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    )
    process = _Process(task, popen, out)
    process.follower = threading.Thread(target=_follow, args=(process, progress), daemon=True)
    process.follower.start()
    return process


def _follow(process: _Process, progress: Progress) -> None:
    for line in process.popen.stdout or ():
        if line.startswith(STATE):
            process.state = line.removeprefix(STATE).strip()
            progress(process.task.job.variant, process.state)
        else:
            process.lines.append(line.rstrip())


def _record_of(process: _Process) -> dict[str, Any]:
    """What the process wrote; where it did not come to its end, why, beside what it had measured by then.

    A failure keeps the last lines that it printed.
    """
    record: dict[str, Any]
    try:
        record = json.loads(process.out.read_text())
    except (OSError, ValueError):
        record = {"status": CUT, "date": now()}
    if process.ended_by:
        when = f"after {process.task.timeout_s:.0f} s" if process.ended_by == TIMEOUT else "when the time was up"
        record |= {"status": process.ended_by, "reason": f"not done {when}, {process.doing}"}
    elif record["status"] == CUT:
        record |= {"status": FAILED, "reason": _end_of(process)}
    if record["status"] in (FAILED, TIMEOUT):
        record["log"] = list(process.lines)[-60:]
    return record


def _end_of(process: _Process) -> str:
    code = process.popen.returncode
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    hint = " (out of host memory?)" if code == -signal.SIGKILL else ""
    tail = " / ".join([line for line in process.lines if line.strip()][-3:])
    return f"{how}{hint} {process.doing}: {tail[-600:]}"


# ---------------------------------------------------------------- the command


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as the other verbs do."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = _Parser(prog="fusionfix bench", description="Measures a model, variant by variant.")
    parser.add_argument("model", help=f"file.py:function, or one of {', '.join(NAMES)}")
    for name, words in (
        ("layers", "layers of a named model"),
        ("hidden-size", "hidden size of a named model"),
        ("seq", "tokens a sequence; for vision models patches"),
        ("batch", "sequences or images a step"),
    ):
        parser.add_argument(f"--{name}", type=int, help=words)
    parser.add_argument("--optimizer", default="none", choices=tuple(OPTIMIZERS), help="what follows the backward")
    parser.add_argument(
        "--variants",
        default=",".join(DEFAULT),
        help=f"some of {', '.join(VARIANTS)}, with commas between; each {WRITTEN}: both:fusionfix_memory_budget=32GB",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="directory of the results files")
    parser.add_argument(
        "--steps", type=int, default=20, help="timed steps, at least; quick ones are timed for two seconds"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one variant")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for everything")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that compile side by side; timing is always alone"
    )
    parser.add_argument("--predict-only", action="store_true", help="predictions alone, on a machine without a GPU")
    parser.add_argument("--no-predict", action="store_true", help="measurements alone")
    parser.add_argument("--no-distance", action="store_true", help="no comparison with eager float32")
    parser.add_argument("--again", action="store_true", help="measure also what was measured before")
    parser.add_argument("--retry", action="store_true", help="measure also what failed before")
    return parser


def for_the_record(arguments: Sequence[str]) -> list[str]:
    """Arguments but for where results go and how long everything may take: no part of what is measured."""
    kept, words = list[str](), iter(arguments)
    for word in words:
        if word in ("--out", "--budget"):
            next(words, None)
        elif not word.startswith(("--out=", "--budget=")):
            kept.append(word)
    return kept


def command(spec: Spec, options: Options, *, measuring: bool = True, line: str = "") -> int:
    """What the verb `bench` does: shows the progress, then the table; gives the exit code.

    Returns:
        0 where every variant was measured (or predicted, without ``measuring``), 1 where one was not.

    Raises:
        UsageError: as `bench`.
    """
    check_name(spec.model)
    with _shown_progress() as progress:
        run = bench(spec, options, measuring=measuring, command=line, progress=progress)
    print(plain_table(run))
    path = results_path(run.spec, options.out)
    print("written:", *(str(file) for end in (".json", ".md", ".png") if (file := path.with_suffix(end)).exists()))
    records = run.variants if measuring else run.predictions
    wanted = [name for name in options.variants if measuring or find(name).executors is not None]
    return 0 if all(records.get(name, {}).get("status") == OK for name in wanted) else 1


@contextlib.contextmanager
def _ended_with_all_written() -> Iterator[None]:
    """Makes SIGTERM, as `timeout` sends it, an exception, so that processes are ended and files written."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _shown_progress() -> Iterator[Progress]:
    """On a terminal a line for each variant, with what it does and since when; elsewhere a line for each change."""
    if not sys.stdout.isatty():
        start = time.monotonic()
        yield lambda variant, state: print(
            f"[{time.monotonic() - start:6.1f} s] {find(variant).label}: {state}", flush=True
        )
        return
    from rich.progress import Progress as Bars
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Bars(*columns) as bars:
        tasks: dict[str, Any] = {}
        ends = {OK, FAILED, OUT_OF_MEMORY, TIMEOUT, SKIPPED, CUT}

        def progress(variant: str, state: str) -> None:
            if variant not in tasks:
                tasks[variant] = bars.add_task(find(variant).label, total=1, state=state)
            bars.update(tasks[variant], state=state, completed=int(state in ends))

        yield progress


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 where every variant was measured, 1 where one was not, 2 for wrong usage."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        args = parser().parse_args(given)
        spec = Spec(args.model, args.layers, args.hidden_size, args.seq, args.batch, args.optimizer)
        options = Options(
            variants=tuple(filter(None, args.variants.split(","))),
            out=args.out,
            steps=args.steps,
            timeout_s=args.timeout,
            budget_s=args.budget,
            jobs=args.jobs,
            predict=not args.no_predict,
            distance=not args.no_distance,
            again=args.again,
            retry=args.retry,
        )
        line = shlex.join(["fusionfix", "bench", *for_the_record(given)])
        with _ended_with_all_written():
            return command(spec, options, measuring=not args.predict_only, line=line)
    except FusionFixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

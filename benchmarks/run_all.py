"""Measures everything that README and docs/ show, on the GPUs of one machine, in calls of a few minutes each.

    python benchmarks/run_all.py --predict              # first: predictions into docs/predictions; needs no GPU
    python benchmarks/run_all.py --dry-run              # what would run, in which call, and for how long
    python benchmarks/run_all.py --minutes 9            # again and again until it says that nothing is left
    python benchmarks/run_all.py --publish              # what lies under --out into docs/ and README.md

Steps stand in the order of their value, in batches: the steps of a batch run side by side, compile side by side, and time one
after another (`measure.GpuLock`). Each GPU is a *lane* (``--gpus``): it takes the first batch that fits into the minutes that are
left and writes no file that another lane is writing, then the next one. What a lane runs sees its GPU alone, and times beside
the other lanes. What has its result under ``--out`` is not run again; a step that fails or takes too long is reported and stops
nothing else, in its lane or in another. A new results file takes the predictions that docs/predictions has, and no measurement
from anywhere, so that all that is compared comes from one run.

Under ``--out`` lie results/ (of `fusionfix bench`), benchmarks/ (of the scripts here) and logs/.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import programs_table
import results_table

from thunder_fusionfix.bench import Options, is_done, results_path, source_digest
from thunder_fusionfix.measure import machine_gpus
from thunder_fusionfix.models import MODELS
from thunder_fusionfix.results import OK, Run, Spec

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "fusionfix-out" / "all"
PREDICTIONS = ROOT / "docs" / "predictions"
START_S = 15.0  # a process imports torch, Thunder and nvFuser
LAST_S = 10.0  # of a call, to write down what is there
OPTIMIZER = "keep-gradients"
SHORT = ("plain", "torch-compile", "transform", "both")
BUDGETED = "both:fusionfix_memory_budget=37.7GB"  # 0.8 of what plain Thunder needs
LAYOUTS_ALONE = "transform:fusionfix_reorder=False+fusionfix_split_regions=False"  # what the other two passes add


@dataclass(frozen=True, slots=True)
class Step:
    """One command. Times are estimates on an H200 with 16 cores to a lane, in seconds."""

    name: str
    beside_s: float  # while others may run: compilation, memory
    alone_s: float  # while nobody else may: timing
    limit_s: float  # it is ended after this
    script: tuple[str, ...] = ()  # of benchmarks/, with its arguments
    spec: Spec | None = None  # of `fusionfix bench`
    variants: tuple[str, ...] = ()

    def command(self, out: Path, seconds: float, *, predict: bool = False, retry: bool = False) -> list[str]:
        """What to start, with ``seconds`` to run."""
        if self.spec is None:
            name, *arguments = self.script
            timed = ["--budget", f"{seconds:.0f}"] if name == "first_step" else []
            return [f"benchmarks/{name}.py", *arguments, *timed, "--out", _from_root(self.file(out))]
        sizes = {"layers": self.spec.layers, "hidden-size": self.spec.hidden_size, "batch": self.spec.batch}
        line = ["-m", "thunder_fusionfix.bench", self.spec.model, "--optimizer", self.spec.optimizer]
        line += [word for name, size in sizes.items() if size is not None for word in (f"--{name}", str(size))]
        line += ["--variants", ",".join(self.variants)]
        if predict:
            return [*line, "--out", _from_root(PREDICTIONS), "--predict-only"]
        line += ["--out", _from_root(out / "results")]
        line += ["--jobs", str(len(self.variants)), "--no-predict", "--steps", "30", "--budget", f"{seconds:.0f}"]
        return [*line, "--timeout", f"{self.limit_s:.0f}", *(["--retry"] if retry else [])]

    def file(self, out: Path) -> Path:
        """The results file."""
        return (
            out / "benchmarks" / f"{self.script[0]}.json"
            if self.spec is None
            else results_path(self.spec, out / "results")
        )

    def state(self, out: Path, *, retry: bool = False) -> tuple[bool, str]:
        """Whether nothing is left to do, and what there is, in words."""
        file = self.file(out)
        if not file.exists():
            return False, "not measured"
        if self.spec is None:
            found = json.loads(file.read_text())
            failed = sum("error" in row for row in found["rows"])
            words = f"{len(found['rows'])} rows" + (f", {failed} of them failed" if failed else "")
            useful = len(found["rows"]) > failed and not (retry and failed)
            return useful and found["is_complete"] and found["source"] == source_digest(), words
        run, options = Run.load(file), Options(self.variants, retry=retry)
        status = {name: run.variants.get(name, {}).get("status", "not measured") for name in self.variants}
        good = sum(value == OK for value in status.values())
        others = ", ".join(f"{name} {value}" for name, value in status.items() if value != OK)
        done = all(is_done(run.variants.get(name), name, options) for name in self.variants)
        return done, f"{good} of {len(status)} variants" + (f"; {others}" if others else "")


def _from_root(path: Path) -> str:
    """``path`` as a command that runs in the checkout names it."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def _bench(
    name: str, model: str, variants: Sequence[str], beside_s: float, alone_s: float, limit_s: float, **sizes: int
) -> Step:
    spec = Spec(model, **{**asdict(MODELS[model].sizes), **sizes}, optimizer=OPTIMIZER)
    return Step(name, beside_s, alone_s, limit_s, spec=spec, variants=tuple(variants))


def batches() -> tuple[tuple[Step, ...], ...]:
    """All steps, the most valuable first. A batch fits on 16 cores and, at its largest, into 140 GB of one GPU's memory."""
    return (
        (
            Step("loss", 90, 15, 240, script=("loss",)),
            Step("linear layers", 60, 15, 240, script=("linear_table", "--calls", "20")),
            Step("padded products", 25, 15, 240, script=("padded_products", "--calls", "20")),
            Step("towers", 60, 20, 240, script=("towers", "--steps", "8")),
            Step("checkpointed blocks", 95, 5, 240, script=("checkpointed_blocks", "--steps", "5")),
        ),
        (
            _bench(
                "4 layers, real width",
                "qwen2.5-7b",
                (*SHORT, "eager", "both:fusionfix_cudnn_attention=False", LAYOUTS_ALONE),
                90,
                35,
                420,
                layers=4,
            ),
        ),
        (
            _bench(
                "8 layers, hidden 28",
                "qwen2.5-7b",
                (*SHORT, "torchcompile", "eager", LAYOUTS_ALONE),
                150,
                40,
                420,
                layers=8,
                hidden_size=28,
            ),
        ),
        (
            _bench(
                "28 layers", "qwen2.5-7b", ("plain-shared", "both", BUDGETED), 330, 35, 345, layers=28, hidden_size=28
            ),
        ),
        (
            _bench("llama", "llama-3.2-1b", SHORT, 110, 10, 300, layers=2),
            _bench("mixtral", "mixtral-small", SHORT, 110, 10, 300, layers=2),
            _bench("gpt-neox", "gpt-neox", SHORT, 110, 10, 300, layers=2),
            _bench("vit", "vit", SHORT, 110, 5, 300, layers=2),
            _bench("gpt2", "gpt2", SHORT, 110, 10, 300, layers=2),
            _bench("vit, batch 64", "vit", SHORT, 110, 10, 300, layers=2, batch=64),  # the GPU's time, not the host's
            _bench("12 layers, for the slope", "qwen2.5-7b", ("torchcompile",), 200, 5, 510, layers=12, hidden_size=28),
            _bench("4 layers, for the slope", "qwen2.5-7b", ("torchcompile",), 80, 5, 300, layers=4, hidden_size=28),
        ),
        (Step("first step", 190, 0, 400, script=("first_step", "--jobs", "4")),),
    )


# ---------------------------------------------------------------- the plan


def estimate_s(batch: Sequence[Step]) -> float:
    """Seconds of a batch."""
    return START_S + max(step.beside_s for step in batch) + sum(step.alone_s for step in batch)


def next_batch(left: Sequence[Sequence[Step]], seconds: float, busy: Collection[Step] = ()) -> Sequence[Step] | None:
    """The first batch with something left that fits, and writes no file that ``busy`` steps write; None where none does."""
    taken = {step.file(WORK) for step in busy}
    for batch in left:
        if batch and estimate_s(batch) <= seconds - LAST_S and not any(step.file(WORK) in taken for step in batch):
            return batch
    return None


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch's place in a call, by estimate."""

    lane: int
    start_s: float  # of the call
    batch: Sequence[Step]

    @property
    def end_s(self) -> float:
        return self.start_s + estimate_s(self.batch)


def calls(left: Sequence[Sequence[Step]], minutes: float, lanes: int = 1) -> Iterator[list[Planned]]:
    """The batches of each call of so many minutes, by estimate; what fits into no call is left out."""
    waiting = [batch for batch in left if batch]
    while waiting:
        planned, clock = list[Planned](), 0.0
        while True:
            running = {one.lane: one for one in planned if one.end_s > clock}
            for lane in range(lanes):
                busy = [step for one in running.values() for step in one.batch]
                if lane not in running and (batch := next_batch(waiting, 60 * minutes - clock, busy)):
                    waiting.remove(batch)
                    running[lane] = Planned(lane, clock, batch)
                    planned.append(running[lane])
            if not running:
                break
            clock = min(one.end_s for one in running.values())  # a lane is free again
        if not planned:
            return
        yield planned


def plan_text(left: Sequence[Sequence[Step]], minutes: float, out: Path, gpus: Sequence[str | None] = (None,)) -> str:
    """The plan for people, by call and, where there are several, by lane."""
    lines, planned = [], list[Step]()
    for number, call in enumerate(calls(left, minutes, len(gpus)), 1):
        lines.append(f"call {number}: {max(one.end_s for one in call) / 60:.1f} of {minutes:g} minutes")
        for lane, gpu in enumerate(gpus):
            mine = [one for one in call if one.lane == lane]
            if len(gpus) > 1:
                lines.append(f" GPU {gpu}: {max((one.end_s for one in mine), default=0.0) / 60:.1f} minutes")
            for one in mine:
                lines.append(f"  {estimate_s(one.batch):4.0f} s  " + "  |  ".join(step.name for step in one.batch))
                lines += [f"          python {' '.join(step.command(out, step.limit_s))}" for step in one.batch]
                planned += one.batch
    beyond = [step.name for batch in left for step in batch if step not in planned]
    lines += [f"in no call of {minutes:g} minutes: {', '.join(beyond)}"] if beyond else []
    return "\n".join(lines or ["nothing is left"])


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that a process started here would see, as ``CUDA_VISIBLE_DEVICES`` calls them; none where there are none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return tuple(itertools.takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), names))  # CUDA stops there
    return tuple(number for number, _ in machine_gpus())


def lanes_of(number: int | None, seen: Sequence[str]) -> tuple[str | None, ...]:
    """The GPU of each lane; None for a lane that leaves ``CUDA_VISIBLE_DEVICES`` as it is.

    Args:
        number: of lanes; None for as many as there are GPUs, and one where there are none.
        seen: the GPUs that there are; where there are fewer than ``number``, their names are made up, for a plan.
    """
    if number is None:
        return tuple(seen) or (None,)
    return tuple(seen[:number]) if number <= len(seen) else tuple(map(str, range(number)))


# ---------------------------------------------------------------- running


@dataclass
class Running:
    """A step that runs."""

    step: Step
    popen: subprocess.Popen[bytes]
    started: float
    seconds: float  # after which it is ended
    ended_by_us: bool = False

    @property
    def age(self) -> float:
        return time.monotonic() - self.started

    def end_if_late(self) -> None:
        """First a signal on which it writes what it has, then the end of its group."""
        if self.age > self.seconds and not self.ended_by_us:
            self.ended_by_us = True
            self.popen.terminate()
        elif self.age > self.seconds + LAST_S / 2:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)


Command = Callable[[Step, float], list[str]]  # what to start for a step that has so many seconds


def start_batch(
    batch: Sequence[Step], out: Path, seconds: float, command: Command, running: list[Running], gpu: str | None = None
) -> None:
    """Starts the steps side by side for at most ``seconds``, with ``gpu`` as the one that they see, into ``running``."""
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    for step in batch:
        given = min(step.limit_s, seconds)
        step.file(out).parent.mkdir(parents=True, exist_ok=True)
        with open(logs / f"{step.name.replace(' ', '-').replace(',', '')}.log", "wb") as log:
            popen = subprocess.Popen(
                [sys.executable, *command(step, given - LAST_S / 2)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                preexec_fn=os.setpgrp,  # noqa: PLW1509 -- no thread runs here; its processes end with it, it with our session
            )
        running.append(Running(step, popen, time.monotonic(), given))


def collect(running: list[Running], say: Callable[[str], None]) -> dict[str, str]:
    """Takes out of ``running`` what has ended and ends what is late; by name how each ended, "" for well."""
    ends = dict[str, str]()
    for one in tuple(running):
        one.end_if_late()
        code = one.popen.poll()
        if code is None:
            continue
        running.remove(one)
        ends[one.step.name] = "took too long" if one.ended_by_us else "" if code == 0 else f"exit {code}"
        say(f"{one.step.name}: {ends[one.step.name] or 'done'} after {one.age:.0f} s")
    return ends


@contextlib.contextmanager
def ended_with_us(lanes: Sequence[list[Running]]) -> Iterator[None]:
    """Ends at its exit, however that comes, what still runs."""
    try:
        yield
    finally:
        for one in itertools.chain(*lanes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.popen.pid, signal.SIGKILL)


def run_batch(
    batch: Sequence[Step], out: Path, seconds: float, say: Callable[[str], None], command: Command
) -> dict[str, str]:
    """Runs the steps side by side for at most ``seconds``; by name how each ended where it did not end well."""
    running, ends = list[Running](), dict[str, str]()
    with ended_with_us([running]):
        start_batch(batch, out, seconds, command, running)
        while running:
            time.sleep(0.1)
            ends |= collect(running, say)
    return {name: how for name, how in ends.items() if how}


def seed(step: Step, out: Path, predictions: Path) -> None:
    """Gives a new results file the predictions that were made before."""
    if step.spec is None or step.file(out).exists() or not results_path(step.spec, predictions).exists():
        return
    run = Run.load(results_path(step.spec, predictions))
    Run(run.spec, run.command, run.started, {}, run.predictions).save(step.file(out))


def run_all(
    everything: Sequence[Sequence[Step]],
    out: Path,
    minutes: float,
    say: Callable[[str], None],
    *,
    predictions: Path = PREDICTIONS,
    retry: bool = False,
    gpus: Sequence[str | None] = (None,),
) -> dict[str, str]:
    """Runs what is left, batch by batch in a lane for each of ``gpus``, while the time lasts; by name what did not end well.

    A lane that finds no batch asks again when another lane has ended one.
    """
    deadline = time.monotonic() + 60 * minutes
    ends: dict[str, str] = {}
    tried: set[str] = set()
    lanes = [list[Running]() for _ in gpus]

    def start_next(lane: list[Running], gpu: str | None) -> None:
        left = [
            [step for step in batch if step.name not in tried and not step.state(out, retry=retry)[0]]
            for batch in everything
        ]
        seconds = deadline - time.monotonic()
        batch = next_batch(left, seconds, [one.step for other in lanes for one in other])
        if batch is None:
            return
        tried.update(step.name for step in batch)
        where = f" on GPU {gpu}" if len(gpus) > 1 else ""
        say(f"{' | '.join(step.name for step in batch)}: about {estimate_s(batch):.0f} s of {seconds:.0f}{where}")
        for step in batch:
            seed(step, out, predictions)
        start_batch(batch, out, seconds - LAST_S, lambda step, given: step.command(out, given, retry=retry), lane, gpu)

    with ended_with_us(lanes):
        is_free = True  # a lane that was not before
        while True:
            for lane, gpu in zip(lanes, gpus):
                if is_free and not lane:
                    start_next(lane, gpu)
            if not any(lanes):
                return {name: how for name, how in ends.items() if how}
            time.sleep(0.1)
            is_free = False
            for lane in lanes:
                was_running = bool(lane)
                ends |= collect(lane, say)
                is_free |= was_running and not lane


def predict_all(everything: Sequence[Sequence[Step]], say: Callable[[str], None]) -> dict[str, str]:
    """Writes the predictions of all models to `PREDICTIONS`, one after another."""
    ends: dict[str, str] = {}
    for step in (replace(step, limit_s=3600) for batch in everything for step in batch if step.spec is not None):
        ends |= run_batch([step], WORK, 3600, say, lambda step, given: step.command(WORK, given, predict=True))
        for shown in (".md", ".png"):  # of measurements, which these files have none of
            results_path(step.spec, PREDICTIONS).with_suffix(shown).unlink(missing_ok=True)
    return ends


def publish(everything: Sequence[Sequence[Step]], out: Path, docs: Path, readme: Path) -> None:
    """Copies every results file that has a measurement into ``docs``, and writes the tables anew."""
    for step in (step for batch in everything for step in batch):
        file = step.file(out)
        if not file.exists() or (step.spec is not None and not Run.load(file).variants):
            continue
        for made in (file, *filter(Path.exists, map(file.with_suffix, (".md", ".png")))):
            shutil.copy(made, step.file(docs).with_suffix(made.suffix))
        if step.spec is not None:  # what a process said before it failed names places of the machine that it ran on
            run = Run.load(step.file(docs))
            without = {
                name: {key: value for key, value in record.items() if key != "log"}
                for name, record in run.variants.items()
            }
            replace(run, variants=without).save(step.file(docs))
    results_table.main(["--results", str(docs / "results"), "--write", str(readme)])
    programs_table.main(["--results", str(docs / "benchmarks"), "--write", str(docs / "benchmarks" / "README.md")])


def table(everything: Sequence[Sequence[Step]], out: Path, ends: dict[str, str]) -> str:
    """What there is of each step."""
    steps = [step for batch in everything for step in batch]
    width = max(len(step.name) for step in steps) + 2
    lines = [f"{'step':{width}}{'done':6}what there is"]
    for step in steps:
        done, words = step.state(out)
        why = f" ({ends[step.name]}, see logs/)" if step.name in ends else ""
        lines.append(f"{step.name:{width}}{'yes' if done else 'no':6}{words}{why}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 where nothing is left, 1 where something is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call")
    parser.add_argument("--out", type=Path, default=WORK)
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps alone")
    parser.add_argument("--retry", action="store_true", help="run also what failed before")
    parser.add_argument("--gpus", type=int, metavar="N", help="lanes, one GPU each; by default as many as are visible")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and end")
    parser.add_argument(
        "--predict", action="store_true", help="write predictions to docs/predictions and end; needs no GPU"
    )
    parser.add_argument(
        "--publish", action="store_true", help="copy what was measured into docs/, write the tables, and end"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what lies under --out")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what runs is ended, see `run_batch`
    everything = batches()
    names = [step.name for batch in everything for step in batch]
    if unknown := set(args.only or ()) - set(names):
        parser.error(f"--only {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    seen = visible_gpus()
    if args.gpus is not None and (args.gpus < 1 or (0 < len(seen) < args.gpus and not args.dry_run)):
        parser.error(f"--gpus {args.gpus}: from 1 to {max(1, len(seen))} here")
    gpus = lanes_of(args.gpus, seen)
    everything = tuple(tuple(step for step in batch if step.name in (args.only or names)) for batch in everything)
    everything = tuple(filter(None, everything))
    start, out = time.monotonic(), args.out.resolve()

    def say(words: str) -> None:
        print(f"[{time.monotonic() - start:5.0f} s] {words}", flush=True)

    if args.predict:
        return 1 if predict_all(everything, say) else 0
    if args.publish:
        publish(everything, out, ROOT / "docs", ROOT / "README.md")
        return 0
    if args.fresh and not args.dry_run:
        shutil.rmtree(out, ignore_errors=True)
    left = [[step for step in batch if not step.state(out, retry=args.retry)[0]] for batch in everything]
    print(plan_text(left, args.minutes, out, gpus), flush=True)
    if args.dry_run:
        return 0
    ends = run_all(everything, out, args.minutes, say, retry=args.retry, gpus=gpus)
    print("", table(everything, out, ends), sep="\n")
    return 0 if all(step.state(out)[0] for batch in everything for step in batch) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Measures one variant of one program on this machine's GPU, in a process of its own.

`bench` starts ``python -m thunder_fusionfix.measure JOB OUT`` for each variant and reads the JSON file OUT when it has
ended. What the process prints that starts with `STATE` tells how far it is. It ends when its standard input does, so
that it never outlives the `bench` that started it.

One step is what a training loop does: forward, backward of the loss, and the optimizer where there is one. After it
gradients are set to None, but with "keep-gradients", a loop without ``zero_grad``. The output stays alive until the
step ends.

In order, and why so:

1. First step, by the wall clock: compilation, and the first run of every kernel.
2. Steps with the allocator's own counters read between forward and backward. Several processes may do this at once.
3. One step with the allocator's history on, replayed to a curve: what is alive at the peak, and at the start of the
backward.
4. One step under the profiler: kernels by name, launches. Alone on the GPU (`GpuLock`), as what others run stretches kernels.
5. Timed steps, with CUDA events, alone likewise. In rounds, between which other processes have their turn, so that a machine that
gets slower does so for all.
6. Loss and gradients from fresh gradients, then the same in float32 without a compiler.

After each of these the record is in OUT, as `CUT`: a process that is ended early leaves what it had measured by then.

*Start of the backward*: from the end of the forward up to one tenth of the backward's allocations. Memory is what is
counted here, so allocations are the clock; host time would stretch with the length of a kernel's launch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.results import CUT, FAILED, OK, OUT_OF_MEMORY, SKIPPED, Spec
from thunder_fusionfix.step import OPTIMIZERS
from thunder_fusionfix.variants import SHARED, VARIANTS, Variant, find

if TYPE_CHECKING:  # `bench` imports this module and needs no torch
    import torch

    from thunder_fusionfix.models import Program

STATE = "@state "
WAITING = "waiting until nobody times"  # time in this state does not count against --timeout

MEMORY_STEPS = 2  # after the first and one warm-up step nothing changes any more; two show that
WARM_UP_STEPS = (5, 2)  # before the timed ones of the first round and of others: clocks and caches settle
ROUNDS = 15  # of timed steps; a machine's pace drifts within seconds, so turns are short
LEAST_SECONDS = 2.0  # of timed steps; a quick step waits for the host, whose pace varies more than the GPU's
PAUSE_SECONDS = 0.05  # after a round, for others to get the lock
SEED = 0

# An allocation of this odd size marks, in the allocator's history, where the forward ends and the backward begins.
_MARK_BYTES = 1_000_003

_BLOCK_BYTES = 512  # the allocator rounds up to this


@dataclass(frozen=True, slots=True)
class Job:
    """What one process has to do."""

    spec: Spec
    variant: str
    steps: int = 20  # timed steps
    distance: bool = True  # compare with eager float32

    @classmethod
    def from_json(cls, text: str) -> Job:
        data = json.loads(text)
        return cls(**{**data, "spec": Spec(**data["spec"])})

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


# ---------------------------------------------------------------- the program and its variants


def build(spec: Spec, device: str = "cuda") -> Program:
    """The program of ``spec`` with real tensors on ``device``; the same numbers each time.

    Raises:
        UsageError: no such model, or one whose tensors have no values.
    """
    import torch
    from torch.utils import _pytree as pytree

    from thunder_fusionfix.models import load_model

    torch.manual_seed(SEED)
    program = load_model(**spec.sizes, device=device)

    def on_device(value: torch.Tensor) -> torch.Tensor:
        if value.device.type == "meta":
            raise UsageError(f"{spec.model} gives tensors on 'meta'; a measurement needs their values")
        return value if value.device.type == device else value.detach().to(device).requires_grad_(value.requires_grad)

    if isinstance(program.fn, torch.nn.Module):
        program.fn.to(device)
    args, kwargs = pytree.tree_map_only(torch.Tensor, on_device, (tuple(program.args), dict(program.kwargs)))
    return dataclasses.replace(program, args=args, kwargs=kwargs)


def parameters_of(program: Program) -> dict[str, torch.Tensor]:
    """Everything that gets a gradient, by name: a module's parameters, and arguments that require grad."""
    import torch
    from torch.utils import _pytree as pytree

    leaves = [
        leaf for leaf in pytree.tree_leaves((program.args, dict(program.kwargs))) if isinstance(leaf, torch.Tensor)
    ]
    found = {f"argument {at}": leaf for at, leaf in enumerate(leaves) if leaf.requires_grad}
    if isinstance(program.fn, torch.nn.Module):
        found |= {name: parameter for name, parameter in program.fn.named_parameters() if parameter.requires_grad}
    return found


class Missing(Exception):
    """A variant that does not exist in this installation; the message says what is missing."""


def thunder_options(variant: Variant) -> dict[str, Any]:
    """What Thunder's compiler is given for a variant that it compiles.

    Raises:
        Missing: the variant needs a part of this project that is not installed.
    """
    if variant.has_entry:
        if importlib.util.find_spec("thunder_fusionfix.executor") is None:
            raise Missing("this release has no executor entry `fusionfix`")
        importlib.import_module("thunder_fusionfix.executor")  # registers it
    if any(variant.options.get(name) == value for name, value in SHARED.items()):
        from thunder_fusionfix.share import install

        install()
    transforms: list[Any] = []
    if variant.transform:
        from thunder_fusionfix.transform import FusionFixTransform

        transforms = [FusionFixTransform()]
    return {"executors": variant.executors, "transforms": transforms, **variant.options}


def compiled(fn: Callable, variant: Variant) -> tuple[Callable, list[Any]]:
    """``fn`` as ``variant`` runs it, and the transforms of ours that it uses."""
    import torch

    if variant.executors is not None:
        from thunder.dynamo import ThunderCompiler

        options = thunder_options(variant)
        ours = list(options["transforms"])  # Thunder adds to the list that it is given
        return torch.compile(fn, backend=ThunderCompiler(**options)), ours
    return (fn if variant is VARIANTS["eager"] else torch.compile(fn)), []


def losses_of(output: Any) -> list[Any]:
    """What a step calls backward on: a model output's ``loss``, else every floating tensor that requires grad."""
    import torch
    from torch.utils import _pytree as pytree

    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return [loss]
    found = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not found:
        raise UsageError("the program gives no tensor that requires a gradient: there is no training step to measure")
    return found


def backward(output: Any) -> None:
    """The backward of a step; an output that is no scalar gets a gradient of ones."""
    import torch

    losses = losses_of(output)
    torch.autograd.backward(losses, [None if loss.numel() == 1 else torch.ones_like(loss) for loss in losses])


@dataclass
class Step:
    """One training step, in its parts."""

    call: Callable
    program: Program
    optimizer: Any | None
    keeps_gradients: bool = False

    def forward(self) -> Any:
        return self.call(*self.program.args, **self.program.kwargs)

    def finish(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
        if not self.keeps_gradients:
            for parameter in self.parameters:
                parameter.grad = None

    @functools.cached_property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        return tuple(parameters_of(self.program).values())

    def run(self) -> None:
        output = self.forward()
        backward(output)
        self.finish()


def make_optimizer(name: str, program: Program) -> Any | None:
    """The optimizer `name` of `step.OPTIMIZERS` over everything that gets a gradient."""
    import torch

    parameters = list(parameters_of(program).values())
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-4)
    return None


# ---------------------------------------------------------------- alone on the GPU


LOCKED_GPU = "FUSIONFIX_LOCKED_GPU"  # environment of a process that sees no GPU: `visible_gpu` of who started it


def visible_gpu() -> str:
    """The GPU that torch's device 0 is, as this machine counts them: "0", or a UUID of a part of one.

    Read from the environment alone, so a process that has not started CUDA may ask.
    """
    if locked := os.environ.get(LOCKED_GPU):
        return locked
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = "0" if visible is None else visible.split(",")[0].strip()
    if first.startswith("GPU-"):  # other processes may know the same one by its number
        return next((number for number, uuid in machine_gpus() if uuid.startswith(first)), first)
    return first.lstrip("0") or "0" if first.isdigit() else first


def machine_gpus() -> list[tuple[str, str]]:
    """Number and UUID of every GPU of this machine; none where ``nvidia-smi`` does not say."""
    try:
        asked = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^GPU (\d+): .*\(UUID: (GPU-[^)]+)\)", asked.stdout, re.MULTILINE)


class GpuLock:
    """Many may measure memory at once; who measures time is alone on its GPU.

    A readers-writer lock on a file, so it holds between processes that know nothing of each other, and ends with them.
    By default each GPU has one, so processes on different GPUs of a machine do not wait for each other.
    """

    def __init__(self, path: Path | None = None) -> None:
        name = re.sub(r"[^\w.-]", "_", visible_gpu()) or "none"
        self.path = path or Path(tempfile.gettempdir()) / f"thunder_fusionfix-gpu-{name}.lock"

    def shared(self, waiting: Callable[[], None] = lambda: None) -> contextlib.AbstractContextManager[None]:
        """The lock beside others; ``waiting`` is called where it is not free at once."""
        return self._held(fcntl.LOCK_SH, waiting)

    def alone(self, waiting: Callable[[], None] = lambda: None) -> contextlib.AbstractContextManager[None]:
        """The lock without others, likewise."""
        return self._held(fcntl.LOCK_EX, waiting)

    def beside(self, name: str) -> GpuLock:
        """Another lock of the same GPU, for what must not run twice at once."""
        return GpuLock(self.path.with_name(f"{self.path.stem}-{name}.lock"))

    @contextlib.contextmanager
    def _held(self, how: int, waiting: Callable[[], None]) -> Iterator[None]:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(handle, how | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(handle, how)
            yield
        finally:
            os.close(handle)  # lets go of the lock


# ---------------------------------------------------------------- measuring


def measure(
    job: Job,
    say: Callable[[str], None],
    lock: GpuLock | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """The record of one variant: ``status``, ``measured``, ``notes`` and what it was measured with.

    Args:
        job: what to measure.
        say: called with each phase that begins.
        lock: who else measures on this GPU.
        keep: called with the record so far, as `CUT`, at the begin of each phase after the first that measured anything.
    """
    import torch

    lock = lock or GpuLock()
    measured: dict[str, Any] = {}
    notes: list[str] = []
    record: dict[str, Any] = {
        "status": OK,
        "measured": measured,
        "notes": notes,
        "environment": environment(),
        "date": now(),
    }
    phase = ""

    def enter(name: str) -> None:
        nonlocal phase
        phase = name
        say(name)
        if measured:
            keep({**record, "status": CUT, "reason": f"ended while {name}"})

    try:
        with lock.shared(lambda: enter(WAITING)):
            enter("building the model")
            program = build(job.spec)
            call, ours = compiled(program.fn, find(job.variant))
            kept = OPTIMIZERS[job.spec.optimizer].keeps_gradients
            step = Step(call, program, make_optimizer(job.spec.optimizer, program), kept)
            enter("first step")
            measured["first_step_s"] = _first_step(step)
            enter("memory")
            step.run()
            measured.update(_memory(step))
            measured["reports"] = [_report(report) for transform in ours for report in transform.reports]
            enter("memory history")
            _noted(notes, phase, lambda: measured.update(_history(step)))
            torch.cuda.empty_cache()

        @contextlib.contextmanager
        def turn() -> Iterator[None]:
            with lock.alone(lambda: enter(WAITING)):
                enter("timing")
                yield
                torch.cuda.empty_cache()  # others have the GPU now

        with lock.alone(lambda: enter(WAITING)):
            enter("profile")
            _noted(notes, phase, lambda: measured.update(_profile(step)))
        measured["step_ms"] = spread_of(in_rounds(lambda: _timed(step), job.steps, turn))
        if job.distance:
            wide = lock.beside("float32")  # one float32 step at a time: it takes twice the memory
            with lock.shared(lambda: enter(WAITING)), wide.alone(lambda: enter(WAITING)):
                enter("distance from eager float32")
                _noted(notes, phase, lambda: measured.update(_distance(step)))
    except Missing as missing:
        record.update(status=SKIPPED, reason=str(missing))
    except torch.OutOfMemoryError as error:
        record.update(status=OUT_OF_MEMORY, reason=f"while {phase}: {_words(error)}")
    except Exception as error:  # noqa: BLE001 -- whatever a variant dies of, the others are still measured
        record.update(status=FAILED, reason=f"while {phase}: {type(error).__name__}: {_words(error)}")
        traceback.print_exc()
    return record


def _words(error: BaseException) -> str:
    """The first lines of an error's message, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " / ".join(lines[:3])[:500]


def _noted(notes: list[str], what: str, run: Callable[[], None]) -> None:
    """Runs what a record can do without; a failure becomes a note."""
    try:
        run()
    except Exception as error:  # noqa: BLE001 -- a record can do without it
        notes.append(f"{what} was not measured: {type(error).__name__}: {_words(error)}")
        gc.collect()


def _first_step(step: Step) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    step.run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _counter(name: str) -> int:
    import torch

    return int(torch.cuda.memory_stats()[name])


def _memory(step: Step) -> dict[str, Any]:
    """Bytes by the allocator's counters; the largest of `MEMORY_STEPS` steps."""
    import torch

    found: dict[str, int] = {}

    def note(name: str, value: int) -> None:
        found[name] = max(found.get(name, 0), value)

    for _ in range(MEMORY_STEPS):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        note("before_step_bytes", before)
        torch.cuda.reset_peak_memory_stats()
        output = step.forward()
        torch.cuda.synchronize()
        note("forward_peak_bytes", torch.cuda.max_memory_allocated())
        note("forward_peak_requested_bytes", _counter("requested_bytes.all.peak"))
        note("saved_bytes", torch.cuda.memory_allocated() - before)
        note("reserved_bytes", torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()
        backward(output)
        torch.cuda.synchronize()
        note("backward_peak_bytes", torch.cuda.max_memory_allocated())
        note("backward_peak_requested_bytes", _counter("requested_bytes.all.peak"))
        torch.cuda.reset_peak_memory_stats()
        step.finish()
        torch.cuda.synchronize()
        note("optimizer_peak_bytes", torch.cuda.max_memory_allocated())
        note("reserved_bytes", torch.cuda.max_memory_reserved())
        del output
    peaks = ("forward_peak_bytes", "backward_peak_bytes", "optimizer_peak_bytes")
    found["peak_bytes"] = max(found[name] for name in peaks)
    workspaces = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    found["cublas_workspace_bytes"] = workspaces - torch.cuda.memory_allocated()
    return found


def _history(step: Step) -> dict[str, Any]:
    """The start-of-backward peak, and what is alive there and at the peak, from one step's allocations."""
    import torch

    step.run()  # the workspaces are back
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(context=None, stacks="python")
    try:
        output = step.forward()
        torch.empty(_MARK_BYTES, dtype=torch.uint8, device="cuda")
        backward(output)
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    step.finish()
    del output
    return replay(events, base)


def replay(events: Sequence[Mapping[str, Any]], base: int) -> dict[str, Any]:
    """What the allocator's events say about one step that began with ``base`` bytes allocated.

    Args:
        events: entries of a snapshot's ``device_traces``, with the mark at the end of the forward.
        base: bytes.

    Returns:
        ``backward_start_bytes`` (see the module), ``alive_at_peak`` and ``alive_at_backward_start``: lists of
        ``{"bytes": of one, "count": how many, "seen": "forward" or "backward"}``, largest total first, without what was
        there before the step; ``curve``: at most 200 bytes counts over the step, each the largest of its stretch.
    """
    live: dict[int, tuple[int, str]] = {}
    total, stage = base, "forward"
    curve: list[int] = []
    backward_at: int | None = None
    peak: tuple[int, dict[int, tuple[int, str]]] = (0, {})  # bytes, and what is alive then
    start_peak = peak
    allocations = _backward_allocations(events)
    seen = 0
    for event in events:
        size = -(-event["size"] // _BLOCK_BYTES) * _BLOCK_BYTES
        if event["action"] == "alloc":
            if event["size"] == _MARK_BYTES and backward_at is None:
                backward_at, stage = len(curve), "backward"
                start_peak = (total, dict(live))
            if event["size"] != _MARK_BYTES:
                live[event["addr"]] = (size, stage)
                total += size
                seen += stage == "backward"
        elif event["action"] == "free_requested":
            if event["size"] != _MARK_BYTES:
                live.pop(event["addr"], None)
                total -= size
        else:
            continue
        curve.append(total)
        if total > peak[0]:
            peak = (total, dict(live))
        if stage == "backward" and seen <= -(-allocations // 10) and total > start_peak[0]:
            start_peak = (total, dict(live))
    found: dict[str, Any] = {
        "alive_at_peak": _grouped(peak[1]),
        "replayed_peak_bytes": peak[0],
        "curve": _thinned(curve),
    }
    if backward_at is not None:
        found |= {
            "backward_start_bytes": start_peak[0],
            "alive_at_backward_start": _grouped(start_peak[1]),
            "curve_backward_at": backward_at / max(1, len(curve)),
        }
    return found


def _backward_allocations(events: Sequence[Mapping[str, Any]]) -> int:
    sizes = [event["size"] for event in events if event["action"] == "alloc"]
    return len(sizes) - sizes.index(_MARK_BYTES) - 1 if _MARK_BYTES in sizes else 0


def _grouped(live: Mapping[int, tuple[int, str]], most: int = 24) -> list[dict[str, Any]]:
    counts = Counter(live.values())
    largest = sorted(counts.items(), key=lambda item: (-item[0][0] * item[1], item[0]))[:most]
    return [{"bytes": size, "count": count, "seen": stage} for (size, stage), count in largest]


def _thinned(curve: Sequence[int], most: int = 200) -> list[int]:
    width = max(1, -(-len(curve) // most))
    return [max(curve[at : at + width]) for at in range(0, len(curve), width)]


def _profile(step: Step) -> dict[str, Any]:
    """Kernel launches of one step, and the kernels that take the most time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    step.run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step.run()
        torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    micros: Counter[str] = Counter()
    for event in profiler.events():
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if (
            on_gpu
            and not getattr(event, "is_user_annotation", False)
            and not event.name.startswith(("Memcpy", "Memset"))
        ):
            counts[event.name] += 1
            micros[event.name] += event.time_range.elapsed_us()
    if not counts:
        raise RuntimeError("the profiler saw no kernel")
    kernels = [{"name": name[:160], "count": counts[name], "us": round(us, 1)} for name, us in micros.most_common(25)]
    return {"launches": counts.total(), "kernel_ms": sum(micros.values()) / 1e3, "kernels": kernels}


def in_rounds(
    timed: Callable[[], float],
    steps: int,
    turn: Callable[[], contextlib.AbstractContextManager[None]],
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Milliseconds of at least ``steps`` steps, and of as many as take `LEAST_SECONDS`, in `ROUNDS` of equal size.

    Args:
        timed: runs one step; its milliseconds.
        steps: at least so many are timed.
        turn: held for a round.
        clock: seconds.
    """
    times: list[float] = []
    for one in range(ROUNDS):
        with turn():
            for _ in range(WARM_UP_STEPS[one > 0]):
                timed()
            enough, until = -(-steps * (one + 1) // ROUNDS), clock() + LEAST_SECONDS / ROUNDS
            while len(times) < enough or clock() < until:
                times.append(timed())
        if one + 1 < ROUNDS:
            time.sleep(PAUSE_SECONDS)
    return times


def _timed(step: Step) -> float:
    """Milliseconds of one step, by CUDA events."""
    import torch

    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step.run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def spread_of(times: Sequence[float]) -> dict[str, Any]:
    """Median, and spread: third quartile minus first."""
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return {
        "median": statistics.median(times),
        "spread": quartiles[2] - quartiles[0],
        "min": min(times),
        "max": max(times),
        "steps": len(times),
    }


def _distance(step: Step) -> dict[str, Any]:
    """Loss and gradients of one step, against the same step in float32 without a compiler."""
    import torch
    from torch.utils import _pytree as pytree

    program = step.program
    step.optimizer = None
    loss, gradients = _loss_and_gradients(step)
    step.call = program.fn
    if isinstance(program.fn, torch.nn.Module):
        program.fn.float()
    # arguments keep their identity where they are float32 already, so that they keep their name
    wide = pytree.tree_map_only(torch.Tensor, _as_float32, (program.args, dict(program.kwargs)))
    reference = Step(program.fn, dataclasses.replace(program, args=wide[0], kwargs=wide[1]), None)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    gc.collect()
    torch.cuda.empty_cache()
    right_loss, right_gradients = _loss_and_gradients(reference)
    difference = norm = 0.0
    worst, worst_name = 0.0, ""
    for name, right in right_gradients.items():
        off = (gradients.pop(name).float() - right).norm().item()
        size = right.norm().item()
        difference, norm = difference + off**2, norm + size**2
        if size and off / size > worst:
            worst, worst_name = off / size, name
    return {
        "loss": loss,
        "loss_float32": right_loss,
        "loss_distance": abs(loss - right_loss),
        "gradient_distance": (difference / norm) ** 0.5 if norm else 0.0,
        "worst_gradient": {"name": worst_name, "distance": worst},
    }


def _as_float32(value: Any) -> Any:
    if not value.is_floating_point():
        return value
    return value.detach().float().requires_grad_(value.requires_grad)


def _loss_and_gradients(step: Step) -> tuple[float, dict[str, Any]]:
    """The loss, summed where it is no scalar, and the gradients by name, taken off their parameters."""
    import torch

    parameters = parameters_of(step.program)
    for parameter in parameters.values():
        parameter.grad = None
    torch.manual_seed(SEED)
    output = step.forward()
    loss = sum(part.detach().float().sum().item() for part in losses_of(output))
    backward(output)
    del output
    gradients = {}
    for name, parameter in parameters.items():
        gradients[name], parameter.grad = parameter.grad, None
    return loss, {name: gradient for name, gradient in gradients.items() if gradient is not None}


def _report(report: Any) -> dict[str, Any]:
    """A transform's report on one trace, in numbers."""
    return {
        "stage": report.stage,
        "before_peak_bytes": report.before.peak_bytes,
        "after_peak_bytes": report.after.peak_bytes,
        "applied": sum(decision.applied for decision in report.decisions),
        "refused": sum(not decision.applied for decision in report.decisions),
        "seconds": report.seconds,
        "kept_input": report.kept_input,
    }


# ---------------------------------------------------------------- with what


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def environment() -> dict[str, Any]:
    """The GPU and the versions of everything that a measurement depends on."""
    import torch

    from thunder_fusionfix import __version__
    from thunder_fusionfix._thunder import installed_versions

    packages = {**installed_versions(), "transformers": _version("transformers"), "thunder_fusionfix": __version__}
    found: dict[str, Any] = {"packages": packages, "python": platform.python_version(), "cpus": os.cpu_count()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "gpu_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---------------------------------------------------------------- the process


def join_parent() -> None:
    """Makes this process end with its parent: when its standard input is closed, or by one kill of its group."""
    os.setpgrp()

    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(argv: Sequence[str]) -> int:
    """``measure JOB OUT``: JOB is a `Job` as JSON, OUT the file to write."""
    job, out = Job.from_json(argv[0]), Path(argv[1])
    join_parent()
    warnings.simplefilter("ignore")

    def say(state: str) -> None:
        print(f"{STATE}{state}", flush=True)

    def keep(record: Mapping[str, Any]) -> None:
        part = out.with_suffix(".part")
        part.write_text(json.dumps(record))
        part.replace(out)

    keep(measure(job, say, keep=keep))
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # compilers' worker processes and threads would take seconds to end

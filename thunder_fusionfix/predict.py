"""Predicts what a training step of a program needs, on a machine without a GPU: capture, read, `simulate_step`.

``fusionfix explain MODEL --step`` and ``bench`` use it; ``python -m thunder_fusionfix.predict JOB OUT`` is `bench`'s
process.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thunder_fusionfix.devices import CONTEXT_BYTES, DEFAULT, Device, fits
from thunder_fusionfix.devices import find as find_device
from thunder_fusionfix.effects import Kind, effect_of
from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.measure import STATE, WAITING, GpuLock, Job, Missing, join_parent, thunder_options
from thunder_fusionfix.model import Op, Value
from thunder_fusionfix.results import FAILED, MB, OK, SKIPPED, Spec, megabytes
from thunder_fusionfix.step import StepPart, StepTimeline, simulate_step
from thunder_fusionfix.variants import find

if TYPE_CHECKING:  # it needs torch
    from thunder_fusionfix.capture import Split


@dataclass(frozen=True)
class Prediction:
    """A step of one variant, as predicted."""

    step: StepTimeline
    parts: tuple[StepPart, ...]
    notes: tuple[str, ...]  # where torch.compile or ThunderFX split the program, and why
    seconds: float  # of the capture
    splits: tuple[Split, ...] = ()  # the same, each place by itself


def predict(
    spec: Spec,
    variant: str = "plain",
    *,
    device: Device | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Prediction:
    """Captures the program as ``variant`` compiles it and prices its step.

    Args:
        spec: the program.
        variant: one that Thunder compiles.
        device: whose cuBLAS workspace is counted; by default `devices.DEFAULT`.
        progress: called with a few words at each step that takes time.

    Raises:
        UsageError: no such model, or a variant that Thunder does not compile.
        Missing: the variant needs a part of this project that is not installed.
    """
    chosen = find(variant)
    if chosen.executors is None:
        raise UsageError(f"there is no prediction for {variant!r}: Thunder does not compile it")
    from thunder_fusionfix.capture import capture
    from thunder_fusionfix.models import load_model

    options = thunder_options(chosen)
    program = load_model(**spec.sizes)
    captured = capture(
        program.fn,
        program.args,
        program.kwargs,
        dynamo=True,
        progress=progress,
        **options,
    )
    parts = step_parts(captured)
    workspace = device.workspace_bytes if device is not None else None
    step = simulate_step(parts, optimizer=spec.optimizer, workspace_bytes=workspace)
    return Prediction(step, parts, captured.notes, captured.seconds, captured.splits)


def resolved(spec: Spec) -> Spec:
    """``spec`` with the model's own sizes where none are given.

    Raises:
        UsageError: no such model, or sizes that it cannot take.
    """
    from thunder_fusionfix.models import MODELS, load_model

    if spec.model not in MODELS:
        if ":" not in spec.model and not spec.model.endswith(".py"):
            load_model(spec.model)  # raises, and names the models
        return spec
    load_model(**spec.sizes)  # on "meta": takes no memory
    own = MODELS[spec.model].sizes
    given = {name: getattr(spec, name) or getattr(own, name) for name in ("layers", "hidden_size", "seq", "batch")}
    return replace(spec, **given)


def step_parts(captured: Any) -> tuple[StepPart, ...]:
    """The final traces of a `Capture` as Graphs, with the strides of their arguments; what torch.compile gets included."""
    from thunder_fusionfix.read import example_strides, read

    parts = []
    for part in captured.called:
        with part.compiling():
            strides = example_strides()
            forward = read(part.forward, strides=strides)
            backward = None if part.backward is None else read(part.backward, strides=strides, held=forward.args)
        parts.append(StepPart(part.name, forward, backward))
    return tuple(parts)


def as_record(prediction: Prediction) -> dict[str, Any]:
    """What the results file keeps of a prediction."""
    step = prediction.step
    graphs = [graph for part in prediction.parts for graph in (part.forward, part.backward) if graph is not None]
    return {
        "status": OK,
        "peak_bytes": step.peak_bytes,
        "is_lower_bound": step.is_lower_bound,
        "peak_phase": step.peak_phase.name,
        "forward_peak_bytes": step.peak_of("forward"),
        "backward_peak_bytes": step.peak_of("backward"),
        "optimizer_peak_bytes": step.peak_of("optimizer"),
        "backward_start_bytes": step.backward_start_bytes,
        "saved_bytes": step.saved_bytes,
        "base": dict(step.base),
        "phases": [{"name": phase.name, "peak_bytes": phase.peak_bytes} for phase in step.phases],
        "holders": [
            {"name": holder.name, "bytes": holder.nbytes, "from": holder.producer} for holder in step.holders[:16]
        ],
        "thunder_functions": [part.name for part in prediction.parts],
        "regions": sum(op.is_fusion for graph in graphs for op in graph.ops),
        "calls": sum(_is_call(op) for graph in graphs for op in graph.ops),
        "unknown": list(step.unknown),
        "splits": [asdict(split) for split in prediction.splits],
        "notes": [*prediction.notes, *step.notes],
        "capture_s": prediction.seconds,
    }


def explain_step(
    spec: Spec,
    *,
    variant: str = "plain",
    device: str = DEFAULT,
    progress: Callable[[str], None] = lambda step: None,
) -> str:
    """What ``explain MODEL --step --device DEVICE`` prints.

    Raises:
        UsageError: no such model, size, variant, optimizer or device.
        Missing: as `predict`.
    """
    chosen, spec = find_device(device), resolved(spec)
    return step_text(spec, predict(spec, variant, device=chosen, progress=progress), chosen)


def step_text(spec: Spec, prediction: Prediction, device: Device) -> str:
    """What ``explain MODEL --step`` prints: the peak, whether it fits, each phase, and what is alive at the peak."""
    step = prediction.step
    least = "at least " if step.is_lower_bound else ""
    spare = device.capacity_bytes - CONTEXT_BYTES - step.peak_bytes
    large = [holder for holder in step.holders[:12] if holder.nbytes >= MB / 2]  # largest first
    values = _values_of(step.peak_phase.name, prediction.parts)

    def shown(name: str) -> str:
        value = values.get(name)
        if value is None or value.shape is None:
            return name
        return f"{name}: {value.dtype}[{', '.join(map(str, value.shape))}]"

    verdict = (
        f"fits, {megabytes(spare)} MB to spare"
        if fits(step.peak_bytes, device)
        else f"does not fit by {megabytes(-spare)} MB"
    )
    lines = [
        f"{spec.title}: a step needs {least}{megabytes(step.peak_bytes)} MB, in the {step.peak_phase.name}",
        f"{device.name} has {megabytes(device.capacity_bytes)} MB, CUDA takes {megabytes(CONTEXT_BYTES)}: {verdict}",
        "",
        f"{'phase':44}{'peak MB':>10}",
        *(f"{phase.name:44}{megabytes(phase.peak_bytes):>10}" for phase in step.phases),
        f"{'start of the backward':44}{megabytes(step.backward_start_bytes):>10}",
        f"{'saved by the forwards, outputs included':44}{megabytes(step.saved_bytes):>10}",
        "",
        f"{'alive at the peak':44}{'MB':>10}",
        *(f"{shown(holder.name):44}{megabytes(holder.nbytes):>10}  {holder.producer}" for holder in large),
    ]
    rest = step.holders[len(large) :]
    if rest:
        lines.append(f"{f'{len(rest)} more':44}{megabytes(sum(holder.nbytes for holder in rest)):>10}")
    if step.unknown:
        lines += ["", f"bytes not known, counted as 0: {', '.join(step.unknown)}"]
    return "\n".join([*lines, *([""] if prediction.notes or step.notes else []), *prediction.notes, *step.notes])


def _values_of(phase: str, parts: Sequence[StepPart]) -> Mapping[str, Value]:
    """The values of the Graph that runs in ``phase``; none for the optimizer."""
    stage, _, name = phase.partition(" of ")
    part = next((part for part in parts if part.name == name), None)
    graph = None if part is None else part.forward if stage == "forward" else part.backward
    return {} if graph is None else graph.values


def _is_call(op: Op) -> bool:
    return effect_of(op).kind is not Kind.BOOKKEEPING


def _say(state: str) -> None:
    print(f"{STATE}{state}", flush=True)


def main(argv: Sequence[str]) -> int:
    """``predict JOB OUT``: JOB is a `Job` as JSON, OUT the file to write."""
    job, out = Job.from_json(argv[0]), Path(argv[1])
    join_parent()
    warnings.simplefilter("ignore")
    record: Mapping[str, Any]
    try:
        # it would take the processor from who times
        with GpuLock().shared(lambda: _say(WAITING)):
            _say("tracing without a GPU")
            record = as_record(predict(job.spec, job.variant, progress=_say))
    except Missing as missing:
        record = {"status": SKIPPED, "reason": str(missing)}
    except Exception as error:  # noqa: BLE001 -- a program that cannot be captured may still be measured
        traceback.print_exc()
        record = {"status": FAILED, "reason": f"{type(error).__name__}: {error}"[:400]}
    out.write_text(json.dumps(record))
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)

"""The golden cases of traces/: what the passes do to a few programs, as text that a reviewer reads.

``make golden`` (``pytest tests/test_golden.py --bless``) writes the files anew. A case is one line of `CASES`; traces/README.md
says what its files hold. They are compared on the releases that they were made with, and nowhere else.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from thunder_fusionfix.document import Heading, markdown
from thunder_fusionfix.overview import comparison_of, overview_of, overview_of_graphs
from thunder_fusionfix.parse import parse
from thunder_fusionfix.report import decision_blocks, summarize
from thunder_fusionfix.text import normalised, sections, split_sections

TRACES = Path(__file__).parent.parent / "traces"
NUMBERS = "peak.json"


@dataclass(frozen=True)
class Case:
    """One program and how it is captured."""

    program: Callable[[], tuple[Any, ...]] | str  # a name for `load_model`, or a function that gives (callable, args)
    sizes: Mapping[str, int] = field(default_factory=dict)  # of a named model
    options: Mapping[str, Any] = field(default_factory=dict)  # of `capture`

    @property
    def needs(self) -> tuple[str, ...]:
        """Packages whose releases decide what the traces look like."""
        return ("torch", "lightning-thunder", "nvFuser", *(("transformers",) if self.sizes else ()))


def attention_by_hand() -> tuple[Any, ...]:
    """Attention out of matmuls: its backward starts with transposes of what the forward saved."""
    import torch
    import torch.nn.functional as F

    def attention(x, wq, wk, wv):
        b, s, _ = x.shape
        q, k, v = (F.linear(x, w).view(b, s, 4, -1).transpose(1, 2) for w in (wq, wk, wv))
        p = torch.softmax(torch.matmul(q, k.transpose(2, 3)), -1, dtype=torch.float32).to(x.dtype)
        return torch.matmul(p, v).transpose(1, 2).reshape(b, s, -1)

    def tensor(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

    return attention, [tensor(2, 128, 256), *(tensor(256, 256) for _ in range(3))]


CASES = {
    "causal-lm-loss": Case("causal-lm-loss"),
    "qwen2.5-7b-2-layers": Case("qwen2.5-7b", {"layers": 2}),
    "qwen2.5-7b-2-layers-consecutive": Case(
        "qwen2.5-7b", {"layers": 2, "hidden_size": 28}, {"fusion_type": "consecutive"}
    ),
    "shape-only-fusion": Case(
        attention_by_hand, options={"fusion_type": "dataflow", "nv_enable_shape_only_fusion": True}
    ),
}


def versions(case: Case) -> dict[str, str]:
    """The installed releases of what the case needs, without the part that says how they were built."""
    from thunder_fusionfix._thunder import installed_versions

    found = installed_versions()
    if "transformers" in case.needs:
        found["transformers"] = importlib.metadata.version("transformers")
    return {name: (found[name] or "none").partition("+")[0] for name in case.needs}


@functools.cache
def captured_with_fix(name: str) -> tuple[Any, Any]:
    """The capture of a case, and the transform that rewrote it."""
    from thunder_fusionfix.capture import capture
    from thunder_fusionfix.models import load_model
    from thunder_fusionfix.transform import FusionFixTransform

    case, fix = CASES[name], FusionFixTransform(strict=True)
    if isinstance(case.program, str):
        program = load_model(case.program, **case.sizes)
        fn, args, kwargs = program.fn, program.args, program.kwargs
    else:
        (fn, args), kwargs = case.program(), {}
    return capture(fn, args, kwargs, transforms=[fix], **case.options), fix


@functools.cache
def made(name: str) -> Mapping[str, str]:
    """The files of a case, by name, as they are made now."""
    case = CASES[name]
    captured, fix = captured_with_fix(name)

    overviews = overview_of(captured, before=True), overview_of(captured)
    steps = [comparison_of(overview) for overview in overviews]
    before, after = {}, {}
    for part in captured.parts:
        for label, old, new in (
            (f"{part.name} forward", part.forward_before, part.forward),
            (f"{part.name} backward", part.backward_before, part.backward),
        ):
            before[label], after[label] = normalised(str(old)), normalised(str(new))
    reports = dict(zip(overviews[0].labelled(), fix.reports))  # no trace of these programs is without regions
    assert list(reports) == list(before) and len(fix.reports) == len(before)
    numbers = {
        "made with": versions(case),
        "step": {label: [step[label] for step in steps] for label in steps[0]},
        "traces": {
            label: {
                "peak_bytes": [report.before.peak_bytes, report.after.peak_bytes],
                "layouts_in_fusions": [
                    sum(summarize(graph, timeline).layouts.values())
                    for graph, timeline in ((report.graph_before, report.before), (report.graph_after, report.after))
                ],
            }
            for label, report in reports.items()
        },
    }
    decisions = [
        block
        for label, report in reports.items()
        for block in (Heading(label, is_main=True), *decision_blocks(report.decisions))
    ]
    return {
        "before.txt": sections(before),
        "after.txt": sections(after),
        "pass.diff": "".join(difference(before[label], after[label], label) for label in before),
        "decisions.md": markdown(decisions) + "\n",
        NUMBERS: json.dumps(numbers, indent=2) + "\n",
    }


def difference(old: str, new: str, label: str, context: int = 1) -> str:
    """The unified difference of two texts; empty where there is none."""
    lines = difflib.unified_diff(
        old.splitlines(True), new.splitlines(True), f"{label}, before", f"{label}, after", n=context
    )
    return "".join(lines)


@pytest.mark.nvfuser
@pytest.mark.parametrize("name", CASES)
def test_golden_case_is_what_the_passes_make(name, bless):
    """The files of a case are what is made now; a difference is either a fault or a change that ``make golden`` records."""
    folder = TRACES / name
    if bless:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in made(name).items():
            (folder / file).write_text(text, encoding="utf-8")
        return
    made_with = json.loads((folder / NUMBERS).read_text())["made with"]
    if made_with != versions(CASES[name]):
        pytest.skip(f"made with {made_with}, here are {versions(CASES[name])}")
    for file, text in made(name).items():
        changed = difference((folder / file).read_text(encoding="utf-8"), text, f"{name}/{file}")
        assert not changed, (
            f"traces/{name}/{file} is not what is made now; read this, then `make golden`:\n{changed[:6000]}"
        )


@pytest.mark.parametrize("name", CASES)
def test_golden_case_reads_without_nvfuser(name):
    """The texts of a case are whole traces: a program read from them has the layouts and, to 0.1 %, the peak of peak.json."""
    numbers = json.loads((TRACES / name / NUMBERS).read_text())["step"]
    for side, file in enumerate(("before.txt", "after.txt")):
        texts = split_sections((TRACES / name / file).read_text(encoding="utf-8"))
        program = overview_of_graphs((label, parse(text, name=label)) for label, text in texts.items())
        found = comparison_of(program)
        assert found["num_layouts"] == numbers["num_layouts"][side]
        # a text has no sizes of tuples
        assert found["peak_bytes"] == pytest.approx(numbers["peak_bytes"][side], rel=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_golden_text_holds_nothing_of_a_machine(name):
    """Normalising the texts again changes nothing: no time, no path, no address is left."""
    for file in ("before.txt", "after.txt"):
        for text in split_sections((TRACES / name / file).read_text(encoding="utf-8")).values():
            assert normalised(text) == text


def test_every_folder_of_traces_is_a_case():
    """No golden files lie around that no case renews."""
    assert {path.name for path in TRACES.iterdir() if path.is_dir()} == set(CASES)


@pytest.mark.nvfuser
@pytest.mark.parametrize("name", CASES)
def test_golden_case_is_read_as_it_is_parsed(name):
    """Parsing what Thunder prints of a case gives the ops that `read` gives, before and after the passes."""
    from thunder_fusionfix.read import read

    captured, _ = captured_with_fix(name)
    for part in captured.parts:
        for trace in (part.forward_before, part.backward_before, part.forward, part.backward):
            parsed, graph = parse(str(trace)), read(trace)
            assert (parsed.name, parsed.stage, parsed.args) == (graph.name, graph.stage, graph.args)
            assert parsed.ops == graph.ops
            assert parsed.values.keys() == graph.values.keys()

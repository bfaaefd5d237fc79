"""Sentences, tables and pictures of timelines and reports."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from helpers import GraphBuilder

from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.model import Decision, Graph, Ref, Report, Timeline, Value
from thunder_fusionfix.report import (
    Curve,
    _edges,
    _phase_widths,
    _wrapped,
    comparison_table,
    curve,
    draw_timeline,
    peak_sentence,
    report_markdown,
    report_text,
    short_name,
    summarize,
    timeline_text,
)
from thunder_fusionfix.segments import Cost
from thunder_fusionfix.simulate import simulate

MEGA = (1000, 1000)  # shape of 4 MB of f32


def backward(*, layouts_inside: bool) -> Graph:
    """A loss-like backward over a saved 4 MB bf16 tensor: reordered before it is reduced, in the region or not at all."""
    build = GraphBuilder("backward")
    build.values |= {name: Value(name, kind="collection") for name in ("C0", "C1")}
    logits = build.value("logits", (2000, 1000), "bf16")
    build.collection("saved_for_backward", Ref("C0"), Ref("C1"), arg=True)
    build.collection("cotangents", build.value("g", MEGA), arg=True)
    build.collection("C0", logits)

    def body() -> None:
        wide = build.op("prims.convert_element_type", logits, "dtypes.float32", out="wide", shape=(2000, 1000))
        if layouts_inside:
            wide = build.op("prims.stride_order", wide, (1, 0), out="ordered", shape=(2000, 1000))
        build.op("prims.exp", wide, out="grad", shape=(2000, 1000))

    build.region("nvFusion0", (logits, Ref("g")), (Ref("grad"),), body)
    return build.delete(logits, Ref("g")).returns(Ref("grad"), None)


def report(**changes) -> Report:
    before, after = backward(layouts_inside=True), backward(layouts_inside=False)
    decisions = (
        Decision(
            "unfuse_layouts", 9, "nvFusion0", "hoisted stride_order of ordered", "a view of the input", True, 16_000_000
        ),
        Decision("unfuse_layouts", 9, "nvFusion0", "transpose of t1", "it would become a copy", False),
        Decision("unfuse_layouts", 11, "nvFusion4", "transpose of t2", "it would become a copy", False),
    )
    made = Report("backward", simulate(before), simulate(after), before, after, decisions, 0.012)
    return replace(made, **changes)


# ---------------------------------------------------------------- in words


def test_peak_sentence_tells_shares_largest_first() -> None:
    """What the region writes for itself, what was saved, what was given, what is returned; they add up to the peak."""
    graph = backward(layouts_inside=True)
    assert peak_sentence(graph, simulate(graph)) == (
        "The peak of 32.0 MB is at nvFusion0 (op 9 of 12): "
        "16.0 MB that nvFusion0 writes only for itself, where nvFuser cuts it (wide, ordered), "
        "8.0 MB results (grad), 4.0 MB incoming gradients (g), 4.0 MB saved by the forward (logits)."
    )


def test_peak_sentence_sums_up_what_is_small() -> None:
    """Shares below two per cent are one."""
    build = GraphBuilder()
    x = build.arg("x", (10,))
    y = build.op("torch.exp", x, out="y", shape=MEGA)
    sentence = peak_sentence(graph := build.returns(y), simulate(graph))
    assert sentence == "The peak of 4.0 MB is at torch.exp (op 0 of 2): 4.0 MB results (y), 0.001 MB else."


def test_peak_sentence_of_a_trace_without_tensors_says_so() -> None:
    """Nothing alive, nothing held."""
    graph = GraphBuilder().returns(None)
    assert peak_sentence(graph, simulate(graph)) == "The trace needs no GPU memory."


def test_short_name_keeps_both_ends() -> None:
    """Parameters of a model have names that differ at the end."""
    assert short_name("t1") == "t1"
    long = "L_self_" + "modules_" * 12 + "weight_"
    assert short_name(long).startswith("L_self_modules_")
    assert short_name(long).endswith("weight_")
    assert len(short_name(long)) <= 48


# ---------------------------------------------------------------- numbers and tables


def test_summarize_counts_layouts_by_cost_and_launches_without_views() -> None:
    """A view in torch launches nothing, a layout that may copy does, a fusion does."""
    build = GraphBuilder("forward")
    x = build.arg("x", MEGA, strides=(1000, 1))
    view = build.op("torch.permute", x, (1, 0), out="view", shape=MEGA)
    copy = build.op("torch.reshape", view, (1_000_000,), out="copy", shape=(1_000_000,))

    def body() -> None:
        build.op("prims.exp", copy, out="y", shape=(1_000_000,))
        build.op("prims.transpose", x, (1, 0), out="t", shape=MEGA)

    build.region("nvFusion0", (x, copy), (Ref("y"), Ref("t")), body)
    graph = build.returns((Ref("y"),), ((x, Ref("y"), Ref("t")), ()))
    found = summarize(graph, simulate(graph))
    assert (found.num_regions, found.num_launches) == (1, 2)
    assert found.layouts == {Cost.LAUNCH: 1}
    assert found.saved_bytes == 4_000_000, "y; x and its transpose are the caller's"
    assert found.start_of_backward_bytes is None


def test_comparison_table_shows_both_traces() -> None:
    """One row a number, with what a forward or a backward alone has left out."""
    made = report()
    table = comparison_table(summarize(made.graph_before, made.before), summarize(made.graph_after, made.after))
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["peak, MB"] == ("32.0", "16.0")
    assert rows["layout ops in fusions"] == ("1", "0")
    assert rows["  that write a tensor"] == ("1", "0")
    assert rows["written by those, MB"] == ("16.0", "0")
    assert "peak in the first tenth of the backward, MB" in rows
    assert "saved for the backward, MB" not in rows


def test_report_text_leads_with_the_answer_and_gives_each_decision_its_reason() -> None:
    """Peak before and after on the first line, rewrites with their bytes, refusals once a reason with all places."""
    lines = report_text(report()).splitlines()
    assert lines[0] == "backward trace: peak 32.0 -> 16.0 MB (-50.0 %), 1 rewrite, 12 ms"
    assert lines[1].startswith("  before: The peak of 32.0 MB is at nvFusion0")
    assert lines[2].startswith("  after:  The peak of 16.0 MB")
    (done,) = [line for line in lines if "hoisted stride_order" in line]
    assert "-16.0" in done
    assert "a view of the input" in done
    (left,) = [line for line in lines if "it would become a copy" in line]
    assert left.split()[0] == "2"
    assert "nvFusion0, nvFusion4" in left


def test_report_text_says_why_an_input_was_kept() -> None:
    """A pass that was undone is no secret."""
    text = report_text(report(kept_input="the simulated peak would rise", decisions=()))
    assert "a pass was undone: the simulated peak would rise" in text
    assert "0 rewrites" in text


def test_report_markdown_is_the_same_in_markdown() -> None:
    """A heading and a table that GitHub shows."""
    text = report_markdown(report())
    assert text.startswith("## backward trace: peak 32.0 -")
    assert "| peak, MB | 32.0 | 16.0 |" in text


def test_timeline_text_lists_the_largest_holders_and_sums_up_the_rest() -> None:
    """Eight rows and one for the rest; tensors of unknown size are named."""
    build = GraphBuilder()
    inputs = [build.arg(f"x{number}", MEGA) for number in range(11)]
    y = build.op("torch.stack", tuple(inputs), out="y", shape=(11, *MEGA))
    build.value("z", None)
    build.values["z"] = Value("z", None, None, "cuda:0")
    build.args.append("z")
    text = timeline_text(graph := build.returns(y), simulate(graph), "a title")
    assert text.splitlines()[0] == "a title"
    assert "4 more" in text
    assert "their sizes are not known: z" in text
    assert len([line for line in text.splitlines() if "argument" in line and "4.0" in line]) == 8


# ---------------------------------------------------------------- a picture


@pytest.mark.parametrize(("suffix", "head"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_draw_timeline_writes_the_kind_that_the_suffix_names(suffix, head, tmp_path) -> None:
    """PNG, SVG and PDF, of one timeline and of several, of a trace of one op too."""
    made = report()
    short = GraphBuilder()
    tiny = simulate(flat := short.returns(short.arg("x", (4,))))
    plain, fixed = curve(made.graph_before, made.before), curve(made.graph_after, made.after)
    phases = (("forward of net", 2), ("backward of net", len(made.before.live_bytes) - 2))
    step = replace(plain, phases=phases)
    for number, curves in enumerate(({"plain": plain, "fixed": fixed}, {"one": curve(flat, tiny)}, {"step": step})):
        path = tmp_path / f"picture{number}{suffix}"
        draw_timeline(curves, path)
        assert path.read_bytes().startswith(head)
        assert path.stat().st_size > 3000


def test_draw_timeline_refuses_other_suffixes_and_missing_folders_in_one_line(tmp_path) -> None:
    """The message names the file and what to do."""
    plain = curve(report().graph_before, report().before)
    with pytest.raises(UsageError, match="picture.doc: no picture is of that kind; end it in .png, .svg or .pdf"):
        draw_timeline({"plain": plain}, tmp_path / "picture.doc")
    with pytest.raises(UsageError, match="cannot be written"):
        draw_timeline({"plain": plain}, tmp_path / "nowhere" / "picture.png")


def svg_text(path) -> str:
    """All that an SVG says, letter by letter as it is drawn: matplotlib writes each text into a comment."""
    return " ".join(re.findall(r"<!-- (.*?) -->", path.read_text(), re.DOTALL))


def test_picture_counts_ops_as_the_sentence_does() -> None:
    """The peak has one name and one number, whoever speaks of it."""
    made = report()
    drawn = curve(made.graph_before, made.before)
    assert drawn.peak_op == "nvFusion0 (op 9 of 12)"
    assert f" MB is at {drawn.peak_op}: " in peak_sentence(made.graph_before, made.before)


def test_axis_of_ops_has_whole_numbers_only(tmp_path) -> None:
    """There is no op 0.5, not even in a trace of two."""
    made = report()
    short = curve(made.graph_before, replace(made.before, live_bytes=(4, 8), peak_pos=1))
    draw_timeline({"short": short}, tmp_path / "picture.svg")
    ticks, _, _ = svg_text(tmp_path / "picture.svg").partition(" op of the trace, counted from 0")
    assert ticks == "0 1 2"


def test_phases_of_a_step_stand_at_one_place_for_all_that_is_drawn(tmp_path) -> None:
    """Each phase has the same width before and after, however many ops it has; a short one can be seen; all are named."""
    timeline = Timeline(tuple(range(1, 22)), 21, 20, 0, 0, ())
    phases = (("forward of net", 20), ("backward of net", 1)), (("forward of net", 10), ("backward of net", 11))
    curves = {
        label: Curve(timeline, "torch.exp (op 1 of 2)", found) for label, found in zip(("before", "after"), phases)
    }
    widths = dict(_phase_widths(curves.values()))
    before, after = (_edges(drawn, widths) for drawn in curves.values())
    assert before[0] == after[0] == 0
    assert before[20] == after[10] == widths["forward of net"]
    assert before[21] == pytest.approx(after[21]) == pytest.approx(sum(widths.values()))
    alone = dict(_phase_widths([curves["before"]]))
    assert alone["backward of net"] == pytest.approx(0.12 * 21)
    draw_timeline(curves, tmp_path / "step.svg")
    assert "forward net backward net ops that compute" in svg_text(tmp_path / "step.svg")


@pytest.mark.parametrize(
    ("text", "width", "most", "lines"),
    [
        ("outputs of thunder_0 of graph 0", 14, 3, ["outputs of", "thunder_0 of", "graph 0"]),
        ("outputs of thunder_0 of graph 0", 14, 2, ["outputs of", "thunder_0 of…"]),
        ("t1", 5, 2, ["t1"]),
        ("l_logits_weight", 5, 2, ["l_log", "its_…"]),
    ],
)
def test_labels_are_wrapped_before_they_are_cut(text, width, most, lines) -> None:
    """What does not fit into a bar goes into more lines, and only then loses its end."""
    assert _wrapped(text, width, most) == lines


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("module", ["alias", "liveness", "segments", "simulate", "store", "report"])
def test_module_of_the_pure_layers_imports_neither_torch_nor_thunder_nor_matplotlib(module) -> None:
    """It loads in milliseconds anywhere."""
    heavy = "{'torch', 'thunder', 'matplotlib', 'numpy'}"
    code = f"import sys, thunder_fusionfix.{module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

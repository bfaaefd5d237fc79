"""A program as a whole: its step as one timeline, and the traces that make up a program."""

from __future__ import annotations

import re

import pytest

from thunder_fusionfix.document import megabytes
from thunder_fusionfix.model import Timeline
from thunder_fusionfix.overview import Overview, comparison_blocks, comparison_of, overview_of_graphs
from thunder_fusionfix.parse import parse_document
from thunder_fusionfix.simulate import simulate

PROGRAM = """\
def computation(x, w):
  # x: "cuda:0 f32[1024, 1024]"
  # w: "cuda:0 f32[1024, 1024]"
  t0 = torch.nn.functional.linear(x, w, None)  # t0: "cuda:0 f32[1024, 1024]"
  t1 = torch.exp(t0)  # t1: "cuda:0 f32[1024, 1024]"
  del t0
  return {'output': (t1,), 'flat_args': [x, w], 'flat_output': (t1,)}, ((t1, x), ())

def backward_fn(saved_for_backward, cotangents):
  # saved_for_backward: "Collection"
  # cotangents: "Collection"
  C0, C1, = saved_for_backward
  # C0: "Collection"
  # C1: "Collection"
  clear_mutable_collection(saved_for_backward)
  del C1, saved_for_backward
  t9, = cotangents
  # t9: "cuda:0 f32[1024, 1024]"
  clear_mutable_collection(cotangents)
  del cotangents
  t1, x, = C0
  # t1: "cuda:0 f32[1024, 1024]"
  # x: "cuda:0 f32[1024, 1024]"
  clear_mutable_collection(C0)
  del C0
  t10 = torch.mul(t9, t1)  # t10: "cuda:0 f32[1024, 1024]"
  del t9, t1
  t11 = torch.matmul(x, t10)  # t11: "cuda:0 f32[1024, 1024]"
  del x, t10
  return (None, t11)
"""


@pytest.fixture(scope="module")
def graphs():
    return [parsed.graph for parsed in parse_document(PROGRAM, name="program")]


@pytest.fixture(scope="module")
def program(graphs):
    found = overview_of_graphs([("net forward", graphs[0]), ("net backward", graphs[1])])
    assert found is not None
    return found


def test_a_backward_joins_the_forward_before_it(program):
    """Labels of a saved program come back as they were."""
    assert [part.name for part in program.parts] == ["net"]
    assert list(program.labelled()) == ["net forward", "net backward"]
    assert [graph.stage for graph in program.graphs] == ["forward", "backward"]


def test_a_backward_without_its_forward_makes_no_program(graphs):
    """Traces that are no pairs are not priced as a step."""
    forward, backward = graphs
    assert overview_of_graphs([("a", backward)]) is None
    assert overview_of_graphs([("a", forward), ("b", backward), ("c", backward)]) is None
    assert overview_of_graphs([]) is None


def test_timeline_of_a_step_keeps_its_peak_and_leaves_out_what_computes_nothing(program):
    """Every phase adds the ops that compute, and the highest point is the step's peak."""
    timeline = program.timeline
    assert isinstance(timeline, Timeline)
    assert timeline.peak_bytes == program.step.peak_bytes == timeline.live_bytes[timeline.peak_pos]
    assert len(timeline.live_bytes) < sum(len(phase.live_bytes) for phase in program.step.phases)
    assert timeline.live_bytes[0] >= timeline.start_bytes


def test_sentence_names_the_phase_of_the_peak(program):
    """The sentence speaks of the step, and says in which trace and at which op its peak is."""
    phase = program.step.peak_phase
    graph = program.labelled()[program.peak_label]
    place = f"the {phase.name}, at {graph.ops[phase.peak_pos].id} (op {phase.peak_pos} of {len(graph.ops)})"
    sentence = program.sentence()
    assert sentence.startswith(f"The peak of a step, {megabytes(program.step.peak_bytes)} MB, is in {place}: ")
    assert "4.2 MB outputs of net" in sentence and "there before the step (w, x)" in sentence


def test_shares_in_the_sentence_add_up_to_the_peak(program):
    """The sentence and the table speak of the same thing: what it lists is the step's peak, within rounding."""
    shares = [float(share) for share in re.findall(r"([\d.]+) MB", program.sentence().partition(": ")[2])]
    assert sum(shares) * 1e6 == pytest.approx(program.step.peak_bytes, abs=1e5)


def test_curve_has_a_point_for_each_op_that_computes_phase_by_phase(program):
    """The points of the phases are those of the timeline, and the peak is called what the sentence calls it."""
    assert [name for name, _ in program.curve.phases] == ["forward of net", "backward of net"]
    assert sum(count for _, count in program.curve.phases) == len(program.timeline.live_bytes)
    assert f", at {program.curve.peak_op}: " in program.sentence()


def test_start_of_the_backward_is_the_same_for_the_step_and_for_its_trace(graphs):
    """Alone in a step with nothing beside it, a backward's first tenth has one peak: ops that compute nothing do not count."""
    (backward,) = [graph for graph in graphs if graph.stage == "backward"]
    program = overview_of_graphs([("net forward", graphs[0]), ("net backward", backward)])
    first = next(pos for pos, op in enumerate(backward.ops) if op.id == "torch.mul")
    assert program.step.backward_start_bytes == program.step.phases[1].live_bytes[first]
    (alone,) = [one.start_of_backward_bytes for one in program.summaries if one.start_of_backward_bytes is not None]
    assert alone == simulate(backward, forward=graphs[0]).live_bytes[first]


def test_comparison_has_the_numbers_of_both_sides(program):
    """The heading gives both peaks, the table a row for each number."""
    heading, before, after, table = comparison_blocks("net", program, Overview(program.parts))
    assert "(+0.0 %)" in heading.text
    assert before.text.removeprefix("before: ") == after.text.removeprefix("after:  ")
    assert len(table.rows) == len(comparison_of(program))
    assert all(row[1] == row[2] for row in table.rows)

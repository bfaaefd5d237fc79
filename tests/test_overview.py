"""A program as a whole: its step as one timeline, and the traces that make up a program."""

from __future__ import annotations

import pytest

from thunder_fusionfix.model import Timeline
from thunder_fusionfix.overview import Overview, comparison_blocks, comparison_of, overview_of_graphs
from thunder_fusionfix.parse import parse_document

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
    """The sentence speaks of the trace that runs at the step's peak."""
    assert program.sentence().startswith(
        f"The step needs most in the {program.step.peak_phase.name}. Of that trace: the peak"
    )


def test_comparison_has_the_numbers_of_both_sides(program):
    """The heading gives both peaks, the table a row for each number."""
    heading, before, after, table = comparison_blocks("net", program, Overview(program.parts))
    assert "(+0.0 %)" in heading.text
    assert before.text.removeprefix("before: ") == after.text.removeprefix("after:  ")
    assert [row[0] for row in table.rows] == list(comparison_of(program))
    assert all(row[1] == row[2] for row in table.rows)

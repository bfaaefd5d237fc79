"""What `explain` says of a trace: the peak, its holders and why each lives, regions of layouts, the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from strategies import graphs

from thunder_fusionfix.document import markdown, plain
from thunder_fusionfix.explain import Explanation, explain_trace, live_storages
from thunder_fusionfix.model import Graph
from thunder_fusionfix.simulate import Prices, simulate
from thunder_fusionfix.views import explanation_blocks

# A cut backward: its first region holds layouts only, of saved tensors that the text does not type.
EXCERPT = """\
[... cut ...]
v5, v7, = C0
clear_mutable_collection(C0)
del C0
[t48, t86, t90] = nvFusion0(h4, p1, v5)
  # t48 = prims.reshape(h4, (4096, 2048))  # t48: "cuda:0 bf16[4096, 2048]"
  # t86 = prims.transpose(p1, (0, 2, 1))  # t86: "cuda:0 bf16[28, 4096, 64]"
  # t90 = prims.transpose(v5, (1, 0))  # t90: "cuda:0 bf16[700, 900]"
del h4, v5
t29 = torch_nll_loss_backward_impl(t65, t44, None)  # t29: "cuda:0 f32[4095, 4096]"
[t43, t47] = nvFusion1(t44, t29, t66)
[... cut ...]
"""

# A loss whose slice and reshape stand between a cast and compute: nvFuser writes two wide tensors for them.
LOSS = """\
def computation(logits, labels):
  # logits: "cuda:0 bf16[1, 64, 4096]"
  # labels: "cuda:0 i64[63]"
  [t5] = nvFusion0(logits, labels)
    # t1 = prims.convert_element_type(logits, dtypes.float32)  # t1: "cuda:0 f32[1, 64, 4096]"
    # t2 = prims.slice_prim(t1, [0, 0, 0], [1, 63, 4096], [1, 1, 1])  # t2: "cuda:0 f32[1, 63, 4096]"
    # t3 = prims.stride_order(t2, (2, 1, 0))  # t3: "cuda:0 f32[1, 63, 4096]"
    # t4 = prims.reshape(t3, (63, 4096))  # t4: "cuda:0 f32[63, 4096]"
    # (t5, t6, t7, t8) = thunder.executors.nvfuserex_impl.nv_cross_entropy_fwd(t4, labels, None, None, -100, None, 'mean', 0.0)
  return t5
"""


def only(text: str) -> Explanation:
    (found,) = explain_trace(text)
    return found


def test_explain_region_of_layouts_only_names_what_it_takes_and_what_dissolving_changes() -> None:
    """The saved tensors that it takes with their bytes, from the number of elements where no more is known, and the views."""
    (region,) = only(EXCERPT).layout_regions
    assert (region.name, region.num_ops) == ("nvFusion0", 3)
    assert [(one.name, one.nbytes, one.known_by, one.origin) for one in region.takes] == [
        ("h4", 16_777_216, "number of elements", "saved tensor"),
        ("p1", 14_680_064, "shape", "saved tensor"),
        ("v5", 1_260_000, "shape", "saved tensor"),
    ]
    assert (region.num_views, region.view_bytes) == (2, 14_680_064 + 1_260_000)
    assert (region.num_maybe, region.maybe_bytes, region.num_copies) == (1, 16_777_216, 0)
    text = plain(explanation_blocks(only(EXCERPT)))
    assert "nvFusion0 holds layout ops only (line 5)" in text
    assert "it takes 3 saved tensors: 32.7 MB" in text
    assert "2 outputs, 15.9 MB: views for certain" in text
    assert "no sub-ops are shown for nvFusion1" in text


def test_explain_region_that_computes_is_no_region_of_layouts() -> None:
    """One sub-op that computes is enough to be none."""
    computing = EXCERPT.replace("prims.transpose(v5, (1, 0))", "prims.exp(v5)")
    assert only(computing).layout_regions == ()


def test_explain_peak_names_op_line_and_why_each_holder_lives() -> None:
    """The peak is at an op of the text; each holder says what made it and what needs it next."""
    found = only(EXCERPT)
    assert (found.peak_op, found.source.op_lines[found.peak_pos][0]) == ("torch_nll_loss_backward_impl", 10)
    reasons = {holder.name: (holder.made_by, holder.needed_by) for holder in found.holders}
    assert reasons["t29"] == ("torch_nll_loss_backward_impl", "nvFusion1")
    assert reasons["t44"] == ("before the text", "used or made right here")
    assert reasons["p1"] == ("before the text", "unknown: nothing in the text takes or deletes it")


def test_explain_plan_of_a_loss_takes_the_layouts_out_and_lowers_the_estimate() -> None:
    """What the passes would do to a pasted trace, with the peak before and after by estimate."""
    found = only(LOSS)
    assert any("slice_prim" in decision.what for decision in found.applied)
    wide = 63 * 4096 * 4
    assert found.peak_bytes - found.planned_peak_bytes >= wide
    assert found.to_diff().left and simulate(found.planned).peak_bytes == found.planned_peak_bytes


@given(graphs(max_ops=15))
@settings(max_examples=60, deadline=None)
def test_explain_of_any_trace_speaks_in_every_form(graph: Graph) -> None:
    """Text, Markdown and JSON of any trace; the peak is the simulator's, and the plan never raises it."""
    (found,) = explain_trace(graph)
    timeline = simulate(graph)
    assert (found.peak_bytes, found.peak_pos) == (timeline.peak_bytes, timeline.peak_pos)
    assert found.planned_peak_bytes <= found.peak_bytes
    blocks = explanation_blocks(found)
    assert found.source.title in plain(blocks) and markdown(blocks).startswith("## ")
    assert json.loads(json.dumps(found.to_dict()))["peak_bytes"] == found.peak_bytes


@given(graphs(max_ops=15))
@settings(max_examples=60, deadline=None)
def test_live_storages_add_up_to_the_timeline(graph: Graph) -> None:
    """What lives at an op, with what its region needs inside, is what the timeline says there."""
    prices = Prices(graph)
    found = live_storages(prices)
    for pos, nbytes in enumerate(prices.timeline().live_bytes):
        alive = sum(one.nbytes for one in found if one.start <= pos < one.end)
        assert alive + prices.temporary_bytes[pos] == nbytes


def test_explain_forward_and_backward_of_one_file_belong_together() -> None:
    """A backward is priced with the forward beside it, whose saved views share storage."""
    forward = """\
def computation(x):
  # x: "cuda:0 f32[32, 32]"
  t1 = prims.exp(x)  # t1: "cuda:0 f32[32, 32]"
  t2 = prims.transpose(t1, (1, 0))  # t2: "cuda:0 f32[32, 32]"
  return {'output': (t2,), 'flat_args': [x]}, ((t1, t2), ())
"""
    backward = """\
def backward_fn(saved_for_backward, cotangents):
  # saved_for_backward: "Collection"
  # cotangents: "Collection"
  C0, C1, = saved_for_backward
  t1, t2, = C0
  # t1: "cuda:0 f32[32, 32]"
  # t2: "cuda:0 f32[32, 32]"
  t9, = cotangents
  # t9: "cuda:0 f32[32, 32]"
  t10 = prims.mul(t9, t2)  # t10: "cuda:0 f32[32, 32]"
  return (t10,)
"""
    alone = only(backward)
    _, together = explain_trace(forward + "\n" + backward)
    assert alone.start_bytes - together.start_bytes == 4096


@pytest.mark.parametrize("trace", [LOSS, EXCERPT])
def test_explain_without_a_plan_or_peak_of_unknown_sizes_says_so(trace: str) -> None:
    """With every type taken out of the text, nothing is invented: sizes count as 0 and the notes say which are not known."""
    bare = "\n".join(
        line.split("  # t")[0] for line in trace.splitlines() if '# labels: "' not in line and '# logits: "' not in line
    )
    assert "size not known" in plain(explanation_blocks(only(bare + "\n")))


@pytest.mark.parametrize("case", ["causal-lm-loss", "qwen2.5-7b-2-layers", "qwen2.5-7b-2-layers-consecutive"])
def test_every_pass_has_a_plan_for_the_golden_traces_as_text(case):
    """Passes follow one another on data as they do on traces: no plan trips over the names that an earlier one made."""
    path = Path(__file__).parents[1] / "traces" / case / "before.txt"
    for explanation in explain_trace(path):
        assert explanation.undone == ()

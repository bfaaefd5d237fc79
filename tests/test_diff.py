"""Two traces compared by structure: what the lists of a diff say, and the laws that every diff keeps."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import graphs, random_graph, renamed

from thunder_fusionfix.diff import Partition, TraceDiff, canonical, diff, side_of
from thunder_fusionfix.model import DEL, RETURN, Graph, Op, Ref
from thunder_fusionfix.parse import parse
from thunder_fusionfix.simulate import simulate

HEAD = """\
def computation(a, b):
  # a: "cuda:0 f32[1024]"
  # b: "cuda:0 f32[1024]"
"""


def trace(*lines: str) -> Graph:
    """A trace of two arguments, with every output typed as they are."""
    typed = (f'{line}  # {line.split(" = ")[0]}: "cuda:0 f32[1024]"' if " = prims" in line else line for line in lines)
    return parse(HEAD + "".join(f"  {line}\n" for line in typed))


def lists_that_speak(found: TraceDiff) -> set[str]:
    return {name for name in found.lists() if getattr(found, name)}


CHAIN = ("t1 = prims.exp(a)", "t2 = prims.neg(b)", "t3 = prims.add(t1, t2)", "return t3")


# ---------------------------------------------------------------- lists


def test_diff_of_reordered_ops_names_the_move_and_both_distances() -> None:
    """An op that stands elsewhere is moved: from, to, and steps to its consumer before and after."""
    found = diff(trace(*CHAIN), trace(CHAIN[1], CHAIN[0], *CHAIN[2:]))
    (move,) = found.moved
    assert {move.id_before, move.id_after} <= {"prims.exp", "prims.neg"}
    assert {(move.from_pos, move.distance_before), (move.to_pos, move.distance_after)} == {(0, 2), (1, 1)}
    assert lists_that_speak(found) == {"moved", "lifetimes"}


REGION = (
    "[t3] = nvFusion4(a, b)",
    '  # t1 = prims.exp(a)  # t1: "cuda:0 f32[1024]"',
    '  # t2 = prims.reshape(b, (32, 32))  # t2: "cuda:0 f32[32, 32]"',
    '  # t4 = prims.reshape(t2, (1024,))  # t4: "cuda:0 f32[1024]"',
    '  # t3 = prims.add(t1, t4)  # t3: "cuda:0 f32[1024]"',
    "return t3",
)
OUTSIDE = (
    't9 = torch_prims_reshape_impl(b, (32, 32))  # t9: "cuda:0 f32[32, 32]"',
    "[t3] = nvFusion7(a, t9)",
    '  # t1 = prims.exp(a)  # t1: "cuda:0 f32[1024]"',
    '  # t8 = prims.reshape(t9, (1024,))  # t8: "cuda:0 f32[1024]"',
    '  # t3 = prims.add(t1, t8)  # t3: "cuda:0 f32[1024]"',
    "return t3",
)


def test_diff_of_an_op_out_of_its_region_says_that_it_left() -> None:
    """The op is told by structure although its name, its spelling and the region's number changed; the mirror says entered."""
    found = diff(trace(*REGION), trace(*OUTSIDE))
    (crossing,) = found.left
    assert (crossing.what, crossing.name_before, crossing.name_after) == ("reshape", "t2", "t9")
    assert (crossing.region_before, crossing.region_after, crossing.nbytes) == ("nvFusion4", None, 4096)
    (region,) = found.regions
    assert region.before is not None and region.after is not None
    assert (region.before.num_ops, region.after.num_ops, region.before.name, region.after.name) == (
        4,
        3,
        "nvFusion4",
        "nvFusion7",
    )
    assert lists_that_speak(found) == {"left", "regions", "lifetimes"}  # b is needed by the reshape only
    assert lists_that_speak(diff(trace(*OUTSIDE), trace(*REGION))) == {"entered", "regions", "lifetimes"}


WHOLE = (
    "[t3, t4] = nvFusion0(a, b)",
    '  # t1 = prims.exp(a)  # t1: "cuda:0 f32[1024]"',
    '  # t2 = prims.neg(b)  # t2: "cuda:0 f32[1024]"',
    '  # t3 = prims.sin(t1)  # t3: "cuda:0 f32[1024]"',
    '  # t4 = prims.cos(t2)  # t4: "cuda:0 f32[1024]"',
    "return (t3, t4)",
)
HALVES = (
    "[t3] = nvFusion0(a)",
    '  # t1 = prims.exp(a)  # t1: "cuda:0 f32[1024]"',
    '  # t3 = prims.sin(t1)  # t3: "cuda:0 f32[1024]"',
    "[t4] = nvFusion1(b)",
    '  # t2 = prims.neg(b)  # t2: "cuda:0 f32[1024]"',
    '  # t4 = prims.cos(t2)  # t4: "cuda:0 f32[1024]"',
    "return (t3, t4)",
)


def test_diff_of_a_split_region_names_its_parts_and_the_mirror_a_merge() -> None:
    """A region whose ops stand in two regions was split; seen from the other side, two were merged."""
    found = diff(trace(*WHOLE), trace(*HALVES))
    assert found.split == (Partition("nvFusion0", ("nvFusion0", "nvFusion1")),) and found.merged == ()
    assert [(c.what, c.region_before, c.region_after) for c in found.regrouped] == [
        ("neg", "nvFusion0", "nvFusion1"),
        ("cos", "nvFusion0", "nvFusion1"),
    ]
    mirror = diff(trace(*HALVES), trace(*WHOLE))
    assert mirror.merged == found.split and mirror.split == ()


def test_diff_of_a_cloned_op_says_duplicated_and_of_a_new_one_added() -> None:
    """A second instance of what both have is a duplicate; what only one has is added, and gone in the mirror."""
    clone = trace(
        "t1 = prims.exp(a)", "t2 = prims.neg(b)", "t3 = prims.add(t1, t2)", "t5 = prims.exp(a)", "return (t3, t5)"
    )
    plain = trace("t1 = prims.exp(a)", "t2 = prims.neg(b)", "t3 = prims.add(t1, t2)", "return (t3, t1)")
    (copy,) = diff(plain, clone).duplicated
    assert (copy.what, copy.copy_of) == ("prims.exp", "t1" if copy.name == "t5" else "t5")
    assert diff(clone, plain).deduplicated == (copy,)
    more = trace(*CHAIN[:3], "t7 = prims.tanh(t3)", "return t7")
    (added,) = diff(trace(*CHAIN), more).added
    assert (added.what, added.name, added.nbytes) == ("prims.tanh", "t7", 4096)
    assert diff(more, trace(*CHAIN)).gone == (added,)


@pytest.mark.parametrize(
    ("line", "aspect"),
    [
        ("t3 = prims.sub(t2, t1)", "operands"),
        ("t3 = ltorch.sub(t1, t2)", "callee"),
        ("t3 = prims.sub(t1, t2, alpha=2)", "arguments"),
    ],
)
def test_diff_of_an_op_that_changed_says_in_what(line: str, aspect: str) -> None:
    """Swapped operands, another constant, another executor: the op is matched, and what changed is named."""
    first = trace("t1 = prims.exp(a)", "t2 = prims.neg(b)", "t3 = prims.sub(t1, t2)", "return t3")
    typed = line + '  # t3: "cuda:0 f32[1024]"' if line.startswith("t3 = ltorch") else line
    found = diff(first, trace("t1 = prims.exp(a)", "t2 = prims.neg(b)", typed, "return t3"))
    assert [(one.what, one.aspect) for one in found.changed] == [("sub", aspect)]


def test_diff_of_a_slice_off_by_one_is_a_changed_argument() -> None:
    """The same op at the same place with another start is no other op."""
    lines = 't1 = prims.slice_prim(a, ({},), (9,))  # t1: "cuda:0 f32[8]"'
    found = diff(trace(lines.format(1), "return t1"), trace(lines.format(2), "return t1"))
    (change,) = found.changed
    assert {change.before, change.after} == {"a, (1,), (9,)", "a, (2,), (9,)"}


def test_diff_of_a_later_delete_says_which_value_lives_longer() -> None:
    """A ``del`` further down is a longer lifetime, in steps that both traces have."""
    early = trace("t1 = prims.exp(a)", "t2 = prims.neg(t1)", "del t1", "t3 = prims.sin(t2)", "return t3")
    late = trace("t1 = prims.exp(a)", "t2 = prims.neg(t1)", "t3 = prims.sin(t2)", "del t1", "return t3")
    found = diff(early, late)
    (life,) = found.lifetimes
    assert (life.name_before, life.nbytes, life.steps_before, life.steps_after) == ("t1", 4096, 2, 3)
    assert lists_that_speak(found) == {"lifetimes"}
    assert found.after.peak_bytes - found.before.peak_bytes == 4096


def test_diff_of_forward_traces_lists_what_is_saved_more() -> None:
    """A forward that saves another tensor says so in bytes; results themselves are the same."""
    body = ("t1 = prims.exp(a)", "t2 = prims.sin(t1)")
    less = trace(*body, "return {'output': t2, 'flat_args': [a, b]}, ((a,), ())")
    more = trace(*body, "return {'output': t2, 'flat_args': [a, b]}, ((t1, a), ())")
    found = diff(less, more)
    assert [(one.name, one.nbytes) for one in found.saved_more] == [("t1", 4096)] and found.saved_less == ()
    assert found.after.saved_bytes - found.before.saved_bytes == 4096
    assert "other" not in lists_that_speak(found)


def test_diff_sides_have_the_simulated_peak_and_its_holders() -> None:
    """Peak, its op and at most ten holders are those of the simulator."""
    rng = random.Random(3)
    one, other = random_graph(rng, 30), random_graph(rng, 30)
    found = diff(one, other)
    for side, graph in ((found.before, one), (found.after, other)):
        timeline = simulate(graph)
        assert (side.peak_bytes, side.peak_pos) == (timeline.peak_bytes, timeline.peak_pos)
        assert side.peak_op == graph.ops[timeline.peak_pos].id and side.holders == timeline.holders[:10]


# ---------------------------------------------------------------- laws


@given(graphs(max_ops=20), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_diff_of_a_trace_and_its_renamed_copy_is_empty(graph: Graph, rng: random.Random) -> None:
    """Names of values and numbers of regions are no differences."""
    assert diff(graph, graph).is_empty
    assert diff(graph, renamed(graph, rng)).is_empty


def mutated(graph: Graph, rng: random.Random) -> Graph:
    """The Graph with one change somewhere; it need not be well-formed, as pasted text need not be."""
    ops = list(graph.ops)
    if not ops:
        return graph
    at = rng.randrange(len(ops))
    op = ops[at]
    kind = rng.randrange(7)
    if kind == 0:
        ops.insert(rng.randrange(len(ops)), ops.pop(at))
    elif kind == 1:
        ops.pop(at)
    elif kind == 2 and op.id != RETURN:
        ops.insert(at, op)
    elif kind == 3:
        ops[at] = replace(op, args=(*op.args, 7))
    elif kind == 4 and op.inputs:
        ops[at] = replace(op, args=(Ref(rng.choice(list(graph.values))), *op.args[1:]))
    elif kind == 5 and op.subops:
        ops[at : at + 1] = op.subops
    elif kind == 6 and len(op.subops) > 1:
        halves = op.subops[: len(op.subops) // 2], op.subops[len(op.subops) // 2 :]
        ops[at : at + 1] = [
            Op(f"{op.id}{number}", op.args, tuple(Ref(n) for s in half for n in s.outputs), (), half, is_fusion=True)
            for number, half in enumerate(halves)
        ]
    return replace(graph, ops=tuple(ops))


@given(graphs(max_ops=16), st.randoms(use_true_random=False), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_diff_is_empty_only_for_equal_canonical_forms(graph: Graph, rng: random.Random, times: int) -> None:
    """Whatever changes the statements of a trace shows in some list, and nothing else does."""
    changed = graph
    for _ in range(times):
        changed = mutated(changed, rng)
    assert diff(graph, changed).is_empty == (canonical(graph) == canonical(changed))


@given(graphs(max_ops=12), graphs(max_ops=12), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_diff_mirrors(one: Graph, other: Graph, rng: random.Random) -> None:
    """The diff in the other direction is the mirror, for related and for unrelated traces; mirroring twice changes nothing."""
    for pair in ((one, other), (one, mutated(one, rng))):
        found = diff(*pair)
        assert diff(*reversed(pair)) == found.mirrored()
        assert found.mirrored().mirrored() == found


@given(graphs(max_ops=16), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_diff_does_not_depend_on_names(graph: Graph, rng: random.Random) -> None:
    """Renaming both traces, each in its own way, leaves the shape of the diff."""
    changed = mutated(graph, rng)
    plain, other = diff(graph, changed), diff(renamed(graph, rng), renamed(changed, rng))
    assert [len(getattr(plain, name)) for name in plain.lists()] == [
        len(getattr(other, name)) for name in other.lists()
    ]


def test_diff_of_10000_ops_takes_seconds() -> None:
    """Ten thousand ops, some hundreds of them moved or changed, are compared in five seconds."""
    rng = random.Random(4)
    graph = random_graph(rng, 10_000)
    ops = list(graph.ops)
    for _ in range(300):
        at = rng.randrange(len(ops) - 9)
        ops.insert(at + rng.randrange(8), ops.pop(at))
    changed = replace(graph, ops=tuple(ops))
    start = time.process_time()
    found = diff(graph, changed)
    assert time.process_time() - start < 5.0
    assert 0 < len(found.moved) <= 300


def test_diff_as_plain_data_is_json_and_names_its_schema() -> None:
    """`to_dict` holds every list and goes through JSON unchanged."""
    data = diff(trace(*REGION), trace(*OUTSIDE)).to_dict()
    assert data["schema"] == "thunder_fusionfix.diff/1" and data["is_empty"] is False
    assert set(TraceDiff.lists()) <= data.keys()
    assert json.loads(json.dumps(data))["left"][0]["region_before"] == "nvFusion4"


def test_canonical_tells_deletes_apart() -> None:
    """What is deleted, and in which order, is part of a trace's form."""
    both = trace("t1 = prims.exp(a)", "t2 = prims.neg(a)", "t3 = prims.add(t1, t2)", "del t1, t2", "return t3")
    swapped = replace(both, ops=tuple(replace(op, args=op.args[::-1]) if op.id == DEL else op for op in both.ops))
    assert canonical(both) != canonical(swapped)
    (difference,) = diff(both, swapped).other
    assert difference.what == "statement"


def test_saved_bytes_count_each_storage_once_and_none_of_the_callers():
    """Two views of one saved tensor take its memory once, and a saved argument takes none that the forward allocates."""
    text = """
def computation(x):
  # x: "cuda:0 f32[2, 64]"
  a = prims.exp(x)  # a: "cuda:0 f32[2, 64]"
  b = prims.transpose(a, (1, 0))  # b: "cuda:0 f32[64, 2]"
  return {'output': (a,), 'flat_args': [x], 'flat_output': (a,)}, ((x, a, b), ())
"""
    graph = replace(parse(text), stage="forward")
    assert side_of(graph).saved_bytes == 2 * 64 * 4

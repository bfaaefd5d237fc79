"""Saved Graphs and Timelines: exact both ways, and one line for every file that is not one."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from helpers import GraphBuilder
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import graphs, random_graph

from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.model import Const, Graph, Op, Ref, Struct, Value
from thunder_fusionfix.simulate import simulate
from thunder_fusionfix.store import VERSION, load, load_graphs, save


def small() -> Graph:
    build = GraphBuilder("forward")
    x = build.arg("x", (2, 3), "bf16", strides=(3, 1))
    y = build.op("torch.exp", x, out="y", shape=(2, 3))
    return build.returns((y,), ((x,), ()))


def test_save_then_load_random_graphs_gives_them_back(tmp_path) -> None:
    """Values, ops, sub-ops, tags and all survive unchanged."""
    rng = random.Random(0)
    for stage in ("inference", "forward", "backward"):
        saved = {f"{stage} {number}": random_graph(rng, 20, stage=stage) for number in range(10)}
        save(saved, tmp_path / "graphs.json")
        assert load(tmp_path / "graphs.json") == saved


@settings(max_examples=25, deadline=None)
@given(graph=graphs())
def test_save_then_load_any_graph_gives_it_back(graph, tmp_path_factory) -> None:
    """As hypothesis makes them."""
    path = tmp_path_factory.mktemp("any") / "graph.json"
    save([graph], path)
    assert load_graphs(path) == {graph.stage: graph}


ARGS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.builds(Const, st.text())
    | st.just(Ref("x")),
    lambda inner: (
        st.lists(inner).map(tuple) | st.lists(st.tuples(st.text(), inner)).map(lambda items: Struct(tuple(items)))
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(arg=ARGS)
def test_save_then_load_any_argument_keeps_value_and_type(arg, tmp_path_factory) -> None:
    """2 stays an int, 2.0 a float, infinity and complex numbers survive, text is not taken for anything else."""
    path = tmp_path_factory.mktemp("args") / "graph.json"
    op = Op("torch.f", (arg,), None, (("kw", arg),), tags=frozenset({"A", "B"}))
    save([Graph("f", "joint", ("x",), (op,), {"x": Value("x", (), "f32")}, notes=("ü",))], path)
    (found,) = load_graphs(path)["joint"].ops
    assert repr(found.args) == repr(op.args)
    assert repr(found.kwargs) == repr(op.kwargs)
    assert found.tags == op.tags


def test_save_then_load_nan_is_still_one(tmp_path) -> None:
    """NaN equals nothing, so it is looked at by itself."""
    graph = replace(small(), ops=(Op("torch.full", (float("nan"),), None),))
    save([graph], tmp_path / "g.json")
    assert math.isnan(load_graphs(tmp_path / "g.json")["forward"].ops[0].args[0])


def test_save_then_load_timelines_beside_graphs(tmp_path) -> None:
    """A file may hold both; `load_graphs` gives the Graphs."""
    graph = small()
    items = {"before": graph, "timeline": simulate(graph)}
    save(items, tmp_path / "both.json")
    assert load(tmp_path / "both.json") == items
    assert load_graphs(tmp_path / "both.json") == {"before": graph}


def test_save_without_labels_takes_stages_numbered_from_the_second_on(tmp_path) -> None:
    """Two forwards and a backward: forward, forward2, backward."""
    graph = small()
    save([graph, replace(graph, name="other"), replace(graph, stage="backward")], tmp_path / "g.json")
    assert list(load(tmp_path / "g.json")) == ["forward", "forward2", "backward"]


def test_save_twice_gives_the_same_bytes(tmp_path) -> None:
    """What was loaded is saved as it was."""
    save([small()], tmp_path / "one.json")
    save(load(tmp_path / "one.json"), tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_save_to_a_place_that_cannot_be_written_names_it(tmp_path) -> None:
    """A missing folder is the user's to make."""
    with pytest.raises(UsageError, match="nowhere.*cannot be written"):
        save([small()], tmp_path / "nowhere" / "g.json")


# ---------------------------------------------------------------- files that are not ours


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe\x00nonsense", "it is not text"),
        (b"", "it is not JSON"),
        (b'{"format": "thunder_fus', "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[1, 2]", "JSON of another program"),
        (b'{"format": "something else", "version": 1}', "JSON of another program"),
        (b'{"format": "thunder_fusionfix", "version": 99, "items": {}}', "version 99 .* reads version 1"),
        (b'{"format": "thunder_fusionfix", "version": 1}', "damaged"),
        (b'{"format": "thunder_fusionfix", "version": 1, "items": {"a": {"type": "song"}}}', "damaged .a: neither"),
        (b'{"format": "thunder_fusionfix", "version": 1, "items": {}}', "holds no trace"),
    ],
    ids=["binary", "empty", "cut", "deep", "list", "foreign", "newer", "no items", "odd item", "nothing"],
)
def test_load_foreign_or_broken_file_is_one_line_that_names_it(content, words, tmp_path) -> None:
    """Whatever the file holds, the message starts with its path, says what is wrong and what to do."""
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words) as caught:
        load_graphs(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "capture" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_load_missing_file_and_folder_are_named(tmp_path) -> None:
    """There is no such file; a folder is none."""
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            load(path)


def test_load_any_damage_to_a_saved_graph_is_a_usage_error_or_a_graph(tmp_path) -> None:
    """Each part of the JSON replaced by each wrong thing: never another exception, never a name without a value."""
    path = tmp_path / "g.json"
    save({"g": small(), "t": simulate(small())}, path)
    content = json.loads(path.read_text())
    assert content["version"] == VERSION
    refused = 0
    for where in paths(content["items"]):
        for wrong in (None, -1, "text", [], {}, [[]], {"ref": "nobody"}, True, 1.5):
            damaged = json.loads(path.read_text())
            set_at(damaged["items"], where, wrong)
            broken = tmp_path / "broken.json"
            broken.write_text(json.dumps(damaged))
            try:
                found = load(broken)
            except UsageError as error:
                assert str(error).startswith(f"{broken}: ")
                refused += 1
                continue
            graph = found["g"]
            assert all(name in graph.values for op in graph.ops for name in (*op.inputs, *op.outputs))
    assert refused > 300


def paths(item, at: tuple = ()):
    """Every place in nested JSON."""
    for key, inner in item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ():
        yield (*at, key)
        yield from paths(inner, (*at, key))


def set_at(item, where: tuple, wrong) -> None:
    for key in where[:-1]:
        item = item[key]
    item[where[-1]] = wrong

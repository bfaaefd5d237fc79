"""read: what a Graph tells of a trace beyond its print, and that reading leaves the trace as it was."""

from __future__ import annotations

import warnings

import pytest
import thunder
import torch
from cpu_nvfuser import nvfuser_on_cpu
from thunder.core.transform_common import Transform
from thunder.dynamo import ThunderCompiler

from thunder_fusionfix.capture import capture
from thunder_fusionfix.errors import UnsupportedTraceError
from thunder_fusionfix.model import CLEAR, DEL, RETURN, UNPACK, Const, Ref, Struct
from thunder_fusionfix.read import example_strides, forward_trace, read


class During(Transform):
    """Calls ``look`` with each final trace, while its compile runs, and keeps the answers."""

    def __init__(self, look):
        self.look, self.found = look, []

    def transform_trace_post_optimization(self, computation_trace, **kwargs):
        self.found.append(self.look(computation_trace))
        return computation_trace


def trained(fn, *args, **options):
    """The last forward and backward traces of ``fn``, after a step."""
    jitted = thunder.jit(fn, **options)
    jitted(*args).sum().backward()
    return thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]


def norm(x, w):
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
    return y @ w


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


# ---------------------------------------------------------------- the whole


def test_stage_is_told_by_what_the_trace_is():
    """Joint, forward and backward traces of a program that trains; "inference" where nothing requires a gradient."""
    part = capture(norm, [torch.empty(2, 3, requires_grad=True), torch.empty(3, 2, requires_grad=True)]).parts[0]
    stages = [read(trace).stage for trace in (part.joint, part.forward, part.backward)]
    assert stages == ["joint", "forward", "backward"]
    plain = thunder.jit(norm)
    plain(torch.randn(2, 3), torch.randn(3, 2))
    assert read(thunder.last_traces(plain)[-1]).stage == "inference"


def test_reading_leaves_the_trace_as_it_was():
    """Text, names, scopes and bound symbols are what they were, and reading again gives an equal Graph."""
    for trace in trained(norm, leaf(2, 3), leaf(3, 2)):
        text, names, scopes, bsyms = str(trace), set(trace.names), len(trace.scopes), list(trace.bound_symbols)
        assert read(trace) == read(trace)
        assert (str(trace), trace.names, len(trace.scopes)) == (text, names, scopes)
        assert all(one is other for one, other in zip(trace.bound_symbols, bsyms, strict=True))


def test_caller_holds_arguments_of_a_forward_and_of_inference_but_not_saved_tensors():
    """A `del` of an argument frees nothing in a forward; in a backward only what the reader is told is held."""
    forward, backward = trained(norm, leaf(2, 3), leaf(3, 2))
    assert read(forward).held == {"x", "w"}
    assert read(backward).held == frozenset()
    assert read(backward, held=("w",)).held == {"w"}


def test_cotangents_are_held_where_autograd_is_not_split():
    """ThunderFX's option: the engine holds what it hands over until the backward returns; else a ``del`` frees it."""

    def held(**options):
        look = During(lambda trace: read(trace))
        trained(norm, leaf(2, 3), leaf(3, 2), transforms=[look], **options)
        forward, backward = look.found
        cotangents = {op.inputs[0]: op.outputs for op in backward.ops if op.id == UNPACK}[backward.args[1]]
        assert forward.held == set(forward.args) and cotangents
        return backward.held, cotangents

    free, _ = held()
    kept, cotangents = held(thunderfx_disable_split_autograd=True)
    assert (free, kept) == (frozenset(), frozenset(cotangents))


def test_cotangents_are_held_under_thunderfx():
    """Its backend sets the option itself."""
    look = During(lambda trace: read(trace))
    x = leaf(4, 4)
    torch.compile(lambda x: torch.sin(x).sum(), backend=ThunderCompiler(transforms=[look]))(x).backward()
    assert [bool(graph.held) for graph in look.found if graph.stage == "backward"] == [True]


def test_saved_tensors_of_forward_and_backward_are_the_same():
    """What the forward returns second is what the backward unpacks first."""
    forward, backward = trained(norm, leaf(2, 3), leaf(3, 2))
    assert set(read(forward).saved) == set(read(backward).saved) != set()


# ---------------------------------------------------------------- ops and arguments


def test_statements_have_names_of_their_own():
    """Returns, deletes, unpacking and clears are ops with the model's names; comments and trivial unpacking are none."""
    _, backward = trained(norm, leaf(2, 3), leaf(3, 2))
    graph = read(backward)
    ids = [op.id for op in graph.ops]
    assert ids[0] == UNPACK and ids[-1] == RETURN and DEL in ids and CLEAR in ids
    assert not any("unpack_trivial" in op_id or "comment" in op_id for op_id in ids)
    assert graph.args == ("saved_for_backward", "cotangents")
    assert all(graph.values[name].kind == "collection" for name in graph.args)


def test_arguments_become_plain_data():
    """Numbers, strings and None stay; lists are tuples, dicts are Structs, dtypes and devices are their printed text."""

    def fn(x):
        y = torch.full((2, 3), 1.5, dtype=torch.bfloat16).to(torch.float32)
        return {"sum": (x + y).sum((0, 1)), "shape": [x.reshape(3, 2)]}

    jitted = thunder.jit(fn)
    jitted(torch.randn(2, 3))
    prims = [sub for op in read(thunder.last_traces(jitted)[0]).ops for sub in op.leaves]
    cast = next(op for op in prims if op.id == "prims.convert_element_type")
    assert isinstance(cast.args[0], Ref) and cast.args[1] == Const("dtypes.float32")
    reshape = next(op for op in prims if op.id == "prims.reshape")
    assert reshape.args[1] == (3, 2)
    forward, _ = trained(norm, leaf(2, 3), leaf(3, 2))
    returned, _saved = read(forward).result
    assert isinstance(returned, Struct) and dict(returned.items)["flat_args"] == (Ref("x"), Ref("w"))


def test_values_have_shape_dtype_and_device_of_their_proxies():
    """Every name of the trace, those inside regions included, has a Value; numbers have no shape."""

    def fn(x, n):
        return x.to(torch.float64) * n

    jitted = thunder.jit(fn)
    jitted(torch.ones(2, 3, dtype=torch.int32), 2.5)
    trace = thunder.last_traces(jitted)[0]
    values = read(trace).values
    assert (values["x"].shape, values["x"].dtype, values["x"].device) == ((2, 3), "i32", "cpu")
    assert {name for bsym in trace.bound_symbols for name in (p.name for p in bsym.flat_proxy_outs)} <= set(values)


def test_tags_of_thunder_are_kept():
    """Random ops carry Thunder's own tag, so that whoever reorders can ask."""
    jitted = thunder.jit(lambda x: torch.nn.functional.dropout(x, 0.5))
    jitted(torch.ones(3))
    graph = read(thunder.last_traces(jitted)[0])
    assert any("RANDOM_OP" in sub.tags for op in graph.ops for sub in op.leaves)


@pytest.mark.nvfuser
def test_regions_are_fusions_with_their_ops():
    """A fusion says so and holds what it computes, in order."""

    during = During(read)
    with nvfuser_on_cpu():
        thunder.jit(lambda x: torch.tanh(x * 2), executors=("nvfuser",), transforms=[during])(torch.randn(3))
    region = next(op for op in during.found[0].ops if op.is_fusion)
    assert region.id == "nvFusion0" and [sub.id for sub in region.subops] == ["prims.mul", "prims.tanh"]


# ---------------------------------------------------------------- what only a compile knows


def test_strides_of_arguments_are_known_under_thunderfx():
    """torch.compile's graph tells the strides of its inputs, by the names that the trace has for them."""

    def look(trace):
        strides = example_strides()
        return {name: value.strides for name, value in read(trace, strides=strides).values.items()}

    during = During(look)
    backend = ThunderCompiler(executors=(), transforms=[during])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(lambda a, b: a @ b, backend=backend)(torch.randn(3, 2).t(), torch.randn(3, 4))
    known = {strides for strides in during.found[0].values() if strides is not None}
    assert known == {(1, 2), (4, 1)}


def test_strides_are_not_known_for_a_plain_function():
    """A function under ``thunder.jit`` tells nothing, and one cached trace may serve several patterns."""
    during = During(lambda trace: example_strides())
    thunder.jit(lambda a: a * 2, transforms=[during])(torch.randn(3, 2).t())
    assert during.found == [{}] and example_strides() == {}


def test_strides_of_another_rank_are_left_out():
    """A stride pattern that does not fit the shape is no knowledge."""
    jitted = thunder.jit(lambda a: a * 2)
    jitted(torch.randn(3, 2))
    trace = thunder.last_traces(jitted)[-1]
    assert read(trace, strides={"a": (1, 3)}).values["a"].strides == (1, 3)
    assert read(trace, strides={"a": (1,)}).values["a"].strides is None


def test_forward_trace_is_the_one_that_was_handed_over():
    """While the backward is worked on, the forward is Thunder's last forward trace; outside of a compile there is none."""
    during = During(lambda trace: forward_trace())
    jitted = thunder.jit(norm, transforms=[during])
    jitted(leaf(2, 3), leaf(3, 2))
    assert during.found[1] is thunder.last_traces(jitted)[-1]
    assert forward_trace() is None


def test_symbolic_sizes_are_refused_and_the_trace_is_not_written_to():
    """A trace whose sizes only a run can tell is an error, and it has no op more than before."""

    def look(trace):
        before = list(trace.bound_symbols), set(trace.names)
        with pytest.raises(UnsupportedTraceError, match="symbolic values"):
            read(trace)
        return before == (list(trace.bound_symbols), set(trace.names))

    during = During(look)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The 'symbolic values' cache option")
        thunder.jit(lambda a: a * 2 + 1, transforms=[during], cache="symbolic values")(torch.randn(3, 2))
    assert during.found == [True]

"""Printed traces, whole and as people paste them, become Graphs; hostile text becomes one error and nothing else."""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from strategies import graphs, random_graph

from thunder_fusionfix.effects import Kind, effect_of
from thunder_fusionfix.model import CLEAR, DEL, RETURN, UNPACK, Arg, Const, Graph, Op, Ref, Struct, Value
from thunder_fusionfix.parse import ParseError, parse, parse_document, parse_traces
from thunder_fusionfix.syntax import read_statement
from thunder_fusionfix.unparse import graph_text
from thunder_fusionfix.verify import check_graph

FORWARD = """\
# Constructed by Delete Last Used (took 0 milliseconds)
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(x, w):
  # x: "cuda:0 bf16[2, 8]"
  # w: "cuda:0 bf16[4, 8]"

  # <eval_with_key>.1:7: \t    y = torch.nn.functional.linear(x, w);  x = None
  y = torch.nn.functional.linear(x, w, None)  # y: "cuda:0 bf16[2, 4]"
    # y = ltorch.linear(x, w, None)  # y: "cuda:0 bf16[2, 4]"
      # y = prims.linear(x, w, None)  # y: "cuda:0 bf16[2, 4]"
  [z, t5] = nvFusion0(y)
    # t3 = prims.convert_element_type(y, dtypes.float32)  # t3: "cuda:0 f32[2, 4]"
    # t4 = prims.mul(t3, 0.5)  # t4: "cuda:0 f32[2, 4]"
    # z = prims.convert_element_type(t4, dtypes.bfloat16)  # z: "cuda:0 bf16[2, 4]"
    # t5 = prims.transpose(t3, (1, 0))  # t5: "cuda:0 f32[4, 2]"
  del y
  return {'output': (z,), 'flat_args': [x, w], 'flat_output': (z,)}, ((x, w, t5), ())
"""

BACKWARD = """\
@torch.no_grad()
@no_autocast
def backward_fn(saved_for_backward, cotangents):
  # saved_for_backward: "Collection"
  # cotangents: "Collection"
  C0, _, = saved_for_backward
  # C0: "Collection"
  # None
  clear_mutable_collection(saved_for_backward)
  del saved_for_backward
  t6, = cotangents
  # t6: "cuda:0 bf16[2, 4]"
  clear_mutable_collection(cotangents)
  del cotangents
  x, w, \\
  t5, = C0
  # x: "cuda:0 bf16[2, 8]"
  # w: "cuda:0 bf16[4, 8]"
  # t5: "cuda:0 f32[4, 2]"
  clear_mutable_collection(C0)
  del C0
  t7 = torch.matmul(t6, w)  # t7: "cuda:0 bf16[2, 8]"
  del w, t6
  return (t7, None)
"""


def is_known_part(parsed: Value, read: Value) -> bool:
    """True where the parsed value says nothing that the trace itself does not say."""
    pairs = ((parsed.shape, read.shape), (parsed.dtype, read.dtype), (parsed.device, read.device))
    return parsed.kind == read.kind and all(ours in (None, theirs) for ours, theirs in pairs)


# ---------------------------------------------------------------- whole traces


def test_parse_forward_trace_gives_ops_regions_and_types() -> None:
    """A printed trace gives its ops in order, sub-ops nested as printed, and every type that a comment tells."""
    graph = parse(FORWARD)
    assert (graph.name, graph.stage, graph.args, graph.notes) == ("computation", "forward", ("x", "w"), ())
    assert [op.id for op in graph.ops] == ["torch.nn.functional.linear", "nvFusion0", DEL, RETURN]
    linear, fusion, deletion, _ = graph.ops
    assert [op.id for op in (linear, *linear.subops, *linear.subops[0].subops)][1:] == ["ltorch.linear", "prims.linear"]
    assert fusion.is_fusion and fusion.output == (Ref("z"), Ref("t5")) and len(fusion.leaves) == 4
    assert fusion.subops[0].args == (Ref("y"), Const("dtypes.float32"))
    assert deletion.args == (Ref("y"),)
    assert graph.saved == ("x", "w", "t5") and graph.held == {"x", "w"}
    assert graph.values["t5"] == Value("t5", (4, 2), "f32", "cuda:0")


def test_parse_backward_trace_gives_unpacking_and_saved() -> None:
    """Unpacking, over several lines too, gives the collections' values; literals print as ``_`` and are None."""
    graph = parse(BACKWARD)
    assert graph.stage == "backward" and graph.held == frozenset()
    assert graph.ops[0] == Op(UNPACK, (Ref("saved_for_backward"),), (Ref("C0"), None))
    assert graph.ops[6] == Op(UNPACK, (Ref("C0"),), (Ref("x"), Ref("w"), Ref("t5")))
    assert graph.ops[1].id == CLEAR and graph.values["C0"].kind == "collection"
    assert graph.saved == ("x", "w", "t5")
    assert graph.result == ((Ref("t7"), None),)


@pytest.mark.parametrize(
    ("text", "arg"),
    [
        ("-1", -1),
        ("1e-05", 1e-05),
        ("float('inf')", float("inf")),
        ("-float('inf')", -float("inf")),
        ("complex(1.0, -2.0)", 1 - 2j),
        ("'a\\'b\\n'", "a'b\n"),
        ("(t0,)", (Ref("t0"),)),
        ("[]", ()),
        ("{'k': [t0, None], 'j': True}", Struct((("k", (Ref("t0"), None)), ("j", True)))),
        ("slice(None,-1,None)", Const("slice(None,-1,None)")),
        ("(..., slice(1,None,None))", (Const("..."), Const("slice(1,None,None)"))),
        ('devices.Device("cuda:0")', Const('devices.Device("cuda:0")')),
        ("(object of type torch.Generator)", Const("(object of type torch.Generator)")),
        ("<class 'torch.dtype'>", Const("<class 'torch.dtype'>")),
        ("my_Batch(ids=t0,mask=t1)", (Ref("t0"), Ref("t1"))),
        ("float", Const("float")),
    ],
)
def test_read_statement_argument_as_printed_is_plain_data(text: str, arg: Arg) -> None:
    """Every literal, object and collection that traces print is read as the data it stands for."""
    statement = read_statement(f"t9 = prims.f({text})")
    assert statement is not None and statement.args == (arg,)


def test_parse_name_of_an_object_is_a_constant_but_an_argument_is_a_value() -> None:
    """``_torch_ProcessGroup_8`` is a constant unless the trace makes or is given a value of that name."""
    graph = parse("def computation(_0_weight):\n  t1 = prims.f(_0_weight, _torch_ProcessGroup_8)\n  return t1\n")
    assert graph.ops[0].args == (Ref("_0_weight"), Const("_torch_ProcessGroup_8"))


@given(graphs(max_ops=20))
@settings(max_examples=150, deadline=None)
def test_parse_of_a_printed_graph_gives_the_graph(graph: Graph) -> None:
    """Printing a Graph and parsing it gives the Graph back, with nothing inferred and nothing noted."""
    assert parse(graph_text(graph)) == graph


@given(graphs(max_ops=20))
@settings(max_examples=100, deadline=None)
def test_parse_without_type_comments_infers_only_what_is_true(graph: Graph) -> None:
    """With no type comment but those of arguments and cotangents, every shape, dtype and device inferred is the real one."""
    parsed = parse(re.sub(r"  # t\d+: \".*\"$", "", graph_text(graph), flags=re.MULTILINE))
    assert parsed.ops == graph.ops
    assert all(is_known_part(value, graph.values[name]) for name, value in parsed.values.items())


# ---------------------------------------------------------------- what people paste


def quoted(text: str) -> str:
    return "".join(f"> {line}\n" for line in text.splitlines())


def fenced(text: str) -> str:
    return f"Here is the trace, it got slower:\n\n```python\n{text}```\n\nAny idea (see above)?\n"


def in_issue(text: str) -> str:
    script = "import torch, thunder\n\ndef f(x):\n    return torch.nn.functional.relu(x) * 2\n\njf = thunder.jit(f)\nx, y = f(1), 2\n"
    return f"## Bug\n```py\n{script}print(jf(x))\n```\nprints\n<details>\n{fenced(text)}</details>\n"


def with_crlf(text: str) -> str:
    return text.replace("\n", "\r\n")


def from_html(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")


def ranked(text: str) -> str:
    return "".join(f"[rank0]: {line}\n" for line in text.splitlines())


def commented(text: str) -> str:
    return "jf(x)\n" + "".join(f"    # {line}\n" if line else "    #\n" for line in text.splitlines()) + "y = 1\n"


def coloured(text: str) -> str:
    return "".join(f"\x1b[32m{line}\x1b[0m\n" for line in text.splitlines())


def typographic(text: str) -> str:
    return "\ufeff" + text.replace('"cuda', "\u201ccuda").replace(']"', "]\u201d").replace(
        "'output'", "\u2018output\u2019"
    )


def wrapped(text: str) -> str:
    """As a terminal of 60 columns breaks code lines; comment lines stay whole."""
    lines = []
    for line in text.splitlines():
        code, mark, comment = line.partition("  # ")
        while len(code) > 60 and not code.lstrip().startswith("#"):
            cut = code.rfind(", ", 0, 60) + 1
            lines.append(code[:cut])
            code = "      " + code[cut:].lstrip()
        lines.append(code + mark + comment)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "paste", [quoted, fenced, in_issue, with_crlf, from_html, ranked, commented, coloured, typographic, wrapped]
)
@pytest.mark.parametrize("trace", [FORWARD, BACKWARD])
def test_parse_pasted_trace_equals_the_trace(paste: Callable[[str], str], trace: str) -> None:
    """What people and tools put around a trace changes nothing in the Graph."""
    trace = trace[trace.index("@torch.no_grad") :]
    assert parse(paste(trace)) == parse(trace)


def test_parse_document_two_traces_and_user_code_gives_the_two_with_their_lines() -> None:
    """A report with a script and two traces gives the two traces, and tells where each op stands."""
    text = in_issue(FORWARD) + fenced(BACKWARD)
    forward, backward = parse_document(text, name="issue.md")
    assert (forward.graph.name, backward.graph.name) == ("computation", "backward_fn")
    lines = text.splitlines()
    first, last = forward.op_lines[1]
    assert lines[first - 1].startswith("  [z, t5] = nvFusion0") and lines[last - 1].startswith(
        "    # t5 = prims.transpose"
    )
    assert forward.title == f"computation (issue.md:{forward.first_line})"


def test_parse_several_traces_where_one_is_wanted_names_file_and_line() -> None:
    """`parse` refuses to choose between traces; `parse_traces` gives all."""
    with pytest.raises(
        ParseError, match=r"^two\.txt:\d+: 2 traces where one is wanted: computation at line 1, backward_fn"
    ):
        parse(FORWARD + "\n" + BACKWARD, name="two.txt")
    assert len(parse_traces(FORWARD + "\n" + BACKWARD)) == 2


@pytest.mark.parametrize("text", ["", "\n\n", "just words (and more)", "import torch\nx = torch.ones(3)\nprint(x)\n"])
def test_parse_text_without_a_trace_names_file_and_line(text: str) -> None:
    """Prose and plain Python are no traces; the error says in which file and line none was found."""
    with pytest.raises(ParseError, match=r"^notes\.txt:1: no trace found"):
        parse(text, name="notes.txt")


OLD = """\
@torch.no_grad()
@no_autocast()
def backward_fn(saved_for_backward, cotangents):
  # saved_for_backward: "Collection"
  # cotangents: "Collection"
  C0, \\
  C1, \\
  = saved_for_backward
  clear_collection(saved_for_backward)
  del [saved_for_backward]
  t10, \\
  = cotangents
  t1, \\
  t2, \\
  = C0
  clear_collection(C0)
  i5, \\
  f6, \\
  = C1
  (t3, t4) = nvFusion0(t10, t1, t2, f6)
    # t3 = prims.add(t10, t1)  # t3: "cuda:0 f32[2, 2]"
    # t4 = prims.transpose(t2, (1, 0))  # t4: "cuda:0 f32[3, 2]"
  return t3, (t4,),
"""


def test_parse_older_printing_is_read_the_same_way() -> None:
    """One name a line, ``clear_collection``, ``del [a]`` and untyped unpacking, as Thunder printed in 2023 and 2024."""
    graph = parse(OLD)
    assert [op.id for op in graph.ops] == [UNPACK, CLEAR, DEL, UNPACK, UNPACK, CLEAR, UNPACK, "nvFusion0", RETURN]
    assert graph.ops[2].args == (Ref("saved_for_backward"),)
    kinds = {name: graph.values[name].kind for name in ("C0", "C1", "i5", "f6", "t1")}
    assert kinds == {"C0": "collection", "C1": "collection", "i5": "number", "f6": "number", "t1": "tensor"}
    assert graph.values["t10"].shape == (2, 2) and graph.values["t2"].shape == (2, 3)
    assert "inferred by op rules: t1, t10, t2" in graph.notes


def test_parse_symbolic_sizes_count_with_the_value_that_was_traced() -> None:
    """A symbolic size in a type comment counts with its value; a future is the tensor that it will be."""
    text = """def computation(a, b):
  # a: "cuda:0 f32[[IntegerProxy name=i0, value=2, static=CONSTRAINT.CONSTRAINABLE], 1024]"
  # b: "FUTURE thunder.devices.Device(type='cuda', index=0) f32[256]"
  t1 = prims.neg(a)
  return t1
"""
    values = parse(text).values
    assert values["a"].shape == (2, 1024) and values["t1"].nbytes == 8192
    assert values["b"] == Value("b", (256,), "f32", "cuda:0")


EXCERPT = """\
We see this at the start of the backward:

[... cut ...]
v5, v7, = C0
clear_mutable_collection(C0)
del C0
[t48, t86, t90] = nvFusion0(h4, p1, v5)
  # t48 = prims.reshape(h4, (64, 28))  # t48: "cuda:0 bf16[64, 28]"
  # t86 = prims.transpose(p1, (0, 2, 1))  # t86: "cuda:0 bf16[28, 32, 64]"
  # t90 = prims.transpose(v5, (1, 0))  # t90: "cuda:0 bf16[7, 9]"
del h4, v5
t29 = torch_nll_loss_backward_impl(t65, t44, None)  # t29: "cuda:0 f32[63, 512]"
[t43, t47] = nvFusion1(t44, t29, t66)
[... cut ...]
which is bad, since the peak is there.
"""


def test_parse_excerpt_infers_shapes_or_numel_and_says_the_rest() -> None:
    """Without signature and with lines missing, inputs are arguments, sizes come from op rules, and notes say so."""
    graph = parse(EXCERPT)
    assert graph.stage == "backward" and graph.args[0] == "C0" and graph.result is None
    assert graph.args == ("C0", "h4", "p1", "t65", "t44", "t66")
    assert graph.values["p1"] == Value("p1", (28, 64, 32), "bf16", "cuda:0")
    assert graph.values["h4"].shape is None and graph.values["h4"].nbytes == 64 * 28 * 2
    assert graph.values["t44"].nbytes == 63 * 512 * 4  # the loss's gradient is of its input's size
    assert graph.values["t43"].nbytes is None
    notes = "\n".join(graph.notes)
    for part in (
        "no signature",
        "left out of the text at lines 3, 14",
        "no return",
        "number of elements is known, by op rules: h4",
    ):
        assert part in notes
    assert "size not known: t43, t47, t65, t66, v7" in notes


def test_parse_lines_cut_on_the_right_keep_what_is_there() -> None:
    """A statement that was cut keeps its output and the arguments before the cut; half a name is no name.

    What the operation does without the rest of its arguments nobody knows, so its callee says that it was cut.
    """
    text = "t1 = prims.add(t0, 2.0)\nt2 = torch.cat((t0, t1, t5"
    graph = parse(text)
    assert graph.ops[1] == Op("torch.cat...", ((Ref("t0"), Ref("t1")),), Ref("t2"))
    assert effect_of(graph.ops[1]).kind is Kind.BARRIER
    assert "cut, and read as far as it goes: line 2" in graph.notes


def test_parse_interrupted_by_log_lines_goes_on() -> None:
    """Warnings between the lines of a trace are left out and noted; the trace goes on."""
    lines = FORWARD.splitlines()
    noisy = "\n".join([*lines[:12], "W1130 12:33 some warning about caches", *lines[12:]])
    graph = parse(noisy)
    assert graph.ops == parse(FORWARD).ops
    assert any(note == "not understood and left out: line 13" for note in graph.notes)


def test_parse_without_indentation_finds_the_same_leaves() -> None:
    """Where the text lost its indentation, a prim that repeats the op above it is still what that op consists of."""
    flat = "\n".join(line.lstrip() for line in FORWARD.splitlines())
    assert [op.leaves for op in parse(flat).ops] == [op.leaves for op in parse(FORWARD).ops]


def test_parse_use_before_definition_is_kept_for_the_verifier() -> None:
    """In a whole trace a name that nothing makes is a fault to find, no argument to invent."""
    graph = parse("def computation(a):\n  t1 = prims.add(a, t7)\n  return t1\n")
    assert graph.args == ("a",) and "t7" in graph.values


# ---------------------------------------------------------------- the same as read


def _norm_and_gate(x, w):
    import torch

    y = x.float()
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) @ w
    left, right = y.split(y.shape[-1] // 2, dim=-1)
    return torch.cat((torch.nn.functional.silu(left) * right, left.transpose(0, 1).reshape(right.shape)), -1)


def _shifted_loss(logits, labels):
    import torch

    return torch.nn.functional.cross_entropy(logits.float()[:, :-1].reshape(-1, 16), labels[:, 1:].reshape(-1))


def _dropout_and_write(x):
    import torch

    y = torch.nn.functional.dropout(torch.relu(x), 0.25)
    y.add_(1.0)
    return y.view(-1)[2:], y


@pytest.mark.nvfuser
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Thunder leaves source files open
@pytest.mark.parametrize("program", ["gate", "loss", "dropout"])
def test_parse_of_the_print_equals_read_of_the_trace(program: str) -> None:
    """At every stage, parsing what Thunder prints gives the ops that `read` gives, and no value that contradicts it."""
    import torch

    from thunder_fusionfix.capture import capture
    from thunder_fusionfix.read import read

    programs = {
        "gate": (_norm_and_gate, (torch.ones(4, 4, requires_grad=True), torch.ones(4, 8, requires_grad=True))),
        "loss": (_shifted_loss, (torch.ones(2, 5, 16, requires_grad=True), torch.ones(2, 5, dtype=torch.int64))),
        "dropout": (_dropout_and_write, (torch.ones(4, 6),)),
    }
    function, args = programs[program]
    part = capture(function, args).parts[0]
    for trace in (part.joint, part.fused, part.forward, part.backward):
        if trace is None:
            continue
        ours, theirs = parse(str(trace)), read(trace)
        assert (ours.name, ours.stage, ours.args) == (theirs.name, theirs.stage, theirs.args)
        assert ours.ops == tuple(map(_as_printed, theirs.ops))
        assert ours.values.keys() == theirs.values.keys()
        wrong = [name for name, value in ours.values.items() if not is_known_part(value, theirs.values[name])]
        assert wrong == []


def _as_printed(op: Op) -> Op:
    """The op without what its print leaves out: the length of what it unpacks, and literals among its outputs."""
    args = op.args[:1] if op.id == UNPACK else op.args
    return replace(op, args=args, output=_without_literals(op.output), subops=tuple(map(_as_printed, op.subops)))


def _without_literals(output: Arg) -> Arg:
    if isinstance(output, tuple):
        return tuple(map(_without_literals, output))
    return output if isinstance(output, Ref) else None


# ---------------------------------------------------------------- hostile text

_WATCHED = ("exec", "compile", "import", "open", "os.system", "subprocess.Popen", "pickle.find_class", "ctypes.dlopen")
_events: list[str] = []
_is_watching = False


def _watch(event: str, _: tuple[object, ...]) -> None:
    if _is_watching and event in _WATCHED:
        _events.append(event)


sys.addaudithook(_watch)


@contextmanager
def nothing_executes() -> Iterator[None]:
    """Fails if Python code is compiled or run from text, or a module, file or process opened, while it lasts."""
    global _is_watching
    _events.clear()
    _is_watching = True
    try:
        yield
    finally:
        _is_watching = False
    assert _events == []


HOSTILE = (
    "t1 = __import__('os').system('touch /nowhere')",
    "t1 = prims.add(eval('1'), exec('2'))",
    "t = f(" + "(" * 500,
    "t = f(" + "9" * 6000 + ")",
    "t = f('" + "\\'" * 300,
    "t = f(" + "-" * 300 + "1)",
    '# t1: "cuda:0 f32[' + "9" * 400 + ']"',
    "t1 = prims.reshape(t0, (-1, -1, 0))",
    "t1 = prims.transpose(t0, (7, 7))",
    "t1 = prims.slice_prim(t0, (0,), (9999999999999999999999,), (1,))",
    "[t1, t1] = nvFusion0(t1)",
    "del del del",
    "return return",
    "def def(def):",
    "\x00\x01\x02 = \x03(\x04)",
    "t\u00e9 = prims.neg(\u4e16)",
    "<<<<<<< HEAD",
    "```" * 40,
    "{'a': {'b': " * 60,
)


def fuzzed(rng: random.Random, corpus: list[list[str]]) -> str:
    """One hostile text: lines of one or two traces, cut, mixed, damaged, and with what attackers write between them."""
    lines = list(rng.choice(corpus))
    start = rng.randrange(len(lines))
    lines = lines[start : start + rng.randint(1, 16)]
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(lines) + 1)
        action = rng.randrange(6)
        if action == 0:  # interleave
            lines[at:at] = rng.sample(rng.choice(corpus), 2)
        elif action == 1:
            lines.insert(at, rng.choice(HOSTILE))
        elif action == 2 and lines:  # damage a line
            line = lines[at - 1]
            where = rng.randrange(len(line) + 1)
            lines[at - 1] = (
                line[:where]
                + rng.choice(("", "(", ")", "'", '"', "\\", "#", "=", ",", "\0", "..."))
                + line[where + rng.randint(0, 3) :]
            )
        elif action == 3 and lines:
            lines.pop(at - 1)
        elif action == 4 and lines:  # repeat
            lines.insert(at, rng.choice(lines))
        elif lines:
            lines[at - 1] = lines[at - 1][: rng.randrange(len(lines[at - 1]) + 1)]
    text = "\n".join(lines)
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.2 else text


def test_parse_fuzzed_text_gives_graphs_or_the_documented_error() -> None:
    """10,000 hostile texts: each gives sound Graphs or `ParseError` with file and line; nothing is executed."""
    rng = random.Random(6)
    corpus = [FORWARD.splitlines(), BACKWARD.splitlines(), OLD.splitlines(), EXCERPT.splitlines()]
    corpus += [graph_text(random_graph(rng, 12, stage=stage)).splitlines() for stage in ("forward", "backward")]
    parse(FORWARD)  # imports happen on first use
    num_parsed = 0
    with nothing_executes():
        for _ in range(10_000):
            text = fuzzed(rng, corpus)
            try:
                traces = parse_document(text, name="fuzz.txt")
            except ParseError as error:
                assert str(error).startswith("fuzz.txt:")
                continue
            num_parsed += 1
            for trace in traces:
                names = {*trace.graph.args, *(name for op in trace.graph.ops for name in (*op.inputs, *op.outputs))}
                assert names <= trace.graph.values.keys()
                assert len(trace.op_lines) == len(trace.graph.ops)
    assert num_parsed > 5_000  # the corpus is not all noise


@pytest.mark.parametrize(
    "pattern",
    [
        "t = f((((((((((",
        "'\\'\\'\\'\\'",
        "..........(",
        "t1, \\\n",
        "<<<<<<",
        "t = f(\n",
        "{'a': {'b': ",
        "a.a.a.a.",
        "def f(\n",
        "# # t = f(t)\n",
        '# t: "cuda:0 f32[[IntegerProxy ',
        "(object of type a",
        "t2 = prims.add(t1, t1)\n",
        "  # t = prims.neg(t)\n   # t = prims.neg(t)\n",
    ],
)
def test_parse_time_is_linear_in_the_length(pattern: str) -> None:
    """A text eight times as long takes at most about eight times as long, whatever it repeats."""

    def seconds(length: int) -> float:
        text = "t1 = prims.neg(t0)\n" + pattern * (length // len(pattern))
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            parse_document(text)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(40_000) < 8 * 3 * seconds(5_000) + 0.05


def test_parse_and_check_28_layer_trace_takes_seconds() -> None:
    """A trace of 28 layers, 1.6 MB, parses in three seconds."""
    rng = random.Random(28)
    graph = random_graph(rng, 11_000)
    text = graph_text(graph)
    assert len(text) > 1_000_000
    start = time.process_time()
    parsed = parse(text)
    assert time.process_time() - start < 3.0
    assert parsed.ops == graph.ops
    check_graph(parsed)


@pytest.mark.parametrize("call", ["torch.transpose(x, 0, 1)", "torch.permute(x, (1, 0))", "torch.swapaxes(x, -1, 0)"])
def test_infer_two_dims_of_a_matrix_are_swapped_under_every_spelling(call):
    """``transpose(x, 0, 1)`` names the two dims that change places, ``permute`` the order of all."""
    graph = parse(f'def f(x):\n  # x: "cuda:0 f32[3, 5]"\n  y = {call}\n  return y\n')
    assert graph.values["y"].shape == (5, 3)

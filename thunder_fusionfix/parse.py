"""Reads printed Thunder traces as Graphs: saved files, and whatever people paste into a bug report.

The Graph equals the one that `read` makes of the trace itself, apart from tags, strides and what the caller holds, which a
printed trace does not tell. Text that was cut, quoted, elided or printed by an older Thunder is read as far as it goes: what is
missing is inferred where an operation's rule allows (`infer`), is None otherwise, and `Graph.notes` says so.

Nothing of the text is executed; time is linear in its length.

    >>> graph = parse('''
    ... def computation(x):
    ...   # x: "cuda:0 bf16[2, 3]"
    ...   [t1] = nvFusion0(x)
    ...     # t0 = prims.neg(x)  # t0: "cuda:0 bf16[2, 3]"
    ...     # t1 = prims.transpose(t0, (1, 0))  # t1: "cuda:0 bf16[3, 2]"
    ...   return t1
    ... ''')
    >>> [op.id for op in graph.ops], graph.values["t1"].shape
    (['nvFusion0', 'return'], (3, 2))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.infer import fill
from thunder_fusionfix.model import (
    CLEAR,
    DEL,
    EXPAND,
    OWN,
    RETURN,
    UNPACK,
    Arg,
    Const,
    Graph,
    Op,
    Ref,
    Struct,
    Value,
    refs,
)
from thunder_fusionfix.paste import Line, Region, regions
from thunder_fusionfix.syntax import Statement, read_signature, read_statement

_TYPE_COMMENT = re.compile(r'#+\s*([^\W\d]\w*): "(.*?)"')
_SOURCE_COMMENT = re.compile(r"#\s*\S+:\d+:(?:\s|$)")
_TENSOR_TYPE = re.compile(
    r"(?:DTensor |FUTURE )?(?:(?P<device>\w+(?::\d+)?)|thunder\.devices\.Device\(type='(?P<kind>\w+)'(?:, index=(?P<index>\d+))?\)) "
    r"(?P<dtype>\w+)\[(?P<shape>.*)\]\Z"
)
_SYMBOLIC_SIZE = re.compile(r"\[?IntegerProxy[^\]]*?value=(\d+)[^\]]*\]?")
_FUSION = re.compile(r"(?:nvFusion|TorchCompile|CUDAGraph)\d+\Z")
_OBJECT_NAME = re.compile(r"_\w*_\d+\Z")
_NUMBER_NAME = re.compile(r"[bfi]\d+\Z")
_SURE_SIGN = re.compile(
    r"(?:prims|ltorch)\.|(?:nvFusion|TorchCompile|CUDAGraph)\d+\Z|\w*_(?:prim_)?impl\Z|clear_(?:mutable_)?collection\Z"
)
_TARGETS_ONLY = re.compile(r"(?:[^\W\d]\w*,\s*)+\Z")
_BROKEN_STATEMENT = re.compile(r"\b(?:prims|ltorch)\.\w|\b(?:nvFusion|TorchCompile|CUDAGraph)\d+\(")
_OLD_NAMES = {"clear_collection": CLEAR}
_STATEMENTS = frozenset((DEL, RETURN, UNPACK, CLEAR, OWN, EXPAND))
_MAX_DEPTH = 16  # levels of sub-ops; traces print about four
_SHOWN_NAMES = 8  # names that a note lists before it counts the rest


class ParseError(UsageError):
    """Text that holds no trace, or several where one is wanted; names the file and the line."""

    def __init__(self, source: str, line: int, message: str) -> None:
        super().__init__(f"{source}:{line}: {message}")
        self.source = source
        self.line = line


@dataclass(frozen=True)
class ParsedTrace:
    """A trace and where each of its operations stands in the text."""

    graph: Graph
    source: str  # name of the file
    first_line: int  # from 1
    last_line: int
    op_lines: tuple[tuple[int, int], ...]  # per position in graph.ops: first and last line, sub-ops included

    @property
    def title(self) -> str:
        """Its name and place, for people: ``backward_fn (trace.txt:12)``."""
        return f"{self.graph.name} ({self.source}:{self.first_line})"


def parse(text: str, *, name: str = "<text>") -> Graph:
    """The one trace in ``text`` as a Graph.

    Args:
        text: a printed trace with anything around it.
        name: name of the file, for messages.

    Raises:
        ParseError: there is no trace in the text, or more than one (`parse_traces` gives all).
    """
    traces = parse_document(text, name=name)
    if len(traces) > 1:
        where = ", ".join(f"{trace.graph.name} at line {trace.first_line}" for trace in traces[:_SHOWN_NAMES])
        raise ParseError(name, traces[1].first_line, f"{len(traces)} traces where one is wanted: {where}")
    return traces[0].graph


def parse_traces(text: str, *, name: str = "<text>") -> tuple[Graph, ...]:
    """All traces in ``text``, in order; at least one.

    Raises:
        ParseError: there is no trace in the text.
    """
    return tuple(trace.graph for trace in parse_document(text, name=name))


def parse_document(text: str, *, name: str = "<text>") -> tuple[ParsedTrace, ...]:
    """All traces in ``text`` with their places in it, in order; at least one.

    A stretch of text is a trace if it has operations and something that only traces print (prims, fusions, type comments, ...);
    where no stretch has, one that reads without a rest and ends in ``return`` is taken.

    Raises:
        ParseError: there is no trace in the text.
    """
    drafts = [draft for region in regions(text) for draft in _drafts(region) if draft.nodes]
    chosen = [draft for draft in drafts if draft.sure_signs] or [draft for draft in drafts if draft.reads_as_trace()]
    if not chosen:
        raise ParseError(
            name, 1, "no trace found; a trace has lines like `t1 = prims.mul(t0, 2.0)` or `[t2] = nvFusion0(t1)`"
        )
    return tuple(draft.finish(name) for draft in chosen)


# ---------------------------------------------------------------- drafts


@dataclass(slots=True)
class _Node:
    """An operation while its sub-ops are still coming."""

    statement: Statement
    first: int
    last: int
    indent: int
    children: list[_Node] = field(default_factory=list)


@dataclass(slots=True)
class _Draft:
    """A trace while its lines are still coming."""

    name: str = ""
    params: tuple[str, ...] | None = None  # None: no signature
    nodes: list[_Node] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)
    first_line: int = 0
    last_line: int = 0
    def_indent: int = -1
    sure_signs: int = 0
    elided: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)
    prose: list[int] = field(default_factory=list)  # prose on the signature's level: the trace is over, or interrupted
    branch: list[_Node] = field(default_factory=list)  # the last op and the last sub-op below it, and so on

    @property
    def begun(self) -> bool:
        return self.params is not None or bool(self.nodes)

    @property
    def returned(self) -> bool:
        return bool(self.nodes) and self.nodes[-1].statement.callee == RETURN

    def touch(self, line: Line) -> None:
        self.first_line = self.first_line or line.first
        self.last_line = line.last

    def reads_as_trace(self) -> bool:
        return not self.skipped and self.params is not None and self.returned and len(self.nodes) > 1

    # ------------------------------------------------------------ lines

    def add_signature(self, line: Line) -> None:
        signature = read_signature(line.text)
        self.touch(line)
        if signature is None:
            self.skipped.append(line.first)
            return
        self.name, self.params, self.def_indent = signature.name, signature.params, line.indent
        if signature.elided:
            self.elided.append(line.first)

    def add_comment(self, line: Line) -> None:
        text = line.text
        if text.startswith("# Constructed by"):
            self.sure_signs += 1
            self.touch(line)
            return
        if _SOURCE_COMMENT.match(text):
            return
        typed = _TYPE_COMMENT.match(text)
        if typed:
            self.types.setdefault(typed.group(1), typed.group(2))
            self.sure_signs += _TENSOR_TYPE.match(typed.group(2)) is not None
            self.touch(line)
            return
        parent = self.parent_of(line)
        statement = read_statement(text.lstrip("# "), cut=line.cut) if parent is not None else None
        if parent is None or statement is None or statement.callee in (DEL, RETURN):
            return
        node = self.node(line, statement)
        if line.indent <= parent.indent and parent.children and _decomposes(parent.children[-1], node):
            parent = parent.children[-1]
            self.branch.append(parent)
        parent.children.append(node)
        self.branch.append(node)
        for ancestor in self.branch:
            ancestor.last = line.last

    def parent_of(self, line: Line) -> _Node | None:
        """The op or sub-op that a commented line belongs to, by indentation; the nearest op where the text lost its."""
        if not self.branch or self.branch[0].statement.callee in _STATEMENTS:
            return None
        lost = line.indent <= self.branch[0].indent
        while len(self.branch) > 1 and (lost or self.branch[-1].indent >= line.indent or len(self.branch) > _MAX_DEPTH):
            self.branch.pop()
        return self.branch[-1]

    def add_statement(self, line: Line, statement: Statement) -> None:
        node = self.node(line, statement)
        self.nodes.append(node)
        self.branch = [node]

    def is_left_by(self, line: Line) -> bool:
        """True where a statement does not belong to this trace any more."""
        body_indent = self.nodes[0].indent if self.nodes else line.indent
        return self.returned or (line.indent <= self.def_indent < body_indent)

    def add_prose(self, line: Line) -> bool:
        """Notes a line that no trace prints; gives True where the trace is over."""
        if _TARGETS_ONLY.match(line.text) and self.begun:
            self.cut.append(line.first)
            return False
        if _BROKEN_STATEMENT.search(line.text) and not self.returned:
            self.skipped.append(line.first)
            return False
        if self.params is None or self.returned:
            return self.begun or bool(self.elided)
        if line.indent <= self.def_indent:
            self.prose.append(line.first)  # counts only if the trace goes on below
        else:
            self.skipped.append(line.first)
        return False

    def node(self, line: Line, statement: Statement) -> _Node:
        self.skipped += self.prose
        self.prose = []
        self.touch(line)
        if statement.cut or line.cut:
            self.cut.append(line.first)
        typed = _TYPE_COMMENT.match(statement.comment)
        if typed:
            self.types.setdefault(typed.group(1), typed.group(2))
        if statement.annotation is not None and isinstance(statement.output, Ref):
            self.types.setdefault(statement.output.name, statement.annotation)
        self.sure_signs += typed is not None or _SURE_SIGN.match(statement.callee) is not None
        return _Node(statement, line.first, line.last, line.indent)

    # ------------------------------------------------------------ the Graph

    def finish(self, source: str) -> ParsedTrace:
        known = {*self.types, *(self.params or ()), *(name for node in self.nodes for name in _made(node))}
        ops = tuple(_op(node, known) for node in self.nodes)
        free = _free_names(ops, self.params or ())
        whole = self.params is not None and not (self.elided or self.skipped or self.cut)
        args = (self.params or ()) if whole else (*(self.params or ()), *free)
        values = {name: _value(name, self.types.get(name)) for name in _names(args, ops)}
        for name, kind in _kinds(ops):
            if name not in self.types:
                values[name] = Value(name, kind=kind)
        values, inferred = fill(ops, values)
        notes = (*self.notes(free if not whole else ()), *inferred)
        graph = Graph(
            self.name or "excerpt", _stage(self.name, args, ops), args, ops, values, held=frozenset(), notes=notes
        )
        if graph.stage != "backward":
            graph = Graph(graph.name, graph.stage, args, ops, values, held=frozenset(self.params or ()), notes=notes)
        op_lines = tuple((node.first, node.last) for node in self.nodes)
        return ParsedTrace(graph, source, self.first_line, self.last_line, op_lines)

    def notes(self, free: Iterable[str]) -> Iterator[str]:
        free = tuple(free)
        if self.params is None:
            yield f"no signature: names that the text takes but does not make count as arguments: {listed(free)}"
        elif free:
            yield f"made in lines that are missing, so they count as arguments: {listed(free)}"
        if self.elided:
            yield f"lines were left out of the text at {_numbered(self.elided)}"
        if self.skipped:
            yield f"not understood and left out: {_numbered(self.skipped)}"
        if self.cut:
            yield f"cut, and read as far as it goes: {_numbered(self.cut)}"
        if not self.returned:
            yield "no return statement: what the trace returns is not known"


def _drafts(region: Region) -> Iterator[_Draft]:
    """Splits a region into traces: at headers, at signatures, after a return, and where indentation falls back."""
    draft = _Draft()
    elided = list(reversed(region.elided))
    for line in region.lines:
        if _begins_anew(line, draft):
            yield draft
            draft = _Draft()
        while elided and elided[-1] < line.first:
            draft.elided.append(elided.pop())
        text = line.text
        if text[0] == "#":
            draft.add_comment(line)
        elif text[0] == "@" or text.startswith(("import ", "from ")):
            draft.sure_signs += text.startswith("@no_autocast")
            draft.touch(line)
        elif text.startswith("def "):
            draft.add_signature(line)
        elif (statement := read_statement(text, cut=line.cut)) is not None:
            if draft.is_left_by(line):
                yield draft
                draft = _Draft()
            draft.add_statement(line, statement)
        elif draft.add_prose(line):
            yield draft
            draft = _Draft()
    draft.elided.extend(reversed(elided))
    yield draft


def _begins_anew(line: Line, draft: _Draft) -> bool:
    """True where a line is the first of another trace: its header, an import or decorator above it, or its signature."""
    return draft.begun and line.text.startswith(("# Constructed by", "@", "import ", "from ", "def "))


def _decomposes(upper: _Node, lower: _Node) -> bool:
    """True where ``lower`` is what ``upper`` consists of, told without indentation: a prim with the same output."""
    is_prim = lower.statement.callee.startswith("prims.") and not upper.statement.callee.startswith("prims.")
    return is_prim and upper.statement.output is not None and upper.statement.output == lower.statement.output


def _made(node: _Node) -> Iterator[str]:
    yield from refs(node.statement.output)
    for child in node.children:
        yield from _made(child)


def _op(node: _Node, known: set[str]) -> Op:
    statement = node.statement
    callee = _OLD_NAMES.get(statement.callee, statement.callee)
    if statement.cut and callee not in _STATEMENTS:
        callee += "..."  # an operation without all of its arguments is not known
    return Op(
        id=callee,
        args=tuple(_resolved(arg, known) for arg in statement.args),
        output=statement.output,
        kwargs=tuple((name, _resolved(arg, known)) for name, arg in statement.kwargs),
        subops=tuple(_op(child, known) for child in node.children),
        is_fusion=_FUSION.match(callee) is not None,
    )


def _resolved(arg: Arg, known: set[str]) -> Arg:
    """``arg`` with names of constant objects (``_torch_float32_0``) told from names of values."""
    if isinstance(arg, Ref):
        is_object = arg.name[0] == "_" and arg.name not in known and _OBJECT_NAME.match(arg.name)
        return Const(arg.name) if is_object else arg
    if isinstance(arg, tuple):
        return tuple(_resolved(item, known) for item in arg)
    if isinstance(arg, Struct):
        return Struct(tuple((key, _resolved(item, known)) for key, item in arg.items))
    return arg


def _free_names(ops: tuple[Op, ...], params: tuple[str, ...]) -> tuple[str, ...]:
    """Names that ops take and no earlier op makes, collections first."""
    made = set(params)
    free: dict[str, bool] = {}  # whether it is a collection
    for op in ops:
        for name in op.inputs:
            if name not in made:
                free[name] = free.get(name, False) or op.id in (UNPACK, CLEAR, OWN, EXPAND)
        made.update(op.outputs)
    return tuple(sorted(free, key=lambda name: not free[name]))


def _kinds(ops: tuple[Op, ...]) -> Iterator[tuple[str, str]]:
    """Names that are no tensors, with their kind, as far as unpacking tells: older Thunder prints no types there.

    What a backward trace saved is two collections, one of tensors and one of numbers, which Thunder names i0, f1, b2, ...
    """
    for op in ops:
        if op.id in (UNPACK, CLEAR, OWN, EXPAND):
            yield from ((name, "collection") for name in op.inputs)
        if op.id == UNPACK and op.inputs == ("saved_for_backward",):
            yield from ((name, "collection") for name in op.outputs)
        elif _gives_numbers(op):
            yield from ((name, "number") for name in op.outputs)


def _gives_numbers(op: Op) -> bool:
    """True for the unpacking of numbers, and for the seed and offset of a random generator."""
    if op.id == UNPACK:
        return all(_NUMBER_NAME.match(name) for name in op.outputs)
    return op.id.startswith("get_and_update_rng_state")


def _names(args: tuple[str, ...], ops: tuple[Op, ...]) -> dict[str, None]:
    names = dict.fromkeys(args)
    for op in ops:
        names.update(dict.fromkeys(op.inputs))
        names.update(dict.fromkeys(op.outputs))
        if op.subops:
            names.update(_names((), op.subops))
    return names


def _value(name: str, type_text: str | None) -> Value:
    """The value that a type comment tells; a tensor of unknown size where there is none."""
    if type_text is None:
        return Value(name)
    match = _TENSOR_TYPE.match(type_text)
    if match is None:
        first = type_text.split(" ", 1)[0]
        kinds = {"int": "number", "float": "number", "bool": "number", "complex": "number", "Collection": "collection"}
        return Value(name, kind=kinds.get(first, "other"))
    device = match["device"] or match["kind"] + (f":{match['index']}" if match["index"] else "")
    return Value(name, _shape(match["shape"]), match["dtype"], device)


def _shape(text: str) -> tuple[int, ...] | None:
    """Sizes in a type comment; a symbolic size counts with the value that it was traced with."""
    if "Proxy" in text:
        text = _SYMBOLIC_SIZE.sub(r"\1", text)
    sizes = [size.strip() for size in text.split(",")] if text.strip() else []
    return tuple(int(size) for size in sizes) if all(size.isdecimal() and len(size) < 19 for size in sizes) else None


def _stage(name: str, args: tuple[str, ...], ops: tuple[Op, ...]) -> str:
    """The stage, by what each kind of trace prints."""
    if name.startswith("backward") or "saved_for_backward" in args:
        return "backward"
    last = ops[-1] if ops and ops[-1].id == RETURN else None
    first = last.args[0] if last is not None and last.args else None
    keys = {key for key, _ in first.items} if isinstance(first, Struct) else set()
    if "fw_flat_out" in keys:
        return "joint"
    if name.startswith("augmented_forward"):
        return "forward"
    second = last.args[1] if last is not None and len(last.args) == 2 else None
    if "output" in keys and isinstance(second, tuple) and len(second) == 2:
        return "forward"
    if not name and any(op.id == CLEAR or any(output.startswith("bw_") for output in op.outputs) for op in ops):
        return "backward"  # only backward traces clear collections; newer Thunder marks their names
    return "inference"


def listed(names: Iterable[str]) -> str:
    """Names for people: all, or the first few and how many more."""
    names = tuple(names)
    shown = ", ".join(names[:_SHOWN_NAMES])
    return shown + (f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else "") if names else "none"


def _numbered(lines: Iterable[int]) -> str:
    numbers = [str(line) for line in lines]
    return ("line " if len(numbers) == 1 else "lines ") + listed(numbers)

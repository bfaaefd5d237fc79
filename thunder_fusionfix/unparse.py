"""Prints a Graph the way Thunder prints the trace: the inverse of `parse`, for Graphs whose trace is elsewhere.

The text is for people, for the tools' ten lines of context and for tests; it names no imports and no source lines.

    >>> op = Op("prims.transpose", (Ref("x"), (1, 0)), Ref("y"))
    >>> print("\\n".join(op_lines(op, {"y": Value("y", (2, 3), "bf16", "cuda:0")})))
    y = prims.transpose(x, (1, 0))  # y: "cuda:0 bf16[2, 3]"
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from thunder_fusionfix.model import DEL, RETURN, UNPACK, Arg, Const, Graph, Op, Ref, Struct, Value

_KIND_NAMES = {"number": "int ?", "collection": "Collection", "other": "Any"}


def graph_text(graph: Graph) -> str:
    """The Graph as a printed trace, sub-ops included; ends with a newline."""
    return "\n".join(graph_lines(graph)[0]) + "\n"


def graph_lines(graph: Graph) -> tuple[list[str], list[tuple[int, int]]]:
    """The lines of the printed trace, and per op the first and last of its lines, counted from 1."""
    lines = [f"def {graph.name}({', '.join(graph.args)}):"]
    lines += [f"  # {typed}" for name in graph.args if (typed := type_text(graph.values[name])) is not None]
    places = []
    for op in graph.ops:
        first = len(lines) + 1
        lines += [f"  {line}" for line in op_lines(op, graph.values)]
        places.append((first, len(lines)))
    return lines, places


def op_lines(op: Op, values: Mapping[str, Value]) -> list[str]:
    """The lines of one operation, its sub-ops as comments below it."""
    lines = [_statement(op)]
    typed = type_text(values[op.output.name]) if isinstance(op.output, Ref) and op.output.name in values else None
    if typed is not None:
        lines[0] += f"  # {typed}"
    if op.id == UNPACK:
        lines += [f"# {typed}" for name in op.outputs if (typed := type_text(values[name])) is not None]
    for subop in op.subops:
        for line in op_lines(subop, values):
            body = line.lstrip()
            indent = line[: len(line) - len(body)]
            lines.append(f"  {indent}{body if body.startswith('#') else '# ' + body}")
    return lines


def type_text(value: Value) -> str | None:
    """``x: "cuda:0 bf16[2, 3]"``; None where the type is not known."""
    if value.kind != "tensor":
        return f'{value.name}: "{_KIND_NAMES[value.kind]}"'
    if value.shape is None or value.dtype is None or value.device is None:
        return None
    return f'{value.name}: "{value.device} {value.dtype}{list(value.shape)}"'


def arg_text(arg: Arg) -> str:
    """An argument as traces print it; lists are printed as tuples, since Graphs do not tell them apart."""
    if isinstance(arg, Ref):
        return arg.name
    if isinstance(arg, Const):
        return arg.text
    if isinstance(arg, Struct):
        return "{" + ", ".join(f"{key!r}: {arg_text(item)}" for key, item in arg.items) + "}"
    if isinstance(arg, tuple):
        inner = ", ".join(map(arg_text, arg))
        return f"({inner},)" if len(arg) == 1 else f"({inner})"
    if isinstance(arg, complex):
        return f"complex({_float_text(arg.real)}, {_float_text(arg.imag)})"
    if isinstance(arg, float):
        return _float_text(arg)
    return repr(arg)


def _float_text(number: float) -> str:
    if math.isnan(number):
        return "float('NaN')"
    if number in (float("inf"), -float("inf")):
        return "float('inf')" if number > 0 else "-float('inf')"
    return repr(number)


def _statement(op: Op) -> str:
    args = ", ".join(map(arg_text, op.args))
    if op.id == DEL:
        return f"del {args}"
    if op.id == RETURN:
        return f"return {args}".rstrip()
    if op.id == UNPACK:
        targets = op.output if isinstance(op.output, tuple) else (op.output,)
        return "".join(f"{_target_text(target)}, " for target in targets) + f"= {args}"
    kwargs = ", ".join(f"{name}={arg_text(arg)}" for name, arg in op.kwargs)
    call = f"{op.id}({args}{', ' if args and kwargs else ''}{kwargs})"
    if op.output is None or op.output == ():
        return call
    return f"{_target_text(op.output)} = {call}"


def _target_text(target: Arg) -> str:
    if target is None:
        return "_"
    if isinstance(target, tuple):
        return "[" + ", ".join(map(_target_text, target)) + "]"
    return arg_text(target)

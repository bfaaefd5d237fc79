"""Graphs and Timelines in a file: JSON with a version, exact both ways.

A file holds any number of Graphs and Timelines under labels. Nothing in it is ever run, and everything is checked on the way in:
a file that another program wrote, that was cut off, or that an incompatible version wrote gives one line that names it.

    {"format": "thunder_fusionfix", "version": 1,
     "items": {"forward": {"type": "graph", "name": "computation", "stage": "forward", "args": ["x"], "ops": [...], ...}}}

Arguments are plain JSON where JSON has them (None, True, 2, 2.0, "text", lists for tuples); the rest is an object with one key:
``{"ref": "t1"}``, ``{"const": "dtypes.float32"}``, ``{"struct": [["name", arg], ...]}``, ``{"float": "inf"}``,
``{"complex": ["0.0", "1.0"]}``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from thunder_fusionfix.errors import UsageError
from thunder_fusionfix.model import STAGES, Arg, Const, Graph, Holder, Op, Ref, Struct, Timeline, Value

FORMAT = "thunder_fusionfix"
VERSION = 1

Item = Graph | Timeline
_T = TypeVar("_T")


class _Broken(Exception):
    """The content is not what this version writes; the message says where."""


def save(items: Mapping[str, Item] | Sequence[Graph], path: str | Path) -> None:
    """Writes Graphs and Timelines to ``path``.

    Args:
        items: by label; Graphs without labels get their stage as one, numbered from the second on ("forward", "forward2").
        path: the file; one that exists is replaced.

    Raises:
        UsageError: the file cannot be written.
    """
    labelled = dict(items) if isinstance(items, Mapping) else _labelled(items)
    content = {"format": FORMAT, "version": VERSION, "items": {label: _item(item) for label, item in labelled.items()}}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error


def load(path: str | Path) -> dict[str, Item]:
    """The Graphs and Timelines in ``path``, by label.

    Raises:
        UsageError: there is no such file, `save` did not write it, it is damaged, or another version wrote it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a saved trace (it is not text); `fusionfix capture` saves one") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a saved trace (it is not JSON); `fusionfix capture` saves one") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f"{path}: not a saved trace (JSON of another program); `fusionfix capture` saves one")
    if content.get("version") != VERSION:
        raise UsageError(
            f"{path}: saved in version {content.get('version')!r} of the format, this release reads version {VERSION}; "
            "capture it again"
        )
    try:
        return {label: _read_item(item, label) for label, item in _object(content.get("items"), "items").items()}
    except (_Broken, RecursionError) as error:
        raise UsageError(f"{path}: damaged ({error}); capture it again") from error


def load_graphs(path: str | Path) -> dict[str, Graph]:
    """The Graphs in ``path``, by label.

    Raises:
        UsageError: as `load`, and where the file holds none.
    """
    graphs = {label: item for label, item in load(path).items() if isinstance(item, Graph)}
    if not graphs:
        raise UsageError(f"{path}: holds no trace; `fusionfix capture` saves one")
    return graphs


def _labelled(graphs: Iterable[Graph]) -> dict[str, Graph]:
    labelled: dict[str, Graph] = {}
    for graph in graphs:
        same = sum(other.stage == graph.stage for other in labelled.values())
        labelled[graph.stage if not same else f"{graph.stage}{same + 1}"] = graph
    return labelled


# ---------------------------------------------------------------- out


def _item(item: Item) -> dict[str, Any]:
    return _graph(item) if isinstance(item, Graph) else _timeline(item)


def _graph(graph: Graph) -> dict[str, Any]:
    return {
        "type": "graph",
        "name": graph.name,
        "stage": graph.stage,
        "args": list(graph.args),
        "values": [_value(value) for value in graph.values.values()],
        "ops": [_op(op) for op in graph.ops],
        "held": sorted(graph.held),
        "notes": list(graph.notes),
    }


def _value(value: Value) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    return {
        field.name: getattr(value, field.name)
        for field in fields(Value)
        if field.name == "name" or getattr(value, field.name) != field.default
    }


def _op(op: Op) -> dict[str, Any]:
    found: dict[str, Any] = {"id": op.id, "args": _arg(op.args), "output": _arg(op.output)}
    if op.kwargs:
        found["kwargs"] = [[name, _arg(arg)] for name, arg in op.kwargs]
    if op.subops:
        found["subops"] = [_op(subop) for subop in op.subops]
    if op.tags:
        found["tags"] = sorted(op.tags)
    if op.is_fusion:
        found["is_fusion"] = True
    return found


def _arg(arg: Arg) -> Any:
    if isinstance(arg, tuple):
        return [_arg(item) for item in arg]
    if isinstance(arg, Ref):
        return {"ref": arg.name}
    if isinstance(arg, Const):
        return {"const": arg.text}
    if isinstance(arg, Struct):
        return {"struct": [[name, _arg(item)] for name, item in arg.items]}
    if isinstance(arg, complex):
        return {"complex": [repr(arg.real), repr(arg.imag)]}
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": repr(arg)}
    return arg


def _timeline(timeline: Timeline) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "timeline"}
    for field in fields(Timeline):
        found[field.name] = getattr(timeline, field.name)
    found["holders"] = [
        {field.name: getattr(holder, field.name) for field in fields(Holder)} for holder in timeline.holders
    ]
    return found


# ---------------------------------------------------------------- in


def _read_item(item: Any, label: str) -> Item:
    kind = _object(item, label).get("type")
    if kind == "graph":
        return _read_graph(item, label)
    if kind == "timeline":
        return _read_timeline(item, label)
    raise _Broken(f"{label}: neither a graph nor a timeline")


def _read_graph(item: Mapping[str, Any], where: str) -> Graph:
    values = {value.name: value for value in _list(item.get("values"), f"{where}.values", _read_value)}
    graph = Graph(
        name=_text(item.get("name"), f"{where}.name"),
        stage=_text(item.get("stage"), f"{where}.stage"),
        args=_list(item.get("args"), f"{where}.args", _text),
        ops=_list(item.get("ops"), f"{where}.ops", _read_op),
        values=values,
        held=frozenset(_list(item.get("held"), f"{where}.held", _text)),
        notes=_list(item.get("notes"), f"{where}.notes", _text),
    )
    if graph.stage not in STAGES:
        raise _Broken(f"{where}.stage: {graph.stage!r} is none of {', '.join(STAGES)}")
    for name in (*graph.args, *(name for op in graph.ops for part in (op, *op.leaves) for name in _names(part))):
        if name not in values:
            raise _Broken(f"{where}: nothing is known about {name}")
    return graph


def _names(op: Op) -> tuple[str, ...]:
    return (*op.inputs, *op.outputs)


def _read_value(item: Any, where: str) -> Value:
    found = _object(item, where)
    known = {field.name for field in fields(Value)}
    if unknown := [name for name in found if name not in known]:
        raise _Broken(f"{where}: unknown field {unknown[0]!r}")
    return Value(
        name=_text(found.get("name"), where),
        shape=_optional(found.get("shape"), f"{where}.shape", _sizes),
        dtype=_optional(found.get("dtype"), f"{where}.dtype", _text),
        device=_optional(found.get("device"), f"{where}.device", _text),
        strides=_optional(found.get("strides"), f"{where}.strides", _sizes),
        kind=_text(found.get("kind", "tensor"), f"{where}.kind"),
        known_numel=_optional(found.get("known_numel"), f"{where}.known_numel", _int),
    )


def _read_op(item: Any, where: str) -> Op:
    found = _object(item, where)
    args = _read_arg(found.get("args"), f"{where}.args")
    if not isinstance(args, tuple):
        raise _Broken(f"{where}.args: not a list")
    return Op(
        id=_text(found.get("id"), f"{where}.id"),
        args=args,
        output=_read_arg(found.get("output"), f"{where}.output"),
        kwargs=_list(found.get("kwargs", []), f"{where}.kwargs", _read_pair),
        subops=_list(found.get("subops", []), f"{where}.subops", _read_op),
        tags=frozenset(_list(found.get("tags", []), f"{where}.tags", _text)),
        is_fusion=_bool(found.get("is_fusion", False), f"{where}.is_fusion"),
    )


def _read_pair(item: Any, where: str) -> tuple[str, Arg]:
    if not isinstance(item, list) or len(item) != 2:
        raise _Broken(f"{where}: not a pair")
    return _text(item[0], where), _read_arg(item[1], where)


def _read_arg(item: Any, where: str) -> Arg:
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    if isinstance(item, list):
        return tuple(_read_arg(part, where) for part in item)
    if isinstance(item, dict) and len(item) == 1:
        ((key, inner),) = item.items()
        if key == "ref":
            return Ref(_text(inner, where))
        if key == "const":
            return Const(_text(inner, where))
        if key == "struct":
            return Struct(_list(inner, where, _read_pair))
        if key == "float":
            return _float(inner, where)
        if key == "complex" and isinstance(inner, list) and len(inner) == 2:
            return complex(_float(inner[0], where), _float(inner[1], where))
    raise _Broken(f"{where}: not an argument")


def _read_timeline(item: Mapping[str, Any], where: str) -> Timeline:
    return Timeline(
        live_bytes=_list(item.get("live_bytes"), f"{where}.live_bytes", _int),
        peak_bytes=_int(item.get("peak_bytes"), f"{where}.peak_bytes"),
        peak_pos=_int(item.get("peak_pos"), f"{where}.peak_pos"),
        start_bytes=_int(item.get("start_bytes"), f"{where}.start_bytes"),
        lower_bound_bytes=_int(item.get("lower_bound_bytes"), f"{where}.lower_bound_bytes"),
        holders=_list(item.get("holders"), f"{where}.holders", _read_holder),
        unknown=_list(item.get("unknown"), f"{where}.unknown", _text),
    )


def _read_holder(item: Any, where: str) -> Holder:
    found = _object(item, where)
    return Holder(
        name=_text(found.get("name"), where),
        nbytes=_int(found.get("nbytes"), where),
        producer=_text(found.get("producer"), where),
        last_use=_text(found.get("last_use"), where),
        names=_list(found.get("names"), where, _text),
    )


def _object(item: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(item, dict):
        raise _Broken(f"{where}: not an object")
    return item


def _list(item: Any, where: str, read: Callable[[Any, str], _T]) -> tuple[_T, ...]:
    if not isinstance(item, list):
        raise _Broken(f"{where}: not a list")
    return tuple(read(part, f"{where}[{index}]") for index, part in enumerate(item))


def _optional(item: Any, where: str, read: Callable[[Any, str], _T]) -> _T | None:
    return None if item is None else read(item, where)


def _sizes(item: Any, where: str) -> tuple[int, ...]:
    return _list(item, where, _int)


def _text(item: Any, where: str) -> str:
    if not isinstance(item, str):
        raise _Broken(f"{where}: not text")
    return item


def _int(item: Any, where: str) -> int:
    if isinstance(item, bool) or not isinstance(item, int) or item < 0:
        raise _Broken(f"{where}: not a whole number >= 0")
    return item


def _bool(item: Any, where: str) -> bool:
    if not isinstance(item, bool):
        raise _Broken(f"{where}: not true or false")
    return item


def _float(item: Any, where: str) -> float:
    try:
        return float(_text(item, where))
    except ValueError as error:
        raise _Broken(f"{where}: not a number") from error

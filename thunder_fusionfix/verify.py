"""Judges a trace, and a rewritten trace against the one that it came from.

A wrong gradient is the worst that a pass can do, so no pass is trusted: the Graph of the rewritten trace is read anew and
compared with the Graph before. The rules are data, each with the law that it holds. `check_graph` asks those that concern one
trace, `verify` also those that compare two.

The laws together say: same signature and same result; every value that both traces know outside of regions has the same
metadata and the same *normal form* (`thunder_fusionfix.normal_form`), whatever regions it is computed in; whatever has an effect
besides its outputs happens as often and in the same order; and whoever reads memory that something writes finds the same
write done. What a pass may change beyond that, it admits in an `Allow`; by default nothing.

Unequal means rejected, also where two forms are equal in a way that is not understood here: the rewrite is lost, never the result.

    >>> from thunder_fusionfix.model import Ref, Value
    >>> x, y = Value("x", (2, 3), "f32", "cpu"), Value("y", (3, 2), "f32", "cpu")
    >>> transposed = Op("prims.transpose", (Ref("x"), (1, 0)), Ref("y"))
    >>> reshaped = Op("prims.reshape", (Ref("x"), (3, 2)), Ref("y"))
    >>> result = Op("return", (Ref("y"),))
    >>> before = Graph("computation", "inference", ("x",), (transposed, result), {"x": x, "y": y})
    >>> after = Graph("computation", "inference", ("x",), (reshaped, result), {"x": x, "y": y})
    >>> verify(before, before)
    >>> verify(before, after, Allow(may_rewrite_regions=True))
    Traceback (most recent call last):
    ...
    thunder_fusionfix.errors.VerifyError: inference trace: rule same-values broken at 0: y is another value than before
    ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from thunder_fusionfix.effects import PURE, Kind, effect_of, is_layout, short_name
from thunder_fusionfix.errors import VerifyError
from thunder_fusionfix.model import CLEAR, DEL, RETURN, UNPACK, Arg, Const, Graph, Op, Ref, Struct, Value

CONTEXT_LINES = 10  # lines of the trace that a message shows around the fault


@dataclass(frozen=True, slots=True)
class Allow:
    """What a pass admits to have changed; the default allows nothing."""

    may_reorder: bool = False  # the order of ops, within what effects and writes permit
    may_rewrite_regions: bool = (
        False  # layouts and casts leave, enter or change in regions, and regions of nothing else vanish
    )
    may_split_regions: bool = False  # the ops of regions are dealt to regions in another way
    may_clone: frozenset[str] = frozenset()  # names of values that cheap pure ops compute once more than before
    may_replace: tuple[tuple[str, str], ...] = ()  # pairs (id before, id after) of ops that compute the same
    may_keep_longer: bool = False  # a value stays bound beyond its last use


@dataclass(frozen=True, slots=True)
class Fault:
    """One breach of a rule."""

    pos: int  # where, in the Graph that `in_before` tells
    text: str
    names: tuple[str, ...] = ()  # values to show with their metadata
    in_before: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One law; ``find`` yields its breaches."""

    name: str
    law: str
    find: Callable[[Any], Iterator[Fault]]  # of a Graph in GRAPH_RULES, of a Pair in PAIR_RULES


@dataclass(frozen=True)
class Pair:
    """A trace before and after a pass, with what several rules ask of both."""

    before: Graph
    after: Graph
    allow: Allow

    @cached_property
    def new_id(self) -> Mapping[str, str]:
        return dict(self.allow.may_replace)

    @cached_property
    def effects(self) -> tuple[tuple[tuple[int, Op], ...], tuple[tuple[int, Op], ...]]:
        """The ops of both graphs that do more than compute their outputs, with positions, in order."""
        return tuple(_ordered_ops(self.before)), tuple(_ordered_ops(self.after))


def check_graph(graph: Graph, rules: Sequence[Rule] | None = None) -> None:
    """Returns nothing where ``graph`` is a sound trace.

    Args:
        graph: any trace.
        rules: those to ask; None for all of `GRAPH_RULES`.

    Raises:
        VerifyError: a rule is broken.
    """
    for rule in GRAPH_RULES if rules is None else rules:
        for fault in rule.find(graph):
            raise _error(rule, fault, graph)


def verify(before: Graph, after: Graph, allow: Allow = Allow(), rules: Sequence[Rule] | None = None) -> None:
    """Returns nothing where ``after`` is sound and computes what ``before`` computes, apart from what ``allow`` permits.

    Args:
        before: the trace that a pass was given.
        after: the Graph of the trace that it made, read anew.
        allow: what the pass admits to have changed.
        rules: those to ask; None for all of `RULES`.

    Raises:
        VerifyError: a rule is broken. The caller keeps the trace that it had.
    """
    asked = RULES if rules is None else rules
    check_graph(after, [rule for rule in GRAPH_RULES if rule in asked])
    pair = Pair(before, after, allow)
    for rule in PAIR_RULES:
        if rule in asked:
            for fault in rule.find(pair):
                raise _error(rule, fault, before if fault.in_before else after)


# ---------------------------------------------------------------- rules about one trace


def _uses_undefined(graph: Graph) -> Iterator[Fault]:
    defined = set(graph.args)
    for pos, op in enumerate(graph.ops):
        for name in op.inputs:
            if name not in defined:
                yield Fault(pos, f"{name} is used before anything gives it", (name,))
        for text, name in _undefined_inside(op):
            yield Fault(pos, text, (name,))
        defined.update(op.outputs)


def _undefined_inside(op: Op) -> Iterator[tuple[str, str]]:
    """What the sub-ops of ``op`` use although neither an input nor an earlier sub-op gives it."""
    if not op.subops:
        return
    defined = set(op.inputs)
    for subop in op.subops:
        for name in subop.inputs:
            if name not in defined:
                yield f"inside {op.id}, {subop.id} uses {name}, which is neither an input nor computed before", name
        yield from _undefined_inside(subop)
        defined.update(subop.outputs)
    for name in op.outputs:
        if name not in defined:
            yield f"{op.id} gives {name}, but nothing inside computes it", name


def _uses_deleted(graph: Graph) -> Iterator[Fault]:
    deleted: dict[str, int] = {}
    for pos, op in enumerate(graph.ops):
        if op.id == RETURN:
            continue
        for name in op.inputs:
            if name in deleted:
                yield Fault(pos, f"{name} is used here, but deleted at {deleted[name]}", (name,))
        if op.id == DEL:
            deleted.update((name, pos) for name in op.inputs)


def _defines_twice(graph: Graph) -> Iterator[Fault]:
    defined = set(graph.args)
    for pos, op in enumerate(graph.ops):
        for name in op.outputs:
            if name in defined and name not in op.inputs:  # an op that gives back its input defines nothing
                yield Fault(pos, f"{name} is given a second time", (name,))
        inside: set[str] = set()
        for subop in op.subops:
            for name in subop.outputs:
                if name in inside and name not in subop.inputs:
                    yield Fault(pos, f"inside {op.id}, {name} is given a second time", (name,))
            inside.update(subop.outputs)
        defined.update(op.outputs)


def _shares_region_names(graph: Graph) -> Iterator[Fault]:
    first: dict[str, int] = {}
    for pos, op in enumerate(graph.ops):
        if not op.is_fusion:
            continue
        if op.id in first:
            yield Fault(pos, f"{op.id} is also the region at {first[op.id]}: both names would run the same code")
        first.setdefault(op.id, pos)


def _returns_wrongly(graph: Graph) -> Iterator[Fault]:
    deleted = {name for op in graph.ops if op.id == DEL for name in op.inputs}
    for pos, op in enumerate(graph.ops):
        if op.id != RETURN:
            continue
        if pos != len(graph.ops) - 1:
            yield Fault(pos, "the return statement is not the last one")
        for name in op.inputs:
            if name in deleted:
                yield Fault(pos, f"{name} is returned, but deleted before", (name,))


# ---------------------------------------------------------------- rules about two traces


def _changes_signature(pair: Pair) -> Iterator[Fault]:
    before, after = pair.before, pair.after
    if (before.name, before.stage, before.args) != (after.name, after.stage, after.args):
        yield Fault(
            0, f"the signature was {before.name}({', '.join(before.args)}), now {after.name}({', '.join(after.args)})"
        )


def _changes_result(pair: Pair) -> Iterator[Fault]:
    if _text(pair.before.result) != _text(pair.after.result):
        yield Fault(len(pair.after.ops) - 1, f"the trace returned {_text(pair.before.result)}")


def _changes_unpacking(pair: Pair) -> Iterator[Fault]:
    """Which saved tensors and cotangents a backward trace takes out of its collections, and which of these it clears."""
    before, after = (
        [(pos, op) for pos, op in enumerate(graph.ops) if op.id == UNPACK] for graph in (pair.before, pair.after)
    )
    yield from _first_difference(before, after, lambda op: line_of(op))
    cleared = Counter(name for op in pair.after.ops if op.id == CLEAR for name in op.inputs)
    for pos, op in enumerate(pair.before.ops):
        if op.id == CLEAR and cleared != Counter(n for o in pair.before.ops if o.id == CLEAR for n in o.inputs):
            yield Fault(pos, "the collections that are cleared are not the same", op.inputs, in_before=True)


def _changes_metadata(pair: Pair) -> Iterator[Fault]:
    for name, old in pair.before.values.items():
        new = pair.after.values.get(name)
        if new is not None and _metadata(old) != _metadata(new):
            pos = pair.after.producer.get(name, 0)
            yield Fault(pos, f"{name} was {describe(old)} and is {describe(new)}", (name,))


def _keeps_longer(pair: Pair) -> Iterator[Fault]:
    if pair.allow.may_keep_longer or not any(op.id == DEL for op in pair.before.ops):
        return
    before, after = _name_ends(pair.before), _name_ends(pair.after)
    returned = {name for op in pair.after.ops if op.id == RETURN for name in op.inputs}
    for name, (last_use, end) in after.items():
        prompt_before = name not in before or (before[name][1] is not None and not _lingers(pair.before, *before[name]))
        if name in returned or name in pair.after.args or not prompt_before:
            continue
        if end is None:
            yield Fault(last_use, f"{name} is not deleted after its last use", (name,))
        elif _lingers(pair.after, last_use, end):
            yield Fault(last_use, f"{name} is used here for the last time, but deleted only at {end}", (name,))


def _name_ends(graph: Graph) -> dict[str, tuple[int, int | None]]:
    """For each name that an op gives: its last use (or where it is given), and where it is deleted."""
    ends: dict[str, tuple[int, int | None]] = {}
    for pos, op in enumerate(graph.ops):
        for name in (*op.inputs, *op.outputs):
            if op.id == DEL:
                ends[name] = (ends[name][0] if name in ends else pos, pos)
            elif name not in ends or ends[name][1] is None:
                ends[name] = (pos, None)
    return ends


def _lingers(graph: Graph, last_use: int, end: int | None) -> bool:
    """True where an op runs between the last use of a name and its `del`."""
    return end is not None and any(op.id not in (DEL, CLEAR) for op in graph.ops[last_use + 1 : end])


def _reorders_effects(pair: Pair) -> Iterator[Fault]:
    before, after = pair.effects
    yield from _first_difference(before, after, lambda op: _spelling(op, pair.new_id))


def _changes_ops(pair: Pair) -> Iterator[Fault]:
    """Ops that appear, vanish or change their place although nothing allows it."""
    allow = pair.allow
    before, after = list(_compared_ops(pair.before, allow)), list(_compared_ops(pair.after, allow))

    def key(op: Op) -> str:
        return _role(op, pair.new_id) if allow.may_rewrite_regions else line_of(op, pair.new_id)

    ordered = not allow.may_reorder and not allow.may_split_regions and not allow.may_rewrite_regions
    if ordered:
        yield from _first_difference(before, after, key)
        return
    left = Counter(key(op) for _, op in before)
    known = set(left)
    for pos, op in after:
        if left[key(op)]:
            left[key(op)] -= 1
        elif not _is_admitted_clone(op, key(op) in known, allow):
            yield Fault(pos, f"{line_of(op)} is new", op.outputs)
    for pos, op in before:
        if left[key(op)]:
            left[key(op)] -= 1
            yield Fault(pos, f"{line_of(op)} is gone", op.outputs, in_before=True)
    if not allow.may_reorder:
        yield from _first_difference(_outside(pair.before), _outside(pair.after), lambda op: _place(op, pair.new_id))


def _compared_ops(graph: Graph, allow: Allow) -> Iterator[tuple[int, Op]]:
    """The ops that must be the same before and after: all but what is derived anew or what ``allow`` names."""
    for pos, op in enumerate(graph.ops):
        if op.id in (DEL, CLEAR):
            continue
        if not (op.is_fusion and (allow.may_split_regions or allow.may_rewrite_regions)):
            parts: tuple[Op, ...] = (op,)
        else:
            parts = op.subops
        for part in parts:
            if not (allow.may_rewrite_regions and _is_layout_or_cast(part)):
                yield pos, part


def _is_layout_or_cast(op: Op) -> bool:
    return all(is_layout(leaf) or short_name(leaf.id) == "convert_element_type" for leaf in op.leaves)


def _role(op: Op, new_id: Mapping[str, str]) -> str:
    """What a sub-op is, apart from shapes and names that change when layouts move past it."""
    return new_id.get(op.id, op.id)


def _is_admitted_clone(op: Op, is_known: bool, allow: Allow) -> bool:
    effect = effect_of(op)
    cheap = all(effect_of(leaf).cheap and effect_of(leaf).is_pure for leaf in op.leaves) or (
        effect.is_pure and effect.cheap
    )
    return cheap and is_known and bool(op.outputs) and set(op.outputs) <= allow.may_clone


def _outside(graph: Graph) -> list[tuple[int, Op]]:
    """The ops that keep their place where only regions change: all but layouts, regions and what is derived anew."""
    return [
        (pos, op)
        for pos, op in enumerate(graph.ops)
        if op.id not in (DEL, CLEAR) and not op.is_fusion and not _is_layout_or_cast(op)
    ]


def _place(op: Op, new_id: Mapping[str, str]) -> str:
    return f"{_text(op.output)} = {new_id.get(op.id, op.id)}"


# ---------------------------------------------------------------- what the rules ask


def _ordered_ops(graph: Graph) -> Iterator[tuple[int, Op]]:
    """Ops with an effect besides their outputs, unknown ones among them; those inside regions stand at the region."""
    for pos, op in enumerate(graph.ops):
        for part in op.subops if op.is_fusion else (op,):
            if _has_effect(part):
                yield pos, part


def _has_effect(op: Op) -> bool:
    harmless = PURE | {Kind.BOOKKEEPING}
    return effect_of(op).kind not in harmless or any(
        effect_of(leaf).kind not in PURE | {Kind.BOOKKEEPING} for leaf in op.leaves
    )


def _spelling(op: Op, new_id: Mapping[str, str]) -> str:
    """An op without the names of its values, which a pass may change; the values themselves are compared elsewhere."""
    args = ", ".join(_text(arg, names=False) for arg in op.args)
    kwargs = "".join(f", {name}={_text(arg, names=False)}" for name, arg in op.kwargs)
    return f"{new_id.get(op.id, op.id)}({args}{kwargs})"


def _metadata(value: Value) -> tuple[Any, ...]:
    return value.kind, value.shape, value.dtype, value.device


def _first_difference(
    before: Sequence[tuple[int, Op]], after: Sequence[tuple[int, Op]], key: Callable[[Op], str]
) -> Iterator[Fault]:
    """The first place where two sequences of ops differ by ``key``."""
    for (_, old), (pos, new) in zip(before, after):
        if key(old) != key(new):
            yield Fault(pos, f"{key(new)} stands where {key(old)} stood", (*new.inputs, *new.outputs))
            return
    if len(before) > len(after):
        pos, op = before[len(after)]
        yield Fault(pos, f"{key(op)} is gone", (*op.inputs, *op.outputs), in_before=True)
    elif len(after) > len(before):
        pos, op = after[len(before)]
        yield Fault(pos, f"{key(op)} is new", (*op.inputs, *op.outputs))


GRAPH_RULES: tuple[Rule, ...] = (
    Rule("def-before-use", "what an op takes, inside regions too, is an argument or was given before", _uses_undefined),
    Rule("use-after-del", "no op takes a value that was deleted", _uses_deleted),
    Rule("single-definition", "each name is given once", _defines_twice),
    Rule("region-names", "two regions of one name would run one code, so names are unique", _shares_region_names),
    Rule("returned", "the return statement is last, and what it returns was not deleted", _returns_wrongly),
)

PAIR_RULES: tuple[Rule, ...] = (
    Rule("signature", "name, stage and arguments are the same", _changes_signature),
    Rule("result", "what is returned, saved tensors included, is the same", _changes_result),
    Rule("unpacking", "saved tensors and cotangents are unpacked and cleared as before", _changes_unpacking),
    Rule("metadata", "a value that both traces know has the same shape, dtype and device", _changes_metadata),
    Rule(
        "deletes", "a value is deleted right after its last use where it was before, and where it is new", _keeps_longer
    ),
    Rule(
        "effect-order",
        "random, in-place, collective, syncing and unknown ops are the same in the same order",
        _reorders_effects,
    ),
    Rule("same-ops", "ops appear, vanish, and change their order only as allowed", _changes_ops),
)

RULES = GRAPH_RULES + PAIR_RULES


# ---------------------------------------------------------------- text


def _error(rule: Rule, fault: Fault, graph: Graph) -> VerifyError:
    """The message that a person needs to find the fault."""
    which = "input trace" if fault.in_before else "trace"
    lines = [f"{graph.stage} {which}: rule {rule.name} broken at {fault.pos}: {fault.text}", f"  law: {rule.law}"]
    lines += [f"  {name}: {describe(graph.values[name])}" for name in fault.names[:8] if name in graph.values]
    first = max(0, min(fault.pos - CONTEXT_LINES // 2, len(graph.ops) - CONTEXT_LINES))
    for pos, op in list(enumerate(graph.ops))[first : first + CONTEXT_LINES]:
        lines.append(f"  {'>' if pos == fault.pos else ' '}{pos:5d}  {shorten(line_of(op))}")
    lines.append(
        "  This is a bug of thunder_fusionfix; the trace before the pass is unharmed. "
        "Find the rewrite with fuel=N, switch the pass off, and report this text."
    )
    return VerifyError("\n".join(lines))


def describe(value: Value) -> str:
    """The type of a value as traces print it: "cuda:0 bf16[2, 128]"."""
    if value.kind != "tensor":
        return value.kind
    shape = "?" if value.shape is None else ", ".join(map(str, value.shape))
    return f"{value.device or '?'} {value.dtype or '?'}[{shape}]"


def line_of(op: Op, new_id: Mapping[str, str] | None = None) -> str:
    """``op`` on one line, much as the trace prints it, sub-ops included."""
    name = (new_id or {}).get(op.id, op.id)
    args = [*(_text(arg) for arg in op.args), *(f"{name}={_text(arg)}" for name, arg in op.kwargs)]
    given = "" if op.output is None else f"{_text(op.output)} = "
    inside = f" {{{'; '.join(line_of(subop) for subop in op.subops)}}}" if op.subops else ""
    return f"{given}{name}({', '.join(args)}){inside}"


def shorten(line: str, width: int = 140) -> str:
    return line if len(line) <= width else line[: width - 3] + "..."


def _text(arg: Arg, names: bool = True) -> str:
    """An argument as text; ``names=False`` leaves out which value it is."""
    if isinstance(arg, Ref):
        return arg.name if names else "_"
    if isinstance(arg, Const):
        return arg.text
    if isinstance(arg, Struct):
        return "{" + ", ".join(f"{name!r}: {_text(item, names)}" for name, item in arg.items) + "}"
    if isinstance(arg, tuple):
        return "(" + ", ".join(_text(item, names) for item in arg) + ("," if len(arg) == 1 else "") + ")"
    return repr(arg)


def _names(ops: Iterable[Op]) -> set[str]:
    return {name for op in ops for name in op.outputs}

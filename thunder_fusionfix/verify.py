"""Judges a trace, and a rewritten trace against the one that it came from.

A wrong gradient is the worst that a pass can do, so no pass is trusted: the Graph of the rewritten trace is read anew
and compared with the Graph before. The rules are data, each with the law that it holds. `check_graph` asks those that
concern one trace, `verify` also those that compare two.

The laws together say: same signature and same result; every value that both traces know outside of regions has the
same metadata and the same *normal form* (`thunder_fusionfix.normal_form`), whatever regions it is computed in;
whatever has an effect besides its outputs happens as often and in the same order; and whoever reads memory that
something writes finds the same write done. What a pass may change beyond that, it admits in an `Allow`; by default
nothing.

Unequal means rejected, also where two forms are equal in a way that is not understood here: the rewrite is lost,
never the result.

    >>> from thunder_fusionfix.model import Ref, Value
    >>> x, y = Value("x", (2, 3), "f32", "cpu"), Value("y", (3, 2), "f32", "cpu")
    >>> transposed = Op("prims.transpose", (Ref("x"), (1, 0)), Ref("y"))
    >>> reshaped = Op("prims.reshape", (Ref("x"), (3, 2)), Ref("y"))
    >>> result = Op("return", (Ref("y"),))
    >>> before = Graph("computation", "inference", ("x",), (transposed, result), {"x": x, "y": y})
    >>> after = Graph("computation", "inference", ("x",), (reshaped, result), {"x": x, "y": y})
    >>> verify(before, before)
    >>> verify(before, after, Allow(may_rewrite_regions=True))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    thunder_fusionfix.errors.VerifyError: inference trace: rule same-values broken at 0: y is another value than before
    ...
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from thunder_fusionfix.alias import Aliases, aliases
from thunder_fusionfix.effects import ATTENTION, FLASH_BACKWARD, effect_of, is_layout, short_name
from thunder_fusionfix.errors import VerifyError
from thunder_fusionfix.model import (
    CLEAR,
    DEL,
    EXPAND,
    OWN,
    RETURN,
    UNPACK,
    Arg,
    Graph,
    Op,
    Ref,
    Struct,
    Value,
    kept_with_op,
    number_of,
)
from thunder_fusionfix.normal_form import Epoch, Forms, GraphForm, Observation, has_effect
from thunder_fusionfix.repeated import dense_uses, names_at
from thunder_fusionfix.unparse import arg_text, op_lines, type_text

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
    may_add: frozenset[str] = frozenset()  # short names of pure ops that may stand there more often than before
    may_own_cotangents: bool = False  # cotangents that autograd's engine held become the trace's own
    may_expand_cotangents: bool = False  # cotangents that nobody sends may come as repeated zeros
    may_keep_longer: bool = False  # a value stays bound beyond its last use
    may_repeat_work: bool = False  # what `may_clone` names may be computed by any pure ops, not by cheap ones alone


_STATEMENTS = (DEL, CLEAR, OWN, EXPAND, UNPACK, RETURN)  # each has a rule of its own

Placed = tuple[int, Op]
"""An op, or a part of one, with its position in the trace."""


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
    forms: Forms = field(default_factory=Forms)  # one table for the expressions of both traces

    @cached_property
    def new_id(self) -> Mapping[str, str]:
        return dict(self.allow.may_replace)

    @cached_property
    def changed_ops(self) -> tuple[list[Placed], list[Placed]]:
        """The ops before and after; without those that both traces hold once, as one object, which are what they were."""
        before, after = (Counter(map(number_of, graph.ops)) for graph in (self.before, self.after))
        same = {number for number, times in before.items() if times == after[number] == 1}
        old, new = (
            [(pos, op) for pos, op in enumerate(graph.ops) if number_of(op) not in same]
            for graph in (self.before, self.after)
        )
        return old, new

    @cached_property
    def has_same_ops(self) -> bool:
        """True where both traces hold the same ops, the same objects, in the same order, beside what binds and frees no value."""
        kept = [
            [op for op in graph.ops if op.id not in (DEL, CLEAR, OWN, EXPAND)] for graph in (self.before, self.after)
        ]
        return len(kept[0]) == len(kept[1]) and all(old is new for old, new in zip(*kept))


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


def verify(
    before: Graph,
    after: Graph,
    allow: Allow = Allow(),
    rules: Sequence[Rule] | None = None,
    forms: Forms | None = None,
) -> None:
    """Returns nothing where ``after`` is sound and computes what ``before`` does, apart from what ``allow`` permits.

    Args:
        before: the trace that a pass was given.
        after: the Graph of the trace that it made, read anew.
        allow: what the pass admits to have changed.
        rules: those to ask; None for all of `RULES`.
        forms: the table of an earlier `verify`, which saves the work on ops that it has seen, the same objects; None for a new one.

    Raises:
        VerifyError: a rule is broken. The caller keeps the trace that it had.
    """
    asked = RULES if rules is None else rules
    check_graph(after, [rule for rule in GRAPH_RULES if rule in asked])
    pair = Pair(before, after, allow, forms if forms is not None else Forms())
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


@kept_with_op
def _undefined_inside(op: Op) -> tuple[tuple[str, str], ...]:
    """What the sub-ops of ``op`` use although neither an input nor an earlier sub-op gives it."""
    if not op.subops:
        return ()
    found: list[tuple[str, str]] = []
    defined = set(op.inputs)
    for subop in op.subops:
        for name in subop.inputs:
            if name not in defined:
                text = f"inside {op.id}, {subop.id} uses {name}, which is neither an input nor computed before"
                found.append((text, name))
        found += _undefined_inside(subop)
        defined.update(subop.outputs)
    found += [
        (f"{op.id} gives {name}, but nothing inside computes it", name) for name in op.outputs if name not in defined
    ]
    return tuple(found)


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
        for name in _defined_twice_inside(op):
            yield Fault(pos, f"inside {op.id}, {name} is given a second time", (name,))
        defined.update(op.outputs)


@kept_with_op
def _defined_twice_inside(op: Op) -> tuple[str, ...]:
    found: list[str] = []
    inside: set[str] = set()
    for subop in op.subops:
        found += [name for name in subop.outputs if name in inside and name not in subop.inputs]
        inside.update(subop.outputs)
    return tuple(found)


def _shares_region_names(graph: Graph) -> Iterator[Fault]:
    first: dict[str, int] = {}
    for pos, op in enumerate(graph.ops):
        for region in _regions_in(op):
            if region.id in first:
                yield Fault(pos, f"{region.id} is also the region at {first[region.id]}: both names would run one code")
            first.setdefault(region.id, pos)


@kept_with_op
def _regions_in(op: Op) -> tuple[Op, ...]:
    """``op`` where it is a region, and the regions in it: a CUDAGraph region holds those that it replays."""
    if not op.subops:
        return (op,) if op.is_fusion else ()
    inside = (region for subop in op.subops for region in _regions_in(subop))
    return (op, *inside) if op.is_fusion else tuple(inside)


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


def _owns_wrongly(graph: Graph) -> Iterator[Fault]:
    """What is taken over from the engine: whole collections of cotangents, each once, before anybody has what is in them."""
    cotangents, touched = set(graph.args[1:]) if graph.stage == "backward" else set(), set[str]()
    for pos, op in enumerate(graph.ops):
        if op.id == OWN:
            for name in op.inputs:
                if name not in cotangents or graph.values[name].kind != "collection":
                    yield Fault(pos, f"{name} is taken over, but is no collection of cotangents", (name,))
                elif name in touched:
                    yield Fault(pos, f"{name} is taken over after something else took it", (name,))
        touched.update(op.inputs)


def _expands_wrongly(graph: Graph) -> Iterator[Fault]:
    """What may come as repeated zeros: cotangents that are not unpacked yet, and whose memory nobody needs dense."""
    cotangents, touched = set(graph.args[1:]) if graph.stage == "backward" else set(), set[str]()
    for pos, op in enumerate(graph.ops):
        if op.id == EXPAND:
            if len(op.inputs) != 1 or op.inputs[0] not in cotangents:
                yield Fault(pos, f"{', '.join(op.inputs)}: no collection of cotangents", op.inputs)
            elif op.inputs[0] in touched:
                yield Fault(pos, f"{op.inputs[0]} gets its zeros after something else took it", op.inputs)
            names = names_at(graph, op)
            if None in names:
                yield Fault(pos, "a position is none of a tensor that is unpacked", op.inputs)
            for name, why in dense_uses(graph, [name for name in names if name is not None]).items():
                yield Fault(pos, f"{name} may come as repeated zeros, but {why}", (name,))
        if op.id != OWN:
            touched.update(op.inputs)


def _mixes_attention(graph: Graph) -> Iterator[Fault]:
    """What the entry's attention gives may be another kernel's than the one whose backward Thunder calls."""
    ours: set[str] = set()
    for pos, op in enumerate(graph.ops):
        for part in op.leaves:
            if part.id == FLASH_BACKWARD and not ours.isdisjoint(part.inputs):
                names = tuple(name for name in part.inputs if name in ours)
                yield Fault(pos, f"{part.id} takes what {ATTENTION} gives", names)
            elif part.id == ATTENTION:
                ours.update(part.outputs[1:])


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
    """Which tensors a backward trace takes out of its collections, and which collections it takes over, fills and clears."""
    owned_before, owned = (
        {name for op in graph.ops if op.id == OWN for name in op.inputs} for graph in (pair.before, pair.after)
    )
    for pos, op in enumerate(pair.after.ops):
        if op.id == OWN and not owned_before.issuperset(op.inputs) and not pair.allow.may_own_cotangents:
            yield Fault(pos, f"{', '.join(op.inputs)} is taken over, which nothing allows", op.inputs)
    for pos, op in enumerate(pair.before.ops):
        if op.id == OWN and not owned.issuperset(op.inputs):
            yield Fault(pos, f"{', '.join(op.inputs)} is not taken over any more", op.inputs, in_before=True)
    lines_before, lines = (
        {_line(op, {}) for op in graph.ops if op.id == EXPAND} for graph in (pair.before, pair.after)
    )
    for pos, op in enumerate(pair.after.ops):
        if op.id == EXPAND and _line(op, {}) not in lines_before and not pair.allow.may_expand_cotangents:
            yield Fault(pos, f"zeros of {', '.join(op.inputs)} may be repeated, which nothing allows", op.inputs)
    for pos, op in enumerate(pair.before.ops):
        if op.id == EXPAND and _line(op, {}) not in lines:
            yield Fault(pos, f"{', '.join(op.inputs)} does not get its zeros any more", op.inputs, in_before=True)
    before, after = (
        [(pos, op) for pos, op in enumerate(graph.ops) if op.id == UNPACK] for graph in (pair.before, pair.after)
    )
    yield from _first_difference(before, after, lambda op: _line(op, {}))
    cleared = Counter(name for op in pair.after.ops if op.id == CLEAR for name in op.inputs)
    for pos, op in enumerate(pair.before.ops):
        if op.id == CLEAR and cleared != Counter(n for o in pair.before.ops if o.id == CLEAR for n in o.inputs):
            yield Fault(pos, "the collections that are cleared are not the same", op.inputs, in_before=True)


def _changes_metadata(pair: Pair) -> Iterator[Fault]:
    for name, old in pair.before.values.items():
        new = pair.after.values.get(name)
        if new is not None and new is not old and _metadata(old) != _metadata(new):
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
    before, after = list(_effects(pair.before)), list(_effects(pair.after))
    yield from _first_difference(before, after, lambda op: _spelling(op, pair.new_id))


def _effects(graph: Graph) -> Iterator[Placed]:
    """Ops that do more than compute their outputs, or are not known; those inside regions stand at the region."""
    for pos, op in enumerate(graph.ops):
        for part in _effects_in(op):
            yield pos, part


@kept_with_op
def _effects_in(op: Op) -> tuple[Op, ...]:
    return tuple(part for part in (op.subops if op.is_fusion and op.subops else (op,)) if has_effect(part))


def _changes_reads(pair: Pair) -> Iterator[Fault]:
    """Reads that find another write done than before.

    Both traces are taken as programs over memory: an expression then says after how many writes each of its reads
    happens. What is seen from outside, the arguments of effects and of the return statement, must be the same.
    """
    if not any(True for graph in (pair.before, pair.after) for _ in _effects(graph)):
        return  # nothing writes; the storages need not be worked out
    memory = [aliases(graph) for graph in (pair.before, pair.after)]
    if not any(found.written_groups for found in memory):
        return
    before, after = (
        pair.forms.of(graph, new_id=pair.new_id, epoch=_epochs(found))
        for graph, found in zip((pair.before, pair.after), memory)
    )
    for old, new in _matching(before, after, pair.new_id):
        if old.args != new.args:
            yield Fault(new.pos, f"{new.op.id} reads memory before or after another write than it did", new.op.inputs)


def _epochs(found: Aliases) -> Epoch:
    writes = {
        group: sorted({access.pos for access in found.accesses[group] if access.writes})
        for group in found.written_groups
    }

    def epoch(pos: int, name: str) -> int | None:
        positions = writes.get(found.group_of(name)) if name in found.storage_of else None
        return bisect_left(positions, pos) if positions else None

    return epoch


def _changes_ops(pair: Pair) -> Iterator[Fault]:
    """Ops that appear, vanish or change their place although nothing allows it."""
    allow = pair.allow
    if not (allow.may_reorder or allow.may_split_regions or allow.may_rewrite_regions):
        before, after = (list(_compared(enumerate(graph.ops), allow)) for graph in (pair.before, pair.after))
        yield from _first_difference(before, after, lambda op: _line(op, pair.new_id))
        return
    key = _role if allow.may_rewrite_regions else _line
    old, new = (_grouped(_compared(ops, allow), key, pair.new_id) for ops in pair.changed_ops)
    known = old
    if allow.may_clone:
        given = {op.outputs for placed in new.values() for _, op in placed}  # a line tells them, a role does not
        all_old = _compared(enumerate(pair.before.ops), allow)
        known = _grouped((one for one in all_old if key is _role or one[1].outputs in given), key, pair.new_id)
    for name in new:
        num_more = len(new[name]) - len(old.get(name, ()))
        if num_more <= 0:
            continue
        clones = [
            _is_admitted_new(op, allow) or (name in known and _is_admitted_clone(op, allow)) for _, op in new[name]
        ]
        others = [placed for placed, is_clone in zip(new[name], clones) if not is_clone]
        others.sort(key=lambda placed: any(output in pair.before.values for output in placed[1].outputs))
        for pos, op in others[: max(0, num_more - sum(clones))]:
            yield Fault(pos, f"{_line(op, pair.new_id)} is new", op.outputs)
    for name in old:
        kept = {output for _, op in new.get(name, ()) for output in op.outputs}
        gone = sorted(old[name], key=lambda placed: not kept.isdisjoint(placed[1].outputs))
        for pos, op in gone[: max(0, len(old[name]) - len(new.get(name, ())))]:
            yield Fault(pos, f"{_line(op, pair.new_id)} is gone", op.outputs, in_before=True)
    if not allow.may_reorder:
        yield from _first_difference(
            list(_in_place(pair.before, allow)), list(_in_place(pair.after, allow)), lambda op: _place(op, pair.new_id)
        )


def _compared(ops: Iterable[Placed], allow: Allow) -> Iterator[Placed]:
    """Of some ops those that must be the same before and after: all but what ``allow`` names and what other rules compare."""
    may_open = allow.may_split_regions or allow.may_rewrite_regions
    for pos, op in ops:
        if op.id in _STATEMENTS:
            continue
        for part in _needed_subops(op) if op.is_fusion and may_open and not has_effect(op) else (op,):
            is_compared_elsewhere = has_effect(part) and not part.is_fusion and (may_open or allow.may_reorder)
            if not is_compared_elsewhere and not (allow.may_rewrite_regions and _is_plumbing(part)):
                yield pos, part


@kept_with_op
def _needed_subops(region: Op) -> tuple[Op, ...]:
    """The sub-ops that the outputs of a region without effects depend on, in order."""
    wanted, kept = set(region.outputs), []
    for subop in reversed(region.subops):
        if wanted.intersection(subop.outputs):
            wanted.update(subop.inputs)
            kept.append(subop)
    return tuple(kept[::-1])


def _in_place(graph: Graph, allow: Allow) -> Iterator[Placed]:
    """The ops that keep their order where only regions change."""
    for pos, op in enumerate(graph.ops):
        is_statement = op.id in _STATEMENTS or op.is_fusion
        if not is_statement and not _is_plumbing(op) and not _is_admitted_new(op, allow):
            yield pos, op


@kept_with_op
def _is_plumbing(op: Op) -> bool:
    """Layouts, casts and pads: what moves between regions and torch when layouts leave."""
    names = ("convert_element_type", "pad")
    return not op.is_fusion and all(is_layout(leaf) or short_name(leaf.id) in names for leaf in op.leaves)


def _role(op: Op, new_id: Mapping[str, str]) -> str:
    """What an op is, apart from the shapes and names that change when layouts move past it."""
    return _line(op, new_id) if has_effect(op) else new_id.get(op.id, op.id)


def _grouped(
    placed: Iterable[Placed], key: Callable[[Op, Mapping[str, str]], str], new_id: Mapping[str, str]
) -> dict[str, list[Placed]]:
    groups: dict[str, list[Placed]] = {}
    for pos, op in placed:
        groups.setdefault(key(op, new_id), []).append((pos, op))
    return groups


def _is_admitted_clone(op: Op, allow: Allow) -> bool:
    effects = [effect_of(leaf) for leaf in op.leaves]
    may = all(effect.is_pure and (effect.cheap or allow.may_repeat_work) for effect in effects)
    return may and bool(op.outputs) and set(op.outputs) <= allow.may_clone


def _is_admitted_new(op: Op, allow: Allow) -> bool:
    return short_name(op.id) in allow.may_add and not has_effect(op)


def _place(op: Op, new_id: Mapping[str, str]) -> str:
    return f"{_text(op.output)} = {new_id.get(op.id, op.id)}"


def _changes_values(pair: Pair) -> Iterator[Fault]:
    """Values that both traces know outside of regions, and arguments of effects, that are other expressions."""
    if pair.has_same_ops and pair.before.args == pair.after.args and not pair.new_id:
        return
    changed = None if pair.new_id else pair.forms.where_changed(pair.before, pair.after)
    if changed is None or any(True for _ in _other_values(pair, *changed)):
        yield from _other_values(
            pair, *(pair.forms.of(graph, new_id=pair.new_id) for graph in (pair.before, pair.after))
        )


def _other_values(pair: Pair, before: GraphForm, after: GraphForm) -> Iterator[Fault]:
    for name, new in after.values.items():
        old = before.values.get(name)
        if old is not None and old != new:
            was, now = shorten(pair.forms.text(old)), shorten(pair.forms.text(new))
            pos = pair.after.producer.get(name, 0)
            yield Fault(pos, f"{name} is another value than before\n  before: {was}\n  now:    {now}", (name,))
    for seen, now_seen in _matching(before, after, pair.new_id):
        if seen.args != now_seen.args and seen.op.id != RETURN:
            yield Fault(now_seen.pos, f"{now_seen.op.id} takes other values than before", now_seen.op.inputs)


def _matching(
    before: GraphForm, after: GraphForm, new_id: Mapping[str, str]
) -> Iterator[tuple[Observation, Observation]]:
    """What is observed in both traces; an op is known by its outputs, one without outputs by its turn."""

    def keyed(form: GraphForm) -> dict[tuple[str, int], Observation]:
        turns: Counter[str] = Counter()
        found = {}
        for seen in form.observed:
            key = _place(seen.op, new_id)
            found[key, turns[key]] = seen
            turns[key] += 1
        return found

    old, new = keyed(before), keyed(after)
    return ((old[key], new[key]) for key in new if key in old)


# ---------------------------------------------------------------- what the rules ask


def _spelling(op: Op, new_id: Mapping[str, str]) -> str:
    """An op with an effect, without the values that it takes; `same-values` compares those."""
    args = [_text(arg, names=False) for arg in op.args]
    args += [f"{name}={_text(arg, names=False)}" for name, arg in op.kwargs]
    return f"{_place(op, new_id)}({', '.join(args)})"


def _metadata(value: Value) -> tuple[Any, ...]:
    return value.kind, value.shape, value.dtype, value.device


def _first_difference(before: Sequence[Placed], after: Sequence[Placed], key: Callable[[Op], str]) -> Iterator[Fault]:
    """The first place where two sequences of ops differ by ``key``."""
    for (_, old), (pos, new) in zip(before, after):
        if old is not new and key(old) != key(new):
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
    Rule(
        "attention",
        "what the entry's attention gives beside its result, which kernel it ran, goes to no other backward",
        _mixes_attention,
    ),
    Rule("ownership", "only collections of cotangents are taken over, once, before they are unpacked", _owns_wrongly),
    Rule(
        "repeated-zeros",
        "only cotangents that nothing writes, returns or needs dense come as repeated zeros, made before they are unpacked",
        _expands_wrongly,
    ),
)

PAIR_RULES: tuple[Rule, ...] = (
    Rule("signature", "name, stage and arguments are the same", _changes_signature),
    Rule("result", "what is returned, saved tensors included, is the same", _changes_result),
    Rule(
        "unpacking",
        "saved tensors and cotangents are unpacked, taken over, filled and cleared as before",
        _changes_unpacking,
    ),
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
    Rule(
        "same-values", "a value that both traces know, and what effects take, is the same expression", _changes_values
    ),
    Rule("write-order", "who reads memory that something writes finds the same writes done", _changes_reads),
)

RULES = GRAPH_RULES + PAIR_RULES


# ---------------------------------------------------------------- text


def _error(rule: Rule, fault: Fault, graph: Graph) -> VerifyError:
    """The message that a person needs to find the fault."""
    which = "trace before the pass" if fault.in_before else "trace"
    lines = [f"{graph.stage} {which}: rule {rule.name} broken at {fault.pos}: {fault.text}", f"  law: {rule.law}"]
    lines += [f"  {name}: {describe(graph.values[name])}" for name in fault.names[:8] if name in graph.values]
    first = max(0, min(fault.pos - CONTEXT_LINES // 2, len(graph.ops) - CONTEXT_LINES))
    for pos in range(first, min(first + CONTEXT_LINES, len(graph.ops))):
        mark = ">" if pos == fault.pos else " "
        lines.append(f"  {mark}{pos:5d}  {shorten(op_lines(graph.ops[pos], graph.values)[0])}")
    lines.append(
        "  This is a bug of thunder_fusionfix; the trace before the pass is unharmed. "
        "Find the rewrite with fuel=N, switch the pass off, and report this text."
    )
    return VerifyError("\n".join(lines))


def describe(value: Value) -> str:
    """The type of a value: "cuda:0 bf16[2, 128]" where it is known, else as much as is."""
    known = type_text(value)
    return (
        known.split(": ", 1)[1].strip('"') if known is not None else f"{value.dtype or '?'} of unknown shape or device"
    )


def shorten(line: str, width: int = 160) -> str:
    """``line``, cut to ``width`` characters."""
    return line if len(line) <= width else line[: width - 3] + "..."


def _line(op: Op, new_id: Mapping[str, str]) -> str:
    """All of ``op`` on one line, sub-ops included."""
    return _spelled(op, new_id) if new_id else _own_line(op)


@kept_with_op
def _own_line(op: Op) -> str:
    return _spelled(op, {})


def _spelled(op: Op, new_id: Mapping[str, str]) -> str:
    args = [*(_text(arg) for arg in op.args), *(f"{name}={_text(arg)}" for name, arg in op.kwargs)]
    inside = f" {{{'; '.join(_line(subop, new_id) for subop in op.subops)}}}" if op.subops else ""
    return f"{_place(op, new_id)}({', '.join(args)}){inside}"


def _text(arg: Arg, names: bool = True) -> str:
    """An argument as text; ``names=False`` leaves out which value it is."""
    if names:
        return arg_text(arg)
    if isinstance(arg, Ref):
        return "_"
    if isinstance(arg, tuple):
        return f"({', '.join(_text(item, names) for item in arg)})"
    if isinstance(arg, Struct):
        return "{" + ", ".join(f"{name!r}: {_text(item, names)}" for name, item in arg.items) + "}"
    return arg_text(arg)

"""The canonical form of a fusion region: equal for two regions that are the same program, whatever their names and order.

Layers of a model are traced one by one, so equal layers give regions that differ in names, and at times in the order of
inputs, outputs and independent ops. `canonical` finds an order that only the structure decides, and writes the region down
in it, with numbers for names. That text is the key:

- **Equal keys, same program.** The key is the whole region (each op's label, which values it takes and gives, each input's
  type, which values are returned), not a digest of it. So two regions of one key map onto each other number by number.
- **Same program, equal keys**, nearly always. Ops are ordered by what leads to them and what follows from them, refined
  until nothing more is told apart. Regions so symmetric that this does not settle the order may get two keys for one
  program; then something compiles twice and nothing is wrong.

Here ``a - b`` and ``y - x`` are one region, with their inputs in opposite order:

    >>> sub = Op("sub", takes=(0, 1), gives=(2,))
    >>> one = canonical(Region(("f32[4]", "f32[4]", "f32[4]"), inputs=(0, 1), ops=(sub,), outputs=(2,)))
    >>> two = canonical(Region(("f32[4]", "f32[4]", "f32[4]"), inputs=(1, 0), ops=(sub,), outputs=(2,)))
    >>> one.key == two.key, one.inputs, two.inputs
    (True, (0, 1), (1, 0))

The refinement is the colour refinement of Weisfeiler and Leman (1968), over a DAG whose edges have an order at each op.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a region; values are numbers into `Region.types`."""

    label: str  # everything that the op is but its values: callee, constants, nesting, types
    takes: tuple[int, ...]  # in argument order; a value may come twice
    gives: tuple[int, ...]  # values that the op makes
    identity: Hashable = ()  # compared with the label, but without a say in the order: objects have no order


@dataclass(frozen=True, slots=True)
class Region:
    """A region as numbers: every value is an input or is given by one op before it is taken."""

    types: tuple[str, ...]  # of each value: dtype, shape, device
    inputs: tuple[int, ...]  # values, in the order in which the region is called
    ops: tuple[Op, ...]  # in an order that can run
    outputs: tuple[int, ...]  # values, in the order in which the region returns them


@dataclass(frozen=True, slots=True)
class Canonical:
    """A region's key, and how its own order of inputs and outputs lies in the canonical one."""

    key: Hashable
    inputs: tuple[int, ...]  # inputs[k] is the position in Region.inputs of canonical input k
    outputs: tuple[int, ...]  # outputs[k] is the position in Region.outputs of canonical output k

    def argument_order(self, other: Canonical) -> tuple[int, ...]:
        """For each input of ``self``, the position in ``other``'s inputs of the value that plays its part."""
        return _through(self.inputs, other.inputs)

    def result_order(self, other: Canonical) -> tuple[int, ...]:
        """For each output of ``self``, the position in ``other``'s outputs of the value that plays its part."""
        return _through(self.outputs, other.outputs)


def _through(mine: tuple[int, ...], theirs: tuple[int, ...]) -> tuple[int, ...]:
    order = [0] * len(mine)
    for my_pos, their_pos in zip(mine, theirs):
        order[my_pos] = their_pos
    return tuple(order)


def canonical(region: Region) -> Canonical:
    """The canonical form of ``region``.

    Raises:
        ValueError: an op takes, or the region returns, a value that is neither an input nor given before.
    """
    _check(region)
    order, numbers = _order(region, _colours(region))
    for value in sorted(set(region.inputs) - numbers.keys(), key=lambda value: (region.types[value], value)):
        numbers[value] = len(numbers)  # an input that no op takes

    def numbered(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(numbers[value] for value in values)

    inputs = sorted(range(len(region.inputs)), key=lambda pos: numbers[region.inputs[pos]])
    outputs = sorted(range(len(region.outputs)), key=lambda pos: numbers[region.outputs[pos]])
    key = (
        tuple((numbers[region.inputs[pos]], region.types[region.inputs[pos]]) for pos in inputs),
        tuple((op.label, op.identity, numbered(op.takes), numbered(op.gives)) for op in order),
        tuple(numbers[region.outputs[pos]] for pos in outputs),
    )
    return Canonical(key, tuple(inputs), tuple(outputs))


def _check(region: Region) -> None:
    known = set(region.inputs)
    for op in region.ops:
        if not known.issuperset(op.takes):
            raise ValueError(f"op {op.label} takes a value that nothing before it gives")
        if not known.isdisjoint(op.gives) or len(set(op.gives)) != len(op.gives):
            raise ValueError(f"op {op.label} gives a value that exists already")
        known.update(op.gives)
    if not known.issuperset(region.outputs):
        raise ValueError("the region returns a value that nothing gives")


@dataclass(frozen=True, slots=True)
class _Colours:
    """What tells values and ops apart; equal where nothing does."""

    values: list[str]
    ops: list[str]


def _colours(region: Region) -> _Colours:
    """Refines until a round tells nothing more apart: one or two rounds for most regions, for each has both directions."""
    colours = _Colours([_digest(kind) for kind in region.types], [""] * len(region.ops))
    told_apart = 0
    while True:
        colours = _refined(region, colours.values)
        classes = len(set(colours.values))
        if classes <= told_apart:
            return colours
        told_apart = classes


def _refined(region: Region, values: list[str]) -> _Colours:
    """One round: forwards every value learns what it comes from, backwards what comes of it."""
    origin = list(values)
    ops = [""] * len(region.ops)
    for pos, op in enumerate(region.ops):
        ops[pos] = _digest(op.label, *(origin[value] for value in op.takes))
        for slot, value in enumerate(op.gives):
            origin[value] = _digest(ops[pos], slot, values[value])
    returned = set(region.outputs)
    uses: list[list[tuple[str, int]]] = [[] for _ in region.types]
    refined = list(origin)

    def refine(value: int) -> None:
        refined[value] = _digest(origin[value], value in returned, *sorted(uses[value]))

    for pos in reversed(range(len(region.ops))):
        op = region.ops[pos]
        for value in op.gives:
            refine(value)
        ops[pos] = _digest(ops[pos], *(refined[value] for value in op.gives))
        for slot, value in enumerate(op.takes):
            uses[value].append((ops[pos], slot))
    for value in region.inputs:
        refine(value)
    return _Colours(refined, ops)


def _digest(*parts: object) -> str:
    # Not `hash`, which differs from process to process: the order must be one on every rank. A collision would cost
    # an equal order, never a wrong key.
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _order(region: Region, colours: _Colours) -> tuple[list[Op], dict[int, int]]:
    """The ops so that each comes after those it takes from, and the values numbered as these ops name them.

    Of the ops that can run, the smallest colour goes first. Of several of one colour, the one whose arguments were
    numbered first: so a chain among equal chains, once begun, keeps its place. A last tie falls to the given order.
    """
    takers: list[list[int]] = [[] for _ in region.types]
    for pos, op in enumerate(region.ops):
        for value in dict.fromkeys(op.takes):
            takers[value].append(pos)
    known = set(region.inputs)
    waiting = [len(set(op.takes) - known) for op in region.ops]
    numbers: dict[int, int] = {}
    ready: list[tuple[str, list[int], int]] = []

    def announce(pos: int) -> None:
        # Where an argument gets its number later, the op is announced again; the entry with the number sorts first.
        seniority = [numbers.get(value, len(region.types)) for value in region.ops[pos].takes]
        heapq.heappush(ready, (colours.ops[pos], seniority, pos))

    for pos, count in enumerate(waiting):
        if not count:
            announce(pos)
    order: dict[int, Op] = {}
    while ready:
        _, _, pos = heapq.heappop(ready)
        if pos in order:
            continue
        op = order[pos] = region.ops[pos]
        for value in (*op.takes, *op.gives):
            if value in numbers:
                continue
            numbers[value] = len(numbers)
            for taker in takers[value]:
                waiting[taker] -= value not in known
                if not waiting[taker] and taker not in order:
                    announce(taker)
    return list(order.values()), numbers

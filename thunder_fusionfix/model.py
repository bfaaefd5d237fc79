"""The words of the project: what a trace is once nothing of Thunder's is left in it.

A `Graph` is a printed trace as data: operations in order, each with its arguments and its outputs by name, and for every
name a `Value` with shape, dtype, device and, where they are known, strides. All facts (`alias`, `liveness`), all decisions
(`simulate`, `schedule`, `verify`, `diff`, the passes' plans) are functions of a Graph, so they run without torch, without
Thunder and without a GPU, and on a Graph that a user saved elsewhere.

Conventions: a *position* is an index into ``Graph.ops``; ranges of positions are half-open; sizes are bytes as int;
``None`` means "not known", never "zero".

    >>> x = Value("x", shape=(2, 3), dtype="bf16", device="cuda:0")
    >>> x.nbytes, x.strides is None
    (12, True)
    >>> op = Op("prims.transpose", (Ref("x"), (1, 0)), Ref("y"))
    >>> op.inputs, op.outputs
    (('x',), ('y',))
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from inspect import signature
from math import prod
from typing import Concatenate, ParamSpec, TypeVar

# Bytes of one element, by the dtype names that printed traces use.
DTYPE_BYTES: Mapping[str, int] = {
    "b8": 1,
    "i8": 1,
    "ui8": 1,
    "i16": 2,
    "ui16": 2,
    "i32": 4,
    "ui32": 4,
    "i64": 8,
    "ui64": 8,
    "f8_e4m3fn": 1,
    "f8_e4m3fnuz": 1,
    "f8_e5m2": 1,
    "f8_e5m2fnuz": 1,
    "f8_e8m0fnu": 1,
    "f4_e2m1fn_x2": 1,
    "bf16": 2,
    "f16": 2,
    "f32": 4,
    "f64": 8,
    "c32": 4,
    "c64": 8,
    "c128": 16,
}


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument or output that is a value of the trace."""

    name: str


@dataclass(frozen=True, slots=True)
class Const:
    """An argument that is neither a value nor a plain Python literal, as the trace prints it: a dtype, a device, ..."""

    text: str


@dataclass(frozen=True, slots=True)
class Struct:
    """A dict argument or output, in printed order."""

    items: tuple[tuple[str, Arg], ...]


# Lists and tuples both become tuples: Thunder's prims do not tell them apart.
Arg = Ref | Const | Struct | None | bool | int | float | complex | str | tuple["Arg", ...]


def refs(arg: Arg) -> list[str]:
    """The names of the values in ``arg``, in printed order, repeats included."""
    if isinstance(arg, Ref):
        return [arg.name]
    if isinstance(arg, Struct):
        arg = tuple(item for _, item in arg.items)
    found: list[str] = []
    if isinstance(arg, tuple):
        for item in arg:
            if isinstance(item, Ref):
                found.append(item.name)
            elif isinstance(item, (tuple, Struct)):
                found += refs(item)
    return found


def renamed(arg: Arg, names: Mapping[str, str]) -> Arg:
    """``arg`` with other names for the values that ``names`` has."""
    if isinstance(arg, Ref):
        return Ref(names.get(arg.name, arg.name))
    if isinstance(arg, tuple):
        return tuple(renamed(item, names) for item in arg)
    if isinstance(arg, Struct):
        return Struct(tuple((key, renamed(item, names)) for key, item in arg.items))
    return arg


@dataclass(frozen=True, slots=True)
class Value:
    """One named value of a trace.

    ``shape`` is None where only ``numel`` or nothing is known (text pasted from elsewhere). ``strides`` are in elements and
    None where nobody knows them: one cached trace serves inputs of several strides.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None  # "bf16", "f32", "i64", "b8": a key of DTYPE_BYTES where it is a tensor
    device: str | None = None  # "cuda:0", "cpu"
    strides: tuple[int, ...] | None = None  # elements
    kind: str = "tensor"  # "tensor", "number", "collection" or "other" (None, str, generator state, ...)
    known_numel: int | None = None  # elements, where the shape is not known but its product is

    @property
    def numel(self) -> int | None:
        """Elements of the tensor; None where not known."""
        return prod(self.shape) if self.shape is not None else self.known_numel

    @property
    def itemsize(self) -> int | None:
        """Bytes of one element; None for a dtype that is not known."""
        return DTYPE_BYTES.get(self.dtype) if self.dtype is not None else None

    @property
    def nbytes(self) -> int | None:
        """Bytes of a dense tensor of this shape: 0 for what is no tensor, None where shape or dtype is not known."""
        if self.kind != "tensor":
            return 0
        numel, itemsize = self.numel, self.itemsize
        return None if numel is None or itemsize is None else numel * itemsize


@dataclass(frozen=True)
class Op:
    """One bound symbol.

    ``id`` is the callee as the trace prints it ("prims.reshape", "torch.permute", "nvFusion3"), so that a Graph that was
    read from a trace equals the Graph that was parsed from its print.
    """

    id: str
    args: tuple[Arg, ...]
    output: Arg = None
    kwargs: tuple[tuple[str, Arg], ...] = ()
    subops: tuple[Op, ...] = ()  # what the printed trace shows indented below it; for a fusion region, what it computes
    tags: frozenset[str] = field(
        default=frozenset(), compare=False
    )  # names of Thunder's tags; printed traces lose them
    is_fusion: bool = False  # one compiled region: nvFusionN, TorchCompileN, CUDAGraphN

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that the op takes, in order of first appearance, without repeats."""
        named = [name for _, arg in self.kwargs for name in refs(arg)] if self.kwargs else ()
        return tuple(dict.fromkeys((*refs(self.args), *named)))

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that the op gives, in order, without repeats."""
        return tuple(dict.fromkeys(refs(self.output)))

    @cached_property
    def leaves(self) -> tuple[Op, ...]:
        """The op's finest sub-ops in order; the op itself where it shows none."""
        if not self.subops:
            return (self,)
        return tuple(leaf for subop in self.subops for leaf in subop.leaves)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every name that the op or one of its sub-ops takes or gives, without repeats."""
        inside = [name for subop in self.subops for name in subop.names]
        return tuple(dict.fromkeys((*self.inputs, *self.outputs, *inside)))

    def kwarg(self, name: str, default: Arg = None) -> Arg:
        """The keyword argument ``name``, or ``default``."""
        return dict(self.kwargs).get(name, default)


number_of: Callable[[object], int] = object.__hash__ if sys.implementation.name == "cpython" else id
"""Tells living objects apart, as `id` does. CPython announces each call of that to audit hooks, and torch brings one, in Python."""

Context = ParamSpec("Context")
Fact = TypeVar("Fact")


def kept_with_op(find: Callable[Concatenate[Op, Context], Fact]) -> Callable[Concatenate[Op, Context], Fact]:
    """``find``, asked once for each Op: what follows from an op alone is kept with it, as `Op.inputs` is.

    Graphs before and after a pass share the ops that the pass left alone, so they share these facts. Where a fact follows from more
    than the op, that comes as further arguments, which are plain data; the fact is then kept for the last ones.

        >>> @kept_with_op
        ... def width(op): print("looked at"); return len(op.inputs)
        >>> op = Op("prims.neg", (Ref("x"),), Ref("y"))
        >>> width(op), width(op)
        looked at
        (1, 1)
    """
    name = f"{find.__module__}.{find.__qualname__}"

    @wraps(find)
    def recall(op: Op) -> Fact:
        try:
            return op.__dict__[name]
        except KeyError:
            fact = op.__dict__[name] = find(op)  # type: ignore[call-arg]
            return fact

    @wraps(find)
    def recall_in_context(op: Op, *context: Context.args, **none: Context.kwargs) -> Fact:
        known = op.__dict__.get(name)
        if known is None or known[0] != context:
            known = op.__dict__[name] = context, find(op, *context, **none)
        return known[1]

    return recall_in_context if len(signature(find).parameters) > 1 else recall  # type: ignore[return-value]


STAGES = ("joint", "forward", "backward", "inference")


@dataclass(frozen=True)
class Graph:
    """A trace as data. Its ops include ``del``s, unpacking and the return statement, in trace order."""

    name: str  # the traced function's name: "computation", "backward_fn"
    stage: str  # one of STAGES: "joint" before the split, "inference" where nothing needs a gradient
    args: tuple[str, ...]  # the signature, flat
    ops: tuple[Op, ...]
    values: Mapping[str, Value]  # every name in args, ops and their sub-ops
    held: frozenset[str] = frozenset()  # values that the caller owns until the end: a `del` of one frees nothing
    notes: tuple[str, ...] = ()  # what was inferred or is not known (pasted text), for people

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Position of the op that first gives a name; arguments of the signature have none."""
        positions: dict[str, int] = {}
        for pos, op in enumerate(self.ops):
            for name in op.outputs:
                positions.setdefault(name, pos)
        return positions

    @cached_property
    def consumers(self) -> Mapping[str, tuple[int, ...]]:
        """Positions of the ops that take a name, ``del``s and the return included, in order."""
        positions: dict[str, list[int]] = {}
        for pos, op in enumerate(self.ops):
            for name in op.inputs:
                positions.setdefault(name, []).append(pos)
        return {name: tuple(where) for name, where in positions.items()}

    @cached_property
    def result(self) -> Arg:
        """What the trace returns; None where it has no return statement (text that was cut)."""
        last = self.ops[-1] if self.ops else None
        return last.args if last is not None and last.id == RETURN else None

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """Names that a forward trace saves for the backward, or that a backward trace takes; without repeats.

        A split forward trace returns ``(outputs, (saved tensors, other saved values))``; a backward trace unpacks the
        collections of its first argument.
        """
        if self.stage == "forward" and isinstance(self.result, tuple) and len(self.result) == 2:
            return tuple(dict.fromkeys(refs(self.result[1])))
        if self.stage != "backward" or not self.args:
            return ()
        opened, found = {self.args[0]}, []
        for op in self.ops:
            if op.id == UNPACK and set(op.inputs) <= opened:
                inner = [name for name in op.outputs if self.values[name].kind == "collection"]
                opened.update(inner)
                found += [name for name in op.outputs if name not in inner]
        return tuple(dict.fromkeys(found))


# Names under which `read` and `parse` give the statements that a trace prints in a form of their own.
RETURN = "return"
DEL = "del"
UNPACK = "unpack"  # a, b, = C0
CLEAR = "clear_mutable_collection"
EXPAND = "expand_zero_cotangents"  # of this project: gradients that nobody sent come as repeated zeros (`undefined`)
OWN = "own_cotangents"  # of this project: the trace takes the cotangents over from autograd's engine (`cotangents`)


# ---------------------------------------------------------------- facts about memory


@dataclass(frozen=True, slots=True)
class LiveRange:
    """``[start, end)`` positions during which a value's name is bound; ``end`` is ``len(ops)`` for what is returned."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Holder:
    """One storage that is alive at some point, for people: who made it, who still needs it."""

    name: str  # the value that first had the storage
    nbytes: int  # bytes as the allocator counts them
    producer: str  # id of the op that made it, or "argument"
    last_use: str  # id of the op that takes it last, "return" or "caller"
    names: tuple[str, ...] = ()  # every name that shares the storage


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a trace needs, op by op: ``live_bytes[i]`` is the most that is allocated while op ``i`` runs."""

    live_bytes: tuple[int, ...]
    peak_bytes: int
    peak_pos: int  # the first position that reaches the peak
    start_bytes: int  # allocated before the first op: arguments and what the caller holds
    lower_bound_bytes: int  # no order of these ops, with these saved tensors, needs less
    holders: tuple[Holder, ...]  # alive at the peak, largest first
    unknown: tuple[str, ...] = ()  # tensors whose bytes are not known, counted as 0


# ---------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True)
class NewOp:
    """An op that `edit` makes with Thunder's own symbol and meta; a plan gives no shapes of its own."""

    symbol: str  # a prim: "prims.reshape"
    args: tuple[Arg, ...]  # Refs are names of the trace or outputs of NewOps that come before
    output: str  # a name of the trace that this op gives from now on, or a fresh one: "%0", "%1", ...
    kwargs: tuple[tuple[str, Arg], ...] = ()


@dataclass(frozen=True, slots=True)
class Repeat:
    """A sub-op of the region that is rebuilt, over other operands: its shapes are what Thunder's meta makes of those."""

    index: int  # into the old region's subops
    renamed: tuple[tuple[str, str], ...]  # an operand or output -> the name that stands for it from now on


@dataclass(frozen=True, slots=True)
class Part:
    """One region that stands where a region stood: what it computes, in order, and what it gives."""

    body: tuple[
        int | NewOp | Repeat, ...
    ]  # an index into the old region's subops, or an op that takes the place of some
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RegionEdit:
    """A region rebuilt: one part for a region that lost or changed ops, several for a split, none for a dissolved one."""

    pos: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """A new op outside of regions, right before the op that stands at ``pos`` in the Graph that the pass read."""

    pos: int
    op: NewOp


@dataclass(frozen=True, slots=True)
class Plan:
    """What a pass wants changed. It holds for the trace whose Graph it was made from, and for no other."""

    regions: tuple[RegionEdit, ...] = ()
    placed: tuple[Placed, ...] = ()  # several at one position keep their order
    order: tuple[int, ...] | None = None  # positions in their new order, `del`s and clears left out; None: as they are
    decisions: tuple[Decision, ...] = ()
    owned: tuple[str, ...] = ()  # collections of cotangents that the trace takes over right before it unpacks them
    expanded: tuple[tuple[str, tuple[int, ...]], ...] = ()  # such a collection, and where a zero in it may be repeated

    @property
    def is_empty(self) -> bool:
        return not (self.regions or self.placed or self.owned or self.expanded or self.order)


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing that a pass did or refused, for people and for tests."""

    pass_name: str
    pos: int  # position in the Graph that the pass read
    where: str  # id of the op or region: "nvFusion0"
    what: str  # "hoisted slice_prim, reshape of t42 past convert_element_type"
    reason: str
    applied: bool
    bytes_won: int = 0  # at the place, not at the peak; negative where it costs


def fuel_left(fuel: int | None, decisions: Iterable[Decision]) -> int | None:
    """Of ``fuel`` rewrites those that may yet be made after ``decisions``; None for no limit.

    >>> fuel_left(3, [Decision("reorder", 0, "x", "moved", "", applied) for applied in (True, False)]), fuel_left(None, [])
    (2, None)
    """
    return None if fuel is None else fuel - sum(decision.applied for decision in decisions)


@dataclass(frozen=True, slots=True)
class Report:
    """What the passes did to one trace."""

    stage: str
    before: Timeline
    after: Timeline
    graph_before: Graph
    graph_after: Graph
    decisions: tuple[Decision, ...]
    seconds: float  # wall time of all passes, reading and verifying included
    kept_input: str | None = None  # why the input trace was kept although a pass had a plan

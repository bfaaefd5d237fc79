"""Carries a region's computation past a reshape that merges dims, so that the reshape need not happen.

A reshape that merges dims is a copy where its input is a slice: `logits[:, :-1]` of two sequences cannot be seen as one list
of rows. But nothing that follows may care: elementwise ops and reductions over other dims compute the same numbers over the
dims before the merge. Such a region is computed there, and a later reshape back to those dims falls away.

    t2 = prims.reshape(t1, (6, 5))      # t1: f32[2, 3, 5], a slice        %0 = prims.exp(t1)          # f32[2, 3, 5]
    t3 = prims.exp(t2)                  # t3: f32[6, 5]              ->    %1 = prims.sum(%0, (2,))    # f32[2, 3]
    t4 = prims.sum(t3, (1,))            # t4: f32[6]                 outside: t4 = reshape(%1, (6,)), a view

Only whole closures are carried: if one user of the reshape cannot be, nothing is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from thunder_fusionfix.effects import Kind, effect_of, short_name
from thunder_fusionfix.layout import Broadcast, Permute, Reshape, Same, Shape, dim_groups, layout_of
from thunder_fusionfix.model import Arg, NewOp, Op, Ref, Value


@dataclass(frozen=True, slots=True)
class Merge:
    """The one group of dims that a reshape merges: output dim ``dim`` is made from ``sizes``."""

    dim: int
    sizes: Shape


@dataclass(frozen=True, slots=True)
class Lifted:
    """A region's computation without one of its merging reshapes."""

    subops: tuple[Op, ...]  # the region's ops, the carried ones over the dims before the merge
    new_ops: Mapping[int, NewOp]  # index into subops -> how to make it; the others are the region's own
    origin: Mapping[int, int]  # index into subops -> index into the region's old subops
    values: Mapping[str, Value]  # of the new names
    outputs: Mapping[str, str]  # old region output -> the carried value that it is a reshape of
    inputs: Mapping[str, tuple[str, Shape]]  # new name -> (region input, shape): a reshape of it outside, a view


def merge_of(shape: Shape, new_shape: Shape) -> Merge | None:
    """The merge that a reshape from ``shape`` to ``new_shape`` does; None where it does anything else too.

    >>> merge_of((2, 3, 5), (6, 5))
    Merge(dim=0, sizes=(2, 3))
    >>> merge_of((6, 5), (2, 3, 5)) is None
    True
    """
    if prod(shape) == 0:
        return None
    merged = None
    for ins, outs in dim_groups(shape, new_shape):
        if len(ins) == len(outs) == 1:
            continue
        if len(outs) != 1 or len(ins) < 2 or merged is not None or ins != tuple(range(ins[0], ins[-1] + 1)):
            return None
        merged = Merge(outs[0], tuple(shape[dim] for dim in ins))
    if merged is None or (*new_shape[: merged.dim], *merged.sizes, *new_shape[merged.dim + 1 :]) != shape:
        return None
    return merged


def lift(
    subops: Sequence[Op],
    index: int,
    values: Mapping[str, Value],
    inputs: Sequence[str],
    outputs: Sequence[str],
    fresh: Iterator[str],
) -> Lifted | None:
    """The computation carried past the reshape ``subops[index]``; None where some user of it cannot be carried.

    Args:
        subops: a region's ops, in order.
        index: of a reshape that merges dims.
        values: of every name in the region.
        inputs: the region's inputs.
        outputs: the region's outputs.
        fresh: unused names.
    """
    reshape = subops[index]
    source, result = reshape.inputs[0], reshape.outputs[0]
    shape, new_shape = values[source].shape, values[result].shape
    merge = merge_of(shape, new_shape) if shape is not None and new_shape is not None else None
    if merge is None:
        return None
    carrier = _Carrier(subops, values, frozenset(inputs), frozenset(outputs), fresh, merge.sizes)
    carrier.carried[result] = (source, merge.dim)
    for position in range(index + 1, len(subops)):
        if not carrier.step(position):
            return None
    carried_outputs = {name: carrier.carried[name][0] for name in outputs if name in carrier.carried}
    if not carrier.new_ops and not carried_outputs:
        return None
    return carrier.result(index, carried_outputs)


@dataclass
class _Carrier:
    """Walks the ops after the reshape and rewrites those that see the merged dim."""

    subops: Sequence[Op]
    old_values: Mapping[str, Value]
    region_inputs: frozenset[str]
    region_outputs: frozenset[str]
    fresh: Iterator[str]
    sizes: Shape

    def __post_init__(self) -> None:
        self.carried: dict[str, tuple[str, int]] = {}  # old name -> (new name, where the merged dim stood)
        self.values: dict[str, Value] = {}
        self.new_ops: dict[int, NewOp] = {}  # by old index
        self.inputs: dict[str, tuple[str, Shape]] = {}
        self.dropped: set[int] = set()

    def step(self, index: int) -> bool:
        """Carries one op; False where it needs to be and cannot."""
        op = self.subops[index]
        if not any(name in self.carried for name in op.inputs):
            return True
        if op.kwargs or op.subops or len(op.outputs) != 1 or not op.id.startswith("prims."):
            return False
        kind = effect_of(op).kind
        if kind is Kind.POINTWISE:
            return self._pointwise(index, op)
        if kind is Kind.REDUCTION and short_name(op.id) in ("sum", "amax", "amin", "prod"):
            return self._reduction(index, op)
        if kind is Kind.LAYOUT:
            return self._layout(index, op)
        if short_name(op.id) == "pad":
            return self._pad(index, op)
        return False

    def _pointwise(self, index: int, op: Op) -> bool:
        dims = {self.carried[name][1] for name in op.inputs if name in self.carried}
        if len(dims) != 1:
            return False
        (dim,) = dims
        args: list[Arg] = []
        for arg in op.args:
            lifted = self._operand(arg, dim) if isinstance(arg, Ref) else arg
            if lifted is None and arg is not None:
                return False
            args.append(lifted)
        return self._emit(index, op, tuple(args), dim)

    def _operand(self, arg: Ref, dim: int) -> Ref | None:
        """The operand over the dims before the merge; None where that would need a computation or a copy."""
        if arg.name in self.carried:
            return Ref(self.carried[arg.name][0])
        value = self.old_values[arg.name]
        if value.kind != "tensor":
            return arg
        shape = value.shape
        if shape is None or arg.name not in self.region_inputs or dim >= len(shape) or shape[dim] != prod(self.sizes):
            return None
        name = next(self.fresh)
        new_shape = self._split(shape, dim)
        self.inputs[name] = (arg.name, new_shape)
        self.values[name] = replace(value, name=name, shape=new_shape, strides=None)
        self.carried[arg.name] = (name, dim)
        return Ref(name)

    def _reduction(self, index: int, op: Op) -> bool:
        name, dim = self.carried[op.inputs[0]]
        dims = _ints(op.args[1]) if len(op.args) == 2 else None
        if dims is None or dim in dims:
            return False
        after = dim - sum(1 for item in dims if item < dim)
        return self._emit(index, op, (Ref(name), self._shifted(dims, dim)), after)

    def _layout(self, index: int, op: Op) -> bool:
        name, dim = self.carried[op.inputs[0]]
        layout = layout_of(op, self.old_values)
        if isinstance(layout, Same):
            return self._emit(index, op, (Ref(name),), dim)
        if isinstance(layout, Permute):
            return False  # the merged dims would move as one: not seen in practice
        if isinstance(layout, Broadcast):
            after = layout.dims[dim]
            if layout.shape[after] != prod(self.sizes):
                return False
            extra = len(self.sizes) - 1
            dims: list[int] = []
            for source, where in enumerate(layout.dims):
                if source == dim:
                    dims += range(after, after + len(self.sizes))
                else:
                    dims.append(where + extra * (where > after))
            return self._emit(index, op, (Ref(name), self._split(layout.shape, after), tuple(dims)), after)
        if isinstance(layout, Reshape) and self._is_split_back(op, dim):
            self.carried[op.outputs[0]] = (name, -1)  # the very dims that were merged: nothing is left to do
            return self._undo(index, op, name)
        return False

    def _is_split_back(self, op: Op, dim: int) -> bool:
        before, after = self.old_values[op.inputs[0]].shape, self.old_values[op.outputs[0]].shape
        return before is not None and after == self._split(before, dim)

    def _undo(self, index: int, op: Op, name: str) -> bool:
        """The op gives the carried value under its old name."""
        del self.carried[op.outputs[0]]
        self.new_ops[index] = NewOp("prims.shallow_copy", (Ref(name),), op.outputs[0])
        return True

    def _pad(self, index: int, op: Op) -> bool:
        name, dim = self.carried[op.inputs[0]]
        config = op.args[2]
        if not isinstance(config, tuple) or config[dim] != (0, 0, 0):
            return False
        lifted = (*config[:dim], *(((0, 0, 0),) * len(self.sizes)), *config[dim + 1 :])
        return self._emit(index, op, (Ref(name), op.args[1], lifted), dim)

    def _emit(self, index: int, op: Op, args: tuple[Arg, ...], dim: int) -> bool:
        old, name = op.outputs[0], next(self.fresh)
        value = self.old_values[old]
        if value.shape is None:
            return False
        self.values[name] = replace(value, name=name, shape=self._split(value.shape, dim), strides=None)
        self.carried[old] = (name, dim)
        self.new_ops[index] = NewOp(op.id, args, name)
        return True

    def _split(self, shape: Shape, dim: int) -> Shape:
        return (*shape[:dim], *self.sizes, *shape[dim + 1 :])

    def _shifted(self, dims: Sequence[int], dim: int) -> tuple[int, ...]:
        return tuple(item + (len(self.sizes) - 1) * (item > dim) for item in dims)

    def result(self, reshape_index: int, outputs: Mapping[str, str]) -> Lifted:
        subops: list[Op] = []
        new_ops: dict[int, NewOp] = {}
        origin: dict[int, int] = {}
        for index, op in enumerate(self.subops):
            if index == reshape_index:
                continue
            new_op = self.new_ops.get(index)
            if new_op is not None:
                new_ops[len(subops)] = new_op
                op = Op(new_op.symbol, new_op.args, Ref(new_op.output))
            else:
                origin[len(subops)] = index
            subops.append(op)
        return Lifted(tuple(subops), new_ops, origin, self.values, outputs, self.inputs)


def _ints(arg: Arg) -> tuple[int, ...] | None:
    """The integers of a tuple of nothing else; None for anything else."""
    if not isinstance(arg, tuple):
        return None
    ints = tuple(item for item in arg if isinstance(item, int))
    return ints if len(ints) == len(arg) else None

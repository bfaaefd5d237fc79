"""Random Graphs: well-formed, small, and of all the kinds of operation that traces hold.

`random_graph` makes one from any `random.Random`; `graphs` is the same for hypothesis, which then shrinks it. Shapes, dtypes and
sub-ops are right, names are given once, what is deleted is not used again, so every Graph passes `verify`'s rules on one trace.
`renamed` makes the copy that laws are stated about.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from thunder_fusionfix.model import CLEAR, DEL, RETURN, UNPACK, Arg, Const, Graph, Op, Ref, Struct, Value

DEVICE = "cuda:0"
FLOATS = ("f32", "bf16")
_TORCH_DTYPES = {"f32": "float32", "bf16": "bfloat16", "b8": "bool8", "i64": "int64"}


def graphs(
    *,
    max_ops: int = 12,
    stages: tuple[str, ...] = ("inference", "forward", "backward"),
    fusions: bool = True,
    effects: bool = True,
    deletes: bool = True,
) -> st.SearchStrategy[Graph]:
    """Graphs of up to ``max_ops`` operations, bookkeeping not counted.

    Args:
        max_ops: most operations, those inside regions counted one by one.
        stages: which stages to draw from.
        fusions: whether runs of operations may become ``nvFusionN`` regions.
        effects: whether in-place, random and unknown operations may appear.
        deletes: whether names are deleted after their last use; else they never are.
    """
    return st.builds(
        lambda rng, num_ops, stage: random_graph(
            rng, num_ops, stage=stage, fusions=fusions, effects=effects, deletes=deletes
        ),
        st.randoms(use_true_random=False),
        st.integers(1, max_ops),
        st.sampled_from(stages),
    )


def random_graph(
    rng: random.Random,
    num_ops: int,
    *,
    stage: str = "inference",
    fusions: bool = True,
    effects: bool = True,
    deletes: bool = True,
) -> Graph:
    """One random Graph of ``num_ops`` operations; same generator state, same Graph."""
    builder = _Builder(rng, effects)
    head = builder.arguments(stage)
    for _ in range(num_ops):
        builder.add_op()
    body = [*builder.ops, builder.result(stage)]
    ops = [*head, *(_fused(rng, body) if fusions else body)]
    args = tuple(builder.args)
    if deletes:
        ops = _with_deletes(ops, frozenset(args) if stage != "backward" else frozenset())
    held = frozenset(args) if stage != "backward" else frozenset()
    name = {"backward": "backward_fn"}.get(stage, "computation")
    return Graph(name, stage, args, tuple(ops), builder.values, held=held)


@dataclass
class _Builder:
    rng: random.Random
    effects: bool
    ops: list[Op] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    args: list[str] = field(default_factory=list)
    pool: list[str] = field(default_factory=list)  # tensors that later ops may take

    def new(self, shape: tuple[int, ...], dtype: str, prefix: str = "t") -> str:
        name = f"{prefix}{len(self.values)}"
        self.values[name] = Value(name, shape, dtype, DEVICE)
        return name

    def arguments(self, stage: str) -> list[Op]:
        """Makes the arguments; gives the ops that unpack them."""
        tensors = [self.new(self.shape(), self.rng.choice(FLOATS), "a") for _ in range(self.rng.randint(1, 4))]
        self.pool += tensors
        if stage != "backward":
            self.args += tensors
            return []
        for name in ("saved_for_backward", "cotangents", "C0", "C1"):
            self.values[name] = Value(name, kind="collection")
        self.args += ["saved_for_backward", "cotangents"]
        cut = self.rng.randint(0, len(tensors) - 1)
        saved, cotangents = tensors[:cut], tensors[cut:]
        head = [Op(UNPACK, (Ref("saved_for_backward"),), (Ref("C0"), Ref("C1")))]
        head += [Op(CLEAR, (Ref("saved_for_backward"),))]
        head += [Op(UNPACK, (Ref("cotangents"),), tuple(map(Ref, cotangents))), Op(CLEAR, (Ref("cotangents"),))]
        if saved:
            head += [Op(UNPACK, (Ref("C0"),), tuple(map(Ref, saved))), Op(CLEAR, (Ref("C0"),))]
        return head

    def shape(self) -> tuple[int, ...]:
        return tuple(self.rng.choice((1, 2, 3, 4)) for _ in range(self.rng.randint(1, 3)))

    def pick(self, **want: object) -> str:
        """A tensor of the pool with the wanted attributes, late ones more often; any tensor where there is none."""
        late = self.pool[-64:]
        fitting = [name for name in late if all(getattr(self.values[name], k) == v for k, v in want.items())] or late
        return fitting[max(self.rng.randrange(len(fitting)) for _ in range(3))]

    def emit(
        self,
        op_id: str,
        args: tuple[Arg, ...],
        shape: tuple[int, ...],
        dtype: str,
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> str:
        output = self.new(shape, dtype)
        self.ops.append(Op(op_id, args, Ref(output), kwargs))
        if dtype in FLOATS:
            self.pool.append(output)
        return output

    def add_op(self) -> None:
        kinds = ["unary", "binary", "cast", "transpose", "reshape", "slice", "broadcast", "reduce", "matmul", "factory"]
        kinds += ["two_outputs", "torch"]
        kinds += ["write", "random", "unknown"] if self.effects else []
        getattr(self, f"_{self.rng.choice(kinds)}")()

    def _unary(self) -> None:
        source = self.values[self.pick()]
        op_id = self.rng.choice(("prims.neg", "prims.exp", "prims.shallow_copy"))
        self.emit(op_id, (Ref(source.name),), source.shape, source.dtype)

    def _binary(self) -> None:
        left = self.values[self.pick()]
        right = self.pick(shape=left.shape, dtype=left.dtype)
        fits = (self.values[right].shape, self.values[right].dtype) == (left.shape, left.dtype)
        second: Arg = Ref(right) if fits else self.rng.choice((2.0, 0.5, 1e-06))
        self.emit(self.rng.choice(("prims.add", "prims.mul")), (Ref(left.name), second), left.shape, left.dtype)

    def _cast(self) -> None:
        source = self.values[self.pick()]
        dtype = self.rng.choice(FLOATS)
        args = (Ref(source.name), Const(f"dtypes.{_TORCH_DTYPES[dtype]}"))
        self.emit("prims.convert_element_type", args, source.shape, dtype)

    def _transpose(self) -> None:
        source = self.values[self.pick()]
        dims = tuple(self.rng.sample(range(len(source.shape)), len(source.shape)))
        shape = tuple(source.shape[dim] for dim in dims)
        self.emit("prims.transpose", (Ref(source.name), dims), shape, source.dtype)

    def _reshape(self) -> None:
        source = self.values[self.pick()]
        shape = self.rng.choice(_factorings(source.numel))
        self.emit("prims.reshape", (Ref(source.name), shape), shape, source.dtype)

    def _slice(self) -> None:
        source = self.values[self.pick()]
        starts = tuple(self.rng.randint(0, size - 1) for size in source.shape)
        ends = tuple(self.rng.randint(start + 1, size) for start, size in zip(starts, source.shape))
        shape = tuple(end - start for start, end in zip(starts, ends))
        self.emit("prims.slice_prim", (Ref(source.name), starts, ends, (1,) * len(shape)), shape, source.dtype)

    def _broadcast(self) -> None:
        source = self.values[self.pick()]
        shape = (self.rng.randint(1, 3), *source.shape)
        dims = tuple(range(1, len(shape)))
        self.emit("prims.broadcast_in_dim", (Ref(source.name), shape, dims), shape, source.dtype)

    def _reduce(self) -> None:
        source = self.values[self.pick()]
        dim = self.rng.randrange(len(source.shape))
        shape = (*source.shape[:dim], *source.shape[dim + 1 :]) or (1,)
        if len(source.shape) > 1:
            self.emit("prims.sum", (Ref(source.name), (dim,)), shape, source.dtype)

    def _matmul(self) -> None:
        left = self.values[self.pick()]
        if len(left.shape) < 2:
            return
        columns = self.rng.randint(1, 4)
        right = self.emit("prims.full", ((left.shape[-1], columns), 1.0), (left.shape[-1], columns), left.dtype)
        self.emit("torch.matmul", (Ref(left.name), Ref(right)), (*left.shape[:-1], columns), left.dtype)

    def _factory(self) -> None:
        shape = self.shape()
        self.emit("prims.full", (shape, 0.0), shape, "f32", (("device", Const('devices.Device("cuda:0")')),))

    def _two_outputs(self) -> None:
        source = self.values[self.pick()]
        first, second = self.new(source.shape, source.dtype), self.new(source.shape, source.dtype)
        subops = tuple(Op("prims.neg", (Ref(source.name),), Ref(name)) for name in (first, second))
        self.ops.append(Op("ltorch.pair", (Ref(source.name),), (Ref(first), Ref(second)), subops=subops))
        self.pool += [first, second]

    def _torch(self) -> None:
        """A torch call over a prim, as executors print it."""
        source = self.values[self.pick()]
        dims = tuple(reversed(range(len(source.shape))))
        output = self.new(tuple(reversed(source.shape)), source.dtype)
        prim = Op("prims.transpose", (Ref(source.name), dims), Ref(output))
        middle = Op("ltorch.permute", (Ref(source.name), dims), Ref(output), subops=(prim,))
        self.ops.append(Op("torch.permute", (Ref(source.name), dims), Ref(output), subops=(middle,)))
        self.pool.append(output)

    def _write(self) -> None:
        target = self.values[self.pick()]
        source = self.pick(shape=target.shape, dtype=target.dtype)
        if self.values[source].shape == target.shape and source != target.name:
            self.emit("prims.copy_", (Ref(source), Ref(target.name)), target.shape, target.dtype)

    def _random(self) -> None:
        shape = self.shape()
        self.emit("prims.uniform", (shape, 0.0, 1.0), shape, "f32", (("dtype", Const("dtypes.float32")),))

    def _unknown(self) -> None:
        source = self.values[self.pick()]
        self.emit("mystery.op", (Ref(source.name), "mode", None, True), source.shape, source.dtype)

    def result(self, stage: str) -> Op:
        outputs = tuple(Ref(self.pick()) for _ in range(self.rng.randint(1, 3)))
        if stage != "forward":
            return Op(RETURN, (outputs,))
        saved = tuple(map(Ref, sorted({self.pick() for _ in range(self.rng.randint(0, 4))})))
        flat_args = tuple(map(Ref, self.args))
        packed = Struct((("output", outputs), ("flat_args", flat_args), ("flat_output", outputs)))
        return Op(RETURN, (packed, (saved, ())))


def _factorings(numel: int) -> list[tuple[int, ...]]:
    pairs = [(first, numel // first) for first in range(1, numel + 1) if numel % first == 0]
    return [(numel,), *pairs, *((1, *pair) for pair in pairs)]


_FUSIBLE = frozenset(
    f"prims.{name}"
    for name in ("neg", "exp", "shallow_copy", "add", "mul", "convert_element_type", "transpose", "reshape")
    + ("slice_prim", "broadcast_in_dim", "sum", "full")
)


def _fused(rng: random.Random, ops: list[Op]) -> list[Op]:
    """The ops with some runs of fusible ones gathered into regions, which give what is used later."""
    last_use = {name: pos for pos, op in enumerate(ops) for name in op.inputs}
    result: list[Op] = []
    index, count = 0, 0
    while index < len(ops):
        run = ops[index : index + rng.randint(1, 5)]
        run = run[: next((i for i, op in enumerate(run) if op.id not in _FUSIBLE), len(run))]
        if not run or rng.random() < 0.4:
            result.append(ops[index])
            index += 1
            continue
        index += len(run)
        made = [name for op in run for name in op.outputs]
        inputs = dict.fromkeys(name for op in run for name in op.inputs if name not in made)
        outputs = [name for name in made if last_use.get(name, 0) >= index] or made[-1:]
        region = Op(
            f"nvFusion{count}", tuple(map(Ref, inputs)), tuple(map(Ref, outputs)), subops=tuple(run), is_fusion=True
        )
        result.append(region)
        count += 1
    return result


def _with_deletes(ops: list[Op], kept: frozenset[str]) -> list[Op]:
    """The ops with a ``del`` after the last use of every name that is not returned."""
    last: dict[str, int] = {}
    for pos, op in enumerate(ops):
        for name in (*op.outputs, *op.inputs):
            last[name] = pos
    returned = set(ops[-1].inputs)
    result: list[Op] = []
    for pos, op in enumerate(ops):
        result.append(op)
        dying = [name for name in (*op.inputs, *op.outputs) if last[name] == pos and name not in returned | kept]
        if dying and op.id != RETURN and op.id != UNPACK:
            result.append(Op(DEL, tuple(map(Ref, dict.fromkeys(dying)))))
    return result


# ---------------------------------------------------------------- copies


def renamed(graph: Graph, rng: random.Random) -> Graph:
    """The same Graph under other names: values, and regions by number."""
    names = list(graph.values)
    fresh = [f"r{index}" for index in range(len(names))]
    rng.shuffle(fresh)
    new = dict(zip(names, fresh))
    if graph.stage == "backward":  # these two names tell the stage
        new |= {name: name for name in graph.args}
    numbers = [op.id.removeprefix("nvFusion") for op in graph.ops if op.is_fusion]
    shuffled_numbers = rng.sample(numbers, len(numbers))
    regions = {f"nvFusion{old}": f"nvFusion{fresh}" for old, fresh in zip(numbers, shuffled_numbers)}

    def of_arg(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(new[arg.name])
        if isinstance(arg, tuple):
            return tuple(map(of_arg, arg))
        if isinstance(arg, Struct):
            return Struct(tuple((key, of_arg(item)) for key, item in arg.items))
        return arg

    def of_op(op: Op) -> Op:
        return Op(
            regions.get(op.id, op.id),
            tuple(map(of_arg, op.args)),
            of_arg(op.output),
            tuple((key, of_arg(arg)) for key, arg in op.kwargs),
            tuple(map(of_op, op.subops)),
            op.tags,
            op.is_fusion,
        )

    return Graph(
        graph.name,
        graph.stage,
        tuple(new[name] for name in graph.args),
        tuple(map(of_op, graph.ops)),
        {new[name]: replace(value, name=new[name]) for name, value in graph.values.items()},
        frozenset(new[name] for name in graph.held),
        graph.notes,
    )

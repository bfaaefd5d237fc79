"""What a trace needs in GPU memory, op by op, and what any order of the same ops would need.

The model. An op's outputs are allocated, the op runs with its temporaries, and a storage is freed at the ``del`` of the last of
its names: frees take effect in host order, and nvFuser holds a fusion's inputs until it returns. Every storage takes whole
blocks of 512 bytes, as in PyTorch's allocator. Views take nothing (`alias`), a layout that may be a copy is taken for one.
A region's temporaries are those of `segments`; those of the entry's matmuls, what they copy (`matmul_copies`); those of attention's
backward, what its kernel accumulates in (`attention_workspace`).

Before the first op stand the arguments and what the caller holds. In a backward trace the saved tensors sit in collections:
they are freed by ``del`` once their collection is unpacked and cleared, unless the caller owns them, which ``Graph.held`` says
(a forward's arguments: parameters and inputs). The cotangents are cleared alike; but where Thunder's autograd function is not
split (ThunderFX sets ``thunderfx_disable_split_autograd=True``) the engine holds them until the backward returns, unless the
trace takes them over. That is membership in ``Graph.held`` too: `hold_cotangents` gives the Graph that says so. Plain
``thunder.jit`` frees them: the default. Each cotangent counts in full, as when it is sent: one trace alone does not tell which are not, and which
of these come as one repeated zero (`expand_zero_cotangents`); a whole step does (`step`).

A trace without any ``del`` (a joint trace) is priced as if ``del_last_used`` had placed them, and so is every order other than
the trace's own.

Left out: cuBLAS workspaces, what any other operator allocates while it runs, fragmentation, and the up to 1 MiB that the
allocator leaves unsplit at the end of a large block.

    >>> from thunder_fusionfix.model import Graph, Op, Ref, Value
    >>> f32 = {name: Value(name, (1024,), "f32", "cuda:0") for name in "xyz"}
    >>> ops = (
    ...     Op("torch.exp", (Ref("x"),), Ref("y")), Op("torch.exp", (Ref("y"),), Ref("z")),
    ...     Op("del", (Ref("y"),)), Op("return", (Ref("z"),)),
    ... )
    >>> timeline = simulate(Graph("f", "inference", ("x",), ops, f32, held=frozenset("x")))
    >>> timeline.live_bytes, timeline.start_bytes, timeline.lower_bound_bytes
    ((8192, 12288, 12288, 8192), 4096, 12288)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from thunder_fusionfix.alias import Aliases, aliases
from thunder_fusionfix.attention_workspace import is_attention_backward, workspace_of
from thunder_fusionfix.effects import Kind, effect_of
from thunder_fusionfix.matmul_copies import copies_of, product_of
from thunder_fusionfix.model import CLEAR, DEL, OWN, RETURN, UNPACK, Graph, Holder, Op, Timeline
from thunder_fusionfix.segments import Temporaries, temporaries_of

BLOCK_BYTES = 512  # PyTorch's CUDA allocator rounds every request up to this

# Steps that the lower bound looks at before it settles for what it has; it is sound wherever it stops. About 0.05 s.
_BOUND_VISITS = 40_000


def rounded(nbytes: int) -> int:
    """Bytes that the allocator gives for a request of ``nbytes``.

    >>> rounded(0), rounded(1), rounded(512), rounded(513)
    (0, 512, 512, 1024)
    """
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def simulate(graph: Graph, order: Sequence[int] | None = None, forward: Graph | None = None) -> Timeline:
    """The Timeline of ``graph``.

    Args:
        graph: any Graph.
        order: positions of its ops, each at most once, in the order to price. ``del``s and clears may be left out and do nothing
            where they stand: they are placed right after each last use, as Thunder does. None is the trace as it is.
        forward: for a backward Graph, the forward that saved its tensors (`aliases`).

    Raises:
        ValueError: ``order`` leaves out an op, names one twice, or uses a value before it is made.
    """
    return Prices(graph, forward).timeline(order)


def hold_cotangents(graph: Graph) -> Graph:
    """The backward ``graph`` under an engine that holds the cotangents until the backward returns (ThunderFX).

    Those that the trace takes over (`passes.own_cotangents`) are its own: their ``del`` frees them.
    """
    if graph.stage != "backward" or len(graph.args) < 2:
        return graph
    opened, owned, found = set(graph.args[1:]), set[str](), set[str]()
    for op in graph.ops:
        if op.id == OWN:
            owned.update(op.inputs)
        elif op.id == UNPACK and opened.intersection(op.inputs):
            opened.update(op.outputs)
            found.update(() if owned.issuperset(op.inputs) else op.outputs)
    return replace(graph, held=graph.held | found)


def computing(graph: Graph) -> tuple[int, ...]:
    """Positions of the ops that compute: neither bookkeeping nor layouts, most of which are views."""
    kinds = (Kind.BOOKKEEPING, Kind.LAYOUT)
    return tuple(pos for pos, op in enumerate(graph.ops) if effect_of(op).kind not in kinds)


def start_of_backward_peak(graph: Graph, timeline: Timeline) -> int:
    """The most bytes at the first tenth of a backward trace's computing ops, where all that was saved is alive."""
    calls = computing(graph)
    return max((timeline.live_bytes[pos] for pos in calls[: -(-len(calls) // 10)]), default=timeline.start_bytes)


class Prices:
    """A Graph made ready to price many orders of its ops.

    A scheduler asks `peak_of` or `live_of` for each order that it tries; both take time linear in ops and uses.

    Attributes:
        steps: positions of the ops that an order arranges: all but ``del``s and clears.
        aliases: the storages; their ids index what follows.
        sizes, is_outside, is_kept: by storage: bytes in whole blocks; whether it is there before the first op; whether it
            stays to the end, returned or owned by the caller.
        makes, made_bytes, uses: by position: storages that the op allocates, with their bytes, and those that it makes or takes.
        temporaries, temporary_bytes: by position: what a region, a matmul or attention's backward writes for itself, and how much of
            it at once.
        start_bytes: allocated before the first op.
        unknown: tensors whose size is not known, counted as 0.

        >>> from thunder_fusionfix.model import Graph, Op, Ref, Value
        >>> f32 = {name: Value(name, (1024,), "f32", "cuda:0") for name in "xyz"}
        >>> ops = (Op("torch.exp", (Ref("x"),), Ref("y")), Op("torch.sin", (Ref("x"),), Ref("z")), Op("return", (Ref("z"),)))
        >>> prices = Prices(Graph("f", "inference", ("x",), ops, f32, held=frozenset("x")))
        >>> prices.steps, prices.peak_of((0, 1, 2)), prices.live_of((1, 0, 2))
        ((0, 1, 2), 8192, [8192, 12288, 8192])
    """

    def __init__(self, graph: Graph, forward: Graph | Aliases | None = None) -> None:
        self.graph = graph
        self._forward = aliases(forward) if isinstance(forward, Graph) else forward
        self.aliases: Aliases = aliases(graph, self._forward)
        self.unknown: list[str] = []
        self.sizes: tuple[int, ...] = tuple(self._size(storage) for storage in range(len(self.aliases.storages)))
        num = len(graph.ops)
        self.steps: tuple[int, ...] = tuple(pos for pos, op in enumerate(graph.ops) if op.id not in (DEL, CLEAR))
        self.makes: list[tuple[int, ...]] = [()] * num  # by position: storages that the op allocates
        self.made_bytes: list[int] = [0] * num
        self.uses: list[tuple[int, ...]] = [()] * num  # by position: storages that the op makes or takes
        self.temporaries: list[Temporaries | None] = [None] * num
        self.temporary_bytes: list[int] = [0] * num
        self._trace_uses()
        result = {
            self.aliases.storage_of[name]
            for op in graph.ops[-1:]
            if op.id == RETURN
            for name in self._tensors(op.inputs)
        }
        held = {self.aliases.storage_of[name] for name in self._tensors(self._held_names())}
        self.is_outside: tuple[bool, ...] = tuple(storage.is_outside for storage in self.aliases.storages)
        # returned, or the caller's: alive to the end
        self.is_kept: tuple[bool, ...] = tuple(id in result or id in held for id in range(len(self.sizes)))
        self.start_bytes = sum(size for size, outside in zip(self.sizes, self.is_outside) if outside)

    def _held_names(self) -> Iterable[str]:
        """What the caller owns, and what the forward saved as a view of it: a transposed weight is the weight."""
        shared = self._forward
        if shared is None:
            return self.graph.held
        owned = {shared.storage_of[name] for name in self.graph.held if name in shared.storage_of}
        # by the saved names alone: others of the forward's may stand for something else here
        return [*self.graph.held, *(name for name in self.graph.saved if shared.storage_of.get(name) in owned)]

    def _size(self, id: int) -> int:
        storage = self.aliases.storages[id]
        if not self._on_device(storage.root):
            return 0
        if storage.nbytes is None:
            self.unknown.append(storage.root)
            return 0
        return rounded(storage.nbytes)

    @cached_property
    def _has_gpu(self) -> bool:
        return any(value.device is not None and value.device.startswith("cuda") for value in self.graph.values.values())

    def _on_device(self, name: str) -> bool:
        """True where the tensor counts: on a GPU, or anywhere in a trace that has no GPU tensor."""
        device = self.graph.values[name].device
        return not self._has_gpu or device is None or device.startswith("cuda")

    def _tensors(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in self.aliases.storage_of]

    def _trace_uses(self) -> None:
        storage_of = self.aliases.storage_of
        made = {storage.id for storage in self.aliases.storages if storage.is_outside}
        for pos in self.steps:
            op = self.graph.ops[pos]
            touched = tuple(dict.fromkeys([storage_of[name] for name in self._tensors((*op.inputs, *op.outputs))]))
            self.uses[pos] = touched
            fresh = tuple([id for id in touched if id not in made])
            self.makes[pos] = fresh
            self.made_bytes[pos] = sum([self.sizes[id] for id in fresh])
            made.update(fresh)
            if (find := _temporaries_by(op)) is not None and self._on_gpu(op):
                found = find(op, self.graph.values, self.aliases.strides)
                self.temporaries[pos] = found
                self.temporary_bytes[pos] = sum(rounded(nbytes) for _, nbytes in found.at_peak)

    def _on_gpu(self, op: Op) -> bool:
        return any(self._on_device(name) for name in self._tensors((*op.inputs, *op.outputs)))

    # ------------------------------------------------ prices

    @cached_property
    def _freed(self) -> list[tuple[int, int]]:
        """Storages that are freed after their last use, with their bytes."""
        return [
            (id, size)
            for id, (size, kept, users) in enumerate(zip(self.sizes, self.is_kept, self._users))
            if size and users and not kept
        ]

    def live_of(self, order: Sequence[int]) -> list[int]:
        """Bytes allocated while each op of ``order`` runs; ``order`` holds each of ``steps`` once."""
        uses, made, temporary = self.uses, self.made_bytes, self.temporary_bytes
        last_use = [0] * len(self.sizes)
        for at, pos in enumerate(order):
            for id in uses[pos]:
                last_use[id] = at
        freed = [0] * len(order)
        for id, size in self._freed:
            freed[last_use[id]] += size
        live, found = self.start_bytes, []
        for pos, ending in zip(order, freed):
            live += made[pos]
            found.append(live + temporary[pos])
            live -= ending
        return found

    def peak_of(self, order: Sequence[int]) -> int:
        """The most bytes that ``order`` needs at any op."""
        return max(self.live_of(order), default=self.start_bytes)

    # ------------------------------------------------ timelines

    def timeline(self, order: Sequence[int] | None = None) -> Timeline:
        """The Timeline of ``order``, or of the trace as it is.

        Raises:
            ValueError: as `simulate`.
        """
        has_dels = any(op.id == DEL for op in self.graph.ops)
        if order is None:
            order = range(len(self.graph.ops))
        else:
            self.check_order(order)
            has_dels = False
        births, deaths = self._lifetimes(order, as_it_is=has_dels)
        live = self._replay(order, births, deaths)
        peak = max(live, default=self.start_bytes)
        peak_pos = live.index(peak) if live else 0
        return Timeline(
            live_bytes=tuple(live),
            peak_bytes=peak,
            peak_pos=peak_pos,
            start_bytes=self.start_bytes,
            # a broken trace may delete what it takes later, and so need less than is possible
            lower_bound_bytes=min(peak, self.lower_bound),
            holders=self._holders(order, peak_pos, births, deaths) if live else (),
            unknown=tuple(self.unknown),
        )

    def check_order(self, order: Sequence[int]) -> None:
        """Raises `ValueError` where ``order`` is no order of the Graph's ops that makes each value before its use."""
        seen = set(order)
        if len(seen) != len(order) or not seen.issuperset(self.steps) or not seen.issubset(range(len(self.graph.ops))):
            raise ValueError(f"an order names each of the {len(self.steps)} ops of {self.graph.name} once")
        index = {pos: at for at, pos in enumerate(order)}
        for pos in self.steps:
            for before in self.needs[pos]:
                if index[before] > index[pos]:
                    raise ValueError(
                        f"the order runs {self.graph.ops[pos].id} at {pos} before {self.graph.ops[before].id} at {before}"
                    )

    def _lifetimes(self, order: Sequence[int], *, as_it_is: bool) -> tuple[list[int], list[int]]:
        """By storage: index in ``order`` of the op that makes it (-1: there before), and of the one after which it is freed."""
        end = len(order)
        births = [-1] * len(self.sizes)
        deaths = [end] * len(self.sizes)
        for at, pos in enumerate(order):
            for id in self.makes[pos]:
                births[id] = at
        last = self._last_owned(order) if as_it_is else self._last_used(order)
        for id, at in last.items():
            if not self.is_kept[id]:
                deaths[id] = at
        return births, deaths

    def _last_used(self, order: Sequence[int]) -> dict[int, int]:
        return {id: at for at, pos in enumerate(order) for id in self.uses[pos]}

    def _last_owned(self, order: Sequence[int]) -> dict[int, int]:
        """By storage: where its last owner, a name or a collection, lets it go; nothing for one that is never let go."""
        owners = _Owners(self.aliases)
        for name in self.graph.args:
            owners.bind(name)
        for at, pos in enumerate(order):
            owners.step(at, self.graph.ops[pos])
        return owners.freed

    def _replay(self, order: Sequence[int], births: list[int], deaths: list[int]) -> list[int]:
        change = [0] * (len(order) + 1)
        for size, born, dies in zip(self.sizes, births, deaths):
            if born >= 0:
                change[born] += size
            if dies < len(order):
                change[dies + 1] -= size
        live, found = self.start_bytes, []
        for at, pos in enumerate(order):
            live += change[at]
            found.append(live + self.temporary_bytes[pos])
        return found

    def _holders(self, order: Sequence[int], at: int, births: list[int], deaths: list[int]) -> tuple[Holder, ...]:
        """What is alive while the op at index ``at`` runs, largest first."""
        last_user = {id: self.graph.ops[order[last]].id for id, last in self._last_used(order).items()}
        found = []
        for storage, size, born, dies in zip(self.aliases.storages, self.sizes, births, deaths):
            if not size or not born <= at <= dies:
                continue
            last = last_user.get(storage.id, "caller")
            if self.is_kept[storage.id] and last != RETURN:
                last = "caller"
            found.append(Holder(storage.root, size, self._producer(storage.root, order, born), last, storage.names))
        op, temporaries = self.graph.ops[order[at]], self.temporaries[order[at]]
        for name, nbytes in temporaries.at_peak if temporaries is not None else ():
            found.append(Holder(name, rounded(nbytes), op.id, op.id, (name,)))
        return tuple(sorted(found, key=lambda holder: -holder.nbytes))

    def _producer(self, root: str, order: Sequence[int], born: int) -> str:
        if born >= 0:
            return self.graph.ops[order[born]].id
        return "argument" if root in self.graph.args else self._unpacked_as.get(root, "argument")

    @cached_property
    def _unpacked_as(self) -> dict[str, str]:
        """What an unpacked tensor is: one that the forward saved, or a cotangent."""
        saved = set(self.graph.saved)
        return {
            name: "saved tensor" if name in saved else "cotangent"
            for op in self.graph.ops
            if op.id == UNPACK
            for name in op.outputs
        }

    # ------------------------------------------------ lower bound

    @cached_property
    def needs(self) -> dict[int, tuple[int, ...]]:
        """By position of a step: the steps whose outputs it takes."""
        producer = self.graph.producer
        return {
            pos: tuple(
                dict.fromkeys(producer[name] for name in self.graph.ops[pos].inputs if producer.get(name, pos) < pos)
            )
            for pos in self.steps
        }

    @cached_property
    def needed_by(self) -> dict[int, tuple[int, ...]]:
        """By position of a step: the steps that take its outputs."""
        found: dict[int, list[int]] = {pos: [] for pos in self.steps}
        for pos, before in self.needs.items():
            for producer in before:
                found[producer].append(pos)
        return {pos: tuple(after) for pos, after in found.items()}

    @cached_property
    def lower_bound(self) -> int:
        """Bytes that every order of the ops needs at some op.

        For an op ``i``, count what is alive while it runs *whatever the order*:

        - its temporaries and every storage that it takes or makes;
        - a storage that was there before the first op, if the caller keeps it, if no op takes it, or if an op that needs ``i``
          takes it: that op runs later, and memory is freed after its last use;
        - a storage made by an op that ``i`` needs, if it is returned or if an op that needs ``i`` takes it: it is made before and
          used after.

        Each holds in every order that makes values before their use, so the sum is a bound for each ``i``, and so is the largest
        sum over any set of ops. Since no order beats its own sums, an op at which the trace's own order has not more alive than the
        best sum so far cannot raise it: ops are tried by falling live bytes until then, or until a fixed amount of work is done.
        """
        live = dict(zip(self.steps, self.live_of(self.steps)))
        best = self.start_bytes
        budget = _BOUND_VISITS
        for pos in sorted(self.steps, key=lambda pos: -live[pos]):
            if live[pos] <= best or budget <= 0:
                break
            before, after = _closure(pos, self.needs), _closure(pos, self.needed_by)
            budget -= len(before) + len(after) + len(self._outside)
            best = max(best, self._certain_bytes(pos, before, after))
        return best

    @cached_property
    def _outside(self) -> tuple[int, ...]:
        return tuple(id for id, outside in enumerate(self.is_outside) if outside and self.sizes[id])

    @cached_property
    def _users(self) -> list[list[int]]:
        """By storage: positions of the steps that use it."""
        users: list[list[int]] = [[] for _ in self.sizes]
        for pos in self.steps:
            for id in self.uses[pos]:
                users[id].append(pos)
        return users

    def _certain_bytes(self, pos: int, before: set[int], after: set[int]) -> int:
        """Bytes alive at ``pos`` in every order; ``before`` and ``after`` hold ``pos`` itself."""
        users, kept, sizes = self._users, self.is_kept, self.sizes
        alive = set(self.uses[pos])
        for id in self._outside:
            if kept[id] or not users[id] or not after.isdisjoint(users[id]):
                alive.add(id)
        for earlier in before:
            for id in self.makes[earlier]:
                if kept[id] or not after.isdisjoint(users[id]):
                    alive.add(id)
        return self.temporary_bytes[pos] + sum(sizes[id] for id in alive)


def _temporaries_by(op: Op) -> Callable[..., Temporaries] | None:
    """What finds the memory that ``op`` needs for itself; None for an op that needs none that we know of."""
    if op.is_fusion:
        return temporaries_of
    if is_attention_backward(op):
        return workspace_of
    return copies_of if product_of(op) is not None else None


def _closure(pos: int, edges: dict[int, tuple[int, ...]]) -> set[int]:
    """``pos`` and all that is reached from it along ``edges``."""
    found, todo = {pos}, [pos]
    while todo:
        for other in edges[todo.pop()]:
            if other not in found:
                found.add(other)
                todo.append(other)
    return found


class _Owners:
    """Follows who holds each storage while a trace runs as it is: names, and collections that were not cleared."""

    def __init__(self, shared: Aliases) -> None:
        self.storage_of = shared.storage_of
        self.count = [0] * len(shared.storages)
        self.content: dict[str, tuple[str, ...]] = {}  # an unpacked collection to what it still holds
        self.parent: dict[str, str] = {}  # a collection to the one that it was unpacked from
        self.freed: dict[int, int] = {}  # storage to the index where its last owner let go

    def bind(self, name: str) -> None:
        if name in self.storage_of:
            self.count[self.storage_of[name]] += 1

    def release(self, name: str, at: int) -> None:
        id = self.storage_of.get(name)
        if id is None:
            return
        self.count[id] -= 1
        if not self.count[id]:
            self.freed[id] = at

    def step(self, at: int, op: Op) -> None:
        if op.id == CLEAR:
            for name in op.inputs:
                self.empty(name, at)
        elif op.id == DEL:
            for name in op.inputs:
                self.release(name, at)
                # the caller still holds a list whose parent was not cleared
                if name in self.content and self.content.get(self.parent.get(name, name)) == ():
                    self.empty(name, at)
        elif op.id == UNPACK:
            for source in op.inputs[:1]:
                self.content[source] = op.outputs
                self.parent.update(dict.fromkeys(op.outputs, source))
            for name in op.outputs:
                self.bind(name)  # as a name
                self.bind(name)  # as a part of the collection
        else:
            for name in op.outputs:
                if name not in op.inputs:
                    self.bind(name)

    def empty(self, collection: str, at: int) -> None:
        content, self.content[collection] = self.content.get(collection, ()), ()
        for name in content:
            self.release(name, at)

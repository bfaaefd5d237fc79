"""Tensors that need not be saved for the backward, because cheap ops make them again from what is saved anyway.

Thunder's own rematerialization looks at pairs of fusions; a value that a matmul takes in both halves (the input of a layer's
down projection, of its q, k and v projections, expanded keys and values) is saved although its factors are saved too. A minimum
cut says which values to save instead; each value that is dropped is made anew next to the backward ops that take it.

    before                                             after
    t9 = mul(silu(t7), t8)      # forward              t9 = mul(silu(t7), t8)
    t10 = linear(t9, w)                                t10 = linear(t9, w)
    ...                                                ...
    t21 = matmul(t20, w)        # backward             t21 = matmul(t20, w)
    t22 = matmul(t20.mT, t9)    # t9 is saved          t7b = after(t7, t21)
                                                       t9b = mul(silu(t7b), t8)
                                                       t22 = matmul(t20.mT, t9b)

Why `after`: a fusion pass that goes by dataflow runs everything as soon as it can, and what is made from saved tensors alone can
run at the start of the backward, for all layers at once, in one merged region. `after` is the tensor itself, but it waits for
a gradient that the consumer's neighbourhood makes. It also keeps nvFuser's CSE from merging the clone with its original.

Stage: joint (executor entry), before the later fusion executors. Needs: a dry run of them, which says what they save. Keeps: the
forward, every random op, in-place update, matmul and reduction. Changes: what is saved, and when cheap ops run.

Never from storage that the trace writes anywhere, never past Thunder's checkpoint tags, never through an op without a row in
`effects`. Never from a rounded value where the forward computed with what was not rounded: of a cast to bf16 and back nvFuser's
pass leaves nothing, so what the forward made of `x.bfloat16().float()` it made of `x`, and a rebuild starts at `x` or before. A dropped tensor must free more than making it again costs: `Level.max_traffic`.

Under ``memory_budget`` the default's rebuilds stay, and the entry adds as many of `Further` as are needed: by cheap ops, copies and
reductions at any cost, and with one matmul on the way from what is saved to a rebuilt tensor (attention scores, the projections of
an MLP), which is one layer's and no more. One minimum cut says what could be dropped at most. Any part of that is a plan, because a
chain starts at whatever is still saved; they are taken in order of the time that a byte freed costs, and of two that cost the same
first the one that the backward needs last, so that what stays to be freed early is freed early.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from thunder_fusionfix.alias import Aliases
from thunder_fusionfix.config import FusionFixConfig
from thunder_fusionfix.effects import Kind, short_name
from thunder_fusionfix.joint import (
    FIXED,
    GET_GRAD,
    RECOMPUTED,
    Anchor,
    Clone,
    Insert,
    JointFacts,
    JointPlan,
    Moved,
    Site,
    effects_of,
    equal_values,
    is_layout_chain,
    joint_result,
    op_at,
    sites,
)
from thunder_fusionfix.mincut import INFINITE, min_cut
from thunder_fusionfix.model import Decision, Op, refs

NAME = "recompute_cheap"

NEW_SAVE = 1.25
"""Price of a byte that would be saved instead of others, beside 1 for a byte that may be dropped: no change for a small gain."""


@dataclass(frozen=True, slots=True)
class Level:
    """How far to go for memory."""

    kinds: frozenset[Kind] = frozenset()  # of ops that may run again beside those that the table calls cheap
    max_traffic: float = float("inf")  # bytes that a rebuild may move for each byte that it frees
    max_chain: int = 256  # ops that one rebuild may take
    takes_over: bool = True  # decides all that is saved; else only drops from what later executors would save
    repeats_matmuls: bool = False  # one on the way from what is saved to a rebuilt tensor


# A product of two saved tensors moves 3 bytes for each that it frees, an expanded key 1.3.
DEFAULT = Level(max_traffic=4.0, max_chain=64, takes_over=False)

FURTHER = Level(frozenset({Kind.MOVE, Kind.REDUCTION}), repeats_matmuls=True)
"""All that a budget may ask for."""

FLOPS_PER_BYTE = 200
"""Operations of a matmul that take as long as moving one byte: about what the data sheets of A100, H100 and H200 give for bf16."""

KERNEL_BYTES = 2**24
"""Bytes that such a GPU moves in the time that one more kernel takes to start."""

MATMUL_MUST_FREE = 2.0
"""Bytes that a repeated matmul must free for each byte that is saved in its place."""

SPAN = 8
"""Uses of a rebuilt tensor that lie within this many kernels share one rebuild; the three projections of a layer are six."""


@dataclass(frozen=True, slots=True)
class Uses:
    """Backward ops that take a dropped tensor and share one rebuild."""

    consumers: tuple[int, ...]  # positions that take the tensor itself
    first: int  # position of the first op that cannot run before its gradient is there


@dataclass(frozen=True, slots=True)
class Rebuild:
    """How one dropped tensor is made again."""

    name: str
    chain: tuple[Site, ...]  # ops to repeat, in order
    sources: tuple[str, ...]  # saved values that they start from
    uses: tuple[Uses, ...]
    freed_bytes: int  # less what is saved for it
    traffic_bytes: int  # what all its rebuilds read and write


def plan_recompute_cheap(facts: JointFacts, config: FusionFixConfig, fuel: int | None = None) -> JointPlan:
    """Which saved tensors to drop and where to make them again, where that costs little.

    Args:
        facts: a joint trace.
        config: options; ``recompute_min_bytes`` bounds what is looked at.
        fuel: at most so many tensors.
    """
    search = _Search(facts, config.recompute_min_bytes)
    return _planned(search, search.run()[:fuel])


def _planned(search: _Search, rebuilds: Sequence[Rebuild]) -> JointPlan:
    plan = _Writer(search.facts, search).write(rebuilds) if rebuilds else JointPlan()
    decisions = [_applied(search.facts, rebuild) for rebuild in rebuilds]
    decisions += [_refused(search.facts, name, why) for name, why in search.kept.items()]
    return JointPlan(plan.inserts, plan.renamed, plan.exports, decisions=tuple(decisions))


def num_matmuls(facts: JointFacts, plan: JointPlan) -> int:
    """Matmuls that ``plan`` repeats."""
    clones = (insert.what for insert in plan.inserts if isinstance(insert.what, Clone))
    return sum(_is_matmul(op_at(facts.joint, clone.site)) for clone in clones)


def _is_matmul(op: Op) -> bool:
    return any(effect.kind is Kind.MATMUL for effect in effects_of(op))


# ---------------------------------------------------------------- what may be done


@dataclass
class _Search:
    """Finds the tensors that need not be saved.

    Values that the same cheap op makes of the same inputs are one value here, named after the first of them: a later fusion
    pass merges them, so what it saves may be any of them.
    """

    facts: JointFacts
    min_bytes: int
    level: Level = DEFAULT
    kept: dict[str, str] = field(default_factory=dict)  # tensors that stay saved although ops could make them, and why
    left: set[str] = field(default_factory=set)  # what is saved at the end
    opened: set[str] = field(default_factory=set)  # outputs of matmuls that are repeated
    pinned: set[str] = field(default_factory=set)  # what those start from: it is not made by another repeated matmul

    def run(self) -> list[Rebuild]:
        """The rebuilds that win, the cheapest for what it frees first, those that win only together side by side."""
        while True:
            self.opened, self.pinned = set(), set()
            rebuilds = self.propose()
            by_memory: dict[str, list[Rebuild]] = {}
            for rebuild in rebuilds:
                by_memory.setdefault(self.mates(rebuild.name)[0], []).append(rebuild)
            if all([self.pays(mates) for mates in by_memory.values()]):  # noqa: C419 -- each notes why not
                groups = [self.priced_once(group) for group in self.grouped(rebuilds)]
                if all([self.frees(group) for group in groups]):  # noqa: C419 -- each notes why not
                    return [rebuild for group in sorted(groups, key=self.rank) for rebuild in group]

    def grouped(self, rebuilds: Iterable[Rebuild]) -> list[list[Rebuild]]:
        """``rebuilds`` that share memory, or a source that is saved for them."""
        groups: list[tuple[set[str], list[Rebuild]]] = []
        for rebuild in rebuilds:
            shared = {self.mates(rebuild.name)[0], *self.new_sources(rebuild)}
            joined = [rebuild]
            for group in [one for one in groups if not shared.isdisjoint(one[0])]:
                groups.remove(group)
                shared |= group[0]
                joined += group[1]
            groups.append((shared, joined))
        return [sorted(group, key=lambda rebuild: (-rebuild.freed_bytes, rebuild.name)) for _, group in groups]

    def new_sources(self, rebuild: Rebuild) -> list[str]:
        """What is saved for ``rebuild`` alone."""
        return [source for source in rebuild.sources if source not in self.saved and self.is_tensor(source)]

    def priced_once(self, group: Sequence[Rebuild]) -> tuple[Rebuild, ...]:
        """``group`` with the bytes of each source that is saved for it taken from the first rebuild that starts there."""
        counted: set[str] = set()
        found = []
        for rebuild in group:
            new = set(self.new_sources(rebuild)) - counted
            counted |= new
            found.append(replace(rebuild, freed_bytes=rebuild.freed_bytes - sum(map(self.bytes_of, new))))
        return tuple(found)

    def frees(self, group: Sequence[Rebuild]) -> bool:
        """Whether ``group`` saves less than before; notes where not."""
        freed = sum(rebuild.freed_bytes for rebuild in group)
        if freed <= 0:
            why_not = f"what would be saved instead is larger by {-freed} bytes"
            self.kept.update((rebuild.name, why_not) for rebuild in group)
        return freed > 0

    def rank(self, group: Sequence[Rebuild]) -> tuple[float, str]:
        """Sorts groups by what a byte freed costs."""
        freed = sum(rebuild.freed_bytes for rebuild in group)
        moved = sum(max(rebuild.traffic_bytes, 0) for rebuild in group)
        return moved / freed, group[0].name

    def pays(self, mates: Sequence[Rebuild]) -> bool:
        """Whether the rebuilds of one piece of memory free enough for what they cost; notes why not."""
        freed = sum(rebuild.freed_bytes for rebuild in self.priced_once(mates))
        traffic = self.joint_traffic(mates)
        longest = max(len(rebuild.chain) for rebuild in mates)
        why_not = None
        if not all(rebuild.uses and any(map(self.is_tensor, rebuild.sources)) for rebuild in mates):
            why_not = "no place in the backward where it could be made again"
        elif longest > self.level.max_chain:
            why_not = f"takes {longest} ops to make again"
        elif not self.level.takes_over and (freed <= 0 or traffic > self.level.max_traffic * freed):
            why_not = f"making it again moves {traffic} bytes for {freed} that it frees"
        if why_not is not None:
            self.kept.update((rebuild.name, why_not) for rebuild in mates)
        return why_not is None

    def propose(self) -> list[Rebuild]:
        """What a minimum cut drops, given what is ``kept``."""
        wanted = [name for name in self.candidates if name not in self.kept]
        made_from: dict[str, tuple[str, ...]] = {}
        prices: dict[str, int] = {}
        stack = list(wanted)
        while stack:
            name = stack.pop()
            if name in prices or name in made_from:
                continue
            price = self.price(name)
            if price < INFINITE:
                prices[name] = price
            if price > 0 and self.can_repeat(name):
                made_from[name] = self.inputs_of(name)
                stack += made_from[name]
        cut = min_cut(prices, made_from, wanted)
        if cut is None:
            return []
        dropped = [name for name in wanted if name not in cut]
        self.left = (set(self.saved) - set(dropped)) | cut
        if self.level.repeats_matmuls:
            dropped += self.beyond_matmuls()
        # what shares memory with a tensor that stays is free to keep
        stays = [name for name in dropped if not self.left.isdisjoint(self.mates(name))]
        self.left.update(stays)
        return [self.rebuild(name) for name in dropped if name not in stays]

    def beyond_matmuls(self) -> list[str]:
        """Saved tensors to drop that take one matmul to make again, largest first; `left` is what stays saved."""
        found = []
        for name in sorted(self.left, key=lambda name: (-self.bytes_of(name), name)):
            if name in self.kept or name in self.pinned or self.is_outside(name):
                continue
            if self.bytes_of(name) < self.min_bytes or not self.returned.isdisjoint(self.members(name)):
                continue
            opened, extra, pinned = self.one_matmul_deep(name)
            if not opened or sum(map(self.bytes_of, extra)) * MATMUL_MUST_FREE > self.bytes_of(name):
                continue
            self.opened |= opened
            self.pinned |= pinned
            self.left = (self.left - {name}) | extra
            found.append(name)
        taken = {self.rep(name) for name in self.facts.before.saved}
        return [name for name in found if name in taken]

    def one_matmul_deep(self, name: str) -> tuple[set[str], set[str], set[str]]:
        """The matmuls to repeat for ``name``, what would be saved for them instead, and all that they start from.

        No matmuls where it is not possible.
        """
        opened: set[str] = set()
        extra: set[str] = set()
        starts: set[str] = set()
        seen: set[tuple[str, bool]] = set()
        stack = [(name, True)]  # a value, and whether a matmul may still be repeated for it
        while stack:
            current, may_multiply = stack.pop()
            if (current, may_multiply) in seen:
                continue
            if current in self.left and current != name:
                if not may_multiply:
                    starts.add(current)
                continue
            seen.add((current, may_multiply))
            if self.can_repeat(current) and current not in self.opened:
                stack += [(other, may_multiply) for other in self.inputs_of(current)]
            elif may_multiply and self.is_matmul(current):
                opened.add(current)
                stack += [(other, False) for other in self.inputs_of(current)]
            elif current == name or self.price(current) >= INFINITE:
                return set(), set(), set()
            else:
                extra.add(current)
        return opened, extra, starts | extra

    def is_matmul(self, name: str) -> bool:
        """True for the output of a pure matmul of the forward that nothing writes to."""
        site = self.facts.producer.get(name)
        if site is None or site.pos not in self.forward or site.sub >= 0:
            return False
        op = op_at(self.facts.joint, site)
        if op.tags & FIXED or not all(effect.kind is Kind.MATMUL for effect in effects_of(op)):
            return False
        return not any(self.is_written(other) for other in (*op.inputs, *op.outputs))

    # ------------------------------------------------ facts about values

    @cached_property
    def same(self) -> Mapping[str, str]:
        """The first of the values that are equal to each, where it is not the value itself."""

        def may(site: Site, op: Op) -> bool:  # what reads memory that is written may read it at two moments
            return (
                site.pos in self.forward and self.is_cheap(op) and not any(self.is_written(name) for name in op.inputs)
            )

        return equal_values(self.facts.joint, may)

    def rep(self, name: str) -> str:
        return self.same.get(name, name)

    @cached_property
    def equals(self) -> Mapping[str, tuple[str, ...]]:
        """For each first value that has equals, all of them."""
        found: dict[str, list[str]] = {}
        for name, first in self.same.items():
            found.setdefault(first, [first]).append(name)
        return {first: tuple(names) for first, names in found.items()}

    def members(self, name: str) -> tuple[str, ...]:
        return self.equals.get(name, (name,))

    @cached_property
    def returned(self) -> frozenset[str]:
        """What the caller gets: it is there anyway."""
        result = joint_result(self.facts.joint)
        return frozenset((*refs(result["fw_flat_out"]), *refs(result["output"])))

    @cached_property
    def candidates(self) -> tuple[str, ...]:
        """Tensors that the backward takes as they are, that ops could make again, and that are worth it."""
        taken = {self.rep(name) for name in self.facts.before.saved}
        may = {
            name
            for name in self.saved
            if name in taken
            and self.can_repeat(name)
            and self.returned.isdisjoint(self.members(name))
            and (self.level.takes_over or not self.rebuilds_others(name))
        }
        return tuple(
            name
            for name in self.saved
            if may.issuperset(self.mates(name)) and self.own_bytes(name) >= max(1, self.min_bytes)
        )

    def mates(self, name: str) -> tuple[str, ...]:
        """What is saved and has the memory of the saved value ``name``, itself included."""
        return self.by_memory.get(self.memory_of(name), (name,))

    @cached_property
    def by_memory(self) -> Mapping[int | None, tuple[str, ...]]:
        found: dict[int | None, list[str]] = {}
        for name in self.saved:
            if (memory := self.memory_of(name)) is not None:
                found.setdefault(memory, []).append(name)
        return {memory: tuple(names) for memory, names in found.items()}

    def memory_of(self, name: str) -> int | None:
        """The storage of a value, among those of the trace that decides what is saved; None for what is no tensor."""
        return self.shared.storage_of.get(self.saved.get(name, name))

    @property
    def shared(self) -> Aliases:
        return self.facts.aliases if self.level.takes_over else self.facts.fused_aliases

    @cached_property
    def saved(self) -> Mapping[str, str]:
        """What is saved unless it is dropped, in order of first use: the first of its equals to the value itself."""
        saved = self.facts.before.saved if self.level.takes_over else self.facts.after.saved
        found: dict[str, str] = {}
        for name in saved:
            found.setdefault(self.rep(name), name)
        return found

    @cached_property
    def forward(self) -> frozenset[int]:
        return frozenset(self.facts.before.forward)

    def is_tensor(self, name: str) -> bool:
        return self.facts.joint.values[name].kind == "tensor"

    def rebuilds_others(self, name: str) -> bool:
        """True where a later executor's backward makes other forward values again from ``name``: it would save it all the same."""
        given = set(self.facts.producer)
        for member in self.members(name):
            for pos in self.facts.fused.consumers.get(member, ()):
                op = self.facts.fused.ops[pos]
                if pos not in self.fused_backward or not op.is_fusion:
                    continue
                for inner in op.subops:
                    if member in inner.inputs and any(
                        other in given and self.facts.producer[other].pos in self.forward for other in inner.outputs
                    ):
                        return True
        return False

    @cached_property
    def fused_backward(self) -> frozenset[int]:
        return frozenset(self.facts.after.backward)

    def own_bytes(self, name: str) -> int:
        """Bytes of the memory of the saved value ``name``; 0 where the caller owns it."""
        memory = self.memory_of(name)
        if memory is None or self.shared.storages[memory].is_outside:
            return 0
        return self.shared.storages[memory].nbytes or 0

    def price(self, name: str) -> int:
        """Price of saving ``name``: 0 for what is saved anyway, `INFINITE` for what may not be saved."""
        value = self.facts.joint.values[name]
        if name in self.saved:
            return self.own_bytes(name) if name in self.candidates and name not in self.kept else 0
        if name in self.facts.joint.args or value.kind != "tensor":
            return INFINITE  # an argument that is not saved today may be changed by the user before the backward
        site = self.facts.producer[name]
        if site.pos not in self.forward or RECOMPUTED in op_at(self.facts.joint, site).tags or self.is_written(name):
            return INFINITE
        # all of an expanded tensor, whatever its storage takes: a region that gives it writes all of it
        return INFINITE if value.nbytes is None else int(value.nbytes * NEW_SAVE) + 1

    def is_outside(self, name: str) -> bool:
        """True for memory that the caller owns, and for what is no tensor."""
        shared = self.facts.aliases
        return name not in shared.storage_of or shared.storages[shared.storage_of[name]].is_outside

    def is_written(self, name: str) -> bool:
        """True where the trace may write to the memory of ``name``."""
        return self.facts.aliases.is_written(name)

    def can_repeat(self, name: str) -> bool:
        """True where the op that gives ``name`` may run again, with the same result, for little."""
        return name in self.opened or name in self.repeatable

    @cached_property
    def repeatable(self) -> frozenset[str]:
        """What ops of the forward give that may run again, with the same result, for little."""
        found: set[str] = set()
        for site, op in sites(self.facts.joint):
            if site.pos not in self.forward or not self.is_cheap(op) or not (op.inputs or site in self.facts.fusible):
                continue
            if any(self.is_written(other) for other in (*op.inputs, *op.outputs)):
                continue
            if all(self.rep(name) in found for name in self.unrounded(op)):
                found.update(op.outputs)
        return frozenset(found)

    def unrounded(self, op: Op) -> frozenset[str]:
        """Inputs of ``op`` that it widens right after another op rounded them: nvFuser's pass lets it take what was not rounded."""
        widened = {leaf.inputs[0] for leaf in op.leaves if self.cast_growth(leaf) > 0}
        return frozenset(name for name in op.inputs if name in widened and name in self.rounded)

    @cached_property
    def rounded(self) -> frozenset[str]:
        """What the forward casts to fewer bits."""
        ops = (op for site, op in sites(self.facts.joint) if site.pos in self.forward)
        return frozenset(leaf.outputs[0] for op in ops for leaf in op.leaves if self.cast_growth(leaf) < 0)

    def cast_growth(self, leaf: Op) -> int:
        """Bytes an element that a cast between floating-point types adds; 0 for any other op."""
        if short_name(leaf.id) != "convert_element_type" or len(leaf.inputs) != 1 or len(leaf.outputs) != 1:
            return 0
        before, after = (self.facts.joint.values[name] for name in (leaf.inputs[0], leaf.outputs[0]))
        if not all(value.dtype is not None and value.dtype.startswith(("f", "bf")) for value in (before, after)):
            return 0
        return (after.itemsize or 0) - (before.itemsize or 0)

    def is_cheap(self, op: Op) -> bool:
        """True for a pure op that is worth doing again, at this level, rather than keeping its output."""
        if op.is_fusion or op.tags & FIXED:
            return False
        return all(effect.is_pure and (effect.cheap or effect.kind in self.level.kinds) for effect in effects_of(op))

    def arguments_of(self, name: str) -> Iterator[tuple[str, bool]]:
        """What the op that gives ``name`` takes, and whether that must be made again with it, before it was rounded."""
        op = op_at(self.facts.joint, self.facts.producer[name])
        wide = self.unrounded(op)
        return ((self.rep(other), other in wide) for other in op.inputs)

    def inputs_of(self, name: str) -> tuple[str, ...]:
        """What ``name`` may be made again from."""
        found: dict[str, None] = {}
        stack = [name]
        while stack:
            for other, must_repeat in self.arguments_of(stack.pop()):
                if must_repeat:
                    stack.append(other)
                else:
                    found[other] = None
        return tuple(found)

    # ------------------------------------------------ one rebuild

    def rebuild(self, name: str) -> Rebuild:
        """How ``name`` is made from what is ``left``."""
        chain: dict[Site, None] = {}
        sources: dict[str, None] = {}
        stack = [(name, True)]
        while stack:
            current, must_repeat = stack.pop()
            if not must_repeat and (current in self.left or not self.can_repeat(current)):
                sources[current] = None
                continue
            site = self.facts.producer[current]
            if site not in chain:
                chain[site] = None
                stack += self.arguments_of(current)
        order = tuple(sorted(chain))
        starts = tuple(source for source in sources if self.facts.producer.get(source) not in chain)
        uses = tuple(self.uses(name, order))
        # the first of those that share memory stands for all of them
        freed = self.own_bytes(name) if name in self.saved and self.mates(name)[0] == name else 0
        return Rebuild(name, order, starts, uses, freed, self.traffic(name, order, starts, uses))

    def flops(self, chain: Iterable[Site]) -> int:
        """Operations of the matmuls in ``chain``: two for each element of the result and of the dimension that is summed."""
        values = self.facts.joint.values
        found = 0
        for site in chain:
            op = op_at(self.facts.joint, site)
            if not _is_matmul(op):
                continue
            depth = (values[op.inputs[0]].shape or (1,))[-1]
            found += 2 * depth * sum(values[name].numel or 0 for name in op.outputs)
        return found

    def traffic(self, name: str, chain: Sequence[Site], sources: Sequence[str], uses: Sequence[Uses]) -> int:
        """Bytes that all rebuilds of ``name`` move, more than reading it would."""
        nbytes = self.facts.joint.values[name].nbytes or 0
        if all(site in self.facts.fusible for site in chain):
            read = sum(self.bytes_of(source) for source in sources)
            return sum(read + (nbytes if self.is_written_out(use) else -nbytes) for use in uses)
        moved = 0
        for site in chain:
            op = op_at(self.facts.joint, site)
            if not is_layout_chain(op):
                moved += sum(self.bytes_of(other) for other in (*op.inputs, *op.outputs))
        return moved * len(uses)

    def joint_traffic(self, mates: Sequence[Rebuild]) -> int:
        """Bytes that all rebuilds of one piece of memory move: near uses share what they are made from."""
        base = min(mates, key=lambda rebuild: len(rebuild.chain))
        consumers = {pos for rebuild in mates for use in rebuild.uses for pos in use.consumers}
        return self.traffic(base.name, base.chain, base.sources, tuple(self.clustered(consumers, base.chain)))

    def is_layout_only(self, chain: Sequence[Site]) -> bool:
        return all(is_layout_chain(op_at(self.facts.joint, site)) for site in chain)

    def is_written_out(self, use: Uses) -> bool:
        """True where a consumer is no part of a fusion, so that the tensor must exist."""
        ops = self.facts.joint.ops
        return any(not self.facts.is_fusible(pos) or is_layout_chain(ops[pos]) for pos in use.consumers)

    def bytes_of(self, name: str) -> int:
        """Bytes that reading or writing ``name`` moves: what its storage takes, where it is known to repeat elements."""
        shared = self.facts.aliases
        nbytes = self.facts.joint.values[name].nbytes or 0
        if name in shared.storage_of:
            nbytes = min(nbytes, shared.storages[shared.storage_of[name]].nbytes or nbytes)
        return nbytes

    # ------------------------------------------------ where it is used

    def uses(self, name: str, chain: Sequence[Site]) -> Iterator[Uses]:
        """The backward ops that take ``name`` or its equals, in groups that share one rebuild."""
        consumers = {pos for member in self.members(name) for pos in self.facts.joint.consumers.get(member, ())}
        return self.clustered(consumers & self.backward, chain)

    def clustered(self, consumers: Iterable[int], chain: Sequence[Site]) -> Iterator[Uses]:
        """``consumers`` in groups that lie within `SPAN` kernels of one another; layouts are made for each anew."""
        firsts = sorted((self.first_use(pos), pos) for pos in consumers)
        span = 0 if self.is_layout_only(chain) else SPAN
        group: list[int] = []
        start = -1
        for first, pos in firsts:
            if group and self.kernels_before[first] - self.kernels_before[start] > span:
                yield Uses(tuple(group), start)
                group = []
            if not group:
                start = first
            group.append(pos)
        if group:
            yield Uses(tuple(group), start)

    @cached_property
    def backward(self) -> frozenset[int]:
        return frozenset(self.facts.before.backward)

    @cached_property
    def kernels_before(self) -> tuple[int, ...]:
        """Backward ops before each position that a fusion does not take and that are no layouts."""
        counts, count = [], 0
        for pos in range(len(self.facts.joint.ops)):
            counts.append(count)
            count += self.is_kernel(pos)
        return tuple(counts)

    def is_kernel(self, pos: int) -> bool:
        op = self.facts.joint.ops[pos]
        if pos not in self.backward or self.facts.is_fusible(pos):
            return False
        return not is_layout_chain(op) and all(effect.kind is not Kind.BOOKKEEPING for effect in effects_of(op))

    @cached_property
    def early(self) -> frozenset[int]:
        """Backward ops that need no gradient: pure ops on forward values, which may run next to their consumers as well."""
        found: set[int] = set()
        made: set[str] = set()
        for pos, op in enumerate(self.facts.joint.ops):
            if pos not in self.backward or op.is_fusion or op.tags & FIXED:
                continue
            if not all(effect.is_pure and (effect.cheap or self.facts.is_fusible(pos)) for effect in effects_of(op)):
                continue
            is_free = all(name in self.facts.before.available or name in made for name in op.inputs)
            if is_free and not any(self.is_written(name) for name in (*op.inputs, *op.outputs)):
                found.add(pos)
                made.update(op.outputs)
        return frozenset(found)

    def first_use(self, pos: int) -> int:
        """Position of the first op that waits for a gradient and needs what the op at ``pos`` gives; ``pos`` if it waits."""
        return self.first_uses.get(pos, pos)

    @cached_property
    def first_uses(self) -> Mapping[int, int]:
        """For each early op, the first op that waits for a gradient and takes its result, through other early ops."""
        firsts: dict[int, int] = {}
        consumers = self.facts.joint.consumers
        for pos in sorted(self.early, reverse=True):
            users = {
                user for name in self.facts.joint.ops[pos].outputs for user in consumers.get(name, ()) if user != pos
            }
            firsts[pos] = min((firsts.get(user, user) for user in users), default=pos)
        return firsts


# ---------------------------------------------------------------- under a budget


@dataclass(frozen=True, slots=True)
class _Step:
    """Values that are dropped together, beside the default's."""

    names: tuple[str, ...]
    freed_bytes: int  # of the memory that they have, nothing taken off for `new`
    new: frozenset[str]  # what is saved for them instead
    new_bytes: int
    cost: float  # of making them again, in bytes moved
    last: int  # position of the op of the backward that needs them first

    @property
    def rank(self) -> tuple[float, int, tuple[str, ...]]:
        """Sorts steps: by what a byte freed costs; of equal ones first what is needed last."""
        return self.cost / max(self.freed_bytes - self.new_bytes, 1), -self.last, self.names


class Further:
    """What may be dropped beside what the default drops, as steps, the cheapest for what it frees first.

    What is ``hidden`` is saved by nobody, because a later executor makes it again itself, from something that it saves. Where that
    is dropped, it has to be made again here. A step therefore holds all values of one piece of memory that the later executors
    save, and what is hidden behind them.
    """

    def __init__(self, facts: JointFacts, config: FusionFixConfig) -> None:
        least = config.recompute_min_bytes
        self.facts = facts
        default = _Search(facts, least)
        self.search = _Search(facts, min(least, 2**16), FURTHER)
        self.default = tuple(self.search.rep(rebuild.name) for rebuild in default.run())
        self.droppable = frozenset(rebuild.name for rebuild in self.search.run())
        self.saved = frozenset(map(self.search.rep, facts.after.saved))
        new = (self.search.rep(name) for name in default.left if name not in default.saved)
        self.kept = frozenset((*self.search.left, *new)) - self.droppable
        self.steps = self._ordered()

    def plan(self, share: float, fuel: int | None = None) -> JointPlan:
        """The default's rebuilds and the first steps that free ``share`` of all that the steps could free.

        Args:
            share: from 0, the default alone, to 1.
            fuel: at most so many tensors.
        """
        wanted = share * sum(freed for _, freed in self.steps)
        dropped: dict[str, int] = dict.fromkeys(self.default, -1)
        won = 0
        for names, freed in self.steps:
            if won >= wanted:
                break
            won += freed
            dropped.update(dict.fromkeys(names, 0))
            dropped[next(name for name in names if name in self.search.saved)] = freed
        rebuilds = self.rebuilds(dropped)
        told = [one if dropped[one.name] < 0 else replace(one, freed_bytes=dropped[one.name]) for one in rebuilds]
        return _planned(self.search, told[:fuel])

    def rebuilds(self, dropped: Iterable[str]) -> list[Rebuild]:
        """How each of ``dropped`` that the backward takes is made again from what is saved where all of them are not."""
        names = tuple(dropped)
        self.search.left = set((self.saved | self.kept).difference(names))
        return [self.search.rebuild(name) for name in names if name in self.search.saved]

    def _ordered(self) -> list[tuple[tuple[str, ...], int]]:
        """Names that are dropped together and the bytes that it frees, where those before are dropped: all above 0."""
        steps = list(self._steps())
        alone = [step for step in steps if step.freed_bytes > step.new_bytes]
        others = [step for step in steps if step.freed_bytes <= step.new_bytes]
        left = sorted([*alone, *map(self._joined, _sharing(others))], key=lambda step: step.rank)
        paid: set[str] = set()
        found: list[tuple[tuple[str, ...], int]] = []
        while left:
            waiting = []
            for step in left:
                freed = step.freed_bytes - self.bytes_of(step.new - paid)
                if freed > 0:
                    found.append((step.names, freed))
                    paid |= step.new
                else:
                    waiting.append(step)
            if len(waiting) == len(left):  # nothing that the others save makes one of them win
                break
            left = waiting
        return found

    def _joined(self, steps: Sequence[_Step]) -> _Step:
        names = tuple(dict.fromkeys(name for step in steps for name in step.names))
        new = frozenset(name for step in steps for name in step.new)
        freed = sum(step.freed_bytes for step in steps)
        cost = sum(step.cost for step in steps)
        return _Step(names, freed, new, self.bytes_of(new), cost, min(step.last for step in steps))

    def _steps(self) -> Iterator[_Step]:
        """One for each piece of memory that the later executors save and that can be dropped."""
        search = self.search
        memory: dict[int, list[str]] = {}
        for name in sorted(self.saved.union(search.saved)):
            if (storage := search.memory_of(name)) is not None and not search.is_outside(name):
                memory.setdefault(storage, []).append(name)
        for storage, names in memory.items():
            if self.saved.isdisjoint(names) or not set(self.default).isdisjoint(names):
                continue
            if all(map(self.can_drop, names)):
                step = self._step(names, self.facts.aliases.storages[storage].nbytes or 0)
                if step is not None:
                    yield step

    def can_drop(self, name: str) -> bool:
        """True for what the search drops, and for what the backward does not take and the search does not need."""
        if name in self.search.saved:
            return name in self.droppable
        return (
            name not in self.kept
            and self.search.can_repeat(name)
            and self.search.returned.isdisjoint(self.search.members(name))
        )

    def _step(self, names: Sequence[str], nbytes: int) -> _Step | None:
        """What dropping ``names`` alone comes to, beside the default; None where the backward needs nothing of it."""
        behind = [name for name, sources in self.hidden.items() if not sources.isdisjoint(names)]
        together = tuple(dict.fromkeys((*names, *(name for name in behind if name in self.droppable))))
        own = set(together)
        rebuilds = [one for one in self.rebuilds((*self.default, *together)) if one.name in own]
        if not rebuilds or nbytes < self.search.min_bytes:
            return None
        new = {source for one in rebuilds for source in self.new_sources(one)}
        new |= {name for name in behind if name not in self.droppable}
        last = min(use.first for one in rebuilds for use in one.uses)
        return _Step(together, nbytes, frozenset(new), self.bytes_of(new), self.cost(rebuilds), last)

    @cached_property
    def hidden(self) -> Mapping[str, frozenset[str]]:
        """For each value that the backward takes and nobody saves, the saved values that it can be made from."""
        found = {}
        for name in self.search.saved:
            if name in self.saved or self.search.is_outside(name):
                continue
            sources: set[str] = set()
            seen: set[str] = set()
            stack = [name]
            while stack:
                current = stack.pop()
                if current in self.saved:
                    sources.add(current)
                elif current not in seen and current in self.search.repeatable:
                    seen.add(current)
                    stack += self.search.inputs_of(current)
            found[name] = frozenset(sources)
        return found

    def new_sources(self, rebuild: Rebuild) -> Iterator[str]:
        for source in rebuild.sources:
            if source not in self.saved and self.search.is_tensor(source) and not self.search.is_outside(source):
                yield source

    def bytes_of(self, names: Iterable[str]) -> int:
        return sum(map(self.search.bytes_of, names))

    def cost(self, rebuilds: Sequence[Rebuild]) -> float:
        """Time of making all of ``rebuilds`` once for each use, as bytes moved: what one fusion takes over to the next is not."""
        places = max(len(one.uses) for one in rebuilds)
        chain = {site for one in rebuilds for site in one.chain}
        results = {one.name for one in rebuilds}
        fused: set[str] = set()
        moved: set[str] = set()
        kernels = len(rebuilds)
        for site in sorted(chain):
            op = op_at(self.facts.joint, site)
            if site in self.facts.fusible:
                fused.update(op.outputs)
                moved.update(name for name in op.inputs if name not in fused)
                moved.update(name for name in op.outputs if name in results)
            elif not is_layout_chain(op):
                kernels += 1
                moved.update((*op.inputs, *op.outputs))
        tensors = [name for name in moved if self.search.is_tensor(name)]
        return places * (self.bytes_of(tensors) + self.search.flops(chain) / FLOPS_PER_BYTE + kernels * KERNEL_BYTES)


def _sharing(steps: Iterable[_Step]) -> list[list[_Step]]:
    """``steps`` in groups that save some of the same for them."""
    groups: list[tuple[set[str], list[_Step]]] = []
    for step in steps:
        shared, joined = set(step.new), [step]
        for group in [one for one in groups if not shared.isdisjoint(one[0])]:
            groups.remove(group)
            shared |= group[0]
            joined = group[1] + joined
        groups.append((shared, joined))
    return [group for _, group in groups]


# ---------------------------------------------------------------- the plan


@dataclass
class _Writer:
    """Turns rebuilds into edits."""

    facts: JointFacts
    search: _Search
    inserts: list[Insert] = field(default_factory=list)
    renamed: dict[int, dict[str, str]] = field(default_factory=dict)
    exports: dict[tuple[int, str], None] = field(default_factory=dict)
    # first of its equals to the places where it is made again, in order, and the new values
    made: defaultdict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    moving: set[int] = field(default_factory=set)

    def write(self, rebuilds: Iterable[Rebuild]) -> JointPlan:
        jobs = [(*self.where(rebuild, use), rebuild, use) for rebuild in rebuilds for use in rebuild.uses]
        for place, token, rebuild, use in sorted(jobs, key=lambda job: (job[0], job[2].chain)):
            self.put(place, token, rebuild, use)
        moved = [Insert(self.facts.first_user(pos, self.moving), Moved(pos)) for pos in sorted(self.moving)]
        renamed = tuple((pos, tuple(names.items())) for pos, names in sorted(self.renamed.items()))
        return JointPlan(tuple(self.inserts + moved), renamed, tuple(self.exports))

    def where(self, rebuild: Rebuild, use: Uses) -> tuple[int, str | None]:
        """The position before which the clones for ``use`` go, and the value that they wait for."""
        token_pos, token = self.token(use.first)
        sources = (self.source(name) for name in rebuild.sources)
        known = [self.facts.producer[name].pos for name in sources if name in self.facts.producer]
        return max([token_pos, *known]) + 1, token

    def put(self, place: int, token: str | None, rebuild: Rebuild, use: Uses) -> None:
        chain = self.missing(rebuild, place)
        taken = {self.search.rep(name) for site in chain for name in op_at(self.facts.joint, site).inputs}
        sources = [name for name in rebuild.sources if name in taken]
        for name in self.anchored(rebuild, sources, chain, token):
            if self.found(name, place) is None:
                self.made[name].append((place, output := f"{name}%{place}"))
                self.inserts.append(Insert(place, Anchor(self.source(name), token, output)))  # type: ignore[arg-type]
        is_claimed = (
            self.search.is_layout_only(rebuild.chain)
            and self.facts.fusible.issuperset(rebuild.chain)
            and self.search.is_written_out(use)
        )
        for site in chain:
            self.clone(site, place, is_claimed)
        rebuilt = self.found(rebuild.name, place)
        assert rebuilt is not None
        for pos in use.consumers:
            for member in self.search.members(rebuild.name):
                if member in self.facts.joint.ops[pos].inputs:
                    self.renamed.setdefault(pos, {})[member] = rebuilt
            self.move(pos, place)

    def missing(self, rebuild: Rebuild, place: int) -> list[Site]:
        """The ops of the chain that have to be repeated at ``place``: all but what was made again not far before."""
        needed: set[Site] = set()
        stack = [(rebuild.name, False)]
        while stack:
            current, must_repeat = stack.pop()
            site = self.facts.producer.get(current)
            if site not in rebuild.chain or site in needed:
                continue
            if not must_repeat and self.found(current, place) is not None:
                continue
            needed.add(site)
            stack += self.search.arguments_of(current)
        return [site for site in rebuild.chain if site in needed]

    def found(self, name: str, place: int) -> str | None:
        """What stands for ``name`` at ``place``: made there or within `SPAN` kernels before; None where nothing."""
        kernels = self.search.kernels_before
        for before, output in reversed(self.made[name]):
            if before <= place:
                near = kernels[min(place, len(kernels) - 1)] - kernels[min(before, len(kernels) - 1)] <= SPAN
                return output if near else None
        return None

    def source(self, name: str) -> str:
        """The value that stands for ``name``: the one that is saved, else one that the trace has outside of regions."""
        if name in self.search.saved:
            return self._known(self.search.saved[name])
        return self._known(next((one for one in self.search.members(name) if one in self.facts.joint.producer), name))

    def _known(self, name: str) -> str:
        """``name``, which a region gives from now on where so far it only computes it."""
        site = self.facts.producer.get(name)
        if site is not None and site.sub >= 0 and name not in self.facts.joint.producer:
            self.exports[site.pos, name] = None
        return name

    def clone(self, site: Site, place: int, is_claimed: bool) -> None:
        op, rep = op_at(self.facts.joint, site), self.search.rep
        names = {name: self.found(rep(name), place) or self.source(rep(name)) for name in op.inputs}
        for name in op.outputs:
            names[name] = output = f"{name}%{place}"
            self.made[rep(name)].append((place, output))
        self.inserts.append(Insert(place, Clone(site, tuple(names.items()), is_claimed)))

    def move(self, pos: int, place: int) -> None:
        """Takes ``pos``, and the early ops that need it, behind ``place``."""
        if pos >= place or pos in self.moving:
            return
        self.moving.add(pos)
        for name in self.facts.joint.ops[pos].outputs:
            for user in self.facts.joint.consumers.get(name, ()):
                if user in self.search.early:
                    self.move(user, place)

    def token(self, first: int) -> tuple[int, str | None]:
        """The last result before ``first`` that a kernel of the backward gives: position and name."""
        ops = self.facts.joint.ops
        fallback: tuple[int, str | None] = (-1, None)
        for pos in range(first - 1, -1, -1):
            given = [name for name in ops[pos].outputs if self.search.is_tensor(name)]
            if not given or pos in self.search.early:
                continue
            if self.search.is_kernel(pos) or (ops[pos].is_fusion and pos in self.search.backward):
                return pos, given[0]
            if fallback[1] is None and short_name(ops[pos].id) == GET_GRAD:
                fallback = (pos, given[0])
        return fallback

    def anchored(self, rebuild: Rebuild, sources: Sequence[str], chain: Sequence[Site], token: str | None) -> list[str]:
        """Sources that wait for the token: the one that costs least to read twice, as the neighbours in a fusion may read it
        under its own name; all of them where a clone would stand alone and could be merged away."""
        tensors = [name for name in sources if self.search.is_tensor(name)]
        if token is None or not tensors:
            return []
        if self.search.is_layout_only(chain) or not self.facts.fusible.issuperset(chain):
            return tensors
        return [min(tensors, key=lambda name: (self.search.bytes_of(name), self.dependents(rebuild, name), name))]

    def dependents(self, rebuild: Rebuild, source: str) -> int:
        """Ops of the chain that need ``source``: what would be computed twice."""
        reached, count = set(self.search.members(source)), 0
        for site in rebuild.chain:
            op = op_at(self.facts.joint, site)
            if not reached.isdisjoint(op.inputs):
                reached.update(other for name in op.outputs for other in self.search.members(self.search.rep(name)))
                count += 1
        return count


# ---------------------------------------------------------------- the report


def _applied(facts: JointFacts, rebuild: Rebuild) -> Decision:
    value = facts.joint.values[rebuild.name]
    shape = f"{value.dtype}{list(value.shape or ())}"
    what = f"{rebuild.name} {shape} is made again from {', '.join(rebuild.sources)} for {len(rebuild.uses)} place(s)"
    why = f"{len(rebuild.chain)} cheap ops that move {max(rebuild.traffic_bytes, 0)} bytes"
    pos = rebuild.uses[0].consumers[0]
    return Decision(NAME, pos, facts.joint.ops[pos].id, what, why, True, rebuild.freed_bytes)


def _refused(facts: JointFacts, name: str, why: str) -> Decision:
    pos = facts.producer[name].pos
    return Decision(NAME, pos, facts.joint.ops[pos].id, f"{name} stays saved", why, False)

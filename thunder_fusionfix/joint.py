"""The joint trace: which of its ops run forward, which backward, what is saved in between, and plans that change it.

Before the split a trace holds forward and backward in one, in any order that respects dataflow. Thunder's splitter walks it from
the end: what the forward outputs need runs forward, everything else backward, and a value that crosses is saved. `split` is that
rule on a Graph, so a plan can tell what it would save before anything is split.

Fusion executors that stand later in the list see the trace after us. They fuse, move and rebuild; `JointFacts` therefore carries
the same trace before and after a dry run of them.

A `JointPlan` has six kinds of edit, each for the trace that it was made from and no other:

    Anchor   x2 = after(x, g)     x itself, but not before g is there: what is made from x2 cannot be gathered at the start
    Clone    an op of the forward once more, tagged backward, with other names for what it takes and gives
    Moved    an op of the backward, put next to its first consumer
    renamed  arguments of an op replaced by other values
    exports  a region gives one more of the values that it computes
    claims   an op bound for torch, so that no fusion takes it
    swaps    an op bound to another operator with the same arguments and outputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property

from thunder_fusionfix.alias import Aliases, aliases
from thunder_fusionfix.effects import Effect, Kind, effect_of, short_name
from thunder_fusionfix.errors import UnsupportedTraceError
from thunder_fusionfix.model import RETURN, Arg, Decision, Graph, Op, Ref, Struct, refs, renamed

GET_GRAD = "get_grad"  # the gradient that the caller gives for a forward output

BACKWARD = "BACKWARD"  # tag of Thunder's: nvFuser merges no two ops of which one alone has it
RECOMPUTED = "RECOMPUTE_IN_BACKWARD"  # tag of Thunder's: the user asked for a checkpoint around this op
FIXED = frozenset({"RANDOM_OP", "DONT_RECOMPUTE_IN_BACKWARD", "IN_PLACE", "DONT_DCE"})  # tags of ops that are done once


# ---------------------------------------------------------------- the split


@dataclass(frozen=True)
class Split:
    """Who runs when. Positions are in trace order; the return statement and gradients from outside are in neither."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    available: frozenset[str]  # every value that exists when the forward has run, arguments included
    saved: tuple[str, ...]  # values of `available` that the backward takes, in order of first use


def split(graph: Graph) -> Split:
    """How Thunder will split the joint trace ``graph``.

    Raises:
        UnsupportedTraceError: ``graph`` is no joint trace.
    """
    result = joint_result(graph)
    available = {*refs(result["fw_flat_out"]), *refs(result["flat_args"])}
    forward: list[int] = []
    backward: list[int] = []
    for pos in reversed(range(len(graph.ops))):
        op = graph.ops[pos]
        if op.id == RETURN or short_name(op.id) == GET_GRAD:
            continue
        if any(name in available for name in op.outputs):
            forward.append(pos)
            available.update(op.inputs, op.outputs)
        elif short_name(op.id) == "copy_" and isinstance(op.args[1], Ref) and op.args[1].name in available:
            forward.append(pos)  # its result is not needed, its effect on a forward value is
            available.update(op.inputs)
        else:
            backward.append(pos)
    backward.reverse()
    saved = dict.fromkeys(name for pos in backward for name in graph.ops[pos].inputs if name in available)
    return Split(tuple(reversed(forward)), tuple(backward), frozenset(available), tuple(saved))


def executed(graph: Graph) -> Graph:
    """The joint trace ``graph`` in the order in which its halves run: all of the forward, then all of the backward."""
    halves = split(graph)
    given = [pos for pos, op in enumerate(graph.ops) if short_name(op.id) == GET_GRAD]
    order = (*halves.forward, *given, *halves.backward, len(graph.ops) - 1)
    return replace(graph, ops=tuple(graph.ops[pos] for pos in order))


def joint_result(graph: Graph) -> Mapping[str, Arg]:
    """The items that a joint trace returns: "fw_flat_out", "flat_args", "output" (the gradients), ..."""
    result = graph.result
    first = result[0] if isinstance(result, tuple) and result else None
    items = dict(first.items) if isinstance(first, Struct) else {}
    if "fw_flat_out" not in items or "flat_args" not in items:
        raise UnsupportedTraceError(f"{graph.name}: not a joint forward and backward trace")
    return items


# ---------------------------------------------------------------- sites


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """Where an op stands: a position of the trace, or a sub-op of the region at that position."""

    pos: int
    sub: int = -1  # index into the region's subops; -1: the op at `pos` itself


def sites(graph: Graph) -> Iterator[tuple[Site, Op]]:
    """Every op of ``graph`` with its site; regions are opened."""
    for pos, op in enumerate(graph.ops):
        if not op.is_fusion:
            yield Site(pos), op
            continue
        for sub, inner in enumerate(op.subops):
            yield Site(pos, sub), inner


def op_at(graph: Graph, site: Site) -> Op:
    op = graph.ops[site.pos]
    return op if site.sub < 0 else op.subops[site.sub]


def effects_of(op: Op) -> tuple[Effect, ...]:
    """The effects of ``op``: of all that it is made of, and its own row where that is no pure one."""
    own = effect_of(op)
    parts = tuple(effect_of(leaf) for leaf in op.leaves)
    return parts if own.is_pure or own.kind in (Kind.BARRIER, Kind.REGION) else (own, *parts)


def is_layout_chain(op: Op) -> bool:
    """True where ``op`` and all that it is made of only rearrange."""
    return all(effect.kind is Kind.LAYOUT for effect in effects_of(op))


def equal_values(graph: Graph, may: Callable[[Site, Op], bool]) -> Mapping[str, str]:
    """For each value that equals an earlier one, the first of them: the same op of the same values. Later passes merge them.

    Args:
        graph: a joint trace.
        may: which ops to look at; pure ones.
    """
    first: dict[str, str] = {}
    known: dict[str, tuple[str, ...]] = {}
    given: set[str] = set()
    for site, op in sites(graph):
        if may(site, op) and given.isdisjoint(op.outputs):
            names = tuple(first.get(name, name) for name in op.inputs)
            before = known.setdefault(_spelling(op, names), op.outputs)
            first.update((name, other) for name, other in zip(op.outputs, before) if name != other)
        given.update(op.outputs)
    return first


def _spelling(op: Op, names: tuple[str, ...]) -> str:
    """A text equal for ops that compute the same of the values ``names``."""
    numbered = {name: str(index) for index, name in enumerate(op.inputs)}
    kwargs = tuple((key, renamed(arg, numbered)) for key, arg in op.kwargs)
    return repr((op.id, names, renamed(op.args, numbered), kwargs))


def opened(graph: Graph) -> Graph:
    """``graph`` with every composite op that the table does not know replaced by its leaves. For aliases, not for positions."""
    ops = tuple(
        leaf for op in graph.ops for leaf in (op.leaves if op.subops and effect_of(op).kind is Kind.BARRIER else (op,))
    )
    return replace(graph, ops=ops)


# ---------------------------------------------------------------- facts


@dataclass(frozen=True)
class JointFacts:
    """One joint trace, before and after a dry run of the fusion executors that come later in the list."""

    joint: Graph
    fused: Graph  # `joint` itself where no fusion executor comes later
    fusible: frozenset[Site] = frozenset()  # sites of `joint` that one of those executors would take

    @cached_property
    def before(self) -> Split:
        return split(self.joint)

    @cached_property
    def after(self) -> Split:
        return split(self.fused)

    @cached_property
    def aliases(self) -> Aliases:
        """Of `joint`."""
        return aliases(opened(self.joint))

    @cached_property
    def fused_aliases(self) -> Aliases:
        """Of `fused`."""
        return aliases(opened(self.fused))

    @cached_property
    def producer(self) -> Mapping[str, Site]:
        """The first site that gives each value, inside regions too."""
        found: dict[str, Site] = {}
        for site, op in sites(self.joint):
            for name in op.outputs:
                found.setdefault(name, site)
        return found

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that the later executors save: distinct storages that are no argument's."""
        return self.fused_aliases.bytes_of(self.after.saved)

    def first_user(self, pos: int, moving: AbstractSet[int]) -> int:
        """The first op that stays and takes what the op at ``pos`` gives, through those that are ``moving``: it goes before that."""
        consumers = self.joint.consumers
        users = {user for name in self.joint.ops[pos].outputs for user in consumers.get(name, ()) if user != pos}
        return min((self.first_user(user, moving) if user in moving else user for user in users), default=pos + 1)

    def is_fusible(self, op_pos: int) -> bool:
        return Site(op_pos) in self.fusible


# ---------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True)
class Anchor:
    """``output`` is ``source``, available once ``token`` is."""

    source: str
    token: str
    output: str


@dataclass(frozen=True, slots=True)
class Clone:
    """The op at ``site`` once more; ``names`` are (name there, name here) for what it takes and gives."""

    site: Site
    names: tuple[tuple[str, str], ...]
    is_claimed: bool = False  # bound for torch, so that no fusion takes it


@dataclass(frozen=True, slots=True)
class Moved:
    """The op at ``pos``, taken from there."""

    pos: int


@dataclass(frozen=True, slots=True)
class Insert:
    """Something placed right before the op at ``before``; several keep their order."""

    before: int
    what: Anchor | Clone | Moved


@dataclass(frozen=True, slots=True)
class JointPlan:
    """Edits of one joint trace. New values have names with a "%", which the edit replaces by names of the trace."""

    inserts: tuple[Insert, ...] = ()
    renamed: tuple[tuple[int, tuple[tuple[str, str], ...]], ...] = ()  # position, (old, new) arguments
    exports: tuple[tuple[int, str], ...] = ()  # position of a region, value that it gives as well
    claims: tuple[int, ...] = ()  # positions
    swaps: tuple[tuple[int, str], ...] = ()  # position, id of the operator
    decisions: tuple[Decision, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.inserts or self.renamed or self.exports or self.claims or self.swaps)


@dataclass(frozen=True, slots=True)
class Budget:
    """What came of a memory budget: estimated peaks of one joint trace as the later executors leave it."""

    limit_bytes: int
    before_bytes: int  # with nothing rebuilt
    peak_bytes: int
    num_rebuilds: int
    num_matmuls: int  # that are repeated
    num_trials: int  # plans that were judged by a dry run

    @property
    def is_met(self) -> bool:
        return self.peak_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True)
class JointReport:
    """What the entry did to one trace."""

    stage: str  # "joint", or "inference" where nothing requires a gradient
    saved_before_bytes: int  # what the later executors would save, by a dry run
    saved_after_bytes: int  # the same after the plan: by its own estimate, under a budget by a dry run
    decisions: tuple[Decision, ...]
    seconds: float  # wall time, the dry run included
    dry_run_seconds: float
    kept_input: str | None = None  # why the input trace was kept although there was a plan
    budget: Budget | None = None  # where the user gave one and there is a backward

"""The order of a trace's ops that needs the least memory, of the orders that its rules allow.

Several named *orderings* each give one order of the ops, `simulate.Prices` prices them all, and the smallest peak wins. The input
order is always among them and wins ties. Then moves that the peak does not need are taken back, so that what is left of the
winner is what wins. Everything is a function of the Graph and ties break on the position in it: two ranks that hold one trace
choose one order.

The orderings, and where each one wins (`tests/test_schedule.py` has a case for each):

- *held back*: the trace's own order, but an op that takes more memory than it frees waits until something needs its output.
  Large tensors made early and taken late, as what `torch.utils.checkpoint` computes again in the backward pass.
- *least growth*: of the ops that may run, the one after which the least is allocated. Ops that free something and wait.
- *least growth from the end*: the same for the trace run backwards. The best of the four on most random graphs.
- *by need*: depth first from the results, the operand with the largest peak of its own first. Expression trees.

A *search* goes on from the best of them, over the whole trace where it is small and in windows around the peak where it is not.
It keeps the best partial orders and knows two things that make it exact on most traces of models: an op that frees as much as it
takes, without a new peak, can run at once; and a partial order that reaches the best peak known need not be followed.

    >>> from thunder_fusionfix.model import Graph, Op, Ref, Value
    >>> large = {name: Value(name, (1024,), "f32", "cuda:0") for name in ("x", "a", "b", "d")}
    >>> ops = (
    ...     Op("torch.exp", (Ref("x"),), Ref("a")), Op("torch.sin", (Ref("x"),), Ref("b")), Op("torch.sum", (Ref("a"),), Ref("c")),
    ...     Op("torch.sum", (Ref("b"),), Ref("d")), Op("return", ((Ref("c"), Ref("d")),)),
    ... )
    >>> graph = Graph("f", "inference", ("x",), ops, {**large, "c": Value("c", (), "f32"), "d": Value("d", (), "f32")}, frozenset("x"))
    >>> found = schedule(graph)
    >>> found.order, found.moved, found.peak_before, found.peak_bytes, found.is_optimal
    ((0, 2, 1, 3, 4), (2,), 12800, 9216, True)

Sources: R. Sethi and J. Ullman, The Generation of Optimal Code for Arithmetic Expressions, JACM 1970 (operand order);
B. Ahn et al., Ordering Chaos: Memory-Aware Scheduling of Irregularly Wired Neural Networks, MLSys 2020 (search over sets of ops).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import lt
from typing import NamedTuple

from thunder_fusionfix.model import Graph
from thunder_fusionfix.pins import is_fence, pairs
from thunder_fusionfix.simulate import Prices

# The search looks at the whole trace up to this many ops, and at windows of larger ones: its sets of ops are bit masks.
WHOLE_OPS = 1500
WINDOW_OPS = 64
WINDOW_ROUNDS = 8
# Partial orders that the search keeps, tried in turn: a narrow search is often enough, and sometimes better than a wide one.
WIDTHS = (1, 8, 64, 512)
# Times that the searches of one trace may look at an op; about a third of a second, and a twentieth.
SEARCH_VISITS = 40_000
QUICK_VISITS = 6_000
# Orders that are priced to take moves back, times the length of the trace; about a third of a second.
SETTLE_VISITS = 80_000

Order = list[int]  # indices into `Problem.steps`
Tried = tuple[str, Order, int]  # which ordering, its order and the peak in bytes


@dataclass(frozen=True, slots=True)
class Schedule:
    """An order of a Graph's ops, and how it was found."""

    order: tuple[int, ...]  # positions, ``del``s and clears left out; the trace's own order where none is better
    moved: tuple[int, ...]  # positions of the fewest ops that one takes out and puts elsewhere to get the order
    name: str  # which ordering gave it
    peak_before: int  # bytes
    peak_bytes: int
    lower_bound_bytes: int  # of the ops, whatever their order
    is_optimal: bool  # proven: no order that keeps the rules needs less
    prices: tuple[tuple[str, int], ...]  # every ordering that was tried, with its peak


def schedule(graph: Graph, prices: Prices | None = None, most_moves: int | None = None) -> Schedule:
    """The order of ``graph``'s ops with the smallest peak found.

    Args:
        graph: any Graph.
        prices: its `Prices`, where the caller has them.
        most_moves: at most this many ops move; None for no limit.
    """
    return best_order(Problem(prices if prices is not None else Prices(graph)), most_moves)


def best_order(problem: Problem, most_moves: int | None = None) -> Schedule:
    """`schedule` of a `Problem` that the caller has."""
    tried, is_optimal = problem.tried
    floor, peak_before = problem.prices.lower_bound, tried[0][2]
    name, order, peak = _least(tried)
    if peak < peak_before:
        order = settle(problem, order, peak, most_moves)
        peak = problem.peak_of(order)
    if peak >= peak_before and most_moves is None:
        name, order, peak = tried[0]
    return Schedule(
        order=tuple(problem.steps[index] for index in order),
        moved=tuple(problem.steps[index] for index in moved_of(order)),
        name=name,
        peak_before=peak_before,
        peak_bytes=peak,
        lower_bound_bytes=floor,
        is_optimal=is_optimal or peak <= floor,
        prices=tuple((name, peak) for name, _, peak in tried),
    )


class Problem:
    """The steps of a Graph, numbered from 0 in trace order, with what orderings ask of each."""

    def __init__(self, prices: Prices) -> None:
        graph = prices.graph
        self.prices = prices
        self.steps = prices.steps
        self.sizes, self.is_kept = prices.sizes, prices.is_kept
        index = {pos: at for at, pos in enumerate(self.steps)}
        before: list[set[int]] = [set() for _ in self.steps]
        for first, then in pairs(graph, prices.aliases):
            before[index[then]].add(index[first])
        self.before: list[tuple[int, ...]] = [tuple(sorted(found)) for found in before]
        self.after: list[list[int]] = [[] for _ in self.steps]
        for at, found in enumerate(self.before):
            for first in found:
                self.after[first].append(at)
        self.is_fence = [is_fence(graph.ops[pos]) for pos in self.steps]
        # storages without bytes play no part
        self.makes = [tuple([id for id in prices.makes[pos] if self.sizes[id]]) for pos in self.steps]
        self.uses = [tuple([id for id in prices.uses[pos] if self.sizes[id]]) for pos in self.steps]
        self.made_bytes = [prices.made_bytes[pos] for pos in self.steps]
        self.temporary_bytes = [prices.temporary_bytes[pos] for pos in self.steps]

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def users(self) -> list[list[int]]:
        """By storage: the steps that make or take it."""
        users: list[list[int]] = [[] for _ in self.sizes]
        for at, used in enumerate(self.uses):
            for id in used:
                users[id].append(at)
        return users

    @cached_property
    def rules(self) -> tuple[list[int], list[int]]:
        """Of each pair of steps whose order must stay, the first and the second."""
        return [first for found in self.before for first in found], [
            at for at, found in enumerate(self.before) for _ in found
        ]

    def keeps_rules(self, order: Order) -> bool:
        """True where ``order`` is one of the legal ones."""
        index = [0] * len(order)
        for at, step in enumerate(order):
            index[step] = at
        firsts, thens = (map(index.__getitem__, steps) for steps in self.rules)
        return all(map(lt, firsts, thens))

    @cached_property
    def ordered(self) -> list[Tried]:
        """The trace's own order, and what each of `ORDERINGS` gives."""
        found = [("as it is", list(range(len(self)))), *((name, find(self)) for name, find in ORDERINGS.items())]
        return [(name, order, self.peak_of(order)) for name, order in found]

    @cached_property
    def tried(self) -> tuple[list[Tried], bool]:
        """Every order that was tried, the trace's own first, and whether one of them is proven to be the best."""
        as_it_is = list(range(len(self)))
        peak, floor = self.peak_of(as_it_is), self.prices.lower_bound
        if peak <= floor:
            return [("as it is", as_it_is, peak)], True
        name, order, peak = _least(self.ordered)
        found, is_optimal = _search(self, order, peak, floor, SEARCH_VISITS)
        if found is None:
            return self.ordered, is_optimal
        return [*self.ordered, (f"search from {name}", found, self.peak_of(found))], is_optimal

    @cached_property
    def best_peak(self) -> int:
        """Bytes, in the best order that was tried."""
        return _least(self.tried[0])[2]

    def live_of(self, order: Order) -> list[int]:
        return self.prices.live_of([self.steps[at] for at in order])

    def peak_of(self, order: Order) -> int:
        return self.prices.peak_of([self.steps[at] for at in order])


def _least(tried: Sequence[Tried]) -> Tried:
    """The one with the smallest peak; the first of equals."""
    return min(tried, key=lambda item: item[2])


# ---------------------------------------------------------------- orderings


def held_back(problem: Problem) -> Order:
    """The trace's order, but what takes more memory than it frees waits until an op that is not held back needs it."""
    sizes, kept = problem.sizes, problem.is_kept
    last = [users[-1] if users else -1 for users in problem.users]
    order: Order = []
    is_done = [False] * len(problem)
    growth = [0] * len(problem)  # of an op together with the ops held back that it needs
    for at in range(len(problem)):
        makes = problem.makes[at]
        made = sum([sizes[id] for id in makes if kept[id] or last[id] != at])
        freed = sum([sizes[id] for id in problem.uses[at] if last[id] == at and not kept[id] and id not in makes])
        growth[at] = made - freed + sum([growth[first] for first in problem.before[at] if not is_done[first]])
        is_needed_later = not all(problem.is_fence[then] for then in problem.after[at])
        if growth[at] <= 0 or problem.is_fence[at] or not is_needed_later:
            _run_with_needs(at, problem.before, is_done, order)
    return order


def by_need(problem: Problem) -> Order:
    """Depth first from the ops that nothing takes, the operand whose own peak is furthest above its result first."""
    peaks = [0] * len(problem)  # of the op with all that it needs, if that were a tree
    needs: list[Sequence[int]] = list(problem.before)
    for at in range(len(problem)):
        if problem.is_fence[at]:
            continue
        needs[at] = sorted(problem.before[at], key=lambda first: (problem.made_bytes[first] - peaks[first], first))
        live = 0
        for first in needs[at]:
            peaks[at] = max(peaks[at], live + peaks[first])
            live += problem.made_bytes[first]
        peaks[at] = max(peaks[at], live + problem.made_bytes[at] + problem.temporary_bytes[at])
    order: Order = []
    is_done = [False] * len(problem)
    for at in range(len(problem)):
        if problem.is_fence[at] or all(problem.is_fence[then] for then in problem.after[at]):
            _run_with_needs(at, needs, is_done, order)
    return order


def _run_with_needs(at: int, needs: Sequence[Sequence[int]], is_done: list[bool], order: Order) -> None:
    """Appends ``at`` and what it needs and is not done, each right after its own needs."""
    if is_done[at]:
        return
    is_done[at] = True
    stack: list[tuple[int, Iterator[int]]] = [(at, iter(needs[at]))]
    while stack:
        top, rest = stack[-1]
        below = next((first for first in rest if not is_done[first]), None)
        if below is None:
            order.append(top)
            stack.pop()
        else:
            is_done[below] = True
            stack.append((below, iter(needs[below])))


def least_growth(problem: Problem) -> Order:
    """Of the ops that may run, always the one after which the least is allocated."""
    sizes, kept, uses = problem.sizes, problem.is_kept, problem.uses
    left = [len(users) for users in problem.users]
    rest = [sum(users) for users in problem.users]  # the one user that is left, once it is one

    def growth(at: int) -> int:
        return problem.made_bytes[at] - sum([sizes[id] for id in uses[at] if left[id] == 1 and not kept[id]])

    ready = _Ready(problem.before, problem.after, growth)
    for at in ready:
        for id in uses[at]:
            left[id] -= 1
            rest[id] -= at
            if left[id] == 1:
                ready.changed(rest[id])
    return ready.order


def least_growth_from_the_end(problem: Problem) -> Order:
    """The trace run backwards: of the ops that may run last, always the one before which the least is allocated."""
    sizes, uses = problem.sizes, problem.uses
    is_alive = list(problem.is_kept)  # storages needed by what runs later

    def growth(at: int) -> int:
        makes = problem.makes[at]
        needed = sum([sizes[id] for id in uses[at] if not is_alive[id] and id not in makes])
        return needed - sum([sizes[id] for id in makes if is_alive[id]])

    ready = _Ready(problem.after, problem.before, growth, late_first=True)
    for at in ready:
        for id in uses[at]:
            if not is_alive[id]:
                is_alive[id] = True
                for user in problem.users[id]:
                    ready.changed(user)
    return ready.order[::-1]


class _Ready:
    """Iterates over steps so that each comes after its ``needs``, the one of least ``growth`` first."""

    def __init__(
        self,
        needs: Sequence[Sequence[int]],
        needed_by: Sequence[Sequence[int]],
        growth: Callable[[int], int],
        late_first: bool = False,
    ) -> None:
        self.needed_by = needed_by
        self.growth = growth
        self.sign = -1 if late_first else 1  # which of equals comes first
        self.waiting = [len(found) for found in needs]
        self.order: Order = []
        self.current: dict[int, int] = {}  # growth of the steps that may run
        self.heap: list[tuple[int, int]] = []  # with entries that are no longer current
        for at, count in enumerate(self.waiting):
            if not count:
                self._push(at)

    def __iter__(self) -> Iterator[int]:
        while self.heap:
            growth, key = heapq.heappop(self.heap)
            at = self.sign * key
            if self.current.get(at) != growth:
                continue
            del self.current[at]
            self.order.append(at)
            yield at
            for then in self.needed_by[at]:
                self.waiting[then] -= 1
                if not self.waiting[then]:
                    self._push(then)

    def changed(self, at: int) -> None:
        """Tells that the growth of ``at`` may have fallen."""
        if at in self.current:
            self._push(at)

    def _push(self, at: int) -> None:
        self.current[at] = self.growth(at)
        heapq.heappush(self.heap, (self.current[at], self.sign * at))


ORDERINGS: dict[str, Callable[[Problem], Order]] = {
    "held back": held_back,
    "least growth": least_growth,
    "least growth from the end": least_growth_from_the_end,
    "by need": by_need,
}


def quick_order(problem: Problem) -> Order:
    """An order that is nearly as good as `schedule`'s, for prices of what-ifs: a short search, and no move is taken back."""
    _, order, peak = _least(problem.ordered)
    found, _ = _search(problem, order, peak, problem.prices.start_bytes, QUICK_VISITS)
    return order if found is None else found


# ---------------------------------------------------------------- search


def _search(problem: Problem, order: Order, peak: int, floor: int, visits: int) -> tuple[Order | None, bool]:
    """A better order than ``order``, if one is found, and whether the best known is proven to be the best."""
    if len(problem) <= WHOLE_OPS:
        found, is_exact = search_window(problem, order, 0, len(order), peak, floor, visits)
        if found is not None or is_exact:
            return found, is_exact
    best = None
    for _ in range(WINDOW_ROUNDS):
        at = problem.live_of(order).index(peak)
        first = max(0, min(at - WINDOW_OPS // 2, len(order) - WINDOW_OPS))
        found, _ = search_window(problem, order, first, first + WINDOW_OPS, peak, floor, visits // WINDOW_ROUNDS)
        if found is None:
            break
        best = order = found
        peak = problem.peak_of(order)
    return best, False


def search_window(
    problem: Problem, order: Order, first: int, end: int, peak: int, floor: int, visits: int
) -> tuple[Order | None, bool]:
    """``order`` with ``order[first:end]`` in a better order.

    Args:
        problem: the steps.
        order: an order of them that keeps the rules.
        first: where the window starts.
        end: where it ends.
        peak: bytes that are to be beaten inside the window.
        floor: bytes below which nothing is won.
        visits: how many times the search may look at an op.

    Returns:
        The order, None where no better one was found; and whether that is proven to be the best for the window.
    """
    window = _Window(problem, order[first:end], order[:first])
    best: Order | None = None
    for width in WIDTHS:
        found, visits, is_exact = window.search(width, visits, peak, floor)
        if found is not None:
            peak, best = found[0], [*order[:first], *found[1], *order[end:]]
        if is_exact or peak <= floor:
            return best, True
        if visits <= 0:
            break
    return best, False


class _Partial(NamedTuple):
    """A set of ops of the window that have run, by the best order known for it."""

    peak: int
    live: int
    ready: Sequence[int]  # ops that could run before the last one ran
    path: tuple | None  # (path before, last op)


class _Window:
    """Ops that stand next to each other in an order, numbered from 0, and the memory around them."""

    def __init__(self, problem: Problem, ops: Order, ops_before: Order) -> None:
        self.ops = ops
        local = {at: number for number, at in enumerate(ops)}
        self.needs = [sum(1 << local[first] for first in problem.before[at] if first in local) for at in ops]
        self.after = [[local[then] for then in problem.after[at] if then in local] for at in ops]
        self.made_bytes = [problem.made_bytes[at] for at in ops]
        self.run_bytes = [problem.made_bytes[at] + problem.temporary_bytes[at] for at in ops]
        left = [len(users) for users in problem.users]
        self.start_bytes = problem.prices.start_bytes
        for at in ops_before:
            self.start_bytes += problem.made_bytes[at]
            for id in problem.uses[at]:
                left[id] -= 1
                if not left[id] and not problem.is_kept[id]:
                    self.start_bytes -= problem.sizes[id]
        users: dict[int, int] = {}  # storage to the set of its users here
        for number, at in enumerate(ops):
            for id in problem.uses[at]:
                users[id] = users.get(id, 0) | 1 << number
        # by op: what it may be the last to use, as pairs of all users and bytes
        self.frees = [
            [
                (users[id], problem.sizes[id])
                for id in problem.uses[at]
                if not problem.is_kept[id] and left[id] == users[id].bit_count()
            ]
            for at in ops
        ]

    def search(self, width: int, visits: int, peak: int, floor: int) -> tuple[tuple[int, Order] | None, int, bool]:
        """(peak and order, if better than ``peak``), the visits that are left, and whether the result is proven."""
        everything = (1 << len(self.ops)) - 1
        ready = tuple(op for op, needs in enumerate(self.needs) if not needs)
        states = {0: _Partial(min(floor, peak - 1), self.start_bytes, ready, None)}
        best: _Partial | None = None
        is_exact = True
        while states:
            grown: dict[int, _Partial] = {}
            for done, state in states.items():
                visits = self._grow(done, state, peak, grown, visits)
            if visits <= 0:
                is_exact = False
                break
            if everything in grown:  # sets of one size need not come at one time
                best = grown.pop(everything)
                peak = best.peak
                grown = {done: state for done, state in grown.items() if state.peak < peak}
            states = grown
            if len(states) > width:
                is_exact = False
                ranked = sorted(states.items(), key=lambda item: (item[1].peak, item[1].live, item[0]))
                states = dict(ranked[:width])
        found = None if best is None else (best.peak, [self.ops[op] for op in _steps_of(best.path)])
        return found, visits, is_exact

    def _grow(self, done: int, state: _Partial, peak: int, grown: dict[int, _Partial], visits: int) -> int:
        """Adds what one more op makes of ``state``, after all ops that cost nothing; gives the visits that are left."""
        best, live, path = state.peak, state.live, state.path
        waiting = self._ready_after(state.ready, path[1], done) if path is not None else list(state.ready)
        costly: list[tuple[int, int, int]] = []  # op, bytes while it runs, bytes after
        ready: list[int] = []
        is_changed = True
        while is_changed:  # an op that ran may make others free of cost
            is_changed = False
            costly, ready = [], []
            while waiting:
                op = waiting.pop()
                visits -= 1
                running, after = live + self.run_bytes[op], self._live_after(op, done, live)
                if after > live or running > best:
                    ready.append(op)
                    costly.append((op, running, after))
                    continue
                is_changed = True
                done |= 1 << op
                live, path = after, (path, op)
                waiting += self._ready_after((), op, done)
            waiting = ready
        if not ready and (done not in grown or best < grown[done].peak):
            grown[done] = _Partial(best, live, (), path)
        for op, running, after in costly:
            new_done, new_peak = done | 1 << op, max(best, running)
            if new_peak < peak and (new_done not in grown or new_peak < grown[new_done].peak):
                grown[new_done] = _Partial(new_peak, after, ready, (path, op))
        return visits

    def _ready_after(self, ready: Sequence[int], op: int, done: int) -> list[int]:
        """The ops that may run once ``op``, one of ``ready``, has run."""
        return [other for other in ready if other != op] + [
            then for then in self.after[op] if not self.needs[then] & ~done
        ]

    def _live_after(self, op: int, done: int, live: int) -> int:
        left = ~(done | 1 << op)
        return live + self.made_bytes[op] - sum(size for users, size in self.frees[op] if not users & left)


def _steps_of(path: tuple | None) -> Order:
    ops: Order = []
    while path is not None:
        path, op = path
        ops.append(op)
    return ops[::-1]


# ---------------------------------------------------------------- moves


def moved_of(order: Order) -> Order:
    """The fewest steps that one takes out of the trace's order and puts elsewhere to get ``order``.

    >>> moved_of([0, 3, 1, 2, 4])
    [3]
    """
    smallest_end: list[int] = []  # by length: the smallest last element of a rising subsequence
    ends_at: list[int] = []  # by length: where in `order` that element is
    previous: list[int] = []
    for at, step in enumerate(order):
        length = bisect_left(smallest_end, step)
        previous.append(ends_at[length - 1] if length else -1)
        smallest_end[length : length + 1] = [step]
        ends_at[length : length + 1] = [at]
    stays = set()
    at = ends_at[-1] if ends_at else -1
    while at >= 0:
        stays.add(order[at])
        at = previous[at]
    return sorted(set(order) - stays)


def settle(problem: Problem, order: Order, peak: int, most_moves: int | None = None) -> Order:
    """``order`` without the moves that a peak of ``peak`` bytes does not need.

    Moves are taken back in halves, and halves of halves, as long as the work stays within `SETTLE_VISITS`.
    """
    moved = moved_of(order)
    anchors = _anchors(order, set(moved))
    trials = max(4, SETTLE_VISITS // max(1, len(problem)))
    back: set[int] = set()  # steps that return to their place
    kept_moves: Order = []
    chunks = [moved[middle:] for middle in (len(moved) // 2,)] + [moved[: len(moved) // 2]]
    while chunks:
        chunk = chunks.pop()
        if not chunk:
            continue
        trial = _with_back(problem, order, anchors, back.union(chunk)) if trials > 0 else None
        trials -= 1
        if trial is not None and problem.peak_of(trial) <= peak:
            back.update(chunk)
        elif len(chunk) == 1 or trials <= 0:
            kept_moves += chunk
        else:
            chunks += [chunk[len(chunk) // 2 :], chunk[: len(chunk) // 2]]
    if most_moves is not None:
        back.update(sorted(kept_moves)[most_moves:])
    return _with_back(problem, order, anchors, back) if back else order


def _anchors(order: Order, moved: set[int]) -> list[tuple[int, int]]:
    """By step: the next step of ``order`` that did not move, and the index in ``order``; sorting by it gives ``order``."""
    anchors: list[tuple[int, int]] = [(0, 0)] * len(order)
    next_stays = len(order)
    for at in reversed(range(len(order))):
        if order[at] not in moved:
            next_stays = order[at]
        anchors[order[at]] = (next_stays, at)
    return anchors


def _with_back(problem: Problem, order: Order, anchors: Sequence[tuple[int, int]], back: Iterable[int]) -> Order:
    """``order`` with the steps ``back`` where the trace has them, as far as the rules let them."""
    keys = list(anchors)
    for step in back:
        keys[step] = (step, keys[step][1])
    as_wanted = sorted(range(len(keys)), key=keys.__getitem__)
    if problem.keeps_rules(as_wanted):
        return as_wanted
    waiting = [len(found) for found in problem.before]
    heap = [(*keys[step], step) for step, count in enumerate(waiting) if not count]
    heapq.heapify(heap)
    result: Order = []
    while heap:
        step = heapq.heappop(heap)[2]
        result.append(step)
        for then in problem.after[step]:
            waiting[then] -= 1
            if not waiting[then]:
                heapq.heappush(heap, (*keys[then], then))
    return result

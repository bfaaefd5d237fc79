"""Ops move to where the peak is lowest: producers next to their consumers.

Stage: final, forward or backward. Needs: a trace and its rules of order (`pins`). Keeps: every op, what it takes and what it
gives, and the order of whatever has an effect. Changes: where ops stand, and with it where memory is taken and freed.

Thunder places work early. ThunderFX's ``dataflow`` fusion gathers what is ready, and what the backward pass recomputes stands at
its start, where everything saved is still alive:

    t1 = torch.relu(x0)                     # x0, x1: "cuda:0 f32[4096, 4096]"
    t2 = torch.relu(x1)                     # t2 waits here ...
    t3 = torch.matmul(t1, t1)
    a1 = torch.matmul(t3, a0)
    t4 = torch.matmul(t2, t2)               # ... until here

becomes, with one tensor less at the peak:

    t1 = torch.relu(x0)
    t3 = torch.matmul(t1, t1)
    a1 = torch.matmul(t3, a0)
    t2 = torch.relu(x1)
    t4 = torch.matmul(t2, t2)

`schedule` finds the order; here it becomes a plan with a reason for each move, and for what could not move. Lightning Thunder's
issue 1337 is the program that this is about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thunder_fusionfix.document import megabytes
from thunder_fusionfix.facts import Facts
from thunder_fusionfix.model import Decision, Plan
from thunder_fusionfix.pins import edges, given_twice
from thunder_fusionfix.schedule import Schedule, best_order
from thunder_fusionfix.simulate import Prices

NAME = "reorder"
EXPLAINED = 5  # largest tensors at the peak whose staying there gets a reason


def plan_reorder(facts: Facts, fuel: int | None = None) -> Plan:
    """The plan that puts the ops of a final trace in the order that needs the least memory.

    Args:
        facts: the trace and what is known of it.
        fuel: at most this many ops move; None for no limit.
    """
    repeated = given_twice(facts.graph)
    if repeated:
        reason = f"the trace gives {repeated[0]} twice: which of the two an op takes is then a matter of order"
        return Plan(decisions=(Decision(NAME, 0, facts.graph.name, "the order stays", reason, False),))
    prices = facts.prices
    found = facts.schedule if fuel is None else best_order(facts.problem, fuel)
    left = tuple(_what_stays(prices, found))
    if not found.moved:
        return Plan(decisions=(_nothing_to_win(prices, found), *left))
    return Plan(order=found.order, decisions=(*_moves(prices, found), *left))


def _nothing_to_win(prices: Prices, found: Schedule) -> Decision:
    if found.peak_before <= found.lower_bound_bytes:
        reason = f"the peak, {megabytes(found.peak_before)} MB, is the lower bound of these ops"
    elif found.is_optimal:
        reason = f"proven: no order of these ops needs less than {megabytes(found.peak_before)} MB"
    else:
        tried = ", ".join(f"{name} {megabytes(peak)}" for name, peak in found.prices)
        reason = (
            f"no order that was tried needs less than {megabytes(found.peak_before)} MB ({tried}); "
            f"bound {megabytes(found.lower_bound_bytes)}"
        )
    return Decision(NAME, 0, prices.graph.name, "the order stays", reason, False)


# ---------------------------------------------------------------- moves


def _moves(prices: Prices, found: Schedule) -> Iterator[Decision]:
    """One decision for each op that moved."""
    graph, order = prices.graph, found.order
    index = {pos: at for at, pos in enumerate(order)}
    old_index = {pos: at for at, pos in enumerate(prices.steps)}
    won = bytes_won(prices, found)
    proof = "no order needs less" if found.is_optimal else f"bound {megabytes(found.lower_bound_bytes)} MB"
    for pos in found.moved:
        at = index[pos]
        following = order[at + 1]  # there is one: the return statement does not move
        where = "later" if at > old_index[pos] else "earlier"
        yield Decision(
            pass_name=NAME,
            pos=pos,
            where=graph.ops[pos].id,
            what=f"{_outputs(prices, pos)} moved {where}, from {pos} to before {graph.ops[following].id} ({following})",
            reason=f"order `{found.name}`: peak {megabytes(found.peak_before)} -> {megabytes(found.peak_bytes)} MB, {proof}",
            applied=True,
            bytes_won=won[pos],
        )


def bytes_won(prices: Prices, found: Schedule) -> dict[int, int]:
    """For each op that moved: the bytes that its move takes away from where the peak was; negative where it adds some.

    Looks at what is alive while the op runs that stood at the old peak. A storage that is no longer alive there is put down to
    the op that makes it, if it moved, else to the last one that takes it, else to the op at the old peak itself.
    """
    live = prices.live_of(prices.steps)
    peak_op = prices.steps[live.index(found.peak_before)]
    before, after = _spans(prices, prices.steps), _spans(prices, found.order)
    then, now = prices.steps.index(peak_op), found.order.index(peak_op)
    won = dict.fromkeys(found.moved, 0)
    for id, (made, last) in before.items():
        was_alive, is_alive = made <= then <= last, after[id][0] <= now <= after[id][1]
        if was_alive == is_alive:
            continue
        # kept storages have no last use, outside ones no maker
        ends = [(prices.steps, made), (found.order, after[id][1]), (prices.steps, last)]
        responsible = [order[at] for order, at in ends if 0 <= at < len(order)]
        moved = next((pos for pos in (*responsible, peak_op) if pos in won), None)
        if moved is not None:
            won[moved] += prices.sizes[id] if was_alive else -prices.sizes[id]
    return won


def _spans(prices: Prices, order: Sequence[int]) -> dict[int, tuple[int, int]]:
    """By storage: the indices in ``order`` of the op that makes it (-1: there before) and of the last one that takes it."""
    spans: dict[int, tuple[int, int]] = {}
    for at, pos in enumerate(order):
        for id in prices.uses[pos]:
            spans[id] = (spans[id][0] if id in spans else -1 if prices.is_outside[id] else at, at)
    end = len(order)
    return {id: (first, end if prices.is_kept[id] else last) for id, (first, last) in spans.items()}


# ---------------------------------------------------------------- what stays


def _what_stays(prices: Prices, found: Schedule) -> Iterator[Decision]:
    """For the largest tensors alive at the peak that its op does not use: why no order of the ops is without them there."""
    if found.peak_bytes <= found.lower_bound_bytes:
        return
    live = prices.live_of(found.order)
    peak_at = live.index(found.peak_bytes)
    peak_op = found.order[peak_at]
    spans = _spans(prices, found.order)
    waiting = [
        id
        for id, (first, last) in spans.items()
        if first <= peak_at < last
        and id not in prices.uses[peak_op]
        and not (prices.is_outside[id] and prices.is_kept[id])
    ]
    pinned = _pinned(prices)
    for id in sorted(waiting, key=lambda id: (-prices.sizes[id], id))[:EXPLAINED]:
        first = spans[id][0]
        name = prices.aliases.storages[id].root
        maker = found.order[first] if first >= 0 else None
        users = [at for at, pos in enumerate(found.order) if id in prices.uses[pos] and at != first]
        yield Decision(
            pass_name=NAME,
            pos=maker if maker is not None else 0,
            where=prices.graph.ops[maker].id if maker is not None else prices.graph.name,
            what=f"{name} stays alive over the peak at {prices.graph.ops[peak_op].id} ({peak_op})",
            reason=f"{megabytes(prices.sizes[id])} MB; {_why_alive(prices, found, maker, users, peak_at, pinned)}",
            applied=False,
        )


def _why_alive(
    prices: Prices, found: Schedule, maker: int | None, users: Sequence[int], peak_at: int, pinned: dict[int, str]
) -> str:
    later = next((found.order[at] for at in users if at > peak_at), None)
    until = (
        f"{prices.graph.ops[later].id} ({later}) takes it later"
        if later is not None
        else "it is returned or the caller's"
    )
    if maker is None:
        return f"there before the first op, and {until}"
    if any(at < peak_at for at in users):
        return f"taken before the peak, and {until}"
    if maker in pinned:
        return f"its producer is pinned by the rule `{pinned[maker]}`, and {until}"
    return f"made later, its producer's inputs would wait instead; {until}"


def _pinned(prices: Prices) -> dict[int, str]:
    """Ops with an order to keep besides that of values, and the rule; fences leave the others free between them."""
    return {
        pos: edge.rule
        for edge in edges(prices.graph, prices.aliases)
        if edge.rule not in ("value", "fence")
        for pos in (edge.first, edge.then)
    }


def _outputs(prices: Prices, pos: int) -> str:
    outputs = prices.graph.ops[pos].outputs
    return ", ".join(outputs[:3]) + (f" and {len(outputs) - 3} more" if len(outputs) > 3 else "")

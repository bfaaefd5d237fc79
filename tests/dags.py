"""Random programs with tensors of many sizes, a fusion pass that merges what is ready, and a judge of orders.

`random_dag` has pure ops only, so that every order that makes values before their use is legal. `merged` puts elementwise ops into
regions as a greedy horizontal fusion pass does. `optimum` finds the smallest peak of all orders by trying every set of ops.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

from helpers import GraphBuilder

from thunder_fusionfix.model import RETURN, Graph, Op, Ref
from thunder_fusionfix.simulate import rounded

UNIT = 1 << 18  # elements: 1 MiB of f32


def random_dag(rng: random.Random, num_ops: int) -> Graph:
    """``num_ops`` ops on tensors of 1 to 32 MiB; three arguments, the caller's or not, and all that nothing takes is returned."""
    build = GraphBuilder()
    names = [build.arg(f"x{i}", (UNIT * rng.choice((1, 2, 4, 8)),)) for i in range(3)]
    style = rng.choice(("chain", "wide", "any"))
    for i in range(num_ops):
        pool = names[-5:] if style == "chain" else names[:3] if style == "wide" and rng.random() < 0.4 else names
        inputs = dict.fromkeys(rng.choice(pool) for _ in range(rng.choice((1, 1, 2, 2, 3))))
        op_id = rng.choice(("prims.add", "torch.matmul"))
        names.append(build.op(op_id, *inputs, out=f"t{i}", shape=(UNIT * rng.choice((1, 1, 2, 4, 8, 16, 32)),)))
    used = {name for op in build.ops for name in op.inputs}
    results = tuple(name for name in names[3:] if name.name not in used)
    return build.returns(results, held=build.args if rng.random() < 0.5 else ())


def merged(graph: Graph, rng: random.Random) -> Graph:
    """``graph`` with its elementwise ops in regions: level by level, most of those of a level in one."""
    level: dict[str, int] = {}
    levels: dict[tuple[int, bool], list[Op]] = {}
    for op in graph.ops[:-1]:
        is_elementwise = op.id == "prims.add"
        # an elementwise op may join its elementwise producers; whatever else it takes comes a level before
        depths = [level.get(name, 0) for name in op.inputs]
        depth = max(depths, default=0) + (not is_elementwise or rng.random() < 0.5)
        level.update((name, depth) for name in op.outputs)
        levels.setdefault((depth, not is_elementwise), []).append(op)
    ops: list[Op] = []
    for (_, is_single), found in sorted(levels.items(), key=lambda item: (item[0][0], not item[0][1])):
        ops += found if is_single or len(found) < 2 else [_region(graph, found, f"nvFusion{len(ops)}")]
    return replace(graph, ops=(*_in_order(ops), graph.ops[-1]))


def _region(graph: Graph, body: list[Op], name: str) -> Op:
    given = {output for op in body for output in op.outputs}
    inside = {id(op) for op in body}
    taken = dict.fromkeys(name for op in body for name in op.inputs if name not in given)
    needed = {name for op in graph.ops if id(op) not in inside for name in op.inputs}
    outputs = [output for op in body for output in op.outputs if output in needed]
    return Op(name, tuple(map(Ref, taken)), tuple(map(Ref, outputs)), subops=tuple(body), is_fusion=True)


def _in_order(ops: list[Op]) -> list[Op]:
    """The ops so that values come before their use; a region in a circle comes apart."""
    ordered: list[Op] = []
    made: set[str] = set()
    produced = {name for op in ops for name in op.outputs} | {
        name for op in ops for sub in op.subops for name in sub.outputs
    }
    left = list(ops)
    while left:
        ready = next((op for op in left if all(name in made or name not in produced for name in op.inputs)), None)
        if ready is None:
            broken = next(op for op in left if op.is_fusion)
            at = left.index(broken)
            left[at : at + 1] = broken.subops
            continue
        ordered.append(ready)
        made.update(ready.outputs)
        left.remove(ready)
    return ordered


def optimum(graph: Graph) -> int:
    """The smallest peak of all orders of a graph of pure ops, in bytes; time is exponential in the number of ops."""
    ops = graph.ops[:-1]
    users = {name: sum(1 << i for i, op in enumerate(ops) if name in op.inputs) for name in graph.values}
    maker = {name: i for i, op in enumerate(ops) for name in op.outputs}
    needs = [sum(1 << maker[name] for name in op.inputs if name in maker) for op in ops]
    kept = set(graph.held) | (set(graph.ops[-1].inputs) if graph.ops[-1].id == RETURN else set())
    size = {name: rounded(value.nbytes or 0) for name, value in graph.values.items()}
    visible = [name for name in graph.values if name in maker or name in graph.args]
    everything = (1 << len(ops)) - 1

    def live(done: int) -> int:
        alive = (name for name in visible if name not in maker or done >> maker[name] & 1)
        return sum(size[name] for name in alive if name in kept or users[name] & ~done)

    @cache
    def best(done: int) -> int:
        if done == everything:
            return live(done)
        peaks = []
        for i, op in enumerate(ops):
            if not done >> i & 1 and not needs[i] & ~done:
                running = live(done) + sum(size[name] for name in op.outputs)
                peaks.append(max(running, best(done | 1 << i)))
        return min(peaks)

    # an argument that nothing takes is there all the time
    unused = sum(size[name] for name in graph.args if not users[name] and name not in kept)
    return best(0) + unused

"""How our decisions grow with the length of a trace, without Thunder and without a GPU: seconds of CPU time by stage.

    python benchmarks/growth.py [--ops 1000 10000 50000] [--repeat 3] [--json FILE]

A trace here is a random program of blocks: a region gives several tensors at once, matmuls take them one after another, together with
tensors from any block before. So there is something to cut and much to move. The stages are asked as the pipeline asks: prices and
timeline of the trace, then `split_regions`, then prices and `reorder` of the trace with its cuts. Reading, editing and verifying a
trace have no part in it; `own_cost.py` measures those. The least of several runs counts, each with a trace that nobody has looked at.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thunder_fusionfix.apply import apply_to_graph
from thunder_fusionfix.facts import Facts
from thunder_fusionfix.garbage import collected_later
from thunder_fusionfix.model import Graph, Op, Ref, Value
from thunder_fusionfix.passes.reorder import plan_reorder
from thunder_fusionfix.passes.split_regions import plan_split_regions

UNIT = 1 << 18  # elements: 1 MiB of f32


def program(num_ops: int, seed: int = 0) -> Graph:
    """A trace of ``num_ops`` ops, ``del``s not counted; it has none."""
    rng = random.Random(seed)
    values: dict[str, Value] = {}
    ops: list[Op] = []

    def new(units: int) -> str:
        name = f"t{len(values)}"
        values[name] = Value(name, (UNIT * units,), "f32", "cuda:0")
        return name

    args = tuple(new(4) for _ in range(3))
    names, used = list(args), set[str]()

    def taken(last: int) -> str:
        name = rng.choice(names[-last:])
        used.add(name)
        return name

    while len(ops) < num_ops - 1:
        body, outputs = [], []
        for _ in range(rng.randint(2, 5)):
            inner, output = new(8), new(rng.choice((1, 2, 8)))
            body.append(Op("prims.mul", (Ref(taken(6)), Ref(taken(60))), Ref(inner)))
            body.append(Op("prims.neg", (Ref(inner),), Ref(output)))
            outputs.append(output)
        given = {name for op in body for name in op.outputs}
        inputs = dict.fromkeys(name for op in body for name in op.inputs if name not in given)
        region = f"nvFusion{len(ops)}"
        ops.append(Op(region, tuple(map(Ref, inputs)), tuple(map(Ref, outputs)), subops=tuple(body), is_fusion=True))
        for output in outputs:
            used.add(output)
            result = new(rng.choice((1, 2, 4)))
            ops.append(Op("torch.matmul", (Ref(output), Ref(taken(600))), Ref(result)))
            names.append(result)
        del ops[num_ops - 1 :]
    results = tuple(Ref(name) for op in ops for name in op.outputs if name not in used)
    return Graph("computation", "inference", args, (*ops, Op("return", (results,))), values, held=frozenset(args))


def stages(graph: Graph) -> dict[str, float]:
    """Seconds of CPU time of each stage for ``graph``, and of all together."""
    seconds: dict[str, float] = {}

    def timed(name: str, find: Callable[[], Any]) -> Any:
        started = time.process_time()
        try:
            return find()
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.process_time() - started

    facts = Facts(graph)
    timed("prices", lambda: facts.timeline)
    plan = timed("split_regions", lambda: plan_split_regions(facts))
    if not plan.is_empty:
        facts = Facts(apply_to_graph(graph, plan))
        timed("prices", lambda: facts.timeline)
    timed("reorder", lambda: plan_reorder(facts))
    return {**seconds, "all": sum(seconds.values())}


def least(num_ops: int, repeat: int) -> dict[str, float]:
    """The least of ``repeat`` runs, stage by stage; "all" is that of the fastest run."""
    runs = []
    for _ in range(repeat):
        graph = program(num_ops)
        with collected_later():  # as in the pipeline
            runs.append(stages(graph))
    return {name: min(run[name] for run in runs) for name in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, nargs="+", default=[1_000, 10_000, 50_000])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {num_ops: least(num_ops, args.repeat) for num_ops in args.ops}
    print(f"{'seconds of CPU time':24}" + "".join(f"{num_ops:>12,}" for num_ops in found) + "   ops")
    for name in next(iter(found.values())):
        print(f"{name:24}" + "".join(f"{row[name]:>12.3f}" for row in found.values()))
    print(
        f"{'microseconds an op':24}" + "".join(f"{row['all'] / num_ops * 1e6:>12.0f}" for num_ops, row in found.items())
    )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

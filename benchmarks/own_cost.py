"""What our passes cost, without a GPU: seconds by pass and by stage, beside Thunder's own compile time.

    python benchmarks/own_cost.py [--model qwen2.5-7b] [--layers 2 8 28] [--json FILE]

Each model is captured once with `FusionFixTransform`; forward and backward of all its parts are added up. Times of a
pass include the estimates that it asks for; `estimate` lists those once more by themselves, wherever they were asked
for. `one more order` is what it costs to price another order of the largest trace once its `Prices` are made: a rewrite
tried does not price the whole trace anew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from thunder_fusionfix import facts, pipeline
from thunder_fusionfix.capture import capture
from thunder_fusionfix.models import load_model
from thunder_fusionfix.predict import step_parts
from thunder_fusionfix.read import Reader
from thunder_fusionfix.simulate import Prices
from thunder_fusionfix.transform import FusionFixTransform


class Clock:
    """Seconds by name, and how often each was called."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

        return call


@contextlib.contextmanager
def clocked() -> Iterator[Clock]:
    """A clock on every stage of the pipeline while the context is open."""
    clock = Clock()
    stages = {
        (Reader, "read"): "read",
        (pipeline, "apply_plan"): "edit",
        (pipeline, "verify"): "verify",
        (facts, "Prices"): "estimate",
    }
    before = {place: getattr(*place) for place in stages}
    passes = pipeline.PASSES
    try:
        for (module, name), stage in stages.items():
            setattr(module, name, clock.timed(stage, before[module, name]))
        pipeline.PASSES = tuple(replace(item, plan=clock.timed(f"plan {item.name}", item.plan)) for item in passes)
        yield clock
    finally:
        for (module, name), function in before.items():
            setattr(module, name, function)
        pipeline.PASSES = passes


def cost(model: str, layers: int) -> dict[str, Any]:
    """One model's numbers; times in seconds."""
    program = load_model(model, layers=layers)
    with clocked() as clock:
        captured = capture(program.fn, program.args, program.kwargs, dynamo=True, transforms=[FusionFixTransform()])
    graphs = [graph for part in step_parts(captured) for graph in (part.forward, part.backward) if graph is not None]
    largest = max(graphs, key=lambda graph: len(graph.ops))
    start = time.perf_counter()
    prices = Prices(largest)
    made = time.perf_counter()
    prices.peak_of(prices.steps)
    tried = time.perf_counter()
    compile_s = sum(part.seconds.total for part in captured.parts)
    ours = sum(part.seconds.transforms for part in captured.parts)
    return {
        "layers": layers,
        "ops": sum(len(graph.ops) for graph in graphs),
        "thunder_compile_s": compile_s - ours,
        "nvfuser_fusion_pass_s": sum(part.seconds.fusion for part in captured.parts),
        "ours_s": ours,
        "ours_of_compile": ours / (compile_s - ours),
        **{f"{name}_s": seconds for name, seconds in sorted(clock.seconds.items())},
        "prices_s": made - start,
        "one_more_order_s": tried - made,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 28])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found = []
    for layers in args.layers:
        found.append(cost(args.model, layers))
        print(f"{layers} layers done", flush=True)
    print(f"\n{args.model:32}" + "".join(f"{row['layers']:>10}" for row in found) + "   layers")
    for name in found[0]:
        if name == "layers":
            continue
        shown = [row.get(name, 0) for row in found]
        cells = [f"{value:>10,}" if isinstance(value, int) else f"{value:>10.4f}" for value in shown]
        print(f"{name.replace('_s', ' s') if name.endswith('_s') else name:32}" + "".join(cells))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

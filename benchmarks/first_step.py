"""Measures the first step of a training run on a GPU, and where its time goes, with and without sharing of equal fusions.

    python benchmarks/first_step.py [--out first_step.json] [--layers 2 8] [--variants shared plain] [--budget 560] [--jobs 1]

The model is Qwen2.5-7B with hidden size 28, bf16, one sequence of 4096 tokens, random weights: the model of the report that
this project began with. Every variant runs in a process of its own, in the order given, small models first; what does not
fit into the budget (seconds) is left out and said so, and what was measured is printed and written after every run.

``--jobs 4`` runs so many side by side, large models first. First steps compete for the processor then, all of them alike,
and steady steps are not timed; memory and results are as before.

Variants: `plain` (sharing off), `shared` (by the compile option alone), `fusionfix` (with the transform), `torch.compile`,
and `plain+db` and `shared+db`, which add nvFuser's option "kernel_db": compiled kernels are kept in the folder
nvfuser_kernel_db of the system's temporary directory; give such a variant twice to see a cold and a warm first step.

nvFuser compiles the segments of one fusion in 8 threads; NVFUSER_NUM_THREADS=16 in the environment tries another number.

What the columns of the profile mean, in seconds of wall time of the first step (forward and backward, synchronized):

- dynamo      torch.compile's graph capture, without the backend
- splitter    ThunderFX's split of each graph, which tries every op
- tracing     Thunder's trace of each piece
- passes      everything else of Thunder's compile: gradient, executors, fusion passes, the transforms
- keys        what sharing costs: the canonical form of every region
- definitions of nvFuser's fusions, in Python
- nvFuser     all calls of fusions: kernels compile when a fusion is first called
- inductor    all calls of regions that torch.compile takes, of which the first ones compile
- rest        the first run of everything else
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

VARIANTS = ("plain", "shared", "fusionfix", "plain+db", "shared+db", "torch.compile")
PHASES = ("dynamo", "splitter", "tracing", "passes", "keys", "definitions", "nvFuser", "inductor", "rest")
MARK = "RESULT "
WARM_UP_STEPS = 3
TIMED_STEPS = 15
LEAST_S = 20.0  # nothing is started with less time left
ROOT = Path(__file__).resolve().parent.parent  # runs from a checkout, installed or not

# ---------------------------------------------------------------- one variant, in a process of its own


class Profile:
    """Seconds by phase while it is open; a phase inside another counts for the inner one alone.

    Phases may lie in several threads (the backward pass runs in autograd's), but one waits for the other: they add up.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.calls = dict.fromkeys(PHASES, 0)
        self.is_open = False
        self.dynamo_in_regions = 0.0  # Dynamo's share of "inductor"
        self._lock = threading.Lock()
        self._here = threading.local()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer = getattr(self._here, "inner_seconds", 0.0)
        self._here.inner_seconds = 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - start
            with self._lock:
                self.seconds[name] += took - self._here.inner_seconds
                self.calls[name] += 1
            self._here.inner_seconds = outer + took

    def timed(self, name: str, fn: Callable) -> Callable:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.is_open:
                return fn(*args, **kwargs)
            with self.phase(name):
                return fn(*args, **kwargs)

        return run


def instrument(profile: Profile) -> None:
    """Puts the clock around what Thunder calls; where a version has not got a function, its phase stays 0."""
    import thunder
    import thunder.dynamo.compiler
    import torch

    from thunder_fusionfix import share

    thunder.dynamo.compiler._splitter = profile.timed("splitter", thunder.dynamo.compiler._splitter)
    thunder.thunder_general_jit = profile.timed("tracing", thunder.thunder_general_jit)
    share._SharedRegion._find = profile.timed("keys", share._SharedRegion._find)
    share.SharedCompiled._compiled_for = profile.timed("inductor", share.SharedCompiled._compiled_for)
    impl = sys.modules.get("thunder.executors.nvfuserex_impl")
    if impl is not None:
        impl.create_fd = profile.timed("definitions", impl.create_fd)
        impl.FusionDefinition.execute = profile.timed("nvFuser", impl.FusionDefinition.execute)

    compile_with_torch = torch.compile

    def compile_region(*args: Any, **kwargs: Any) -> Any:
        compiled = compile_with_torch(*args, **kwargs)
        if not profile.is_open or not callable(compiled):
            return compiled
        timed = profile.timed("inductor", compiled)

        def call(*args: Any) -> Any:
            before = dynamo_seconds() if profile.is_open else 0.0
            results = timed(*args)
            profile.dynamo_in_regions += dynamo_seconds() - before if profile.is_open else 0.0
            return results

        return call

    torch.compile = compile_region


def dynamo_seconds() -> float:
    """torch.compile's own time so far, without its backends; 0 where this torch does not tell."""
    import torch._dynamo.utils

    metrics = getattr(torch._dynamo.utils, "compilation_time_metrics", {})
    inner, backend = (
        sum(metrics.get(name, ())) for name in ("_compile.compile_inner", "OutputGraph.call_user_compiler")
    )
    return inner - backend


def build_model(args: argparse.Namespace) -> tuple[Any, Any]:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=args.vocab,
        hidden_size=28,
        intermediate_size=args.mlp,
        num_hidden_layers=args.one_layers,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(args.device):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen2ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        ids = torch.randint(0, args.vocab, (1, args.seq))
    return model, ids


def compile_model(model: Any, variant: str, device: str) -> tuple[Any, Any]:
    """The compiled model, and Thunder's compiler where there is one."""
    import torch
    from thunder.dynamo import ThunderCompiler

    if variant == "torch.compile":
        return torch.compile(model), None
    executors = ("sdpa", "torchcompile_cat", "nvfuser") if device == "cuda" else ("torchcompile",)
    options: dict[str, Any] = {"executors": executors, "fusionfix_share_fusions": not variant.startswith("plain")}
    if variant.endswith("+db"):
        options["nv_enable_options"] = ["kernel_db"]
    if variant == "fusionfix":
        from thunder_fusionfix.transform import FusionFixTransform

        options["transforms"] = [FusionFixTransform()]
    compiler = ThunderCompiler(**options)
    return torch.compile(model, backend=compiler), compiler


def run_variant(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured of one variant with one number of layers."""
    warnings.simplefilter("ignore")
    import thunder
    import torch

    import thunder_fusionfix.splitter  # noqa: F401  (joins Thunder, with what it imports)
    from thunder_fusionfix import share

    profile = Profile()
    instrument(profile)
    model, ids = build_model(args)
    compiled, compiler = compile_model(model, args.one_variant, args.device)
    is_cuda = args.device == "cuda"
    synchronize = torch.cuda.synchronize if is_cuda else lambda: None

    def step() -> Any:
        model.zero_grad(set_to_none=True)
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    torch.empty(1, device=args.device)  # the CUDA context is no part of a first step
    synchronize()
    profile.is_open = True
    before, start = dynamo_seconds(), time.perf_counter()
    loss = step()
    synchronize()
    first_step = time.perf_counter() - start
    profile.is_open = False
    profile.seconds["dynamo"] = dynamo_seconds() - before - profile.dynamo_in_regions
    profile.seconds["passes"] = max(0.0, thunder_compile_seconds(compiler) - profile.seconds["tracing"])
    profile.seconds["rest"] = first_step - sum(profile.seconds.values())

    result: dict[str, Any] = {
        "variant": args.one_variant,
        "layers": args.one_layers,
        "first_step_s": first_step,
        "profile_s": profile.seconds,
        "calls": profile.calls,
        "sharing": {kind: list(counts) for kind, counts in share.sharing().items()},
        "loss": loss.item(),
        "grad_norms": {
            name: parameter.grad.double().norm().item()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and ("embed" in name or name.endswith(("down_proj.weight", "q_proj.weight")))
        },
        "versions": {"torch": torch.__version__, "thunder": thunder.__version__},
        "gpu": torch.cuda.get_device_name() if is_cuda else None,
        "side_by_side": args.jobs,
        "step_ms": None,
    }
    print(MARK + json.dumps({**result, "step_ms": None, "peak_mb": None}), flush=True)  # stands where the rest is cut
    for _ in range(WARM_UP_STEPS):
        step()
    synchronize()
    times = []
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range((TIMED_STEPS if is_cuda else 2) if args.jobs == 1 else 1):
        start = time.perf_counter()
        step()
        synchronize()
        times.append(1000 * (time.perf_counter() - start))
    if args.jobs == 1:
        result["step_ms"] = statistics.median(times)
        result["step_ms_all"] = times
    result["peak_mb"] = torch.cuda.max_memory_allocated() / 1e6 if is_cuda else 0.0
    return result


def thunder_compile_seconds(compiler: Any) -> float:
    """Thunder's compile of all pieces, tracing included; asked right after the first step, before anything is called again."""
    import thunder

    seconds = 0.0
    for info in getattr(compiler, "subgraph_infos", ()):
        for function in info.thunder_compiled_fns or ():
            stats = thunder.compile_stats(function)
            seconds += (stats.last_trace_host_execution_start - stats.last_trace_cache_start) / 1e9
    return seconds


# ---------------------------------------------------------------- all variants


def run_apart(args: argparse.Namespace, variant: str, layers: int, seconds: float) -> dict[str, Any]:
    """The result of one variant from a fresh process, or what went wrong; what was measured before it did is kept."""
    command = [sys.executable, __file__, "--one-variant", variant, "--one-layers", str(layers)]
    for name in ("seq", "vocab", "mlp", "device", "jobs"):
        command += [f"--{name}", str(getattr(args, name))]
    # A cache of Inductor's from an earlier run would hide what a first step costs.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": path}
        lives, ours = os.pipe()  # closed when we end: the child ends then (`join_parent`)
        child = subprocess.Popen(
            command, stdin=lives, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        os.close(lives)
        ended = ""
        try:
            out, err = child.communicate(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            ended = f"not done after {seconds:.0f} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # with Inductor's workers
            child.kill()
            out, err = child.communicate()
        finally:
            os.close(ours)
    found: dict[str, Any] = {"variant": variant, "layers": layers}
    for line in out.splitlines():
        if line.startswith(MARK):
            found = json.loads(line[len(MARK) :])
    if child.returncode and not ended:
        ended = f"exit {child.returncode}: " + (err or out)[-2000:]
    return {**found, "error": ended} if ended else found


def run_all(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Runs every variant with every number of layers, ``args.jobs`` at a time; ``keep`` gets each result as it comes."""
    deadline = time.monotonic() + args.budget
    layers = sorted(args.layers, reverse=args.jobs > 1)

    def run_one(job: tuple[int, str]) -> dict[str, Any]:
        left = deadline - time.monotonic()
        if left < LEAST_S:
            return {"variant": job[1], "layers": job[0], "error": "left out: the budget is spent"}
        return run_apart(args, job[1], job[0], left)

    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [pool.submit(run_one, (many, variant)) for many in layers for variant in args.variants]
        for run in as_completed(runs):
            keep(run.result())


def table(results: list[dict[str, Any]]) -> str:
    lines = [f"{'variant':<14}{'layers':>6}{'first s':>9}{'step ms':>9}{'peak MB':>10}{'fusions':>10}{'regions':>10}"]
    lines[0] += "  | " + "".join(f"{phase:>12}" for phase in PHASES)
    for result in results:
        head = f"{result['variant']:<14}{result['layers']:>6}"
        if "first_step_s" not in result:
            lines.append(head + "  " + result["error"].strip().splitlines()[-1][:160])
            continue
        shared = [f"{fusions} of {regions}" for regions, fusions in result["sharing"].values()] + ["", ""]
        lines.append(
            head
            + "".join(
                f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"
                for value, digits, width in (
                    (result["first_step_s"], 1, 9),
                    (result["step_ms"], 2, 9),
                    (result["peak_mb"], 0, 10),
                )
            )
            + f"{shared[0]:>10}{shared[1]:>10}  | "
            + "".join(f"{result['profile_s'][phase]:>12.2f}" for phase in PHASES)
        )
    return "\n".join(lines)


def comparison(results: list[dict[str, Any]]) -> list[str]:
    """Each variant against plain with as many layers, and what the layers between the smallest and the largest cost."""
    good = {(result["variant"], result["layers"]): result for result in results if "first_step_s" in result}
    lines = []
    for (variant, layers), result in good.items():
        plain = good.get(("plain", layers))
        if plain is None or variant == "plain":
            continue
        ratios = ", ".join(
            f"{what} x {result[name] / plain[name]:.3f}"
            for what, name in (("first step", "first_step_s"), ("step", "step_ms"), ("peak", "peak_mb"))
            if plain[name] and result[name]
        )
        worst = max(
            (abs(norm - plain["grad_norms"][name]) / max(norm, 1e-30) for name, norm in result["grad_norms"].items()),
            default=0.0,
        )
        lines.append(
            f"{variant} against plain, {layers} layers: {ratios}; loss {result['loss']:.6f} against {plain['loss']:.6f}, "
            f"gradient norms within {worst:.1e}"
        )
    for variant in dict.fromkeys(variant for variant, _ in good):
        mine = sorted((result for (name, _), result in good.items() if name == variant), key=lambda r: r["layers"])
        if len(mine) > 1:
            few, many = mine[0], mine[-1]
            growth = {phase: many["profile_s"][phase] - few["profile_s"][phase] for phase in PHASES}
            lines.append(
                f"{variant}, from {few['layers']} to {many['layers']} layers: "
                f"first step + {many['first_step_s'] - few['first_step_s']:.1f} s ("
                + ", ".join(f"{phase} {seconds:+.1f}" for phase, seconds in growth.items() if abs(seconds) >= 0.05)
                + ")"
            )
    return lines


def report(results: list[dict[str, Any]]) -> str:
    """Table and comparisons."""
    return "\n".join([table(results), "", *comparison(results)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write after every run")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["shared", "plain"])
    parser.add_argument("--budget", type=float, default=560, help="seconds for everything")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; steady steps are not timed then")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=152064)
    parser.add_argument("--mlp", type=int, default=18944, help="width of the MLP")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: without nvFuser, to try the script"
    )
    parser.add_argument("--one-variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--one-layers", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_variant:
        from thunder_fusionfix.measure import join_parent

        join_parent()
        print(MARK + json.dumps(run_variant(args)), flush=True)
        os._exit(0)  # compilers' worker processes and threads would take seconds to end

    from table_file import table_file

    with table_file(args.out, "first_step") as file:

        def keep(result: dict[str, Any]) -> None:
            file.add(result, shown=False)
            file.rows.sort(key=lambda row: (row["layers"], args.variants.index(row["variant"])))
            print(report(file.rows), end="\n\n", flush=True)

        run_all(args, keep)
    results = file.rows
    errors = [result for result in results if "error" in result]
    for result in errors:
        print(f"--- {result['variant']}, {result['layers']} layers:\n{result['error']}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

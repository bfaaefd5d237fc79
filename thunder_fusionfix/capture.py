"""Traces a function or model as Thunder compiles it, with nvFuser's real fusion pass, on a machine without a GPU.

Nothing is computed and no memory of a tensor's size is taken: parameters and arguments are replaced by fake tensors that say
they are on "cuda", Thunder compiles for them, and what it would run is not run. nvFuser's fusion pass itself needs no GPU;
only Thunder's import of it does, which `_thunder.nvfuser_registered` gets around while a capture lasts.

A module goes the way of ThunderFX: torch.compile finds the FX graphs, Thunder's own splitter says which of their pieces
Thunder takes, and each piece is one `Part`. A causal LM of transformers 4.47.1 gives two, the model and its loss. A plain
function goes through ``thunder.jit`` and is one part. ``dynamo=`` turns either choice round.

    >>> import torch
    >>> got = capture(lambda a: torch.relu(a).sum(), [torch.empty(4, 4, requires_grad=True)], executors=("torchcompile_cat",))
    >>> len(got.parts), got.backward is not None
    (1, True)

Invariants: the caller's tensors, modules and Thunder's registry are as they were before, also after an error. What a capture
shows differs from a run in these points, and `Capture.notes` says where one of them applies: pieces that ThunderFX gives to
torch.compile are left out; arguments that share memory count as separate; an executor that is not installed is left out.
"""

from __future__ import annotations

import contextlib
import copy
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import thunder
import torch
from thunder.dynamo import ThunderCompiler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from thunder_fusionfix._thunder import (
    FusionExecutor,
    TraceCtx,
    Transform,
    attention_as_on_hopper,
    before_split,
    compile_data_and_stats,
    fallbacks_without_driver,
    get_executor,
    nvfuser_registered,
    replaced,
    splitter,
    thunderfx_left_out,
    thunderfx_pieces,
)
from thunder_fusionfix.errors import UnsupportedTraceError, UsageError
from thunder_fusionfix.garbage import collected_later
from thunder_fusionfix.splitter import asking_once

EXECUTORS = ("sdpa", "torchcompile_cat", "nvfuser")  # what ThunderFX users are told to give

# torch.compile keeps this many versions of one function and then runs it uncompiled: captures of other sizes must not count.
_MANY_VERSIONS = 10_000


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where the time of one part went, in seconds of wall time."""

    total: float  # all of Thunder's compile, from the call to the finished traces
    fusion: float  # of it, fusion passes of all fusion executors
    transforms: float  # of it, the given transforms' hooks after optimization


@dataclass(frozen=True)
class Part:
    """One function that Thunder compiles."""

    name: str  # "thunder_0 of graph 1"; for a function its own name
    joint: TraceCtx = field(
        repr=False
    )  # forward and backward in one, as the last fusion executor in the list is given it
    fused: TraceCtx = field(repr=False)  # the same after all fusion passes, right before the split
    forward_before: TraceCtx = field(repr=False)  # final forward trace as the first of the given transforms sees it
    backward_before: TraceCtx | None = field(
        repr=False
    )  # the same for backward; None where nothing requires a gradient
    forward: TraceCtx = field(repr=False)  # final forward trace, after the given transforms
    backward: TraceCtx | None = field(repr=False)
    seconds: Seconds
    jitted: Any = field(repr=False)  # what thunder.jit returned; it owns the compile data
    is_thunders: bool = True  # False: torch.compile gets it; traced, unfused, to know what it takes, saves and gives

    @property
    def executors(self) -> tuple[Any, ...]:
        """Thunder's resolved executor list, as transforms are given it (`executors_list`)."""
        return tuple(thunder.compile_data(self.jitted).executors_list)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """The state in which Thunder's hooks run: compile options can be read, and regions can be fused anew."""
        data, stats = thunder.compile_data(self.jitted), thunder.compile_stats(self.jitted)
        with nvfuser_registered(), compile_data_and_stats(data, stats):
            yield


@dataclass(frozen=True, slots=True)
class Split:
    """A place where a program stops being one Thunder function."""

    graph: int  # of torch.compile: the one that ends here, or that ThunderFX cuts
    by: str  # "torch.compile" or "ThunderFX"
    what: str  # "modeling_qwen2.py:1184", or the function that is given to torch.compile
    why: str
    times: int = 1


@dataclass(frozen=True)
class Capture:
    """What `capture` found. ``joint``, ``forward`` and ``backward`` are those of the largest part."""

    parts: tuple[Part, ...]  # in the order in which the program calls them
    notes: tuple[str, ...]  # where a run under ThunderFX would differ, for people
    seconds: float  # wall time of everything, torch.compile's graph capture included
    splits: tuple[Split, ...] = ()  # with dynamo: why there are several parts
    between: tuple[Part, ...] = ()  # pieces that ThunderFX gives to torch.compile
    calls: tuple[str, ...] = ()  # names of all parts, those between included, in the order of the calls

    @cached_property
    def called(self) -> tuple[Part, ...]:
        """All parts in the order in which the program calls them, those that torch.compile gets included."""
        named = {part.name: part for part in (*self.parts, *self.between)}
        return tuple(named[name] for name in self.calls if name in named)

    @cached_property
    def largest(self) -> Part:
        """The part with the most operations; the first of them."""
        return max(self.parts, key=lambda part: len(part.fused.bound_symbols))

    @property
    def joint(self) -> TraceCtx:
        return self.largest.joint

    @property
    def forward(self) -> TraceCtx:
        return self.largest.forward

    @property
    def backward(self) -> TraceCtx | None:
        return self.largest.backward


def capture(
    model_or_fn: Callable,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str = "cuda",
    executors: Sequence[Any] = EXECUTORS,
    fusion_type: str | None = None,
    transforms: Sequence[Transform] = (),
    grad: bool = True,
    dynamo: bool | None = None,
    progress: Callable[[str], None] = lambda step: None,
    **thunder_options: Any,
) -> Capture:
    """The traces that Thunder makes of ``model_or_fn(*args, **kwargs)``.

    Args:
        model_or_fn: a module (real, fake or on "meta"; it is not changed) or a function. Tensors that a plain function
            closes over stay where they are; give them as arguments.
        args: positional arguments; their tensors may be real, fake or on "meta", only shape, strides, dtype and
            requires_grad count.
        kwargs: keyword arguments, likewise.
        device: where all tensors are said to be.
        executors: names or executors, as for ``thunder.jit``. "nvfuser" is left out, with a note, where it is not installed.
        fusion_type: "dataflow" or "consecutive"; by default what Thunder takes: "dataflow" with dynamo, else "consecutive".
        transforms: as for ``thunder.jit``.
        grad: False compiles as under ``torch.no_grad()``.
        dynamo: True goes through torch.compile as ThunderFX does, False through ``thunder.jit``; by default True for modules.
        progress: called with a few words at each step that takes time.
        thunder_options: further options of ``thunder.jit``.

    Raises:
        UsageError: an executor or fusion type that does not exist, or a tensor that is not plain and strided.
        UnsupportedTraceError: torch.compile found nothing to compile, or gave none of it to Thunder.
    """
    start = time.perf_counter()
    if fusion_type not in (None, "dataflow", "consecutive"):
        raise UsageError(f"fusion_type={fusion_type!r}: 'dataflow' or 'consecutive'")
    dynamo = isinstance(model_or_fn, torch.nn.Module) if dynamo is None else dynamo
    options = {**thunder_options, "fusion_type": fusion_type or ("dataflow" if dynamo else "consecutive")}
    notes, splits = list(_shared_memory((args, kwargs))), list[Split]()

    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        nvfuser_registered() as nvfuser,
        fallbacks_without_driver(),
        torch.set_grad_enabled(grad),
        collected_later(),
    ):
        options["executors"] = _resolve(executors, nvfuser, notes)
        recorder = _Recorder(options["executors"], tuple(transforms))
        options["transforms"] = recorder.transforms
        with fake_mode:
            faker = _Faker(device)
            fn = faker.module_or_function(model_or_fn)
            fake_args, fake_kwargs = faker.tree(tuple(args or ())), faker.tree(dict(kwargs or {}))
        if dynamo:
            jobs = _thunderfx_jobs(fn, fake_args, fake_kwargs, fake_mode, options, notes, splits, progress)
        else:
            name = getattr(fn, "__name__", type(fn).__name__)
            jobs = [_Job(name, thunder.jit(fn, **options), fake_args, fake_kwargs, grad)]
        with fake_mode:
            parts = tuple(recorder.compile(job, progress) for job in jobs if job.is_thunders)
            between = tuple(_traced(recorder, job, progress, notes) for job in jobs if not job.is_thunders)
    if all(part.backward is None for part in parts) and grad:
        notes.append("No argument and no parameter requires a gradient: there is no backward trace.")
    return Capture(
        parts,
        tuple(notes),
        time.perf_counter() - start,
        tuple(splits),
        tuple(part for part in between if part is not None),
        tuple(job.name for job in jobs),
    )


# ---------------------------------------------------------------- arguments


@dataclass(slots=True)
class _Faker:
    """Makes fake tensors on one device, one for each original, so that tied parameters stay tied. Needs a fake mode."""

    device: str
    made: dict[int, torch.Tensor] = field(default_factory=dict)  # id of the original -> its fake
    kept: list[torch.Tensor] = field(default_factory=list)  # originals: their ids must not be used again

    def tensor(self, original: torch.Tensor) -> torch.Tensor:
        """A fake of the same shape, strides, dtype and class (tensor or parameter)."""
        if id(original) in self.made:
            return self.made[id(original)]
        if original.layout is not torch.strided:
            raise UsageError(f"a tensor with layout {original.layout} cannot be captured; give a strided one")
        fake = torch.empty_strided(original.size(), original.stride(), dtype=original.dtype, device=self.device)
        if isinstance(original, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, original.requires_grad)
        elif original.requires_grad:
            fake.requires_grad_(True)
        self.made[id(original)] = fake
        self.kept.append(original)
        return fake

    def tree(self, values: Any) -> Any:
        """``values`` with every tensor replaced."""
        return pytree.tree_map_only(torch.Tensor, self.tensor, values)

    def module_or_function(self, fn: Callable) -> Callable:
        """A copy of a module with every tensor in its attributes replaced; a function as it is."""
        if not isinstance(fn, torch.nn.Module):
            return fn
        for module in fn.modules():
            for attribute in vars(module).values():
                self.tree(attribute)
        # deepcopy takes what its memo holds instead of copying: no weight is ever copied
        return copy.deepcopy(fn, dict(self.made))


def _shared_memory(values: Any) -> Iterator[str]:
    """A note where tensors in ``values`` share memory."""
    storages: dict[Any, list[torch.Tensor]] = {}
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta":
            storages.setdefault(leaf.untyped_storage()._cdata, []).append(leaf)
    if any(len(tensors) > 1 for tensors in storages.values()):
        yield "Arguments that share memory are shown as separate: Thunder would look for in-place ops that they both see."


def _resolve(executors: Sequence[Any], nvfuser: FusionExecutor | None, notes: list[str]) -> tuple[Any, ...]:
    """The executors, by name or as they are; without "nvfuser", and a note, where there is none."""
    resolved = []
    for executor in executors:
        if executor == "nvfuser" and nvfuser is None:
            notes.append(
                "nvFuser is not installed (it has wheels for Python 3.10 and 3.12): shown without its fusions."
            )
            continue
        found = get_executor(executor) if isinstance(executor, str) else executor
        if found is None:
            names = sorted(str(known.name) for known in thunder.get_all_executors())
            raise UsageError(f"there is no executor {executor!r}; Thunder knows {', '.join(names)}")
        resolved.append(found)
    return tuple(resolved)


# ---------------------------------------------------------------- ThunderFX


@dataclass(frozen=True, slots=True)
class _Job:
    """One function for Thunder to compile, and what it is called with."""

    name: str
    jitted: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grad: bool  # whether gradients are on where the program calls it
    is_thunders: bool = True


def _thunderfx_jobs(
    fn: Callable,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    fake_mode: FakeTensorMode,
    options: Mapping[str, Any],
    notes: list[str],
    splits: list[Split],
    progress: Callable[[str], None],
) -> list[_Job]:
    """The pieces of the program that ThunderFX would give to Thunder, in call order; ``splits`` gets what is between them."""
    jobs: list[_Job] = []
    num_graphs = 0
    breaks: list[tuple[int, str]] = []  # graph, and where it ends

    def backend(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable:
        nonlocal num_graphs
        progress(f"graph {num_graphs}: {len(graph.graph.nodes)} nodes")
        eager = copy.deepcopy(graph)  # Thunder's splitter changes checkpointed functions in place
        # a compiler for each graph: it adds a transform of its own to the list that it is given, every time
        # the tensors that the splitter makes must be fake too, in this mode and not in the one that torch.compile gives backends
        with _splitting_only(), torch._guards.tracing(None), fake_mode:
            compiler = ThunderCompiler(**{**options, "transforms": list(options["transforms"])})
            compiler(graph, examples)
        for piece in thunderfx_pieces(compiler):
            name = f"{piece.name} of graph {num_graphs}"
            is_thunders = piece.jitted is not None
            jitted = piece.jitted if is_thunders else thunder.jit(piece.module, **_unfused(options))
            jobs.append(_Job(name, jitted, piece.examples, {}, torch.is_grad_enabled(), is_thunders))
        if left_out := thunderfx_left_out(compiler):
            notes.append(
                f"Graph {num_graphs}: ThunderFX gives {', '.join(sorted({name for name, _ in left_out}))} to torch.compile and "
                "the pieces before and after to Thunder; only these are shown."
            )
            counted = Counter(left_out).items()
            splits.extend(Split(num_graphs, "ThunderFX", name, why, times) for (name, why), times in counted)
        ended = getattr(graph, "compile_subgraph_reason", None)
        if ended is not None and ended.graph_break:
            breaks.append((num_graphs, _place(ended.user_stack)))
        num_graphs += 1
        return eager.forward

    # torch.compile traces into `re` where a pattern is not in its cache, and cannot go on there: transformers 4.47.1 looks up
    # its loss with a pattern, so that the first call of a process makes two graphs and a later one makes one. Show the first.
    re.purge()
    limits = {"recompile_limit": _MANY_VERSIONS, "accumulated_recompile_limit": _MANY_VERSIONS}
    before = Counter(torch._dynamo.utils.counters["graph_break"])
    with torch._dynamo.config.patch(limits), fake_mode:
        torch.compile(fn, backend=backend, dynamic=False)(*args, **kwargs)
    told = map(_explanation, (Counter(torch._dynamo.utils.counters["graph_break"]) - before).elements())
    splits += (Split(at, "torch.compile", place, next(told, "torch.compile does not say why")) for at, place in breaks)
    if num_graphs > 1:
        notes.append(
            f"torch.compile makes {num_graphs} graphs of this program: a gradient that goes from one to another lives until "
            "the backward of the one that receives it returns, unless that one takes it over (own_cotangents)."
        )
    if not any(job.is_thunders for job in jobs):
        raise UnsupportedTraceError("torch.compile gave nothing of this program to Thunder; try dynamo=False")
    return jobs


def _unfused(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with which Thunder traces what it is not given to run: no executor, and our own hooks alone."""
    first, *_, last = options["transforms"]
    return {**options, "executors": (), "transforms": [first, last], "thunderfx_disable_split_autograd": True}


def _place(stack: Sequence[Any]) -> str:
    """File and line of the innermost frame of a torch.compile stack."""
    return f"{Path(stack[-1].filename).name}:{stack[-1].lineno}" if stack else "?"


def _explanation(reason: str) -> str:
    """The sentence in which torch.compile tells why it broke a graph."""
    found = re.search(r"Explanation: (.*)", reason)
    return (found[1] if found else reason.splitlines()[0]).strip()


@contextlib.contextmanager
def _splitting_only() -> Iterator[None]:
    """ThunderFX splits graphs but compiles no piece: what it would give to torch.compile stays as it is.

    ``thunder.jit`` compiles on the first call only. Equal nodes are asked about once, whatever the options.
    """
    name = "is_node_supported_by_thunder"
    with (
        replaced(splitter, name, asking_once(getattr(splitter, name), lambda options: True)),
        replaced(torch._inductor, "compile", lambda graph, _: graph),
    ):
        yield


# ---------------------------------------------------------------- recording


def _traced(recorder: _Recorder, job: _Job, progress: Callable[[str], None], notes: list[str]) -> Part | None:
    """What torch.compile gets, as Thunder would trace it; None, with a note, where Thunder cannot."""
    try:
        return recorder.compile(job, progress)
    except Exception as error:  # noqa: BLE001 -- whatever Thunder lacks, the parts that it takes are known
        notes.append(f"{job.name}, which torch.compile gets, counts as nothing: {type(error).__name__}: {error}"[:300])
        return None


class _Hook(Transform):
    """Keeps the traces that Thunder hands to it, forward first, and when."""

    def __init__(self) -> None:
        self.traces: list[TraceCtx] = []
        self.times: list[float] = []

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        self.traces.append(computation_trace)
        self.times.append(time.perf_counter())
        return computation_trace

    def forget(self) -> None:
        self.traces, self.times = [], []

    @property
    def forward(self) -> TraceCtx:
        return self.traces[0]

    @property
    def backward(self) -> TraceCtx | None:
        return self.traces[1] if len(self.traces) > 1 else None


class _FusionWatch:
    """Keeps what goes through fusion passes, and how long they take."""

    def __init__(self) -> None:
        self.given: list[TraceCtx] = []
        self.made: list[TraceCtx] = []
        self.seconds = 0.0

    def watched(self, fusion_pass: Callable[[TraceCtx], TraceCtx]) -> Callable[[TraceCtx], TraceCtx]:
        """A fusion pass that does the same and is seen."""

        def watch(trace: TraceCtx) -> TraceCtx:
            start = time.perf_counter()
            made = fusion_pass(trace)
            self.seconds += time.perf_counter() - start
            self.given.append(trace)
            self.made.append(made)
            return made

        return watch


class _Recorder:
    """Lets Thunder compile one function after another with the same options."""

    def __init__(self, executors: Sequence[Any], transforms: Sequence[Transform]) -> None:
        self.before, self.after = _Hook(), _Hook()
        self.transforms = [self.before, *transforms, self.after]
        self.fusers = [executor for executor in executors if isinstance(executor, FusionExecutor)]

    def compile(self, job: _Job, progress: Callable[[str], None]) -> Part:
        """Lets Thunder compile ``job``, not run it."""
        progress(job.name)
        self.before.forget()
        self.after.forget()
        fusion, split = _FusionWatch(), list[TraceCtx]()
        start = time.perf_counter()
        with contextlib.ExitStack() as stack, torch.set_grad_enabled(job.grad), before_split(split.append):
            stack.enter_context(attention_as_on_hopper())
            for fuser in self.fusers:
                stack.enter_context(replaced(fuser, "fusion_pass", fusion.watched(fuser.fusion_pass)))
            thunder.compile_data(job.jitted).get_computation_and_inputs(*job.args, **job.kwargs)
        total = time.perf_counter() - start
        fused = [self.before.forward, *fusion.made, *split][-1]
        return Part(
            name=job.name,
            joint=[fused, *fusion.given][-1],
            fused=fused,
            forward_before=self.before.forward,
            backward_before=self.before.backward,
            forward=self.after.forward,
            backward=self.after.backward,
            seconds=Seconds(total, fusion.seconds, self.after.times[0] - self.before.times[-1]),
            jitted=job.jitted,
            is_thunders=job.is_thunders,
        )

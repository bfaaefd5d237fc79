"""The only home of version-bound imports from Thunder and nvFuser; importing it mends what is broken between the two.

Two mends. Nothing else changes, and where the two fit together nothing changes at all.

`mend_nvfuser`: Thunder 0.2.6 asks the module ``nvfuser`` for `compute_tensor_descriptor` each time it describes a fusion's
input, and nvFuser 0.2.36 ships that function in ``nvfuser_direct`` alone, so that every nvFusion fails when it is called.
Thunder's one caller of it gets the function that is there.

`mend_gradient_rules`: Thunder 0.2.6 takes an executor's gradient rule for an operator that the executor's own checker refuses, if
the executor can fuse what the operator is made of. nvFuser's rule for `cross_entropy` then gets what it was not written for: label
smoothing and class weights are left out without a word, a label >= 0 that is ignored gets a gradient, and a loss of bfloat16 logits
(GPT-2, GPT-NeoX, ViT) does not compile.

    >>> mend_nvfuser(), mend_gradient_rules()   # already done on import: nothing is left to mend
    (False, False)

Everything that other modules need of Thunder's private or version-bound names is re-exported here, each with its reason.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import thunder
import thunder.core.transforms
import thunder.transforms.autodiff
import torch
from looseversion import LooseVersion
from thunder.core.compile_data import compile_data_and_stats
from thunder.extend import FusionExecutor, deregister_executor, get_executor, register_executor

__all__ = [
    "TESTED",
    "FusionExecutor",
    "Piece",
    "Transform",
    "before_split",
    "compile_data_and_stats",
    "fallbacks_without_driver",
    "get_executor",
    "given_options",
    "installed_versions",
    "mend_gradient_rules",
    "mend_nvfuser",
    "nvfuser_registered",
    "nvfuser_version",
    "nvfuser_works",
    "replaced",
    "thunderfx_left_out",
    "thunderfx_pieces",
    "untested_versions",
    "warn_untested_versions",
]

_NVFUSER_IMPL = "thunder.executors.nvfuserex_impl"

# ---------------------------------------------------------------- the mends


def mend_nvfuser() -> bool:
    """Mends Thunder's nvFuser executor where it needs it; True where it changed something.

    Does nothing where the executor is not loaded (Thunder loads it where CUDA is available), where the old module
    ``nvfuser`` is installed, or where it was mended before.
    """
    impl = sys.modules.get(_NVFUSER_IMPL)
    if (
        impl is None
        or hasattr(getattr(impl, "compute_contiguity", None), "_mended")
        or importlib.util.find_spec("nvfuser") is not None
    ):
        return False
    nvfuser_direct = sys.modules.get("nvfuser_direct")
    if nvfuser_direct is None or not hasattr(nvfuser_direct, "compute_tensor_descriptor"):
        return False
    describe = nvfuser_direct.compute_tensor_descriptor

    @functools.lru_cache(maxsize=2048)  # the size that Thunder gives it
    def compute_contiguity(shape: Sequence[int], stride: Sequence[int]) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(part) for part in describe(shape, stride))

    compute_contiguity._mended = True  # type: ignore[attr-defined]
    impl.compute_contiguity = compute_contiguity  # type: ignore[attr-defined]
    return True


def mend_gradient_rules() -> bool:
    """Makes Thunder ask an executor's checker before it takes the executor's gradient rule; True where it changed something.

    An operator that is refused is differentiated by Thunder's own rule, or as the operators that it is made of. Does nothing with
    releases of Thunder that were not tested, or where it was done before.
    """
    transforms = thunder.core.transforms
    find = transforms._get_gradfn_and_executor
    if hasattr(find, "_mended") or not is_tested("lightning-thunder", _thunder_version()):
        return False

    @functools.wraps(find)
    def find_accepted(bsym: Any, **kwargs: Any) -> tuple[Callable | None, Any]:
        rule, executor = find(bsym, **kwargs)
        if executor is None or executor.can_execute(bsym):
            return rule, executor
        return transforms._grad_fn_map.get(bsym.sym.id), None

    find_accepted._mended = True  # type: ignore[attr-defined]
    for module in (transforms, thunder.transforms.autodiff):  # the second imported the name
        module._get_gradfn_and_executor = find_accepted
    return True


def nvfuser_works() -> bool:
    """True where Thunder's loaded nvFuser executor can describe a tensor, which it does for each input of a fusion."""
    try:
        sys.modules[_NVFUSER_IMPL].compute_contiguity((2, 3), (3, 1))
    except ImportError:
        return False
    return True


# ---------------------------------------------------------------- versions


# package -> the releases that the passes were tested with; pyproject.toml pins the same
TESTED: dict[str, tuple[str, ...]] = {
    "torch": ("2.10", "2.11"),
    "lightning-thunder": ("0.2.6",),
    "nvFuser": ("0.2.36",),
}


def installed_versions() -> dict[str, str | None]:
    """The version of torch, lightning-thunder and nvFuser; None for what is not installed."""
    return {
        "torch": str(torch.__version__),
        "lightning-thunder": _thunder_version(),
        "nvFuser": nvfuser_version(),
    }


def _thunder_version() -> str | None:
    try:
        return importlib.metadata.version("lightning-thunder")
    except importlib.metadata.PackageNotFoundError:
        return getattr(thunder, "__version__", None)


@functools.cache
def nvfuser_version() -> str | None:
    """nvFuser's version, "0.2.36+git7e04d26"; None where it is not installed or cannot be loaded."""
    try:
        import nvfuser_direct
    except ImportError:
        return None
    return str(nvfuser_direct.version())


def untested_versions() -> tuple[str, ...]:
    """One line for each installed package whose version the passes were not tested with; empty where all were.

    nvFuser may be missing: what is not there makes no fusions.
    """
    lines = []
    for package, version in installed_versions().items():
        if version is not None and not is_tested(package, version):
            lines.append(f"{package} {version} (tested: {', '.join(TESTED[package])})")
    return tuple(lines)


def is_tested(package: str, version: str | None) -> bool:
    """True where ``version`` of ``package``, one of those in `TESTED`, is a build or patch of a release that was tested."""
    return version is not None and any(_is_release(version, tested) for tested in TESTED[package])


def _is_release(version: str, release: str) -> bool:
    """True where ``version`` is ``release`` or a build or patch of it: "2.10.0+cu128" is "2.10", "2.1.0" is not."""
    return re.fullmatch(rf"{re.escape(release)}([.+].*)?", version) is not None


@functools.cache
def warn_untested_versions() -> bool:
    """True where an installed version was not tested; warns on the first call, naming all of them."""
    untested = untested_versions()
    if not untested:
        return False
    warnings.warn(
        f"thunder_fusionfix was not tested with {'; '.join(untested)}. Traces pass through untouched; give "
        "FusionFixTransform(untested_versions=True) to rewrite them all the same.",
        stacklevel=2,
    )
    return True


mend_nvfuser()
mend_gradient_rules()

# ---------------------------------------------------------------- what capture needs


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives the attribute ``name`` of ``owner`` another value while the context is open."""
    before = owner.__dict__.get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


_ABSENT = object()


@contextlib.contextmanager
def nvfuser_registered() -> Iterator[FusionExecutor | None]:
    """nvFuser's executor, known to Thunder while the context is open; None where nvFuser is not installed.

    With a GPU Thunder registers it itself and nothing is done. Without one Thunder does not even import it, because it asks
    CUDA first, on import and again for the version in many of its checks; here both get an answer, and the executor is
    taken out of Thunder's registry at the end. Its fusion pass then works; the fusions themselves cannot run.
    """
    registered = get_executor("nvfuser")
    if registered is not None or nvfuser_version() is None:
        yield registered
        return
    impl = _load_nvfuser_impl()
    version = LooseVersion(nvfuser_version())
    register_executor(impl.ex)
    try:
        with replaced(impl, "nvfuser_version", lambda: version):
            yield impl.ex
    finally:
        deregister_executor(impl.ex)


def _load_nvfuser_impl() -> Any:
    if _NVFUSER_IMPL not in sys.modules:
        with replaced(torch.cuda, "is_available", lambda: True):
            importlib.import_module(_NVFUSER_IMPL)
        mend_nvfuser()
    return sys.modules[_NVFUSER_IMPL]


@contextlib.contextmanager
def fallbacks_without_driver() -> Iterator[None]:
    """Lets Thunder find gradients of its automatic fallbacks ("torch.mm") for CUDA tensors where there is no driver.

    Thunder runs torch's autograd on fake tensors there, and the engine asks the driver for the device of each. In this context
    they say "cpu", and what comes back says the device again. Nothing is done where CUDA is available.
    """
    if torch.cuda.is_available():
        yield
        return
    fake_of, proxy_of = ltorch._get_fake_arg, ltorch._fake_type_to_thunder
    said: list[torch.device] = []  # devices that were replaced; a capture has one

    def fake_on_cpu(arg: Any) -> Any:
        fake = fake_of(arg)
        if not isinstance(fake, torch.Tensor) or fake.device.type != "cuda":
            return fake
        said.append(fake.device)
        return torch.empty_like(fake, device="cpu", requires_grad=fake.requires_grad)

    def proxy_on_device(fake: Any) -> Any:
        if said and isinstance(fake, torch.Tensor) and fake.device.type == "cpu":
            with torch._subclasses.fake_tensor.FakeTensorMode():
                fake = torch.empty(fake.shape, dtype=fake.dtype, device=said[-1], requires_grad=fake.requires_grad)
        return proxy_of(fake)

    with (
        replaced(ltorch, "_get_fake_arg", fake_on_cpu),
        replaced(ltorch, "_fake_type_to_thunder", proxy_on_device),
    ):
        yield


@contextlib.contextmanager
def attention_as_on_hopper() -> Iterator[None]:
    """Thunder's choice of a fused attention as on an H100 or H200, while the context is open; with a GPU its own.

    torch answers the question for the GPU that is there, and without one that no fused attention can run. The conditions are
    those of ``can_use_flash_attention`` and ``can_use_efficient_attention`` in torch 2.10 for compute capability 9.0, as far
    as they can be asked of shapes and dtypes.
    """
    if torch.cuda.is_available():
        yield
        return
    from thunder.executors import sdpaex

    with replaced(sdpaex, "_fused_sdp_choice", _hopper_attention):
        yield


def _hopper_attention(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: float = 0.0, is_causal: bool = False, scale: Any = None
) -> Any:
    """The attention kernel for these proxies: flash, else memory-efficient, else none."""
    from thunder.executors.utils import SpdaBackend

    tensors, dtype = (query, key, value), query.dtype
    if any(tensor.ndim != 4 or tensor.dtype != dtype or 0 in tensor.shape for tensor in tensors):
        return SpdaBackend.MATH
    if any(tensor.shape[:2] != query.shape[:2] for tensor in tensors):
        return SpdaBackend.MATH
    width = query.shape[-1]
    low_precision = dtype in (dtypes.bfloat16, dtypes.float16)
    same_width = all(tensor.shape[-1] == width for tensor in tensors)
    square = not is_causal or query.shape[-2] == key.shape[-2]
    if low_precision and same_width and width <= 256 and mask is None and square:
        return SpdaBackend.FLASH_ATTENTION
    aligned = 8 if low_precision else 4  # elements in 16 bytes, what the tensor cores load
    fits = key.shape[-1] == width and width % aligned == 0 and value.shape[-1] % aligned == 0
    if fits and (low_precision or dtype is dtypes.float32) and not (mask is not None and mask.requires_grad):
        return SpdaBackend.MEMORY_EFFICIENT
    return SpdaBackend.MATH


@contextlib.contextmanager
def before_split(seen: Callable[[Any], None]) -> Iterator[None]:
    """Calls ``seen`` with each joint trace that Thunder splits into forward and backward while the context is open."""
    from thunder.transforms import autodiff

    split = autodiff.split_into_forward_and_backward

    def see_and_split(trace: Any) -> Any:
        seen(trace)
        return split(trace)

    with replaced(autodiff, "split_into_forward_and_backward", see_and_split):
        yield


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of a graph that ThunderFX split."""

    name: str  # "thunder_0", or "inductor_1" for one that torch.compile gets
    jitted: Any  # what thunder.jit made of it; None where torch.compile gets it
    module: Any  # its GraphModule
    examples: tuple[Any, ...]  # a fake tensor, or a number, for each of its inputs


def thunderfx_pieces(compiler: Any) -> tuple[Piece, ...]:
    """The pieces of the last graph that ``compiler`` split, in call order."""
    split = compiler.subgraph_infos[-1].split_graph_module
    pieces = []
    for node in split.graph.find_nodes(op="call_module"):
        called = getattr(split, node.target)
        jitted = called if node.target.startswith("thunder") else None
        module = thunder.compile_data(called).fn if jitted is not None else called.graph.owning_module
        placeholders = module.graph.find_nodes(op="placeholder")
        examples = tuple(arg.meta["example_value"] for arg in placeholders)
        pieces.append(Piece(node.target, jitted, module, examples))
    return tuple(pieces)


def thunderfx_left_out(compiler: Any) -> tuple[tuple[str, str], ...]:
    """Why ThunderFX gave pieces of the last graph to torch.compile: name of the function and reason, in call order."""
    found = []
    for reason in compiler.subgraph_infos[-1].split_reasons or ():
        info = reason.info or ""
        target = re.search(r"target: (?:<[a-z-]+ (?:method |function )?)?([\w.]+)", info)
        fallback = "only has an automatic torch fallback"
        told = fallback if fallback in info else (reason.exception or info).strip().splitlines()[-1:]
        found.append((target[1] if target else "?", told if isinstance(told, str) else "".join(told)))
    return tuple(found)


# ---------------------------------------------------------------- what read.py and edit.py need

from thunder.core import dtypes as dtypes
from thunder.core import prims as prims
from thunder.core.codeutils import ContextObject as ContextObject
from thunder.core.codeutils import prettyprint as prettyprint
from thunder.core.codeutils import to_printable as to_printable
from thunder.core.compile_data import (
    _compile_data as _compile_data,  # the pair (CompileData, CompileStats) of the running compile
)
from thunder.core.compile_data import get_compile_data as get_compile_data
from thunder.core.compile_data import get_compile_option as get_compile_option
from thunder.core.devices import to_device as to_device
from thunder.core.prims import PrimIDs as PrimIDs
from thunder.core.proxies import CollectionProxy as CollectionProxy
from thunder.core.proxies import FutureTensorProxy as FutureTensorProxy
from thunder.core.proxies import NumberProxy as NumberProxy
from thunder.core.proxies import Proxy as Proxy
from thunder.core.proxies import TensorProxy as TensorProxy
from thunder.core.proxies import variableify as variableify
from thunder.core.pytree import tree_flatten as tree_flatten
from thunder.core.pytree import tree_iter as tree_iter
from thunder.core.pytree import tree_map as tree_map
from thunder.core.pytree import tree_unflatten as tree_unflatten
from thunder.core.recipe import Plugin as Plugin
from thunder.core.recipe import PluginPolicy as PluginPolicy
from thunder.core.symbol import BoundSymbol as BoundSymbol
from thunder.core.symbol import BoundSymbolTag as BoundSymbolTag
from thunder.core.symbol import Symbol as Symbol
from thunder.core.trace import TraceCtx as TraceCtx
from thunder.core.trace import TraceProvenance as TraceProvenance
from thunder.core.trace import from_trace as from_trace
from thunder.core.trace import get_tracectx as get_tracectx
from thunder.core.trace import tracectx as tracectx
from thunder.core.transform_common import Transform as Transform
from thunder.core.transforms import TraceTag as TraceTag
from thunder.executors.pythonex import clear_mutable_collection as clear_mutable_collection
from thunder.executors.torchex import contiguous as contiguous
from thunder.extend import get_always_executors as get_always_executors
from thunder.plugins import register_plugin as register_plugin


def keep_object_names(trace: TraceCtx, before: TraceCtx) -> None:
    """Lets ``trace`` call objects that Thunder cannot write down (memory formats, process groups) what ``before`` calls them.

    Thunder numbers them anew in every trace, so that an op which did not change would read as another one.
    """
    trace._object_ctx = dict(before._object_ctx)


def get_compile_stats() -> Any:
    """The CompileStats of the compile that runs now, whose `last_traces` grow as it goes; None outside a compile."""
    return _compile_data.get()[1]


# ---------------------------------------------------------------- what share.py and splitter.py need

from thunder.core.devices import Device as Device
from thunder.dynamo import splitter as splitter  # its `is_node_supported_by_thunder` is looked up for every node
from thunder.executors import torch_compile as torch_compile  # its `make_compiled` is looked up when a region is made
from thunder.torch.experimental.dtensor_proxy import DTensorProxy as DTensorProxy
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

real_tensors = _disable_current_modes  # a context in which a FakeTensorMode around it does not count


def nvfuser_impl() -> Any | None:
    """The module of Thunder's nvFuser executor; None where Thunder has not loaded it: no GPU, no nvFuser."""
    return sys.modules.get(_NVFUSER_IMPL)


def make_executable(definition: Any) -> None:
    """Does what the first ``execute`` of an nvFuser definition would do, in steps between which another thread could come.

    A definition that is empty, or already executable, stays as it is.
    """
    if hasattr(definition, "fec") or not getattr(definition, "validate_definition", lambda: (False,))()[0]:
        return
    from nvfuser_direct import FusionExecutorCache

    definition.fec = FusionExecutorCache(definition._fusion)
    del definition._fusion  # the cache has taken it over


# ---------------------------------------------------------------- what take_addmm.py, cotangents.py, undefined.py, executor.py and passes/cudnn_attention.py need

from thunder import torch as ltorch
from thunder.core.prims import get_grad as get_grad
from thunder.core.prims import put_grad as put_grad
from thunder.core.transforms import register_grad as register_grad
from thunder.dynamo.utils import (
    try_execute_thunder_symbol as try_execute_thunder_symbol,  # how ThunderFX asks about an FX node
)
from thunder.executors import sdpaex as sdpaex  # its symbols of flash attention, and what they run
from thunder.executors import torch_autograd
from thunder.executors.torch_autograd import connect_to_autograd as connect_to_autograd
from thunder.extend import FUEL_LEVEL as FUEL_LEVEL
from thunder.extend import OperatorExecutor as OperatorExecutor
from thunder.torch import (
    _torch_to_thunder_function_map as _torch_to_thunder_function_map,  # what Thunder traces for a function of torch
)

_FORWARDS = {
    "ThunderFunction": "ctx return_none_instead_of_grads compiled_backward side_channel saved_tensors saved_other"
    " is_differentiable_outputs flat_output flat_args",
    "ThunderOutputFunction": "ctx dummy side_channel args",
}  # what the forwards of Thunder's autograd functions take


def autograd_functions() -> tuple[Any, Any] | None:
    """Thunder's autograd function, and the one that gives the outputs where autograd is split; None where they are others."""
    functions = tuple(getattr(torch_autograd, name, None) for name in _FORWARDS)
    for function, names in zip(functions, _FORWARDS.values()):
        forward = getattr(function, "forward", None)
        if forward is None or " ".join(inspect.signature(forward).parameters) != names:
            return None
    whole, outputs = functions
    return whole, outputs


def given_options(prefix: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """What the user gave to Thunder under ``prefix``, by names without it; misspelt ones included, so that somebody says so.

    Args:
        prefix: of the options' names.
        texts: known options, and what to say of each in Thunder's own list of compile options.
    """
    for name, text in texts.items():
        get_compile_option(prefix + name, text)  # enters it in the list
    compile_data = get_compile_data()
    given = compile_data.compile_options if compile_data is not None else {}
    return {
        name.removeprefix(prefix): value
        for name, value in given.items()
        if name.startswith(prefix) and value is not None
    }

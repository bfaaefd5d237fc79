"""The only home of version-bound imports from Thunder and nvFuser; importing it mends what is broken between the two.

The one mend: Thunder 0.2.6 asks the module ``nvfuser`` for `compute_tensor_descriptor` each time it describes a fusion's
input, and nvFuser 0.2.36 ships that function in ``nvfuser_direct`` alone, so that every nvFusion fails when it is called.
`mend_nvfuser` gives Thunder's one caller of it the function that is there. Nothing else changes, and where the two fit
together nothing changes at all.

    >>> mend_nvfuser()   # already done on import: nothing is left to mend
    False

Everything that other modules need of Thunder's private or version-bound names is re-exported here, each with its reason.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import thunder
import torch
from thunder.extend import FusionExecutor, get_executor, resolve_executors

__all__ = [
    "TESTED",
    "FusionExecutor",
    "get_executor",
    "installed_versions",
    "mend_nvfuser",
    "nvfuser_version",
    "resolve_executors",
    "untested_versions",
    "warn_untested_versions",
]

_NVFUSER_IMPL = "thunder.executors.nvfuserex_impl"

# ---------------------------------------------------------------- the mend


def mend_nvfuser() -> bool:
    """Mends Thunder's nvFuser executor where it needs it; True where it changed something.

    Does nothing where the executor is not loaded (Thunder loads it where CUDA is available), where the old module
    ``nvfuser`` is installed, or where it was mended before.
    """
    impl = sys.modules.get(_NVFUSER_IMPL)
    if impl is None or hasattr(getattr(impl, "compute_contiguity", None), "_mended") or importlib.util.find_spec("nvfuser") is not None:
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
        if version is not None and not any(_is_release(version, tested) for tested in TESTED[package]):
            lines.append(f"{package} {version} (tested: {', '.join(TESTED[package])})")
    return tuple(lines)


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

# ---------------------------------------------------------------- what read.py and edit.py need

from thunder.core import prims as prims
from thunder.core.codeutils import ContextObject as ContextObject
from thunder.core.codeutils import prettyprint as prettyprint
from thunder.core.compile_data import (
    _compile_data as _compile_data,  # the pair (CompileData, CompileStats) of the running compile
)
from thunder.core.compile_data import get_compile_data as get_compile_data
from thunder.core.compile_data import get_compile_option as get_compile_option
from thunder.core.prims import PrimIDs as PrimIDs
from thunder.core.proxies import CollectionProxy as CollectionProxy
from thunder.core.proxies import NumberProxy as NumberProxy
from thunder.core.proxies import Proxy as Proxy
from thunder.core.proxies import TensorProxy as TensorProxy
from thunder.core.proxies import variableify as variableify
from thunder.core.pytree import tree_iter as tree_iter
from thunder.core.symbol import BoundSymbol as BoundSymbol
from thunder.core.symbol import BoundSymbolTag as BoundSymbolTag
from thunder.core.trace import TraceCtx as TraceCtx
from thunder.core.trace import TraceProvenance as TraceProvenance
from thunder.core.trace import from_trace as from_trace
from thunder.core.trace import tracectx as tracectx
from thunder.core.transforms import TraceTag as TraceTag
from thunder.extend import get_always_executors as get_always_executors


def get_compile_stats() -> Any:
    """The CompileStats of the compile that runs now, whose `last_traces` grow as it goes; None outside a compile."""
    return _compile_data.get()[1]

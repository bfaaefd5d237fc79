"""A Lightning Thunder plugin that keeps memory-costly layout ops out of fusions, and shows what it did.

    from thunder.dynamo import ThunderCompiler
    from thunder_fusionfix import FusionFixTransform

    backend = ThunderCompiler(executors=("sdpa", "torchcompile_cat", "nvfuser"), transforms=[FusionFixTransform()])
    model = torch.compile(model, backend=backend)

Public names load on first use, so that the pure layers (`model`, `simulate`, `verify`, ...) and the command's help need
neither torch nor Thunder. Functions that share their module's name are taken from there:
``from thunder_fusionfix.capture import capture``.

Importing this package mends Thunder and registers the plugin with it: at once where Thunder is imported already,
otherwise right after its import.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

__version__ = "0.1.0"

# public name -> module that holds it
_PUBLIC = {
    "Capture": "capture",
    "FusionFixConfig": "config",
    "FusionFixError": "errors",
    "FusionFixTransform": "transform",
    "Graph": "model",
    "Report": "model",
    "Timeline": "model",
    "diff_traces": "sources",
    "load_model": "models",
}

# module -> what is imported right after it: mending Thunder first, then registering the plugin and the executor with it, and
# the hooks by which equal fusions are compiled once and equal nodes are asked about once. The latter must not import other modules of ours that import `_thunder`: one of those may be what imports it now.
_FOLLOWERS = {"thunder": ("_thunder",), f"{__name__}._thunder": ("plugin", "executor", "share", "splitter")}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604 -- the keys are strings


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


def _import_followers(module: str) -> None:
    for follower in _FOLLOWERS[module]:
        importlib.import_module(f"{__name__}.{follower}")


class _Follow(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do, and imports the followers of one when it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _FOLLOWERS:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_follow(module: types.ModuleType) -> None:
            execute(module)
            _import_followers(fullname)

        spec.loader.exec_module = execute_and_follow  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Follow())
if "thunder" in sys.modules:
    _import_followers("thunder")

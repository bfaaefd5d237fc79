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
    "load_model": "models",
}

# Modules that change or extend Thunder when they are imported.
_THUNDER_SIDE = ("_thunder",)

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604 -- the keys are strings


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


def _join_thunder() -> None:
    for module in _THUNDER_SIDE:
        importlib.import_module(f"{__name__}.{module}")


class _AfterThunder(importlib.abc.MetaPathFinder):
    """Finds the module "thunder" as the other finders do, and calls `_join_thunder` when it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "thunder":
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_join(module: types.ModuleType) -> None:
            execute(module)
            _join_thunder()

        spec.loader.exec_module = execute_and_join  # type: ignore[method-assign]
        return spec


if "thunder" in sys.modules:
    _join_thunder()
else:
    sys.meta_path.insert(0, _AfterThunder())

"""Every option of the passes, its default and why.

An option is given to `FusionFixTransform` by its name, or to Thunder as a compile option with the prefix ``fusionfix_``
(``ThunderCompiler(..., fusionfix_unfuse_layouts=False)``); the argument wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from thunder_fusionfix.errors import UsageError

PREFIX = "fusionfix_"


@dataclass(frozen=True, slots=True)
class FusionFixConfig:
    """Options of the passes; each field's comment says what it does."""

    unfuse_layouts: bool = True  # layout ops leave fusion regions
    share_fusions: bool = True  # equal fusion regions compile once
    verify: bool = True  # check every rewrite; a failure keeps the input trace
    strict: bool = False  # raise on a failed check instead of keeping the input trace with a warning; for tests
    debug_execute: bool = False  # run old and new region bodies on small random CPU tensors and compare
    untested_versions: bool = False  # rewrite also under versions that this release was not tested with
    fuel: int | None = None  # at most this many rewrites, for bisecting a wrong result; None: no limit

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> FusionFixConfig:
        """The config that ``options`` (names without prefix) asks for.

        Raises:
            UsageError: for a name that is no option, or a value of the wrong type.
        """
        known = {field.name: field for field in fields(cls)}
        for name, value in options.items():
            if name not in known:
                raise UsageError(f"fusionfix has no option {name!r}; its options are {', '.join(known)}")
            check_option(name, value)
        return cls(**options)


def option_names() -> dict[str, str]:
    """Every option's name with a word on it, for Thunder's listing of compile options."""
    return {field.name: f"default {field.default!r}; see FusionFixConfig" for field in fields(FusionFixConfig)}


def check_option(name: str, value: Any) -> None:
    """Raises `UsageError` where ``value`` is not legal for the option ``name``."""
    if name == "fuel":
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise UsageError(f"fusionfix option fuel={value!r}: a number of rewrites >= 0, or None for no limit")
    elif not isinstance(value, bool):
        raise UsageError(f"fusionfix option {name}={value!r}: True or False")

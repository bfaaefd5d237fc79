"""The ways to run a program that `bench` compares.

    >>> VARIANTS["plain"].executors, VARIANTS["eager"].executors
    (('sdpa', 'torchcompile_cat', 'nvfuser'), None)

Those of this project are compared with each of the others. A variant that is not of the default ones is measured where
it is asked for: sharing equal fusions alone is plain Thunder made to finish on deep models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thunder_fusionfix.errors import UsageError

_NVFUSER = ("sdpa", "torchcompile_cat", "nvfuser")
_ENTRY = ("sdpa", "torchcompile_cat", "fusionfix", "nvfuser")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a program."""

    label: str  # for people
    executors: tuple[str, ...] | None = None  # Thunder's list; None: Thunder does not compile it
    transform: bool = False  # with FusionFixTransform
    options: Mapping[str, Any] = field(default_factory=dict)  # further compile options of Thunder
    is_default: bool = True

    @property
    def is_ours(self) -> bool:
        """True where a rewrite of this project is in use."""
        return self.transform or self.has_entry

    @property
    def has_entry(self) -> bool:
        return self.executors is not None and "fusionfix" in self.executors


SHARED = {"fusionfix_share_fusions": True}

VARIANTS: Mapping[str, Variant] = {
    "plain": Variant("plain Thunder", _NVFUSER),
    "plain-shared": Variant("plain Thunder, equal fusions shared", _NVFUSER, options=SHARED, is_default=False),
    "plain-shape-only": Variant(
        "plain Thunder, nv_enable_shape_only_fusion",
        _NVFUSER,
        options={"nv_enable_shape_only_fusion": True},
        is_default=False,
    ),
    "torchcompile": Variant("Thunder, torchcompile executor", ("sdpa", "torchcompile")),
    "torchcompile-shared": Variant(
        "Thunder, torchcompile executor, equal regions shared",
        ("sdpa", "torchcompile"),
        options=SHARED,
        is_default=False,
    ),
    "torch-compile": Variant("torch.compile"),
    "eager": Variant("eager"),
    "transform": Variant("fusionfix, transform", _NVFUSER, transform=True),
    "entry": Variant("fusionfix, entry", _ENTRY),
    "both": Variant("fusionfix, transform and entry", _ENTRY, transform=True),
}
DEFAULT = tuple(name for name, variant in VARIANTS.items() if variant.is_default)
OURS = tuple(name for name, variant in VARIANTS.items() if variant.is_ours)
OTHERS = tuple(name for name in VARIANTS if name not in OURS)


def find(name: str) -> Variant:
    """The variant called ``name``.

    Raises:
        UsageError: there is none; the message lists those that there are.
    """
    if name not in VARIANTS:
        raise UsageError(f"there is no variant {name!r}; there are {', '.join(VARIANTS)}")
    return VARIANTS[name]

"""The ways to run a program that `bench` compares.

    >>> VARIANTS["plain"].executors, VARIANTS["eager"].executors
    (('sdpa', 'torchcompile_cat', 'nvfuser'), None)

Those of this project are compared with each of the others. A variant that is not of the default ones is measured where
it is asked for: sharing equal fusions alone is plain Thunder made to finish on deep models.

A name may carry compile options of Thunder, ``NAME:OPTION=VALUE``, several with ``+`` between, since names of variants
are listed with commas. Such a variant is another one than ``NAME``, wherever variants are kept apart by name:

    >>> found = find("both:fusionfix_memory_budget=37.7GB+fusionfix_reorder=False")
    >>> found.options, found.executors == VARIANTS["both"].executors
    ({'fusionfix_memory_budget': '37.7GB', 'fusionfix_reorder': False}, True)
    >>> found.label
    'fusionfix, transform and entry, fusionfix_memory_budget=37.7GB, fusionfix_reorder=False'
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from thunder_fusionfix.config import PREFIX, FusionFixConfig
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

WRITTEN = "NAME or NAME:OPTION=VALUE[+OPTION=VALUE], with a compile option of Thunder"

_OPTION = re.compile(r"([A-Za-z_]\w*)=([^\s=+,|:]+)")
_WORDS = {"True": True, "False": False, "None": None}


@cache
def find(name: str) -> Variant:
    """The variant that ``name`` says, with the options that it carries.

    Options with the prefix ``fusionfix_`` are checked here; others are Thunder's and given to it as they are.

    Raises:
        UsageError: there is no such variant; the message lists those that there are. Or it can take no options, or one is
            malformed, given twice, unknown, has a value that is not legal, or is one that nothing in the variant reads.
    """
    base, colon, text = name.partition(":")
    if base not in VARIANTS:
        raise UsageError(f"there is no variant {base!r}; there are {', '.join(VARIANTS)}")
    variant = VARIANTS[base]
    if not colon:
        return variant
    options = _options(name, text)
    if variant.executors is None:
        raise UsageError(f"variant {name!r}: Thunder does not compile {base!r}, which takes no options")
    ours = {option.removeprefix(PREFIX): value for option, value in options.items() if option.startswith(PREFIX)}
    try:
        FusionFixConfig.from_options(ours)
    except UsageError as error:
        raise UsageError(f"variant {name!r}: {error}") from error
    if unread := [PREFIX + option for option in ours if PREFIX + option not in SHARED and not variant.is_ours]:
        raise UsageError(f"variant {name!r}: nothing in {base!r} reads {unread[0]}")
    label = ", ".join([variant.label, *text.split("+")])
    return replace(variant, label=label, options={**variant.options, **options}, is_default=False)


def _options(name: str, text: str) -> dict[str, Any]:
    """The options in ``OPTION=VALUE+OPTION=VALUE``: True, False, None and whole numbers as such, all else as text."""
    options: dict[str, Any] = {}
    for part in text.split("+"):
        match = _OPTION.fullmatch(part)
        if match is None:
            raise UsageError(f"variant {name!r}: {part!r} is no OPTION=VALUE; a variant is {WRITTEN}")
        option, value = match.groups()
        if option in options:
            raise UsageError(f"variant {name!r}: option {option} is given twice")
        is_number = re.fullmatch(r"-?\d+", value)
        options[option] = int(value) if is_number else _WORDS.get(value, value)
    return options


def ordered(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that are variants, as tables show them: in the order of `VARIANTS`, with options after without.

    >>> ordered(["both", "plain:nv_store_fusion_inputs=True", "of another release", "plain"])
    ['plain', 'plain:nv_store_fusion_inputs=True', 'both']
    """
    known = list(VARIANTS)
    found = [name for name in dict.fromkeys(names) if is_variant(name)]
    return sorted(found, key=lambda name: (known.index(name.partition(":")[0]), ":" in name))


def is_variant(name: str) -> bool:
    """True where `find` finds it."""
    try:
        find(name)
    except UsageError:
        return False
    return True

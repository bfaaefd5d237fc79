"""Every option of the passes, its default and why.

An option is given to `FusionFixTransform` by its name, or to Thunder as a compile option with the prefix ``fusionfix_``
(``ThunderCompiler(..., fusionfix_unfuse_layouts=False)``); the argument wins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any

from thunder_fusionfix.errors import UsageError

PREFIX = "fusionfix_"


@dataclass(frozen=True, slots=True)
class FusionFixConfig:
    """Options of the passes; each field's comment says what it does."""

    ignore_cut_rows: bool = True  # rows cut off before a cross entropy are ignored by their label instead
    cut_rows_min_bytes: int = 2**26  # smaller logits are cut as they were: launches would cost what copies do
    unfuse_layouts: bool = True  # layout ops leave fusion regions
    own_cotangents: bool = True  # a backward frees the cotangents after their last use, where nobody else has them
    own_min_bytes: int = 2**24  # of a cotangent; for smaller ones the host's time at each step costs more than they do
    expand_zero_cotangents: bool = True  # gradients of 1 MiB and more that nobody sent are one zero, repeated
    split_regions: bool = True  # fusion regions that hold memory at the peak are cut, where the pieces need less
    split_min_bytes: int = 2**20  # a cut has to lower the peak by this much for each launch that it adds
    reorder: bool = True  # ops run in the order that needs the least memory
    share_fusions: bool = True  # equal fusion regions compile once
    take_addmm: bool = True  # entry: addmm with a bias is a linear layer to Thunder, no place to split the program
    widen_losses: bool = True  # entry: a cross entropy of 16-bit logits is computed in float32, which nvFuser can fuse
    fold_matmuls: bool = True  # entry: linear layers and matmuls of an N-D tensor choose their kernel at run time
    pad_matmuls: bool = True  # entry: products whose rows start off 16-byte steps run padded where that pays
    claim_layouts: bool = True  # entry: layouts that a fusion would only carry stay out of it
    cudnn_attention: bool = True  # entry: attention runs cuDNN's kernel where torch would; off: Thunder's kernel
    recompute_cheap: bool = True  # entry: saved tensors that cheap ops make again are not saved
    recompute_min_bytes: int = 2**20  # entry: smaller tensors are saved; one more kernel costs more than they do
    memory_budget: str | int | None = None  # entry: "32GB", peak of each compiled function; makes more again to meet it
    entry_fuel: int | None = None  # entry: at most this many rewrites; None: no limit
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

    @property
    def memory_budget_bytes(self) -> int | None:
        """`memory_budget` in bytes."""
        return None if self.memory_budget is None else parse_bytes(self.memory_budget)


def parse_bytes(size: str | int) -> int:
    """Bytes of "32GB", "1.5GiB", "200 MB" or a number of bytes.

    >>> parse_bytes("32GB"), parse_bytes("1.5 GiB"), parse_bytes(1024)
    (32000000000, 1610612736, 1024)

    Raises:
        ValueError: the text is no size, or the size is not above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?\s*", str(size))
    if match is None or isinstance(size, bool):
        raise ValueError(f"{size!r} is no size: write 32GB, 31.5GiB, 800MB or a number of bytes")
    number, prefix, binary = match.groups()
    nbytes = int(Decimal(number) * (1024 if binary else 1000) ** " kMGT".index(prefix or " "))
    if nbytes <= 0:
        raise ValueError(f"{size!r} is no size above 0")
    return nbytes


def option_names() -> dict[str, str]:
    """Every option's name with a word on it, for Thunder's listing of compile options."""
    return {
        field.name: f"thunder_fusionfix: default {field.default!r}; see FusionFixConfig"
        for field in fields(FusionFixConfig)
    }


def check_option(name: str, value: Any) -> None:
    """Raises `UsageError` where ``value`` is not legal for the option ``name``."""
    if name in ("fuel", "entry_fuel"):
        if value is not None and not _is_count(value):
            raise UsageError(f"fusionfix option {name}={value!r}: a number of rewrites >= 0, or None for no limit")
    elif name in ("own_min_bytes", "cut_rows_min_bytes", "split_min_bytes", "recompute_min_bytes"):
        if not _is_count(value):
            raise UsageError(f"fusionfix option {name}={value!r}: a number of bytes >= 0")
    elif name == "memory_budget":
        try:
            if value is not None:
                parse_bytes(value)
        except ValueError as error:
            raise UsageError(f"fusionfix option {name}: {error}") from error
    elif not isinstance(value, bool):
        raise UsageError(f"fusionfix option {name}={value!r}: True or False")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

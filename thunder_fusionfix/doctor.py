"""Says whether what is installed fits together, and which of Thunder's options cost memory.

Each check is one row: what was looked at, what was found, and what to do where it does not fit.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from thunder_fusionfix.document import Block, Heading, Line, Table, megabytes

SCHEMA = "thunder_fusionfix.doctor/1"

# Compile options of Thunder that keep memory, and why; the default is named where it is the costly one.
COSTLY_OPTIONS = (
    (
        'fusion_type="dataflow"',
        "ThunderFX's default: whatever can be fused is gathered from the whole trace, and lives long",
    ),
    (
        "thunderfx_disable_split_autograd=True",
        "ThunderFX's default: gradients passed on live until the backward returns",
    ),
    ("nv_enable_shape_only_fusion=True", "regions that only rearrange go to nvFuser instead of being views"),
    ("nv_store_fusion_inputs=True", "every fusion keeps its last inputs"),
)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    found: str
    fits: bool
    advice: str = ""  # what to do where it does not fit, or what to know where it does


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `fusionfix doctor` says."""

    checks: tuple[Check, ...]
    costly_options: tuple[tuple[str, str], ...]

    @property
    def fits(self) -> bool:
        """True where everything fits together."""
        return all(check.fits for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain data; docs/json.md describes the layout."""
        return {
            "schema": SCHEMA,
            "fits": self.fits,
            "checks": [asdict(check) for check in self.checks],
            "costly_options": [{"option": option, "why": why} for option, why in self.costly_options],
        }


def diagnose() -> Diagnosis:
    """Looks at what is installed here."""
    try:
        import thunder  # noqa: F401  (with torch; ours that follows mends it)
    except Exception as error:  # noqa: BLE001 -- whatever it is, it is the diagnosis
        words = " ".join(f"{type(error).__name__}: {error}".split())
        failure = Check(
            "importing Thunder", words, False, "nothing here can run; the line below installs what was tested"
        )
        return Diagnosis((_python(), failure, _transformers()), COSTLY_OPTIONS)
    return Diagnosis((_python(), *_versions(), _transformers(), _gpu(), _mend(), _registered()), COSTLY_OPTIONS)


def diagnosis_blocks(diagnosis: Diagnosis) -> list[Block]:
    """The diagnosis for people: the answer first."""
    faults = [check for check in diagnosis.checks if not check.fits]
    answer = "everything fits together" if not faults else f"{len(faults)} of {len(diagnosis.checks)} checks do not fit"
    rows = tuple(("ok" if check.fits else "NO", check.name, check.found, check.advice) for check in diagnosis.checks)
    return [
        Heading(answer, is_main=True),
        Table(("", "what", "found", ""), rows),
        Heading("options that cost memory"),
        Table(("option of Thunder", "why"), diagnosis.costly_options),
        *([Line("make it fit: pip install --upgrade 'thunder-fusionfix[nvfuser]'", "bad")] if faults else []),
    ]


def _python() -> Check:
    wheels = sys.version_info[:2] in ((3, 10), (3, 12))
    return Check(
        "Python", platform.python_version(), True, "" if wheels else "nvFuser has wheels for 3.10 and 3.12 only"
    )


def _versions() -> Iterator[Check]:
    from thunder_fusionfix._thunder import TESTED, installed_versions, untested_versions

    untested = " ".join(untested_versions())
    for package, installed in installed_versions().items():
        tested = f"tested: {', '.join(TESTED[package])}"
        if installed is None:
            yield Check(package, "not installed", False, f"{tested}; without it there are no nvFuser fusions to fix")
        else:
            fits = f"{package} {installed}" not in untested
            yield Check(package, installed, fits, tested if fits else f"{tested}; traces pass through untouched")


def _transformers() -> Check:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return Check("transformers", "not installed", True, "needed for named models only: thunder-fusionfix[hf]")
    release = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if (4, 48) <= release < (5, 0):
        return Check(
            "transformers", version, True, "tested: 4.47.1, 5.x; ThunderFX may fail to split models of this one"
        )
    return Check("transformers", version, True, "tested: 4.47.1, 5.x")


def _gpu() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("GPU", "none", True, "capture, explain, fix and predictions need none; bench does")
    properties = torch.cuda.get_device_properties(0)
    return Check("GPU", f"{properties.name}, {megabytes(properties.total_memory)} MB", True)


def _mend() -> Check:
    from thunder_fusionfix._thunder import nvfuser_registered, nvfuser_works

    with nvfuser_registered() as nvfuser:
        if nvfuser is None:
            return Check("nvFuser in Thunder", "not there", True, "Thunder runs without it")
        works = nvfuser_works()
    found = "can describe its inputs" if works else "fails when it is called"
    return Check("nvFuser in Thunder", found, works, "" if works else "import thunder_fusionfix before the first call")


def _registered() -> Check:
    from thunder.plugins import get_plugin_names

    from thunder_fusionfix._thunder import get_executor

    there = get_executor("fusionfix") is not None and "fusionfix" in get_plugin_names()
    return Check('"fusionfix" in Thunder', "executor and plugin" if there else "missing", there)

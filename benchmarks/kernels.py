"""Where the time of variants differs: kernels by kind, from a result that `fusionfix bench` wrote. Needs no GPU.

    python benchmarks/kernels.py docs/results/NAME.json [VARIANT ...]

Kinds are told by the names of kernels: cuBLAS' by their libraries' names (``align1``, ``align2``: an operand whose rows do not
start at multiples of 16 bytes), nvFuser's by their scheduler, Inductor's by what they fuse. A result holds the 25 kernels of each variant
that take the most time; the rest is one line.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

KINDS = (  # the first that fits
    (r"fmha|flash|attention|sdpa", "attention"),
    (r"align[12]\b|align[12]_|gemv|gemmSN", "matmul, misaligned or a vector"),
    (r"gemm|nvjet|cutlass|xmma", "matmul"),
    (r"nvfuser_resize", "nvFuser: pads, slices, concatenations"),
    (r"nvfuser_(inner|outer|inner_outer)_persistent|nvfuser_reduction", "nvFuser: reductions"),
    (r"nvfuser_transpose", "nvFuser: transposes"),
    (r"nvfuser", "nvFuser: elementwise"),
    (r"triton_(red|per)", "Inductor: reductions"),
    (r"triton", "Inductor: elementwise"),
    (r"Memcpy|Memset|copy|CatArray", "copies"),
)


def kind_of(kernel: str) -> str:
    """What a kernel of this name does.

    >>> kind_of("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_32x4_tn_align2>(...)")
    'matmul, misaligned or a vector'
    >>> kind_of("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"), kind_of("nvf::nvfuser_resize_f0_c1_r0_g0(...)")
    ('matmul', 'nvFuser: pads, slices, concatenations')
    """
    return next((kind for pattern, kind in KINDS if re.search(pattern, kernel)), "torch: elementwise and others")


def milliseconds(measured: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of one step by kind; what is not listed by name is one kind of its own."""
    found: defaultdict[str, float] = defaultdict(float)
    for kernel in measured["kernels"]:
        found[kind_of(kernel["name"])] += kernel["us"] / 1e3
    found["kernels that are not listed"] = measured["kernel_ms"] - sum(found.values())
    found["all kernels"] = measured["kernel_ms"]
    found["step"] = measured["step_ms"]["median"]
    return dict(found)


def table(result: dict[str, Any], names: list[str]) -> str:
    columns = {
        name: milliseconds(entry["measured"])
        for name, entry in result["variants"].items()
        if entry.get("status") == "ok" and "kernels" in entry["measured"] and (not names or name in names)
    }
    kinds = dict.fromkeys(kind for column in columns.values() for kind in column)
    first = dict.fromkeys(kind for _, kind in KINDS if kind in kinds)
    lines = ["| ms of one step | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for kind in dict.fromkeys((*first, *(one for one in kinds if one not in ENDS), *ENDS)):
        cells = (f"{column[kind]:.2f}" if kind in column else "-" for column in columns.values())
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


ENDS = ("kernels that are not listed", "all kernels", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON that `fusionfix bench` wrote")
    parser.add_argument("variants", nargs="*", help="plain, both, torch-compile, ...; all by default")
    args = parser.parse_args()
    print(table(json.loads(args.result.read_text()), args.variants))


if __name__ == "__main__":
    main()

"""benchmarks/kernels.py: what a result that was measured says about kernels."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import kernels

RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))


@pytest.mark.parametrize(
    "name, kind",
    [
        ("nvf::nvfuser_inner_persistent_f0_c1_r0_g2(nvf::Tensor<nvf::__bfloat, 4, 4>)", "nvFuser: reductions"),
        ("nvf::nvfuser_pointwise_f0_c1_r0_g0(nvf::Tensor<nvf::__bfloat, 3, 3>)", "nvFuser: elementwise"),
        ("triton_red_fused__softmax_add_arange_exp_expand", "Inductor: reductions"),
        (
            "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_64x64_nn_align1>(...)",
            "matmul, misaligned or a vector",
        ),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16_64x256_32x4_nt_align8>(...)", "matmul"),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>",
            "torch: elementwise and others",
        ),
    ],
)
def test_kinds_of_kernels(name, kind):
    """Names as profilers print them."""
    assert kernels.kind_of(name) == kind


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_kinds_add_up_to_all_kernels(path):
    """For every result that the project ships: the kinds are the whole of what was measured."""
    for entry in json.loads(path.read_text())["variants"].values():
        if "kernels" not in entry.get("measured", {}):
            continue
        times = kernels.milliseconds(entry["measured"])
        parts = sum(ms for kind, ms in times.items() if kind not in ("all kernels", "step"))
        assert parts == pytest.approx(times["all kernels"]) and times["kernels that are not listed"] >= -0.01

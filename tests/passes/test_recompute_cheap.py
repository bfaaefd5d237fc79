"""recompute_cheap: what is rebuilt instead of saved, what must not be, and that outputs and gradients stay the same."""

from __future__ import annotations

import pytest
import thunder
import torch
import torch.nn.functional as F
from cpu_nvfuser import nvfuser_on_cpu
from runs import assert_equal, copied, run

from thunder_fusionfix._thunder import nvfuser_version
from thunder_fusionfix.read import read

pytestmark = pytest.mark.skipif(nvfuser_version() is None, reason="nvFuser is not installed")

PLAIN, ENTRY = ("nvfuser",), ("fusionfix", "nvfuser")


def gated_mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def cast_and_back(x):
    return torch.tanh(x.to(torch.bfloat16).float())


def masked(x, w):
    h = x @ w
    return torch.where(h > 0, h * 2, h.exp()).t() @ x


PROGRAMS = {
    "gated_mlp": (gated_mlp, [(6, 8), (12, 8), (12, 8), (8, 12)]),
    "masked": (masked, [(4, 5), (5, 5)]),
}


def arguments(shapes):
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def saved_bytes(fn, args, executors):
    """Bytes that the forward of ``fn`` saves, its arguments left out."""
    with nvfuser_on_cpu():
        jitted = thunder.jit(fn, executors=executors, fusion_type="dataflow", fusionfix_recompute_min_bytes=0)
        jitted(*args)
        graph = read(thunder.last_traces(jitted)[-1])
    return sum(graph.values[name].nbytes or 0 for name in graph.saved if name not in graph.args)


@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_with_the_entry_gives_what_plain_thunder_gives(name, fusion_type):
    """Outputs and every gradient are plain Thunder's, and what is rebuilt is rebuilt from the same numbers."""
    fn, shapes = PROGRAMS[name]
    args = arguments(shapes)
    options = {"fusionfix_recompute_min_bytes": 0}
    plain = run(fn, copied(args), fusion_type, executors=PLAIN)
    assert_equal(run(fn, copied(args), fusion_type, executors=ENTRY, **options), plain)


def test_gated_mlp_saves_less_with_the_entry():
    """The product of a gated MLP is rebuilt from its two factors, which are saved anyway."""
    args = arguments(PROGRAMS["gated_mlp"][1])
    assert saved_bytes(gated_mlp, args, ENTRY) < saved_bytes(gated_mlp, args, PLAIN)


def test_output_that_the_caller_holds_is_not_rebuilt():
    """Dropping what the caller gets anyway frees nothing: it stays saved, and nothing is saved in its place."""
    args = arguments([(3, 4)])
    assert saved_bytes(cast_and_back, args, ENTRY) <= saved_bytes(cast_and_back, args, PLAIN)

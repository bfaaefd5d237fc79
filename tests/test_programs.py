"""Programs that break tools which reorder, un-fuse or recompute, run plain and with the passes: the numbers must be the same.

nvFuser's real fusion pass makes the regions, torch runs them on the CPU. Three verdicts: equal; plain Thunder already fails or is
wrong, which the two tables name; ours wrong, which fails. Cuts are made wherever they lower the peak at all (`split_min_bytes=0`).
A plain run takes one fusion type of each program, in turns; ``--slow`` takes the other one too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from cases import CASES, Case, cotangent_for
from runs import SEED, Results, assert_equal, copied, distance, run

import thunder_fusionfix  # noqa: F401
from thunder_fusionfix.transform import FusionFixTransform

pytestmark = pytest.mark.nvfuser

FUSION_TYPES = ("dataflow", "consecutive")
IN_TURNS = {name: FUSION_TYPES[index % 2] for index, name in enumerate(CASES)}

# Plain Thunder raises this.
PLAIN_FAILS = {
    "argument_is_row_of_other": "is different from the number of elements in shape",  # it takes an argument for a view of all of another
}

# Plain Thunder gives other numbers than eager; ours must give plain Thunder's.
PLAIN_WRONG = {
    "dropout_under_checkpoint": "the recomputed mask is another one where nvFuser draws from the generator itself",
}

# nvFuser's own random numbers come from the state of a GPU's generator: here uniform stays what it is.
RNG_OPTIONS = {"disable_replace_uniform": True}

# The passes have something to do in these, whatever else changes.
REWRITTEN = frozenset(
    {
        "neox_parallel_residual",
        "llama_sequential_residual",
        "attention_explicit_rotary",
        "sequence_first_bmm_attention",
        "seq_first_linear_noncontiguous",
        "channels_last_conv_norm",
        "chunk_loop_cat",
    }
)

# The distance to eager in float64 is compared, ours against plain Thunder's.
IN_FLOAT64 = ("shifted_causal_loss", "attention_explicit_rotary", "tied_embedding_lm", "permute_reshape_copies")


@functools.cache
def plain(name: str, fusion_type: str) -> Results:
    return run(*CASES[name].build(), fusion_type, **options_of(CASES[name]))


@functools.cache
def fixed(name: str, fusion_type: str) -> tuple[Results, FusionFixTransform]:
    fix = FusionFixTransform(strict=True, split_min_bytes=0)
    return run(*CASES[name].build(), fusion_type, fix, **options_of(CASES[name])), fix


def options_of(case: Case) -> Mapping[str, Any]:
    return RNG_OPTIONS if case.rng else {}


def check_program(name: str, fusion_type: str) -> None:
    if name in PLAIN_FAILS:
        with pytest.raises(RuntimeError, match=PLAIN_FAILS[name]):
            plain(name, fusion_type)
        with pytest.raises(RuntimeError, match=PLAIN_FAILS[name]):
            fixed(name, fusion_type)
        return
    got, fix = fixed(name, fusion_type)
    assert_equal(got, plain(name, fusion_type))
    if name in REWRITTEN:
        assert any(decision.applied for report in fix.reports for decision in report.decisions)


@pytest.mark.parametrize("name", CASES)
def test_program_gives_what_plain_thunder_gives(name):
    """Outputs, gradients and whatever is changed in place are plain Thunder's."""
    check_program(name, IN_TURNS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_program_gives_what_plain_thunder_gives_in_the_other_fusion_type(name):
    """The same law under the fusion type that this program's turn left out."""
    check_program(name, FUSION_TYPES[1 - FUSION_TYPES.index(IN_TURNS[name])])


def split_before_a_write(x, y):
    whole = torch.exp(x)
    first, second = whole.split(2, 0)
    return first * 2, second, y.zero_()


def views_of_an_argument_around_writes(x, y):
    rows, turned = x.unbind(-2), y.transpose(2, 0)
    norm = x.mean(1, keepdim=True)
    return turned.tanh_(), norm + norm, rows[0], turned.reshape(-1)


@pytest.mark.parametrize("fusion_type", FUSION_TYPES)
@pytest.mark.parametrize("fn", [split_before_a_write, views_of_an_argument_around_writes])
def test_program_that_once_broke_the_entry_gives_what_plain_thunder_gives(fn, fusion_type):
    """Several views by one op, next to a write of something else: no read, so it may stand on either side."""
    args = [torch.randn(4, 6), torch.randn(1, 1, 8)]
    options = {"fusionfix_strict": True, "fusionfix_recompute_min_bytes": 0}
    plain = run(fn, copied(args), fusion_type)
    assert_equal(run(fn, copied(args), fusion_type, executors=("fusionfix", "nvfuser"), **options), plain)


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].rng and name not in PLAIN_FAILS])
def test_plain_thunder_gives_what_eager_gives(name):
    """What ours is compared with is right: a program where plain Thunder is wrong stands in the table."""
    assert_equal(plain(name, IN_TURNS[name]), run(*CASES[name].build(), None), 1e-4)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].rng])
def test_random_program_uses_one_mask_forward_and_backward(name):
    """A gradient goes through the mask that the forward drew, where it does in plain Thunder."""
    for results in (plain(name, IN_TURNS[name]), fixed(name, IN_TURNS[name])[0]):
        outputs = [value for key, value in results.items() if key.startswith("output")]
        gradients = [value for key, value in results.items() if key.startswith("gradient")]
        held = all(
            torch.allclose(gradient, cotangent_for(output) * output, atol=1e-5)
            for output, gradient in zip(outputs, gradients, strict=True)
        )
        assert held == (name not in PLAIN_WRONG)


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_program_is_as_near_to_float64_as_plain_thunder(name):
    """Losses, outputs and gradients are no further from eager in float64 than plain Thunder's, but for the order of sums."""
    exact = in_float64(CASES[name])
    for key, want in exact.items():
        ours, theirs = (
            distance(found[key], want) for found in (fixed(name, IN_TURNS[name])[0], plain(name, IN_TURNS[name]))
        )
        assert ours <= 1.5 * theirs + 1e-7, f"{key}: {ours:.1e}, plain Thunder {theirs:.1e}"


def in_float64(case: Case) -> Results:
    """What the program gives eagerly with the same values in float64, `float()` in it included."""
    fn, args = case.build()
    args = [
        arg.detach().double().requires_grad_(arg.requires_grad)
        if isinstance(arg, torch.Tensor) and arg.is_floating_point()
        else arg
        for arg in args
    ]
    if isinstance(fn, torch.nn.Module):
        fn = fn.double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        return run(fn, args, None)


def test_runs_are_repeatable():
    """One seed gives one result, so that a difference is never luck."""
    case = CASES["two_branches_of_dropout"]
    first, second = (run(*case.build(), None) for _ in range(2))
    assert_equal(first, second, 0)
    torch.manual_seed(SEED + 1)
    assert not torch.equal(torch.nn.functional.dropout(case.build()[1][0], 0.3), first["output 0"])

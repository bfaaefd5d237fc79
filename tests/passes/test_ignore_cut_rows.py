"""Tests of `thunder_fusionfix.passes.ignore_cut_rows`: which losses see all rows, and that no number changes."""

from __future__ import annotations

import math
from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import assert_equal, copied, distance, run

from thunder_fusionfix._thunder import nvfuser_version
from thunder_fusionfix.layout import Reshape, Slice
from thunder_fusionfix.passes.ignore_cut_rows import Cut, _composed, cut_of
from thunder_fusionfix.transform import FusionFixTransform

pytestmark = pytest.mark.skipif(nvfuser_version() is None, reason="nvFuser is not installed")

VOCAB = 1200


def cut(logits, labels):
    ahead = logits.float()[..., :-1, :].contiguous().view(-1, VOCAB)
    return F.cross_entropy(ahead, labels[..., 1:].contiguous().view(-1))


def from_behind(logits, labels):
    return F.cross_entropy(logits.float()[:, 2:].reshape(-1, VOCAB), labels[:, :-2].reshape(-1), ignore_index=-1)


def first_sequences(logits, labels):
    return F.cross_entropy(logits[:-1].float().reshape(-1, VOCAB), labels[:-1].reshape(-1))


def flat(logits, labels):
    return F.cross_entropy(logits[0, :-1].float(), labels[0, 1:])


def padded_vocabulary(logits, labels):
    ahead = logits[..., : VOCAB - 4][:, :-1].reshape(-1, VOCAB - 4)
    return F.cross_entropy(ahead.float(), labels[:, 1:].reshape(-1))


def turned(logits, labels):
    return F.cross_entropy(
        logits.transpose(0, 1)[:-1].reshape(-1, VOCAB).float(), labels.transpose(0, 1)[1:].reshape(-1)
    )


def written(logits, labels):
    loss = cut(logits, labels)
    labels.add_(1)
    return loss


def arguments(batch=2, seq=12, dtype=torch.bfloat16, ignored=-100):
    """Logits and labels, of which some are ignored."""
    generator = torch.Generator().manual_seed(batch * seq)
    logits = torch.randn(batch, seq, VOCAB, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (batch, seq), generator=generator)
    labels[:, 2] = ignored
    return [logits, labels]


def fixed(fn, args, fusion_type, **options):
    """What ``fn`` gives with the pass, and the decisions of the pass about it."""
    options = {"cut_rows_min_bytes": 0, "debug_execute": True, **options}
    fix = FusionFixTransform(strict=True, **options)
    results = run(fn, copied(args), fusion_type, fix)
    made = [one for report in fix.reports for one in report.decisions if one.pass_name == "ignore_cut_rows"]
    return results, made


@pytest.mark.parametrize("fusion_type", ["dataflow", "consecutive"])
@pytest.mark.parametrize("batch, seq", [(1, 12), (2, 12), (3, 17)])
@pytest.mark.parametrize("fn", [cut, from_behind], ids=lambda fn: fn.__name__)
def test_loss_and_gradient_are_those_of_plain_thunder_and_of_eager(fn, batch, seq, fusion_type):
    """Plain Thunder's, and as near to eager in float64 as plain Thunder's; the backward always sees all rows."""
    args = arguments(batch, seq, ignored=-100 if fn is cut else -1)
    results, decisions = fixed(fn, args, fusion_type)
    assert [decision.applied for decision in decisions] == [batch > 1, True]
    plain = run(fn, copied(args), fusion_type)
    assert_equal(results, plain, 1e-6)
    wide = run(fn, [args[0].detach().double().requires_grad_(), args[1]], None)
    assert all(distance(results[name], wide[name]) <= distance(plain[name], wide[name]) + 1e-6 for name in wide)


@pytest.mark.parametrize(
    "fn, rows", [(first_sequences, "12 rows of"), (flat, "1 row of")], ids=["sequences", "one sequence"]
)
def test_any_one_dim_may_be_cut(fn, rows):
    """Whole sequences, or rows of logits that are rows already; what is told is the number of rows."""
    args = arguments(5 if fn is first_sequences else 1)
    results, decisions = fixed(fn, args, "dataflow")
    assert [decision.what for decision in decisions if decision.applied][-1].startswith(rows)
    assert_equal(results, run(fn, copied(args), "dataflow"), 1e-6)


def test_what_stands_in_cut_rows_reaches_nothing():
    """Logits that are no numbers, where rows are cut off, change neither the loss nor any gradient."""
    args = arguments(2)
    with torch.no_grad():
        args[0][0, -1] = math.nan
        args[0][1, -1, 3] = math.inf
    results, decisions = fixed(cut, args, "dataflow", debug_execute=False)
    assert all(decision.applied for decision in decisions)
    gradient = results["gradient of argument 0"]
    assert gradient.isfinite().all() and not gradient[:, -1].any()
    assert_equal(
        {name: value for name, value in results.items() if name != "argument 0"},
        {name: value for name, value in run(cut, copied(args), "dataflow").items() if name != "argument 0"},
        1e-6,
    )


def test_gradient_is_written_once_and_no_copy_of_the_logits_is_made():
    """At batch 2 the estimate has the logits, their gradient and rows of labels; plain has copies in float32."""
    fix = FusionFixTransform(strict=True, cut_rows_min_bytes=0)
    args = arguments(2)
    nbytes = args[0].numel() * 2
    run(cut, copied(args), "dataflow", fix)
    forward, backward = fix.reports
    assert forward.after.peak_bytes < 2.2 * nbytes  # a copy where strides are not known, as for a plain function
    assert 2 * nbytes <= backward.after.peak_bytes < 2.2 * nbytes < 5 * nbytes < backward.before.peak_bytes


@pytest.mark.parametrize(
    "fn, why",
    [
        (lambda logits, labels: cut(logits, labels.clamp(max=7)), "is computed in the region"),
        (lambda logits, labels: cut(logits[:, :8], labels[:, :8]), "would cost more"),
        (
            lambda logits, labels: F.cross_entropy(
                logits.float()[:, ::2].reshape(-1, VOCAB), labels[:, ::2].reshape(-1)
            ),
            None,
        ),
        (lambda logits, labels: F.cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1)), None),
    ],
    ids=["labels computed", "many rows", "every second row", "nothing cut"],
)
def test_other_losses_are_left_alone(fn, why):
    """Where rows are not simply cut off, or the cut ones serve another op, nothing is changed; numbers are plain Thunder's."""
    args = arguments(2)
    results, decisions = fixed(fn, args, "dataflow")
    assert not any(decision.applied for decision in decisions)
    assert why is None or any(why in decision.reason for decision in decisions)
    assert_equal(results, run(fn, copied(args), "dataflow"), 1e-6)


@pytest.mark.parametrize("fn", [padded_vocabulary, turned], ids=lambda fn: fn.__name__)
def test_logits_that_are_cut_or_turned_before_are_left_alone(fn):
    """Their rows do not lie together, so that all of them are no view, and a second pad would keep the gradient twice."""
    args = arguments(3)
    args[1] = args[1].clamp(max=VOCAB - 5)
    results, decisions = fixed(fn, args, "dataflow")
    assert decisions and not any(decision.applied for decision in decisions)
    assert any("do not lie together" in decision.reason for decision in decisions)
    assert_equal(results, run(fn, copied(args), "dataflow"), 1e-6)


def test_loss_of_nothing_is_left_alone():
    """A sequence of one position has no next token: nothing is left, and the mean is no number, as without the pass."""
    args = arguments(2, 3)
    fn = lambda logits, labels: cut(logits[:, :1], labels[:, :1])
    results, decisions = fixed(fn, args, "dataflow", debug_execute=False)
    assert not any(decision.applied for decision in decisions)
    assert results["output 0"].isnan() and results["gradient of argument 0"].shape == args[0].shape


def test_small_logits_are_left_alone_by_default():
    """The small ops for labels and maxima would cost more than a pass over these bytes."""
    _, decisions = fixed(cut, arguments(2), "dataflow", cut_rows_min_bytes=2**26)
    assert decisions and not any(decision.applied for decision in decisions)
    assert all("launches" in decision.reason for decision in decisions)


def test_fuel_bounds_the_rewrites():
    """The first rewrite alone, with one unit of fuel."""
    _, decisions = fixed(cut, arguments(2), "dataflow", fuel=0)
    assert not any(decision.applied for decision in decisions)


@pytest.mark.parametrize("fn", [lambda logits, labels: (cut(logits, labels), logits.float()[:, :-1].exp()), written])
def test_cut_logits_and_labels_that_serve_another_op_stay(fn):
    """Where the forward uses the cut logits elsewhere, or writes the labels, it stays; the backward is rewritten by itself."""
    args = arguments(2)
    results, decisions = fixed(fn, args, "dataflow")
    assert [one.where for one in decisions if one.applied] == ["nvFusion1"]
    assert_equal(results, run(fn, copied(args), "dataflow"), 1e-6)


# ---------------------------------------------------------------- the cut


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_cut_of_tells_what_slices_do(data):
    """One dim sliced at its ends, then rows: the rows that are kept, in order; several dims sliced: no cut."""
    dims = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    bounds = [
        data.draw(
            st.tuples(st.integers(0, size - 1), st.just(size)).flatmap(
                lambda pair: st.tuples(st.just(pair[0]), st.integers(pair[0] + 1, pair[1]))
            )
        )
        for size in dims
    ]
    starts, ends = (tuple(bound[i] for bound in bounds) for i in (0, 1))
    shape = (*dims, 5)
    layouts = [Slice((*starts, 0), (*ends, 5), (1,) * len(shape)), Reshape((prod(b - a for a, b in bounds), 5))]
    found = cut_of(shape, _composed(layouts, shape))
    sliced = [dim for dim, (start, end) in enumerate(bounds) if end - start < dims[dim]]
    assert (found is None) == (len(sliced) != 1)
    if found is not None:
        (dim,) = sliced
        assert found == Cut(dims, dim, starts[dim], ends[dim] - starts[dim])
        numbers = torch.arange(prod(dims)).reshape(found.around(dims[dim]))
        kept = numbers.narrow(found.axis, found.low, found.kept).reshape(-1)
        assert (
            kept.tolist()
            == torch.arange(prod(dims)).reshape(dims).narrow(dim, found.low, found.kept).reshape(-1).tolist()
        )

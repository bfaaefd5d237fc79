"""matmul_copies: what the entry's matmuls copy while they run, and that `simulate` counts it."""

from __future__ import annotations

import pytest

from thunder_fusionfix.folding import COPY_LIMIT
from thunder_fusionfix.layout import row_major
from thunder_fusionfix.matmul_copies import LINEAR, MATMUL, copies_of, product_of
from thunder_fusionfix.model import Graph, Op, Ref, Value
from thunder_fusionfix.padding import PAD_LIMIT, choose_padding
from thunder_fusionfix.parse import parse
from thunder_fusionfix.report import why_alive
from thunder_fusionfix.simulate import rounded, simulate


def peak(name: str, shapes, strides, *limits: int | None, dtype: str = "bf16") -> int:
    """Bytes that the product of ``shapes`` copies."""
    left, right = (Value(one, shape, dtype, "cuda:0") for one, shape in zip("ab", shapes))
    args = (Ref("a"), Ref("b"), None, *limits) if name == LINEAR else (Ref("a"), Ref("b"), *limits)
    op = Op(name, args, Ref("c"))
    return copies_of(op, {"a": left, "b": right}, dict(zip("ab", strides))).peak_bytes


def test_aligned_products_and_other_ops_copy_nothing() -> None:
    """What stays as it was costs what it did."""
    for name, right in ((LINEAR, (1024, 768)), (MATMUL, (768, 1024))):
        for strides in (((786432, 768, 1), row_major(right)), (None, None)):
            assert peak(name, ((1, 1024, 768), right), strides, COPY_LIMIT, 0) == 0
    op = Op("torch.matmul", (Ref("a"), Ref("b")), Ref("c"))
    assert product_of(op) is None and copies_of(op, {}, {}).peak_bytes == 0


def test_a_fold_that_copies_is_counted_with_its_input() -> None:
    """[40, 40, 1024], sequence first, is copied; of dense strides nothing is; of unknown ones the worst case."""
    shapes, right = ((40, 40, 1024), (4096, 1024)), (1024, 1)
    sequence_first, dense = (1024, 40960, 1), (40960, 1024, 1)
    copied = 40 * 40 * 1024 * 2
    assert peak(LINEAR, shapes, (sequence_first, right), COPY_LIMIT, 0) == copied
    assert peak(LINEAR, shapes, (dense, right), COPY_LIMIT, 0) == 0
    assert peak(LINEAR, shapes, (None, right), COPY_LIMIT, 0) == copied
    assert peak(LINEAR, shapes, (None, right), copied - 1, 0) == 0
    assert peak(LINEAR, shapes, (None, right), None, 0) == 0


def test_a_view_for_certain_is_no_copy_though_strides_are_unknown() -> None:
    """A batch of 1 folds as a view in every order of its leading dims."""
    assert peak(LINEAR, ((1, 4096, 3584), (3584, 3584)), (None, None), COPY_LIMIT, 0) == 0


def test_a_matrix_times_an_nd_tensor_counts_the_turned_result() -> None:
    """w @ x as x.mT @ w.mT: the result is copied into the order that the caller wants."""
    shapes = ((4096, 1024), (300, 1024, 2))
    turned = 300 * 2 * 4096 * 2
    found = peak(MATMUL, shapes, ((1024, 1), (2048, 1, 1024)), COPY_LIMIT, 0)
    assert found == turned
    assert peak(MATMUL, shapes, ((1024, 1), (2048, 1, 1024)), None, PAD_LIMIT) == 0


def test_padding_is_counted_as_it_is_chosen() -> None:
    """The bytes of `Padding`, for known strides; the most of all layouts for unknown ones."""
    shapes = ((1, 1024, 768), (50257, 768))
    padding = choose_padding((1024, 768), (768, 1), (768, 50257), (1, 768))
    assert padding is not None
    known = peak(LINEAR, shapes, ((786432, 768, 1), (768, 1)), COPY_LIMIT, PAD_LIMIT)
    assert known == padding.nbytes > 0
    assert peak(LINEAR, shapes, (None, (768, 1)), COPY_LIMIT, PAD_LIMIT) >= known
    assert peak(LINEAR, shapes, ((786432, 768, 1), (768, 1)), COPY_LIMIT, 0) == 0
    assert peak(LINEAR, shapes, ((786432, 768, 1), (768, 1)), COPY_LIMIT, PAD_LIMIT, dtype="f32") == 0


def test_batched_padding_is_counted() -> None:
    """Scores of heads of width 28: both operands are copied, 32 wide."""
    heads = (1, 28, 4096, 28)
    found = peak(
        MATMUL, (heads, (1, 28, 28, 4096)), (row_major(heads), (3211264, 114688, 1, 28)), COPY_LIMIT, PAD_LIMIT
    )
    assert found == 2 * 28 * 4096 * 32 * 2


# ---------------------------------------------------------------- simulate


def logits(pad_limit: int) -> Graph:
    values = {
        "x": Value("x", (1024, 768), "bf16", "cuda:0", strides=(768, 1)),
        "w": Value("w", (50257, 768), "bf16", "cuda:0", strides=(768, 1)),
        "y": Value("y", (1024, 50257), "bf16", "cuda:0"),
    }
    ops = (Op(LINEAR, (Ref("x"), Ref("w"), None, COPY_LIMIT, pad_limit), Ref("y")), Op("return", (Ref("y"),)))
    return Graph("f", "inference", ("x", "w"), ops, values, held=frozenset("xw"))


def test_simulate_counts_the_copies_at_their_op_alone() -> None:
    """The peak is higher by the copies while the product runs; they are a holder with a name and a reason; then they are gone."""
    plain, padded = simulate(logits(0)), simulate(logits(PAD_LIMIT))
    copies = peak(LINEAR, ((1024, 768), (50257, 768)), ((768, 1), (768, 1)), COPY_LIMIT, PAD_LIMIT)
    assert padded.live_bytes[0] - plain.live_bytes[0] == rounded(copies) > 0
    assert padded.live_bytes[1] == plain.live_bytes[1] and padded.peak_pos == 0
    (holder,) = (one for one in padded.holders if one.name == "copies for y")
    assert holder.nbytes == rounded(copies)
    assert why_alive(logits(PAD_LIMIT), 0, holder) == "that fusionfix_linear writes only for itself"
    assert padded.lower_bound_bytes == padded.peak_bytes


@pytest.mark.parametrize(
    ("limits", "want"), [("1024", (1024, 0)), ("1024, 0", (1024, 0)), ("None, 4096", (None, 4096))]
)
def test_limits_are_read_from_printed_traces(limits, want) -> None:
    """Traces of before padding have one limit."""
    text = f"""def computation(x, w):
  # x: "cuda:0 bf16[2, 3, 4]"
  # w: "cuda:0 bf16[5, 4]"
  t0 = fusionfix_linear(x, w, None, {limits})  # t0: "cuda:0 bf16[2, 3, 5]"
  return t0
"""
    graph = parse(text)
    (product,) = filter(None, map(product_of, graph.ops))
    assert (product.copy_limit, product.pad_limit) == want and product.is_linear and not product.has_bias

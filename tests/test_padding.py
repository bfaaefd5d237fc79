"""padding: what is padded, of which measured products, and what never is."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunder_fusionfix.padding import (
    ALIGNED,
    PAD_LIMIT,
    PIECE_BYTES,
    WHOLE_BYTES,
    WHOLE_ROWS,
    choose_padding,
    layouts,
    may_pad,
    pad_what_is_misaligned,
    up,
)

NO_LIMIT = 2**60

# Measured on one H200, torch 2.11, bf16. A linear layer of T tokens from K to N: product, T, K, N, ms plain, ms padded. The second is
# the aligned product with the copies that it needs.
LAYERS = (
    ("fwd", 4096, 18944, 28, 0.061, 0.049),
    ("dx", 4096, 18944, 28, 0.086, 0.061),
    ("dw", 4096, 18944, 28, 0.073, 0.051),
    ("fwd", 4096, 28, 18944, 0.087, 0.067),
    ("fwd", 4096, 28, 152064, 0.680, 0.397),
    ("dx", 4096, 28, 152064, 0.424, 0.315),
    ("dw", 4096, 28, 152064, 0.448, 0.298),
    ("fwd", 1024, 768, 50257, 0.843, 0.283),
    ("dx", 1024, 768, 50257, 0.616, 0.280),
    ("dw", 1024, 768, 50257, 0.576, 0.233),
    ("fwd", 8192, 768, 50257, 6.669, 1.905),
    ("dx", 8192, 768, 50257, 4.528, 1.829),
    ("dw", 8192, 768, 50257, 4.396, 1.723),
    ("fwd", 4096, 28, 28, 0.003, 0.016),
    ("dx", 4096, 28, 28, 0.003, 0.015),
    ("dw", 4096, 28, 28, 0.007, 0.019),
    ("fwd", 4096, 100, 400, 0.009, 0.015),
    ("dx", 4096, 100, 400, 0.009, 0.013),
    ("fwd", 4096, 1000, 4001, 0.321, 0.100),
    ("dx", 4096, 1000, 4001, 0.265, 0.097),
    ("dw", 4096, 1000, 4001, 0.261, 0.088),
    ("fwd", 4096, 4001, 1000, 0.268, 0.119),
    ("dx", 4096, 4001, 1000, 0.270, 0.113),
    ("dw", 4096, 4001, 1000, 0.245, 0.123),
    ("fwd", 4200, 2056, 4111, 0.787, 0.169),
    ("dx", 4200, 2056, 4111, 0.644, 0.173),
    ("dw", 4200, 2056, 4111, 0.590, 0.162),
    ("fwd", 33600, 2051, 4111, 4.246, 1.308),
    ("dx", 33600, 2051, 4111, 4.143, 1.351),
    ("dw", 33600, 2051, 4111, 4.084, 1.388),
    ("fwd", 8192, 2050, 2050, 0.336, 0.207),
    ("dx", 8192, 2050, 2050, 0.336, 0.201),
    ("dw", 8192, 2050, 2050, 0.341, 0.199),
    ("fwd", 8192, 2050, 4100, 0.559, 0.365),
    ("dx", 8192, 2050, 4100, 0.636, 0.384),
    ("dw", 8192, 2050, 4100, 0.627, 0.375),
    ("fwd", 8192, 2052, 4100, 0.564, 0.365),
    ("dx", 8192, 2052, 4100, 0.641, 0.384),
    ("dw", 8192, 2052, 4100, 0.633, 0.375),
    ("fwd", 8192, 513, 513, 0.074, 0.038),
    ("dx", 8192, 513, 513, 0.062, 0.037),
    ("dw", 8192, 513, 513, 0.048, 0.045),
    ("fwd", 65536, 300, 300, 0.101, 0.136),
    ("dx", 65536, 300, 300, 0.100, 0.135),
    ("dw", 65536, 300, 300, 0.112, 0.137),
    ("fwd", 65536, 300, 4096, 1.010, 0.367),
    ("fwd", 1576, 768, 1001, 0.048, 0.017),
    ("dx", 1576, 768, 1001, 0.033, 0.021),
    ("dw", 1576, 768, 1001, 0.029, 0.014),
    ("fwd", 16384, 12, 1000, 0.020, 0.027),
    ("dx", 16384, 12, 1000, 0.020, 0.018),
    ("dw", 16384, 12, 1000, 0.020, 0.018),
    ("fwd", 4096, 1024, 6, 0.008, 0.016),
    ("fwd", 256, 1001, 1001, 0.017, 0.020),
    ("dx", 256, 1001, 1001, 0.016, 0.020),
    ("dw", 256, 1001, 1001, 0.012, 0.019),
    ("fwd", 128, 300, 300, 0.005, 0.016),
    ("fwd", 512, 100, 100, 0.004, 0.016),
    ("dx", 512, 100, 100, 0.004, 0.016),
    ("dw", 512, 100, 100, 0.006, 0.017),
)

# Attention of B heads over S tokens with a head of D: product, B, S, D, ms plain, ms padded.
HEADS = (
    ("q kT", 28, 4096, 1, 0.746, 0.296),
    ("P v", 28, 4096, 1, 0.220, 0.236),
    ("PT g", 28, 4096, 1, 0.208, 0.224),
    ("q kT", 28, 4096, 2, 0.507, 0.300),
    ("P v", 28, 4096, 2, 0.341, 0.252),
    ("PT g", 28, 4096, 2, 0.324, 0.224),
    ("q kT", 28, 4096, 4, 0.511, 0.297),
    ("P v", 28, 4096, 4, 0.344, 0.237),
    ("PT g", 28, 4096, 4, 0.330, 0.224),
    ("q kT", 12, 1024, 20, 0.017, 0.022),
    ("P v", 12, 1024, 20, 0.019, 0.016),
    ("PT g", 12, 1024, 20, 0.017, 0.016),
    ("q kT", 28, 4096, 28, 0.955, 0.306),
    ("P v", 28, 4096, 28, 0.370, 0.263),
    ("PT g", 28, 4096, 28, 0.348, 0.256),
    ("q kT", 16, 2048, 100, 0.191, 0.084),
    ("P v", 16, 2048, 100, 0.070, 0.066),
    ("PT g", 16, 2048, 100, 0.069, 0.064),
    ("q kT", 8, 512, 36, 0.009, 0.015),
    ("P v", 8, 512, 36, 0.010, 0.013),
    ("PT g", 8, 512, 36, 0.008, 0.013),
    ("q kT", 2, 256, 6, 0.003, 0.012),
    ("P v", 2, 256, 6, 0.005, 0.011),
    ("PT g", 2, 256, 6, 0.005, 0.011),
    ("q kT", 32, 2048, 65, 0.318, 0.130),
    ("P v", 32, 2048, 65, 0.261, 0.105),
    ("PT g", 32, 2048, 65, 0.185, 0.103),
)


def layer(product: str, tokens: int, depth: int, num_out: int):
    """Shapes and strides of the operands of one product of a linear layer."""
    x, y, w = (tokens, depth), (tokens, num_out), (num_out, depth)
    return {
        "fwd": (x, (depth, 1), (depth, num_out), (1, depth)),
        "dx": (y, (num_out, 1), w, (depth, 1)),
        "dw": ((num_out, tokens), (1, num_out), x, (depth, 1)),
    }[product]


def attention(product: str, heads: int, length: int, head: int, *, strided: bool = False):
    q, scores = (heads, length, head), (heads, length, length)
    q_strides = (head, heads * head, 1) if strided else (length * head, head, 1)
    return {
        "q kT": (q, q_strides, (heads, head, length), (q_strides[0], 1, q_strides[1])),
        "P v": (scores, (length * length, length, 1), q, q_strides),
        "PT g": (scores, (length * length, 1, length), q, q_strides),
    }[product]


def agrees(is_padded: bool, plain_ms: float, padded_ms: float) -> bool:
    """What was clearly faster is padded, what was slower is not; in between either is right."""
    ratio = padded_ms / plain_ms
    return is_padded if ratio < 0.8 else not is_padded if ratio > 1.0 else True


@pytest.mark.parametrize("row", LAYERS, ids=str)
def test_measured_products_of_linear_layers_are_decided_as_measured(row) -> None:
    """Every row of the table: padded where that took less than 0.8 of the time, and not where it took more."""
    *what, plain_ms, padded_ms = row
    assert agrees(choose_padding(*layer(*what)) is not None, plain_ms, padded_ms)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("row", HEADS, ids=str)
def test_measured_products_of_attention_are_decided_as_measured(row, strided) -> None:
    """As above, for dense heads, and for heads that stand beside each other in a token (scores alone were measured so)."""
    *what, plain_ms, padded_ms = row
    if not strided or what[0] == "q kT":
        assert agrees(choose_padding(*attention(*what, strided=strided)) is not None, plain_ms, padded_ms)


def test_the_table_tests_both_answers() -> None:
    """There are rows on either side, so that neither "always" nor "never" passes."""
    ratios = [row[-1] / row[-2] for row in (*LAYERS, *HEADS)]
    assert sum(ratio < 0.8 for ratio in ratios) > 30 and sum(ratio > 1.0 for ratio in ratios) > 20


# ---------------------------------------------------------------- what has to be aligned


@pytest.mark.parametrize(
    ("operands", "padded"),
    [
        # x[4096, 18944] @ w[28, 18944].T: both operands have aligned rows; the output has not, and w has its rows
        (layer("fwd", 4096, 18944, 28), {"right": True, "left": False, "sizes": (4096, 18944, 32)}),
        # its gradients: of x, K is 28 and lies densely in dy; of w, M is 28, and the cut rows stand behind the others
        (layer("dx", 4096, 18944, 28), {"right": True, "left": True, "sizes": (4096, 32, 18944)}),
        (layer("dw", 4096, 18944, 28), {"right": False, "left": True, "sizes": (32, 4096, 18944)}),
        # an odd number of tokens lies densely in neither operand of dw, and in neither operand of fwd or dx
        (layer("dw", 4095, 1024, 1024), None),
        (layer("fwd", 4095, 1024, 1024), None),
        # rows of 1024 that start 1025 elements apart
        (
            ((4096, 1024), (1025, 1), (1024, 1024), (1, 1024)),
            {"right": False, "left": True, "sizes": (4096, 1024, 1024)},
        ),
        # K and N lie across in both: only the output's N is wrong
        (((64, 30), (1, 64), (30, 60), (60, 1)), {"right": True, "left": False, "sizes": (64, 30, 64)}),
        # a column of K = 1: rows of one element, or one dense column
        (((64, 1), (1, 1), (1, 64), (1, 1)), {"right": True, "left": True, "sizes": (64, 8, 64)}),
        (((64, 1), (1, 64), (1, 64), (64, 1)), None),
    ],
)
def test_only_what_blas_sees_misaligned_is_padded(operands, padded) -> None:
    """What lies densely counts, and leading dimensions; not the logical sizes alone."""
    found = pad_what_is_misaligned(*operands)
    if padded is None:
        assert found is None
    else:
        assert found is not None and (found.rows, found.depth, found.cols) == padded["sizes"]
        assert (found.left, found.right) == (padded["left"], padded["right"])


@given(
    st.lists(st.integers(1, 3), max_size=2),
    st.tuples(*[st.integers(1, 40)] * 3),
    st.tuples(st.integers(0, 1), st.integers(0, 1)),
)
def test_padding_leaves_nothing_misaligned(leading, sizes, turned) -> None:
    """Padded sizes are the next multiples of 8, and padding what is padded finds nothing more to do."""
    m, k, n = sizes
    left, right = (*leading, m, k), (*leading, k, n)
    operands = (left, layouts(left)[turned[0]], right, layouts(right)[turned[1]])
    padding = pad_what_is_misaligned(*operands)
    if padding is None:
        return
    sizes_after = (padding.rows, padding.depth, padding.cols)
    assert all(after in (before, up(before)) for before, after in zip(sizes, sizes_after))
    left, right = (*leading, padding.rows, padding.depth), (*leading, padding.depth, padding.cols)
    again = (
        left,
        layouts(left)[padding.left_turned],
        right,
        layouts(right)[padding.right_turned],
    )
    assert pad_what_is_misaligned(*again) is None


# ---------------------------------------------------------------- what is never padded


def test_other_item_sizes_are_never_padded() -> None:
    """float32 and float64 gain nothing."""
    operands = layer("fwd", 1024, 768, 50257)
    assert choose_padding(*operands, PAD_LIMIT, 2) is not None
    assert all(choose_padding(*operands, NO_LIMIT, itemsize) is None for itemsize in (1, 4, 8, 16))


def test_vectors_and_empty_tensors_are_never_padded() -> None:
    """A matrix times a vector is bound by its one read; an empty product is nothing."""
    assert choose_padding(*attention("P v", 28, 4096, 1)) is None
    assert choose_padding(*layer("fwd", 1, 768, 50257)) is None
    for sizes in ((0, 767, 50257), (8192, 0, 50257), (8192, 767, 0)):
        assert choose_padding(*layer("fwd", *sizes)) is None
    left, left_strides, right, right_strides = attention("q kT", 28, 4096, 28)
    assert choose_padding((0, *left[1:]), left_strides, (0, *right[1:]), right_strides) is None


def test_broadcast_leading_dims_are_never_padded() -> None:
    """Only what has a partner in the other operand."""
    left, left_strides, right, right_strides = attention("q kT", 28, 4096, 28)
    assert choose_padding(left, left_strides, right, right_strides) is not None
    assert choose_padding(left, left_strides, (1, *right[1:]), right_strides) is None
    assert choose_padding(left, left_strides, right[1:], right_strides[1:]) is None


@pytest.mark.parametrize("limit", [0, 2**20, 2**26, PAD_LIMIT])
def test_copies_stay_below_the_limit(limit) -> None:
    """All that is alive at once, whatever is padded; a limit of 0 pads nothing."""
    padded = 0
    for *what, _, _ in LAYERS:
        padding = choose_padding(*layer(*what), limit)
        assert padding is None or padding.nbytes <= limit
        padded += padding is not None
    assert padded > 0 if limit else padded == 0


def test_logits_are_copied_in_pieces() -> None:
    """Logits of 823 MB are padded, forward and backward, and never a second time in memory."""
    for product in ("fwd", "dx", "dw"):
        padding = choose_padding(*layer(product, 8192, 768, 50257))
        assert padding is not None and padding.pieces > 1 and padding.rows % ALIGNED == 0
        assert padding.nbytes <= PIECE_BYTES and not padding.right  # the weight is not copied
        rows = 50257 if product == "dw" else 8192
        assert padding.rows * (padding.pieces - 1) < rows <= padding.rows * padding.pieces


@pytest.mark.parametrize("product", ["fwd", "dx", "dw"])
def test_logits_of_few_tokens_are_copied_at_once(product) -> None:
    """Copies of 103 MB are one piece; not where the limit forbids it, where they are larger, or where tokens are many."""
    whole = choose_padding(*layer(product, 1024, 768, 50257))
    assert whole is not None and whole.pieces == 1 and PIECE_BYTES < whole.nbytes <= WHOLE_BYTES
    for limit in (WHOLE_BYTES * 3 // 4, PIECE_BYTES):
        bounded = choose_padding(*layer(product, 1024, 768, 50257), limit)
        assert bounded is not None and bounded.pieces > 1 and bounded.nbytes <= min(limit, PIECE_BYTES)
    for tokens, num_out in ((1400, 50257), (WHOLE_ROWS + 1, 25001)):
        in_pieces = choose_padding(*layer(product, tokens, 768, num_out))
        assert in_pieces is not None and in_pieces.pieces > 1 and in_pieces.nbytes <= 1.02 * PIECE_BYTES


# ---------------------------------------------------------------- before strides are known


@given(st.tuples(*[st.sampled_from((1, 6, 28, 64, 300, 768, 1001, 4096, 50257))] * 3), st.booleans(), st.booleans())
def test_what_runs_padded_was_claimed(sizes, left_turned, right_turned) -> None:
    """No layout of dense operands is padded that `may_pad` had not seen coming."""
    m, k, n = sizes
    operands = ((m, k), layouts((m, k))[left_turned], (k, n), layouts((k, n))[right_turned])
    if choose_padding(*operands) is not None:
        assert may_pad((m, k), (k, n)) and may_pad((1, m, k), (k, n))


def test_what_is_aligned_or_small_is_not_claimed() -> None:
    """Real widths, and the small layers of narrow models."""
    assert not may_pad((1, 4096, 3584), (3584, 18944))
    assert not may_pad((1, 4096, 28), (28, 28))
    assert not may_pad((12, 1024, 64), (12, 64, 1024))
    assert may_pad((1, 4096, 28), (28, 18944)) and may_pad((28, 18944), (1, 18944, 4096))


def test_folded_sizes_are_those_of_one_matrix() -> None:
    """An N-D tensor and a matrix, from either side, are looked at as they are multiplied: folded."""
    assert may_pad((8, 1024, 768), (768, 50257)) == may_pad((8192, 768), (768, 50257))
    assert prod((8, 1024)) == 8192

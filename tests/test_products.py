"""products: padded products are right on any strides, exact about infinities, and taken only where they may be."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_fusionfix import padding as padding_module
from thunder_fusionfix import products
from thunder_fusionfix.padding import Padding, pad_what_is_misaligned
from thunder_fusionfix.passes.fold_matmuls import fusionfix_linear, fusionfix_matmul
from thunder_fusionfix.products import may_be_padded, multiplied, padded_product

EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SIZES = st.integers(1, 21)


def laid(shape: tuple[int, ...], how: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A random tensor of ``shape`` that lies in memory as ``how`` says."""
    torch.manual_seed(seed)
    *leading, rows, cols = shape
    if how == "turned":
        made = torch.randn(*leading, cols, rows).mT
    elif how == "with gaps":
        made = torch.randn(*leading, rows, cols + 3)[..., :cols]
    elif how == "scattered":
        made = torch.randn(*leading, rows, 2 * cols)[..., ::2]
    elif how == "repeated":
        made = torch.randn(*leading, 1, cols).expand(shape)
    elif how == "leading last" and leading:
        made = torch.randn(rows, *leading, cols).movedim(0, -2)
    else:
        made = torch.randn(shape)
    low = made.to(dtype) if how != "repeated" else made[..., :1, :].to(dtype).expand(shape)
    if how in ("with gaps", "scattered"):  # a cast would make it dense
        base = torch.zeros(*leading, rows, 2 * cols + 3, dtype=dtype)
        low = base[..., : 2 * cols : 2] if how == "scattered" else base[..., :cols]
        low.copy_(made)
    return low


HOW = st.sampled_from(("dense", "turned", "with gaps", "scattered", "repeated", "leading last"))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test sets is undone."""
    monkeypatch.setattr(products, "SMALL_BYTES", products.SMALL_BYTES)
    monkeypatch.setattr(padding_module, "SPLIT_BYTES", padding_module.SPLIT_BYTES)


def padding_of(left: torch.Tensor, right: torch.Tensor) -> Padding | None:
    return pad_what_is_misaligned(left.shape, left.stride(), right.shape, right.stride())


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return (torch.linalg.vector_norm(got.double() - want) / torch.linalg.vector_norm(want).clamp_min(1e-30)).item()


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 3), max_size=2),
    st.tuples(SIZES, SIZES, SIZES),
    HOW,
    HOW,
    st.sampled_from(sorted(EPS, key=str)),
    st.booleans(),
    st.sampled_from((0, 2**20)),
    st.sampled_from((0, 2**20)),
    st.integers(0, 2**31),
)
def test_padded_products_equal_float64(
    leading, sizes, left_how, right_how, dtype, has_bias, small, split, seed
) -> None:
    """Any shapes and strides: as near to float64 as one rounding of the result allows, dense, no view, of the same dtype."""
    m, k, n = sizes
    products.SMALL_BYTES, padding_module.SPLIT_BYTES = small, split
    left = laid((*leading, m, k), left_how, dtype, seed)
    right = laid((*leading, k, n), right_how, dtype, seed + 1)
    bias = torch.randn(n).to(dtype) if has_bias and not leading else None
    padding = padding_of(left, right)
    if padding is None:
        return
    got = multiplied(left, right, bias, padding)
    want = left.double() @ right.double() + (0 if bias is None else bias.double())
    assert got.shape == want.shape and got.dtype is dtype
    assert got.is_contiguous() and not got._is_view()
    # a product of norms bounds what sums that cancel may lose
    scale = torch.linalg.vector_norm(left.double()) * torch.linalg.vector_norm(right.double())
    scale = scale + (0 if bias is None else torch.linalg.vector_norm(bias.double()))
    assert torch.linalg.vector_norm(got.double() - want) <= 2 * EPS[dtype] * scale


PIECES = [(50, 12, 9), (50, 16, 9), (50, 9, 16), (53, 8, 16), (53, 5, 3), (48, 5, 3)]
DENSE_PIECES = [sizes for sizes in PIECES if sizes != (53, 8, 16)]  # which is aligned as it is


@pytest.mark.parametrize(
    ("how", "sizes"), [*(("dense", sizes) for sizes in DENSE_PIECES), *(("turned", sizes) for sizes in PIECES)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_pieces_put_together_are_the_whole(how, sizes, has_bias) -> None:
    """The same product in pieces of 16 rows: every row is there, in its place, to the last bit or nearly so."""
    m, k, n = sizes
    left, right = laid((m, k), how, torch.bfloat16, 0), laid((k, n), "turned", torch.bfloat16, 1)
    padding = padding_of(left, right)
    assert padding is not None
    bias = torch.randn(n, dtype=torch.bfloat16) if has_bias else None
    fields = {name: getattr(padding, name) for name in Padding.__dataclass_fields__}
    in_pieces = Padding(**{**fields, "rows": 16, "pieces": -(-m // 16)})
    got = multiplied(left, right, bias, in_pieces)
    assert got.shape == (m, n) and got.is_contiguous() and not got._is_view()
    want = left.double() @ right.double() + (0 if bias is None else bias.double())
    assert relative(got, want) < 2 * EPS[torch.bfloat16]
    assert relative(got, multiplied(left, right, bias, padding).double()) < EPS[torch.bfloat16]


@pytest.mark.parametrize("num_pieces", [1, 4])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("sizes", "right_how", "want"),
    [((50, 16, 29), "turned", (16, 24)), ((50, 101, 16), "dense", (96, 16))],
    ids=["last columns", "last terms"],
)
def test_what_is_done_apart_leaves_the_right_operand_where_it_is(
    sizes, right_how, want, has_bias, num_pieces, monkeypatch
) -> None:
    """The last columns, and the last terms, of a product whose right operand is not copied: as near to float64 as the whole."""
    m, k, n = sizes
    left, right = laid((m, k), "dense", torch.bfloat16, 0), laid((k, n), right_how, torch.bfloat16, 1)
    bias = torch.randn(n, dtype=torch.bfloat16) if has_bias else None
    whole = padding_of(left, right)
    monkeypatch.setattr(padding_module, "SPLIT_BYTES", 0)
    apart = padding_of(left, right)
    assert whole is not None and whole.right
    assert apart is not None and not apart.right and (apart.depth, apart.cols) == want
    assert apart.nbytes < whole.nbytes or right_how == "turned"
    fields = {name: getattr(apart, name) for name in Padding.__dataclass_fields__}
    if num_pieces > 1:
        apart = Padding(**{**fields, "rows": 16, "pieces": num_pieces})
    exact = left.double() @ right.double() + (0 if bias is None else bias.double())
    got = multiplied(left, right, bias, apart)
    assert got.is_contiguous() and not got._is_view()
    assert relative(got, exact) < 1.5 * relative(multiplied(left, right, bias, whole), exact)


def test_few_columns_or_terms_are_never_all_done_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than 8 leave nothing for the aligned product: they are padded."""
    monkeypatch.setattr(padding_module, "SPLIT_BYTES", 0)
    for m, k, n, how in ((5, 16, 6, "turned"), (3, 6, 16, "dense")):
        padding = padding_of(laid((m, k), "dense", torch.bfloat16, 0), laid((k, n), how, torch.bfloat16, 1))
        assert padding is not None and padding.right and min(padding.depth, padding.cols) >= 8


@pytest.mark.parametrize("small", [0, 2**20])
def test_infinities_and_nans_stay_where_they_were(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns without one stay finite, though new memory may hold NaNs: padding multiplies zeros with zeros only."""
    real = torch.Tensor.new_empty
    monkeypatch.setattr(products, "SMALL_BYTES", small)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size: real(self, *size).fill_(float("nan")))
    for left_how in ("dense", "turned", "with gaps"):
        for right_how in ("dense", "turned", "with gaps"):
            left, right = (laid(s, h, torch.bfloat16, 2) for s, h in (((11, 5), left_how), ((5, 13), right_how)))
            left[3, 2], left[4, 1], right[0, 7] = float("inf"), float("nan"), float("-inf")
            padding = padding_of(left, right)
            assert padding is not None
            got, want = multiplied(left, right, None, padding), left.float() @ right.float()
            assert torch.equal(got.isfinite(), want.isfinite())
            assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("wrong", ["left", "right"])
def test_zeros_on_one_side_alone_are_not_enough(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: where one side's padding is not cleared, the test above would see it."""
    monkeypatch.setattr(products, "SMALL_BYTES", 0)
    real_empty, real_zero = torch.Tensor.new_empty, torch.Tensor.zero_
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size: real_empty(self, *size).fill_(float("nan")))
    keeps = {"left": lambda t: t.shape[-1] == 3, "right": lambda t: t.shape[-2] == 3}[wrong]
    monkeypatch.setattr(torch.Tensor, "zero_", lambda self: self if keeps(self) else real_zero(self))
    left, right = laid((16, 5), "dense", torch.bfloat16, 2), laid((5, 16), "turned", torch.bfloat16, 3)
    padding = padding_of(left, right)
    assert padding is not None and padding.depth == 8
    assert multiplied(left, right, None, padding).isnan().any()


def test_nothing_reads_data() -> None:
    """Fake tensors, which have none, go through whole and in pieces: so does a CUDA graph."""
    with FakeTensorMode(), torch.no_grad():
        left, right = torch.empty(50, 12, dtype=torch.bfloat16), torch.empty(12, 9, dtype=torch.bfloat16)
        padding = padding_of(left, right)
        assert padding is not None
        assert multiplied(left, right, torch.empty(9, dtype=torch.bfloat16), padding).shape == (50, 9)
        in_pieces = Padding(16, 16, 16, True, True, False, False, 0, pieces=4)
        assert multiplied(left, right, None, in_pieces).shape == (50, 9)
        q = torch.empty(2, 3, 7, 5, dtype=torch.float16)
        padding = padding_of(q, q.mT)
        assert padding is not None and multiplied(q, q.mT, None, padding).shape == (2, 3, 7, 7)


# ---------------------------------------------------------------- host time


class _Calls(TorchDispatchMode):
    """Names of the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


FORWARD = "view t split_with_sizes new_empty split_with_sizes mm mm copy_ resize_"
GRAD_INPUT = "split_with_sizes split_with_sizes mm clone addmm"
GRAD_WEIGHT = "new_empty transpose as_strided copy_ mm resize_"


@pytest.mark.parametrize(
    ("product", "want"), [("fwd", FORWARD), ("dx", GRAD_INPUT), ("dw", GRAD_WEIGHT)], ids=["fwd", "dx", "dw"]
)
def test_the_layer_of_a_small_model_takes_few_calls(product, want, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a few tokens, scaled down: one aligned product, one copy, and what is done apart. Its step waits for the host."""
    monkeypatch.setattr(padding_module, "SPLIT_BYTES", 0)
    monkeypatch.setattr(products, "SMALL_BYTES", 0)
    monkeypatch.setattr(products, "may_be_padded", lambda left, right: True)
    monkeypatch.setattr(products, "choose_padding", lambda *args: pad_what_is_misaligned(*args))
    x, w, dy = (laid(shape, "dense", torch.bfloat16, 0) for shape in ((32, 16), (57, 16), (32, 57)))
    with torch.no_grad():
        left, right = {"fwd": (x[None], w), "dx": (dy, w), "dw": (dy.t(), x)}[product]
        multiply = partial(fusionfix_linear, bias=None) if product == "fwd" else fusionfix_matmul
        with _Calls() as calls:
            got = multiply(left, right, copy_limit=0, pad_limit=2**28)
    exact = left.double() @ (right.double().t() if product == "fwd" else right.double())
    assert got.shape == exact.shape and got.is_contiguous() and not got._is_view()
    assert relative(got, exact) < 2 * EPS[torch.bfloat16]
    assert sorted(calls.names) == sorted(want.split())


# ---------------------------------------------------------------- guards


class _Gpu:
    """What `may_be_padded` asks of a tensor, as it would be on a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.is_cuda, self.device = True, torch.device("cuda:0")
        self.dtype, self.layout = tensor.dtype, tensor.layout


def asked(left: torch.Tensor, right: torch.Tensor, monkeypatch: pytest.MonkeyPatch, *, plain: bool = True) -> bool:
    monkeypatch.setattr(products, "_PLAIN", (_Gpu,) if plain else (torch.Tensor,))
    return may_be_padded(_Gpu(left), _Gpu(right))  # type: ignore[arg-type]


def test_only_two_byte_floats_on_a_gpu_without_autograd_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The yes-case, and each guard beside it."""
    low = torch.randn(4, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        assert asked(low, low, monkeypatch)
        assert asked(low.half(), low.half(), monkeypatch)
        assert not may_be_padded(low, low)  # on a CPU
        assert not asked(low, low, monkeypatch, plain=False)  # a subclass of Tensor
        assert not asked(low, low.half(), monkeypatch)
        assert not asked(low.to_sparse(), low, monkeypatch)
        assert not asked(low, low.to_sparse(), monkeypatch)
        for dtype in (torch.float32, torch.float64, torch.int16, torch.complex64):
            assert not asked(low.to(dtype), low.to(dtype), monkeypatch)
    assert not asked(low, low, monkeypatch)  # autograd may record


@pytest.mark.parametrize(("cast_to", "may"), [(torch.bfloat16, True), (torch.float16, False)])
def test_autocast_that_would_cast_is_left_to_aten(cast_to, may, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast to the operands' own dtype changes nothing; to another one, ATen casts."""
    low = torch.randn(4, 4, dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: cast_to)
    with torch.no_grad():
        assert asked(low, low, monkeypatch) == may


def test_no_limit_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of 0 asks nothing and pads nothing."""
    monkeypatch.setattr(products, "may_be_padded", lambda left, right: True)
    left, right = torch.empty(8192, 768, dtype=torch.bfloat16), torch.empty(50257, 768, dtype=torch.bfloat16).t()
    monkeypatch.setattr(products, "multiplied", lambda *args: args[-1])
    with torch.no_grad():
        assert padded_product(left, right, None, 0) is None
        assert isinstance(padded_product(left, right, None, 2**28), Padding)
        assert padded_product(left, right[:, :48], None, 2**28) is None

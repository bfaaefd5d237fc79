"""fold_matmuls: the same sums by four ways, and the way that real strides and sizes ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_fusionfix.folding import COPY_LIMIT, Choice, Way, aten_folds, choose
from thunder_fusionfix.matmul_copies import LINEAR
from thunder_fusionfix.model import Graph, Op, Ref, Value
from thunder_fusionfix.passes import fold_matmuls
from thunder_fusionfix.passes.fold_matmuls import fusionfix_linear, fusionfix_matmul, plan_fold_matmuls

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WIDTH = 12

# Every way to lay out a [..., WIDTH] tensor that trips somebody: name -> tensor in float64.
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "dense": lambda: torch.randn(4, 6, WIDTH),
    "dense 4-D": lambda: torch.randn(2, 3, 5, WIDTH),
    "unit dim behind": lambda: torch.randn(1, 7, WIDTH).transpose(0, 1),
    "unit dim in front": lambda: torch.randn(7, 1, WIDTH).transpose(0, 1),
    "all units": lambda: torch.randn(1, 1, WIDTH),
    "sequence first": lambda: torch.randn(6, 4, WIDTH).transpose(0, 1),
    "heads in the middle": lambda: torch.randn(2, 5, 3, WIDTH).transpose(1, 2),
    "three dims turned": lambda: torch.randn(3, 4, 2, WIDTH).permute(2, 1, 0, 3),
    "columns first": lambda: torch.randn(4, WIDTH, 6).transpose(1, 2),
    "with gaps": lambda: torch.randn(4, 9, 2 * WIDTH)[:, ::3, :WIDTH],
    "every second column": lambda: torch.randn(4, 6, 2 * WIDTH)[..., ::2],
    "rows repeated": lambda: torch.randn(4, 1, WIDTH).expand(4, 6, WIDTH),
    "batch repeated": lambda: torch.randn(1, 6, WIDTH).expand(4, 6, WIDTH),
    "no rows": lambda: torch.randn(4, 0, WIDTH).transpose(0, 1),
    "no batch": lambda: torch.randn(0, 4, WIDTH),
}


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype is dtype and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=tolerance(dtype), atol=tolerance(dtype))


class Products(TorchDispatchMode):
    """Notes the products and copies that ATen is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) in ("mm", "addmm", "bmm", "clone"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------- the same sums


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_of_any_layout_equals_float64(layout: str, dtype: torch.dtype) -> None:
    """A linear layer gives what float64 gives, dense and row-major, with and without bias, frozen or trained."""
    torch.manual_seed(0)
    x, w, b = LAYOUTS[layout]().to(torch.float64) / 4, torch.randn(9, WIDTH).double() / 4, torch.randn(9).double()
    low = x.to(dtype)
    assert low.stride() == x.stride() or 0 in x.stride()
    for bias in (None, b):
        want = linear(low.double(), w.to(dtype).double(), None if bias is None else bias.to(dtype).double())
        for requires_grad in (False, True):
            weight = w.to(dtype).requires_grad_(requires_grad)
            with torch.no_grad():
                got = fusionfix_linear(low, weight, None if bias is None else bias.to(dtype))
            assert_close(got, want, dtype)
            assert got.is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matmul_from_both_sides_equals_float64(layout: str) -> None:
    """An N-D tensor times a 2-D one, and a 2-D one times an N-D one, give what float64 gives."""
    torch.manual_seed(0)
    x, right, left = LAYOUTS[layout](), torch.randn(WIDTH, 5), torch.randn(5, WIDTH)
    with torch.no_grad():
        for requires_grad in (False, True):
            right.requires_grad_(requires_grad), left.requires_grad_(requires_grad)
            assert_close(fusionfix_matmul(x, right), x.double() @ right.double(), torch.float32)
            assert_close(fusionfix_matmul(left, x.mT), left.double() @ x.mT.double(), torch.float32)


@pytest.mark.parametrize("way", [way for way in Way if way is not Way.BATCH])
@pytest.mark.parametrize("layout", ["unit dim behind", "dense", "all units"])
def test_every_way_gives_the_same_sums(way: Way, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever way is chosen for a tensor that may be viewed, the result is the same."""
    monkeypatch.setattr(fold_matmuls, "choose", lambda *args, **kwargs: Choice(way))
    monkeypatch.setattr(fold_matmuls, "aten_folds", lambda shape, strides: False)
    x, w, b = LAYOUTS[layout](), torch.randn(9, WIDTH), torch.randn(9)
    with torch.no_grad():
        assert_close(fusionfix_linear(x, w, b), linear(x.double(), w.double(), b.double()), torch.float32)
        assert_close(fusionfix_matmul(x, w.t()), x.double() @ w.t().double(), torch.float32)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("layout", ["sequence first", "dense", "with gaps", "columns first", "rows repeated"])
def test_batches_by_either_dim_give_the_same_sums(swapped: bool, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product per index of the first or of the second leading dim: the result is the same, in the same order."""
    x, w, b = LAYOUTS[layout](), torch.randn(9, WIDTH), torch.randn(9)
    choice = Choice(Way.BATCH, *x.shape[:2], swapped=swapped)
    monkeypatch.setattr(fold_matmuls, "choose", lambda *args, **kwargs: choice)
    monkeypatch.setattr(fold_matmuls, "aten_folds", lambda shape, strides: False)
    with torch.no_grad():
        got = fusionfix_linear(x, w.requires_grad_(), b)
    assert_close(got, linear(x.double(), w.detach().double(), b.double()), torch.float32)
    assert got.is_contiguous()


def test_gradients_flow_where_autograd_records() -> None:
    """Outside of no_grad, ATen's own path runs, and its gradients with it."""
    x = torch.randn(7, 1, WIDTH).transpose(0, 1).requires_grad_()
    w = torch.randn(9, WIDTH, requires_grad=True)
    fusionfix_linear(x, w).sum().backward()
    assert x.grad is not None and w.grad is not None
    torch.testing.assert_close(w.grad, x.detach().sum((0, 1)).expand(9, WIDTH))


def test_complex_and_integer_products_are_right() -> None:
    """Dtypes that no price is written for give what torch gives."""
    x, w = torch.randn(6, 4, 8, dtype=torch.complex64).transpose(0, 1), torch.randn(8, 3, dtype=torch.complex64)
    i, v = torch.randint(9, (6, 4, 8)).transpose(0, 1), torch.randint(9, (8, 3))
    with torch.no_grad():
        torch.testing.assert_close(fusionfix_matmul(x.conj(), w), torch.matmul(x.conj(), w))
        assert torch.equal(fusionfix_matmul(i, v), torch.matmul(i, v))


def test_no_way_reads_data() -> None:
    """Fake tensors, which have none, go through every layout: so does a CUDA graph."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        w = torch.empty(9, WIDTH)
        for make in LAYOUTS.values():
            x = make()
            assert fusionfix_linear(x, w, torch.empty(9)).shape == (*x.shape[:-1], 9)
            assert fusionfix_matmul(w, x.mT).shape == (*x.shape[:-2], 9, x.shape[-2])


# ---------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("shape", "strides", "num_out", "itemsize", "want"),
    [
        ((33600, 1, 2056), (2056, 69081600, 1), 4112, 2, Choice(Way.VIEW)),
        ((2100, 1, 2056), (2056, 4317600, 1), 4112, 2, Choice(Way.VIEW)),
        ((64, 512, 1024), (1024, 65536, 1), 4096, 2, Choice(Way.ATEN)),
        ((512, 8, 1024), (1024, 524288, 1), 4096, 2, Choice(Way.BATCH, 512, 8, swapped=True)),
        ((40, 40, 1024), (1024, 40960, 1), 4096, 2, Choice(Way.COPY)),
        ((4, 7, 5), (5, 20, 1), 6, 4, Choice(Way.ATEN)),
    ],
)
def test_choice_of_measured_and_typical_rows(
    shape: tuple[int, ...], strides: tuple[int, ...], num_out: int, itemsize: int, want: Choice
) -> None:
    """The rows of the table are decided as measured; small products stay one kernel."""
    assert choose(shape, strides, num_out, itemsize, False, COPY_LIMIT) == want


def test_choice_with_bias_prefers_one_addmm() -> None:
    """A bias costs a folded product nothing and others a pass over the output, which here outweighs the copy."""
    shape, strides = (64, 512, 1024), (1024, 65536, 1)
    assert choose(shape, strides, 4096, 2, True, COPY_LIMIT).way is Way.COPY


@pytest.mark.parametrize("limit", [0, 10**6])
def test_choice_never_copies_beyond_the_limit(limit: int) -> None:
    """Where ATen copies nothing, nothing larger than the limit is copied."""
    for rows in (2, 8, 40, 200):
        for transposed in (False, True):
            shape, strides = (rows, rows, 4096), (4096, 4096 * rows, 1)
            if rows * rows * 4096 * 2 > limit:
                assert choose(shape, strides, 4096, 2, True, limit, transposed).way is not Way.COPY


def test_choice_where_aten_copies_is_never_more_than_that_copy() -> None:
    """Leading dims that merge in no way: ATen copies and multiplies many times, so one product of the copy is taken."""
    shape, strides = (8, 8, 8, 2048), (16384 * 8, 2048, 16384, 1)
    assert choose(shape, strides, 4096, 2, False, 0).way is not Way.ATEN


def test_aten_rule_agrees_with_aten() -> None:
    """`aten_folds` says which tensors ATen folds without grad and without a copy."""
    w = torch.randn(9, WIDTH)
    for name, make in LAYOUTS.items():
        x = make()
        with torch.no_grad(), Products() as products:
            torch.matmul(x, w.t())
        if x.numel():
            assert ("mm" in products.seen and "clone" not in products.seen) == aten_folds(x.shape, x.stride()), name


@pytest.mark.parametrize("requires_grad", [False, True])
def test_unit_dim_becomes_one_product(requires_grad: bool) -> None:
    """The report's case is one mm and no copy, with a frozen weight as with a trained one."""
    x = torch.randn(1, 40, WIDTH).transpose(0, 1)
    w = torch.randn(9, WIDTH).requires_grad_(requires_grad)
    with torch.no_grad(), Products() as products:
        fusionfix_linear(x, w)
    assert products.seen == ["mm"]
    with torch.no_grad(), Products() as plain:
        linear(x, w.detach())
    assert plain.seen == ["bmm"]


def test_trained_weight_does_not_force_a_copy() -> None:
    """ATen folds for a weight that requires grad and copies for it; the entry multiplies in place where that is faster."""
    x = torch.randn(300, 4, WIDTH).transpose(0, 1)
    w = torch.randn(9, WIDTH, requires_grad=True)
    with torch.no_grad(), Products() as products:
        fusionfix_linear(x, w)
    assert products.seen == ["bmm"]
    with torch.no_grad(), Products() as plain:
        linear(x, w)
    assert plain.seen == ["clone", "mm"]


# ---------------------------------------------------------------- the report


def test_report_groups_products_by_reason() -> None:
    """One decision for what shares a reason: weights that an op made, and weights that are arguments."""
    values = {name: Value(name, (4, 6, 8), "bf16", "cuda:0") for name in ("x", "y", "z")}
    values |= {name: Value(name, (8, 8), "bf16", "cuda:0") for name in ("w", "cast")}
    ops = (
        Op("prims.convert_element_type", (Ref("w"),), Ref("cast")),
        Op(LINEAR, (Ref("x"), Ref("cast"), None, COPY_LIMIT), Ref("y")),
        Op(LINEAR, (Ref("y"), Ref("w"), None, COPY_LIMIT), Ref("z")),
        Op("return", (Ref("z"),)),
    )
    decisions = plan_fold_matmuls(Graph("f", "inference", ("x", "w"), ops, values))
    assert [decision.pos for decision in decisions] == [1, 2]
    assert "made by convert_element_type" in decisions[0].reason and "[4, 6, 8] @ [8, 8]" in decisions[0].what
    assert "is an argument" in decisions[1].reason

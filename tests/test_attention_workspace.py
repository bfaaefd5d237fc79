"""attention_workspace: what attention's backward kernels allocate, as measured, and that `simulate` counts it."""

from __future__ import annotations

import pytest
from helpers import slow_replay

from thunder_fusionfix.attention_workspace import (
    KERNELS,
    cudnn,
    flash,
    flash_or_cudnn,
    is_attention_backward,
    memory_efficient,
    workspace_of,
)
from thunder_fusionfix.effects import ATTENTION_BACKWARD, FLASH, FLASH_BACKWARD, PURE, effect_of
from thunder_fusionfix.explain import explain
from thunder_fusionfix.model import DEL, Graph, Op, Ref, Value
from thunder_fusionfix.report import why_alive
from thunder_fusionfix.schedule import Problem, best_order
from thunder_fusionfix.simulate import Prices, rounded, simulate
from thunder_fusionfix.sources import sources

EFFICIENT_BACKWARD = "sdpaex_scaled_dot_product_efficient_attention_backward"

# One H200, torch 2.11, cuDNN 9.19, bf16, not causal: most bytes allocated in the backward beyond inputs and gradients, whole blocks of
# 512. None where the allocator gave 1 MiB more, the end of a large block that it leaves unsplit.
MEASURED = [
    # [batch, heads, length, dim], flash, cuDNN, memory-efficient
    ((8, 12, 197, 64), 6389760, 4917760, 6373376),
    ((1, 28, 4096, 128), 59179008, 59179520, 59193344),
    ((1, 32, 4096, 64), 34078720, 34079232, 34111488),
    ((1, 12, 1024, 64), 3194880, 3195392, 3197952),
    ((2, 16, 2047, 128), 33816576, 33800704, 33824768),
    ((4, 8, 512, 32), 2162688, 2163200, 4263936),
    ((1, 20, 2048, 80), None, 13271552, 21140480),
    ((1, 8, 1000, 96), 3178496, 3104256, 4227584),
    ((16, 4, 64, 64), 2129920, 1065472, 1065984),
    ((1, 2, 100, 16), 33792, 14336, 67072),
]


def nbytes(workspace: tuple[int, int]) -> int:
    return sum(map(rounded, workspace))


@pytest.mark.parametrize(("shape", "of_flash", "of_cudnn", "of_efficient"), MEASURED)
def test_the_rule_gives_what_was_measured(shape, of_flash, of_cudnn, of_efficient) -> None:
    """To the byte; of cuDNN's, whose parts are not known, never less and at most two blocks more."""
    assert of_flash is None or nbytes(flash(shape)) == of_flash
    assert 0 <= nbytes(cudnn(shape)) - of_cudnn <= 1024
    assert nbytes(memory_efficient(shape)) == of_efficient
    assert nbytes(flash_or_cudnn(shape)) >= max(of_flash or 0, of_cudnn)


def test_only_backwards_of_attention_have_a_workspace() -> None:
    """Each operator has a row in the table of effects; others, and shapes that are not known, take nothing."""
    assert {FLASH_BACKWARD, ATTENTION_BACKWARD, EFFICIENT_BACKWARD, "cudnn_sdpa_bwd"} == set(KERNELS)
    assert all(effect_of(Op(name, ())).kind in PURE for name in KERNELS)
    for name in (FLASH, "torch.matmul", "del"):
        assert not is_attention_backward(Op(name, ())) and not workspace_of(op(name), values((1, 2, 64, 64))).at_peak
    for shape in (None, (64, 64), (0, 2, 64, 64)):
        assert not workspace_of(op(FLASH_BACKWARD), values(shape)).at_peak
    assert not workspace_of(Op(FLASH_BACKWARD, ()), {}).at_peak


# ---------------------------------------------------------------- simulate

TENSORS = ("g", "q", "k", "v", "dq", "dk", "dv")
SHAPE = (1, 8, 1000, 96)


def op(name: str) -> Op:
    return Op(name, tuple(map(Ref, TENSORS[:4])), tuple(map(Ref, TENSORS[4:])))


def values(shape, device: str = "cuda:0") -> dict[str, Value]:
    return {name: Value(name, shape, "bf16", device) for name in TENSORS}


def backward(name: str, device: str = "cuda:0") -> Graph:
    """The gradients of attention, then the sum of two of them on a GPU."""
    outputs = {one: Value(one, SHAPE, "bf16", "cuda:0") for one in "xy"}
    ops = (
        op(name),
        Op("torch.add", (Ref("dq"), Ref("dk")), Ref("x")),
        *(Op(DEL, (Ref(one),)) for one in ("dq", "dk")),
        Op("torch.exp", (Ref("x"),), Ref("y")),
        Op("return", (Ref("y"), Ref("dv"))),
    )
    return Graph("f", "backward", TENSORS[:4], ops, {**values(SHAPE, device), **outputs}, held=frozenset(TENSORS[:4]))


@pytest.mark.parametrize("name", KERNELS)
def test_simulate_counts_it_at_its_op_alone(name) -> None:
    """Seven tensors and the workspace are alive while the kernel runs, and the workspace has names and a reason."""
    graph, tensor = backward(name), rounded(8 * 1000 * 96 * 2)
    accumulator, sums = map(rounded, KERNELS[name](SHAPE))
    timeline = simulate(graph)
    assert timeline.live_bytes == (
        7 * tensor + accumulator + sums,
        8 * tensor,
        8 * tensor,
        7 * tensor,
        7 * tensor,
        7 * tensor,
    )
    assert (timeline.peak_bytes, timeline.peak_pos) == (7 * tensor + accumulator + sums, 0)
    assert timeline.lower_bound_bytes == timeline.peak_bytes
    found = {holder.name: holder for holder in timeline.holders if holder.name not in TENSORS}
    assert {one: holder.nbytes for one, holder in found.items()} == {
        "accumulator for dq": accumulator,
        "row sums for dq": sums,
    }
    for holder in found.values():
        assert why_alive(graph, 0, holder) == f"that {name} writes only for itself"
    assert sum(holder.nbytes for holder in timeline.holders) == timeline.peak_bytes
    reasons = {kept.name: kept.needed_by for kept in explain(*sources(graph)).holders}
    assert [reasons[one] for one in found] == ["a temporary of this op"] * 2


@pytest.mark.parametrize("name", KERNELS)
def test_all_prices_agree(name) -> None:
    """The replay of owners, the orders' prices and the scheduler count the same bytes."""
    graph = backward(name)
    prices = Prices(graph)

    def size_of(value: str) -> tuple[str, int]:
        return value, rounded(graph.values[value].nbytes or 0)

    def temporary(pos: int) -> int:
        return nbytes(KERNELS[name](SHAPE)) if graph.ops[pos].id == name else 0

    timeline = prices.timeline()
    assert slow_replay(graph, size_of, temporary) == list(timeline.live_bytes)
    assert prices.peak_of(prices.steps) == timeline.peak_bytes == prices.timeline(prices.steps).peak_bytes
    assert best_order(Problem(prices)).peak_bytes == timeline.peak_bytes


def test_tensors_elsewhere_take_no_memory_of_the_gpu() -> None:
    """On a CPU in a trace with GPU tensors it counts nothing, as its tensors."""
    assert simulate(backward(FLASH_BACKWARD, device="cpu")).live_bytes[0] == 0

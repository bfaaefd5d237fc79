"""Random torch programs, run under Thunder with nvFuser's regions on the CPU, with and without the passes.

Programs hold views, in-place ops on arguments and on intermediates, draws of random numbers, and independent branches that are
joined late, so that there is something to move and much that must not move. Both runs execute the same torch functions on the
same numbers, so they must agree to the last bit: a difference is a wrong order, a wrong region or a wrong alias.

    python tests/programs.py 100        # counts of verdicts and of passes that fired, for seeds 0 to 99
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import thunder
import torch
import torch.nn.functional as F
from cpu_nvfuser import nvfuser_on_cpu
from thunder.core import rematerialization
from torch.utils import _pytree as pytree

from thunder_fusionfix._thunder import replaced
from thunder_fusionfix.transform import FusionFixTransform

EQUAL, PLAIN_WRONG, OURS_WRONG = "equal", "plain Thunder is wrong already", "ours is wrong"
SIZE = 24  # rows and columns of a tensor


@dataclass(frozen=True)
class Program:
    """A function and its arguments; the function draws random numbers from torch's generator."""

    fn: Callable
    args: tuple[torch.Tensor, ...]


def random_program(seed: int) -> Program:
    """A program of some 12 statements; the same for the same seed."""
    rng = random.Random(seed)
    num_args = rng.randint(2, 4)
    generator = torch.Generator().manual_seed(seed)
    args = tuple(torch.randn(SIZE, SIZE, generator=generator).mul_(0.2) for _ in range(num_args))
    for arg in args[: rng.randint(0, num_args - 1)]:
        arg.requires_grad_(True)
    free = [i for i, arg in enumerate(args) if not arg.requires_grad]  # may be changed in place
    steps = [_random_step(rng, num_args + i, free) for i in range(rng.randint(8, 16))]
    num_results = rng.randint(1, 3)

    def fn(*tensors: torch.Tensor):
        pool = list(tensors)
        for step in steps:
            pool.append(step(pool))
        total = sum(tensor.sum() for tensor in pool[-3:])
        return (*pool[-num_results:], total)

    return Program(fn, args)


def _random_step(
    rng: random.Random, num_known: int, free: Sequence[int]
) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """One statement on tensors that are there by then; it gives a new one of the same shape."""

    def pick() -> int:
        return num_known - 1 - min(int(rng.expovariate(0.3)), num_known - 1)

    a, b, c = pick(), pick(), pick()
    free_arg = rng.choice(free)
    dropped = rng.uniform(0.1, 0.5)
    cut = rng.randint(1, SIZE - 1)
    kinds: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
        "matmul": lambda pool: pool[a] @ pool[b] * 0.2,
        "relu": lambda pool: torch.relu(pool[a]),
        "two relus": lambda pool: torch.relu(pool[a]) @ torch.tanh(pool[b]),
        "tanh": lambda pool: torch.tanh(pool[a] * 0.5) + pool[b],
        "gate": lambda pool: F.silu(pool[a]) * pool[b] + pool[c],
        "norm": lambda pool: pool[a] * torch.rsqrt(pool[a].square().mean(-1, keepdim=True) + 1e-3),
        "transpose": lambda pool: pool[a].t() + pool[b],
        "view": lambda pool: pool[a].reshape(-1).view(SIZE, SIZE).t(),
        "slices": lambda pool: torch.cat([torch.relu(pool[a][:cut]), pool[b][cut:] * 2], 0),
        "dropout": lambda pool: F.dropout(pool[a], dropped, training=True),
        "write argument": lambda pool: pool[free_arg].mul_(0.5) + pool[a],
        "write computed": lambda pool: (pool[a] * 1.5).add_(pool[b]),
        "copy": lambda pool: pool[free_arg].copy_(torch.tanh(pool[a].detach())) * 0.5,
    }
    weights = [3 if name in ("matmul", "relu", "two relus") else 1 for name in kinds]
    return kinds[rng.choices(list(kinds), weights)[0]]


def results(program: Program, compiled: Callable, seed: int) -> list[torch.Tensor]:
    """Outputs, gradients and final arguments of one training step."""
    args = [arg.detach().clone().requires_grad_(arg.requires_grad) for arg in program.args]
    torch.manual_seed(seed)
    outs = [leaf for leaf in pytree.tree_leaves(compiled(*args)) if isinstance(leaf, torch.Tensor)]
    needing = [out for out in outs if out.requires_grad]
    if needing:
        torch.autograd.backward(
            needing, [torch.cos(torch.arange(out.numel()) * 1.0).view(out.shape) for out in needing]
        )
    grads = [arg.grad if arg.grad is not None else torch.zeros(()) for arg in args]
    return [tensor.detach().clone() for tensor in (*outs, *grads, *args)]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], tolerance: float = 0.0) -> bool:
    """True where both are the same, to the last bit or within ``tolerance`` of the largest element."""
    if len(one) != len(other):
        return False
    for got, want in zip(one, other, strict=True):
        if got.shape != want.shape or got.dtype != want.dtype:
            return False
        scale = max(want.abs().max().item(), 1.0) if want.numel() else 1.0
        if not torch.allclose(got, want, rtol=0, atol=tolerance * scale, equal_nan=True):
            return False
    return True


def compare(program: Program, fusion_type: str, seed: int = 0, **options) -> tuple[str, Counter[str]]:
    """The verdict on one program, and how many rewrites each pass applied."""
    fix = FusionFixTransform(strict=True, split_min_bytes=0, share_fusions=False, **options)
    found = []
    # nvFuser's pass would take the generator's state from a GPU; without it a draw is an op that advances torch's own
    draws = replaced(rematerialization, "replace_uniform", lambda trace: trace)
    with nvfuser_on_cpu(), draws, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for transforms in ([], [fix]):
            jitted = thunder.jit(program.fn, executors=("nvfuser",), fusion_type=fusion_type, transforms=transforms)
            found.append(results(program, jitted, seed))
    fired = Counter(d.pass_name for report in fix.reports for d in report.decisions if d.applied)
    if same(found[1], found[0]):
        return EQUAL, fired
    eager = results(program, program.fn, seed)
    is_plain_right = same(found[0], eager, 1e-4)
    return (OURS_WRONG if is_plain_right else PLAIN_WRONG), fired


def main() -> None:
    verdicts: Counter[str] = Counter()
    programs: Counter[str] = Counter()
    for seed in range(int(sys.argv[1])):
        program = random_program(seed)
        for fusion_type in ("dataflow", "consecutive"):
            try:
                verdict, fired = compare(program, fusion_type, seed)
            except Exception as error:  # noqa: BLE001 - what Thunder cannot compile says nothing about us
                verdict, fired = f"{type(error).__name__}: {str(error)[:90]}", Counter()
                print("seed", seed, fusion_type, verdict, flush=True)
            verdicts[verdict] += 1
            programs.update(dict.fromkeys(fired, 1))
            if verdict == OURS_WRONG:
                print("seed", seed, fusion_type, verdict, dict(fired), flush=True)
    print(dict(verdicts))
    print("programs in which a pass fired:", dict(programs))


if __name__ == "__main__":
    main()

"""The time of steps on a GPU, by CUDA events."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch


def milliseconds(step: Callable[[], object], steps: int) -> Iterator[float]:
    """The time of each of ``steps`` steps, after one more."""
    step()
    for _ in range(steps):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        end.synchronize()
        yield start.elapsed_time(end)

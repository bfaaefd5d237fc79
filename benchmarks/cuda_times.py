"""The time of steps on a GPU, by CUDA events: one by one, or of many calls queued while the GPU sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

LONG_CALL_MS = 20.0  # of these a few are enough
MOST_SLEEP_S = 4.0
CYCLES_PER_S = 2.0e9  # about a GPU's clock; the sleep is checked, not trusted


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


def times(call: Callable[[], object], calls: int) -> dict[str, float]:
    """Milliseconds of one ``call``: "device" and "host"."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once_ms = 1e3 * (time.perf_counter() - start)
    calls = min(calls, 3) if once_ms > LONG_CALL_MS else calls
    sleep_s = 0.01 + 2e-3 * once_ms * calls
    while True:
        found = queued(call, calls, sleep_s)
        if found is not None:
            return found
        sleep_s, calls = 2 * sleep_s, max(3, calls // 2)  # the GPU's queue may be full, too
        if sleep_s > MOST_SLEEP_S:
            raise RuntimeError(
                f"the host does not queue {calls} calls in {MOST_SLEEP_S} s: something in them waits for the GPU"
            )


def queued(call: Callable[[], object], calls: int, sleep_s: float) -> dict[str, float] | None:
    """The times of ``calls`` calls queued while the GPU sleeps; None where it woke before the last was queued."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(sleep_s * CYCLES_PER_S))
    start.record()
    before = time.perf_counter()
    for _ in range(calls):
        call()
    host_s = time.perf_counter() - before
    slept_through = not start.query()
    end.record()
    torch.cuda.synchronize()
    if not slept_through:
        return None
    return {"device": start.elapsed_time(end) / calls, "host": 1e3 * host_s / calls}

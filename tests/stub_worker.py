"""Stands in for `measure` and `predict` in the tests of `bench`: ``python -m stub_worker JOB OUT``.

The behaviour of each variant is in the environment: ``STUB="plain=ok,eager=crash"``; each start
is a line in the file ``STUB_LOG``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from thunder_fusionfix.measure import STATE, WAITING, GpuLock, Job, join_parent


def main() -> None:
    job, out = Job.from_json(sys.argv[1]), Path(sys.argv[2])
    join_parent()
    with open(os.environ["STUB_LOG"], "a") as log:
        log.write(f"{job.variant} {os.getpid()}\n")
    if "STUB_LOCK" in os.environ:  # what it sees, and the lock that it would take
        with open(os.environ["STUB_LOCK"], "a") as seen:
            seen.write(f"{os.environ['CUDA_VISIBLE_DEVICES']} {GpuLock().path}\n")
    behaviour = dict(item.rsplit("=", 1) for item in os.environ["STUB"].split(","))[job.variant]
    print(f"{STATE}first step", flush=True)
    record = {
        "status": "ok",
        "notes": [],
        "peak_bytes": 7_000_000,
        "measured": {"peak_bytes": 7_000_000, "step_ms": {"median": 2.0, "spread": 0.1}},
    }
    if behaviour == "crash":
        print("something went wrong", flush=True)
        os._exit(3)
    if behaviour == "out of memory":
        record = {"status": "out of memory", "reason": "tried to allocate 1 GiB", "measured": {}, "notes": []}
    if behaviour.startswith("part"):  # memory is measured, time is not: it hangs there, or crashes
        part = {**record, "status": "cut short", "reason": "ended while timing", "measured": {"peak_bytes": 5_000_000}}
        out.write_text(json.dumps(part))
        print(f"{STATE}timing", flush=True)
    if behaviour == "part and crash":
        time.sleep(0.5)
        os._exit(3)
    if behaviour in ("hang", "part"):
        time.sleep(600)
    if behaviour == "wait":
        print(f"{STATE}{WAITING}", flush=True)
        time.sleep(4)
        print(f"{STATE}timing", flush=True)
    out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
    os._exit(0)

"""Python's cyclic garbage collector, put off while traces are worked on.

A trace and what is known of it only grow until the work is done, so collecting finds nothing; but each collection walks all of
Thunder's traces and ours. It took 4 of 31 CPU seconds of a capture of 8 layers of Qwen2, and 2 of 5 seconds of the decisions about a
trace of 10,000 ops.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collected_later() -> Iterator[None]:
    """Collects no garbage while the context is open; leaves the collector as it was.

    >>> with collected_later():
    ...     print(gc.isenabled())
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

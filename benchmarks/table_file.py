"""The rows of a benchmark, on disk after each of them, with the machine and the versions that they were measured with.

    with table_file(path, "loss") as file:
        file.add({"case": "cut:1x4096", "variant": "plain", "ms": 7.5})

A run that is cut leaves what it had; only one that came to its end has ``"is_complete": true``.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from thunder_fusionfix.bench import for_the_record, source_digest
from thunder_fusionfix.measure import environment, now

MOST_OF_AN_ERROR = 500  # characters


@contextlib.contextmanager
def table_file(path: str | Path | None, name: str) -> Iterator[TableFile]:
    """The file of the benchmark ``name``; complete where the context ends without an exception."""
    file = TableFile(path, name)
    yield file
    file.write(is_complete=True)


class TableFile:
    """A JSON file that grows row by row; without a path the rows are only printed."""

    def __init__(self, path: str | Path | None, name: str) -> None:
        self.path = Path(path) if path else None
        self.rows: list[dict[str, Any]] = []
        self.head: dict[str, Any] = {
            "benchmark": name,
            "command": shlex.join(["python", f"benchmarks/{name}.py", *for_the_record(sys.argv[1:])]),
            "date": now(),
            "source": source_digest(),
            **environment(),
        }

    def add(self, row: dict[str, Any], *, shown: bool = True) -> None:
        """Prints ``row`` as one line of JSON, if ``shown``, and writes the file."""
        self.rows.append(row)
        if shown:
            print(json.dumps(row), flush=True)
        self.write(is_complete=False)

    def add_measured(self, named: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
        """Adds what ``measure`` gives; where it fails ``named`` and the error, as one row's failure must not cost the others."""
        try:
            row = measure()
        except Exception as error:  # noqa: BLE001 -- see above
            row = {**named, "error": f"{type(error).__name__}: {error}"[:MOST_OF_AN_ERROR]}
        self.add(row)

    def write(self, *, is_complete: bool) -> None:
        if self.path is None:
            return
        lines = ",\n".join(f"  {json.dumps(row)}" for row in self.rows)
        head = json.dumps({**self.head, "is_complete": is_complete}, indent=1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')
        part.replace(self.path)

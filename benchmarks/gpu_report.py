"""What the parts of the GPU's benchmark find: each row is printed and written when it is known, so whatever ends a part loses none."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

Dtype = Literal["bfloat16", "float16", "float32"]


class Report:
    """Appends a line of JSON for each row to a file, if there is one, and prints it."""

    def __init__(self, part: str, file: Path | None) -> None:
        self._part = part
        self._file = file

    def row(self, what: str, **figures: Any) -> None:
        cells = [f"{name.replace('_', ' ')} {_number(value)}" for name, value in figures.items()]
        print(f"{self._part}: {what}: " + ", ".join(cells), flush=True)
        if self._file is None:
            return
        with self._file.open("a") as out:
            out.write(json.dumps({"part": self._part, "what": what, **figures}) + "\n")
            out.flush()
            os.fsync(out.fileno())


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def note(what: str) -> None:
    """Says what is being done; it is no result."""
    print(f"  {what}", file=sys.stderr, flush=True)

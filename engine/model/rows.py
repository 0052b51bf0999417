"""A model runs as one sequence over all requests' tokens. What depends on the tokens before gets some of the rows at a time."""

from __future__ import annotations

from typing import Any

import torch


class RowsOf:
    """Rows [start, end) of whatever has one for each of a step's `rows` tokens."""

    def __init__(self, start: int, end: int, rows: int, *, as_batch: bool) -> None:
        """`as_batch`: each row is a sequence of its own."""
        self._start, self._end, self._rows, self._as_batch = start, end, rows, as_batch

    def __call__(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(self(item) for item in value)
        if isinstance(value, dict):
            return {name: self(item) for name, item in value.items()}
        if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[:2] != (1, self._rows):
            return value
        mine = value[:, self._start : self._end]
        return mine.transpose(0, 1) if self._as_batch else mine

    def back(self, out: torch.Tensor) -> torch.Tensor:
        return out.transpose(0, 1) if self._as_batch else out

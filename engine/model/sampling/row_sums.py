"""Sums whose order follows from positions alone, on any device."""

from __future__ import annotations

import torch


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Sums over the last dimension. On a GPU torch would choose an order by the number of rows. So halves are added to each other there
    until one number is left, and a row's sum has the same bits whatever rows are beside it. A CPU sums each row by itself."""
    if x.device.type == "cpu":
        return x.sum(dim=-1)
    while (width := x.shape[-1]) > 1:
        half = width // 2
        pairs = x[..., :half] + x[..., width - half :]
        x = torch.cat((pairs, x[..., half : half + 1]), dim=-1) if width % 2 else pairs
    return x[..., 0]

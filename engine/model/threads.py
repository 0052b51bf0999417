"""How many CPU threads the model uses."""

from __future__ import annotations

import torch

from tandem.machine.cores import usable_cores


def bind_threads(threads: int) -> int:
    """Tell torch, and return the number: `threads`, or every usable core when it is 0."""
    count = threads if threads > 0 else usable_cores()
    torch.set_num_threads(count)
    return count

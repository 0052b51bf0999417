"""Imitates a CUDA graph on a CPU: operations are recorded once and run again on the same tensors.

As in a CUDA graph, values that the recorded work reads from the host are frozen, and reading a result while recording is an error. A
library's kernel is one operation (`torch.library.custom_op`), and reads its arguments each time it runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem.engine.model.fused.tape import Tape


def record(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """See engine.model.cuda.decode_graphs.Record."""
    work()
    tape = Tape()
    result = tape.record(work)
    return tape.play, result

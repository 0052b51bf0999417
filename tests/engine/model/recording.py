"""What a CUDA graph does, on a CPU: operations are recorded once and run again on the very same tensors.

Whatever the recorded work read from the host is frozen, and looking at a result while recording is an error, as it is
there. A library's kernel is one operation (`torch.library.custom_op`), and may read what it was given each time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem.engine.model.tape import Tape


def record(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """See engine.model.decode_graphs.Record."""
    work()
    tape = Tape()
    result = tape.record(work)
    return tape.play, result

"""What a CUDA graph does, on a CPU: operations are recorded once and run again on the very same tensors.

Whatever the recorded work read from the host is frozen, and looking at a result while recording is an error, as it is
there. A library's kernel is one operation (`torch.library.custom_op`), and may read what it was given each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LOOKS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "item")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        by_mask = name.startswith("index") and any(
            isinstance(t, torch.Tensor) and t.dtype == torch.bool for t in tree_leaves(args[1:2])
        )
        if name in LOOKS or by_mask:
            raise RuntimeError(f"{name} is not permitted while recording")
        result = func(*args, **kwargs)
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        fresh = [
            t if isinstance(t, torch.Tensor) and t.numel() and _storage(t) not in given else None
            for t in tree_leaves(result)
        ]
        changes = name.endswith("_") or any(
            argument.alias_info is not None and argument.alias_info.is_write
            for argument in func._schema.arguments
        )
        if changes or any(t is not None for t in fresh):

            def again() -> None:
                for target, value in zip(fresh, tree_leaves(func(*args, **kwargs)), strict=True):
                    if target is not None:
                        target.copy_(value)

            self.operations.append(again)
        return result


def record(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """See engine.model.decode_graphs.Record."""
    work()
    with _Recording() as recording:
        result = work()

    def replay() -> None:
        for operation in recording.operations:
            operation()

    return replay, result

"""How a transformers model reaches the paged cache: an attention function registered under a name of ours.

Transformers builds no mask for an implementation that it knows no mask function for, so the model passes None
and the paged step decides by itself who sees what.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface

PAGED = "tandem_paged"

AttentionFunction = Callable[..., tuple[torch.Tensor, None]]
"""(module, query, key, value, attention_mask, **kwargs), as transformers calls it."""


class _Current(threading.local):
    function: AttentionFunction | None = None


_current = _Current()


@contextmanager
def attention_through(function: AttentionFunction) -> Iterator[None]:
    """Models that run in this thread meanwhile attend through `function`. Not to be nested."""
    _current.function = function
    try:
        yield
    finally:
        _current.function = None


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    if _current.function is None:
        raise RuntimeError("a model with paged attention was run outside of an engine's step")
    return _current.function(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(PAGED, _paged_attention)

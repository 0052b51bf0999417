"""A model that is loaded and has no KV cache yet, and the largest step that it will get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from tandem.engine.model.attention.layers import AttentionLayer, CachePlan, KeptStates
from tandem.engine.model.runner import Forward
from tandem.kvtransfer.base import HeadShare


@dataclasses.dataclass(frozen=True)
class ForwardShape:
    """The largest step that a forward pass may get."""

    max_requests: int
    max_model_len: int
    block_size: int = 16


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model whose weights are loaded and which has no KV cache yet."""

    layers: tuple[AttentionLayer, ...]  # the layers that attend
    vocab_size: int
    dtype: torch.dtype
    use_cache: Callable[[torch.Tensor, CachePlan, ForwardShape], Forward]
    # The bytes on the device that a step of the given number of tokens takes besides the KV cache, with libraries' workspaces.
    # None on a CPU, where memory is taken and given back as needed.
    beside_cache: Callable[[ForwardShape, int], int] | None = None
    states: KeptStates | None = None  # the recurrent states of layers that do not attend
    vector_size: int = 0  # numbers in a hidden state
    embed_size: int = 0  # numbers in a token's embedding, if other rows may replace it; 0: they may not
    generates: bool = True  # False: the checkpoint has no head, so the logits mean nothing
    heads: HeadShare | None = None  # the KV heads that a rank with a cache of its own keeps; None: all
    weight_bytes: int = 0  # in host memory; 0: not known
    shares_weights: bool = False  # they are a file's, which the kernel counts as memory that is free
    of_stage: frozenset[int] | None = None  # the layers of this rank's stage; None: all

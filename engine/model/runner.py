"""The model's side of a step: what the engine asks of a runner, what the runner, which knows requests, asks of the forward pass,
which knows only rows, and the batch that the pass gets: every request's tokens, flattened end to end, without padding.

Requests that compute one token (decodes) come first, so that rows [0, num_decodes) are theirs and one kernel
can take them together; longer chunks (prompts, and tokens with drafts after them) follow.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import msgspec

from tandem.engine.cache.group_manager import KVCacheGroup
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.kvtransfer.base import HeadShare, KVCacheMemory, LayerShare
from tandem.wire.images import ImageRules
from tandem.wire.pooling import VectorModel

if TYPE_CHECKING:
    import numpy as np
    import torch

    from tandem.engine.model.lora.slots import AdapterSlots
    from tandem.engine.structured.grammars import Grammars


class ModelInfo(msgspec.Struct, frozen=True):
    """What the rest of the engine must know of a loaded model."""

    name: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    groups: tuple[KVCacheGroup, ...]
    num_blocks: int
    content: str = ""  # what identifies the model: engine.model.content
    tokenizer: str = ""
    vectors: VectorModel | None = None  # None: it makes none
    images: ImageRules | None = None  # None: it reads none
    image_row_size: int = 0  # numbers in a row of its vision tower
    reads_hidden: bool = (
        False  # tokens are guessed from hidden states: those before the first new token must be computed here
    )
    embed_size: int = 0  # numbers in what may stand in the place of a token's embedding; 0: nothing may
    heads: HeadShare | None = None  # those of the KV cache, where this rank keeps its own apart; None: all
    layers: LayerShare | None = None  # and where it has those of one pipeline stage

    @property
    def keeps_tokens(self) -> bool:
        """Whether any layer attends."""
        return any(not group.blocks_per_request for group in self.groups)

    @property
    def state_blocks(self) -> int:
        """How many blocks each request has in the last group, for recurrent states; 0 without any."""
        return self.groups[-1].blocks_per_request


class LayerHooks(Protocol):
    """Called inside the forward pass, so that a connector can overlap transfers with it."""

    def wait_for_layer_load(self, layer: int) -> None: ...
    def save_kv_layer(self, layer: int) -> None: ...


class StartedStep(Protocol):
    """A step that has been given to the device. Steps run, and are finished, in the order in which they were started;
    at most one is unfinished when the next is started, and none when it holds drafts."""

    def finish(self) -> ModelOutput:
        """Waits until the device has computed the step, whether it samples tokens or not: what it wrote is written when
        this returns. To be called once."""
        ...


class FinishedStep:
    """A step that is over."""

    def __init__(self, output: ModelOutput) -> None:
        self._output = output

    def finish(self) -> ModelOutput:
        return self._output


class ModelRunner(Protocol):
    """Owns the weights and the KV cache tensor. Used from the engine's step thread only."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def kv_cache(self) -> torch.Tensor:
        """[num_blocks, slots, num_parts, num_kv_heads, block_size, head_dim]: see kvtransfer.base.KVCacheMemory."""
        ...

    @property
    def grammars(self) -> Grammars | None:
        """What compiles grammars for this model's tokenizer; None where none are served."""
        ...

    @property
    def adapters(self) -> AdapterSlots | None:
        """The LoRA adapters that requests may name; None where none are served."""
        ...

    def start(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> StartedStep:
        """Does not wait for the device. Tokens that the unfinished step samples are fed to this one there."""
        ...

    def forget_requests(self) -> None:
        """Between two engines: the next one knows none of the last one's. Only when no step is under way."""
        ...


class Forward(Protocol):
    """Computes a batch: writes its tokens' KV to the cache and returns logits for `batch.logit_rows`."""

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        """[S, vocab_size] on the model's device, in float32 or the model's dtype, valid until the next call.

        With hooks, calls `wait_for_layer_load(l)` before layer l reads the cache and `save_kv_layer(l)` once the
        batch's KV of layer l is written, for every layer, in order. A batch whose `logit_rows` is empty returns
        an empty tensor and skips what only logits need.
        """
        ...

    @property
    def hidden(self) -> torch.Tensor:
        """[N, hidden size], what the head would read of `batch.hidden_rows` of the last call; valid until the next. To be asked for
        only where that batch has some."""
        ...


def memory_of(runner: ModelRunner) -> KVCacheMemory:
    """The KV cache as a connector sees it."""
    info = runner.info
    return KVCacheMemory(
        tensor=runner.kv_cache,
        model=info.content or info.name,
        num_layers=info.num_layers,
        num_groups=len(info.groups),
        vocab_size=info.vocab_size,
        has_windows=any(group.window is not None for group in info.groups),
        state_blocks=info.state_blocks,
        heads=info.heads,
        layers=info.layers,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class HostBatch:
    """What the host knows of a batch, in its memory; what it means stands at Batch. The tokens are not among it: the
    newest may be on the device alone."""

    positions: np.ndarray
    query_start: np.ndarray
    context_lens: np.ndarray
    slot_mapping: tuple[np.ndarray, ...]
    block_tables: tuple[np.ndarray, ...]
    logit_rows: np.ndarray | None = None  # None in a step of a fixed shape, which has a row for every token


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of R requests. Tensors lie on the model's device; every one is contiguous.

    Request r owns rows query_start[r] .. query_start[r+1]. Its last row is its token number context_lens[r] - 1,
    so its row i stands at position context_lens[r] - query_start[r+1] + i, and may attend to itself and every
    earlier position (in a sliding group: to the last `window` of them, itself included).

    Token at position p of request r, in group g, has its KV in block block_tables[g][r, p // block_size] at
    offset p % block_size. Columns beyond a request's blocks hold 0, the null block. In a sliding group, columns
    that lie wholly before the window of a request's first row may name blocks that are others' by now: they must
    not be read. KV of the batch's own tokens is written before it is read.

    A group of recurrent states has no slots: its table, the last, is [R, blocks of each request], and what lies there is the
    states after the token before the request's first row. For a request whose rows begin at position 0 it is nothing.

    Tensors may be views of buffers that the next step overwrites: nothing may keep them.
    """

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    query_start: torch.Tensor  # int32 [R + 1]
    context_lens: torch.Tensor  # int32 [R], this step's tokens included
    slot_mapping: tuple[
        torch.Tensor, ...
    ]  # per group that attends, int64 [T]: block id * block_size + offset, to write KV to
    block_tables: tuple[torch.Tensor, ...]  # per group, int32 [R, at least the longest request's blocks]
    logit_rows: torch.Tensor  # int64 [S], ascending: the rows whose logits are wanted; may be empty
    num_decodes: int  # the first requests, with one row each
    max_context_len: int
    # The same as query_start and context_lens, in host memory: reading them never waits for the device.
    host_query_start: np.ndarray  # int32 [R + 1]
    host_context_lens: np.ndarray  # int32 [R]
    # int64 [R]: the last so many rows of each request are guesses; None where no request has any
    host_num_drafts: np.ndarray | None = None
    # int64, ascending: the rows whose last hidden states are wanted, for vectors; None where no request wants any
    hidden_rows: torch.Tensor | None = None
    # int64 [T], the slot of each row's adapter, -1 for rows of the model itself; None where no row has one
    adapter_slots: torch.Tensor | None = None
    adapter_slots_used: int = 0  # only slots below this are among them
    # int64 [I]: rows that are no token's embedding, but a part of an image, or what a request brought; and what they are, [I, hidden
    # size], or a multiple of it: what further layers add (`VisionTower.width`)
    image_rows: torch.Tensor | None = None
    image_states: torch.Tensor | None = None
    # int64 [3, T]: time, row and column of each token, in place of `positions`, where a model counts images' so and some are here
    rope_positions: torch.Tensor | None = None
    # What the tensors were made from, for who plans on the host; a batch made by hand may lack it.
    host: HostBatch | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return self.context_lens.shape[0]

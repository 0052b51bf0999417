"""The contracts of the model's side. The engine calls a `ModelRunner`, which knows requests. The runner calls a `Forward`, which
knows only rows: a `Batch` is every request's tokens, flattened end to end, without padding.

Requests that compute one token (decodes) come first in a batch, in rows [0, num_decodes), so that one kernel can take them
together. Longer chunks (prompts, and tokens with drafts) follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from tandem.engine.cache.group_manager import KVCacheGroup
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.kvtransfer.base import HeadShare, KVCacheMemory, LayerShare
from tandem.wire.images import ImageRules
from tandem.wire.pooling import VectorModel

if TYPE_CHECKING:
    import numpy as np
    import torch

    from tandem.engine.model.adapter_book import AdapterBook


class ModelWork(msgspec.Struct, frozen=True):
    """What a step costs, by estimate: floating-point operations, and bytes that it reads."""

    flops_per_token: float
    flops_per_output: float  # of the head, for each sampled token
    flops_per_pair: float  # of attention, for each token and each token that it reads
    weight_bytes: int  # that a step reads
    kv_bytes_per_token: int


class EncoderRules(msgspec.Struct, frozen=True):
    """A model whose encoder reads the whole prompt, before a decoder writes the answer."""

    opening: tuple[int, ...]  # the decoder's first tokens, which every request has after its prompt
    longest_prompt: int  # in tokens, without the opening
    longest_answer: int


class ModelInfo(msgspec.Struct, frozen=True):
    """What the rest of the engine must know about a loaded model."""

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
    content: str = ""  # the model's identity: engine.model.content
    tokenizer: str = ""
    vectors: VectorModel | None = None  # None: the model makes no vectors
    images: ImageRules | None = None  # None: the model reads no images
    image_row_size: int = 0  # numbers in a row of its vision tower
    encoder: EncoderRules | None = None  # None: no encoder reads its prompts
    # Drafts are made from hidden states (EAGLE), so the token before the first new one must be computed here.
    reads_hidden: bool = False
    embed_size: int = 0  # numbers in a row that may replace a token's embedding; 0: no rows may
    heads: HeadShare | None = None  # the KV heads of this rank's shard; None: all
    layers: LayerShare | None = None  # the layers of this rank's pipeline stage; None: all
    work: ModelWork | None = None  # None: it is not known
    slower: str = ""  # why it computes more slowly than it could on this machine
    weight_bytes: int = 0  # in host memory; 0: not known
    shares_weights: bool = False  # they are a file's that all nodes of the machine map

    @property
    def keeps_tokens(self) -> bool:
        """Whether any layer attends."""
        return any(not group.blocks_per_request for group in self.groups)

    @property
    def state_blocks(self) -> int:
        """How many blocks each request has in the last group for recurrent states; 0 without them."""
        return self.groups[-1].blocks_per_request


class LayerHooks(Protocol):
    """A connector's hooks. The forward pass calls them, so that transfers overlap with it."""

    def wait_for_layer_load(self, layer: int) -> None: ...
    def save_kv_layer(self, layer: int) -> None: ...


class StartedStep(Protocol):
    """A step that the device computes. Steps run and are finished in the order in which they were started. At most one is
    unfinished when the next is started, and none when the next holds drafts."""

    def finish(self) -> ModelOutput:
        """Waits until the device has computed the step, also a step that samples no token: all its KV is written when this
        returns. Call it once."""


class FinishedStep:
    """A step with nothing left to compute."""

    def __init__(self, output: ModelOutput) -> None:
        self._output = output

    def finish(self) -> ModelOutput:
        return self._output


class Grammars(Protocol):
    """Compiles grammars for one model's tokenizer, and keeps them. Several threads use it."""

    def prepared(self, grammar: str) -> object | None:
        """What keeps the compiled grammar for as long as anyone has it; None if it must be compiled first."""

    def prepare(self, grammar: str) -> None:
        """Compiles the grammar unless it is kept, which may take long. Raises an InvalidRequest for a text that is not a grammar."""


class ModelRunner(Protocol):
    """Owns the weights and the KV cache tensor. Only the engine's step thread uses it."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def kv_cache(self) -> torch.Tensor:
        """[num_blocks, slots, num_parts, num_kv_heads, block_size, head_dim]: see kvtransfer.base.KVCacheMemory."""

    @property
    def kv_in_memory(self) -> int:
        """How many of the cache's bytes are in memory by now."""

    @property
    def grammars(self) -> Grammars | None:
        """None when structured output is not served."""

    @property
    def adapters(self) -> AdapterBook[Any] | None:
        """The LoRA adapters that requests may name; None when none are served."""

    @property
    def states_wait(self) -> bool:
        """So many hidden states wait to be written that no further request may ask for them."""

    def start(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> StartedStep:
        """Starts a step without waiting for the device. It reads the tokens that the unfinished step samples on the device."""

    def forget_requests(self) -> None:
        """Forgets all requests, so that another engine can use the runner. Call it only while no step is under way."""


class Forward(Protocol):
    """Computes a batch: writes its tokens' KV to the cache and returns logits for `batch.logit_rows`."""

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        """Returns logits [S, vocab_size] on the model's device, in float32 or the model's dtype, valid until the next call.

        With hooks, calls `wait_for_layer_load(l)` before layer l reads the cache and `save_kv_layer(l)` once the
        batch's KV of layer l is written, for every layer, in order. For an empty `logit_rows` it returns an empty
        tensor and skips the head.
        """

    @property
    def hidden(self) -> torch.Tensor:
        """[N, hidden size]: the head's input for `batch.hidden_rows` of the last call. Valid until the next call. Read it only if
        that batch had hidden rows."""


@runtime_checkable
class Replays(Protocol):
    """A forward pass that may replay a recorded step. Ranks must all do so or none."""

    def replays(self, batch: Batch) -> bool:
        """Whether the step will be replayed: rank 0 asks and tells the others (`Batch.replayed`)."""


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
    """The arrays of a batch in host memory, as `Batch` explains them, where reading them never waits for the device. The token ids
    are not among them: the newest ones may exist only on the device."""

    positions: np.ndarray
    query_start: np.ndarray
    context_lens: np.ndarray
    slot_mapping: tuple[np.ndarray, ...]
    block_tables: tuple[np.ndarray, ...]
    logit_rows: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of R requests. All tensors are contiguous and on the model's device.

    Request r has the rows query_start[r] .. query_start[r+1]. Its last row is its token number context_lens[r] - 1, so row i is
    at position context_lens[r] - query_start[r+1] + i. It attends to itself and to every earlier position (in a sliding group:
    to the last `window` positions, with its own).

    In group g, the KV of request r's token at position p is in block block_tables[g][r, p // block_size] at offset
    p % block_size. Columns beyond a request's blocks hold 0, the null block. In a sliding group, columns wholly before the
    window of a request's first row may name blocks that other requests own by now: they must not be read. The KV of the batch's
    own tokens is written before it is read.

    A group of recurrent states has no slots. Its table is the last one, [R, blocks per request]; its blocks hold the states
    after the token before the request's first row, and garbage for a request whose rows begin at position 0.

    Tensors may be views of buffers that the next step overwrites, so no code may keep them.
    """

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    query_start: torch.Tensor  # int32 [R + 1]
    context_lens: torch.Tensor  # int32 [R], with this step's tokens
    # For each group that attends, int64 [T]: block id * block_size + offset, where each token's KV is written.
    slot_mapping: tuple[torch.Tensor, ...]
    block_tables: tuple[torch.Tensor, ...]  # per group, int32 [R, at least the longest request's blocks]
    logit_rows: torch.Tensor  # int64 [S], ascending: the rows to compute logits for; may be empty
    num_decodes: int  # how many leading requests have one row each
    host: HostBatch  # the arrays that the tensors were made from
    # int64 [R]: how many of each request's last rows are drafts; None without drafts.
    host_num_drafts: np.ndarray | None = None
    # int64, ascending: the rows whose last hidden states are kept in `Forward.hidden`; None when none are.
    hidden_rows: torch.Tensor | None = None
    # int64 [T]: the slot of each row's adapter, -1 for rows without one; None when no row has one.
    adapter_slots: torch.Tensor | None = None
    adapter_slots_used: int = 0  # all slots in `adapter_slots` are below this
    # int64 [I]: rows whose input is a part of an image, or a row that the request brought, instead of a token's embedding.
    image_rows: torch.Tensor | None = None
    # These inputs, [I, hidden size]. They are a multiple as wide when further layers add to them (`VisionTower.width`).
    image_states: torch.Tensor | None = None
    # int64 [3, T]: time, row and column of each token. It replaces `positions` when the batch has images and the model counts
    # their positions so.
    rope_positions: torch.Tensor | None = None
    # int64 [R], in host memory: how many leading tokens of each request an encoder reads; None for a model without one.
    encoder_lens: np.ndarray | None = None
    # [E, width]: what the encoder made of the batch's rows among them, in order; None if there are none.
    encoder_states: torch.Tensor | None = None
    # Whether a recorded step computes it, as rank 0 has told all ranks; None: the forward pass chooses.
    replayed: bool | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return self.context_lens.shape[0]

    @property
    def host_query_start(self) -> np.ndarray:
        return self.host.query_start

    @property
    def host_context_lens(self) -> np.ndarray:
        return self.host.context_lens


Around = Callable[[Batch], AbstractContextManager[None]]
"""What happens around a forward pass of the general path."""

"""The model's side of a step: what the engine asks of a runner, and what the runner, which knows requests, asks of the
forward pass, which knows only rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from tandem.engine.cache.group_manager import KVCacheGroup
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.kvtransfer.base import HeadShare, KVCacheMemory, LayerShare
from tandem.wire.images import ImageRules
from tandem.wire.pooling import VectorModel

if TYPE_CHECKING:
    import torch

    from tandem.engine.model.batch import Batch
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

"""A tier that makes KV up, to measure decoding after long prompts that were not computed: `cache.tiers: [{spec:
synthetic}]`.

It has every block that it is asked for, and loads noise. Answers mean nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tandem.base.errors import ConfigurationError
from tandem.kvtransfer.base import KVCacheMemory, flat_bytes
from tandem.kvtransfer.config import TierConfig
from tandem.kvtransfer.offload.cpu import Copier, CopyThread
from tandem.kvtransfer.offload.manager import StoreRoom, TierManager
from tandem.kvtransfer.offload.patience import Hold
from tandem.kvtransfer.offload.policies import Key
from tandem.kvtransfer.offload.spec import Copy, Mover

logger = logging.getLogger(__name__)

# The noise's spread is that of real models' keys and values, so that attention spreads over all tokens, as in a prompt.
SPREAD = 0.5


def create(config: TierConfig) -> SyntheticTier:
    if config.options:
        raise ConfigurationError("cache.tiers: the synthetic tier has no options")
    return SyntheticTier()


class SyntheticTier:
    name = "synthetic"

    def open(self, memory: KVCacheMemory, wake: Callable[[], None]) -> tuple[TierManager, Mover]:
        logger.warning("cache.tiers has a synthetic tier: prompts are not computed, and answers mean nothing")
        return HasEverything(), CopyThread(NoiseCopier(memory), wake, self.name)


class HasEverything(TierManager):
    capacity = used = evicted = 0

    def lookup(self, keys: Iterable[Key]) -> int:
        return sum(1 for _ in keys)

    def prepare_load(self, keys: Iterable[Key]) -> list[int]:
        return [0 for _ in keys]

    def prepare_store(self, keys: Sequence[Key]) -> StoreRoom | None:
        return StoreRoom([], [])

    def touch(self, keys: Sequence[Key]) -> None: ...
    def line_up(self, keys: Sequence[Key]) -> None: ...
    def complete_load(self, slots: Iterable[int]) -> None: ...
    def complete_store(self, room: StoreRoom, *, written: bool) -> None: ...
    def forget(self, keys: Iterable[Key]) -> None: ...
    def reset(self) -> None: ...


class NoiseCopier(Copier):
    def __init__(self, memory: KVCacheMemory) -> None:
        super().__init__(memory)
        self._rows = flat_bytes(memory.tensor).view(memory.tensor.dtype).view(memory.num_blocks, -1)
        noise = torch.randn(self._rows.shape[1], device=self._rows.device) * SPREAD
        self._noise = noise.to(memory.tensor.dtype)
        self._on_device = memory.tensor.is_cuda

    def copy(self, job: Copy, to_device: bool, fence: Any, hold: Hold) -> bool:
        with hold:
            for block in job.blocks:
                self._rows[block].copy_(self._noise)
            if self._on_device:
                torch.cuda.synchronize(self._rows.device)
        return True

"""The contract of layers that keep a recurrent state. `recurrent/` computes them, and is known by its name here."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from tandem.base.wings import find_wing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tandem.engine.model.attention.layers import KeptStates
    from tandem.engine.model.caches import NotingCache, StepCache
    from tandem.engine.model.runner import Batch, LayerHooks

RECURRENT = "tandem.engine.model.recurrent.joined"


class StatesInCache(Protocol):
    """A model's states in its KV cache."""

    def step_cache(self, num_layers: int, before: int | torch.Tensor) -> StepCache:
        """A step's cache, in which mixers find their states."""

    def mixing(self, batch: Batch, hooks: LayerHooks | None, cache: StepCache) -> AbstractContextManager[None]:
        """Inside, mixers that run in this thread keep their states in the blocks of the batch's requests."""


class Mixers(Protocol):
    """The modules of a model that keep states. They are computed request by request."""

    @property
    def layout(self) -> KeptStates: ...
    @property
    def num_layers(self) -> int:
        """Layers of all kinds."""

    def token_by_token(self) -> Mixers:
        """The same for a model that goes on from a state one token at a time."""

    def wrap(self) -> None:
        """Wraps the modules, so that within `mixing` they are computed request by request."""

    def bound_to(self, kv_cache: torch.Tensor) -> StatesInCache: ...


class StateNoting(Protocol):
    """The cache that a model is probed with, which notes its mixers."""

    def mixers(self) -> Mixers | None: ...


class StatesWing(Protocol):
    def noting_cache(self, config: Any, model: PreTrainedModel) -> NotingCache:
        """A cache that is also a StateNoting."""

    def take_states_out(self, model: PreTrainedModel) -> None:
        """Changes modules that keep states in themselves, so that they keep them in the cache."""


def states_wing() -> StatesWing | None:
    return cast("StatesWing | None", find_wing(RECURRENT))

"""A model whose prompts several ranks read together (context parallel)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.base.errors import ConfigurationError, InternalError
from tandem.engine.model.capabilities import Capability, ModelLoad, ToAttend

if TYPE_CHECKING:
    from tandem.engine.model.attention.interface import PagedAttention
    from tandem.engine.model.divided.exchange import KVExchange
    from tandem.engine.model.loaded import LoadedModel
    from tandem.engine.model.runner import Forward
    from tandem.engine.model.shard import Shard
    from tandem.engine.model.transformers_forward import ModelParts


def capability(loading: ModelLoad) -> Capability | None:
    shard = loading.shard
    return DividedPrompts(loading, shard) if shard is not None and shard.contexts > 1 else None


class DividedPrompts(Capability):
    def __init__(self, loading: ModelLoad, shard: Shard) -> None:
        self._loading, self._shard = loading, shard
        self._exchange: KVExchange | None = None

    def refuse(self, parts: ModelParts) -> None:
        if parts.mixers is not None:
            why = "keeps recurrent states, and each row's follows from the row before it"
        elif parts.own is not None:
            why = "has layers that attend by their own code"
        else:
            return
        raise ConfigurationError(
            f"{self._loading.source.name} cannot be read by several ranks at once: it {why}. Set pools.<pool>.context_parallel to 1"
        )

    def exchanged(self, attention: PagedAttention, of: ToAttend) -> PagedAttention:
        from tandem.engine.model.divided.exchange import ExchangedAttention, KVExchange

        self._exchange = KVExchange(self._shard, of.kv_cache, of.plan, of.parts.layers, of.dtype)
        return ExchangedAttention(attention, self._exchange, of.plan.readers)

    def leading(self, forward: Forward, loaded: LoadedModel) -> Forward:
        from tandem.engine.model.divided.forward import DividedForward

        if self._exchange is None:
            raise InternalError("a model whose keys and values ranks do not exchange")
        return DividedForward(forward, self._exchange, self._shard)

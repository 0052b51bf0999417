"""The events of vLLM's cache in our words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandem.base.errors import InternalError
from tandem.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, ExtraKeys, KVEvent


class EventDesk:
    """Stands where vLLM has the publisher of its cache's events."""

    def __init__(self, group_of: Callable[[int], int]) -> None:
        self.events: list[KVEvent] = []
        self.keeps = False
        self._group_of = group_of

    def publish(self, batch: Any) -> None:
        if self.keeps:
            self.events += [_event(event, self._group_of) for event in batch.events]

    def shutdown(self) -> None: ...


def _event(event: Any, group_of: Callable[[int], int]) -> KVEvent:
    group = group_of(getattr(event, "group_idx", None) or 0) or None
    match type(event).__name__:
        case "BlockStored":
            return BlockStored(
                [_hash(each) for each in event.block_hashes],
                _hash(event.parent_block_hash) if event.parent_block_hash is not None else None,
                event.token_ids,
                event.block_size,
                medium=event.medium,
                lora_name=event.lora_name,
                extra_keys=_extra_keys(event),
                group_idx=group,
            )
        case "BlockRemoved":
            return BlockRemoved([_hash(each) for each in event.block_hashes], event.medium, group)
        case "AllBlocksCleared":
            return AllBlocksCleared()
        case other:
            raise InternalError(f"vLLM's cache reports an event of an unknown kind, {other}")


def _extra_keys(event: Any) -> list[ExtraKeys | None] | None:
    """vLLM does not say what a key is; an adapter's identity comes first."""
    keys: list[ExtraKeys | None] | None = event.extra_keys
    if keys is None or event.lora_name is None:
        return keys
    return [(f"lora:{each[0]}", *each[1:]) if each else each for each in keys]


def _hash(value: Any) -> bytes:
    return value if isinstance(value, bytes) else int(value).to_bytes(8, "big")

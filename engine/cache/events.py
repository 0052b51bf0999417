"""What happened to the prefix cache since it was last asked, in order: hashes that appeared and vanished."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tandem.engine.cache.hashing import ExtraKey, HashedContent, extra_keys
from tandem.wire.kv_events import DEVICE_MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent


class CacheEvents:
    """What a pool begins to cache and what it drops. With several copies of a block it tells of the first, and of the last one's end."""

    def __init__(self, num_groups: int, untold: Collection[int] = ()) -> None:
        """`untold`: groups of recurrent states. Their checkpoints are few, and are where blocks of tokens are, which are told of."""
        self._untold = frozenset(untold)
        self._events: list[KVEvent] = []
        self._removed: list[bytes] | None = None  # of the last event, while removals follow one another
        self._removed_group = 0
        self._names_groups = num_groups > 1

    def stored(
        self,
        request: HashedContent,
        group: int,
        block_size: int,
        blocks: range,
        hashes: list[bytes],
        parent: bytes | None,
    ) -> None:
        """`blocks`: their places among the request's."""
        start, end = blocks.start * block_size, blocks.stop * block_size
        keys = None
        if request.lora is not None or request.cache_salt is not None or request.media:
            keys = [_shown(extra_keys(request, i * block_size, (i + 1) * block_size)) or None for i in blocks]
        self._add(
            BlockStored(
                hashes,
                parent,
                list(request.all_token_ids[start:end]),
                block_size,
                None,
                DEVICE_MEDIUM,
                request.lora,
                keys,
                group if self._names_groups else None,
            )
        )

    def removed(self, group: int, block_hash: bytes) -> None:
        if group in self._untold:
            return
        if self._removed is None or self._removed_group != group:
            hashes: list[bytes] = []
            self._add(BlockRemoved(hashes, DEVICE_MEDIUM, group if self._names_groups else None))
            self._removed, self._removed_group = hashes, group
        if self._removed is not None:
            self._removed.append(block_hash)

    def cleared(self) -> None:
        self._add(AllBlocksCleared())

    def _add(self, event: KVEvent) -> None:
        self._removed = None
        self._events.append(event)

    def take(self) -> Sequence[KVEvent]:
        """What happened since the last call."""
        events = self._events
        if not events:
            return ()
        self._events, self._removed = [], None
        return events


def _shown(keys: Sequence[ExtraKey]) -> tuple[str, ...]:
    """As text: what kind, what, and where in the prompt."""
    return tuple(
        ":".join(part.decode(errors="replace") if isinstance(part, bytes) else str(part) for part in key)
        for key in keys
    )

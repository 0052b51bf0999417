"""The thread of a node that tells routers what its cache holds, on the world's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.node.routers import CacheNewsSender, NamedBlocks
from tandem.wire.kv_events import KVEvent
from tandem.wire.requests import CacheNews
from tests.world.process import Process


class WorldNews(CacheNewsSender):
    """Takes the turns of the sender's thread on the world's clock."""

    def __init__(
        self, process: Process, node_id: str, epoch: int, block_size: int, tell: Callable[[str, CacheNews], None]
    ) -> None:
        super().__init__(node_id, epoch, NamedBlocks(block_size, 0), tell)
        self._process = process

    def happened(self, events: Sequence[KVEvent]) -> None:
        super().happened(events)
        self._process.later(0.0005, self._take_turn)

    def begin(self, reply_to: str) -> None:
        super().begin(reply_to)
        self._process.later(0.0005, self._take_turn)

    def forget(self, reply_to: str) -> None:
        super().forget(reply_to)
        self._process.later(0.0005, self._take_turn)

    def _take_turn(self) -> None:
        if not self._inbox.empty():
            self.turn()

"""A router of the world: the product's dispatcher, pool, chooser and links over the world's network, without HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from tandem.router.config import Heartbeat, RouterConfig, Timeouts
from tandem.router.dispatch import Dispatcher
from tandem.router.links import NodeLinks
from tandem.router.metrics import RouterMetrics
from tandem.router.policy.choose import Chooser
from tandem.router.pool import NodePool
from tandem.router.responses.recall import Recalls
from tandem.wire.nodes import NodeInfo
from tests.world.network import Network
from tests.world.node import MODEL
from tests.world.process import Process, Timer


class _Inbox:
    handler_errors = 0

    def __init__(
        self, network: Network, process: Process, message_type: Any, on_message: Callable[[Any], None]
    ) -> None:
        decoder = msgspec.msgpack.Decoder(message_type)
        self._waiting: list[bytes] | None = []
        self.malformed = 0
        self._decoder, self._on_message = decoder, on_message
        self.endpoint = network.open(process, self._take)

    def _take(self, frame: bytes) -> None:
        if self._waiting is not None:
            self._waiting.append(frame)
        else:
            self._receive(frame)

    def _receive(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
        except msgspec.DecodeError:
            self.malformed += 1
            return
        self._on_message(message)

    def listen(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        for frame in waiting:
            self._receive(frame)

    def close(self) -> None:
        pass


class _Outbox:
    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process

    def send_frame(self, endpoint: str, frame: bytes) -> None:
        self._network.send(self._process, endpoint, frame)

    def forget(self, endpoint: str) -> None:
        pass

    def close(self) -> None:
        pass


class WorldRouter:
    def __init__(self, process: Process, network: Network, **settings: Any) -> None:
        self.process = process
        self.config = config = RouterConfig(
            tokenizer_path="none", model_name=MODEL, timeouts=Timeouts(queue=20.0, token_idle=8.0), **settings
        )
        self.pool = NodePool(
            MODEL,
            config.heartbeat,
            process.clock,
            on_lost=lambda node, why: self.dispatcher.on_node_lost(node, why),
            on_change=lambda: self.dispatcher.on_pool_change(),
            listener=lambda endpoint: network.listener(process, endpoint),
        )
        self.links = links = NodeLinks(
            "10.0.0.1",
            open_inbox=lambda host, kind, on_message, name: _Inbox(network, process, kind, on_message),
            open_outbox=lambda: _Outbox(network, process),
            clock=process.clock,
        )
        self.chooser = chooser = Chooser(self.pool, config.policy, config.local_prefill, config.limits.cached_blocks)
        self.dispatcher = Dispatcher(config, links, self.pool, chooser, RouterMetrics(MODEL), process.clock)
        self.recalls = self.dispatcher.followed = Recalls(config, links, self.pool)
        links.listen(
            self.dispatcher.on_tokens,
            self.dispatcher.on_status,
            lambda trace: None,
            lambda reading: None,
            self.dispatcher.on_holding,
            self.dispatcher.followed.on_recalled,
            self.dispatcher.on_cache_news,
            lambda node, why: self.pool.suspect(node.node_id, node.epoch, why),
        )
        self._beats = 0
        Timer(process, self._beat).within(0.0)

    def _beat(self) -> float:
        heartbeat: Heartbeat = self.config.heartbeat
        if self._beats % 3 == 0:
            for member in self.pool.members:
                self.links.ping(member.info)
        self._beats += 1
        self.dispatcher.check_nodes()
        return heartbeat.ping_interval / 3

    def set_members(self, infos: Iterable[NodeInfo]) -> None:
        came, went = self.pool.set_members(infos)
        for info in went:
            self.dispatcher.on_node_left(info)
        for info in came:
            self.dispatcher.on_node_joined(info)

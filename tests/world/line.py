"""The node's end of the lines to routers."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tandem.wire.lines import LetterToNode, Lines, Position
from tandem.wire.requests import ToNode
from tests.world.network import Network
from tests.world.process import Process


class WorldLine:
    """The node's end of the lines to routers: `wire.lines.Lines` over the world's network."""

    died = None

    def __init__(self, network: Network, process: Process, epoch: int, after_s: Callable[[], float]) -> None:
        self.malformed = 0
        self._decoder = msgspec.msgpack.Decoder(LetterToNode)
        self.lines: Lines[ToNode] = Lines(
            epoch,
            lambda endpoint, frame: network.send(process, endpoint, frame, after_s()),
            lambda message: self.deliver(message),
            begun=lambda endpoint: self.begun(endpoint),
            replaced=lambda endpoint: self.replaced(endpoint),
            meets_strangers=True,
            clock=process.clock,
        )
        self.endpoint = network.open(process, self._receive)
        self.lines.endpoint = self.endpoint
        self.deliver: Callable[[ToNode], None]
        self.begun: Callable[[str], None]
        self.replaced: Callable[[str], None]

    def _receive(self, frame: bytes) -> None:
        try:
            letter = self._decoder.decode(frame)
        except msgspec.DecodeError:
            self.malformed += 1
            return
        self.lines.receive(letter)

    @property
    def gaps(self) -> int:
        return self.lines.gaps

    def send(self, endpoint: str, message: msgspec.Struct) -> None:
        self.lines.send(endpoint, message)

    def received(self, endpoint: str) -> Position:
        return self.lines.received(endpoint)

    def forget(self, endpoint: str) -> None:
        self.lines.forget(endpoint)

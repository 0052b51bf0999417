"""The network of the world: frames between endpoints, each of one process. What the weather says may happen to a frame does. An
endpoint hears whom its process has admitted; what others send waits until they are admitted, as on a connection that is not made yet."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from tandem.base.errors import NodeLost
from tandem.wire.curve import MAX_HELD
from tandem.wire.handoff import HandoffMessage
from tandem.wire.listening import Listener
from tests.world.process import Process

OnFrame = Callable[[float, str, str, bytes], None]
"""Is told of every frame that is sent: when, by which process, to which (or to an endpoint that is closed), and its bytes."""


@dataclasses.dataclass
class Weather:
    """How likely each of these is for one frame. All 0: a healthy network."""

    lost: float = 0.0
    doubled: float = 0.0
    overtaken: float = 0.0  # comes later than frames that were sent after it
    slow: float = 0.0  # takes a second or two


@dataclasses.dataclass
class _Open:
    process: Process
    receive: Callable[[bytes], None]


class Network:
    def __init__(self, rng: random.Random, note: Callable[[str], None]) -> None:
        self.rng = rng
        self.note = note
        self.weather = Weather()
        self.late = 0.0  # the chance that a frame lies in a queue until no one waits for it any more
        self.late_rng = rng
        self.cut: set[tuple[str, str]] = set()  # (from, to): machines between which nothing passes this way
        self._open: dict[str, _Open] = {}
        self._machine_at: dict[str, str] = {}
        self._last: dict[tuple[str, str], float] = {}  # when the last frame from one process to an endpoint arrives
        self._ports = itertools.count(10_000)
        self._heard: set[tuple[int, str]] = set()  # connections that were made: a process's number, and an endpoint
        self._held: dict[
            int, deque[tuple[Process, str, bytes]]
        ] = {}  # what came from strangers, by the number of whose it is
        self.on_sent: Callable[[str, bytes], None] | None = None  # is told of every frame, and where it goes
        self.frames = 0
        self.on_frame: OnFrame | None = None
        self.digest = hashlib.blake2b(digest_size=8)  # of all frames that were sent, with their times

    def open(self, process: Process, receive: Callable[[bytes], None], endpoint: str = "") -> str:
        endpoint = endpoint or f"tcp://10.0.0.1:{next(self._ports)}"
        self._open[endpoint] = _Open(process, receive)
        self._machine_at[endpoint] = process.machine
        process.keys.on_change = lambda: self._let_in(process)
        process.on_end.append(lambda: self.close(endpoint))
        return endpoint

    def close(self, endpoint: str) -> None:
        self._open.pop(endpoint, None)

    def is_cut(self, source: str, target: str) -> bool:
        return source != target and (source, target) in self.cut

    def listener(self, process: Process, endpoint: str) -> Listener:
        machine = self._machine_at.get(endpoint, "")
        if self.is_cut(process.machine, machine) or self.is_cut(machine, process.machine):
            return Listener.DOES_NOT_ANSWER
        return Listener.ACCEPTS if endpoint in self._open else Listener.REFUSES

    def send(self, process: Process, endpoint: str, frame: bytes, after_s: float = 0.0) -> None:
        """`after_s`: it leaves so much later than now."""
        if not process.is_alive:
            return
        if endpoint not in self._machine_at:
            raise NodeLost(f"nothing is known of {endpoint}")
        self.frames += 1
        self.digest.update(f"{process.loop.time()} {process.name} {endpoint} ".encode() + frame)
        if self.on_frame is not None:
            there = self._open.get(endpoint)
            self.on_frame(process.loop.time(), process.name, there.process.name if there else endpoint, frame)
        if self.on_sent is not None:
            self.on_sent(endpoint, frame)
        rng, weather = self.rng, self.weather
        if rng.random() < weather.lost:
            return
        if self.late and self.late_rng.random() < self.late:
            late_s = after_s + self.late_rng.uniform(2.0, 20.0)
            self.send_after(process, endpoint, frame, late_s)
            if self.late_rng.random() < 0.5:
                return  # the others come twice
        self._send_once(process, endpoint, frame, after_s)
        if rng.random() < weather.doubled:
            self._send_once(process, endpoint, frame, after_s)

    def _send_once(self, process: Process, endpoint: str, frame: bytes, after_s: float) -> None:
        rng, weather = self.rng, self.weather
        line = (process.name, endpoint)
        now = process.loop.time()
        at = now + after_s + rng.uniform(0.0001, 0.002)
        if rng.random() < weather.slow:
            at += rng.uniform(0.1, 2.0)
        if rng.random() >= weather.overtaken:
            at = max(at, self._last.get(line, 0.0) + 1e-6)
            self._last[line] = at
        process.loop.call_at(at, self._arrive, process, endpoint, frame)

    def send_after(self, process: Process, endpoint: str, frame: bytes, seconds: float) -> None:
        """It arrives then, whatever the weather."""
        process.loop.call_later(seconds, self._arrive, process, endpoint, frame)

    def _arrive(self, sender: Process, endpoint: str, frame: bytes) -> None:
        there = self._open.get(endpoint)
        if there is None or self.is_cut(sender.machine, self._machine_at[endpoint]):
            return
        if self._is_heard(sender, endpoint, there.process):
            there.process.do(lambda: there.receive(frame))
        else:
            number = there.process.identity.pid
            held = self._held.setdefault(number, deque(maxlen=MAX_HELD))
            held.append((sender, endpoint, frame))

    def _is_heard(self, sender: Process, endpoint: str, there: Process) -> bool:
        connection = (sender.identity.pid, endpoint)
        if connection not in self._heard and sender.key in there.keys:
            self._heard.add(connection)
        return connection in self._heard

    def _let_in(self, process: Process) -> None:
        for sender, endpoint, frame in self._held.pop(process.identity.pid, ()):
            if sender.is_alive:
                self._arrive(sender, endpoint, frame)


class WorldChannel:
    """The node's end of the way to its peers."""

    died = None

    def __init__(
        self, network: Network, process: Process, on_message: Callable[[Any], None], messages: Any = HandoffMessage
    ) -> None:
        self._network, self._process = network, process
        self.malformed = 0
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._encoder = msgspec.msgpack.Encoder()
        self._on_message = on_message
        self.endpoint = network.open(process, self._receive)

    def _receive(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
        except msgspec.DecodeError:
            self.malformed += 1
            return
        self._on_message(message)

    def send(self, endpoint: str, message: msgspec.Struct) -> None:
        try:
            self._network.send(self._process, endpoint, self._encoder.encode(message))
        except NodeLost:
            return

    def forget(self, endpoint: str) -> None:
        pass

    def listener(self, endpoint: str) -> Listener:
        return self._network.listener(self._process, endpoint)

    def close(self) -> None:
        self._network.close(self.endpoint)

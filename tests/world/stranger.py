"""A process that no one has admitted. It knows every address and every message, sends messages again, and others that it changed a
little. None may have an effect: without it the schedule is the same, frame by frame. Drawn from a generator of its own."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from tandem.wire.handoff import HandoffMessage
from tandem.wire.lines import Letter
from tests.world.process import Process

if TYPE_CHECKING:
    from tests.world.schedule import Schedule

STRANGER = "stranger"  # what a schedule may leave out
SHARE = 0.3
REMEMBERED = 300
_OF_TRANSFERS = [
    kind.__struct_config__.tag for kind in get_args(HandoffMessage) if "transfer_id" in kind.__struct_fields__
]
_LETTER = len(Letter.__struct_fields__)
_NUMBER, _SENT = (Letter.__struct_fields__.index(name) for name in ("number", "sent"))


def _drawing(seed: int) -> random.Random:
    return random.Random(f"{STRANGER} {seed}")


def comes_in(seed: int) -> bool:
    return _drawing(seed).random() < SHARE


class Stranger:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._rng = rng = _drawing(schedule.outcome.seed)
        self._comes = rng.random() < SHARE
        if self._comes:
            self._process = Process(schedule.loop, STRANGER, rng.choice(schedule.machines))
        self._seen: deque[tuple[str, bytes]] = deque(maxlen=REMEMBERED)
        self._answers = rng.choice([0.1, 0.5])  # how many of the messages about transfers

    def begin(self, faults_s: float) -> None:
        if not self._comes or STRANGER in self._schedule.without:
            return
        self._schedule.network.on_sent = self._sees
        for _ in range(self._rng.choice([5, 40, 200])):
            self._schedule.loop.call_later(self._rng.uniform(0.0, faults_s), self._forge)
        self._schedule.loop.call_later(faults_s, self._leave)

    def _leave(self) -> None:
        self._schedule.network.on_sent = None

    def _sees(self, endpoint: str, frame: bytes) -> None:
        self._seen.append((endpoint, frame))
        if b"transfer_id" in frame and self._rng.random() < self._answers:
            self._send(endpoint, altered(frame, self._rng))

    def _forge(self) -> None:
        if not self._seen:
            return
        endpoint, frame = self._rng.choice(self._seen)
        self._send(endpoint, altered(frame, self._rng) if self._rng.random() < 0.6 else frame)

    def _send(self, endpoint: str, frame: bytes) -> None:
        rng, schedule = self._rng, self._schedule
        for _ in range(rng.choice([1, 1, 5])):
            after_s = rng.choice([0.004, 0.5]) * rng.uniform(0.5, 1.0)
            schedule.network.send_after(self._process, endpoint, frame, after_s)
            schedule.outcome.forged += 1


def altered(frame: bytes, rng: random.Random) -> bytes:
    """The message with another number, text or truth in some places. Of a line, it may become the next letter."""
    message = msgspec.msgpack.decode(frame)
    if isinstance(message, dict) and "transfer_id" in message and rng.random() < 0.7:
        # Of the same transfer, from the same node to the same one: another message
        return msgspec.msgpack.encode(message | {"type": rng.choice(_OF_TRANSFERS), "reason": "forged"})
    if isinstance(message, list) and len(message) == _LETTER and rng.random() < 0.7:
        message[_NUMBER] += 1
        message[_SENT] = max(message[_NUMBER], message[_SENT])
        leaves = list(_leaves(message[-1]))
    else:
        leaves = list(_leaves(message))
    for within, at in rng.sample(leaves, min(len(leaves), rng.choice([1, 1, 3]))):
        within[at] = _other(within[at], rng)
    return msgspec.msgpack.encode(message)


def _leaves(part: Any) -> list[tuple[Any, Any]]:
    """Where a message has numbers, texts and truths: what each is in, and its place there."""
    places = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    found: list[tuple[Any, Any]] = []
    for at, inner in places:
        if isinstance(inner, dict | list):
            found += _leaves(inner)
        elif isinstance(inner, int | str):
            found.append((part, at))
    return found


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, max(0, value - 1), rng.randrange(50_000)])
    return value[::-1]

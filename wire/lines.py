"""Numbered lines: a router and a node notice every lost message between them, and send it again.

Two processes have two lines, one in each direction. A line belongs to one incarnation of its sender and one of its
receiver, and has an id that only grows. Every message that matters has a number on its line: 1, 2, 3 and so on. A
message that only describes the present (Ping, NodeStatus, ClockReading) has none, because the next one replaces it.

    sender                                            receiver
       │ ── Letter(line 4, number 7, sent 7, body) ──▶ │   the next number: delivered
       │ ── Letter(line 4, number 8, ...) ─── lost     │
       │ ── Letter(line 4, number 9, ...) ───────────▶ │   a gap: nothing after it is delivered
       │ ◀────────────────────── Resend(line 4, after 7) │   at once, and later once more
       │ ── Letter 8, Letter 9 ──────────────────────▶ │   from the sender's replay buffer
       │ ◀──── any letter (heard line 4, number 9) ── │   acknowledged: the buffer drops them

- **Every letter has the highest number that its sender has used** (`sent`), even a letter without a number. So a
  status or a ping, which come several times a second, show that the last messages were lost.
- **Every letter acknowledges** (`heard`): it has the highest number that its sender received without a gap. A Submit
  needs no answer of its own: it has arrived when its number is acknowledged.
- **Delivery is in order and at most once.** The receiver drops a number that it has delivered before. It also drops a
  letter after a gap, which comes again.
- **The replay buffer is bounded.** If a requested message is no longer in it, or if the sender forgot the receiver, the
  sender begins a new line. The receiver sees a higher line id and drops everything of the old line. A node then
  lists the requests that it holds (`Holding`), and the router moves those that are missing, or whose tokens are
  missing.
- **Incarnations.** A letter for another incarnation of the receiver is dropped and counted, and so is one of an earlier
  incarnation of the sender.

This file does not depend on the transport, which may lose, double, delay and reorder frames, and break its connections.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from tandem.base.errors import NodeLost
from tandem.wire.requests import Ask, NodeStatus, Ping, ToNode, ToRouter
from tandem.wire.sockets import Inbox, Outbox
from tandem.wire.tracing import ClockReading

B = TypeVar("B")

# A receiver with a gap asks again after RETRY_S, and then after twice as long each time, up to RETRY_MAX_S.
RETRY_S = 0.2
RETRY_MAX_S = 1.0
# What one line keeps until the receiver acknowledges it: some seconds of the busiest node's tokens.
REPLAY_BYTES = 64 << 20
REPLAY_FRAMES = 50_000
PAST_INCARNATIONS = 16


class Resend(msgspec.Struct, frozen=True, tag="resend"):
    """Send everything on this line again that has a number above `after`."""

    line: int
    after: int


class Letter(msgspec.Struct, Generic[B], frozen=True, array_like=True):
    """A message between a router and a node, with its place on its line."""

    sender: str  # the sender's endpoint
    sender_epoch: int
    receiver_epoch: int
    line: int
    number: int  # 0: the message has none
    sent: int  # the highest number on this line so far
    heard_line: int  # the other direction: the line that the sender receives,
    heard: int  # and the highest number that came on it without a gap
    body: B


_UNNUMBERED: frozenset[type] = frozenset({Ping, Ask, NodeStatus, ClockReading, Resend})

LetterToNode = Letter[ToNode | Resend]
LetterToRouter = Letter[ToRouter | Resend]


class Position(NamedTuple):
    """A place on a line. Positions of one pair of incarnations are ordered: a later line comes after an earlier one."""

    line: int
    number: int


@dataclasses.dataclass(slots=True)
class SendingLine:
    """Invariant: `kept` holds the frames with the last `len(kept)` numbers up to `sent`."""

    id: int
    sent: int = 0
    heard: int = 0
    kept: deque[tuple[float, bytes]] = dataclasses.field(default_factory=deque)
    kept_bytes: int = 0

    def keep(self, frame: bytes, now: float, max_bytes: int, max_frames: int) -> None:
        """Keeps the frame with number `sent`, and drops the oldest ones beyond the limits."""
        self.kept.append((now, frame))
        self.kept_bytes += len(frame)
        while self.kept_bytes > max_bytes or len(self.kept) > max_frames:
            self._drop_oldest()

    def acknowledge(self, number: int) -> None:
        if self.heard < number <= self.sent:
            self.heard = number
            while self.kept and self.sent - len(self.kept) < number:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, frame = self.kept.popleft()
        self.kept_bytes -= len(frame)

    def frames_after(self, number: int) -> list[bytes] | None:
        """Returns the frames after this number; None if some of them are no longer kept."""
        missing = self.sent - number
        if missing > len(self.kept):
            return None
        return [frame for _, frame in itertools.islice(self.kept, len(self.kept) - max(missing, 0), None)]

    @property
    def unheard_since(self) -> float | None:
        """When the oldest unacknowledged message was sent; None if there is none."""
        return self.kept[0][0] if self.kept else None


@dataclasses.dataclass(slots=True)
class _Peer:
    epoch: int
    out: SendingLine
    line: int = 0  # the line that comes from the peer; 0: none yet
    heard: int = 0  # the highest number on that line without a gap
    asked_at: float | None = None  # when a Resend for the gap was last sent; None: there is no gap
    retry_s: float = RETRY_S
    past: tuple[int, ...] = ()  # the peer's earlier incarnations


class Lines(Generic[B]):
    """All lines of one process. It holds the lock, if one is given, whenever it makes and sends a frame, so that
    numbers leave in order.

    `deliver` gets each message once and in order. `begun(endpoint)`: a new line has begun in one of the directions, so
    messages may be lost for good. `replaced(endpoint)`: another incarnation listens there now. All three are called
    without the lock.
    """

    def __init__(
        self,
        epoch: int,
        send_frame: Callable[[str, bytes], None],
        deliver: Callable[[B], None],
        *,
        begun: Callable[[str], None] = lambda endpoint: None,
        replaced: Callable[[str], None] = lambda endpoint: None,
        meets_strangers: bool,
        lock: contextlib.AbstractContextManager[Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        replay_bytes: int = REPLAY_BYTES,
        replay_frames: int = REPLAY_FRAMES,
    ) -> None:
        """`meets_strangers`: any process that writes here is heard and answered. Otherwise only those that `meet`
        named."""
        self.endpoint = ""  # this process's; set before anything is sent
        self.epoch = epoch
        self.gaps = 0  # how often a Resend was sent for a new gap
        self.resent = 0  # messages that were sent again
        self.restarts = 0  # lines that could not be healed
        self.foreign = 0  # letters for, or from, another incarnation
        self._send_frame = send_frame
        self._deliver = deliver
        self._begun = begun
        self._replaced = replaced
        self._meets_strangers = meets_strangers
        self._lock = lock if lock is not None else contextlib.nullcontext()
        self._clock = clock
        self._replay_bytes = replay_bytes
        self._replay_frames = replay_frames
        self._peers: dict[str, _Peer] = {}
        self._ids = itertools.count(1)
        self._encoder = msgspec.msgpack.Encoder()

    # --- sending

    def meet(self, endpoint: str, epoch: int) -> None:
        """From now on sends to this incarnation and hears it. Begins its lines, unless they have begun."""
        with self._lock:
            peer = self._peers.get(endpoint)
            if peer is None or peer.epoch != epoch:
                self._peers[endpoint] = _Peer(epoch, self._new_line())

    def send(self, endpoint: str, body: msgspec.Struct) -> Position:
        """Returns the message's place on its line, to compare with `acknowledged`. Raises NodeLost for an endpoint
        that was never met, and if the transport does."""
        with self._lock:
            peer = self._peers.get(endpoint)
            if peer is None:
                raise NodeLost(f"nothing is known of {endpoint}: it has not been heard, or it was forgotten")
            return self._write(endpoint, peer, body)

    def _write(self, endpoint: str, peer: _Peer, body: msgspec.Struct) -> Position:
        out, number = peer.out, 0
        numbered = type(body) not in _UNNUMBERED
        if numbered:
            number = out.sent + 1
        frame = self._encoder.encode(
            Letter(
                self.endpoint,
                self.epoch,
                peer.epoch,
                out.id,
                number,
                max(out.sent, number),
                peer.line,
                peer.heard,
                body,
            )
        )
        if numbered:
            out.sent = number
            out.keep(frame, self._clock(), self._replay_bytes, self._replay_frames)
        self._send_frame(endpoint, frame)
        return Position(out.id, out.sent)

    def begin_anew(self, endpoint: str) -> None:
        """Drops what was sent there and not acknowledged, and begins a new line. What comes from there is still
        heard."""
        with self._lock:
            peer = self._peers.get(endpoint)
            if peer is not None:
                peer.out = self._new_line()

    def forget(self, endpoint: str) -> None:
        with self._lock:
            self._peers.pop(endpoint, None)

    def _new_line(self) -> SendingLine:
        return SendingLine(next(self._ids))

    # --- what the other side has received

    def acknowledged(self, endpoint: str) -> Position:
        """Returns the place of the last message there that is known to have arrived."""
        with self._lock:
            peer = self._peers.get(endpoint)
            return Position(peer.out.id, peer.out.heard) if peer is not None else Position(0, 0)

    def received(self, endpoint: str) -> Position:
        """Returns the place of the last message from there that was delivered."""
        with self._lock:
            peer = self._peers.get(endpoint)
            return Position(peer.line, peer.heard) if peer is not None else Position(0, 0)

    def unheard_since(self, endpoint: str) -> float | None:
        """Returns when the oldest unacknowledged message there was sent; None if all are acknowledged."""
        with self._lock:
            peer = self._peers.get(endpoint)
            return peer.out.unheard_since if peer is not None else None

    # --- receiving

    def receive(self, letter: Letter[B | Resend]) -> None:
        """Takes a letter. Only one thread at a time may call this."""
        number = letter.number
        with self._lock:
            peer = self._peers.get(letter.sender)
            in_order = (
                peer is not None
                and letter.line == peer.line
                and letter.sender_epoch == peer.epoch
                and letter.receiver_epoch == self.epoch
                and (
                    number == peer.heard + 1
                    if number
                    else letter.sent <= peer.heard and type(letter.body) is not Resend
                )
            )
            if in_order and peer is not None:  # true for nearly every letter
                if number:
                    peer.asked_at = None
                if letter.heard_line == peer.out.id:
                    peer.out.acknowledge(letter.heard)
        if not in_order:
            peer = self._receive_other(letter)
        if peer is None:
            return
        try:
            self._deliver(letter.body)  # type: ignore[arg-type]  # a Resend is never delivered
        finally:
            # Only now, because `received` promises that the message was delivered.
            if number and peer.line == letter.line:
                peer.heard = number

    def _receive_other(self, letter: Letter[B | Resend]) -> _Peer | None:
        """Takes a letter out of order. Returns its sender if its message is to be delivered."""
        events: list[Callable[[], None]] = []
        with self._lock:
            peer = self._sender_of(letter, events)
            delivers = peer is not None and self._take(letter, peer, events)
        for event in events:
            event()
        return peer if delivers else None

    def _sender_of(self, letter: Letter[Any], events: list[Callable[[], None]]) -> _Peer | None:
        endpoint, epoch = letter.sender, letter.sender_epoch
        peer = self._peers.get(endpoint)
        if letter.receiver_epoch != self.epoch:
            self.foreign += 1
            return None
        if peer is not None and peer.epoch == epoch:
            return peer
        if not self._meets_strangers or (peer is not None and epoch in peer.past):
            self.foreign += 1
            return None
        past: tuple[int, ...] = ()
        if peer is not None:
            past = (peer.epoch, *peer.past)[:PAST_INCARNATIONS]
            events.append(lambda: self._replaced(endpoint))
        met = self._peers[endpoint] = _Peer(epoch, self._new_line(), past=past)
        return met

    def _take(self, letter: Letter[Any], peer: _Peer, events: list[Callable[[], None]]) -> bool:
        """Returns whether the letter's message is to be delivered."""
        out = peer.out
        if letter.heard_line == out.id:
            out.acknowledge(letter.heard)
        if letter.line < peer.line:
            return False  # it was on its way when its line was replaced
        if letter.line > peer.line:
            peer.line, peer.heard, peer.asked_at = letter.line, 0, None
            events.append(lambda: self._begun(letter.sender))
        if isinstance(letter.body, Resend):
            self._resend(letter.sender, peer, letter.body, events)
        elif letter.number and letter.number <= peer.heard:
            return False
        missing_from = letter.number - 1 if letter.number else letter.sent
        if missing_from > peer.heard:
            self._ask_again(letter.sender, peer)
            return letter.number == 0 and not isinstance(letter.body, Resend)
        if letter.number:
            peer.asked_at = None
        return not isinstance(letter.body, Resend)

    def _ask_again(self, endpoint: str, peer: _Peer) -> None:
        now = self._clock()
        if peer.asked_at is None:
            self.gaps += 1
            peer.retry_s = RETRY_S
        elif now < peer.asked_at + peer.retry_s:
            return
        else:
            # The link may be slow, and the answer on its way.
            peer.retry_s = min(2 * peer.retry_s, RETRY_MAX_S)
        peer.asked_at = now
        with contextlib.suppress(NodeLost):  # the next letter tries again
            self._write(endpoint, peer, Resend(peer.line, peer.heard))

    def _resend(self, endpoint: str, peer: _Peer, asked: Resend, events: list[Callable[[], None]]) -> None:
        out = peer.out
        if asked.line != out.id:
            return
        frames = out.frames_after(asked.after)
        if frames is None:
            peer.out = self._new_line()
            self.restarts += 1
            events.append(lambda: self._begun(endpoint))
            return
        self.resent += len(frames)
        with contextlib.suppress(NodeLost):  # the receiver asks again
            for frame in frames:
                self._send_frame(endpoint, frame)


class NumberedChannel:
    """A node's inbox and outbox, with numbered lines to every router that has written to it. It has its address at
    once; messages that arrive before `listen` wait."""

    def __init__(self, host: str, epoch: int, *, name: str) -> None:
        self._outbox = Outbox()
        self.lines: Lines[ToNode] = Lines(
            epoch,
            self._outbox.send_frame,
            lambda message: self._on_message(message),
            begun=lambda endpoint: self._begun(endpoint),
            replaced=lambda endpoint: self._replaced(endpoint),
            meets_strangers=True,
            lock=threading.Lock(),
        )
        self._inbox: Inbox[LetterToNode] = Inbox(host, LetterToNode, self.lines.receive, name=name, listens=False)
        self.lines.endpoint = self._inbox.endpoint

    def listen(
        self, on_message: Callable[[ToNode], None], *, begun: Callable[[str], None], replaced: Callable[[str], None]
    ) -> None:
        """Begins to receive. The three callbacks are those of `Lines`, called in the inbox's thread."""
        self._on_message, self._begun, self._replaced = on_message, begun, replaced
        self._inbox.listen()

    @property
    def endpoint(self) -> str:
        return self._inbox.endpoint

    @property
    def malformed(self) -> int:
        return self._inbox.malformed

    @property
    def died(self) -> str | None:
        return self._inbox.died

    @property
    def gaps(self) -> int:
        return self.lines.gaps

    def send(self, endpoint: str, message: msgspec.Struct) -> None:
        self.lines.send(endpoint, message)

    def received(self, endpoint: str) -> Position:
        return self.lines.received(endpoint)

    def forget(self, endpoint: str) -> None:
        self.lines.forget(endpoint)
        self._outbox.forget(endpoint)

    def close(self) -> None:
        self._inbox.close()
        self._outbox.close()

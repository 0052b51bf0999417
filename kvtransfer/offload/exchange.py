"""Messages between the tiers of two nodes, and the thread that reads another node's chunks.

The step thread sends messages, posts readings, and takes events in `take`. Only this module's thread touches the
transport. A reading ends when none of its moves is in flight, however long that takes: until then the transport may
write to its slots.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tandem.base.errors import InternalError, TransferError
from tandem.kvtransfer.base import KVCacheMemory, flat_bytes
from tandem.kvtransfer.protocol.checksums import ChecksumSample, pack, unpack
from tandem.kvtransfer.protocol.endpoint import POLL_MAX_S, POLL_MIN_S, SideChannel
from tandem.kvtransfer.protocol.side import Clock, Identity, PeerKey
from tandem.kvtransfer.protocol.transport import HandleId, Move, Operation, RemoteId, Transport
from tandem.kvtransfer.sources import ASK_S, KVSources
from tandem.wire.handoff import CacheMemory, Envelope
from tandem.wire.nodes import PeerAddress
from tandem.wire.sharing import AskChunks, ChunksFound, SharingMessage

logger = logging.getLogger(__name__)

# The most bytes of one post, so that an urgent reading does not wait long for another one.
MAX_POST_BYTES = 32 << 20
MAX_IN_FLIGHT = 4  # posts
MAX_REMOTES = 64  # the most peers to which the transport is connected
STOP_GRACE_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteRead:
    """Copies place `there[i]` of the peer's tier to place `here[i]` of ours."""

    number: int
    peer: PeerKey
    memory: CacheMemory
    here: Sequence[int]
    there: Sequence[int]
    until: float  # chunks that arrive later do not count as right
    urgent: bool  # a request waits for it
    factor: int = 1  # places of a chunk
    checksum_every: int = 0  # one chunk of this many is compared, and the last one
    checksums: bytes = b""  # the peer's checksums of those chunks


@dataclasses.dataclass(frozen=True, slots=True)
class ChecksummedAnswer:
    """Sends `found` with checksums of our chunks, which keep their content meanwhile."""

    peer: PeerAddress
    found: ChunksFound
    factor: int
    every: int


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteReadEnded:
    number: int
    right: bool
    seconds: float
    checked: int = 0  # chunks that were compared
    wrong: str = ""  # which chunk arrived with other bytes than were sent


Event = SharingMessage | RemoteReadEnded


@dataclasses.dataclass(slots=True)
class _Progress:
    reading: RemoteRead
    posted: int = 0  # places
    in_flight: int = 0  # moves
    began: float = 0.0
    failed: bool = False

    @property
    def has_more(self) -> bool:
        return not self.failed and self.posted < len(self.reading.here)


class _Stop:
    pass


# The number of a question that asks for no chunks, only for a sign of the peer.
NO_FETCH = -1


def compared_chunks(number: int, chunks: int, every: int) -> list[int]:
    """Returns the chunks that carry a checksum. Both nodes choose the same ones, and the next answer has others."""
    return ChecksumSample(every, number % every if every else 0, chunks - 1).between(0, chunks)


class SharingChannel(Protocol):
    """A `SideChannel` between tiers."""

    @property
    def endpoint(self) -> str: ...

    @property
    def malformed(self) -> int: ...

    @property
    def died(self) -> str | None: ...

    def send(self, endpoint: str, message: SharingMessage) -> None: ...

    def close(self) -> None: ...


MakeChannel = Callable[[str, str, Callable[[SharingMessage], None], Clock], SharingChannel]


def _side_channel(host: str, name: str, on_message: Callable[[SharingMessage], None], clock: Clock) -> SharingChannel:
    return SideChannel(host, name, on_message, clock, messages=SharingMessage)


class Exchange:
    """Sends and receives messages, and reads. `wake` is called when there is something to take. A simulation brings its own clock and
    channel, and takes the turns itself."""

    def __init__(
        self,
        node_id: str,
        epoch: int,
        host: str,
        transport: Transport,
        wake: Callable[[], None],
        clock: Clock = time.monotonic,
        make_channel: MakeChannel = _side_channel,
    ) -> None:
        self._transport = transport
        self._wake = wake
        self._clock = clock
        self._events: deque[Event] = deque()
        self._posted: queue.SimpleQueue[RemoteRead | ChecksummedAnswer | _Stop] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._remotes: OrderedDict[PeerKey, RemoteId] = OrderedDict()  # the least recently used comes first
        self._broken: set[PeerKey] = set()  # peers to disconnect when nothing is in flight there
        self._open: list[_Progress] = []
        self._handles: dict[HandleId, _Progress] = {}
        self._channel = make_channel(host, f"{node_id}-tier", self._add, clock)
        self._me = Identity(node_id, epoch, self._channel.endpoint)
        self._thread: threading.Thread | None = None
        self.memory: CacheMemory | None = None
        # Peers that are asked every few seconds for a sign of their cache's generation.
        self.sources: KVSources | None = None
        self._ask_at = 0.0
        self._poll_s = POLL_MIN_S
        self._rows: npt.NDArray[np.uint8] | None = None

    @property
    def endpoint(self) -> str:
        return self._channel.endpoint

    @property
    def malformed_frames(self) -> int:
        return self._channel.malformed + self._transport.malformed_frames

    def open(self, memory: KVCacheMemory) -> None:
        """Opens the tier to peers and begins to take turns. `memory` is the tier's pool: its blocks are the places."""
        self.memory = self._transport.register(memory)
        self._rows = flat_bytes(memory.tensor).numpy().reshape(-1, self.memory.block_bytes)
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kv-exchange", daemon=True)
        self._thread.start()

    def begin_generation(self) -> None:
        """Messages name a new generation of our cache from now on."""
        self._me.generation += 1

    def envelope(self, receiver_epoch: int) -> Envelope:
        return self._me.envelope(receiver_epoch)

    @property
    def epoch(self) -> int:
        return self._me.epoch

    def send(self, peer: PeerAddress, message: SharingMessage) -> None:
        """Never waits and never raises. Any thread may call this."""
        self._channel.send(peer.endpoint, message)

    def read(self, reading: RemoteRead) -> None:
        self._posted.put(reading)

    def answer(self, answer: ChecksummedAnswer) -> None:
        """Has this module's thread send the answer, so that a step does not wait for checksums."""
        self._posted.put(answer)

    def take(self) -> list[Event]:
        if self._failure is not None:
            raise InternalError("the thread that reads other nodes' tiers died") from self._failure
        if self._channel.died is not None:
            raise InternalError(f"nothing is heard of other nodes' tiers any more: {self._channel.died}")
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self._wake()

    def _run(self) -> None:
        try:
            wait_s: float | None = ASK_S
            while wait_s is not None:
                wait_s = self.turn(wait_s)
        except BaseException as error:
            logger.exception("the thread that reads other nodes' tiers died")
            self._failure = error
            self._wake()

    def turn(self, wait_s: float) -> float | None:
        """Waits up to `wait_s` for something new to do, does it, and looks after what is under way. Returns in how many seconds the next
        turn is due; None: never."""
        try:
            posted = self._posted.get(timeout=wait_s)
        except queue.Empty:
            self._poll_s = min(2 * self._poll_s, POLL_MAX_S)
        else:
            if isinstance(posted, _Stop):
                return None
            self._poll_s = POLL_MIN_S
            if isinstance(posted, ChecksummedAnswer):
                self._sum_up(posted)
            else:
                self._open.append(_Progress(posted, began=self._clock()))
                self._open.sort(key=lambda progress: not progress.reading.urgent)
        self._poll()
        self._post()
        self._ask_sources()
        return self._poll_s if self._open else ASK_S

    def _ask_sources(self) -> None:
        now = self._clock()
        if now < self._ask_at:
            return
        self._ask_at = now + ASK_S
        for peer in self.sources.to_ask() if self.sources is not None else ():
            self.send(peer, AskChunks(self.envelope(peer.epoch), NO_FETCH, "", [], knows_memory=True))

    def _poll(self) -> None:
        for handle, progress in list(self._handles.items()):
            try:
                if not self._transport.is_done(handle):
                    continue
            except TransferError as error:
                self._break(progress.reading.peer, error)
            del self._handles[handle]
            progress.in_flight -= 1
        self._disconnect_broken()
        # A failed move may write to its slots until the connection is closed.
        ended = [
            progress
            for progress in self._open
            if not (progress.in_flight or progress.has_more or progress.reading.peer in self._broken)
        ]
        for progress in ended:
            self._open.remove(progress)
        for progress in ended:
            reading, seconds = progress.reading, self._clock() - progress.began
            checked, wrong = (0, "") if progress.failed else self._compared(reading)
            right = not (progress.failed or wrong) and self._clock() < reading.until
            self._add(RemoteReadEnded(reading.number, right, seconds, checked, wrong))

    def _sum_up(self, answer: ChecksummedAnswer) -> None:
        slots, factor = answer.found.slots, answer.factor
        sums = [
            self._sum([slots[chunk] * factor + part for part in range(factor)])
            for chunk in compared_chunks(answer.found.number, len(slots), answer.every)
        ]
        self.send(answer.peer, msgspec.structs.replace(answer.found, checksums=pack(sums)))

    def _compared(self, reading: RemoteRead) -> tuple[int, str]:
        """Returns how many chunks have the peer's bytes, and what is wrong with the first that does not."""
        count = len(reading.here) // reading.factor
        chunks = compared_chunks(reading.number, count, reading.checksum_every)
        expected = unpack(reading.checksums)
        if len(chunks) != len(expected):
            return 0, f"{len(expected)} checksums came for {len(chunks)} chunks"
        for number, (chunk, right) in enumerate(zip(chunks, expected, strict=True)):
            first = chunk * reading.factor
            if self._sum(reading.here[first : first + reading.factor]) != right:
                return number, f"chunk {chunk} of {count} arrived with other bytes than were sent"
        return len(chunks), ""

    def _sum(self, places: Sequence[int]) -> int:
        if self._rows is None:
            raise InternalError("a checksum is wanted of a tier that is not open")
        checksum = xxhash.xxh3_64()
        for place in places:
            checksum.update(self._rows[place].data)
        return checksum.intdigest()

    def _post(self) -> None:
        for progress in self._open:
            while progress.has_more and len(self._handles) < MAX_IN_FLIGHT:
                self._post_next(progress)

    def _post_next(self, progress: _Progress) -> None:
        reading = progress.reading
        size = reading.memory.block_bytes
        count = max(MAX_POST_BYTES // size, 1)
        first, progress.posted = progress.posted, progress.posted + count
        move = Move(
            Operation.READ,
            f"tier-{reading.number}",
            size,
            np.asarray(reading.here[first : progress.posted], dtype=np.int64),
            np.asarray(reading.there[first : progress.posted], dtype=np.int64),
        )
        try:
            if reading.peer in self._broken:
                raise TransferError("the connection is being given up")
            handle = self._transport.post(self._connected(reading), move)
        except TransferError as error:
            progress.failed = True
            self._break(reading.peer, error)
            return
        self._handles[handle] = progress
        progress.in_flight += 1

    def _connected(self, reading: RemoteRead) -> RemoteId:
        remote = self._remotes.pop(reading.peer, None)
        if remote is None:
            remote = self._transport.connect(reading.memory)
        self._remotes[reading.peer] = remote
        if len(self._remotes) > MAX_REMOTES:
            busy = {progress.reading.peer for progress in self._open}
            idle = next((peer for peer in self._remotes if peer not in busy), None)
            if idle is not None:
                self._transport.disconnect(self._remotes.pop(idle))
        return remote

    def _break(self, peer: PeerKey, error: TransferError) -> None:
        """Fails everything else that is read from this peer, too. The connection is closed when nothing is in
        flight."""
        if peer not in self._broken:
            logger.warning("reading the tier of %s failed: %s", peer.node_id, error)
        self._broken.add(peer)
        for progress in self._open:
            if progress.reading.peer == peer:
                progress.failed = True

    def _disconnect_broken(self) -> None:
        busy = {progress.reading.peer for progress in self._handles.values()}
        for peer in self._broken - busy:
            self._broken.remove(peer)
            if (remote := self._remotes.pop(peer, None)) is not None:
                self._transport.disconnect(remote)

    def close(self) -> None:
        """Idempotent. When it returns, nothing reads our tier through this agent or writes to it."""
        if self._thread is not None and self._thread.is_alive():
            self._posted.put(_Stop())
            self._thread.join(STOP_GRACE_S)
        try:
            self._transport.close()
        finally:
            self._rows = None  # lets the tier take its memory back
            self._channel.close()

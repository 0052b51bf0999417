"""The thread that reads other nodes' tiers, over a transport whose failures the test controls."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tandem.base.errors import InternalError, TransferError
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.offload import exchange
from tandem.kvtransfer.offload.exchange import MAX_IN_FLIGHT, ChecksummedAnswer, Exchange, RemoteRead, RemoteReadEnded
from tandem.kvtransfer.protocol.side import PeerKey
from tandem.kvtransfer.protocol.transport import HandleId, Move, RemoteId, Transport
from tandem.wire.handoff import CacheMemory
from tandem.wire.nodes import PeerAddress
from tandem.wire.sharing import ChunksFound, ChunksRead
from tandem.wire.sockets import Outbox

PATIENCE_S = 20.0
PLACES, PLACE_BYTES = 100, 4096
MEMORY = CacheMemory(b"", "DRAM", 0, 0, PLACES, PLACE_BYTES)
A, B = PeerKey("a", 1), PeerKey("b", 2)


class Held(Transport):
    """A transport whose handles complete or fail when the test says so."""

    name = "held"

    def __init__(self) -> None:
        self._ids = itertools.count()
        self.moves: dict[HandleId, Move] = {}
        self.outcomes: dict[HandleId, TransferError | None] = {}
        self.connected: list[RemoteId] = []
        self.looks = 0  # at handles that are not done
        self.refuses = False
        self.breaks: Exception | None = None
        self.closed = False

    def register(self, memory: KVCacheMemory) -> CacheMemory:
        return MEMORY

    def connect(self, memory: CacheMemory) -> RemoteId:
        if self.refuses:
            raise TransferError("no way there")
        self.connected.append(RemoteId(next(self._ids)))
        return self.connected[-1]

    def disconnect(self, remote: RemoteId) -> None:
        self.connected.remove(remote)

    def post(self, remote: RemoteId, move: Move) -> HandleId:
        assert remote in self.connected
        handle = HandleId(next(self._ids))
        self.moves[handle] = move
        return handle

    def is_done(self, handle: HandleId) -> bool:
        if self.breaks is not None:
            raise self.breaks
        if handle not in self.outcomes:
            self.looks += 1
            return False
        if (error := self.outcomes.pop(handle)) is not None:
            raise error
        return True

    def close(self) -> None:
        self.closed = True

    def end(self, handle: HandleId, error: TransferError | None = None) -> None:
        self.outcomes[handle] = error


class Reader:
    def __init__(self) -> None:
        self.transport = Held()
        self.woken = threading.Event()
        self.exchange = Exchange("n", 7, "127.0.0.1", self.transport, self.woken.set)
        self.pool = torch.zeros((PLACES, 1, 1, 1, 1, PLACE_BYTES), dtype=torch.uint8)
        self.exchange.open(KVCacheMemory(self.pool, "m", 1, 1, 1000))
        self.ended: dict[int, bool] = {}

    def read(
        self, number: int, peer: PeerKey = A, places: int = 1, *, urgent: bool = False, left_s: float = 60
    ) -> None:
        until = time.monotonic() + left_s
        self.exchange.read(RemoteRead(number, peer, MEMORY, range(places), range(places), until, urgent))

    def wait_for_moves(self, count: int) -> list[HandleId]:
        self.until(lambda: len(self.transport.moves) >= count, f"{count} moves")
        return list(self.transport.moves)

    def until_ended(self, number: int) -> bool:
        def has_ended() -> bool:
            for event in self.exchange.take():
                assert isinstance(event, RemoteReadEnded)
                self.ended[event.number] = event.right
            return number in self.ended

        self.until(has_ended, f"the end of {number}")
        return self.ended[number]

    def until(self, holds: object, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():  # type: ignore[operator]
            assert time.monotonic() < deadline, what
            self.woken.wait(0.01)


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.exchange.close()
    assert made.transport.closed


def test_a_long_read_goes_in_pieces_and_ends_with_the_last(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_POST_BYTES", 4 * PLACE_BYTES)
    reader.read(1, places=4 * (MAX_IN_FLIGHT + 1))
    moves = reader.wait_for_moves(MAX_IN_FLIGHT)
    assert len(moves) == MAX_IN_FLIGHT
    for handle in moves:
        reader.transport.end(handle)
    last = reader.wait_for_moves(MAX_IN_FLIGHT + 1)[-1]
    assert list(reader.transport.moves[last].remote) == list(range(16, 20))
    reader.transport.end(last)
    assert reader.until_ended(1)


def test_what_a_request_waits_for_is_posted_before_what_a_mirror_copies(reader: Reader) -> None:
    for number in range(MAX_IN_FLIGHT + 2):
        reader.read(number)
    held = reader.wait_for_moves(MAX_IN_FLIGHT)
    reader.read(99, urgent=True)
    before = reader.transport.looks
    reader.until(lambda: reader.transport.looks > before + 3 * MAX_IN_FLIGHT, "the thread has the urgent one")
    reader.transport.end(held[0])
    assert reader.until_ended(0)
    moves = reader.wait_for_moves(MAX_IN_FLIGHT + 1)
    assert reader.transport.moves[moves[-1]].transfer_id == "tier-99"


def test_after_a_failure_nothing_of_that_peer_is_right_and_its_connection_ends_last(reader: Reader) -> None:
    for number, peer in ((0, A), (1, A), (2, B)):
        reader.read(number, peer)
    first, second, other = reader.wait_for_moves(3)
    reader.transport.end(first, TransferError("it broke"))
    reader.transport.end(other)
    assert reader.until_ended(2), "another peer is no matter"
    assert not reader.ended.keys() & {0, 1}, "the second may still write to its slots, and so may the first"
    assert len(reader.transport.connected) == 2
    reader.transport.end(second)
    assert not reader.until_ended(1)
    assert not reader.until_ended(0)
    assert len(reader.transport.connected) == 1
    reader.read(3)
    reader.transport.end(reader.wait_for_moves(4)[-1])
    assert reader.until_ended(3), "it is connected again"


def test_a_peer_that_cannot_be_reached_fails_the_read(reader: Reader) -> None:
    reader.transport.refuses = True
    reader.read(1)
    assert not reader.until_ended(1)


def test_what_arrives_too_late_is_not_right(reader: Reader) -> None:
    reader.read(1, left_s=0)
    reader.transport.end(reader.wait_for_moves(1)[0])
    assert not reader.until_ended(1)


def test_a_thread_that_died_is_not_waited_for(reader: Reader) -> None:
    reader.transport.breaks = ValueError("a mistake of ours")
    reader.read(1)
    with pytest.raises(InternalError, match="died"):
        reader.until_ended(1)


def test_what_is_no_message_is_counted_and_dropped(reader: Reader) -> None:
    outbox = Outbox()
    try:
        outbox.send_frame(reader.exchange.endpoint, b"x" * 20)
        reader.until(lambda: reader.exchange.malformed_frames, "it is counted")
        assert reader.exchange.take() == []
    finally:
        outbox.close()


def test_messages_arrive_and_wake(reader: Reader) -> None:
    other = Reader()
    try:
        message = ChunksRead(other.exchange.envelope(7), 5)
        other.exchange.send(PeerAddress("n", 7, reader.exchange.endpoint), message)
        assert reader.woken.wait(PATIENCE_S)
        assert reader.exchange.take() == [message]
    finally:
        other.exchange.close()


@pytest.mark.parametrize("every", [1, 16])
@pytest.mark.parametrize("flipped", [None, (39, 0, 0), (20, 4095, 7)])
def test_what_was_copied_is_compared_with_what_its_owner_has(
    reader: Reader, every: int, flipped: tuple[int, int, int] | None
) -> None:
    """Of chunks of two places, from other slots than they come to. A sample has the last, and one of sixteen."""
    factor, number, theirs, ours = 2, 10, list(range(30, 10, -1)), list(range(20))
    owner = Reader()
    try:
        owner.pool.random_(0, 256, generator=torch.Generator().manual_seed(1))
        found = ChunksFound(owner.exchange.envelope(7), number, theirs)
        owner.exchange.answer(ChecksummedAnswer(PeerAddress("n", 7, reader.exchange.endpoint), found, factor, every))
        events: list[object] = []
        reader.until(lambda: events or events.extend(reader.exchange.take()), "the answer")
        (answer,) = events
        assert isinstance(answer, ChunksFound)
        there = [factor * slot + part for slot in theirs for part in range(factor)]
        here = [factor * slot + part for slot in ours for part in range(factor)]
        reader.pool[here] = owner.pool[there]
        if flipped is not None:
            place, byte, bit = flipped
            reader.pool.view(PLACES, -1)[place, byte] ^= 1 << bit
        until = time.monotonic() + 60
        reader.exchange.read(RemoteRead(number, A, MEMORY, here, there, until, True, factor, every, answer.checksums))
        reader.transport.end(reader.wait_for_moves(1)[0])
        ended: list[RemoteReadEnded] = []
        reader.until(lambda: ended or ended.extend(reader.exchange.take()), "the end")  # type: ignore[arg-type]
        assert ended[0].right == (flipped is None)
        assert bool(ended[0].wrong) == (flipped is not None)
        if flipped is None:
            assert ended[0].checked == (20 if every == 1 else 2)
    finally:
        owner.exchange.close()


def test_a_peer_that_sends_other_checksums_than_it_was_asked_for_is_not_believed(reader: Reader) -> None:
    until = time.monotonic() + 60
    reader.exchange.read(RemoteRead(1, A, MEMORY, range(4), range(4), until, True, 1, 1, b"12345678"))
    reader.transport.end(reader.wait_for_moves(1)[0])
    assert not reader.until_ended(1)

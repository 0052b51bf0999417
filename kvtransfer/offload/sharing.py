"""A tier in host memory that nodes share. A node copies chunks that it lacks from another node's tier, if that takes
less time than computing them, and copies what running requests fill to a mirror.

Everything here runs in the step thread, which owns the manager; `exchange` has the other thread. Whether a copy or the
model is faster follows from measurements: the rate of that node's bytes, and the rate of this node's prompt tokens. If
there is no recent measurement, the copy is tried.

A chunk that is being copied here counts as being written: nothing loads it, and nothing takes its slot, before the
reading has ended. What peers read from here is lent (`lending`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from tandem.kvtransfer.base import TransferRequest
from tandem.kvtransfer.config import ChecksumPolicy
from tandem.kvtransfer.offload.exchange import NO_FETCH, Exchange, RemoteRead, RemoteReadEnded
from tandem.kvtransfer.offload.fetches import Fetch, PrefixQuestion, which_of
from tandem.kvtransfer.offload.lending import ChunkLender, sender_of
from tandem.kvtransfer.offload.manager import StoreRoom, TierManager
from tandem.kvtransfer.offload.peers import TierPeers
from tandem.kvtransfer.offload.policies import Key
from tandem.kvtransfer.offload.prefixes import Prefixes
from tandem.kvtransfer.protocol.cache_map import ADDRESS_SPACE, MAX_DEVICES
from tandem.kvtransfer.protocol.side import PeerKey, Recorder, key_of
from tandem.kvtransfer.sources import KVSources
from tandem.wire.handoff import CacheMemory, Envelope
from tandem.wire.nodes import PeerAddress
from tandem.wire.sharing import (
    LEASE_S,
    SAFETY,
    AskChunks,
    AskPrefix,
    ChunksFound,
    ChunksRead,
    ChunksStored,
    PrefixFound,
    TierForgotten,
)

# A node that does not answer within this time is busy or gone. A request that waits for the answer is then computed.
ANSWER_S = 1.0
MAX_PLACES = 1 << 26  # a transport makes a descriptor for each of a peer's places
# The most fetches of a mirror from one peer at a time. A slow mirror asks for the rest later, when some may be gone.
MAX_MIRROR_FETCHES = 4


class MirrorNews:
    """What mirrors are told of the chunks of requests that they go on with if this node dies."""

    def __init__(self, exchange: Exchange, *, has_mirrors: bool) -> None:
        self._exchange = exchange
        self._has_mirrors = has_mirrors
        # For each mirror: keys stored, and gone.
        self._news: dict[PeerAddress, tuple[list[Key], list[Key]]] = {}

    def follows(self, request: TransferRequest) -> bool:
        """Whether the request has a mirror."""
        peers = request.cache_peers
        return self._has_mirrors and peers is not None and peers.mirror is not None

    def stored(self, request: TransferRequest, keys: Sequence[Key], gone: Sequence[Key] = ()) -> None:
        """The tier has these chunks of the request; the chunks in `gone` are of no more use."""
        peers = request.cache_peers
        if self._has_mirrors and peers is not None and peers.mirror is not None:
            news = self._news.setdefault(peers.mirror, ([], []))
            news[0].extend(keys)
            news[1].extend(gone)

    def tell(self) -> None:
        """Sends each mirror one message about all its requests. Called once a step."""
        for mirror, (keys, gone) in self._news.items():
            self._exchange.send(mirror, ChunksStored(self._exchange.envelope(mirror.epoch), keys, gone))
        if self._news:
            self._news = {}


class TierSharing:
    def __init__(
        self,
        manager: TierManager,
        exchange: Exchange,
        prefixes: Prefixes,
        *,
        layout: str,
        block_factor: int,
        chunk_bytes: int,
        chunk_tokens: int,
        remote: bool,
        mirror: bool,
        checksums: ChecksumPolicy = ChecksumPolicy.SAMPLE,
        sources: KVSources | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._exchange = exchange
        self._prefixes = prefixes
        self._layout = layout
        self._factor = block_factor
        self._chunk_bytes = chunk_bytes
        self._chunk_tokens = chunk_tokens
        self._remote = remote
        self._mirror = mirror
        self._clock = clock
        self.lender = ChunkLender(manager, exchange, prefixes, layout, block_factor, clock)
        self.recorder = Recorder(clock)
        self.peers = TierPeers(self.recorder, chunk_bytes, checksums, clock)
        self.mirrors = MirrorNews(exchange, has_mirrors=mirror)
        self._numbers = itertools.count()
        self.fetches: dict[int, Fetch] = {}
        self._waiting: dict[str, int] = {}  # the fetch that each request waits for
        self._arriving: dict[Key, int] = {}  # the fetch that brings each key
        self._sources = exchange.sources = sources or KVSources(clock)
        # Why the engine must begin a new generation of its cache; empty if it need not.
        self.distrusted = ""
        self.fetched_bytes = 0
        self.mirrored_bytes = 0

    @property
    def endpoint(self) -> str:
        return self._exchange.endpoint

    @property
    def malformed_frames(self) -> int:
        return self._exchange.malformed_frames

    # ── what a request lacks ──

    def begin_fetch(self, request: TransferRequest, missing: Sequence[Key]) -> bool:
        """Returns whether the request should wait, because the chunks that it lacks are being copied from a peer."""
        peers = request.cache_peers
        source = peers.source if peers is not None else None
        number = self._arriving.get(missing[0])
        if number is None:
            tokens = len(missing) * self._chunk_tokens
            if source is None or not self._remote or not self.peers.are_worth_it(source, len(missing), tokens):
                return False
            number = self._fetch(source, missing, for_mirror=False)
        return number is not None and self._wait(request, number)

    def ask_for_prefix(self, request: TransferRequest, first: int, end: int, last: int) -> bool:
        """As `begin_fetch`, for a model whose groups need different parts of a prefix. It asks the peer for the blocks
        from `first` on. Those before `end` are here, but a longer prefix may need other parts of them."""
        asked = PrefixQuestion(request, first, end, last)
        for number, fetch in self.fetches.items():
            known = fetch.question
            if known is not None and known.covers(asked):
                return self._wait(request, number)
        peers = request.cache_peers
        source = peers.source if peers is not None else None
        tokens = (last - end) * self._chunk_tokens
        if source is None or not self._remote or not self.peers.are_worth_it(source, 0, tokens, answers=2):
            return False
        if self.peers.checksum_every(source) is None:
            return False
        number = next(self._numbers)
        fetch = Fetch(number, source, StoreRoom([], []), self._clock(), for_mirror=False, question=asked)
        self.fetches[number] = fetch
        envelope = self._exchange.envelope(source.epoch)
        self._exchange.send(source, AskPrefix(envelope, number, self._layout, list(asked.hashes)))
        return self._wait(request, number)

    def _wait(self, request: TransferRequest, number: int) -> bool:
        if self._waiting.get(request.request_id, number) != number:
            self.stop_waiting(request.request_id)  # it was admitted before that fetch ended
        self.fetches[number].requests.add(request.request_id)
        self._waiting[request.request_id] = number
        return True

    def is_fetching(self, request_id: str) -> bool:
        """Returns whether what the request waits for may still come. If not, the request no longer waits."""
        number = self._waiting.get(request_id)
        if number is None:
            return False
        fetch = self.fetches[number]
        longest = LEASE_S if fetch.is_reading else ANSWER_S
        if self._clock() - fetch.asked_at < longest:
            return True
        self.stop_waiting(request_id)
        return False

    def stop_waiting(self, request_id: str) -> None:
        """The request waits no longer. A reading goes on, because other requests may use what it brings."""
        number = self._waiting.pop(request_id, None)
        if number is None:
            return
        fetch = self.fetches[number]
        fetch.requests.discard(request_id)
        if not (fetch.is_reading or fetch.requests or fetch.for_mirror):
            self._give_up(number)

    def _fetch(self, peer: PeerAddress, keys: Sequence[Key], *, for_mirror: bool) -> int | None:
        """Returns the fetch's number; None if there is nothing to copy, no room, or if the peer is left out."""
        fetch = Fetch(next(self._numbers), peer, StoreRoom([], []), self._clock(), for_mirror)
        return fetch.number if self._ask(fetch, keys) else None

    def _ask(self, fetch: Fetch, keys: Sequence[Key]) -> bool:
        every = self.peers.checksum_every(fetch.peer)
        room = self._manager.prepare_store(keys) if every is not None else None
        if room is None or every is None or not room.keys:
            return False
        number, peer = fetch.number, fetch.peer
        fetch.room, fetch.checksum_every, fetch.asked_at = room, every, self._clock()
        self.fetches[number] = fetch
        self._arriving.update(dict.fromkeys(room.keys, number))
        knows = self.peers.of(PeerKey(peer.node_id, peer.epoch)).memory is not None
        envelope = self._exchange.envelope(peer.epoch)
        ask = AskChunks(envelope, number, self._layout, room.keys, knows, every, fetch.for_mirror)
        self._exchange.send(peer, ask)
        return True

    # ── what came ──

    def turn(self) -> None:
        """Handles what has arrived, and deadlines. Called at least once in every step."""
        for event in self._exchange.take():
            if isinstance(event, RemoteReadEnded):
                self._end_reading(event)
            elif event.envelope.receiver_epoch == self._exchange.epoch:
                self._hear(event.envelope)
                match event:
                    case AskChunks():
                        self.lender.answer(event, is_distrusted=bool(self.distrusted))
                    case AskPrefix():
                        self.lender.answer_prefix(event)
                    case PrefixFound():
                        self._choose(event)
                    case ChunksFound():
                        self._read(event)
                    case ChunksRead():
                        self.lender.on_read(event)
                    case ChunksStored():
                        self._copy(event)
                    case TierForgotten():
                        pass  # its envelope has said all
        now = self._clock()
        self.lender.end_leases(now)
        late = [
            number
            for number, fetch in self.fetches.items()
            if not fetch.is_reading and now - fetch.asked_at >= ANSWER_S
        ]
        for number in late:
            self._give_up(number)

    def _choose(self, found: PrefixFound) -> None:
        """Chooses the longest prefix that both tiers have together, and asks the peer for the missing parts."""
        key, fetch = key_of(found.envelope), self.fetches.get(found.number)
        if fetch is None or key != (fetch.peer.node_id, fetch.peer.epoch):
            return
        question = fetch.question
        if question is None or not question.is_open:
            return  # the peer answered twice
        question.is_open = False
        self.peers.of(key).answers_per_s.observe(1, self._clock() - fetch.asked_at)
        theirs = self._prefixes.named(found.has, question.hashes)
        end, keys = self._prefixes.to_copy(self._manager, theirs, question.request, question.first, question.last)
        tokens = (end - question.end) * self._chunk_tokens
        fetch.others = sorted({self._arriving[key] for key in keys if key in self._arriving}) if tokens > 0 else []
        if not (
            keys and tokens > 0 and self.peers.are_worth_it(fetch.peer, len(keys), tokens) and self._ask(fetch, keys)
        ):
            self._end(fetch.number)

    def _read(self, found: ChunksFound) -> None:
        if found.number == NO_FETCH:
            return
        key, fetch = key_of(found.envelope), self.fetches.get(found.number)
        is_open = fetch is not None and fetch.question is not None and fetch.question.is_open
        if fetch is None or is_open or key != (fetch.peer.node_id, fetch.peer.epoch):
            self._tell_read(sender_of(found.envelope), found.number)  # the fetch was given up
            return
        if fetch.is_reading:
            return  # the question or the answer came twice; the lease is in use
        peer = self.peers.of(key)
        peer.memory = found.memory or peer.memory
        which = which_of(found, len(fetch.room.keys))
        slots = found.slots[: len(which)]
        if not self._is_readable(peer.memory, slots):
            which = []
        self._keep_only(fetch, which)
        if not which or peer.memory is None:
            self._tell_read(fetch.peer, found.number)
            self._end(found.number)
            return
        peer.answers_per_s.observe(1, self._clock() - fetch.asked_at)
        fetch.is_reading = True
        fetch.generation = found.envelope.generation
        until = fetch.asked_at + LEASE_S * (1 - SAFETY)
        here, there = self._places(fetch.room.slots), self._places(slots)
        self._exchange.read(
            RemoteRead(
                found.number,
                key,
                peer.memory,
                here,
                there,
                until,
                not fetch.for_mirror,
                self._factor,
                fetch.checksum_every,
                found.checksums,
            )
        )

    def _keep_only(self, fetch: Fetch, which: Sequence[int], *, answered: bool = True) -> None:
        """The chunks of the fetch other than `which` do not come."""
        keys, slots = fetch.room.keys, fetch.room.slots
        others = sorted(set(range(len(keys))).difference(which))
        absent = StoreRoom([keys[i] for i in others], [slots[i] for i in others])
        fetch.room = StoreRoom([keys[i] for i in which], [slots[i] for i in which])
        self._manager.complete_store(absent, written=False)
        self._expect_no_more(fetch.number, absent.keys)
        if fetch.for_mirror:
            peer = self.peers.of(PeerKey(fetch.peer.node_id, fetch.peer.epoch))
            peer.ask_again(absent.keys, {key: fetch.asked.get(key, 0) + answered for key in absent.keys})

    def _is_readable(self, memory: CacheMemory | None, slots: Sequence[int]) -> bool:
        """Checks what a peer says before memory is touched."""
        if memory is None or memory.block_bytes * self._factor != self._chunk_bytes:
            return False
        end = memory.base_address + memory.num_blocks * memory.block_bytes
        if not 0 <= memory.base_address <= end <= ADDRESS_SPACE or not 0 <= memory.device_id < MAX_DEVICES:
            return False
        if memory.num_blocks > MAX_PLACES:
            return False
        return all(0 <= slot < memory.num_blocks // self._factor for slot in slots)

    def _places(self, slots: Sequence[int]) -> list[int]:
        return [place for slot in slots for place in range(slot * self._factor, (slot + 1) * self._factor)]

    def _tell_read(self, peer: PeerAddress, number: int) -> None:
        self._exchange.send(peer, ChunksRead(self._exchange.envelope(peer.epoch), number))

    def _end_reading(self, ended: RemoteReadEnded) -> None:
        fetch = self.fetches[ended.number]
        key = PeerKey(fetch.peer.node_id, fetch.peer.epoch)
        right = ended.right and fetch.generation >= self.peers.of(key).generation
        self._manager.complete_store(fetch.room, written=right)
        self._tell_read(fetch.peer, ended.number)
        self.recorder.checked(ended.checked)
        if ended.wrong:
            self.peers.was_wrong(fetch.peer.node_id, ended.wrong)
        if right:
            num_bytes = len(fetch.room.keys) * self._chunk_bytes
            self.peers.of(key).bytes_per_s.observe(num_bytes, ended.seconds)
            self._sources.took(fetch.peer, fetch.generation)
            if fetch.for_mirror:
                self.mirrored_bytes += num_bytes
            else:
                self.fetched_bytes += num_bytes
        elif fetch.for_mirror and not ended.wrong:
            self.peers.of(key).ask_again(fetch.room.keys, fetch.asked)
        self._end(ended.number)

    def _expect_no_more(self, number: int, keys: Sequence[Key]) -> None:
        """The fetch brings these keys no more. If the tier has forgotten everything, another fetch may bring them."""
        for key in keys:
            if self._arriving.get(key) == number:
                del self._arriving[key]

    def _give_up(self, number: int) -> None:
        """Ends a fetch of which nothing is being read."""
        self._keep_only(self.fetches[number], [], answered=False)
        self._end(number)

    def _end(self, number: int) -> None:
        fetch = self.fetches.pop(number)
        self._expect_no_more(number, fetch.room.keys)
        following = next((other for other in fetch.others if other in self.fetches), None)
        for request_id in fetch.requests:
            del self._waiting[request_id]
            if following is not None:
                self._waiting[request_id] = following
                self.fetches[following].requests.add(request_id)

    def _copy(self, stored: ChunksStored) -> None:
        if not self._mirror:
            return
        sender = sender_of(stored.envelope)
        peer = self.peers.of(key_of(stored.envelope))
        gone = set(stored.gone)
        self._manager.forget(gone)
        asked, peer.missed = peer.missed, {}
        keys = [key for key in (*asked, *stored.keys) if key not in gone]
        of_sender = [fetch for fetch in self.fetches.values() if fetch.for_mirror and fetch.peer == sender]
        number = None
        if len(of_sender) < MAX_MIRROR_FETCHES:
            number = self._fetch(sender, keys, for_mirror=True)
        if number is None:
            peer.ask_again([key for key in keys if not self._manager.lookup((key,))], asked)
        else:
            self.fetches[number].asked = asked

    # ── what must be forgotten ──

    def forget_all(self) -> None:
        """Forgets everything, and tells peers that what they have copied from here is of an earlier generation."""
        self._manager.reset()
        self._exchange.begin_generation()
        self._sources.clear()
        self.distrusted = ""
        self.lender.tell_forgotten()

    def _hear(self, envelope: Envelope) -> None:
        """Learns the generation of a peer's cache. If KV of an earlier one is here, all that is here may be computed from it. If none
        is, nothing needs to be forgotten: else two nodes would make each other forget for ever."""
        key = key_of(envelope)
        self.peers.hear(key, envelope.generation)
        if self._sources.hear(key, envelope.generation):
            self.distrusted = f"{key.node_id} distrusts its own cache, from which blocks were copied"

    def close(self) -> None:
        self._exchange.close()

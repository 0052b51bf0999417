"""Nodes that share their tiers, without threads and sockets: messages are lost, duplicated and late, reads take any time, and nodes are
started again. A chunk that a tier calls ready always has the KV of its key."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.scheduling.output import CachedRequestData, SchedulerOutput
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.config import EvictionPolicy
from tandem.kvtransfer.offload.exchange import ChecksummedAnswer, Event, RemoteRead, RemoteReadEnded
from tandem.kvtransfer.offload.fetches import RATE_LASTS_S
from tandem.kvtransfer.offload.manager import SlotManager, TierManager
from tandem.kvtransfer.offload.prefixes import Prefixes
from tandem.kvtransfer.offload.scheduler_half import TierScheduler
from tandem.kvtransfer.offload.sharing import ANSWER_S, TierSharing
from tandem.kvtransfer.offload.spec import Copy, Mover, Tier
from tandem.kvtransfer.protocol.checksums import SAMPLE_EVERY
from tandem.kvtransfer.protocol.side import Identity
from tandem.kvtransfer.sources import KVSources
from tandem.wire.handoff import CacheMemory
from tandem.wire.nodes import PeerAddress
from tandem.wire.requests import CachePeers
from tandem.wire.sharing import LEASE_S, AskChunks, SharingMessage
from tests.kvtransfer.offload.test_tier_prefixes import (
    BLOCK,
    BLOCKS,
    STATES,
    WHOLE,
    a_request,
    key_of,
    parts_of,
    suffices,
)

SLOTS = 12
CHUNK_BYTES = 1000
CHUNK_TOKENS = 16
FULL = KVCacheGroup(AttentionKind.FULL, BLOCK, (0,))


@dataclasses.dataclass
class Asker:
    """As much of a request as sharing looks at."""

    request_id: str
    cache_peers: CachePeers | None = None
    block_hashes: Sequence[bytes] = ()


class FakeExchange:
    """Messages and reads lie in the world until it moves them."""

    def __init__(self, world: World, node: FakeNode) -> None:
        self._world = world
        self._node = node
        self._me = Identity(node.name, node.epoch, f"tcp://{node.name}")
        self.endpoint = self._me.endpoint
        self.epoch = node.epoch
        self.memory = CacheMemory(b"", "DRAM", 0, 0, world.slots, CHUNK_BYTES)
        self.events: list[Event] = []
        self.envelope = self._me.envelope
        self.sources: KVSources | None = None

    def begin_generation(self) -> None:
        self._me.generation += 1

    def send(self, peer: PeerAddress, message: SharingMessage) -> None:
        self._world.mail.append((peer.node_id, message))

    def answer(self, answer: ChecksummedAnswer) -> None:
        self.send(answer.peer, answer.found)

    def read(self, reading: RemoteRead) -> None:
        owner = self._world.nodes[reading.peer.node_id]
        # An earlier incarnation's memory is gone: the transport fails.
        seen = [owner.content.get(slot) for slot in reading.there] if owner.epoch == reading.peer.epoch else None
        self._world.reads.append((self._node, reading, seen))

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def close(self) -> None: ...


class FakeNode:
    epochs = itertools.count(1)

    def __init__(self, world: World, name: str, policy: EvictionPolicy, layout: str = "l") -> None:
        self.name = name
        self.epoch = next(self.epochs)
        self.manager = SlotManager(world.slots, policy)
        self.content: dict[int, bytes] = {}
        self.exchange = FakeExchange(world, self)
        self.sources = KVSources(lambda: world.now)
        self.sharing = TierSharing(
            self.manager,
            self.exchange,  # type: ignore[arg-type]
            Prefixes(world.groups, 1),
            layout=layout,
            block_factor=1,
            chunk_bytes=CHUNK_BYTES,
            chunk_tokens=CHUNK_TOKENS,
            remote=True,
            mirror=True,
            sources=self.sources,
            clock=lambda: world.now,
        )

    def turn(self) -> None:
        self.sharing.turn()
        if self.sharing.distrusted:  # the engine begins a new generation of the whole cache
            self.sharing.forget_all()

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.name, self.epoch, self.exchange.endpoint)

    def store(self, keys: list[bytes]) -> None:
        room = self.manager.prepare_store(keys)
        if room is not None:
            self.content.update(zip(room.slots, room.keys, strict=True))
            self.manager.complete_store(room, written=True)

    def check(self) -> None:
        self.manager.check_integrity()
        for key in self.manager.policy.all_keys():
            if self.manager.lookup([key]):
                slot = self.manager.policy.get(key)
                assert slot is not None
                assert self.content[slot] == key, f"{self.name} would load another chunk"


class World:
    def __init__(
        self,
        names: str = "ab",
        policy: EvictionPolicy = EvictionPolicy.LRU,
        groups: Sequence[KVCacheGroup] = (FULL,),
        slots: int = SLOTS,
    ) -> None:
        self.now = 100.0
        self.slots = slots
        self.groups = groups
        self.policy = policy
        self.mail: list[tuple[str, SharingMessage]] = []
        self.reads: list[tuple[FakeNode, RemoteRead, list[bytes | None] | None]] = []
        self.nodes: dict[str, FakeNode] = {}
        for name in names:
            self.start(name)

    def start(self, name: str, layout: str = "l") -> None:
        self.nodes[name] = FakeNode(self, name, self.policy, layout)
        self.reads = [read for read in self.reads if read[0].name != name]

    def deliver(self, index: int = 0) -> None:
        name, message = self.mail.pop(index)
        self.nodes[name].exchange.events.append(message)
        self.nodes[name].turn()

    def end_read(self, index: int = 0, *, fails: bool = False, wrong: str = "") -> None:
        node, reading, seen = self.reads.pop(index)
        owner = self.nodes[reading.peer.node_id]
        right = not (fails or wrong) and seen is not None and self.now < reading.until
        if right and owner.epoch == reading.peer.epoch:
            assert seen == [owner.content.get(slot) for slot in reading.there], "written to while it is read"
        for slot, content in zip(reading.here, seen or [b"?"] * len(reading.here), strict=True):
            node.content[slot] = content or b"?"
        node.exchange.events.append(RemoteReadEnded(reading.number, right, 0.1, 0, wrong))
        node.turn()

    def settle(self) -> None:
        while self.mail or self.reads:
            if self.mail:
                self.deliver()
            else:
                self.end_read()


def world_with(stored: list[bytes], **options: Any) -> tuple[World, FakeNode, FakeNode]:
    """Nodes a and b; a has stored these."""
    world = World(**options)
    a, b = world.nodes["a"], world.nodes["b"]
    a.store(stored)
    return world, a, b


def keys(count: int, family: str = "p") -> list[bytes]:
    return [f"{family}{i}".encode() for i in range(count)]


def test_what_a_peer_has_without_a_gap_is_copied() -> None:
    world, a, b = world_with(keys(5))
    request = Asker("r", CachePeers(source=a.address))
    assert b.sharing.begin_fetch(request, keys(8))  # type: ignore[arg-type]
    assert b.sharing.is_fetching("r")
    other = Asker("s")
    assert b.sharing.begin_fetch(other, keys(8)), "it waits for the same chunks"  # type: ignore[arg-type]
    world.settle()
    assert not b.sharing.is_fetching("r")
    assert not b.sharing.is_fetching("s")
    assert b.manager.lookup(keys(8)) == 5
    assert b.sharing.fetched_bytes == 5 * CHUNK_BYTES
    b.check()
    assert not a.sharing.lender.num_leases


def test_what_arrived_wrong_is_not_kept_and_its_owner_is_trusted_less_and_then_left_out() -> None:
    world, a, b = world_with(keys(4))
    every = []
    for number in range(3):
        assert b.sharing.begin_fetch(Asker(f"r{number}", CachePeers(source=a.address)), keys(4))  # type: ignore[arg-type]
        while world.mail:
            if isinstance(message := world.mail[0][1], AskChunks):
                every.append(message.checksum_every)
            world.deliver()
        world.end_read(wrong="chunk 1 arrived with other bytes than were sent")
        world.settle()
        assert not b.sharing.is_fetching(f"r{number}")
        assert b.manager.lookup(keys(4)) == 0
    assert every == [SAMPLE_EVERY, 1, 1]
    stats = b.sharing.recorder.snapshot(0)
    assert stats.wrong_kv == {"a": 3}
    assert stats.left_out == ["a"]
    late = Asker("r3", CachePeers(source=a.address))
    assert not b.sharing.begin_fetch(late, keys(4)), "it is left out"  # type: ignore[arg-type]
    world.now += 601
    assert b.sharing.begin_fetch(late, keys(4))  # type: ignore[arg-type]
    assert not a.sharing.lender.num_leases


def test_it_is_computed_where_that_was_seen_to_be_faster() -> None:
    """Both ways, and again when what was seen is old."""
    world, a, b = world_with(keys(10))

    def fetches(name: str, family: list[bytes]) -> bool:
        return b.sharing.begin_fetch(Asker(name, CachePeers(source=a.address)), family)  # type: ignore[arg-type]

    def compute(tokens_per_s: float) -> None:
        b.sharing.peers.planned(1000)
        world.now += 1000 / tokens_per_s
        b.sharing.peers.booked()

    compute(100.0)
    assert fetches("r0", keys(2)), "nothing is known of the link"
    world.now += 0.01
    world.settle()  # 2,000 bytes in 0.1 s, after an answer that took 0.01 s
    # Six chunks take 0.01 + 0.3 s to copy, and 0.96 s to compute.
    assert fetches("r1", keys(8)[2:])
    world.settle()
    b.manager.reset()
    for _ in range(12):
        compute(2000.0)
    assert not fetches("r2", keys(6))
    world.now += RATE_LASTS_S
    assert fetches("r3", keys(6)), "what was measured is too old"


class SharedMover(Mover):
    """Of a tier whose copies no test here makes."""

    stored_bytes = loaded_bytes = 0

    def submit(self, stores: Sequence[Copy], loads: Sequence[Copy]) -> None: ...
    def take_ended(self) -> dict[int, bool | None]:
        return {}

    def close(self) -> None: ...


class SharedSpec:
    name = "cpu"

    def __init__(self, node: FakeNode) -> None:
        self._node = node

    def open(self, memory: KVCacheMemory, wake: Callable[[], None]) -> tuple[TierManager, Mover]:
        return self._node.manager, SharedMover()


def half_of(node: FakeNode) -> TierScheduler:
    """What the engine's scheduler talks to."""
    tier = Tier(SharedSpec(node), 1, sharing=node.sharing)
    tier.open(KVCacheMemory(torch.zeros(4, 2, 2, 3, BLOCK, 8), "m", 2, 1, 100), lambda: None)
    return TierScheduler((FULL,), tier)


def test_a_request_that_ran_while_chunks_came_for_it_may_wait_for_others_once_it_is_preempted() -> None:
    world = World()
    a, b = world.nodes["a"], world.nodes["b"]
    half, request = half_of(b), a_request()
    request.cache_peers = CachePeers(source=a.address)
    a.store(list(request.block_hashes[:2]))
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) == (None, False)
    while world.mail:
        world.deliver()
    # Another request has computed all of it meanwhile, so it runs. The first two chunks are still on their way.
    found = request.num_tokens - BLOCK
    assert half.get_num_new_matched_tokens(request, found) == (0, False)
    half.update_state_after_alloc(request, [list(range(1, 8))], 0)
    for token in range(2 * BLOCK):
        request.append_output_token(token)
    half.build_connector_meta(SchedulerOutput([], CachedRequestData(), {}, 0, {}, set(), {"r"}))
    assert half.get_num_new_matched_tokens(request, found) == (None, False), "it asks for what it has written since"
    world.settle()
    assert half.get_num_new_matched_tokens(request, found) == (0, False)
    assert b.manager.lookup(request.block_hashes[:2]) == 2
    b.check()


def test_silence_costs_a_second_and_what_comes_too_late_is_let_go() -> None:
    world, a, b = world_with(keys(5))
    assert b.sharing.begin_fetch(Asker("r", CachePeers(source=a.address)), keys(5))  # type: ignore[arg-type]
    world.now += ANSWER_S
    assert not b.sharing.is_fetching("r")
    assert b.manager.used == 0
    world.deliver()
    assert a.sharing.lender.num_leases
    world.settle()
    assert not a.sharing.lender.num_leases
    assert b.manager.lookup(keys(5)) == 0


@pytest.mark.parametrize("doubled", ["question", "answer"])
def test_what_comes_twice_ends_no_lease_under_which_is_read(doubled: str) -> None:
    world, a, b = world_with(keys(3))
    assert b.sharing.begin_fetch(Asker("r", CachePeers(source=a.address)), keys(3))  # type: ignore[arg-type]
    if doubled == "answer":
        world.deliver()
    world.mail *= 2
    while world.mail:
        world.deliver()
    a.store(keys(SLOTS, "another prompt's"))
    world.settle()
    assert b.manager.lookup(keys(3)) == 3
    b.check()
    assert not a.sharing.lender.num_leases


def test_a_reader_that_was_away_when_a_tier_was_distrusted_learns_it_from_the_next_message() -> None:
    world, a, b = world_with(keys(3))
    assert b.sharing.begin_fetch(Asker("r", CachePeers(source=a.address)), keys(3))  # type: ignore[arg-type]
    world.settle()
    a.sharing.forget_all()
    world.mail.clear()  # b does not hear of it
    assert b.manager.used == 3
    assert b.sources.to_ask() == [a.address]
    a.store(keys(1, "other"))
    assert b.sharing.begin_fetch(Asker("s", CachePeers(source=a.address)), keys(1, "other"))  # type: ignore[arg-type]
    world.settle()
    assert b.manager.lookup(keys(3)) == 0
    assert b.sources.to_ask() in ([], [a.address])


def test_other_layouts_and_places_that_are_not_there_are_refused() -> None:
    world = World()
    world.start("b", layout="another")
    a, b = world.nodes["a"], world.nodes["b"]
    a.store(keys(3))
    assert b.sharing.begin_fetch(Asker("r", CachePeers(source=a.address)), keys(3))  # type: ignore[arg-type]
    world.settle()
    assert b.manager.used == 0
    world, a, b = world_with(keys(3))
    a.exchange.memory = CacheMemory(b"", "DRAM", 0, 0, 1, CHUNK_BYTES)  # it names slots beyond it
    assert b.sharing.begin_fetch(Asker("s", CachePeers(source=a.address)), keys(3))  # type: ignore[arg-type]
    world.settle()
    assert b.manager.used == 0
    assert not world.reads


@pytest.mark.parametrize(
    "wrong", [{"num_blocks": 1 << 50}, {"base_address": -5}, {"base_address": 1 << 63}, {"device_id": -1}]
)
def test_memory_that_cannot_be_is_not_connected_to(wrong: dict[str, int]) -> None:
    world, a, b = world_with(keys(3))
    a.exchange.memory = msgspec.structs.replace(a.exchange.memory, **wrong)
    assert b.sharing.begin_fetch(Asker("s", CachePeers(source=a.address)), keys(3))  # type: ignore[arg-type]
    while world.mail:
        world.deliver()
    assert not world.reads
    assert not b.sharing.is_fetching("s")
    assert b.manager.used == 0


def run(number: int) -> int:
    draw = random.Random(number)
    groups = (FULL,) if number % 2 else (FULL, KVCacheGroup(AttentionKind.SLIDING, BLOCK, (1,), 9), STATES)
    world = World("abc", draw.choice(list(EvictionPolicy)), groups)
    prefixes, every = Prefixes(groups, 1), parts_of(groups)
    requests = itertools.count()
    waiting: list[tuple[FakeNode, str]] = []
    copied = 0
    for _ in range(draw.choice([50, 300])):
        node, peer = draw.sample(list(world.nodes.values()), 2)
        family = keys(draw.randrange(1, 8), draw.choice("pq"))
        match draw.randrange(14):
            case 0 | 1 if not prefixes.needs_every_block:
                node.store([key_of(prefixes, groups, part) for part in draw.sample(every, 9)])
            case 0 | 1:
                node.store(family)
            case 2 | 3 if not prefixes.needs_every_block:
                name = f"r{next(requests)}"
                asks: Any = Asker(name, CachePeers(source=peer.address), WHOLE.block_hashes)
                first = draw.randrange(BLOCKS)
                end = prefixes.end_of_prefix(node.manager, asks, first, BLOCKS)
                if end < BLOCKS and node.sharing.ask_for_prefix(asks, first, end, BLOCKS):
                    waiting.append((node, name))
            case 2 | 3:
                name = f"r{next(requests)}"
                request: Any = Asker(name, CachePeers(source=peer.address))
                missing = family[node.manager.lookup(family) :]
                if missing and node.sharing.begin_fetch(request, missing):
                    waiting.append((node, name))
            case 4:
                announced: Any = Asker("m", CachePeers(mirror=peer.address))
                node.sharing.mirrors.stored(announced, family, keys(8)[draw.randrange(9) :])
                node.sharing.mirrors.tell()
            case 5:
                world.now += draw.choice([0.1, 0.5, 2.0, 8.0])
            case 6 if world.mail:
                index = draw.randrange(len(world.mail))
                if draw.random() < 0.5:
                    del world.mail[index]
                else:
                    world.mail.append(world.mail[index])
            case 7 if world.reads:
                world.end_read(draw.randrange(len(world.reads)), fails=draw.random() < 0.2)
            case 8 if draw.random() < 0.1:
                world.start(node.name)
            case 9 if draw.random() < 0.2:
                node.sharing.forget_all()
            case 10 if waiting:
                asker, name = waiting.pop(draw.randrange(len(waiting)))
                if draw.random() < 0.5:
                    asker.sharing.stop_waiting(name)
                elif asker.sharing.is_fetching(name):
                    waiting.append((asker, name))
            case _:
                if world.mail:
                    world.deliver(draw.randrange(len(world.mail)))
        for each in world.nodes.values():
            each.check()
            if not prefixes.needs_every_block:
                first = draw.randrange(BLOCKS)
                end = prefixes.end_of_prefix(each.manager, WHOLE, first, BLOCKS)
                there = {part for part in every if each.manager.lookup([key_of(prefixes, groups, part)])}
                assert end == first or suffices(groups, there, first, end), "a group lacks its part"
    world.settle()
    for _ in range(2):
        world.now += LEASE_S
        for each in world.nodes.values():
            each.turn()
        world.settle()
    for each in world.nodes.values():
        each.check()
        sharing = each.sharing
        left = [sharing.lender.num_leases, sharing.fetches]
        assert not any(left)
        assert not any(each.manager.busy), "a slot is in use by nothing"
        copied += sharing.fetched_bytes + sharing.mirrored_bytes
    return copied // CHUNK_BYTES


def test_whatever_is_lost_or_late_no_tier_has_another_chunk_than_it_says() -> None:
    assert sum(map(run, range(50))) > 100

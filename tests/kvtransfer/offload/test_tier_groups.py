"""Shared tiers for models whose groups of layers need different parts of a prefix: attention windows, chunks, recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.kvtransfer.offload.fetches import MAX_ASKED
from tandem.kvtransfer.offload.prefixes import Prefixes
from tandem.kvtransfer.offload.sharing import ANSWER_S, MAX_MIRROR_FETCHES
from tandem.kvtransfer.protocol.side import PeerKey
from tandem.wire.requests import CachePeers
from tandem.wire.sharing import AskChunks, ChunksFound, PrefixFound
from tests.kvtransfer.offload.test_tier_prefixes import (
    BLOCK,
    BLOCKS,
    FULL,
    GROUPS,
    STATES,
    WHOLE,
    Part,
    key_of,
    parts_of,
    suffices,
)
from tests.kvtransfer.offload.test_tier_sharing import CHUNK_BYTES, Asker, World, keys, world_with


def with_parts(groups: Sequence[KVCacheGroup], *parts: set[Part]) -> tuple[World, Prefixes]:
    """A world whose nodes have these parts of one prompt."""
    world = World("ab"[: len(parts)], groups=groups, slots=200)
    prefixes = Prefixes(groups, 1)
    for node, there in zip(world.nodes.values(), parts, strict=True):
        node.store([key_of(prefixes, groups, part) for part in sorted(there)])
    return world, prefixes


@pytest.mark.parametrize("groups", GROUPS, ids=range(len(GROUPS)))
@settings(max_examples=20)
@given(data=st.data())
def test_what_is_copied_is_the_longest_prefix_that_all_groups_have_here_or_there(
    groups: tuple[KVCacheGroup, ...], data: st.DataObject
) -> None:
    every = parts_of(groups)
    some = st.sets(st.sampled_from(every), max_size=6)
    theirs, mine = set(every) - data.draw(some), data.draw(some)
    first = data.draw(st.integers(0, BLOCKS - 1))
    last = data.draw(st.integers(first + 1, BLOCKS))
    world, prefixes = with_parts(groups, theirs, mine)
    a, b = world.nodes["a"], world.nodes["b"]
    request: Any = Asker("r", CachePeers(source=a.address), WHOLE.block_hashes)
    end = prefixes.end_of_prefix(b.manager, request, first, last)
    before = b.manager.used
    if end < last:
        assert b.sharing.ask_for_prefix(request, first, end, last)
        world.settle()
    b.check()
    # A state of which the peer has not got all is none.
    broken = {(index, place) for index, place, _ in set(every) - theirs}
    usable = {(index, place, number) for index, place, number in theirs if (index, place) not in broken}
    together = [e for e in range(first + 1, last + 1) if suffices(groups, usable | mine, first, e)]
    found = prefixes.end_of_prefix(b.manager, request, first, last)
    assert found == max(together, default=first)
    copied = b.manager.used - before
    if copied:
        loaded = [key for part in prefixes.to_load(request, first, found) for key in part.keys]
        had = {key_of(prefixes, groups, part) for part in mine}
        assert copied == len(set(loaded) - had), "nothing else is copied"
    left = [a.sharing.lender.num_leases, b.sharing.fetches]
    assert not any(left)


def test_whether_it_pays_is_decided_by_all_that_has_to_move() -> None:
    """The states after a short prefix take longer to copy than the prefix takes to compute."""
    groups = (FULL, KVCacheGroup(AttentionKind.STATE, BLOCK, (1,), blocks_per_request=40))
    world, prefixes = with_parts(groups, set(parts_of((groups[0],))), set())
    a, b = world.nodes["a"], world.nodes["b"]
    for end in (2, BLOCKS):
        a.store(prefixes.state_keys(WHOLE, end))
    for _ in range(20):
        b.sharing.peers.planned(1000)
        world.now += 1.0
        b.sharing.peers.booked()
        peer = b.sharing.peers.of(PeerKey("a", a.epoch))
        peer.bytes_per_s.observe(600 * CHUNK_BYTES, 1.0)
        peer.answers_per_s.observe(1, 1e-4)
    short: Any = Asker("r", CachePeers(source=a.address), WHOLE.block_hashes)
    assert b.sharing.ask_for_prefix(short, 0, 0, 2)
    world.settle()
    assert (b.manager.used, b.sharing.fetched_bytes) == (0, 0), "42 chunks for 32 tokens"
    assert not b.sharing.is_fetching("r")
    whole: Any = Asker("s", CachePeers(source=a.address), WHOLE.block_hashes)
    assert b.sharing.ask_for_prefix(whole, 0, 0, BLOCKS)
    world.settle()
    assert b.manager.used == BLOCKS + 40, "46 chunks for 96 tokens do"


def test_two_requests_that_share_a_beginning_wait_for_what_either_copies() -> None:
    groups = (FULL, STATES)
    world, prefixes = with_parts(groups, set(parts_of(groups)), set())
    a, b = world.nodes["a"], world.nodes["b"]
    hashes = WHOLE.block_hashes
    peers = CachePeers(source=a.address)
    one: Any = Asker("one", peers, hashes)
    same: Any = Asker("same", peers, hashes)
    short: Any = Asker("short", peers, hashes[: BLOCKS - 2])
    assert b.sharing.ask_for_prefix(one, 0, 0, BLOCKS)
    assert b.sharing.ask_for_prefix(same, 0, 0, BLOCKS)
    assert b.sharing.ask_for_prefix(short, 0, 0, BLOCKS - 2)
    assert len(world.mail) == 2, "the second waits for the first one's answer"
    while world.mail:
        world.deliver()
    world.end_read(1)  # the states of the short one are here, and not yet the blocks before them
    assert b.sharing.is_fetching("short")
    world.settle()
    assert not any(b.sharing.is_fetching(name) for name in ("one", "same", "short"))
    for request in (one, same, short):
        last = len(request.block_hashes)
        assert prefixes.end_of_prefix(b.manager, request, 0, last) == last


@pytest.mark.parametrize("has", [[], [b"", b""], [b"\xff"], [b"\xff" * 9] * 2])
def test_an_answer_that_is_not_of_the_question_copies_nothing(has: list[bytes]) -> None:
    world, _ = with_parts((FULL, STATES), set(), set())
    a, b = world.nodes["a"], world.nodes["b"]
    request: Any = Asker("r", CachePeers(source=a.address), WHOLE.block_hashes)
    assert b.sharing.ask_for_prefix(request, 0, 0, BLOCKS)
    number = next(iter(b.sharing.fetches))
    world.mail = [("b", PrefixFound(a.exchange.envelope(b.epoch), number, has))] * 2
    world.settle()
    assert not b.sharing.is_fetching("r")
    assert b.manager.used == 0


# ── mirrors ──


def tell(world: World, stored: list[bytes], gone: list[bytes] | None = None) -> None:
    a, b = world.nodes["a"], world.nodes["b"]
    request: Any = Asker("r", CachePeers(mirror=b.address))
    a.sharing.mirrors.stored(request, stored, gone or [])
    a.sharing.mirrors.tell()


def test_what_was_not_answered_or_not_read_is_asked_for_again() -> None:
    """However often: without it all that comes after it is worth nothing."""
    world, _, b = world_with(keys(3))
    tell(world, keys(1))
    for _ in range(2 * MAX_ASKED):
        world.deliver()  # what is stored; the question is lost
        world.mail.clear()
        world.now += ANSWER_S
        b.sharing.turn()
        tell(world, [])
    world.deliver()
    world.deliver()
    world.deliver()
    world.end_read(fails=True)
    assert b.manager.lookup(keys(3)) == 0
    tell(world, keys(3)[1:])
    world.settle()
    assert b.manager.lookup(keys(3)) == 3


def test_a_mirror_passes_over_what_its_neighbour_has_given_up_and_asks_for_it_a_few_times() -> None:
    world = World(slots=40)
    a, b = world.nodes["a"], world.nodes["b"]
    asked = []
    for number, key in enumerate(keys(MAX_ASKED + 4)):
        if number != 2:
            a.store([key])
        tell(world, [key])
        while world.mail:
            if isinstance(message := world.mail[0][1], AskChunks):
                asked.append(message.keys)
            world.deliver()
        world.settle()
    assert b.manager.lookup(keys(20)) == 2
    assert b.manager.lookup(keys(20)[3:]) == MAX_ASKED + 1
    assert sum(keys(20)[2] in each for each in asked) == MAX_ASKED
    assert not b.sharing.peers.of(PeerKey("a", a.epoch)).missed


def test_what_an_answer_has_left_behind_is_given_up_by_its_mirror() -> None:
    world, _, b = world_with(keys(6))
    tell(world, keys(3))
    world.settle()
    tell(world, keys(6)[3:5], gone=keys(6)[1:2])
    world.settle()
    assert [b.manager.lookup([key]) for key in keys(6)] == [1, 0, 1, 1, 1, 0]
    tell(world, keys(6)[5:])
    world.deliver()
    world.deliver()
    tell(world, [], gone=keys(6)[5:])  # while it is read
    world.deliver(next(i for i, (name, _) in enumerate(world.mail) if name == "b"))
    world.settle()
    assert b.manager.lookup(keys(6)[5:]) == 0
    b.check()


def test_a_mirror_that_is_slower_than_its_neighbour_takes_no_more_room_for_what_it_waits_for() -> None:
    world, _, b = world_with(keys(10))
    for key in keys(10):
        tell(world, [key])
        world.deliver()
    assert len(b.sharing.fetches) == b.manager.used == MAX_MIRROR_FETCHES
    world.settle()
    tell(world, [])
    world.settle()
    assert b.manager.lookup(keys(10)) == 10


@pytest.mark.parametrize(
    ("which", "there"),
    [(None, 3), ([0, 1, 4], 3), ([0, 0, 1], 0), ([1, 0, 2], 0), ([-1, 0, 1], 0), ([0, 1, 9], 0), ([0, 1], 0)],
)
def test_which_chunks_a_peer_has_is_believed_only_where_it_makes_sense(which: list[int] | None, there: int) -> None:
    """None is said by a node of the version before, which answers up to the first that it lacks."""
    world, _, b = world_with(keys(5))
    tell(world, keys(5))
    world.deliver()
    world.deliver()
    (name, found), *_ = world.mail
    assert isinstance(found, ChunksFound)
    assert found.which == [0, 1, 2, 3, 4]
    named = which if which and there else range(3)
    slots = [found.slots[i] for i in named]
    world.mail = [(name, msgspec.structs.replace(found, slots=slots, which=which))]
    world.settle()
    assert sum(b.manager.lookup([key]) for key in keys(5)) == there
    b.check()
    assert not b.sharing.fetches

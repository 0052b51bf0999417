"""A tier has as much of a prefix as all groups of layers have, and no more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.cache.hashing import make_block_hasher
from tandem.engine.config import HashAlgorithm
from tandem.engine.request import Request
from tandem.kvtransfer.config import EvictionPolicy
from tandem.kvtransfer.offload.manager import SlotManager
from tandem.kvtransfer.offload.prefixes import Prefixes
from tests.engine.made_requests import made_request

BLOCK = 4
BLOCKS = 6
FULL = KVCacheGroup(AttentionKind.FULL, BLOCK, (0,))
HASHER = make_block_hasher(HashAlgorithm.SHA256, BLOCK, "tests")
STATES = KVCacheGroup(AttentionKind.STATE, BLOCK, (1,), blocks_per_request=3)


def sliding(window: int) -> KVCacheGroup:
    return KVCacheGroup(AttentionKind.SLIDING, BLOCK, (2,), window)


def chunked(length: int) -> KVCacheGroup:
    return KVCacheGroup(AttentionKind.CHUNKED, BLOCK, (3,), length)


GROUPS = [
    (FULL,),
    (FULL, FULL),
    (sliding(6),),
    (FULL, sliding(9)),
    (FULL, STATES),
    (sliding(6), STATES),
    (STATES,),
    (FULL, sliding(1), sliding(13), STATES),
    (FULL, chunked(9)),
    (chunked(8), sliding(6)),
]


def a_request() -> Request:
    request = made_request("r", range(BLOCKS * BLOCK))
    request.hash_with(HASHER)
    return request


WHOLE = a_request()  # for tests that only read it: hashing takes longer than most of them

Part = tuple[int, int, int]
"""Group, block or end of a prefix, number of a state's block."""


def parts_of(groups: Sequence[KVCacheGroup]) -> list[Part]:
    """All parts of a prompt that a tier may have."""
    return [
        (index, place, number)
        for index, group in enumerate(groups)
        for place in range(BLOCKS)
        for number in range(max(group.blocks_per_request, 1))
    ]


def key_of(prefixes: Prefixes, groups: Sequence[KVCacheGroup], part: Part) -> bytes:
    index, place, number = part
    if groups[index].blocks_per_request:
        return prefixes.state_keys(WHOLE, place + 1)[number]
    return prefixes.keys(WHOLE, index, place, place + 1)[0]


def suffices(groups: Sequence[KVCacheGroup], there: set[Part], first: int, end: int) -> bool:
    """Whether a token after block `end` finds all KV that it reads, in these parts and the device's blocks before `first`."""
    for index, group in enumerate(groups):
        if group.kind is AttentionKind.STATE:
            if any((index, end - 1, number) not in there for number in range(group.blocks_per_request)):
                return False
            continue
        oldest = max(end * BLOCK - group.window + 1, 0) if group.window else 0
        if group.kind is AttentionKind.CHUNKED and group.window:
            oldest = end * BLOCK // group.window * group.window
        read = {token // BLOCK for token in range(oldest, end * BLOCK)}
        if any((index, block, 0) not in there for block in read if block >= first):
            return False
    return True


@pytest.mark.parametrize("groups", GROUPS, ids=range(len(GROUPS)))
@settings(max_examples=20)
@given(data=st.data())
def test_a_hit_is_the_longest_that_all_groups_have(groups: tuple[KVCacheGroup, ...], data: st.DataObject) -> None:
    every = parts_of(groups)
    lost = data.draw(st.sets(st.sampled_from(every), max_size=8))
    there = set(every) - lost
    first = data.draw(st.integers(0, BLOCKS - 1))
    last = data.draw(st.integers(first + 1, BLOCKS))
    prefixes, manager = Prefixes(groups, 1), SlotManager(len(every), EvictionPolicy.LRU)
    room = manager.prepare_store([key_of(prefixes, groups, part) for part in sorted(there)])
    assert room is not None
    assert len(room.keys) == len(there), "two parts have one key"
    assert prefixes.end_of_prefix(manager, WHOLE, first, last) == first, "nothing is written yet"
    manager.complete_store(room, written=True)
    ends = [end for end in range(first + 1, last + 1) if suffices(groups, there, first, end)]
    end = prefixes.end_of_prefix(manager, WHOLE, first, last)
    assert end == max(ends, default=first)
    if end > first:
        parts = prefixes.to_load(WHOLE, first, end)
        keys = [key for part in parts for key in part.keys]
        assert manager.lookup(keys) == len(keys) == sum(part.end - part.first for part in parts)


def test_a_states_blocks_are_told_from_others_by_their_keys() -> None:
    prefixes = Prefixes((FULL, sliding(6), STATES), 1)
    request = a_request()
    for group in (0, 1):
        found = [prefixes.block_of(key) for key in prefixes.keys(request, group, 2, 3)]
        assert found == [(request.block_hashes[2], group)]
    assert [prefixes.block_of(key) for key in prefixes.state_keys(request, 3)] == [None] * 3
    alone = Prefixes((STATES,), 1)
    assert [alone.block_of(key) for key in alone.state_keys(request, 3)] == [None] * 3


def test_states_that_are_there_stand_beside_the_blocks_that_they_come_after() -> None:
    prefixes, manager = Prefixes((FULL, STATES), 1), SlotManager(20, EvictionPolicy.LRU)
    request = a_request()
    room = manager.prepare_store(prefixes.state_keys(request, 2))
    assert room is not None
    manager.complete_store(room, written=True)
    blocks = list(prefixes.keys(request, 0, 0, BLOCKS))
    assert prefixes.all_keys(manager, request) == [*blocks[:2], *prefixes.state_keys(request, 2), *blocks[2:]]

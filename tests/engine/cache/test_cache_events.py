"""A follower of the events knows which blocks are cached."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.cache.group_manager import KVCacheGroup
from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.cache.pool import CacheEvents
from tandem.engine.request import Request
from tandem.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.engine.cache.tables import BLOCK, FULL, HASHER, admit, decode, manager, request, sliding


class Follower:
    """Holds what the events say, and each block's tokens by its hash."""

    def __init__(self, groups: int) -> None:
        self.cached: list[set[bytes]] = [set() for _ in range(groups)]

    def follow(self, cache: KVCacheManager) -> None:
        assert cache.pool.events is not None
        for event in cache.pool.events.take():
            match event:
                case BlockStored():
                    there = self.cached[event.group_idx or 0]
                    assert there.isdisjoint(event.block_hashes)
                    there.update(event.block_hashes)
                    self._check_hashes(event)
                case BlockRemoved():
                    there = self.cached[event.group_idx or 0]
                    assert there.issuperset(event.block_hashes)
                    there.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    for there in self.cached:
                        there.clear()
        assert self.cached == [set(each) for each in cache.pool.cached]

    def _check_hashes(self, event: BlockStored) -> None:
        """From the parent and the tokens the hashes follow, where nothing else is in them."""
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        if event.extra_keys is None:
            parent = event.parent_block_hash or HASHER.root
            assert HASHER.hash_blocks(parent, event.token_ids, None) == event.block_hashes


def followed(*groups: KVCacheGroup, num_blocks: int) -> tuple[KVCacheManager, Follower]:
    cache = manager(*groups, num_blocks=num_blocks)
    cache.pool.events = CacheEvents(len(groups))
    return cache, Follower(len(groups))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(FULL,), (FULL, sliding(8))]))
def test_the_events_tell_what_is_cached(seed: int, groups: tuple[KVCacheGroup, ...]) -> None:
    rng = random.Random(seed)
    cache, follower = followed(*groups, num_blocks=24)
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 30))] for _ in range(3)]
    running: list[Request] = []
    for number in range(30):
        if rng.random() < 0.5:
            each = request(f"r{number}", [*rng.choice(prompts), *range(rng.randint(0, 6))])
            if admit(cache, each) is not None:
                running.append(each)
        elif running:
            each = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.3:
                cache.coordinator.forget_after(each.request_id, 0)
            cache.free(each)
        elif rng.random() < 0.3:
            cache.reset_prefix_cache()
        follower.follow(cache)


def test_one_event_for_the_blocks_of_a_chunk_with_what_made_their_hashes() -> None:
    cache, _ = followed(FULL, num_blocks=50)
    assert cache.pool.events is not None
    each = request("a", range(10), cache_salt="s")
    admit(cache, each)
    (stored,) = cache.pool.events.take()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == each.block_hashes[:2]
    assert (stored.parent_block_hash, stored.token_ids) == (None, list(range(8)))
    assert (stored.block_size, stored.medium, stored.extra_keys) == (BLOCK, "GPU", [("salt:s",), None])
    decode(cache, each, 10, 11, 12)
    (stored,) = cache.pool.events.take()
    assert isinstance(stored, BlockStored)
    assert stored.parent_block_hash == each.block_hashes[1]

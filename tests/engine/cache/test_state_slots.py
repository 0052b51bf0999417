"""The blocks of recurrent states: a request needs as many for one token as for a thousand, gets all or none of them, and
they are never in the prefix cache."""

from __future__ import annotations

import pytest

from tandem.base.errors import ConfigurationError, InternalError
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.request import Request
from tandem.wire.sampling import SamplingParams
from tests.engine.made_requests import made_request

FULL = KVCacheGroup(AttentionKind.FULL, 4, (0,))
STATES = KVCacheGroup(AttentionKind.STATE, 4, (1,), blocks_per_request=3)


def manager(num_blocks: int, *groups: KVCacheGroup) -> KVCacheManager:
    return KVCacheManager(groups, num_blocks, caching=False, max_model_len=64, max_new_tokens=16)


def request(name: str, tokens: int) -> Request:
    return made_request(name, range(tokens), SamplingParams(max_tokens=8))


def test_a_request_takes_its_states_with_its_first_token_and_gives_all_back() -> None:
    cache = manager(12, FULL, STATES)
    one = request("a", 9)
    blocks = cache.allocate_slots(one, 1, hits=[[], []])
    assert blocks is not None
    assert [len(table) for table in blocks] == [1, 3]
    one.num_computed_tokens = 1
    grown = cache.extend_slots(one, 8)
    assert grown is not None
    assert [len(table) for table in grown] == [2, 0]
    cache.check_integrity({"a": one})
    cache.free(one)
    assert cache.pool.num_free == cache.pool.num_usable


def test_without_room_for_all_of_its_states_a_request_gets_nothing() -> None:
    cache = manager(8, FULL, STATES)  # seven blocks, and a token needs four
    assert cache.allocate_slots(request("a", 1), 1, hits=[[], []]) is not None
    assert cache.allocate_slots(request("b", 1), 1, hits=[[], []]) is None
    assert cache.pool.num_free == 3
    assert not cache.has_blocks("b")


def test_the_longest_request_leaves_room_for_its_states() -> None:
    assert manager(12, FULL, STATES).max_request_tokens == 4 * (11 - 3)
    assert manager(12, STATES).max_request_tokens == 64


def test_a_state_does_not_go_back() -> None:
    """Only the keys and values of earlier tokens are still there."""
    cache = manager(12, FULL, STATES)
    one = request("a", 9)
    assert cache.allocate_slots(one, 9, hits=[[], []]) is not None
    one.num_computed_tokens = 9
    cache.rewind(one, 8)
    assert one.num_computed_tokens == 0
    assert not cache.has_blocks("a")
    assert cache.pool.num_free == cache.pool.num_usable


def test_a_wrong_block_of_a_state_makes_all_tokens_wrong() -> None:
    cache = manager(12, FULL, STATES)
    one = request("a", 9)
    assert cache.allocate_slots(one, 9, hits=[[], []]) is not None
    tokens, states = cache.block_ids("a")
    assert cache.first_token_in(one, {states[2]}) == 0
    assert cache.first_token_in(one, {tokens[1]}) == 4


def test_a_state_that_lacks_a_block_is_noticed() -> None:
    cache = manager(12, FULL, STATES)
    one = request("a", 5)
    assert cache.allocate_slots(one, 5, hits=[[], []]) is not None
    lost = cache.coordinator.managers[1].tables["a"].pop()
    cache.pool.release([lost])
    with pytest.raises(InternalError, match="has 2 of 3 blocks of states"):
        cache.check_integrity({"a": one})


def test_a_group_of_states_says_how_many_blocks_a_request_has() -> None:
    with pytest.raises(ConfigurationError, match="at least 1 block"):
        manager(12, KVCacheGroup(AttentionKind.STATE, 4, (1,)))

"""The blocks of recurrent states: a request needs as many for one token as for a thousand, gets all or none of them, and
they are never in the prefix cache."""

from __future__ import annotations

import pytest

from tandem.base.errors import ConfigurationError, InternalError
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.request import Request
from tests.engine.cache.tables import FULL, STATES, manager, request


def small(num_blocks: int, *groups: KVCacheGroup) -> KVCacheManager:
    return manager(*groups, num_blocks=num_blocks, caching=False, max_model_len=64, max_new_tokens=16)


def with_states(tokens: int, computed: int) -> tuple[KVCacheManager, Request]:
    """A request of so many tokens in twelve blocks, and its blocks for the first of them."""
    cache, one = small(12, FULL, STATES), request("a", range(tokens))
    assert cache.allocate_slots(one, computed, hits=[[], []]) is not None
    one.num_computed_tokens = computed
    return cache, one


def test_a_request_takes_its_states_with_its_first_token_and_gives_all_back() -> None:
    cache, one = with_states(9, 1)
    assert [len(table) for table in cache.block_ids("a")] == [1, 3]
    grown = cache.extend_slots(one, 8)
    assert grown is not None
    assert [len(table) for table in grown] == [2, 0]
    cache.check_integrity({"a": one})
    cache.free(one)
    assert cache.pool.num_free == cache.pool.num_usable


def test_without_room_for_all_of_its_states_a_request_gets_nothing() -> None:
    cache = small(8, FULL, STATES)  # seven blocks, and a token needs four
    assert cache.allocate_slots(request("a", range(1)), 1, hits=[[], []]) is not None
    assert cache.allocate_slots(request("b", range(1)), 1, hits=[[], []]) is None
    assert cache.pool.num_free == 3
    assert not cache.has_blocks("b")


def test_the_longest_request_leaves_room_for_its_states() -> None:
    assert small(12, FULL, STATES).max_request_tokens == 4 * (11 - 3)
    assert small(12, STATES).max_request_tokens == 64


def test_a_state_does_not_go_back() -> None:
    """Only the keys and values of earlier tokens are still there."""
    cache, one = with_states(9, 9)
    cache.rewind(one, 8)
    assert one.num_computed_tokens == 0
    assert not cache.has_blocks("a")
    assert cache.pool.num_free == cache.pool.num_usable


def test_a_wrong_block_of_a_state_makes_all_tokens_wrong() -> None:
    cache, one = with_states(9, 9)
    tokens, states = cache.block_ids("a")
    assert cache.first_token_in(one, {states[2]}) == 0
    assert cache.first_token_in(one, {tokens[1]}) == 4


def test_a_state_that_lacks_a_block_is_noticed() -> None:
    cache, one = with_states(5, 5)
    cache.pool.release([cache.coordinator.managers[1].tables["a"].pop()])
    with pytest.raises(InternalError, match="has 2 of 3 blocks of states"):
        cache.check_integrity({"a": one})


def test_a_group_of_states_says_how_many_blocks_a_request_has() -> None:
    with pytest.raises(ConfigurationError, match="at least 1 block"):
        small(12, KVCacheGroup(AttentionKind.STATE, 4, (1,)))

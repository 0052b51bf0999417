"""Checkpoints of recurrent states for later prompts: where they are made, found, copied, evicted and dropped."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.request import Request
from tandem.kvtransfer.base import BlockIds, ConnectorMetadata, ScheduledStep, SchedulerConnector
from tests.engine.cache.tables import BLOCK, FULL, STATES, manager
from tests.engine.cache.tables import request as a_request


def a_cache(num_blocks: int = 60, min_tokens: int = BLOCK, num_lookahead_tokens: int = 0) -> KVCacheManager:
    options = {"num_lookahead_tokens": num_lookahead_tokens, "checkpoint_tokens": min_tokens}
    return manager(FULL, STATES, num_blocks=num_blocks, max_model_len=256, max_new_tokens=16, **options)


def begin(
    cache: KVCacheManager, request: Request, others: Sequence[Request] = (), connector: SchedulerConnector | None = None
) -> list[int]:
    """Computes the request's prompt in as few steps as it takes, and returns their ends."""
    hits, found = cache.find_prefix(request)
    assert cache.checkpoints is not None
    cache.checkpoints.begin(request, found)
    request.num_computed_tokens, begins = found, True
    ends = []
    while request.num_computed_tokens < request.num_tokens:
        rest = request.num_tokens - request.num_computed_tokens
        count = cache.checkpoints.cap(request, request.num_computed_tokens, rest)
        blocks = (
            cache.allocate_slots(request, count, hits=hits, num_hit_tokens=found)
            if begins
            else cache.extend_slots(request, count)
        )
        assert blocks is not None
        requests = {each.request_id: each for each in (request, *others)}
        cache.checkpoints.keep(requests, {request.request_id: count}, connector)
        request.num_computed_tokens += count
        begins = False
        ends.append(request.num_computed_tokens)
    return ends


def book(cache: KVCacheManager) -> list[tuple[int, int]]:
    copies, checkpoints = cache.take_state_copies()
    cache.release_checkpoints(checkpoints)
    return copies


def kept(num_blocks: int = 60) -> tuple[KVCacheManager, Request, list[int]]:
    """A cache, a request whose prompt of eleven tokens it has, and the checkpoint after eight."""
    cache, one = a_cache(num_blocks), a_request("a", range(11))
    begin(cache, one)
    return cache, one, [target for _, target in book(cache)]


def test_a_prompt_stops_at_its_last_whole_block_and_leaves_a_copy_there() -> None:
    cache, one = a_cache(), a_request("a", range(11))
    assert begin(cache, one) == [8, 11]
    own = cache.block_ids("a")[1]
    copies, checkpoint = cache.take_state_copies()
    assert copies == list(zip(own, checkpoint, strict=True))
    free = cache.pool.num_free
    cache.check_integrity({"a": one})
    cache.release_checkpoints(checkpoint)
    assert cache.pool.num_free == free + 3, "until the step is booked nothing else gets them"
    cache.check_integrity({"a": one})


def test_a_later_prompt_gets_a_copy() -> None:
    (cache, one, checkpoint), two = kept(), a_request("b", range(20))
    cache.free(one)
    assert begin(cache, two) == [16, 20], "from 8 on"
    (_, own), copies = cache.block_ids("b"), book(cache)
    assert copies[:3] == list(zip(checkpoint, own, strict=True))
    assert not set(own) & set(checkpoint)
    cache.free(two)
    assert cache.find_prefix(a_request("c", range(20)))[1] == 16


def test_the_place_where_two_prompts_part_is_kept_for_the_third() -> None:
    cache = a_cache()
    common = list(range(12))
    for name, rest, expected in (("a", 50, [16, 20]), ("b", 60, [12, 16, 20]), ("c", 70, [16, 20])):
        request = a_request(name, [*common, *range(rest, rest + 8)])
        found = cache.find_prefix(request)[1]
        assert found == (12 if name == "c" else 0)
        assert begin(cache, request) == expected
        book(cache)
        cache.free(request)


def test_a_place_that_saves_little_is_not_kept() -> None:
    cache = a_cache(min_tokens=12)
    assert begin(cache, a_request("a", range(11))) == [11]
    assert begin(cache, a_request("b", range(13))) == [12, 13]
    assert len(book(cache)) == 3


def test_where_free_blocks_are_few_the_request_takes_the_checkpoint_over() -> None:
    """Nothing waits for blocks that a checkpoint has."""
    cache, one, checkpoint = kept(1 + 3 + 3 + 3)
    others, _ = cache.block_ids("a")
    cache.pool.touch(others[2:])
    cache.free(one)
    two = a_request("b", range(15))
    begin(cache, two)
    assert cache.block_ids("b")[1] == checkpoint
    assert book(cache) == []
    cache.pool.release(others[2:])
    cache.check_integrity({"b": two})
    cache.free(two)
    assert cache.pool.num_free == cache.pool.num_usable
    assert cache.find_prefix(a_request("c", range(15)))[1] == 0


@pytest.mark.parametrize("lost", range(3))
def test_a_checkpoint_that_lost_a_block_is_not_found(lost: int) -> None:
    cache, _, checkpoint = kept()
    later = a_request("b", range(11))
    assert cache.find_prefix(later)[1] == 8
    cache.uncache([checkpoint[lost]])
    assert cache.find_prefix(later)[1] == 0


def test_without_free_blocks_none_is_kept() -> None:
    cache, one = a_cache(num_blocks=1 + 3 + 3 + 2), a_request("a", range(11))
    assert begin(cache, one) == [8, 11]
    assert book(cache) == []
    assert cache.pool.num_free == 2


def test_what_turned_out_wrong_is_found_by_none() -> None:
    cache, one, _ = kept()
    assert len(cache.cached_blocks_from(one, 7)) == 1 + 3, "a page and the checkpoint"
    cache.rewind(one, 7)
    assert cache.find_prefix(a_request("b", range(11)))[1] == 0


def test_a_load_from_elsewhere_brings_its_own_states() -> None:
    (cache, one, _), two = kept(), a_request("b", range(20))
    hits, found = cache.find_prefix(two)
    assert found == 8
    two.num_computed_tokens = 8
    cache.allocate_slots(two, 0, hits=hits, num_hit_tokens=8, num_external_tokens=12, delay_caching=True)
    assert book(cache) == []
    cache.check_integrity({"a": one, "b": two})


class Wanting(SchedulerConnector):
    """Notes what is kept for it."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, int]] = []

    def wants_checkpoints(self, request: Request) -> bool:
        return request.request_id != "unwanted"

    def checkpoint_kept(
        self, request: Request, num_tokens: int, block_ids: Sequence[int], *, passing: bool = False
    ) -> None:
        if passing:
            assert len(block_ids) == 3
            self.kept.append((request.request_id, num_tokens))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[None, bool]:
        raise AssertionError

    def update_state_after_alloc(self, request: Request, block_ids: BlockIds, num_external_tokens: int) -> None:
        raise AssertionError

    def build_connector_meta(self, step: ScheduledStep) -> ConnectorMetadata:
        raise AssertionError


def answer(
    cache: KVCacheManager, connector: Wanting, requests: Sequence[Request], steps: int, most: int = 1, seed: int = 0
) -> None:
    """Each request gets up to `most` tokens in a step."""
    draw, checkpoints = random.Random(seed), cache.checkpoints
    assert checkpoints is not None
    for _ in range(steps):
        counts = {}
        for request in requests:
            computed = request.num_computed_tokens
            wanted = draw.randint(1, most)
            counts[request.request_id] = count = checkpoints.cap(request, computed, wanted)
            for token in range(computed + count - request.num_tokens):
                request.append_output_token(token)
            assert cache.extend_slots(request, count) is not None
        checkpoints.keep({request.request_id: request for request in requests}, counts, connector)
        book(cache)
        for request in requests:
            request.num_computed_tokens += counts[request.request_id]


def begun(cache: KVCacheManager, connector: Wanting, *names: str) -> list[Request]:
    assert cache.checkpoints is not None
    cache.checkpoints.wanted = connector.wants_checkpoints
    requests = [a_request(name, [index, *range(10)]) for index, name in enumerate(names)]
    for request in requests:
        begin(cache, request, requests, connector)
        book(cache)
    return requests


@pytest.mark.parametrize("most", [1, 3])
def test_states_of_an_answer_are_copied_for_a_connector_that_wants_them_and_found_by_no_prompt(most: int) -> None:
    cache, connector = a_cache(num_blocks=400, min_tokens=8, num_lookahead_tokens=most - 1), Wanting()
    one, other = begun(cache, connector, "one", "unwanted")
    answer(cache, connector, [one, other], 42, most)
    assert connector.kept == [("one", end) for end in range(16, one.num_computed_tokens, 8)]
    held = sum(cache.num_blocks_of(name) for name in ("one", "unwanted"))
    assert cache.pool.num_free == cache.pool.num_usable - held, "no copy is left"
    cache.check_integrity({"one": one, "unwanted": other})
    later = a_request("later", list(one.all_token_ids))
    assert cache.find_prefix(later)[1] == 8, "the prompt's own checkpoint"


def test_after_a_handover_the_first_block_that_ends_is_a_place() -> None:
    cache, connector = a_cache(min_tokens=8), Wanting()
    (one,) = begun(cache, connector, "one")
    assert cache.checkpoints is not None
    cache.checkpoints.handed_over(one, 11)
    answer(cache, connector, [one], 14)
    assert connector.kept == [("one", 12), ("one", 20)]


def test_few_of_many_answers_are_copied_in_one_step() -> None:
    """The others' turn comes a block later, and nothing is copied where blocks are few."""
    cache, connector = a_cache(num_blocks=200, min_tokens=8), Wanting()
    requests = begun(cache, connector, "a", "b", "c")
    answer(cache, connector, requests, 14)
    assert connector.kept == [("a", 16), ("b", 16), ("c", 20), ("a", 24), ("b", 24)]
    cache, connector = a_cache(num_blocks=1 + 3 + 3 + 3 + 4, min_tokens=8), Wanting()
    (one,) = begun(cache, connector, "one")
    taken = cache.pool.take(cache.pool.num_free - 3)
    answer(cache, connector, [one], 8)
    assert connector.kept == []
    cache.pool.release(taken)
    answer(cache, connector, [one], 4)
    assert connector.kept == [("one", 20)]

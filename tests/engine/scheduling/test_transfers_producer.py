"""A prefill node's side of a handoff: its blocks stay until the connector lets go."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.base.errors import InvalidRequest
from tandem.kvtransfer.base import ConnectorOutput
from tests.engine.scheduling.driving import connected, produce, sent


def producer(**options: Any):
    return connected(keeps=["a"], **options)


def test_the_connector_hears_of_a_request_from_beginning_to_end():
    driver, connector = producer(max_num_batched_tokens=6)
    driver.add("a", prompt=10, max_tokens=1, transfer=produce())
    driver.run()
    assert [call[0] for call in connector.calls if call[1:2] == ("a",)] == ["new", "match", "alloc", "finished"]


@pytest.mark.parametrize("begun", [False, True])
def test_a_prompt_that_its_consumer_no_longer_wants_is_computed_no_further(begun: bool):
    driver, connector = producer(max_num_batched_tokens=6, max_num_seqs=1)
    if not begun:
        driver.add("before it", prompt=4, max_tokens=3)
    driver.add("a", prompt=20, max_tokens=1, transfer=produce())
    driver.step()
    computed = driver.scheduler.stats().prompt_tokens_computed
    _, updates = driver.step(ConnectorOutput(unwanted_sending={"a", "unknown"}))
    assert ("a", "abort") in [(update.request_id, update.finish) for update in updates]
    assert connector.asked("finished", "a")
    driver.run()
    assert driver.scheduler.stats().prompt_tokens_computed <= computed + 6, "the step under way, and no more"


def test_blocks_of_later_chunks_are_told_with_their_step():
    driver, connector = producer(max_num_batched_tokens=6)
    driver.add("a", prompt=15, max_tokens=1, transfer=produce())
    driver.step()
    assert connector.blocks["a"] == [[1, 2]]
    driver.step()
    assert connector.blocks["a"] == [[1, 2, 3]]
    driver.step()
    assert connector.asked("finished", "a") == [([[1, 2, 3, 4]],)]


def test_the_request_ends_for_its_user_at_once_and_its_blocks_stay():
    driver, _ = producer()
    driver.add("a", prompt=10, max_tokens=1, transfer=produce())
    _, updates = driver.step()
    assert updates[0].finish == "length"
    assert not driver.scheduler.has_unfinished_requests()
    stats = driver.scheduler.stats()
    assert (stats.held_blocks, stats.held_requests, stats.free_blocks) == (3, 1, 96)
    driver.step(sent("a"))
    assert driver.free_blocks == 99
    assert driver.scheduler.stats().held_blocks == 0


def test_held_blocks_are_not_taken_and_still_found():
    driver, connector = producer(num_blocks=6)
    request = driver.add("a", prompt=10, max_tokens=1, transfer=produce())
    driver.step()
    before = dict(driver.model.kv)
    driver.add("b", request.prompt_token_ids, max_tokens=1)
    assert driver.step()[0].num_scheduled_tokens == {"b": 2}
    driver.add("c", prompt=12, max_tokens=1)
    assert driver.step()[0].num_scheduled_tokens == {}
    held = connector.blocks["a"][0]
    assert all(driver.model.kv[slot] == content for slot, content in before.items() if slot[0] in held)
    driver.step(sent("a"))
    assert driver.step()[0].num_scheduled_tokens == {"c": 12}


def test_an_id_whose_blocks_are_held_is_still_taken():
    driver, _ = producer()
    driver.add("a", max_tokens=1, transfer=produce())
    driver.step()
    assert "a" not in driver.scheduler.requests
    with pytest.raises(InvalidRequest, match="already here"):
        driver.add("a")


def test_a_request_that_never_had_blocks_may_be_kept_too():
    driver, connector = producer(max_num_seqs=1)
    driver.add("b")
    driver.add("a", transfer=produce())
    driver.step()
    driver.abort("a")
    assert connector.asked("finished", "a") == [([[]],)]
    assert driver.scheduler.stats().held_requests == 1
    driver.step(sent("a"))
    assert driver.scheduler.stats().held_requests == 0


def test_a_preempted_producer_is_told_of_its_new_blocks():
    driver, connector = producer(num_blocks=6)
    driver.add("b", prompt=7, max_tokens=9)
    driver.add("a", prompt=7, max_tokens=9, transfer=produce())
    while "a" not in driver.step()[0].preempted_req_ids:
        pass
    driver.abort("b")
    driver.step()
    assert connector.asked("alloc", "a") == [(0,), (0,)]


def test_each_end_is_told_once_and_each_block_is_freed_once():
    driver, connector = producer()
    for name in "abcd":
        connector.keeps.add(name)
        driver.add(name, prompt=9, max_tokens=2, transfer=produce(name))
    driver.run()
    assert sum(call[0] == "finished" for call in connector.calls) == 4
    driver.step(sent("a", "c"))
    driver.step(sent("a"))  # a connector that repeats itself does no harm
    driver.step(sent("b", "d"))
    assert driver.free_blocks == 99

"""A decode node's side of a handoff: it waits for KV and continues from the first token, or fails in every possible way."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.base.errors import InternalError
from tandem.engine.request import RequestStatus
from tandem.kvtransfer.base import ConnectorOutput, Handoff
from tandem.kvtransfer.config import LoadFailurePolicy
from tandem.wire.images import MediaFeature
from tandem.wire.sampling import FinishReason, SamplingParams
from tests.engine.scheduling.driving import connected, consume, failed, received, unique_tokens
from tests.engine.scheduling.model import alone, next_token


def waiting_driver(**options: Any):
    """A driver whose request a waits for its KV, which has not been sent yet."""
    driver, connector = connected({"a": (10, True)}, **options)
    request = driver.add("a", 10, max_tokens=5, transfer=consume())
    driver.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return driver, connector, request


def test_blocks_are_reserved_and_nothing_is_computed_while_it_waits():
    driver, connector, request = waiting_driver()
    assert connector.asked("match", "a") == [(0,)]
    assert connector.asked("alloc", "a") == [(10,)]
    assert connector.blocks["a"] == [[1, 2, 3]]
    assert driver.free_blocks == 99 - 3
    for _ in range(3):
        step, updates = driver.step()
        assert (step.num_scheduled_tokens, updates) == ({}, [])
    assert request.num_computed_tokens == 0
    assert not driver.scheduler.has_work()
    assert driver.scheduler.has_unfinished_requests()


def test_what_is_on_its_way_is_not_found_by_others():
    driver, _, request = waiting_driver()
    driver.add("b", request.prompt_token_ids, max_tokens=1)
    step, _ = driver.step()
    assert step.num_scheduled_tokens == {"b": 10}


def test_after_a_handoff_no_prompt_token_is_computed_and_the_first_token_is_reported():
    driver, connector, request = waiting_driver()
    first = next_token(request.prompt_token_ids)
    driver.arrive(request, 0, 10)
    _, updates = driver.step(received("a", first, 10))
    assert [(update.start, update.token_ids, update.cached_tokens) for update in updates] == [(0, [first], 0)]
    assert (request.num_computed_tokens, request.num_tokens) == (10, 11)
    step, _ = driver.step()
    assert step.num_scheduled_tokens == {"a": 1}
    (new,) = step.new_reqs
    assert new.num_computed_tokens == 10
    assert len(new.facts.prompt_token_ids) == 10
    assert new.token_ids == [*request.prompt_token_ids, first]
    assert connector.asked("alloc", "a") == [(10,), (0,)]
    driver.run()
    assert driver.outputs["a"] == alone(request.prompt_token_ids, 5)
    stats = driver.scheduler.stats()
    assert (stats.prompt_tokens_received, stats.prompt_tokens_computed) == (10, 0)
    assert driver.free_blocks == 99


def test_blocks_that_arrived_are_found_by_others():
    driver, _, request = waiting_driver()
    driver.arrive(request, 0, 10)
    driver.step(received("a", 7, 10))
    driver.add("b", request.prompt_token_ids, max_tokens=1)
    step, _ = driver.step()
    assert step.num_scheduled_tokens["b"] == 2


def test_only_what_is_not_here_is_asked_for():
    prompt = list(range(10))
    driver, connector = connected()
    driver.add("before", prompt, max_tokens=1)
    driver.run()
    connector.offers["a"] = (2, True)
    request = driver.add("a", prompt, max_tokens=5, transfer=consume())
    driver.step()
    assert connector.asked("match", "a") == [(8,)]
    assert connector.asked("alloc", "a") == [(2,)]
    assert request.num_computed_tokens == 8
    driver.arrive(request, 8, 10)
    _, updates = driver.step(received("a", next_token(prompt), 10))
    assert updates[0].cached_tokens == 8
    driver.run()
    assert driver.outputs["a"] == alone(prompt, 5)
    stats = driver.scheduler.stats()
    assert (stats.prompt_tokens_cached, stats.prompt_tokens_received) == (8, 2)


def test_a_first_token_that_ends_the_request_ends_it_there():
    driver, connector, request = waiting_driver(eos=[3])
    driver.arrive(request, 0, 10)
    _, updates = driver.step(received("a", 3, 10))
    (update,) = updates
    assert (update.token_ids, update.finish, update.stop_token) == ([3], FinishReason.STOP, 3)
    assert len(connector.asked("finished", "a")) == 1
    assert driver.free_blocks == 99
    assert driver.step()[0].finished_req_ids == {"a"}


PROMPT = unique_tokens("a", 10)
# An answer that began elsewhere has reported its prompt there.
BEGUN = {"sampling": SamplingParams(max_tokens=5, prompt_logprobs=0), "output_token_ids": [1]}


@pytest.mark.parametrize(
    ("offered", "written", "news", "fields", "used"),
    [
        (10, 0, failed("a"), {}, 0),
        (10, 6, failed("a", valid_tokens=6), {}, 6),
        # Log-probabilities and hidden states of the tokens that came would be missing.
        (10, 8, failed("a", valid_tokens=8), {"sampling": SamplingParams(max_tokens=5, prompt_logprobs=0)}, 0),
        (10, 8, failed("a", valid_tokens=8), {"sampling": SamplingParams(max_tokens=5, hidden_states="file")}, 0),
        (10, 8, failed("a", valid_tokens=8), BEGUN, 8),
        # What was computed from the request's own input may have failed at a producer that ended before it could say so.
        (10, 8, failed("a", valid_tokens=8), {"lora": "x"}, 0),
        (10, 5, failed("a", valid_tokens=8), {"media": [MediaFeature("image", 5, 2)], "images": [b"file"]}, 5),
        # Handoffs of another length are not believed, nor those of a part that continues otherwise than the prompt.
        *((10, 10, received("a", 7, num_tokens), {}, 0) for num_tokens in (9, 11, 0)),
        (8, 8, received("a", PROMPT[8], 8), {}, 8),
        (8, 8, received("a", PROMPT[8] + 1, 8), {}, 0),
    ],
)
def test_what_did_not_arrive_whole_is_computed_from_where_it_is_right(
    offered: int, written: int, news: ConnectorOutput, fields: dict[str, Any], used: int
) -> None:
    driver, connector = connected({"a": (offered, True)}, max_loras=1, encoder_tokens=8)
    request = driver.add("a", PROMPT, **{"max_tokens": 5, "transfer": consume(), **fields})
    driver.step()
    driver.arrive(request, 0, written)
    left = request.num_tokens - used
    _, updates = driver.step(news)
    assert (updates, request.num_computed_tokens) == ([], used)
    step, _ = driver.step()
    assert step.num_scheduled_tokens == {"a": left}
    assert step.new_reqs[0].num_computed_tokens == used
    assert len(connector.asked("match", "a")) == (1 if used else 2), "the connector says itself that it has no more"
    driver.run()
    if "output_token_ids" not in fields:
        assert driver.outputs["a"] == alone(PROMPT, 5)
    stats = driver.scheduler.stats()
    assert (stats.prompt_tokens_received, stats.prompt_tokens_computed) == (used, len(PROMPT) - used)
    assert stats.loads_failed == (news != received("a", PROMPT[8], 8))


def test_a_request_goes_on_without_the_blocks_that_a_peer_may_still_write_to():
    driver, connector, request = waiting_driver()
    blocks = connector.blocks["a"][0]
    driver.arrive(request, 0, 4)
    driver.step(failed("a", valid_tokens=4, unsafe=blocks[1:]))
    assert driver.scheduler.stats().quarantined_blocks == 2
    step, _ = driver.step()
    assert step.num_scheduled_tokens == {"a": 6}
    assert step.new_reqs[0].block_ids[0][0] == blocks[0]
    assert not set(step.new_reqs[0].block_ids[0]) & set(blocks[1:])
    driver.run()
    assert driver.outputs["a"] == alone(request.prompt_token_ids, 5)
    assert driver.free_blocks == 97
    driver.step(ConnectorOutput(released_blocks=set(blocks[1:])))
    assert driver.free_blocks == 99
    assert driver.scheduler.stats().quarantined_blocks == 0


def test_a_block_that_is_not_in_quarantine_cannot_leave_it():
    driver, _, _ = waiting_driver()
    with pytest.raises(InternalError, match="block 1 is not in quarantine"):
        driver.step(ConnectorOutput(released_blocks={1}))


def test_a_failed_load_that_is_all_right_still_computes_the_last_token():
    driver, _, request = waiting_driver()
    driver.arrive(request, 0, 10)
    driver.step(failed("a", valid_tokens=10))
    assert driver.step()[0].num_scheduled_tokens == {"a": 1}
    driver.run()
    assert driver.outputs["a"] == alone(request.prompt_token_ids, 5)


def test_a_failed_load_ends_the_request_where_that_is_the_policy():
    driver, connector, request = waiting_driver(on_failure=LoadFailurePolicy.FAIL)
    _, updates = driver.step(failed("a", reason="the peer is gone"))
    (update,) = updates
    assert (update.finish, update.token_ids) == (FinishReason.ERROR, [])
    assert update.error is not None
    assert update.error.code == "kv_load_failed"
    assert "the peer is gone" in update.error.message
    assert request.status is RequestStatus.FINISHED_ERROR
    assert len(connector.asked("finished", "a")) == 1
    assert driver.free_blocks == 99


def test_news_of_unknown_requests_is_ignored():
    driver, _, request = waiting_driver()
    driver.step(ConnectorOutput(
        finished_sending={"x"}, finished_recving={"y": Handoff(1, 2)}, failed_recving=failed("z").failed_recving,
        invalid_block_ids={77}
    ))  # fmt: skip
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def test_requests_that_arrived_stand_in_their_old_place_in_line():
    driver, connector = connected(max_num_seqs=1)
    loads = {}
    for name in ("a", "b"):
        connector.offers[name] = (6, True)
        loads[name] = driver.add(name, prompt=6, max_tokens=2, transfer=consume())
    driver.add("c", prompt=6, max_tokens=3)
    driver.step()
    for name in ("b", "a"):  # b's comes first
        driver.arrive(loads[name], 0, 6)
        driver.step(received(name, 7, 6))
    assert list(driver.step()[0].num_scheduled_tokens) == ["a"]


def test_a_load_needs_a_free_place_among_the_running():
    driver, _ = connected({"a": (6, True)}, max_num_seqs=1)
    driver.add("b")
    driver.step()
    request = driver.add("a", transfer=consume())
    driver.step()
    assert request.status is RequestStatus.WAITING

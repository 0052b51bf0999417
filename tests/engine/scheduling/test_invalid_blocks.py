"""Blocks are found to be wrong after requests have read them: everything computed from them is undone."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.base.errors import InvalidImage, InvalidLogits, TandemError, Unavailable
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.output import SchedulerOutput
from tandem.kvtransfer.base import ConnectorOutput
from tandem.kvtransfer.config import LoadFailurePolicy
from tandem.wire.images import MediaFeature
from tandem.wire.requests import TokenChunk
from tandem.wire.sampling import FinishReason
from tests.engine.made_requests import made_request
from tests.engine.scheduling.driving import BLOCK, FULL, Driver, connected, consume, produce, received, sliding
from tests.engine.scheduling.model import alone


def loaded_driver(**options: Any):
    """Request a is about to run on twelve tokens from outside, of which the third block is wrong."""
    driver, connector = connected({"a": (12, False)}, **options)
    return driver, connector, driver.add("a", prompt=15, max_tokens=4)


def invalid(*blocks: int) -> ConnectorOutput:
    return ConnectorOutput(invalid_block_ids=set(blocks))


def book_garbage(driver: Driver, step, transfers):
    """Books a step that ran on wrong KV; requests that read it must get no token."""
    driver.model.tolerant = True
    updates = driver.finish(step, transfers)
    driver.model.tolerant = False
    assert driver.model.misread
    assert not driver.model.misread & {update.request_id for update in updates if update.token_ids}
    return updates


def test_a_request_goes_back_to_its_first_wrong_block_and_answers_right():
    driver, connector, a = loaded_driver()
    step = driver.schedule()
    driver.arrive(a, 0, 8)
    updates = book_garbage(driver, step, invalid(connector.blocks["a"][0][2]))
    assert updates == []  # what it sampled is not used
    assert (a.status, a.num_computed_tokens, a.num_output_tokens) == (RequestStatus.PREEMPTED, 8, 0)
    step, _ = driver.step()
    assert step.preempted_req_ids == {"a"}
    assert step.cached_reqs.resumed_req_ids == {"a"}
    assert step.num_scheduled_tokens == {"a": 7}
    driver.run()
    assert driver.outputs["a"] == alone(a.prompt_token_ids, 4)
    assert driver.scheduler.stats().loads_failed == 1


def test_where_that_is_the_policy_the_request_ends_with_an_error():
    driver, connector, a = loaded_driver(on_failure=LoadFailurePolicy.FAIL)
    told: list[int] = []
    connector.on_finished = lambda request: told.append(request.num_computed_tokens) or False
    step = driver.schedule()
    driver.arrive(a, 0, 8)
    (update,) = book_garbage(driver, step, invalid(connector.blocks["a"][0][2]))
    assert update.finish is FinishReason.ERROR
    assert update.error is not None
    assert update.error.code == "kv_load_failed"
    assert a.status is RequestStatus.FINISHED_ERROR
    assert told == [8]  # no request is told that what is wrong was computed
    assert driver.free_blocks == 99
    driver.add("b", a.prompt_token_ids, max_tokens=1)
    assert driver.step()[0].new_reqs[0].num_computed_tokens == 0  # nothing that was cached before is found


@pytest.mark.parametrize("policy", list(LoadFailurePolicy))
def test_what_was_computed_from_a_wrong_block_is_not_found_when_that_block_is_right_again(policy):
    driver, connector = connected({"a": (12, False)}, on_failure=policy)
    a = driver.add("a", prompt=17, max_tokens=4)  # computes its fourth block from the third, which is wrong
    step = driver.schedule()
    driver.arrive(a, 0, 8)
    book_garbage(driver, step, invalid(connector.blocks["a"][0][2]))
    driver.abort("a")
    driver.add("b", a.prompt_token_ids[:13], max_tokens=1)  # computes the third block again
    driver.run()
    driver.add("c", a.prompt_token_ids, max_tokens=4)
    assert driver.step()[0].new_reqs[0].num_computed_tokens == 12
    driver.run()
    assert driver.outputs["c"] == alone(a.prompt_token_ids, 4)


@pytest.mark.parametrize("places", [(1,), (0, 2), (2, 0)])
def test_wrong_blocks_of_a_load_under_way_are_remembered_until_it_ends_and_it_is_right_up_to_the_first(places):
    driver, connector = connected({"a": (12, True)})
    a = driver.add("a", prompt=12, max_tokens=4)
    driver.step()
    for place in places:
        driver.step(invalid(connector.blocks["a"][0][place]))
    assert a.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    for place in {0, 1, 2}.difference(places):
        driver.arrive(a, place * BLOCK, (place + 1) * BLOCK)
    driver.step(received("a", 7, 12))
    assert a.num_computed_tokens == min(places) * BLOCK
    driver.run()
    assert driver.outputs["a"] == alone(a.prompt_token_ids, 4)


def test_a_wrong_block_of_one_that_loaded_and_waits_for_its_turn():
    driver, connector = connected({"a": (12, True)}, max_num_seqs=1)
    a = driver.add("a", prompt=12, max_tokens=4)
    driver.add("b", prompt=12, max_tokens=6)
    driver.step()
    driver.arrive(a, 0, 8)
    chosen = alone(a.prompt_token_ids, 1)[0]
    driver.step(received("a", chosen, 12))
    assert (a.status, a.num_computed_tokens) == (RequestStatus.WAITING, 12)
    driver.step(invalid(connector.blocks["a"][0][2]))
    assert a.num_computed_tokens == 8
    driver.run()
    assert driver.outputs["a"] == alone(a.prompt_token_ids, 4)


@pytest.mark.parametrize("window", [5, 40])
def test_a_window_that_has_moved_on_is_computed_from_the_start(window):
    driver, connector = connected({"a": (16, False)}, groups=(FULL, sliding(window)))
    a = driver.add("a", prompt=19, max_tokens=4)
    step = driver.schedule()
    driver.arrive(a, 0, 4)
    book_garbage(driver, step, invalid(connector.blocks["a"][0][1]))
    assert a.num_computed_tokens == (0 if window == 5 else 4)
    driver.run()
    assert driver.outputs["a"] == alone(a.prompt_token_ids, 4)


# --- an input that fails

TEXT = list(range(500, 506))
IMAGE = [MediaFeature("x/0", len(TEXT), 6)]
PROMPT = [*TEXT, *[7] * 6, *range(600, 610)]


def asking(driver: Driver, request_id: str, prompt: list[int] = PROMPT, **fields: object) -> Request:
    return driver.add(request_id, prompt, max_tokens=4, media=IMAGE, images=[b"file"], **fields)


def fail(driver: Driver, step: SchedulerOutput, request_id: str, error: TandemError) -> list[TokenChunk]:
    output = driver.model.execute(step)
    output.sampled_token_ids.pop(request_id, None)
    output.errors[request_id] = error
    return driver.book(step, output)


def found(driver: Driver, prompt: list[int] = PROMPT) -> int:
    """How many tokens of the prompt with the image another request would find."""
    request = made_request("asks", prompt, media=IMAGE, images=[b"file"], block_hasher=driver.scheduler.block_hasher)
    return driver.scheduler.find_prefix(request)[1]


@pytest.mark.parametrize("error", [InvalidImage("broken"), Unavailable("not now"), InvalidLogits("no number")])
def test_who_shares_the_blocks_of_an_input_that_fails_computes_them_again(error: TandemError) -> None:
    driver, connector = connected(encoder_tokens=64)
    other = driver.add("other", 12, max_tokens=8)
    driver.step()
    asking(driver, "a")
    b = asking(driver, "b")
    c = asking(driver, "c", [*PROMPT[:16], 1, 2, 3, 4, 5])  # the same blocks at first
    step = driver.schedule()
    assert b.num_cached_tokens == 20
    assert c.num_cached_tokens == 16, "the others found its blocks in the very step that computes them"
    updates = fail(driver, step, "a", error)
    assert {update.request_id for update in updates} == {"a", "other"}, "what was read from it is not used"
    assert (b.num_computed_tokens, c.num_computed_tokens) == (len(TEXT), len(TEXT))
    assert found(driver) == BLOCK, "the text before the image is still found"
    assert driver.scheduler.find_prefix(other)[1] == 12, "and so is what others have cached"
    assert {call for call in connector.calls if call[0] in ("forget", "reset")} == {
        ("forget", request_id, len(TEXT)) for request_id in "abc"
    }
    driver.run()
    assert driver.outputs["b"] == alone(PROMPT, 4)
    assert driver.outputs["c"] == alone(c.prompt_token_ids, 4)
    assert found(driver) == 20


def test_the_requests_of_a_step_that_was_planned_ahead_are_rewound_too() -> None:
    driver = Driver(encoder_tokens=64)
    asking(driver, "a")
    first = driver.schedule()
    assert driver.scheduler.leave_open(first)
    b = asking(driver, "b")
    second = driver.schedule()
    assert second.num_scheduled_tokens["b"] == 2
    updates = fail(driver, first, "a", InvalidImage("broken"))
    assert [update.request_id for update in updates] == ["a"]
    assert b.num_computed_tokens == len(TEXT)
    assert driver.finish(second) == []
    driver.run()
    assert driver.outputs["b"] == alone(PROMPT, 4)


@pytest.mark.parametrize("policy", list(LoadFailurePolicy))
def test_a_request_that_waits_for_kv_behind_such_blocks_computes_it_whatever_the_policy(
    policy: LoadFailurePolicy,
) -> None:
    driver, connector = connected(encoder_tokens=64, on_failure=policy)
    asking(driver, "a")
    connector.offers["w"] = (2, True)
    w = asking(driver, "w")
    step = driver.schedule()
    assert w.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    fail(driver, step, "a", InvalidImage("broken"))
    assert w.num_computed_tokens == len(TEXT)
    driver.step(received("w", 9, len(PROMPT)))
    driver.run()
    assert driver.outputs["w"] == alone(PROMPT, 4)


def test_what_is_being_sent_of_such_blocks_is_called_wrong() -> None:
    driver, connector = connected(keeps=["sent"], encoder_tokens=64)
    driver.add("sent", PROMPT, max_tokens=1, media=IMAGE, images=[b"file"], transfer=produce())
    driver.step()
    assert driver.scheduler.holds_blocks_of("sent")
    asking(driver, "a")
    fail(driver, driver.schedule(), "a", InvalidLogits("no number"))
    assert connector.asked("forget", "sent") == [(len(TEXT),)]


def test_every_copy_of_what_such_an_input_made_is_forgotten() -> None:
    """Two requests received the same KV at the same time, so each name has two blocks."""
    driver, connector = connected(encoder_tokens=64)
    for request_id in ("a", "b"):
        connector.offers[request_id] = (len(PROMPT), True)
        asking(driver, request_id, transfer=consume(request_id))
    driver.step()
    for request_id in ("a", "b"):
        driver.arrive(driver.scheduler.requests[request_id], 0, len(PROMPT))
    news = received("a", alone(PROMPT, 1)[0], len(PROMPT))
    news.finished_recving |= received("b", alone(PROMPT, 1)[0], len(PROMPT)).finished_recving
    driver.step(news)
    driver.abort("b")
    assert found(driver) == 20
    fail(driver, driver.schedule(), "a", InvalidLogits("no number"))
    assert found(driver) == BLOCK


def test_without_an_input_of_its_own_nothing_explains_the_error() -> None:
    driver, connector = connected()
    driver.add("a", 12)
    fail(driver, driver.schedule(), "a", InvalidLogits("no number"))
    assert ("reset",) in connector.calls
    assert not connector.asked("forget", "a")

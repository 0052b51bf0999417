"""A step is planned while the previous one runs: what it may count on, what must wait, and what is discarded."""

from __future__ import annotations

import pytest

from tandem.base.errors import InvalidLogits
from tandem.engine.request import RequestStatus
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.kvtransfer.base import ConnectorOutput
from tandem.wire.sampling import FinishReason, SamplingParams
from tests.engine.scheduling.driving import BLOCK, Driver, FakeConnector, connected, produce
from tests.engine.scheduling.model import alone, next_token


def open_step(driver: Driver) -> SchedulerOutput:
    step = driver.schedule()
    assert driver.scheduler.leave_open(step)
    driver.scheduler.check_integrity()
    return step


def test_the_token_of_the_open_step_is_computed_by_the_next() -> None:
    driver = Driver()
    request = driver.add("a", prompt=6, max_tokens=4)
    first = open_step(driver)
    assert request.num_output_placeholders == 1
    second = driver.schedule()
    assert second.cached_reqs.num_computed_tokens == [6]
    assert second.num_scheduled_tokens == {"a": 1}
    driver.finish(first)
    assert request.num_output_placeholders == 0
    assert driver.scheduler.leave_open(second)
    driver.finish(second)
    assert driver.outputs["a"] == alone(request.prompt_token_ids, 2)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_no_step_is_planned_for_what_comes_after_the_last_token(max_tokens: int) -> None:
    driver = Driver()
    driver.add("a", prompt=6, max_tokens=max_tokens)
    for _ in range(max_tokens - 1):
        driver.step()
    last = open_step(driver)
    nothing = driver.schedule()
    assert nothing.num_scheduled_tokens == {}
    assert not driver.scheduler.leave_open(nothing)
    (update,) = driver.finish(last)
    assert update.finish is FinishReason.LENGTH
    assert driver.free_blocks == 99


def test_a_stop_is_found_when_the_next_step_runs_and_its_token_is_nobodys() -> None:
    prompt = [5, 6, 7]
    stop = next_token(prompt)
    connector = FakeConnector()
    driver = Driver(eos=[stop], connector=connector)
    request = driver.add("a", prompt, max_tokens=9)
    computed: list[int] = []
    connector.on_finished = lambda seen: bool(computed.append(seen.num_computed_tokens))
    first = open_step(driver)
    surplus = driver.schedule()
    assert surplus.num_scheduled_tokens == {"a": 1}
    (update,) = driver.finish(first)
    assert (update.token_ids, update.finish, update.stop_token) == ([stop], FinishReason.STOP, stop)
    # The stop token's KV fills a block. It belongs to no request, and none is told of it.
    assert computed == [3]
    assert request.num_tokens == BLOCK
    assert driver.scheduler.stats().cached_blocks == 0
    assert driver.free_blocks == 99
    assert driver.scheduler.leave_open(surplus)  # no request waits for it
    assert driver.finish(surplus) == []
    assert driver.outputs["a"] == [stop]


def test_nobody_loses_blocks_before_the_open_step_is_booked() -> None:
    driver = Driver(num_blocks=5)
    a, b = (driver.add(name, prompt=BLOCK + 3, max_tokens=9) for name in "ab")
    driver.step()
    first = open_step(driver)  # both fill their second block
    short = driver.schedule()
    assert (short.ran_short, short.num_scheduled_tokens, short.preempted_req_ids) == (True, {}, set())
    assert not driver.scheduler.leave_open(short)
    driver.finish(first)
    driver.finish(short)
    assert driver.schedule().num_scheduled_tokens == {"a": 1}
    assert (a.status, b.status) == (RequestStatus.RUNNING, RequestStatus.PREEMPTED)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(grammar="{}"),
        SamplingParams(bad_words=[[1, 2]]),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=0.1),
        SamplingParams(frequency_penalty=0.1),
        SamplingParams(prompt_logprobs=1),
    ],
)
def test_a_step_whose_successor_needs_its_tokens_is_not_left_open(sampling: SamplingParams) -> None:
    driver = Driver()
    driver.add("a")
    driver.add("b", sampling=sampling)
    step = driver.schedule()
    assert not driver.scheduler.leave_open(step)
    driver.finish(step)
    driver.abort("b")
    open_step(driver)


def test_a_request_whose_logits_are_no_numbers_ends_with_the_step_behind_it() -> None:
    driver = Driver()
    request = driver.add("a", prompt=6, max_tokens=9)
    driver.add("b", max_tokens=9)
    first = open_step(driver)
    second = driver.schedule()
    output = driver.model.execute(first)
    del output.sampled_token_ids["a"]
    output.errors["a"] = InvalidLogits("no number")
    updates = driver.book(first, output)
    assert {update.request_id: update.finish for update in updates} == {"a": FinishReason.ERROR, "b": None}
    assert request.num_computed_tokens == 0, "the connector must take nothing of it for computed"
    assert driver.scheduler.leave_open(second)
    failed = ModelOutput({"b": [3]}, errors={"a": InvalidLogits("no number")})
    assert [update.request_id for update in driver.book(second, failed)] == ["b"]
    assert driver.scheduler.stats().model_errors == 1


def test_wrong_blocks_take_the_open_step_and_the_next_with_them() -> None:
    """They are found in a load that was thought to be over: a step that loads itself is not left open."""
    driver, connector = connected({"a": (2 * BLOCK, False)})
    a = driver.add("a", prompt=10, max_tokens=5)
    driver.model.tolerant = True
    loading = driver.schedule()
    assert not driver.scheduler.leave_open(loading)
    driver.arrive(a, 0, 2 * BLOCK)
    driver.finish(loading)
    first = open_step(driver)
    second = driver.schedule()
    bad = connector.blocks["a"][0][1]
    assert driver.finish(first, ConnectorOutput(invalid_block_ids={bad})) == []
    assert (a.status, a.num_computed_tokens, a.num_output_placeholders) == (RequestStatus.PREEMPTED, BLOCK, 0)
    driver.arrive(a, 0, BLOCK)
    again = driver.schedule()  # before the second is booked
    assert again.cached_reqs.resumed_req_ids == {"a"}
    assert driver.finish(second) == []
    driver.model.tolerant = False
    driver.finish(again)
    driver.run()
    assert driver.outputs["a"] == alone(a.prompt_token_ids, 5)


def test_a_block_is_found_once_all_its_tokens_are_known() -> None:
    driver = Driver()
    a = driver.add("a", prompt=BLOCK - 1, max_tokens=9)
    first = open_step(driver)
    second = driver.schedule()  # fills the block with a token that is not known yet
    assert driver.scheduler.stats().cached_blocks == 0
    driver.finish(first)
    assert driver.scheduler.leave_open(second)
    third = driver.schedule()
    assert driver.scheduler.stats().cached_blocks == 1
    driver.finish(second)
    driver.finish(third)
    driver.add("b", [*a.all_token_ids[:BLOCK], 1], max_tokens=1)
    assert driver.schedule().new_reqs[0].num_computed_tokens == BLOCK


def test_a_producers_request_ends_with_the_step_that_samples_its_only_token() -> None:
    driver, _ = connected(keeps=["a"])
    driver.add("a", prompt=6, max_tokens=1, transfer=produce())
    first = open_step(driver)
    assert driver.schedule().num_scheduled_tokens == {}
    driver.finish(first)
    assert driver.scheduler.stats().held_blocks == 2
    driver.step(ConnectorOutput(finished_sending={"a"}))
    assert driver.free_blocks == 99

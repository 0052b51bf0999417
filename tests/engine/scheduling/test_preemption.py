"""Preemption when blocks run out: which request gives way, and that no token is lost or wrong."""

from __future__ import annotations

import pytest

from tandem.engine.request import Request, RequestStatus
from tests.engine.scheduling.driving import BLOCK, Driver
from tests.engine.scheduling.model import alone


def short_of_blocks() -> tuple[Driver, Request, Request]:
    """Two requests that will want three blocks each of the five: in the next step b gives way."""
    driver = Driver(num_blocks=6)
    a, b = (driver.add(name, prompt=7, max_tokens=5) for name in "ab")
    driver.steps(2)
    return driver, a, b


def test_the_last_admitted_gives_way_for_nobody_new_and_answers_the_same_in_the_end():
    driver, a, b = short_of_blocks()
    c = driver.add("c", prompt=2, max_tokens=1)
    b.spec_token_ids = [1, 2]
    step, _ = driver.step()
    assert step.preempted_req_ids == {"b"}
    assert list(step.num_scheduled_tokens) == ["a"]
    assert (b.status, b.num_computed_tokens, b.num_preemptions, b.spec_token_ids) == (RequestStatus.PREEMPTED, 0, 1, [])
    driver.run()
    for request, tokens in ((a, 5), (b, 5), (c, 1)):
        assert request.output_token_ids == alone(request.prompt_token_ids, tokens)


def test_a_preempted_request_is_the_first_in_line_and_finds_its_own_blocks():
    driver, _, _ = short_of_blocks()
    driver.step()
    driver.add("c", prompt=7, max_tokens=1)
    driver.abort("a")
    step, _ = driver.step()
    assert step.cached_reqs.num_computed_tokens == [8]  # both its full blocks
    assert next(iter(step.num_scheduled_tokens.items())) == ("b", 1)


@pytest.mark.parametrize(
    ("policy", "victim", "left"),
    [
        pytest.param("priority", "low", {"b": 1, "a": 7}, id="by priority the least urgent, wherever it stands"),
        pytest.param("fcfs", "a", {"low": 3, "b": 1}, id="first come, first served: the last"),
    ],
)
def test_one_gives_way_and_what_it_was_given_in_the_step_is_rolled_back(
    policy: str, victim: str, left: dict[str, int]
) -> None:
    """Seven blocks are all in use: three by `low`, and two each by the others. In the next step `b` wants a third. The drafts of `a` fit
    into the step's nine tokens because `low` gives back what it was given."""
    driver = Driver(num_blocks=8, policy=policy, max_num_batched_tokens=9)
    for name, priority in [("low", 5), ("b", 1), ("a", 0)]:
        driver.add(name, prompt=7, max_tokens=9, priority=priority)
        driver.step()
    assert driver.free_blocks == 0
    for name, drafts in (("low", 2), ("a", 6)):
        driver.scheduler.requests[name].spec_token_ids = [1] * drafts
    step, _ = driver.step()
    assert step.preempted_req_ids == {victim}
    assert step.num_scheduled_tokens == left
    assert step.total_num_scheduled_tokens == sum(left.values())
    assert victim not in step.spec_token_ids
    assert victim not in step.cached_reqs.req_ids
    assert not step.new_block_ids(victim)
    driver.run()
    assert all(len(driver.outputs[name]) == 9 for name in ("low", "a", "b"))


def test_blocks_filed_for_a_step_that_was_rolled_back_are_not_found_later():
    """A victim's block may have been filed as full moments before it was taken back: it was never computed."""
    driver = Driver(num_blocks=5, policy="priority")
    prompt = list(range(6))
    driver.add("low", prompt, max_tokens=9, priority=5)
    driver.step()  # six tokens in two blocks
    driver.add("b", prompt=8, max_tokens=9, priority=1)
    driver.step()  # eight in the other two
    step, _ = driver.step()  # low fills its second block, which is filed; b wants a third
    assert step.preempted_req_ids == {"low"}
    driver.abort("b")
    step, _ = driver.step()
    assert step.cached_reqs.num_computed_tokens == [BLOCK]  # not 2 * BLOCK
    driver.run()
    assert driver.outputs["low"] == alone(prompt, 9)

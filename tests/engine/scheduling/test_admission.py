"""Waiting requests: which is admitted, which cached tokens it finds, and what makes it wait."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.engine.config import Reserve
from tandem.wire.sampling import SamplingParams
from tests.engine.scheduling.driving import BLOCK, Driver, connected, sliding


def test_a_prefix_is_found_in_the_very_step_that_computes_it():
    driver = Driver()
    driver.add("a", list(range(9)))
    driver.add("b", list(range(9)))
    step, _ = driver.step()
    assert step.num_scheduled_tokens == {"a": 9, "b": 1}
    a, b = (new.block_ids[0] for new in step.new_reqs)
    assert a[:2] == b[:2]
    assert a[2] != b[2]


def test_the_last_token_is_kept_back_even_when_all_is_cached():
    driver = Driver()
    driver.add("a", list(range(8)), max_tokens=5)
    driver.run()
    driver.add("b", list(range(8)), max_tokens=5)
    step, _ = driver.step()
    assert step.num_scheduled_tokens == {"b": BLOCK}  # a whole block of them: hits end where blocks do
    driver.run()
    assert driver.outputs["a"] == driver.outputs["b"]


@pytest.mark.parametrize(
    "asked", [{"sampling": SamplingParams(prompt_logprobs=0)}, {"skip_reading_prefix_cache": True}]
)
def test_a_prompt_that_must_be_computed_is_whatever_is_cached(asked: dict[str, Any]):
    driver = Driver()
    driver.add("a", list(range(10)))
    driver.run()
    driver.add("b", list(range(10)), **asked)
    step, _ = driver.step()
    assert step.num_scheduled_tokens == {"b": 10}


@pytest.mark.parametrize(
    ("first", "second"),
    [({"cache_salt": "x"}, {"cache_salt": "y"}), ({"cache_salt": "x"}, {}), ({"lora": "x"}, {"cache_salt": "x"})],
)
def test_tenants_and_adapters_find_nothing_of_each_other(first, second):
    driver = Driver()
    driver.add("a", list(range(10)), **first)
    driver.add("b", list(range(10)), **second)
    driver.add("c", list(range(10)), **first)
    step, _ = driver.step()
    assert step.num_scheduled_tokens == {"a": 10, "b": 10, "c": 2}


def test_when_memory_is_short_the_line_waits_and_nobody_is_preempted_for_it():
    driver = Driver(num_blocks=6)
    driver.add("a", prompt=12, max_tokens=5)
    driver.add("b", prompt=12, max_tokens=2)
    driver.add("c", prompt=2, max_tokens=2)  # would fit, and does not overtake
    step, _ = driver.step()
    assert step.num_scheduled_tokens == {"a": 12}
    driver.run()
    assert driver.scheduler.stats().preemptions == 0
    assert [len(driver.outputs[name]) for name in "abc"] == [5, 2, 2]


def test_by_priority_the_most_urgent_is_admitted_first_and_ties_go_to_the_earlier():
    driver = Driver(policy="priority", max_num_seqs=1)
    driver.add("late", priority=1, arrival_time=9)
    driver.add("early", priority=1, arrival_time=2)
    driver.add("urgent", priority=-5, arrival_time=10)
    driver.add("b", priority=1, arrival_time=5)
    driver.add("a", priority=1, arrival_time=5)
    order = []
    while driver.scheduler.has_unfinished_requests():
        step, _ = driver.step()
        order += [new.req_id for new in step.new_reqs]
    assert order == ["urgent", "early", "a", "b", "late"]


def test_no_more_adapters_in_a_step_than_there_is_room_for():
    driver = Driver(max_loras=2)
    for name, lora in [("a", "x"), ("b", "y"), ("c", "z"), ("d", "x"), ("e", None)]:
        driver.add(name, lora=lora, max_tokens=2 if name == "a" else 4)
    step, _ = driver.step()
    assert list(step.num_scheduled_tokens) == ["a", "b", "d", "e"]
    driver.steps(3)
    assert "c" not in driver.running  # d still needs x
    step, _ = driver.step()
    assert "c" in step.num_scheduled_tokens


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_that_was_passed_over_goes_before_those_behind_it(policy):
    driver = Driver(policy=policy, max_loras=1, max_num_seqs=2)
    driver.add("a", lora="x", max_tokens=3)
    driver.add("b", lora="y", max_tokens=3)
    driver.add("c", lora="x", max_tokens=3)
    driver.add("d", lora="x", max_tokens=3)
    assert list(driver.step()[0].num_scheduled_tokens) == ["a", "c"]
    driver.steps(2)
    assert list(driver.step()[0].num_scheduled_tokens) == ["b"]


def test_by_priority_one_that_was_passed_over_yields_to_a_more_urgent_one():
    driver = Driver(policy="priority", max_loras=1, max_num_seqs=1)
    driver.add("a", lora="x", max_tokens=2)
    driver.step()
    driver.add("b", lora="y", max_tokens=2)
    driver.step()
    driver.add("c", lora="z", max_tokens=2, priority=-1)
    assert list(driver.step()[0].num_scheduled_tokens) == ["c"]


def test_a_connector_that_cannot_say_yet_is_asked_again_and_others_go_ahead():
    driver, connector = connected({"a": (None, False)})
    driver.add("a")
    driver.add("b")
    assert list(driver.step()[0].num_scheduled_tokens) == ["b"]
    assert driver.scheduler.has_work()
    connector.offers["a"] = (0, False)
    assert list(driver.step()[0].num_scheduled_tokens) == ["b", "a"]
    assert connector.asked("match", "a") == [(0,), (0,)]


@pytest.mark.parametrize(("offered", "used"), [(8, 8), (99, 10)])
def test_tokens_from_outside_that_are_there_are_not_computed_but_for_the_last(offered: int, used: int):
    driver, connector = connected({"a": (offered, False)})
    request = driver.add("a", prompt=11)
    step = driver.schedule()
    assert step.num_scheduled_tokens == {"a": 11 - used}
    assert step.new_reqs[0].num_computed_tokens == used
    assert connector.asked("alloc", "a") == [(used,)]
    driver.arrive(request, 0, used)
    driver.finish(step)
    assert driver.scheduler.stats().prompt_tokens_received == used


# A request's prompt and the most tokens of its answer. Seven blocks of eight are three and four; a number of tokens is no one else's.
@pytest.mark.parametrize(
    ("reserve", "num_blocks", "first", "then", "admitted", "preempts"),
    [
        # The first needs three blocks in the end. The second needs four, and two of them would be missing. The third must not overtake.
        pytest.param(Reserve.SEQUENCE, 6, (4, 8), [(4, 12), (2, 2)], [], False, id="whole or not at all"),
        pytest.param(Reserve.PROMPT, 6, (4, 8), [(4, 8), (4, 8)], ["b", "c"], True, id="answers are not reserved for"),
        # Five blocks of seven; it shares two, and needs two more.
        pytest.param(Reserve.SEQUENCE, 8, (range(12), 8), [(range(12), 4)], ["b"], False, id="cached blocks count"),
        # Three of eight, and six. Its first chunk would fit, and the running request would soon be short of blocks.
        pytest.param(Reserve.PROMPT, 9, (12, 10), [(24, 2)], [], False, id="no prompt is begun piece by piece"),
        pytest.param(Reserve.NONE, 9, (12, 10), [(24, 2)], ["b"], True, id="unless nothing is reserved"),
        # Three of six; it shares three, and needs one more.
        pytest.param(
            Reserve.PROMPT, 7, (range(12), 6), [([*range(12), 7, 8, 9], 2)], ["b"], False, id="cached prompts count"
        ),
    ],
)
def test_a_request_is_admitted_when_what_is_reserved_for_it_is_there(
    reserve: Reserve,
    num_blocks: int,
    first: tuple[Any, int],
    then: list[tuple[Any, int]],
    admitted: list[str],
    preempts: bool,
) -> None:
    driver = Driver(num_blocks=num_blocks, max_num_batched_tokens=8, reserve=reserve)
    driver.add("a", *first)
    driver.steps(2)
    for name, request in zip("bc", then, strict=False):
        driver.add(name, *request)
    step, _ = driver.step()
    assert [name for name in step.num_scheduled_tokens if name != "a"] == admitted
    driver.run()
    assert (driver.scheduler.stats().preemptions > 0) == preempts
    assert [len(driver.outputs[name]) for name in driver.outputs] == [most for _, most in (first, *then)]


def test_a_long_prompt_with_a_window_needs_only_what_it_holds_at_once():
    driver = Driver(groups=(sliding(5),), num_blocks=8, max_num_batched_tokens=8, reserve=Reserve.PROMPT, caching=False)
    driver.add("a", prompt=60, max_tokens=3)
    driver.run()
    assert len(driver.outputs["a"]) == 3

"""Waiting requests: which is admitted, which cached tokens it finds, and what makes it wait."""

from __future__ import annotations

import pytest

from tandem.engine.config import Reserve
from tandem.wire.sampling import SamplingParams
from tests.engine.scheduling.driving import BLOCK, Driver, FakeConnector, sliding


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


def test_prompt_logprobs_are_computed_whatever_is_cached():
    driver = Driver()
    driver.add("a", list(range(10)))
    driver.run()
    driver.add("b", list(range(10)), sampling=SamplingParams(max_tokens=1, prompt_logprobs=1))
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
    connector = FakeConnector()
    connector.offers["a"] = (None, False)
    driver = Driver(connector=connector)
    driver.add("a")
    driver.add("b")
    assert list(driver.step()[0].num_scheduled_tokens) == ["b"]
    assert driver.scheduler.has_work()
    connector.offers["a"] = (0, False)
    assert list(driver.step()[0].num_scheduled_tokens) == ["b", "a"]
    assert connector.asked("match", "a") == [(0,), (0,)]


def test_tokens_from_outside_that_are_there_are_not_computed():
    connector = FakeConnector()
    connector.offers["a"] = (8, False)
    driver = Driver(connector=connector)
    request = driver.add("a", prompt=11)
    step = driver.schedule()
    assert step.num_scheduled_tokens == {"a": 3}
    assert step.new_reqs[0].num_computed_tokens == 8
    assert connector.asked("alloc", "a") == [(8,)]
    driver.arrive(request, 0, 8)
    driver.finish(step)
    assert driver.scheduler.stats().prompt_tokens_received == 8


def test_of_all_tokens_from_outside_the_last_is_computed_all_the_same():
    connector = FakeConnector()
    connector.offers["a"] = (99, False)
    driver = Driver(connector=connector)
    request = driver.add("a", prompt=11)
    step = driver.schedule()
    assert step.num_scheduled_tokens == {"a": 1}
    assert connector.asked("alloc", "a") == [(10,)]
    driver.arrive(request, 0, 10)
    driver.finish(step)


def test_a_request_is_admitted_whole_or_not_at_all():
    driver = Driver(num_blocks=6, reserve=Reserve.SEQUENCE)
    driver.add("a", prompt=4, max_tokens=8)  # three blocks in the end
    driver.add("b", prompt=4, max_tokens=12)  # four, of which two would not be there in the end
    driver.add("c", prompt=2, max_tokens=2)
    assert list(driver.step()[0].num_scheduled_tokens) == ["a"]
    driver.run()
    assert driver.scheduler.stats().preemptions == 0
    assert [len(driver.outputs[name]) for name in "abc"] == [8, 12, 2]


def test_without_reservation_the_same_requests_are_admitted_at_once():
    driver = Driver(num_blocks=6)
    for name in "abc":
        driver.add(name, prompt=4, max_tokens=8)
    assert list(driver.step()[0].num_scheduled_tokens) == ["a", "b", "c"]


def test_what_is_cached_counts_for_a_whole_admission():
    driver = Driver(num_blocks=8, reserve=Reserve.SEQUENCE)
    driver.add("a", list(range(12)), max_tokens=8)  # five blocks of seven
    driver.step()
    driver.add("b", list(range(12)), max_tokens=4)  # shares two, needs two more
    assert "b" in driver.step()[0].num_scheduled_tokens


def test_a_prompt_that_does_not_fit_is_not_begun_piece_by_piece():
    """Its first chunk would fit. Beside it the running request would be short of blocks in a few steps."""
    driver = Driver(num_blocks=9, max_num_batched_tokens=8, reserve=Reserve.PROMPT)
    driver.add("a", prompt=12, max_tokens=10)
    driver.steps(2)  # three blocks of eight
    driver.add("b", prompt=24, max_tokens=2)  # six
    assert list(driver.step()[0].num_scheduled_tokens) == ["a"]
    driver.run()
    assert driver.scheduler.stats().preemptions == 0
    assert [len(driver.outputs[name]) for name in "ab"] == [10, 2]


def test_without_a_reservation_a_prompt_is_begun_with_what_there_is():
    driver = Driver(num_blocks=9, max_num_batched_tokens=8, reserve=Reserve.NONE)
    driver.add("a", prompt=12, max_tokens=10)
    driver.steps(2)
    driver.add("b", prompt=24, max_tokens=2)
    assert "b" in driver.step()[0].num_scheduled_tokens
    driver.run()
    assert driver.scheduler.stats().preemptions > 0


def test_what_is_cached_counts_for_a_prompts_reservation():
    driver = Driver(num_blocks=7, max_num_batched_tokens=8, reserve=Reserve.PROMPT)
    driver.add("a", list(range(12)), max_tokens=6)
    driver.steps(2)  # three blocks of six
    driver.add("b", [*range(12), 77, 78, 79], max_tokens=2)  # shares three, needs one more
    assert "b" in driver.step()[0].num_scheduled_tokens


def test_a_long_prompt_with_a_window_needs_only_what_it_holds_at_once():
    driver = Driver(groups=(sliding(5),), num_blocks=8, max_num_batched_tokens=8, reserve=Reserve.PROMPT, caching=False)
    driver.add("a", prompt=60, max_tokens=3)
    driver.run()
    assert len(driver.outputs["a"]) == 3

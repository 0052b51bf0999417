"""Running requests: the token budget, the limits, and the order."""

from __future__ import annotations

import pytest

from tandem.base.errors import ConfigurationError
from tandem.engine.config import CacheConfig, SchedulerConfig
from tandem.engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.driving import BLOCK, FULL, Driver


def test_running_requests_are_served_in_order_of_admission_before_anybody_is_admitted():
    driver = Driver(max_num_batched_tokens=8)
    driver.add("b", prompt=4)
    driver.add("a", prompt=3)
    driver.step()
    driver.add("c", prompt=20)
    step, _ = driver.step()
    assert list(step.num_scheduled_tokens.items()) == [("b", 1), ("a", 1), ("c", 6)]


def test_one_budget_for_all_and_never_more():
    driver = Driver(max_num_batched_tokens=10)
    for name in "abcd":
        driver.add(name, prompt=7, max_tokens=6)
    while driver.scheduler.has_unfinished_requests():
        step, _ = driver.step()
        assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values()) <= 10


def test_the_chunk_cap_leaves_budget_to_others():
    driver = Driver(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    driver.add("long", prompt=15)
    driver.add("short", prompt=5)
    assert [driver.step()[0].num_scheduled_tokens for _ in range(3)] == [
        {"long": 6, "short": 5},
        {"long": 6, "short": 1},
        {"long": 3, "short": 1},
    ]


def test_the_last_position_of_the_context_is_never_an_input():
    driver = Driver(max_model_len=10)
    driver.add("a", prompt=5, max_tokens=100)
    driver.run()
    assert len(driver.outputs["a"]) == 5  # ten tokens in all, of which nine were computed
    assert driver.updates["a"][-1].finish == "length"


def test_a_context_configured_shorter_than_the_models_rules():
    scheduler = Scheduler(SchedulerConfig(max_model_len=50), CacheConfig(), (FULL,), 100, max_model_len=90)
    assert scheduler.max_model_len == 50
    assert Driver(max_model_len=90).scheduler.max_model_len == 90


def test_the_context_ends_where_the_whole_pool_does():
    driver = Driver(num_blocks=4, max_model_len=1000)  # three blocks that can be used
    driver.add("a", prompt=5, max_tokens=100)
    driver.run()
    assert len(driver.outputs["a"]) == 3 * BLOCK - 5
    assert driver.free_blocks == 3


def test_without_chunks_a_prompt_waits_until_it_fits_whole():
    driver = Driver(max_num_batched_tokens=30, max_model_len=31, chunked_prefill=False)
    driver.add("a", prompt=20)
    driver.add("b", prompt=15)
    driver.add("c", prompt=2)  # would fit, and waits its turn all the same
    assert [driver.step()[0].num_scheduled_tokens for _ in range(2)] == [{"a": 20}, {"a": 1, "b": 15, "c": 2}]


def test_without_chunks_a_budget_below_the_context_is_refused():
    with pytest.raises(ConfigurationError, match="chunked_prefill"):
        Driver(max_num_batched_tokens=30, max_model_len=32, chunked_prefill=False)

"""Booking a step's results: tokens, finish reasons, and the updates for routers."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.base.errors import InternalError, InvalidLogits
from tandem.engine.request import RequestStatus
from tandem.engine.scheduling.output import CachedRequestData, ModelOutput, SchedulerOutput
from tandem.wire.sampling import FinishReason, SamplingParams, TokenLogprobs
from tests.engine.scheduling.driving import FULL, Driver, unique_tokens
from tests.engine.scheduling.world import STATES


def answer(driver: Driver, *tokens: int, **output: object):
    """Runs one step in which the model samples `tokens` for request a, and returns the last update."""
    updates = driver.book(driver.schedule(), ModelOutput({"a": list(tokens)}, **output))  # type: ignore[arg-type]
    return updates[-1]


END = 2


@pytest.mark.parametrize(
    ("asked", "fields", "sampled", "stop"),
    [
        ({}, {}, [5, END], END),
        ({}, {"eos_token_ids": frozenset({3})}, [3], 3),
        ({"ignore_eos": True, "stop_token_ids": [8]}, {}, [END, 8], 8),
        ({"min_tokens": 3}, {}, [END, END, END], END),
        ({"max_tokens": 2, "min_tokens": 5}, {}, [4, 4], None),
        ({"max_tokens": 1}, {}, [END], END),
        ({"max_tokens": 99}, {"prompt": 10}, [4, 4], None),  # the context's end
        ({"max_tokens": 4}, {"output_token_ids": [7, 7]}, [5, 5], None),  # two before it moved
    ],
)
def test_a_request_ends_with_its_last_token_and_says_why(
    asked: dict[str, Any], fields: dict[str, Any], sampled: list[int], stop: int | None
) -> None:
    driver = Driver(eos=[END], max_model_len=12)
    request = driver.add("a", sampling=SamplingParams(**{"max_tokens": 9, **asked}), **fields)
    before = request.num_output_tokens
    *others, last = (answer(driver, token) for token in sampled)
    assert all(update.finish is None for update in others)
    assert (last.start, last.token_ids, last.stop_token) == (before + len(others), sampled[-1:], stop)
    assert last.finish is (FinishReason.LENGTH if stop is None else FinishReason.STOP)
    status = RequestStatus.FINISHED_LENGTH_CAPPED if stop is None else RequestStatus.FINISHED_STOPPED
    assert request.status is status
    assert not driver.scheduler.has_unfinished_requests()


def test_nothing_behind_the_end_is_kept():
    driver = Driver(eos=[2])
    request = driver.add("a", max_tokens=9)
    answer(driver, 5, draft_token_ids={"a": [6, 2, 7]})
    update = answer(driver, 6, 2, 7, 9)
    assert update.token_ids == [6, 2]
    assert (update.stop_token, request.output_token_ids) == (2, [5, 6, 2])


def test_log_probabilities_follow_their_tokens():
    logprobs = [TokenLogprobs(token, -1.0, 1) for token in (6, 2, 7)]
    driver = Driver(eos=[2])
    driver.add("a", max_tokens=9)
    assert answer(driver, 5, draft_token_ids={"a": [6, 2]}, logprobs={"a": logprobs[:1]}).logprobs == logprobs[:1]
    assert answer(driver, 6, 2, 7, logprobs={"a": logprobs}).logprobs == logprobs[:2]


def test_prompt_log_probabilities_are_reported_with_the_first_token():
    found = [None, TokenLogprobs(1, -1.0, 1)]
    driver = Driver()
    driver.add("a")
    assert answer(driver, 5, prompt_logprobs={"a": found}).prompt_logprobs == found
    assert answer(driver, 5).prompt_logprobs is None


def test_prompt_log_probabilities_that_come_before_any_token_are_not_lost():
    driver = Driver(max_num_batched_tokens=6)
    driver.add("a", prompt=6, max_tokens=9, output_token_ids=[1, 2, 3])
    updates = driver.book(driver.schedule(), ModelOutput({}, prompt_logprobs={"a": [None]}))
    assert [(update.start, update.token_ids, update.prompt_logprobs) for update in updates] == [(3, [], [None])]


def test_a_new_request_under_an_old_id_gets_nothing_of_the_old_ones_step():
    driver = Driver()
    driver.add("a")
    step = driver.schedule()
    driver.abort("a")
    again = driver.add("a", prompt=9)
    assert driver.finish(step) == []
    assert again.num_tokens == 9
    driver.run()
    assert len(driver.outputs["a"]) == 4


def test_more_tokens_than_drafts_were_given_is_a_bug_and_said_to_be_one():
    driver = Driver()
    driver.add("a")
    with pytest.raises(InternalError, match="drafts"):
        driver.scheduler.update_from_output(driver.schedule(), ModelOutput({"a": [5, 6]}))


def test_an_error_of_the_model_ends_its_request_alone_and_nobody_finds_its_kv():
    driver = Driver()
    request = driver.add("a", prompt=8)
    driver.add("b", prompt=8)
    step = driver.schedule()
    updates = driver.book(step, ModelOutput({"b": [7]}, errors={"a": InvalidLogits("no number")}))
    assert [(update.request_id, update.finish, update.token_ids) for update in updates] == [
        ("a", FinishReason.ERROR, []),
        ("b", None, [7]),
    ]
    assert updates[0].error == InvalidLogits("no number").to_wire()
    assert request.status is RequestStatus.FINISHED_ERROR
    stats = driver.scheduler.stats()
    assert (stats.model_errors, stats.running) == (1, 1)
    driver.abort("b")
    # The same prompts again: nothing that was cached before the error is found, because some of it may have led to it.
    for name in ("b", "a"):
        driver.add(f"{name}2", prompt=[*unique_tokens(name, 8), 5])
    counts = driver.schedule().num_scheduled_tokens
    assert counts == {"b2": 9, "a2": 9}


@pytest.mark.parametrize("asked_before", [False, True])
def test_what_a_request_computes_after_a_reset_from_blocks_before_it_is_never_found(asked_before):
    """Also not the second time, when other blocks have been cached under the same names."""
    driver = Driver()
    prompt = unique_tokens("p", 8)
    running = driver.add("running", prompt, max_tokens=9)
    driver.step()
    driver.scheduler.reset_prefix_cache()
    if asked_before:
        driver.add("between", [*prompt, 5], max_tokens=1)
    for _ in range(4):
        driver.step()
    old = set(driver.scheduler.state.cache.block_ids("running")[0])
    driver.run()
    continued = list(running.all_token_ids)
    for turn in range(2):
        again = driver.add(f"again{turn}", continued, max_tokens=1)
        hits, _ = driver.scheduler.find_prefix(again)
        assert not old & set(hits[0])
        driver.run()


def test_a_new_request_is_described_in_full_once():
    driver = Driver()
    sampling = SamplingParams(max_tokens=3, temperature=0.5, seed=7)
    request = driver.add("a", prompt=6, sampling=sampling, lora="x")
    (new,) = driver.step()[0].new_reqs
    assert (new.req_id, new.token_ids, len(new.facts.prompt_token_ids)) == ("a", request.prompt_token_ids, 6)
    assert (new.facts.sampling, new.block_ids, new.num_computed_tokens, new.facts.lora) == (sampling, [[1, 2]], 0, "x")
    step, _ = driver.step()
    assert step.new_reqs == []
    assert step.cached_reqs.req_ids == ["a"]


def test_afterwards_only_new_blocks_and_progress_are_told():
    driver = Driver()
    driver.add("a", prompt=6, max_tokens=5)
    driver.step()
    told = [driver.step()[0].cached_reqs for _ in range(3)]
    assert [cached.num_computed_tokens for cached in told] == [[6], [7], [8]]
    assert [cached.new_block_ids for cached in told] == [[None], [None], [[[3]]]]
    assert all(not cached.resumed_req_ids and not cached.resumed_token_ids for cached in told)


def test_the_runner_hears_of_an_end_in_the_next_step_and_once():
    driver = Driver()
    driver.add("a", max_tokens=1)
    driver.add("b", max_tokens=3)
    assert driver.step()[0].finished_req_ids == set()
    assert driver.step()[0].finished_req_ids == {"a"}
    assert driver.step()[0].finished_req_ids == set()


def test_blocks_of_a_new_or_resumed_request_are_not_news_of_a_running_one():
    step = SchedulerOutput(
        new_reqs=[],
        cached_reqs=CachedRequestData(
            req_ids=["a", "b", "c"],
            num_computed_tokens=[1, 1, 0],
            new_block_ids=[[[5]], None, [[7, 8]]],
            resumed_req_ids={"c"},
        ),
        num_scheduled_tokens={"a": 1, "b": 1, "c": 8},
        total_num_scheduled_tokens=10,
        spec_token_ids={},
        finished_req_ids=set(),
        preempted_req_ids=set(),
    )
    assert [step.new_block_ids(name) for name in "abcd"] == [[[5]], (), (), ()]


def test_a_step_ends_where_states_are_kept_and_the_next_one_copies_them():
    driver = Driver(groups=(FULL, STATES))
    driver.add("a", prompt=11, max_tokens=2)
    first, second = driver.step()[0], driver.step()[0]
    assert first.num_scheduled_tokens == {"a": 8}
    assert first.state_copies == []
    assert second.num_scheduled_tokens == {"a": 3}
    own = first.new_reqs[0].block_ids[1]
    assert [source for source, _ in second.state_copies] == own
    assert [target for _, target in second.state_copies] == second.checkpoint_blocks
    assert driver.step()[0].state_copies == []


def test_a_prompt_that_must_not_be_cut_leaves_no_states():
    driver = Driver(groups=(FULL, STATES), chunked_prefill=False, max_num_batched_tokens=1000)
    driver.add("a", prompt=11, max_tokens=2)
    assert driver.step()[0].num_scheduled_tokens == {"a": 11}

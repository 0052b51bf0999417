"""Drafts are packed and verified, taken back when wrong, and never found by another request."""

from __future__ import annotations

import pytest

from tandem.engine.scheduling.output import ModelOutput
from tests.engine.scheduling.driving import BLOCK, Driver
from tests.engine.scheduling.model import alone, next_token


def sample(driver: Driver, tokens: list[int], drafts: list[int] | None = None):
    step = driver.schedule()
    output = ModelOutput({"a": tokens}, draft_token_ids={"a": drafts} if drafts else {})
    return step, driver.book(step, output)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rejected_drafts_are_taken_back(accepted):
    driver = Driver()
    request = driver.add("a", prompt=6, max_tokens=20)
    sample(driver, [5], drafts=[1, 2, 3])
    step = driver.schedule()
    assert request.num_computed_tokens == 6 + 1 + 3
    driver.book(step, ModelOutput({"a": [1, 2, 3, 9][: accepted + 1]}))
    assert request.num_computed_tokens == 6 + 1 + accepted
    assert request.num_tokens == request.num_computed_tokens + 1
    stats = driver.scheduler.stats()
    assert (stats.speculative_drafted, stats.speculative_accepted) == (3, accepted)
    assert stats.speculative_steps == 1
    assert stats.speculative_accepted_at == [int(position < accepted) for position in range(3)]


def test_placeholders_of_rejected_drafts_are_taken_back_with_them():
    driver = Driver()
    request = driver.add("a", prompt=6, max_tokens=20)
    sample(driver, [5], drafts=[1, 2, 3])
    step = driver.schedule()
    request.num_output_placeholders = 4
    driver.scheduler.update_from_output(step, ModelOutput({"a": [1, 9]}))
    assert request.num_output_placeholders == 2


def test_drafts_beyond_the_budget_are_cut_off():
    driver = Driver(max_num_batched_tokens=8)
    driver.add("a", prompt=6, max_tokens=20)
    driver.add("b", prompt=2, max_tokens=20)
    step = driver.schedule()
    driver.book(step, ModelOutput({"a": [5], "b": [5]}, draft_token_ids={"a": [1] * 5, "b": [2] * 5}))
    step = driver.schedule()
    assert step.num_scheduled_tokens == {"a": 6, "b": 2}
    assert step.spec_token_ids == {"a": [1] * 5, "b": [2]}


def test_drafts_beyond_the_context_are_cut_off():
    driver = Driver(max_model_len=10)
    driver.add("a", prompt=6, max_tokens=20)
    sample(driver, [5], drafts=[1] * 9)
    step = driver.schedule()
    assert step.num_scheduled_tokens == {"a": 3}
    assert step.spec_token_ids == {"a": [1, 1]}


def test_a_block_with_drafts_in_it_is_not_found_by_others():
    driver = Driver()
    request = driver.add("a", prompt=6, max_tokens=20)
    sample(driver, [5], drafts=[1, 2])  # seven tokens are certain, nine are computed
    driver.schedule()
    with_drafts = [*request.prompt_token_ids, 5, 1, 2]
    driver.add("b", with_drafts, max_tokens=1)
    step = driver.schedule()
    assert step.new_reqs[0].num_computed_tokens == BLOCK


def test_accepted_drafts_are_found_once_they_are_certain():
    driver = Driver()
    request = driver.add("a", prompt=6, max_tokens=20)
    sample(driver, [5], drafts=[1, 2])
    sample(driver, [1, 2, 3])
    sample(driver, [4])
    driver.add("b", [*request.all_token_ids, 9], max_tokens=1)
    assert driver.schedule().new_reqs[0].num_computed_tokens == 2 * BLOCK


def test_room_is_kept_for_the_drafts_of_the_next_step():
    driver = Driver(num_speculative_tokens=3)
    driver.add("a", prompt=6, max_tokens=9)
    (new,) = driver.step()[0].new_reqs
    assert len(new.block_ids[0]) == 3  # six tokens and three drafts


@pytest.mark.parametrize("good", [0, 1, 2])
def test_speculation_changes_the_number_of_steps_and_not_the_answer(good):
    def propose(request_id: str, tokens: list[int]) -> list[int]:
        drafts: list[int] = []
        for _ in range(good):
            drafts.append(next_token(tokens + drafts))
        return [*drafts, -1]

    driver = Driver(num_speculative_tokens=3)
    driver.model.propose = propose
    request = driver.add("a", prompt=6, max_tokens=30)
    steps = driver.run()
    assert driver.outputs["a"] == alone(request.prompt_token_ids, 30)
    assert steps == 1 + -(-29 // (good + 1)) + 1  # and one to tell the runner

"""What the scheduler sends to the runner: everything once, then only what changed."""

from __future__ import annotations

from tandem.engine.scheduling.output import CachedRequestData, SchedulerOutput
from tandem.wire.sampling import SamplingParams
from tests.engine.scheduling.driving import FULL, Driver, sliding
from tests.engine.scheduling.world import STATES


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


def test_blocks_of_one_request_are_found_by_its_id():
    driver = Driver(groups=(FULL, sliding(8)))
    driver.add("a", prompt=6, max_tokens=9)
    driver.add("b", prompt=4, max_tokens=9)
    driver.step()  # two blocks in each group for a, one for b
    step, _ = driver.step()
    assert step.new_block_ids("b") == [[7], [8]]
    assert step.new_block_ids("a") == ()
    assert step.new_block_ids("unknown") == ()


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
    assert [step.new_block_ids(name) for name in "abc"] == [[[5]], (), ()]


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

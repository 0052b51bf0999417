"""Requests that run when nothing else does: they have no part in a step while another could compute, and give their blocks."""

from __future__ import annotations

import pytest

from tandem.engine.request import Request, RequestStatus
from tests.engine.scheduling.driving import Driver, FakeConnector, connected, consume, produce, received, sent
from tests.engine.scheduling.model import alone


def scheduled(driver: Driver) -> list[str]:
    return list(driver.step()[0].num_scheduled_tokens)


@pytest.mark.parametrize("read", [4, 6], ids=["in the middle of a prompt", "in an answer"])
def test_they_rest_while_others_compute_and_go_on_where_they_were(read: int) -> None:
    driver = Driver(max_num_batched_tokens=read)
    idle = driver.add("idle", prompt=6, max_tokens=6, when_idle=True)
    assert scheduled(driver) == ["idle"]
    driver.add("asked", prompt=4, max_tokens=3)
    driver.add("late", prompt=2, max_tokens=2, when_idle=True)
    for _ in range(3):
        assert scheduled(driver) == ["asked"]
    assert idle.num_computed_tokens == read
    stats = driver.scheduler.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (0, 0, 0), "routers count none of it"
    step, _ = driver.step()
    assert step.num_scheduled_tokens == {"idle": max(6 - read, 1), "late": 2}, "it kept its blocks"
    driver.run()
    assert idle.output_token_ids == alone(idle.prompt_token_ids, 6)
    assert idle.num_preemptions == 0


def test_what_it_takes_is_counted_apart() -> None:
    driver = Driver(max_num_batched_tokens=4)
    driver.add("idle", prompt=6, max_tokens=9, when_idle=True)
    for _ in range(3):
        step = driver.schedule()
        driver.scheduler.took(step, 0.5)
        driver.finish(step)
    stats = driver.scheduler.stats()
    assert (stats.idle_steps, stats.idle_seconds, stats.idle_tokens_read, stats.idle_tokens_written) == (3, 1.5, 6, 2)
    assert stats.decode_steps == 0, "routers and the autoscaler measure users' steps by these"
    assert stats.idle_blocks == 2
    driver.add("asked", prompt=6, max_tokens=3)
    step = driver.schedule()
    driver.scheduler.took(step, 0.5)
    driver.finish(step)
    stats = driver.scheduler.stats()
    assert (stats.idle_steps, stats.idle_blocks) == (3, 2)
    driver.run()
    assert driver.scheduler.stats().idle_blocks == 0


def test_the_last_that_rests_gives_its_blocks_to_a_request_in_line() -> None:
    driver = Driver(num_blocks=10, caching=False)  # nine blocks
    kept = driver.add("kept", prompt=7, max_tokens=6, when_idle=True)
    lost = driver.add("lost", prompt=7, max_tokens=6, when_idle=True)
    driver.steps(2)
    asked = driver.add("asked", prompt=21, max_tokens=6)
    assert scheduled(driver) == ["asked"]
    assert (kept.num_preemptions, lost.num_preemptions, lost.status) == (0, 1, RequestStatus.PREEMPTED)
    for _ in range(5):
        assert scheduled(driver) == ["asked"]
    driver.run()
    for request in (kept, lost, asked):
        assert request.output_token_ids == alone(request.prompt_token_ids, 6)


def test_a_running_request_that_grows_takes_their_blocks_before_anothers() -> None:
    driver = Driver(num_blocks=8, caching=False)  # seven blocks
    idle = driver.add("idle", prompt=7, max_tokens=4, when_idle=True)
    driver.steps(2)  # it has three blocks
    first = driver.add("first", prompt=7, max_tokens=4)
    second = driver.add("second", prompt=7, max_tokens=4)
    driver.steps(3)
    assert (idle.num_preemptions, first.num_preemptions, second.num_preemptions) == (1, 0, 0)
    driver.run()
    for request in (idle, first, second):
        assert request.output_token_ids == alone(request.prompt_token_ids, 4)


def test_ended_ones_whose_kv_waits_for_its_consumer_give_as_many_blocks_as_are_missing() -> None:
    connector = FakeConnector()
    connector.keeps |= {"first", "user", "second", "third"}
    driver = Driver(connector=connector, num_blocks=12, caching=False)  # eleven blocks
    for name in ("first", "user", "second", "third"):
        driver.add(name, prompt=7, max_tokens=1, transfer=produce(name), when_idle=name != "user")
        driver.step()
    stats = driver.scheduler.stats()
    assert (stats.held_blocks, stats.idle_blocks, stats.free_blocks) == (8, 6, 3)
    driver.add("line", prompt=25, max_tokens=1, when_idle=True)
    driver.step()
    assert called_back(connector) == [], "lines wait for each other"
    driver.abort("line")
    asked = driver.add("asked", prompt=25, max_tokens=1)  # seven blocks
    driver.step()
    assert called_back(connector) == ["third", "second"]
    driver.step(sent("second"))
    assert called_back(connector) == ["third", "second", "first"], "the third may be on its way"
    driver.step(sent("third"))
    driver.step()
    assert asked.output_token_ids == alone(asked.prompt_token_ids, 1)
    assert driver.scheduler.stats().idle_blocks == 2
    driver.step(sent("first", "user"))
    assert driver.free_blocks == 11


def called_back(connector: FakeConnector) -> list[str]:
    return [str(call[1]) for call in connector.calls if call[0] == "call back"]


def test_one_that_is_not_begun_leaves_the_line_when_it_is_aborted() -> None:
    driver = Driver()
    driver.add("asked", max_tokens=3)
    driver.add("waits", when_idle=True)
    driver.step()
    assert driver.abort("waits") == ["waits"]
    driver.run()
    rests = driver.add("rests", max_tokens=9, when_idle=True)
    driver.steps(2)
    driver.add("other", max_tokens=3)
    driver.step()
    assert driver.abort("rests") == ["rests"]
    assert rests.num_computed_tokens
    driver.run()
    assert driver.scheduler.stats().free_blocks == 99


def test_they_rest_while_a_requests_kv_is_on_its_way() -> None:
    driver, _ = connected({"asked": (6, True)})
    idle = driver.add("idle", max_tokens=5, when_idle=True)
    driver.step()
    request = driver.add("asked", prompt=6, max_tokens=3, transfer=consume())
    assert scheduled(driver) == []
    assert scheduled(driver) == []
    assert not driver.scheduler.has_work()
    driver.arrive(request, 0, 6)
    driver.step(received("asked", alone(request.prompt_token_ids, 1)[0], 6))
    assert scheduled(driver) == ["asked"]
    driver.run()
    assert idle.output_token_ids == alone(idle.prompt_token_ids, 5)


def test_they_go_on_while_a_requests_kv_cannot_come_yet() -> None:
    """As sixteen others took a second and more for each token, its six are not here before six seconds. A step may take one."""
    now = 0.0
    driver, connector = connected(clock=lambda: now, step_target_ms=2000)

    def waits(name: str) -> Request:
        connector.offers[name] = (6, True)
        request = driver.add(name, prompt=6, max_tokens=1, transfer=consume(), arrival_time=now)
        driver.step()
        return request

    def comes(request: Request) -> None:
        driver.arrive(request, 0, 6)
        driver.step(received(request.request_id, alone(request.prompt_token_ids, 1)[0], 6))

    for number in range(16):
        request = waits(f"before {number}")
        now += 6.0 + number % 3
        comes(request)
    driver.add("idle", max_tokens=20, when_idle=True)
    request = waits("asked")
    for seconds in (1.0, 3.9):
        now += seconds
        assert scheduled(driver) == ["idle"]
    now += 0.2
    assert scheduled(driver) == []
    now += 60.0
    assert scheduled(driver) == []
    comes(request)
    assert scheduled(driver) == ["idle"]


def test_they_do_not_take_the_place_of_what_others_have_cached() -> None:
    driver = Driver(num_blocks=20)
    prompt = list(range(16))
    driver.add("asked", prompt=prompt, max_tokens=1)
    driver.run()
    shared = list(range(100, 108))
    for number in range(8):
        driver.add(f"idle {number}", prompt=[*shared, *range(200 + 10 * number, 208 + 10 * number)], when_idle=True)
        driver.run()
    again = driver.add("again", prompt=[*prompt, 7], max_tokens=1)
    beside = driver.add("beside", prompt=[*shared, 7], max_tokens=1)
    driver.run()
    assert (again.num_cached_tokens, beside.num_cached_tokens) == (16, 8)


def test_their_steps_stay_short_because_a_request_may_come() -> None:
    driver = Driver(step_target_ms=10, max_num_batched_tokens=2000, max_model_len=4000, num_blocks=2000)
    driver.add("idle", prompt=3000, max_tokens=1, when_idle=True)
    for seconds, tokens in ((0.001, 32), (0.001, 64), (0.001, 128), (0.01, 256), (0.004, 128)):
        step = driver.schedule()
        assert step.total_num_scheduled_tokens == tokens  # at most twice as many, and as fit into half of the target
        driver.scheduler.took(step, seconds)
        driver.finish(step)


def test_their_steps_change_no_step_of_others() -> None:
    """Short steps seem slow, because reading the weights takes most of them."""
    driver = Driver(step_target_ms=200, max_num_batched_tokens=2000, max_model_len=4000, num_blocks=2000)
    driver.add("idle", prompt=100, max_tokens=1, when_idle=True)
    step = driver.schedule()
    driver.scheduler.took(step, 1.0)
    driver.finish(step)
    driver.add("asked", prompt=1500, max_tokens=1)
    assert driver.schedule().num_scheduled_tokens == {"asked": 1500}


def test_no_step_is_planned_while_one_of_theirs_runs() -> None:
    """A request that came in between would wait for both."""
    driver = Driver()
    driver.add("idle", prompt=6, max_tokens=9, when_idle=True)
    step = driver.schedule()
    assert not driver.scheduler.leave_open(step)
    driver.finish(step)
    driver.add("asked", prompt=6, max_tokens=9)
    step = driver.schedule()
    assert list(step.num_scheduled_tokens) == ["asked"]
    assert driver.scheduler.leave_open(step)


def test_their_drafts_are_as_many_as_others_and_the_rejected_are_no_written_tokens() -> None:
    """They are paid from the same account. The autoscaler takes what users' requests wrote to be all tokens but these."""
    drafted = []
    for when_idle in (False, True):
        driver = Driver(num_speculative_tokens=3)
        driver.model.propose = lambda request_id, tokens: [-1, -1, -1]
        for number in range(40):
            driver.add(f"{number}", prompt=6, max_tokens=8, when_idle=when_idle)
            timed(driver)
        stats = driver.scheduler.stats()
        drafted.append(stats.speculative_drafted)
    assert drafted[1] == drafted[0] > 0
    assert stats.idle_tokens_written == stats.output_tokens == 40 * 8


def timed(driver: Driver) -> None:
    """Steps until no work is left. A step takes longer the more tokens it computes."""
    while driver.scheduler.has_work():
        step = driver.schedule()
        output = driver.model.execute(step)
        limits = step.draft_limits or {}
        output.draft_token_ids = {
            name: drafts[: limits[name]] for name, drafts in output.draft_token_ids.items() if name in limits
        }
        driver.scheduler.took(step, 0.004 + 0.002 * step.total_num_scheduled_tokens)
        driver.book(step, output)

"""The statistics by which routers plan are right and cheap."""

from __future__ import annotations

from tandem.base.errors import DeadlineExceeded, InternalError, InvalidImage, InvalidLogits, InvalidRequest
from tandem.engine.request import RequestStatus
from tandem.engine.scheduling.output import ModelOutput
from tandem.wire.requests import STEP_TOKEN_BOUNDS
from tests.engine.scheduling.driving import Driver, FakeConnector


def test_gauges_follow_the_requests():
    driver = Driver(max_num_seqs=2, max_num_batched_tokens=8)
    driver.add("a", prompt=6)
    driver.add("b", prompt=10)
    driver.add("c", prompt=7)
    stats = driver.scheduler.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (0, 3, 23)
    driver.step()  # all of a, two tokens of b
    stats = driver.scheduler.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (2, 1, 8 + 7)
    assert (stats.free_blocks, stats.total_blocks) == (99 - 3, 99)
    driver.abort("b", "c")
    stats = driver.scheduler.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (1, 0, 0)


def test_tokens_that_are_on_their_way_are_not_waiting_to_be_computed():
    connector = FakeConnector()
    connector.offers["a"] = (10, True)
    driver = Driver(connector=connector)
    driver.add("a", prompt=10)
    assert driver.scheduler.stats().waiting_tokens == 10
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.waiting, stats.blocked, stats.waiting_tokens) == (1, 1, 0)


def test_totals_add_up():
    driver = Driver(eos=[10_000])
    driver.add("a", list(range(9)), max_tokens=3)
    driver.add("b", list(range(9)), max_tokens=2)
    driver.add("c", max_tokens=9)
    driver.step()
    driver.abort("c")
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.prompt_tokens_computed, stats.prompt_tokens_cached) == (9 + 1 + 6, 8)
    assert stats.output_tokens == 3 + 2 + 1
    assert (stats.requests_started, stats.requests_finished) == (3, {"length": 2, "abort": 1})
    assert (stats.steps, stats.cached_blocks) == (4, 3)


def test_errors_that_clients_cause_are_counted_apart():
    driver = Driver()
    causes = {
        "a": InvalidRequest("the grammar is too large"),
        "b": DeadlineExceeded("too late"),
        "c": InternalError("a bug"),
        "d": None,
    }
    for name in [*causes, "e", "f"]:
        driver.add(name)
    for name, error in causes.items():
        driver.scheduler.finish_requests([name], RequestStatus.FINISHED_ERROR, error)
    errors = {"e": InvalidImage("no image"), "f": InvalidLogits("no number")}
    driver.book(driver.schedule(), ModelOutput({}, errors=errors))
    stats = driver.scheduler.stats()
    assert (stats.requests_finished, stats.client_errors) == ({"error": 6}, 3)


def test_what_a_preempted_request_computes_again_is_counted_again():
    driver = Driver(num_blocks=6, caching=False)
    driver.add("a", prompt=7, max_tokens=5)
    driver.add("b", prompt=7, max_tokens=5)
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.preemptions == 1
    assert stats.prompt_tokens_computed == 3 * 7
    assert stats.requests_admitted == 2


def test_steps_are_counted_by_their_tokens():
    driver = Driver(max_num_batched_tokens=16)
    driver.add("a", prompt=24, max_tokens=3)
    driver.run()
    stats = driver.scheduler.stats()
    by_size = dict(zip((*STEP_TOKEN_BOUNDS, None), stats.step_tokens, strict=True))
    assert {bound: count for bound, count in by_size.items() if count} == {16: 1, 8: 1, 1: 2}
    assert stats.tokens_scheduled == 16 + 8 + 2


def test_what_was_looked_for_is_counted_beside_what_was_found():
    connector = FakeConnector()
    driver = Driver(connector=connector)
    driver.add("a", list(range(9)), max_tokens=1)
    driver.run()
    driver.add("b", list(range(9)), max_tokens=1)
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.prompt_tokens_looked_up, stats.prompt_tokens_cached) == (18, 8)
    assert stats.prompt_tokens_asked == 9 + 1


def test_a_request_tells_how_long_it_stood_in_line():
    now = 10.0
    driver = Driver(max_num_seqs=1, clock=lambda: now)
    driver.add("a", prompt=3, max_tokens=2, arrival_time=9.5)
    driver.add("b", prompt=3, max_tokens=1, arrival_time=9.75)
    driver.step()
    now = 13.0
    driver.run()
    assert [driver.updates[name][0].queue_s for name in "ab"] == [0.5, 3.25]
    stats = driver.scheduler.stats()
    assert (stats.queue_seconds, stats.requests_admitted) == (3.75, 2)

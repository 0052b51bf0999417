"""The statistics by which routers plan are right and cheap."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidImage,
    InvalidLogits,
    InvalidRequest,
)
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.config import CacheConfig, SchedulerConfig
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.output import ModelOutput
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kvtransfer.base import ConnectorMetadata, ConnectorOutput, Handoff, SchedulerConnector
from tandem.wire.requests import STEP_TOKEN_BOUNDS, RequestFacts
from tandem.wire.sampling import SamplingParams
from tests.engine.made_requests import made_request
from tests.engine.scheduling.driving import BLOCK, Driver, FakeConnector, connected, produce


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


def test_a_request_whose_kv_is_on_its_way_has_no_tokens_to_compute_and_is_not_the_oldest_in_line():
    driver, _ = connected({"far": (10, True)}, max_num_seqs=1)
    driver.add("far", prompt=10, arrival_time=1.0)
    assert driver.scheduler.stats().waiting_tokens == 10
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.waiting, stats.blocked, stats.waiting_tokens, stats.oldest_arrival) == (1, 1, 0, None)
    driver.add("runs", arrival_time=2.0)
    driver.add("waits", arrival_time=3.0)
    driver.step()
    assert driver.scheduler.stats().oldest_arrival == 3.0


def test_totals_add_up():
    driver = Driver(eos=[10_000], connector=FakeConnector())
    driver.add("a", list(range(9)), max_tokens=3)
    driver.add("b", list(range(9)), max_tokens=2)
    driver.add("c", max_tokens=9)
    driver.step()
    driver.abort("c")
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.prompt_tokens_computed, stats.prompt_tokens_cached) == (9 + 1 + 6, 8)
    assert (stats.prompt_tokens_looked_up, stats.prompt_tokens_asked) == (9 + 9 + 6, 9 + 1 + 6)
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


def test_the_blocks_that_answers_will_want_are_guessed_from_those_that_have_ended():
    driver = Driver()

    def tokens_expected(name: str) -> int:
        """Of an answer that has one."""
        driver.add(name, prompt=8, max_tokens=300)
        driver.step()
        stats = driver.scheduler.stats()
        driver.abort(name)
        return (stats.wanted_blocks + stats.total_blocks - stats.free_blocks) * BLOCK - 8

    assumed = tokens_expected("a")
    assert tokens_expected("b") == assumed, "one that was aborted says nothing"
    for name, num_tokens, expected in (("c", 100, 100), ("d", 60, 96), ("e", 4, 88)):
        driver.add(name, prompt=8, max_tokens=num_tokens)
        driver.run()
        assert tokens_expected(f"after {name}") == expected
    for number in range(40):
        driver.add(f"short {number}", prompt=8, max_tokens=1)
        driver.run()
    assert tokens_expected("f") == 36, "it is expected to go on for a while"


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


@pytest.fixture
def driver() -> Driver:
    """One request runs, one waits, one loads, one is held; some blocks are cached and free."""
    driver, connector = connected(max_num_seqs=2)
    driver.add("gone", list(range(12)), max_tokens=1)
    driver.run()
    connector.keeps.add("held")
    driver.add("held", prompt=9, max_tokens=1, transfer=produce())
    driver.run()
    connector.offers["loads"] = (9, True)
    driver.add("loads", prompt=9)
    driver.add("runs", prompt=9, max_tokens=50)
    driver.add("runs too", prompt=9, max_tokens=50)
    driver.add("waits", prompt=9)
    driver.step()
    driver.scheduler.check_integrity()
    return driver


def state(driver: Driver):
    return driver.scheduler.state


def pool(driver: Driver):
    return state(driver).cache.pool


def table(driver: Driver, request_id: str) -> list[int]:
    return state(driver).cache.coordinator.managers[0].tables[request_id]


def running(driver: Driver):
    return driver.scheduler.requests["runs"]


BREAKAGES: dict[str, Callable[[Driver], object]] = {
    "a count that is too high": lambda d: pool(d).ref_counts.__setitem__(table(d, "runs")[0], 2),
    "a count that is too low": lambda d: pool(d).ref_counts.__setitem__(table(d, "runs")[0], 0),
    "a block of no request": lambda d: table(d, "runs").pop(),
    "a block of two that counts one": lambda d: table(d, "runs").append(table(d, "held")[0]),
    "a block that is used and free": lambda d: pool(d).free_queue.append([table(d, "runs")[0]]),
    "a block that is lost": lambda d: pool(d).free_queue.pop_front(1),
    "a queue that is shorter than it says": lambda d: setattr(
        pool(d).free_queue, "num_free", pool(d).free_queue.num_free + 1
    ),
    "a null block that is free": lambda d: pool(d).free_queue.append([0]),
    "a null block that is cached": lambda d: pool(d).hashes.__setitem__(0, b"x"),
    "a hash that leads nowhere": lambda d: pool(d).hashes.pop(table(d, "runs")[0]),
    "a hash without a way to it": lambda d: pool(d).cached[0].popitem(),
    "one block that is filed as several": lambda d: (
        pool(d).cached[0].update({pool(d).hashes[table(d, "runs")[0]]: {table(d, "runs")[0]: None}})
    ),
    "a hash that leads to another block": lambda d: pool(d).hashes.__setitem__(table(d, "runs")[0], b"x"),
    "a block that holds something else than it is found for": lambda d: table(d, "runs").reverse(),
    "a block that is found before it is computed": lambda d: setattr(running(d), "num_computed_tokens", 3),
    "more computed than there is": lambda d: setattr(running(d), "num_computed_tokens", 99),
    "more computed than there are blocks for": lambda d: (
        running(d).all_token_ids.extend(range(20)),
        setattr(running(d), "num_tokens", 30),
        setattr(running(d), "num_computed_tokens", 29),
    ),
    "a token that is not counted": lambda d: running(d).all_token_ids.append(1),
    "a request that goes on after its end": lambda d: setattr(running(d), "length_limit", 9),
    "a request in two places": lambda d: state(d).waiting.add(running(d)),
    "a running request that is nowhere": lambda d: state(d).running.remove(running(d)),
    "a request that is not registered": lambda d: d.scheduler.requests.pop("waits"),
    "a status that is not its place": lambda d: setattr(running(d), "status", RequestStatus.WAITING),
    "a blocked status in line": lambda d: setattr(
        d.scheduler.requests["waits"], "status", RequestStatus.WAITING_FOR_GRAMMAR
    ),
    "drafts of one that does not run": lambda d: d.scheduler.requests["waits"].spec_token_ids.append(1),
    "a held request that has not ended": lambda d: setattr(state(d).held["held"], "status", RequestStatus.RUNNING),
    "blocks of a request that has ended": lambda d: state(d).held.clear(),
    "computed tokens without blocks": lambda d: (
        setattr(d.scheduler.requests["waits"], "num_computed_tokens", 4),
        setattr(state(d).waiting._waiting, "num_tokens", state(d).waiting._waiting.num_tokens - 4),
    ),
    "a token that no step computes": lambda d: setattr(running(d), "num_output_placeholders", 1),
    "a line that miscounts its tokens": lambda d: setattr(state(d).waiting._waiting, "num_tokens", 1),
    "more at once than may run": lambda d: setattr(state(d), "config", type(state(d).config)(max_num_seqs=1)),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_audit_notices(driver, breakage):
    BREAKAGES[breakage](driver)
    with pytest.raises(InternalError):
        driver.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("limits", "prompt", "fields", "error", "match"),
    [
        ({}, [], {}, InvalidRequest, "empty"),
        ({"max_model_len": 10}, 10, {}, ContextLengthExceeded, "context of 10"),
        ({"num_blocks": 4}, 3 * BLOCK, {}, InvalidRequest, "room for 11"),
        ({}, 5, {"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({}, 5, {"max_tokens": -1}, InvalidRequest, "max_tokens"),
        ({}, 5, {"max_tokens": 2, "output_token_ids": [1, 2]}, InvalidRequest, "2 output tokens already"),
        *(({}, [1, 2, 3, token], {}, InvalidRequest, "token id") for token in (-1, 1 << 32, 1.5, "x", None)),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_leaves_nothing(
    limits: dict[str, Any], prompt: Any, fields: dict[str, Any], error: type[InvalidRequest], match: str
) -> None:
    driver = Driver(**limits)
    before = driver.scheduler.stats()
    with pytest.raises(error, match=match) as caught:
        driver.add("bad", prompt, **fields)
    if match in ("empty", "room for 11"):
        assert caught.value.param == "prompt"
    assert driver.scheduler.stats() == before
    assert not driver.scheduler.has_work()
    driver.scheduler.check_integrity()


def test_one_token_less_than_what_cannot_run_runs():
    Driver(max_model_len=10).add("good", 9)
    driver = Driver(num_blocks=4)
    driver.add("good", 3 * BLOCK - 1)
    driver.run()
    assert len(driver.outputs["good"]) == 1


def test_a_duplicate_id_leaves_the_first_alone():
    driver = Driver()
    driver.add("a", prompt=5, max_tokens=2)
    with pytest.raises(InvalidRequest, match="already here") as caught:
        driver.scheduler.add_request(made_request("a", [1, 2]))
    assert caught.value.param == "request_id"
    driver.run()
    assert len(driver.outputs["a"]) == 2


def test_a_token_that_is_none_of_a_request_that_nobody_hashed():
    driver = Driver()
    with pytest.raises(InvalidRequest, match="token id"):
        driver.scheduler.add_request(made_request("a", [1, 2, 3, -4]))
    assert not driver.scheduler.has_unfinished_requests()


def test_an_unknown_or_ended_id_is_aborted_without_ado():
    driver = Driver()
    driver.add("a", max_tokens=1)
    driver.run()
    assert driver.abort("unknown", "a", "unknown") == []


NAMES = (
    AttentionKind, CacheConfig, ConnectorMetadata, ConnectorOutput, Handoff, KVCacheGroup, ModelOutput, Request,
    RequestFacts, SamplingParams, Scheduler, SchedulerConfig, SchedulerConnector
)  # fmt: skip


def test_the_documents_example_runs():
    document = Path(__file__).parents[3] / "docs" / "scheduler.md"
    (program,) = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    found: dict[str, Any] = {name.__name__: name for name in NAMES}
    exec(program, found)
    assert not found["scheduler"].has_unfinished_requests()
    found["scheduler"].check_integrity()

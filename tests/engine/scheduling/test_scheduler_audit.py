"""The audit finds what is wrong: each invariant is broken on purpose, and must be noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.base.errors import InternalError
from tandem.engine.request import RequestStatus
from tests.engine.scheduling.driving import Driver, FakeConnector, produce


@pytest.fixture
def driver() -> Driver:
    """One request runs, one waits, one loads, one is held; some blocks are cached and free."""
    connector = FakeConnector()
    driver = Driver(connector=connector, max_num_seqs=2)
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
    "computed tokens without blocks": lambda d: setattr(d.scheduler.requests["waits"], "num_computed_tokens", 4),
    "a line that miscounts its tokens": lambda d: setattr(state(d).waiting._waiting, "num_tokens", 1),
    "more at once than may run": lambda d: setattr(state(d), "config", type(state(d).config)(max_num_seqs=1)),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_audit_notices(driver, breakage):
    BREAKAGES[breakage](driver)
    with pytest.raises(InternalError):
        driver.scheduler.check_integrity()

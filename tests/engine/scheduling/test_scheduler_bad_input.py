"""A request that cannot run is refused on arrival with a reason; no input makes a step raise."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.base.errors import ContextLengthExceeded, InvalidRequest
from tests.engine.made_requests import made_request
from tests.engine.scheduling.driving import BLOCK, Driver


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

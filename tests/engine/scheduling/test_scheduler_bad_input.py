"""A request that cannot run is refused on arrival with a reason; no input makes a step raise."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.base.errors import ContextLengthExceeded, InvalidRequest
from tests.engine.made_requests import made_request
from tests.engine.scheduling.driving import BLOCK, Driver


def refused(driver: Driver, error: type[Exception], match: str, *args: object, **fields: object) -> Any:
    before = driver.scheduler.stats()
    with pytest.raises(error, match=match) as caught:
        driver.add("bad", *args, **fields)  # type: ignore[arg-type]
    assert driver.scheduler.stats() == before
    assert not driver.scheduler.has_work()
    driver.scheduler.check_integrity()
    return caught.value


def test_an_empty_prompt():
    error = refused(Driver(), InvalidRequest, "empty", [])
    assert error.param == "prompt"


def test_a_prompt_that_fills_the_context():
    refused(Driver(max_model_len=10), ContextLengthExceeded, "context of 10", 10)
    Driver(max_model_len=10).add("good", 9)


def test_a_prompt_larger_than_the_whole_pool():
    error = refused(Driver(num_blocks=4), InvalidRequest, "room for 11", 3 * BLOCK)
    assert error.param == "prompt"
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


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_nothing_to_generate(max_tokens):
    refused(Driver(), InvalidRequest, "max_tokens", 5, max_tokens=max_tokens)


def test_a_moved_request_that_has_everything_already():
    refused(Driver(), InvalidRequest, "2 output tokens already", 5, max_tokens=2, output_token_ids=[1, 2])


@pytest.mark.parametrize("token", [-1, 1 << 32, 1.5, "x", None])
def test_a_token_that_is_none(token):
    refused(Driver(), InvalidRequest, "token id", [1, 2, 3, token])


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

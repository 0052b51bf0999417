"""POST /verify: requests that old nodes answered are asked again of new ones, and the first other token is named."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from tandem.router.config import ApiKey
from tandem.wire.nodes import Role
from tests.router.conftest import RunningRouter, StartRouter, error_of
from tests.router.fake_node import Board, TokenRule


def like(router: RunningRouter) -> TokenRule:
    return router.board.rule


def other_third_token(router: RunningRouter) -> TokenRule:
    rule = router.board.rule
    return lambda prompt, seed, index: 80 if index == 2 else rule(prompt, seed, index)


def two_generations(start_router: StartRouter, rule: Any) -> RunningRouter:
    """A new node that answers by this rule; clients' requests go to the old one."""
    router = start_router(prefill=0, decode=0)
    router.add("old", Role.AGGREGATED)
    new = router.add("new", Role.AGGREGATED)
    new.board = Board(rule(router), router.board.eos)
    router.wait_ready()
    return router


def verify(router: RunningRouter, **fields: Any) -> httpx.Response:
    with router.new_client() as client:
        return client.post("/verify", json={"old": ["old"], "seconds": 60.0, **fields})


def judged(router: RunningRouter, **fields: Any) -> dict[str, Any]:
    """While the router listens, clients ask until some requests have been answered by the old node."""
    answers: list[httpx.Response] = []
    judge = threading.Thread(target=lambda: answers.append(verify(router)))
    judge.start()
    number = 0
    while judge.is_alive():
        number += 1
        router.complete(prompt=f"{number} foxes", max_tokens=5, temperature=1, **fields)
    judge.join()
    assert answers[0].status_code == 200, answers[0].text
    return dict(answers[0].json())


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}])
def test_the_same_bits_are_counted(start_router: StartRouter, fields: dict[str, Any]) -> None:
    found = judged(two_generations(start_router, like), **fields)
    assert found == {"compared": 4, "tokens": 20, "difference": ""}


def test_the_first_other_token_is_named(start_router: StartRouter) -> None:
    found = judged(two_generations(start_router, other_third_token))
    assert found["compared"] == 4
    assert "token 2 of the answer: tokens " in found["difference"]
    assert found["difference"].endswith("answered by old and new")


def test_without_a_new_node_nothing_is_asked(start_router: StartRouter) -> None:
    router = two_generations(start_router, like)
    assert verify(router, old=["old", "new"]).json() == {"compared": 0, "tokens": 0, "difference": ""}


def test_a_time_beyond_the_limit_is_refused(start_router: StartRouter) -> None:
    assert error_of(verify(start_router(), seconds=61), 400)["param"] == "seconds"


def test_only_an_operator_may_ask(start_router: StartRouter) -> None:
    router = start_router(api_keys=(ApiKey("user", "a-users-key"),))
    answer = router.client.post("/verify", json={"old": []}, headers={"authorization": "Bearer a-users-key"})
    assert answer.status_code == 403

"""A rollout's judge hears of clients' requests that new nodes answer otherwise, though they answer its own as before."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from tandem.cluster.verify.judge import judge
from tandem.wire.nodes import Role
from tests.router.conftest import RunningRouter, StartRouter, end_token, start_router
from tests.router.fake_node import Board

__all__ = ["end_token", "start_router"]

LOOKS = 40  # at most; a look that finds no request takes 2 s
SHORT = 5  # tokens, of which only the judge's own prompt has so few


def with_a_new_node(router: RunningRouter) -> None:
    before = router.board.rule

    def rule(prompt: Sequence[int], seed: int, index: int) -> int:
        return 80 if len(prompt) > SHORT and index == 2 else before(prompt, seed, index)

    router.add("new", Role.AGGREGATED).board = Board(rule, router.board.eos)
    router.wait_ready()


def test_a_clients_request_convicts_a_new_node(start_router: StartRouter, tmp_path: Path) -> None:
    router = start_router(prefill=0, decode=0)
    router.add("old", Role.AGGREGATED)
    router.wait_ready()
    file = tmp_path / "asked.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 4}')
    judging, ended = judge(router.url, file), threading.Event()
    assert judging.learn() == 1
    with_a_new_node(router)

    def ask() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            router.complete(prompt=f"client {number} asks something", max_tokens=4)

    clients = threading.Thread(target=ask)
    clients.start()
    try:
        found = next(filter(None, (judging.ask_next() for _ in range(LOOKS))), "")
    finally:
        ended.set()
        clients.join()
        judging.close()
    assert found.startswith("a client's request ")
    assert "token 2 of the answer: tokens " in found
    assert found.endswith("answered by old and new")
    assert not judging.compared.startswith("0 ")

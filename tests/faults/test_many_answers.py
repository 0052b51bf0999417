"""Answers to many users, while nodes are killed, have the same bits as alone.

`TANDEM_ANSWERS=2000` compares so many, and `TANDEM_ANSWERS=1000-2000` the second half of them; the default is a few. A killed node has a
healthy peer, and the next one is killed when the pools are whole again and some more answers have come. What was counted is printed at the
end, and with `-s` meanwhile.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tandem.cluster.verify.comparison import ComparedChoice, choices_of, first_difference
from tests.faults.processes import actors, send
from tests.faults.test_lost_nodes import until_whole
from tests.integration.conftest import Deploy, RunningDeployment, float32_config

_FIRST, _, _END = os.environ.get("TANDEM_ANSWERS", "24").rpartition("-")
NUMBERS = range(int(_FIRST or 0), int(_END))
ANSWERS = len(NUMBERS)
QUESTIONS = max(6, min(100, ANSWERS // 4))  # each is asked again and again, with its prefix cached or not
USERS = 6
BETWEEN = max(8, ANSWERS // 50)  # answers from one kill to the next, at least
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def server(deploy: Deploy, smollm2_path: Path) -> Iterator[RunningDeployment]:
    config = float32_config(smollm2_path, prefill=2, decode=2)
    config = replace(
        config,
        model=replace(config.model, dtype="bfloat16", exact="require"),
        cache=replace(config.cache, memory_bytes=256 << 20),
        timeouts=replace(config.timeouts, restart_backoff_max_s=0.5),
        debug=False,
    )
    with deploy(config) as running:
        yield running


def questions(prompt: list[int]) -> list[dict[str, Any]]:
    """Requests of 5 to 80 tokens, some greedy. Some prompts begin as others do."""
    draw = random.Random(7)
    asked = []
    for seed in range(QUESTIONS):
        words = prompt[: draw.randint(5, 80)]
        if seed % 3:
            draw.shuffle(words)
        asked.append({"prompt": words, "seed": seed, "temperature": 0.8 * (seed % 2), "logprobs": 2})
    return asked


class Killer:
    """Kills a node of a random role when all are well and enough answers have come, from `begin` to `end`."""

    def __init__(self, server: RunningDeployment) -> None:
        self._server = server
        self._draw = random.Random(NUMBERS[0])
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers = 0
        self.kills = 0

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ends.set()
        self._thread.join(60)

    def _run(self) -> None:
        known: set[str] = set()
        wanted = BETWEEN // 2
        while not self._ends.wait(0.2):
            well = {n["incarnation"] for n in self._server.nodes() if n["state"] == "ready" and not n["unusable"]}
            if len(well) < 4 or well == known or self.answers < wanted:
                continue
            known, wanted = well, self.answers + self._draw.randint(BETWEEN, 3 * BETWEEN)
            send(self._draw.choice(actors(self._draw.choice(("prefill", "decode")))), signal.SIGKILL)
            self.kills += 1


@pytest.mark.timeout(600 + 10 * ANSWERS)
def test_answers_under_load_while_nodes_are_killed_have_the_bits_of_answers_alone(
    server: RunningDeployment, prompts: Callable[[int], list[int]]
) -> None:
    asked = questions(prompts(512))

    def answered(question: dict[str, Any], salt: str) -> list[ComparedChoice]:
        body = {"model": server.model, "max_tokens": 8, "return_token_ids": True, "cache_salt": salt, **question}
        response = server.http.post("/v1/completions", json=body, timeout=PATIENCE_S)
        assert response.status_code == 200, response.text
        return choices_of(response.json())

    alone = [answered(question, "alone") for question in asked]
    killer = Killer(server)

    def compared(number: int) -> int:
        at = number % QUESTIONS
        found = answered(asked[at], f"company {number // (2 * QUESTIONS)}")  # every second time it is cached
        difference = first_difference(f"answer {number}", alone[at], found)
        assert difference is None, f"after {killer.kills} kills: {difference}"
        return len(found[0].tokens)

    tokens = 0
    killer.begin()
    try:
        with ThreadPoolExecutor(USERS) as users:
            everything = [users.submit(compared, number) for number in NUMBERS]
            for done in as_completed(everything):
                tokens += done.result()
                killer.answers += 1
                if killer.answers % 100 == 0:
                    print(f"{killer.answers} answers, {tokens} tokens, {killer.kills} kills", flush=True)
        assert killer.is_alive, "it killed nothing more"
    finally:
        killer.end()
    assert killer.kills > 0
    until_whole(server)
    assert all(not node["counters"]["wrong_kv"] for node in server.nodes())
    print(f"{ANSWERS} answers with {tokens} log-probabilities, {killer.kills} kills, 0 with other bits")

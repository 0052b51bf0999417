"""A node is killed in every phase of a request's life, many times: no answer is lost or wrong.

`TANDEM_KILLS=15` kills thirty times in each phase, for fifteen greedy and fifteen seeded requests; the default is one of each. A killed
node has a healthy peer, and the next kill comes when the pools are whole again. The test asks for the right answers before a kill, while
the pools are whole; each trial has its own salt, so that it finds nothing in the caches. At the end it prints the recovery times, from
the kill to the next token.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from tests.faults.answers import WatchedAnswer
from tests.faults.processes import actors, busiest, send
from tests.faults.test_lost_nodes import LONG_PROMPT, SAMPLINGS, until_whole
from tests.integration.conftest import Deploy, RunningDeployment, float32_config

KILLS = int(os.environ.get("TANDEM_KILLS", "1"))
TOKENS = 32
PROMPT = 512  # tokens, for faults before or after the prompt is computed
QUEUED = 3  # requests sent at once, so that all but the first wait in the prefill nodes' queues
SEEDS = 3  # trials use these in turn


class Phase(enum.StrEnum):
    QUEUED = "queued"  # kills a prefill node that has begun few of its requests
    PREFILL = "prefill"  # kills the prefill node that computes the prompt
    TRANSFER = "transfer"  # kills the decode node while the prompt's KV arrives
    # Kills the prefill node after the first token, perhaps before the last KV has left
    FIRST_TOKEN = "first_token"
    DECODE = "decode"  # kills the decode node in the middle of the answer


VICTIM = {
    Phase.QUEUED: "prefill",
    Phase.PREFILL: "prefill",
    Phase.TRANSFER: "decode",
    Phase.FIRST_TOKEN: "prefill",
    Phase.DECODE: "decode",
}
# Seconds after the request was sent, or the number of events after which it happens.
AFTER_S = {Phase.QUEUED: 0.05, Phase.PREFILL: 0.5, Phase.TRANSFER: 0.5}
AFTER_EVENTS = {Phase.FIRST_TOKEN: 1, Phase.DECODE: 10}

recoveries: dict[Phase, list[float]] = {}


@pytest.fixture(scope="module")
def server(deploy: Deploy, smollm2_path: Path) -> Iterator[RunningDeployment]:
    config = float32_config(smollm2_path, prefill=2, decode=2)
    # One node is killed again and again: limit how long its supervisor waits before each start.
    config = replace(config, timeouts=replace(config.timeouts, restart_backoff_max_s=0.5))
    with deploy(config) as running:
        yield running
    for phase, seconds in recoveries.items():
        print(
            f"{phase}: {len(seconds)} kills; to the next token {statistics.median(seconds):.2f} s, "
            f"at most {max(seconds):.2f} s"
        )


@pytest.fixture(autouse=True)
def whole(server: RunningDeployment) -> Iterator[None]:
    until_whole(server)
    yield
    until_whole(server)


def process_of(server: RunningDeployment, role: str, node_id: str | None) -> psutil.Process:
    """The process of the node with this id; for an answer that has not begun, the process of the busy node. It is found by the address
    where the router says that the node listens. A node in its first long step reports no work yet, but its process computes."""
    if node_id is None and role == "prefill":
        return busiest(role)
    deadline = time.monotonic() + 3
    while True:
        wanted = [
            node
            for node in server.nodes(role)
            if (node["node_id"] == node_id if node_id else node["running"] or node["waiting"])
        ]
        if wanted:
            break
        assert time.monotonic() < deadline, f"no {role} node has anything to do"
    port = int(wanted[0]["request_endpoint"].rpartition(":")[2])
    for process in actors(role):
        if any(connection.laddr.port == port for connection in process.net_connections() if connection.laddr):
            return process
    raise AssertionError(f"no process listens on {wanted[0]['request_endpoint']}")


@dataclasses.dataclass(frozen=True)
class Question:
    """A request with one right answer: it is greedy or has a seed."""

    prompt: list[int]
    fields: dict[str, Any]

    def ask(self, server: RunningDeployment, salt: str) -> WatchedAnswer:
        return WatchedAnswer(server, self.prompt, TOKENS, {**self.fields, "cache_salt": salt})


def questions(
    prompts: Callable[[int], list[int]], sampling: dict[str, Any], phase: Phase, trial: int
) -> list[Question]:
    """The requests that a trial sends at once. Other trials have the same prompts, some with other seeds."""
    fields = {**sampling, "seed": trial % SEEDS} if "seed" in sampling else sampling
    length = LONG_PROMPT if phase in (Phase.PREFILL, Phase.TRANSFER) else PROMPT
    shuffled = [prompts(length) for _ in range(QUEUED if phase is Phase.QUEUED else 1)]
    for number, prompt in enumerate(shuffled):
        random.Random(number).shuffle(prompt)
    return [Question(prompt, fields) for prompt in shuffled]


@pytest.fixture(scope="module")
def in_peace(server: RunningDeployment) -> Callable[[Question], str]:
    """Returns the right answer to a question, asked while no node is killed. It asks each question once, because the answer does not depend
    on the node."""
    answers: dict[str, str] = {}

    def answer(question: Question) -> str:
        key = json.dumps(dataclasses.astuple(question))
        if key not in answers:
            watched = question.ask(server, "in peace")
            watched.run()
            assert watched.finished
            answers[key] = watched.text
        return answers[key]

    return answer


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.timeout(120 + 90 * KILLS)
def test_a_node_killed_in_this_phase_changes_nothing_in_any_text(
    server: RunningDeployment,
    prompts: Callable[[int], list[int]],
    in_peace: Callable[[Question], str],
    phase: Phase,
    sampling: dict[str, Any],
) -> None:
    for trial in range(KILLS):
        asked = questions(prompts, sampling, phase, trial)
        right = [in_peace(question) for question in asked]
        watched = [question.ask(server, f"{phase}/{'seed' in sampling}/{trial}") for question in asked]
        moment: list[float] = []

        def kill() -> None:
            role = VICTIM[phase]
            send(process_of(server, role, watched[0].nodes.get(role)), signal.SIGKILL)  # noqa: B023
            moment.append(time.monotonic())  # noqa: B023 (called before the next turn)

        if phase in AFTER_EVENTS:
            watched[0].run(AFTER_EVENTS[phase], kill)
        else:
            threads = [threading.Thread(target=one.run) for one in watched]
            for thread in threads:
                thread.start()
            time.sleep(AFTER_S[phase])
            kill()
            for thread in threads:
                thread.join(120)
        for one, text in zip(watched, right, strict=True):
            assert one.error is None
            assert one.finished, f"trial {trial}: the stream ended in silence"
            assert one.text == text, f"trial {trial}"
        recoveries.setdefault(phase, []).append(max(one.after(moment[0]) for one in watched))
        until_whole(server)

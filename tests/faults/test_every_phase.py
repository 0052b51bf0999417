"""A node is killed in every phase of a request's life, many times over: nothing is lost and nothing is wrong.

`TANDEM_KILLS=30` makes it thirty of each phase and sampling; without it there is one. What is killed has a healthy peer, and
the next fault comes when the pools are whole again. Recovery, from the kill to the next token, is printed at the end.
"""

from __future__ import annotations

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

import httpx
import psutil
import pytest

from tests.faults.processes import actors, send
from tests.faults.test_lost_nodes import SAMPLINGS, until_whole
from tests.integration.conftest import Deploy, Running, float32_config
from tests.integration.reference import Expected

KILLS = int(os.environ.get("TANDEM_KILLS", "1"))
TOKENS = 32
LONG_PROMPT = 19  # 1,500 tokens: seconds of reading, chunk by chunk
QUEUED = 3  # requests at once, so that all but the first wait in the prefill nodes' queues


class Phase(enum.StrEnum):
    QUEUED = "queued"  # a prefill node, before it has begun with most of what it has
    PREFILL = "prefill"  # a prefill node that reads the prompt
    TRANSFER = "transfer"  # the decode node, while the prompt's KV arrives
    FIRST_TOKEN = "first_token"  # the prefill node, when the first token is there and the last KV may not be
    DECODE = "decode"  # the decode node, in the middle of the answer


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
def server(deploy: Deploy, smollm2_path: Path, expected: list[Expected]) -> Iterator[Running]:
    with deploy(float32_config(smollm2_path, prefill=2, decode=2)) as running:
        yield running
    for phase, seconds in recoveries.items():
        print(
            f"{phase}: {len(seconds)} kills; to the next token {statistics.median(seconds):.2f} s, "
            f"at most {max(seconds):.2f} s"
        )


@pytest.fixture(autouse=True)
def whole(server: Running) -> Iterator[None]:
    until_whole(server)
    yield
    until_whole(server)


class Watched:
    """One streamed answer, and when its events came."""

    def __init__(self, server: Running, prompt: list[int], fields: dict[str, Any]) -> None:
        self._server, self._prompt, self._fields = server, prompt, fields
        self.text = ""
        self.times: list[float] = []
        self.finished = False
        self.error: str | None = None

    def run(self, at_event: int = 0, then: Callable[[], None] = lambda: None) -> None:
        body = {
            "model": self._server.model,
            "prompt": self._prompt,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            **self._fields,
        }
        url = f"{self._server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as response:
            if response.status_code != 200:
                self.error = response.read().decode()
                return
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    self.finished = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.error = line
                        return
                    self.text += event["choices"][0]["text"]
                    self.times.append(time.monotonic())
                    if len(self.times) == at_event:
                        then()

    def after(self, moment: float) -> float:
        return next((later for later in self.times if later > moment), moment) - moment


def process_of(server: Running, role: str) -> psutil.Process:
    """The node of this role that has something to do, by what the router knows of it, and by who listens there."""
    deadline = time.monotonic() + 5
    while True:
        nodes = server.nodes(role)
        busy = [node for node in nodes if node["running"] or node["waiting"]]
        if busy or time.monotonic() > deadline:
            break
    (node, *_) = busy or nodes
    port = int(node["request_endpoint"].rpartition(":")[2])
    for process in actors(role):
        if any(connection.laddr.port == port for connection in process.net_connections() if connection.laddr):
            return process
    raise AssertionError(f"no process listens on {node['request_endpoint']}")


def fresh_prompt(expected: list[Expected], trial: int, phase: Phase) -> list[int]:
    """That no node has read before."""
    prompt = list(expected[LONG_PROMPT].prompt)
    random.Random(f"{phase}/{trial}").shuffle(prompt)
    return prompt


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.timeout(120 + 90 * KILLS)
def test_a_node_killed_in_this_phase_changes_nothing_in_any_text(
    server: Running, expected: list[Expected], phase: Phase, sampling: dict[str, Any]
) -> None:
    for trial in range(KILLS):
        seed = {"seed": trial} if "seed" in sampling else {}
        fields = {**sampling, **seed}
        count = QUEUED if phase is Phase.QUEUED else 1
        prompts = [
            fresh_prompt(expected, 1000 * trial + index + 500 * bool(seed), phase) for index in range(count)
        ]
        watched = [Watched(server, prompt, fields) for prompt in prompts]
        moment: list[float] = []

        def kill() -> None:
            send(process_of(server, VICTIM[phase]), signal.SIGKILL)
            moment.append(time.monotonic())  # noqa: B023 (called before the next turn)

        threads = [threading.Thread(target=one.run) for one in watched]
        if phase in AFTER_EVENTS:
            watched[0].run(AFTER_EVENTS[phase], kill)
        else:
            for thread in threads:
                thread.start()
            time.sleep(AFTER_S[phase])
            kill()
            for thread in threads:
                thread.join(120)
        for one in watched:
            assert one.error is None
            assert one.finished, f"trial {trial}: the stream ended in silence"
        recoveries.setdefault(phase, []).append(max(one.after(moment[0]) for one in watched))
        until_whole(server)
        for one, prompt in zip(watched, prompts, strict=True):
            again = Watched(server, prompt, fields)
            again.run()
            assert one.text == again.text, f"trial {trial}"

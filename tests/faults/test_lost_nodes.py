"""A node is killed or frozen in the middle of a request: the client gets the same text as without it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.answers import WatchedAnswer
from tests.faults.processes import busiest, send
from tests.integration.conftest import Deploy, RunningDeployment, float32_config

LONG_ANSWER = 120
PROMPT = 32  # tokens
LONG_PROMPT = 1500  # tokens, which take seconds to compute, chunk by chunk


@pytest.fixture(scope="module")
def server(deploy: Deploy, smollm2_path: Path) -> Iterator[RunningDeployment]:
    with deploy(float32_config(smollm2_path, prefill=2, decode=2)) as running:
        yield running


def until_whole(server: RunningDeployment) -> list[dict[str, Any]]:
    """Waits until two nodes of each role are ready and every block is free."""
    server.until(
        lambda nodes: (
            sorted(node["role"] for node in nodes if node["state"] == "ready" and not node["unusable"])
            == ["decode", "decode", "prefill", "prefill"]
        ),
        "two nodes of each role",
    )
    return server.until_quiet()


@pytest.fixture(autouse=True)
def whole(server: RunningDeployment) -> Iterator[None]:
    until_whole(server)
    yield
    until_whole(server)


def stream(server: RunningDeployment, prompt: list[int], at_token: int, then: Callable[[], None], **fields: Any) -> str:
    """Streams an answer and returns its text. Calls `then` once, when `at_token` events have come."""
    answer = WatchedAnswer(server, prompt, LONG_ANSWER, {"temperature": 0, **fields})
    answer.run(at_token, then)
    assert answer.error is None
    assert answer.finished
    return answer.text


SAMPLINGS = [
    pytest.param({"temperature": 0}, id="greedy"),
    pytest.param({"temperature": 0.9, "top_p": 0.95, "seed": 77}, id="seeded"),
    pytest.param(
        {"temperature": 0.9, "seed": 78, "ignore_eos": False, "structured_outputs": {"regex": "([a-z]{2,9} ){60}"}},
        id="by-grammar",
    ),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_decode_node_lost_in_mid_stream_changes_nothing_in_the_text(
    server: RunningDeployment, prompts: Callable[[int], list[int]], sampling: dict[str, Any], number: signal.Signals
) -> None:
    prompt = prompts(PROMPT)
    undisturbed = stream(server, prompt, 0, lambda: None, **sampling)
    disturbed = stream(server, prompt, 10, lambda: send(busiest("decode"), number), **sampling)
    assert disturbed == undisturbed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_prefill_node_lost_while_it_reads_the_prompt_changes_nothing_in_the_text(
    server: RunningDeployment, prompts: Callable[[int], list[int]], number: signal.Signals
) -> None:
    # No node has cached these prompts, so a prefill node is busy with each of them for a while.
    prompt = list(reversed(prompts(LONG_PROMPT)))
    prompt[0] = number
    fault = threading.Timer(0.4, lambda: send(busiest("prefill"), number))
    fault.start()
    answer = server.complete(prompt, 8)["choices"][0]["text"]
    fault.join()
    until_whole(server)
    assert answer == server.complete(prompt, 8)["choices"][0]["text"]


def test_a_lost_node_comes_back_with_a_new_epoch(server: RunningDeployment) -> None:
    before = {(node["node_id"], node["incarnation"]) for node in server.nodes()}
    send(busiest("prefill"), signal.SIGKILL)
    server.until(
        lambda nodes: len({(node["node_id"], node["incarnation"]) for node in nodes} - before) == 1, "a new epoch"
    )
    after = {(node["node_id"], node["incarnation"]) for node in until_whole(server)}
    assert {node_id for node_id, _ in after} == {node_id for node_id, _ in before}
    assert len(after - before) == 1

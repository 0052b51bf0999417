"""`tandem serve` with a node of several ranks: its answers are those of a node with one rank, and when a rank is killed or stopped the
whole node ends and is replaced."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.cluster_lab import END_S, START_S, parent_of, until_true

# SmolLM2-135M has nine heads of queries and three of keys and values.
SETTINGS = """
pools: {aggregated: {nodes: 1, tensor_parallel: 3}}
model: {dtype: float32}
cache: {memory_bytes: 96MiB}
scheduler: {max_model_len: 1024}
"""
HANDING_OVER = """
pools: {prefill: {nodes: 1, tensor_parallel: 3}, decode: {nodes: 1, pipeline_parallel: 2}}
model: {dtype: float32}
scheduler: {max_model_len: 1024}
router: {local_prefill: never}
"""
RANK = "tandem.node.ranks.process"
PROMPT = "The largest planet of the solar system is"


def answer_of(http: httpx.Client, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def incarnation_of_node(http: httpx.Client) -> str:
    nodes = http.get("/cluster").raise_for_status().json()["nodes"]
    return next((node["incarnation"] for node in nodes if node["state"] == "ready"), "")


def ranks_of(command: Any) -> set[int]:
    return {pid for pid, line in command.processes().items() if RANK in line}


def received(http: httpx.Client) -> int:
    nodes = http.get("/cluster").raise_for_status().json()["nodes"]
    return sum(node["counters"]["transfer_bytes_received"] for node in nodes if node["role"] == "decode")


@pytest.mark.more
def test_three_ranks_hand_over_to_two_stages(serve: Any, tmp_path: Path) -> None:
    """And when one of them is killed, the prompt that they read is answered all the same."""
    settings = tmp_path / "tandem.yaml"
    settings.write_text(HANDING_OVER)
    command = serve("--config", str(settings), "--kv-memory", "96MiB")
    http = httpx.Client(base_url=command.until(r"^API: +(http://\S+)/v1$", START_S)[1], timeout=120, trust_env=False)
    model = http.get("/v1/models").json()["data"][0]["id"]
    first = answer_of(http, model)
    assert "Jupiter" in first
    until_true(lambda: received(http) > 0, "its status says what the decode node received")

    ranks = ranks_of(command)
    assert len(ranks) == 2 + 1, "besides the nodes' own processes"
    with ThreadPoolExecutor(1) as asking:
        pending = asking.submit(answer_of, http, model)
        reads = command.pid_of("ray::PrefillActor")
        killed = min(rank for rank in ranks if parent_of(rank) == reads)  # the only decode node stays
        os.kill(killed, signal.SIGKILL)
        assert pending.result() == first
    until_true(lambda: killed not in ranks_of(command), "its node has ended")
    until_true(lambda: len(ranks_of(command)) == 3, "the node was replaced")
    before = received(http)

    def handed_over() -> bool:
        assert answer_of(http, model) == first
        return received(http) > before

    until_true(handed_over, "the new node hands over")
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(END_S) == 0
    command.nothing_left()


def test_a_lost_rank_ends_its_node_as_one(serve: Any, tmp_path: Path) -> None:
    settings = tmp_path / "tandem.yaml"
    settings.write_text(SETTINGS)
    command = serve("--config", str(settings), "--kv-memory", "96MiB")

    def ranks() -> set[int]:
        return ranks_of(command)

    http = httpx.Client(base_url=command.until(r"^API: +(http://\S+)/v1$", START_S)[1], timeout=120, trust_env=False)
    model = http.get("/v1/models").json()["data"][0]["id"]
    first = answer_of(http, model)
    assert "Jupiter" in first

    for kill in (signal.SIGKILL, signal.SIGSTOP):
        before, old = incarnation_of_node(http), ranks()
        assert len(old) == 2
        os.kill(min(old), kill)
        until_true(lambda: incarnation_of_node(http) not in ("", before), "the node was replaced")  # noqa: B023
        assert answer_of(http, model) == first
        until_true(lambda: not ranks() & old, "no rank of the node before is left")  # noqa: B023

    old = ranks()
    os.kill(command.pid_of("ray::DecodeActor"), signal.SIGKILL)
    until_true(lambda: len(ranks()) == 2 and not ranks() & old, "the ranks ended with their node")
    until_true(lambda: incarnation_of_node(http) != "", "the node is back")
    assert answer_of(http, model) == first

    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(END_S) == 0
    command.nothing_left()

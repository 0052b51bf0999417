"""Prefill and decode nodes of several vLLM ranks, each a process with some heads of every block: KV goes over by Tandem's protocol, and
answers stay those of one vLLM alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.cluster_lab import Serve
from tests.vllm.conftest import (
    NEEDS_PYTHON,
    START_S,
    answers_alone,
    ask_in_stream,
    is_at_rest,
    nodes,
    pid_of_node,
    prompt,
    serve_vllm,
    until,
)

pytestmark = [NEEDS_PYTHON, pytest.mark.timeout(1800)]
TOKENS = 16
LENGTHS = (1, 31, 32, 33, 63, 64, 100, 256, 257, 700, 1500, 3000)
PROMPTS = [prompt(length, seed) for seed in (3, 4) for length in LENGTHS]
POOLS = ("prefill", "decode")
BOUND = "VLLM_CPU_OMP_THREADS_BIND: '0|1'"  # one rank to a core, which vLLM does not find out where a machine has one NUMA node


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    return answers_alone(tiny_model, PROMPTS, TOKENS)


@pytest.fixture(scope="module", params=[(2, 2), (2, 1)], ids=["2-2", "2-1"])
def served(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Serve, httpx.Client]]:
    flags = ["--prefill", "1", "--decode", "1", "--set", "router.local_prefill=never"]
    for pool, ranks in zip(POOLS, request.param, strict=True):
        flags.append(f"pools.{pool}.engine_args={{tensor_parallel_size: {ranks}}}")
    yield from serve_vllm(tiny_model, tmp_path_factory.mktemp("path"), POOLS, *flags, env=BOUND)


def ask(client: httpx.Client, tokens: list[int], **others: Any) -> list[int]:
    body = {"model": "tiny", "prompt": tokens, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    response = client.post("/v1/completions", json={**body, "return_token_ids": True, **others}, timeout=START_S)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def received(found: list[dict[str, Any]]) -> int:
    return sum(node["counters"]["transfers_finished"].get("received", 0) for node in found)


def test_answers_are_those_of_one_rank(served: tuple[Serve, httpx.Client], expected: list[list[int]]) -> None:
    _, client = served
    assert [ask(client, tokens) for tokens in PROMPTS] == expected
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda tokens: ask(client, tokens), PROMPTS))
    assert found == expected
    until(client, lambda now: is_at_rest(now) and received(now) >= 2 * len(PROMPTS))
    now = nodes(client)
    assert [(node["counters"]["loads_failed"], node["counters"]["transfer_refusals"]) for node in now] == [(0, {})] * 2
    assert sum(node["counters"]["prompt_tokens_computed"] for node in now if node["role"] == "decode") == 0


def test_the_end_of_a_rank_ends_its_node_and_no_answer(served: tuple[Serve, httpx.Client]) -> None:
    """In the middle of an answer, which goes on where it was, and then with nothing to do."""
    command, client = served
    if ranks_of(command, client, node_of(client)["node_id"]) == []:
        pytest.skip("the decode node is one process")
    whole = ask(client, PROMPTS[9], max_tokens=600)
    killed: list[str] = []
    answer = ask_in_stream(client, PROMPTS[9], 600, lambda: killed or killed.append(kill_rank(command, client)))
    assert answer == whole
    (first,) = killed
    until(client, lambda now: is_at_rest(now) and bool(incarnations(now) - {first}), START_S)
    assert ask(client, PROMPTS[9]) == whole[:TOKENS]
    second = kill_rank(command, client)
    assert second != first
    until(client, lambda now: second not in incarnations(now))


def node_of(client: httpx.Client) -> dict[str, Any]:
    (node,) = (node for node in nodes(client) if node["role"] == "decode")
    return node


def ranks_of(command: Serve, client: httpx.Client, name: str) -> list[int]:
    parent = pid_of_node(command, client, name)
    return [pid for pid in command.processes() if is_rank(pid, parent)]


def kill_rank(command: Serve, client: httpx.Client) -> str:
    """Returns the incarnation of the decode node whose last rank was killed."""
    node = node_of(client)
    os.kill(max(ranks_of(command, client, node["node_id"])), signal.SIGKILL)
    incarnation: str = node["incarnation"]
    return incarnation


def is_rank(pid: int, parent: int) -> bool:
    try:
        status, title = (Path("/proc", str(pid), name).read_text() for name in ("status", "cmdline"))
    except OSError:  # it has ended
        return False
    return f"PPid:\t{parent}\n" in status and title.startswith("VLLM::Worker")


def incarnations(found: list[dict[str, Any]]) -> set[str]:
    return {node["incarnation"] for node in found if node["role"] == "decode" and node["state"] == "ready"}

"""Prefill and decode nodes of several vLLM ranks, each a process with some heads of every block: KV goes over by Tandem's protocol, and
answers stay those of one vLLM alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.cluster_lab import Serve
from tests.vllm.conftest import NEEDS_PYTHON, START_S, answers_alone, is_at_rest, nodes, prompt, serve_vllm, until

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

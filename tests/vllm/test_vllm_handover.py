"""`tandem serve --engine vllm` with prefill and decode nodes: KV goes over by Tandem's protocol, and answers stay those of vLLM alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.cluster_lab import Serve
from tests.vllm.conftest import (
    CONTEXT,
    NEEDS_PYTHON,
    answers_alone,
    ask_in_stream,
    is_at_rest,
    nodes,
    pid_of_node,
    prompt,
    serve_vllm,
    until,
)

pytestmark = [NEEDS_PYTHON, pytest.mark.timeout(900)]
TOKENS = 24
# Keys and values of 32 tokens in three layers and two heads of 32 numbers; one block more than the longest context, and vLLM's own.
DECODE_BYTES = (CONTEXT // 32 + 2) * 32 * 3 * 2 * 2 * 32 * 4
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 100, 200, 255, 256, 257, 400, 511, 512, 700, 1000, 1500, 3000)
PROMPTS = [prompt(length, seed) for seed in (3, 4, 5) for length in LENGTHS]


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serve, httpx.Client]]:
    # Short prompts go over, too: otherwise a decode node computes them itself. A decode node has blocks for one request of the longest
    # context, so that many which write long answers take each other's.
    flags = (
        "--prefill", "1", "--decode", "2", "--set", "router.local_prefill=never", f"pools.decode.cache={{memory_bytes: {DECODE_BYTES}}}",
    )  # fmt: skip
    yield from serve_vllm(tiny_model, tmp_path_factory.mktemp("path"), ("prefill", "decode"), *flags)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    return answers_alone(tiny_model, PROMPTS, TOKENS)


def ask(client: httpx.Client, tokens: list[int], **others: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": tokens, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    response = client.post("/v1/completions", json={**body, "return_token_ids": True, **others})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def count(found: list[dict[str, Any]], name: str) -> int:
    return sum(node["counters"][name] for node in found)


def test_sixty_answers_are_those_of_vllm_alone(served: tuple[Serve, httpx.Client], expected: list[list[int]]) -> None:
    _, client = served
    found = [ask(client, tokens)["choices"][0]["token_ids"] for tokens in PROMPTS]
    assert found == expected
    until(client, lambda now: is_at_rest(now) and received(now) >= len(PROMPTS))
    now = nodes(client)
    assert count(now, "loads_failed") == 0
    assert count(now, "prompt_tokens_received") > 3 * max(LENGTHS) * 0.9, "shorter prompts share their beginning"
    assert all(not node["counters"]["transfer_refusals"] for node in now)


def received(found: list[dict[str, Any]]) -> int:
    return sum(node["counters"]["transfers_finished"].get("received", 0) for node in found)


def test_many_at_once_are_those_too(served: tuple[Serve, httpx.Client], expected: list[list[int]]) -> None:
    _, client = served
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda tokens: ask(client, tokens)["choices"][0]["token_ids"], PROMPTS))
    wrong = [len(PROMPTS[i]) for i, tokens in enumerate(found) if tokens != expected[i]]
    assert not wrong
    until(client, is_at_rest)


def test_requests_that_lose_their_blocks_to_others_go_on(tiny_model: Path, served: tuple[Serve, httpx.Client]) -> None:
    """A decode node computes a preempted request again, prompt and first token of the prefill node included."""
    _, client = served
    prompts = [prompt(300, seed) for seed in range(40, 54)]
    expected = answers_alone(tiny_model, prompts, 420)
    for _ in range(4):  # on a busy machine prompts come so slowly that those before have ended
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda tokens: ask(client, tokens, max_tokens=420), prompts))
        assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
        until(client, is_at_rest)
        if count(nodes(client), "preemptions"):
            return
    raise AssertionError("no request lost its blocks")


def test_an_answer_that_its_first_token_ends_is_whole(
    served: tuple[Serve, httpx.Client], expected: list[list[int]]
) -> None:
    _, client = served
    assert ask(client, PROMPTS[9], max_tokens=1)["choices"][0]["token_ids"] == expected[9][:1]
    stopped = ask(client, PROMPTS[9], stop_token_ids=[expected[9][0]])["choices"][0]
    assert stopped["finish_reason"] == "stop"
    until(client, is_at_rest)


def test_grammars_and_logprobs_go_over(served: tuple[Serve, httpx.Client]) -> None:
    _, client = served
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["b", "c"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    question = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello " * 40}],
        "temperature": 0,
        "max_tokens": 60,
    }
    shaped = {**question, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    said = client.post("/v1/chat/completions", json=shaped).json()["choices"][0]["message"]["content"]
    assert json.loads(said)["a"] in ("b", "c")
    listed = ask(client, PROMPTS[10], logprobs=2, max_tokens=5)["choices"][0]["logprobs"]["token_logprobs"]
    assert len(listed) == 5
    assert all(value <= 0 for value in listed)


def test_a_sampled_answer_does_not_depend_on_where_it_is_made(served: tuple[Serve, httpx.Client]) -> None:
    _, client = served
    sampled = {"temperature": 1.1, "seed": 11, "max_tokens": 20}
    apart = ask(client, PROMPTS[15], **sampled)["choices"][0]["token_ids"]
    again = ask(client, PROMPTS[15], **sampled)["choices"][0]["token_ids"]
    other = ask(client, PROMPTS[15], **{**sampled, "seed": 12})["choices"][0]["token_ids"]
    assert apart == again != other


def test_clients_that_leave_in_each_phase_give_every_block_back(served: tuple[Serve, httpx.Client]) -> None:
    _, client = served
    for seed, wait in ((31, 0), (32, 0), (33, 1), (34, 5), (35, 5)):
        body = {"model": "tiny", "prompt": prompt(2500, seed), "max_tokens": 1000, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            for _ in range(wait):
                next(lines)
    until(client, is_at_rest)


def test_an_answer_outlives_each_of_its_nodes(served: tuple[Serve, httpx.Client]) -> None:
    """The decode node, and then the prefill node, is killed while an answer is written; answers go on and stay the same."""
    command, client = served
    whole = ask(client, PROMPTS[12], max_tokens=1000)["choices"][0]["token_ids"]
    for role in ("decode", "prefill"):
        killed: list[str] = []
        found = ask_in_stream(client, PROMPTS[12], 1000, partial(kill_one, command, client, role, killed))
        assert killed
        assert found == whole, killed
        again = ask(client, PROMPTS[12], max_tokens=1000)["choices"][0]["token_ids"]
        assert again == whole, "without the killed node, or with its successor"


def kill_one(command: Serve, client: httpx.Client, role: str, killed: list[str]) -> None:
    """Kills a node of this role, of decode nodes one that writes; but only one."""
    there = [node for node in nodes(client) if node["role"] == role and (node["running"] or role == "prefill")]
    if there and not killed:
        killed.append(there[0]["node_id"])
        os.kill(pid_of_node(command, client, killed[0]), signal.SIGKILL)

"""`tandem serve --engine vllm`: two nodes in vLLM's own environment, behind a router in ours."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.cluster_lab import Serve
from tests.vllm.conftest import (
    NEEDS_PYTHON,
    aborted,
    answers_alone,
    is_at_rest,
    nodes,
    pid_of_node,
    prompt,
    serve_vllm,
    until,
)

pytestmark = [NEEDS_PYTHON, pytest.mark.timeout(900)]
TOKENS = 40


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serve, httpx.Client]]:
    yield from serve_vllm(tiny_model, tmp_path_factory.mktemp("path"), ("aggregated",), "--aggregated", "2")


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    return answers_alone(tiny_model, PROMPTS, TOKENS)


PROMPTS = [prompt(length, 3) for length in (1, 31, 32, 33, 200, 700, 1500, 3000)]


def asked(tokens: list[int], **others: Any) -> dict[str, Any]:
    return {
        "model": "tiny", "prompt": tokens, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **others,
    }  # fmt: skip


def test_greedy_answers_are_those_of_vllm_alone(served: tuple[Serve, httpx.Client], expected: list[list[int]]) -> None:
    _, client = served
    answers = [client.post("/v1/completions", json=asked(tokens)).json() for tokens in PROMPTS]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
    until(client, is_at_rest)


def test_chats_stop_strings_and_schemas_are_answered(served: tuple[Serve, httpx.Client]) -> None:
    _, client = served
    question = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 60}
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["b", "c"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    shaped = {**question, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    answer = client.post("/v1/chat/completions", json=shaped).json()["choices"][0]
    assert json.loads(answer["message"]["content"])["a"] in ("b", "c")
    text = client.post("/v1/completions", json=asked(PROMPTS[2], return_token_ids=False)).json()["choices"][0]["text"]
    stop = text[len(text) // 2 :][:2]
    stopped = client.post("/v1/completions", json=asked(PROMPTS[2], stop=[stop])).json()["choices"][0]
    assert (stopped["finish_reason"], stopped["text"]) == ("stop", text[: text.index(stop)])
    assert client.post("/v1/completions", json=asked([5] * 5000)).status_code == 400


def test_a_client_that_leaves_gives_its_blocks_back(served: tuple[Serve, httpx.Client]) -> None:
    _, client = served
    before = aborted(nodes(client))
    body = asked(PROMPTS[3], max_tokens=3000, stream=True)
    with client.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    until(client, lambda found: aborted(found) > before and is_at_rest(found))


def test_routers_hear_what_is_cached(served: tuple[Serve, httpx.Client]) -> None:
    _, client = served
    before = client.post("/v1/completions", json=asked(prompt(600, 77))).json()
    again = client.post("/v1/completions", json=asked(prompt(600, 77))).json()
    assert before["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 576
    assert before["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]


def test_an_answer_outlives_its_node(served: tuple[Serve, httpx.Client], expected: list[list[int]]) -> None:
    command, client = served
    body = asked(PROMPTS[4], max_tokens=1000)
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    assert whole[:TOKENS] == expected[4]
    found: list[int] = []
    killed = ""
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    found += choice.get("token_ids") or []
            if found and not killed:
                killed = next((node["node_id"] for node in nodes(client) if node["running"]), "")
                if killed:
                    os.kill(pid_of_node(command, client, killed), signal.SIGKILL)
    assert killed
    assert found == whole


def test_several_ranks_answer_as_one(tiny_model: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    """vLLM's workers are processes of their own then, one to a core."""
    flags = ("--aggregated", "1", "--set", "pools.aggregated.engine_args={tensor_parallel_size: 2}")
    serve, bound = contextmanager(serve_vllm), "VLLM_CPU_OMP_THREADS_BIND: '0|1'"
    with serve(tiny_model, tmp_path, ("aggregated",), *flags, env=bound) as (_, client):
        answers = [client.post("/v1/completions", json=asked(tokens)).json() for tokens in PROMPTS]
        assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
        until(client, is_at_rest)

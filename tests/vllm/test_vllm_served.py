"""`tandem serve --engine vllm`: two nodes in vLLM's own environment, behind a router in ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.cluster_lab import Serve
from tests.listening import listening_addresses
from tests.vllm.conftest import prompt

PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(
        not PYTHON, reason="TANDEM_VLLM_PYTHON names no Python with vLLM: `make test-vllm` sets it"
    ),
    pytest.mark.timeout(900),
]
START_S = 300.0
TOKENS = 40


@pytest.fixture(scope="module")
def served(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Serve, httpx.Client]]:
    path = tmp_path_factory.mktemp("path")
    (path / "tandem").symlink_to(Path(__file__).parents[2] / "tandem")
    command = Serve(
        str(tiny_model), "--engine", "vllm", "--aggregated", "2", "--dtype", "float32", "--max-model-len", "4096",
        "--set", f"model.engine_python={PYTHON}", "model.engine_args={enforce_eager: true, block_size: 32}",
        "model.device=cpu", "pools.aggregated.threads=1", f"pools.aggregated.env={{PYTHONPATH: {path}}}",
        "scheduler.max_num_batched_tokens=256", "model.served_name=tiny",
    )  # fmt: skip
    try:
        command.until(r"engine: ready: vllm 0\.32", 60)
        url = command.until(r"^API: +(http://\S+)/v1$", START_S)[1]
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            yield command, client
    finally:
        command.kill_all()


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    """What vLLM says by itself."""
    args = {
        "enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 4096,
        "max_num_batched_tokens": 256,
    }  # fmt: skip
    ended = subprocess.run(
        [PYTHON, str(Path(__file__).parent / "alone.py"), str(tiny_model)],
        input=json.dumps({"args": args, "prompts": PROMPTS, "max_tokens": TOKENS}),
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: list[list[int]] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


PROMPTS = [prompt(length, 3) for length in (1, 31, 32, 33, 200, 700, 1500, 3000)]


def asked(tokens: list[int], **others: Any) -> dict[str, Any]:
    return {
        "model": "tiny", "prompt": tokens, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **others,
    }  # fmt: skip


def nodes(client: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/cluster").json()["nodes"]
    return found


def is_at_rest(found: list[dict[str, Any]]) -> bool:
    return not any(
        node["running"] or node["waiting"] or node["free_blocks"] != node["total_blocks"] for node in found
    )


def until(client: httpx.Client, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition(found := nodes(client)):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def aborted(found: list[dict[str, Any]]) -> int:
    return sum(node["counters"]["requests_finished"].get("abort", 0) for node in found)


def test_greedy_answers_are_those_of_vllm_alone(
    served: tuple[Serve, httpx.Client], expected: list[list[int]]
) -> None:
    _, client = served
    answers = [client.post("/v1/completions", json=asked(tokens)).json() for tokens in PROMPTS]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
    until(client, is_at_rest)


def test_chats_stop_strings_and_schemas_are_answered(served: tuple[Serve, httpx.Client]) -> None:
    _, client = served
    question = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 60,
    }
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["b", "c"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    shaped = {
        **question,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }
    answer = client.post("/v1/chat/completions", json=shaped).json()["choices"][0]
    assert json.loads(answer["message"]["content"])["a"] in ("b", "c")
    text = client.post("/v1/completions", json=asked(PROMPTS[2], return_token_ids=False)).json()["choices"][
        0
    ]["text"]
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
    found: list[int] = []
    body = asked(PROMPTS[4], stream=True)
    with client.stream("POST", "/v1/completions", json=body) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                found += choice.get("token_ids") or []
            if 0 < len(found) < TOKENS and (
                busy := [node["node_id"] for node in nodes(client) if node["running"]]
            ):
                os.kill(pid_of_node(command, client, busy[0]), signal.SIGKILL)
                break
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    found += choice.get("token_ids") or []
    assert found == expected[4]


def pid_of_node(command: Serve, client: httpx.Client, name: str) -> int:
    """The process that listens where routers reach the node."""
    (endpoint,) = (node["request_endpoint"] for node in nodes(client) if node["node_id"] == name)
    host, _, port = endpoint.rpartition(":")
    (pid,) = (pid for pid in command.processes() if (host, int(port)) in listening_addresses(pid))
    return pid

"""Chats with images through all processes: HTTP, router, a prefill node with the vision tower, and a decode node that gets its KV."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine.model import tiny_vision
from tests.integration.conftest import Deploy, RunningDeployment, float32_config
from tests.pictures import data_url, picture

NEW_TOKENS = 8
FILES = [picture(seed, 40 + 3 * seed, 30) for seed in range(4)]
QUESTIONS = [["What is this? ", FILES[0]], ["What is this? ", FILES[1]], ["Compare ", FILES[2], " with ", FILES[3]]]


@pytest.fixture(scope="module")
def seeing(deploy: Deploy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningDeployment, Path]]:
    path = tiny_vision.smolvlm(tmp_path_factory.mktemp("seeing"))
    config = float32_config(path, prefill=1, decode=1)
    scheduler = msgspec.structs.replace(config.scheduler, max_num_batched_tokens=48, max_encoder_tokens=16)
    with deploy(msgspec.structs.replace(config, scheduler=scheduler)) as running:
        yield running, path


def ask(server: RunningDeployment, parts: list[str | bytes]) -> list[int]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    body: dict[str, Any] = {
        "model": server.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


def test_the_answers_are_generates_and_the_tower_runs_on_the_prefill_side(
    seeing: tuple[RunningDeployment, Path],
) -> None:
    server, path = seeing
    prompts = [["<|im_start|>User: ", *parts, "<end_of_utterance>\nAssistant:"] for parts in QUESTIONS]
    expected = tiny_vision.reference(path, prompts, NEW_TOKENS)
    with ThreadPoolExecutor(len(QUESTIONS)) as at_once:
        assert list(at_once.map(lambda parts: ask(server, parts), QUESTIONS)) == expected
    server.until_quiet()
    encoded = server.counters("prefill")["encoder_tokens"]
    assert [ask(server, parts) for parts in QUESTIONS] == expected
    server.until_quiet()
    counters = server.counters("prefill")
    assert counters["encoder_tokens"] == encoded > 0  # the second time their KV was there
    assert counters["prompt_tokens_cached"] > 0
    assert server.counters("decode")["encoder_tokens"] == 0
    assert server.counters("decode")["transfer_bytes_received"] > 0

"""`tandem serve --encode 1 --prefill 1 --decode 1`: the encoder node encodes images, and the prefill node does when the encoder node is
killed or stopped."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.node.config import NodeTimeouts
from tests.engine.model import tiny_vision
from tests.integration.cluster_lab import START_S
from tests.pictures import data_url, picture
from tests.waiting import until

NEW_TOKENS = 8
ENCODER_S = NodeTimeouts().encoder_s
FILES = [picture(seed, 40 + 3 * seed, 30) for seed in range(6)]
FLAGS = ("--dtype", "float32", "--set", "router.local_prefill=never")


class Client:
    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self.model = self.http.get("/v1/models").json()["data"][0]["id"]

    def ask(self, file: bytes) -> list[int]:
        content = [
            {"type": "text", "text": "What is this? "},
            {"type": "image_url", "image_url": {"url": data_url(file)}},
        ]
        return self.say(content)

    def say(self, content: str | list[dict[str, Any]]) -> list[int]:
        body: dict[str, Any] = {
            "model": self.model, "messages": [{"role": "user", "content": content}], "max_tokens": NEW_TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        response = self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens

    def counters(self, role: str) -> dict[str, Any]:
        nodes = self.http.get("/cluster").raise_for_status().json()["nodes"]
        (node,) = [node for node in nodes if node["role"] == role and node["state"] == "ready"]
        counters: dict[str, Any] = node["counters"]
        return counters

    def has_encoder(self) -> bool:
        nodes = self.http.get("/cluster").raise_for_status().json()["nodes"]
        return any(node["role"] == "encode" and node["state"] == "ready" for node in nodes)


@pytest.mark.timeout(400)
def test_images_are_encoded_on_the_encoder_node_and_its_death_loses_none(serve: Any, tmp_path: Path) -> None:
    path = tiny_vision.smolvlm(tmp_path)
    prompts = [["<|im_start|>User: What is this? ", file, "<end_of_utterance>\nAssistant:"] for file in FILES]
    expected = tiny_vision.reference(path, prompts, NEW_TOKENS)
    command = serve("--model", str(path), "--encode", "1", "--prefill", "1", "--decode", "1", *FLAGS)
    client = Client(command.until(r"^API: +(http://\S+)/v1$", START_S)[1])
    until(client.has_encoder, START_S)
    with ThreadPoolExecutor(3) as at_once:
        assert list(at_once.map(client.ask, FILES[:3])) == expected[:3]
    until(  # counters come once a second
        lambda: (
            0 < client.counters("prefill")["encoder_tokens_received"] == client.counters("encode")["encoder_tokens"]
        ),
        10,
    )
    assert client.counters("prefill")["encoder_tokens"] == 0
    assert client.counters("decode")["encoder_tokens"] == 0
    metrics = client.http.get("/metrics").text
    assert "tandem_node_encoder_tokens_sent_total{" in metrics

    broken = {"type": "image_url", "image_url": {"url": data_url(FILES[0][:200])}}
    refused = client.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [broken]}]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_image")

    os.kill(command.pid_of("ray::EncodeActor"), signal.SIGKILL)
    with ThreadPoolExecutor(3) as at_once:
        assert list(at_once.map(client.ask, FILES[3:])) == expected[3:]
    until(lambda: client.counters("prefill")["encoder_tokens"] > 0, 10)
    until(client.has_encoder, START_S)  # the controller has replaced it
    assert client.ask(FILES[0]) == expected[0]
    command.process.send_signal(signal.SIGINT)
    assert command.ended() in (0, 130)


class Load:
    """Clients that ask about one image after another, and one client that asks without images. It compares and times every answer."""

    def __init__(self, url: str, expected: Sequence[list[int]]) -> None:
        self._url, self._expected = url, expected
        self._numbers = itertools.count()
        self._over = threading.Event()
        self.answered = self.texts = 0
        self.longest_s = self.longest_text_s = 0.0

    @contextmanager
    def running(self, clients: int) -> Iterator[None]:
        with ThreadPoolExecutor(clients + 1) as at_once:
            ended = [at_once.submit(self._ask_images) for _ in range(clients)] + [at_once.submit(self._ask_text)]
            try:
                yield
            finally:
                self._over.set()
            for each in ended:
                each.result()

    def _ask_images(self) -> None:
        client = Client(self._url)
        while not self._over.is_set():
            which = next(self._numbers) % len(self._expected)
            begun = time.monotonic()
            assert client.ask(FILES[which]) == self._expected[which]
            self.longest_s = max(self.longest_s, time.monotonic() - begun)
            self.answered += 1

    def _ask_text(self) -> None:
        client = Client(self._url)
        while not self._over.is_set():
            begun = time.monotonic()
            client.say("Hello")
            self.longest_text_s = max(self.longest_text_s, time.monotonic() - begun)
            self.texts += 1


@pytest.mark.timeout(400)
def test_an_encoder_node_that_stands_still_stops_no_request(serve: Any, tmp_path: Path) -> None:
    path = tiny_vision.smolvlm(tmp_path)
    prompts = [["<|im_start|>User: What is this? ", file, "<end_of_utterance>\nAssistant:"] for file in FILES]
    expected = tiny_vision.reference(path, prompts, NEW_TOKENS)
    # No node caches KV or rows of images, so every request with an image asks the encoder node.
    kept = ("--set", "cache.prefix_caching=false", "--set", "cache.encoder_tokens=48")
    command = serve("--model", str(path), "--encode", "1", "--prefill", "1", "--decode", "1", *FLAGS, *kept)
    url = command.until(r"^API: +(http://\S+)/v1$", START_S)[1]
    client = Client(url)
    until(client.has_encoder, START_S)
    load = Load(url, expected)
    with load.running(3):
        until(lambda: client.counters("prefill")["encoder_tokens_received"] > 0, 30)
        frozen = command.pid_of("ray::EncodeActor")
        os.kill(frozen, signal.SIGSTOP)
        until(lambda: client.counters("prefill")["encoder_fallbacks"].get("late", 0) > 0, 30)
        until(lambda: not client.has_encoder(), 30)
        answered, texts = load.answered, load.texts
        until(lambda: load.answered > answered + 10 and load.texts > texts + 3, 30)
        received = client.counters("prefill")["encoder_tokens_received"]
        # It wakes with questions whose deadlines have passed, unless the controller has replaced it before.
        with contextlib.suppress(ProcessLookupError):
            os.kill(frozen, signal.SIGCONT)
        until(client.has_encoder, START_S)
        until(lambda: client.counters("prefill")["encoder_tokens_received"] > received, 60)
    assert load.longest_s < ENCODER_S + 5
    assert load.longest_text_s < ENCODER_S  # an answer without images never waits for an encoder node
    command.process.send_signal(signal.SIGINT)
    assert command.ended() in (0, 130)

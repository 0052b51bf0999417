"""`tandem serve` replaces an adapter through its HTTP door while streams run: the name is known all the time, each answer is that of one
adapter, and streams on the earlier weights go on with them, even when their node dies."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.engine.model.adapter_files import save_adapter
from tests.integration.cluster_lab import START_S, Serve
from tests.listening import listener

KEY = {"authorization": "Bearer operators"}
LONG, SHORT = 200, 4
PROMPT = list(range(20, 60))


class Client:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120, trust_env=False, headers=KEY)

    def post(self, path: str, **body: object) -> httpx.Response:
        return self._http.post(path, json=body)

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def until_one_runs(self, role: str) -> list[dict[str, Any]]:
        """Waits until nodes of this role say that they run a request, and returns these nodes."""
        while True:
            nodes = self.get("/cluster").raise_for_status().json()["nodes"]
            if running := [node for node in nodes if node["role"] == role and node["running"]]:
                return running

    def names_until(self, is_over: Callable[[], bool]) -> set[str]:
        """Asks for the models again and again. Returns the names that were there each time."""
        names: set[str] | None = None
        while not is_over() or names is None:
            there = {card["id"] for card in self.get("/v1/models").raise_for_status().json()["data"]}
            names = there if names is None else names & there
        return names

    def _asking(self, model: str, count: int) -> dict[str, object]:
        return {
            "model": model, "prompt": PROMPT, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip

    def answer(self, model: str, count: int) -> list[int]:
        answer = self.post("/v1/completions", **self._asking(model, count))
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    def stream(self, model: str, on_tokens: Callable[[int], None]) -> list[int]:
        tokens: list[int] = []
        asked = self._asking(model, LONG) | {"stream": True}
        with self._http.stream("POST", "/v1/completions", json=asked) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    tokens += event["choices"][0]["token_ids"]
                    on_tokens(len(tokens))
        return tokens


def test_an_adapter_is_replaced_under_load_without_a_gap(
    smollm2_path: Path, tmp_path: Path, serve: Callable[..., Serve]
) -> None:
    options = {"target_modules": ["q_proj", "down_proj"]}
    old, new = (save_adapter(smollm2_path, tmp_path / str(seed), seed, **options) for seed in (1, 2))
    keys = json.dumps([{"name": "ops", "key": "operators", "operator": True}])
    running = serve(
        "--model", str(smollm2_path), "--dtype", "float32", "--prefill", "1", "--decode", "2",
        "--max-loras", "3", "--lora-modules", f"law={old}", f"next={new}",
        "--max-model-len", "1024", "--set", f"router.api_keys={keys}", "--set", "router.local_prefill=never",
        "--set", f"controller.admin_folders=[{json.dumps(str(tmp_path))}]",
    )  # fmt: skip
    url = running.until(r"^API: +(http://\S+)/v1$", START_S)[1]
    client = Client(url)
    of_old, of_new = client.answer("law", LONG), client.answer("next", LONG)
    assert of_old[:SHORT] != of_new[:SHORT]

    began = threading.Event()
    count = 0

    def on_tokens(so_far: int) -> None:
        nonlocal count
        count = so_far
        began.set()

    with ThreadPoolExecutor(3) as pool:
        following = pool.submit(lambda: Client(url).stream("law", on_tokens))
        assert began.wait(60)
        (node,) = client.until_one_runs("decode")
        body = {"lora_name": "law", "lora_path": str(new), "load_inplace": True}
        replacing = pool.submit(lambda: Client(url).post("/v1/load_lora_adapter", **body))
        watching = pool.submit(lambda: Client(url).names_until(replacing.done))
        found = [client.answer("law", SHORT)]
        while not replacing.done():
            found.append(client.answer("law", SHORT))
        assert replacing.result().status_code == 200, replacing.result().text
        assert watching.result() == {"SmolLM2-135M-Instruct", "law", "next"}
        assert all(answer in (of_old[:SHORT], of_new[:SHORT]) for answer in found)
        turned = [answer == of_new[:SHORT] for answer in found]
        assert turned == sorted(turned), "it went back"
        # No other node uses the earlier weights now.
        os.kill(listener(node["request_endpoint"]), signal.SIGKILL)
        assert count < LONG, "the stream ran all the time"
        assert client.answer("law", SHORT) == of_new[:SHORT]
        assert following.result() == of_old
    metrics = client.get("/metrics").text
    assert sum(map(float, re.findall(r"^tandem_failovers_total\S* (\S+)$", metrics, re.MULTILINE))) > 0
    assert client.post("/v1/unload_lora_adapter", lora_name="law").status_code == 200
    gone = client.post("/v1/completions", model="law", prompt=PROMPT, max_tokens=1)
    assert gone.status_code == 404

"""`tandem serve` with tiers in tandem.yaml: blocks that the device has evicted come back from host memory, and from the disk after a
node's restart."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.model import tiny
from tests.integration.cluster_lab import END_S, START_S, until_true
from tests.listening import listener

# Room for some 1,050 tokens on the device: the third prompt pushes the first out.
SETTINGS = """
cache:
  memory_bytes: 24MiB
  tiers:
    - {{cpu: 256MiB, policy: arc}}
    - {{disk: {folder}, size: 256MiB}}
scheduler: {{max_model_len: 1024, trace_folder: {folder}/steps}}
router: {{local_prefill: never}}
"""
BLOCK = 16
PROMPT = 480


class Client:
    def __init__(self, url: str, key: str = "") -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False)
        self.model = self.http.get("/v1/models").json()["data"][0]["id"]

    def answer(self, prompt: list[int], **fields: Any) -> tuple[list[int], int]:
        """The answer's tokens, and how many of the prompt's tokens came from a cache."""
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **fields,
        }  # fmt: skip
        answer = self.http.post("/v1/completions", json=body).raise_for_status().json()
        return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def nodes(self) -> dict[str, dict[str, Any]]:
        nodes = self.http.get("/cluster").raise_for_status().json()["nodes"]
        return {node["node_id"]: node for node in nodes if node["state"] == "ready"}

    def tiers(self, node_id: str) -> dict[str, dict[str, Any]]:
        return {tier["name"]: tier for tier in self.nodes()[node_id]["tiers"]}

    def metric(self, line: str) -> float:
        """The value of a metric. `line` is its line without the model's name, which all lines have."""
        text = re.sub(r'model_name="[^"]*",?', "", self.http.get("/metrics").raise_for_status().text)
        (found,) = re.findall(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
        return float(found)


@pytest.mark.parametrize(
    ("pools", "title", "reader"),
    [
        pytest.param(("--prefill", "1", "--decode", "1"), "ray::PrefillActor", "prefill-0", id="1P+1D"),
        pytest.param(
            ("--aggregated", "1"), "ray::DecodeActor", "aggregated-0", id="aggregated", marks=pytest.mark.more
        ),
    ],
)
def test_a_second_turn_comes_from_a_tier_also_when_the_node_was_killed(
    serve: Any, tmp_path: Path, pools: tuple[str, ...], title: str, reader: str
) -> None:
    """`reader`: the node that computes prompts."""
    settings = tmp_path / "tandem.yaml"
    settings.write_text(SETTINGS.format(folder=tmp_path / "kv"))
    command = serve("--config", str(settings), "--kv-memory", "24MiB", *pools)
    client = Client(command.until(r"^API: +(http://\S+)/v1$", START_S)[1])

    draw = random.Random(7)
    prompts = [[draw.randrange(1000, 40_000) for _ in range(PROMPT)] for _ in range(4)]
    first, cached = client.answer(prompts[0])
    assert cached == 0
    for other in prompts[1:]:  # evict it from the device's pool
        client.answer(other)
    second_turn = [*prompts[0], *first, 11, 12, 13]
    second, cached = client.answer(second_turn, job_id="j")
    assert cached == PROMPT, "all of the first turn's prompt came from the tier"
    assert client.answer(second_turn, skip_reading_prefix_cache=True) == (second, 0)

    until_true(lambda: client.tiers(reader)["cpu"]["found_tokens"] == PROMPT, "the node has told of it")
    role = client.nodes()[reader]["role"]
    labels = f'{{node="{reader}",role="{role}",tier="cpu"}}'
    assert client.metric(f"tandem_node_tier_found_tokens_total{labels}") == PROMPT
    assert client.metric(f"tandem_node_tier_used_bytes{labels}") > 0
    labels = f'{{node="{reader}",role="{role}"}}'
    loaded = f"tandem_node_prompt_tokens_loaded_total{labels}"
    until_true(lambda: client.metric(loaded) == PROMPT, "the node has told that it loaded them")
    said = subprocess.run(
        [sys.executable, "-m", "tandem.cluster.cli", "status", "--url", str(client.http.base_url)],
        check=True, text=True, capture_output=True, timeout=60,
    ).stdout  # fmt: skip
    assert re.search(rf"cpu tier of {reader}: [\d.]+ MiB of [\d.]+ MiB, had \d+% of [\d,]+ tokens", said), said
    assert f"disk tier of {reader}:" in said

    until_true(lambda: client.tiers(reader)["disk"]["stored_bytes"] >= client.tiers(reader)["cpu"]["stored_bytes"],
          "what the first tier has, the second has")  # fmt: skip
    before = client.nodes()[reader]["incarnation"]
    os.kill(command.pid_of(title), signal.SIGKILL)
    until_true(lambda: client.nodes().get(reader, {}).get("incarnation", before) != before, "the node is back")
    again, cached = client.answer(second_turn)
    assert again == second
    assert cached >= PROMPT, "what the killed process had stored is on the disk"
    assert client.tiers(reader)["cpu"]["found_tokens"] == 0

    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(END_S) == 0
    command.nothing_left()
    steps = [json.loads(line) for line in (tmp_path / f"kv/steps/{reader}.jsonl").read_text().splitlines()]
    tiers = [step["tiers"] for step in steps if step["event"] == "step_snapshot"][-1]
    assert [(name, 0 < cached < total) for name, cached, total in tiers] == [("cpu", True), ("disk", True)]
    assert "j" in {step["job_id"] for step in steps if step["event"] == "prefix_cache_event"}


SHARED = """
cache:
  memory_bytes: 64MiB
  remote: true
  mirror: true
  tiers: [{cpu: 256MiB}]
model: {dtype: float32}
scheduler: {max_model_len: 1024}
router: {local_prefill: never}
"""
BLOCK_BYTES = 30 * 2 * 3 * 64 * 4 * BLOCK


def tiny_model(kind: str, folder: Path, tokenizer: Path) -> Path:
    """With room for this prompt, and a tokenizer that knows more than it."""
    path = tiny.save(kind, folder)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, path)
    return path


@pytest.mark.parametrize(
    ("kind", "tokens_said"),
    [
        ("", 160),
        pytest.param("qwen3.5", 400, marks=pytest.mark.slow),
        pytest.param("gemma3", 400, marks=pytest.mark.slow),
    ],
    ids=["smollm2", "states", "windows"],
)
def test_a_killed_decode_nodes_stream_goes_on_with_the_kv_of_its_mirror(
    serve: Any, tmp_path: Path, smollm2_path: Path, kind: str, tokens_said: int
) -> None:
    settings = tmp_path / "tandem.yaml"
    settings.write_text(SHARED)
    model = [str(tiny_model(kind, tmp_path, smollm2_path))] if kind else []
    command = serve(*model, "--config", str(settings), "--kv-memory", "64MiB", "--prefill", "1", "--decode", "2")
    client = Client(command.until(r"^API: +(http://\S+)/v1$", START_S)[1])
    until_true(lambda: len(client.nodes()) == 3, "every node is ready")
    draw = random.Random(3)
    vocabulary = range(3, tiny.VOCAB) if kind else range(1000, 40_000)
    prompt = [draw.choice(vocabulary) for _ in range(PROMPT)]
    body = {
        "model": client.model, "prompt": prompt, "max_tokens": tokens_said, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip

    def stream(at: int, act: Callable[[], None]) -> list[int]:
        tokens: list[int] = []
        acted = False
        with client.http.stream("POST", "/v1/completions", json=body) as events:
            for line in events.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:])["choices"]
                    tokens += choices[0].get("token_ids", []) if choices else []
                if len(tokens) >= at and not acted:
                    acted = True
                    act()
        return tokens

    def kill() -> None:
        """The one that runs it."""
        until_true(lambda: any(is_decoding(node) for node in client.nodes().values()), "its status says so")
        ((name, node),) = ((name, node) for name, node in client.nodes().items() if is_decoding(node))
        killed.append(name)
        incarnations.append(node["incarnation"])
        os.kill(listener(node["request_endpoint"]), signal.SIGKILL)

    def is_decoding(node: dict[str, Any]) -> bool:
        return node["role"] == "decode" and node["running"] > 0

    killed: list[str] = []
    incarnations: list[str] = []
    tokens = stream(80, kill)
    assert len(tokens) == tokens_said
    (survivor,) = {"decode-0", "decode-1"} - set(killed)
    until_true(
        lambda: (
            client.tiers(survivor)["cpu"]["loaded_tokens"] >= PROMPT
            and (bool(kind) or client.tiers(survivor)["cpu"]["loaded_bytes"] >= PROMPT // BLOCK * BLOCK_BYTES)
        ),
        "the prompt's KV came from the mirror's own memory",
    )
    assert client.tiers(survivor)["cpu"]["mirrored_bytes"] > 0
    answered = time.monotonic()
    until_true(
        lambda: client.nodes()[survivor]["counters_age_s"] < time.monotonic() - answered, "its counters are of later"
    )
    counters = client.nodes()[survivor]["counters"]
    assert counters["prompt_tokens_computed"] == 0, "nothing of the prompt was computed again"
    until_true(
        lambda: client.nodes().get(killed[0], {}).get("incarnation", incarnations[0]) != incarnations[0], "it is back"
    )
    assert stream(1, lambda: None) == tokens, "the same as without a failure"

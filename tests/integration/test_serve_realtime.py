"""/v1/realtime on real engines: the part of a prompt that has come is computed before the rest comes, and a prompt that never ends leaves
nothing behind."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.conftest import Deploy, RunningDeployment, float32_config
from tests.realtime_client import LONGEST_S, RealtimeClient
from tests.waiting import until

pytestmark = pytest.mark.integration

TEXT = "The harbour was quiet that morning, and the boats lay still. " * 8


def nodes_of(running: RunningDeployment) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = httpx.get(f"{running.url}/cluster", trust_env=False).json()["nodes"]
    return nodes


def read_by_prefill(running: RunningDeployment) -> int:
    (prefill,) = (node for node in nodes_of(running) if node["role"] == "prefill")
    return int(prefill["counters"]["prompt_tokens_computed"])


def test_a_prompt_is_computed_while_it_comes(deploy: Deploy, smollm2_path: Path) -> None:
    with deploy(float32_config(smollm2_path, 1, 1)) as running:
        with closing(RealtimeClient(running.url)) as client:
            client.hear("session.created")
            client.say("input_text_buffer.append", text=TEXT)
            until(lambda: read_by_prefill(running) > 0, LONGEST_S)
            before = read_by_prefill(running)
            client.say("input_text_buffer.append", text=f"Then a ship came in. {TEXT}")
            until(lambda: read_by_prefill(running) > before, LONGEST_S)
            client.say("input_text_buffer.append", text="Who was on it?")
            client.say("input_text_buffer.commit")
            client.say("response.create", response={"max_output_tokens": 12, "temperature": 0})
            done = client.hear("response.done")["response"]
            question = f"{TEXT}Then a ship came in. {TEXT}Who was on it?"
            body = {
                "messages": [{"role": "user", "content": question}], "max_tokens": 12, "temperature": 0,
            }  # fmt: skip
            chat = httpx.post(
                f"{running.url}/v1/chat/completions", json=body, timeout=LONGEST_S, trust_env=False
            ).json()
            assert done["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
            usage = done["usage"]
            assert usage["input_token_details"]["cached_tokens"] >= usage["input_tokens"] // 2
        with closing(RealtimeClient(running.url)) as client:
            client.hear("session.created")
            before = read_by_prefill(running)
            client.say("input_text_buffer.append", text=f"Another evening. {TEXT}")
            until(lambda: read_by_prefill(running) > before, LONGEST_S)
        until(lambda: all(node["free_blocks"] == node["total_blocks"] for node in nodes_of(running)), LONGEST_S)

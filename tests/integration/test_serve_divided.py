"""`tandem serve` with a prefill node whose ranks read prompts together, and a decode node of another width: the answers are transformers'."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from tests.integration.cluster_lab import END_S, START_S, parent_of, until_true
from tests.integration.test_serve_ranks import ranks_of, received

SETTINGS = """
pools: {prefill: {nodes: 1, context_parallel: 2}, decode: {nodes: 1, tensor_parallel: 3}}
model: {dtype: float32}
scheduler: {max_model_len: 1024}
router: {local_prefill: never}
"""
FACTS = "Mercury is small. Venus is hot. Earth is wet. Mars is red. Saturn has rings. Jupiter is the largest planet. "
PROMPTS = [f"{FACTS * count}The largest planet of the solar system is" for count in (12, 3, 14)]
NUM_TOKENS = 8


@pytest.mark.more
def test_long_prompts_are_read_together_and_answered_elsewhere(serve: Any, smollm2_path: Path, tmp_path: Path) -> None:
    """Also one that begins as an earlier one, and after a rank was killed."""
    settings = tmp_path / "tandem.yaml"
    settings.write_text(SETTINGS)
    command = serve("--config", str(settings), "--kv-memory", "96MiB")
    http = httpx.Client(base_url=command.until(r"^API: +(http://\S+)/v1$", START_S)[1], timeout=120, trust_env=False)
    nodes = http.get("/cluster").raise_for_status().json()["nodes"]
    assert sorted((node["role"], node["context_parallel"]) for node in nodes) == [("decode", 1), ("prefill", 2)]
    model = http.get("/v1/models").json()["data"][0]["id"]

    def answer_of(prompt: str) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    right = [said_by_transformers(smollm2_path, prompt) for prompt in PROMPTS]
    assert [answer_of(prompt) for prompt in PROMPTS] == right
    until_true(lambda: received(http) > 0, "its status says what the decode node received")

    ranks = ranks_of(command)
    assert len(ranks) == 1 + 2, "besides the nodes' own processes"
    reads = command.pid_of("ray::PrefillActor")
    (killed,) = (rank for rank in ranks if parent_of(rank) == reads)
    os.kill(killed, signal.SIGKILL)
    assert answer_of(PROMPTS[0]) == right[0]
    until_true(lambda: len(ranks_of(command) - {killed}) == 3, "the node was replaced")
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(END_S) == 0
    command.nothing_left()


def said_by_transformers(path: Path, prompt: str) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    given = tokenizer(prompt, return_tensors="pt")
    assert given["input_ids"].shape[1] < 1000
    with torch.inference_mode():
        found = model.generate(**given, max_new_tokens=NUM_TOKENS, do_sample=False)
    return str(tokenizer.decode(found[0, given["input_ids"].shape[1] :], skip_special_tokens=True))

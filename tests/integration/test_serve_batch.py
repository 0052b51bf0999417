"""A file of requests, with a server that is started for it: real nodes, Ray and SmolLM2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.integration.cluster_lab import START_S

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_a_file_of_requests_has_a_server_started_for_it(smollm2_path: Path, tmp_path: Path) -> None:
    """Real nodes: lines yield to no one here, and come out as the same requests would."""
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"messages": QUESTION, "max_tokens": 12, "temperature": 0}
    lines = [
        {"custom_id": f"n{index}", "method": "POST", "url": "/v1/chat/completions", "body": body} for index in range(12)
    ]
    given.write_text("\n".join(map(json.dumps, lines)))
    done = subprocess.run(
        [sys.executable, "-m", "tandem.cluster.cli", "batch", given, out, "--model", "smollm2", "-o", "json"],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=START_S + 120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completed"] == 12
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["custom_id"] for each in answers] == [f"n{index}" for index in range(12)]
    texts = {each["response"]["body"]["choices"][0]["message"]["content"] for each in answers}
    assert len(texts) == 1, "the same bits in any company"
    assert "Paris" in texts.pop()

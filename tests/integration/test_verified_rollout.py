"""`tandem apply --verify`: a rollout that changes no bit is done, and one that changes some is taken back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.cli import main

START_S = 180.0
KEY = "an-operators-key"
SERVED = (
    "--model", "smollm2", "--aggregated", "1", "--kv-memory", "256MiB", "--max-model-len", "512", "--set", "model.exact=require",
    "--set", f"router.api_keys=[{{name: operator, key: {KEY}, operator: true}}]",
)  # fmt: skip
REQUEST = {"prompt": "Once upon a time", "max_tokens": 6}


@pytest.mark.timeout(600)
def test_a_rollout_that_answers_otherwise_is_taken_back(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", KEY)
    file = tmp_path / "asked.jsonl"
    file.write_text("\n".join(json.dumps({**REQUEST, "temperature": float(seed)}) for seed in range(2)))
    url = serve(*SERVED).until(r"^API: +(http://\S+)/v1$", START_S)[1]

    def apply(setting: str) -> tuple[int, str]:
        words = ("apply", "--port", "0", *SERVED, "--set", setting, "--url", url, "--verify", str(file))
        status = main(words)
        said = capfd.readouterr()
        return status, said.out + said.err

    status, said = apply("scheduler.max_num_seqs=64")
    assert status == 0, said
    assert said.startswith(f"the deployment at {url}:\n2 requests answered, to be compared\n")
    assert said.endswith("same bits as before\n")

    status, said = apply("model.dtype=float32")
    assert status == 1, said
    assert (
        "other bits: line 1 of asked.jsonl, choice 0, token 0 of the answer: " in said or "line 2 of" in said
    )
    assert "the rollout was taken back" in said

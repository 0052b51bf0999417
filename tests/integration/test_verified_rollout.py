"""`tandem apply --verify`: a rollout that changes no bit is done, and one that changes some is taken back. Clients' own requests are asked
again, too."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.cluster.cli import main
from tests.integration.cluster_lab import START_S

KEY = "an-operators-key"
SERVED = (
    "--model", "smollm2", "--aggregated", "1", "--kv-memory", "256MiB", "--max-model-len", "512", "--set", "model.exact=require",
    "--set", f"router.api_keys=[{{name: operator, key: {KEY}, operator: true}}]",
)  # fmt: skip
REQUEST = {"prompt": "Once upon a time", "max_tokens": 6}


@contextmanager
def clients(url: str) -> Iterator[None]:
    """Requests that only clients know, one after another."""
    ended = threading.Event()

    def ask() -> None:
        with httpx.Client(
            base_url=url, timeout=120, headers={"authorization": f"Bearer {KEY}"}, trust_env=False
        ) as http:
            while not ended.is_set():
                http.post("/v1/completions", json={**REQUEST, "temperature": 1, "logprobs": 1}).raise_for_status()

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for one in asking:
        one.start()
    try:
        yield
    finally:
        ended.set()
        for one in asking:
            one.join()


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

    with clients(url):
        status, said = apply("scheduler.max_num_seqs=64")
    assert status == 0, said
    assert said.startswith(f"the deployment at {url}:\n2 requests answered, to be compared\n")
    assert re.search(
        r"[1-9]\d* live requests? asked again of new nodes, with [1-9]\d* tokens\nsame bits as before\n$", said
    )

    with clients(url):
        status, said = apply("model.dtype=float32")
    assert status == 1, said
    assert re.search(
        r"other bits: (line [12] of asked.jsonl, choice 0|a client's request \S+), token \d of the answer: ", said
    )
    assert "the rollout was taken back" in said

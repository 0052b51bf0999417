"""A client of a real cluster has its quote before the first token, through httpx and OpenAI's client, and most quotes are kept."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.integration.conftest import Deploy, RunningDeployment, float32_config

QUOTED = re.compile(r"first-token-by=(\d+\.\d+); confidence=0\.9")
COUNT = 16


@pytest.fixture(scope="module")
def server(deploy: Deploy, smollm2_path: Path) -> Iterator[RunningDeployment]:
    with deploy(float32_config(smollm2_path, prefill=1, decode=1)) as running:
        rng = random.Random(4)
        for _ in range(24):  # not quoted, and learnt from
            running.complete([rng.randrange(1000, 40_000) for _ in range(rng.randrange(20, 120))], 2)
        yield running


def test_streams_have_their_quotes_before_the_first_token_and_most_are_kept(server: RunningDeployment) -> None:
    rng, kept, waited = random.Random(5), 0, list[float]()
    for _ in range(COUNT):
        prompt = [rng.randrange(1000, 40_000) for _ in range(rng.randrange(20, 120))]
        body = {"model": server.model, "prompt": prompt, "max_tokens": 4, "stream": True}
        began = time.monotonic()
        with server.http.stream("POST", "/v1/completions", json=body, headers={"X-Tandem-Quote": "0.9"}) as answer:
            told_s = time.monotonic() - began
            found = QUOTED.fullmatch(answer.headers["x-tandem-quote"])
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            first_s = time.monotonic() - began
            assert list(lines)[-2] == "data: [DONE]"
        assert found, answer.headers
        kept += first_s <= float(found[1])
        waited.append(told_s / first_s)
    assert kept > COUNT // 2, "of so few, nine in ten is never so little"
    assert sorted(waited)[COUNT // 2] < 0.9, "the quote comes when the prompt is still to be read"
    counted = dict(
        re.findall(r'^tandem_quotes_total\{.*outcome="(\w+)"\} (\S+)', server.http.get("/metrics").text, re.M)
    )
    assert sum(map(float, counted.values())) == COUNT


def test_the_official_client_has_it_before_the_first_token(server: RunningDeployment) -> None:
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, http_client=http) as client:
        began = time.monotonic()
        with client.chat.completions.with_streaming_response.create(
            model=server.model,
            messages=[{"role": "user", "content": "Count: " + " ".join(map(str, range(400)))}],
            max_tokens=3,
            stream=True,
            extra_headers={"X-Tandem-Quote": "0.9"},
        ) as answer:
            told_s = time.monotonic() - began
            assert QUOTED.fullmatch(answer.headers["x-tandem-quote"])
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            assert time.monotonic() - began > 1.2 * told_s
            assert "data: [DONE]" in list(lines)

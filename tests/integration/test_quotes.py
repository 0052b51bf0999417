"""A client of a real cluster has its quote before the first token, through httpx and OpenAI's client, and most quotes are kept."""

from __future__ import annotations

import random
import re
import time

import openai
import pytest

from tests.integration.conftest import RunningDeployment

QUOTED = re.compile(r"first-token-by=(\d+\.\d+); confidence=0\.9")
COUNT = 16


@pytest.fixture(scope="module")
def learnt(server: RunningDeployment) -> RunningDeployment:
    rng = random.Random(4)
    for _ in range(24):  # not quoted, and learnt from
        server.complete([rng.randrange(1000, 40_000) for _ in range(rng.randrange(20, 120))], 2)
    return server


@pytest.mark.more  # it takes as long as forty prompts; the next one has a quote, too
def test_streams_have_their_quotes_before_the_first_token_and_most_are_kept(learnt: RunningDeployment) -> None:
    server, rng, kept, waited = learnt, random.Random(5), 0, list[float]()
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


def test_the_official_client_has_it_before_the_first_token(learnt: RunningDeployment) -> None:
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{learnt.url}/v1", api_key="unused", max_retries=0, http_client=http) as client:
        began = time.monotonic()
        with client.chat.completions.with_streaming_response.create(
            model=learnt.model,
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

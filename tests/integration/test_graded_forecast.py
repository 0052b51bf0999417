"""A real cluster says what a change of its sizes will bring, and grades it by what came."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import random
import subprocess
import threading
import time
from typing import Any

import httpx

from tests.integration.cluster_lab import START_S, free_port
from tests.integration.test_ports import KEYS, tandem

OPERATOR = "ops-key"
FORETOLD_S = 60.0
GRADED_S = 300.0  # a node starts, a minute passes, and sixty requests come


def ask(url: str, seed: int) -> None:
    rng = random.Random(seed)
    body = {
        "model": "SmolLM2-135M-Instruct",
        "prompt": [rng.randrange(1000, 20000) for _ in range(rng.choice([20, 60, 120]))],
        "max_tokens": 12,
        "ignore_eos": True,
    }
    headers = {"authorization": "Bearer tenant-key"}
    httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120, trust_env=False).raise_for_status()


def read(url: str, path: str) -> Any:
    headers = {"authorization": f"Bearer {OPERATOR}"}
    return httpx.get(f"{url}{path}", headers=headers, timeout=30, trust_env=False).raise_for_status()


def done(command: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert command.returncode == 0, command.stderr + command.stdout
    return command


def graded(url: str) -> dict[str, Any]:
    """Two clients go on asking until the last change is graded. Returns what the controller shows."""
    ends, seeds = threading.Event(), itertools.count(1000)

    def go_on() -> None:
        while not ends.is_set():
            ask(url, next(seeds))

    with concurrent.futures.ThreadPoolExecutor(2) as clients:
        asking = [clients.submit(go_on) for _ in range(2)]
        try:
            deadline = time.monotonic() + GRADED_S
            while time.monotonic() < deadline:
                headers = {"authorization": f"Bearer {OPERATOR}"}
                view = httpx.post(f"{url}/admin/view", headers=headers, timeout=30, trust_env=False).raise_for_status()
                foresight: dict[str, Any] = view.json()["foresight"]
                if foresight["graded"]:
                    return foresight
                assert not any(client.done() for client in asking), [client.result() for client in asking]
                ends.wait(1.0)
        finally:
            ends.set()
    raise AssertionError(f"not graded after {GRADED_S:.0f} s: {foresight}")


def foretold(url: str) -> dict[str, Any]:
    """Returns what is expected of the change that was just made."""
    deadline = time.monotonic() + FORETOLD_S
    while time.monotonic() < deadline:
        headers = {"authorization": f"Bearer {OPERATOR}"}
        view = httpx.post(f"{url}/admin/view", headers=headers, timeout=30, trust_env=False).raise_for_status()
        foresight: dict[str, Any] = view.json()["foresight"]
        if foresight.get("pending"):
            pending: dict[str, Any] = foresight["pending"]
            return pending
        threading.Event().wait(0.5)
    raise AssertionError(f"not foretold after {FORETOLD_S:.0f} s: {foresight}")


def test_what_a_change_brings_is_said_before_it_and_compared_with_what_came(serve: Any) -> None:
    flags = ["--prefill", "1", "--decode", "1", "--port", str(free_port())]
    command = serve(*flags, "--set", f"router.api_keys={json.dumps(KEYS)}")
    url = command.until(r"^API: +(http://\S+)/v1$", START_S)[1]
    early = done(tandem(url, OPERATOR, "scale", "prefill=1", "decode=1", "-o", "json"))
    assert json.loads(early.stdout)["forecast"] is None
    with concurrent.futures.ThreadPoolExecutor(2) as clients:
        list(clients.map(lambda seed: ask(url, seed), range(60)))

    scaled = done(tandem(url, OPERATOR, "scale", "prefill=2", "-o", "json"))
    assert "expected, by the last 60 requests: first token, p90 " in scaled.stderr
    forecast = json.loads(scaled.stdout)["forecast"]
    assert (forecast["now"], forecast["then"]) == ("1 prefill, 1 decode", "2 prefill, 1 decode")
    assert all(figure["low"] <= figure["then"] <= figure["high"] for figure in forecast["expected"])

    foresight = graded(url)
    (one,) = foresight["graded"]
    assert (one["then"], one.get("not_graded", "")) == ("2 prefill, 1 decode", "")
    assert one["requests"] == 60
    assert [figure["what"] for figure in one["figures"]] == [figure["what"] for figure in forecast["expected"]]
    for figure in one["figures"]:
        assert figure["inside"] == (figure["low"] <= figure["came"] <= figure["high"])

    status = done(tandem(url, OPERATOR, "status")).stdout
    assert "forecast: 1 prefill, 1 decode → 2 prefill, 1 decode: first token, p90 was " in status
    assert "of the last 1 graded forecast of an ordered change, first token, p90 came inside the interval" in status
    score = json.loads(done(tandem(url, OPERATOR, "status", "-o", "json")).stdout)["router"]["forecasts"]
    assert score["graded"] == 1
    assert "tandem_forecasts{" in read(url, "/metrics").text
    assert read(url, "/ui/state").json()["router"]["forecasts"]["said"] == score["said"]
    # What no one asked about before is foretold beside the change: here a request as the page sends it.
    headers = {"authorization": f"Bearer {OPERATOR}"}
    body = {"pools": {"prefill": 1}}
    httpx.post(f"{url}/admin/scale", json=body, headers=headers, timeout=30, trust_env=False).raise_for_status()
    pending = foretold(url)
    assert (pending["now"], pending["then"]) == ("2 prefill, 1 decode", "1 prefill, 1 decode")
    print(scaled.stderr, status)

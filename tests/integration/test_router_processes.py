"""Two router processes on one port, as `tandem serve` starts them: both serve, each answers for both, and when one is killed only its own
connections break."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import httpx

from tests.integration.cluster_lab import START_S, Serve
from tests.waiting import until

MODEL = "SmolLM2-135M-Instruct"
CONNECTIONS = 6
TOKENS = 200


def counted(url: str) -> float:
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=20).text
    return sum(map(float, re.findall(r"^tandem_request_success_total\{.*\} (\S+)$", text, re.MULTILINE)))


def processes(url: str) -> list[dict[str, Any]]:
    router: dict[str, Any] = httpx.get(f"{url}/cluster", trust_env=False, timeout=20).json()["router"]
    found: list[dict[str, Any]] = router["processes"]
    return [one for one in found if one["answers"] and not one["unhealthy"]]


def ends_well(stream: httpx.Response) -> bool:
    try:
        return "data: [DONE]" in list(stream.iter_lines())
    except httpx.TransportError:
        return False


def test_both_serve_and_one_is_killed(serve: Any) -> None:
    running: Serve = serve("--set", "router.processes=2")
    url = running.until(r"(http://127\.0\.0\.1:\d+)/v1", START_S)[1]
    until(lambda: len(processes(url)) == 2, START_S)
    routers = [pid for pid, command in running.processes().items() if "RouterActor" in command]
    assert len(routers) == 2

    body = {"model": MODEL, "prompt": "Once", "max_tokens": 2}
    clients = [httpx.Client(base_url=url, trust_env=False, timeout=60) for _ in range(CONNECTIONS)]
    for number, client in enumerate(clients):
        headers = {"x-tandem-trace": "1", "x-request-id": f"asked-{number}"}
        assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
    assert counted(url) == CONNECTIONS
    for number in range(CONNECTIONS):
        assert httpx.get(f"{url}/traces/asked-{number}", trust_env=False, timeout=20).status_code == 200

    long = {**body, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    streams = [
        client.send(client.build_request("POST", "/v1/completions", json=long), stream=True) for client in clients
    ]
    os.kill(routers[0], signal.SIGKILL)
    whole = [ends_well(stream) for stream in streams]
    assert set(whole) == {True, False}, "each had some of the streams"
    for _ in range(4):
        answer = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60)
        assert answer.status_code == 200, answer.text
    until(lambda: len(processes(url)) == 2, START_S)
    assert counted(url) >= CONNECTIONS
    for client in clients:
        client.close()

"""On one machine no process listens beyond loopback, and every process that listens is in the table of docs/security.md. An operator
with a key changes the cluster through the router."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.integration.cluster_lab import END_S, START_S, Serve
from tests.listening import listening_addresses, named_in_the_table, program_of

KEYS = [{"name": "tenant", "key": "tenant-key"}, {"name": "ops", "key": "ops-key", "operator": True}]


def is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def tandem(url: str, key: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tandem.cluster.cli", *words, "--url", url],
        capture_output=True, text=True, timeout=60, env={**os.environ, "TANDEM_API_KEY": key},
    )  # fmt: skip


def test_what_listens_is_what_the_page_says_and_an_operator_comes_by_the_router(serve: Any) -> None:
    running: Serve = serve("--set", f"router.api_keys={json.dumps(KEYS)}")
    url = running.until(r"(http://127\.0\.0\.1:\d+)/v1", START_S)[1]
    headers = {"authorization": "Bearer tenant-key"}
    body = {"model": "SmolLM2-135M-Instruct", "prompt": "Once upon a time " * 40, "max_tokens": 8}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text  # KV was transferred, so every socket is open by now

    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in running.processes()]
    for program in ("dashboard.py", "log_monitor.py", "monitor.py"):
        assert not [command for command in commands if f"/{program}\0" in command], "it was not asked for"
    assert not [command for command in commands if command.startswith("ray::DashboardAgent")]

    found = {
        (program_of(command), host)
        for pid, command in running.processes().items()
        for host, _ in listening_addresses(pid)
    }
    beyond = {(name, host) for name, host in found if not is_loopback(host)}
    assert not beyond, "beyond loopback"
    names = named_in_the_table()
    assert {"ray::RouterActor", "ray::PrefillActor", "ray::DecodeActor"} <= {name for name, _ in found} & names
    assert {name for name, _ in found} <= names

    scaled = tandem(url, "ops-key", "scale", "decode=1")
    assert scaled.stdout.splitlines() == [f"the deployment at {url}:", "decode: stays at 1"], scaled.stderr
    refused = tandem(url, "tenant-key", "scale", "decode=2")
    assert refused.returncode != 0
    assert "needs an operator's key" in refused.stderr + refused.stdout
    running.process.terminate()
    running.process.wait(END_S)

"""A real Prometheus scrapes a real run: every panel of the dashboard has something to show."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from tandem.engine.config import CacheConfig, SchedulerConfig
from tandem.kvtransfer.config import TierConfig
from tests.hosts.tools import install_absent
from tests.integration.conftest import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    PATIENCE_S,
    Deploy,
    RunningDeployment,
    float32_config,
)

MONITORING = Path(__file__).resolve().parents[2] / "manifests" / "monitoring"
SCRAPE_S = 1
RATE = "20s"


class Prometheus:
    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=10, trust_env=False)

    def ask(self, expression: str) -> list[dict[str, Any]]:
        answer = self.http.get("/api/v1/query", params={"query": expression})
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        return answer.json()["data"]["result"]

    def until(self, expression: str, what: str) -> list[dict[str, Any]]:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.ask(expression)):
            if time.monotonic() > deadline:
                pytest.fail(f"after {PATIENCE_S:.0f} s still not: {what} ({expression})")
            time.sleep(0.2)
        return found


@pytest.fixture
def prometheus(serving: RunningDeployment, tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus with the shipped configuration, except for its target and scrape interval."""
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config["rule_files"] = [str(MONITORING / "alerts.yaml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [serving.url.removeprefix("http://")]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yaml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address={address}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "log").open("wb"),
    )
    client = Prometheus(f"http://{address}")
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                if client.http.get("/-/ready").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        yield client
    finally:
        client.http.close()
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def serving(deploy: Deploy, smollm2_path: Path) -> Iterator[RunningDeployment]:
    install_absent({"prometheus": "prometheus"}, "a test of the dashboard")
    base = float32_config(smollm2_path, 1, 1)
    config = msgspec.structs.replace(
        base,
        cache=CacheConfig(
            block_size=BLOCK_SIZE, memory_bytes=80 * BLOCK_BYTES, tiers=[TierConfig(cpu=64 * BLOCK_BYTES)]
        ),
        scheduler=SchedulerConfig(num_speculative_tokens=3, max_model_len=1024),
    )
    with deploy(config) as running:
        yield running


def expressions() -> list[tuple[str, str]]:
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text(encoding="utf-8"))
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", RATE).replace("$model_name", "smollm2"))
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def test_every_panel_shows_something_of_a_real_run(
    serving: RunningDeployment, prometheus: Prometheus
) -> None:
    prometheus.until("up == 1", "the router is scraped")

    def users(seconds: float) -> None:
        ends = time.monotonic() + seconds
        turn = 0
        while time.monotonic() < ends:
            # Prompts that repeat themselves are drafted; more of them than the device's cache holds come from the tier.
            prompt = [100 + turn % 9, *range(200, 220)] * 8
            serving.complete(prompt, 12, ignore_eos=True)
            turn += 1

    missing: dict[str, str] = {}
    deadline = time.monotonic() + PATIENCE_S
    with ThreadPoolExecutor(2) as pool:
        while True:
            for user in [pool.submit(users, 6) for _ in range(2)]:
                user.result()
            missing = {
                expression: title
                for title, expression in expressions()
                if not any(sample["value"][1] != "NaN" for sample in prometheus.ask(expression))
            }
            if not missing or time.monotonic() > deadline:
                break
    assert not missing
    # Prometheus has evaluated the shipped rules on these figures, and no alert fires.
    rules = prometheus.http.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert not [rule["name"] for rule in rules if rule["state"] == "firing"]

"""A real Prometheus scrapes a real run: every panel of the dashboard has something to show."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from tandem.engine.config import CacheConfig, SchedulerConfig
from tandem.kvtransfer.config import TierConfig
from tests.integration.conftest import BLOCK_BYTES, BLOCK_SIZE, PATIENCE_S, Deploy, RunningDeployment, float32_config
from tests.integration.prometheus import MONITORING, RATE, Prometheus, watching


@pytest.fixture
def prometheus(serving: RunningDeployment, tmp_path: Path) -> Iterator[Prometheus]:
    rules = (MONITORING / "alerts.yaml").read_text(encoding="utf-8")
    with watching(serving.url, tmp_path, rules) as running:
        yield running


@pytest.fixture(scope="module")
def serving(deploy: Deploy, smollm2_path: Path) -> Iterator[RunningDeployment]:
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
        if "DCGM" not in target["expr"]  # tests/cluster/test_manifests_monitoring.py
    ]


def test_every_panel_shows_something_of_a_real_run(serving: RunningDeployment, prometheus: Prometheus) -> None:
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

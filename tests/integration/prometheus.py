"""A real Prometheus with the shipped configuration, made faster."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.hosts.tools import install_absent

MONITORING = Path(__file__).resolve().parents[2] / "manifests" / "monitoring"
PATIENCE_S = 240.0
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

    def fired(self) -> set[str]:
        """The alerts that have fired since it began."""
        found = self.ask('count_over_time(ALERTS{alertstate="firing"}[1h])')
        return {sample["metric"]["alertname"] for sample in found}

    def until_fired(self, *alerts: str) -> None:
        for alert in alerts:
            self.until(f'count_over_time(ALERTS{{alertname="{alert}", alertstate="firing"}}[1h])', alert)

    def until_quiet(self) -> None:
        self.until('absent(ALERTS{alertstate="firing", alertname!~"TandemSlow.*"})', "no alert fires")


def quick_rules() -> str:
    """The shipped rules, whose alerts fire after a second instead of minutes."""
    text = (MONITORING / "alerts.yaml").read_text(encoding="utf-8")
    return re.sub(r"\bfor: \w+", "for: 1s", text)


@contextmanager
def watching(url: str, folder: Path, rules: str) -> Iterator[Prometheus]:
    """Runs Prometheus for the block: it scrapes the router at `url` every second. Without the program, the test skips."""
    install_absent({"prometheus": "prometheus"}, "a test with Prometheus")
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    (folder / "alerts.yaml").write_text(rules, encoding="utf-8")
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [url.removeprefix("http://")]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("wb"),
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
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        yield client
    finally:
        client.http.close()
        process.terminate()
        process.wait(20)

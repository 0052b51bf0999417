"""manifests/monitoring: every alert fires with its fault, as Prometheus' own tool computes it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.hosts.tools import install_absent

MONITORING = Path(__file__).resolve().parents[2] / "manifests" / "monitoring"


@pytest.fixture(scope="module")
def promtool() -> None:
    install_absent({"promtool": "prometheus"}, "a test of the alerts")


def check(*words: str) -> None:
    done = subprocess.run(
        ["promtool", *words], cwd=MONITORING, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("promtool")
def test_every_alert_fires_with_its_fault_and_only_then() -> None:
    check("check", "config", "prometheus.yaml")
    check("test", "rules", "alerts-test.yaml")


def test_no_alert_is_without_a_fault() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    faults = (MONITORING / "alerts-test.yaml").read_text(encoding="utf-8")
    for rule in rules:
        assert f'alertname="{rule["alert"]}"' in faults, rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_panels_lie_beside_one_another() -> None:
    panels = json.loads((MONITORING / "grafana-dashboard.json").read_text(encoding="utf-8"))["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)

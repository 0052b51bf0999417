"""manifests/monitoring: every alert fires with its fault, as Prometheus' own tool computes it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.hosts.tools import install_absent
from tests.integration.prometheus import watching
from tests.small_server import Answer, SmallServer

MONITORING = Path(__file__).resolve().parents[2] / "manifests" / "monitoring"


@pytest.fixture(scope="module")
def promtool() -> None:
    install_absent({"promtool": "prometheus"}, "a test of the alerts")


def check(*words: str) -> None:
    done = subprocess.run(["promtool", *words], cwd=MONITORING, capture_output=True, text=True, timeout=60, check=False)
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


EXPORTED = {
    "DCGM_FI_DEV_POWER_USAGE gauge": 412.6, "DCGM_FI_DEV_XID_ERRORS gauge": 0, "DCGM_FI_DEV_FB_FREE gauge": 9000,
    "DCGM_FI_DEV_FB_USED gauge": 72000, "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS counter": 0,
    "DCGM_FI_DEV_ROW_REMAP_FAILURE gauge": 0, "DCGM_FI_PROF_GR_ENGINE_ACTIVE gauge": 0.97,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE gauge": 0.61, "DCGM_FI_PROF_DRAM_ACTIVE gauge": 0.43,
}  # fmt: skip
LABELS = (
    '{gpu="0",UUID="GPU-a8394b51",pci_bus_id="00000000:18:00.0",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",'
    'Hostname="gpu-1",DCGM_FI_DRIVER_VERSION="580.95.05"}'
)


def exported(path: str) -> Answer:
    lines = [f"# TYPE {metric}\n{metric.partition(' ')[0]}{LABELS} {value}\n" for metric, value in EXPORTED.items()]
    return 200, {"Content-Type": "text/plain; version=0.0.4"}, "".join(lines).encode()


def test_the_panels_on_gpus_show_what_the_exporter_says(tmp_path: Path) -> None:
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text(encoding="utf-8"))
    asked = [
        target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        if "DCGM" in target["expr"]
    ]
    assert len(asked) == 8
    rules = (MONITORING / "alerts.yaml").read_text(encoding="utf-8")
    with SmallServer(exported) as server, watching(server.url, tmp_path, rules) as prometheus:
        prometheus.until("DCGM_FI_PROF_DRAM_ACTIVE", "the exporter is scraped")
        for expression in asked:
            (sample,) = prometheus.ask(expression)
            assert sample["value"][1] != "NaN", expression
        (taken,) = [each for each in asked if "FB_USED" in each]
        assert float(prometheus.ask(taken)[0]["value"][1]) == pytest.approx(72 / 81)


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

"""Real faults of a real `tandem serve` fire the shipped alerts in a real Prometheus, and nothing else fires."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.cluster_lab import START_S, Serve
from tests.integration.prometheus import Prometheus, quick_rules, watching

pytestmark = pytest.mark.timeout(900)

OPERATOR, POOR = "an-operators-key-0123456789", "a-poor-tenants-key-0123456789"
SETTINGS = """
cache:
  tiers: [{{disk: {folder}, size: 48MiB}}]
scheduler: {{max_model_len: 1024}}
router:
  local_prefill: never
  api_keys:
    - {{name: ops, key: {operator}, operator: true}}
    - {{name: poor, key: {poor}, requests_per_minute: 1}}
"""
# How fast this machine computes is not what is tested.
OF_SPEED = {"TandemSlowFirstToken", "TandemSlowTokens", "TandemQueueStands"}


class Watched:
    """A served model, its folder of links, the disk of its tier, and the Prometheus that watches it."""

    def __init__(self, server: Serve, url: str, model: Path, disk: Path, prometheus: Prometheus) -> None:
        self.server, self.model, self.disk, self.prometheus = server, model, disk, prometheus
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def post(self, path: str, body: dict[str, Any], key: str = OPERATOR) -> httpx.Response:
        return self.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

    def complete(self, key: str = OPERATOR) -> int:
        draw = random.Random(time.monotonic_ns())
        prompt = [draw.randrange(1000, 40_000) for _ in range(200)]
        return self.post(
            "/v1/completions", {"model": self.name, "prompt": prompt, "max_tokens": 2}, key
        ).status_code

    @property
    def name(self) -> str:
        models = self.http.get("/v1/models", headers={"Authorization": f"Bearer {OPERATOR}"})
        return str(models.json()["data"][0]["id"])

    def until_serving(self) -> None:
        self.prometheus.until("tandem_router_healthy == 1", "it serves")
        self.prometheus.until_quiet()

    def fired_for_a_fault(self) -> set[str]:
        return self.prometheus.fired() - OF_SPEED


@pytest.fixture(scope="module")
def watched(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    model, disk = folder / "model", folder / "disk"
    model.mkdir()
    disk.mkdir()
    for file in smollm2_path.iterdir():
        (model / file.name).symlink_to(file.resolve())
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160m", "tandem", str(disk)], check=False
    ).returncode:
        pytest.skip("a disk that can be filled needs the right to mount one")
    server = None
    try:
        settings = folder / "tandem.yaml"
        settings.write_text(SETTINGS.format(folder=disk / "kv", operator=OPERATOR, poor=POOR))
        server = Serve(str(model), "--config", str(settings), "--prefill", "1", "--decode", "1")
        url = server.until(r"^API: +(http://\S+)/v1$", START_S)[1]
        with watching(url, folder, quick_rules()) as prometheus:
            yield Watched(server, url, model, disk, prometheus)
    finally:
        if server is not None:
            server.kill_all()
        subprocess.run(["umount", "-l", str(disk)], check=False)
        shutil.rmtree(model)


def test_real_faults_fire_their_alerts_and_nothing_fires_without_one(watched: Watched) -> None:
    """One test, because each fault is told from the one before it by what has not fired yet."""
    prometheus = watched.prometheus
    prometheus.until("tandem_router_healthy == 1", "it serves")
    assert [watched.complete() for _ in range(3)] == [200] * 3
    prometheus.until("count_over_time(tandem_router_healthy[1h]) >= 5", "it has been looked at for a while")
    assert watched.fired_for_a_fault() == set(), "all is well"

    assert [watched.complete(POOR) for _ in range(2)] == [200, 429]
    prometheus.until_fired("TandemRequestsRefused")
    expected = {"TandemRequestsRefused"}
    assert watched.fired_for_a_fault() == expected

    os.kill(watched.server.pid_of("ray::DecodeActor"), signal.SIGKILL)
    prometheus.until_fired("TandemNodeDown", "TandemPoolEmpty", "TandemUnavailable")
    down = prometheus.ask('count_over_time(ALERTS{alertname="TandemNodeDown"}[1h])')
    assert {sample["metric"]["node"] for sample in down} == {"decode-0"}
    prometheus.until("tandem_router_healthy == 1", "it is back")
    expected |= {"TandemNodeDown", "TandemPoolEmpty", "TandemUnavailable"}

    # A frozen process is as silent as one behind a cut link.
    frozen = watched.server.pid_of("ray::PrefillActor")
    os.kill(frozen, signal.SIGSTOP)
    prometheus.until(
        'count_over_time(ALERTS{alertname="TandemNodeDown", node="prefill-0"}[1h])', "it is missed"
    )
    os.kill(frozen, signal.SIGCONT)
    prometheus.until('tandem_node_up{node="prefill-0"} == 1', "it is back")

    with (watched.disk / "filler").open("wb") as filler, contextlib.suppress(OSError):
        while True:  # until the disk is full
            filler.write(bytes(1 << 20))
            filler.flush()
    for _ in range(12):
        watched.complete()
    prometheus.until_fired("TandemTierFails")
    (watched.disk / "filler").unlink()
    expected |= {"TandemTierFails"}
    assert "TandemNodeLeftOut" not in watched.fired_for_a_fault()

    for weights in watched.model.glob("*.safetensors"):
        weights.rename(weights.with_suffix(".away"))
    os.kill(watched.server.pid_of("ray::PrefillActor"), signal.SIGKILL)
    prometheus.until_fired("TandemNodeLeftOut")
    for weights in watched.model.glob("*.away"):
        weights.rename(weights.with_suffix(".safetensors"))
    assert watched.post("/admin/scale", {"pools": {"prefill": 1}}).status_code == 200
    prometheus.until('tandem_pool_nodes{role="prefill", state="ready"} == 1', "an operator brings it back")
    expected |= {"TandemNodeLeftOut"}
    # A request that was under way may have met a node's death.
    may = {
        "TandemFailovers",
        "TandemTransfersFail",
        "TandemLeasesExpire",
        "TandemTierLeftOut",
        "TandemNodeWaits",
    }
    assert expected <= watched.fired_for_a_fault() <= expected | may

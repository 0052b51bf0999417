"""Real faults of a real `tandem serve` fire the shipped alerts in a real Prometheus, and nothing else fires."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hosts.tools import install_absent
from tests.integration.cluster_lab import START_S, Serve
from tests.integration.prometheus import PATIENCE_S, Prometheus, quick_rules, watching

pytestmark = pytest.mark.timeout(900)

OPERATOR, POOR = "an-operators-key-0123456789", "a-poor-tenants-key-0123456789"
SETTINGS = """
cache:
  tiers: [{{disk: {folder}, size: 160MiB}}]  # more than is stored before the disk is full: only a new part of the file fails
scheduler: {{max_model_len: 1024}}
router:
  local_prefill: never
  api_keys:
    - {{name: ops, key: {operator}, operator: true}}
    - {{name: poor, key: {poor}, requests_per_minute: 1}}
"""
# How fast this machine computes, or answers a scrape, is not what is tested.
OF_SPEED = {"TandemSlowFirstToken", "TandemSlowTokens", "TandemQueueStands", "TandemRouterDown"}


class Watched:
    """A served model, its folder of links, the disk of its tier, and the Prometheus that watches it."""

    def __init__(self, server: Serve, url: str, model: Path, disk: Path, prometheus: Prometheus) -> None:
        self.server, self.model, self.disk, self.prometheus = server, model, disk, prometheus
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False)

    def post(self, path: str, body: dict[str, Any], key: str = OPERATOR) -> httpx.Response:
        return self.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

    def complete(self, key: str = OPERATOR, tokens: int = 200) -> int:
        draw = random.Random(time.monotonic_ns())
        prompt = [draw.randrange(1000, 40_000) for _ in range(tokens)]
        return self.post("/v1/completions", {"model": self.name, "prompt": prompt, "max_tokens": 2}, key).status_code

    def transfers(self) -> int:
        """How many are under way."""
        state = self.http.get("/ui/state", headers={"Authorization": f"Bearer {OPERATOR}"}).json()
        return sum(pair["transfers"] for pair in state["moving"])

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
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=480m", "tandem", str(disk)], check=False).returncode:
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


@contextmanager
def cut(one: int, other: int) -> Iterator[None]:
    """Drops what these two processes send each other over TCP, for the block. Their shared memory still works."""

    def ends(process: int) -> set[tuple[int, int]]:
        lines = re.findall(rf"^ESTAB .*pid={process},.*$", listed, re.MULTILINE)
        return {(int(here), int(there)) for line in lines for here, there in [re.findall(r":(\d+)\b", line)[:2]]}

    listed = subprocess.run(["ss", "-tnp"], capture_output=True, text=True, check=True).stdout
    ports = {port for here, there in ends(one) if (there, here) in ends(other) for port in (here, there)}
    assert ports, "they are connected"
    listening = subprocess.run(["ss", "-tnl"], capture_output=True, text=True, check=True).stdout
    doors = ports & {int(port) for port in re.findall(r":(\d+)\s", listening)}
    some = ", ".join(map(str, doors))
    rules = f"tcp dport {{ {some} }} drop; tcp sport {{ {some} }} drop"
    table = "inet tandem_test_cut"
    chain = f"table {table} {{\nchain output {{\ntype filter hook output priority 0; {rules};\n}}\n}}\n"
    subprocess.run(["nft", "-f", "-"], input=chain, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run(["nft", "delete", "table", *table.split()], check=True)


def test_a_cut_link_fires_its_alerts_and_nothing_fires_before_it(watched: Watched) -> None:
    install_absent({"nft": "nftables", "ss": "iproute2"}, "a link that is cut")
    if subprocess.run(["nft", "list", "tables"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel has no nftables, which cut a link")
    prometheus = watched.prometheus
    prometheus.until("tandem_router_healthy == 1", "it serves")
    assert [watched.complete() for _ in range(3)] == [200] * 3
    prometheus.until("count_over_time(tandem_router_healthy[1h]) >= 5", "it has been looked at for a while")
    assert watched.fired_for_a_fault() == set(), "all is well"

    prefill, decode = watched.server.pid_of("ray::PrefillActor"), watched.server.pid_of("ray::DecodeActor")
    answers: list[int] = []
    asking = [threading.Thread(target=lambda: answers.append(watched.complete(tokens=400))) for _ in range(4)]
    for one in asking:
        one.start()
    deadline = time.monotonic() + PATIENCE_S
    while watched.transfers() < 2:
        assert time.monotonic() < deadline, "their KV is on its way"
    with cut(prefill, decode):
        while not {"TandemTransfersFail", "TandemLeasesExpire"} <= prometheus.fired():
            found = prometheus.ask("tandem_node_transfers_finished_total > 0")
            assert time.monotonic() < deadline, [(one["metric"]["outcome"], one["value"]) for one in found]
            assert watched.complete(tokens=40) == 200
        for one in asking:
            one.join()
    assert answers == [200] * 4, "the decode node read these prompts itself"
    assert watched.fired_for_a_fault() == {"TandemTransfersFail", "TandemLeasesExpire"}

    received = 'sum(tandem_node_transfers_finished_total{outcome="received"})'
    before = float(prometheus.ask(received)[0]["value"][1])
    deadline = time.monotonic() + PATIENCE_S
    while not prometheus.ask(f"{received} > {before}"):
        assert time.monotonic() < deadline, "mended, it transfers again"
        assert watched.complete(tokens=40) == 200


def test_real_faults_fire_their_alerts_and_nothing_fires_without_one(watched: Watched) -> None:
    """One test, because each fault is told from the one before it by what has not fired yet."""
    prometheus = watched.prometheus
    prometheus.until("tandem_router_healthy == 1", "it serves")
    assert [watched.complete() for _ in range(3)] == [200] * 3
    prometheus.until("count_over_time(tandem_router_healthy[1h]) >= 5", "it has been looked at for a while")
    cut_before = watched.fired_for_a_fault()
    assert cut_before <= {"TandemTransfersFail", "TandemLeasesExpire"}, "all is well"

    assert [watched.complete(POOR) for _ in range(2)] == [200, 429]
    prometheus.until_fired("TandemRequestsRefused")
    expected = {"TandemRequestsRefused", *cut_before}
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
    prometheus.until('count_over_time(ALERTS{alertname="TandemNodeDown", node="prefill-0"}[1h])', "it is missed")
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
    may = {"TandemFailovers", "TandemTransfersFail", "TandemLeasesExpire", "TandemTierLeftOut", "TandemNodeWaits"}
    assert expected <= watched.fired_for_a_fault() <= expected | may

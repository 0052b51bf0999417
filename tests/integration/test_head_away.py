"""The control plane is away under load: Ray's control store is killed, as when its machine is lost, or the controller's process is
stopped. Nodes and routers go on serving, and are the same afterwards. TANDEM_AWAY_S says for how long; Ray by itself waits a minute
for its control store."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster_lab import MODEL, START_S, Load, RayNodes, Tandem, free_port
from tests.integration.test_serve_command import epochs

AWAY_S = float(os.environ.get("TANDEM_AWAY_S", "10"))
# The manifests set this for every machine.
PATIENCE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3600"}

pytestmark = pytest.mark.timeout(int(600 + AWAY_S))


@pytest.fixture(scope="module")
def ray_nodes(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    store = tmp_path_factory.mktemp("gcs")
    environment = PATIENCE | {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(store)}
    nodes = RayNodes(environment, prefill=1, decode=1)
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def tandem(ray_nodes: RayNodes, tmp_path_factory: pytest.TempPathFactory) -> Tandem:
    tandem = Tandem(ray_nodes.address, tmp_path_factory.mktemp("operator"))
    settings = ("--model", MODEL, "--kv-memory", "256MiB", "--set", "router.local_prefill=never")
    said = tandem("serve", "--detach", "--port", str(free_port()), *settings, timeout_s=START_S)
    tandem.url = re.findall(r"^API: +(http://\S+)/v1$", said, re.MULTILINE)[0]
    return tandem


def requests_go_on(tandem: Tandem, load: Load, seconds: float) -> None:
    before = epochs(tandem.url)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done = load.finished
        tandem.until(lambda nodes, done=done: load.finished > done, "requests finished meanwhile")
        assert epochs(tandem.url) == before


def is_as_it_was(tandem: Tandem, before: dict[str, int]) -> None:
    said = tandem("status")
    assert re.search(r"^prefill: 1 of 1 node ready", said, re.MULTILINE), said
    assert "restart" not in said
    assert epochs(tandem.url) == before, "nothing was started again"


def test_without_the_control_store(ray_nodes: RayNodes, tandem: Tandem) -> None:
    before = epochs(tandem.url)
    with Load(tandem.url, "SmolLM2-135M-Instruct", clients=2) as load:
        with ray_nodes.head_away():
            requests_go_on(tandem, load, AWAY_S)
        requests_go_on(tandem, load, 1.0)
    is_as_it_was(tandem, before)


def test_with_a_controller_that_stands_still(ray_nodes: RayNodes, tandem: Tandem) -> None:
    before = epochs(tandem.url)
    controller = ray_nodes.pid_of("ray::ControllerActor")
    with Load(tandem.url, "SmolLM2-135M-Instruct", clients=2) as load:
        os.kill(controller, signal.SIGSTOP)
        requests_go_on(tandem, load, AWAY_S)
        os.kill(controller, signal.SIGCONT)
        # As long as it would take to give up who was silent meanwhile.
        requests_go_on(tandem, load, 5.0)
    is_as_it_was(tandem, before)
    assert ray_nodes.pid_of("ray::ControllerActor") == controller
    assert "everything was finished" in tandem("down")

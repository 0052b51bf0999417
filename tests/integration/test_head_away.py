"""Ray's control store is killed and stays away under load, as when its machine is lost: what serves goes on serving, and
the control store that comes back finds it. TANDEM_HEAD_AWAY_S says how long; Ray itself would wait for a minute."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster_lab import MODEL, Load, RayNodes, Tandem, free_port
from tests.integration.test_serve_command import epochs

AWAY_S = float(os.environ.get("TANDEM_HEAD_AWAY_S", "10"))
# As the manifests set it for every machine.
PATIENCE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3600"}

pytestmark = pytest.mark.timeout(int(300 + AWAY_S))


@pytest.fixture(scope="module")
def ray_nodes(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    store = tmp_path_factory.mktemp("gcs")
    environment = PATIENCE | {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(store)}
    nodes = RayNodes(environment, prefill=1, decode=1)
    yield nodes
    nodes.close()


def test_streams_go_on_without_the_control_store_and_it_finds_them_again(
    ray_nodes: RayNodes, tmp_path: Path
) -> None:
    tandem = Tandem(ray_nodes.address, tmp_path)
    settings = ("--model", MODEL, "--kv-memory", "256MiB", "--set", "router.local_prefill=never")
    said = tandem("serve", "--detach", "--port", str(free_port()), *settings, timeout_s=180)
    tandem.url = re.findall(r"^API: +(http://\S+)/v1$", said, re.MULTILINE)[0]
    before = epochs(tandem.url)
    with Load(tandem.url, "SmolLM2-135M-Instruct", clients=2) as load:
        with ray_nodes.head_away():
            away_until = time.monotonic() + AWAY_S
            while time.monotonic() < away_until:
                done = load.finished
                tandem.until(lambda nodes, done=done: load.finished > done, "requests finished meanwhile")
                assert epochs(tandem.url) == before
        done = load.finished
        tandem.until(lambda nodes: load.finished > done + 2, "requests finished afterwards")
    assert epochs(tandem.url) == before, "nothing was started again"
    said = tandem("status")
    assert re.search(r"^prefill: 1 of 1 node ready", said, re.MULTILINE), said
    tandem("scale", "decode=1")
    assert "everything was finished" in tandem("down")

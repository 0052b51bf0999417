"""Ray is stopped on a machine by its service manager, without telling Tandem first: no request fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.integration.cluster_lab import MODEL, START_S, Load, RayNodes, Tandem, free_port


def test_sigterm_to_a_raylet_under_load_loses_no_request(smollm2_path: Path, tmp_path: Path) -> None:
    ray_nodes = RayNodes(aggregated=1)
    try:
        raylet = ray_nodes.add_machine(aggregated=1)
        port = free_port()
        tandem = Tandem(ray_nodes.address, tmp_path)
        tandem.url = f"http://127.0.0.1:{port}"
        words = ("serve", "--detach", "--model", MODEL, "--aggregated", "2", "--kv-memory", "256MiB")
        tandem(*words, "--port", str(port), timeout_s=START_S)
        assert len(tandem.nodes()) == 2
        with Load(tandem.url, "SmolLM2-135M-Instruct", clients=4) as load:
            tandem.until(lambda nodes: load.finished > 2, "requests finished on both machines")
            os.kill(raylet, signal.SIGTERM)
            tandem.until(lambda nodes: len(nodes) == 1, "its node is out of view")
            done = load.finished
            tandem.until(lambda nodes: load.finished > done + 4, "requests finished on the other machine")
        assert "1 node without a machine" in tandem("status")
        tandem("down")
    finally:
        ray_nodes.close()

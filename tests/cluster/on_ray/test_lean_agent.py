"""The script that a raylet of our own has in place of the agent of Ray's dashboard."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tandem.cluster.on_ray import lean


def test_it_tells_its_raylet_that_it_has_no_ports_and_ends_with_it(tmp_path: Path) -> None:
    raylet = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lean_agent = str(Path(lean.__file__).with_name("lean_agent.py"))
    agent = subprocess.Popen(
        [sys.executable, "-I", "-S", lean_agent, "agent.py", "--node-id=ab", f"--session-dir={tmp_path}", "--head"],
        env={**os.environ, "RAY_RAYLET_PID": str(raylet.pid)},
    )  # fmt: skip
    try:
        raylet.communicate(b"\n", timeout=60)
        assert agent.wait(60) == 0
        ports = ("dashboard_agent_listen_port", "metrics_agent_port", "metrics_export_port")
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {f"{port}_ab": "-1" for port in ports}
    finally:
        for process in (raylet, agent):
            process.kill()
            process.wait()

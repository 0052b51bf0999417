from __future__ import annotations

import os
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.lib.processes import descendants
from benchmarks.lib.servers import System, running, tandem_systems, vllm_systems
from tandem.base.errors import ConfigurationError, Unavailable
from tests.integration.cluster_lab import free_port

_SERVER = """
import json, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Handler.asked += 1
        healthy = Handler.asked > 2
        body = json.dumps({"data": [{"id": "smol"}]}).encode() if self.path == "/v1/models" else b""
        self.send_response(200 if healthy else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

print("listening", flush=True)
for port in sys.argv[1:]:
    threading.Thread(target=HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever).start()
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_a_system_answers_inside_and_is_gone_after(tmp_path: Path) -> None:
    """A Python interpreter starts, and is asked until it says that it is healthy."""
    port = free_port()
    system = System("fake", "Fake", (sys.executable, "-c", _SERVER, str(port)), port)
    before = descendants(os.getpid())
    with running(system, tmp_path) as started:
        assert started.model == "smol"
        assert started.ready_s > 0
        assert httpx.get(f"{system.url}/health", trust_env=False).status_code == 200
    assert descendants(os.getpid()) == before
    assert "listening" in (tmp_path / "output.log").read_text()


@pytest.mark.slow
def test_a_system_is_not_ready_before_what_is_behind_it_is(tmp_path: Path) -> None:
    """A Python interpreter starts, which listens at one port after the other."""
    front, behind = free_port(), free_port()
    command = (sys.executable, "-c", _SERVER, str(front), str(behind))
    with running(System("fake", "Fake", command, front, behind=(behind,)), tmp_path):
        for port in (front, behind):
            assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200


def test_a_system_that_ends_before_it_is_ready_says_why(tmp_path: Path) -> None:
    system = System("fake", "Fake", ("bash", "-c", "echo no such model; exit 3"), free_port())
    with pytest.raises(Unavailable, match=r"(?s)status 3.*no such model"), running(system, tmp_path):
        pass


def test_tandem_is_started_both_ways_on_ports_of_its_own() -> None:
    separate, together = tandem_systems(Path("/models/smol"))
    assert separate.command[-4:] == ("--prefill", "1", "--decode", "1")
    assert together.command[-2:] == ("--aggregated", "1")
    assert "/models/smol" in separate.command
    assert separate.port != together.port


def test_peers_that_are_not_there_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--peers"):
        vllm_systems(Path("/models/smol"), tmp_path, tmp_path)
    for script in ("serve_vllm.sh", "serve_vllm_pd.sh"):
        (tmp_path / script).touch()
    with pytest.raises(ConfigurationError, match="--vllm"):
        vllm_systems(Path("/models/smol"), tmp_path, tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").touch()
    assert [system.title for system in vllm_systems(Path("/m"), tmp_path, tmp_path)] == [
        "vLLM aggregated",
        "vLLM 1P+1D",
    ]

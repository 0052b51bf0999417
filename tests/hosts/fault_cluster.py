"""A cluster for fault tests: two prefill hosts, two decode hosts and a router host that serve a model.

The test starts Ray with all of Ray's ports fixed, so that Ray's traffic and Tandem's can be cut separately. Head, controller and router
run on the router host.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from lab import RAY, TANDEM, Host, Lab
from links import CONTROL_PORTS, GCS_PORT, dropped_packets, limit

START_S = 300.0
MEND_S = 120.0
_ASK_S = 10.0
_LOOK_EVERY_S = 0.2
# A node's status counts only if it is newer than the last answer; a node reports four times a second.
_REPORTED_S = 1.0
HTTP_PORT = 8000
RATES = {"1gbit": 1e9, "100mbit": 1e8, "10gbit": 1e10}  # bits a second
_KINDS = {
    "prefill": "ray::PrefillActor",
    "decode": "ray::DecodeActor",
    "router": "ray::RouterActor",
    "controller": "ray::ControllerActor",
}


class NotMended(AssertionError):
    """The cluster did not recover from a fault in time."""


class FaultCluster:
    """Use it as `with FaultCluster(lab, model) as cluster:`. The lab must have five hosts, and needs no sshd."""

    def __init__(self, lab: Lab, model: Path, settings: dict[str, Any] | None = None) -> None:
        self.lab = lab
        self.router, *rest = lab.hosts
        self.prefill, self.decode = rest[:2], rest[2:4]
        self.url = f"http://{self.router.address}:{HTTP_PORT}"
        self._model = model
        self._settings = settings or {}
        self._rate = next(iter(RATES))
        self.started_s = 0.0

    @property
    def hosts(self) -> list[Host]:
        return [self.router, *self.prefill, *self.decode]

    def __enter__(self) -> FaultCluster:
        began = time.monotonic()
        token = secrets.token_hex(16)
        for host in self.hosts:
            (host.home / ".ray").mkdir(exist_ok=True)
            (host.home / ".ray" / "auth_token").write_text(token)
        self._start_ray(self.router, "--head", f"--port={GCS_PORT}", "--include-dashboard=false")
        for role, hosts in (("prefill", self.prefill), ("decode", self.decode)):
            for host in hosts:
                self._start_ray(
                    host, f"--address={self.router.address}:{GCS_PORT}", f"--resources={json.dumps({role: 1})}"
                )
        file = self.lab.folder / "tandem.yaml"
        file.write_text(yaml.safe_dump(self._configuration()), encoding="utf-8")
        self.tandem("serve", "--address", "auto", "--detach", "--config", str(file), timeout_s=START_S)
        self.until_whole(START_S)
        self.started_s = time.monotonic() - began
        return self

    def __exit__(self, *_: object) -> None:
        """Ends nothing on the hosts: their processes end with the lab."""

    def _configuration(self) -> dict[str, Any]:
        base: dict[str, Any] = {
            "model": {"path": str(self._model), "served_name": "model", "dtype": "float32"},
            "cache": {"memory_bytes": "384MiB"},
            "pools": {"prefill": {"nodes": None}, "decode": {"nodes": None}},
            # Send every prompt to a prefill node, however short, because these tests are about transfers.
            "router": {"host": self.router.address, "port": HTTP_PORT, "local_prefill": "never"},
            "debug": True,
        }
        return _merged(base, self._settings)

    def _start_ray(self, host: Host, *words: str) -> None:
        first = CONTROL_PORTS[0]
        fixed = (
            "node-manager-port", "object-manager-port", "runtime-env-agent-port", "metrics-export-port",
            "dashboard-agent-listen-port", "dashboard-agent-grpc-port",
        )  # fmt: skip
        ports = [f"--{name}={first + number}" for number, name in enumerate(fixed)]
        ports += [f"--min-worker-port={first + 100}", f"--max-worker-port={CONTROL_PORTS[1]}"]
        environment = (
            "RAY_AUTH_MODE=token",
            # Nodes wait this long for a control store that is down or cut off.
            "RAY_gcs_rpc_server_reconnect_timeout_s=600",
        )
        # Each host would count all of this machine's cores as its own, so it is told that it has one.
        cores = sorted(os.sched_getaffinity(0))
        core = str(cores[self.hosts.index(host) % len(cores)])
        host.run(
            "taskset", "--cpu-list", core, "env", *environment, *RAY, "start", "--disable-usage-stats", "--object-store-memory=80000000", "--num-cpus=0",
            f"--node-ip-address={host.address}", *ports, *words, timeout_s=120.0,
        )  # fmt: skip

    def tandem(self, *words: str, timeout_s: float = 120.0) -> str:
        """Runs a `tandem` command on the router host."""
        return self.router.run("env", "RAY_AUTH_MODE=token", *TANDEM, *words, timeout_s=timeout_s)

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that the router knows. Raises OSError while the router does not answer."""
        script = (
            "import sys, urllib.request as u;"
            f"sys.stdout.write(u.build_opener(u.ProxyHandler({{}})).open(sys.argv[1], timeout={_ASK_S}).read().decode())"
        )
        try:
            said = self.router.run(sys.executable, "-c", script, f"{self.url}/cluster", timeout_s=_ASK_S + 10)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise OSError(f"the router does not show its cluster: {str(error)[-300:]}") from error
        return list(json.loads(said)["nodes"])

    def until_whole(self, within_s: float = MEND_S) -> float:
        """Waits until two nodes of each role are ready, and returns how long that took."""
        return self._until(is_whole, "two ready nodes of each role", within_s)

    def until_quiet(self, within_s: float = MEND_S) -> float:
        """Also waits until every block is free and nothing is in transfer or quarantine. Returns how long that took."""
        return self._until(
            lambda nodes: is_whole(nodes) and all(not left_on(node) for node in nodes),
            "every block free and nothing under way",
            within_s,
        )

    def _until(self, is_so: Callable[[list[dict[str, Any]]], bool], what: str, within_s: float) -> float:
        began = time.monotonic()
        seen: object = None
        while True:
            try:
                nodes = self.nodes()
                seen = [summary(node) for node in nodes]
                if is_so(nodes) and time.monotonic() - began > _REPORTED_S:
                    return time.monotonic() - began
            except OSError as error:
                seen = error
            if time.monotonic() - began > within_s:
                raise NotMended(f"after {within_s:.0f} s still not: {what}; the router sees {seen}")
            time.sleep(_LOOK_EVERY_S)  # the router announces no changes

    def apply(self, settings: dict[str, Any], timeout_s: float) -> str:
        """Applies these settings in the place of the previous ones."""
        self._settings = settings
        file = self.lab.folder / "tandem.yaml"
        file.write_text(yaml.safe_dump(self._configuration()), encoding="utf-8")
        return self.tandem("apply", str(file), timeout_s=timeout_s)

    def limit_links(self, rate: str | None = None) -> None:
        """Limits the links of all hosts but the router's to this rate; None: to the previous rate."""
        self._rate = rate or self._rate
        for host in [*self.prefill, *self.decode]:
            limit(host, self._rate)

    def dropped_packets(self) -> int:
        """How many packets the current rules have dropped. A cut that dropped none proves nothing."""
        return sum(dropped_packets(host) for host in self.hosts)

    def processes(self, host: Host, kind: str) -> list[int]:
        """The ids of processes of one kind, in the host's numbering."""
        said = host.run("sh", "-c", f"pgrep -f '^{_KINDS[kind]}' || true")
        return [int(word) for word in said.split()]

    def serving(self) -> dict[str, list[int]]:
        """The processes that serve, by kind, in this machine's numbering."""
        found: dict[str, list[int]] = {"router": [], "prefill": [], "decode": []}
        for host in self.hosts:
            for pid in host.processes_outside():
                title = _title_of(pid)
                for kind, of_kind in found.items():
                    if title.startswith(_KINDS[kind]):
                        of_kind.append(pid)
        return found

    def without_ray(self) -> list[str]:
        """The hosts that Ray takes for dead. Their processes go on serving, but none can be started there until the host joins again."""
        return [
            host.name
            for host in self.hosts
            if not any("raylet/raylet" in _title_of(pid) for pid in host.processes_outside())
        ]

    def send(self, host: Host, kind: str, number: signal.Signals) -> None:
        for process in self.processes(host, kind):
            host.run("sh", "-c", f"kill -{int(number)} {process} || true")

    def keep_logs(self, folder: Path) -> None:
        """Copies the logs of nodes and routers. (Ray's session_latest is a link that resolves only on the host.)"""
        for host in self.hosts:
            (folder / host.name).mkdir(parents=True, exist_ok=True)
            for file in (host.folder / "ray").glob("session_2*/logs/*"):
                if file.is_file() and (file.name.startswith("worker-") or "tandem" in file.name):
                    shutil.copy(file, folder / host.name)


def _title_of(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def is_whole(nodes: list[dict[str, Any]]) -> bool:
    roles = sorted(node["role"] for node in nodes if node["state"] == "ready" and not node["unusable"])
    return roles == ["decode", "decode", "prefill", "prefill"]


def left_on(node: dict[str, Any]) -> dict[str, Any]:
    """What an idle node must not hold; empty if it is quiet."""
    left = {name: node[name] for name in ("running", "waiting", "transfers", "held_blocks") if node.get(name)}
    left |= {name: count for name, count in node.items() if "quarantine" in name and count}
    if node.get("free_blocks") != node.get("total_blocks"):
        left["blocks not free"] = node.get("total_blocks", 0) - node.get("free_blocks", 0)
    return left


def summary(node: dict[str, Any]) -> str:
    return f"{node['node_id']} {node['state']} {node['unusable'] or ''} {left_on(node) or 'quiet'}"


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        nested = isinstance(value, dict) and isinstance(base.get(name), dict)
        merged[name] = _merged(base[name], value) if nested else value
    return merged

"""Starts manifests/ray/static.yaml on the hosts of a lab: the same file and start commands, with the lab's addresses and Python."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from lab import RAY, ROOT, TANDEM, Host, Lab

MANIFEST = ROOT / "manifests" / "ray" / "static.yaml"
PROBE = Path(__file__).with_name("probe.py")
UP_TIMEOUT_S = 300.0


class StaticCluster:
    """Runs `ray up` and `ray down` outside the hosts, as an operator does, and a probe on the head that reports what Ray sees."""

    def __init__(self, lab: Lab, settings: dict[str, Any] | None = None) -> None:
        self.lab = lab
        # What the cluster serves; None: it serves nothing, Ray is all that there is
        self._settings = settings
        self.head = lab.hosts[0]
        self.file = lab.folder / "static.yaml"
        self._probe: Probe | None = None

    def config(self, *, prefill: Sequence[Host], decode: Sequence[Host], standby: int = 0) -> dict[str, Any]:
        config = copy.deepcopy(yaml.safe_load(MANIFEST.read_text(encoding="utf-8")))
        config["provider"]["head_ip"] = self.head.address
        config["auth"] = {"ssh_user": "root", "ssh_private_key": str(self.lab.key)}
        for name, hosts in (("prefill", prefill), ("decode", decode)):
            config["available_node_types"][name]["node_config"]["hosts"] = [host.address for host in hosts]
        config["available_node_types"]["decode"]["node_config"]["standby"] = standby
        config["idle_timeout_minutes"] = 0.2
        # Tandem is installed already, in the environment that the tests run in.
        config["file_mounts"] = {"~/.ray/auth_token": "~/.ray/auth_token"}
        own_tree = f"grep -qs PYTHONPATH ~/.bashrc || echo 'export PYTHONPATH={ROOT}' >> ~/.bashrc"
        config["setup_commands"] = [f"ln -sfn {sys.prefix} ~/tandem-env", config["setup_commands"][-1], own_tree]
        if self._settings is None:
            config["head_start_ray_commands"] = [
                command for command in config["head_start_ray_commands"] if "tandem serve" not in command
            ]
        else:
            file = self.lab.folder / "tandem.yaml"
            file.write_text(yaml.safe_dump(self._settings), encoding="utf-8")
            config["file_mounts"]["~/tandem.yaml"] = str(file)
        return config

    @property
    def url(self) -> str:
        """The router's URL in the hosts' network."""
        return f"http://{self.head.address}:8000"

    def tandem(self, *words: str, timeout_s: float = 120.0) -> str:
        """Runs a `tandem` command on the head."""
        return self.head.run("env", "RAY_AUTH_MODE=token", *TANDEM, *words, timeout_s=timeout_s)

    def up(self, *, prefill: Sequence[Host], decode: Sequence[Host], standby: int = 0) -> str:
        token = self.lab.laptop_home / ".ray" / "auth_token"
        if not token.exists():
            self.lab.on_laptop(*RAY, "get-auth-token", "--generate", timeout_s=60)
        self.file.write_text(
            yaml.safe_dump(self.config(prefill=prefill, decode=decode, standby=standby)), encoding="utf-8"
        )
        return self.lab.on_laptop(*RAY, "up", "-y", str(self.file), timeout_s=UP_TIMEOUT_S)

    def down(self) -> str:
        if self._probe is not None:
            self._probe.close()
            self._probe = None
        return self.lab.on_laptop(*RAY, "down", "-y", str(self.file), timeout_s=UP_TIMEOUT_S)

    @property
    def probe(self) -> Probe:
        if self._probe is None:
            self._probe = Probe(self.head)
        return self._probe


class Probe:
    """A process on the head that stays connected to Ray: one line for each question and for each answer."""

    def __init__(self, head: Host) -> None:
        self._process = subprocess.Popen(
            head.command("env", "RAY_AUTH_MODE=token", sys.executable, str(PROBE)),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def ask(self, question: str, **arguments: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"question": question, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the probe on the head has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["answer"]

    def pools(self) -> dict[str, list[str]]:
        """Addresses of the nodes that are alive, by the resource that makes them a pool."""
        return self.ask("pools")

    def wait_for_pools(self, expected: dict[str, Sequence[Host]], within_s: float) -> None:
        wanted = {name: sorted(host.address for host in hosts) for name, hosts in expected.items()}
        seen = self.ask("wait_for_pools", wanted=wanted, within_s=within_s)
        assert seen == wanted, f"after {within_s:.0f} s the pools are {seen}, not {wanted}"

    def wait_for_count(self, pool: str, count: int, within_s: float) -> None:
        seen = self.ask("wait_for_count", pool=pool, count=count, within_s=within_s)
        assert seen == count, f"after {within_s:.0f} s {pool} has {seen} nodes, not {count}"

    def run_in_pool(self, pool: str, count: int, within_s: float) -> list[str]:
        """Runs `count` tasks at the same time, each on one unit of the pool, and returns where they ran."""
        return self.ask("run_in_pool", pool=pool, count=count, within_s=within_s)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)

"""A Ray cluster of several Ray nodes on this machine, `tandem` commands as an operator types them, and clients that stream meanwhile."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.cluster.on_ray.lean import fewer_processes

PATIENCE_S = 90.0
START_S = 300.0  # how long `tandem serve` may take to answer
END_S = 60.0  # how long it may take to end
MODEL = "smollm2"


def free_port() -> int:
    """Returns a port that no process uses. A router needs a fixed port, because its replacement comes back at the same one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until_true(condition: Callable[[], Any], what: str, within_s: float = START_S) -> Any:
    """Returns what the condition is when it holds."""
    deadline = time.monotonic() + within_s
    while not (seen := condition()):
        assert time.monotonic() < deadline, f"after {within_s:.0f} s still not: {what}"
        time.sleep(0.05)
    return seen


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def started(start: Callable[[], Any]) -> Any:
    """Returns the Ray node, or the cluster, that `start` starts. Ray gives up a node whose agents need more than 15 s to begin, which they
    may on a busy machine: then it is tried again, and it has one agent less than Ray's own."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            with fewer_processes():
                return start()
        except Exception as error:  # Ray raises bare exceptions
            if "timed out during startup" not in str(error) or time.monotonic() > deadline:
                raise


class RayNodes:
    """A Ray head, and Ray nodes that offer places for prefill or decode nodes."""

    def __init__(self, environment: Mapping[str, str] | None = None, **places: int) -> None:
        name, value = "TANDEM_TEST_MARK", secrets.token_hex(8)
        self.mark = f"{name}={value}"  # in the environment of each of its processes
        environment = {**(environment or {}), name: value}
        os.environ.update(environment)  # what Ray starts inherits it
        from tandem.cluster.on_ray.runtime import import_ray

        import_ray()
        from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
        from ray.cluster_utils import Cluster

        ensure_token_if_auth_enabled(create_token_if_missing=True)
        self._small = {"num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
        self._cluster = started(lambda: Cluster(initialize_head=True, head_node_args=self._small))
        for role, count in places.items():
            started(lambda: self._cluster.add_node(resources={role: count}, **self._small))  # noqa: B023
        self._environment = environment
        for name in environment:
            os.environ.pop(name)
        self.address: str = self._cluster.address

    def add_machine(self, labels: Mapping[str, str] | None = None, **places: int) -> int:
        """Adds a Ray node that offers `places`. Returns the process id of its raylet."""
        os.environ.update(self._environment)
        try:
            offered = {"resources": dict(places), "labels": dict(labels or {})}
            node = started(lambda: self._cluster.add_node(**offered, **self._small))
        finally:
            for name in self._environment:
                os.environ.pop(name)
        return int(node.all_processes["raylet"][0].process.pid)

    def processes(self, title: str) -> dict[int, str]:
        """The processes of this cluster whose command lines begin with `title`: their command lines by process id."""
        found: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_text().replace("\0", " ")
                    if command.startswith(title):
                        found[int(folder.name)] = command[:80]
            except OSError:
                continue  # it ended meanwhile
        return found

    def pid_of(self, title: str) -> int:
        (pid,) = self.processes(title)
        return pid

    @contextmanager
    def head_away(self) -> Iterator[None]:
        """Kills Ray's control store for the block, and starts it again with its persistent data."""
        self._cluster.head_node.kill_gcs_server(check_alive=False)
        yield
        os.environ.update(self._environment)
        try:
            self._cluster.head_node.start_gcs_server()
        finally:
            for name in self._environment:
                os.environ.pop(name)

    def close(self) -> None:
        self._cluster.shutdown()


class Tandem:
    """Runs the `tandem` command against one Ray cluster."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address = address
        self._folder = folder
        self.url = ""

    def __call__(self, *words: str, status: int | None = 0, timeout_s: float = 120.0) -> str:
        with self.begin(*words) as process:
            try:
                said, _ = process.communicate(timeout=timeout_s)
            finally:
                process.kill()
        assert status is None or process.returncode == status, f"tandem {' '.join(words)}: {process.returncode}\n{said}"
        return said

    def python(self, program: str) -> str:
        """Runs a Python program against the cluster, for what an operator does without Tandem."""
        return subprocess.run(
            [sys.executable, "-c", program], check=True, text=True, capture_output=True, timeout=60,
            env={**os.environ, "RAY_ADDRESS": self.address},
        ).stdout  # fmt: skip

    @contextlib.contextmanager
    def begun(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Runs a command in the background for the block. Ends it at once if the block fails: otherwise the wait for its pipe would hide
        the failure."""
        with self.begin(*words) as process:
            try:
                yield process
            except BaseException:
                process.kill()
                raise

    def begin(self, *words: str) -> subprocess.Popen[str]:
        root = str(Path(__file__).resolve().parents[2])
        return subprocess.Popen(
            [sys.executable, "-m", "tandem.cluster.cli", *words, "--address", self.address],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self._folder,
            env={**os.environ, "PYTHONPATH": root, "PYTHONUNBUFFERED": "1", "TANDEM_API_KEY": ""},
        )  # fmt: skip

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The nodes that the router can use, by id."""
        answer = httpx.get(f"{self.url}/cluster", timeout=10, trust_env=False).raise_for_status().json()
        return {node["node_id"]: node for node in answer["nodes"] if node["state"] == "ready"}

    def until(self, condition: Callable[[dict[str, dict[str, Any]]], bool], what: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        seen: Any = None
        while time.monotonic() < deadline:
            try:
                seen = self.nodes()
                if condition(seen):
                    return seen
            except httpx.HTTPError as error:
                seen = error
            time.sleep(0.1)
        pytest.fail(
            f"after {PATIENCE_S:.0f} s still not: {what}; the router says {seen}\n{self('status', status=None)}"
        )

    def until_roles(self, **counts: int) -> dict[str, Any]:
        def as_wanted(nodes: dict[str, dict[str, Any]]) -> bool:
            roles = [node["role"] for node in nodes.values()]
            return all(roles.count(role) == count for role, count in counts.items())

        return self.until(as_wanted, str(counts))


def stream(url: str, model: str, words: str, max_tokens: int, on_token: Callable[[int], None]) -> list[str]:
    """Streams one completion of exactly `max_tokens` tokens, and returns its lines."""
    body = {
        "model": model, "prompt": words, "max_tokens": max_tokens, "stream": True, "temperature": 0,
        "logit_bias": {"2": -100, "0": -100},
    }  # fmt: skip
    lines: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line:
                lines.append(line)
                on_token(len(lines))
    assert lines[-1] == "data: [DONE]", lines[-1]
    assert not any('"error"' in line for line in lines), lines[-2:]
    return lines


class Load:
    """Clients that stream one request after another while the block runs; every request must succeed."""

    def __init__(self, url: str, model: str, clients: int = 2) -> None:
        self._ending = threading.Event()
        self.finished = 0
        self.failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(url, model, number), daemon=True) for number in range(clients)
        ]

    def _run(self, url: str, model: str, number: int) -> None:
        turn = 0
        while not self._ending.is_set():
            turn += 1
            words = f"Client {number}, request {turn}: " + "the quick brown fox jumps over the lazy dog; " * 4
            try:
                stream(url, model, words, 24, lambda count: None)
                self.finished += 1
            except Exception as error:
                self.failures.append(f"{words[:24]}: {type(error).__name__}: {error}")

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(90)
        if kind is None:
            assert self.failures == []
            assert self.finished > 0


class Serve:
    """A running `tandem serve` and all processes that it starts, which inherit a mark in their environment."""

    def __init__(self, *flags: str) -> None:
        self.mark = f"TANDEM_TEST_MARK={secrets.token_hex(8)}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tandem.cluster.cli", "serve", "--port", "0", "--kv-memory", "256MiB", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, name: value, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        self.said: list[str] = []
        self._reads = True
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
            if not self._reads:
                self.process.stdout.close()
                break
        self._lines.put(None)

    def stop_reading(self) -> None:
        """Stops reading the command's output after the next line, as `head` does."""
        self._reads = False

    def until(self, pattern: str, timeout_s: float) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                pytest.fail(f"{pattern!r} was not said within {timeout_s:.0f} s, but:\n" + "\n".join(self.said))
            self.said.append(line)
            found = re.search(pattern, line)
            if found:
                return found

    def ended(self) -> int:
        """Waits for the command and returns its exit status; no process of it may be left."""
        status = self.process.wait(END_S)
        self.nothing_left()
        return status

    def nothing_left(self, but: tuple[str, ...] = ()) -> None:
        deadline = time.monotonic() + END_S
        while left := [command for command in self.processes().values() if not command.startswith(but)]:
            if time.monotonic() > deadline:
                pytest.fail(f"left behind: {left}")
            time.sleep(0.1)

    def processes(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
                if self.mark.encode() in environment.split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")[:120]
            except OSError:
                continue  # it ended meanwhile
        return found

    def kill_all(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def pid_of(self, title: str) -> int:
        (pid,) = [pid for pid, command in self.processes().items() if command.startswith(title)]
        return pid

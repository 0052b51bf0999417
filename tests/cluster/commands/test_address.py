"""How a command finds its cluster, and its message if there is none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tandem.cluster.commands import address
from tandem.cluster.commands.address import (
    AddressRecord,
    choose_address,
    forget_address,
    remember_address,
    remembered_address,
)
from tandem.cluster.on_ray import runtime
from tandem.cluster.on_ray.runtime import check_reachable
from tandem.wire.errors import ConfigurationError, Unavailable


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.setattr(address, "models_folder", lambda: tmp_path / "models")
    return tmp_path / "serving.json"


def write(record: Path, pid: int) -> None:
    record.write_bytes(msgspec.json.encode(AddressRecord("10.0.0.1:1", pid)))


def test_what_the_operator_names_comes_first_then_the_environment_then_what_runs_here(record: Path) -> None:
    assert choose_address(None, {}) == "auto"
    write(record, os.getpid())
    assert choose_address(None, {}) == "10.0.0.1:1"
    assert choose_address(None, {"RAY_ADDRESS": "b:1"}) == "b:1"
    assert choose_address("a:1", {"RAY_ADDRESS": "b:1"}) == "a:1"


@pytest.mark.slow
def test_a_command_that_was_killed_is_not_found(record: Path) -> None:
    """Slow: runs a process, to have an id that no process has any more."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write(record, gone.pid)
    assert remembered_address() is None


def test_where_nothing_can_be_written_it_serves_all_the_same(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_address("10.0.0.1:1")
    assert remembered_address() == "10.0.0.1:1"
    a_file = record.with_name("file")
    a_file.touch()
    monkeypatch.setattr(address, "models_folder", lambda: a_file / "models")
    remember_address("10.0.0.1:1")
    assert remembered_address() is None
    forget_address()


def test_a_record_that_cannot_be_read_is_none(record: Path) -> None:
    record.write_bytes(b"{")
    assert remembered_address() is None


def test_a_command_forgets_itself_and_nobody_else(record: Path) -> None:
    write(record, 1)
    forget_address()
    assert record.exists()
    write(record, os.getpid())
    forget_address()
    assert not record.exists()
    forget_address()


@pytest.mark.parametrize(
    "address", ["10.0.0.1", ":6379", "head:port", "head:0", "head:70000", "ray://head:10001x"]
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match="must be HOST:PORT"):
        check_reachable(address)


def test_an_address_where_nobody_answers_is_said_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(Unavailable, match=rf"nothing answers at 127\.0\.0\.1:{port}"):
        check_reachable(f"127.0.0.1:{port}")


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of a server that says this to every client, and closes."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def test_an_address_where_somebody_begins_as_ray_does_is_fine() -> None:
    with answering(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])) as address:
        check_reachable(address)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"hello", b""])
def test_a_port_where_something_else_listens_is_no_ray(answer: bytes) -> None:
    """Ray would try for minutes."""
    with answering(answer) as address, pytest.raises(Unavailable, match=r"not as Ray: .*6379.*--url"):
        check_reachable(address)


def test_the_address_of_a_ray_that_has_ended_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray remembers the last one that ran on this machine, and would look for it for minutes."""
    runtime.import_ray()
    from ray._private import services

    monkeypatch.setattr(services, "canonicalize_bootstrap_address", lambda address: "127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"nothing answers at 127\.0\.0\.1:1"):
        runtime.connect_to_ray(runtime.AUTO)

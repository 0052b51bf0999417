"""Which cluster a command talks to, and what is said when nobody is there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cluster.commands import address_record
from cluster.commands.address import choose_address
from cluster.commands.address_record import Record, forget_address, remembered_address
from cluster.on_ray.runtime import check_reachable
from wire.errors import ConfigurationError, Unavailable


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.setattr(address_record, "models_folder", lambda: tmp_path / "models")
    return tmp_path / "serving.json"


def write(record: Path, pid: int) -> None:
    record.write_bytes(msgspec.json.encode(Record("10.0.0.1:1", pid)))


def test_what_the_operator_names_comes_first_then_the_environment_then_what_runs_here(record: Path) -> None:
    assert choose_address(None, {}) == "auto"
    write(record, os.getpid())
    assert choose_address(None, {}) == "10.0.0.1:1"
    assert choose_address(None, {"RAY_ADDRESS": "b:1"}) == "b:1"
    assert choose_address("a:1", {"RAY_ADDRESS": "b:1"}) == "a:1"


@pytest.mark.slow
def test_a_command_that_was_killed_is_not_found(record: Path) -> None:
    """Slow: runs a process, to have an id that nobody has any more."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write(record, gone.pid)
    assert remembered_address() is None


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
    with pytest.raises(Unavailable, match=rf"nobody answers at 127\.0\.0\.1:{port}"):
        check_reachable(f"127.0.0.1:{port}")


def test_an_address_where_somebody_answers_is_fine() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        check_reachable(f"127.0.0.1:{listener.getsockname()[1]}")

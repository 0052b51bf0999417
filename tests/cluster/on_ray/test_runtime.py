from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tandem.base.errors import Unavailable
from tandem.base.own_thread import in_own_thread
from tandem.cluster.cli import main
from tandem.cluster.on_ray import runtime
from tandem.cluster.on_ray.runtime import import_ray, is_held_by_ray, start_ray, stop_ray
from tests.waiting import until


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.0, 500.0])
@pytest.mark.parametrize("error", [Exception("timed out during startup"), RuntimeError("no"), OSError("no")])
def test_whatever_ray_says_when_it_cannot_start_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, load: float
) -> None:
    """Slow: imports Ray."""

    def refuse(**options: object) -> None:
        raise error

    monkeypatch.setattr(import_ray(), "init", refuse)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    advice = "this machine is busy .load 500 on .*: try again" if load else "`tandem doctor` looks"
    with pytest.raises(Unavailable, match=f"Ray did not start: {error}; {advice}"):
        start_ray()


@pytest.mark.slow
def test_what_ray_starts_does_not_hear_signals_to_our_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: imports Ray. It starts its processes as here, with something to call in the child."""
    groups: list[int] = []

    def spawn() -> int:
        child = subprocess.run(
            [sys.executable, "-c", "import os; print(os.getpgrp())"],
            stdout=subprocess.PIPE,
            check=True,
            preexec_fn=lambda: None,
        )
        return int(child.stdout)

    def init(**options: object) -> None:
        groups.append(spawn())
        raise RuntimeError("enough")

    monkeypatch.setattr(import_ray(), "init", init)
    with pytest.raises(Unavailable):
        start_ray()
    assert groups[0] != os.getpgrp()
    assert spawn() == os.getpgrp(), "no other processes are moved"


def test_a_ray_that_listens_on_loopback_alone_is_told_from_a_head_that_is_named_by_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        assert runtime.listens_on_loopback_only(f"127.0.0.1:{own.getsockname()[1]}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address beyond loopback")
        if asked.getsockname()[0].startswith("127."):
            pytest.skip("this machine has no address beyond loopback")
    with socket.create_server(("0.0.0.0", 0)) as head:
        assert not runtime.listens_on_loopback_only(f"127.0.0.1:{head.getsockname()[1]}")


def test_other_addresses_are_of_clusters() -> None:
    for address in ("auto", "10.0.0.1:6379", "head:6379", "", "127.0.0.1:x"):
        assert not runtime.listens_on_loopback_only(address)


@pytest.mark.slow
def test_a_head_that_ends_while_a_command_joins_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: imports Ray. It would ask for ten minutes, and hear no signal meanwhile."""
    answers, ended = threading.Event(), list[int]()
    monkeypatch.setattr(import_ray(), "init", lambda **_: answers.wait())
    monkeypatch.setattr(runtime, "JOIN_S", 0.1)
    monkeypatch.setattr(os, "_exit", ended.append)
    with socket.create_server(("127.0.0.1", 0)) as head:

        def begin() -> None:
            with head.accept()[0] as connection:
                connection.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))

        in_own_thread("head", begin)
        address = f"127.0.0.1:{head.getsockname()[1]}"
        assert main(["status", "--address", address]) == 1
    assert is_held_by_ray()
    assert ended == [1]
    answers.set()
    until(lambda: not is_held_by_ray())


@pytest.mark.slow
def test_a_head_that_stands_still_does_not_keep_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: waits ten seconds for Ray, as a command does. Ray itself would wait for minutes, and in the interpreter's exit, too."""
    answers, ended = threading.Event(), list[int]()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True, shutdown=answers.wait))
    monkeypatch.setattr(os, "_exit", ended.append)
    assert main(["completion", "bash"]) == 0
    assert not ended
    stop_ray()
    assert is_held_by_ray()
    assert main(["completion", "bash"]) == 0
    assert ended == [0]
    answers.set()
    until(lambda: not is_held_by_ray())

"""Mistakes, and the sentence that each of them gets: at once, with nothing started."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.base.errors import Unavailable
from tandem.cluster.cli import main
from tandem.cluster.commands import serve

# The settings' own mistakes are in tests/cluster/test_settings.py, a machine's and a model's in test_preflight.py.
MISTAKES = {
    "serve --port {taken}": r"port \d+ on 127\.0\.0\.1 is taken: end what listens there",
    "serve --host 192.0.2.77": "is not an address of this machine: name one that is",
    "serve --model ./nowhere": "is not there: name a folder",
    "serve -o json --model ./nowhere": "is not there: name a folder",
    f"serve {'a' * 5000}": r"^.{,300} cannot be read: File name too long$",
    "serve --detach": "--detach needs --address",
    "serve --address head": "--address must be HOST:PORT",
    **{
        f"{command} --address 127.0.0.1:{{free}}": r"nothing answers at 127\.0\.0\.1:\d+"
        for command in (
            "apply", "down --now", "down -o json", "drain decode-0", "logs", "pause", "reset-cache", "resume",
            "role decode-0 prefill", "scale decode=2", "serve", "status",
        )
    },
}  # fmt: skip


@pytest.fixture
def ports() -> Iterator[dict[str, int]]:
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))  # no process listens there
        yield {"taken": taken.getsockname()[1], "free": free.getsockname()[1]}


@pytest.fixture(autouse=True)
def _nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: object) -> None:
        pytest.fail("something was started")

    monkeypatch.setattr(serve, "start_ray", started)
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("TANDEM_") and name != "TANDEM_CACHE":
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _signals_stay_as_they_are() -> Iterator[None]:
    """A command that ends takes no signal any more; this process goes on."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_said_at_once_with_what_to_change(
    command: str, ports: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.format(**ports).split()) == 1
    _is_said(MISTAKES[command], capsys)


def _is_said(pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = capsys.readouterr().err
    assert re.search(pattern, said), said
    assert "Traceback" not in said


def test_a_folder_that_cannot_be_entered_or_was_deleted_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`sudo -u` keeps the folder. To look for a file there fails as it does here."""
    (tmp_path / "tandem.yaml").symlink_to("a" * 300)
    assert main(["serve"]) == 1
    _is_said(r"tandem\.yaml: cannot be read: File name too long", capsys)
    (tmp_path / "tandem.yaml").unlink()
    tmp_path.rmdir()
    assert main(["serve", "--port", "0"]) == 1
    _is_said("the folder in which .* has been deleted since: go to another", capsys)


def test_no_model_is_converted_while_ray_has_a_limited_time_to_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(when_imported: object) -> None:
        raise Unavailable("Ray did not start")

    fetched: list[object] = []
    monkeypatch.setattr(serve, "start_ray", start)
    monkeypatch.setattr(serve, "_in_background", lambda name, display: fetched.append(name))
    assert main(["serve", "--port", "0", "--kv-memory", "256MiB"]) == 1
    assert "Ray did not start" in capsys.readouterr().err
    assert not fetched


def test_a_process_that_blocks_signals_can_be_interrupted_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tasks and actors of Ray block SIGINT, and what they start inherits that."""

    def start(when_imported: object) -> None:
        signal.raise_signal(signal.SIGINT)
        raise Unavailable("it goes on")

    monkeypatch.setattr(serve, "start_ray", start)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        assert main(["serve", "--port", "0", "--kv-memory", "256MiB"]) == 130
    finally:
        signal.sigtimedwait([signal.SIGINT], 0)  # one that is still pending would end the tests
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert "stopped before it was ready" in capsys.readouterr().out

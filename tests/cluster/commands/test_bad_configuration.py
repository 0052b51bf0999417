"""Mistakes, and the sentence that each of them gets: at once, with nothing started."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.base.errors import Unavailable
from tandem.cluster.cli import main
from tandem.cluster.commands import serve

Prepare = Callable[[Path], None]
Case = tuple[str, str, Prepare | None]


def settings_file(text: str) -> Prepare:
    def write(folder: Path) -> None:
        (folder / "tandem.yaml").write_text(text, encoding="utf-8")

    return write


def model_folder(folder: Path) -> None:
    (folder / "empty").mkdir()


def model_file(folder: Path) -> None:
    (folder / "weights.bin").touch()


def unreachable_settings(folder: Path) -> None:
    """To look whether it is there fails, as in a folder that this user cannot enter: `sudo -u` keeps the folder."""
    (folder / "tandem.yaml").symlink_to("a" * 300)


# what is wrong: (command line, what is said, what lies in the current folder)
MISTAKES: dict[str, Case] = {
    "a setting that does not exist": ("serve --set router.prot=1", r"did you mean router\.port\?", None),
    "a section that does not exist": ("serve", r"unknown.*roter|roter.*did you mean router", settings_file("roter: {}")),
    "text for a number": ("serve --decode two", r"--decode: pools\.decode\.nodes must be a whole number", None),
    "a number for text": ("serve --set model.path=", r"model\.path", None),
    "a file that is not YAML": ("serve", r"tandem\.yaml", settings_file("model: [")),
    "a file that cannot be looked at": ("serve", r"tandem\.yaml: cannot be read: File name too long", unreachable_settings),
    "a folder that was deleted": ("serve --port 0", r"the folder in which .* has been deleted since: go to another", Path.rmdir),
    "a model's name that is too long": (f"serve {'a' * 5000}", r"^.{,300} cannot be read: File name too long$", None),
    "a file that is not there": ("serve --config nowhere.yaml", r"nowhere\.yaml", None),
    "no node that writes answers": ("serve --decode 0", r"pools\.decode", None),
    "no node at all": ("serve --prefill 0 --decode 0", r"pools", None),
    "decode nodes without prefill nodes": ("serve --prefill 0", r"set it to at least 1, or use pools\.aggregated", None),
    "a pool whose limits cross": (
        "serve --set pools.decode.min=4 pools.decode.max=2", r"pools\.decode\.min is 4, which is more than", None,
    ),
    "a resource of which nothing is asked": (
        "serve", r"pools\.decode\.resources is not right: its values must be above 0",
        settings_file("pools: {decode: {nodes: 1, resources: {GPU: 0}}}"),
    ),
    "a choice that does not exist": ("serve --set router.policy=round_robbin", r"did you mean round_robin\?", None),
    "a size that is none": ("serve --kv-memory lots", r"must be a size such as 2GiB", None),
    "a cache that holds nothing": ("serve --kv-memory 1KiB", r"cache\.memory_bytes", None),
    "a port that is taken": ("serve --port {taken}", r"port \d+ on 127\.0\.0\.1 is taken: end what listens there", None),
    "a port that is none": ("serve --port 70000", r"router\.port must be from 0 to 65535", None),
    "an address of another machine": (
        "serve --host 192.0.2.77", r"is not an address of this machine: name one that is", None,
    ),
    "a model that is not there": ("serve --model ./nowhere", r"is not there: name a folder", None),
    "a folder without a model": ("serve --model ./empty", r"a folder without config\.json", model_folder),
    "a file for a folder": ("serve --model ./weights.bin", r"is a file: name the folder that it is in", model_file),
    "more threads than cores": ("serve --set pools.decode.threads=4096", r"set fewer threads or fewer nodes", None),
    "more nodes than the cores take": (
        "serve --prefill 10000", r"too many for \d+ cores?:.*per core are the most, \d+ in all: ask for fewer \(--prefill", None,
    ),
    "a cache larger than the machine": (
        "serve --kv-memory 900TiB --set model.device=cpu",
        r"TiB of memory, and .* is free on this machine: give each at most \S+ \(--kv-memory\)", None,
    ),
    "what is no setting": ("serve --set pools.nodes_per_core=9", r"pools\.nodes_per_core is no setting, it is 4: ", None),
    "a connector that does not exist": (
        "serve --set transfer.connector=carrier-pigeon", r"there is no connector 'carrier-pigeon'", None,
    ),
    "to detach from a Ray of its own": ("serve --detach", r"--detach needs --address", None),
    "an address without a port": ("serve --address head", r"--address must be HOST:PORT", None),
    "a cluster that does not answer": ("serve --address 127.0.0.1:{free}", r"nothing answers at 127\.0\.0\.1:\d+", None),
    "a pool that does not exist": ("scale prefil=2", r"there is no pool 'prefil'", None),
    **{
        f"no cluster for {command}": (f"{command} --address 127.0.0.1:{{free}}", r"nothing answers at 127\.0\.0\.1:\d+", None)
        for command in (
            "apply", "down --now", "drain decode-0", "logs", "pause", "reset-cache", "resume",
            "role decode-0 prefill", "scale decode=2",
        )
    },
    "no cluster to end, as JSON": ("down -o json --address 127.0.0.1:{free}", r"nothing answers at 127\.0\.0\.1:\d+", None),
    "no model, as JSON": ("serve -o json --model ./nowhere", r"is not there: name a folder", None),
    "no cluster to look at": ("status --address 127.0.0.1:{free}", r"nothing answers at 127\.0\.0\.1:\d+", None),
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


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_said_at_once_with_what_to_change(
    mistake: str, ports: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, said, prepare = MISTAKES[mistake]
    if prepare is not None:
        prepare(tmp_path)
    status = main(command.format(**ports).split())
    output = capsys.readouterr()
    assert status == 1, output.out
    assert re.search(said, output.err), output.err
    assert "Traceback" not in output.err


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

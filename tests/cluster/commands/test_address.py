"""How a command finds its cluster, and its message if there is none."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.cluster.cli import main
from tandem.cluster.commands.address import WhichCluster, choose_address, url_of
from tandem.cluster.commands.router_url import choose_url
from tandem.cluster.commands.running import ServingRecord, forget_serving, record_serving, running
from tandem.cluster.on_ray import runtime
from tandem.cluster.on_ray.runtime import check_reachable


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


@pytest.fixture
def another() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this machine, which a record can name."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def serving_in(
    process: subprocess.Popen[bytes], address: str, url: str, monkeypatch: pytest.MonkeyPatch, name: str = "tandem"
) -> None:
    """Leaves the record that a `tandem serve` with this process would have written."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: process.pid)
        record_serving(address, name, "smol", url)


def test_what_the_operator_names_comes_first_then_the_environment_then_what_runs_here() -> None:
    assert choose_address(WhichCluster(), {}) == "auto"
    record_serving("10.0.0.1:1", "tandem", "smol")
    assert choose_address(WhichCluster(), {}) == "10.0.0.1:1"
    assert choose_address(WhichCluster(), {"RAY_ADDRESS": "b:1"}) == "b:1"
    assert choose_address(WhichCluster("a:1"), {"RAY_ADDRESS": "b:1"}) == "a:1"


@pytest.mark.parametrize("left_over", ["http://127.0.0.1:1", "local", "127.0.0.1:1"])
def test_an_address_that_no_one_typed_is_said_to_be_the_environments(
    left_over: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ray job submit`, for example, is given one of another kind in the same variable."""
    monkeypatch.setenv("RAY_ADDRESS", left_over)
    assert main(["status"]) == 1
    assert "That address is RAY_ADDRESS: unset it" in capsys.readouterr().err
    assert main(["status", "--address", "127.0.0.1:1"]) == 1
    assert "RAY_ADDRESS" not in capsys.readouterr().err


def test_a_server_is_found_whatever_its_port_is_and_speaks_its_scheme() -> None:
    record_serving("127.0.0.1:1", "tandem", "smol")
    with pytest.raises(Unavailable, match=r"process \d+ is still starting"):
        choose_url(None, {})
    record_serving("127.0.0.1:1", "tandem", "smol", "https://127.0.0.1:9000")
    assert choose_url(None, {}) == "https://127.0.0.1:9000"
    assert choose_url("http://elsewhere:1", {}) == "http://elsewhere:1"
    assert url_of("127.0.0.1:1", "tandem") == "https://127.0.0.1:9000"
    assert url_of("127.0.0.1:1", "chat") == ""
    (record,) = running()
    assert record.port == 9000
    assert record.pid == os.getpid()


def test_between_two_servers_no_command_guesses_and_both_are_named(
    another: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_serving("127.0.0.1:1", "tandem", "smol", "http://127.0.0.1:8000")
    serving_in(another, "127.0.0.1:2", "http://127.0.0.1:9000", monkeypatch)
    with pytest.raises(ConfigurationError) as refused:
        choose_address(WhichCluster(), {})
    for told in ("2 servers", "--address 127.0.0.1:1", "--address 127.0.0.1:2", "http://127.0.0.1:8000", "smol"):
        assert told in str(refused.value)
    assert f"process {another.pid}, since 20" in str(refused.value)
    with pytest.raises(
        ConfigurationError, match=r"--url http://127\.0\.0\.1:8000(.|\n)*--url http://127\.0\.0\.1:9000"
    ):
        choose_url(None, {})
    assert choose_address(WhichCluster("127.0.0.1:2"), {}) == "127.0.0.1:2"
    assert choose_url(None, {"RAY_ADDRESS": "127.0.0.1:2"}) == "http://127.0.0.1:9000"


def test_a_name_chooses_between_two_servers(another: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    record_serving("127.0.0.1:1", "tandem", "smol")
    serving_in(another, "127.0.0.1:2", "", monkeypatch, name="chat")
    assert choose_address(WhichCluster(name="chat"), {}) == "127.0.0.1:2"
    with pytest.raises(ConfigurationError, match="2 servers"):
        choose_address(WhichCluster(name="neither"), {})
    with pytest.raises(ConfigurationError, match=r"no URL yet  \(chat still starting"):
        choose_url(None, {})


def test_deployments_of_one_ray_cluster_are_told_apart_by_its_names(
    another: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_serving("10.0.0.1:6379", "tandem", "smol")
    serving_in(another, "10.0.0.1:6379", "", monkeypatch, name="chat")
    assert choose_address(WhichCluster(), {}) == "10.0.0.1:6379"
    forget_serving()
    assert [record.pid for record in running()] == [another.pid], "a command forgets its own record alone"
    forget_serving()


def test_when_the_newer_of_two_has_ended_the_older_is_found(
    another: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """Until its parent reads its status, a process that was killed keeps its id."""
    record_serving("127.0.0.1:1", "tandem", "smol", "http://127.0.0.1:8000")
    serving_in(another, "127.0.0.1:2", "http://127.0.0.1:9000", monkeypatch)
    another.kill()
    os.waitid(os.P_PID, another.pid, os.WEXITED | os.WNOWAIT)
    assert choose_address(WhichCluster(), {}) == "127.0.0.1:1"
    assert choose_url(None, {}) == "http://127.0.0.1:8000"
    another.wait()
    assert len(list(cache.glob("serving/*"))) == 1


def test_a_later_process_with_the_same_id_is_another_one(cache: Path) -> None:
    record_serving("127.0.0.1:1", "tandem", "smol")
    (file,) = cache.glob("serving/*")
    record = msgspec.json.decode(file.read_bytes(), type=ServingRecord)
    earlier = msgspec.structs.replace(record, started=record.started - 1)
    file.unlink()
    left = file.with_name(f"{earlier.pid}-{earlier.started}.json")
    left.write_bytes(msgspec.json.encode(earlier))
    assert running() == []
    assert not left.exists()
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, system="another boot")))
    assert running() == []
    assert file.exists(), "another machine's is not read and not deleted"
    file.write_bytes(b"{")
    assert running() == []


def test_where_nothing_can_be_written_it_serves_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_file = tmp_path / "file"
    a_file.touch()
    monkeypatch.setenv("TANDEM_CACHE", str(a_file))
    record_serving("10.0.0.1:1", "tandem", "smol")
    assert running() == []
    forget_serving()


def test_an_address_that_is_none_is_refused_and_one_where_nobody_answers_is_said_at_once() -> None:
    for address in ("10.0.0.1", ":6379", "head:port", "head:0", "head:70000", "ray://head:10001x"):
        with pytest.raises(ConfigurationError, match="must be HOST:PORT"):
            check_reachable(address)
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


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"hello", b""])
def test_a_port_where_something_else_listens_is_no_ray(answer: bytes) -> None:
    """Ray would try for minutes."""
    with answering(answer) as address, pytest.raises(Unavailable, match=r"not as Ray: .*6379.*--url"):
        check_reachable(address)
    with answering(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])) as address:
        check_reachable(address)  # it begins as Ray does


def test_a_head_that_stands_still_is_not_called_something_else() -> None:
    """Its machine takes the connection for it. This test waits as long as the command does."""
    with socket.create_server(("127.0.0.1", 0)) as still:
        address = f"127.0.0.1:{still.getsockname()[1]}"
        with pytest.raises(Unavailable, match=r"has said nothing for 3 s: .* busy, or the Ray there stands still"):
            check_reachable(address)


def test_where_nothing_serves_a_plain_sentence_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray remembers the last one that ran on this machine, and would look for it for minutes."""
    runtime.import_ray()
    from ray._private import services

    monkeypatch.setattr(services, "find_gcs_addresses", frozenset)
    monkeypatch.setattr(services, "canonicalize_bootstrap_address", lambda address: "127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"^Tandem does not run on this machine: start it with `tandem serve`"):
        runtime.connect_to_ray(runtime.AUTO)


def test_between_two_rays_without_a_record_no_command_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself takes the one that was started last, with a warning."""
    runtime.import_ray()
    from ray._private import services

    monkeypatch.setattr(services, "find_gcs_addresses", lambda: frozenset({"127.0.0.1:1", "127.0.0.1:2"}))
    with pytest.raises(ConfigurationError, match=r"2 Ray clusters .*--address \(127\.0\.0\.1:1, 127\.0\.0\.1:2\)"):
        runtime.connect_to_ray(runtime.AUTO)

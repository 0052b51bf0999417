"""The record's file, opened on the head and changed from elsewhere: the same scripts that ssh would run, in sh."""

from __future__ import annotations

import itertools
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.base.own_thread import in_own_thread
from tandem.cluster.static_hosts.record import ClusterRecord, LaunchRecord, with_hosts, with_node
from tandem.cluster.static_hosts.shell import LocalShell, ScriptFailed
from tandem.cluster.static_hosts.store import LocalStore, RecordStore, RemoteStore, record_file
from tests.waiting import until


class CountingShell(LocalShell):
    def __init__(self) -> None:
        self.calls = 0

    def run(self, address: str, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> bytes:
        self.calls += 1
        return super().run(address, script, stdin=stdin, timeout_s=timeout_s)


def remote() -> RemoteStore:
    return RemoteStore("tandem", LocalShell(), "head")


def added(name: str) -> LaunchRecord:
    return LaunchRecord(name, name, name, "decode", {})


def test_what_one_writes_the_other_reads() -> None:
    here, there = LocalStore("tandem"), remote()
    assert here.read() == there.read() == ClusterRecord()
    there.update(lambda record: with_hosts(record, {"decode": ("d1",)}))
    here.update(lambda record: with_node(record, added("d1-1")))
    expected = ClusterRecord(hosts={"decode": ("d1",)}, nodes={"d1-1": added("d1-1")})
    assert here.read() == there.read() == expected


@pytest.mark.parametrize("store", [remote, lambda: LocalStore("tandem")])
def test_the_record_is_read_by_its_owner_alone(home: Path, store: Callable[[], RecordStore]) -> None:
    store().update(lambda record: with_node(record, added("d1-1")))
    assert (home / record_file("tandem")).stat().st_mode & 0o077 == 0


def test_a_change_that_meets_another_is_made_on_top_of_it() -> None:
    there, other = remote(), LocalStore("tandem")
    there.read()
    other.update(lambda record: with_node(record, added("first")))
    record = there.update(lambda record: with_node(record, added("second")))
    assert set(record.nodes) == {"first", "second"}
    assert other.read() == record


def test_a_record_that_never_stands_still_is_given_up_on() -> None:
    there, other = remote(), LocalStore("tandem")
    turns = iter(range(1000))

    def change(record: ClusterRecord) -> ClusterRecord:
        other.update(lambda record: with_node(record, added(f"other-{next(turns)}")))
        return with_node(record, added("mine"))

    with pytest.raises(Unavailable, match="try again"):
        there.update(change)


def test_what_was_read_is_known_without_asking_again() -> None:
    shell = CountingShell()
    there = RemoteStore("tandem", shell, "head")
    there.update(lambda record: with_node(record, added("d1-1")))
    asked = shell.calls
    assert set(there.last_read().nodes) == {"d1-1"}
    there.update(lambda record: with_node(record, added("d1-1")))  # changes nothing
    assert shell.calls == asked


class BrokenLink(LocalShell):
    """Passes on half of what it is given."""

    def run(self, address: str, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> bytes:
        return super().run(address, script, stdin=stdin[: len(stdin) // 2], timeout_s=timeout_s)


def test_half_a_record_is_not_taken_for_one(home: Path) -> None:
    here = LocalStore("tandem")
    before = here.update(lambda record: with_node(record, added("first")))
    there = RemoteStore("tandem", BrokenLink(), "head")
    with pytest.raises(ScriptFailed, match="the record did not arrive whole"):
        there.update(lambda record: with_node(record, added("second")))
    assert here.read() == before
    assert {file.name for file in (home / record_file("tandem")).parent.iterdir()} == {
        "tandem.json",
        "tandem.json.lock",
    }


class StalledLink(LocalShell):
    """Runs the script, which gets nothing to read until `meanwhile` has returned."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self._meanwhile = meanwhile

    def run(self, address: str, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> bytes:
        if not stdin:
            return super().run(address, script)
        with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE) as running:
            until(lambda: "cat" in children_of(running.pid))
            self._meanwhile()
            running.communicate(stdin)
        if running.returncode:
            raise ScriptFailed(address, "failed", running.returncode)
        return b""


def children_of(pid: int) -> set[str]:
    names: set[str] = set()
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(FileNotFoundError):  # it has ended since
            names.add(Path(f"/proc/{child}/comm").read_text().strip())
    return names


def test_a_link_that_stalls_holds_up_no_other_program() -> None:
    """The autoscaler on the head would launch and end nothing until the link breaks."""
    here, turns = LocalStore("tandem"), itertools.count()

    def change() -> None:
        name = f"here-{next(turns)}"
        if name == "here-0":  # the second try meets no other change
            in_own_thread(name, lambda: here.update(lambda record: with_node(record, added(name)))).result(20.0)

    there = RemoteStore("tandem", StalledLink(change), "head")
    there.update(lambda record: with_node(record, added("there")))
    assert set(here.read().nodes) == {"here-0", "there"}


def test_nothing_is_lost_when_everybody_writes_at_once() -> None:
    failures: list[BaseException] = []

    def writer(store: RecordStore, name: str) -> None:
        try:
            for turn in range(5):
                store.update(lambda record, turn=turn: with_node(record, added(f"{name}-{turn}")))
        except BaseException as error:
            failures.append(error)

    stores: list[RecordStore] = [LocalStore("tandem"), LocalStore("tandem"), remote(), remote()]
    writers = [threading.Thread(target=writer, args=(store, f"writer{index}")) for index, store in enumerate(stores)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join(timeout=30)
    assert failures == []
    assert len(LocalStore("tandem").read().nodes) == 20


def test_a_file_that_somebody_spoiled_and_a_name_that_is_no_files_are_refused(home: Path) -> None:
    LocalStore("tandem").update(lambda record: with_node(record, added("d1-1")))
    (home / record_file("tandem")).write_text("[]")
    with pytest.raises(ConfigurationError, match=r"tandem\.json is not a cluster record"):
        LocalStore("tandem").read()
    with pytest.raises(ConfigurationError, match=r"head:~/\.tandem/clusters/tandem\.json"):
        remote().read()
    for name in ("../etc", "a b", "", "$(id)"):
        with pytest.raises(ConfigurationError, match="cluster_name"):
            record_file(name)

"""Whether a process has ended: only proof counts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tandem.kvtransfer.protocol import processes
from tandem.kvtransfer.protocol.processes import has_ended, this_process


def test_this_process_has_not_ended() -> None:
    assert not has_ended(this_process())


def test_a_number_that_another_process_has_now_is_of_one_that_has_ended() -> None:
    assert has_ended(msgspec.structs.replace(this_process(), started=1))


def test_a_number_that_no_process_has_is_of_one_that_has_ended() -> None:
    assert has_ended(msgspec.structs.replace(this_process(), pid=2**22 + 1))


def test_nothing_is_known_of_processes_of_other_machines_and_namespaces() -> None:
    for elsewhere in ({"machine": "another"}, {"pid_namespace": 1}):
        assert not has_ended(msgspec.structs.replace(this_process(), pid=2**22 + 1, **elsewhere))  # type: ignore[arg-type]


def _proc(folder: Path, monkeypatch: pytest.MonkeyPatch, *, numbers: str) -> None:
    """Replaces /proc by one that shows only this process."""
    (folder / "sys/kernel/random").mkdir(parents=True)
    (folder / "sys/kernel/random/boot_id").write_text("boot")
    (folder / "self/ns").mkdir(parents=True)
    (folder / "self/ns/pid").write_text("")
    (folder / "self/stat").write_text("1 (python) S " + "7 " * 30)
    (folder / "self/status").write_text(f"Name:\tpython\nNSpid:\t{numbers}\n")
    monkeypatch.setattr(processes, "_PROC", folder)


def test_a_process_that_proc_hides_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the mount option hidepid=2."""
    _proc(tmp_path, monkeypatch, numbers="1")
    assert not has_ended(this_process())
    assert has_ended(msgspec.structs.replace(this_process(), pid=2**22 + 1))


def test_a_proc_of_another_namespace_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _proc(tmp_path, monkeypatch, numbers="4711\t1")
    assert not has_ended(msgspec.structs.replace(this_process(), pid=2**22 + 1))

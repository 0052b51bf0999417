"""Whether a process has ended: only proof counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.kvtransfer.protocol import processes
from tandem.kvtransfer.protocol.processes import has_ended, this_process

NO_ONES = 2**22 + 1


@pytest.mark.parametrize(
    ("another", "ended"),
    [
        pytest.param({}, False, id="this process"),
        pytest.param({"started": 1}, True, id="one whose number another process has now"),
        pytest.param({"pid": NO_ONES}, True, id="one whose number no process has"),
        pytest.param({"pid": NO_ONES, "machine": "another"}, False, id="one of another machine"),
        pytest.param({"pid": NO_ONES, "pid_namespace": 1}, False, id="one of another namespace"),
    ],
)
def test_what_has_ended(another: dict[str, Any], ended: bool) -> None:
    assert has_ended(msgspec.structs.replace(this_process(), **another)) is ended


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
    assert has_ended(msgspec.structs.replace(this_process(), pid=NO_ONES))


def test_a_proc_of_another_namespace_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _proc(tmp_path, monkeypatch, numbers="4711\t1")
    assert not has_ended(msgspec.structs.replace(this_process(), pid=NO_ONES))

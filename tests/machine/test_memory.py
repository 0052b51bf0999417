"""Free memory is what the control group leaves, if that is less than the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.machine import resources
from tandem.machine.resources import free_memory


def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    for name, content in files.items():
        (tmp_path / name.replace("_", ".")).write_text(content)
    monkeypatch.setattr(resources, "folders_of", lambda controller: [tmp_path])
    monkeypatch.setattr(resources, "_machine_available", lambda: 10_000)


def test_a_group_with_a_limit_has_what_it_does_not_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups(tmp_path, monkeypatch, memory_max="5000\n", memory_current="2000\n")
    assert free_memory() == 3000


def test_idle_file_pages_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = "anon 10\ninactive_file 700\nactive_file 900\n"
    groups(tmp_path, monkeypatch, memory_max="5000", memory_current="2000", memory_stat=stat)
    assert free_memory() == 3700


def test_a_group_over_its_limit_has_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups(tmp_path, monkeypatch, memory_max="1000", memory_current="2000")
    assert free_memory() == 0


def test_no_limit_leaves_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups(tmp_path, monkeypatch, memory_max="max\n", memory_current="2000")
    assert free_memory() == 10_000


def test_this_machine_has_some() -> None:
    assert free_memory() > 0

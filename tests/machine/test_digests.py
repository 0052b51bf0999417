"""The digest of a file is the digest of its bytes; the file is read once as long as it does not change."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from tandem.machine import digests
from tandem.machine.digests import cache_folder, digest_of, digests_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were hashed."""
    hashed: list[str] = []
    real = digests._hash

    def counted(file, on_read):  # type: ignore[no-untyped-def]
        hashed.append(Path(file.name).name)
        return real(file, on_read)

    monkeypatch.setattr(digests, "_hash", counted)
    return hashed


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files were written long ago."""
    now = time.time_ns()
    monkeypatch.setattr("tandem.machine.digests.time.time_ns", lambda: now + 10**10)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_file_is_read_once(tmp_path: Path, reads: list[str], later: None) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    assert [digest_of(file), digest_of(file)] == [sha256(b"one")] * 2
    assert reads == ["weights"]


@pytest.mark.parametrize("how", ["in place", "by another file"])
def test_a_file_that_was_changed_is_read_again_though_its_size_and_time_are_the_same(
    tmp_path: Path, reads: list[str], later: None, how: str
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    times = os.stat(file)
    assert digest_of(file) == sha256(b"one")
    target = file if how == "in place" else tmp_path / "other"
    target.write_bytes(b"two")
    os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.replace(target, file)
    assert digest_of(file) == sha256(b"two")
    assert len(reads) == 2


def test_what_was_written_just_now_may_be_written_again_and_is_not_remembered(tmp_path: Path, reads: list[str]) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    assert [digest_of(file), digest_of(file)] == [sha256(b"one")] * 2
    assert len(reads) == 2


def test_the_hubs_cache_says_the_digest_of_a_large_file(tmp_path: Path, reads: list[str]) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / sha256(b"one")).write_bytes(b"one")
    (blobs / ("a" * 40)).write_bytes(b"small")  # a small file is there under its git hash
    link, small = tmp_path / "model.safetensors", tmp_path / "config.json"
    link.symlink_to(blobs / sha256(b"one"))
    small.symlink_to(blobs / ("a" * 40))
    assert digest_of(link) == sha256(b"one")
    assert reads == []
    assert digest_of(small) == sha256(b"small")


@pytest.mark.parametrize("content", [b"", b"no json", b"{}", b"[1]", b'{"identity": [], "sha256": "x"}'])
def test_a_damaged_memory_is_read_over(
    tmp_path: Path, cache: Path, reads: list[str], later: None, content: bytes
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    digest_of(file)
    (kept,) = (cache / "digests").iterdir()
    kept.write_bytes(content)
    assert digest_of(file) == sha256(b"one")
    assert len(reads) == 2


def test_without_a_place_to_remember_files_are_read_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str], later: None
) -> None:
    (tmp_path / "in the way").write_bytes(b"")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "in the way"))
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    heard: list[int] = []
    assert digests_of([file, file], heard.append) == [sha256(b"one")] * 2
    assert sum(heard) == 6, "what is read is told"
    assert len(reads) == 2


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    assert cache_folder({}) is None
    assert cache_folder({"TANDEM_CACHE": "/there"}) == Path("/there")

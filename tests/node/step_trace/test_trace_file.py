"""The scheduler trace's files are bounded and whole, and the node never waits for them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tandem.node.step_trace.part import MAX_QUEUED, TraceFile


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def test_all_that_is_written_is_there_after_the_end(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "new", "d0", 1 << 20)
    for number in range(100):
        file.write(b"%d\n" % number)
    file.close()
    assert lines(tmp_path / "new" / "d0.jsonl") == [b"%d" % number for number in range(100)]


def test_files_stay_within_their_bytes_and_keep_the_newest(tmp_path: Path) -> None:
    file = TraceFile(tmp_path, "d0", 1000)
    file.write(b"header\n")
    for number in range(2000):
        file.write(b"%06d\n" % number)
    file.close()
    new, old = tmp_path / "d0.jsonl", tmp_path / "d0.old.jsonl"
    assert new.stat().st_size + old.stat().st_size <= 1000 + 2 * 7
    assert {path.name for path in tmp_path.iterdir()} == {"d0.jsonl", "d0.old.jsonl"}
    assert lines(old)[0] == lines(new)[0] == b"header", "each file says whose steps it has"
    kept = [int(line) for line in (*lines(old)[1:], *lines(new)[1:])]
    assert kept == list(range(kept[0], 2000))


def test_a_node_that_starts_again_goes_on_in_its_file(tmp_path: Path) -> None:
    """What its process left half written when it was killed, it writes no further."""
    for start in (b"one\n", b"two\nthr", b"four\n"):
        file = TraceFile(tmp_path, "d0", 1 << 20)
        file.write(start)
        file.close()
    assert lines(tmp_path / "d0.jsonl") == [b"one", b"two", b"four"]


def test_a_folder_that_cannot_be_written_ends_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("a file")
    with caplog.at_level(logging.ERROR):
        file = TraceFile(tmp_path / "taken", "d0", 1 << 20)
        for _ in range(3 * MAX_QUEUED):
            file.write(b"line\n")
        file.close()
    assert "the scheduler trace ends" in caplog.text

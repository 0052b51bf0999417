"""`tandem replay` on a trace of a real scheduler."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tandem.base.errors import ConfigurationError
from tandem.cluster import cli
from tandem.cluster.replay.command import run
from tandem.cluster.replay.reading import TraceReader
from tandem.node.step_trace.records import StepTrace
from tests.engine.scheduling.driving import Driver


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two requests that do not fit: the younger is preempted. In two parts, as when the first is full."""
    lines: list[bytes] = []
    driver = Driver(num_blocks=5, caching=False, watcher=StepTrace("decode-0", lines.append))
    driver.add("req-a", prompt=7, max_tokens=5)
    driver.add("req-b", prompt=7, max_tokens=5)
    driver.run()
    half = next(index for index in range(len(lines) // 2, len(lines)) if b"step_snapshot" in lines[index])
    (tmp_path / "decode-0.old.jsonl").write_bytes(b"".join(lines[:half]))
    (tmp_path / "decode-0.jsonl").write_bytes(lines[0] + b"".join(lines[half:]))
    return tmp_path


def replayed(path: Path, *words: str, typed: str | None = None) -> str:
    out = Console(file=io.StringIO(), width=200)
    asked: Iterator[str] = iter((typed or "").split("|"))
    run(
        cli.make_parser().parse_args(["replay", str(path), *words]),
        out,
        lambda prompt: next(asked),
        interactive=typed is not None,
    )
    return out.file.getvalue()  # type: ignore[attr-defined]


def test_every_step_has_a_line(trace: Path) -> None:
    shown = replayed(trace).splitlines()
    assert len(shown) == len(TraceReader(trace))
    assert [int(line.split()[1]) for line in shown] == sorted(int(line.split()[1]) for line in shown)
    assert "2 admitted" in shown[0]


def test_a_step_shows_the_line_the_blocks_and_who_was_preempted_for_whom(trace: Path) -> None:
    [line] = replayed(trace, "--preemptions").splitlines()
    shown = replayed(trace, "--step", line.split()[1])
    assert "decode-0" in shown
    assert "of 4 used" in shown
    assert "preempted for the next tokens of req-a" in shown
    assert "tokens to compute again" in shown


def test_one_steps_through_it(trace: Path) -> None:
    shown = replayed(trace, typed="|p|p|b|r req-b|0|nonsense|q")
    assert "(1 of " in shown
    assert "(2 of " in shown
    assert "preempted for the next tokens of req-a" in shown
    assert "no request is preempted after this step" in shown
    assert "that is not a command" in shown


def test_json_has_the_records_as_they_are(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replayed(trace, "--request", "req-b", "-o", "json")
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line]
    assert records
    assert all("req-b" in json.dumps(record) for record in records)


def test_a_trace_whose_writer_died_is_read_up_to_there(trace: Path) -> None:
    whole = len(TraceReader(trace))
    file = trace / "decode-0.jsonl"
    file.write_bytes(file.read_bytes()[:-7])
    assert len(TraceReader(trace)) == whole - 1
    with pytest.raises(ConfigurationError, match="the trace has no step 999"):
        replayed(trace, "--step", "999")


def test_a_trace_that_goes_on_while_it_is_read_is_shown_as_it_was(trace: Path) -> None:
    reader = TraceReader(trace)
    before = [step.snapshot for step in reader]
    (trace / "decode-0.jsonl").replace(trace / "decode-0.old.jsonl")
    (trace / "decode-0.jsonl").write_text("of another step\n")
    assert [step.snapshot for step in reader] == before


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no scheduler trace"):
        TraceReader(tmp_path)
    (tmp_path / "a.jsonl").write_text("hello\n")
    with pytest.raises(ConfigurationError, match="is not a scheduler trace"):
        TraceReader(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(ConfigurationError, match="traces of a, b: name one"):
        TraceReader(tmp_path)

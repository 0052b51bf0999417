"""One table has the headlines of every benchmark; a failed one is named, and the others still run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.lib.harness import BenchmarkReport, report, report_of, run
from benchmarks.lib.tables import at_most, seen
from benchmarks.suite import SuitePart, run_part
from tandem.base.errors import ConfigurationError

FIGURES = msgspec.json.encode(report_of({}, [seen("it", 1.5, "s"), at_most("no peer there", None, 4.0)])).decode()


def part_of(script: str, within_s: float = 20.0) -> SuitePart:
    return SuitePart("a part", ("made", script), within_s)


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`python -c SCRIPT FILE` instead of `python -m made ...`."""
    import subprocess

    real = subprocess.run

    def run(command: list[str], **fields: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "made"]
        return real([sys.executable, "-S", "-c", *command[3:]], **fields)

    monkeypatch.setattr("benchmarks.suite.subprocess.run", run)
    return lambda part: run_part(part, "m", tmp_path)


def test_a_part_is_read_a_broken_one_is_said_to_be_broken_and_an_endless_one_is_ended(run_script: Any) -> None:
    well = run_script(part_of(f"import sys; open(sys.argv[2], 'w').write({FIGURES!r})"))
    assert well.headlines == [seen("it", 1.5, "s")], "what was not measured is no headline"
    assert not well.failure
    broken = run_script(part_of("print('why it broke'); raise SystemExit(3)"))
    assert not broken.headlines, "not those of the run before"
    assert "status 3" in broken.failure
    assert "why it broke" in broken.failure
    endless = run_script(part_of("import time; time.sleep(60)", within_s=0.2))
    assert "not through" in endless.failure


def test_a_command_ends_by_what_it_found_and_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = argparse.Namespace(json=None, out=tmp_path / "made", name="it")
    assert report(options, {"it": 1}, "some words", floors=[at_most("it", 1.0, 2.0)]) == 0
    assert report(options, {"it": 3}, "some [words]", floors=[at_most("it", 3.0, 2.0)]) == 1
    found = msgspec.json.decode((tmp_path / "made" / "it.json").read_bytes(), type=BenchmarkReport)
    assert (found.figures, found.floors[0].met) == ({"it": 3}, False)
    written = (tmp_path / "made" / "it.txt").read_text()
    assert "some [words]" in written
    assert "missed" in written
    assert capsys.readouterr().out.endswith(written)
    assert report(argparse.Namespace(json=tmp_path / "it.json"), 1, failed=True) == 1


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise ConfigurationError("--runs must be at least 1, not 0")

    with pytest.raises(SystemExit) as ended:
        run(fails)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "--runs must be at least 1, not 0\n"

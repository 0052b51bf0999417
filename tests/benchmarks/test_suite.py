"""One table has the headlines of every benchmark; a failed one is named, and the others still run."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import suite as module
from benchmarks.lib.tables import Floor, seen
from benchmarks.suite import PARTS, Suite, SuitePart, run_part, show
from tandem.loadgen.report import MachineDescription

FOUND: dict[str, Any] = {
    "scheduler": {"workloads": [{"running": 256, "tandem_us": {"step": 300.0, "add_request": 30.0}}]},
    "transfer": {
        "handover_512": {"ms_p50": 4.0, "raw_ms_p50": 1.0},
        "throughput": [{"of_raw": 0.2}, {"of_raw": 0.9}],
        "overlap_2048": [{"share": 0.875}],
    },
    "router": {
        "added_ttft_ms": 2.5,
        "streams": [{"streams": 512, "added_us_per_token": 120.0}, {"streams": 1, "added_us_per_token": 9.0}],
        "requests": {"new prompts": {"per_s": 100.0}},
    },
    "load generator": {
        "compared": [{"figure": "a", "ours": 102.0, "known": 100.0}, {"figure": "b", "ours": 49.0, "known": 50.0}],
        "ours_us_per_chunk": 32.0,
    },
    "disaggregation": {
        "titles": {"a": "A"},
        "examined": [
            {"system": "a", "cell": "1 user", "summary": {"ttft_ms": {"p50": 90.0}, "tpot_ms": {"p50": 14.0}}},
            {"system": "a", "cell": "8 users", "summary": {"output_tokens_per_s": 200.0}},
        ],
        "floors": [
            {"claim": "steady", "measured": 1.5, "unit": "×", "required": "at most 2×", "met": True},
            {"claim": "no peer there", "measured": None, "unit": "×", "required": "4×", "met": None},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS, ids=[part.name for part in PARTS])
def test_every_part_has_headlines(part: SuitePart) -> None:
    lines = part.read(FOUND[part.name])
    assert lines
    assert all(line.measured is not None and line.measured >= 0 for line in lines)


def test_floors_are_judged_in_their_own_direction() -> None:
    lines = {line.claim: line.met for part in PARTS for line in part.read(FOUND[part.name])}
    assert lines["handover of 512 tokens"] is True
    assert lines["the same, over raw NIXL"] is False
    assert lines["largest batch, of raw NIXL"] is True
    assert lines["CPU per token, 512 streams"] is False
    assert "no peer there" not in lines


def part_of(script: str, within_s: float = 20.0) -> SuitePart:
    def read(found: Any) -> list[Floor]:
        return [seen("it", found["it"], "s")]

    return SuitePart("a part", ("made", script, "{json}"), within_s, read)


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`python -c SCRIPT FILE` instead of `python -m made ...`."""
    import subprocess

    real = subprocess.run

    def run(command: list[str], **fields: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "made"]
        return real([sys.executable, "-S", "-c", *command[3:]], **fields)

    monkeypatch.setattr(module.subprocess, "run", run)
    return lambda part: run_part(part, "m", tmp_path)


def test_a_part_is_read_a_broken_one_is_said_to_be_broken_and_an_endless_one_is_ended(
    run_script: Any,
) -> None:
    well = run_script(part_of("import sys; open(sys.argv[1], 'w').write('{\"it\": 1.5}')"))
    assert well.headlines == [seen("it", 1.5, "s")]
    assert not well.failure
    broken = run_script(part_of("print('why it broke'); raise SystemExit(3)"))
    assert not broken.headlines, "not those of the run before"
    assert "status 3" in broken.failure
    assert "why it broke" in broken.failure
    endless = run_script(part_of("import time; time.sleep(60)", within_s=0.2))
    assert "not through" in endless.failure
    out = io.StringIO()
    show(
        Console(file=out, width=100), Suite("", MachineDescription("p", 2, "s", "3"), [well, broken, endless])
    )
    assert "1.50 s" in out.getvalue()
    assert "why it broke" in out.getvalue()

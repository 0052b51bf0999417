"""The GPU's benchmark from its beginning to its end, on a CPU: some minutes of loading engines, so `make test-gpu-packages` runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_parts import STAGES
from benchmarks.gpu_report import rows_of


@pytest.mark.slow
@pytest.mark.parametrize("stage", sorted(STAGES))
def test_a_dry_run_goes_through_every_part(stage: str, tmp_path: Path) -> None:
    """Each part makes what it needs, loads it, and measures."""
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--stage", stage, "--out", str(out)]
    ran = subprocess.run([*command, "--deadline", "300"], capture_output=True, text=True, check=False)
    rows = rows_of(out)
    ends = {row["part"]: row["state"] for row in rows if "state" in row}
    assert ran.returncode == 0, (ends, ran.stderr[-2000:])
    assert set(ends) == set(STAGES[stage])
    left_out = {part for part, state in ends.items() if state.startswith("left out")}
    assert left_out == ({"kernels", "transfer"} if stage == "1" else set())
    assert all(row["holds"] for row in rows if "holds" in row)
    for part in set(ends) & {"tiny", "8b", "qwen3-8b", "experts", "fp8", "latents"}:
        steps = [row for row in rows if row["part"] == part and "limit_ms" in row]
        whats = ["decode 2 x 16", "prefill 16", "8 behind 64", "16 beside 2 x 32"]
        assert [row["what"] for row in steps] == whats
        assert all(row["ms"] > 0 < row["products_alone_ms"] for row in steps)
    if stage == "2":
        handovers = [row for row in rows if row["what"].startswith("handover")]
        assert len(handovers) == 2
        assert all(row["same_answer"] and row["ms_after_the_last_chunk"] > 0 for row in handovers)

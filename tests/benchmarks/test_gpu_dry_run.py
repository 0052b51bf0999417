"""The GPU's benchmark from its beginning to its end, on a CPU: a minute of loading engines, so `make test-gpu-packages` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_models import make_model
from benchmarks.machine import MachineLimits
from tests.benchmarks.test_gpu_benchmark import SMALL


@pytest.mark.slow
def test_it_runs_through_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model is made, loaded, compared and timed."""
    path = make_model(SMALL, tmp_path / "model", torch.device("cpu"))
    monkeypatch.setattr(gpu, "QUICK_PREFILLS", (16,))
    monkeypatch.setattr(gpu, "QUICK_DECODES", ((2, 16),))
    monkeypatch.setattr(gpu, "PARITY_SHAPE", SMALL)
    monkeypatch.setattr(gpu, "measure_limits", lambda *_, **__: MachineLimits(1e12, 1e10))
    out = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--model", str(path), "--json", str(out)])
    assert gpu.main() == 0
    figures = json.loads(out.read_text())
    assert [row["what"] for row in figures["rows"]] == ["prefill 16", "decode 2 x 16"]
    assert all(parity["holds"] for parity in figures["parity"])
    assert "decode 2 x 16" in capsys.readouterr().out


@pytest.mark.slow
def test_a_dry_run_goes_through_everything(tmp_path: Path) -> None:
    """Five engines are loaded, a tiny one is measured, and then two of them hand over."""
    file = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--dry-run",
        "--kv-memory",
        str(64 << 20),
        "--json",
        str(file),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    figures = json.loads(file.read_text())
    assert all(row["expected_ms"] > 0 for row in figures["rows"])
    assert len(figures["sampling"]) == 10
    assert all(row["kernels"] > 0 and row["host_ms"] > 0 for row in figures["parts"])
    assert "loading weights" in figures["seconds_to_load"]
    pair = figures["pair"]
    assert pair["same_answers"] == pair["answers"] == len(pair["handovers"])
    assert all(row["ms"] > 0 for row in pair["handovers"])
    assert pair["two"]["tokens_per_s"] > 0 < pair["one_engine"]["gap_ms_p99"]
    assert figures["parity"]

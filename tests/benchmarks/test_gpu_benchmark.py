"""The GPU benchmark on a machine without a GPU: its message, and that it would notice a wrong answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_parity
from benchmarks.gpu_models import ModelShape, make_model
from benchmarks.lib import engines
from benchmarks.lib.costs import Costs
from benchmarks.lib.machine import MachineLimits

SMALL = ModelShape(64, 96, 2, 2, 1, 1000, 32, "float32", spread=0.3)


def test_without_a_gpu_it_says_so_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
    captured = capsys.readouterr()
    assert "no GPU" in captured.err
    assert captured.out == ""


def test_it_starts_without_what_only_a_cluster_needs() -> None:
    """A machine that is lent for half an hour has torch and transformers, and little else."""
    absent = ("llguidance", "ray", "nixl", "zmq", "starlette", "httptools", "prometheus_client", "uvloop")
    blocked = f"import sys; sys.modules.update(dict.fromkeys({absent!r}))"
    code = f"{blocked}; from benchmarks import gpu; sys.argv = ['gpu', '--help']; gpu.main()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "--kv-memory" in ran.stdout


def test_a_step_s_limit_is_what_the_machine_can_do() -> None:
    costs = Costs(layers=1000, head=100, element_bytes=2, kv_bytes=10, attention_flops=4)
    limits = MachineLimits(gemm_flops=1e6, read_bytes=1e9)
    prompt = 2 * (1000 * 10 + 100) + 4 * 10 * 11 // 2
    assert costs.least_seconds([10], [10], limits) == pytest.approx(prompt / 1e6)
    # Tokens behind a prefix attend to it, and it is read once.
    behind = 2 * 1000 * 10 + 4 * (30 * 31 - 20 * 21) // 2 + 2 * 100
    assert costs.least_seconds([10], [30], limits) == pytest.approx(behind / 1e6)
    slow = MachineLimits(gemm_flops=1e12, read_bytes=1e5)
    assert costs.least_seconds([1] * 4, [50] * 4, slow) == pytest.approx((1100 * 2 + 4 * 50 * 10) / 1e5)
    some = Costs(0, 0, 2, 0, 0, experts=1000, chosen=0.5)
    assert some.least_seconds([1] * 2, [50] * 2, slow) == pytest.approx(750 * 2 / 1e5)


@pytest.mark.slow
def test_a_device_that_computes_something_else_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five engines are loaded twice, and one once."""
    path = make_model(SMALL, tmp_path / "model", torch.device("cpu"))
    monkeypatch.setattr(gpu_parity, "_LENGTHS", (3, 20))
    checks = gpu_parity.check_parity, gpu_parity.check_same_bits
    assert all(parity.holds for check in checks for parity in check(path, torch.device("cpu")))
    load = engines.load_runner  # type: ignore[attr-defined]

    def spoilt(*arguments: object, native: bool, **options: object) -> object:
        runner = load(*arguments, native=native, **options)  # type: ignore[arg-type]
        if native:
            forward = runner.forward
            runner.forward = lambda batch, hooks: forward(batch, hooks).roll(1, dims=1)
        return runner

    monkeypatch.setattr(engines, "load_runner", spoilt)
    assert not any(parity.holds for parity in gpu_parity.check_parity(path, torch.device("cpu")))

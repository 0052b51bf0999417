"""The GPU benchmark on a machine without a GPU: its message, and that it would notice a wrong answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_parity, gpu_speed
from benchmarks.engine_costs import Costs
from benchmarks.gpu_models import ModelShape, make_model
from benchmarks.gpu_report import rows_of
from benchmarks.machine import MachineLimits

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
    limits = MachineLimits(gemm_flops=1e6, read_bytes=1e5)
    prompt = 2 * (1000 * 10 + 100) + 4 * 10 * 11 // 2 + 2 * 100
    assert gpu_speed.limit_of(limits, costs, [10], [10]) == pytest.approx(prompt / 1e6)
    # Tokens behind a prefix attend to it, and it is read once.
    behind = 2 * 1000 * 10 + 4 * (30 * 31 - 20 * 21) // 2 + 2 * 100
    assert gpu_speed.limit_of(limits, costs, [10], [30]) == pytest.approx(behind / 1e6)
    slow = MachineLimits(gemm_flops=1e12, read_bytes=1e5)
    assert gpu_speed.limit_of(slow, costs, [1] * 4, [50] * 4) == pytest.approx((1100 * 2 + 4 * 50 * 10) / 1e5)
    some = Costs(0, 0, 2, 0, 0, experts=1000, chosen=0.5)
    assert gpu_speed.limit_of(slow, some, [1] * 2, [50] * 2) == pytest.approx(750 * 2 / 1e5)


def with_parts(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str, **parts: str) -> int:
    """Runs the benchmark with parts that are only these lines of Python."""
    code = "import sys; from benchmarks import gpu; from benchmarks.gpu_parts import Part\n"
    for name, body in parts.items():
        code += f"def {name}(setting, report):\n    {body}\n"
        code += f"gpu.PARTS[{name!r}] = Part({name}, 60)\n"
    script = out.with_suffix(".py")
    # A part's process runs the same file.
    script.write_text(f"import subprocess\n{code}\nsys.exit(gpu.main())\n")
    popen = subprocess.Popen

    def started(command: list[str], **options: Any) -> Any:
        where = command.index("-m")
        return popen([*command[:where], str(script), *command[where + 2 :]], **options)

    exec(code, {})
    monkeypatch.setattr(gpu.subprocess, "Popen", started)
    arguments = ["gpu", "--device", "cpu", "--out", str(out), "--only", ",".join(parts), *more]
    monkeypatch.setattr(sys, "argv", arguments)
    return gpu.main()


@pytest.mark.slow
def test_a_part_that_fails_dies_or_hangs_costs_no_other_part_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each part is a process of its own, which begins in some seconds."""
    for name in ("fine", "fails", "dies", "absent", "last"):
        monkeypatch.setitem(gpu.PARTS, name, gpu.PARTS["machine"])
    out = tmp_path / "rows.jsonl"
    status = with_parts(
        monkeypatch,
        out,
        fine="report.row('one', ms=1.5)",
        fails="report.row('two', ms=2); raise RuntimeError('an illegal address')",
        dies="report.row('three', ms=3); import os; os.kill(os.getpid(), 9)",
        absent="from benchmarks.gpu_parts import Left; raise Left('no library')",
        last="report.row('four', ms=4)",
    )
    assert status == 1
    rows = [(row["part"], row.get("state") or row["what"]) for row in rows_of(out)]
    assert rows == [
        ("fine", "one"),
        ("fine", "done"),
        ("fails", "two"),
        ("fails", "failed: RuntimeError: an illegal address"),
        ("dies", "three"),
        ("dies", "failed: status -9"),
        ("absent", "left out: no library"),
        ("last", "four"),
        ("last", "done"),
    ]
    said = capfd.readouterr().out
    assert "fine done; fails failed: status 1; dies failed: status -9; absent left out; last done" in said


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that its child holds is closed when both have ended."""
    monkeypatch.setitem(gpu.PARTS, "hangs", gpu.PARTS["machine"])
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    popen = subprocess.Popen
    monkeypatch.setattr(gpu.subprocess, "Popen", lambda *a, **o: popen(*a, **o, pass_fds=(theirs,)))
    out = tmp_path / "rows.jsonl"
    hangs = (
        f"import subprocess; subprocess.Popen(['sleep', '600'], pass_fds=({theirs},)); "
        "report.row('begun', ms=1); import threading; threading.Event().wait()"
    )
    assert with_parts(monkeypatch, out, "--deadline", "40", hangs=hangs) == 1
    os.close(theirs)
    assert os.read(ours, 1) == b""
    os.close(ours)
    assert [row.get("state", row["what"]) for row in rows_of(out)] == ["begun", "late: not done after 40 s"]


@pytest.mark.slow
def test_a_device_that_computes_something_else_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five engines are loaded twice."""
    path = make_model(SMALL, tmp_path / "model", torch.device("cpu"))
    monkeypatch.setattr(gpu_parity, "_LENGTHS", (3, 20))
    assert all(parity.holds for parity in gpu_parity.check_parity(path, torch.device("cpu")))
    load = gpu_parity.load_runner

    def spoilt(*arguments: object, native: bool, **options: object) -> object:
        runner = load(*arguments, native=native, **options)  # type: ignore[arg-type]
        if native:
            forward = runner.forward
            runner._forward = lambda batch, hooks: forward(batch, hooks).roll(1, dims=1)
        return runner

    monkeypatch.setattr(gpu_parity, "load_runner", spoilt)
    assert not any(parity.holds for parity in gpu_parity.check_parity(path, torch.device("cpu")))

"""The GPU's benchmark from its beginning to its end, on a CPU: some minutes of loading engines, so `make test-gpu-packages` runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu_parts import PARTS, STAGES
from benchmarks.gpu_report import rows_of


@pytest.mark.slow
@pytest.mark.timeout(900)
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
    monkeypatch.setattr("benchmarks.gpu.subprocess.Popen", started)
    # A script's own folder is searched for modules, and not the folder that it is started in, as with `-m`.
    there = Path(gpu.__file__).resolve().parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(there), os.environ.get("PYTHONPATH", "")])))
    arguments = ["gpu", "--device", "cpu", "--out", str(out), "--only", ",".join(parts), *more]
    monkeypatch.setattr(sys, "argv", arguments)
    return gpu.main()


@pytest.mark.slow
def test_a_part_that_fails_dies_or_hangs_costs_no_other_part_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each part is a process of its own, which begins in some seconds."""
    for name in ("fine", "fails", "dies", "absent", "last"):
        monkeypatch.setitem(PARTS, name, PARTS["machine"])
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
def test_a_part_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that its child holds is closed when both have ended."""
    monkeypatch.setitem(PARTS, "hangs", PARTS["machine"])
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    popen = subprocess.Popen
    monkeypatch.setattr("benchmarks.gpu.subprocess.Popen", lambda *a, **o: popen(*a, **o, pass_fds=(theirs,)))
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

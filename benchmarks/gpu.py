"""The engine on a GPU, part by part: whether it gives the right tokens, and how near it is to the card's limits.

    python -m benchmarks.gpu [--stage 1 | --only PART,...] [--model DIR] [--out FILE] [--dry-run]

Each part runs in a process of its own with a deadline. Each row is printed, and appended to FILE as a line of JSON, as soon as it is known.
So a part that fails, hangs or takes the card's context with it is named at the end, and the others lose nothing. Steps stand beside the
limit, beside what torch and FlashInfer take alone, and beside what is expected (docs/gpu.md).

Needs torch, transformers, msgspec, xxhash and cbor2; handovers also need nixl and pyzmq, and are left out without them. Needs no Ray and no
network. Models have random weights, which cost the same as trained ones. Uses FlashInfer if it is installed. `--dry-run` runs all parts
with tiny models on a CPU, as a test of the benchmark itself.

Exits with 2 without a GPU, and with 1 if a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu_parts import PARTS, STAGES, Left, Setting
from benchmarks.gpu_report import Report, rows_of
from tandem.base.flags import adder

_STATE = "how it ended"
_LEFT_OUT = 3  # the status of a part that cannot run here


def main() -> int:
    arguments = _arguments()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print("There is no GPU here: torch finds no CUDA device. Nothing was measured.", file=sys.stderr)
        return 2
    if arguments.part:
        return run_part(arguments.part, arguments)
    names = _wanted(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a part does not outlive this process
    with tempfile.TemporaryDirectory() as folder:
        arguments.models = arguments.models or Path(folder)
        ended = {name: run_apart(name, arguments) for name in names}
    print("; ".join(f"{name} {how}" for name, how in ended.items()))
    return 1 if any(how.startswith(("failed", "late")) for how in ended.values()) else 0


def _wanted(arguments: argparse.Namespace) -> list[str]:
    if arguments.only:
        names: list[str] = arguments.only.split(",")
        if unknown := [name for name in names if name not in PARTS]:
            sys.exit(f"no such part: {', '.join(unknown)}. There are {', '.join(PARTS)}")
        return names
    if arguments.stage:
        return list(STAGES[arguments.stage])
    every = [name for stage in STAGES.values() for name in stage]
    if arguments.quick:
        every = [*STAGES["1"], "sampling", "pair"]
    return list(dict.fromkeys(every)) + (["model"] if arguments.model else [])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", choices=sorted(STAGES), help="a third of the parts: ten minutes on one card")
    add = adder(parser)
    add("--only", None, str, f"these parts, with commas: {', '.join(PARTS)}")
    add("--out", None, Path, "a file to which a line of JSON is appended for each row")
    add("--model", None, Path, "a local model folder, measured and compared with transformers, too")
    add("--models", None, Path, "a folder where random models are made and stay")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the benchmark itself")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU: tries the benchmark itself")
    parser.add_argument("--kv-memory", type=int, help="bytes for the KV cache; most of what is free without")
    parser.add_argument("--quick", action="store_true", help="tiny models, fewer sizes")
    parser.add_argument("--deadline", type=float, help="seconds for each part, instead of its own")
    parser.add_argument("--part", choices=sorted(PARTS), help=argparse.SUPPRESS)  # in its own process
    arguments = parser.parse_args()
    if arguments.dry_run:
        arguments.device = "cpu"
        arguments.kv_memory = arguments.kv_memory or 64 << 20
    return arguments


def run_part(name: str, arguments: argparse.Namespace) -> int:
    setting = Setting(
        arguments.device, arguments.dtype, arguments.models, arguments.model, arguments.kv_memory, arguments.quick
    )
    report = Report(name, arguments.out)
    began = time.monotonic()
    try:
        PARTS[name].run(setting, report)
    except Left as why:
        report.row(_STATE, state=f"left out: {why}")
        return _LEFT_OUT
    except Exception as error:  # whatever it is, the other parts go on
        words = str(error).strip().split("\n", 1)[0]
        report.row(_STATE, state=f"failed: {type(error).__name__}: {words}")
        raise
    report.row(_STATE, state="done", seconds=time.monotonic() - began)
    return 0


def run_apart(name: str, arguments: argparse.Namespace) -> str:
    """Runs a part in a process of its own. Returns how it ended."""
    deadline = arguments.deadline or PARTS[name].deadline_s
    command = [sys.executable, "-u", "-m", "benchmarks.gpu", "--part", name, "--models", str(arguments.models)]
    command += ["--device", arguments.device, "--dtype", arguments.dtype]
    for flag in ("out", "model", "kv_memory"):
        if (value := getattr(arguments, flag)) is not None:
            command += [f"--{flag.replace('_', '-')}", str(value)]
    command += ["--quick"] if arguments.quick else []
    print(f"-- {name}, for at most {deadline:.0f} s", file=sys.stderr, flush=True)
    report = Report(name, arguments.out)
    child = subprocess.Popen(command, start_new_session=True)
    try:
        status = child.wait(deadline)
    except subprocess.TimeoutExpired:
        how = f"late: not done after {deadline:.0f} s"
        report.row(_STATE, state=how)
        return how
    finally:
        _end(child)
    if status in (0, _LEFT_OUT):
        return "left out" if status else "done"
    how = f"failed: status {status}"
    if arguments.out is None or not _said_why(arguments.out, name):
        report.row(_STATE, state=how)
    return how


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the part's process and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _said_why(out: Path, name: str) -> bool:
    """Whether the part's last row says how it ended. A process that is killed says nothing."""
    last = [row for row in rows_of(out) if row["part"] == name][-1:]
    return bool(last) and last[0]["what"] == _STATE


if __name__ == "__main__":
    sys.exit(main())

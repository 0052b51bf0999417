"""manifests/slurm: the script as it stands, with a Slurm, a Ray and a Tandem of our own on the PATH; its flags are ones that they have."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from pathlib import Path

from tandem.cluster.cli import make_parser
from tandem.cluster.on_ray.runtime import import_ray

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "manifests" / "slurm" / "tandem.sbatch"

FAKES = {
    "scontrol": "printf 'one\\ntwo\\nthree\\n'",
    "hostname": "echo 10.0.0.1 10.0.0.9",
    "srun": """while [[ $1 == --* ]]; do flags+=" $1"; shift; done
echo "srun$flags" >>{log}; exec "$@" """,
    "ray": """[[ $1 == health-check ]] && exit 0
echo "$(printf '%q ' ray "$@")" >>{log}; trap 'exit 0' TERM; sleep 60 & wait""",
    "tandem": """echo "$(printf '%q ' tandem "$@")" >>{log}
[[ $1 == serve ]] && echo >{serves}; exit 0""",
}


def test_every_machine_gets_a_place_and_the_end_of_the_time_finishes_what_runs(tmp_path: Path) -> None:
    log, serves = tmp_path / "log", tmp_path / "serves"
    subprocess.run(["mkfifo", str(serves)], check=True)
    for name, script in FAKES.items():
        text = script.replace("{log}", str(log)).replace("{serves}", str(serves))
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = subprocess.Popen(
        ["bash", str(SCRIPT), "tandem.yaml"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "one,two,three", "SLURM_CPUS_ON_NODE": "8"},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        subprocess.run(["cat", str(serves)], timeout=60, check=True)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=60) == 0
    finally:
        subprocess.run(["pkill", "-KILL", "--session", str(job.pid)], check=False)
    lines = [shlex.split(line) for line in log.read_text().splitlines()]
    rays = {line[line.index("--resources") + 1]: line for line in lines if line[0] == "ray"}
    assert set(rays) == {'{"prefill": 1}', '{"decode": 1}'}
    assert "--head" in rays['{"prefill": 1}']
    assert [line[line.index("--address") + 1] for line in lines if "--block" in line and "--address" in line] == [
        "10.0.0.1:6379"
    ] * 2
    assert [line[1] for line in lines if line[0] == "tandem"] == ["serve", "down"]
    for line in lines:
        assert line[0] != "tandem" or make_parser().parse_args(line[1:]).address == "10.0.0.1:6379"
    named = [flag for line in lines if line[0] == "srun" for flag in line if flag.startswith("--nodelist=")]
    assert {"--nodelist=one", "--nodelist=two", "--nodelist=three"} == set(named)


def test_its_flags_are_rays() -> None:
    import_ray()
    from ray.scripts.scripts import cli

    text = SCRIPT.read_text(encoding="utf-8")
    for command in ("start", "health-check"):
        known = {name for option in cli.commands[command].params for name in option.opts}
        lines = [line for line in text.splitlines() if f" ray {command} " in line]
        assert lines
        for line in lines:
            used = set(re.findall(r"(?<= )--[a-z-]+", line.split(f" ray {command} ")[1]))
            assert used <= known

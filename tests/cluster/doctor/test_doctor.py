"""The doctor's findings about given machines."""

from __future__ import annotations

import io
import json
import resource
import socket
import subprocess
import threading
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from tandem.base.wings import is_there
from tandem.cluster.cli import main
from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.doctor import command as doctor
from tandem.cluster.doctor import machine_checks
from tandem.cluster.doctor.machine_checks import Finding, Level
from tandem.cluster.pools.placement import LocalMachine
from tandem.engine.config import CacheConfig, ModelConfig
from tandem.kvtransfer import nixl_check
from tandem.kvtransfer.nixl.lanes import lanes_in
from tandem.kvtransfer.nixl_check import NixlReport

GIB = 1 << 30
replace = msgspec.structs.replace


def printed(*findings: Finding) -> str:
    out = io.StringIO()
    doctor.show(findings, Console(file=out, width=200))
    return out.getvalue()


def test_every_finding_has_its_level_and_advice_only_when_something_is_wrong_and_the_worst_decides() -> None:
    fine, short = Finding("ray", Level.OK, "2.60.0", "not shown"), Finding("shm", Level.WARN, "64 MiB", "give it more")
    text = printed(fine, short, Finding("port", Level.FAIL, "8000", "choose another"))
    for said in ("OK   ray", "WARN shm", "→ give it more", "FAIL port", "cannot run here"):
        assert said in text
    assert "not shown" not in text
    assert "Tandem can run here." in printed(fine)
    assert "with the limits above" in printed(short)


SLOW_RAY = "The current node timed out during startup. Some of the raylet failed to startup.."


@pytest.mark.parametrize(
    ("what", "load", "level"),
    [
        (SLOW_RAY, 7.0, Level.WARN),
        ("nothing happened within 90 s", 7.0, Level.WARN),
        (SLOW_RAY, 0.5, Level.FAIL),
        ("no space left on device", 7.0, Level.FAIL),
    ],
)
def test_a_busy_machine_is_told_from_a_broken_one(
    what: str, load: float, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "this_machine", lambda: LocalMachine(cores=(0, 1)))
    found = machine_checks.failed(what, "look at its logs", load=load)
    assert found.level is level
    text = printed(found)
    if level is Level.WARN:
        assert "this machine is busy (load 7 on 2 cores)" in text
        assert "→ try again when the machine is quieter" in text
        assert "Whether Tandem can run here is not known" in text
    else:
        assert "cannot run here" in text


def test_what_a_failed_process_says_has_no_class_and_no_second_full_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it send its reader to the doctor, who is here already."""
    said = f"Traceback (most recent call last):\ntandem.base.errors.Unavailable: {SLOW_RAY}"
    child = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(machine_checks, "run_python", lambda script: child)
    text = printed(machine_checks.check_ray())
    assert "it does not start: The current node timed out during startup." in text
    assert all(word not in text for word in ("Unavailable", "..", "doctor"))


@pytest.mark.slow
def test_what_lies_in_the_current_folder_is_no_fault_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow: imports torch."""
    (tmp_path / "torch.py").write_text("raise SystemExit('a program of the user')")
    monkeypatch.chdir(tmp_path)
    assert machine_checks.check_torch().level is Level.OK


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on() -> None:
    def broken() -> Finding:
        raise RuntimeError("oops")

    said: list[list[str]] = []
    ended = threading.Event()
    slow = {"b": lambda: Finding("b", Level.OK, "fine" if ended.wait(10) else "never")}
    found = doctor.run_checks({"a": broken, **slow}, lambda left: (said.append(left), ended.set()))
    assert said == [["b"], []], "who waits sees what for"
    assert [(finding.subject, finding.level) for finding in found] == [("a", Level.FAIL), ("b", Level.OK)]
    assert "RuntimeError: oops" in found[0].what


def test_an_interrupt_waits_for_no_check() -> None:
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()

    def quick() -> Finding:
        begun.wait(10)
        return Finding("quick", Level.OK, "")

    def slow() -> Finding:
        begun.set()
        released.wait(10)
        ended.set()
        return Finding("slow", Level.OK, "")

    def interrupted(left: list[str]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        doctor.run_checks({"quick": quick, "slow": slow}, interrupted)
    assert not ended.is_set()
    released.set()


@pytest.mark.slow
def test_a_machine_that_runs_these_tests_is_well_enough() -> None:
    """Everything but NIXL, which has a test of its own. Slow: processes of their own start Ray and import torch."""
    config = replace(TandemConfig(), router=replace(TandemConfig().router, port=0))
    checks = machine_checks.checks_for(config)
    del checks["nixl"]
    assert [finding for finding in doctor.run_checks(checks) if finding.level is Level.FAIL] == []


@pytest.mark.parametrize(
    ("free", "kv", "level"),
    [(1, None, Level.FAIL), (2, None, Level.WARN), (8, None, Level.OK), (8, 8 * GIB, Level.FAIL)],
)
def test_memory_that_is_too_little_fails_and_what_may_just_suffice_is_worth_a_warning(
    free: int, kv: int | None, level: Level
) -> None:
    machine = LocalMachine(cores=(0, 1), free_memory=free * GIB)
    found = machine_checks.check_memory(TandemConfig(cache=CacheConfig(memory_bytes=kv)), machine)
    assert found.level is level
    assert kv is None or "--kv-memory" in found.advice


def test_a_container_has_the_cores_of_its_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "this_machine", lambda: LocalMachine(cores=tuple(range(64)), quota=2))
    found = machine_checks.check_cores(TandemConfig())
    assert found.level is Level.OK
    assert found.what == "2 cores, 0 usable GPUs (by the container's quota; the machine has 64 cores)"
    for prefill, said in ((PoolConfig(nodes=8), "too many for 2 cores"), (PoolConfig(nodes=1, threads=9), "")):
        pools = PoolsConfig(prefill=prefill, decode=PoolConfig(nodes=1))
        refused = machine_checks.check_cores(TandemConfig(pools=pools))
        assert refused.level is Level.FAIL
        assert said in refused.advice


def test_what_else_this_machine_may_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    (tmp_path / "file").touch()
    for found, level in (
        (machine_checks.check_open_files(1024), Level.WARN),
        (machine_checks.check_open_files(65536), Level.OK),
        (machine_checks.check_open_files(resource.RLIM_INFINITY), Level.OK),
        (machine_checks.check_shared_memory(tmp_path / "shm"), Level.WARN),
        (machine_checks.check_disk(tmp_path / "file" / "models"), Level.FAIL),
        (machine_checks.check_model("/no/such/model"), Level.FAIL),
        (machine_checks.check_model("org/name"), Level.OK),  # one to be fetched
        (machine_checks.check_compiler(), Level.WARN),
    ):
        assert found.level is level, found
    assert "g++" in found.advice
    assert machine_checks.check_disk(Path("/proc/no/writes/here")).level in (Level.FAIL, Level.WARN)


def test_a_taken_port_fails_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        router = replace(TandemConfig().router, port=listener.getsockname()[1])
        found = machine_checks.check_port(replace(TandemConfig(), router=router))
    assert found.level is Level.FAIL
    assert "--port" in found.advice


@pytest.mark.slow
def test_nixl_is_tried_and_not_only_looked_for() -> None:
    """Slow: a process of its own loads NIXL and moves a megabyte."""
    found = machine_checks.check_nixl()
    assert found.level in (Level.OK, Level.WARN), found
    assert "UCX moves host memory at" in found.what


def test_transports_are_read_from_what_ucx_logs() -> None:
    log = (
        "ucp_worker.c:1997 UCX  INFO    A self cfg#0 rma_am(sysv/memory)  am(sysv/memory)\n"
        "ucp_worker.c:1997 UCX  INFO    A intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)\n"
        "ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from somewhere)\n"
    )
    assert lanes_in(log) == ["cma/memory", "tcp/lo"]


def test_the_command_names_each_machine_that_it_should_reach(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checks of this machine alone have their own tests, and take a while."""
    monkeypatch.setattr(doctor, "checks_for", lambda config: {})
    main(["doctor", "-o", "json", "--reach", "127.0.0.1", "--reach", "localhost"])
    subjects = {finding["subject"] for finding in json.loads(capsys.readouterr().out)}
    assert {"clock", "to 127.0.0.1", "to localhost"} <= subjects


def test_doctor_names_the_lanes_of_a_gpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = "UCX moves the GPU's memory at 90.0 GB/s over cuda_ipc/cuda"
    for report, level, said in (
        (NixlReport("1.5", ["UCX"], ["cuda_ipc/cuda"], 90.0), Level.OK, fast),
        (NixlReport("1.5", ["UCX"], ["tcp/lo"], 1.0), Level.WARN, "host memory"),
        (NixlReport("1.5", error="no CUDA"), Level.WARN, "no CUDA"),
    ):
        monkeypatch.setattr(nixl_check, "check", lambda timeout, device, report=report: report)
        found = machine_checks.check_nixl_on_gpu()
        assert found.level is level
        assert said in found.what


@pytest.mark.skipif(not is_there("tandem.engine.vllm"), reason="vllm is not here")
def test_another_engine_that_cannot_run_is_a_finding(tmp_path: Path) -> None:
    model = ModelConfig(path="smollm2", engine="vllm", engine_python=str(tmp_path / "python"))
    found = doctor.check_other_engine(TandemConfig(model=model))
    assert (found.level, found.what) == (Level.FAIL, "vllm cannot run")
    assert str(tmp_path) in found.advice

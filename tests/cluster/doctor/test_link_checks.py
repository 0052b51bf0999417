"""The doctor's findings about the links between given machines and GPUs."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cluster.config import PoolConfig, PoolsConfig
from tandem.cluster.doctor import link_checks
from tandem.cluster.doctor.machine_checks import Level

NO_LIMIT = resource.RLIM_INFINITY
IPC_LOCK = 1 << 14


def device(folder: Path, name: str, *states: str) -> None:
    for number, state in enumerate(states, 1):
        port = folder / name / "ports" / str(number)
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (port / "link_layer").write_text("InfiniBand\n")


@pytest.mark.parametrize(
    ("ports", "has_verbs", "level", "what", "advice"),
    [
        ({}, True, Level.OK, "over TCP", ""),
        ({"mlx5_0": ["4: ACTIVE", "1: DOWN"]}, True, Level.OK, "mlx5_0:1 InfiniBand 400 Gb/sec active", ""),
        ({"mlx5_0": ["4: ACTIVE"]}, False, Level.WARN, "", "--device /dev/infiniband"),  # a container does not have it
        (
            {"mlx5_0": ["1: DOWN"], "mlx5_1": ["2: INIT"]}, True, Level.WARN,
            "no port is active: mlx5_0:1 InfiniBand 400 Gb/sec down, mlx5_1:1 InfiniBand 400 Gb/sec init", "ibstat",
        ),
    ],
    ids=["no device", "an active port", "no way to it", "all ports are down"],
)  # fmt: skip
def test_rdma_ports_are_named_with_their_rates_and_what_is_wrong_with_them(
    tmp_path: Path, ports: dict[str, list[str]], has_verbs: bool, level: Level, what: str, advice: str
) -> None:
    for name, states in ports.items():
        device(tmp_path / "sys", name, *states)
    (tmp_path / "dev").mkdir()
    if has_verbs:
        (tmp_path / "dev" / "uverbs0").touch()
    found = link_checks.check_rdma(tmp_path / "sys", tmp_path / "dev")
    assert found.level is level
    assert what in found.what
    assert advice in found.advice


@pytest.mark.parametrize(
    ("limit", "capabilities", "devices", "level"),
    [
        (8 << 20, 0, ["mlx5_0"], Level.WARN),
        (8 << 20, 0, [], Level.OK),
        (8 << 20, IPC_LOCK, ["mlx5_0"], Level.OK),
        (NO_LIMIT, 0, ["mlx5_0"], Level.OK),
    ],
)
def test_a_limit_on_locked_memory_matters_where_rdma_is(
    limit: int, capabilities: int, devices: list[str], level: Level
) -> None:
    found = link_checks.check_locked_memory(limit, capabilities, devices)
    assert found.level is level
    assert ("ulimit -l unlimited" in found.advice) == (level is Level.WARN)


def test_the_capabilities_of_this_process_are_read() -> None:
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if "CapEff" in each]
    assert f"{link_checks.own_capabilities():016x}" == line.split()[1]


@pytest.mark.parametrize(
    ("count", "apart", "what"),
    [
        (1, [], "fewer than two usable GPUs"),
        (4, [], "each of 4 GPUs reads the memory of each other one"),
        (2, [(0, 1), (1, 0)], "2 of 2 ways between GPUs pass through host memory: 0 → 1, 1 → 0"),
        (4, [(a, b) for a in range(4) for b in range(4) if a != b], "0 → 1, 0 → 2, 0 → 3, 1 → 0, 1 → 2, 1 → 3 …"),
    ],
)  # fmt: skip
def test_gpus_that_do_not_reach_each_other_are_named(count: int, apart: list[tuple[int, int]], what: str) -> None:
    found = link_checks.judge_gpu_peers(count, apart)
    assert what in found.what
    assert found.level is (Level.WARN if apart else Level.OK)


@pytest.mark.slow
def test_peers_of_a_machine_without_gpus_are_none() -> None:
    """Slow: a process of its own imports torch."""
    assert link_checks.check_gpu_peers().level is Level.OK


def test_a_clock_that_nothing_keeps_in_time_is_worth_a_warning() -> None:
    assert link_checks.check_clock(is_kept=True, error_us=12_000).what == "kept in time, to within 12 ms"
    lost = link_checks.check_clock(is_kept=False, error_us=16_000_000)
    assert (lost.level, lost.what) == (Level.WARN, "nothing keeps this machine's clock in time")
    assert "chrony" in lost.advice
    drifting = link_checks.check_clock(is_kept=True, error_us=1_500_000)
    assert (drifting.level, drifting.what) == (Level.WARN, "this machine's clock may be wrong by 1.5 s")
    is_kept, error_us = link_checks.kernel_clock()
    assert isinstance(is_kept, bool)
    assert error_us >= 0


@pytest.fixture
def open_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_machine_is_reached_where_it_accepts_and_where_it_refuses(open_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as once:
        free_port = once.getsockname()[1]
    found = link_checks.check_reach("127.0.0.1", [open_port, free_port])
    assert found.level is Level.OK
    assert str(open_port) in found.what
    assert link_checks.check_reach("no-such-host.invalid", [1]).level is Level.FAIL


def test_ports_that_are_not_answered_are_named_with_what_to_open(
    open_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = socket.create_connection

    def behind_a_firewall(address: tuple[str, int], within_s: float) -> socket.socket:
        if address[1] == 6379:
            raise TimeoutError
        if address[1] == 8076:
            raise OSError(113, "No route to host")
        return connect(address, within_s)

    monkeypatch.setattr(socket, "create_connection", behind_a_firewall)
    found = link_checks.check_reach("127.0.0.1", [6379, 8076, open_port])
    assert found.level is Level.FAIL
    assert found.what == "not reached on some TCP ports: 6379 (no answer), 8076 (No route to host)"
    assert "tandem.nft" in found.advice
    assert "any port" in link_checks.check_reach("127.0.0.1", [6379]).what


def test_ports_are_probed_where_the_system_takes_them_from_on_each_machine_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "range").write_text("40000\t50000\n")
    assert link_checks.probed_ports(tmp_path / "range") == [6379, 8076, 40000, 45000, 50000]
    assert link_checks.probed_ports(tmp_path / "missing")[2:] == [32768, 46883, 60999]
    checks = link_checks.link_checks(["10.0.0.2", "10.0.0.3"], PoolsConfig())
    assert {"rdma", "memlock", "clock", "to 10.0.0.2", "to 10.0.0.3"} <= checks.keys()


def test_ranks_on_several_machines_need_the_others_to_be_reached() -> None:
    pools = PoolsConfig(prefill=PoolConfig(nodes=1, tensor_parallel=2, machines=2))
    found = link_checks.link_checks([], pools)["ranks"]()
    assert found.level is Level.WARN
    assert found.what.startswith("nodes of pools.prefill have ranks on several machines, and no other")
    assert link_checks.link_checks(["10.0.0.2"], pools)["ranks"]().level is Level.OK
    assert "ranks" not in link_checks.link_checks([], PoolsConfig())

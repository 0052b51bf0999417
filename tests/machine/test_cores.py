"""A container's quota of processor time counts as cores, whichever version of control groups says it; and what memory is free."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.machine import resources
from tandem.machine.resources import core_quota, folders_of, free_memory, usable_cores


@pytest.fixture(autouse=True)
def sixty_four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))


class Kernel:
    """What a kernel says in /proc and /sys, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.membership = folder / "cgroup"
        self.mount = folder / "sys"
        self.membership.write_text("")

    def says(self, path: str, **files: str) -> None:
        (self.mount / path).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (self.mount / path / name.replace("__", ".")).write_text(content)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(tmp_path)
    monkeypatch.setattr(
        resources, "folders_of", lambda controller: folders_of(controller, kernel.membership, kernel.mount)
    )
    return kernel


def test_a_pod_with_two_cores_of_a_large_machine_has_two(kernel: Kernel) -> None:
    kernel.membership.write_text("0::/\n")
    for text, quota in (("200000 100000\n", 2), ("50000 100000\n", 1)):  # less than a core is one
        kernel.says("", cpu__max=text)
        assert (core_quota(), usable_cores()) == (quota, quota)


def test_the_tightest_of_the_groups_above_counts(kernel: Kernel) -> None:
    kernel.membership.write_text("0::/pods/one\n")
    kernel.says("pods/one", cpu__max="max 100000\n")
    kernel.says("pods", cpu__max="800000 100000\n")
    kernel.says("", cpu__max="1600000 100000\n")
    assert core_quota() == 8


def test_version_one_keeps_it_in_two_files(kernel: Kernel) -> None:
    kernel.membership.write_text("5:memory:/docker/id\n4:cpu,cpuacct:/docker/id\n0::/\n")
    kernel.says("cpu", cpu__cfs_quota_us="350000\n", cpu__cfs_period_us="100000\n")  # as seen from within
    kernel.says("memory", cpu__cfs_quota_us="100000\n", cpu__cfs_period_us="100000\n")  # not its business
    assert core_quota() == 3, "half a core is no core to wait for"


@pytest.mark.parametrize(
    "files",
    [
        {"cpu__max": "max 100000\n"},
        {"cpu__max": "6400000 100000\n"},
        {"cpu__max": "nonsense\n"},
        {"cpu__max": ""},
        {"cpu__cfs_quota_us": "-1\n", "cpu__cfs_period_us": "100000\n"},
        {"cpu__cfs_quota_us": "100000\n"},
        {"cpu__max": "100000 0\n"},
        {},
    ],
)
def test_without_a_limit_that_bites_all_cores_are_there(kernel: Kernel, files: dict[str, str]) -> None:
    kernel.membership.write_text("1:cpu:/\n0::/\n")
    kernel.says("", **files)
    kernel.says("cpu", **files)
    assert (core_quota(), usable_cores()) == (None, 64)


def test_a_kernel_without_control_groups_limits_nothing(kernel: Kernel) -> None:
    kernel.membership.unlink()
    assert core_quota() is None


IN_USE = "anon 10\ninactive_file 700\nactive_file 900\n"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"max": "5000\n", "current": "2000\n"}, 3000),
        ({"max": "5000", "current": "2000", "stat": IN_USE}, 3700),  # idle pages of files count as free
        ({"max": "1000", "current": "2000"}, 0),
        ({"max": "max\n", "current": "2000"}, 10_000),
    ],
)
def test_free_memory_is_what_the_group_leaves_if_that_is_less_than_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], free: int
) -> None:
    assert free_memory() > 0, "of this machine"
    for name, content in files.items():
        (tmp_path / f"memory.{name}").write_text(content)
    monkeypatch.setattr(resources, "folders_of", lambda controller: [tmp_path])
    monkeypatch.setattr(resources, "_machine_available", lambda: 10_000)
    assert free_memory() == free

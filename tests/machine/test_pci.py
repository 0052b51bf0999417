"""How near GPUs and RDMA devices are to each other, by trees of the kernel's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.machine.pci import Distance, distance, gpus, nearest, ports_near, rdma_devices
from tests.machine.pci_tree import gpu, rdma, two_sockets


def test_each_gpu_gets_the_device_on_its_switch(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    cards, devices = gpus(tmp_path), rdma_devices(tmp_path)
    assert [card.name for card in cards] == ["0000:15:18.0", "0000:15:28.0", "0000:97:18.0", "0000:97:28.0"]
    assert [ports_near(card.name, tmp_path) for card in cards] == [(f"mlx5_{number}:1",) for number in range(4)]
    assert {nearest(card, devices)[1] for card in cards} == {Distance.SWITCH}


def test_what_lies_between_two_devices(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    first, devices = gpus(tmp_path)[0], {each.device.name: each.device for each in rdma_devices(tmp_path)}
    assert distance(first, devices["mlx5_0"]) is Distance.SWITCH
    assert distance(first, devices["mlx5_1"]) is Distance.ROOT
    assert distance(first, devices["mlx5_9"]) is Distance.ROOT
    assert distance(first, devices["mlx5_2"]) is Distance.MACHINE


def test_a_processor_has_several_roots(tmp_path: Path) -> None:
    gpu(tmp_path, "pci0000:15/0000:15:01.0/0000:16:00.0", 0)
    rdma(tmp_path, "mlx5_0", "pci0000:26/0000:26:01.0/0000:27:00.0", 0)
    rdma(tmp_path, "mlx5_1", "pci0000:a6/0000:a6:01.0/0000:a7:00.0", 1)
    (card,) = gpus(tmp_path)
    near, how = nearest(card, rdma_devices(tmp_path))
    assert ([each.device.name for each in near], how) == (["mlx5_0"], Distance.NUMA)
    assert ports_near(card.name, tmp_path) == ("mlx5_0:1",)


@pytest.mark.parametrize("lacks", [{"state": "1: DOWN"}, {"may_open": False}])
def test_a_port_that_is_down_or_that_a_pod_was_not_given_is_not_the_nearest(
    tmp_path: Path, lacks: dict[str, Any]
) -> None:
    gpu(tmp_path, "pci0000:15/0000:15:01.0/0000:16:00.0", 0)
    rdma(tmp_path, "mlx5_0", "pci0000:15/0000:15:01.0/0000:17:00.0", 0, **lacks)
    rdma(tmp_path, "mlx5_1", "pci0000:26/0000:26:01.0/0000:27:00.0", 0)
    rdma(tmp_path, "mlx5_2", "pci0000:a6/0000:a6:01.0/0000:a7:00.0", 1)
    assert ports_near("0000:16:00.0", tmp_path) == ("mlx5_1:1",)


def test_where_all_are_alike_nothing_is_chosen(tmp_path: Path) -> None:
    """As in virtual machines, where each device has a root port and the kernel knows no NUMA node."""
    gpu(tmp_path, "pci0000:00/0000:00:02.0")
    rdma(tmp_path, "mlx5_0", "pci0000:00/0000:00:05.0")
    rdma(tmp_path, "mlx5_1", "pci0000:00/0000:00:06.0")
    assert ports_near("0000:00:02.0", tmp_path) == ()
    assert ports_near("0000:77:00.0", tmp_path) == ()
    assert ports_near("0000:00:02.0", tmp_path / "not there") == ()

"""A node on a GPU hands over through the RDMA device beside it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from tandem.kvtransfer.nixl import transport
from tandem.kvtransfer.nixl.interfaces import listening_at
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.node import near
from tests.machine.pci_tree import two_sockets


class Driver:
    """What libcuda says. CUDA's numbers may be others than the bus's."""

    cards = ("00000000:97:28.0", "0000:15:18.0")

    def __init__(self) -> None:
        self.fails_with = 0

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self.fails_with

    def cuDeviceGet(self, card: Any, ordinal: int) -> int:
        ctypes.cast(card, ctypes.POINTER(ctypes.c_int)).contents.value = ordinal
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, room: int, card: ctypes.c_int) -> int:
        text.value = self.cards[card.value].upper().encode()
        assert len(text.value) < room
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(near, "_load", lambda: made)
    return made


def test_a_node_on_a_gpu_names_the_device_beside_it(tmp_path: Path, driver: Driver) -> None:
    two_sockets(tmp_path)
    assert near.near_device("cuda:0", tmp_path) == ("mlx5_3:1",)
    assert near.near_device("cuda", tmp_path) == ("mlx5_3:1",)
    assert near.near_device("cuda:1", tmp_path) == ("mlx5_0:1",)
    assert near.near_device("cpu", tmp_path) == ()


def test_a_driver_that_says_nothing_leaves_the_choice_to_ucx(
    tmp_path: Path, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    two_sockets(tmp_path)
    driver.fails_with = 100
    assert near.near_device("cuda:0", tmp_path) == ()
    assert "CUDA's driver ended with 100" in caplog.text


def test_an_agent_is_made_with_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, tuple[str, ...]]] = []

    def noted(host: str, near: tuple[str, ...]) -> object:
        given.append((host, near))
        return listening_at(host, near)

    monkeypatch.setattr("tandem.kvtransfer.nixl.transport.listening_at", noted)
    agent = transport.NixlAgent("here", NixlOptions(), near=("mlx5_3:1",))
    agent.close()
    assert given == [("127.0.0.1", ("mlx5_3:1",))]

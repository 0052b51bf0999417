"""UCX listens at the node's own address, and nowhere else."""

from __future__ import annotations

import os
import socket

import pytest

from tandem.kvtransfer.nixl import interfaces
from tandem.kvtransfer.nixl.interfaces import DEVICES, addresses, devices_for, listening_at
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.kvtransfer.nixl.transport import NixlAgent
from tests.listening import listening_addresses

LAB = {"127.0.0.1": "lo", "::1": "lo", "10.0.0.5": "eth1", "10.9.0.5": "eth0", "fd00::5": "eth1"}


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICES, raising=False)
    monkeypatch.setattr(interfaces, "addresses", lambda: LAB)
    monkeypatch.setattr(interfaces.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1")])  # type: ignore[attr-defined]


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize(
    ("host", "devices"),
    [("127.0.0.1", "lo"), ("::1", "lo"), ("10.0.0.5", "^eth0,lo"), ("fd00::5", "^eth0,lo"), ("10.1.1.1", None)],
)
def test_all_but_the_interfaces_of_other_addresses(host: str, devices: str | None) -> None:
    """Names that are no network interfaces are ignored: RDMA devices are not named."""
    assert devices_for(host) == devices
    with listening_at(host):
        assert os.environ.get(DEVICES) == devices
    assert DEVICES not in os.environ


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize(
    ("host", "devices"),
    [
        ("127.0.0.1", "lo"),  # its peers are on this machine
        ("10.0.0.5", "eth1,mlx5_3:1"),
        ("fd00::5", "eth1,mlx5_3:1"),
        ("10.1.1.1", None),
    ],
)
def test_of_rdma_devices_the_nearest_alone(host: str, devices: str | None) -> None:
    with listening_at(host, ["mlx5_3:1"]):
        assert os.environ.get(DEVICES) == devices


@pytest.mark.usefixtures("lab")
def test_an_address_that_is_on_no_interface_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with listening_at("10.1.1.1"):
        pass
    assert "no interface has this node's address 10.1.1.1" in caplog.text


@pytest.mark.usefixtures("lab")
def test_what_the_operator_has_set_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICES, "mlx5_0:1")
    with listening_at("127.0.0.1"):
        assert os.environ[DEVICES] == "mlx5_0:1"
    assert os.environ[DEVICES] == "mlx5_0:1"


def test_this_machine_knows_its_addresses() -> None:
    found = addresses()
    assert found["127.0.0.1"] == "lo"
    assert set(found.values()) <= {name for _, name in socket.if_nameindex()}


def test_an_agent_listens_at_its_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICES, raising=False)
    before = listening_addresses()
    agent = NixlAgent("here", NixlOptions())
    try:
        opened = listening_addresses() - before
        assert opened
        assert {host for host, _ in opened} == {"127.0.0.1"}
    finally:
        agent.close()

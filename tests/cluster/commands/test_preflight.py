"""What cannot work is found before anything is loaded."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from cluster.commands.preflight import check_address, check_before_start
from cluster.config import PoolConfig, PoolsConfig, TandemConfig
from cluster.pools.placement import Machine
from cluster.settings import SettingsError
from engine.config import ModelConfig
from kvtransfer.base import TransferConfig
from wire.errors import ConfigurationError

replace = msgspec.structs.replace


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_taken_port_is_named_with_what_to_do(taken_port: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"port {taken_port} on 127\.0\.0\.1 is taken.*--port"):
        check_address("127.0.0.1", taken_port)


def test_a_free_port_is_fine_and_stays_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)
    check_address("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("host", "why"),
    [("192.0.2.77", "not an address of this machine"), ("no such host!", "is not an address")],
)
def test_an_address_that_is_not_here_is_refused(host: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        check_address(host, 0)


def test_everything_that_is_wrong_is_said_at_once(taken_port: int) -> None:
    config = TandemConfig(
        model=ModelConfig(path="/nowhere/at/all"),
        pools=PoolsConfig(prefill=PoolConfig(nodes=1, threads=64)),
    )
    config = replace(config, router=replace(config.router, port=taken_port))
    with pytest.raises(SettingsError) as raised:
        check_before_start(config, Machine(cores=(0, 1)))
    assert len(raised.value.mistakes) == 3


def test_a_connector_that_is_not_there_is_refused_where_one_is_needed(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    config = TandemConfig(
        model=ModelConfig(path=str(tmp_path)), transfer=TransferConfig(connector="carrier-pigeon")
    )
    config = replace(config, router=replace(config.router, port=0))
    with pytest.raises(SettingsError, match="there is no connector 'carrier-pigeon'"):
        check_before_start(config, Machine(cores=(0, 1)))
    nobody_sends = PoolsConfig(prefill=PoolConfig(), decode=PoolConfig(), aggregated=PoolConfig(nodes=1))
    check_before_start(replace(config, pools=nobody_sends), Machine(cores=(0, 1)))


def test_a_good_configuration_passes(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    config = TandemConfig(model=ModelConfig(path=str(tmp_path)))
    check_before_start(replace(config, router=replace(config.router, port=0)), Machine(cores=(0, 1)))

"""Preflight finds a configuration that cannot work before anything is loaded."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import msgspec
import pytest

from tandem.cluster.commands.preflight import check_address, check_before_start
from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.pools.placement import LocalMachine
from tandem.cluster.settings import SettingsError
from tandem.engine.config import CacheConfig, ModelConfig
from tandem.kvtransfer.config import TransferConfig
from tandem.wire.errors import ConfigurationError

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
        check_before_start(config, LocalMachine(cores=(0, 1)))
    assert len(raised.value.mistakes) == 3


def make_model(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "not here")
    config = TandemConfig(model=ModelConfig(path=str(tmp_path)))
    with pytest.raises(SettingsError, match=r"has no weights: there is no \.safetensors file"):
        check_before_start(replace(config, router=replace(config.router, port=0)), LocalMachine(cores=(0, 1)))


def test_a_connector_that_is_not_there_is_refused_where_one_is_needed(tmp_path: Path) -> None:
    make_model(tmp_path)
    config = TandemConfig(
        model=ModelConfig(path=str(tmp_path)), transfer=TransferConfig(connector="carrier-pigeon")
    )
    config = replace(config, router=replace(config.router, port=0))
    with pytest.raises(SettingsError, match="there is no connector 'carrier-pigeon'"):
        check_before_start(config, LocalMachine(cores=(0, 1)))
    nobody_sends = PoolsConfig(prefill=PoolConfig(), decode=PoolConfig(), aggregated=PoolConfig(nodes=1))
    check_before_start(replace(config, pools=nobody_sends), LocalMachine(cores=(0, 1)))


def test_a_good_configuration_passes(tmp_path: Path) -> None:
    make_model(tmp_path)
    config = TandemConfig(model=ModelConfig(path=str(tmp_path)))
    check_before_start(replace(config, router=replace(config.router, port=0)), LocalMachine(cores=(0, 1)))


def test_caches_that_the_machine_cannot_hold_are_found_before_a_node_loads(tmp_path: Path) -> None:
    make_model(tmp_path)
    config = TandemConfig(model=ModelConfig(path=str(tmp_path)), cache=CacheConfig(memory_bytes=900 << 30))
    config = replace(config, router=replace(config.router, port=0))
    machine = LocalMachine(cores=(0, 1), free_memory=20 << 30)
    with pytest.raises(
        SettingsError, match=r"20\.0 GiB is free on this machine: give each at most .*--kv-memory"
    ):
        check_before_start(config, machine)
    check_before_start(config, dataclasses.replace(machine, gpus=1))
    on_cpu = replace(config, model=replace(config.model, device="cpu"))
    with pytest.raises(SettingsError, match="is free on this machine"):
        check_before_start(on_cpu, dataclasses.replace(machine, gpus=1))


def test_weights_that_are_here_are_weighed(tmp_path: Path) -> None:
    make_model(tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(40 << 30)  # a hole: it takes no space
    config = TandemConfig(model=ModelConfig(path=str(tmp_path), device="cpu"))
    config = replace(config, router=replace(config.router, port=0))
    with pytest.raises(SettingsError, match=r"2 nodes need at least 61\.2 GiB"):
        check_before_start(config, LocalMachine(cores=(0, 1), free_memory=50 << 30))

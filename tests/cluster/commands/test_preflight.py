"""Preflight finds a configuration that cannot work before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.commands.model_checks import check_hub
from tandem.cluster.commands.preflight import check_address, check_before_start, check_device
from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.pools.placement import LocalMachine
from tandem.cluster.settings.combined import SettingsError
from tandem.engine.config import CacheConfig, ModelConfig
from tandem.kvtransfer.config import TransferConfig

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
    ("host", "why"), [("192.0.2.77", "not an address of this machine"), ("no such host!", "is not an address")]
)
def test_an_address_that_is_not_here_is_refused(host: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        check_address(host, 0)


def test_everything_that_is_wrong_is_said_at_once(taken_port: int) -> None:
    config = TandemConfig(
        model=ModelConfig(path="/nowhere/at/all"), pools=PoolsConfig(prefill=PoolConfig(nodes=1, threads=64))
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
    config = TandemConfig(model=ModelConfig(path=str(tmp_path)), transfer=TransferConfig(connector="carrier-pigeon"))
    config = replace(config, router=replace(config.router, port=0))
    with pytest.raises(SettingsError, match="there is no connector 'carrier-pigeon'"):
        check_before_start(config, LocalMachine(cores=(0, 1)))
    nobody_sends = PoolsConfig(prefill=PoolConfig(), decode=PoolConfig(), aggregated=PoolConfig(nodes=1))
    check_before_start(replace(config, pools=nobody_sends), LocalMachine(cores=(0, 1)))


def test_caches_that_the_machine_cannot_hold_are_found_before_a_node_loads(tmp_path: Path) -> None:
    make_model(tmp_path)
    config = TandemConfig(model=ModelConfig(path=str(tmp_path)), cache=CacheConfig(memory_bytes=900 << 30))
    config = replace(config, router=replace(config.router, port=0))
    machine = LocalMachine(cores=(0, 1), free_memory=20 << 30)
    with pytest.raises(SettingsError, match=r"20\.0 GiB is free on this machine: give each at most .*--kv-memory"):
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


def config_of(folder: Path, **settings: Any) -> TandemConfig:
    """One node of the model in this folder, at any port."""
    model = replace(ModelConfig(path=str(folder)), **settings)
    config = TandemConfig(model=model, pools=PoolsConfig(aggregated=PoolConfig(nodes=1)))
    return replace(config, router=replace(config.router, port=0))


def mistakes(config: TandemConfig) -> list[str]:
    try:
        check_before_start(config, LocalMachine(cores=(0, 1)))
    except SettingsError as error:
        return list(error.mistakes)
    return []


def test_paths_that_are_not_there_are_said_together_before_anything_starts(tmp_path: Path) -> None:
    make_model(tmp_path)
    config = config_of(tmp_path, adapters={"sql": "/nofolder"}, draft="/nodraft")
    router = replace(config.router, chat_template="/nofile.jinja", tls_certificate="/no.pem", tls_key="/nokey.pem")
    said = mistakes(replace(config, router=router))
    assert len(said) == 4
    for told in ("there is no folder '/nofolder'", "model.draft '/nodraft'", "'/nofile.jinja'", "/no.pem"):
        assert any(told in line for line in said), told


def test_a_cache_folder_that_cannot_be_made_is_named_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path)
    monkeypatch.setenv("TANDEM_CACHE", "/proc/none")
    (said,) = mistakes(config_of(tmp_path))
    assert "/proc/none/models, cannot be written" in said
    assert "TANDEM_CACHE" in said


@pytest.mark.parametrize(
    ("name", "gpus", "environ", "there", "why"),
    [
        ("cuda", 0, {}, (), "leave it at auto"),
        ("cuda", 0, {"CUDA_VISIBLE_DEVICES": ""}, ("nvidia0",), "CUDA_VISIBLE_DEVICES hides all"),
        ("cuda:2", 2, {}, ("nvidia0", "nvidia1"), "the last CUDA device here is cuda:1"),
    ],
)
def test_a_device_that_is_not_here_is_refused(
    name: str, gpus: int, environ: dict[str, str], there: tuple[str, ...], why: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.13.0")
    monkeypatch.setenv("PATH", "/nowhere")
    for device in there:
        (tmp_path / device).touch()
    with pytest.raises(ConfigurationError, match=f"model.device is {name}, but .*{why}"):
        check_device(name, gpus, environ, tmp_path)


@pytest.mark.parametrize("there", ["nvidia0", "dxg"])
def test_a_device_that_may_be_here_is_left_to_torch(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.13.0")
    (tmp_path / there).touch()
    check_device("cuda", 0, {}, tmp_path)
    check_device("cpu", 0, {}, tmp_path / "nothing")


PLAIN = {
    "model_type": "llama", "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "hidden_size": 576, "max_position_embeddings": 8192,
}  # fmt: skip


def described(folder: Path, asked: int | None, cache: CacheConfig | None = None, **fields: Any) -> list[str]:
    make_model(folder)
    (folder / "config.json").write_text(json.dumps({**PLAIN, **fields}))
    config = config_of(folder)
    scheduler = replace(config.scheduler, max_model_len=asked)
    return mistakes(replace(config, scheduler=scheduler, cache=cache or config.cache))


def test_a_context_longer_than_the_models_is_refused(tmp_path: Path) -> None:
    (said,) = described(tmp_path, 100_000)
    assert said.startswith("max_model_len is 100000, and the model's context is 8192 tokens: ask for at most 8192")
    assert described(tmp_path, 8192) == described(tmp_path, None) == []


@pytest.mark.parametrize("scaling", ["rope_scaling", "rope_parameters"])
def test_a_context_that_rope_scaling_extends_may_be_asked_for(scaling: str, tmp_path: Path) -> None:
    name = "type" if scaling == "rope_scaling" else "rope_type"
    rope = {name: "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    assert described(tmp_path, 32_768, **{scaling: rope}) == []
    assert described(tmp_path, 32_769, **{scaling: rope}) != []


def test_a_cache_smaller_than_one_request_is_refused(tmp_path: Path) -> None:
    small, enough = (CacheConfig(memory_bytes=mib << 20) for mib in (64, 181))
    (said,) = described(tmp_path, None, small)
    assert (
        "of each prefill node needs 180.0 MiB for one request of 8192 tokens, and may use 64.0 MiB: raise --kv-memory"
        in said
    )
    assert described(tmp_path, None, enough) == described(tmp_path, 2048, small) == []


def hub(status: int | httpx.HTTPError) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        if isinstance(status, httpx.HTTPError):
            raise status
        return httpx.Response(status)

    return httpx.MockTransport(answer)


@pytest.mark.parametrize(
    ("status", "environ", "why"),
    [
        (httpx.ConnectError("no route to host"), {}, "cannot be reached .no route to host.: fetch it where"),
        (httpx.ConnectTimeout(""), {}, "cannot be reached .no answer."),
        (401, {}, "does not have owner/name, or it needs a token"),
        (200, {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_said_before_anything_starts(
    status: int | httpx.HTTPError, environ: dict[str, str], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        check_hub("owner/name", {"HF_HOME": str(tmp_path), **environ}, hub(status))


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "what:is:this", "gopher://h:1"])
def test_a_proxy_that_only_the_hubs_own_client_may_understand_is_left_to_it(
    proxy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    check_hub("owner/name", {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"})


def test_a_model_that_may_be_fetched_is_not_refused(tmp_path: Path) -> None:
    environ = {"HF_HOME": str(tmp_path)}
    check_hub("owner/name", environ, hub(200))
    check_hub("owner/name", environ, hub(503))
    check_hub("owner/name", {**environ, "HF_TOKEN": "hf_x"}, hub(401))
    (tmp_path / "hub/models--owner--name/snapshots/abc").mkdir(parents=True)
    check_hub("owner/name@main", environ, hub(httpx.ConnectError("no network")))
    check_hub("smollm2", environ, hub(httpx.ConnectError("no network")))

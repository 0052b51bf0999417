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
from tandem.kvtransfer.config import TierConfig, TransferConfig

replace = msgspec.structs.replace


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_free_port_is_fine_and_stays_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)
    check_address("127.0.0.1", 0)
    with pytest.raises(ConfigurationError, match="is not an address"):
        check_address("no such host!", 0)


def test_everything_that_is_wrong_is_said_at_once(taken_port: int) -> None:
    config = TandemConfig(
        model=ModelConfig(path="/nowhere/at/all"), pools=PoolsConfig(prefill=PoolConfig(nodes=1, threads=64))
    )
    config = replace(config, router=replace(config.router, port=taken_port))
    with pytest.raises(SettingsError) as raised:
        check_before_start(config, LocalMachine(cores=(0, 1)))
    assert len(raised.value.mistakes) == 3


def make_model(folder: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors(0))


def safetensors(size: int) -> bytes:
    """A file with one tensor of this size."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def config_of(folder: Path, **settings: Any) -> TandemConfig:
    """One node of the model in this folder, at any port."""
    model = replace(ModelConfig(path=str(folder)), **settings)
    return at_any_port(TandemConfig(model=model, pools=PoolsConfig(aggregated=PoolConfig(nodes=1))))


def at_any_port(config: TandemConfig) -> TandemConfig:
    return replace(config, router=replace(config.router, port=0))


def mistakes(config: TandemConfig, machine: LocalMachine | None = None) -> list[str]:
    try:
        check_before_start(config, machine or LocalMachine(cores=(0, 1)))
    except SettingsError as error:
        return list(error.mistakes)
    return []


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (said,) = mistakes(config_of(tmp_path))
    assert "has no weights: there is no .safetensors file" in said
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "not here")
    (said,) = mistakes(config_of(tmp_path))
    assert "has 0 of 1 weight files; model.safetensors is missing" in said


def test_all_parts_of_a_gguf_file_count_for_the_memory(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for part in (1, 2):
        with (tmp_path / f"m-0000{part}-of-00002.gguf").open("wb") as file:
            file.write(b"GGUF\3\0\0\0")
            file.truncate(3 << 30)
    config = config_of(tmp_path / "m-00001-of-00002.gguf")
    assert mistakes(config, LocalMachine(cores=(0, 1), free_memory=64 << 30)) == []
    (said,) = mistakes(config, LocalMachine(cores=(0, 1), free_memory=10 << 30))
    assert "need at least 15.1 GiB" in said


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 269060552\n"
INDEX = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", safetensors(4000)[:2000], "is cut off: it has 2.0 KiB of 4.0 KiB"),
        ("model.safetensors", safetensors(4000)[:20], "is cut off"),
        ("model.safetensors", b"", "is cut off"),
        ("model.safetensors", POINTER, "is a pointer of Git LFS, and not the file: run `git lfs pull`"),
        ("tokenizer.json", POINTER, "is a pointer of Git LFS"),
        ("model.safetensors", b"<html>Not Found</html>", "is no safetensors file"),
        (
            "model.safetensors.index.json",
            json.dumps(INDEX).encode(),
            "has 1 of 2 weight files; model-00002-of-00002.saf",
        ),
        ("config.json", b'{"model_type": ', "config.json cannot be read"),
        ("config.json", b"[]", "config.json must hold a JSON object"),
        ("tokenizer.json", None, "has no tokenizer"),
    ],
)
def test_half_a_download_is_said_before_anything_starts(
    file: str, content: bytes | None, said: str, tmp_path: Path
) -> None:
    make_model(tmp_path)
    assert mistakes(config_of(tmp_path)) == []
    (tmp_path / file).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / file).write_bytes(content)
    (told,) = mistakes(config_of(tmp_path))
    assert said in told
    assert str(tmp_path) in told


def test_a_gguf_file_that_is_none_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for name, content in (("whole.gguf", b"GGUF\3\0\0\0"), ("page.gguf", b"<html>"), ("pointer.gguf", POINTER)):
        (tmp_path / name).write_bytes(content)
    assert mistakes(config_of(tmp_path / "whole.gguf")) == []
    assert "is no GGUF file" in mistakes(config_of(tmp_path / "page.gguf"))[0]
    assert "is a pointer of Git LFS" in mistakes(config_of(tmp_path / "pointer.gguf"))[0]


def test_a_connector_that_is_not_there_is_refused_where_one_is_needed(tmp_path: Path) -> None:
    make_model(tmp_path)
    config = TandemConfig(model=ModelConfig(path=str(tmp_path)), transfer=TransferConfig(connector="carrier-pigeon"))
    (said,) = mistakes(at_any_port(config))
    assert "there is no connector 'carrier-pigeon'" in said
    nobody_sends = PoolsConfig(prefill=PoolConfig(), decode=PoolConfig(), aggregated=PoolConfig(nodes=1))
    assert mistakes(at_any_port(replace(config, pools=nobody_sends))) == []


def test_caches_that_the_machine_cannot_hold_are_found_before_a_node_loads(tmp_path: Path) -> None:
    make_model(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    config = at_any_port(TandemConfig(model=model, cache=CacheConfig(memory_bytes=900 << 30)))
    machine = LocalMachine(cores=(0, 1), free_memory=20 << 30)
    (said,) = mistakes(config, machine)
    assert "20.0 GiB is free on this machine: give each at most" in said
    assert mistakes(config, dataclasses.replace(machine, gpus=1)) == []
    on_cpu = replace(config, model=replace(model, device="cpu"))
    assert "is free on this machine" in mistakes(on_cpu, dataclasses.replace(machine, gpus=1))[0]
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(40 << 30)  # a hole: it takes no space
    weighed = replace(on_cpu, cache=CacheConfig())
    (said,) = mistakes(weighed, dataclasses.replace(machine, free_memory=50 << 30))
    assert "2 nodes need at least 61.2 GiB" in said


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


def test_a_disk_without_room_for_the_tiers_or_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path)

    def with_disk(folder: Path, size: int) -> TandemConfig:
        return replace(config_of(tmp_path), cache=CacheConfig(tiers=[TierConfig(disk=str(folder), size=size)]))

    assert mistakes(with_disk(tmp_path / "kv", 1 << 20)) == []
    (said,) = mistakes(with_disk(tmp_path / "kv", 1 << 60))
    assert "kv has room for" in said
    assert "give them less" in said
    (said,) = mistakes(with_disk(tmp_path / "config.json", 1 << 20))
    assert "config.json' cannot be used: File exists" in said


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


def test_a_name_that_is_no_device_is_refused_before_a_node_starts() -> None:
    for name in ("gpu", "cuda:x", "tpu", "cuda:0,1"):
        with pytest.raises(ConfigurationError, match=f"must be auto, cpu, cuda or cuda:N, not {name}"):
            check_device(name, 1)


def test_a_device_that_may_be_here_is_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.13.0")
    for there in ("nvidia0", "dxg"):
        (tmp_path / there).mkdir()
        (tmp_path / there / there).touch()
        check_device("cuda", 0, {}, tmp_path / there)
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
    """The cache's first block is for none."""
    small, little_more, enough = (CacheConfig(memory_bytes=mib << 20) for mib in (64, 180, 181))
    (said,) = described(tmp_path, None, small)
    assert (
        "of each prefill node needs 180.4 MiB for one request of 8192 tokens, and may use 64.0 MiB: raise --kv-memory"
        in said
    )
    assert described(tmp_path, None, little_more) != []
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


def test_a_proxy_that_only_the_hubs_own_client_may_understand_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for proxy in ("socks5://127.0.0.1:1", "what:is:this", "gopher://h:1"):
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

"""Whole nodes whose ranks keep their KV apart, in processes as on GPUs, behind a router."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from tandem.base.errors import ConfigurationError
from tandem.decode_node.node import DecodeNode
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem.kvtransfer.config import ChecksumPolicy, TierConfig, TransferConfig
from tandem.node.config import NodeConfig
from tandem.prefill_node.node import PrefillNode
from tandem.router.config import Heartbeat, LocalPrefill, RouterConfig
from tandem.wire.nodes import NodeInfo, Role
from tests.engine.model import tiny
from tests.router.conftest import LETTERS, RunningRouter

OUTPUT_TOKENS = 8
PATIENCE_S = 60.0


class ApartNode:
    def __init__(self, role: Role, folder: str, width: int, block_size: int) -> None:
        config = config_of(role, folder, width, block_size)
        self.node = PrefillNode(config) if role is Role.PREFILL else DecodeNode(config)
        self.node.caches_apart = True
        before = {*psutil.Process().children()}
        info = self.node.start()
        self.ranks = {*psutil.Process().children()} - before
        self.info: NodeInfo = msgspec.structs.replace(info, tokenizer="")

    def kill(self) -> None:
        self.node.stop()


def config_of(
    role: Role,
    folder: str,
    width: int,
    block_size: int = 16,
    tiers: list[TierConfig] | None = None,
    remote: bool = False,
) -> NodeConfig:
    engine = EngineConfig(
        model=ModelConfig(path=folder, served_name="fake", dtype="float32", device="cpu", threads=1),
        cache=CacheConfig(block_size=block_size, memory_bytes=4 << 20, tiers=tiers or [], remote=remote, hash_seed="t"),
        scheduler=SchedulerConfig(max_num_batched_tokens=48),
    )
    return NodeConfig(
        f"{role.value}-0",
        role,
        engine=engine,
        transfer=TransferConfig(checksums=ChecksumPolicy.ALL, lease_s=4.0),
        tensor_parallel=width,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("apart"))


@pytest.fixture
def cluster(model_folder: str, folder: Path) -> Iterator[RunningRouter]:
    config = RouterConfig(
        tokenizer_path=model_folder,
        model_name="fake",
        port=0,
        heartbeat=Heartbeat(silence=20.0, starved=20.0),
        local_prefill=LocalPrefill.NEVER,
    )
    running = RunningRouter(config, LETTERS, eos=1)
    running.nodes["prefill-0"] = ApartNode(Role.PREFILL, str(folder), 2, 16)  # type: ignore[assignment]
    running.nodes["decode-0"] = ApartNode(Role.DECODE, str(folder), 2, 8)  # type: ignore[assignment]
    running.announce()
    running.wait_ready()
    yield running
    running.close()


def ask(cluster: RunningRouter, prompt: list[int]) -> list[int]:
    body = {
        "model": "fake",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    with cluster.new_client() as client:
        answer = client.post("/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def test_answers_are_those_of_generate_and_a_lost_rank_costs_its_node(cluster: RunningRouter, folder: Path) -> None:
    chance = random.Random(5)
    prompts = [[chance.randrange(3, tiny.VOCAB) for _ in range(length)] for length in (9, 40, 121)]
    expected = [found.tokens for found in tiny.reference(folder, prompts, OUTPUT_TOKENS)]
    for prompt, answer in zip(prompts, expected, strict=True):
        assert ask(cluster, prompt) == answer
    prefill, decode = (cluster.nodes[name].node for name in ("prefill-0", "decode-0"))  # type: ignore[attr-defined]
    assert decode.status().counters.prompt_tokens_computed == 0
    assert decode.status().counters.transfers_finished == {"received": len(prompts)}
    (rank,) = cluster.nodes["prefill-0"].ranks  # type: ignore[attr-defined]
    rank.kill()
    until = time.monotonic() + PATIENCE_S
    while not prefill.status().detail:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert "rank 1 has ended" in prefill.status().detail
    began = time.monotonic()
    prefill.stop()
    assert time.monotonic() < began + PATIENCE_S / 2, "it does not wait for what cannot come"


def test_what_would_copy_one_ranks_heads_is_refused(folder: Path) -> None:
    node = PrefillNode(config_of(Role.PREFILL, str(folder), 2, tiers=[TierConfig(cpu=1 << 20)], remote=True))
    node.caches_apart = True
    try:
        with pytest.raises(ConfigurationError, match=r"cache\.remote would copy one rank's"):
            node.start()
    finally:
        node.stop()


def test_a_connector_that_knows_no_shards_is_refused(folder: Path) -> None:
    config = config_of(Role.PREFILL, str(folder), 2)
    config = msgspec.structs.replace(config, transfer=TransferConfig(connector="nccl"))
    node = PrefillNode(config)
    node.caches_apart = True
    try:
        with pytest.raises(
            ConfigurationError, match=r"transfer\.connector is nccl, .* set transfer\.connector to nixl"
        ):
            node.start()
    finally:
        node.stop()

"""A whole node with a cache tier: what it reports of the tier, and which settings it refuses to start with."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from tandem.base.errors import ConfigurationError
from tandem.decode_node.node import DecodeRules
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.loading import load_runner
from tandem.engine.model.runner import ModelRunner
from tandem.kvtransfer.config import TierConfig
from tandem.kvtransfer.multi import create_connector
from tandem.node.config import NodeConfig
from tandem.node.engine_node import EngineNode
from tandem.wire.endpoints import parse_endpoint
from tandem.wire.nodes import PeerAddress, Role
from tandem.wire.requests import KVTransferParams, Submit, TransferRole
from tandem.wire.sampling import SamplingParams
from tests.engine.model import tiny
from tests.more import more
from tests.node.test_roles import PATIENCE_S, ROUTER, FakeChannel

CACHE = CacheConfig(block_size=4, memory_bytes=1 << 20)


def runner_of(kind: str, folder: Path) -> ModelRunner:
    model = ModelConfig(path=str(tiny.save(kind, folder)), dtype="float32", device="cpu", threads=1)
    return load_runner(model, CACHE, SchedulerConfig(max_model_len=120))


def node_with(
    tiers: list[TierConfig], *, shares: bool = False, checkpoint_tokens: int = 256
) -> tuple[EngineNode, list[FakeChannel]]:
    """An aggregated node, so without peers."""
    channels: list[FakeChannel] = []

    def open_channel(host: str, epoch: int, *, name: str) -> FakeChannel:
        channels.append(FakeChannel(host, epoch))
        return channels[-1]

    cache = msgspec.structs.replace(
        CACHE, tiers=tiers, remote=shares, mirror=shares, checkpoint_tokens=checkpoint_tokens
    )
    config = NodeConfig("n0", Role.AGGREGATED, engine=EngineConfig(cache=cache))
    return EngineNode(config, DecodeRules(Role.AGGREGATED), open_channel, create_connector), channels


def test_a_node_that_does_both_keeps_copies_and_says_so(tmp_path: Path) -> None:
    node, channels = node_with([TierConfig(cpu=1 << 20)])
    node.start(runner=runner_of("llama", tmp_path))
    try:
        first = channels[0].answer_to("a", 50)
        wait_until_free(node)
        assert isinstance(node._engine, Engine)
        node._engine.scheduler.state.cache.reset_prefix_cache()
        assert channels[0].answer_to("b", 50) == first
        wait_until_free(node)
        status = node.status()
        (tier,) = status.tiers
        assert tier.total_bytes <= 1 << 20
        assert tier.used_bytes > 0
        assert (tier.asked_tokens, tier.found_tokens, tier.loaded_tokens) == (2 * 48, 48, 48)
        assert tier.loading_seconds > 0
        assert status.counters.prompt_tokens_loaded == 48
        peer = PeerAddress("p", 1, "tcp://p")
        transfer = KVTransferParams("t", TransferRole.CONSUME, peer)
        sampling = SamplingParams(max_tokens=1, temperature=0)
        channels[0].receive(
            Submit("c", ROUTER, prompt_token_ids=[5, 6], sampling=sampling, timeout_s=PATIENCE_S, transfer=transfer)
        )
        refused = channels[0].chunks.get(timeout=PATIENCE_S)
        assert refused.error is not None
        assert "has no peers" in refused.error.message
    finally:
        node.stop()


def wait_until_free(node: EngineNode) -> None:
    until = time.monotonic() + PATIENCE_S
    while (status := node.status()).free_blocks < status.total_blocks:
        assert time.monotonic() < until, "some block is held"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("kind", "factor", "said"),
    [
        ("mamba2", 2, r"cache.tiers: block_factor must be 1 for this model, which keeps recurrent states"),
        ("gemma3", 2, r"cache.tiers: block_factor must be 1 for this model, which has attention windows"),
    ],
)
def test_what_a_tier_cannot_keep_is_refused_with_the_reason(tmp_path: Path, kind: str, factor: int, said: str) -> None:
    node, _ = node_with([TierConfig(cpu=1 << 20, block_factor=factor)])
    with pytest.raises(ConfigurationError, match=said):
        node.start(runner=runner_of(kind, tmp_path))


@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        ("llama", False),
        ("llama", True),
        ("gemma3", True),
        ("mamba2", True),
        *more([("llama4", True), ("mamba2", False)]),
    ],
)
def test_a_node_says_where_others_read_its_tier(tmp_path: Path, kind: str, shares: bool) -> None:
    node, _ = node_with([TierConfig(cpu=1 << 20), TierConfig(disk=str(tmp_path), size=1 << 20)], shares=shares)
    info = node.start(runner=runner_of(kind, tmp_path / kind))
    try:
        there = parse_endpoint(info.tier_endpoint)
        assert (there is not None and there.host == "127.0.0.1", info.mirrors) == (shares, shares)
    finally:
        node.stop()


def test_more_memory_than_there_is_is_refused(tmp_path: Path) -> None:
    node, _ = node_with([TierConfig(cpu=1 << 50)])
    with pytest.raises(ConfigurationError, match=r"cache.tiers asks for 1073741824 MiB of host memory"):
        node.start(runner=runner_of("llama", tmp_path))

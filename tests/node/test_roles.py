"""A process changes its role: the new node takes over the loaded model of the old one."""

from __future__ import annotations

import queue
from collections.abc import Callable

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, InternalError, Unavailable
from tandem.decode_node.node import DecodeRules
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.config import CacheConfig, EngineConfig
from tandem.kvtransfer.base import ConnectorContext, ConnectorMetadata, ConnectorOutput, KVCacheMemory, WorkerConnector
from tandem.kvtransfer.config import TransferConfig
from tandem.node.config import NodeConfig
from tandem.node.engine_node import EngineNode
from tandem.node.requests import RoleRules
from tandem.prefill_node.node import PrefillRules
from tandem.wire.lines import Position
from tandem.wire.nodes import NodeState, Role
from tandem.wire.requests import Submit, TokenBatch, TokenChunk, ToNode
from tandem.wire.sampling import FinishReason, SamplingParams
from tests.engine.engine_fakes import BLOCK_SIZE, FakeRunner

PATIENCE_S = 10.0
ROUTER = "tcp://router:1"


class FakeChannel:
    """A channel that records what the node sends."""

    opened = 0

    def __init__(self, host: str, epoch: int) -> None:
        FakeChannel.opened += 1
        self.endpoint = f"tcp://{host}:{FakeChannel.opened}"
        self.malformed = 0
        self.gaps = 0
        self.died: str | None = None
        self.chunks: queue.SimpleQueue[TokenChunk] = queue.SimpleQueue()
        self.closed = False

    def listen(self, on_message: Callable[[ToNode], None], **_: object) -> None:
        self.receive = on_message

    def send(self, endpoint: str, message: msgspec.Struct) -> None:
        if isinstance(message, TokenBatch):
            for chunk in message.chunks:
                self.chunks.put(chunk)

    def received(self, endpoint: str) -> Position:
        return Position(0, 0)

    def forget(self, endpoint: str) -> None: ...

    def close(self) -> None:
        self.closed = True

    def answer_to(self, request_id: str, prompt: int) -> list[int]:
        sampling = SamplingParams(max_tokens=3, temperature=0)
        tokens = list(range(10, 10 + prompt))
        self.receive(Submit(request_id, ROUTER, prompt_token_ids=tokens, sampling=sampling, timeout_s=PATIENCE_S))
        answer: list[int] = []
        while True:
            chunk = self.chunks.get(timeout=PATIENCE_S)
            assert chunk.error is None
            answer += chunk.token_ids
            if chunk.finish is not None:
                assert chunk.finish is FinishReason.LENGTH
                return answer


def make_node(rules: RoleRules) -> tuple[EngineNode, list[FakeChannel]]:
    channels: list[FakeChannel] = []

    def open_channel(host: str, epoch: int, *, name: str) -> FakeChannel:
        channels.append(FakeChannel(host, epoch))
        return channels[-1]

    config = NodeConfig("n0", rules.role, engine=EngineConfig(cache=CacheConfig(block_size=BLOCK_SIZE)))
    return EngineNode(config, rules, open_channel, lambda context: pytest.fail("no connector was asked for")), channels


def test_the_node_that_takes_over_serves_with_the_same_runner_and_knows_nothing_of_what_was() -> None:
    runner = FakeRunner()
    first, (channels) = make_node(PrefillRules())
    before = first.start(runner=runner)
    expected = channels[0].answer_to("a", 5)
    assert first.drain(PATIENCE_S)
    released = first.release()
    assert released is runner
    assert runner.tokens == {}, "the engine that told it of its requests tells it no more"
    assert channels[0].closed

    second, others = make_node(DecodeRules(Role.DECODE))
    try:
        after = second.start(runner=released)
        assert after.epoch != before.epoch
        assert after.request_endpoint != before.request_endpoint
        assert (before.role, after.role) == (Role.PREFILL, Role.DECODE)
        assert others[0].answer_to("a", 5) == expected
        assert second.status().state is NodeState.READY
    finally:
        second.stop()


def test_a_node_that_has_not_started_has_nothing_to_give() -> None:
    node, _ = make_node(PrefillRules())
    with pytest.raises(Unavailable, match="has not started"):
        node.release()


def test_the_model_of_a_node_that_failed_is_not_trusted() -> None:
    runner = FakeRunner()
    node, channels = make_node(DecodeRules(Role.DECODE))
    node.start(runner=runner)
    runner.error = RuntimeError("boom")
    channels[0].receive(
        Submit("a", ROUTER, prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=1), timeout_s=PATIENCE_S)
    )
    assert channels[0].chunks.get(timeout=PATIENCE_S).finish is FinishReason.ERROR
    assert not node.drain(PATIENCE_S), "a node that failed comes to no rest, and says so at once"
    with pytest.raises(InternalError, match="boom"):
        node.release()
    node.stop()


def test_under_a_quota_a_node_is_bound_to_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    def cores_of_node() -> list[int]:
        config = NodeConfig("n", Role.DECODE, cores=[0, 1])
        return EngineNode(config, PrefillRules(), None, None).config.cores  # type: ignore[arg-type]

    monkeypatch.setattr("tandem.node.engine_node.core_quota", lambda: None)
    assert cores_of_node() == [0, 1]
    monkeypatch.setattr("tandem.node.engine_node.core_quota", lambda: 2)
    assert cores_of_node() == []


class NoStates(WorkerConnector):
    """A connector's worker half that cannot hand over recurrent states."""

    closed = False

    def register_kv_caches(self, memory: KVCacheMemory) -> None: ...
    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None: ...
    def get_finished(self, finished_req_ids: set[str]) -> ConnectorOutput:
        return ConnectorOutput()

    def shutdown(self) -> None:
        self.closed = True


@pytest.mark.parametrize("rules", [PrefillRules(), DecodeRules(Role.DECODE)])
def test_states_that_a_connector_does_not_hand_over_keep_a_node_from_its_role(rules: RoleRules) -> None:
    runner = FakeRunner()
    state = KVCacheGroup(AttentionKind.STATE, BLOCK_SIZE, (1,), blocks_per_request=3)
    runner.info = msgspec.structs.replace(runner.info, groups=(*runner.info.groups, state))
    worker_half, asked = NoStates(), []

    def connector(context: ConnectorContext) -> tuple[None, NoStates]:
        asked.append(context.state_blocks)
        return None, worker_half

    config = NodeConfig(
        "n0", rules.role, engine=EngineConfig(cache=CacheConfig(block_size=BLOCK_SIZE)), transfer=TransferConfig()
    )
    node = EngineNode(config, rules, lambda *_, **__: pytest.fail("it was opened"), connector)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="recurrent states, which it does not hand over"):
        node.start(runner=runner)
    assert worker_half.closed
    assert asked == [3]

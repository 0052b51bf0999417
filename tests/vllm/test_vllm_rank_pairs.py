"""Two engines of several vLLM ranks in one process, without a cluster: blocks go from the ranks of one to those of the other. These tests
run in vLLM's own environment."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tandem.base.errors import NodeLost
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem.engine.contract import NodeEngine
from tandem.engine.request import Request
from tandem.engine.vllm.wing import make
from tandem.engine.wings import Connect
from tandem.kvtransfer.base import ConnectorContext
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.multi import create_connector
from tandem.wire.nodes import PeerAddress
from tandem.wire.requests import KVTransferParams, RequestFacts, TransferRole
from tandem.wire.sampling import SamplingParams
from tests.vllm.conftest import ARGS, CONTEXT, STEP_TOKENS, answers_alone, prompt

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="this Python has no vLLM: `make test-vllm` runs these in one that has",
    ),
    pytest.mark.timeout(1800),
]
TOKENS, PATIENCE_S = 16, 600.0
LENGTHS = (1, 31, 32, 33, 64, 100, 256, 257, 700, 1500, 3000)
PROMPTS = [prompt(length, 3) for length in LENGTHS]
PATIENT = TransferConfig(lease_s=60.0, patience_s=120.0)


class RanksNode:
    def __init__(self, model: Path, name: str, ranks: int) -> None:
        self._woken = threading.Event()
        others = set(multiprocessing.active_children())
        settings = ModelConfig(
            path=str(model),
            dtype="float32",
            device="cpu",
            engine="vllm",
            engine_args={**ARGS, "tensor_parallel_size": ranks},
        )
        config = EngineConfig(
            model=settings,
            cache=CacheConfig(memory_bytes=64 << 20),
            scheduler=SchedulerConfig(max_model_len=CONTEXT, max_num_batched_tokens=STEP_TOKENS, max_num_seqs=16),
        )

        def halves(groups: Sequence[Any], lines: Sequence[Any]) -> Any:
            context = ConnectorContext(name, ranks, "127.0.0.1", groups[0].block_size, PATIENT, self._woken.set)
            return create_connector(msgspec.structs.replace(context, groups=groups, rank_lines=lines))

        self.engine: NodeEngine = make(config, settings, lambda what, fraction: None, Connect(halves, fails=False))
        self.address = PeerAddress(name, ranks, self.engine.peer_endpoint)
        self.processes = sorted(set(multiprocessing.active_children()) - others, key=lambda each: each.pid or 0)

    def add(self, name: str, tokens: list[int], count: int, role: TransferRole, peer: RanksNode) -> None:
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        facts = RequestFacts(prompt_token_ids=tokens, sampling=sampling)
        self.engine.add_request(Request(name, facts, transfer=KVTransferParams(f"t-{name}", role, peer.address)))

    @property
    def is_at_rest(self) -> bool:
        stats = self.engine.stats()
        return not (stats.running or stats.waiting) and stats.free_blocks == stats.total_blocks


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    return answers_alone(tiny_model, PROMPTS, TOKENS)


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> Iterator[tuple[RanksNode, RanksNode]]:
    """The producer has one rank, in this process, and the consumer two."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    consumer = RanksNode(tiny_model, "consumer", 2)
    producer = RanksNode(tiny_model, "producer", 1)
    yield producer, consumer
    producer.engine.shutdown()
    consumer.engine.shutdown()


def until(condition: Callable[[], bool], *nodes: RanksNode) -> dict[str, list[int]]:
    """Steps the nodes in turns. Returns the tokens of the last one's answers."""
    deadline = time.monotonic() + PATIENCE_S
    found: defaultdict[str, list[int]] = defaultdict(list)
    while not condition():
        assert time.monotonic() < deadline, [node.engine.stats() for node in nodes]
        for node in nodes:
            for chunk in node.engine.step().updates:
                assert chunk.error is None, chunk.error
                if node is nodes[-1]:
                    found[chunk.request_id] += chunk.token_ids
    return found


def hand_over(producer: RanksNode, consumer: RanksNode, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Returns when both nodes have all their blocks back."""
    for name, tokens in prompts.items():
        consumer.add(name, tokens, TOKENS, TransferRole.CONSUME, producer)
        producer.add(name, tokens, 1, TransferRole.PRODUCE, consumer)
    return until(lambda: producer.is_at_rest and consumer.is_at_rest, producer, consumer)


def test_answers_are_those_of_vllm_alone_and_every_block_comes_back(
    pair: tuple[RanksNode, RanksNode], expected: list[list[int]]
) -> None:
    producer, consumer = pair
    alone = [hand_over(producer, consumer, {f"a{i}": tokens})[f"a{i}"] for i, tokens in enumerate(PROMPTS)]
    assert alone == expected
    found = hand_over(producer, consumer, {f"b{i}": tokens for i, tokens in enumerate(PROMPTS)})
    assert [found[f"b{i}"] for i in range(len(PROMPTS))] == expected
    assert consumer.engine.transfer_stats().outcomes.get("received") == 2 * len(PROMPTS)
    assert consumer.engine.stats().prompt_tokens_computed == 0


def test_the_end_of_an_idle_ranks_process_is_an_error(pair: tuple[RanksNode, RanksNode]) -> None:
    _, consumer = pair
    assert len(consumer.processes) == 2
    assert consumer.engine.seconds_until_due() == 1.0, "vLLM does not wake its node"
    consumer.processes[1].kill()
    consumer.processes[1].join()
    with pytest.raises(NodeLost, match="a process of vLLM's ranks has ended"):
        until(lambda: False, consumer)


class CoreOfRanks:
    """What the engine touches of vLLM's core before and in a step."""

    def __init__(self, *, loses_rank: bool) -> None:
        self._loses_rank = loses_rank
        self.model_executor = SimpleNamespace(is_failed=False)
        self.structured_output_manager = SimpleNamespace(executor=None)
        self.scheduler: Any = SimpleNamespace(
            has_requests=lambda: True, kv_cache_config=SimpleNamespace(kv_cache_groups=[], num_blocks=1), newest=None
        )
        self.batch_queue = None

    def step_fn(self) -> Any:
        self.model_executor.is_failed = self._loses_rank
        raise RuntimeError("cancelled")


def engine_of(core: CoreOfRanks) -> NodeEngine:
    from tandem.engine.vllm.engine import VllmEngine

    info: Any = SimpleNamespace(max_model_len=100, num_blocks=1, groups=(), num_layers=1)
    return VllmEngine(core, info, lambda group: group)


def test_a_step_that_a_rank_does_not_survive_says_that_the_node_is_lost() -> None:
    engine = engine_of(CoreOfRanks(loses_rank=True))
    with pytest.raises(NodeLost, match="a process of vLLM's ranks has ended"):
        engine.step()


def test_an_idle_node_finds_out_by_itself() -> None:
    core = CoreOfRanks(loses_rank=True)
    engine = engine_of(core)
    core.scheduler.has_requests = lambda: False
    assert not engine.step().progressed
    assert engine.seconds_until_due() == 1.0
    core.model_executor.is_failed = True
    with pytest.raises(NodeLost):
        engine.step()


def test_another_error_stays_what_it_is() -> None:
    engine = engine_of(CoreOfRanks(loses_rank=False))
    with pytest.raises(RuntimeError, match="cancelled"):
        engine.step()

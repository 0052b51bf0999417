"""Two engines with the real model in one process, without Ray: what one computed, the other goes on from, whatever moves
it and however unlike their caches are; and a long prompt's layers leave while the next are computed."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import CacheConfig, ModelConfig, SchedulerConfig
from engine.core import Engine
from engine.model.loading import load_runner
from engine.request import Request
from engine.scheduling.scheduler import Scheduler
from kvtransfer.base import ConnectorContext, TransferConfig, TransferStats
from kvtransfer.registry import create_connector
from wire.nodes import PeerAddress
from wire.requests import KVTransferParams, TransferRole
from wire.sampling import SamplingParams

NEW_TOKENS = 8
epochs = itertools.count(900)


@dataclasses.dataclass
class OneEngine:
    engine: Engine
    woken: threading.Event
    address: PeerAddress | None

    @classmethod
    def start(cls, model: Path, name: str, block_size: int, transfer: TransferConfig | None) -> OneEngine:
        woken, epoch = threading.Event(), next(epochs)
        cache = CacheConfig(block_size=block_size, memory_bytes=512 << 20, prefix_caching=False)
        scheduler = SchedulerConfig()
        runner = load_runner(ModelConfig(path=str(model), dtype="float32", threads=1), cache, scheduler)
        planner, mover = None, None
        if transfer is not None:
            context = ConnectorContext(name, epoch, "127.0.0.1", block_size, transfer, woken.set)
            planner, mover = create_connector(context)
        info = runner.info
        made = Scheduler(
            scheduler, cache, info.groups, info.num_blocks, info.max_model_len, connector=planner
        )
        address = PeerAddress(name, epoch, mover.peer_endpoint) if mover is not None else None
        return cls(Engine(made, runner, mover), woken, address)

    def add(self, name: str, prompt: list[int], count: int, transfer: KVTransferParams | None) -> None:
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        self.engine.add_request(Request(name, prompt, sampling, transfer=transfer))

    def run(self, name: str, tokens: list[int], until: float) -> bool:
        """One step. True when the request has ended."""
        self.woken.clear()
        result = self.engine.step()
        for update in result.updates:
            assert update.error is None, update.error
            tokens += update.token_ids
            if update.finish is not None:
                return True
        assert time.monotonic() < until, f"{name} has {len(tokens)} tokens"
        if not result.progressed and not self.engine.scheduler.has_work():
            self.woken.wait(0.01)  # the other one may have something to do
        return False

    def stats(self) -> TransferStats:
        assert self.engine.worker is not None
        return self.engine.worker.stats()


def prompt_of(length: int) -> list[int]:
    return [1000 + 7 * number % 20_000 for number in range(length)]


@pytest.fixture(scope="module")
def alone(smollm2_path: Path) -> Iterator[OneEngine]:
    engine = OneEngine.start(smollm2_path, "alone", 16, None)
    yield engine
    engine.engine.shutdown()


@pytest.mark.parametrize(
    ("connector", "direction", "blocks"),
    [
        ("nixl", "push", (16, 16)),
        ("nixl", "push", (16, 32)),
        ("nixl", "push", (32, 16)),
        ("nixl", "pull", (16, 32)),
        ("nccl", "push", (16, 16)),
        ("nccl", "pull", (32, 16)),
    ],
)
def test_the_tokens_are_those_of_one_engine(
    smollm2_path: Path, alone: OneEngine, connector: str, direction: str, blocks: tuple[int, int]
) -> None:
    config = TransferConfig(connector=connector, direction=direction)
    producer, consumer = (
        OneEngine.start(smollm2_path, name, block_size, config)
        for name, block_size in zip("pc", blocks, strict=True)
    )
    try:
        for length in (37, 200, 777):
            expected: list[int] = []
            until = time.monotonic() + 60
            name, prompt = f"r{length}", prompt_of(length)
            alone.add(name, prompt, NEW_TOKENS, None)
            while not alone.run(name, expected, until):
                pass
            assert producer.address
            assert consumer.address
            consume = KVTransferParams(f"t{length}", TransferRole.CONSUME, producer.address)
            produce = KVTransferParams(f"t{length}", TransferRole.PRODUCE, consumer.address)
            tokens: list[int] = []
            first: list[int] = []
            consumer.add(name, prompt, NEW_TOKENS, consume)
            consumer.run(name, tokens, until)
            producer.add(name, prompt, 1, produce)
            while not consumer.run(name, tokens, until):
                producer.run(name, first, until)
            while producer.engine.scheduler.stats().held_blocks:
                producer.run(name, first, until)
            assert tokens == expected
        assert consumer.engine.scheduler.stats().prompt_tokens_computed == 0
        assert producer.stats().outcomes == {"sent": 3}
        if direction == "push":
            # Each prompt is one chunk: what overlaps are layers.
            assert producer.stats().bytes_overlapped > 0
    finally:
        producer.engine.shutdown()
        consumer.engine.shutdown()

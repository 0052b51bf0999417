"""Nodes of several ranks at random: a node of any kind reads prompts for a node of any other kind, and each has requests of its own beside
them. Ranks, and the threads that move their KV, are late wherever production has processes. Some prompts begin alike, some requests lose
their blocks, some are aborted in whatever phase they are, and tiers keep what was evicted. Each answer must be that of one rank alone, no
checksum may be wrong, and all blocks must come back.

A run follows from its number, but for the order in which threads run. TANDEM_RANK_RUNS=FIRST-LAST plays other runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tandem.engine.config import AsyncScheduling, SchedulerConfig
from tandem.engine.model.attention.gathered import GatheredCache
from tandem.engine.model.divided import division
from tandem.kvtransfer.config import TierConfig, TransferConfig
from tandem.kvtransfer.nixl.ranks.thread import RankTransfers
from tandem.kvtransfer.nixl.transport import NixlTransport
from tandem.kvtransfer.offload.cpu import CopyThread
from tandem.kvtransfer.offload.ranks import RankTiers
from tandem.node.ranks import group
from tandem.wire.requests import KVTransferParams, TransferRole
from tandem.wire.sampling import FinishReason, SamplingParams
from tests.engine.model import ranks_here, tiny
from tests.integration.one_engine import PATIENT, OneEngine, one_token
from tests.more import more

REQUESTS = 20
PATIENCE_S = 240.0


@dataclasses.dataclass(frozen=True)
class Way:
    width: int = 1
    stages: int = 1
    contexts: int = 1
    apart: bool = False


ONE = Way()
TENSOR = [Way(2), Way(2, apart=True), Way(4), Way(4, apart=True)]
STAGES = [Way(2, 2), Way(2, 2, apart=True), Way(4, 2), Way(4, 2, apart=True)]
CONTEXTS = [
    Way(2, contexts=2), Way(2, contexts=2, apart=True), Way(3, contexts=3), Way(3, contexts=3, apart=True),
    Way(4, contexts=2), Way(4, contexts=2, apart=True), Way(4, contexts=2, apart=True),
]  # fmt: skip
KINDS: dict[str, list[Way]] = {
    "wide-llama": [*TENSOR, *STAGES, *CONTEXTS],
    "gemma3": [*TENSOR, *STAGES, *CONTEXTS],
    "deepseek-v3": [*TENSOR, *STAGES, *CONTEXTS],
    "gemma3n": [ONE, CONTEXTS[0], CONTEXTS[1], CONTEXTS[3]],
    "mixtral": [*TENSOR, *STAGES, *CONTEXTS],
    "phi3": [*TENSOR, *STAGES, *CONTEXTS],
}


class CollectivesHere:
    """`GroupCollectives` among threads. No rank waits for another one longer than it must: a sum is there when all have given their part."""

    _queues: ClassVar[dict[tuple[str, str, int, int], queue.SimpleQueue[torch.Tensor]]] = {}
    _making = threading.Lock()

    def __init__(
        self, rank: int, size: int, rendezvous: str, _device: torch.device, *, host: str = "", name: str = "all"
    ) -> None:
        self._rank, self._size, self._where = rank, size, (rendezvous, name)
        self._others = [other for other in range(size) if other != rank]

    def _line(self, source: int, target: int) -> queue.SimpleQueue[torch.Tensor]:
        with self._making:
            return self._queues.setdefault((*self._where, source, target), queue.SimpleQueue())

    def _give(self, tensor: torch.Tensor, targets: Iterable[int]) -> None:
        given = tensor.clone()
        for target in targets:
            self._line(self._rank, target).put(given)

    def _take(self, source: int) -> torch.Tensor:
        return self._line(source, self._rank).get(timeout=PATIENCE_S)

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._give(tensor, self._others)
        return [tensor.clone() if rank == self._rank else self._take(rank) for rank in range(self._size)]

    def sum(self, tensor: torch.Tensor) -> None:
        first, *others = self._all(tensor)
        tensor.copy_(sum(others, first))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(tensor))

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self._rank:
            tensor.copy_(self._take(0))
        else:
            self._give(tensor, self._others)

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._give(tensor, [rank])

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        tensor.copy_(self._take(rank))


class Late:
    """Makes ranks and movers late, now and then."""

    def __init__(self, draw: random.Random, patch: pytest.MonkeyPatch) -> None:
        self._draw, self._lock = draw, threading.Lock()
        self._patch = patch
        self.chance, self.longest_s = draw.choice([(0.0, 0.0), (0.02, 0.02), (0.2, 0.002), (0.01, 0.05)])
        self.slow_rank = draw.choice(["", "MainThread", "rank 1", "rank 2", "rank 3"])

    def pause(self) -> None:
        with self._lock:
            name = threading.current_thread().name
            chance = 0.5 if name == self.slow_rank else self.chance
            longest = 0.003 if name == self.slow_rank else self.longest_s
            seconds = self._draw.random() * longest if self._draw.random() < chance else 0.0
        if seconds:
            time.sleep(seconds)

    def around(self, kind: type, name: str) -> None:
        work = getattr(kind, name)

        @functools.wraps(work)
        def late(*given: Any, **named: Any) -> Any:
            self.pause()
            result = work(*given, **named)
            self.pause()
            return result

        self._patch.setattr(kind, name, late)

    def begin(self) -> None:
        for name in ("sum", "gather", "broadcast", "send", "receive"):
            self.around(CollectivesHere, name)
        self.around(GatheredCache, "write")
        self.around(RankTransfers, "_handle")
        self.around(RankTiers, "_handle")
        self.around(CopyThread, "do")
        self.around(NixlTransport, "post")
        is_done, draw = NixlTransport.is_done, self._draw

        def seen_late(transport: NixlTransport, handle: Any) -> bool:
            return draw.random() > min(10 * self.chance, 0.8) and is_done(transport, handle)

        if self.chance:
            self._patch.setattr(NixlTransport, "is_done", seen_late)


@dataclasses.dataclass
class Asked:
    prompt: list[int]
    sampling: SamplingParams
    at: str  # "both", "p" or "c"
    lora: str | None = None
    answer: list[int] = dataclasses.field(default_factory=list)
    first: list[int] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None
    aborted: bool = False


class RankRun:
    def __init__(
        self, number: int, folder: Path, path_of: Callable[[str], Path], alone: Callable[[str, str], OneEngine]
    ) -> None:
        self.draw = draw = random.Random(number)
        self.kind, self.ways = self.draw_nodes()
        self.blocks = draw.choice([(4, 4), (4, 4), (8, 4), (4, 8)])
        self.kept = "fp8" if self.may_be_fp8() and draw.random() < 0.15 else "auto"
        self.path = path_of(self.kind)
        self.alone = alone(self.kind, self.kept)
        self.direction = draw.choice(["push", "push", "pull"])
        together = not any(way.apart for way in self.ways)
        connector = "nccl" if together and draw.random() < 0.4 else "nixl"
        options = {"layerwise_tokens": draw.choice(["1", "1", "0", "24"])}
        self.config = TransferConfig(
            **{
                **PATIENT,
                "lease_s": 4.0,
                "connector": connector,
                "direction": self.direction if connector == "nixl" else "push",
            },
            checksums=draw.choice(["all", "all", "off"]),
            options=options,
        )
        self.least_rows = draw.choice([1, 2, 8])
        self.folder = folder
        self.adapters: Mapping[str, str] = {}
        self.tiers: list[list[TierConfig]] = []
        self.asked: dict[str, Asked] = {}
        self.prefixes = [[draw.randrange(5, tiny.VOCAB) for _ in range(60)] for _ in range(3)]
        self.until = time.monotonic() + PATIENCE_S

    def draw_nodes(self) -> tuple[str, tuple[Way, Way]]:
        kind = self.draw.choice([*KINDS, "wide-llama"])
        ways = [ONE, *KINDS[kind]]
        drawn = self.draw.choice(ways), self.draw.choice(ways)
        return kind, drawn if drawn != (ONE, ONE) else (self.draw.choice(KINDS[kind]), ONE)

    def may_be_fp8(self) -> bool:
        return "deepseek" not in self.kind

    def draw_sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.draw.randrange(1, 14), temperature=0.0, ignore_eos=True)

    def draw_adapter(self) -> str | None:
        return None

    def __str__(self) -> str:
        return f"{self.kind} {self.kept}, {self.ways}, blocks {self.blocks}, {self.config}, {self.tiers}"

    def start(self, index: int) -> OneEngine:
        draw, way = self.draw, self.ways[index]
        info = self.alone.engine.runner.info
        block_bytes = self.alone.engine.runner.kv_cache[0].nbytes * self.blocks[index] // 4
        groups, states = len(info.groups), info.state_blocks
        sizes = (draw.choice([30, 200]) * groups + 20 * states, 300 * groups + 40 * states)
        cpu = TierConfig(cpu=sizes[0] * block_bytes * way.width)
        disk = TierConfig(disk=str(self.folder / f"{index}"), size=sizes[1] * (block_bytes + 4096) * way.width)
        tiers = draw.choice([[], [], [cpu], [disk], [cpu, disk]])
        self.tiers.append(tiers)
        num_blocks = draw.choice([42, 55, 80]) * 4 // self.blocks[index] * groups + 2 + 12 * states
        scheduler = SchedulerConfig(
            max_num_batched_tokens=draw.choice([16, 48, 90]),
            max_num_seqs=draw.choice([2, 4, 6]),
            max_model_len=160,
            num_speculative_tokens=draw.choice([0, 0, 2]),
            max_loras=len(self.adapters),
            async_scheduling=draw.choice([AsyncScheduling.ALWAYS, AsyncScheduling.NEVER]),
        )
        return OneEngine.start(
            self.path, "pc"[index], self.blocks[index], self.config, scheduler=scheduler, memory_bytes=8 << 20,
            kept=self.kept, prefix_caching=bool(tiers) or draw.random() < 0.8, tiers=tiers, num_blocks=num_blocks, width=way.width,
            stages=way.stages, contexts=way.contexts, apart=way.apart, checkpoint_tokens=32, adapters=self.adapters,
        )  # fmt: skip

    def run(self) -> str:
        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as both:
            for place in (group, ranks_here):
                patch.setattr(place, "GroupCollectives", CollectivesHere)
            self.nodes = [both.enter_context(self.start(index)) for index in (0, 1)]
            patch.setattr(division, "LEAST_ROWS", self.least_rows)
            Late(random.Random(self.draw.random()), patch).begin()
            self.serve()
            self.check()
            transfers = self.nodes[1].stats()
            assert not transfers.wrong_kv
            return f"{transfers.outcomes}, {transfers.blocks_checked} blocks checked"

    def serve(self) -> None:
        draw = self.draw
        names = [str(number) for number in range(REQUESTS)]
        later: list[tuple[int, Callable[[], None]]] = []  # the second half of a request that two nodes share
        turn = 0
        while names or later or any(node.engine.scheduler.has_unfinished_requests() for node in self.nodes):
            turn += 1
            if names and draw.random() < 0.25 and sum(len(n.engine.scheduler.requests) for n in self.nodes) < 12:
                self.ask(names.pop(0), later, turn)
            for due in [one for one in later if one[0] <= turn]:
                later.remove(due)
                due[1]()
            if draw.random() < 0.03:
                self.abort()
            if draw.random() < 0.005:
                draw.choice(self.nodes).engine.reset_prefix_cache()
            self.step(draw.choice(self.nodes))
            assert time.monotonic() < self.until, "it takes too long"
        while not all(map(self.is_empty, self.nodes)):
            for node in self.nodes:
                self.step(node)
            assert time.monotonic() < self.until, [node.stats() for node in self.nodes]

    @staticmethod
    def is_empty(node: OneEngine) -> bool:
        stats = node.engine.scheduler.stats()
        return stats.free_blocks == stats.total_blocks

    def ask(self, name: str, later: list[tuple[int, Callable[[], None]]], turn: int) -> None:
        draw = self.draw
        prompt = draw.choice(self.prefixes)[: draw.choice([0, 17, 32, 60])]
        prompt = prompt + [draw.randrange(5, tiny.VOCAB) for _ in range(draw.choice([1, 5, 30, 60]))]
        before = self.asked.get(str(draw.randrange(int(name) + 1)))
        if before is not None and before.answer and draw.random() < 0.4 and len(before.prompt) < 90:
            prompt = [*before.prompt, *before.answer, draw.randrange(5, tiny.VOCAB)]
        asked = Asked(
            prompt, self.draw_sampling(), draw.choice(["both", "both", "both", "p", "c"]), self.draw_adapter()
        )
        self.asked[name] = asked
        producer, consumer = self.nodes
        if asked.at != "both":
            self.nodes["pc".index(asked.at)].add(name, prompt, 0, None, sampling=asked.sampling, lora=asked.lora)
            return
        assert producer.address
        assert consumer.address
        consume = KVTransferParams(f"t-{name}", TransferRole.CONSUME, producer.address)
        produce = KVTransferParams(f"t-{name}", TransferRole.PRODUCE, consumer.address)

        def begin(node: OneEngine, sampling: SamplingParams | None, params: KVTransferParams) -> None:
            if not asked.aborted:
                node.add(name, prompt, 0, params, sampling=sampling, lora=asked.lora)

        halves = [
            lambda: begin(consumer, asked.sampling, consume),
            lambda: begin(producer, one_token(asked.sampling), produce),
        ]
        if draw.random() < 0.3:
            halves.reverse()
        halves[0]()
        if draw.random() < 0.5:
            halves[1]()
        else:
            later.append((turn + draw.randrange(1, 12), halves[1]))

    def abort(self) -> None:
        names = sorted({name for node in self.nodes for name in node.engine.scheduler.requests})
        if not names:
            return
        name = self.draw.choice(names)
        self.asked[name].aborted = True
        for node in self.draw.sample(self.nodes, 2):
            node.engine.abort_requests([name])
            if self.draw.random() < 0.5:
                self.step(self.draw.choice(self.nodes))

    def step(self, node: OneEngine) -> None:
        node.woken.clear()
        result = node.engine.step()
        node.engine.scheduler.check_integrity()
        for update in result.updates:
            asked = self.asked[update.request_id]
            assert update.error is None, (update.request_id, update.error)
            of_producer = asked.at == "both" and node is self.nodes[0]
            (asked.first if of_producer else asked.answer).extend(update.token_ids)
            if not of_producer:
                asked.finish = update.finish or asked.finish
        if not result.progressed and not node.engine.scheduler.has_work():
            node.woken.wait(0.002)

    def check(self) -> None:
        for name, asked in self.asked.items():
            right = self.answered_alone(f"{id(self)}-{name}", asked)
            expected, found = right.answer, asked.answer
            if asked.aborted:
                expected = expected[: len(found)]
            else:
                assert asked.finish == right.finish, f"request {name}: {asked}"
            assert found == expected, f"request {name}: {asked}"
            assert asked.first in ([], expected[:1]) or asked.aborted, f"request {name}: {asked}"

    def answered_alone(self, name: str, asked: Asked) -> Asked:
        right = dataclasses.replace(asked, answer=[])
        self.alone.add(name, asked.prompt, 0, None, sampling=asked.sampling, lora=asked.lora)
        while self.alone.engine.scheduler.has_unfinished_requests():
            for update in self.alone.engine.step().updates:
                right.answer += update.token_ids
                right.finish = update.finish
        return right


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.ALL, "wide-llama", tiny._config("LlamaConfig", num_key_value_heads=4, num_hidden_layers=4))
        yield functools.cache(lambda kind: tiny.save(kind, tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def alone(path_of: Callable[[str], Path]) -> Iterator[Callable[[str, str], OneEngine]]:
    with contextlib.ExitStack() as engines:
        yield functools.cache(
            lambda kind, kept: engines.enter_context(
                OneEngine.start(path_of(kind), "alone", 4, None, memory_bytes=8 << 20, kept=kept)
            )
        )


def runs(variable: str, otherwise: list[int]) -> Iterable[Any]:
    """The numbers of the runs that this variable names, FIRST-LAST."""
    first, _, last = os.environ.get(variable, "").partition("-")
    return range(int(first), int(last or first) + 1) if first else more(otherwise)


# In the first of these, ranks in two groups have caches of their own, and a tier.
@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("number", runs("TANDEM_RANK_RUNS", [31, 10, 404]))
def test_every_answer_is_that_of_one_rank(
    number: int, tmp_path: Path, path_of: Callable[[str], Path], alone: Callable[[str, str], OneEngine]
) -> None:
    run = RankRun(number, tmp_path, path_of, alone)
    try:
        print(number, run.run(), run)
    except BaseException as problem:
        problem.add_note(f"run {number}: {run}")
        raise

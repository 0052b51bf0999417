"""Engines with a real model in one process, without Ray, and the handoff of a request from one to another."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from tandem.base.errors import NodeLost
from tandem.base.logs import LogsConfig
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.loading import load_runner
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kvtransfer.base import ConnectorContext, TransferStats
from tandem.kvtransfer.config import LoadFailurePolicy, TierConfig, TransferConfig
from tandem.kvtransfer.multi import create_connector
from tandem.node.config import NodeConfig, OtherMachine
from tandem.node.ranks.processes import shares_of
from tandem.node.ranks.supervisor import Ranks
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.images import MediaFeature
from tandem.wire.nodes import PeerAddress, Role
from tandem.wire.requests import CachePeers, KVTransferParams, TransferRole
from tandem.wire.sampling import SamplingParams
from tests.engine.made_requests import made_request
from tests.engine.model.ranks_here import ranks_here
from tests.integration.far_machines import FarMachine

PATIENCE_S = 60.0
epochs = itertools.count(900)
# On a busy machine, too, the KV is waited for instead of computed again.
PATIENT: dict[str, Any] = {"connector": "nixl", "lease_s": 30.0, "patience_s": 60.0}


@dataclasses.dataclass
class OneEngine:
    engine: Engine
    woken: threading.Event
    address: PeerAddress | None
    tier: PeerAddress | None = None  # the endpoint where other nodes read from its tier
    ranks: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    supervised: Ranks | None = None
    far: Sequence[FarMachine] = ()  # the other machines of its ranks

    @classmethod
    def start(
        cls,
        model: Path,
        name: str,
        block_size: int,
        transfer: TransferConfig | None,
        *,
        scheduler: SchedulerConfig | None = None,
        memory_bytes: int = 512 << 20,
        kept: str = "auto",
        prefix_caching: bool = False,
        checkpoint_tokens: int = 256,
        tiers: Sequence[TierConfig] = (),
        shares: bool = False,
        adapters: Mapping[str, str] | None = None,
        encoder_tokens: int = 1024,
        num_blocks: int | None = None,
        draft: Path | str = "",
        width: int = 1,
        stages: int = 1,
        contexts: int = 1,
        apart: bool = False,
        processes: bool = False,
        machines: int = 1,
        hidden_states: Path | str = "",
    ) -> OneEngine:
        """`kept`: the type in which the cache keeps numbers. `shares`: its host-memory tier reads other nodes' tiers, and mirrors. `width`: the number of ranks, in `stages` stages or so many
        `contexts`; they are threads here, or with `processes` the processes of a real node, on `machines` machines. `apart`: each rank keeps the KV of its
        heads in its own memory."""
        woken, epoch = threading.Event(), next(epochs)
        cache = CacheConfig(
            block_size=block_size,
            memory_bytes=memory_bytes,
            dtype=kept,
            prefix_caching=prefix_caching,
            checkpoint_tokens=checkpoint_tokens,
            hash_seed="t",
            tiers=list(tiers),
            encoder_tokens=encoder_tokens,
        )
        scheduler = scheduler or SchedulerConfig()
        config = ModelConfig(
            path=str(model),
            dtype="float32",
            threads=1,
            adapters=dict(adapters or {}),
            draft=str(draft),
            hidden_states_folder=str(hidden_states),
        )
        ranks = contextlib.ExitStack()
        lines: list[socket.socket] = []
        tier_lines: list[socket.socket] = []
        supervised = None
        far: list[FarMachine] = []
        if processes:
            whole = EngineConfig(config, cache, scheduler)
            others = [OtherMachine("127.0.0.1", device="cpu") for _ in range(machines - 1)]
            asked = NodeConfig(
                name,
                Role.AGGREGATED,
                engine=whole,
                tensor_parallel=width // contexts,
                context_parallel=contexts,
                others=others,
            )
            far = [FarMachine(asked, number) for number in range(1, machines)]
            for machine in far:
                ranks.callback(machine.end)
            supervised = Ranks(
                name,
                width,
                whole,
                shares_of([], 1, width // machines),
                LogsConfig(),
                stages=stages,
                contexts=contexts,
                apart=apart,
                keepers=[machine.endpoint for machine in far],
                silence_s=2.0,
                lost=lambda _: woken.set(),
            )
            ranks.callback(supervised.stop)
            runner = load_runner(config, cache, scheduler, shard=supervised.start())
            supervised.await_ready()
            lines, tier_lines = supervised.transfer_lines, supervised.tier_lines
        else:
            load = functools.partial(load_runner, config, cache, scheduler)
            runner = ranks.enter_context(
                ranks_here(
                    width,
                    lambda shard: load(shard=shard),
                    stages,
                    lines if apart else None,
                    tier_lines if apart and tiers else None,
                    contexts,
                )
            )
        info = runner.info
        scheduler_half, worker_half = None, None
        if transfer is not None:
            context = ConnectorContext(
                name,
                epoch,
                "127.0.0.1",
                block_size,
                transfer,
                woken.set,
                info.state_blocks,
                tiers=tiers,
                groups=info.groups,
                remote=shares,
                mirror=shares,
                rank_lines=lines,
                tier_lines=tier_lines,
            )
            scheduler_half, worker_half = create_connector(context)
        made = Scheduler(
            scheduler,
            cache,
            info.groups,
            min(num_blocks or info.num_blocks, info.num_blocks),
            info.max_model_len,
            connector=scheduler_half,
            load_failure_policy=transfer.on_failure if transfer is not None else LoadFailurePolicy.RECOMPUTE,
            reads_images=info.images is not None,
            reads_hidden=info.reads_hidden,
        )
        address = PeerAddress(name, epoch, worker_half.peer_endpoint) if worker_half is not None else None
        ahead = scheduler.plans_ahead(info.device)
        engine = cls(Engine(made, runner, worker_half, ahead=ahead), woken, address, ranks=ranks)
        engine.supervised = supervised
        engine.far = far
        if worker_half is not None and worker_half.tier_endpoint:
            engine.tier = PeerAddress(name, epoch, worker_half.tier_endpoint)
        return engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.engine.shutdown()
        self.ranks.close()

    def add(
        self,
        name: str,
        prompt: list[int],
        count: int,
        transfer: KVTransferParams | None,
        *,
        output: Sequence[int] = (),
        cache_peers: CachePeers | None = None,
        lora: str | None = None,
        media: Sequence[MediaFeature] = (),
        images: Sequence[bytes] = (),
        embeds: PromptEmbeds | None = None,
        sampling: SamplingParams | None = None,
    ) -> None:
        sampling = sampling or SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        request = made_request(
            name,
            prompt,
            sampling,
            lora=lora,
            media=embeds.features() if embeds is not None else media,
            images=images,
            embeds=embeds,
            output_token_ids=output,
            transfer=transfer,
            cache_peers=cache_peers,
            block_hasher=self.engine.scheduler.block_hasher,
        )
        self.engine.add_request(request)

    def run(self, name: str, tokens: list[int], until: float) -> bool:
        """Runs one step. Returns True when the request has ended."""
        self.woken.clear()
        result = self.engine.step()
        for update in result.updates:
            if update.error is not None:
                raise update.error.to_exception()
            tokens += update.token_ids
            if update.finish is not None:
                return True
        assert time.monotonic() < until, f"{name} has {len(tokens)} tokens"
        if not result.progressed and not self.engine.scheduler.has_work():
            self.woken.wait(0.01)  # let the other engine step
        return False

    def run_all(self) -> dict[str, list[int]]:
        """Every request's answer. The scheduler's invariants are checked after each step."""
        answers: dict[str, list[int]] = {}
        until = time.monotonic() + PATIENCE_S
        while self.engine.scheduler.has_unfinished_requests():
            for update in self.engine.step().updates:
                assert update.error is None, update.error
                answers.setdefault(update.request_id, []).extend(update.token_ids)
            self.engine.scheduler.check_integrity()
            assert time.monotonic() < until
        return answers

    def stats(self) -> TransferStats:
        assert self.engine.worker is not None
        return self.engine.worker.stats()

    def answer(self, name: str, prompt: list[int], count: int, lora: str | None = None) -> list[int]:
        """This engine's answer without a transfer."""
        tokens: list[int] = []
        until = time.monotonic() + PATIENCE_S
        self.add(name, prompt, count, None, lora=lora)
        while not self.run(name, tokens, until):
            pass
        return tokens


def prompts_in_pairs(lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Pairs of prompts with the same beginning: the second one finds it in both nodes' prefix caches."""
    chance = random.Random(7)
    found = []
    for length in lengths:
        prompt = [chance.randrange(3, vocabulary) for _ in range(length)]
        found += [prompt, prompt[: length * 2 // 3] + [chance.randrange(3, vocabulary) for _ in range(20)]]
    return found


def one_token(sampling: SamplingParams | None) -> SamplingParams | None:
    return None if sampling is None else msgspec.structs.replace(sampling, max_tokens=1)


def hand_over(
    producer: OneEngine,
    consumer: OneEngine,
    name: str,
    prompt: list[int],
    count: int,
    *,
    produced: int = 1,
    loras: tuple[str | None, str | None] = (None, None),
    media: Sequence[MediaFeature] = (),
    images: Sequence[bytes] = (),
    sampling: SamplingParams | None = None,
    embeds: PromptEmbeds | None = None,
) -> list[int]:
    """The answer of `consumer` to a prompt that `producer` computes. Returns when neither holds blocks of the request any more."""
    assert producer.address
    assert consumer.address
    until = time.monotonic() + PATIENCE_S
    consume = KVTransferParams(f"t-{name}", TransferRole.CONSUME, producer.address)
    produce = KVTransferParams(f"t-{name}", TransferRole.PRODUCE, consumer.address)
    tokens: list[int] = []
    first: list[int] = []
    consumer.add(
        name, prompt, count, consume, lora=loras[1], media=media, images=images, embeds=embeds, sampling=sampling
    )
    consumer.run(name, tokens, until)
    producer.add(
        name,
        prompt,
        produced,
        produce,
        lora=loras[0],
        media=media,
        images=images,
        embeds=embeds,
        sampling=one_token(sampling),
    )
    while not consumer.run(name, tokens, until):
        producer.run(name, first, until)
    while producer.engine.scheduler.stats().held_blocks:
        producer.run(name, first, until)
    return tokens


def hand_over_all(
    producer: OneEngine, consumer: OneEngine, prompts: Sequence[list[int]], expected: Sequence[list[int]]
) -> None:
    """Each prompt is handed over once, and has the answer that is expected of it."""
    for index, (prompt, answer) in enumerate(zip(prompts, expected, strict=True)):
        found = hand_over(producer, consumer, f"r{index}", prompt, len(answer))
        assert found == answer, f"prompt {index}, of {len(prompt)} tokens"
    assert set(consumer.stats().outcomes) == {"received"}
    assert consumer.engine.scheduler.stats().prompt_tokens_computed == 0


def expect_read_where_it_decodes(
    producer: OneEngine, consumer: OneEngine, prompt: list[int], right: list[int], lose: Callable[[], object]
) -> None:
    """The producer loses some of its processes while it sends the prompt's KV, and ends. The consumer computes the prompt itself."""
    assert producer.address
    assert consumer.address
    tokens: list[int] = []
    until = time.monotonic() + PATIENCE_S
    consumer.add("lost", prompt, len(right), KVTransferParams("t", TransferRole.CONSUME, producer.address))
    consumer.run("lost", tokens, until)
    producer.add("lost", prompt, 1, KVTransferParams("t", TransferRole.PRODUCE, consumer.address))
    producer.run("lost", [], until)
    lose()
    with pytest.raises((NodeLost, RuntimeError)):  # a collective's own error may come before the verdict
        run_on(producer, "lost", until)
    while not consumer.run("lost", tokens, until):
        pass
    assert tokens == right
    assert consumer.engine.scheduler.stats().prompt_tokens_computed > 0


def run_on(engine: OneEngine, name: str, until: float) -> None:
    while True:
        engine.run(name, [], until)

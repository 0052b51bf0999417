"""Two nodes read and mirror each other's tiers, and one of them dies. Whatever is evicted, preempted and copied meanwhile, conversations
get the answers of a single engine. A missing part of any group of layers would change an answer. On the native path no bit of a
log-probability changes, either."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from pathlib import Path

import pytest

from tandem.engine.config import AsyncScheduling, SchedulerConfig
from tandem.engine.model.native.forward import NativeLlamaForward
from tandem.engine.model.torch_runner import TorchRunner
from tandem.kvtransfer.config import EvictionPolicy, TierConfig, TransferConfig
from tandem.wire.requests import CachePeers
from tandem.wire.sampling import SamplingParams
from tests.engine.model import tiny
from tests.integration.one_engine import OneEngine
from tests.more import more

BLOCK = 4
SESSIONS = 10
TURNS = 3
ANSWER = 20
AT_ONCE = 6
PATIENCE_S = 120.0
ASKED = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, logprobs=0)


@dataclasses.dataclass
class Turn:
    prompt: list[int]
    node: OneEngine
    answer: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)


def session_of(name: str) -> int:
    return int(name.split(".")[0])


class Sessions:
    """Conversations whose turns run at either node. Each node may have the other as its source and as its mirror."""

    def __init__(self, model: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.model = model
        self.policy = list(EvictionPolicy)[seed % 2]
        self.config = SchedulerConfig(
            max_num_seqs=AT_ONCE,
            max_num_batched_tokens=48,
            max_model_len=200,
            async_scheduling=AsyncScheduling.ALWAYS if seed % 3 == 1 else AsyncScheduling.NEVER,
            num_speculative_tokens=2 if seed % 3 == 2 else 0,
        )
        self.alone = OneEngine.start(model, "alone", BLOCK, None, scheduler=self.config, memory_bytes=4 << 20)
        runner = self.alone.engine.runner
        self.exact = isinstance(runner, TorchRunner) and isinstance(runner.forward, NativeLlamaForward)
        self.nodes = [self.start("a"), self.start("b")]
        self.preemptions = self.copied = 0
        begins = [[self.draw.randrange(5, tiny.VOCAB) for _ in range(17)] for _ in range(2)]
        self.talks = [begins[i % 2] + [self.draw.randrange(5, tiny.VOCAB) for _ in range(15)] for i in range(SESSIONS)]
        self.live: dict[str, Turn] = {}
        self.until = time.monotonic() + PATIENCE_S

    def start(self, name: str) -> OneEngine:
        """Starts a node with room for few requests, and a tier with room for some of their prefixes."""
        runner = self.alone.engine.runner
        groups = sum(1 for group in runner.info.groups if not group.blocks_per_request)
        few = 44 + 14 * (groups - 1) + 5 * runner.info.state_blocks
        size = (150 * groups + 20 * runner.info.state_blocks) * runner.kv_cache[0].nbytes
        return OneEngine.start(
            self.model,
            name,
            BLOCK,
            TransferConfig(connector="nixl"),
            scheduler=self.config,
            memory_bytes=4 << 20,
            prefix_caching=True,
            checkpoint_tokens=2 * BLOCK,
            tiers=[TierConfig(cpu=size, policy=self.policy)],
            shares=True,
            num_blocks=min(few, runner.info.num_blocks),
        )

    def begin(self, name: str) -> None:
        node, other = self.draw.sample(self.nodes, 2)
        peers = CachePeers(
            source=other.tier if self.draw.random() < 0.7 else None,
            mirror=other.tier if self.draw.random() < 0.7 else None,
        )
        self.live[name] = Turn(list(self.talks[session_of(name)]), node)
        node.add(name, self.live[name].prompt, ANSWER, None, cache_peers=peers, sampling=ASKED)

    def run(self, dies_at: int) -> None:
        waiting, steps = [f"{i}.1" for i in range(SESSIONS)], 0
        while waiting or self.live:
            while waiting and len(self.live) < AT_ONCE:
                self.begin(waiting.pop(0))
            steps += 1
            if steps == dies_at:
                self.kill()
            for name in self.step(self.draw.choice(self.nodes)):
                turn, session = self.live.pop(name), session_of(name)
                expected = self.answer_alone(name, turn.prompt)
                assert turn.answer == expected.answer, f"{name} says something else"
                assert turn.logprobs == expected.logprobs or not self.exact, f"{name} has other bits"
                self.talks[session] = [*turn.prompt, *turn.answer, 7, 8, 9]
                number = int(name.split(".")[1])
                if number < TURNS:
                    waiting.append(f"{session}.{number + 1}")
        while any(node.engine.scheduler.stats().held_blocks for node in self.nodes):
            for node in self.nodes:
                self.step(node)
        for node in self.nodes:
            self.note(node)

    def answer_alone(self, name: str, prompt: list[int]) -> Turn:
        self.live[name] = Turn(prompt, self.alone)
        self.alone.add(name, prompt, ANSWER, None, sampling=ASKED)
        while not self.step(self.alone):
            pass
        return self.live.pop(name)

    def step(self, node: OneEngine) -> list[str]:
        node.woken.clear()
        result = node.engine.step()
        ended = []
        for update in result.updates:
            assert update.error is None, update.error
            turn = self.live[update.request_id]
            turn.answer += update.token_ids
            turn.logprobs += [each.logprob for each in update.logprobs or ()]
            if update.finish is not None:
                ended.append(update.request_id)
        assert time.monotonic() < self.until, f"{len(self.live)} answers did not end"
        if not result.progressed and not node.engine.scheduler.has_work():
            node.woken.wait(0.001)
        return ended

    def kill(self) -> None:
        """Kills a node: the other one continues its requests, and a new node starts."""
        dead, other = self.nodes
        self.note(dead)
        dead.close()
        self.nodes = [other, self.start("c")]
        for name, turn in self.live.items():
            if turn.node is dead:
                turn.node = other
                other.add(name, turn.prompt, ANSWER, None, output=turn.answer, sampling=ASKED)

    def note(self, node: OneEngine) -> None:
        node.engine.scheduler.check_integrity()
        (tier,) = node.stats().tiers
        self.copied += tier.fetched_bytes + tier.mirrored_bytes
        self.preemptions += node.engine.scheduler.stats().preemptions

    def close(self) -> None:
        for node in (self.alone, *self.nodes):
            node.close()


@pytest.mark.parametrize("seed", range(int(os.environ.get("TANDEM_EXAMPLES", "1"))))
@pytest.mark.parametrize(
    "kind", ["gemma3", *more(["llama", "qwen3.5", "mistral-window", "recurrent-gemma", "llama4", "mamba2"])]
)
def test_conversations_say_the_same_with_copies_and_deaths(tmp_path: Path, kind: str, seed: int) -> None:
    sessions = Sessions(tiny.save(kind, tmp_path), seed)
    try:
        sessions.run(dies_at=120)
        assert sessions.copied > 0
    finally:
        sessions.close()

"""KV that becomes wrong and that no checksum shows: in a producer before it is sent, in a tier, or in a copy.

Until it is found, answers may be wrong. It is found when the node where it happened begins a new generation of its cache: by
an operator's reset, by its own canary, by a peer's word. The nodes that have copies hear of it within PULL_S while the network is well. Every
request that is asked later is answered rightly: asked again, after a restart, and at the nodes that copied.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tandem.engine.request import Request
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.offload.cpu import CpuTier
from tandem.kvtransfer.sources import ASK_S
from tandem.node.loop import ResetCache
from tandem.wire.nodes import Role
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams
from tests.world.model import LAYERS, as_floats

if TYPE_CHECKING:
    from tests.world.node import WorldNode
    from tests.world.schedule import Schedule
    from tests.world.storage import Asked

PULL_S = ASK_S + 1.0  # a question, and the time of its way
RESET_S = 30.0  # a reset has reached the disk, which answers, within this
POLL_S = 0.1
ASKED_AGAIN = 4
SHARE = 0.3  # of the schedules


@dataclasses.dataclass
class _Corruption:
    node: WorldNode
    generation: int  # of the node's cache when it happened
    what: str
    cleared_at: float | None = None  # when the node's cache began a new generation
    told_at: float | None = None  # when a peer found it

    @property
    def found_at(self) -> float | None:
        """None: the next process on its disk would read it again, because this one ended before its disk had forgotten it."""
        ended_too_soon = not self.node.process.is_alive and self.node.tiers.have_to_forget
        return None if ended_too_soon else self.cleared_at


def _drawing(seed: int) -> random.Random:
    return random.Random(f"wrong KV {seed}")


def happens_in(seed: int) -> bool:
    return _drawing(seed).random() < SHARE


class WrongKV:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.rng = rng = _drawing(schedule.outcome.seed)
        self.happens = rng.random() < SHARE
        # Without other faults each answer is judged from PULL_S after the finding on, also in the course.
        self.is_calm = self.happens and rng.random() < 0.6
        self._canary_share = rng.choice([0.0, 0.3, 1.0])
        self._corruptions: list[_Corruption] = []
        self._asked: dict[str, Asked] = {}
        self._wrong: dict[str, Asked] = {}
        self._to_judge: list[_Corruption] = []  # asked again once all nodes know
        self._findings: dict[tuple[str, int, str], int] = {}
        self._victim: Asked | None = None  # who reads what became wrong last
        self._all_reset_at: float | None = None
        if self.happens:
            schedule.storage.asks_again = True

    def asked(self, label: str, asked: Asked) -> None:
        self._asked[label] = asked

    def with_canary(self, transfer: TransferConfig) -> TransferConfig:
        if not self.happens:
            return transfer
        return msgspec.structs.replace(transfer, canary_share=self._canary_share)

    def begin(self, faults_s: float) -> None:
        if not self.happens:
            return
        call_later, rng = self._schedule.loop.call_later, self.rng
        for _ in range(rng.randint(1, 4)):
            call_later(rng.uniform(1.0, faults_s), self._corrupt)
        for _ in range(rng.randint(0, 2)):
            call_later(rng.uniform(2.0, faults_s), self._reset_one)
        if self.is_calm:
            for _ in range(rng.randint(0, 2)):
                call_later(rng.uniform(2.0, faults_s), self._kill_one)
        call_later(POLL_S, self._poll)

    def heal(self) -> None:
        """What was to become wrong with the next prompt does not."""
        for node in self._schedule.nodes.values():
            node.model.goes_wrong = None

    # ── what happens ──

    def _corrupt(self) -> None:
        rng, schedule = self.rng, self._schedule
        living = [node for node in schedule.nodes.values() if node.process.is_alive]
        if not living:
            return
        node = rng.choice(living)
        computes = [node for node in living if node.role is not Role.DECODE]
        if computes and rng.random() < 0.6:
            node = rng.choice(computes)
            node.model.goes_wrong = lambda prompt: self._miscomputed(node, prompt)
            return
        of_prompt = self._cached_of_a_prompt(node)
        places = [tier.spec.places() for tier in node.tiers.tiers if isinstance(tier.spec, CpuTier)]
        cached = sorted(node.scheduler.state.cache.pool.hashes)
        value = rng.getrandbits(64)
        if places and rng.random() < 0.4:
            cells = places[0].numpy().view(np.uint64).reshape(len(places[0]), LAYERS, 2, -1)
            place, offset = rng.randrange(len(cells)), rng.randrange(cells.shape[-1])
            for layer in range(LAYERS):
                for part in (0, 1):
                    cells[place, layer, part, offset] = as_floats(value) + 2 * layer + part
            what = f"place {place} of its tier in memory"
        elif cached:
            block = rng.choice(of_prompt or cached)
            node.model.corrupt(block, rng.randrange(node.info.block_size), value)
            what = f"block {block}"
        else:
            return
        self._happened(node, what, self._victim)

    def _miscomputed(self, node: WorldNode, prompt: list[int]) -> int:
        """The device computes one token of a prompt wrongly, before anything is stored or sent."""
        lately = self._schedule.storage.asked_lately
        victim = next((asked for asked in lately if asked.prompt == prompt), None)
        self._happened(node, "a token that it computes", victim)
        return self.rng.getrandbits(64)

    def _happened(self, node: WorldNode, what: str, victim: Asked | None) -> None:
        self._schedule.outcome.corrupted += 1
        self._schedule.note(f"{node.process.name}: {what} becomes wrong")
        self._corruptions.append(_Corruption(node, node.generation, what))
        self._to_judge.append(self._corruptions[-1])
        if victim is not None:
            self._wrong["the victim"] = victim
        for _ in range(3):
            self._schedule.loop.call_later(self.rng.uniform(0.1, 3.0), self._ask, victim)

    def _cached_of_a_prompt(self, node: WorldNode) -> list[int]:
        """The blocks in which the node has the beginning of something that was asked lately."""
        lately = self._schedule.storage.asked_lately
        for asked in self.rng.sample(lately, len(lately)):
            request = Request(
                "looked-up",
                RequestFacts(
                    prompt_token_ids=asked.prompt, sampling=SamplingParams(max_tokens=1), cache_salt=asked.salt
                ),
                block_hasher=node.scheduler.block_hasher,
            )
            (blocks, *_), _ = node.scheduler.find_prefix(request)
            if blocks:
                self._victim = asked
                return list(blocks)
        return []

    def _ask(self, asked: Asked | None) -> None:
        routers = self._schedule.living_routers
        if asked is not None and routers and self._schedule.is_busy:
            self._schedule.ask_again(self.rng.choice(routers), asked, must_succeed=False)

    def _reset_one(self) -> None:
        living = [node for node in self._schedule.nodes.values() if node.process.is_alive]
        guilty = [each.node for each in self._open if each.node.process.is_alive]
        if not guilty and not living:
            return
        node = self.rng.choice(guilty or living)
        done = self._reset(node)
        if self.rng.random() < 0.5:
            self._restart_when(done, node)

    def _restart_when(self, done: threading.Event, node: WorldNode) -> None:
        """The operator trusts the process no more, either. What is promised in the end counts without such a restart."""
        if not self._schedule.is_busy:
            return
        if not done.is_set():
            node.process.later(0.05, lambda: self._restart_when(done, node))
        elif node.process.is_alive:
            self._schedule.kill_node(node)

    def _kill_one(self) -> None:
        living = [node for node in self._schedule.nodes.values() if node.process.is_alive]
        if living:
            self._schedule.kill_node(self.rng.choice(living))

    def _reset(self, node: WorldNode) -> threading.Event:
        self._schedule.note(f"{node.process.name}: an operator resets its cache")
        reset = ResetCache(threading.Event())
        node.process.do(lambda: node.mailbox.put(reset))
        return reset.done

    # ── what is known ──

    @property
    def _open(self) -> list[_Corruption]:
        return [each for each in self._corruptions if each.found_at is None]

    def _poll(self) -> float:
        self._look()
        self._schedule.loop.call_later(POLL_S, self._poll)
        return POLL_S

    def _look(self) -> None:
        now = self._schedule.loop.time()
        for each in self._open:
            if each.cleared_at is None and each.node.generation > each.generation:
                each.cleared_at = now
                self._schedule.note(f"{each.node.process.name}: it is found that {each.what} was wrong")
        for node in self._schedule.nodes.values():
            self._look_at_findings(node, now)
        for each in [each for each in self._to_judge if self._known_at(each) < now]:
            self._to_judge.remove(each)
            for asked in list(self._wrong.values())[-2:]:
                self._ask(asked)
                self._schedule.loop.call_later(0.5, self._ask, asked)

    def _look_at_findings(self, node: WorldNode, now: float) -> None:
        """A node that has computed a peer's KV again tells the peer that it was wrong, which tells its readers."""
        for peer, count in node.canary.findings.wrong.items():
            key = (node.process.name, node.epoch, peer)
            if self._findings.get(key) == count:
                continue
            self._findings[key] = count
            self._schedule.note(f"{node.process.name}: its canary finds KV of {peer} wrong")
            for each in self._open:
                if each.node.process.name == peer and each.told_at is None:
                    each.told_at = now + PULL_S

    def explains(self, label: str, asked_at: float) -> bool:
        """Whether an answer to what was asked then may be wrong."""
        if not self._corruptions:
            return False
        self._look()
        may_be = any(self._known_at(each) >= asked_at for each in self._corruptions)
        if may_be and label not in self._wrong:
            self._wrong[label] = self._asked[label]
            if self.rng.random() < 0.4:
                # A user sees it at once
                self._schedule.loop.call_later(self.rng.uniform(0.0, 0.3), self._reset_one)
            self._schedule.outcome.wrong_answers += 1
            self._schedule.note(f"{label} is answered wrongly")
        return may_be

    def _known_at(self, corruption: _Corruption) -> float:
        """When every node that may have a copy knows."""
        never = float("inf")
        found_at = never if corruption.found_at is None else corruption.found_at
        if corruption.told_at is not None and corruption.node.process.is_alive:
            found_at = min(found_at, max(corruption.told_at, self._schedule.healthy_since + PULL_S))
        healthy = max(found_at, self._schedule.healthy_since) + PULL_S
        return min(healthy, never if self._all_reset_at is None else self._all_reset_at)

    # ── the end ──

    async def finish(self) -> None:
        """What is still wrong is found; then everything that was asked is asked again."""
        if not self._corruptions:
            return
        schedule = self._schedule
        self._look()
        if any(not each.node.process.is_alive for each in self._open):
            # The process that could tell its readers is gone: the operator resets all.
            names = list(schedule.nodes)
        else:
            names = list(dict.fromkeys(each.node.process.name for each in self._open))
        await asyncio.gather(*map(self._reset_until_done, names))
        if len(names) == len(schedule.nodes):
            self._all_reset_at = schedule.loop.time()
        await asyncio.sleep(PULL_S)
        if self.rng.random() < 0.5:  # else nothing is written over what the disks have
            await self._ask_again()
        for node in list(schedule.nodes.values()):
            was_wrong = any(each.node is node for each in self._corruptions)
            if node.process.is_alive and self.rng.random() < (0.8 if was_wrong else 0.3):
                schedule.kill_node(node)
        await asyncio.sleep(10.0)
        await self._ask_again()

    async def _reset_until_done(self, name: str) -> None:
        schedule, reset, node = self._schedule, None, None
        until = schedule.loop.time() + RESET_S
        while reset is None or not reset.is_set():
            if schedule.nodes[name] is not node:  # it was started again meanwhile
                node = schedule.nodes[name]
                reset = self._reset(node)
            if schedule.loop.time() > until:
                schedule.broken(f"a reset was not done within {RESET_S:.0f} s although all is well")
                return
            await asyncio.sleep(0.1)

    async def _ask_again(self) -> None:
        schedule = self._schedule
        self._look()
        wrong = list(self._wrong.values())[-ASKED_AGAIN:]
        for asked in [*wrong, *wrong, *schedule.storage.earlier(ASKED_AGAIN)]:
            await schedule.ask_again(self.rng.choice(schedule.living_routers), asked, must_succeed=True)
        schedule.look()

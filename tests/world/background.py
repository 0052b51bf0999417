"""Background answers: the node that decodes one keeps its tokens, and when its router ends another one finds it there and reads on. Drawn
from generators of its own."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from tandem.api.sequence import KeptAnswer, SequenceSpec
from tandem.base.errors import InternalError, TandemError
from tandem.node.config import NodeTimeouts
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from tests.world.router import WorldRouter
    from tests.world.schedule import Schedule

SHARE = 0.35
FOUND_S = 15.0  # while all is well, an answer whose router has ended is found and read to its end within this
LONGEST = 45
SILENCE_S = 1.05 * NodeTimeouts().router_silence_s


def _drawing(seed: int) -> random.Random:
    return random.Random(f"background {seed}")


def happens_in(seed: int) -> bool:
    return _drawing(seed).random() < SHARE


class Background:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._rng = rng = _drawing(schedule.outcome.seed)
        self.exists = rng.random() < SHARE
        self._reading: dict[asyncio.Task[None], tuple[WorldRouter, SequenceSpec, list[int]]] = {}

    def keep(self, label: str) -> KeptAnswer | None:
        if not self.exists or random.Random(f"{self._schedule.outcome.seed} {label} kept").random() < 0.5:
            return None
        return KeptAnswer(f"answer-{label}", b"what a response is made of")

    def reads(self, task: asyncio.Task[None], router: WorldRouter, spec: SequenceSpec, right: list[int]) -> None:
        """This task reads the answer at this router, until the router ends."""
        if spec.keep is not None:
            self._reading[task] = router, spec, right
            task.add_done_callback(lambda task: self._reading.pop(task, None))

    def router_ends(self, router: WorldRouter) -> None:
        for of, spec, right in list(self._reading.values()):
            if of is router:
                after_s = random.Random(f"{spec.label} read again").uniform(0.0, 5.0)
                self._schedule.loop.call_later(after_s, self._read_again, spec, right)

    def _read_again(self, spec: SequenceSpec, right: list[int]) -> None:
        schedule = self._schedule
        if not schedule.living_routers:
            schedule.loop.call_later(1.0, self._read_again, spec, right)
            return
        router = random.Random(f"{spec.label} at {schedule.loop.time()}").choice(schedule.living_routers)
        schedule.add_client(schedule.loop.create_task(self._follow(router, spec, right)), router, spec, right)

    async def _follow(self, router: WorldRouter, spec: SequenceSpec, right: list[int]) -> bool:
        """Returns whether the answer was found and read to its end."""
        schedule, label, asked_at = self._schedule, spec.label, self._schedule.loop.time()
        assert spec.keep is not None
        try:
            found = await router.recalls.find(spec.keep.answer_id, "x")
        except TandemError as error:
            schedule.note(f"{label}: {type(error).__name__}: {error}")
            return False
        if found is None:
            schedule.note(f"{label}: {router.process.name} finds it on no node")
            return False
        schedule.note(f"{label}: {router.process.name} finds it on {found.node.node_id}")
        answer = router.recalls.begin(found, spec, "x")
        try:
            while not answer.ended:
                await answer.news()
                tokens = list(answer.ledger.tokens)
                if tokens != right[: len(tokens)] and not schedule.wrong_kv.explains(label, asked_at):
                    schedule.broken(f"{label}: {found.node.node_id} kept a wrong token")
            if isinstance(answer.error, InternalError):
                schedule.broken(f"{label}: {answer.error}")
            is_whole = answer.error is None and list(answer.ledger.tokens) == right
            if answer.error is None and not is_whole and not schedule.wrong_kv.explains(label, asked_at):
                schedule.broken(f"{label}: a kept answer ended after {len(answer.ledger.tokens)} tokens")
            schedule.note(f"{label} is read to its end" if is_whole else f"{label}: {answer.error}")
            schedule.outcome.followed += is_whole
            return is_whole
        finally:
            answer.cancel()

    async def _stop_all(self, seconds: float) -> None:
        for node in self._schedule.nodes.values():
            node.process.stop()
        await asyncio.sleep(seconds)
        for node in self._schedule.nodes.values():
            self._schedule.go_on(node.process)

    async def _another(self) -> WorldRouter:
        """A router that uses nodes, once there is one."""
        while True:
            if others := [one for one in self._schedule.living_routers if one.pool.view.decode_count]:
                return self._rng.choice(others)
            await asyncio.sleep(0.1)

    async def outlive_a_router(self) -> None:
        """All is well, and a router ends in the middle of an answer."""
        if not self.exists or not self._schedule.living_routers:
            return
        schedule, rng = self._schedule, self._rng
        router, prompt = rng.choice(schedule.living_routers), [rng.randrange(1000) for _ in range(30)]
        facts = RequestFacts(
            prompt_token_ids=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=LONGEST, seed=1)
        )
        deadline = router.process.clock() + FOUND_S
        spec = SequenceSpec("the last", facts, deadline, keep=KeptAnswer("answer-last", b""))
        generation = await router.dispatcher.generate([spec], "x", eager=True)
        await generation.news()
        await asyncio.sleep(rng.choice([0.0, 0.05, 0.3]))
        schedule.kill_router(router)
        generation.cancel()
        if rng.random() < 0.5:
            await self._stop_all(SILENCE_S)  # every node has taken the router for lost before the answer is whole
        try:
            async with asyncio.timeout(FOUND_S):
                is_read = await self._follow(await self._another(), spec, schedule.right(prompt, LONGEST))
        except TimeoutError:
            is_read = False
        if not is_read:
            schedule.broken(f"a kept answer was not read to its end within {FOUND_S:.0f} s after its router ended")
        schedule.look()

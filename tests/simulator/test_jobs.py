"""Turns of jobs on prefill and decode nodes, with the product's own router, schedulers and policies."""

from __future__ import annotations

import asyncio

from tandem.api.sequence import SequenceSpec
from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.engine.config import CacheConfig, SchedulerConfig, SchedulingPolicy
from tandem.router.config import LocalPrefill, RouterConfig
from tandem.simulator.clock import VirtualLoop
from tandem.simulator.node import SimulatedNode
from tandem.simulator.outcome import AnswerTimes
from tandem.simulator.setup import SimulationSetup
from tandem.simulator.simulation import _Simulation
from tandem.simulator.traffic import PlayedTraffic
from tandem.wire.nodes import Role
from tandem.wire.requests import RequestFacts, Submit
from tandem.wire.sampling import SamplingParams
from tests.simulator.worlds import node_costs

PIN_S = 2.0


class Agents(_Simulation):
    """A cluster of that many prefill and decode nodes, with agents instead of recorded traffic."""

    def __init__(self, nodes: int = 2) -> None:
        costs = node_costs()
        config = TandemConfig(
            pools=PoolsConfig(prefill=PoolConfig(nodes=nodes), decode=PoolConfig(nodes=nodes)),
            scheduler=SchedulerConfig(policy=SchedulingPolicy.CONTINUUM, pin_seconds=PIN_S),
            cache=CacheConfig(block_size=16),
            router=RouterConfig(tokenizer_path="none", model_name="agents", local_prefill=LocalPrefill.NEVER),
        )
        super().__init__(SimulationSetup(config, dict.fromkeys(Role, costs), PlayedTraffic([])), None, None)
        self.decisions: list[str] = []
        self.places: list[str] = []
        self.cached: list[int] = []

    async def _arrive(self, requests: asyncio.TaskGroup, guard: asyncio.Task[None]) -> None:
        await asyncio.sleep(1.0)
        await self.work()
        guard.cancel()

    async def work(self) -> None:
        """What a test's agent does."""
        raise NotImplementedError

    def _on_submit(self, submit: Submit) -> None:
        times = AnswerTimes(self._loop.time(), len(submit.prompt_token_ids))
        self._outcome.live.setdefault(submit.request_id, times)

    async def turn(self, prompt: list[int], name: int, called: list[str], *, is_last_step: bool = False) -> list[int]:
        sampling = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, seed=name)
        spec = SequenceSpec(
            "turn",
            RequestFacts(prompt_token_ids=prompt, sampling=sampling, job_id="j", is_last_step=is_last_step),
            self._loop.time() + 100,
        )
        generation = await self._dispatcher.generate([spec], "agents", eager=False)
        (life,) = generation.lives
        while not life.ended:
            await generation.news()
        assert life.error is None
        generation.turn_ended(called)
        self.decisions.append(life.decisions[-1].reason)
        self.places.append(life.decisions[-1].node_names)
        self.cached.append(life.cached_tokens or 0)
        await asyncio.sleep(0.01)
        return [*prompt, *life.ledger.tokens]

    def pinned(self) -> dict[str, int]:
        found = {node.info.node_id: node.scheduler.stats().pinned_requests for node in self.nodes}
        return {name: count for name, count in found.items() if count}

    @property
    def nodes(self) -> list[SimulatedNode]:
        return self._pools.nodes

    def used(self) -> int:
        for node in self.nodes:
            node.scheduler.schedule()
        every = [node.scheduler.stats() for node in self.nodes]
        return sum(stats.total_blocks - stats.free_blocks for stats in every)


def play(agents: Agents) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(agents.run())
    finally:
        loop.close()


def test_turns_are_pinned_on_both_nodes_and_go_back_there():
    class OneJob(Agents):
        async def work(self) -> None:
            text = [7] * 400
            for index in range(4):
                text = await self.turn(text, 10 + index, ["grep"])
                assert sorted(self.pinned().values()) == [1, 1]
                text += [100 + index] * 50
                await asyncio.sleep(0.5)
            await self.turn(text, 99, [], is_last_step=True)
            assert self.pinned() == {}
            assert self.used() == 0

    agents = OneJob()
    play(agents)
    assert len(set(agents.places)) == 1
    assert all("its job's last turn is there" in reason for reason in agents.decisions[1:])
    # The prefill node has each turn's prompt, but not its answer.
    assert agents.cached[0] == 0
    assert all(cached >= 400 for cached in agents.cached[1:])


def test_the_prefill_node_keeps_a_prompt_while_its_answer_is_written():
    class LongAnswer(Agents):
        async def work(self) -> None:
            turn = self._loop.create_task(self.turn([7] * 400, 10, ["grep"]))
            await asyncio.sleep(0.5)
            (name,) = self.pinned()
            assert name.startswith("prefill")
            await turn
            assert len(self.pinned()) == 2

    play(LongAnswer())


def test_a_slow_tool_is_pinned_nowhere_once_it_is_known():
    class Slow(Agents):
        async def work(self) -> None:
            text = await self.turn([7] * 400, 10, ["test"])
            assert len(self.pinned()) == 2
            await asyncio.sleep(20)
            text = await self.turn([*text, *[8] * 50], 11, ["test"])
            assert self.pinned() == {}
            await self.turn([*text, *[9] * 50], 12, ["grep"])
            assert len(self.pinned()) == 2
            await asyncio.sleep(PIN_S)
            assert self.used() == 0

    play(Slow(nodes=1))  # each node learns for itself

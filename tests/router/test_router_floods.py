"""One key floods, and another one gets its half: the whole router, and a node that takes its time to read."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pytest

from tandem.api.sequence import SequenceSpec
from tandem.router.config import ApiKey, Limits
from tandem.router.dispatch.slots import AskedPlaces
from tandem.wire.nodes import Role
from tandem.wire.requests import NodeCounters, RequestFacts, TokenChunk
from tandem.wire.sampling import SamplingParams
from tests.router.conftest import RunningRouter, StartRouter, error_of
from tests.router.fake_node import FakeNode

READS_PER_S = 8000.0
TICK_S = 0.01


class ReadingNode(FakeNode):
    """Reads prompts one after the other, READS_PER_S tokens, and says how far it is."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._budget = 0.0
        self.computed = 0  # tokens
        self.busy_s = 0.0
        self.log: list[tuple[int, int]] = []  # each prompt that was read: its first token, and its length
        super().__init__(*args, **options)
        self._ticks = threading.Thread(target=self._tick, daemon=True)
        self._ticks.start()

    def _tick(self) -> None:
        at = time.monotonic()
        while not self._dead:
            time.sleep(TICK_S)  # its pace: nothing is waited for
            with self._lock:
                now = time.monotonic()
                unread = self._unread()
                if unread:
                    took = min(now - at, 5 * TICK_S)
                    self._budget += took * READS_PER_S
                    self.busy_s += took
                at = now
                self.counters = NodeCounters(prompt_tokens_computed=self.computed, step_seconds=self.busy_s)
                self.status_fields = {"waiting_tokens": unread, "waiting": int(unread > 0)}
                self._lock.notify_all()

    def _unread(self) -> int:
        return sum(len(each.submit.prompt_token_ids) for each in self._running.values() if not each.started)

    def advance(self, running: Any) -> TokenChunk | None:
        if not running.started:
            prompt = running.submit.prompt_token_ids
            first = next(each for each in self._running.values() if not each.started)
            if running is not first or len(prompt) > self._budget:
                return None
            self._budget -= len(prompt)
            self.computed += len(prompt)
            self.log.append((prompt[0], len(prompt)))
        chunk = super().advance(running)
        return None if chunk is None else msgspec.structs.replace(chunk, cached_tokens=0)


FLOOD, OTHER = 70, 71  # the first token of their prompts


def keep_asking(router: RunningRouter, tenant: str, token: int, length: int, at_once: int) -> list[Any]:
    dispatcher = router.server.services.dispatcher

    async def ask_for_ever() -> None:
        while True:
            facts = RequestFacts(prompt_token_ids=[token] * length, sampling=SamplingParams(max_tokens=1, seed=1))
            generation = await dispatcher.generate(
                [SequenceSpec(tenant, facts, time.monotonic() + 60)], tenant, eager=False
            )
            try:
                while not generation.lives[0].ended:
                    await generation.news()
            finally:
                generation.cancel()

    return [router.begin(ask_for_ever()) for _ in range(at_once)]


@pytest.mark.slow
def test_short_prompts_beside_a_flood_of_long_ones_get_half_of_the_work(start_router: StartRouter) -> None:
    router = start_router(prefill=0, decode=0, limits=Limits(queued=4096))
    node = ReadingNode("a0", Role.AGGREGATED, router.board, model="fake")
    router.nodes["a0"] = node
    router.announce()
    router.wait_ready()
    tasks = keep_asking(router, "flood", FLOOD, 400, at_once=60)
    view = router.server.services.pool.view
    router.wait_for(lambda: view.read_tokens_per_s() > 0, "it has read, and said how fast")
    router.wait_for(lambda: len(node.log) >= 20, "the flood has the node")
    came = len(node.log)
    tasks += keep_asking(router, "other", OTHER, 40, at_once=100)

    def read(token: int, *, after: float, until: float = 1e9) -> int:
        """Tokens of its prompts that the node read after so many seconds' work since the other key came."""
        total = result = 0
        for first, length in node.log[came:]:
            if after * READS_PER_S < total <= until * READS_PER_S and first == token:
                result += length
            total += length
        return result

    both = 2 * READS_PER_S
    router.wait_for(lambda: read(FLOOD, after=0) + read(OTHER, after=0) > both, "two seconds of work", 30)
    flood, other = (read(token, after=1.0, until=2.0) for token in (FLOOD, OTHER))
    assert other / (other + flood) == pytest.approx(0.5, abs=0.1)
    assert router.metric("tandem_sequences_paused_total") > 0
    for task in tasks:
        task.cancel()
    router.wait_for(router.idle, "nothing is left")


def test_a_deadline_is_refused_with_the_time_to_come_back(start_router: StartRouter) -> None:
    router = start_router(prefill=0, limits=Limits(inflight_per_node=1))

    def ask(deadline: str) -> Any:
        return router.client.post(
            "/v1/completions", json={"prompt": "the fox", "max_tokens": 2}, headers={"x-tandem-deadline": deadline}
        )

    assert ask("5").status_code == 200
    for wrong in ("0", "-1", "soon", "nan", "inf"):
        assert error_of(ask(wrong), 400)["param"] == "x-tandem-deadline"
    router.nodes["d0"].set(pause_at=1)
    with router.stream(max_tokens=3) as events:
        events.text(count=1)
        late = ask("0.1")
        assert error_of(late, 503)["code"] == "deadline_out_of_reach"
        assert int(late.headers["retry-after"]) >= 1
        router.look(lambda: router.server.services.dispatcher.admission.waits.between_ends.observe(30.0))
        occupied = router.begin(router.server.services.dispatcher.admission.acquire("", AskedPlaces(), 1e9))
        router.wait_for(lambda: router.server.services.dispatcher.queued == 1, "one waits")
        refused = ask("2")
        assert refused.json()["error"]["code"] == "deadline_out_of_reach"
        assert int(refused.headers["retry-after"]) >= 25
        assert router.metric("tandem_requests_refused_total", reason="deadline") == 1
        occupied.cancel()
        router.nodes["d0"].resume()


def test_a_keys_part_is_as_its_tokens_per_minute(start_router: StartRouter) -> None:
    keys = (
        ApiKey("half", "a", tokens_per_minute=500),
        ApiKey("most", "b", tokens_per_minute=1000),
        ApiKey("none", "c"),
    )
    router = start_router(prefill=0, api_keys=keys)
    weight_of = router.server.services.keys.weight_of
    assert [weight_of(name) for name in ("half", "most", "none", "")] == [0.5, 1.0, 1.0, 1.0]

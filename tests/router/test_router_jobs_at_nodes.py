"""A router and a real node service with the real scheduler under continuum; only the model is fake."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from tandem.api.text.tokenizer import Tokenizer
from tandem.engine.config import SchedulerConfig, SchedulingPolicy
from tandem.engine.core import Engine
from tandem.engine.model.runner import FinishedStep, LayerHooks
from tandem.engine.scheduling.output import SchedulerOutput
from tandem.wire.requests import NodeStatus
from tests.engine.engine_fakes import FakeRunner
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.service_node import ServiceNode
from tests.small_model import HERMES, WEATHER

PIN_S = 600.0


class ScriptRunner(FakeRunner):
    """A runner whose every answer is this script."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(num_blocks=4096, max_model_len=2048)
        self._script = script
        self._made = Counter[str]()

    def start(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> FinishedStep:
        computed = super().start(step, hooks)
        sampled = computed.finish().sampled_token_ids
        for request_id in sampled:
            sampled[request_id] = [self._script[self._made[request_id] % len(self._script)]]
            self._made[request_id] += 1
        return computed


class PinningNode(ServiceNode):
    def __init__(self, script: list[int]) -> None:
        config = SchedulerConfig(policy=SchedulingPolicy.CONTINUUM, pin_seconds=PIN_S, max_num_batched_tokens=64)
        super().__init__("n0", ScriptRunner(script), config, debug=True)
        self.info = msgspec.structs.replace(self.info, pin_seconds=PIN_S)


Agent = Callable[..., httpx.Response]


@pytest.fixture
def cluster(start_router: StartRouter, tokenizer: Tokenizer) -> tuple[RunningRouter, PinningNode, Agent]:
    script = tokenizer.encode("I look. " + HERMES, special=False)
    router = start_router(prefill=0, decode=0)
    node = PinningNode(script)
    router.nodes["n0"] = node  # type: ignore[assignment]
    router.announce()
    router.wait_ready()

    def turn(content: str, job: str, **fields: Any) -> httpx.Response:
        return router.chat(content, tools=[WEATHER], max_tokens=len(script), job_id=job, **fields)

    return router, node, turn


def wait(router: RunningRouter, node: PinningNode, condition: Callable[[NodeStatus], bool], what: str) -> None:
    router.wait_for(lambda: condition(node.service.status()), what)


def test_a_job_from_its_first_turn_to_its_last(cluster: tuple[RunningRouter, PinningNode, Agent]) -> None:
    router, node, turn = cluster
    text = "a prompt goes in and an answer comes out " * 4
    first = turn(text, "j").json()
    assert first["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    wait(router, node, lambda status: status.pinned_requests == 1, "the first turn is pinned")
    assert node.service.status().pinned_blocks > 0

    second = turn(text, "j")
    assert "its job's last turn is there" in second.headers["x-tandem-decision"]
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    wait(router, node, lambda status: status.counters.pins_met == 1, "the second turn is met")
    assert turn(text, "j", is_last_step=True).status_code == 200
    wait(router, node, lambda status: status.pinned_requests == 0, "the last turn ends the pin")
    status = node.service.status()
    assert status.free_blocks == status.total_blocks
    assert status.counters.pins_ended == {"next_turn": 2}


def test_the_node_learns_the_tool_from_the_routers_word(cluster: tuple[RunningRouter, PinningNode, Agent]) -> None:
    router, node, turn = cluster
    engine = node.service._engine
    assert isinstance(engine, Engine)
    pins = engine.scheduler.state.pins
    assert pins is not None
    pins.times.took(["weather"], 10 * PIN_S)  # type: ignore[attr-defined]  # as one learns it
    turn("what is it like outside, and should I take an umbrella with me?", "j")
    wait(router, node, lambda status: status.counters.pins_ended == {"slow_tool": 1}, "the pin ends")
    assert node.service.status().pinned_requests == 0


@pytest.mark.parametrize("how", ["drain", "reset_cache"])
def test_metrics_show_pins_and_a_node_that_drains_or_is_emptied_keeps_none(
    cluster: tuple[RunningRouter, PinningNode, Agent], how: str
) -> None:
    router, node, turn = cluster
    turn("what is it like outside, and should I take an umbrella with me?", "j")
    labels = {"node": "n0", "role": "aggregated"}
    # Counters come with each fourth status.
    router.wait_for(lambda: router.metric("tandem_node_pins_made_total", **labels) == 1, "the counter")
    assert router.metric("tandem_node_pinned_requests", **labels) == 1
    assert router.metric("tandem_node_pinned_blocks", **labels) > 0
    assert getattr(node.service, how)(10)
    wait(router, node, lambda status: status.pinned_requests == 0, "the pin ends")

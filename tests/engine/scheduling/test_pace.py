"""Beside decodes, prompts get as many tokens as fit into a step of the wanted length."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tandem.base.errors import ConfigurationError
from tandem.engine.config import SchedulerConfig, SchedulingPolicy
from tandem.engine.core import Engine
from tandem.engine.model.runner import FinishedStep, LayerHooks
from tandem.engine.scheduling.output import SchedulerOutput
from tandem.engine.scheduling.pace import FEWEST_TOKENS, Pace
from tandem.wire.sampling import SamplingParams
from tests.clock import Clock
from tests.engine.engine_fakes import FakeRunner, make_scheduler
from tests.engine.made_requests import made_request
from tests.engine.scheduling.driving import Driver, FakeConnector, consume, produce

# A core that needs 20 ms for a step and a millisecond for each token of a prompt.
FIXED_S, TOKEN_S = 0.02, 0.001


def step_of(num_tokens: int) -> float:
    return FIXED_S + TOKEN_S * num_tokens


def driver(**config: object) -> Driver:
    return Driver(num_blocks=2000, max_num_batched_tokens=2048, **{"max_model_len": 6000, **config})  # type: ignore[arg-type]


def paced(**config: object) -> Driver:
    """One request decodes, and a step with a long prompt has taken ten times as long as it should."""
    world = driver(step_target_ms=200, **config)
    world.add("decodes", 6, max_tokens=100)
    step, _ = world.step()
    step.num_prompt_tokens = 2000
    world.scheduler.took(step, 2.0)
    return world


class TestPace:
    @pytest.mark.parametrize(
        ("target_ms", "steps", "tokens"),
        [
            pytest.param(200, [(100, 0.2)], math.inf, id="nothing is limited before a step was too long"),
            pytest.param(0, [(2048, 100.0)], math.inf, id="nor without a target"),
            pytest.param(200, [(1000, 1.0), (10, step_of(10))], 200, id="the short end of a prompt says nothing"),
            pytest.param(10, [(512, 30.0)], FEWEST_TOKENS, id="prompts go on where decodes alone take too long"),
        ],
    )
    def test_so_many_tokens_fit(self, target_ms: float, steps: list[tuple[int, float]], tokens: float) -> None:
        pace = Pace(target_ms)
        for step in steps:
            pace.took(*step)
        assert pace.tokens == tokens

    @pytest.mark.parametrize("first", [150, 400, 2048])
    def test_it_settles_where_a_step_takes_as_long_as_it_should(self, first: int) -> None:
        pace = Pace(200)
        pace.took(2048, step_of(2048))
        pace.took(first, step_of(first))
        for _ in range(10):
            pace.took(int(pace.tokens), step_of(int(pace.tokens)))
        assert step_of(int(pace.tokens)) == pytest.approx(0.2, rel=0.03)

    def test_after_one_step_that_was_slow_by_chance_it_comes_back(self) -> None:
        pace = Pace(200)
        pace.took(180, 5.0)
        for _ in range(5):
            pace.took(int(pace.tokens), step_of(int(pace.tokens)))
        assert pace.tokens > 170

    @pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
    def test_a_target_that_is_none_is_refused(self, wrong: float) -> None:
        with pytest.raises(ConfigurationError, match=r"scheduler\.step_target_ms must be (from 0|a finite)"):
            SchedulerConfig(step_target_ms=wrong)


class TestScheduler:
    @pytest.mark.parametrize(
        ("config", "prompts", "steps"),
        [
            pytest.param({}, {"long": 450}, [{"long": n} for n in (200, 200, 50, 1)], id="begun and under way"),
            pytest.param({}, {"a": 150, "b": 150}, [{"a": 150, "b": 50}, {"a": 1, "b": 100}], id="several share it"),
            pytest.param(
                {"chunked_prefill": False, "max_model_len": 2000}, {"long": 450}, [{"long": 450}], id="at once or never"
            ),
        ],
    )
    def test_prompts_get_what_fits_beside_a_decode(
        self, config: dict[str, Any], prompts: dict[str, int], steps: list[dict[str, int]]
    ) -> None:
        world = paced(**config)
        for name, length in prompts.items():
            world.add(name, length)
        for expected in steps:
            assert world.step()[0].num_scheduled_tokens == {"decodes": 1, **expected}

    def test_where_no_request_decodes_nothing_is_limited(self) -> None:
        world = paced()
        world.abort("decodes")
        world.add("long", 450)
        assert world.step()[0].num_scheduled_tokens == {"long": 450}

    def test_a_decode_with_drafts_is_no_prompt(self) -> None:
        world = paced(num_speculative_tokens=3)
        world.scheduler.requests["decodes"].spec_token_ids = [1, 2, 3]
        world.add("long", 450)
        step = world.schedule()
        assert step.num_scheduled_tokens == {"decodes": 4, "long": 200}
        assert step.num_prompt_tokens == 200

    def test_a_request_that_is_one_token_behind_is_not_kept_waiting_by_prompts(self) -> None:
        world = paced()
        world.add("long", 450)
        shared = list(range(4 * 4 + 1))
        world.add("known", shared, max_tokens=1)
        assert "known" not in world.step()[0].num_scheduled_tokens, "its turn comes after the prompt before it"
        world.run()
        world.add("more", 6, max_tokens=100)
        world.step()
        world.add("again", shared)
        assert world.step()[0].num_scheduled_tokens["again"] == 1


class TimedRunner(FakeRunner):
    """A runner whose steps take time in proportion to their prompt tokens."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(num_blocks=2000, max_model_len=6000)
        self.clock = clock

    def start(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> FinishedStep:
        computed = super().start(step, hooks)
        runner, seconds = self, step_of(step.total_num_scheduled_tokens)

        class Slow(FinishedStep):
            def finish(self):
                runner.clock.now += seconds
                return super().finish()

        return Slow(computed.finish())


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_the_engine_measures_its_steps_and_keeps_them_as_short_as_asked(ahead: bool) -> None:
    clock = Clock(0.0)
    runner = TimedRunner(clock)
    engine = Engine(
        make_scheduler(runner, config=SchedulerConfig(step_target_ms=200)), runner, None, ahead=ahead, clock=clock
    )

    def add(name: str, prompt: int, max_tokens: int) -> None:
        tokens = [100 + (len(name) * 7 + i) % 1000 for i in range(prompt)]
        engine.add_request(made_request(name, tokens, SamplingParams(max_tokens=max_tokens, temperature=0)))

    add("decodes", 1500, 200)
    while not engine.step().updates:
        pass
    add("long", 1500, 1)
    times = []
    while "long" in engine.scheduler.requests:
        before = clock.now
        engine.step()
        times.append(clock.now - before)
    assert max(times[3:]) == pytest.approx(0.2, rel=0.1)


def test_without_decodes_a_step_is_four_times_as_long() -> None:
    world = slow()
    for name, length in (("a", 40), ("b", 40), ("c", 40), ("long", 400)):
        world.add(name, length, max_tokens=1)
    steps = [world.step()[0].num_scheduled_tokens for _ in range(3)]
    assert steps == [{"a": 40, "b": 40, "c": 40, "long": 136}, {"long": 256}, {"long": 8}]


def test_a_scheduler_whose_steps_are_timed_begins_with_short_ones() -> None:
    world = driver(step_target_ms=200, is_timed=True)
    world.add("long", 3000, max_tokens=1)
    step, _ = world.step()
    assert step.num_scheduled_tokens == {"long": 256}
    world.scheduler.took(step, 0.01)
    assert world.step()[0].num_scheduled_tokens == {"long": 2048}


def slow(**config: object) -> Driver:
    """64 prompt tokens take as long as a step should; nothing decodes."""
    world = driver(step_target_ms=200, **config)
    step, _ = world.step()
    step.num_prompt_tokens = 2000
    world.scheduler.took(step, 20.0)
    return world


class TestBesideALongPrompt:
    """A prompt of 2,000 tokens has begun, and gets 256 in a step."""

    @pytest.fixture
    def world(self) -> Driver:
        return self.begun()

    def begun(self, **config: object) -> Driver:
        world = slow(**config)
        world.add("long", 2000, max_tokens=1)
        assert world.step()[0].num_scheduled_tokens == {"long": 256}
        return world

    @pytest.mark.parametrize(
        ("config", "begun", "steps"),
        [
            pytest.param({}, 1, [({"short": 40}, {"long": 216, "short": 40}), ({}, {"long": 256})], id="in the next step"),
            pytest.param({}, 7, [({"short": 40}, {"long": 208, "short": 40})], id="the long one's end does not wait"),
            pytest.param(
                {}, 1,
                [({"middle": 400}, {"long": 128, "middle": 128}), ({"short": 40}, {"long": 128, "middle": 88, "short": 40})],
                id="one that takes several steps leaves half to quicker ones",
            ),
            pytest.param({}, 1, [({"second": 600}, {"long": 256})], id="one of nearly its length waits for its turn"),
            pytest.param(
                {"policy": SchedulingPolicy.PRIORITY}, 1,
                [({"less urgent": 40}, {"long": 256}), ({"alike": 40}, {"long": 216, "alike": 40})],
                id="a less urgent one waits",
            ),
            pytest.param(
                {"connector": FakeConnector()}, 1, [({"sent away": 1400, "short": 40}, {"long": 216, "short": 40})],
                id="a long one that goes to another node waits for its turn",
            ),
        ],
    )  # fmt: skip
    def test_a_shorter_one_is_computed(
        self, config: dict[str, Any], begun: int, steps: list[tuple[dict[str, int], dict[str, int]]]
    ) -> None:
        world = self.begun(**config)
        world.steps(begun - 1)
        for added, expected in steps:
            for name, length in added.items():
                transfer = produce() if name == "sent away" else None
                world.add(name, length, max_tokens=1, priority=int(name == "less urgent"), transfer=transfer)
            assert world.step()[0].num_scheduled_tokens == expected

    def test_also_behind_others_that_wait_and_keep_their_turns(self, world: Driver) -> None:
        for name, length in (("second", 1500), ("third", 1500), ("short", 40)):
            world.add(name, length, max_tokens=1)
        assert world.step()[0].num_scheduled_tokens == {"long": 216, "short": 40}
        world.run()
        began = [name for name in world.updates if name != "short"]
        assert began == ["long", "second", "third"]

    def test_many_short_ones_get_half_of_each_step(self, world: Driver) -> None:
        for number in range(40):
            world.add("s" * (number + 1), 60, max_tokens=1)
        while (left := missing(world, "long")) > 256:
            given = world.step()[0].num_scheduled_tokens
            assert given["long"] == 128
            assert sum(given.values()) == 256 or left < 512

    def test_what_is_cached_need_not_be_computed(self) -> None:
        world = slow()
        chat = list(range(800))
        world.add("first turn", chat, max_tokens=1)
        world.run()
        world.add("long", 2000, max_tokens=1)
        world.step()
        world.add("next turn", [*chat, *range(900, 920)], max_tokens=1)
        assert world.step()[0].num_scheduled_tokens == {"long": 236, "next turn": 20}

    def test_kv_that_comes_from_another_node_is_sent_for_meanwhile(self) -> None:
        connector = FakeConnector()
        world = self.begun(connector=connector)
        connector.offers["moved"] = (1400, True)
        world.add("moved", 1400, max_tokens=2, transfer=consume())
        world.add("short", 40, max_tokens=1)
        assert world.step()[0].num_scheduled_tokens == {"long": 216, "short": 40}
        assert ("alloc", "moved", 1400) in connector.calls


def missing(world: Driver, request_id: str) -> int:
    request = world.scheduler.requests[request_id]
    return request.num_tokens - request.num_computed_tokens

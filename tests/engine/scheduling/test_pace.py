"""Beside decodes, prompts get as many tokens as fit into a step of the wanted length."""

from __future__ import annotations

import math

import pytest

from tandem.base.errors import ConfigurationError
from tandem.engine.config import SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.runner import FinishedStep, LayerHooks
from tandem.engine.scheduling.output import SchedulerOutput
from tandem.engine.scheduling.state import FEWEST_TOKENS, Pace
from tandem.wire.sampling import SamplingParams
from tests.engine.engine_fakes import FakeRunner, make_scheduler
from tests.engine.made_requests import made_request
from tests.engine.scheduling.driving import Driver

# A core that needs 20 ms for a step and a millisecond for each token of a prompt.
FIXED_S, TOKEN_S = 0.02, 0.001


def step_of(num_tokens: int) -> float:
    return FIXED_S + TOKEN_S * num_tokens


def driver(**config: object) -> Driver:
    return Driver(num_blocks=2000, max_model_len=6000, max_num_batched_tokens=2048, **config)


def paced(**config: object) -> Driver:
    """One request decodes, and a step with a long prompt has taken ten times as long as it should."""
    world = driver(step_target_ms=200, **config)
    world.add("decodes", 6, max_tokens=100)
    step, _ = world.step()
    step.num_prompt_tokens = 2000
    world.scheduler.took(step, 2.0)
    return world


class TestPace:
    def test_nothing_is_limited_before_a_step_was_too_long(self) -> None:
        pace = Pace(200)
        pace.took(100, 0.2)
        assert pace.tokens == math.inf

    @pytest.mark.parametrize("first", [150, 400, 2048])
    def test_it_settles_where_a_step_takes_as_long_as_it_should(self, first: int) -> None:
        pace = Pace(200)
        pace.took(2048, step_of(2048))
        pace.took(first, step_of(first))
        for _ in range(10):
            pace.took(int(pace.tokens), step_of(int(pace.tokens)))
        assert step_of(int(pace.tokens)) == pytest.approx(0.2, rel=0.03)

    def test_the_short_end_of_a_prompt_says_nothing_of_what_would_fit(self) -> None:
        pace = Pace(200)
        pace.took(1000, 1.0)
        pace.took(10, step_of(10))
        assert pace.tokens == 200

    def test_prompts_go_on_where_decodes_alone_take_too_long(self) -> None:
        pace = Pace(10)
        pace.took(512, 30.0)
        assert pace.tokens == FEWEST_TOKENS

    def test_after_one_step_that_was_slow_by_chance_it_comes_back(self) -> None:
        pace = Pace(200)
        pace.took(180, 5.0)
        for _ in range(5):
            pace.took(int(pace.tokens), step_of(int(pace.tokens)))
        assert pace.tokens > 170

    def test_without_a_target_nothing_is_limited(self) -> None:
        pace = Pace(0)
        pace.took(2048, 100.0)
        assert pace.tokens == math.inf

    @pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
    def test_a_target_that_is_none_is_refused(self, wrong: float) -> None:
        with pytest.raises(ConfigurationError, match=r"scheduler\.step_target_ms must be (from 0|a finite)"):
            SchedulerConfig(step_target_ms=wrong)


class TestScheduler:
    def test_a_new_prompt_and_one_under_way_get_what_fits_beside_a_decode(self) -> None:
        world = paced()
        world.add("long", 450)
        given = [world.step()[0].num_scheduled_tokens for _ in range(4)]
        assert [step["long"] for step in given] == [200, 200, 50, 1]
        assert all(step["decodes"] == 1 for step in given)

    def test_several_prompts_share_it(self) -> None:
        world = paced()
        world.add("a", 150)
        world.add("b", 150)
        assert [dict(world.step()[0].num_scheduled_tokens) for _ in range(2)] == [
            {"decodes": 1, "a": 150, "b": 50},
            {"decodes": 1, "a": 1, "b": 100},
        ]

    def test_nobody_waits_so_nothing_is_limited(self) -> None:
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
        assert "known" not in world.step()[0].num_scheduled_tokens, (
            "its turn comes after the prompt before it"
        )
        world.run()
        world.add("more", 6, max_tokens=100)
        world.step()
        world.add("again", shared)
        assert world.step()[0].num_scheduled_tokens["again"] == 1

    def test_a_prompt_that_must_be_computed_at_once_is(self) -> None:
        world = Driver(
            num_blocks=2000,
            max_model_len=2000,
            max_num_batched_tokens=2048,
            chunked_prefill=False,
            step_target_ms=200,
        )
        world.add("decodes", 6, max_tokens=100)
        step, _ = world.step()
        step.num_prompt_tokens = 2000
        world.scheduler.took(step, 2.0)
        world.add("long", 450)
        assert world.step()[0].num_scheduled_tokens["long"] == 450


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedRunner(FakeRunner):
    """A runner whose steps take time in proportion to their prompt tokens."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(num_blocks=2000, max_model_len=6000)
        self._clock = clock

    def start(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> FinishedStep:
        computed = super().start(step, hooks)
        runner, seconds = self, step_of(step.total_num_scheduled_tokens)

        class Slow(FinishedStep):
            def finish(self):
                runner._clock.now += seconds
                return super().finish()

        return Slow(computed.finish())


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_the_engine_measures_its_steps_and_keeps_them_as_short_as_asked(ahead: bool) -> None:
    clock = Clock()
    runner = TimedRunner(clock)
    engine = Engine(
        make_scheduler(runner, config=SchedulerConfig(step_target_ms=200)),
        runner,
        None,
        ahead=ahead,
        clock=clock,
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


def test_prompts_without_decodes_share_a_step_only_while_it_is_short() -> None:
    world = driver(step_target_ms=200)
    step, _ = world.step()
    step.num_prompt_tokens = 2000
    world.scheduler.took(step, 20.0)  # 64 fit
    for name, length in (("long", 1500), ("a", 40), ("b", 40), ("c", 40), ("d", 200)):
        world.add(name, length, max_tokens=1)
    steps = [world.step()[0].num_scheduled_tokens for _ in range(3)]
    assert steps[0] == {"long": 1500}, "the first in line has all that it needs"
    assert steps[1] == {"a": 40, "b": 40, "c": 40, "d": 136}, "four times what fits"
    assert steps[2] == {"d": 64}

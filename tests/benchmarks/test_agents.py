"""The benchmark of agents plays the same jobs under every policy, to their end."""

from __future__ import annotations

import pytest

from benchmarks import agents
from tandem.engine.config import SchedulingPolicy


@pytest.fixture(autouse=True)
def few_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("JOBS", 10), ("JOBS_THAT_FIT", 4), ("MORE", 4)):
        monkeypatch.setattr(agents, name, value)


def test_pins_save_prompts_that_would_be_computed_again():
    plain = agents.Play(0, SchedulingPolicy.FCFS).run()
    pinned = agents.Play(0, SchedulingPolicy.CONTINUUM).run()
    assert plain.pins_made == 0
    assert pinned.pins_met > 0
    assert pinned.prompt_tokens_computed < plain.prompt_tokens_computed
    assert pinned.mean_s < plain.mean_s


def test_steps_that_are_taken_at_once_leave_the_same_pins():
    at_once, by_steps = (agents.Play(1, SchedulingPolicy.CONTINUUM, by_steps=each).run() for each in (False, True))
    assert by_steps.mean_s == pytest.approx(at_once.mean_s, rel=1e-6)
    assert (by_steps.pins_ended, by_steps.prompt_tokens_cached) == (at_once.pins_ended, at_once.prompt_tokens_cached)

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
    assert agents.Play(0, SchedulingPolicy.CONTINUUM).run() == pinned

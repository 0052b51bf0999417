from __future__ import annotations

import msgspec
import pytest

from tandem.router.policy.views import MIN_STEPS, NodeRates
from tandem.wire.nodes import Role
from tandem.wire.requests import NodeCounters, NodeStatus
from tests.router.test_router_pool import info, status


def counted(role: Role, **counters: float) -> NodeStatus:
    waiting_tokens = int(counters.pop("waiting_tokens", 0))
    told = msgspec.convert(counters, NodeCounters)
    return status(info("n", role=role), counters=told, waiting_tokens=waiting_tokens)


def test_a_prefill_nodes_rate_is_its_prompt_tokens_over_its_steps() -> None:
    rates = NodeRates()
    rates.on_status(counted(Role.PREFILL, prompt_tokens_computed=1000, step_seconds=1.0, steps=5))
    assert rates.prefill_tokens_per_s is None
    rates.on_status(counted(Role.PREFILL, prompt_tokens_computed=1500, step_seconds=1.25, steps=6))
    assert rates.prefill_tokens_per_s == pytest.approx(2000)


def test_a_few_tokens_are_collected_before_they_are_believed() -> None:
    rates = NodeRates()
    rates.on_status(counted(Role.PREFILL))
    rates.on_status(counted(Role.PREFILL, prompt_tokens_computed=10, step_seconds=0.5, steps=1))
    assert rates.prefill_tokens_per_s is None
    rates.on_status(counted(Role.PREFILL, prompt_tokens_computed=200, step_seconds=1.0, steps=2))
    assert rates.prefill_tokens_per_s == pytest.approx(200)


def test_a_decode_nodes_step_is_measured_when_it_only_decodes() -> None:
    rates = NodeRates()
    rates.on_status(counted(Role.DECODE))
    rates.on_status(counted(Role.DECODE, decode_steps=10, decode_seconds=0.2))
    assert rates.step_s == pytest.approx(0.02)
    rates.on_status(
        counted(
            Role.DECODE, decode_steps=20, decode_seconds=0.4, steps=40, step_seconds=9.0, prompt_tokens_computed=500
        )
    )
    assert rates.step_s == pytest.approx(0.02), "steps with prompts count for nothing"
    assert rates.prefill_tokens_per_s is None


def test_what_runs_when_nothing_else_does_is_in_no_rate() -> None:
    """The lines of a batch are read in short steps. Requests would go to nodes that had read more of them, or fewer."""
    idle = {"idle_steps": 90, "idle_seconds": 7.0, "idle_tokens_read": 2000, "idle_tokens_written": 300}
    rates = NodeRates()
    rates.on_status(counted(Role.PREFILL, waiting_tokens=9))
    rates.on_status(
        counted(Role.PREFILL, prompt_tokens_computed=2500, step_seconds=7.25, steps=91, waiting_tokens=9, **idle)
    )
    assert rates.prefill_tokens_per_s == rates.line_tokens_per_s == pytest.approx(2000)


def test_a_few_steps_are_collected_before_they_are_believed() -> None:
    rates = NodeRates()
    rates.on_status(counted(Role.AGGREGATED))
    rates.on_status(counted(Role.AGGREGATED, decode_steps=MIN_STEPS - 1, decode_seconds=9.0))
    assert rates.step_s is None
    rates.on_status(counted(Role.AGGREGATED, decode_steps=MIN_STEPS, decode_seconds=10.0))
    assert rates.step_s == pytest.approx(10.0 / MIN_STEPS)


def test_a_status_without_counters_changes_no_rate() -> None:
    rates = NodeRates()
    without = status(info("n", role=Role.DECODE), counters=None)
    rates.on_status(without)
    rates.on_status(counted(Role.DECODE, decode_steps=10, decode_seconds=0.5))
    rates.on_status(without)
    rates.on_status(counted(Role.DECODE, decode_steps=20, decode_seconds=0.7))
    rates.on_status(without)
    assert rates.step_s == pytest.approx(0.02)


def test_a_decode_nodes_rate_comes_from_what_it_read_itself() -> None:
    rates = NodeRates()
    rates.on_local_prefill(tokens=10, seconds=1.0)  # too few to say anything
    assert rates.prefill_tokens_per_s is None
    rates.on_local_prefill(tokens=500, seconds=0.5)
    assert rates.prefill_tokens_per_s == pytest.approx(1000)
    rates.on_local_prefill(tokens=500, seconds=0.25)
    assert 1000 < (rates.prefill_tokens_per_s or 0) < 2000


def test_a_line_moves_as_fast_as_prompts_are_read_beside_all_else() -> None:
    rates = NodeRates()

    def report(waiting_tokens: int, **counters: float) -> None:
        rates.on_status(msgspec.structs.replace(counted(Role.AGGREGATED, **counters), waiting_tokens=waiting_tokens))

    report(0, prompt_tokens_computed=1000, step_seconds=1.0, steps=5)
    report(900, prompt_tokens_computed=1000, step_seconds=1.0, steps=5)
    assert rates.line_tokens_per_s is None
    report(500, prompt_tokens_computed=1400, step_seconds=3.0, steps=10)
    assert rates.line_tokens_per_s == pytest.approx(200)
    report(0, prompt_tokens_computed=1900, step_seconds=3.5, steps=12)
    report(300, prompt_tokens_computed=1900, step_seconds=9.0, steps=90)
    assert rates.line_tokens_per_s == pytest.approx(200), "nothing waited in between"
    rates.on_status(status(info("n", role=Role.AGGREGATED), counters=None))
    report(300, prompt_tokens_computed=2900, step_seconds=99.0, steps=900)
    assert rates.line_tokens_per_s == pytest.approx(200), "nothing waited in between"

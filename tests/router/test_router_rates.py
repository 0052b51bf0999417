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


def read(tokens: int, seconds: float, steps: int = 1) -> dict[str, float]:
    return {"prompt_tokens_computed": tokens, "step_seconds": seconds, "steps": steps}


def decoded(steps: int, seconds: float) -> dict[str, float]:
    return {"decode_steps": steps, "decode_seconds": seconds}


@pytest.mark.parametrize(
    ("role", "reports", "tokens_per_s", "step_s"),
    [
        pytest.param("prefill", [read(1000, 1.0)], None, None, id="one report says nothing"),
        pytest.param("prefill", [read(1000, 1.0), read(1500, 1.25)], 2000, None, id="prompt tokens over steps"),
        pytest.param("prefill", [{}, read(10, 0.5)], None, None, id="a few tokens are not believed"),
        pytest.param("prefill", [{}, read(10, 0.5), read(200, 1.0)], 200, None, id="they are collected"),
        pytest.param("decode", [{}, decoded(10, 0.2)], None, 0.02, id="a step that only decodes"),
        pytest.param(
            "decode", [{}, decoded(10, 0.2), decoded(20, 0.4) | read(500, 9.0, 40)], None, 0.02,
            id="steps with prompts count for nothing",
        ),
        pytest.param("aggregated", [{}, decoded(MIN_STEPS - 1, 9.0)], None, None, id="a few steps are not believed"),
        pytest.param(
            "aggregated", [{}, decoded(MIN_STEPS - 1, 9.0), decoded(MIN_STEPS, 10.0)], None, 10.0 / MIN_STEPS,
            id="they are collected as well",
        ),
    ],
)  # fmt: skip
def test_rates_are_of_what_counters_say(
    role: str, reports: list[dict[str, float]], tokens_per_s: float | None, step_s: float | None
) -> None:
    rates = NodeRates()
    for report in reports:
        rates.on_status(counted(Role(role), **report))
    for found, expected in ((rates.prefill_tokens_per_s, tokens_per_s), (rates.step_s, step_s)):
        assert found == (pytest.approx(expected) if expected is not None else None)


def test_what_runs_when_nothing_else_does_is_in_no_rate() -> None:
    """The lines of a batch are read in short steps. Requests would go to nodes that had read more of them, or fewer."""
    idle = {"idle_steps": 90, "idle_seconds": 7.0, "idle_tokens_read": 2000, "idle_tokens_written": 300}
    rates = NodeRates()
    rates.on_status(counted(Role.PREFILL, waiting_tokens=9))
    rates.on_status(
        counted(Role.PREFILL, prompt_tokens_computed=2500, step_seconds=7.25, steps=91, waiting_tokens=9, **idle)
    )
    assert rates.prefill_tokens_per_s == rates.line_tokens_per_s == pytest.approx(2000)


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

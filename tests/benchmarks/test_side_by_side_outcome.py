from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.lib.servers import TANDEM_AGGREGATED, TANDEM_PD, VLLM_AGGREGATED, VLLM_PD
from benchmarks.lib.tables import seen
from benchmarks.side_by_side.loads import LONG, QUICK, SHARED, cells_of
from benchmarks.side_by_side.outcome import (
    Absence,
    ComparisonOutcome,
    ExaminedSystem,
    Handovers,
    Start,
    figure,
    headlines,
    judge,
    shown,
    ttft,
)
from tandem.loadgen.metrics import Summary, summarize
from tandem.loadgen.timeline import Timeline

TITLES = {
    TANDEM_PD: "Tandem 1P+1D",
    TANDEM_AGGREGATED: "Tandem aggregated",
    VLLM_AGGREGATED: "vLLM aggregated",
    VLLM_PD: "vLLM 1P+1D",
}


def summary(first: float, gap: float, requests: int = 4) -> Summary:
    """Requests of four tokens, one after another."""
    timelines = []
    for _ in range(requests):
        made = Timeline("x", max_tokens=4, prompt_tokens=8)
        made.chunk_times = [first + gap * step for step in range(4)]
        timelines.append(made)
    return summarize("x", timelines, requests * (first + 3 * gap))


def outcome(*examined: ExaminedSystem) -> ComparisonOutcome:
    return ComparisonOutcome(
        settings={"plan": QUICK, "slo": "ttft ≤ 1000 ms"},
        titles=dict(TITLES),
        cells=cells_of(QUICK),
        examined=list(examined),
    )


def everywhere(system: str, first: float, gap: float, run: int = 0) -> list[ExaminedSystem]:
    return [ExaminedSystem(system, run, cell, summary(first, gap)) for cell in cells_of(QUICK)]


def test_a_figure_is_the_median_and_the_spread_of_the_runs() -> None:
    found = outcome(
        *(ExaminedSystem(TANDEM_PD, run, "1 user", summary(t, 0.01)) for run, t in enumerate((0.3, 0.1, 0.2))),
        ExaminedSystem(TANDEM_PD, 0, "8 users", summary(9.0, 0.01)),
        ExaminedSystem(VLLM_PD, 0, "1 user", summary(9.0, 0.01)),
    )
    value = figure(found, TANDEM_PD, "1 user", ttft)
    assert (value.median, value.low, value.high) == pytest.approx((200, 100, 300))


def test_floors_are_ratios_in_which_more_is_better() -> None:
    found = outcome(
        *everywhere(TANDEM_PD, first=0.1, gap=0.01),
        *everywhere(VLLM_PD, first=0.5, gap=0.07),
        *everywhere(TANDEM_AGGREGATED, first=0.1, gap=0.01),
        *everywhere(VLLM_AGGREGATED, first=0.09, gap=0.014),
    )
    floors = {floor.claim: floor for floor in judge(found)}
    assert len(floors) == 9
    first_token = floors["1P+1D beside vLLM's: time to first token, 1 user"]
    assert (first_token.measured, first_token.met) == (pytest.approx(5.0), True)
    tail = floors["1P+1D beside vLLM's: p99 inter-token latency, 8 users"]
    assert (tail.measured, tail.met) == (pytest.approx(7.0), False)
    rate = floors["1P+1D beside vLLM's: output tokens/s, 8 users"]
    assert (rate.measured, rate.met) == (pytest.approx(0.71 / 0.13), True)
    slower = floors["aggregated beside vLLM's: time to first token, 1 user"]
    assert (slower.measured, slower.met) == (pytest.approx(0.9), False)
    per_token = floors["aggregated beside vLLM's: time per output token, 1 user"]
    assert (per_token.measured, per_token.met) == (pytest.approx(1.4), True)


@pytest.mark.parametrize(("first_answers", "met"), [((24.0, 30.0, 20.0), True), ((26.0,), False)])
def test_a_server_is_prompt_if_its_first_token_is(first_answers: tuple[float, ...], met: bool) -> None:
    found = outcome()
    found.starts = [Start(TANDEM_PD, run, 1.0, at, 0.0) for run, at in enumerate(first_answers)]
    (promptness,) = [floor for floor in judge(found) if floor.measured is not None]
    assert (promptness.unit, promptness.met) == ("s", met)


def test_without_its_peer_a_floor_is_neither_met_nor_missed() -> None:
    assert all(floor.met is None for floor in judge(outcome(*everywhere(VLLM_PD, 0.1, 0.01))))


def test_the_table_has_every_system_under_every_load_and_says_what_is_missing() -> None:
    found = outcome(*everywhere(TANDEM_PD, 0.1, 0.01), *everywhere(TANDEM_PD, 0.3, 0.03, run=1))
    found.starts = [Start(TANDEM_PD, 0, 12.5, 13.5, 0.0)]
    found.absences = [Absence(VLLM_PD, 1, "not healthy [after] 600 s")]
    text = io.StringIO()
    console = Console(file=text, width=160)
    for one in shown(found):
        console.print(one)
    written = text.getvalue()
    for words in (
        "Medians of 2 runs",
        "200 (100–300)",
        "Tandem 1P+1D",
        "8 users",
        LONG,
        SHARED,
        "first token 13.5 s after the command",
    ):
        assert words in written
    assert "vLLM 1P+1D, run 2: not examined: not healthy [after] 600 s" in written
    assert headlines(found)[0] == seen("Tandem 1P+1D, 1 user: TTFT p50", 200.0, "ms")


def test_the_handover_is_held_to_the_median_of_the_runs() -> None:
    found = outcome()
    found.handovers = [
        Handovers(TANDEM_PD, 0, [4.0, 6.0, 40.0]),
        Handovers(TANDEM_PD, 1, [9.0]),
        Handovers("x", 0, [99.0]),
    ]
    (floor,) = [floor for floor in judge(found) if "handover" in floor.claim]
    assert (floor.measured, floor.met, floor.unit) == (7.5, True, "ms")
    found.handovers = [Handovers(TANDEM_PD, 0, [12.0])]
    (floor,) = [floor for floor in judge(found) if "handover" in floor.claim]
    assert floor.met is False
    (floor,) = [floor for floor in judge(outcome()) if "handover" in floor.claim]
    assert (floor.measured, floor.met) == (None, None)

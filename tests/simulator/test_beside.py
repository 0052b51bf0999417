"""What nodes take longer beside each other is found in the traces of requests that they served together."""

from __future__ import annotations

import random

import msgspec
import pytest

from tandem.router.tracing.record import NodePart, TraceRecord
from tandem.simulator.beside import in_traffic
from tandem.simulator.costs import BesideCost
from tandem.simulator.profile_client import ProfiledRequest
from tandem.wire.tracing import Span, TracePhase
from tests.simulator.worlds import node_costs

ALONE = node_costs(blocks=20_000, max_model_len=8192)
PAUSE_S = 0.5  # between two prompts
IN_TRAFFIC = 1.08  # times as long takes every step that writes


def served(beside: BesideCost, lengths: list[int], batch: int) -> list[ProfiledRequest]:
    """A prefill node reads prompts with pauses in between, while a decode node writes a batch of long answers."""
    reading: list[Span] = []
    requests: list[ProfiledRequest] = []
    now = PAUSE_S
    for number, length in enumerate(lengths):
        end = now + ALONE.step_s([(length, 0)]) * beside.prefill + beside.prefill_step_s
        spans = [Span(phase, now, end, length, 0) for phase in (TracePhase.STEP, TracePhase.PREFILL)]
        reading.append(spans[0])
        requests.append(a_request(f"read-{number}", length, "prefill", spans))
        now = end + PAUSE_S
    writing: list[Span] = []
    context, then = 100, 0.0
    while then < now:
        seconds = ALONE.step_s([], batch, batch * context) * IN_TRAFFIC
        if any(span.start <= then and then + seconds * beside.decode <= span.end for span in reading):
            seconds *= beside.decode
        writing += [
            Span(phase, then, then + seconds, 1, batch - 1) for phase in (TracePhase.STEP, TracePhase.DECODE)
        ]
        then += seconds
        context += 1
    # Their prompts, which came before
    first = [
        Span(phase, -0.1, 0.0, 100, 100 * (batch - 1)) for phase in (TracePhase.STEP, TracePhase.PREFILL)
    ]
    return [
        *requests,
        *(a_request(f"write-{number}", 100, "decode", [*first, *writing]) for number in range(batch)),
    ]


def a_request(name: str, prompt: int, role: str, spans: list[Span]) -> ProfiledRequest:
    part = NodePart(role, role, name, spans, 0.0, None, 0, None)
    times = (0.0, 0.0, spans[-1].end, 200)
    return ProfiledRequest(
        TraceRecord(name, "", "", "", None, "", "", "m", *times, prompt, 1, [], [], [], [part], []), 0.0
    )


@pytest.mark.parametrize("batch", [1, 4])
def test_what_shared_machines_cost_is_found(batch: int) -> None:
    true = BesideCost(1.3, 0.02, 1.15)
    lengths = [length for length in (128, 256, 512, 1024) for _ in range(10)]
    random.Random(1).shuffle(lengths)
    found = in_traffic(ALONE, served(true, lengths, batch))
    assert found.beside.prefill == pytest.approx(true.prefill, rel=1e-6)
    assert found.beside.prefill_step_s == pytest.approx(true.prefill_step_s, rel=1e-6)
    # Less exact, because some steps are only for the most part beside a step that reads.
    assert found.beside.decode == pytest.approx(true.decode, rel=0.02)
    assert found.decode.at(3, 700) == pytest.approx(ALONE.decode.at(3, 700) * IN_TRAFFIC, rel=0.01)
    assert found.prefill == ALONE.prefill


def test_a_step_with_a_request_that_was_not_traced_says_nothing() -> None:
    """How much work was in it is not known."""
    asked = served(BesideCost(1.3, 0.02, 1.15), [128, 256, 512, 1024] * 10, 2)
    assert in_traffic(ALONE, asked[:-1]) == ALONE


def test_a_few_steps_say_nothing() -> None:
    found = in_traffic(ALONE, served(BesideCost(1.3, 0.02, 1.0), [128, 256], 1))
    assert (found.beside.prefill, found.beside.prefill_step_s) == (1.0, 0.0)
    assert msgspec.structs.replace(found, decode=ALONE.decode, beside=BesideCost()) == ALONE

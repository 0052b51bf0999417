"""What nodes take longer beside each other is found in the traces of requests that they served together."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from tandem.router.tracing.record import NodePart, TraceRecord
from tandem.simulator.beside import in_traffic
from tandem.simulator.costs import BesideCost
from tandem.simulator.profile_client import ProfiledRequest
from tandem.wire.nodes import Role
from tandem.wire.tracing import Span, TracePhase
from tests.simulator.worlds import node_costs

ALONE = node_costs(blocks=20_000, max_model_len=8192)
OTHERS = {f"write-{turn}-1" for turn in range(1000)}  # the second answer of each batch
PAUSE_S = 0.5  # between two prompts
IN_TRAFFIC = 1.08  # times as long takes every step that writes


def served(
    beside: BesideCost,
    lengths: list[int],
    batch: int,
    busy: float = 1.0,
    every_s: float = 0.1,
    noise: float = 0.0,
    slow: float = 0.0,
) -> list[ProfiledRequest]:
    """A prefill node reads prompts with pauses in between. Meanwhile a decode node writes batches of answers: one begins `every_s`, and is
    written for this share of the time. `noise`: how much longer or shorter a step takes than it should, as a share. `slow`: the share of the
    prompts that take half as long again."""
    rng = random.Random(2)
    reading: list[Span] = []
    requests: list[ProfiledRequest] = []
    now = PAUSE_S
    for number, length in enumerate(lengths):
        alone = ALONE.step_s([(length, 0)])
        slowdown = beside.prefill + beside.prefill_step_s / alone
        work = alone * math.exp(rng.gauss(0.0, noise)) * (1.5 if rng.random() < slow else 1.0)
        end = gone_on(now, work, slowdown, busy, every_s)
        spans = [Span(phase, now, end, length, 0) for phase in (TracePhase.STEP, TracePhase.PREFILL)]
        reading.append(spans[0])
        requests.append(a_request(f"read-{number}", length, "prefill", spans))
        now = end + PAUSE_S
    for turn in range(int(now / every_s) + 1):
        begin = turn * every_s
        writing = written(beside, batch, begin, begin + busy * every_s, reading)
        # Their prompts, which came before
        first = [
            Span(phase, -2.0 - turn, -1.0 - turn, 100, 100 * (batch - 1))
            for phase in (TracePhase.STEP, TracePhase.PREFILL)
        ]
        requests += [a_request(f"write-{turn}-{number}", 100, "decode", [*first, *writing]) for number in range(batch)]
    return requests


def gone_on(now: float, left: float, slowdown: float, busy: float, every_s: float) -> float:
    """When a step that begins now and takes `left` seconds alone ends."""
    while True:
        into = now % every_s
        is_busy = into < busy * every_s
        until = now - into + (busy * every_s if is_busy else every_s)
        seconds = left * (slowdown if is_busy else 1.0)
        if now + seconds <= until:
            return now + seconds
        left -= (until - now) / (slowdown if is_busy else 1.0)
        now = math.nextafter(until, math.inf)


def written(beside: BesideCost, batch: int, begin: float, end: float, reading: list[Span]) -> list[Span]:
    spans: list[Span] = []
    context, then = 100, begin
    while then < end:
        seconds = ALONE.step_s([], batch, batch * context) * IN_TRAFFIC
        if any(span.start <= then and then + seconds * beside.decode <= span.end for span in reading):
            seconds *= beside.decode
        spans += [
            Span(phase, then, min(then + seconds, end), 1, batch - 1) for phase in (TracePhase.STEP, TracePhase.DECODE)
        ]
        then += seconds
        context += 1
    return spans


def a_request(name: str, prompt: int, role: str, spans: list[Span]) -> ProfiledRequest:
    part = NodePart(role, role, name, spans, 0.0, None, 0, None)
    times = (0.0, 0.0, spans[-1].end, 200)
    return ProfiledRequest(
        TraceRecord(name, "", "", "", None, "", "", "m", *times, prompt, 1, [], [], [], [part], []), 0.0
    )


@pytest.mark.parametrize(("batch", "busy"), [(4, 0.3), (1, 0.6), (1, 1.0), (4, 1.0)])
def test_what_shared_machines_cost_is_found(batch: int, busy: float) -> None:
    """Even where hardly any step is beside one of the other node from its beginning to its end."""
    true = BesideCost(1.3, 0.02, 1.15)
    found = in_traffic(ALONE, served(true, a_mix(10), batch, busy))
    assert found.beside.prefill == pytest.approx(true.prefill, rel=0.01)
    assert found.beside.prefill_step_s == pytest.approx(true.prefill_step_s, rel=0.05)
    # Less exact, because some steps are only for the most part beside a step that reads.
    assert found.beside.decode == pytest.approx(true.decode, rel=0.03)
    assert found.decode.at(3, 700) == pytest.approx(ALONE.decode.at(3, 700) * IN_TRAFFIC, rel=0.01)
    assert found.prefill.at(300, 0) == pytest.approx(ALONE.prefill.at(300, 0), rel=0.005)


@pytest.mark.parametrize(("noise", "slow", "busy"), [(0.1, 0.0, 0.6), (0.03, 0.2, 1.0)])
def test_it_is_found_on_a_machine_that_is_now_faster_and_now_slower(noise: float, slow: float, busy: float) -> None:
    true = BesideCost(1.2, 0.005, 1.15)
    found = in_traffic(ALONE, served(true, a_mix(30), 2, busy, noise=noise, slow=slow))
    for length in (128, 256, 512, 1024):
        alone = ALONE.step_s([(length, 0)])
        expected = alone * true.of(Role.PREFILL, alone)
        took = found.step_s([(length, 0)]) * found.beside.of(Role.PREFILL, found.step_s([(length, 0)]))
        assert took == pytest.approx(expected, rel=0.05)


def a_mix(each: int) -> list[int]:
    lengths = [length for length in (128, 256, 512, 1024) for _ in range(each)]
    random.Random(1).shuffle(lengths)
    return lengths


def test_a_step_with_a_request_that_was_not_traced_says_only_when_the_node_computed() -> None:
    """How much work was in it is not known."""
    true = BesideCost(1.3, 0.02, 1.15)
    asked = served(true, a_mix(10), 2)
    found = in_traffic(ALONE, [each for each in asked if each.record.request_id not in OTHERS])
    assert found.decode == ALONE.decode
    assert found.beside.decode == 1.0
    assert found.beside.prefill == pytest.approx(true.prefill, rel=0.01)
    few = in_traffic(ALONE, served(BesideCost(1.3, 0.02, 1.0), [128, 256], 1))
    assert (few.beside.prefill, few.beside.prefill_step_s) == (1.0, 0.0), "a few steps say nothing"
    assert msgspec.structs.replace(few, decode=ALONE.decode, beside=BesideCost()) == ALONE

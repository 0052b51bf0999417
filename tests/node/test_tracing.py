"""A node reports each phase of a traced request once, and nothing of other requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import pytest

from tandem.decode_node.node import DecodeRules
from tandem.engine.core import Engine
from tandem.engine.scheduling.output import CachedRequestData, ModelOutput, SchedulerOutput
from tandem.engine.tracing import MAX_AWAITED, MAX_SPANS, FinishedTrace, StepTimes, Tracer
from tandem.kvtransfer.base import ConnectorOutput, Handoff, LoadFailure
from tandem.node.service import NodeService
from tandem.wire.nodes import Role
from tandem.wire.requests import Cancel, Ping, Submit
from tandem.wire.sampling import SamplingParams
from tandem.wire.tracing import Span, TracePhase, TransferRecord, TransferTrace
from tests.node.test_service import ENDLESS, PATIENCE_S, ROUTER, Node, SentBatches

TRANSFER = TransferRecord("r", "received", 99, 1)


class Now:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def submit(request_id: str = "r", **fields) -> Submit:
    sampling = SamplingParams(max_tokens=3, temperature=0)
    return Submit(
        request_id, ROUTER, prompt_token_ids=[5, 6, 7], sampling=sampling, timeout_s=60.0, trace=True, **fields
    )


class ManualTracer:
    """A tracer without an engine: the test says what each step does."""

    def __init__(self, transfer: list[Span] | None = None) -> None:
        self.now = Now()
        self.done: dict[str, tuple[list[Span], int]] = {}
        self.transfers: dict[str, TransferRecord | None] = {}
        kept = {"r": TransferTrace(TRANSFER, transfer)} if transfer else {}
        self.tracer = Tracer(self.now, lambda request_id: kept.pop(request_id, None), self._done)

    def _done(self, done: FinishedTrace) -> None:
        request_id = done.submit.request_id
        assert request_id not in self.done, "told twice"
        self.done[request_id] = (done.spans, done.dropped)
        self.transfers[request_id] = done.transfer

    def begin(self, arrives: float, admitted: float, request_id: str = "r") -> None:
        self.now.at = arrives
        self.tracer.arrived(request_id)
        self.now.at = admitted
        self.tracer.admitted(submit(request_id))

    def step(
        self,
        began: float,
        scheduled: dict[str, int],
        sampled: tuple[str, ...] = (),
        transfers: ConnectorOutput | None = None,
        preempted: tuple[str, ...] = (),
    ) -> None:
        plan = SchedulerOutput([], CachedRequestData(), scheduled, sum(scheduled.values()), {}, set(), set(preempted))
        output = ModelOutput({request_id: [9] for request_id in sampled})
        times = StepTimes(began, began + 1, began + 8, began + 9)
        self.tracer.on_step(plan, output, transfers or ConnectorOutput(), times)

    def spans(self, request_id: str = "r") -> list[tuple[TracePhase, float, float, int, int]]:
        return [(s.phase, s.start, s.end, s.tokens, s.beside) for s in self.done[request_id][0]]


def test_a_prompt_in_two_chunks_and_two_tokens_are_told_with_what_ran_beside_them() -> None:
    traced = ManualTracer()
    traced.begin(arrives=1, admitted=3)
    traced.step(10, {"r": 4, "other": 6})
    traced.step(20, {"r": 2}, sampled=("r",))
    traced.step(30, {"r": 1}, sampled=("r",))
    assert traced.tracer.active
    traced.tracer.ended("r", is_held=False)
    assert traced.spans() == [
        (TracePhase.INBOX, 1, 3, 0, 0),
        (TracePhase.QUEUE, 3, 10, 0, 0),
        (TracePhase.STEP, 10, 19, 4, 6),
        (TracePhase.PREFILL, 11, 18, 4, 6),
        (TracePhase.STEP, 20, 29, 2, 0),
        (TracePhase.PREFILL, 21, 28, 2, 0),
        (TracePhase.STEP, 30, 39, 1, 0),
        (TracePhase.DECODE, 31, 38, 1, 0),
    ]
    assert not traced.tracer.active


def test_the_wait_after_a_preemption_is_told_and_so_is_what_is_computed_again() -> None:
    traced = ManualTracer()
    traced.begin(arrives=1, admitted=2)
    traced.step(10, {"r": 3}, sampled=("r",))
    traced.step(20, {"other": 1}, preempted=("r",))
    traced.step(30, {"other": 1})
    traced.step(40, {"r": 4}, sampled=("r",))
    traced.step(50, {"r": 1}, sampled=("r",))
    traced.tracer.ended("r", is_held=False)
    assert [span[:3] for span in traced.spans() if span[0] is not TracePhase.STEP][2:] == [
        (TracePhase.PREFILL, 11, 18),
        (TracePhase.PREEMPTED, 20, 40),
        (TracePhase.PREFILL, 41, 48),
        (TracePhase.DECODE, 51, 58),
    ]


@pytest.mark.parametrize("complete", [True, False])
def test_a_request_whose_kv_came_decodes_at_once_and_one_whose_kv_did_not_reads_its_prompt(complete: bool) -> None:
    traced = ManualTracer([Span(TracePhase.RECEIVE, 4, 40, 3), Span(TracePhase.REGISTER, 4, 6)])
    traced.begin(arrives=1, admitted=2)
    transfers = ConnectorOutput()
    if complete:
        transfers.finished_recving["r"] = Handoff(first_token=7, num_tokens=3)
    else:
        transfers.failed_recving["r"] = LoadFailure("lost")
    traced.step(35, {}, transfers=transfers)
    traced.step(50, {"r": 1}, sampled=("r",))
    traced.tracer.ended("r", is_held=False)
    spans = traced.spans()
    assert spans[:2] == [(TracePhase.INBOX, 1, 2, 0, 0), (TracePhase.QUEUE, 2, 4, 0, 0)]
    assert (TracePhase.RECEIVE, 4, 40, 3, 0) in spans
    assert spans[4] == (TracePhase.RESUME if complete else TracePhase.QUEUE, 40, 50, 0, 0)
    assert traced.transfers["r"] == TRANSFER
    assert spans[-1] == (TracePhase.DECODE if complete else TracePhase.PREFILL, 51, 58, 1, 0)


def test_a_request_whose_blocks_are_still_being_sent_is_told_of_when_they_are() -> None:
    write = Span(TracePhase.WRITE, 12, 19, 3, num_bytes=99)
    traced = ManualTracer([write])
    traced.begin(1, 2)
    traced.step(10, {"r": 3}, sampled=("r",))
    traced.tracer.ended("r", is_held=True)
    assert traced.tracer.active
    assert not traced.done
    traced.step(20, {"other": 3})
    traced.step(30, {}, transfers=ConnectorOutput(finished_sending={"r", "another"}))
    assert traced.done["r"][0][-1] == write
    assert traced.transfers["r"] == TRANSFER
    assert not traced.tracer.active


def test_what_is_kept_of_one_request_and_of_many_has_a_bound() -> None:
    traced = ManualTracer()
    traced.begin(1, 2)
    for at in range(MAX_SPANS):
        traced.step(at, {"r": 1}, sampled=("r",))
    traced.tracer.ended("r", is_held=False)
    spans, dropped = traced.done["r"]
    assert len(spans) == MAX_SPANS
    assert dropped == 2 * MAX_SPANS + 2 - MAX_SPANS

    for index in range(MAX_AWAITED + 1):
        traced.begin(1, 2, f"held-{index}")
        traced.tracer.ended(f"held-{index}", is_held=True)
    assert set(traced.done) == {"r", "held-0"}


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def node(request: pytest.FixtureRequest) -> Iterator[tuple[NodeService, SentBatches, Engine]]:
    with Node(DecodeRules(Role.DECODE), ahead=request.param) as made:
        yield made.service, made.outgoing, made.engine


def test_a_node_tells_once_of_a_request_that_is_traced_and_never_of_another(node) -> None:
    service, sent, engine = node
    plain = msgspec.structs.replace(submit("plain"), trace=False)
    service.receive(plain)
    service.receive(submit("traced"))
    trace = sent.traces.get(timeout=PATIENCE_S)
    assert (trace.node_id, trace.epoch, trace.request_id, trace.dropped) == ("n0", 7, "traced", 0)
    phases = [span.phase for span in trace.spans]
    assert phases[:4] == [TracePhase.INBOX, TracePhase.QUEUE, TracePhase.STEP, TracePhase.PREFILL]
    assert phases.count(TracePhase.DECODE) == 2
    assert all(span.end >= span.start for span in trace.spans)
    steps = [span for span in trace.spans if span.phase is TracePhase.STEP]
    assert all(one.end <= other.start for one, other in itertools.pairwise(steps)), "no time is told twice"
    service.drain(PATIENCE_S)
    assert sent.traces.empty()
    assert engine.tracer is None, "when no request is traced, the engine notes no times"


def test_a_traced_request_that_is_cancelled_is_told_of_too(node) -> None:
    service, sent, _ = node
    service.receive(msgspec.structs.replace(submit("r"), sampling=ENDLESS))
    service.receive(Cancel(ROUTER, ["r"]))
    assert sent.traces.get(timeout=PATIENCE_S).request_id == "r"


def test_a_traced_request_that_is_refused_leaves_nothing_behind(node) -> None:
    service, sent, engine = node
    service.receive(msgspec.structs.replace(submit("r"), prompt_token_ids=[]))
    service.receive(submit("after"))
    assert sent.traces.get(timeout=PATIENCE_S).request_id == "after"
    service.drain(PATIENCE_S)
    assert engine.tracer is None


def test_a_ping_that_asks_for_the_clock_is_told_it(node) -> None:
    service, sent, _ = node
    service.receive(Ping(ROUTER))
    service.receive(Ping(ROUTER, asked_at=12.5))
    reading = sent.clocks.get(timeout=PATIENCE_S)
    assert (reading.node_id, reading.epoch, reading.asked_at) == ("n0", 7, 12.5)
    assert reading.clock > 0
    assert sent.clocks.empty()

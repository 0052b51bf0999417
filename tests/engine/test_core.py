"""The order of the parts of a step, and what its result says about the next step."""

from __future__ import annotations

import threading

import pytest

from tandem.engine.core import Engine
from tandem.engine.model.runner import FinishedStep, LayerHooks
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.kvtransfer.base import ConnectorMetadata, ConnectorOutput, KVCacheMemory, WorkerConnector
from tandem.node.loop import EngineLoop, Mailbox
from tandem.wire.requests import TokenChunk
from tandem.wire.sampling import SamplingParams
from tests.engine.engine_fakes import FakeRunner, make_scheduler
from tests.engine.made_requests import made_request
from tests.engine.scheduling.driving import FakeConnector
from tests.loops import PATIENCE_S


class Mover(WorkerConnector):
    def __init__(self) -> None:
        self.preemptions = 0

    def register_kv_caches(self, memory: KVCacheMemory) -> None: ...
    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None: ...

    def handle_preemptions(self) -> None:
        self.preemptions += 1

    def get_finished(self, finished_req_ids: set[str]) -> ConnectorOutput:
        return ConnectorOutput()


class OrderedRunner(FakeRunner):
    """A runner whose steps end when their results are asked for. It and its `worker_half` record the order of all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.count = 0

    def start(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> FinishedStep:
        self.count += 1
        return Slow(self, self.count, super().start(step, hooks))


class Slow(FinishedStep):
    def __init__(self, runner: OrderedRunner, number: int, computed: FinishedStep) -> None:
        self._runner, self._number, self._computed = runner, number, computed
        runner.calls.append(f"start {number}")

    def finish(self) -> ModelOutput:
        self._runner.calls.append(f"finish {self._number}")
        return self._computed.finish()


class LoadingConnector(Mover):
    def __init__(self, runner: OrderedRunner) -> None:
        super().__init__()
        self._runner = runner

    def start_load_kv(self) -> None:
        self._runner.calls.append("load")


class DeferringConnector(FakeConnector):
    """A connector that knows how much is cached only after several questions."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.left -= 1
        return (None, False) if self.left >= 0 else (0, False)


def engine_with(connector: FakeConnector) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner()
    return Engine(make_scheduler(runner, connector), runner, Mover(), debug=True), runner


def request(request_id: str = "r", max_tokens: int = 3) -> Request:
    return made_request(request_id, [5, 6, 7], SamplingParams(max_tokens=max_tokens, temperature=0))


def test_a_step_in_which_a_connector_deferred_asks_for_another() -> None:
    engine, _ = engine_with(DeferringConnector(2))
    assert not engine.step().ask_again
    engine.add_request(request())
    for _ in range(2):
        result = engine.step()
        assert (result.progressed, result.ask_again) == (False, True)
    assert engine.step().progressed


def test_plans_that_wait_for_a_step_ask_for_one() -> None:
    connector = FakeConnector()
    engine, _ = engine_with(connector)
    connector.pending = True
    assert engine.step().ask_again


def ahead_with(connector: FakeConnector) -> tuple[Engine, OrderedRunner]:
    runner = OrderedRunner()
    return Engine(make_scheduler(runner, connector), runner, LoadingConnector(runner), ahead=True), runner


def test_ahead_a_step_is_started_before_the_last_one_is_read() -> None:
    engine, runner = ahead_with(FakeConnector())
    engine.add_request(request(max_tokens=3))
    updates = [engine.step().updates for _ in range(4)]
    assert [len(of_step) for of_step in updates] == [0, 1, 1, 1]
    assert [call for call in runner.calls if call != "load"] == [
        *("start 1", "start 2", "finish 1", "start 3", "finish 2", "finish 3")
    ]
    assert not engine.step().progressed  # the runner hears of the end


def test_the_open_step_is_over_before_anything_is_loaded_from_outside() -> None:
    """It may use blocks that came free while it ran, and that the load was given."""
    connector = FakeConnector()
    connector.offers["b"] = (2, True)
    engine, runner = ahead_with(connector)
    engine.add_request(request("a", max_tokens=9))
    engine.step()
    engine.add_request(request("b"))
    runner.calls.clear()
    engine.step()
    assert runner.calls == ["finish 1", "load", "start 2"]


def test_a_step_that_cannot_be_left_open_is_booked_at_once() -> None:
    engine, runner = ahead_with(FakeConnector())
    penalized = SamplingParams(max_tokens=3, presence_penalty=0.5)
    engine.add_request(made_request("r", [5, 6, 7], penalized))
    assert [len(engine.step().updates) for _ in range(3)] == [1, 1, 1]
    assert runner.calls[:3] == ["load", "start 1", "finish 1"]


class Ends:
    """A host that puts requests in and waits for their ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.ended = threading.Event()

    def handle(self, item: Request) -> None:
        self._engine.add_request(item)

    def publish(self, updates: list[TokenChunk]) -> None:
        if any(update.finish is not None for update in updates):
            self.ended.set()

    def before_step(self, now: float) -> None: ...
    def after_step(self, progressed: bool) -> None: ...

    def seconds_until_due(self, now: float) -> float | None:
        return None

    def failed(self, error: BaseException) -> None:
        pytest.fail(str(error))


def test_a_deferred_request_does_not_sleep_with_a_loop_that_nobody_wakes() -> None:
    """The contract lets a connector answer "ask again later" and say no more."""
    engine, _ = engine_with(DeferringConnector(4))
    mailbox: Mailbox[Request] = Mailbox()
    host = Ends(engine)
    loop = EngineLoop(engine, mailbox, host)
    loop.start()
    mailbox.put(request())
    assert host.ended.wait(PATIENCE_S)
    assert loop.stop(PATIENCE_S)


def test_the_runner_hears_of_a_preemption_even_when_nothing_is_computed() -> None:
    """The last running request's blocks were found wrong: what the runner kept of it must not stay."""
    engine, runner = engine_with(FakeConnector())
    engine.add_request(request(max_tokens=50))
    engine.step()
    state = engine.scheduler.state
    victim = state.running.pop()
    engine.scheduler._lifecycle.preempt(victim)
    engine.abort_requests(["r"])
    result = engine.step()
    assert runner.preempted == ["r"]
    assert result.progressed
    assert engine.worker.preemptions == 1  # type: ignore[union-attr]


def test_everything_after_preempted_is_an_end_and_has_a_reason():
    for status in RequestStatus:
        each = request()
        each.status = status
        ended = status.name.startswith("FINISHED")
        assert status.is_finished == each.is_finished == ended
        assert (each.finish_reason is not None) == ended
        assert status.is_blocked == status.name.startswith("WAITING_FOR")

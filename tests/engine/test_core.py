"""One step's order, and what it says of the next."""

from __future__ import annotations

import threading

import pytest

from engine.core import Engine
from engine.loop import EngineLoop, Mailbox
from engine.request import Request
from engine.scheduling.scheduler import PauseState
from engine.scheduling.update import RequestUpdate
from kvtransfer.base import ConnectorMetadata, ConnectorOutput, KVCacheMemory, WorkerConnector
from tests.engine.engine_fakes import FakeRunner, make_scheduler
from tests.engine.scheduling.driving import FakeConnector
from wire.sampling import SamplingParams

PATIENCE_S = 5.0


class Mover(WorkerConnector):
    def __init__(self) -> None:
        self.preemptions = 0

    def register_kv_caches(self, memory: KVCacheMemory) -> None: ...
    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None: ...

    def handle_preemptions(self) -> None:
        self.preemptions += 1

    def get_finished(self, finished_req_ids: set[str]) -> ConnectorOutput:
        return ConnectorOutput()


class Deferring(FakeConnector):
    """Does not know what it has until it was asked some times."""

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
    return Request(request_id, [5, 6, 7], SamplingParams(max_tokens=max_tokens, temperature=0))


def test_a_step_in_which_a_connector_deferred_asks_for_another() -> None:
    engine, _ = engine_with(Deferring(2))
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


class Ends:
    """A host that puts requests in and waits for their ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.ended = threading.Event()

    def handle(self, item: Request) -> None:
        self._engine.add_request(item)

    def publish(self, updates: list[RequestUpdate]) -> None:
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
    engine, _ = engine_with(Deferring(4))
    mailbox: Mailbox[Request] = Mailbox()
    host = Ends(engine)
    loop = EngineLoop(engine, mailbox, host)
    loop.start()
    mailbox.put(request())
    assert host.ended.wait(PATIENCE_S)
    assert loop.stop(PATIENCE_S)


def test_the_runner_hears_of_a_preemption_even_when_nothing_is_computed() -> None:
    """Of the last running request, whose blocks were found wrong: what it kept of it must not stay."""
    engine, runner = engine_with(FakeConnector())
    engine.add_request(request(max_tokens=50))
    engine.step()
    state = engine.scheduler._state
    victim = state.running.pop()
    engine.scheduler._lifecycle.preempt(victim)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    result = engine.step()
    assert runner.preempted == ["r"]
    assert result.progressed
    assert engine.worker.preemptions == 1  # type: ignore[union-attr]

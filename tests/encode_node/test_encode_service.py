"""An encoder node that drains while a question comes, and while its tower fails: paused before each line, in turn."""

from __future__ import annotations

import contextlib
import itertools
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from tandem.encode_node.node import EncodeNode
from tandem.node.config import NodeConfig, NodeTimeouts
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.encoding import Encode, EncodedRows, EncodingRefused, ToAsker, WantedPart
from tandem.wire.images import digest_of_image
from tandem.wire.nodes import NodeState, Role
from tandem.wire.sockets import Inbox, Outbox

PATIENCE_S = 10.0
FILE = b"a picture"
_lock = threading.Lock

Trace = Callable[[FrameType, str, Any], Any]


class Tower:
    info = SimpleNamespace(name="m", content="c", tokenizer="t", max_model_len=64)

    def __init__(self) -> None:
        self.begun, self.may_encode = threading.Event(), threading.Event()
        self.may_encode.set()
        self.error: Exception | None = None

    def encode(self, missing: list[Any]) -> list[PromptEmbeds]:
        self.begun.set()
        assert self.may_encode.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return [PromptEmbeds("float32", 1, bytes(4 * each.length)) for each in missing]


class WatchedLock:
    """A lock that names each thread that has to wait for it."""

    def __init__(self, news: queue.SimpleQueue[str]) -> None:
        self._lock = _lock()
        self._news = news

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        if not blocking:
            return False
        self._news.put(threading.current_thread().name)
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class PausedEncoder:
    """An encoder node, one of whose threads is traced, and another node's end."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tower: Tower,
        trace: Trace | None = None,
        news: queue.SimpleQueue[str] | None = None,
        cores: list[int] | None = None,
    ) -> None:
        self.news = news or queue.SimpleQueue()  # who is blocked, and what has happened
        self.answers: queue.SimpleQueue[ToAsker] = queue.SimpleQueue()
        self.inbox: Inbox[ToAsker] = Inbox("127.0.0.1", ToAsker, self._on_answer, name="asker")
        self.outbox = Outbox()
        timeouts = NodeTimeouts(status_period_s=60.0)
        self.node = EncodeNode(NodeConfig("encode-0", Role.ENCODE, timeouts=timeouts, cores=cores or []))
        with monkeypatch.context() as patched:
            patched.setattr("tandem.engine.model.vision.alone.load_tower", lambda *_: tower)
            for kind in ("Lock", "RLock"):
                patched.setattr(threading, kind, lambda: WatchedLock(self.news))
            threading.settrace(trace)  # type: ignore[arg-type]
            try:
                self.info = self.node.start()
            finally:
                threading.settrace(None)  # type: ignore[arg-type]

    def _on_answer(self, answer: ToAsker) -> None:
        self.answers.put(answer)
        self.news.put("answered")

    def ask(self) -> None:
        part = WantedPart(0, 2)
        question = Encode(1, self.inbox.endpoint, self.info.epoch, "c", digest_of_image(FILE), FILE, [part], PATIENCE_S)
        self.outbox.send(self.info.peer_endpoint, question)

    def await_news(self, *wanted: str) -> str:
        while (news := self.news.get(timeout=PATIENCE_S)) not in wanted:
            pass
        return news

    def close(self) -> None:
        self.node.stop()
        self.inbox.close()
        self.outbox.close()


def pausing_at(number: int, thread: str, pause: Callable[[], None]) -> Trace:
    """Calls `pause` before the line of this number that the thread runs in the nodes' packages."""
    numbers = itertools.count(1)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if threading.current_thread().name != thread or "node/" not in frame.f_code.co_filename:
            return None
        if event == "line" and next(numbers) == number:
            pause()
        return trace

    return trace


@contextlib.contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_a_tower_that_fails_during_a_drain_has_failed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in itertools.count(1):
        tower = Tower()
        tower.error = RuntimeError("no memory")
        tower.may_encode.clear()
        with contextlib.closing(PausedEncoder(monkeypatch, tower)) as encoder:
            encoder.ask()
            assert tower.begun.wait(PATIENCE_S)
            paused = []

            def fail(encoder: PausedEncoder = encoder, tower: Tower = tower, paused: list[int] = paused) -> None:
                paused.append(1)
                tower.may_encode.set()
                encoder.await_news("answered", "encoder")

            with tracing(pausing_at(number, threading.current_thread().name, fail)):
                encoder.node.drain(0.0)
            if not paused:
                tower.may_encode.set()
                break
            assert isinstance(encoder.answers.get(timeout=PATIENCE_S), EncodingRefused)
            encoder.ask()
            refused = encoder.answers.get(timeout=PATIENCE_S)
            assert isinstance(refused, EncodingRefused)
            assert refused.reason == "encode-0 is failed", f"paused before line {number} of the drain"
    assert number > 3


def test_a_question_that_comes_with_a_drain_is_answered_before_its_end_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in itertools.count(1):
        go_on = threading.Event()
        news: queue.SimpleQueue[str] = queue.SimpleQueue()

        def pause(go_on: threading.Event = go_on, news: queue.SimpleQueue[str] = news) -> None:
            news.put("paused")
            assert go_on.wait(PATIENCE_S)

        trace = pausing_at(number, "encode-0-images", pause)
        with contextlib.closing(PausedEncoder(monkeypatch, Tower(), trace, news)) as encoder:
            encoder.ask()
            if encoder.await_news("paused", "answered") == "answered":
                break
            sent: list[int] = []

            def drain(encoder: PausedEncoder = encoder, sent: list[int] = sent) -> None:
                if encoder.node.drain(0.0):
                    sent.append(encoder.node.status().counters.requests_finished.get("sent", 0))
                encoder.news.put("drained")

            drains = threading.Thread(target=drain, name="drains")
            drains.start()
            encoder.await_news("drained", "drains")
            go_on.set()
            drains.join()
            answer = encoder.answers.get(timeout=PATIENCE_S)
            assert sent in ([], [int(isinstance(answer, EncodedRows))]), f"paused before line {number}"
    assert number > 3


def test_a_node_that_cannot_have_its_cores_refuses_questions_and_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine's node: routers then ask another one, and the controller replaces it."""
    monkeypatch.setattr("tandem.encode_node.service.core_quota", lambda: None)
    with contextlib.closing(PausedEncoder(monkeypatch, Tower(), cores=[4095])) as encoder:
        encoder.ask()
        assert isinstance(encoder.answers.get(timeout=PATIENCE_S), EncodingRefused)
        assert encoder.node.status().state is NodeState.FAILED


def test_a_question_is_counted_once_at_every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter that falls looks like a node that was started again, and all it has ever counted is counted once more."""
    started: list[int] = []
    asked: list[PausedEncoder] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if threading.current_thread().name != "encoder" or "node/" not in frame.f_code.co_filename:
            return None
        if event == "line" and asked:
            started.append(asked[0].node.status().counters.requests_started)
        return trace

    with contextlib.closing(PausedEncoder(monkeypatch, Tower(), trace)) as encoder:
        asked.append(encoder)
        for _ in range(3):
            encoder.ask()
            assert isinstance(encoder.answers.get(timeout=PATIENCE_S), EncodedRows)
        assert encoder.node.drain(PATIENCE_S)
    assert started == sorted(started)
    assert started[-1] == 3

"""What a node takes from a store that closes its connections: after an answer, or in the middle of one."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.base.errors import ConfigurationError
from tandem.kvtransfer.config import EvictionPolicy, TierConfig
from tandem.kvtransfer.objects import inquiries
from tandem.kvtransfer.objects.chunks import HEAD_BYTES, ChunkStore, ReadResult
from tandem.kvtransfer.objects.client import ObjectClient, StoreError
from tandem.kvtransfer.objects.inquiries import ANSWER_S, Inquiries, StoredPrefix
from tandem.kvtransfer.objects.options import AccessKeys, CredentialFile, ObjectOptions
from tandem.kvtransfer.objects.signing import signed
from tandem.kvtransfer.offload.spec import create_tier
from tests.clock import Clock

PATIENCE_S = 20.0
CHUNK = bytes(range(256)) * 4096
KEY = b"k" * 32


class ClosingStore(ThreadingHTTPServer):
    """Keeps objects in memory, and says with each answer that it closes the connection."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.objects: dict[str, bytes] = {}
        self.in_pieces = False  # an answer does not say how long it is, as behind a proxy that compresses
        self.cut = False  # the connection ends in the middle of an object
        self.drips = False  # a byte comes now and then
        self.over = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/bucket"

    def end(self) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ClosingStore

    def _say(self, status: int, body: bytes = b"", length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body) if length is None else length))
        self.send_header("connection", "close")
        self.end_headers()
        for start in range(0, len(body), 1 << 16):
            self.wfile.write(body[start : start + (1 << 16)])

    def do_GET(self) -> None:
        if (there := self.server.objects.get(self.path)) is None:
            self._say(404)
        elif self.server.in_pieces:
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(there), there))
        elif self.server.cut:
            self._say(200, there[: len(there) // 2], len(there))
        elif self.server.drips:
            self._say(200, b"", len(there))
            while not self.server.over.wait(0.02):
                self.wfile.write(b"x")
        else:
            self._say(200, there)

    def do_HEAD(self) -> None:
        there = self.server.objects.get(self.path)
        self._say(404 if there is None else 200, b"", len(there or b""))

    def do_PUT(self) -> None:
        self.server.objects[self.path] = self.rfile.read(int(self.headers["content-length"]))
        self._say(200)

    def do_DELETE(self) -> None:
        self.server.objects.pop(self.path, None)
        self._say(204)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def store() -> Iterator[ClosingStore]:
    made = ClosingStore()
    yield made
    made.end()


@pytest.fixture
def connect(store: ClosingStore, tmp_path: Path) -> Callable[[], ChunkStore]:
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    options = ObjectOptions(store.url, credentials=str(credentials))
    return lambda: ChunkStore(ObjectClient(options), "layout", len(CHUNK))


@pytest.fixture
def chunks(connect: Callable[[], ChunkStore]) -> ChunkStore:
    """Of a node that has stored a chunk."""
    made = connect()
    made.write("era", KEY, memoryview(CHUNK), soon())
    return made


def soon() -> float:
    return time.monotonic() + PATIENCE_S


@pytest.mark.usefixtures("chunks")
def test_a_store_that_closes_the_connection_after_each_answer_is_read_whole(connect: Callable[[], ChunkStore]) -> None:
    reader = connect()
    for _ in range(2):
        into = memoryview(bytearray(len(CHUNK)))
        assert reader.read("era", KEY, into, soon()) is ReadResult.RIGHT
        assert into == CHUNK


def test_a_store_that_sends_a_byte_now_and_then_is_given_up_in_time_on_a_new_connection_too(
    store: ClosingStore, chunks: ChunkStore
) -> None:
    store.drips = True
    threading.Timer(5.0, store.over.set).start()
    until = time.monotonic() + 0.3
    with pytest.raises(StoreError, match="did not answer in time"):
        chunks.read("era", KEY, memoryview(bytearray(len(CHUNK))), until)
    assert time.monotonic() < until + 4.0


def test_a_name_that_nobody_resolves_is_given_up_in_time(
    chunks: ChunkStore, monkeypatch: pytest.MonkeyPatch, store: ClosingStore
) -> None:
    monkeypatch.setattr("socket.getaddrinfo", lambda *of_no_concern, **named: store.over.wait(PATIENCE_S) and [])
    with pytest.raises(StoreError, match="did not answer in time"):
        chunks.read("era", KEY, memoryview(bytearray(len(CHUNK))), time.monotonic() + 0.3)
    assert not store.over.is_set()


@pytest.mark.parametrize("how", ["cut", "in_pieces"])
def test_an_object_that_does_not_arrive_whole_is_not_taken_for_a_damaged_one(
    store: ClosingStore, chunks: ChunkStore, how: str
) -> None:
    setattr(store, how, True)
    with pytest.raises(StoreError):
        chunks.read("era", KEY, memoryview(bytearray(len(CHUNK))), soon())
    assert [len(there) for there in store.objects.values()] == [HEAD_BYTES + len(CHUNK)]


KEYS = [number.to_bytes(32, "big") for number in range(1000)]
THERE = 600
AWAY_S = 0.12  # from a question to its answer


class FarStore:
    """Has the first keys, and answers each question after the same time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def has(self, era: str, key: bytes, until: float) -> bool:
        self._clock.now += AWAY_S
        if self._clock.now >= until:
            raise StoreError("it did not answer in time")
        return key in KEYS[:THERE]


def test_a_store_that_answers_each_question_is_not_left_out_because_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, woken, failures = Clock(), threading.Event(), list[StoreError]()
    monkeypatch.setattr(inquiries, "time", SimpleNamespace(monotonic=clock))
    store: Any = FarStore(clock)
    eras: Any = SimpleNamespace(name="", open_now="e", distrusted="")
    asking = Inquiries(store, eras, woken.set, failures.append)
    try:
        until = asking.ask(KEYS)
        assert woken.wait(20)
        (found,) = asking.take()
        assert not failures
        assert THERE // 2 < found.count <= THERE, "what it knows by then"
        assert clock.now < until + AWAY_S, "it asks no longer than a request waits"
    finally:
        asking.close()


def test_a_question_that_waited_in_line_says_nothing_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, woken, failures = Clock(), threading.Event(), list[StoreError]()
    monkeypatch.setattr(inquiries, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(inquiries, "THREADS", 1)
    begun, go_on = threading.Event(), threading.Event()

    class BusyStore(FarStore):
        def has(self, era: str, key: bytes, until: float) -> bool:
            begun.set()
            assert go_on.wait(20)
            return super().has(era, key, until)

    store: Any = BusyStore(clock)
    eras: Any = SimpleNamespace(name="", open_now="e", distrusted="")
    asking = Inquiries(store, eras, woken.set, failures.append)
    try:
        asking.ask(KEYS[:1])
        assert begun.wait(20)
        asking.ask(KEYS[1:3])
        clock.now += ANSWER_S - 1.5 * AWAY_S
        go_on.set()
        found: list[StoredPrefix] = []
        while len(found) < 2:
            assert woken.wait(20)
            woken.clear()
            found += asking.take()
        assert not failures
    finally:
        asking.close()


def test_a_request_is_signed_as_in_awss_own_example() -> None:
    """The example "GET Object" in Amazon's description of signature version 4."""
    keys = AccessKeys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    headers = {"Host": "examplebucket.s3.amazonaws.com", "Range": "bytes=0-9"}
    moment = datetime(2013, 5, 24, tzinfo=UTC)
    made = signed("GET", "/test.txt", headers, hashlib.sha256(b"").hexdigest(), keys, "us-east-1", moment)
    assert made["authorization"].endswith(
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, "
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "url"),
        ({"url": "https://host/bucket", "bucket": "b"}, "bucket"),
        ({"url": "s3://bucket"}, "must be http"),
        ({"url": "https://key:secret@host/bucket"}, "without a key"),
        ({"url": "https://host"}, "names no bucket"),
        ({"url": "https://host/a/../b"}, "names no bucket"),
        ({"url": "https://host:99999/bucket"}, "not right"),
        ({"url": "https://host/bucket", "credentials": "/nowhere"}, "'/nowhere', cannot be read"),
        ({"url": "https://host/bucket", "ca_file": "/nowhere"}, "ca_file"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with pytest.raises(ConfigurationError, match=said):
        create_tier(TierConfig(spec="objects", options=options))


def test_a_policy_of_evicting_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no policy"):
        create_tier(TierConfig(spec="objects", policy=EvictionPolicy.ARC, options={"url": "https://h/b"}))


def test_keys_come_from_a_file_that_may_be_replaced_or_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    file.write_text("[a]\naws_access_key_id = x\naws_secret_access_key = y%z\n")
    ring = CredentialFile(ObjectOptions("https://h/b", credentials=str(file), profile="a"))
    assert ring.keys() == AccessKeys("x", "y%z")
    file.write_text("[a]\naws_access_key_id = x2\naws_secret_access_key = y2\naws_session_token = t\n")
    os.utime(file, (1, 1))
    assert ring.keys() == AccessKeys("x2", "y2", "t")
    assert "y2" not in repr(ring.keys()), "a secret is shown nowhere"
    with pytest.raises(ConfigurationError, match=r"\[default\] with aws_access_key_id"):
        CredentialFile(ObjectOptions("https://h/b", credentials=str(file))).keys()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "e")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "f")
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    assert CredentialFile(ObjectOptions("https://h/b")).keys() == AccessKeys("e", "f")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ConfigurationError, match="no key to its store"):
        CredentialFile(ObjectOptions("https://h/b")).keys()

"""What a node takes from a store that closes its connections: after an answer, or in the middle of one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tandem.kvtransfer.objects.chunks import HEAD_BYTES, ChunkStore, ReadResult
from tandem.kvtransfer.objects.client import ObjectClient, StoreError
from tandem.kvtransfer.objects.options import ObjectOptions

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

"""Heads and chunked bodies are parsed the same, however their bytes arrive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import InternalError
from tandem.http_server.call import HttpCall, LengthBody, RequestHead
from tandem.http_server.chunked import LINES_AT_ONCE, ChunkedBody, FramingError

NEXT = b"GET / HTTP/1.1\r\n"


def head(*lines: str, first: str = "POST /v1/completions HTTP/1.1") -> RequestHead:
    return RequestHead("\r\n".join([first, "host: x", *lines, "", ""]).encode("latin-1"))


def test_a_head() -> None:
    found = head("X-Mixed:  a b\t", "content-length: 12", "expect: 100-continue")
    assert (found.method, found.version, found.keep_alive) == ("POST", "1.1", True)
    assert found.headers[1] == (b"x-mixed", b"a b")
    assert (found.content_length, found.chunked, found.expects_continue) == (12, False, True)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/a%20b?c=%20", ("/a b", b"/a%20b", b"c=%20")),
        ("http://host:80/a?b", ("/a", b"/a", b"b")),
        ("http://host", ("/", b"/", b"")),
        ("*", ("*", b"*", b"")),
    ],
)
def test_targets(target: str, expected: tuple[str, bytes, bytes]) -> None:
    assert head(first=f"OPTIONS {target} HTTP/1.1").target == expected


@pytest.mark.parametrize(
    ("first", "line", "keeps"),
    [
        ("GET / HTTP/1.1", "x: y", True),
        ("GET / HTTP/1.1", "connection: close", False),
        ("GET / HTTP/1.1", "Connection: x, Close", False),
        ("GET / HTTP/1.0", "connection: keep-alive", False),
    ],
)
def test_connections_that_go_on(first: str, line: str, keeps: bool) -> None:
    assert head(line, first=first).keep_alive is keeps


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"GET / HTTP/2.0\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\nhost: x\n\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: b\r\n c\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na\x01: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: b\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n",
    ],
)
def test_what_is_no_head(data: bytes) -> None:
    with pytest.raises(FramingError):
        RequestHead(data)


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    with suppress(FramingError):
        RequestHead(b"GET / HTTP/1.1\r\nhost: x\r\n" + data + b"\r\n\r\n")


def chunks(pieces: list[bytes], extension: bytes = b"", trailers: bytes = b"") -> bytes:
    coded = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    return coded + b"0\r\n" + trailers + b"\r\n"


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=5),
    extension=st.sampled_from([b"", b";a", b' ;a="b"']),
    trailers=st.sampled_from([b"", b"x-sum: 1\r\n", b"a:\r\nb: c\r\n"]),
    cuts=st.lists(st.integers(1, 30), max_size=30),
)
def test_a_chunked_body_however_it_is_cut(
    pieces: list[bytes], extension: bytes, trailers: bytes, cuts: list[int]
) -> None:
    data = chunks(pieces, extension, trailers) + NEXT
    body, buffer, found = ChunkedBody(100), bytearray(), b""
    while data:
        size = cuts.pop() if cuts else len(data)
        buffer += data[:size]
        data = data[size:]
        found += body.take(buffer)
    assert body.complete
    assert found == b"".join(pieces)
    assert buffer == NEXT, "what follows is the next request's"


class SilentCarrier:
    def __init__(self) -> None:
        self.client: tuple[str, int] | None = None
        self.write_paused = self.stopping = False
        self.written = bytearray()
        self.write: Callable[[bytes], None] = self.written.extend

    async def until_writable(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def on_answered(self, call: HttpCall) -> None: ...

    def on_upgraded(self) -> None: ...

    def break_off(self) -> None: ...


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\r\n", b"a\nb", b"a\rb"])
async def test_an_answers_header_is_one_line(value: bytes) -> None:
    carrier = SilentCarrier()
    call = HttpCall(carrier, RequestHead(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"), LengthBody(0))
    headers = [(b"content-length", b"0"), (b"x-a", value)]
    with pytest.raises(InternalError, match="x-a has a line end"):
        await call.send({"type": "http.response.start", "status": 200, "headers": headers})
    assert not carrier.written


def test_many_short_chunks_are_taken_some_at_a_time() -> None:
    data = chunks([b"x"] * 5000) + NEXT
    body, buffer, found = ChunkedBody(100), bytearray(data), b""
    while not body.complete:
        taken = body.take(buffer)
        assert len(taken) <= LINES_AT_ONCE
        assert body.has_rest is not body.complete
        found += taken
    assert found == b"x" * 5000
    assert buffer == NEXT


@pytest.mark.parametrize(
    "data",
    [
        b"g\r\n",
        b"\r\n",
        b"-1\r\n",
        b"0x5\r\n",
        b"5 5\r\n",
        b"5\n",
        b"5\r\nhello!\r\n",
        b"5\r\nhello\n",
        b"1" * 20,
        b"f" * 16 + b"\r\n",
        b"5;" + b"a" * 200,
        b"0\r\nno trailer\r\n",
        b"0\r\n" + b"a: b\r\n" * 100,
        b"5;\x00\r\n",
    ],
)
def test_what_is_no_chunk(data: bytes) -> None:
    with pytest.raises(FramingError):
        ChunkedBody(100).take(bytearray(data + b"x" * 120))


@given(st.binary(max_size=300))
def test_a_chunked_body_of_any_bytes_is_refused_or_ends(data: bytes) -> None:
    body, buffer = ChunkedBody(50), bytearray(data)
    try:
        body.take(buffer)
    except FramingError:
        return
    assert body.complete or len(buffer) <= 53, "what waits for more is a line at most"

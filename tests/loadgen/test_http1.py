from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.loadgen.answers import EventSplitter
from tandem.loadgen.http1 import MalformedResponse, ResponseParser

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted({min(cut, len(data)) for cut in cuts}), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def chunked(chunks: list[bytes]) -> bytes:
    body = b"".join(b"%X;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return HEAD + b"Transfer-Encoding: Chunked\r\n\r\n" + body + b"0\r\nTrailer: x\r\n\r\n"


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(0, 400), max_size=12))
def test_a_body_is_the_same_however_it_arrives(chunks: list[bytes], cuts: list[int]) -> None:
    content = b"".join(chunks)
    for raw in (chunked(chunks), HEAD + b"content-length: %d\r\n\r\n" % len(content) + content):
        parser = ResponseParser()
        assert b"".join(parser.feed(piece) for piece in pieces_of(raw, cuts)) == content
        assert (parser.complete, parser.reusable, parser.status) == (True, True, 200)


def test_a_chunk_is_passed_on_as_soon_as_it_is_whole() -> None:
    parser = ResponseParser()
    parser.feed(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    assert parser.feed(b"5\r\nhel") == b""
    assert parser.feed(b"lo\r\n") == b"hello"
    assert not parser.complete


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.0 200 OK\r\n\r\nhel") == b"hel"
    assert parser.feed(b"lo") == b"lo"
    assert not parser.complete
    assert parser.end_of_stream()
    assert not parser.reusable
    early = ResponseParser()
    early.feed(HEAD + b"content-length: 5\r\n\r\nhel")
    assert not early.end_of_stream()


def test_an_interim_response_is_not_the_answer_and_a_server_that_says_close_is_not_asked_again() -> None:
    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert parser.status == 0
    parser.feed(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert (parser.status, parser.complete) == (204, True)
    for header in (b"connection: close\r\n", b"Connection: Close\r\n"):
        parser = ResponseParser()
        parser.feed(HEAD + header + b"content-length: 0\r\n\r\n")
        assert (parser.complete, parser.reusable) == (True, False)


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-server\r\n\r\n",
        b"HTTP/1.1 ok\r\n\r\n",
        HEAD + b"content-length: many\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n-20\r\nabcdefghijklmnop",
        b"x" * 70_000,
    ],
)
def test_what_is_not_http_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedResponse):
        ResponseParser().feed(raw)


@given(st.lists(st.integers(0, 200), max_size=10))
def test_events_are_the_same_however_they_arrive(cuts: list[int]) -> None:
    raw = (
        b': keep-alive\n\ndata: {"a": 1}\n\nevent: x\nid: 3\ndata: two\ndata:lines\n\n'
        b"\n\ndata: crlf\r\n\r\ndata: [DONE]\n\ndata: unfinished"
    )
    splitter = EventSplitter()
    payloads = [payload for piece in pieces_of(raw, cuts) for payload in splitter.feed(piece)]
    assert payloads == [b'{"a": 1}', b"two\nlines", b"crlf", b"[DONE]"]

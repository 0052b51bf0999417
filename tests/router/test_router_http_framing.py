"""Where a request ends. A proxy before the router must find the same end: if two readers could end a request differently,
it could carry another request past the proxy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from email.utils import parsedate_to_datetime

import pytest

from tests.router.conftest import RunningRouter, bombarded
from tests.router.raw_http import connect, read_answer, talk

BEHIND = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
NO_CHUNKS = b"0\r\n\r\n"


@pytest.fixture(scope="module")
def only_router(model_folder: str, end_token: int) -> Iterator[RunningRouter]:
    with bombarded(model_folder, end_token) as running:
        yield running


@pytest.fixture
def router(only_router: RunningRouter) -> Iterator[RunningRouter]:
    yield only_router
    assert only_router.complete(max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    "lines",
    [
        ["content-length: 5", "transfer-encoding: chunked"],
        ["transfer-encoding: chunked", "content-length: 5"],
        ["transfer-encoding: chunked", "content-length: 0"],
        ["Transfer-Encoding:chunked", "Content-Length:5"],
        ["transfer-encoding:", " chunked", "content-length: 5"],
        ["content-length: 5", "content-length: 6"],
        ["content-length: 5, 6"],
        ["content-length: 5,"],
        ["content-length: -5"],
        ["content-length: +5"],
        ["content-length: 0x5"],
        ["content-length: 5 0"],
        ["content-length: 5.0"],
        ["content-length: five"],
        ["content-length:"],
        ["content-length: " + "9" * 30],
        ["content-length : 5"],
        ["transfer-encoding: gzip"],
        ["transfer-encoding: gzip, chunked"],
        ["transfer-encoding: chunked, gzip"],
        ["transfer-encoding: chunked, chunked"],
        ["transfer-encoding: chunked", "transfer-encoding: chunked"],
        ["transfer-encoding: chunked", "transfer-encoding: identity"],
        ["transfer-encoding: identity"],
        ["transfer-encoding: xchunked"],
        ["transfer-encoding: chunked;q=1"],
        ["transfer-encoding: \x0bchunked"],
        ["transfer-encoding: \x01chunked"],
        ["transfer-encoding:"],
        ["transfer-encoding : chunked"],
    ],
    ids=lambda lines: " | ".join(lines)[:60],
)
def test_a_body_whose_end_is_in_doubt(router: RunningRouter, lines: list[str]) -> None:
    head = "\r\n".join(["POST /v1/completions HTTP/1.1", "host: x", *lines]).encode("latin-1")
    status, headers, body = talk(router, head + b"\r\n\r\n" + NO_CHUNKS + BEHIND)  # reads until it is closed
    assert status == 400
    assert headers["connection"] == "close"
    assert body["error"]["code"] == "invalid_http"


def test_chunks_in_http_1_0(router: RunningRouter) -> None:
    head = b"POST /health HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    status, headers, body = talk(router, head + NO_CHUNKS + BEHIND)
    assert status == 400
    assert headers["connection"] == "close"
    assert "HTTP/1.0" in body["error"]["message"]


def test_a_doubtful_request_behind_a_good_one(router: RunningRouter) -> None:
    bad = b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
    with closing(connect(router)) as connection:
        connection.sendall(BEHIND + bad + NO_CHUNKS + BEHIND)
        assert read_answer(connection)[0] == 200
        assert read_answer(connection)[0] == 400
        assert connection.recv(100) == b""


@pytest.mark.parametrize(
    ("line", "body"),
    [
        ("transfer-encoding: chunked", NO_CHUNKS),
        ("Transfer-Encoding: Chunked", b"5\r\nhello\r\n" + NO_CHUNKS),
        ("content-length: 5", b"hello"),
        ("content-length: 5\r\ncontent-length: 5", b"hello"),
        ("content-length: 0", b""),
    ],
)
def test_a_body_whose_end_is_not_in_doubt(router: RunningRouter, line: str, body: bytes) -> None:
    with closing(connect(router)) as connection:
        connection.sendall(f"POST /health HTTP/1.1\r\nhost: x\r\n{line}\r\n\r\n".encode() + body + BEHIND)
        assert read_answer(connection)[0] == 405
        assert read_answer(connection)[0] == 200


def test_an_answer_has_the_date_of_its_second(router: RunningRouter) -> None:
    for path in ("/health", "/none-such"):
        before = int(time.time())
        _, headers, _ = talk(router, f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert before <= parsedate_to_datetime(headers["date"]).timestamp() <= time.time()

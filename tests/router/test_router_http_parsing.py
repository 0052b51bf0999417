"""Requests are read the same, however their bytes arrive, and each client is answered as its version of HTTP asks."""

from __future__ import annotations

import json
from contextlib import closing

from tandem.router.config import Limits
from tests.router.conftest import StartRouter
from tests.router.raw_http import connect, post, read_answer, read_to_end


def test_a_client_that_waits_to_be_told_to_go_on(start_router: StartRouter) -> None:
    router = start_router()
    body = json.dumps({"model": "fake", "prompt": "the fox", "max_tokens": 2}).encode()
    with closing(connect(router)) as connection:
        connection.sendall(post(b"", content_length=str(len(body)), expect="100-continue"))
        said = b""
        while not said.endswith(b"\r\n\r\n"):
            said += connection.recv(1)
        assert said == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert read_answer(connection)[0] == 200
        connection.sendall(post(b"", "/nothing", content_length="5", expect="100-continue"))
        assert read_answer(connection)[0] == 404, "whose body is not wanted"


def test_an_old_client_reads_to_the_end_of_the_connection(start_router: StartRouter) -> None:
    router = start_router(prefill=0)
    body = json.dumps({"model": "fake", "prompt": "the fox", "max_tokens": 3, "stream": True, "seed": 1})
    head_lines = f"POST /v1/completions HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n"
    with closing(connect(router)) as connection:
        connection.sendall(head_lines.encode() + body.encode())
        answer = read_to_end(connection)
    assert b"transfer-encoding" not in answer
    assert b"connection: close" in answer
    assert answer.endswith(b"data: [DONE]\n\n")


def test_a_head_has_no_body(start_router: StartRouter) -> None:
    router = start_router()
    with closing(connect(router)) as connection:
        connection.sendall(
            b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
        answer = read_to_end(connection)
    first, _, rest = answer.partition(b"\r\n\r\n")
    assert first.startswith((b"HTTP/1.1 200", b"HTTP/1.1 405"))
    assert rest.startswith(b"HTTP/1.1 200")


def test_an_upgrade_that_is_offered_is_not_taken(start_router: StartRouter) -> None:
    answer = start_router().client.get("/health", headers={"connection": "upgrade", "upgrade": "h2c"})
    assert answer.status_code == 200


def test_many_requests_in_one_packet_lie_unread_until_their_turn(start_router: StartRouter) -> None:
    router = start_router(limits=Limits(header_bytes=1000))
    one = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    with closing(connect(router)) as connection:
        connection.sendall(one * 500 + one.replace(b"host: x", b"host: x\r\nconnection: close"))
        assert read_to_end(connection).count(b"HTTP/1.1 200") == 501

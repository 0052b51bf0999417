"""A router's own process writes a log: times, levels, and the id of the request that a line is about."""

from __future__ import annotations

import re
import resource
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from tandem.http_server.serving import OTHER_DESCRIPTORS
from tandem.router.config import ApiKey, Heartbeat, Limits, LocalPrefill, RouterConfig
from tandem.wire.endpoints import key_of, shown
from tandem.wire.nodes import Role, RouterInfo
from tandem.wire.sockets import admit
from tests.router.conftest import LETTERS
from tests.router.fake_node import Board, FakeNode

PROCESS = """
import asyncio, sys
import uvloop
from tandem.router.hosting import RouterHost

async def main():
    host = RouterHost(bytes.fromhex(sys.argv[1]))
    print((await host.start()).hex(), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        await host.set_members(bytes.fromhex(line))
        print("told", flush=True)
    await host.stop()

uvloop.run(main())
"""
LINE = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) [\w.]+: \S.*$")
PATIENCE_S = 15.0
KEY = {"authorization": "Bearer secret"}


class LoggedRouter:
    """A process with a router, its nodes, and the file that its log goes to."""

    def __init__(self, config: RouterConfig, board: Board, file: Path) -> None:
        self._file = file
        self._board = board
        self.nodes: list[FakeNode] = []
        with file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROCESS, msgspec.msgpack.encode(config).hex()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, MOST_DESCRIPTORS)),
            )
        assert self._process.stdout is not None
        started = self._process.stdout.readline().strip()
        assert started, self.text()
        info = msgspec.msgpack.decode(bytes.fromhex(started), type=RouterInfo)
        self.url = info.url
        admit([key_of(info.inbox_endpoint)])
        self.client = httpx.Client(base_url=self.url, timeout=20, trust_env=False, headers=KEY)

    @property
    def pid(self) -> int:
        return self._process.pid

    def add(self, node_id: str, role: Role) -> FakeNode:
        node = FakeNode(node_id, role, self._board)
        self.nodes.append(node)
        self._announce()
        return node

    def lose(self, node: FakeNode) -> None:
        self.nodes.remove(node)
        node.kill()
        self._announce()

    def _announce(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        members = msgspec.msgpack.encode([node.info for node in self.nodes])
        print(members.hex(), file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "told\n"

    def ready_nodes(self) -> int:
        nodes = self.client.get("/cluster").json()["nodes"]
        return sum(node["state"] == "ready" for node in nodes)

    def text(self) -> str:
        return self._file.read_text(encoding="utf-8")

    def lines_with(self, text: str) -> list[str]:
        return [line for line in self.text().splitlines() if text in line]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {PATIENCE_S} s: {what}\n{self.text()}")
            time.sleep(0.01)

    def ask(self, **fields: object) -> httpx.Response:
        body = {"model": "fake", "prompt": "the fox", "max_tokens": 4, **fields}
        name = secrets.token_hex(8)
        return self.client.post("/v1/completions", json=body, headers={"x-request-id": name})

    def connect(self) -> socket.socket:
        parts = urlsplit(self.url)
        return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE_S)

    def close(self) -> None:
        self.client.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        for node in self.nodes:
            node.kill()


MOST_DESCRIPTORS = 1100  # 200 to begin with
MOST_CONNECTIONS = MOST_DESCRIPTORS - OTHER_DESCRIPTORS


@pytest.fixture(scope="module")
def logged(model_folder: str, end_token: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoggedRouter]:
    config = RouterConfig(
        tokenizer_path=model_folder,
        model_name="fake",
        port=0,
        api_keys=(ApiKey("alice", "secret", operator=True),),
        heartbeat=Heartbeat(ping_interval=0.05, silence=5),
        local_prefill=LocalPrefill.NEVER,
        limits=Limits(connections=5000),
    )
    router = LoggedRouter(config, Board(LETTERS, end_token), tmp_path_factory.mktemp("logged") / "router.log")
    router.add("p0", Role.PREFILL)
    router.add("d0", Role.DECODE)
    router.until(lambda: router.ready_nodes() == 2, "the router is ready and has heard both nodes")
    yield router
    router.close()
    assert [line for line in router.text().splitlines() if not LINE.match(line)] == []


def test_every_answer_has_a_line_with_its_id(logged: LoggedRouter) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    body = {"model": "fake", "prompt": "the fox", "max_tokens": 4}
    headers = {"x-request-id": "mine", "traceparent": f"00-{trace_id}-b7ad6b7169203331-00"}
    assert logged.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    refused = logged.ask(model="other")
    wanted = f" {refused.headers['x-request-id']} POST /v1/completions 404 "
    logged.until(lambda: bool(logged.lines_with(wanted)), "a line for the last of them")
    (answered,) = logged.lines_with(" mine ")
    assert "router.access: mine POST /v1/completions 200 " in answered
    assert f" key=alice trace={trace_id} nodes=prefill=p0,decode=d0 " in answered


def test_nodes_that_come_and_go_are_told_of_and_probes_are_not(logged: LoggedRouter) -> None:
    node = logged.add("d1", Role.DECODE)
    assert len(logged.lines_with(f"node d1 (decode, {shown(node.info.request_endpoint)}) joined")) == 1
    logged.lose(node)
    logged.until(lambda: bool(logged.lines_with("node d1 left")), "the node's end is told")
    assert logged.lines_with("GET /health 200") == []


def test_a_request_that_moves_is_named_in_the_warning(logged: LoggedRouter) -> None:
    logged.add("d2", Role.DECODE)
    logged.until(lambda: '"d2"' in logged.client.get("/cluster").text, "the second node is in view")
    decode = [node for node in logged.nodes if node.role is Role.DECODE]
    for node in decode:
        node.set(pause_at=2)
    body = {"model": "fake", "prompt": "the fox", "max_tokens": 9, "stream": True}
    with logged.client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "moved"}) as answer:
        assert answer.status_code == 200
        logged.until(lambda: any(node.submits for node in decode), "a decode node has it")
        serving = next(node for node in decode if node.submits)
        logged.lose(serving)
        for node in decode:
            node.resume()
        assert answer.read().endswith(b"data: [DONE]\n\n")
    warnings = logged.lines_with(" moved: ")
    assert len(warnings) == 1
    assert "going on elsewhere after" in warnings[0]


def test_what_is_no_request_gets_an_id_too(logged: LoggedRouter) -> None:
    with logged.connect() as connection:
        connection.sendall(b"no such thing\r\n\r\n")
        answer = connection.recv(4096).decode()
    name = re.search(r"x-request-id: (\w+)\r\n", answer)
    assert name is not None
    assert len(logged.lines_with(f"{name[1]}: answered 400 to 127.0.0.1:")) == 1


def test_descriptors_are_raised_to_what_is_allowed_and_connections_held_against_them(logged: LoggedRouter) -> None:
    """Idle clients must leave some for nodes."""
    limits = Path(f"/proc/{logged.pid}/limits").read_text()
    assert re.search(rf"Max open files +{MOST_DESCRIPTORS} +{MOST_DESCRIPTORS} ", limits)
    (warning,) = logged.lines_with("connections are taken at once")
    assert f" {MOST_CONNECTIONS} connections are taken at once" in warning
    idle = [logged.connect() for _ in range(MOST_CONNECTIONS)]
    with logged.connect() as one_more:
        assert idle[0].recv(100) == b"", "the longest idle gives way"
        one_more.sendall(b"GET /docs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert one_more.recv(100).startswith(b"HTTP/1.1 200")
    node = logged.add("d9", Role.DECODE)
    for connection in idle:
        connection.close()
    logged.until(lambda: '"d9"' in logged.client.get("/cluster").text, "the node is in view")
    logged.lose(node)

"""Runs a router with fake nodes in this process, over real sockets; without torch, Ray or downloads."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import msgspec
import pytest
import uvloop

from tandem.api.text.tokenizer import Tokenizer
from tandem.router.config import Heartbeat, LocalPrefill, RouterConfig, UnknownFields
from tandem.router.server import RouterServer
from tandem.router.wings import RouterWing
from tandem.wire.nodes import PoolReport, Role
from tandem.wire.pooling import VectorModel
from tandem.wire.requests import new_id
from tests.router.event_reader import EventReader
from tests.router.fake_node import Board, FakeNode, TokenRule, hashed_token, scripted

if TYPE_CHECKING:
    import openai

T = TypeVar("T")
W = TypeVar("W", bound=RouterWing)


# The tokenizer below has three special tokens, and then the bytes in the order of their characters.
LETTERS = hashed_token(67, 93)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """What an answer with this status says is wrong."""
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


class RunningRouter:
    """A router on its own event loop, and the fake nodes that it knows."""

    def __init__(self, config: RouterConfig, rule: TokenRule, eos: int, door: str = "") -> None:
        self.config = config
        self.board = Board(rule, eos)
        self.nodes: dict[str, FakeNode] = {}
        self._loop = uvloop.new_event_loop()  # as Ray gives its actors one
        self.go_on()
        self.server = self.call(self._make())
        try:
            self.url = self.call(self.server.start(door))
        except BaseException:
            self._end()
            raise
        self.client = self.new_client()

    def new_client(self) -> httpx.Client:
        # Ignore proxies in the environment. Do not read TLS certificates, which no test here uses: that takes longer than starting
        # the router.
        return httpx.Client(base_url=self.url, timeout=20, trust_env=False, verify=False)

    def official_client(self) -> openai.OpenAI:
        import openai  # takes a second, so only where it is used

        http = openai.DefaultHttpxClient(trust_env=False, verify=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, http_client=http)

    async def _make(self) -> RouterServer:
        return RouterServer(self.config)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return self.begin(work).result(30)

    def look(self, what: Callable[[], T]) -> T:
        """Calls `what` on the router's event loop, where reading its state is safe, and returns the result."""

        async def do() -> T:
            return what()

        return self.call(do())

    def wing(self, kind: type[W]) -> W:
        """The router's wing of this kind, with its state."""
        return next(wing for wing in self.server.wings if isinstance(wing, kind))

    def add(self, node_id: str, role: Role, **options: Any) -> FakeNode:
        node = FakeNode(node_id, role, self.board, model=self.config.model_name, **options)
        self.nodes[node_id] = node
        self.announce()
        return node

    def remove(self, node_id: str) -> FakeNode:
        node = self.nodes.pop(node_id)
        self.announce()
        return node

    def join(self, other: RunningRouter) -> RunningRouter:
        """From now on it has the other one's nodes."""
        self.board, self.nodes = other.board, other.nodes
        self.announce()
        self.wait_ready()
        return self

    def announce(self, *reports: PoolReport) -> None:
        infos = [node.info for node in self.nodes.values()]
        self.look(lambda: self.server.set_members(infos, reports=reports))

    def wait_ready(self, *node_ids: str) -> None:
        """Waits until the router can use these nodes, or all of its nodes if none is named."""
        wanted = set(node_ids or self.nodes)

        async def wait() -> None:
            async with asyncio.timeout(10):
                while not wanted <= self.in_view():  # noqa: ASYNC110 (several things of the router's, none with an event)
                    await asyncio.sleep(0.002)

        self.call(wait())

    def in_view(self) -> set[str]:
        snapshot = self.server.services.pool.view.snapshot()
        return {view.node_id for view in (*snapshot.prefill, *snapshot.decode)}

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = 10) -> None:
        async def wait() -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    while not condition():  # noqa: ASYNC110 (whatever a test looks at)
                        await asyncio.sleep(0.002)
            except TimeoutError:
                raise AssertionError(f"not within {timeout_s} s: {what}") from None

        self.call(wait())

    def metric(self, name: str, **labels: str) -> float:
        metrics = self.server.services.metrics
        found = [registry.get_sample_value(name, labels) for registry in (metrics.registry, metrics.node_registry)]
        return next((value for value in found if value is not None), 0.0)

    def expected(self, prompt: str, count: int, *, seed: int, special: bool = True) -> str:
        """The text that the router must answer, whichever nodes serve the request."""
        tokenizer = self.server.services.model.tokenizer
        ids = tokenizer.encode(prompt, special=special)
        return tokenizer.decode([self.board.rule(ids, seed, index) for index in range(count)], skip_special=True)

    def complete(self, **asked: Any) -> httpx.Response:
        return self.ask("/v1/completions", **{"model": self.config.model_name, "prompt": "the fox", **asked})

    def chat(self, content: str = "hi", **asked: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return self.ask("/v1/chat/completions", **{"model": self.config.model_name, "messages": messages, **asked})

    def stream(self, *, headers: dict[str, str] | None = None, **fields: Any) -> EventReader:
        body = {"model": self.config.model_name, "prompt": "the fox", "stream": True, **fields}
        return EventReader(self.url, "/v1/completions", body, headers=headers)

    def ask(
        self, path: str, key: str | None = None, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """Posts these fields, with this key."""
        return self.client.post(path, json=fields, headers={**(headers or {}), **({} if key is None else bearer(key))})

    @property
    def prompt(self) -> str:
        """What the prefill node was last asked to read, without special tokens."""
        tokenizer = self.server.services.model.tokenizer
        return tokenizer.decode(self.nodes["p0"].submits[-1].prompt_token_ids)

    def set(self, **behaviour: object) -> None:
        """Sets what all nodes do."""
        for node in self.nodes.values():
            node.set(**behaviour)

    def with_small_buffers(self) -> RunningRouter:
        """The kernel holds little for clients that do not read. Otherwise it would take megabytes."""
        assert self.server._listener is not None
        self.server._listener[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return self

    def as_new(self) -> RunningRouter:
        """This router for one more test: its nodes have no fault and have heard nothing. Its metrics go on."""
        self.wait_for(self.idle, "the last test's requests have ended")
        began, links = time.monotonic(), self.server.services.links
        self.look(lambda: [links.ping(node.info) for node in self.nodes.values()])
        for node in self.nodes.values():
            node.wait_until(lambda node=node: node.pinged_at >= began, "all that was sent before")  # type: ignore[misc]
            node.begin_anew()
        return self

    def connections(self) -> int:
        assert self.server.http is not None
        return len(self.server.http.connections)

    def idle(self) -> bool:
        dispatcher = self.server.services.dispatcher
        return dispatcher.running == 0 and dispatcher.held == 0 and dispatcher.queued == 0

    def close(self) -> None:
        self.client.close()
        self.call(self.server.stop())
        for node in self.nodes.values():
            node.kill()
        self._end()

    def go_on(self) -> None:
        self._thread = threading.Thread(target=self._loop.run_forever, name="router", daemon=True)
        self._thread.start()

    def freeze(self) -> None:
        """Its loop runs no more: it says nothing to anyone, as if the process had been killed, until it goes on."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _end(self) -> None:
        self.freeze()
        self._loop.close()


@contextmanager
def bombarded(
    model_folder: str, end_token: int, unknown_fields: UnknownFields = UnknownFields.IGNORE, **node: Any
) -> Iterator[RunningRouter]:
    """A router with one node of each role. After the block it checks that the router still answers, holds nothing, and has lost none of
    its tasks."""
    config = RouterConfig(
        tokenizer_path=model_folder,
        model_name="fake",
        port=0,
        heartbeat=Heartbeat(ping_interval=0.1, silence=5),
        local_prefill=LocalPrefill.NEVER,
        unknown_fields=unknown_fields,
        batches_folder=str(Path(model_folder).parent / f"batches-{new_id()}"),
    )
    running = RunningRouter(config, LETTERS, end_token)
    running.add("p0", Role.PREFILL, **node)
    running.add("d0", Role.DECODE, **node)
    running.wait_ready()
    yield running
    assert running.complete(max_tokens=3).status_code == 200
    running.wait_for(running.idle, "nothing is left behind")
    assert running.look(lambda: running.server.services.tasks.down) == {}
    running.close()


StartRouter = Callable[..., RunningRouter]


@pytest.fixture(scope="session")
def end_token(tokenizer: Tokenizer) -> int:
    (token,) = tokenizer.encode("<|end|>", special=False)
    return token


@contextmanager
def starting(model_folder: str, end_token: int, folder: Path) -> Iterator[StartRouter]:
    """Starts routers with `prefill` and `decode` (or `aggregated`) fake nodes, each with the options `node`, and waits until they are
    ready; stops them at the end."""
    started: list[RunningRouter] = []

    def start(
        prefill: int = 1,
        decode: int = 1,
        aggregated: int = 0,
        rule: TokenRule | None = None,
        vectors: VectorModel | None = None,
        door: str = "",
        content: str = "",
        node: dict[str, Any] | None = None,
        **settings: Any,
    ) -> RunningRouter:
        config = RouterConfig(tokenizer_path=model_folder, model_name="fake", port=0)
        defaults = {
            "heartbeat": Heartbeat(ping_interval=0.1, silence=1.5),
            "local_prefill": LocalPrefill.NEVER,
            "batches_folder": str(folder / f"batches-{new_id()}"),
        }
        running = RunningRouter(
            msgspec.structs.replace(config, **(defaults | settings)), rule or LETTERS, end_token, door
        )
        started.append(running)
        for count, name, role in (
            (prefill, "p", Role.PREFILL),
            (decode, "d", Role.DECODE),
            (aggregated, "a", Role.AGGREGATED),
        ):
            for index in range(count):
                running.add(f"{name}{index}", role, vectors=vectors, content=content, **(node or {}))
        running.wait_ready()
        return running

    yield start
    for running in started:
        running.close()


@pytest.fixture
def start_router(model_folder: str, end_token: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartRouter]:
    with starting(model_folder, end_token, tmp_path_factory.getbasetemp()) as start:
        yield start


@pytest.fixture
def start_saying(start_router: StartRouter, tokenizer: Tokenizer, end_token: int) -> StartRouter:
    """As start_router. Every answer is this text, again and again if it does not end there."""

    def start(text: str, *, ends: bool = True, **settings: Any) -> RunningRouter:
        script = tokenizer.encode(text, special=False)
        return start_router(rule=scripted([*script, end_token] if ends else script), **settings)

    return start


@pytest.fixture(scope="module")
def keep_router(model_folder: str, end_token: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartRouter]:
    """As start_router. They stop after the file's last test; each test takes them by `as_new`."""
    with starting(model_folder, end_token, tmp_path_factory.getbasetemp()) as start:
        yield start


@pytest.fixture(scope="module")
def kept_router(keep_router: StartRouter) -> RunningRouter:
    """A test file that needs other settings has a fixture of this name of its own."""
    return keep_router()


@pytest.fixture
def router(kept_router: RunningRouter) -> RunningRouter:
    """One router for all tests of a file that ask it and look at what its nodes were told."""
    return kept_router.as_new()

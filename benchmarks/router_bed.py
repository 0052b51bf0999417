"""What the router's benchmarks run, each in a process of its own: a router; engines that answer instantly, so that a request's time is the
router's and the sockets'; and a relay, which does the minimum that any router has to do.

The thread that receives a Submit answers it with the first token. Further tokens come in steps, with one message per step for all running
requests, like a real engine's.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import tokenizers
import uvloop
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.lib.connections import HttpConnection, TimedAnswer, serve
from benchmarks.lib.processes import child, wait_for
from tandem.router.config import Limits, LocalPrefill, RouterConfig
from tandem.router.hosting import RouterHost
from tandem.router.links import NodeLinks
from tandem.wire.endpoints import key_of
from tandem.wire.lines import NumberedChannel
from tandem.wire.nodes import NodeInfo, NodeState, Role, RouterInfo, new_epoch
from tandem.wire.requests import (
    Cancel,
    NodeCounters,
    NodeStatus,
    Ping,
    Submit,
    TokenBatch,
    TokenChunk,
    ToNode,
    TransferRole,
)
from tandem.wire.sampling import FinishReason, SamplingParams, TokenLogprobs
from tandem.wire.sockets import admit, public_key

MODEL = "instant"
TOKEN = 70
MOST_LOGPROBS = 20
PROMPT = "the quick brown fox jumps over the lazy dog " * 12
START_S = 10.0
ANSWER_S = 60.0
APART_S = 0.002  # between the beginnings of two streams
Probe = Callable[..., float]
_RELAYED = b"data: " + b"x" * 150 + b"\n\n"
_draw = random.Random(0)
_ROWS = [
    TokenLogprobs(
        TOKEN, -_draw.random(), 1, [(_draw.randrange(256), -20 * _draw.random()) for _ in range(MOST_LOGPROBS)]
    )
    for _ in range(257)
]


class InstantNode:
    def __init__(self, node_id: str, role: Role, step_s: float) -> None:
        self._role = role
        self._step_s = step_s
        self._running: dict[str, tuple[Submit, int]] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        epoch = new_epoch()
        self._channel = NumberedChannel("127.0.0.1", epoch, name=node_id)
        self.info = NodeInfo(node_id, role, epoch, self._channel.endpoint, "tcp://127.0.0.1:1", MODEL, 1 << 20, 16)
        self._channel.listen(self._on_message, begun=lambda endpoint: None, replaced=lambda endpoint: None)
        threading.Thread(target=self._steps, daemon=True).start()

    def _on_message(self, message: ToNode) -> None:
        if isinstance(message, Submit):
            self._on_submit(message)
        elif isinstance(message, Cancel):
            with self._lock:
                for request_id in message.request_ids:
                    self._running.pop(request_id, None)
        elif isinstance(message, Ping):
            status = NodeStatus(
                self.info.node_id, self._role, self.info.epoch, NodeState.READY, 10**6, 10**6, len(self._running),
                0, 0, 0, 0, 0.0, NodeCounters(),
            )  # fmt: skip
            self._channel.send(message.reply_to, status)

    def _on_submit(self, submit: Submit) -> None:
        finish = None
        if submit.sampling.max_tokens == 1:
            finish = FinishReason.LENGTH
        elif submit.transfer is not None and submit.transfer.role is TransferRole.PRODUCE:
            finish = FinishReason.HANDOFF
        chunk = TokenChunk(submit.request_id, 0, [TOKEN], finish=finish, cached_tokens=0, logprobs=_logprobs(submit, 0))
        self._send(submit.reply_to, [chunk])
        if finish is None and (submit.transfer is None or self._role is not Role.PREFILL):
            with self._lock:
                self._running[submit.request_id] = (submit, 1)
            self._wake.set()

    def _send(self, reply_to: str, chunks: list[TokenChunk]) -> None:
        self._channel.send(reply_to, TokenBatch(self.info.node_id, self.info.epoch, chunks))

    def _steps(self) -> None:
        while True:
            self._wake.wait()
            began = time.perf_counter()
            with self._lock:
                chunks = [self._next(request_id) for request_id in list(self._running)]
                reply_to = {submit.reply_to for submit, _ in self._running.values()}
                for chunk in chunks:
                    if chunk.finish is not None:
                        del self._running[chunk.request_id]
                if not self._running:
                    self._wake.clear()
            if chunks:
                self._send(next(iter(reply_to)), chunks)
            time.sleep(max(0.0, self._step_s - (time.perf_counter() - began)))

    def _next(self, request_id: str) -> TokenChunk:
        submit, index = self._running[request_id]
        self._running[request_id] = (submit, index + 1)
        finish = FinishReason.LENGTH if index + 1 >= submit.sampling.max_tokens else None
        return TokenChunk(request_id, index, [TOKEN], finish=finish, logprobs=_logprobs(submit, index))


def _logprobs(submit: Submit, index: int) -> list[TokenLogprobs] | None:
    """Returns different log-probabilities for different tokens, like a model's: equal ones would cost the router less."""
    count = submit.sampling.logprobs
    if count is None:
        return None
    row = _ROWS[index % len(_ROWS)]
    if count == len(row.top):
        return [row]
    return [TokenLogprobs(row.token_id, row.logprob, row.rank, row.top[:count])]


def _serve_engines(pipe: Connection, step_s: float) -> None:
    """Sends its nodes' addresses, admits the keys that it gets, and serves until the pipe is closed."""
    nodes = [InstantNode("p0", Role.PREFILL, step_s), InstantNode("d0", Role.DECODE, step_s)]
    pipe.send([node.info for node in nodes])
    keys: set[str] = set()
    while True:
        try:
            keys.add(pipe.recv())
        except EOFError:
            return
        admit(keys)
        pipe.send("admitted")


class Engines(list[NodeInfo]):
    """The nodes of one process of instant engines: one prefill node and one decode node."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(pipe.recv())
        self._pipe = pipe
        self.router_inbox = ""  # set when there is a router

    def admit(self, key: str) -> None:
        self._pipe.send(key)
        self._pipe.recv()


@contextmanager
def running_engines(step_s: float) -> Iterator[Engines]:
    with child(_serve_engines, step_s) as pipe:
        yield Engines(pipe)


def make_tokenizer(folder: str, special: Sequence[str] = ()) -> None:
    """Writes a tokenizer of bytes only. Encoding with it costs about what any byte-level model's tokenizer costs, within a factor."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({piece: index for index, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    backend.save(str(Path(folder) / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    Path(folder, "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def serve_router(pipe: Connection, folder: str, nodes: list[NodeInfo], settings: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"limits": Limits(inflight_per_node=4096), "local_prefill": LocalPrefill.NEVER}
    config = RouterConfig(tokenizer_path=folder, model_name=MODEL, port=0, **usual | settings)
    uvloop.run(_serve_router(pipe, config, nodes))


async def _serve_router(pipe: Connection, config: RouterConfig, nodes: list[NodeInfo]) -> None:
    host = RouterHost(msgspec.msgpack.encode(config))
    info = msgspec.msgpack.decode(await host.start(""), type=RouterInfo)
    await host.set_members(msgspec.msgpack.encode(nodes))
    pipe.send(info)
    while True:
        try:
            what = await asyncio.to_thread(pipe.recv)
        except EOFError:
            break
        pipe.send(resident_bytes() if what == "memory" else time.process_time())
    await host.stop()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def asked(pipe: Connection, what: str) -> float:
    pipe.send(what)
    return float(pipe.recv())


@contextmanager
def running_router(
    nodes: Engines, settings: dict[str, Any] | None = None, special: Sequence[str] = ()
) -> Iterator[tuple[str, Probe]]:
    """Yields the router's URL, and what measures it: its CPU time in seconds, or its memory in bytes. `settings`: the router's, besides
    those of all benchmarks. `special`: the tokenizer's special tokens."""
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(folder, special)
        with child(serve_router, folder, list(nodes), settings or {}) as pipe:
            info: RouterInfo = pipe.recv()
            nodes.router_inbox = info.inbox_endpoint
            nodes.admit(key_of(info.inbox_endpoint))
            until_ready(info.url)
            yield info.url, lambda what="cpu": asked(pipe, what)


def until_ready(url: str) -> None:
    def healthy() -> bool:  # not before its nodes have reported
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200

    wait_for(healthy, START_S, "the router is not ready")


async def streams(url: str, count: int, tokens: int) -> list[TimedAnswer]:
    """Runs `count` streams at once. They begin a little apart, because users do not act in step."""
    connections = [await HttpConnection.to(url) for _ in range(count)]
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "stream": True}

    async def one(index: int) -> TimedAnswer:
        await asyncio.sleep(index * APART_S)
        return await answered(connections[index], "/v1/completions", body)

    try:
        return await asyncio.gather(*map(one, range(count)))
    finally:
        for connection in connections:
            connection.abort()


async def answered(connection: HttpConnection, path: str, body: dict[str, Any]) -> TimedAnswer:
    await connection.send(path, body)
    answer = await connection.answer()
    if answer.status != 200:
        raise RuntimeError(f"the router answered with status {answer.status}")
    return answer


class Relay:
    """A connection is a request. The cost per token is what this machine takes to wake up, receive and send."""

    def __init__(self, decode: NodeInfo, tokens: int) -> None:
        self._decode = decode
        self._tokens = tokens
        self._clients: dict[str, asyncio.Transport] = {}
        admit([key_of(decode.request_endpoint)])
        self._links = NodeLinks("127.0.0.1")
        self._links.meet(decode)

    async def listen(self) -> None:
        def ignore(*message: object) -> None: ...

        self._links.listen(self._on_tokens, *[ignore] * 7)

    def add(self, transport: asyncio.Transport) -> None:
        request_id = f"relay-{id(transport)}"
        self._clients[request_id] = transport
        sampling = SamplingParams(max_tokens=self._tokens)
        submit = Submit(request_id, self._links.endpoint, ANSWER_S, prompt_token_ids=[1] * 128, sampling=sampling)
        self._links.submit(self._decode, submit)

    def _on_tokens(self, message: TokenBatch) -> None:
        for chunk in message.chunks:
            transport = self._clients[chunk.request_id]
            transport.write(_RELAYED)
            if chunk.finish is not None:
                transport.close()


class _RelayClient(asyncio.Protocol):
    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._relay.add(cast("asyncio.Transport", transport))  # uvloop's are of no class of asyncio's


def serve_relay(pipe: Connection, decode: NodeInfo, tokens: int) -> None:
    async def relaying() -> None:
        relay = Relay(decode, tokens)
        await relay.listen()
        await serve(pipe, lambda: _RelayClient(relay), public_key(), asked=time.process_time)

    uvloop.run(relaying())


async def read_relay(port: int, count: int) -> None:
    async def one(index: int) -> None:
        await asyncio.sleep(index * APART_S)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(ANSWER_S):
            while await reader.read(65536):
                pass
        writer.close()

    await asyncio.gather(*map(one, range(count)))

"""The minimum that any router has to do: take tokens from nodes and send bytes to clients.

A connection is a request. The cost per token is what this machine takes to wake up, receive and send.
"""

from __future__ import annotations

import asyncio
import time
from multiprocessing.connection import Connection
from typing import cast

import uvloop

from tandem.router.links import NodeLinks
from tandem.wire.endpoints import key_of
from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import Submit, TokenBatch
from tandem.wire.sampling import SamplingParams
from tandem.wire.sockets import admit, public_key

ANSWER_S = 60.0
EVENT = b"data: " + b"x" * 150 + b"\n\n"


class Relay:
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
        self._links.submit(
            self._decode,
            Submit(request_id, self._links.endpoint, 60.0, prompt_token_ids=[1] * 128, sampling=sampling),
        )

    def _on_tokens(self, message: TokenBatch) -> None:
        for chunk in message.chunks:
            transport = self._clients[chunk.request_id]
            transport.write(EVENT)
            if chunk.finish is not None:
                transport.close()


class _Client(asyncio.Protocol):
    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._relay.add(cast("asyncio.Transport", transport))  # uvloop's are of no class of asyncio's


def serve_relay(pipe: Connection, decode: NodeInfo, tokens: int) -> None:
    uvloop.run(_serve(pipe, decode, tokens))


async def _serve(pipe: Connection, decode: NodeInfo, tokens: int) -> None:
    relay = Relay(decode, tokens)
    await relay.listen()
    server = await asyncio.get_running_loop().create_server(lambda: _Client(relay), "127.0.0.1", 0)
    pipe.send((server.sockets[0].getsockname()[1], public_key()))
    while True:
        try:
            await asyncio.to_thread(pipe.recv)
        except EOFError:
            return
        pipe.send(time.process_time())


async def read_relay(port: int, count: int) -> None:
    async def one(index: int) -> None:
        await asyncio.sleep(index * 0.002)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(ANSWER_S):
            while await reader.read(65536):
                pass
        writer.close()

    await asyncio.gather(*(one(index) for index in range(count)))

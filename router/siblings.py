"""The other router processes on this one's port: what they are asked, so that each answers for all of them.

A question goes over a Unix socket of this machine, to a process of the same user, and has a deadline: one that does not answer is
named, and never waited for longer. The controller says which there are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec

logger = logging.getLogger(__name__)

ANSWER_S = 1.0
_SIZE = struct.Struct("!Q")
_CREDENTIALS = struct.Struct("3i")  # process, user, group

T = TypeVar("T")
Answer = Callable[[bytes], Awaitable[object]]


class _Question(msgspec.Struct, frozen=True, array_like=True):
    what: str
    body: bytes


class Siblings:
    """`answers`: what this process answers to each question, from the question's body. On the event loop that makes it."""

    def __init__(self) -> None:
        self.desk = f"tandem-router-{secrets.token_hex(16)}"  # where the others ask this one
        self.name = "router"  # this one's
        self.answers: dict[str, Answer] = {}
        self._desks: dict[str, str] = {}  # of the others, by their names
        self._server: asyncio.Server | None = None

    @property
    def names(self) -> list[str]:
        return list(self._desks)

    def tell(self, desks: Mapping[str, str]) -> None:
        """All processes on this port, by name, this one too: where each is asked."""
        self.name = next((name for name, desk in desks.items() if desk == self.desk), self.name)
        self._desks = {name: desk for name, desk in desks.items() if desk != self.desk}

    async def ask(self, what: str, answer: type[T], body: object = None) -> tuple[dict[str, T], list[str]]:
        """What the others answer, by name, and the names of those that did not in time."""
        desks = dict(self._desks)
        if not desks:
            return {}, []
        question = msgspec.msgpack.encode(_Question(what, msgspec.msgpack.encode(body)))
        asked = await asyncio.gather(
            *(self._ask(desk, question, answer) for desk in desks.values()), return_exceptions=True
        )
        told: dict[str, T] = {}
        for name, one in zip(desks, asked, strict=True):
            if not isinstance(one, BaseException):
                told[name] = one
            elif isinstance(one, (OSError, EOFError, TimeoutError, msgspec.DecodeError)):
                logger.info("%s does not answer: %r", name, one)
            else:
                raise one
        return told, [name for name in desks if name not in told]

    async def _ask(self, desk: str, question: bytes, answer: type[T]) -> T:
        async with asyncio.timeout(ANSWER_S):
            guest = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                guest.setblocking(False)
                guest.connect(f"\0{desk}")  # at once, or never: its line is full
                reader, writer = await asyncio.open_unix_connection(sock=guest)
            except BaseException:
                guest.close()
                raise
            try:
                writer.write(_SIZE.pack(len(question)) + question)
                return msgspec.msgpack.decode(await _read(reader), type=answer)
            finally:
                writer.close()

    # --- asked by the others

    async def listen(self) -> None:
        desk = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Abstract: it is no file, and gone with the process.
        desk.bind(f"\0{self.desk}")
        self._server = await asyncio.start_unix_server(self._serve, sock=desk)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                if not _is_of_this_user(writer):
                    return
                question = msgspec.msgpack.decode(await _read(reader), type=_Question)
                answer = await self.answers[question.what](question.body)
                body = msgspec.msgpack.encode(answer)
                writer.write(_SIZE.pack(len(body)) + body)
                await writer.drain()
        except (OSError, EOFError, TimeoutError, msgspec.DecodeError, LookupError) as error:
            logger.warning("another router's question was not answered: %r", error)
        finally:
            writer.close()

    def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()


async def _read(reader: asyncio.StreamReader) -> bytes:
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    return await reader.readexactly(size)


def _is_of_this_user(writer: asyncio.StreamWriter) -> bool:
    peer: socket.socket = writer.get_extra_info("socket")
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        logger.warning("a process of user %d asked this router, in vain", user)
    return bool(user == os.geteuid())

"""The other router processes on this port: questions to them, so that each process answers for all of them,
and reports to them, so that all decide alike.

A question goes over a Unix socket to a process of the same user on this machine, and has a deadline; a
process that does not answer in time is named in the result. A report gets no answer. The reports of one turn
of the event loop are sent as one datagram; a process that does not read misses the oldest ones. The
controller tells each process which siblings it has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import TypeVar

import msgspec

from tandem.router.siblings import Siblings

logger = logging.getLogger(__name__)


ANSWER_S = 1.0
# For a sibling that does not read: how many reports are kept, and how long until the next try, doubled each
# time.
REPORTS_KEPT = 1000
REPORT_AGAIN_S, REPORT_AGAIN_MOST_S = 0.002, 0.25
_REPORTS_AT_ONCE = 32
_REPORT_BYTES = 1 << 18
_SIZE = struct.Struct("!Q")
_CREDENTIALS = struct.Struct("3i")  # process, user and group id

T = TypeVar("T")


class _Question(msgspec.Struct, frozen=True, array_like=True):
    what: str
    body: bytes


class _Reports(msgspec.Struct, frozen=True, array_like=True):
    desk: str  # the sender's desk
    reports: list[tuple[str, bytes]]


class SiblingProcesses(Siblings):
    """This process's desk, and those of its siblings, on the event loop that makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = f"tandem-router-{secrets.token_hex(16)}"
        self.name = "router"  # this process's name
        self._desks: dict[str, str] = {}  # the siblings' desks, by name
        self._server: asyncio.Server | None = None
        self._letters: socket.socket | None = None  # receives the siblings' reports
        self._unsent: dict[str, deque[tuple[str, bytes]]] = {}  # reports to send, by desk
        self._sending: asyncio.Handle | None = None
        self._again_s = REPORT_AGAIN_S

    @property
    def names(self) -> list[str]:
        return list(self._desks)

    @property
    def desks(self) -> list[str]:
        return list(self._desks.values())

    @property
    def alone(self) -> bool:
        return not self._desks

    def tell(self, desks: Mapping[str, str]) -> None:
        self.name = next((name for name, desk in desks.items() if desk == self.desk), self.name)
        before, self._desks = self._desks, {name: desk for name, desk in desks.items() if desk != self.desk}
        for desk in [desk for desk in self._unsent if desk not in self._desks.values()]:
            del self._unsent[desk]
        if before != self._desks:
            for call in self.on_change:
                call()

    async def ask(self, what: str, answer: type[T], body: object = None) -> tuple[dict[str, T], list[str]]:
        """As long as ANSWER_S."""
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
                # never waits: it connects at once, or fails because the sibling's backlog is full
                guest.connect(f"\0{desk}")
                reader, writer = await asyncio.open_unix_connection(sock=guest)
            except BaseException:
                guest.close()
                raise
            try:
                writer.write(_SIZE.pack(len(question)) + question)
                return msgspec.msgpack.decode(await _read(reader), type=answer)
            finally:
                writer.close()

    # --- told to the others

    def report(self, what: str, news: object) -> None:
        if self.alone or self._letters is None:
            return
        body = msgspec.msgpack.encode(news)
        for desk in self._desks.values():
            self._unsent.setdefault(desk, deque(maxlen=REPORTS_KEPT)).append((what, body))
        if self._sending is None:
            self._sending = asyncio.get_running_loop().call_soon(self._send_reports)

    def _send_reports(self) -> None:
        self._sending = None
        full = [desk for desk, unsent in self._unsent.items() if not self._send_to(desk, unsent)]
        if full:
            self._sending = asyncio.get_running_loop().call_later(self._again_s, self._send_reports)
            self._again_s = min(2 * self._again_s, REPORT_AGAIN_MOST_S)
        else:
            self._again_s = REPORT_AGAIN_S

    def _send_to(self, desk: str, unsent: deque[tuple[str, bytes]]) -> bool:
        """Sends the queued reports to one sibling. Returns False when its socket is full."""
        while unsent and self._letters is not None:
            some = list(islice(unsent, _REPORTS_AT_ONCE))
            try:
                self._letters.sendto(msgspec.msgpack.encode(_Reports(self.desk, some)), _address(desk))
            except BlockingIOError:
                return False
            except OSError as error:  # the sibling has ended
                logger.debug("%s is told nothing: %r", desk, error)
                unsent.clear()
                return True
            for _ in some:
                unsent.popleft()
        return True

    def _read_reports(self) -> None:
        letters = self._letters
        for _ in range(_REPORTS_AT_ONCE):
            if letters is None:
                return
            try:
                letter, ancillary, _, _ = letters.recvmsg(_REPORT_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return
            users = [
                _CREDENTIALS.unpack(value)[1]
                for _, kind, value in ancillary
                if kind == socket.SCM_CREDENTIALS and len(value) == _CREDENTIALS.size
            ]
            if users == [os.geteuid()]:
                self._hear(letter)

    def _hear(self, letter: bytes) -> None:
        try:
            told = msgspec.msgpack.decode(letter, type=_Reports)
            if told.desk not in self._desks.values():
                return  # a sibling that this process does not know yet, or no longer has
            for what, body in told.reports:
                self.hears[what](told.desk, body)
        except (msgspec.DecodeError, LookupError) as error:
            logger.warning("another router's report was not understood: %r", error)

    # --- asked by the others

    async def listen(self) -> None:
        desk = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # An abstract address is no file, and ends with the process.
        desk.bind(f"\0{self.desk}")
        self._server = await asyncio.start_unix_server(self._serve, sock=desk)
        self._letters = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._letters.setblocking(False)
        # the kernel adds each sender's credentials
        self._letters.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._letters.bind(_address(self.desk))
        asyncio.get_running_loop().add_reader(self._letters, self._read_reports)

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
        if self._sending is not None:
            self._sending.cancel()
        if self._letters is not None:
            asyncio.get_running_loop().remove_reader(self._letters)
            self._letters.close()
            self._letters = None


def _address(desk: str) -> str:
    return f"\0{desk}/reports"


async def _read(reader: asyncio.StreamReader) -> bytes:
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    return await reader.readexactly(size)


def _is_of_this_user(writer: asyncio.StreamWriter) -> bool:
    peer: socket.socket = writer.get_extra_info("socket")
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        logger.warning("a process of user %d asked this router, and was refused", user)
    return bool(user == os.geteuid())

"""Requests to an object store over HTTP(S): get, head, put, delete. Each has a deadline that holds for all of it, also for a store
that sends a byte now and then.

Every failure but an absent object is a StoreError. Names are relative to the tier's folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import re
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from tandem.base.errors import ConfigurationError
from tandem.base.own_thread import in_own_thread
from tandem.kvtransfer.objects.options import CredentialFile, ObjectOptions
from tandem.kvtransfer.objects.signing import signed
from tandem.kvtransfer.offload.patience import TierUnavailable

_PIECE = 1 << 20  # sent at a time, between two looks at the clock
_MOST_SAID = 4096  # bytes read of an answer that says what is wrong
_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()

Bytes = bytes | bytearray | memoryview


class StoreError(TierUnavailable):
    """The store did not do what it was asked, or not in time."""


class StoreRefused(StoreError):
    """It answers, and does not let us: the key, the bucket or the region is wrong."""


class _Reading(io.RawIOBase):
    def __init__(self, sock: Any, until: Deadline) -> None:
        self._sock = sock
        # http.client closes a connection that ends with an answer before it reads the answer. Until this is closed, too, it stays open.
        self._file = sock.makefile("rb", buffering=0)
        self._until = until

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        self._sock.settimeout(self._until.left())
        return int(self._file.readinto(into))

    def close(self) -> None:
        self._file.close()
        super().close()


class Deadline:
    """Until when a request must be done. A connection is used for one request after another, each with its own."""

    def __init__(self) -> None:
        self.at = 0.0

    def left(self) -> float:
        left = self.at - time.monotonic()
        if left <= 0:
            raise TimeoutError("it did not answer in time")
        return left


class _TimedSocket:
    """A socket as http.client uses it, whose calls have together until the deadline."""

    def __init__(self, sock: Any, until: Deadline) -> None:
        self._sock = sock
        self._until = until

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reading(self._sock, self._until), 1 << 16)

    def sendall(self, data: Bytes) -> None:
        view = memoryview(data).cast("B")
        while view:
            self._sock.settimeout(self._until.left())
            view = view[self._sock.send(view[:_PIECE]) :]

    def close(self) -> None:
        self._sock.close()


def _addresses(host: str, port: int, until: Deadline) -> list[tuple[str, int]]:
    """Resolves a name in a thread of its own: the system's resolver takes no deadline, and asks for half a minute."""

    def resolve() -> list[tuple[str, int]]:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [(str(at[0]), int(at[1])) for *_, at in answers]

    return in_own_thread("object-names", resolve).result(until.left())


def _opened(addresses: Sequence[tuple[str, int]], until: Deadline) -> socket.socket:
    """Connects to the first of them that takes it."""
    for address in addresses[:-1]:
        with contextlib.suppress(OSError):
            return socket.create_connection(address, until.left())
    return socket.create_connection(addresses[-1], until.left())


class StoreConnection:
    """One connection, for one thread. It is made when it is needed, and again when the store has closed it."""

    def __init__(self, options: ObjectOptions, context: ssl.SSLContext | None) -> None:
        self._parts = options.parts
        self._context = context
        self._until = Deadline()
        self._http: http.client.HTTPConnection | None = None

    def request(
        self, method: str, path: str, headers: dict[str, str], body: Sequence[Bytes], until: float
    ) -> http.client.HTTPResponse:
        """Returns the answer, whose body is yet to be read. Raises OSError or HTTPException."""
        self._until.at = until
        is_used = self._http is not None
        try:
            return self._send(method, path, headers, body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if not is_used or isinstance(error, TimeoutError):
                raise
        # The store closes connections that were idle. Each of our requests may be made twice.
        return self._send(method, path, headers, body)

    def _send(self, method: str, path: str, headers: dict[str, str], body: Sequence[Bytes]) -> http.client.HTTPResponse:
        if self._http is None:
            self._http = self._connected()
        self._http.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            self._http.putheader(name, value)
        self._http.endheaders()
        for part in body:
            self._http.send(part)
        return self._http.getresponse()

    def _connected(self) -> http.client.HTTPConnection:
        host, is_tls = self._parts.hostname or "", self._parts.scheme == "https"
        port = self._parts.port or (443 if is_tls else 80)
        sock: socket.socket = _opened(_addresses(host, port, self._until), self._until)
        try:
            if self._context is not None:
                sock.settimeout(self._until.left())
                sock = self._context.wrap_socket(sock, server_hostname=host)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            sock.close()
            raise
        made = http.client.HTTPConnection(host, port)
        made.auto_open = 0  # a connection that http.client made again by itself would know no deadline
        made.sock = _TimedSocket(sock, self._until)
        return made

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None


class ObjectClient:
    """Any thread may use it: each has a connection of its own."""

    def __init__(self, options: ObjectOptions) -> None:
        self._options = options
        self._ring = CredentialFile(options)
        self._ring.keys()  # an operator hears at the start what is wrong
        parts = options.parts
        self._folder = quote(parts.path.strip("/"), safe="/-_.~")
        self._host = parts.netloc
        self._context: ssl.SSLContext | None = None
        if parts.scheme == "https":
            try:
                self._context = ssl.create_default_context(cafile=options.ca_file or None)
            except OSError as error:
                raise ConfigurationError(
                    f"cache.tiers: ca_file of objects, {options.ca_file!r}, has no certificates: {error.strerror or error}"
                ) from error
        self._of_thread = threading.local()

    def get(self, name: str, until: float) -> bytes | None:
        """Returns a small object, or None if there is none of this name."""
        with self._answer("GET", name, (), until) as answer:
            return None if answer is None else answer.read()

    def read(self, name: str, until: float, head: bytearray, body: memoryview) -> bool | None:
        """Fills `head` and `body`, in this order, with an object of exactly their length. Returns None if there is no
        such object, and False if it has another length."""
        with self._answer("GET", name, (), until) as answer:
            if answer is None:
                return None
            if answer.length is None:
                raise ValueError("the answer does not say how long the object is, as behind a proxy that compresses")
            if answer.length != len(head) + body.nbytes:
                self._drop()
                return False
            for view in (memoryview(head), body):
                _fill(answer, view)
            return True

    def size(self, name: str, until: float) -> int | None:
        """Returns an object's length in bytes, or None if there is none of this name."""
        with self._answer("HEAD", name, (), until) as answer:
            if answer is None:
                return None
            answer.read()  # of nothing, which ends it
            return int(answer.headers.get("content-length", "-1"))

    def put(self, name: str, body: Sequence[Bytes], until: float) -> None:
        with self._answer("PUT", name, body, until) as answer:
            if answer is None:
                raise StoreRefused(f"{self._options.url}: there is no such bucket")
            answer.read()

    def delete(self, name: str, until: float) -> None:
        """There may be none of this name."""
        with self._answer("DELETE", name, (), until) as answer:
            if answer is not None:
                answer.read()

    @contextlib.contextmanager
    def _answer(self, method: str, name: str, body: Sequence[Bytes], until: float) -> Any:
        """The answer to a request; None: there is no such object. Raises StoreError."""
        path = f"/{self._folder}/{name}"
        digest = hashlib.sha256()
        for part in body:
            digest.update(part)
        try:
            headers = {"host": self._host}
            if method == "PUT":
                headers["content-length"] = str(sum(memoryview(part).nbytes for part in body))
            headers = signed(
                method, path, headers, digest.hexdigest() if body else _EMPTY_SHA256, self._ring.keys(),
                self._options.region, datetime.now(UTC),
            )  # fmt: skip
            answer = self._connection.request(method, path, headers, body, until)
            if answer.status == 404 and method != "PUT" and not self._says_no_bucket(answer):
                yield None
            elif answer.status >= 300:
                raise self._refusal(method, answer)
            else:
                yield answer
            if not answer.isclosed():
                self._drop()  # what was not read would be taken for the next answer
        except ConfigurationError as error:
            raise StoreRefused(str(error)) from error
        except StoreError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._drop()
            raise StoreError(f"{self._options.url}: {_words(error)}") from error

    def _says_no_bucket(self, answer: http.client.HTTPResponse) -> bool:
        said = answer.read(_MOST_SAID)
        if b"NoSuchBucket" not in said:
            return False
        raise StoreRefused(f"{self._options.url}: the store has no such bucket: make it")

    def _refusal(self, method: str, answer: http.client.HTTPResponse) -> StoreError:
        said = answer.read(_MOST_SAID)
        if not answer.isclosed():
            self._drop()
        code = re.search(rb"<Code>(\w{1,64})</Code>", said)
        problem = f"{answer.status} {code[1].decode() if code else answer.reason}"
        if answer.status in (401, 403):
            return StoreRefused(
                f"{self._options.url}: the store refuses this key: {problem} (it must allow GetObject, PutObject, DeleteObject and "
                f"ListBucket; the region is {self._options.region})"
            )
        if answer.status == 400:
            return StoreRefused(f"{self._options.url}: the store does not {method} this: {problem}")
        if answer.status < 400:
            where = answer.headers.get("x-amz-bucket-region") or answer.headers.get("location") or "elsewhere"
            return StoreRefused(f"{self._options.url}: the bucket is not here: {problem}, {where}")
        return StoreError(f"{self._options.url}: the store answers {problem}")

    @property
    def _connection(self) -> StoreConnection:
        found: StoreConnection | None = getattr(self._of_thread, "connection", None)
        if found is None:
            found = self._of_thread.connection = StoreConnection(self._options, self._context)
        return found

    def _drop(self) -> None:
        self._connection.close()


def _fill(answer: http.client.HTTPResponse, into: memoryview) -> None:
    while into:
        count = answer.readinto(into)
        if not count:
            raise ConnectionError("the connection ended in the middle of an object")
        into = into[count:]


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

"""One request and its answer, as routes and the log see it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send

from tandem.router.http.errors import Forbidden, anthropic_error
from tandem.router.keys import KeyRing, Tenant
from tandem.router.tracing.traces import RequestTrace
from tandem.wire.errors import Cancelled


class Connection(Protocol):
    """What the server's own protocol offers beyond ASGI. It cuts off a client that does not read, which ends every wait here."""

    def whole_body(self) -> bytes | None: ...

    def watch(self, on_lost: Callable[[], None]) -> None: ...

    def unwatch(self) -> None: ...

    def try_write_chunk(self, data: bytes) -> bool: ...

    async def until_writable(self) -> None: ...


class HttpExchange:
    """One request and its answer, as the routes and the log see it. A route is a function of the router's services and of this."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, request_id: str, trace_id: str | None
    ) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._by_name = dict(reversed(self.headers))
        self.connection: Connection = scope["state"]["connection"]
        self.request_id = request_id
        self.trace_id = trace_id
        self.tenant: Tenant | None = None
        self.route = "other"  # a metric's label: never a path that a client chose
        self.notes = ""  # for the log: nodes, tokens
        self.ignored_fields: list[str] = []  # that the request had and this server does not know
        self.status: int | None = None
        self.ended = False  # the answer's last byte is sent
        self.is_stream = False
        self.trace: RequestTrace | None = None
        self.body: bytes | bytearray = b""  # where it is to be passed on
        self.error_form = anthropic_error if scope["path"].startswith("/v1/messages") else _as_it_is

    @property
    def owner(self) -> str:
        """The name of the key that the request came with; "" where there are no keys."""
        return self.tenant.name if self.tenant is not None else ""

    def header(self, name: bytes) -> bytes | None:
        """The first of this name."""
        return self._by_name.get(name)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.request_id.encode())]
            if self.ignored_fields:
                message["headers"].append((b"x-tandem-ignored-fields", names_of(self.ignored_fields)))
        elif not message.get("more_body", False):
            self.ended = True
        await self._send(message)

    async def until_disconnect(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work` in this task. A client that goes away takes its request with it: `work` is cancelled, and Cancelled raised."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("until_disconnect() outside a task")
        went_away = False

        def on_lost() -> None:
            nonlocal went_away
            went_away = True
            task.cancel()

        self.connection.watch(on_lost)
        try:
            await work()
        except asyncio.CancelledError:
            if not went_away or task.uncancel() > 0:
                raise
            raise Cancelled("the client went away") from None
        finally:
            self.connection.unwatch()

    def require_operator(self, keys: KeyRing) -> None:
        """Where keys are set, a tenant learns nothing of the cluster and of others."""
        if keys.required and (self.tenant is None or not self.tenant.is_operator):
            raise Forbidden(
                f"{self.scope['path'][:100]} needs an operator's key: one of router.api_keys that says operator: true"
            )


def _as_it_is(body: bytes) -> bytes:
    return body


def exchange_of(scope: Scope) -> HttpExchange:
    found = scope["exchange"]
    if not isinstance(found, HttpExchange):
        raise TypeError("the request did not come through the gate")
    return found


def names_of(fields: list[str]) -> bytes:
    """Clients' names of fields, fit for a header and a line of the log: at most a kilobyte of printable ASCII."""
    return re.sub(rb"[^!-~]", b"?", b",".join(name.encode("ascii", "replace")[:100] for name in fields))[
        :1024
    ]

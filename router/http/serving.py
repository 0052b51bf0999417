"""uvicorn's server, started and stopped by events instead of by polling, inside somebody else's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable, Generator

import msgspec
import uvicorn
from starlette.types import ASGIApp

from tandem.router.config import Limits, RouterConfig
from tandem.router.http.protocol import guarded
from tandem.wire.errors import ConfigurationError, InternalError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
DATE_INTERVAL_S = 1.0
# For nodes, the model's files, logs, and Ray.
OTHER_DESCRIPTORS = 512


def raise_descriptor_limit() -> None:
    """To what the system allows. Every connection is a descriptor, and many systems begin with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limits_that_fit(limits: Limits) -> Limits:
    """With no more connections than there are descriptors for, those left out that nodes and files need: clients that
    idle must not keep the router from its nodes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits
    room = max(1, soft - OTHER_DESCRIPTORS if soft > 2 * OTHER_DESCRIPTORS else soft // 2)
    if room >= limits.connections:
        return limits
    logger.warning(
        "%d connections are taken at once and not router.limits.connections' %d: this process may have no more than "
        "%d open files; raise its limit (ulimit -n)",
        room,
        limits.connections,
        soft,
    )
    return msgspec.structs.replace(limits, connections=room)


def listen(host: str, port: int) -> socket.socket:
    """Before anything is loaded, so that a taken port is said at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio turns Nagle's algorithm off only on sockets that say that they are TCP, and
    # with it on every answer of two writes waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"router.port: cannot listen on {host}:{port}: {error.strerror or error}; choose another port"
        ) from error
    listener.listen(2048)
    listener.setblocking(False)
    return listener


class HttpServer(uvicorn.Server):
    """Signals belong to whoever runs the process."""

    def __init__(self, app: ASGIApp, config: RouterConfig, on_cut: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=guarded(limits_that_fit(config.limits), config.timeouts, on_cut),
                h11_max_incomplete_event_size=config.limits.header_bytes,
                timeout_keep_alive=max(1, int(config.timeouts.keep_alive)),
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nothing here asks who the client is
            )
        )
        self._listening = asyncio.Event()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def begin(self, listener: socket.socket) -> asyncio.Task[None]:
        """Returns once it listens: the task that serves, which must not end before `end` is called."""
        self._task = asyncio.create_task(self.serve(sockets=[listener]), name="http")
        listening = asyncio.create_task(self._listening.wait())
        await asyncio.wait(
            {listening, self._task}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not listening.done():
            listening.cancel()
            raise InternalError(f"the HTTP server did not start within {START_TIMEOUT_S:.0f} s")
        return self._task

    async def end(self, grace_s: float) -> None:
        """Answers that are under way have `grace_s` to be sent; whoever does not read them by then is cut off."""
        self._stop.set()
        if self._task is None:
            return
        _, unsent = await asyncio.wait({self._task}, timeout=grace_s)
        if unsent:
            for task in list(self.server_state.tasks):
                task.cancel()
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await asyncio.wait({self._task}, timeout=grace_s)
        if not self._task.done():
            self._task.cancel()
            logger.error("the HTTP server did not end in time")

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening.set()

    async def main_loop(self) -> None:
        while not self._stop.is_set():
            await self.on_tick(0)  # the date header
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_INTERVAL_S):
                    await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:
            await asyncio.wait(list(self.server_state.tasks))
        for server in self.servers:
            await server.wait_closed()

"""A router as its process sees it: arguments and results are msgspec bytes or plain values.

The process (a Ray actor, a test) only passes calls to these methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.base.logs import LogPosition, LogsConfig, begin_logging, recent_page
from tandem.base.progress import Report, SaidProgress
from tandem.router.config import RouterConfig
from tandem.wire.forecasts import ForecastScore
from tandem.wire.nodes import NodeInfo, PoolReport, RouterInfo, RouterQueue
from tandem.wire.sockets import raise_descriptor_limit

if TYPE_CHECKING:
    from tandem.router.http.services import ClusterControl
    from tandem.router.server import RouterServer

_SWITCH_S = 0.001
_GARBAGE_OBJECTS = 10_000
# A process that stands still holds its port for five seconds after Ray was told to end it, and this router may be its successor.
PORT_S = 6.0
_PORT_AGAIN_S = 0.1
_FOLLOWERS = 4  # the controller, and former ones that were killed while they waited

FindModel = Callable[[str, Report], str]
"""Finds the folder of a model on this machine, and fetches what is missing. Reports its progress."""


class RouterHost:
    """One router process. Must be made inside a running event loop."""

    def __init__(
        self, config: bytes, find_model: FindModel | None = None, control: ClusterControl | None = None
    ) -> None:
        # Logs like nodes and the controller. Ray's actors write this to a file of their own.
        settings = msgspec.msgpack.decode(config, type=RouterConfig)
        begin_logging(LogsConfig(settings.log_level, settings.log_format), "router")
        # No log line shows these, so they are not looked up.
        logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
        logging._srcfile = None  # as logging's own documentation advises when no line names a file
        raise_descriptor_limit()
        # Prompts are tokenized one at a time, and passing each to the library's thread pool costs a fifth
        # more.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # The event loop gets the interpreter back within this time, whatever a thread parses or renders.
        sys.setswitchinterval(_SWITCH_S)
        self._config = config
        self._find_model = find_model
        self._control = control
        self._starting: asyncio.Task[RouterInfo] | None = None
        self._server: RouterServer | None = None
        self._stopped = asyncio.Event()
        self._progress = SaidProgress()
        self._followers = ThreadPoolExecutor(_FOLLOWERS, thread_name_prefix="progress")

    def configuration(self) -> bytes:
        """Returns the configuration that it was made with, for a controller that comes back and asks whether
        this is its router."""
        return self._config

    async def start(self, door: str = "") -> bytes:
        """Starts the router, and returns its RouterInfo once it answers. A second call returns the same.
        `door`: the door of the router whose listening socket it takes over; if that router is gone, it opens
        a socket of its own."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(door), name="start")
        return msgspec.msgpack.encode(await asyncio.shield(self._starting))

    async def _start(self, door: str) -> RouterInfo:
        # Commands and controllers import this module, too, and route nothing.
        from tandem.router.server import RouterServer

        config = msgspec.msgpack.decode(self._config, type=RouterConfig)
        if self._find_model is not None:
            if not door:  # finds a taken port before anything is fetched
                await self._until_free(config.host, config.port)
            path = await asyncio.to_thread(self._find_model, config.tokenizer_path, self._progress.report)
            config = msgspec.structs.replace(config, tokenizer_path=path)
        self._progress.report("loading the tokenizer", 0.0)
        self._server = RouterServer(config, self._control)
        url = await self._server.start(door)
        # A garbage collection over all imported objects would delay every stream.
        gc.collect()
        gc.freeze()
        # The default threshold collects after every request or two and finds nothing, because a request's
        # objects are freed as it ends.
        gc.set_threshold(_GARBAGE_OBJECTS)
        services = self._server.services
        return RouterInfo(url, services.links.endpoint, self._server.door, services.siblings.desk)

    async def _until_free(self, host: str, port: int) -> None:
        """Raises ConfigurationError if nothing can listen there, or the port is still taken after PORT_S."""
        from tandem.http_server.serving import listen

        loop = asyncio.get_running_loop()
        deadline = loop.time() + PORT_S
        while True:
            try:
                listen(host, port).close()
                return
            except ConfigurationError as error:
                is_taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
                if not is_taken or loop.time() > deadline:
                    raise
            self._progress.report(f"waiting for port {port}, which another process has", 0.0)
            await asyncio.sleep(_PORT_AGAIN_S)

    async def progress_after(self, seen: int, timeout_s: float) -> tuple[int, str, float]:
        """Waits up to `timeout_s` for a step of `start` newer than `seen`. Returns the latest step and its
        number."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._followers, self._progress.after, seen, timeout_s)

    def _serving(self) -> RouterServer:
        if self._server is None:
            raise Unavailable("the router has not started")
        return self._server

    async def set_members(
        self, members: bytes, paused: Sequence[str] = (), desks: Mapping[str, str] | None = None, pools: bytes = b"\x90"
    ) -> bytes:
        """Sets the members. `members`: the whole membership, a list of NodeInfo. `paused`: names of pools and
        nodes that get no new requests. `desks`: where the router processes on this port, this one included,
        ask each other, by name. `pools`: a list of PoolReport, for metrics and the page. Returns the
        RouterQueue."""
        serving = self._serving()
        serving.set_siblings(desks or {})
        serving.set_members(
            msgspec.msgpack.decode(members, type=list[NodeInfo]),
            paused,
            msgspec.msgpack.decode(pools, type=list[PoolReport]),
        )
        services = serving.services
        admission, metrics = services.dispatcher.admission, services.metrics
        queue = RouterQueue(
            queued=admission.queued,
            oldest_wait_s=admission.oldest_wait_s(),
            adapters=dict(services.model.adapters),
            accepts=serving.accepts,
            is_ending=serving.is_ending,
            answers=metrics.answers,
            errors=metrics.errors,
            out_of_view=services.pool.out_of_view(),
        )
        return msgspec.msgpack.encode(queue)

    async def forget_prefixes(self, node_ids: list[str]) -> None:
        """These nodes have emptied their caches."""
        self._serving().forget_prefixes(node_ids)

    async def follow_forecasts(self, score: bytes, ended_within_s: float) -> bytes:
        """Shows this ForecastScore from now on. Returns what requests took that were answered within the last seconds,
        a list of MeasuredRequest."""
        services = self._serving().services
        services.pool.forecasts = msgspec.msgpack.decode(score, type=ForecastScore)
        return msgspec.msgpack.encode(services.dispatcher.recent.measured(ended_within_s))

    async def recalled(self) -> bytes:
        """Returns what this process shows of its last requests, a PageState, and of the nodes, in JSON: a simulator
        plays them."""
        from tandem.router.http.status_routes import recalled

        return recalled(self._serving().services)

    async def nodes_heard(self) -> bytes:
        """Returns this router's sighting of each node, for a controller that a node does not answer."""
        return msgspec.msgpack.encode(self._serving().services.pool.sightings())

    async def log_page(self, seen: tuple[str, int] | None, last: int, most: int) -> bytes:
        """Returns a LogPage of this process's log: the lines after `seen`, or the last ones."""
        page = recent_page(LogPosition(*seen) if seen is not None else None, last, most)
        return msgspec.msgpack.encode(page)

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new requests and waits for the running ones. Returns False if some had to be failed when
        the time was over."""
        return await self._serving().drain(timeout_s)

    async def finish(self) -> None:
        """The process was told to end. Waits for its controller to place a successor, finishes everything
        that runs, and stops. The controller learns of it with the next answer."""
        server = self._server
        if server is not None:
            server.is_ending = True
            await server.until_succeeded()
            await server.leave(server.longest_s)
        await self.stop()

    async def leave(self, timeout_s: float) -> bool:
        """Leaves the listening socket to another router, and finishes what runs. Returns False if some
        requests had to be failed when the time was over."""
        return await self._serving().leave(timeout_s)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
        self._progress.end()
        self._followers.shutdown(wait=False)
        self._stopped.set()

    async def hold(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s`, and returns whether the router has stopped. A waiting call ends at once
        when the process dies."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), timeout_s)
        return self._stopped.is_set()

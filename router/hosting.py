"""A router as the process that holds it sees it: msgspec bytes or plain values in and out.

Whatever runs the process (a Ray actor, a test) calls these methods and adds nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from tandem.router.config import RouterConfig
from tandem.router.http.services import ClusterControl
from tandem.router.http.serving import listen
from tandem.router.server import RouterServer
from tandem.wire.errors import Unavailable
from tandem.wire.logs import LogPosition, LogsConfig, begin_logging, recent_page
from tandem.wire.nodes import NodeInfo, RouterInfo, RouterQueue
from tandem.wire.progress import Report, SaidProgress
from tandem.wire.sockets import raise_descriptor_limit

_SWITCH_S = 0.001
_GARBAGE_OBJECTS = 10_000
_FOLLOWERS = 4  # a controller, and those before it that were killed while they waited

FindModel = Callable[[str, Report], str]
"""From a model's name to a folder on this machine; says what it is doing. Fetches what is missing."""


class RouterHost:
    """Made inside a running event loop."""

    def __init__(
        self, config: bytes, find_model: FindModel | None = None, control: ClusterControl | None = None
    ) -> None:
        # As nodes and the controller do. Ray's actors write this to a file of their own.
        settings = msgspec.msgpack.decode(config, type=RouterConfig)
        begin_logging(LogsConfig(settings.log_level, settings.log_format), "router")
        # What no line shows need not be found out for each.
        logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
        logging._srcfile = None  # as logging's own guide has it: no line names a file
        raise_descriptor_limit()
        # Prompts are tokenized one by one, and handing each to the library's pool of threads costs a fifth more.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # The event loop gets the interpreter back within this, whatever a thread parses or renders.
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
        """What it was made with, for a controller that comes back and asks whether this is its router."""
        return self._config

    async def start(self, door: str = "") -> bytes:
        """The router's RouterInfo, once it answers. A second call returns the same. `door`: of the router whose listening socket it is
        to have; it takes one of its own when that router is gone."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(door), name="start")
        return msgspec.msgpack.encode(await asyncio.shield(self._starting))

    async def _start(self, door: str) -> RouterInfo:
        config = msgspec.msgpack.decode(self._config, type=RouterConfig)
        if self._find_model is not None:
            if not door:
                listen(config.host, config.port).close()  # a taken port is found before anything is fetched
            path = await asyncio.to_thread(self._find_model, config.tokenizer_path, self._progress.report)
            config = msgspec.structs.replace(config, tokenizer_path=path)
        self._progress.report("loading the tokenizer", 0.0)
        self._server = RouterServer(config, self._control)
        url = await self._server.start(door)
        # A collection that walked over what was imported would keep every stream waiting.
        gc.collect()
        gc.freeze()
        # The default looks for garbage after every request or two, and finds none: what a request makes is freed as it ends.
        gc.set_threshold(_GARBAGE_OBJECTS)
        services = self._server.services
        return RouterInfo(url, services.links.endpoint, self._server.door, services.siblings.desk)

    async def progress_after(self, seen: int, timeout_s: float) -> tuple[int, str, float]:
        """The latest step of `start`, and its number; waits for one that is newer than `seen`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._followers, self._progress.after, seen, timeout_s)

    def _serving(self) -> RouterServer:
        if self._server is None:
            raise Unavailable("the router has not started")
        return self._server

    async def set_members(
        self, members: bytes, paused: Sequence[str] = (), desks: Mapping[str, str] | None = None
    ) -> bytes:
        """`members` is a list of NodeInfo: the whole membership, every time. `paused`: the pools and nodes that get no new requests, by
        name. `desks`: the router processes on its port by name, itself too, and where they ask each other. Answers with its
        RouterQueue."""
        serving = self._serving()
        serving.set_siblings(desks or {})
        serving.set_members(msgspec.msgpack.decode(members, type=list[NodeInfo]), paused)
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
        """These nodes have nothing cached any more."""
        self._serving().forget_prefixes(node_ids)

    async def nodes_heard(self) -> bytes:
        """What this router knows of each node, for a controller that one of them does not answer."""
        return msgspec.msgpack.encode(self._serving().services.pool.sightings())

    async def log_page(self, seen: tuple[str, int] | None, last: int, most: int) -> bytes:
        """A LogPage of this process's log: the lines after one that was seen, or the last ones."""
        page = recent_page(LogPosition(*seen) if seen is not None else None, last, most)
        return msgspec.msgpack.encode(page)

    async def drain(self, timeout_s: float) -> bool:
        """False when some requests had to be failed because the time was over."""
        return await self._serving().drain(timeout_s)

    async def finish(self) -> None:
        """The process was told to end: another router takes its place, and it returns when everything that it has has ended. Its
        controller hears of it with the next answer."""
        server = self._server
        if server is not None:
            server.is_ending = True
            await server.until_succeeded()
            await server.leave(server.longest_s)
        await self.stop()

    async def leave(self, timeout_s: float) -> bool:
        """Another router has its listening socket. False when some requests had to be failed because the time was over."""
        return await self._serving().leave(timeout_s)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
        self._progress.end()
        self._followers.shutdown(wait=False)
        self._stopped.set()

    async def hold(self, timeout_s: float) -> bool:
        """Whether the router has been stopped; waits so long for it. A call that waits ends at once when the process dies."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), timeout_s)
        return self._stopped.is_set()

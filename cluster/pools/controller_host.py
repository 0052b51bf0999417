"""A controller as the process that holds it sees it: asked by several commands at once, msgspec bytes in and out.

Whatever runs the process (a Ray actor, a test) calls these methods and adds nothing.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from tandem.cluster.changes import compare, with_sizes
from tandem.cluster.clock import cancel
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import Control
from tandem.cluster.events import Events, LoggedEvents
from tandem.cluster.pools.event_log import EventLog, Happening
from tandem.wire.errors import InternalError, TandemError, Unavailable, WireError
from tandem.wire.nodes import Role

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode


class Stage(enum.StrEnum):
    STARTING = "starting"
    SERVING = "serving"  # a request that is sent now is answered
    FAILED = "failed"  # it could not start, and does not answer yet; or nobody mends it any more
    STOPPED = "stopped"


class Account(msgspec.Struct, frozen=True):
    """How far the cluster is, and what has happened since the last time that somebody asked."""

    stage: Stage
    happened: list[Happening]
    latest: int  # ask for what comes after this
    url: str = ""
    model: str = ""
    failure: WireError | None = None


class Change(msgspec.Struct, frozen=True):
    """What came of giving a running cluster another configuration."""

    applied: list[str]
    refused: list[str]  # each says what it would take


class Served(Protocol):
    """A deployment; `cluster.pools.deployment.Deployment` is one."""

    @property
    def url(self) -> str: ...
    @property
    def model_name(self) -> str: ...
    @property
    def control(self) -> Control: ...
    async def start(self) -> None: ...
    async def recovered(self) -> None: ...
    async def failed(self) -> str: ...
    async def drain(self) -> bool: ...
    async def stop(self) -> None: ...


class ControllerHost:
    """Made inside a running event loop; begins to serve at once, and goes on until `stop`."""

    def __init__(
        self,
        config: bytes,
        make: Callable[[TandemConfig, Events], Served],
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = msgspec.msgpack.decode(config, type=TandemConfig)
        self._events = EventLog(LoggedEvents())
        self._on_failure = on_failure
        self._stage = Stage.STARTING
        self._failure: WireError | None = None
        self._stopped = asyncio.Event()
        self._deployment = make(self._config, self._events)
        self._run = asyncio.create_task(self._serve(), name="serve")

    async def _serve(self) -> None:
        """Nothing that goes wrong here may go unnoticed: whoever follows is told."""
        try:
            await self._start()
            self._enter(Stage.SERVING)
            self._fail(InternalError(await self._deployment.failed()))
            self._on_failure()
        except TandemError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("the deployment did not start")
            self._fail(InternalError(f"{type(error).__name__}: {error}"))

    async def _start(self) -> None:
        """Who starts a cluster ends it when it cannot start. A controller that came back to one has nobody who would:
        its nodes and machines are looked after as ever, and it serves as soon as they can."""
        try:
            await self._deployment.start()
        except TandemError as error:
            self._fail(error)
            await self._deployment.recovered()
            logger.info("the cluster answers after all")
            self._failure = None

    def _fail(self, error: TandemError) -> None:
        logger.error("the cluster has failed: %s", error)
        self._failure = error.to_wire()
        self._enter(Stage.FAILED)

    def _enter(self, stage: Stage) -> None:
        self._stage = stage
        self._events.wake()

    # --- following

    async def account_after(self, seen: int, stage: str, timeout_s: float) -> bytes:
        """Waits for an event that is newer than `seen`, or another stage than this."""
        if self._stage == stage:
            await self._events.wait_after(seen, timeout_s)
        happened = self._events.after(seen)
        serving = self._stage is Stage.SERVING
        return _encode(
            Account(
                stage=self._stage,
                happened=happened,
                latest=happened[-1].number if happened else seen,
                url=self._deployment.url if serving else "",
                model=self._deployment.model_name,
                failure=self._failure,
            )
        )

    # --- operating

    def configuration(self) -> bytes:
        return _encode(self._config)

    async def configure(self, config: bytes) -> bytes:
        """Applies what can be applied to a cluster that runs, which is how many nodes its pools have."""
        wanted = msgspec.msgpack.decode(config, type=TandemConfig)
        sizes, refused = compare(self._config, wanted)
        applied = await self._control().scale(sizes) if sizes else []
        self._config = with_sizes(self._config, sizes)
        return _encode(Change(applied, refused))

    async def view(self) -> bytes:
        return _encode(await self._control().view())

    async def scale(self, wanted: bytes) -> list[str]:
        return await self._control().scale(msgspec.msgpack.decode(wanted, type=dict[Role, int]))

    async def drain_node(self, node_id: str, timeout_s: float) -> bool:
        return await self._control().drain_node(node_id, timeout_s)

    async def change_role(self, node_id: str, role: str) -> None:
        await self._control().change_role(node_id, Role(role))

    def _control(self) -> Control:
        if self._stage is Stage.STOPPED:
            raise Unavailable("the cluster has been stopped")
        return self._deployment.control

    # --- ending

    async def drain(self) -> bool:
        return self._stage is Stage.SERVING and await self._deployment.drain()

    async def stop(self) -> None:
        """Idempotent. Ends every node and router; whoever holds the controller may end it after this."""
        await cancel(self._run)
        await self._deployment.stop()
        self._enter(Stage.STOPPED)
        self._stopped.set()

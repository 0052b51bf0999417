"""A controller as its process serves it: several commands call it at once, with msgspec bytes in and out.

A Ray actor or a test runs the process, calls these methods and adds nothing.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from typing import Any, Protocol

import msgspec

from tandem.base.errors import InternalError, RequestError, TandemError, Unavailable, WireError
from tandem.base.settings import without_defaults
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import AppliedChange, ClusterEnd, ClusterView, ExchangeView
from tandem.cluster.events import Events, LoggedEvents
from tandem.cluster.launcher import StateStore
from tandem.cluster.orders import LOADING_S, AdaptersOrder, ApplyOrder, Control, Order, act, read_order
from tandem.cluster.pools.changes import compare, with_sizes
from tandem.cluster.pools.event_log import EventLog, LoggedEvent
from tandem.cluster.pools.over_http import check_adapters, check_config
from tandem.cluster.tasks import Clock, cancel

logger = logging.getLogger(__name__)

_KILLED_S = 30.0  # the command that ended the cluster ends the controller's process within this time, or this process ends itself

_encode = msgspec.msgpack.Encoder().encode


class ClusterStage(enum.StrEnum):
    STARTING = "starting"
    SERVING = "serving"  # a request that is sent now is answered
    FAILED = "failed"  # it could not start, but may still; or it is no longer repaired
    STOPPED = "stopped"


class ClusterAccount(msgspec.Struct, frozen=True):
    """The state of the cluster, and what has happened since the follower last asked."""

    stage: ClusterStage
    happened: list[LoggedEvent]
    latest: int  # the `seen` of the next question
    url: str = ""
    model: str = ""
    deployment: str = ""  # its id
    failure: WireError | None = None
    ending: ClusterEnd | None = None  # set when the stage is STOPPED


class ConfigChange(msgspec.Struct, frozen=True):
    """What changed when a running cluster was given another configuration."""

    applied: list[str]
    refused: list[str]  # each says what the change would need


class ServedDeployment(Protocol):
    """A deployment as this file uses it; `cluster.pools.deployment.Deployment` is one."""

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


class Platform(Protocol):
    """What runs the controller's process, and outlives it."""

    @property
    def id(self) -> str:
        """The deployment's id, the same for each of its controllers."""

    @property
    def endings(self) -> StateStore:
        """Where the order to end this deployment is recorded."""

    def deployment(self, config: TandemConfig, events: Events) -> ServedDeployment: ...

    async def exchange(self) -> ExchangeView | None:
        """Returns the current exchange of this controller, or its last one; None if there was none."""

    async def begin_exchange(self, old: TandemConfig, new: TandemConfig) -> str:
        """Starts another process, which ends this controller and creates one with the new configuration's environment, or the old one
        again if that does not serve. Returns the exchange's id. Raises Unavailable while an exchange is running."""

    async def owner_ended(self) -> str:
        """Returns the reason when the command has ended to which this deployment belongs. Never returns for a deployment that
        belongs to no command."""

    def restart(self) -> None:
        """Ends this process so that the platform starts another controller."""

    async def end(self) -> None:
        """Ends the deployment's remaining processes, then this one for good."""


def _understood(config: bytes) -> TandemConfig:
    try:
        return msgspec.msgpack.decode(config, type=TandemConfig)
    except msgspec.ValidationError as error:
        raise _of_another_version(error) from error


def _of_another_version(error: Exception) -> Unavailable:
    return Unavailable(
        f"this cluster runs another version of Tandem, which cannot read this command's configuration ({error}): use the cluster's "
        "version, or restart the cluster with `tandem down` and `tandem serve`"
    )


class ControllerHost:
    """Must be constructed inside a running event loop. Starts to serve at once, and serves until `end`."""

    def __init__(self, config: bytes, platform: Platform, clock: Clock | None = None) -> None:
        self._config = msgspec.msgpack.decode(config, type=TandemConfig)
        self._events = EventLog(LoggedEvents())
        self._platform = platform
        self._clock = clock or Clock()
        self._stage = ClusterStage.STARTING
        self._failure: WireError | None = None
        self._ending: ClusterEnd | None = None
        self._last: asyncio.Task[None] | None = None
        self._drains = False  # it was told to, which nothing takes back
        self._deployment = platform.deployment(self._config, self._events)
        self._run = asyncio.create_task(self._serve(), name="serve")
        self._watch = asyncio.create_task(self._end_with_owner(), name="end with the command")

    async def _serve(self) -> None:
        """Every failure in here sets the stage and the failure that followers see."""
        try:
            if (ending := await self._recorded_end()) is not None:
                logger.info("this cluster's end was ordered before this controller started: %s", ending.why)
                self._ending = ending
                self._enter(ClusterStage.STOPPED)
                return await self._platform.end()
            await self._start()
            self._enter(ClusterStage.SERVING)
            self._fail(InternalError(await self._deployment.failed()))
            self._platform.restart()
        except TandemError as error:  # one of its own tasks died during its start
            self._fail(error)
            self._platform.restart()
        except Exception as error:
            logger.exception("the deployment did not start")
            self._fail(InternalError(f"{type(error).__name__}: {error}"))

    async def _recorded_end(self) -> ClusterEnd | None:
        while True:
            try:
                kept = await self._platform.endings.load()
                return msgspec.msgpack.decode(kept, type=ClusterEnd) if kept else None
            except TandemError as error:
                logger.warning("cannot read whether this cluster's end was ordered; trying again: %s", error)
                await self._clock.sleep(self._config.timeouts.heartbeat_s)

    async def _end_with_owner(self) -> None:
        try:
            await self.end(await self._platform.owner_ended())
            await self._platform.end()
        except Exception:
            logger.exception("watching for the end of the command that started this cluster failed")
            self._platform.restart()

    async def _start(self) -> None:
        """If a new cluster cannot start, the command that started it ends it. A restarted controller has no such command: it goes on
        supervising nodes and machines, and serves as soon as it can."""
        try:
            await self._deployment.start()
        except TandemError as error:
            self._fail(error)
            await self._deployment.recovered()
            logger.info("the cluster serves now, after its start had failed")
            self._failure = None

    def _fail(self, error: TandemError) -> None:
        logger.error("the cluster has failed: %s", error)
        self._failure = error.to_wire()
        self._enter(ClusterStage.FAILED)

    def _enter(self, stage: ClusterStage) -> None:
        self._stage = stage
        self._events.wake()

    # --- following

    async def account_after(self, seen: int, stage: str, timeout_s: float) -> bytes:
        """Waits for an event after `seen`, or for a stage other than `stage`, at most `timeout_s`. Returns a ClusterAccount."""
        if self._stage == stage:
            await self._events.wait_after(seen, timeout_s)
        happened = self._events.after(seen)
        serving = self._stage is ClusterStage.SERVING
        return _encode(
            ClusterAccount(
                stage=self._stage,
                happened=happened,
                latest=happened[-1].number if happened else seen,
                url=self._deployment.url if serving else "",
                model=self._deployment.model_name,
                deployment=self._platform.id,
                failure=self._failure,
                ending=self._ending if self._stage is ClusterStage.STOPPED else None,
            )
        )

    # --- operating

    async def configuration(self) -> bytes:
        """Returns the configuration as it is wanted now; after `apply` it differs from the one that this process was created with."""
        return _encode(without_defaults(await self._running()))

    async def _running(self) -> TandemConfig:
        return await self._deployment.control.configuration()

    async def configure(self, config: bytes) -> bytes:
        """Applies what a running cluster can change without a rollout: the sizes of its pools. The rest is refused. Raises Unavailable for
        a cluster that is being ended: who asks would wait for an answer that no request gets any more."""
        if self._drains:
            raise Unavailable(
                "this deployment takes nothing new, because `tandem down` ends it: start it again when it is down (`tandem down --now` "
                "ends it at once)"
            )
        running = await self._running()
        sizes, refused = compare(running, _understood(config))
        if not sizes:
            return _encode(ConfigChange([], refused))
        change = await self._control().apply(with_sizes(running, sizes), dry_run=False)
        return _encode(ConfigChange(change.at_once, refused))

    async def order(self, action: str, body: bytes) -> bytes:
        """Carries out the order of a command that joined this process's Ray cluster."""
        try:
            order = read_order(action, body)
        except RequestError as error:
            raise _of_another_version(error) from error
        return order.encoded(await self._done(order))

    async def act(self, action: str, body: bytes) -> bytes:
        """Carries out an operator's request that came through a router, in JSON."""
        return await act(self._allowed, action, body)

    async def _allowed(self, order: Order[Any]) -> Any:
        """Carries out the order of an HTTP key, which may not change everything."""
        if isinstance(order, ApplyOrder):
            check_config(await self._running(), order.config, dry_run=order.dry_run)
        elif isinstance(order, AdaptersOrder) and order.load:
            known = await self._control().adapters({}, [])
            check_adapters((await self._running()).controller, known, order.load)
        return await self._done(order)

    async def _done(self, order: Order[Any]) -> Any:
        """Carries out the order. This process also knows of the controller's exchange."""
        if isinstance(order, ApplyOrder):
            return await self._apply(order.config, order.dry_run)
        work = order.do(self._control())
        done = await self._clock.within(LOADING_S + order.limit_s, work, f"the order {order.action!r}")
        if isinstance(done, ClusterView):
            return msgspec.structs.replace(done, exchange=await self._platform.exchange())
        return done

    async def _apply(self, config: TandemConfig, dry_run: bool) -> AppliedChange:
        """Changes and records everything but the controller's environment first; a controller with the new environment then takes over."""
        before = (await self._running()).controller
        replaced = before.env != config.controller.env and not dry_run
        under_way = await self._platform.exchange() if replaced else None
        if under_way is not None and not under_way.is_over:
            raise Unavailable(
                "the controller is being replaced: wait until `tandem status` says that the exchange is over"
            )
        change = await self._control().apply(config, dry_run=dry_run)
        if not replaced:
            return change
        replace = msgspec.structs.replace
        running, wanted = await self._running(), config.controller
        exchange = await self._platform.begin_exchange(
            replace(running, controller=replace(wanted, env=before.env)), replace(running, controller=wanted)
        )
        return replace(change, exchange=exchange)

    def _control(self) -> Control:
        if self._stage is ClusterStage.STOPPED:
            raise Unavailable("the cluster has been stopped: `tandem serve` starts it again")
        return self._deployment.control

    # --- ending

    async def drain(self) -> bool:
        self._drains = True
        return self._stage is not ClusterStage.STOPPED and await self._deployment.drain()

    async def end(self, why: str) -> None:
        """Records the end, then ends every node and router, even if the record could not be written. Idempotent."""
        if self._ending is None:
            self._ending = ClusterEnd(time.time(), why)
            logger.info("ending the cluster: %s", why)
            try:
                await self._platform.endings.save(_encode(self._ending))
            except TandemError as error:
                logger.warning("the end of the cluster could not be recorded: %s", error)
        await cancel(self._run)
        if self._watch is not asyncio.current_task():
            await cancel(self._watch)
        await self._deployment.stop()
        self._enter(ClusterStage.STOPPED)
        if self._last is None:
            self._last = asyncio.create_task(self._end_itself(), name="end this process")

    async def _end_itself(self) -> None:
        """The command that ordered the end ends this process, too. If it was interrupted, no one else would."""
        await self._clock.sleep(_KILLED_S)
        try:
            await self._platform.end()
        except Exception:
            logger.exception("the end is recorded and carried out, but this process could not be ended")

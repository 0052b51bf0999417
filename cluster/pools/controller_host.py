"""A controller as the process that holds it sees it: asked by several commands at once, msgspec bytes in and out.

Whatever runs the process (a Ray actor, a test) calls these methods and adds nothing.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from tandem.cluster.admin import act
from tandem.cluster.changes import compare, with_sizes
from tandem.cluster.config import ClusterTimeouts, TandemConfig
from tandem.cluster.control import AppliedChange, ClusterEnd, ClusterView, Control, ExchangeView
from tandem.cluster.events import Events, LoggedEvents
from tandem.cluster.launcher import StateStore
from tandem.cluster.pools.event_log import EventLog, LoggedEvent
from tandem.cluster.tasks import Clock, cancel
from tandem.wire.errors import InternalError, TandemError, Unavailable, WireError
from tandem.wire.logs import LogsQuery
from tandem.wire.nodes import Role
from tandem.wire.settings import without_defaults

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode


class ClusterStage(enum.StrEnum):
    STARTING = "starting"
    SERVING = "serving"  # a request that is sent now is answered
    FAILED = "failed"  # it could not start, and does not answer yet; or it is not mended any more
    STOPPED = "stopped"


class ClusterAccount(msgspec.Struct, frozen=True):
    """How far the cluster is, and what has happened since it was last asked."""

    stage: ClusterStage
    happened: list[LoggedEvent]
    latest: int  # ask for what comes after this
    url: str = ""
    model: str = ""
    deployment: str = ""  # its id
    failure: WireError | None = None
    ending: ClusterEnd | None = None  # with STOPPED


class ConfigChange(msgspec.Struct, frozen=True):
    """What came of giving a running cluster another configuration."""

    applied: list[str]
    refused: list[str]  # each says what it would take


class ServedDeployment(Protocol):
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


class Platform(Protocol):
    """What runs the controller's process, and what outlives it."""

    @property
    def id(self) -> str:
        """The deployment's id; every controller that it ever has bears it."""
        ...

    @property
    def endings(self) -> StateStore:
        """Where the decision to end this deployment is recorded."""
        ...

    def deployment(self, config: TandemConfig, events: Events) -> ServedDeployment: ...

    async def exchange(self) -> ExchangeView | None:
        """Of this controller for one with another environment: the one that is under way, or the last one."""
        ...

    async def begin_exchange(self, old: TandemConfig, new: TandemConfig) -> str:
        """Another process ends this controller, and makes one with the new configuration's environment; the old one again, if that does
        not serve. Returns the exchange's id. Raises Unavailable while there is one."""
        ...

    async def owner_ended(self) -> str:
        """Returns when the command has ended that this deployment belongs to, and says so. A deployment that belongs
        to no command waits here for ever."""
        ...

    def restart(self) -> None:
        """Ends this process, so that another one goes on."""
        ...

    async def end(self) -> None:
        """Ends what is left of the deployment, then this process for good."""
        ...


class _Operated:
    """The cluster for `act`."""

    def __init__(
        self,
        control: Control,
        timeouts: ClusterTimeouts,
        clock: Clock,
        view: Callable[[], Awaitable[ClusterView]],
        apply: Callable[[TandemConfig, bool], Awaitable[AppliedChange]],
    ) -> None:
        self._timeouts = timeouts
        self._clock = clock
        self._control = control
        self._view = view
        self._apply = apply
        self.scale = control.scale
        self.drain_node = control.drain_node
        self.evacuate = control.evacuate
        self.pause = control.pause
        self.resume = control.resume
        self.reset_cache = control.reset_cache
        self.go_back = control.go_back
        self.logs = control.logs

    async def timeouts(self) -> ClusterTimeouts:
        return self._timeouts

    async def adapters(
        self, load: Mapping[str, str], unload: Sequence[str], timeout_s: float
    ) -> dict[str, str]:
        changing = self._control.adapters(load, unload)
        return await self._clock.within(timeout_s, changing, "changing the adapters")

    async def view(self) -> ClusterView:
        return await self._view()

    async def apply(self, config: TandemConfig, dry_run: bool) -> AppliedChange:
        return await self._apply(config, dry_run)

    async def change_role(self, node_id: str, role: Role, timeout_s: float) -> None:
        changing = self._control.change_role(node_id, role)
        await self._clock.within(timeout_s, changing, f"changing the role of {node_id}")


def _understood(config: bytes) -> TandemConfig:
    try:
        return msgspec.msgpack.decode(config, type=TandemConfig)
    except msgspec.ValidationError as error:
        raise Unavailable(
            f"this cluster runs another version of Tandem, which does not understand the command's configuration ({error}): "
            "use that version, or `tandem down` and `tandem serve` again"
        ) from error


class ControllerHost:
    """Made inside a running event loop; begins to serve at once, and goes on until `end`."""

    def __init__(self, config: bytes, platform: Platform, clock: Clock | None = None) -> None:
        self._config = msgspec.msgpack.decode(config, type=TandemConfig)
        self._events = EventLog(LoggedEvents())
        self._platform = platform
        self._clock = clock or Clock()
        self._stage = ClusterStage.STARTING
        self._failure: WireError | None = None
        self._ending: ClusterEnd | None = None
        self._deployment = platform.deployment(self._config, self._events)
        self._run = asyncio.create_task(self._serve(), name="serve")
        self._watch = asyncio.create_task(self._end_with_owner(), name="end with the command")

    async def _serve(self) -> None:
        """Nothing that goes wrong here may go unnoticed: followers are told."""
        try:
            if (ending := await self._recorded_end()) is not None:
                logger.info("an earlier controller was ending this cluster: %s", ending.why)
                self._ending = ending
                self._enter(ClusterStage.STOPPED)
                return await self._platform.end()
            await self._start()
            self._enter(ClusterStage.SERVING)
            self._fail(InternalError(await self._deployment.failed()))
            self._platform.restart()
        except TandemError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("the deployment did not start")
            self._fail(InternalError(f"{type(error).__name__}: {error}"))

    async def _recorded_end(self) -> ClusterEnd | None:
        while True:
            try:
                kept = await self._platform.endings.load()
                return msgspec.msgpack.decode(kept, type=ClusterEnd) if kept else None
            except TandemError as error:
                logger.warning("cannot read whether this cluster was ended, and asks again: %s", error)
                await self._clock.sleep(self._config.timeouts.heartbeat_s)

    async def _end_with_owner(self) -> None:
        try:
            await self.end(await self._platform.owner_ended())
            await self._platform.end()
        except Exception:
            logger.exception("this controller cannot see whether its command has ended")
            self._platform.restart()

    async def _start(self) -> None:
        """The command that starts a cluster ends it when it cannot start. A controller that came back to one has no such
        command: it looks after its nodes and machines as ever, and serves as soon as they can."""
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
        self._enter(ClusterStage.FAILED)

    def _enter(self, stage: ClusterStage) -> None:
        self._stage = stage
        self._events.wake()

    # --- following

    async def account_after(self, seen: int, stage: str, timeout_s: float) -> bytes:
        """Waits for an event that is newer than `seen`, or another stage than this."""
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
        """As it is wished for now: another one than this process was given, after `apply`."""
        return _encode(without_defaults(await self._running()))

    async def _running(self) -> TandemConfig:
        return await self._deployment.control.configuration()

    async def configure(self, config: bytes) -> bytes:
        """Applies what can be applied to a cluster that runs, which is how many nodes its pools have."""
        running = await self._running()
        sizes, refused = compare(running, _understood(config))
        if not sizes:
            return _encode(ConfigChange([], refused))
        change = await self._control().apply(with_sizes(running, sizes), dry_run=False)
        return _encode(ConfigChange(change.at_once, refused))

    async def apply(self, config: bytes, dry_run: bool) -> bytes:
        return _encode(await self._apply(_understood(config), dry_run))

    async def _apply(self, config: TandemConfig, dry_run: bool) -> AppliedChange:
        """All but the controller's environment is kept first: the next one goes on with it."""
        before = (await self._running()).controller
        replaced = before.env != config.controller.env and not dry_run
        under_way = await self._platform.exchange() if replaced else None
        if under_way is not None and not under_way.is_over:
            raise Unavailable("the controller is being replaced just now: wait for the end (`tandem status`)")
        change = await self._control().apply(config, dry_run=dry_run)
        if not replaced:
            return change
        replace = msgspec.structs.replace
        running, wanted = await self._running(), config.controller
        exchange = await self._platform.begin_exchange(
            replace(running, controller=replace(wanted, env=before.env)), replace(running, controller=wanted)
        )
        return replace(change, exchange=exchange)

    async def go_back(self) -> None:
        await self._control().go_back()

    async def view(self) -> bytes:
        return _encode(await self._view())

    async def _view(self) -> ClusterView:
        view = await self._control().view()
        return msgspec.structs.replace(view, exchange=await self._platform.exchange())

    async def scale(self, wanted: bytes) -> list[str]:
        return await self._control().scale(msgspec.msgpack.decode(wanted, type=dict[Role, int]))

    async def drain_node(self, node_id: str, timeout_s: float) -> bool:
        return await self._control().drain_node(node_id, timeout_s)

    async def evacuate(self, address: str, timeout_s: float) -> dict[str, bool]:
        return await self._control().evacuate(address, timeout_s)

    async def pause(self, names: list[str]) -> list[str]:
        return await self._control().pause(names)

    async def resume(self, names: list[str]) -> list[str]:
        return await self._control().resume(names)

    async def reset_cache(self, names: list[str]) -> list[str]:
        return await self._control().reset_cache(names)

    async def adapters(self, load: dict[str, str], unload: list[str]) -> dict[str, str]:
        return await self._control().adapters(load, unload)

    async def logs(self, query: bytes) -> bytes:
        return _encode(await self._control().logs(msgspec.msgpack.decode(query, type=LogsQuery)))

    async def change_role(self, node_id: str, role: str) -> None:
        await self._control().change_role(node_id, Role(role))

    async def act(self, action: str, body: bytes) -> bytes:
        """What an operator asks through a router, in JSON."""
        timeouts = (await self._running()).timeouts
        operated = _Operated(self._control(), timeouts, self._clock, self._view, self._apply)
        return await act(operated, action, body)

    def _control(self) -> Control:
        if self._stage is ClusterStage.STOPPED:
            raise Unavailable("the cluster has been stopped")
        return self._deployment.control

    # --- ending

    async def drain(self) -> bool:
        return self._stage is ClusterStage.SERVING and await self._deployment.drain()

    async def end(self, why: str) -> None:
        """Records the end, then ends every node and router. Idempotent. The end was decided: where it cannot be
        recorded, it is done all the same."""
        if self._ending is None:
            self._ending = ClusterEnd(time.time(), why)
            logger.info("the cluster is ended: %s", why)
            try:
                await self._platform.endings.save(_encode(self._ending))
            except TandemError as error:
                logger.warning("the end could not be recorded: %s", error)
        await cancel(self._run)
        if self._watch is not asyncio.current_task():
            await cancel(self._watch)
        await self._deployment.stop()
        self._enter(ClusterStage.STOPPED)

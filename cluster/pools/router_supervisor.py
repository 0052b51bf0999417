"""A router's supervisor: keeps the router running and sends it the membership."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tandem.base.errors import TandemError
from tandem.cluster.launcher import Host, RouterHandle
from tandem.cluster.pools.state import RouterRecord
from tandem.cluster.pools.supervisor import ProcessPhase, ProcessSupervisor, SupervisorContext
from tandem.router.config import RouterConfig
from tandem.wire.forecasts import ForecastScore, MeasuredRequest
from tandem.wire.nodes import RouterInfo, RouterQueue

# The first wait for a router that does not use all its nodes yet; it doubles up to a heartbeat
_ASK_SOON_S = 0.05


class RouterSupervisor(ProcessSupervisor[RouterHandle, RouterInfo]):
    def __init__(
        self,
        record: RouterRecord,
        host: Host | None,  # None: the head
        context: SupervisorContext,
        # Returns the other routers in its place, the longest-serving first
        beside: Callable[[], Sequence[RouterSupervisor]],
    ) -> None:
        super().__init__(record.name, context, record.info)
        self.config = record.config
        self.place = record.place
        self.host = host
        self.load = RouterQueue()  # as it last reported
        self.accepts_since: float | None = None  # clients' connections; None: it does not
        self.told = -1  # the membership revision that it last confirmed
        self._door = ""  # with which it was last launched
        self._beside = beside

    @property
    def url(self) -> str:
        return self.info.url if self.info is not None else ""

    def _launch(self) -> RouterHandle:
        # A door whose router has gone is no harm: the new router then opens the socket itself.
        self._door = self._open_door()
        launcher, confirm = self._context.launcher, self._context.recorder.confirm
        return launcher.launch_router(self.name, self.config, self.host, confirm, self._door)

    def _open_door(self) -> str:
        there = [other for other in self._beside() if other.may_serve]
        there.sort(key=lambda other: (_address(other.config) != _address(self.config), not other.serves))
        return next((other.info.door for other in there if other.info is not None), "")

    def _starts_otherwise(self) -> bool:
        """Another router of its place may have opened the socket meanwhile."""
        coming = (ProcessPhase.STARTING, ProcessPhase.RESTARTING)
        return self._open_door() != self._door or any(other.phase in coming for other in self._beside())

    async def _start(self, handle: RouterHandle) -> RouterInfo:
        info = await handle.start(self.report)
        self.info = info
        await self._context.recorder.record(f"{self.name} serves")
        await self._context.membership.announce_router(self.name, info)
        return info

    async def _lost(self) -> None:
        self.load, self.accepts_since, self.told = RouterQueue(), None, -1
        await self._context.membership.withdraw_router(self.name)

    def _may_leave_out(self) -> bool:
        """Without a router no request is served. A router that has worked before will work again once its port or memory is free. One
        that never worked has a mistake in its configuration, which the operator must see."""
        return not self.url

    @property
    def served_s(self) -> float | None:
        return self._served_s(self.accepts_since if self.phase is ProcessPhase.READY else None)

    def _describe(self, info: RouterInfo) -> str:
        return info.url

    async def _watch(self, handle: RouterHandle, info: RouterInfo) -> str:
        """Sends the membership at every change, and every heartbeat; the answers show that the router lives. A router that does not
        answer is kept as long as clients or nodes hear it. Returns why it must be replaced."""
        self._context.recorder.wake()
        timeouts, membership = self._timeouts, self._context.membership
        silence = self._new_silence()
        said = ""
        soon_s = _ASK_SOON_S
        while True:
            revision = membership.revision
            if revision != self.told:
                soon_s = min(_ASK_SOON_S, timeouts.heartbeat_s)
            try:
                load = await self._clock.within(
                    timeouts.silence_s,
                    handle.set_members(
                        membership.members, membership.paused, self._desks(), self._context.recorder.pool_reports()
                    ),
                    f"telling {self.name} its nodes",
                )
            except TandemError as error:
                silence.not_answered()
                if silence.seconds >= timeouts.unresponsive_s:
                    serves = await self._context.witnesses.of_router(handle, info, is_alone=not self._beside())
                    if serves is False:
                        return (
                            f"it has not answered for {silence.seconds:.0f} s, and no node or client hears it: {error}"
                        )
                    who = "clients and nodes hear it" if serves else "no node can be asked about it"
                    if who != said:
                        self._events.trouble(
                            self.name, f"does not answer the controller, but {who}: it is kept: {error}"
                        )
                    said = who
                await self._clock.sleep(timeouts.heartbeat_s)
                continue
            silence.answered()
            self.answered_at = self._clock.now()
            said = ""
            before, self.load = self.load, load
            if load.accepts is not before.accepts:
                self.accepts_since = self._clock.now() if load.accepts else None
            was_told, self.told = self.told, revision
            if was_told != revision or _what_it_serves(load) != _what_it_serves(before):
                self._context.recorder.changed.ring()
            if load.is_ending and not before.is_ending:
                self._context.recorder.wake()
            await self._change_or_heartbeat(revision, soon_s if load.out_of_view else timeouts.heartbeat_s)
            soon_s = min(2 * soon_s, timeouts.heartbeat_s)

    def _desks(self) -> dict[str, str]:
        """Returns the desks of the routers on its port, its own included, and also of one that hangs: its siblings then report that.
        Routers with another environment are left out: they may be of another version, and messages between siblings carry none."""
        return {
            router.name: router.info.desk
            for router in (self, *self._beside())
            if router.info is not None and router.serves and router.config.env == self.config.env
        }

    async def _change_or_heartbeat(self, revision: int, heartbeat_s: float) -> None:
        try:
            await self._clock.within(
                heartbeat_s, self._context.membership.newer_than(revision), "a change of membership"
            )
        except TandemError:
            return  # no change: time for a heartbeat

    def runs_on(self, hosts: Sequence[Host]) -> bool:
        return any(host.head if self.host is None else host.name == self.host.name for host in hosts)

    async def forget_prefixes(self, node_ids: Sequence[str]) -> None:
        """Failures are only logged: the router then sends some prompts to nodes that no longer have their prefix, until it learns of it."""
        if self.phase is not ProcessPhase.READY or self.handle is None:
            return
        forgotten = self.handle.forget_prefixes(node_ids)
        await self._asked(self._timeouts.silence_s, forgotten, f"telling {self.name}", None)

    async def follow_forecasts(self, score: ForecastScore, ended_within_s: float) -> list[MeasuredRequest]:
        """Returns what requests took that it answered within the last seconds; nothing if it does not say."""
        if not self.serves or self.handle is None:
            return []
        took = self.handle.follow_forecasts(score, ended_within_s)
        return await self._asked(self._timeouts.silence_s, took, f"asking {self.name} for its requests", [])

    async def recalled(self) -> bytes:
        """Returns what the simulator plays; b"" if the router does not say."""
        if not self.serves or self.handle is None:
            return b""
        recalled = self.handle.recalled()
        return await self._asked(self._timeouts.silence_s, recalled, f"asking {self.name} what it remembers", b"")

    async def drain(self, limit_s: float) -> bool:
        """The router refuses new requests. Returns True when all of its requests ended in time, or if it has none yet."""
        if not self.serves or self.handle is None:
            return not self.may_serve
        return await self._finish(limit_s, self.handle.drain(limit_s))

    async def leave(self) -> bool:
        """Another router has its place: it accepts no new connection, and its requests may take as long as any request may. Returns True
        when all of them ended in time. Does not end the process; when the process ends it is not replaced."""
        self._leaving = True
        if not self.serves and self.may_serve:
            await self.settled()  # it was adopted, so it may have requests
        if not self.serves or self.handle is None:
            return True
        self._enter(ProcessPhase.DRAINING, "another router has its place")
        limit_s = self.config.timeouts.total
        return await self._finish(limit_s, self.handle.leave(limit_s))

    async def _finish(self, limit_s: float, work: Coroutine[Any, Any, bool]) -> bool:
        return await self._asked(limit_s + self._timeouts.stop_s, work, f"draining {self.name}", False)


def _address(config: RouterConfig) -> tuple[str, int]:
    return config.host, config.port


def _what_it_serves(load: RouterQueue) -> tuple[object, ...]:
    return load.accepts, load.adapters, load.out_of_view

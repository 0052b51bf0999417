"""A router's supervisor: keeps it running, and keeps telling it who the nodes are."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tandem.cluster.clock import Clock
from tandem.cluster.config import ClusterTimeouts
from tandem.cluster.events import Events
from tandem.cluster.hosts import Host
from tandem.cluster.launcher import Launcher, RouterHandle
from tandem.cluster.pools.membership import Membership
from tandem.cluster.pools.supervisor import Phase, Supervisor
from tandem.router.config import RouterConfig
from tandem.wire.errors import TandemError

logger = logging.getLogger(__name__)


class RouterSupervisor(Supervisor[RouterHandle, str]):
    def __init__(
        self,
        name: str,
        config: RouterConfig,
        host: Host | None,  # None: the head
        launcher: Launcher,
        membership: Membership,
        timeouts: ClusterTimeouts,
        events: Events,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__(name, timeouts, events, clock, on_change)
        self.config = config
        self.host = host
        self.url = ""
        self._launcher = launcher
        self._membership = membership

    def _launch(self) -> RouterHandle:
        return self._launcher.launch_router(self.name, self.config, self.host)

    async def _start(self, handle: RouterHandle) -> str:
        self.url = await handle.start(self.report)
        return self.url

    def _may_leave_out(self) -> bool:
        """Without a router nobody is served. One that has worked will work again, when its port is let go or the
        machine has memory again; one that never did is a mistake to be told of."""
        return not self.url

    def _describe(self, url: str) -> str:
        return url

    async def _watch(self, handle: RouterHandle, url: str) -> str:
        """Sends the membership whenever it changes, and again every few seconds: the answer is the heartbeat."""
        timeouts = self._timeouts
        last_answer = self._clock.now()
        while True:
            revision = self._membership.revision
            try:
                await self._clock.within(
                    timeouts.silence_s,
                    handle.set_members(self._membership.members),
                    f"telling {self.name} its nodes",
                )
            except TandemError as error:
                silence = self._clock.now() - last_answer
                if silence >= timeouts.unresponsive_s:
                    return f"it has not answered for {silence:.0f} s: {error}"
                await self._clock.sleep(timeouts.heartbeat_s)
                continue
            last_answer = self._clock.now()
            await self._change_or_heartbeat(revision)

    async def _change_or_heartbeat(self, revision: int) -> None:
        try:
            await self._clock.within(
                self._timeouts.heartbeat_s, self._membership.newer_than(revision), "a change of membership"
            )
        except TandemError:
            return  # nothing changed; it is time for a heartbeat all the same

    async def drain(self, limit_s: float) -> bool:
        """It takes nothing new. True when everything that it had was finished."""
        if self.phase is not Phase.READY or self.handle is None:
            return False
        try:
            return await self._clock.within(
                limit_s + self._timeouts.stop_s, self.handle.drain(limit_s), f"draining {self.name}"
            )
        except TandemError as error:
            logger.warning("%s", error)
            return False

"""A router's supervisor: keeps it running, and keeps telling it who the nodes are."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from tandem.cluster.launcher import Host, RouterHandle
from tandem.cluster.pools.supervisor import ProcessPhase, ProcessSupervisor, Surroundings
from tandem.router.config import RouterConfig
from tandem.wire.errors import TandemError
from tandem.wire.nodes import RouterInfo, RouterQueue

logger = logging.getLogger(__name__)

AdmitRouter = Callable[[str, RouterInfo], Awaitable[None]]
"""Keeps what the router with this name announced, for the next controller."""


class RouterSupervisor(ProcessSupervisor[RouterHandle, RouterInfo]):
    def __init__(
        self,
        name: str,
        config: RouterConfig,
        host: Host | None,  # None: the head
        around: Surroundings,
        admit: AdmitRouter,
    ) -> None:
        super().__init__(name, around)
        self.config = config
        self.host = host
        self.url = ""
        self.load = RouterQueue()  # as it last said
        self._admit = admit

    def _launch(self) -> RouterHandle:
        return self._around.launcher.launch_router(self.name, self.config, self.host)

    async def _start(self, handle: RouterHandle) -> RouterInfo:
        info = await handle.start(self.report)
        self.url = info.url
        await self._admit(self.name, info)
        await self._around.membership.announce_router(self.name, info)
        return info

    async def _lost(self) -> None:
        self.load = RouterQueue()
        await self._around.membership.withdraw_router(self.name)

    def _may_leave_out(self) -> bool:
        """Without a router no request is served. One that has worked will work again, when its port is let go or the
        machine has memory again; one that never did is a mistake to be told of."""
        return not self.url

    def _describe(self, info: RouterInfo) -> str:
        return info.url

    async def _watch(self, handle: RouterHandle, info: RouterInfo) -> str:
        """Sends the membership whenever it changes, and again every few seconds: the answer is the heartbeat. A router
        that does not answer is left alone while clients or nodes hear it."""
        timeouts, membership = self._timeouts, self._around.membership
        silence = self._new_silence()
        said = ""
        while True:
            revision = membership.revision
            before = self.load.adapters
            try:
                self.load = await self._clock.within(
                    timeouts.silence_s,
                    handle.set_members(membership.members, membership.paused),
                    f"telling {self.name} its nodes",
                )
            except TandemError as error:
                silence.not_answered()
                if silence.seconds >= timeouts.unresponsive_s:
                    serves = await self._around.witnesses.of_router(handle, self.config.inbox_host)
                    if serves is False:
                        return f"it has not answered for {silence.seconds:.0f} s, and no node or client hears it: {error}"
                    who = "clients and nodes hear it" if serves else "no node can be asked about it"
                    if who != said:
                        self._events.trouble(
                            self.name, f"does not answer, but {who}: it is left as it is: {error}"
                        )
                    said = who
                await self._clock.sleep(timeouts.heartbeat_s)
                continue
            silence.answered()
            said = ""
            if self.load.adapters != before:
                self._around.on_change()
            await self._change_or_heartbeat(revision)

    async def _change_or_heartbeat(self, revision: int) -> None:
        try:
            await self._clock.within(
                self._timeouts.heartbeat_s,
                self._around.membership.newer_than(revision),
                "a change of membership",
            )
        except TandemError:
            return  # nothing changed; it is time for a heartbeat all the same

    def runs_on(self, hosts: Sequence[Host]) -> bool:
        return any(host.head if self.host is None else host.name == self.host.name for host in hosts)

    async def forget_prefixes(self, node_ids: Sequence[str]) -> None:
        """One that does not answer sends some prompts where their beginnings were, and learns better."""
        if self.phase is not ProcessPhase.READY or self.handle is None:
            return
        try:
            await self._clock.within(
                self._timeouts.silence_s, self.handle.forget_prefixes(node_ids), f"telling {self.name}"
            )
        except TandemError as error:
            logger.warning("%s", error)

    async def drain(self, limit_s: float) -> bool:
        """It takes nothing new. True when everything that it had was finished."""
        if self.phase is not ProcessPhase.READY or self.handle is None:
            return False
        try:
            return await self._clock.within(
                limit_s + self._timeouts.stop_s, self.handle.drain(limit_s), f"draining {self.name}"
            )
        except TandemError as error:
            logger.warning("%s", error)
            return False

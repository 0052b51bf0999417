"""Follows a cluster from a command, and shows what happens in it.

A silent controller is no end: Ray may be restarting it, the network to it may be down, or its process may be stopped. The cluster has ended
only when its end was recorded.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

from tandem.base.errors import NodeLost, TandemError, Unavailable
from tandem.cluster.control import ClusterEnd
from tandem.cluster.events import Events
from tandem.cluster.pools.controller_host import ClusterAccount, ClusterStage
from tandem.cluster.pools.event_log import replay
from tandem.cluster.tasks import Clock

ASK_AGAIN_S = 0.5
SILENT_START_S = 120.0  # how long the controller of a cluster that has not served yet may be silent


class FollowedController(Protocol):
    async def account_after(self, seen: int, stage: ClusterStage) -> ClusterAccount:
        """Returns when something newer than `seen` has happened, when the stage is another one, or after a while."""

    async def ending(self) -> ClusterEnd | None:
        """Returns the recorded end of this cluster; None if it was not ended."""

    async def revive(self) -> None:
        """Creates a controller if there is none and Ray will not restart one. It adopts the cluster's processes."""


class Follower:
    def __init__(self, controller: FollowedController, events: Events, clock: Clock | None = None) -> None:
        self._controller = controller
        self._events = events
        self._clock = clock or Clock()
        self._seen = 0
        self._stage = ClusterStage.STARTING

    async def until_serving(self) -> ClusterAccount:
        """Returns when the cluster serves. Raises the reason when it cannot start."""
        answers = False
        while True:
            account = await self._next(SILENT_START_S)
            if not answers:
                answers = True
                self._events.ready("controller", "running")
            if isinstance(account, ClusterEnd):
                raise Unavailable(f"the cluster was ended while it started: {account.why}")
            if account.stage is ClusterStage.SERVING:
                return account
            if account.stage is ClusterStage.FAILED:
                raise _failure(account)

    async def until_over(self) -> ClusterEnd:
        """Returns the cluster's end. A controller that has failed is no end: its process ends and Ray starts the next one."""
        while True:
            before = self._stage
            account = await self._next(None)
            if isinstance(account, ClusterEnd):
                return account
            if account.stage is ClusterStage.FAILED and before is not ClusterStage.FAILED:
                self._events.trouble("controller", str(_failure(account)))

    async def _next(self, limit_s: float | None) -> ClusterAccount | ClusterEnd:
        """Returns what the controller reports next, after any silence up to `limit_s`. Raises Unavailable after that."""
        silent_since: float | None = None
        while True:
            try:
                account = await self._controller.account_after(self._seen, self._stage)
            except TandemError as error:
                if silent_since is None:
                    silent_since = self._clock.now()
                    self._events.trouble("controller", f"does not answer: {error}")
                elif limit_s is not None and self._clock.now() - silent_since > limit_s:
                    raise Unavailable(f"the controller has not answered for {limit_s:.0f} s: {error}") from error
                if (ending := await self._recorded_or_revived()) is not None:
                    return ending
                self._stage = ClusterStage.STOPPED  # so that any stage of the next answer counts as new
                if isinstance(error, NodeLost):
                    self._seen = 0  # the next controller numbers its events from 1
                await self._clock.sleep(ASK_AGAIN_S)
                continue
            if silent_since is not None:
                seconds = self._clock.now() - silent_since
                self._events.ready("controller", f"answers again after {seconds:.1f} s")
            if account.ending is not None:
                return account.ending
            replay(account.happened, self._events)
            self._seen, self._stage = account.latest, account.stage
            return account

    async def _recorded_or_revived(self) -> ClusterEnd | None:
        """Returns the recorded end, if there is one; otherwise revives the controller. Ignores errors: the caller asks again."""
        with contextlib.suppress(TandemError):
            if (ending := await self._controller.ending()) is not None:
                return ending
            await self._controller.revive()
        return None


def _failure(account: ClusterAccount) -> TandemError:
    if account.failure is not None:
        return account.failure.to_exception()
    return Unavailable("the controller has failed and does not say why: look into its log (`tandem logs controller`)")

"""A cluster as it starts and runs, followed from a command: what happens there is shown here."""

from __future__ import annotations

from typing import Protocol

from tandem.cluster.events import Events
from tandem.cluster.pools.controller_host import Account, Stage
from tandem.cluster.pools.event_log import replay
from tandem.wire.errors import NodeLost, TandemError, Unavailable


class Followed(Protocol):
    async def account_after(self, seen: int, stage: Stage) -> Account:
        """Waits a while for something newer, or another stage."""
        ...


class Follower:
    def __init__(self, controller: Followed, events: Events) -> None:
        self._controller = controller
        self._events = events
        self._seen = 0
        self._stage = Stage.STARTING

    async def until_serving(self) -> Account:
        """Raises what the cluster could not start for."""
        while True:
            account = await self._next()
            if account.stage is Stage.SERVING:
                return account
            if account.stage in (Stage.FAILED, Stage.STOPPED):
                raise _failure(account)

    async def until_over(self) -> str | None:
        """Why nobody mends the cluster any more; None when another command has ended it."""
        while True:
            try:
                account = await self._next()
            except NodeLost:
                return None
            if account.stage is Stage.STOPPED:
                return None
            if account.stage is Stage.FAILED:
                return str(_failure(account))

    async def _next(self) -> Account:
        """A controller that is lost is started again by Ray, which the next question waits for."""
        try:
            account = await self._controller.account_after(self._seen, self._stage)
        except NodeLost as error:
            account = await self._controller.account_after(0, Stage.STOPPED)
            self._events.trouble("controller", f"it was lost, and is back: {error}")
        replay(account.happened, self._events)
        self._seen, self._stage = account.latest, account.stage
        return account


def _failure(account: Account) -> TandemError:
    if account.failure is not None:
        return account.failure.to_exception()
    return Unavailable("another command has ended the cluster")

"""This process among those on its port."""

from __future__ import annotations

import asyncio
import contextlib

from prometheus_client.registry import Collector

from tandem.router.http.page_figures import page_of
from tandem.router.http.services import Services
from tandem.router.page_state import PageState
from tandem.router.processes.figures import SharedFigures
from tandem.router.processes.pages import together
from tandem.router.processes.sent_reports import SiblingReports
from tandem.router.processes.sockets import SiblingProcesses
from tandem.router.wings import RouterWing

# How often processes exchange their counters; they also do so when one comes or leaves.
TELL_S = 10.0


class Processes(RouterWing):
    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.siblings = siblings = SiblingProcesses()
        self.figures = SharedFigures(services.metrics.registry, siblings)
        self._changed = asyncio.Event()
        dispatcher = services.dispatcher
        reports = SiblingReports(siblings, services.pool, services.chooser)
        siblings.on_change.append(lambda: dispatcher.report_to_siblings(None if siblings.alone else reports))
        siblings.on_change.append(self._changed.set)
        siblings.answers["page"] = self._page
        services.keys.share(siblings)
        services.siblings = siblings
        services.add_pages, services.all_figures = self._add_pages, self._all_figures

    async def start(self) -> None:
        await self.siblings.listen()
        self.services.tasks.keep("siblings", self._exchange)

    async def _exchange(self) -> None:
        """Exchanges counters, regularly and soon after a sibling comes or leaves, so that the others keep the
        counts of one that ends without a word."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), TELL_S)
            self._changed.clear()
            if not self.siblings.alone:
                await self.figures.together()

    async def _page(self, body: bytes) -> PageState:
        return page_of(self.services)

    async def _add_pages(self, own: PageState) -> PageState:
        if self.siblings.alone:
            return own
        told, silent = await self.siblings.ask("page", PageState)
        return together(own, self.siblings.name, told, silent)

    async def _all_figures(self) -> Collector | None:
        return None if self.figures.alone else await self.figures.together()

    async def leave(self) -> None:
        await self.figures.leave_behind()

    async def close(self) -> None:
        self.siblings.close()


WING = Processes

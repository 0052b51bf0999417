"""This process among those on its port."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from prometheus_client.registry import Collector

from tandem.router.http.page_figures import page_of
from tandem.router.http.services import Services
from tandem.router.page_state import PageState
from tandem.router.policy.choose import Chooser
from tandem.router.pool import NodePool
from tandem.router.prefixes import PromptHashes
from tandem.router.processes.figures import SharedFigures, together
from tandem.router.processes.sockets import SiblingProcesses
from tandem.router.siblings import SentReports, Siblings
from tandem.router.wings import RouterWing
from tandem.wire.nodes import NodeInfo

# How often processes exchange their counters; they also do so when one comes or leaves.
TELL_S = 10.0


_SENT, _ANSWERED = "sent", "answered"


class _Sent(msgspec.Struct, frozen=True, array_like=True):
    node_id: str
    epoch: int
    request_id: str
    tokens: int  # prompt tokens to compute there
    blocks: int  # blocks that it may take
    marks: list[int]  # the prompt's hashes at marked places


class _Answered(msgspec.Struct, frozen=True, array_like=True):
    node_id: str
    request_id: str


class SiblingReports(SentReports):
    """Tells siblings what this process sends to nodes, and counts what they send. A node reports its work four times a second; without
    this several processes would send their next requests to the same node. Runs on the event loop only."""

    def __init__(self, siblings: Siblings, pool: NodePool, chooser: Chooser) -> None:
        self._siblings = siblings
        self._pool = pool
        self._chooser = chooser
        siblings.hears[_SENT] = self._on_sent
        siblings.hears[_ANSWERED] = self._on_answered

    def tell(self, node: NodeInfo, request_id: str, tokens: int, blocks: int, hashes: PromptHashes) -> None:
        marks = self._chooser.marks_of(hashes, node.block_size)
        self._siblings.report(_SENT, _Sent(node.node_id, node.epoch, request_id, tokens, blocks, marks))

    def _on_sent(self, desk: str, body: bytes) -> None:
        sent = msgspec.msgpack.decode(body, type=_Sent)
        member = self._pool.member(sent.node_id)
        if member is None or member.info.epoch != sent.epoch or member.lost is not None:
            return
        # Counted here until the node's next status counts it.
        self._pool.sent(sent.node_id, sent.request_id, sent.tokens, sent.blocks)
        self._chooser.sent_elsewhere(sent.node_id, sent.marks)

    def tell_answered(self, node_id: str, request_id: str) -> None:
        self._siblings.report(_ANSWERED, _Answered(node_id, request_id))

    def _on_answered(self, desk: str, body: bytes) -> None:
        answered = msgspec.msgpack.decode(body, type=_Answered)
        self._pool.answered(answered.node_id, answered.request_id)


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

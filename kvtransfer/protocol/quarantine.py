"""When nothing can write any more to the blocks of a push that was given up, although its producer does not say so.

There are two proofs beside the producer's own word:

- *Its process has ended.* A node on the same machine, in the same PID namespace, can see that. What the process had sent
  before may still lie in a socket or a shared queue of ours, so we run for `Settings.margin_s` before it counts.
- *We have closed the way that its writes take.* The transport makes our memory reachable in another way, every other
  producer is told of it, and when the last transfer that uses the earlier way has ended, that is closed. Nothing is
  lost by it, so it is done for any producer that is silent for a lease and that the transport shuts out by it: of another
  machine, or of another container of this one.

A producer that writes to our memory by itself (of this machine and PID namespace), and is stopped and not dead, leaves its
blocks in quarantine until it goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tandem.kvtransfer.protocol.incoming import IncomingTransfers
from tandem.kvtransfer.protocol.producer_links import ProducerLinks
from tandem.kvtransfer.protocol.receiving import IncomingTransfer, ReceivePhase
from tandem.kvtransfer.protocol.side import NodeSide
from tandem.wire.errors import TransferError
from tandem.wire.handoff import ProcessIdentity

logger = logging.getLogger(__name__)


class Quarantine:
    """`has_ended` says whether a process has certainly ended."""

    def __init__(
        self,
        side: NodeSide,
        links: ProducerLinks,
        incoming: IncomingTransfers,
        *,
        has_ended: Callable[[ProcessIdentity], bool],
    ) -> None:
        self._side = side
        self._links = links
        self._incoming = incoming
        self._has_ended = has_ended
        self._ended: dict[ProcessIdentity, float] = {}  # and for how long we have run since
        self._look_at = 0.0
        self._reopen_at = 0.0  # not before, if it has failed
        self._closing_before: int | None = None  # ways of an earlier generation than this are to be closed

    def tick(self, ran_s: float) -> None:
        """We have certainly run for `ran_s` since the last time."""
        closing = [
            receiving
            for receiving in self._incoming
            if receiving.stage is ReceivePhase.CLOSING and not receiving.is_safe
        ]
        self._free_after_processes(closing, ran_s)
        if self._closing_before is None:
            self._reopen(closing)
        else:
            self._close_earlier(self._closing_before)

    # ── processes ──

    def _free_after_processes(self, closing: list[IncomingTransfer], ran_s: float) -> None:
        now = self._side.clock()
        processes = {receiving.process for receiving in closing if receiving.process is not None}
        self._ended = {
            process: since + ran_s for process, since in self._ended.items() if process in processes
        }
        unknown = processes - self._ended.keys()
        if unknown and now >= self._look_at:
            self._look_at = now + self._side.settings.retry_s
            self._ended |= dict.fromkeys(filter(self._has_ended, unknown), 0.0)
        for receiving in closing:
            ran = self._ended.get(receiving.process) if receiving.process is not None else None
            if ran is not None and ran >= self._side.settings.margin_s:
                self._end(receiving)

    # ── ways ──

    def _reopen(self, closing: list[IncomingTransfer]) -> None:
        now = self._side.clock()
        if now < self._reopen_at or not any(map(self._needs_closing, closing)):
            return
        self._reopen_at = now + self._side.settings.lease_s
        try:
            memory = self._side.transport.reopen()
        except TransferError as error:
            logger.warning("the KV cache stays reachable in one way only: %s", error)
            return
        if memory is not None:
            self._links.reopened(memory)
            self._closing_before = self._links.generation

    def _needs_closing(self, receiving: IncomingTransfer) -> bool:
        since = receiving.closing_since + self._side.settings.lease_s
        return (
            receiving.is_left
            and self._side.clock() >= since
            and self._is_shut_out(receiving)
            and self._links.is_silent(receiving.peer)
        )

    def _is_shut_out(self, receiving: IncomingTransfer) -> bool:
        return receiving.process is not None and self._side.transport.shuts_out(receiving.process)

    def _close_earlier(self, generation: int) -> None:
        earlier = [receiving for receiving in self._incoming if receiving.is_registered_before(generation)]
        if not all(receiving.is_left for receiving in earlier):
            return  # some of them may still end well
        if not self._side.transport.close_earlier():
            return
        self._closing_before = None
        for receiving in earlier:
            if not receiving.is_safe and self._is_shut_out(receiving):
                self._end(receiving)

    def _end(self, receiving: IncomingTransfer) -> None:
        logger.info("nothing writes to the blocks of %s any more", receiving.command.request_id)
        self._incoming.end(receiving, receiving.outcome, receiving.reason)

"""How a consumer tells its producers of its blocks, and keeps them told: registrations and leases."""

from __future__ import annotations

from collections.abc import Callable

from tandem.kvtransfer.protocol.checksums import every_of
from tandem.kvtransfer.protocol.identity import PeerKey
from tandem.kvtransfer.protocol.links import ProducerLink, ProducerLinks
from tandem.kvtransfer.protocol.receiving import Receiving, Stage
from tandem.kvtransfer.protocol.side import Side
from tandem.wire.handoff import RegisterDestination


class Registrar:
    """`receivings` lists the transfers with one producer. `unreachable` is called when it does not even answer a
    handshake, or gives no fresh stamp."""

    def __init__(
        self,
        side: Side,
        links: ProducerLinks,
        *,
        receivings: Callable[[PeerKey], list[Receiving]],
        unreachable: Callable[[ProducerLink, str], None],
    ) -> None:
        self._side = side
        self._me = side.me
        self._links = links
        self._settings = side.settings
        self._send = side.send
        self._clock = side.clock
        self._receivings = receivings
        self._unreachable = unreachable

    def advance_all(self, link: ProducerLink) -> None:
        for receiving in self._receivings(link.key):
            self.advance(receiving)

    def advance(self, receiving: Receiving) -> None:
        """Register it, if the handshake is done and a fresh stamp is there; else ask for what is missing."""
        link = self._links.get(receiving.peer)
        if receiving.stage is not Stage.CONNECTING or link is None or not link.is_ready:
            return
        now = self._clock()
        if receiving.connected_at is None:
            receiving.connected_at = now
        if link.has_fresh_stamp(now):
            receiving.stage = Stage.REGISTERING
            self._register(receiving, link)
        elif link.owed_since is None:
            self._renew(link)

    def remind(self, receiving: Receiving) -> None:
        """Register it again, if the answer is overdue."""
        link = self._links.get(receiving.peer)
        now = self._clock()
        overdue = now >= receiving.asked_at + self._settings.retry_s
        if link is None or receiving.stage is not Stage.REGISTERING or not overdue:
            return
        if link.has_fresh_stamp(now):
            self._register(receiving, link)
        elif link.is_ready and now >= link.asked_at + self._settings.retry_s:
            self._renew(link)

    def tick(self, link: ProducerLink) -> None:
        now = self._clock()
        stages = {receiving.stage for receiving in self._receivings(link.key)}
        if not stages:
            link.owed_since = None  # nobody waits for what it may still owe
            if not link.is_ready:
                self._links.drop(link.key)
            return
        waiting_since = link.greeting_since if link.greeting_since is not None else link.owed_since
        too_late = waiting_since is not None and now >= waiting_since + self._settings.handshake_timeout_s
        if too_late and Stage.CONNECTING in stages:
            self._unreachable(link, "the producer did not answer the handshake")
            return
        ask_again = now >= link.asked_at + self._settings.retry_s
        if not link.is_ready and ask_again:
            self._links.greet(link)
        if link.stamp and any(stage.is_leased for stage in stages):
            if now >= link.asked_at + self._settings.renew_s:
                self._renew(link)
        elif link.is_ready and Stage.CONNECTING in stages and ask_again:
            self._renew(link)

    def _register(self, receiving: Receiving, link: ProducerLink) -> None:
        command = receiving.command
        receiving.asked_at = self._clock()
        receiving.extend_lease(link.leases_until)
        receiving.generation = self._links.generation
        receiving.process = link.process
        if link.mapping is not None:
            receiving.know_mapping(link.mapping, self._checksum_every(link))
        link.owes(receiving.asked_at)
        self._send(
            link.peer.endpoint,
            RegisterDestination(
                self._me.envelope(link.peer.epoch),
                link.stamp,
                command.transfer_id,
                command.num_tokens,
                command.token_hash,
                command.first_block,
                command.block_ids,
                receiving.sample.every,
            ),
        )

    def _checksum_every(self, link: ProducerLink) -> int:
        here = link.process is not None and link.process.machine == self._side.process.machine
        return every_of(self._side.checksum_policy, same_machine=here)

    def _renew(self, link: ProducerLink) -> None:
        held = [receiving for receiving in self._receivings(link.key) if receiving.stage.is_leased]
        for receiving in held:
            receiving.extend_lease(link.leases_until)
        self._links.renew(link, [receiving.transfer_id for receiving in held])

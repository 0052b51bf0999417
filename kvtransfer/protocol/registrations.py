"""What consumers ask of a producer before anything moves: handshakes, registrations, leases."""

from __future__ import annotations

from collections.abc import Callable

from tandem.kvtransfer.protocol.cache_map import PoolGeometry
from tandem.kvtransfer.protocol.consumer_links import ConsumerLink, ConsumerLinks
from tandem.kvtransfer.protocol.identity import Clock, key_of
from tandem.kvtransfer.protocol.outgoing import Ledger
from tandem.kvtransfer.protocol.sending import DestinationBlocks, OutgoingTransfer, SendPhase
from tandem.kvtransfer.protocol.settings import ProtocolSettings
from tandem.kvtransfer.protocol.side import Answers
from tandem.wire.handoff import (
    DestinationRegistered,
    Hello,
    LeaseRenewed,
    ProcessIdentity,
    RefusalCode,
    RegisterDestination,
    RenewLease,
    Welcome,
)


class Registrations:
    """`registered` is called with a transfer that has got its destination."""

    def __init__(
        self,
        geometry: PoolGeometry,
        ledger: Ledger,
        links: ConsumerLinks,
        settings: ProtocolSettings,
        answers: Answers,
        clock: Clock,
        process: ProcessIdentity,
        *,
        to_write: bool,
        registered: Callable[[OutgoingTransfer], None],
    ) -> None:
        self._geometry = geometry
        self._ledger = ledger
        self._links = links
        self._settings = settings
        self._answers = answers
        self._clock = clock
        self._process = process
        self._stamps = LeaseStamps(settings.lease_s, clock)
        self._to_write = to_write
        self._registered = registered
        self.tokens_per_s: float | None = None  # at which our engine computes prompts

    def on_hello(self, message: Hello) -> None:
        rejection = self._links.welcome(message)
        if rejection is not None:
            self._answers.refuse(message.envelope, "", rejection.code, rejection.reason)
            return
        self._links.drop_unused(
            key_of(message.envelope), in_use=lambda link: bool(self._ledger.through(link))
        )
        self._answers.say(
            message.envelope,
            Welcome(
                self._answers.back_to(message.envelope),
                self._geometry.fingerprint,
                self._geometry.memory,
                self._process,
                self._settings.lease_s,
                self._stamps.issue(),
            ),
        )

    def on_register(self, message: RegisterDestination) -> None:
        envelope, transfer_id = message.envelope, message.transfer_id
        key = key_of(envelope)
        link = self._links.hear(key)
        sending = self._ledger.get(transfer_id)
        ending = self._ledger.ending_of(transfer_id)
        if link is None:
            self._answers.refuse(
                envelope, transfer_id, RefusalCode.HANDSHAKE_REQUIRED, "no handshake with this node"
            )
        elif sending is not None and not sending.belongs_to(key):
            self._answers.refuse(
                envelope, transfer_id, RefusalCode.FOREIGN, "this transfer is for another node"
            )
        elif ending is not None:
            self._answers.closed(envelope, transfer_id, ending)
        elif sending is not None and sending.is_over:
            return  # it answers when nothing is in flight any more
        elif (problem := self._problem(message, link)) is not None:
            self._answers.refuse(envelope, transfer_id, RefusalCode.INVALID, problem)
        elif (lease_until := self._stamps.until(message.stamp)) is None:
            # Too old to grant a lease: it lay in a queue. The consumer asks again with the fresh stamp.
            unknown = [transfer_id] if sending is None or sending.destination is None else []
            self._answers.say(
                envelope, LeaseRenewed(self._answers.back_to(envelope), self._stamps.issue(), unknown)
            )
        elif sending is None and not self._ledger.has_room(sum(map(len, message.block_ids))):
            self._answers.refuse(
                envelope, transfer_id, RefusalCode.OVERLOADED, "too many transfers without a request"
            )
        else:
            self._register(sending or self._ledger.open(transfer_id), message, link, lease_until)

    def _problem(self, message: RegisterDestination, link: ConsumerLink) -> str | None:
        hello = link.hello
        return self._geometry.check_destination(message, hello.fingerprint.block_size, hello.memory)

    def _register(
        self, sending: OutgoingTransfer, message: RegisterDestination, link: ConsumerLink, lease_until: float
    ) -> None:
        known = sending.destination
        if known is None:
            destination = DestinationBlocks(
                link=link,
                endpoint=message.envelope.reply_to,
                num_tokens=message.num_tokens,
                token_hash=message.token_hash,
                first_block=message.first_block,
                block_ids=message.block_ids,
                lease_until=lease_until,
                registered_at=self._clock(),
                checksum_every=message.checksum_every,
            )
            sending.set_destination(destination, to_write=self._to_write)
        elif known.is_same(message):
            known.lease_until = max(known.lease_until, lease_until)
        else:
            self._answers.refuse(
                message.envelope,
                sending.transfer_id,
                RefusalCode.CONFLICT,
                "registered with other blocks before",
            )
            return
        self._answers.say(
            message.envelope,
            DestinationRegistered(
                self._answers.back_to(message.envelope), self._stamps.issue(), sending.transfer_id
            ),
        )
        self._registered(sending)

    def on_renew(self, message: RenewLease) -> None:
        key = key_of(message.envelope)
        if self._links.hear(key) is None:
            self._answers.refuse(
                message.envelope, "", RefusalCode.HANDSHAKE_REQUIRED, "no handshake with this node"
            )
            return
        lease_until = self._stamps.until(message.stamp)
        unknown: list[str] = []
        waiting = [transfer_id for transfer_id in message.transfer_ids if transfer_id in self._ledger.in_line]
        for transfer_id in message.transfer_ids:
            sending = self._ledger.get(transfer_id)
            destination = sending.destination if sending is not None else None
            if (
                sending is None
                or destination is None
                or destination.consumer != key
                or sending.phase is SendPhase.CLOSED
            ):
                unknown.append(transfer_id)
            elif lease_until is not None:
                destination.lease_until = max(destination.lease_until, lease_until)
        self._answers.say(
            message.envelope,
            LeaseRenewed(
                self._answers.back_to(message.envelope),
                self._stamps.issue(),
                unknown,
                waiting,
                self.tokens_per_s,
            ),
        )


class LeaseStamps:
    """A stamp is our own clock, so that nothing has to be remembered of those that were issued."""

    def __init__(self, lease_s: float, clock: Clock) -> None:
        self._lease_s = lease_s
        self._clock = clock

    def issue(self) -> int:
        return int(self._clock() * 1e6)

    def until(self, stamp: int) -> float | None:
        """Until when a lease that this stamp grants holds; None if that is over, or it was never issued."""
        issued = stamp / 1e6
        until = issued + self._lease_s
        return until if issued <= self._clock() < until else None

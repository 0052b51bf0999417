"""The producer of one node: takes its engine's commands and consumers' messages, and acts on its transfers."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable

from tandem.kvtransfer.base import count_blocks
from tandem.kvtransfer.protocol import commands
from tandem.kvtransfer.protocol.links import ConsumerLink, ConsumerLinks, LeaseStamps
from tandem.kvtransfer.protocol.outgoing import Ledger, OutgoingTransfers
from tandem.kvtransfer.protocol.pushing import Progress, PushLoop, Writer
from tandem.kvtransfer.protocol.sending import DestinationBlocks, OutgoingTransfer, SendPhase
from tandem.kvtransfer.protocol.side import Answers, BoundedMemory, NodeSide, Outcome, PeerKey, TransferEnd, key_of
from tandem.kvtransfer.protocol.transport import Activity, Direction
from tandem.kvtransfer.sources import ASK_S
from tandem.wire.handoff import (
    CancelTransfer,
    DestinationRegistered,
    HandoffAccepted,
    Hello,
    LeaseRenewed,
    RefusalCode,
    RegisterDestination,
    RenewLease,
    Welcome,
)

logger = logging.getLogger(__name__)
MOST_READERS = 256
# Consumers are told of a new generation again until they say that they know, at most until they have asked by themselves.
TELL_AGAIN_S = 0.25
TELL_S = ASK_S


class Producer:
    def __init__(
        self,
        side: NodeSide,
        *,
        finished_sending: Callable[[str], None],
        unwanted: Callable[[str], None],
        distrusted: Callable[[str], None],
    ) -> None:
        """`unwanted` is called with a request that has not ended, when its transfer is no longer wanted."""
        geometry, settings, clock, recorder = side.geometry, side.settings, side.clock, side.recorder
        self._side = side
        self._answers = Answers(side.me, side.send, recorder)
        self._writes = side.direction is Direction.PUSH
        self._finished_sending = finished_sending
        self._unwanted = unwanted
        self._distrusted = distrusted
        # How often each consumer has found KV from here to be wrong.
        self._found_wrong: BoundedMemory[tuple[int, int]] = BoundedMemory(
            settings.max_remembered, settings.keep_link_s, clock
        )
        self._links = ConsumerLinks(
            geometry, side.transport if self._writes else None, settings, clock, forget=side.forget
        )
        self._ledger = Ledger(settings, clock, recorder)
        writer = Writer(side.transport, settings, geometry.fingerprint.num_slots, clock, recorder, side.checksums)
        self._outgoing = OutgoingTransfers(
            side, self._ledger, self._links, self._answers, finished_sending=finished_sending, unwanted=unwanted
        )
        self._pushing = PushLoop(side, self._ledger, self._links, self._outgoing, writer)
        self._progress = Progress(
            self._ledger, writer, to_write=self._writes, has_windows=geometry.has_windows, advanced=self._pushing.watch
        )
        self._stamps = LeaseStamps(settings.lease_s, clock)
        self._tokens_per_s: float | None = None  # our engine's rate for prompt tokens
        # Consumers that may have KV of the present generation, also those whose links are gone. The last to register comes last.
        self._readers: OrderedDict[PeerKey, str] = OrderedDict()
        # Those that have not said that they know of the present generation: where, from which of our stamps on they know, until when
        # they are told.
        self._untold: dict[PeerKey, tuple[str, int, float]] = {}
        self._tell_at = 0.0

    @property
    def is_idle(self) -> bool:
        """True if nothing here has a deadline."""
        return (
            not self._links.has_leaving
            and not self._untold
            and all(sending.phase is SendPhase.CLOSED for sending in self._ledger)
        )

    # ── commands of our own engine ──

    def announce(self, command: commands.AnnounceSend) -> None:
        if self._ledger.ending_of(command.transfer_id) is not None:
            self._unwanted(command.request_id)  # the transfer was cancelled before its request came
        else:
            self._ledger.in_line[command.transfer_id] = command.request_id

    def plan(self, command: commands.PlanSend) -> None:
        self._ledger.in_line.pop(command.transfer_id, None)
        known = self._ledger.of_request(command.request_id)
        if known is not None:
            known.set_source(command)
            return
        over = self._ledger.ending_of(command.transfer_id)
        sending = self._ledger.get(command.transfer_id) or self._ledger.open(command.transfer_id)
        if sending.source is not None:
            logger.error("requests %s and %s share a transfer id", sending.request_id, command.request_id)
            return
        sending.set_source(command)
        self._ledger.bind(command.request_id, sending)
        if over is not None:
            self._outgoing.close(sending, Outcome.CANCELLED, over.reason)
        else:
            self._pair(sending)

    def extend(self, command: commands.ExtendSend) -> None:
        sending = self._ledger.of_request(command.request_id)
        if sending is not None:
            sending.extend_source(command.block_ids)

    def computed(self, command: commands.ComputedTokens | commands.LayersComputed) -> None:
        self._progress.take(command)

    def preempted(self, command: commands.PreemptedRequests) -> None:
        self._progress.preempted(command)

    def computes_at(self, command: commands.ComputesAt) -> None:
        self._tokens_per_s = command.tokens_per_s

    def finish(self, command: commands.FinishSend) -> None:
        sending = self._ledger.of_request(command.request_id)
        if sending is None or sending.source is None:
            self._finished_sending(command.request_id)
            return
        sending.request_ended = True
        sending.kept = True
        sending.num_kept = count_blocks(command.block_ids)
        sending.waiting_since = self._side.clock()
        if sending.phase is SendPhase.OPEN:
            if sending.blocks_changed(command.block_ids):
                self._outgoing.close(sending, Outcome.MISMATCHED, "blocks were given up before the prompt's end")
            else:
                sending.source.block_ids = [list(ids) for ids in command.block_ids]
                sending.source.first_token = command.first_token
                sending.source.owned_until = math.inf
        self._outgoing.conclude(sending)

    def abandon(self, command: commands.AbandonSend) -> None:
        reason = "the request ended before its prompt was computed"
        self._ledger.in_line.pop(command.transfer_id, None)
        sending = self._ledger.of_request(command.request_id)
        if sending is None:
            early = self._ledger.get(command.transfer_id)
            sending = early if early is not None and early.source is None else None
        if sending is None:
            self._ledger.ended(command.transfer_id, TransferEnd(reason))
            if command.kept:
                self._finished_sending(command.request_id)
            return
        sending.request_id = command.request_id
        sending.request_ended = True
        sending.kept = command.kept
        if command.kept and sending.source is not None:
            sending.num_kept = count_blocks(sending.source.block_ids)
        self._outgoing.close(sending, Outcome.ABORTED, reason)

    def begin_generation(self) -> None:
        """What is being sent is of the generation that has ended, so no consumer may use it. Consumers also learn that what they have
        is of an earlier one."""
        for sending in list(self._ledger):
            if sending.source is not None:
                self._void(sending)
        readers, self._readers = self._readers, OrderedDict()
        now, stamp = self._side.clock(), self._stamps.issue()
        self._untold |= {key: (endpoint, stamp, now + TELL_S) for key, endpoint in readers.items()}
        for sending in self._ledger:
            if sending.destination is not None and not sending.is_over:  # it will get KV of the new one
                self._remember_reader(sending.destination.consumer, sending.destination.endpoint)
        self._tell(now)

    def _tell(self, now: float) -> None:
        """Tells consumers of the present generation. A node that ends soon answers no question of theirs any more."""
        self._tell_at = now + TELL_AGAIN_S
        for key, (endpoint, _, until) in list(self._untold.items()):
            if now > until:
                del self._untold[key]
                continue
            envelope = self._side.me.envelope(key.epoch)
            news = LeaseRenewed(envelope, self._stamps.issue(), [], [], self._tokens_per_s)
            self._side.send(endpoint, news)

    def void(self, command: commands.VoidSend) -> None:
        """A transfer that its consumer has accepted is over, and known here no more."""
        sending = self._ledger.of_request(command.request_id)
        if sending is not None:
            was_told = sending.phase is SendPhase.CLOSED
            self._void(sending)
            if was_told:  # the consumer uses what had arrived
                self._outgoing.tell_end(sending)

    def call_back(self, command: commands.CallBackSend) -> None:
        """One whose consumer has registered is moved within a moment, and needs its blocks no longer then."""
        sending = self._ledger.of_request(command.request_id)
        if sending is not None and sending.destination is None:
            self._outgoing.close(
                sending, Outcome.ABORTED, "a request that does not wait for idle time needed its blocks"
            )

    def _void(self, sending: OutgoingTransfer) -> None:
        sending.is_void = True
        self._outgoing.close(sending, Outcome.ABORTED, "its KV may be wrong")

    # ── messages of consumers ──

    def on_hello(self, message: Hello) -> None:
        rejection = self._links.welcome(message)
        if rejection is not None:
            self._answers.refuse(message.envelope, "", rejection.code, rejection.reason)
            return
        self._links.drop_unused(key_of(message.envelope), in_use=lambda link: bool(self._ledger.through(link)))
        self._answers.say(
            message.envelope,
            Welcome(
                self._answers.back_to(message.envelope),
                self._side.geometry.fingerprint,
                self._side.geometry.memory,
                self._side.process,
                self._side.settings.lease_s,
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
            self._answers.refuse(envelope, transfer_id, RefusalCode.HANDSHAKE_REQUIRED, "no handshake with this node")
        elif sending is not None and not sending.belongs_to(key):
            self._answers.refuse(envelope, transfer_id, RefusalCode.FOREIGN, "this transfer is for another node")
        elif ending is not None:
            self._answers.closed(envelope, transfer_id, ending)
        elif sending is not None and sending.is_over:
            return  # the end of the transfer answers it, when nothing is in flight
        elif (problem := self._problem(message, link)) is not None:
            self._answers.refuse(envelope, transfer_id, RefusalCode.INVALID, problem)
        elif (lease_until := self._stamps.until(message.stamp)) is None:
            # The stamp is too old to grant a lease: the message lay in a queue. The consumer registers again with the
            # fresh stamp.
            unknown = [transfer_id] if sending is None or sending.destination is None else []
            self._answers.say(envelope, LeaseRenewed(self._answers.back_to(envelope), self._stamps.issue(), unknown))
        elif sending is None and not self._ledger.has_room(sum(map(len, message.block_ids))):
            self._answers.refuse(envelope, transfer_id, RefusalCode.OVERLOADED, "too many transfers without a request")
        else:
            self._register(sending or self._ledger.open(transfer_id), message, link, lease_until)

    def _problem(self, message: RegisterDestination, link: ConsumerLink) -> str | None:
        hello = link.hello
        return self._side.geometry.check_destination(message, hello.fingerprint.block_size, hello.memory)

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
                registered_at=self._side.clock(),
                checksum_every=message.checksum_every,
            )
            sending.set_destination(destination, to_write=self._writes)
            self._remember_reader(link.key, destination.endpoint)
        elif known.is_same(message):
            known.lease_until = max(known.lease_until, lease_until)
        else:
            self._answers.refuse(
                message.envelope, sending.transfer_id, RefusalCode.CONFLICT, "registered with other blocks before"
            )
            return
        self._answers.say(
            message.envelope,
            DestinationRegistered(self._answers.back_to(message.envelope), self._stamps.issue(), sending.transfer_id),
        )
        self._pair(sending)

    def _remember_reader(self, key: PeerKey, endpoint: str) -> None:
        self._readers[key] = endpoint
        self._readers.move_to_end(key)
        if len(self._readers) > MOST_READERS:
            self._readers.popitem(last=False)

    def on_renew(self, message: RenewLease) -> None:
        key = key_of(message.envelope)
        me = self._side.me
        if key in self._untold and message.stamp >= self._untold[key][1]:
            del self._untold[key]
        found_wrong, heard_in = self._found_wrong.get(key) or (0, me.generation)
        if message.found_wrong > found_wrong:
            found_wrong, heard_in = message.found_wrong, me.generation
            self._found_wrong.add(key, (found_wrong, heard_in))
            self._distrusted(f"{key.node_id} computed KV from here again, and it was wrong")
        # Confirmed once nothing of it can come back, also if this process ends now. The consumer says it again until then.
        is_confirmed = me.generation > heard_in and self._side.sources.all_written
        if self._links.hear(key) is None:
            self._answers.refuse(message.envelope, "", RefusalCode.HANDSHAKE_REQUIRED, "no handshake with this node")
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
                self._tokens_per_s,
                found_wrong if is_confirmed else 0,
            ),
        )

    def on_accepted(self, message: HandoffAccepted) -> None:
        key = key_of(message.envelope)
        self._links.hear(key)
        sending = self._ledger.get(message.transfer_id)
        if sending is not None and not sending.belongs_to(key):
            self._side.recorder.refused("foreign_acceptance")
            return
        if sending is not None and sending.phase is SendPhase.NOTIFYING:
            self._outgoing.accepted(sending)
        else:
            self._side.recorder.refused("late_acceptance")
        if not self._writes:
            over = self._ledger.ending_of(message.transfer_id) or TransferEnd("this transfer is not known here")
            self._answers.closed(message.envelope, message.transfer_id, over)

    def on_cancel(self, message: CancelTransfer) -> None:
        key = key_of(message.envelope)
        self._links.hear(key)
        over = TransferEnd("cancelled by the consumer")
        sending = self._ledger.get(message.transfer_id)
        if sending is not None and not sending.belongs_to(key):
            self._answers.refuse(
                message.envelope, message.transfer_id, RefusalCode.FOREIGN, "the transfer of another node"
            )
            return
        in_line = self._ledger.in_line.pop(message.transfer_id, None)
        if in_line is not None:
            self._unwanted(in_line)
        if sending is not None and sending.phase is not SendPhase.CLOSED:
            answered_by_close = sending.destination is not None
            self._outgoing.close(sending, Outcome.CANCELLED, over.reason)
            if answered_by_close:
                return
        else:
            self._ledger.ended(message.transfer_id, over)
        self._answers.closed(message.envelope, message.transfer_id, over)

    def _pair(self, sending: OutgoingTransfer) -> None:
        self._outgoing.pair(sending)
        self._pushing.watch(sending)

    # ── peers ──

    def silent_links(self) -> list[ConsumerLink]:
        """Returns the links with consumers that have open transfers and have been silent for `silent_s`."""
        limit = self._side.clock() - self._side.settings.silent_s
        waiting = {
            sending.destination.consumer
            for sending in self._ledger
            if sending.destination is not None and not sending.is_over
        }
        return [link for link in self._links if link.key in waiting and link.last_heard < limit]

    def peer_ended(self, key: PeerKey, reason: str) -> None:
        """This incarnation has certainly ended."""
        self._links.mark_ended(key)
        self._untold.pop(key, None)
        self._outgoing.close_all_to(key, Outcome.PEER_LOST, reason)

    # ── the loop's turn ──

    def pump(self) -> Activity:
        """Posts what is due, and returns how soon to call again."""
        self._progress.look_at_device()
        waiting = Activity.IN_FLIGHT if self._progress.waits_for_device else Activity.NONE
        return max(waiting, self._pushing.pump())

    def tick(self) -> None:
        self._outgoing.tick()
        if self._untold and (now := self._side.clock()) >= self._tell_at:
            self._tell(now)
        if self._writes:
            self._pushing.tell_pace()

    def shutdown(self) -> bool:
        """Ends everything that can end. False while something is in flight."""
        for sending in self._ledger:
            sending.request_ended = True
            self._pushing.poll(sending)
            self._outgoing.close(sending, Outcome.SHUTDOWN, "the node shuts down")
        self._links.leave_all()
        self._pushing.close_idle_links()
        return self._ledger.is_empty and not self._links.has_leaving and not self._untold

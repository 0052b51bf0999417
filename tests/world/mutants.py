"""Bugs that serving systems really had, put into the product one at a time: the world must find each of them.

`python -m tests.world.mutants` hunts all, or those that are named, and prints after how many schedules each was found.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.scheduling.lifecycle import Lifecycle
from tandem.kvtransfer.protocol.commands import AbandonSend, CancelReceive, FinishSend
from tandem.kvtransfer.protocol.consumer import Consumer
from tandem.kvtransfer.protocol.halves import SchedulerHalf, WorkerHalf
from tandem.kvtransfer.protocol.incoming import IncomingTransfers, Quarantine, Verifier
from tandem.kvtransfer.protocol.links import LeaseStamps
from tandem.kvtransfer.protocol.outgoing import OutgoingTransfers
from tandem.kvtransfer.protocol.producer import Producer
from tandem.kvtransfer.protocol.pulling import PullLoop
from tandem.kvtransfer.protocol.receiving import IncomingTransfer, ReceivePhase
from tandem.kvtransfer.protocol.side import Outcome
from tandem.router.dispatch.ledger import TokenLedger
from tandem.router.dispatch.life import RequestLife
from tandem.router.dispatch.placement import Placement
from tandem.router.dispatch.slots import Slots
from tandem.router.pool import NodePool
from tandem.wire.requests import TransferRole
from tests.world import control
from tests.world.control_mutants import CONTROL_MUTANTS
from tests.world.feature_mutants import FEATURE_MUTANTS
from tests.world.schedule import run
from tests.world.search import fix_hashes
from tests.world.tier_mutants import TIER_MUTANTS, can_differ

MOST = 400  # schedules for one mutant

Patch = tuple[type, str, Callable[[Any], Any]]
"""A class, the name of a method, and what makes the mutant's method of the right one."""


def _load_freed_under_a_write(right: Any) -> Any:
    def request_finished(self: SchedulerHalf, request: Any, block_ids: Any) -> bool:
        entry = self._entries.get(request.request_id)
        waits = entry is not None and entry.begun and not entry.done
        if waits and entry.transfer.role is TransferRole.CONSUME:
            self._entries.pop(request.request_id)
            self._commands.append(CancelReceive(request.request_id))
            return False
        return bool(right(self, request, block_ids))

    return request_finished


def _no_quarantine(right: Any) -> Any:
    return lambda self, block_size, valid_tokens: frozenset()


def _freed_before_it_is_read(right: Any) -> Any:
    def finish(self: SchedulerHalf, request: Any, entry: Any, block_ids: Any) -> bool:
        right(self, request, entry, block_ids)
        return False

    return finish


def _bytes_not_compared(right: Any) -> Any:
    def problem(self: Verifier, receiving: IncomingTransfer, start: int, end: int, packed: bytes) -> None:
        self._arrived(receiving, end)

    return problem


def _preemption_not_told(right: Any) -> Any:
    return lambda self: None


def _tokens_appended(right: Any) -> Any:
    def merge(self: TokenLedger, chunk: Any, may_differ: bool) -> Any:
        chunk.start = len(self.tokens)
        return right(self, chunk, may_differ)

    return merge


def _cached_before_it_came(right: Any) -> Any:
    def allocate(self: KVCacheManager, request: Any, num_new_tokens: int, **given: Any) -> Any:
        blocks = right(self, request, num_new_tokens, **given)
        if blocks is not None and given.get("delay_caching"):
            self.coordinator.cache_full_blocks(request, given["num_hit_tokens"] + given["num_external_tokens"])
        return blocks

    return allocate


def _silence_is_no_loss(right: Any) -> Any:
    return lambda self, member, silent_s: None


def _abandoned_send_never_told(right: Any) -> Any:
    def finish(self: SchedulerHalf, request: Any, entry: Any, block_ids: Any) -> bool:
        kept = bool(right(self, request, entry, block_ids))
        if self._commands and isinstance(self._commands[-1], AbandonSend) and kept:
            self._commands.pop()
        return kept

    return finish


def _finished_send_never_told(right: Any) -> Any:
    def finish(self: SchedulerHalf, request: Any, entry: Any, block_ids: Any) -> bool:
        kept = bool(right(self, request, entry, block_ids))
        if self._commands and isinstance(self._commands[-1], FinishSend) and request.num_tokens % 8 == 0:
            self._commands.pop()
        return kept

    return finish


def _read_without_asking(right: Any) -> Any:
    def read_on(self: PullLoop, receiving: IncomingTransfer) -> None:
        right(self, receiving)
        notice = receiving.notice
        if receiving.stage is ReceivePhase.CONFIRMING and notice is not None and receiving in self._incoming:
            self._incoming.finish(receiving, notice)

    return read_on


def _quarantine_ends_with_the_lease(right: Any) -> Any:
    def tick(self: Quarantine, ran_s: float) -> None:
        right(self, ran_s)
        for receiving in self._incoming:
            ends = receiving.leased_until
            if receiving.quarantined is not None and ends is not None and self._side.clock() > ends:
                self._incoming.end(receiving, receiving.outcome, receiving.reason)

    return tick


def _reaper_stops_early(right: Any) -> Any:
    def tick(self: OutgoingTransfers) -> None:
        now = self._side.clock()
        for sending in self._ledger:
            destination = sending.destination
            if destination is not None and now < destination.lease_until:
                return  # a later one may have expired
            if destination is not None:
                self.close(sending, Outcome.LEASE_EXPIRED, "the consumer did not renew its lease")

    return tick


def _kept_what_was_computed(right: Any) -> Any:
    def preempt(self: Lifecycle, request: Any) -> None:
        computed = request.num_computed_tokens
        right(self, request)
        request.num_computed_tokens = computed // 2

    return preempt


def _one_block_too_many_found(right: Any) -> Any:
    def find(self: KVCacheManager, request: Any) -> Any:
        hits, count = right(self, request)
        return hits, count + 1 if 0 < count < request.num_tokens - 1 else count

    return find


def _acceptance_not_asked_again(right: Any) -> Any:
    def on_accepted(self: Producer, message: Any) -> None:
        if self._side.me.epoch % 2:
            right(self, message)

    return on_accepted


def _failed_load_trusted(right: Any) -> Any:
    return lambda self, receiving: receiving.command.num_tokens - 1


def _notice_not_repeated(right: Any) -> Any:
    def notify(self: OutgoingTransfers, sending: Any) -> None:
        if sending.notice_sent_at is None:
            right(self, sending)

    return notify


def _missing_not_asked_for(right: Any) -> Any:
    return lambda self, node, holding: None


def _freed_in_flight(right: Any) -> Any:
    def close(self: OutgoingTransfers, sending: Any, outcome: Outcome, reason: str) -> None:
        right(self, sending, outcome, reason)
        if sending.in_flight and outcome is not Outcome.SENT:
            sending.in_flight.clear()
            self.conclude(sending)

    return close


def _leases_never_end(right: Any) -> Any:
    def tick(self: OutgoingTransfers) -> None:
        for sending in self._ledger:
            if sending.destination is not None:
                sending.destination.lease_until = float("inf")
        right(self)

    return tick


def _place_not_given_back(right: Any) -> Any:
    return lambda self: self._owner.leave(self, self.wanted)


def _silence_is_proof(right: Any) -> Any:
    def suspect(self: Consumer, key: Any, reason: str, *, proven: bool = False) -> None:
        right(self, key, reason, proven=proven)
        for receiving in self._incoming.with_peer(key):
            self._incoming.end(receiving, Outcome.PEER_LOST, reason)

    return suspect


def _never_too_old(right: Any) -> Any:
    return lambda self, stamp: self._clock() + self._lease_s


def _begun_again(right: Any) -> Any:
    return lambda self, life, attempt, spec, hashes, tokens: right(self, life, attempt, spec, hashes, [])


# The name, where it was seen, what is patched. A loss that is not heard of, a gap that is not noticed and a message that is read
# twice are no bugs here: the question what a node holds, the positions of tokens and the ids of requests find the same. Nor is an
# abort that a consumer does not hear of (SGLang #18701): the router tells the producer, too, which closes the transfer.
MUTANTS: dict[str, tuple[str, Patch]] = {
    "load-freed-under-a-write": (
        "SGLang #24527: pages are used again while the peer's write is in flight",
        (SchedulerHalf, "request_finished", _load_freed_under_a_write),
    ),
    "no-quarantine": (
        "a failed load's blocks are used at once, and a late write lands in them",
        (IncomingTransfer, "unsafe_blocks", _no_quarantine),
    ),
    "freed-before-it-is-read": (
        "TensorRT-LLM #12540: blocks are evicted while the sender reads them",
        (SchedulerHalf, "_finish_send", _freed_before_it_is_read),
    ),
    "bytes-not-compared": (
        "vLLM #52234: a receive that failed is an answer with status 200",
        (Verifier, "problem", _bytes_not_compared),
    ),
    "preemption-not-told": (
        "blocks of a preempted request go on being sent",
        (WorkerHalf, "handle_preemptions", _preemption_not_told),
    ),
    "tokens-appended": ("both nodes' first token is shown", (TokenLedger, "_merge", _tokens_appended)),
    "cached-before-it-came": (
        "another request finds a prefix that is still being loaded",
        (KVCacheManager, "allocate_slots", _cached_before_it_came),
    ),
    "silence-is-no-loss": (
        "SGLang #16903: a node that is gone is waited for",
        (NodePool, "_check_silent", _silence_is_no_loss),
    ),
    "abandoned-send-never-told": (
        "vLLM #50425: a client that goes away leaves the prefill node's KV",
        (SchedulerHalf, "_finish_send", _abandoned_send_never_told),
    ),
    "finished-send-never-told": (
        "TensorRT-LLM PR #12313: some requests' blocks never come back",
        (SchedulerHalf, "_finish_send", _finished_send_never_told),
    ),
    "read-without-asking": (
        "aws-do-eks PR #84: requests decode from KV whose lease had ended",
        (PullLoop, "_read_on", _read_without_asking),
    ),
    "quarantine-ends-with-the-lease": (
        "a lease that ended is taken for a proof that nothing writes",
        (Quarantine, "tick", _quarantine_ends_with_the_lease),
    ),
    "reaper-stops-early": (
        "vLLM #58222: the reaper of leases stops at the first that is alive",
        (OutgoingTransfers, "tick", _reaper_stops_early),
    ),
    "kept-what-was-computed": (
        "a preempted request goes on in blocks that are not its own",
        (Lifecycle, "preempt", _kept_what_was_computed),
    ),
    "one-token-too-many-found": (
        "vLLM #52617: a full hit, and the text differs from the first token on",
        (KVCacheManager, "find_prefix", _one_block_too_many_found),
    ),
    "acceptance-lost": (
        "vLLM #46283: blocks never come back when the other side's word is lost",
        (Producer, "on_accepted", _acceptance_not_asked_again),
    ),
    "failed-load-trusted": (
        "what a failed load brought is used",
        (IncomingTransfers, "_valid_tokens", _failed_load_trusted),
    ),
    "notice-not-repeated": (
        "TensorRT-LLM PR #12640: a lost message stops a transfer for good",
        (OutgoingTransfers, "_notify", _notice_not_repeated),
    ),
    "missing-not-asked-for": (
        "a request that its node never got is waited for",
        (RequestLife, "on_holding", _missing_not_asked_for),
    ),
    "closed-not-heard": (
        "TensorRT-LLM #12542: a decode node's blocks wait for ever",
        (Consumer, "on_closed", lambda right: lambda self, message: None),
    ),
    "freed-in-flight": (
        "TensorRT-LLM PR 14565: a time-out frees what is still being sent",
        (OutgoingTransfers, "close", _freed_in_flight),
    ),
    "leases-never-end": (
        "vLLM PR 38027: a dead decode node keeps the prefill node's blocks",
        (OutgoingTransfers, "tick", _leases_never_end),
    ),
    "late-registration-taken": (
        "a destination is registered when its request has long gone on elsewhere",
        (LeaseStamps, "until", _never_too_old),
    ),
    "silence-is-proof": (
        "a peer that does not answer is taken for one that writes no more",
        (Consumer, "suspect", _silence_is_proof),
    ),
    "place-not-given-back": (
        "TensorRT-LLM PR #12313, at the router: who goes away keeps a place",
        (Slots, "release_all", _place_not_given_back),
    ),
    "begun-again": (
        "a request that moves to another node begins its answer again",
        (Placement, "submit", _begun_again),
    ),
}


ALL = (
    {name: (seen, (patch,)) for name, (seen, patch) in (MUTANTS | CONTROL_MUTANTS).items()}
    | TIER_MUTANTS
    | FEATURE_MUTANTS
)


@contextlib.contextmanager
def mutant(name: str) -> Iterator[None]:
    _, patches = ALL[name]
    with contextlib.ExitStack() as undone:
        for owner, method, make in patches:
            right = inspect.getattr_static(owner, method)
            setattr(owner, method, make(right))
            undone.callback(setattr, owner, method, right)
        yield


def hunt(name: str, most: int) -> tuple[int, str] | None:
    """After how many schedules the mutant was found, and what was broken; None: not within `most`."""
    with mutant(name):
        for seed in range(most):
            if name in CONTROL_MUTANTS:
                outcome = control.run(seed)
            elif can_differ(name, seed):
                outcome = run(seed)
            else:
                continue
            if outcome.violations:
                return seed + 1, outcome.violations[0]
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--most", type=int, default=MOST)
    asked = parser.parse_args()
    fix_hashes("tests.world.mutants")
    alive = 0
    for name in asked.names or ALL:
        began = time.monotonic()
        found = hunt(name, asked.most)
        alive += found is None
        told = f"found by schedule {found[0]}: {found[1]}" if found else f"NOT FOUND in {asked.most}"
        print(f"{name:32} {time.monotonic() - began:6.1f} s  {told}", flush=True)
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())

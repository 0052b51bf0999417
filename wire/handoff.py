"""Node -> node: how a prefill node (the producer) and a decode node (the consumer) agree on one KV transfer.

    consumer                                   producer
       │ ── Hello ──────────────────────────────▶ │   once per pair of epochs: memory and fingerprint
       │ ◀────────────────────────────── Welcome ─ │   (or Refused: the fingerprints differ)
       │ ── RegisterDestination ────────────────▶ │   "for this transfer, these blocks of mine are meant"
       │ ◀──────────────── DestinationRegistered ─ │
       │ ◀═════════════════ KV written, by chunk ═ │   push: the connector's transport, not this channel
       │ ◀─────────────────────────── KVArrived ─ │   push: how much of it is there for good
       │ ◀──────────────────────── TransferPace ─ │   push: the link is slow, and what is to go through it
       │ ── RenewLease ─────────────────────────▶ │   again and again, for all transfers at once
       │ ◀───────────────────────── LeaseRenewed ─ │   also tells a consumer that its producer is alive
       │ ◀──────────────────────── HandoffNotice ─ │   push: every write has completed at the consumer
       │ ═ KV read, all at once ════════════════▶ │   pull: begins with the notice, which names the blocks
       │ ── HandoffAccepted ────────────────────▶ │   the producer may free
       │ ◀─────────────────────── TransferClosed ─ │   pull: the blocks were held until now, so what was read is right
       │ ── CancelTransfer ─────────────────────▶ │   instead: the consumer gives up
       │ ◀─────────────────────── TransferClosed ─ │   nothing is in flight; the blocks may be reused

Every message names its sender's epoch and the receiver's epoch it believes in. One that is addressed to
another epoch is answered with Refused and counted, never acted on. Epochs are secrets of the cluster: the refusal
does not tell the receiver's own. Any message may be lost, doubled or late: the side that waits for an answer asks
again, and every question can be answered twice.

**Evidence.** A refusal and a refused connection are reasons to suspect that a peer is gone, and no proof: the request
goes on without the peer, and its blocks stay in quarantine. What ends a quarantine is the producer's own TransferClosed,
the proven end of its process (`ProcessIdentity`), or that the consumer has closed the way that the writes take.

**Stamps.** A lease must not be renewed by a message that lay in a queue while its reader was stopped. So every
message that grants or renews a lease echoes a stamp that the producer issued, and the lease counts from the
moment of issue. The consumer, who saw the stamp no earlier than it was issued, knows from its own clock alone
when the lease has ended at the latest.
"""

from __future__ import annotations

import enum

import msgspec

from tandem.wire.versions import KV_VERSION, WIRE_VERSION


class CacheFingerprint(msgspec.Struct, frozen=True):
    """What must agree for one node's KV bytes to mean something on another; `block_size` and `layout` may differ as
    far as one can be mapped to the other, `wire_version` as far as the two can speak with each other."""

    model: str  # its content's digest, not what it is called
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    layout: str  # a block's axes, outermost first: "slot,kv,head,token,dim"
    connector: str  # name and direction
    num_slots: int = 1  # layers of a group, side by side in a block
    num_groups: int = 1
    num_parts: int = 2  # keys and values, or one of latents
    state_blocks: int = 0  # of each request, in the last group, for recurrent states
    kv_version: int = KV_VERSION
    wire_version: int = WIRE_VERSION  # of the messages that the node speaks; may differ by one: wire.versions


class ProcessIdentity(msgspec.Struct, frozen=True):
    """One process of one machine. A peer on the same machine and in the same PID namespace can tell from it
    whether the process has ended."""

    machine: str  # another one after each boot
    pid_namespace: int
    pid: int
    started: int  # clock ticks since the boot: a number is given to another process when the first has ended


class CacheShard(msgspec.Struct, frozen=True):
    """Some heads of every block, in memory of one rank's own. Its part of a block lies there as the whole block would with these heads
    alone, and part b begins at b times its size.

    Where the rank has the layers of one pipeline stage, `slots` says which of each group: the first one's slot in a whole block, and how
    many. They lie in the rank's part from slot 0 on, which has as many slots as the largest of these numbers."""

    first_head: int
    num_heads: int
    agent_metadata: bytes
    memory_type: str
    device_id: int
    base_address: int
    process: ProcessIdentity  # the rank's: it reads and writes by itself
    slots: list[tuple[int, int]] = []  # empty: all layers


class CacheMemory(msgspec.Struct, frozen=True):
    """Where a node's KV cache lies: block b is the `block_bytes` at `base_address + b * block_bytes`.

    With `shards` it lies there, and `base_address` is 0: a node that does not know shards finds no cache, and refuses the handshake.
    """

    agent_metadata: bytes  # opaque to all but the connector's transport
    memory_type: str
    device_id: int
    base_address: int
    num_blocks: int
    block_bytes: int  # of all heads
    shards: list[CacheShard] = []


class Envelope(msgspec.Struct, frozen=True):
    """Who sends, to which incarnation. Part of every message on this channel."""

    sender_id: str
    sender_epoch: int
    receiver_epoch: int
    reply_to: str


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    envelope: Envelope
    fingerprint: CacheFingerprint
    memory: CacheMemory
    process: ProcessIdentity


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    envelope: Envelope
    fingerprint: CacheFingerprint
    memory: CacheMemory
    process: ProcessIdentity
    lease_s: float
    stamp: int


class RegisterDestination(msgspec.Struct, frozen=True, tag="register"):
    """`block_ids[g][i]` receives block `first_block[g] + i` of the request, in KV cache group g; blocks here are of
    the consumer's size. A group of recurrent states, which is the last, has no order of tokens: its `first_block` is 0, and its blocks
    receive the states after the request's last token."""

    envelope: Envelope
    stamp: int
    transfer_id: str
    num_tokens: (
        int  # all that the request has when it starts: its prompt, and what it wrote before it moved here
    )
    token_hash: bytes
    first_block: list[int]
    block_ids: list[list[int]]
    checksum_every: int = 0  # one of how many grains shall carry a checksum; 0 for none


class DestinationRegistered(msgspec.Struct, frozen=True, tag="registered"):
    envelope: Envelope
    stamp: int
    transfer_id: str


class RenewLease(msgspec.Struct, frozen=True, tag="renew"):
    """With no transfers it only asks for a fresh stamp."""

    envelope: Envelope
    stamp: int
    transfer_ids: list[str]


class LeaseRenewed(msgspec.Struct, frozen=True, tag="renewed"):
    """`unknown` are transfers that the producer does not (or no longer) hold: they will never complete. One that it is
    closing is not among them before nothing is in flight. `waiting` are those whose prompt is still in line: the time that a
    transfer may take has not begun."""

    envelope: Envelope
    stamp: int
    unknown: list[str]
    waiting: list[str] = []
    tokens_per_s: float | None = None  # of prompts, as the producer computes them; None: not known yet


class KVArrived(msgspec.Struct, frozen=True, tag="arrived"):
    """Push: the first `count` grains of the transfer, in the order in which they are sent, are at the consumer and will
    not be written again. If the transfer fails they need not be computed again.

    `checksums`: of those of them from `start` on that carry one, eight bytes each.
    """

    envelope: Envelope
    transfer_id: str
    start: int
    count: int
    checksums: bytes


class TransferPace(msgspec.Struct, frozen=True, tag="pace"):
    """Push: the link to the consumer has lately moved so many bytes a second. `in_flight` are on their way; of these transfers, which
    go on after that in turn, so many bytes are computed and not on their way. Said while that takes long. The consumer may
    find it faster to compute the rest."""

    envelope: Envelope
    bytes_per_s: float
    in_flight: int
    waiting: dict[str, int]


class HandoffNotice(msgspec.Struct, frozen=True, tag="notice"):
    """Push: every byte of the request's KV is at the consumer. Pull: every byte can be read, from these blocks.

    Accepted only if all of it matches what was asked for.
    """

    envelope: Envelope
    transfer_id: str
    num_tokens: int
    token_hash: bytes
    first_token: int
    num_bytes: int
    num_blocks: int
    # Pull: blocks of the producer's size; [g][0] holds the first token of block `first_block[g]` of the registration.
    source_block_ids: list[list[int]] = []
    checksums: bytes = (
        b""  # of all grains that carry one, eight bytes each, in the order in which grains are sent
    )


class HandoffAccepted(msgspec.Struct, frozen=True, tag="accepted"):
    envelope: Envelope
    transfer_id: str


class CancelTransfer(msgspec.Struct, frozen=True, tag="cancel"):
    envelope: Envelope
    transfer_id: str


class TransferClosed(msgspec.Struct, frozen=True, tag="closed"):
    """The producer has nothing in flight for this transfer and never will again."""

    envelope: Envelope
    transfer_id: str
    reason: str
    handed_over: bool = False  # pull: the acceptance came while the blocks were still held


class RefusalCode(enum.StrEnum):
    WRONG_EPOCH = "wrong_epoch"  # another incarnation was addressed; the refusal's own sender epoch is 0
    INCOMPATIBLE = "incompatible"  # the fingerprints differ
    HANDSHAKE_FAILED = "handshake_failed"  # the transport could not reach the memory described
    HANDSHAKE_REQUIRED = "handshake_required"  # say Hello (again) first
    FOREIGN = "foreign"  # the transfer belongs to another node
    INVALID = "invalid"  # blocks out of range, counts that do not add up
    CONFLICT = "conflict"  # the same transfer was registered otherwise before
    OVERLOADED = "overloaded"  # too many registrations without a request
    MOVE_FAILED = "move_failed"  # a write failed, and what it may still do is not known


class Refusal(msgspec.Struct, frozen=True, tag="refused"):
    envelope: Envelope
    transfer_id: str  # "" when it is not about one transfer
    code: RefusalCode
    reason: str
    addressed_epoch: int  # the receiver epoch of the message that is refused


HandoffMessage = (
    Hello
    | Welcome
    | RegisterDestination
    | DestinationRegistered
    | RenewLease
    | LeaseRenewed
    | KVArrived
    | TransferPace
    | HandoffNotice
    | HandoffAccepted
    | CancelTransfer
    | TransferClosed
    | Refusal
)

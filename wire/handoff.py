"""Node -> node: how a prefill node (the producer) and a decode node (the consumer) agree on one KV transfer.

    consumer                                   producer
       │ ── Hello ──────────────────────────────▶ │   once per pair of epochs: memory and fingerprint
       │ ◀────────────────────────────── Welcome ─ │   (or Refusal: the fingerprints differ)
       │ ── RegisterDestination ────────────────▶ │   names the consumer's blocks for this transfer
       │ ◀──────────────── DestinationRegistered ─ │
       │ ◀═════════════════ KV written, by chunk ═ │   push: the connector's transport, not this channel
       │ ◀─────────────────────────── KVArrived ─ │   push: how many grains have arrived for good
       │ ◀──────────────────────── TransferPace ─ │   push: the link is slow, and what it has to move
       │ ── RenewLease ─────────────────────────▶ │   again and again, for all transfers at once
       │ ◀───────────────────────── LeaseRenewed ─ │   also tells a consumer that its producer is alive
       │ ◀──────────────────────── HandoffNotice ─ │   push: every write has completed at the consumer
       │ ═ KV read, all at once ════════════════▶ │   pull: begins with the notice, which names the blocks
       │ ── HandoffAccepted ────────────────────▶ │   the producer may free its blocks
       │ ◀─────────────────────── TransferClosed ─ │   pull: the blocks were held until now, so the bytes read are right
       │ ── CancelTransfer ─────────────────────▶ │   instead: the consumer gives up
       │ ◀─────────────────────── TransferClosed ─ │   nothing is in flight; the consumer may reuse its blocks

Every message names its sender's epoch, and the epoch that its sender believes the receiver to have. A node answers a
message for another epoch with a Refusal, counts it, and never acts on it. Epochs are secrets of the cluster, so the
refusal does not tell the receiver's own. Any message may be lost, doubled or late: the side that waits for an answer
asks again, and every question can be answered twice.

**Evidence.** A refusal or a refused connection is a reason to suspect that a peer is gone, and no proof. The request
goes on without the peer, and its blocks stay in quarantine. Three things end a quarantine: the producer's own
TransferClosed, the proven end of its process (`ProcessIdentity`), or that the consumer has closed the way that the
writes take.

**Stamps.** A lease must not be renewed by a message that lay in a queue while its reader was stopped. So every
message that grants or renews a lease echoes a stamp that the producer issued, and the lease counts from the moment
of issue. The consumer saw the stamp no earlier than that. So it knows from its own clock alone when the lease has
ended at the latest.
"""

from __future__ import annotations

import enum

import msgspec

from tandem.wire.versions import KV_VERSION, WIRE_VERSION


class CacheFingerprint(msgspec.Struct, frozen=True):
    """The properties of a KV cache that must be equal on two nodes for one's KV bytes to mean the same on the other.
    `block_size` and `layout` may differ if one can be mapped to the other, `wire_version` if the nodes can still
    speak."""

    model: str  # the digest of the model's content, not its name
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    layout: str  # a block's axes, outermost first: "slot,kv,head,token,dim"
    connector: str  # name and direction
    num_slots: int = 1  # layers of a group that lie side by side in a block
    num_groups: int = 1
    num_parts: int = 2  # keys and values, or one part of latents
    state_blocks: int = 0  # blocks of recurrent states that each request has in the last group
    kv_version: int = KV_VERSION
    # The version of the messages that the node understands. Two nodes' may differ by one: wire.versions.
    wire_version: int = WIRE_VERSION


class ProcessIdentity(msgspec.Struct, frozen=True):
    """One process on one machine. A peer on the same machine and in the same PID namespace can tell from it whether the
    process has ended."""

    machine: str  # a new one after each boot
    pid_namespace: int
    pid: int
    started: int  # clock ticks since the boot, because another process may get the number later


class CacheShard(msgspec.Struct, frozen=True):
    """Some heads of every block, in one rank's own memory. The rank's part of a block lies there as a block with
    these heads alone would, and part b begins at b times its size.

    If the rank has the layers of one pipeline stage, `slots` has for each group the slot of its first layer in a whole
    block, and the number of its layers. In the rank's part they begin at slot 0, and the part has as many slots as the
    largest of these numbers."""

    first_head: int
    num_heads: int
    agent_metadata: bytes
    memory_type: str
    device_id: int
    base_address: int
    process: ProcessIdentity  # the rank's, which reads and writes by itself
    slots: list[tuple[int, int]] = []  # empty: the rank has all layers


class CacheMemory(msgspec.Struct, frozen=True):
    """Where a node's KV cache lies: block b is the `block_bytes` at `base_address + b * block_bytes`.

    With `shards` it lies in these, and `base_address` is 0, so a node that does not know shards finds no cache and
    refuses the handshake.
    """

    agent_metadata: bytes  # only the connector's transport reads it
    memory_type: str
    device_id: int
    base_address: int
    num_blocks: int
    block_bytes: int  # with all heads and layers
    shards: list[CacheShard] = []


class Envelope(msgspec.Struct, frozen=True):
    """Who sends a message, to which incarnation. Every message on this channel has one.

    `generation` is that of the sender's cache. Once it is higher than when a peer got KV from the sender, that KV may be
    wrong."""

    sender_id: str
    sender_epoch: int
    receiver_epoch: int
    reply_to: str
    generation: int = 0


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
    """`block_ids[g][i]` receives block `first_block[g] + i` of the request, in KV cache group g. Blocks here have the
    consumer's size. A group of recurrent states, always the last one, has no order of tokens: its `first_block` is
    0, and its blocks receive the states after the request's last token."""

    envelope: Envelope
    stamp: int
    transfer_id: str
    # All tokens that the request has when it starts: the prompt, and the output that it brings if it moved here.
    num_tokens: int
    token_hash: bytes
    first_block: list[int]
    block_ids: list[list[int]]
    checksum_every: int = 0  # one grain of this many shall carry a checksum; 0: none


class DestinationRegistered(msgspec.Struct, frozen=True, tag="registered"):
    envelope: Envelope
    stamp: int
    transfer_id: str


class RenewLease(msgspec.Struct, frozen=True, tag="renew"):
    """Renews the leases of these transfers. Without transfers it only asks for a fresh stamp, or for a sign of the
    producer and its cache's generation."""

    envelope: Envelope
    stamp: int
    transfer_ids: list[str]
    # How many of this producer's handoffs the consumer has found to be wrong when it computed them again.
    found_wrong: int = 0


class LeaseRenewed(msgspec.Struct, frozen=True, tag="renewed"):
    """Answers RenewLease. The producer does not hold the `unknown` transfers (any more): they will never complete.
    It names a transfer that it is closing only when nothing is in flight. The prompts of the `waiting` ones are
    still in line, so the time that these transfers may take has not begun."""

    envelope: Envelope
    stamp: int
    unknown: list[str]
    waiting: list[str] = []
    tokens_per_s: float | None = None  # the producer's rate for prompt tokens; None: unknown
    found_wrong: int = 0  # as the consumer's newest RenewLease that said so


class KVArrived(msgspec.Struct, frozen=True, tag="arrived"):
    """Push: the first `count` grains of the transfer, in the order of sending, are at the consumer and will not be
    written again. If the transfer fails, they need not be computed again.

    `checksums`: of those grains from `start` on that carry one, eight bytes each.
    """

    envelope: Envelope
    transfer_id: str
    start: int
    count: int
    checksums: bytes


class TransferPace(msgspec.Struct, frozen=True, tag="pace"):
    """Push: the link to the consumer moves `bytes_per_s`. `in_flight` bytes are on their way. After them it moves the
    `waiting` bytes of these transfers in turn, which are computed and not posted. The producer repeats this while
    the wait is long. The consumer may find it faster to compute the rest."""

    envelope: Envelope
    bytes_per_s: float
    in_flight: int
    waiting: dict[str, int]


class HandoffNotice(msgspec.Struct, frozen=True, tag="notice"):
    """Push: every byte of the request's KV is at the consumer. Pull: every byte can be read, from these blocks.

    The consumer accepts it only if all of it matches what it asked for.
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
    # The checksums of all grains that carry one, eight bytes each, in the order of sending.
    checksums: bytes = b""


class HandoffAccepted(msgspec.Struct, frozen=True, tag="accepted"):
    envelope: Envelope
    transfer_id: str


class CancelTransfer(msgspec.Struct, frozen=True, tag="cancel"):
    envelope: Envelope
    transfer_id: str


class TransferClosed(msgspec.Struct, frozen=True, tag="closed"):
    """The producer has nothing in flight for this transfer, and will post nothing more for it."""

    envelope: Envelope
    transfer_id: str
    reason: str
    handed_over: bool = False  # pull: the acceptance came while the blocks were still held
    is_void: bool = False  # KV of the request turned out wrong: what KVArrived told of is of no use


class RefusalCode(enum.StrEnum):
    # The message addressed another incarnation; the refusal's own sender epoch is 0.
    WRONG_EPOCH = "wrong_epoch"
    INCOMPATIBLE = "incompatible"  # the fingerprints differ
    HANDSHAKE_FAILED = "handshake_failed"  # the transport could not reach the memory that the Hello describes
    HANDSHAKE_REQUIRED = "handshake_required"  # say Hello (again) first
    FOREIGN = "foreign"  # the transfer belongs to another node
    INVALID = "invalid"  # blocks out of range, counts that do not add up
    CONFLICT = "conflict"  # the same transfer is registered with other blocks
    OVERLOADED = "overloaded"  # too many registrations without a request
    MOVE_FAILED = "move_failed"  # a write failed, and parts of it may still arrive


class Refusal(msgspec.Struct, frozen=True, tag="refused"):
    envelope: Envelope
    transfer_id: str  # "" if the refusal is not about one transfer
    code: RefusalCode
    reason: str
    addressed_epoch: int  # the receiver epoch in the refused message


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

"""Node -> node: how a prefill node (the producer) and a decode node (the consumer) agree on one KV transfer.

    consumer                                   producer
       │ ── Hello ──────────────────────────────▶ │   once per pair of epochs: memory agents and fingerprint
       │ ◀────────────────────────────── Welcome ─ │   (or Refused: the fingerprints differ)
       │ ── RegisterDestination ────────────────▶ │   "for this transfer, write to these blocks"
       │ ◀═════════════════ KV written, by chunk ═ │   the connector's transport, not this channel
       │ ── RenewLease ─────────────────────────▶ │   every third of the lease, for all transfers at once
       │ ◀───────────────────────── LeaseRenewed ─ │   also tells a consumer that its producer is alive
       │ ◀──────────────────────── HandoffNotice ─ │   sent when every write has completed at the consumer
       │ ── HandoffAccepted ────────────────────▶ │   the producer may free
       │ ── CancelTransfer ─────────────────────▶ │   instead: the consumer gives up
       │ ◀─────────────────────── TransferClosed ─ │   nothing is in flight; the blocks may be reused

Every message names its sender's epoch and the receiver's epoch it believes in. One that is addressed to
another epoch is answered with Refused and counted, never acted on.
"""

from __future__ import annotations

import msgspec


class CacheFingerprint(msgspec.Struct, frozen=True):
    """What must agree for one node's KV bytes to mean the same on another."""

    model: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    layout: str
    connector: str


class Envelope(msgspec.Struct, frozen=True):
    """Who sends, to which incarnation. Part of every message on this channel."""

    sender_id: str
    sender_epoch: int
    receiver_epoch: int
    reply_to: str


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    envelope: Envelope
    fingerprint: CacheFingerprint
    agent_metadata: bytes  # opaque to all but the connector's transport
    block_bytes: int
    num_blocks: int
    base_address: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    envelope: Envelope
    fingerprint: CacheFingerprint
    agent_metadata: bytes
    block_bytes: int
    num_blocks: int
    base_address: int


class RegisterDestination(msgspec.Struct, frozen=True, tag="register"):
    """`block_ids[g][i]` receives block `first_block[g] + i` of the request, in KV cache group g."""

    envelope: Envelope
    transfer_id: str
    num_tokens: (
        int  # all that the request has when it starts: its prompt, and what it wrote before it moved here
    )
    token_hash: bytes
    first_block: list[int]
    block_ids: list[list[int]]


class RenewLease(msgspec.Struct, frozen=True, tag="renew"):
    envelope: Envelope
    transfer_ids: list[str]


class LeaseRenewed(msgspec.Struct, frozen=True, tag="renewed"):
    """`unknown` are transfers that the producer does not (or no longer) hold: they will never complete."""

    envelope: Envelope
    unknown: list[str]


class HandoffNotice(msgspec.Struct, frozen=True, tag="notice"):
    """Every byte of the request's KV is at the consumer. Accepted only if all of it matches what was asked for."""

    envelope: Envelope
    transfer_id: str
    num_tokens: int
    token_hash: bytes
    first_token: int
    num_bytes: int
    num_blocks: int


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


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    envelope: Envelope
    transfer_id: str  # "" when a Hello is refused
    reason: str


HandoffMessage = (
    Hello
    | Welcome
    | RegisterDestination
    | RenewLease
    | LeaseRenewed
    | HandoffNotice
    | HandoffAccepted
    | CancelTransfer
    | TransferClosed
    | Refused
)

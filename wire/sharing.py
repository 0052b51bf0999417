"""Node -> node: how one node copies chunks of KV out of another's tier in host memory.

    reader                                 owner
       │ ── AskPrefix ──────────────────────▶ │   where groups of layers need different parts of a prefix: "what have you after these blocks?"
       │ ◀───────────────────── PrefixFound ─ │   of each group; nothing is promised. The reader chooses, and asks for that:
       │ ── AskChunks ──────────────────────▶ │   "which of these have you?"
       │ ◀───────────────────── ChunksFound ─ │   those up to the first that it lacks; they stay where they are, under a lease
       │ ═ read, by the transport ══════════▶ │
       │ ── ChunksRead ─────────────────────▶ │   the owner may give them up
       │
       │ ◀──────────────────── ChunksStored ─ │   a mirror is told of what is new, and asks for it, and of what it may give up
       │ ◀─────────────────── TierForgotten ─ │   what was copied from here may be wrong

The reader counts the lease from when it asked, on its own clock, so for the reader it ends first: what had arrived by then is right,
and what arrives later is not used. Any message may be lost, doubled or late. A question without an answer is given up, and a lease
that is not ended ends by itself.

Models with attention windows, chunks or recurrent states need `AskPrefix`: a tier has parts of such groups here and there, and a prefix ends where
all groups have theirs. A node that does not know the message has no tier that is shared for such a model, so it is never asked.

The owner's checksums are of the bytes that it has in the tier. The reader compares them before anything may load the chunks: how many
it wants is its own setting.
"""

from __future__ import annotations

import msgspec

from tandem.wire.handoff import CacheMemory, Envelope

LEASE_S = 10.0
# The reader does not use this share of a lease: clocks do not run at quite the same speed.
SAFETY = 0.1


class AskChunks(msgspec.Struct, frozen=True, tag="ask_chunks"):
    envelope: Envelope
    number: int  # the reader's; the answer has it
    layout: str  # what the bytes of a chunk mean: model, dtype and the order in which they lie
    keys: list[bytes]
    knows_memory: bool  # from an earlier answer of this incarnation
    checksum_every: int = 0  # one of how many chunks shall carry a checksum, and the last; 0: none
    skips: bool = False  # what lacks is passed over, and the answer says which are there


class AskPrefix(msgspec.Struct, frozen=True, tag="ask_prefix"):
    envelope: Envelope
    number: int  # the reader's; the answer has it, and so has what is asked for after it
    layout: str
    hashes: list[bytes]  # of a prompt's blocks, in order


class PrefixFound(msgspec.Struct, frozen=True, tag="prefix_found"):
    envelope: Envelope
    number: int
    # For each group a bit for each hash, the lowest of the first byte first: its block is there, or the whole state after it.
    has: list[bytes]


class ChunksFound(msgspec.Struct, frozen=True, tag="chunks_found"):
    envelope: Envelope
    number: int
    slots: list[
        int
    ]  # of the first keys that were asked for; none when the first is not there, or layouts differ
    memory: CacheMemory | None = None  # the tier's, unless the reader knows it
    checksums: bytes = b""  # of the chunks that shall carry one, eight bytes each
    which: list[int] | None = None  # of the keys that were asked for, in order; None: the first


class ChunksRead(msgspec.Struct, frozen=True, tag="chunks_read"):
    envelope: Envelope
    number: int


class ChunksStored(msgspec.Struct, frozen=True, tag="chunks_stored"):
    envelope: Envelope
    keys: list[bytes]
    gone: list[
        bytes
    ] = []  # of no use any more: a window has moved on, states have been kept after more tokens


class TierForgotten(msgspec.Struct, frozen=True, tag="tier_forgotten"):
    envelope: Envelope


SharingMessage = AskChunks | AskPrefix | PrefixFound | ChunksFound | ChunksRead | ChunksStored | TierForgotten

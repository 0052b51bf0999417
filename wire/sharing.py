"""Node -> node: how one node copies chunks of KV out of another's tier in host memory.

    reader                                 owner
       │ ── AskPrefix ──────────────────────▶ │   only if groups of layers need different parts of a prefix: which
       │                                      │   blocks are there?
       │ ◀───────────────────── PrefixFound ─ │   for each group; promises nothing. The reader chooses parts:
       │ ── AskChunks ──────────────────────▶ │   which of these chunks are there?
       │ ◀───────────────────── ChunksFound ─ │   those up to the first missing one; they keep their slots under
       │                                      │   a lease
       │ ═ read, by the transport ══════════▶ │
       │ ── ChunksRead ─────────────────────▶ │   the owner may evict them
       │
       │ ◀──────────────────── ChunksStored ─ │   to a mirror: new chunks, which it asks for, and chunks that it
       │                                      │   may forget
       │ ◀─────────────────── TierForgotten ─ │   everything that was copied from here may be wrong: the envelope
       │                                      │   names the new generation of the owner's cache

The reader counts the lease from its question, on its own clock, so for the reader the lease ends first. Chunks that
have arrived by then are right; the reader does not use later ones. Any message may be lost, doubled or late. The
reader gives a question up that has no answer, and the owner ends a lease by itself.

Models with attention windows, chunks or recurrent states need `AskPrefix`: a tier has scattered parts of such
groups, and a prefix ends where all groups have theirs. A node that does not know the message shares no tier for such
a model, so no node asks it.

The owner computes its checksums over the bytes in its tier. The reader compares them before anything may load the
chunks. The reader's own setting says how many it wants.
"""

from __future__ import annotations

import msgspec

from tandem.wire.handoff import CacheMemory, Envelope

# How long the owner keeps chunks for a reader. The reader does not hear of the owner's settings, so this is none of them.
LEASE_S = 10.0
# The reader does not use this share of a lease, because clocks run at slightly different speeds.
SAFETY = 0.1


class AskChunks(msgspec.Struct, frozen=True, tag="ask_chunks"):
    envelope: Envelope
    number: int  # the reader's; the answer repeats it
    layout: str  # what a chunk's bytes mean: model, dtype and order of axes
    keys: list[bytes]
    knows_memory: bool  # an earlier answer of this incarnation had the tier's memory
    checksum_every: int = 0  # one chunk of this many, and the last, shall carry a checksum; 0: none
    skips: bool = False  # True: the answer may skip missing chunks, and names those that are there


class AskPrefix(msgspec.Struct, frozen=True, tag="ask_prefix"):
    envelope: Envelope
    number: int  # the reader's; the answer repeats it, and so does the AskChunks that follows
    layout: str
    hashes: list[bytes]  # of a prompt's blocks, in order


class PrefixFound(msgspec.Struct, frozen=True, tag="prefix_found"):
    envelope: Envelope
    number: int
    # For each group one bit for each hash, beginning with the lowest bit of the first byte. It is set if the owner
    # has the block, or all states after it.
    has: list[bytes]


class ChunksFound(msgspec.Struct, frozen=True, tag="chunks_found"):
    envelope: Envelope
    number: int
    # The slots of the found keys, in order. Empty if the first key is missing, or if the layouts differ.
    slots: list[int]
    memory: CacheMemory | None = None  # the tier's, unless the reader knows it
    checksums: bytes = b""  # of the chunks that shall carry one, eight bytes each
    which: list[int] | None = None  # indices of the found keys, in order; None: the first ones


class ChunksRead(msgspec.Struct, frozen=True, tag="chunks_read"):
    envelope: Envelope
    number: int


class ChunksStored(msgspec.Struct, frozen=True, tag="chunks_stored"):
    envelope: Envelope
    keys: list[bytes]
    # Chunks of no more use: a window has moved on, or there are states after more tokens.
    gone: list[bytes] = []


class TierForgotten(msgspec.Struct, frozen=True, tag="tier_forgotten"):
    envelope: Envelope


SharingMessage = AskChunks | AskPrefix | PrefixFound | ChunksFound | ChunksRead | ChunksStored | TierForgotten

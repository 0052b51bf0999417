"""What the two ends of a pair say to each other, beside the bytes: see `kvtransfer.nccl.pair`."""

from __future__ import annotations

import msgspec

from tandem.kvtransfer.protocol.transport import Operation


class Rendezvous(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach a node: what its peers get as CacheMemory.agent_metadata. `key` proves that a caller got it."""

    endpoint: str
    key: bytes
    backend: str


class Open(msgspec.Struct, frozen=True, tag="open", forbid_unknown_fields=True):
    """The caller waits at this store for the other member of its group."""

    pair_id: str
    key: bytes
    caller: str
    reply_to: str
    store_host: str
    store_port: int


class Announce(msgspec.Struct, frozen=True, tag="announce", forbid_unknown_fields=True):
    """Write: these units of yours come next. Read: send these units of yours."""

    pair_id: str
    number: int
    operation: Operation
    transfer_id: str
    unit_bytes: int
    units: list[int]


class Landed(msgspec.Struct, frozen=True, tag="landed", forbid_unknown_fields=True):
    """A write is in the callee's cache; or not, and why."""

    pair_id: str
    number: int
    problem: str = ""


class Leave(msgspec.Struct, frozen=True, tag="leave", forbid_unknown_fields=True):
    """The caller has taken its end down."""

    pair_id: str


PairMessage = Open | Announce | Landed | Leave

"""What rank 0 and another one say to each other while they start, one message in one packet; and what rank 0's machine and another one
of its node say to each other, over a link (`node.ranks.link`)."""

from __future__ import annotations

import msgspec

from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.wire.logs import LogsConfig


class RankOrders(msgspec.Struct, frozen=True):
    """The first packet, to another rank."""

    name: str  # in logs
    rank: int
    size: int
    rendezvous: str  # where ranks find each other: a file, or tcp://ADDRESS:PORT
    host: str  # the address at which this one listens for the others
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    logs: LogsConfig
    cores: list[int]
    stages: int = 1
    kv_memory: int | None = None  # the descriptor of the KV cache that all ranks keep together
    transfers: int | None = None  # of the line by which rank 0 moves what this rank keeps apart
    tiers: int | None = None  # and of that by which it has it copied to tiers


class RankHere(msgspec.Struct, frozen=True, tag=True):
    """It has loaded its libraries, and looks for the others now."""

    device: str  # the kind: cpu or cuda


class RankProgress(msgspec.Struct, frozen=True, tag=True):
    """How far its load has come, as `wire.progress` has it."""

    what: str
    share: float


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """Its part of the model is loaded: steps may come."""


class RankRefused(msgspec.Struct, frozen=True, tag=True):
    """It cannot take part. `operator`: the operator can change that."""

    why: str
    operator: bool


FromRank = RankHere | RankProgress | RankReady | RankRefused

MOST_BYTES = 1 << 20  # of a packet

# ── to another machine of the node ──


class PrepareRanks(msgspec.Struct, frozen=True, tag=True):
    """The first message: find the model."""

    lead: str  # rank 0's end of the link: its endpoint
    machine: int  # this one's number


class BeginRanks(msgspec.Struct, frozen=True, tag=True):
    rendezvous: str


class OneStep(msgspec.Struct, frozen=True, tag=True):
    """For all ranks there."""

    arrays: list[tuple[str, list[int], bytes]]  # dtype, shape, content


class LineBytes(msgspec.Struct, frozen=True, tag=True):
    """In both directions: of the line by which rank 0 moves what this rank keeps."""

    rank: int
    data: bytes


class LeadBeat(msgspec.Struct, frozen=True, tag=True):
    """Rank 0's process lives. `serves`: all ranks are ready."""

    serves: bool


class EndRanks(msgspec.Struct, frozen=True, tag=True):
    at_once: bool  # else each when it has taken what came before


ToMachine = PrepareRanks | BeginRanks | OneStep | LineBytes | LeadBeat | EndRanks

# ── from another machine ──


class RanksPrepared(msgspec.Struct, frozen=True, tag=True):
    """The model is there."""


class MachineProgress(msgspec.Struct, frozen=True, tag=True):
    what: str
    share: float


class RankSaid(msgspec.Struct, frozen=True, tag=True):
    rank: int
    said: RankHere | RankProgress | RankReady


class MachineBeat(msgspec.Struct, frozen=True, tag=True):
    """The process that keeps the machine's ranks lives."""

    steps: int  # that have come


class RanksFailed(msgspec.Struct, frozen=True, tag=True):
    """Why they are ended: the node ends with them. `operator`: the operator can change that."""

    why: str
    operator: bool


class RanksEnded(msgspec.Struct, frozen=True, tag=True):
    """No process of them is left."""


FromMachine = RanksPrepared | MachineProgress | RankSaid | MachineBeat | LineBytes | RanksFailed | RanksEnded

"""Messages between rank 0 and another rank during its start, one per packet; and messages between rank 0's machine and another machine
of the node, over a link (`node.ranks.link`)."""

from __future__ import annotations

import msgspec

from tandem.base.logs import LogsConfig
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig


class RankOrders(msgspec.Struct, frozen=True):
    """The first packet to a rank: everything that it needs to start."""

    name: str  # its name in logs
    rank: int
    size: int
    rendezvous: str  # where ranks find each other: a file, or tcp://ADDRESS:PORT
    host: str  # the address where this rank listens for the others
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    logs: LogsConfig
    cores: list[int]
    stages: int = 1
    contexts: int = 1
    kv_memory: int | None = None  # the descriptor of the KV cache that all ranks share
    # The descriptor of the line by which rank 0 orders transfers of this rank's own KV
    transfers: int | None = None
    # The descriptor of the line by which rank 0 orders copies of this KV to and from tiers
    tiers: int | None = None


class RankHere(msgspec.Struct, frozen=True, tag=True):
    """The rank has loaded its libraries and joins the other ranks now."""

    device: str  # cpu or cuda


class RankProgress(msgspec.Struct, frozen=True, tag=True):
    """How far the rank's load has come, in the terms of `base.progress`."""

    what: str
    share: float


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """The rank has loaded its part of the model and takes steps."""


class RankRefused(msgspec.Struct, frozen=True, tag=True):
    """The rank cannot take part. `operator`: whether the operator can correct the cause."""

    why: str
    operator: bool


FromRank = RankHere | RankProgress | RankReady | RankRefused

MOST_BYTES = 1 << 20  # largest packet

# ── to another machine of the node ──


class PrepareRanks(msgspec.Struct, frozen=True, tag=True):
    """The first message to a machine: find the model."""

    lead: str  # rank 0's end of the link: its endpoint
    machine: int  # the number of the machine that gets this message


class BeginRanks(msgspec.Struct, frozen=True, tag=True):
    rendezvous: str


class OneStep(msgspec.Struct, frozen=True, tag=True):
    """One step's arrays, for all ranks of that machine."""

    arrays: list[tuple[str, list[int], bytes]]  # dtype, shape, content


class LineBytes(msgspec.Struct, frozen=True, tag=True):
    """Bytes of the line by which rank 0 orders transfers of this rank's KV. Sent in both directions."""

    rank: int
    data: bytes


class LeadBeat(msgspec.Struct, frozen=True, tag=True):
    """Rank 0's process is alive. `serves`: whether all ranks are ready."""

    serves: bool


class EndRanks(msgspec.Struct, frozen=True, tag=True):
    at_once: bool  # True: kill them; False: each ends after the steps that it has already got


ToMachine = PrepareRanks | BeginRanks | OneStep | LineBytes | LeadBeat | EndRanks

# ── from another machine ──


class RanksPrepared(msgspec.Struct, frozen=True, tag=True):
    """The machine has the model's files."""


class MachineProgress(msgspec.Struct, frozen=True, tag=True):
    what: str
    share: float


class RankSaid(msgspec.Struct, frozen=True, tag=True):
    rank: int
    said: RankHere | RankProgress | RankReady


class MachineBeat(msgspec.Struct, frozen=True, tag=True):
    """The machine's keeper is alive."""

    steps: int  # how many steps have arrived there


class RanksFailed(msgspec.Struct, frozen=True, tag=True):
    """The machine's ranks are being ended for this reason, so the node ends. `operator`: whether the operator can correct the cause."""

    why: str
    operator: bool


class RanksEnded(msgspec.Struct, frozen=True, tag=True):
    """No process of the machine's ranks is left."""


FromMachine = RanksPrepared | MachineProgress | RankSaid | MachineBeat | LineBytes | RanksFailed | RanksEnded

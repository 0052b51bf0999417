"""What rank 0 and another one say to each other while they start. One message is one packet."""

from __future__ import annotations

import msgspec

from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.wire.logs import LogsConfig


class RankOrders(msgspec.Struct, frozen=True):
    """The first packet, to another rank."""

    name: str  # in logs
    rank: int
    size: int
    rendezvous: str  # a file in which ranks find each other
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

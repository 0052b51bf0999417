"""The settings of transfers and of the cache's tiers: `transfer:` and `cache.tiers` in tandem.yaml."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.base.errors import ConfigurationError
from tandem.base.settings import AtLeastOne, NotEmpty, NotNegative, Seconds, about, fixed


class LoadFailurePolicy(enum.StrEnum):
    RECOMPUTE = "recompute"  # the decode node computes the missing KV itself
    FAIL = "fail"  # the request ends with a KVLoadFailed


class ChecksumPolicy(enum.StrEnum):
    """Which of the blocks on the way carry a checksum. The receiver compares it before it uses the block."""

    ALL = "all"
    # One of 16, and each transfer's last; every block from a node that has sent a wrong one.
    SAMPLE = "sample"
    OFF = "off"


# A consumer waits for the end of a lease that it cannot revoke, so it refuses a producer with a longer lease.
MAX_LEASE_S = 3600.0


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`transfer:` in tandem.yaml."""

    # fmt: off
    connector: Annotated[NotEmpty, about("`nixl`, `nccl`, or `package.module:factory`: [connectors](connectors.md)")] = "nixl"
    direction: Annotated[Literal["push", "pull"], about(
        "`push`: the prefill node writes; `pull`: the decode node reads"
    )] = "push"
    lease_s: Annotated[Annotated[float, Meta(gt=0, le=MAX_LEASE_S)], fixed(
        "a prefill node holds blocks for this long when the lease is not renewed; decode nodes renew it beside their steps"
    )] = 10.0
    timeout_s: Annotated[Seconds, about(
        "how long a decode node waits for one transfer, once the prompt is being computed"
    )] = 60.0
    handshake_timeout_s: Annotated[Seconds, fixed(
        "for two nodes to get to know each other; it is a few messages, and a failure makes the decode node read the prompt"
    )] = 5.0
    on_failure: Annotated[LoadFailurePolicy, about(
        "`recompute`: the decode node reads the prompt itself; `fail`: the request fails with `kv_load_failed`, and no node "
        "computes its prompt again"
    )] = LoadFailurePolicy.RECOMPUTE
    patience_s: Annotated[Seconds, fixed(
        "a transfer is given up when waiting for it, at its link's recent rate, would take this much longer than computing the "
        "rest on the decode node; both rates are measured"
    )] = 1.0
    checksums: Annotated[ChecksumPolicy, about(
        "which blocks the receiver checks before it uses them: `all`, a `sample` (one of 16, and all from a node that has sent "
        "a wrong one), or `off`"
    )] = ChecksumPolicy.SAMPLE
    canary_share: Annotated[Annotated[float, Meta(ge=0, le=1)], fixed(
        "share of received prompts that a decode node computes again in idle time, to compare the KV; differences that rounding "
        "does not explain count as `wrong_kv`"
    )] = 0.01
    options: Annotated[dict[str, str], about("the connector's own options: [connectors](connectors.md#nixl)")] = {}
    # fmt: on


class EvictionPolicy(enum.StrEnum):
    """Which blocks a full tier evicts."""

    LRU = "lru"  # those unused for the longest time
    ARC = "arc"  # weighs new blocks against blocks used again, by which of them it evicted too soon


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of `cache.tiers`: a place to which full blocks are copied, and from which they are loaded."""

    cpu: Annotated[int, Meta(ge=1)] | None = None  # bytes of host memory, of each node
    disk: str | None = None  # a folder, in which each node of a machine takes a file of `size` bytes
    size: Annotated[int, Meta(ge=1)] | None = None
    policy: EvictionPolicy = EvictionPolicy.LRU
    block_factor: AtLeastOne = 1  # this many blocks of the device are kept, found and evicted together
    store_threshold: NotNegative = 0  # a block is stored once this many requests had it; 0 and 1: at once
    spec: str = ""  # `synthetic`, or "package.module:factory" of a tier of another kind
    options: dict[str, Any] = {}  # for the spec alone

    def __post_init__(self) -> None:
        if [bool(self.cpu), bool(self.disk), bool(self.spec)].count(True) != 1:
            raise ConfigurationError(
                "cache.tiers: each entry is one of {cpu: 8GiB}, {disk: /folder, size: 100GiB} and "
                "{spec: package.module:factory}"
            )
        if bool(self.disk) != (self.size is not None):
            raise ConfigurationError("cache.tiers: `disk` and `size` go together: {disk: /folder, size: 100GiB}")
        if self.options and not self.spec:
            raise ConfigurationError("cache.tiers: options are of a spec of your own; cpu and disk have none")

    @property
    def kind(self) -> str:
        return self.spec or ("cpu" if self.cpu else "disk")

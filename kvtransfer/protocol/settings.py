"""Durations and limits of the protocol, and the options that every connector of it has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.kvtransfer.config import MAX_LEASE_S, LoadFailurePolicy, TransferConfig
from tandem.kvtransfer.protocol.transport import Direction


class ProtocolSettings(msgspec.Struct, frozen=True, kw_only=True):
    lease_s: float  # this and the next two are the user's: `TransferConfig`
    timeout_s: float
    handshake_timeout_s: float
    retry_s: float = 0.25  # a question without an answer is sent again after this long
    renew_s: float = 1.0
    # A peer that owes an answer for this long is probed: does its process run, does its machine answer?
    probe_s: float = 0.5
    silent_s: float = 2.0  # the longest wait for an answer that a peer may never send
    # What a process had sent before it ended has certainly arrived after this long.
    margin_s: float = 0.5
    # A link over which no transfer runs is dropped after this long, because the peer may be gone for good.
    keep_link_s: float = 600.0
    # A transfer is given up if it would take this much longer than computing the missing tokens here.
    patience_s: float = 1.0
    # A link's pace is measured over at least this long, and a producer reports no wait that is shorter.
    pace_s: float = 0.5
    tell_pace_s: float = 0.25  # the producer reports a slow link to a consumer at most this often
    # For this long after a report, the consumer begins no transfer over that link that it would give up.
    keep_pace_s: float = 5.0
    progress_s: float = 0.002  # the producer reports arrived grains to a consumer at most this often
    tick_s: float = 0.05  # deadlines are checked this often while there are any
    # The bytes of one write or read. Larger ones are split, so that the lease is checked in between.
    max_post_bytes: int = 32 << 20
    # Over a slow link, a post has as many bytes as it moves in `post_s`, and at least `min_post_bytes`. No more are in
    # flight than it moves in `link_s`, so that its pace is seen early.
    min_post_bytes: int = 1 << 20
    post_s: float = 0.1
    link_s: float = 1.0
    # The bytes of all writes, or all reads, in flight between two nodes. They cannot be taken back: over a slow link a
    # transfer that was given up keeps its blocks until they have moved.
    max_link_bytes: int = 64 << 20
    # Descriptors of one post, if a block is not one run of bytes on both sides.
    max_post_runs: int = 16_384
    layerwise_posts: int = 10  # a chunk that goes layer by layer is split into about this many writes
    # A node is left out, for `keep_link_s`, after this many transfers from it arrived wrong.
    max_wrong: int = 3
    # Registrations that arrive before their request: how many are kept, and how many places their block tables may have
    # in all, null blocks included.
    max_early_registrations: int = 4096
    max_early_places: int = 4 << 20
    max_remembered: int = 16_384  # ids of closed transfers

    @property
    def remember_s(self) -> float:
        """How long a closed transfer's id is remembered: no message about it can be later than this."""
        return 2 * (self.timeout_s + self.lease_s)

    @classmethod
    def from_config(cls, config: TransferConfig) -> ProtocolSettings:
        for name in ("lease_s", "timeout_s", "handshake_timeout_s"):
            if not getattr(config, name) > 0:
                raise ConfigurationError(f"transfer.{name} must be above 0, not {getattr(config, name)}")
        if config.lease_s > MAX_LEASE_S:
            raise ConfigurationError(f"transfer.lease_s must be at most {MAX_LEASE_S:g}, not {config.lease_s:g}")
        return cls(
            lease_s=config.lease_s,
            timeout_s=config.timeout_s,
            handshake_timeout_s=config.handshake_timeout_s,
            # A lease has time for three renewals, so that one lost message costs nothing.
            renew_s=min(1.0, config.lease_s / 3),
            probe_s=min(0.5, config.lease_s / 4),
            silent_s=min(2.0, config.lease_s / 2),
            margin_s=max(0.25, config.lease_s / 20),
            retry_s=min(0.25, config.lease_s / 6),
            # With `on_failure: fail` a request fails without its KV, so it waits for it.
            patience_s=config.patience_s if config.on_failure is LoadFailurePolicy.RECOMPUTE else math.inf,
        )


class ProtocolOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # A step with at least this many prompt tokens sends their KV while it computes, a few layers at a time; 0 is never.
    # A smaller step's KV is sent in a millisecond or two; more messages and descriptors would cost as much.
    layerwise_tokens: int = 128


Options = TypeVar("Options", bound=ProtocolOptions)


def parse_options(kind: type[Options], connector: str, options: Mapping[str, str]) -> Options:
    try:
        parsed = msgspec.convert(dict(options), kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"transfer.options of the {connector} connector: {error}") from None
    if parsed.layerwise_tokens < 0:
        raise ConfigurationError(f"transfer.options.layerwise_tokens must be at least 0, not {parsed.layerwise_tokens}")
    return parsed


def parse_direction(direction: str) -> Direction:
    try:
        return Direction(direction)
    except ValueError:
        known = ", ".join(direction.value for direction in Direction)
        raise ConfigurationError(f"transfer.direction must be one of {known}, not {direction!r}") from None

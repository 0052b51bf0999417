"""This node, as both halves of the protocol see it: who it is, what moves its bytes, what its messages leave by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec

from tandem.kvtransfer.base import ChecksumPolicy
from tandem.kvtransfer.protocol.checksums import Checksums
from tandem.kvtransfer.protocol.geometry import PoolGeometry
from tandem.kvtransfer.protocol.identity import Clock, Identity
from tandem.kvtransfer.protocol.settings import Settings
from tandem.kvtransfer.protocol.statistics import Recorder
from tandem.kvtransfer.protocol.transport import Direction, Transport
from tandem.wire.handoff import ProcessIdentity

Send = Callable[[str, msgspec.Struct], None]
"""To an endpoint. Never blocks."""

Forget = Callable[[str], None]
"""Nobody is at this endpoint any more, or nobody that we still talk to: nothing is kept for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    me: Identity
    geometry: PoolGeometry
    direction: Direction
    transport: Transport
    settings: Settings
    send: Send
    forget: Forget
    clock: Clock
    recorder: Recorder
    process: ProcessIdentity
    checksums: Checksums
    checksum_policy: ChecksumPolicy

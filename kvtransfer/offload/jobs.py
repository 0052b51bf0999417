"""What the scheduler half of a tier plans and remembers: a step's copies, a copy that goes on, a request with copies."""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Sequence

from tandem.kvtransfer.base import ConnectorMetadata, TransferRequest, WorkerMetadata
from tandem.kvtransfer.offload.manager import StoreRoom
from tandem.kvtransfer.offload.policies import Key
from tandem.kvtransfer.offload.spec import Copy

# See `BLOCKS_BEHIND` in `scheduler_half`.
CHECKPOINTS_KEPT = 3


@dataclasses.dataclass(slots=True)
class TierPlan(ConnectorMetadata):
    """One step's copies."""

    loads: list[Copy] = dataclasses.field(default_factory=list)
    stores: list[Copy] = dataclasses.field(default_factory=list)  # of blocks that are already computed
    stores_after: list[Copy] = dataclasses.field(default_factory=list)  # of blocks that this step computes
    reads: list[int] = dataclasses.field(default_factory=list)  # see ConnectorMetadata


@dataclasses.dataclass(slots=True)
class EndedJobs(WorkerMetadata):
    jobs: dict[int, bool | None]  # by number: see Mover.take_ended


@dataclasses.dataclass(slots=True)
class Load:
    request_id: str
    num_tokens: int  # the request's tokens with KV once the load is done
    keys: list[Key]
    slots: list[int]
    tokens: int  # how many of them the load brings
    began: float
    void: bool = False  # the loaded KV is no longer valid


@dataclasses.dataclass(slots=True)
class Store:
    request_id: str
    room: StoreRoom
    offered: Sequence[Key]  # all that the tier has when the store has ended
    reads: Sequence[int] = ()  # blocks that the request may give up, or has given up, before it has
    blocks: Sequence[int] = ()  # all that it copies, until the request has given them up


@dataclasses.dataclass(slots=True)
class Entry:
    """A request, until it has ended and no copy uses its blocks."""

    request: TransferRequest
    cursor: int = 0  # chunks that were offered to the tier since the last admission
    due: int = -1  # the next step that looks at the request
    looked: int = -1  # the last step that did
    asked: bool = False  # `touch` was called since the request last had no blocks
    counted: bool = False  # found tokens were counted since then
    fetched: bool = False  # a copy from another node was considered since then
    sought: bool = False  # the tier was to find out what it has since then
    question: Key | None = None  # the last of the keys that it looks for now
    ended: bool = False
    jobs: set[int] = dataclasses.field(default_factory=set)
    # Only for a mirrored answer: how many blocks of its windows were offered, what is stored for it alone (by group,
    # with its place), and after how many blocks its checkpoints are.
    windows: int = 0
    trail: defaultdict[int, deque[tuple[int, Key]]] = dataclasses.field(default_factory=lambda: defaultdict(deque))
    checkpoints: deque[int] = dataclasses.field(default_factory=lambda: deque(maxlen=CHECKPOINTS_KEPT))

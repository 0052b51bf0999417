"""The data of the page at /ui and of `tandem top`: the whole cluster as its router sees it, and, with several
router processes on one port, the sums of all."""

from __future__ import annotations

import msgspec

from tandem.router.recent import Moment, RequestAccount, SlowRequest, Trouble

SLOWEST_SHOWN = 12


class NodeRow(msgspec.Struct, frozen=True, array_like=True):
    """One node. Sent as an array without names, because a page may ask for a thousand of these every
    second."""

    node_id: str
    role: str
    state: str
    why: str  # why it gets no requests; "" when it does
    running: int = 0
    waiting: int = 0
    loading: int = 0
    waiting_tokens: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    cached_blocks: int = 0
    held_blocks: int = 0
    transfers: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    preemptions: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0  # computed
    step_s: float = 0.0
    tiers: list[tuple[str, int, int]] = []  # name, bytes in use, bytes in all
    notes: list[str] = []  # what an operator should know of it although it serves


class PoolRow(msgspec.Struct, frozen=True):
    role: str
    wanted: int
    ready: int
    starting: int
    waiting: int  # for a machine


class Pair(msgspec.Struct, frozen=True):
    """The transfers from one node to another that are under way."""

    source: str
    target: str
    transfers: int
    tokens: int
    longest_s: float


class ProcessState(msgspec.Struct, frozen=True):
    """One of several router processes on a port."""

    name: str
    answers: bool  # whether it answers the process that asks
    running: int = 0
    queued: int = 0
    unhealthy: str | None = None


class RouterState(msgspec.Struct, frozen=True):
    model: str
    version: str
    policy: str
    unhealthy: str | None
    draining: bool
    running: int
    queued: int
    queue_limit: int
    places: int
    places_held: int
    oldest_wait_s: float
    handover_s: float | None
    paused: list[str] = []  # pools and nodes that get no new requests
    processes: list[ProcessState] = []  # the processes on its port; empty when it is the only one
    tells_decisions: bool = False  # whether /ui/decisions answers who may see this


class PageState(msgspec.Struct, frozen=True):
    now: float  # time of day
    router: RouterState
    ttft_s: float  # the targets
    inter_token_s: float
    nodes: list[NodeRow]
    moving: list[Pair]
    moments: list[Moment]
    latest: list[RequestAccount]
    slowest: list[SlowRequest]
    troubles: list[Trouble] = []  # of the last ten minutes, the latest first
    pools: list[PoolRow] = []  # as the controller knows them; empty without one

"""What the page at /ui and `tandem top` are told: the whole cluster at once, as its router sees it."""

from __future__ import annotations

import msgspec

from tandem.router.recent import Moment, RequestAccount, SlowRequest


class NodeRow(msgspec.Struct, frozen=True, array_like=True):
    """A thousand of these are asked for every second: so without names."""

    node_id: str
    role: str
    state: str
    why: str  # it gets no requests; "" when it does
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
    tiers: list[tuple[str, int, int]] = []  # name, bytes in use, bytes


class Pair(msgspec.Struct, frozen=True):
    """KV that moves from one node to another now."""

    source: str
    target: str
    transfers: int
    tokens: int
    longest_s: float


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

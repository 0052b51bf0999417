"""The data of the page at /ui and of `tandem top`: the whole cluster as its router sees it, and, with several
router processes on one port, the sums of all."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tandem.router.recent import LATEST, TROUBLES, WINDOW_S, Moment, RequestAccount, SlowRequest, Trouble

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


def together(own: PageState, name: str, others: Mapping[str, PageState], silent: Sequence[str]) -> PageState:
    """Adds up the pages of several processes. `own`: the page of the asked process, whose name is `name`;
    nodes are taken from it."""
    pages = {name: own, **others}
    processes = [
        ProcessState(name, True, page.router.running, page.router.queued, page.router.unhealthy)
        for name, page in pages.items()
    ]
    routers = [page.router for page in pages.values()]
    router = msgspec.structs.replace(
        own.router,
        running=sum(one.running for one in routers),
        queued=sum(one.queued for one in routers),
        queue_limit=sum(one.queue_limit for one in routers),
        places=sum(one.places for one in routers),
        places_held=sum(one.places_held for one in routers),
        oldest_wait_s=max(one.oldest_wait_s for one in routers),
        processes=processes + [ProcessState(one, False) for one in silent],
    )
    all_of = list(pages.values())
    return msgspec.structs.replace(
        own,
        router=router,
        moving=_pairs(pair for page in all_of for pair in page.moving),
        moments=_moments(moment for page in all_of for moment in page.moments),
        latest=sorted((one for page in all_of for one in page.latest), key=lambda one: one.ended_at)[
            -LATEST:
        ],
        slowest=heapq.nlargest(
            SLOWEST_SHOWN, (slow for page in all_of for slow in page.slowest), key=lambda slow: slow.excess
        ),
        troubles=_troubles(trouble for page in all_of for trouble in page.troubles),
    )


def _troubles(troubles: Iterable[Trouble]) -> list[Trouble]:
    """A request belongs to one process; a node's loss is seen by all."""
    found: dict[tuple[object, ...], Trouble] = {}
    for one in troubles:
        known = found.get(one.key, one)
        counts = [one.count] if known is one else [known.count, one.count]
        found[one.key] = msgspec.structs.replace(
            max(known, one, key=lambda each: each.at),
            count=max(counts) if one.what == "node" else sum(counts),
        )
    return sorted(found.values(), key=lambda one: -one.at)[:TROUBLES]


def _pairs(pairs: Iterable[Pair]) -> list[Pair]:
    found: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        key = (pair.source, pair.target)
        known = found.get(key)
        found[key] = (
            pair
            if known is None
            else Pair(
                *key,
                known.transfers + pair.transfers,
                known.tokens + pair.tokens,
                max(known.longest_s, pair.longest_s),
            )
        )
    return sorted(found.values(), key=lambda pair: -pair.transfers)


def _moments(moments: Iterable[Moment]) -> list[Moment]:
    found: dict[float, Moment] = {}
    for moment in moments:
        known = found.setdefault(moment.began, Moment(moment.began))
        for field in Moment.__struct_fields__:
            if field in ("worst_first_s", "restarts"):
                setattr(known, field, max(getattr(known, field), getattr(moment, field)))
            elif field != "began":
                setattr(known, field, getattr(known, field) + getattr(moment, field))
    latest = max(found, default=0.0)
    return [found[began] for began in sorted(found) if began > latest - WINDOW_S]

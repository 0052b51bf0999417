"""The page's figures of several processes added up."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tandem.router.page_state import SLOWEST_SHOWN, PageState, Pair, ProcessState
from tandem.router.recent import LATEST, TROUBLES, WINDOW_S, Moment, Trouble


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

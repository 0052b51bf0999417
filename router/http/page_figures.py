"""The page's figures of this process, and of all on its port."""

from __future__ import annotations

import importlib.metadata
from collections import Counter

from tandem.router.http.services import Services
from tandem.router.page_state import SLOWEST_SHOWN, PageState, Pair, RouterState

VERSION = importlib.metadata.version("tandem-serve")
_MOST_PAIRS = 200  # the most pairs of nodes shown with transfers under way, the busiest first


async def page_of_all(services: Services) -> PageState:
    """Returns the page's figures of all processes, without nodes, which every process knows alike."""
    return await services.add_pages(page_of(services))


def page_of(services: Services) -> PageState:
    """Returns the page's figures of this process, without nodes."""
    dispatcher, config = services.dispatcher, services.config
    admission, recent = dispatcher.admission, dispatcher.recent
    return PageState(
        now=recent.now(),
        router=RouterState(
            model=config.model_name,
            version=VERSION,
            policy=config.policy.value,
            unhealthy=services.why_unhealthy(),
            draining=services.draining,
            paused=sorted(services.pool.paused),
            running=dispatcher.running,
            queued=admission.queued,
            queue_limit=config.limits.queued,
            places=admission.capacity,
            places_held=admission.held,
            oldest_wait_s=admission.oldest_wait_s(),
            handover_s=services.pool.handover.value,
            tells_decisions=services.tells_decisions,
        ),
        ttft_s=recent.targets.ttft_s,
        inter_token_s=recent.targets.inter_token_s,
        nodes=[],
        moving=_pairs(dispatcher.moving()),
        moments=recent.moments(),
        latest=recent.latest(),
        slowest=recent.slowest(SLOWEST_SHOWN),
        troubles=recent.troubles(),
    )


def _pairs(moving: list[tuple[str, str, float, int]]) -> list[Pair]:
    counts: Counter[tuple[str, str]] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    longest: dict[tuple[str, str], float] = {}
    for source, target, seconds, size in moving:
        pair = (source, target)
        counts[pair] += 1
        tokens[pair] += size
        longest[pair] = max(longest.get(pair, 0.0), seconds)
    return [
        Pair(*pair, count, tokens[pair], longest[pair]) for pair, count in counts.most_common(_MOST_PAIRS)
    ]

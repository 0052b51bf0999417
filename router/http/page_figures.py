"""What this router shows of its cluster: its own figures, or those of all processes on its port, and the nodes."""

from __future__ import annotations

import importlib.metadata
from collections import Counter

from tandem.router.http.services import Services
from tandem.router.member import Member
from tandem.router.page_state import SLOWEST_SHOWN, NodeRow, PageState, Pair, PoolRow, RouterState
from tandem.wire.endpoints import shown
from tandem.wire.versions import WIRE_VERSION

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
            local_prefill=config.local_prefill.value,
            inbox=shown(services.links.endpoint),
            wire_version=WIRE_VERSION,
            forecasts=services.pool.forecasts,
        ),
        ttft_s=recent.targets.ttft_s,
        inter_token_s=recent.targets.inter_token_s,
        nodes=[],
        moving=_pairs(dispatcher.moving()),
        moments=recent.moments(),
        latest=recent.latest(),
        slowest=recent.slowest(SLOWEST_SHOWN),
        troubles=recent.troubles(),
        pools=_pools(services),
        nodes_since=recent.now() - (services.pool.now() - services.pool.nodes_since),
    )


def node_rows(services: Services) -> list[NodeRow]:
    """Returns the members, and the nodes that should serve and are none."""
    pool = services.pool
    rows = [
        NodeRow.of(
            member.info.node_id,
            member.info.role.value,
            state_of(member),
            pool.unusable(member) or "",
            member.reported,
            member.counters,
            member.rates.step_s or 0.0,
        )
        for member in pool.members
    ]
    return rows + [
        NodeRow(name, role.value, state, why or state, is_silent=True) for name, role, state, why in pool.absent()
    ]


def state_of(member: Member) -> str:
    if member.lost:
        return "lost"
    return member.reported.state.value if member.reported is not None else "unknown"


def _pools(services: Services) -> list[PoolRow]:
    ready = services.pool.ready_by_role()
    return [
        PoolRow(one.role.value, one.wanted, ready[one.role], one.starting, one.waiting)
        for one in services.pool.reports
        if one.wanted or ready[one.role]
    ]


def _pairs(moving: list[tuple[str, str, float, int]]) -> list[Pair]:
    counts: Counter[tuple[str, str]] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    longest: dict[tuple[str, str], float] = {}
    for source, target, seconds, size in moving:
        pair = (source, target)
        counts[pair] += 1
        tokens[pair] += size
        longest[pair] = max(longest.get(pair, 0.0), seconds)
    return [Pair(*pair, count, tokens[pair], longest[pair]) for pair, count in counts.most_common(_MOST_PAIRS)]

"""What else a request could have been given to, and what was expected of that: for traces, after the decision."""

from __future__ import annotations

import heapq

import msgspec

from tandem.router.policy.costs import best_prefill_rate, decode_wait_s, prefill_wait_s
from tandem.router.policy.types import PoolSnapshot, RoutingDecision, RoutingRequest

SHOWN = 3  # of each pool


class Alternative(msgspec.Struct, frozen=True):
    """A node that was chosen, or one of the best that were not."""

    node_id: str
    role: str
    chosen: bool
    expected_s: (
        float  # of a prefill node until the first token; of a decode node what it costs to be decoded there
    )
    cached_tokens: int  # of the prompt, that it likely has
    waiting_tokens: int  # of prompts, before this one


def alternatives(
    pools: PoolSnapshot, request: RoutingRequest, decision: RoutingDecision
) -> list[Alternative]:
    found: list[Alternative] = []
    for nodes, chosen, decode in (
        (pools.prefill, decision.prefill, False),
        (pools.decode, decision.decode, True),
    ):
        wait_s, assumed = (decode_wait_s if decode else prefill_wait_s), best_prefill_rate(nodes)
        told = [
            Alternative(
                node.node_id,
                node.info.role.value,
                chosen is not None and node.node_id == chosen.node_id,
                wait_s(node, request, assumed),
                request.cached.get(node.node_id, 0),
                node.queued_tokens,
            )
            for node in nodes
        ]
        others = [one for one in told if not one.chosen]
        found += [one for one in told if one.chosen]
        found += heapq.nsmallest(SHOWN, others, key=lambda one: one.expected_s)
    return found

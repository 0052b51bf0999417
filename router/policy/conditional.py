"""Conditional P/D: some prompts cost more to send away than to read where they will be decoded."""

from __future__ import annotations

from tandem.router.policy.costs import known_prefill_rate
from tandem.router.policy.types import NodeSnapshot, PoolSnapshot, RoutingRequest

# A stream that stands still for longer is seen to. Decode nodes are there so that none does because of others' prompts.
_UNNOTICED_S = 0.05


def reason_to_prefill_locally(
    pools: PoolSnapshot, request: RoutingRequest, prefill: NodeSnapshot, decode: NodeSnapshot
) -> str | None:
    """None: send it away, which is also the answer while the rates are not yet measured.

    Both costs are in seconds of somebody's waiting. Sent away, this request alone waits: for the prefill node's
    queue, for its prompt, and for the handover. Read locally, it waits for its prompt behind what is queued on
    the decode node, and everybody who is being decoded there waits as long as its prompt takes. That must be less
    than anybody notices, however long the line elsewhere is.
    """
    away_rate = known_prefill_rate(prefill, pools.prefill)
    local_rate = known_prefill_rate(decode, (*pools.decode, *pools.prefill))
    if away_rate is None or local_rate is None or pools.handover_s is None:
        return None
    reading = request.uncached(decode) / local_rate
    if decode.load and reading > _UNNOTICED_S:
        return None
    local = decode.queued_tokens / local_rate + reading * (1 + decode.status.running)
    away = (prefill.queued_tokens + request.uncached(prefill)) / away_rate + pools.handover_s
    if local >= away:
        return None
    return (
        f"{request.uncached(decode)} uncached tokens cost {local * 1000:.0f} ms here "
        f"and {away * 1000:.0f} ms sent to {prefill.node_id}"
    )

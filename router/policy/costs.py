"""Expected waits, in seconds, from what was measured. Where nothing was, the order still comes out right:
the unknown rate is the same assumption for every node."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.router.policy.types import NodeView, PoolSnapshot, RoutingRequest
from tandem.wire.nodes import Role

# Only for comparing nodes before anything has been measured; never for deciding whether to send a prompt away.
ASSUMED_PREFILL_TOKENS_PER_S = 1000.0
ASSUMED_STEP_S = 0.02


def best_prefill_rate(nodes: Iterable[NodeView]) -> float | None:
    """The best that was measured of them. Pools are of like machines, so it is what is assumed of the others."""
    return max(
        [rate for node in nodes if (rate := node.rates.prefill_tokens_per_s) is not None], default=None
    )


def prefill_wait_s(node: NodeView, request: RoutingRequest, assumed: float | None) -> float:
    """Until the first token: everything queued there, then what of this prompt is not cached there, and what a tier has to be loaded. `assumed`: the rate of a node
    that was not measured."""
    rate = node.rates.prefill_tokens_per_s or assumed or ASSUMED_PREFILL_TOKENS_PER_S
    return (node.queued_tokens + request.uncached(node)) / rate + request.loading_s.get(node.node_id, 0.0)


def line_wait_s(node: NodeView) -> float:
    """Until a prompt that comes now is begun there. 0 while no rate was measured."""
    rate = node.rates.line_tokens_per_s or node.rates.prefill_tokens_per_s
    return node.queued_tokens / rate if rate else 0.0


def prefill_cost_s(node: NodeView, request: RoutingRequest, assumed: float | None) -> float:
    """Its wait, and its own computing once more: requests that come after it wait for that too."""
    rate = node.rates.prefill_tokens_per_s or assumed or ASSUMED_PREFILL_TOKENS_PER_S
    wait = (node.queued_tokens + 2 * request.uncached(node)) / rate
    return wait + request.loading_s.get(node.node_id, 0.0)


def decode_wait_s(node: NodeView, request: RoutingRequest, assumed: float | None) -> float:
    """What it costs to be decoded there: a longer step for each that shares it, prompts that are read in between
    (its own too, on a node that does both), and a wait if blocks are short.

    Blocks come back as running requests end; with `r` running, `r` tokens' worth of blocks are being used per
    step, so the wait for a block is about as long as it takes to fill one.
    """
    step = node.rates.step_s or ASSUMED_STEP_S
    block_size = node.info.block_size
    needed = node.info.blocks_for(request.prompt_tokens + request.max_new_tokens)
    missing = max(0, needed - node.room_blocks)
    wait_for_blocks = missing * block_size * step / max(1, node.status.running)
    reading = node.queued_tokens
    if node.info.role is Role.AGGREGATED:
        reading += request.uncached(node)
    rate = node.rates.prefill_tokens_per_s or assumed or ASSUMED_PREFILL_TOKENS_PER_S
    loading = request.loading_s.get(node.node_id, 0.0) if node.info.role is Role.AGGREGATED else 0.0
    return wait_for_blocks + reading / rate + loading + node.load * step


# A stream that stands still for longer is seen to. Decode nodes are there so that none does because of others' prompts.
_UNNOTICED_S = 0.05


def reason_to_prefill_locally(
    pools: PoolSnapshot, request: RoutingRequest, prefill: NodeView, decode: NodeView
) -> str | None:
    """None: send it away, which is also the answer while the rates are not yet measured.

    Both costs are in seconds that requests wait. Sent away, this request alone waits: for the prefill node's
    queue, for its prompt, and for the handover. Read locally, it waits for its prompt after what is queued on
    the decode node, and every request that decodes there waits as long as its prompt takes. That must be less
    than a user notices, however long the line elsewhere is.
    """
    away_rate = prefill.rates.prefill_tokens_per_s or best_prefill_rate(pools.prefill)
    local_rate = decode.rates.prefill_tokens_per_s or best_prefill_rate((*pools.decode, *pools.prefill))
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

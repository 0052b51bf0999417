"""Which other nodes have to do with a request's KV: one that likely has more of the prompt than the node that reads it, and one that
copies its blocks while it runs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import msgspec

from tandem.router.policy.types import NodeSnapshot, PoolSnapshot, RoutingDecision, RoutingRequest
from tandem.wire.nodes import NodeInfo


def at_mirror(request: RoutingRequest, decode: Mapping[str, NodeSnapshot]) -> RoutingDecision | None:
    """A request whose node is gone goes where its KV is; None where there is no such node any more. `decode`: by name, those in view."""
    mirror = request.mirror
    if mirror is None or mirror.node_id in request.avoid:
        return None
    view = decode.get(mirror.node_id)
    if view is None or view.info != mirror:
        return None
    return RoutingDecision(None, mirror, f"{mirror.node_id} has copies of its KV")


def with_cache_peers(
    decision: RoutingDecision,
    candidates: PoolSnapshot,
    cached: Mapping[str, int],
    decode: Mapping[str, NodeSnapshot],
    names: Sequence[str],
) -> RoutingDecision:
    """`cached`: by node, how many of the prompt's leading tokens it likely has. `names`: those of `decode`, in order."""
    reader = decision.prefill or decision.decode
    source = mirror = None
    if reader is not None and reader.tier_endpoint:
        nodes = [view.info for view in (*candidates.prefill, *candidates.decode) if view.info.tier_endpoint]
        best = max(nodes, key=lambda node: cached.get(node.node_id, 0), default=reader)
        if cached.get(best.node_id, 0) >= cached.get(reader.node_id, 0) + reader.block_size:
            source = best
    if decision.decode is not None and decision.decode.mirrors:
        mirror = _next_after(decision.decode, decode, names)
    if source is None and mirror is None:
        return decision
    return msgspec.structs.replace(decision, source=source, mirror=mirror)


def _next_after(node: NodeInfo, decode: Mapping[str, NodeSnapshot], names: Sequence[str]) -> NodeInfo | None:
    """In a ring by their names: each is the mirror of one, and requests of one node that share a prefix share its copy."""
    first = bisect_right(names, node.node_id)
    for step in range(len(names)):
        info = decode[names[(first + step) % len(names)]].info
        if info.mirrors and info.node_id != node.node_id:
            return info
    return None

"""What a policy sees and answers, and how long it expects a request to wait at a node, in seconds, from what was measured.

Where nothing was measured, the order still comes out right: the unknown rate is the same assumption for every node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import xxhash

from tandem.router.rates import NodeRates
from tandem.wire.nodes import NodeInfo, Role
from tandem.wire.requests import NodeStatus

# Only for comparing nodes before anything has been measured; never for deciding whether to send a prompt away.
ASSUMED_PREFILL_TOKENS_PER_S = 1000.0
ASSUMED_STEP_S = 0.02


def blocks_for(tokens: int, node: NodeInfo) -> int:
    """About how many a request of so many tokens takes there."""
    return (-(-tokens // node.block_size) if node.keeps_tokens else 0) + node.state_blocks


class NodeView(msgspec.Struct, gc=False):
    """A node that may be chosen: its last status, and what this router has sent it since. There is one for as long as requests may go to
    the node, and the pool writes it with every status and every request; policies read it."""

    info: NodeInfo
    status: NodeStatus
    rates: NodeRates
    pending_requests: int = 0
    pending_tokens: int = 0
    pending_blocks: int = 0
    # The shortlist's: where it stands there.
    place: int | None = None
    is_idle: bool = False

    @property
    def room_blocks(self) -> int:
        """Blocks that are free and that no request there is expected to take. Below 0 when some will have to wait."""
        status = self.status
        return status.free_blocks + status.pinned_blocks - status.wanted_blocks - self.pending_blocks

    def has_room(self, tokens: int) -> bool:
        """Whether a request that takes so many tokens' blocks would find them. A node without work takes any."""
        return self.load == 0 or self.room_blocks >= blocks_for(tokens, self.info)

    @property
    def room_tokens(self) -> int:
        """How long a request that finds its blocks may be."""
        left = self.room_blocks - self.info.state_blocks
        if left < 0:
            return 0
        return left * self.info.block_size if self.info.keeps_tokens else self.info.max_model_len

    @property
    def node_id(self) -> str:
        return self.info.node_id

    @property
    def queued_tokens(self) -> int:
        return self.status.waiting_tokens + self.pending_tokens

    @property
    def load(self) -> int:
        return self.status.running + self.status.waiting + self.pending_requests


class PoolSnapshot(msgspec.Struct, frozen=True):
    prefill: tuple[NodeView, ...]
    decode: tuple[NodeView, ...]  # decode nodes, and those that do both
    handover_s: float | None = None  # measured: from the first token to the decode node's start

    @property
    def prompt_readers(self) -> tuple[NodeView, ...]:
        """Where vectors are made: a decode node is kept free of prompts that end on another's account."""
        return (*self.prefill, *(node for node in self.decode if node.info.role is Role.AGGREGATED))


class RoutingRequest(msgspec.Struct, frozen=True):
    prompt_tokens: int  # with the output it already has, when it moves
    max_new_tokens: int
    cached: Mapping[str, int] = {}  # node id: leading prompt tokens that it likely has cached
    loading_s: Mapping[str, float] = {}  # node id: how long it needs to load what of these lies in its tiers
    session: str | None = None
    # The nodes where the last turn of its job keeps its KV, which a request without that job would wait for.
    home: frozenset[str] = frozenset()
    turn: int = 0  # counts requests, for policies that take turns
    avoid: frozenset[str] = frozenset()  # nodes that failed this request before
    mirror: NodeInfo | None = None  # copied its blocks from a node that is gone
    content: str | None = None  # of the model on which it began; None: any
    makes_vector: bool = False  # nothing is decoded: only nodes that read prompts for others take it
    needs_version: int = 0  # of Tandem's messages: a node of one before could not read it

    def uncached(self, node: NodeView) -> int:
        """At least one token is always computed: the last one's output is what is asked for."""
        return max(1, self.prompt_tokens - self.cached.get(node.info.node_id, 0))


def first_by_rendezvous(node_ids: Iterable[str], session: str) -> str:
    """Where a session goes: it stays there as long as the node does, and when not, it moves alone."""
    seed = xxhash.xxh3_64_intdigest(session.encode("utf-8", "surrogatepass"))
    return max(node_ids, key=lambda node_id: xxhash.xxh3_64_intdigest(node_id.encode(), seed))


class RoutingDecision(msgspec.Struct, frozen=True):
    """Either node may be None, not both. Without a decode node the prefill node ends the request by itself."""

    prefill: NodeInfo | None
    decode: NodeInfo | None
    reason: str
    source: NodeInfo | None = None  # likely has more of the prompt than the node that reads it
    mirror: NodeInfo | None = None  # copies what the decode node keeps of it

    @property
    def node_names(self) -> str:
        prefill, decode = self.prefill, self.decode
        if decode is None:
            return f"prefill={prefill.node_id}" if prefill is not None else ""
        if decode.role is Role.AGGREGATED:
            return f"aggregated={decode.node_id}"
        return f"prefill={prefill.node_id},decode={decode.node_id}" if prefill else f"decode={decode.node_id}"


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


def prefill_costs_s(nodes: Iterable[NodeView], request: RoutingRequest, assumed: float | None) -> list[float]:
    """The wait at each, and the prompt's own computing once more: requests that come after it wait for that too."""
    tokens, cached, loading_s = request.prompt_tokens, request.cached.get, request.loading_s.get
    assumed = assumed or ASSUMED_PREFILL_TOKENS_PER_S
    costs = []
    for node in nodes:
        node_id = node.info.node_id
        uncached = max(1, tokens - cached(node_id, 0))
        queued = node.status.waiting_tokens + node.pending_tokens
        rate = node.rates.prefill_tokens_per_s or assumed
        costs.append((queued + 2 * uncached) / rate + loading_s(node_id, 0.0))
    return costs


def decode_wait_s(node: NodeView, request: RoutingRequest, assumed: float | None) -> float:
    """What it costs to be decoded there: a longer step for each that shares it, prompts that are read in between
    (its own too, on a node that does both), and a wait if blocks are short.

    Blocks come back as running requests end; with `r` running, `r` tokens' worth of blocks are being used per
    step, so the wait for a block is about as long as it takes to fill one.
    """
    info, rates = node.info, node.rates
    step = rates.step_s or ASSUMED_STEP_S
    wait = 0.0
    missing = blocks_for(request.prompt_tokens + request.max_new_tokens, info) - node.room_blocks
    if missing > 0:
        wait = missing * info.block_size * step / max(1, node.status.running)
    rate = rates.prefill_tokens_per_s or assumed or ASSUMED_PREFILL_TOKENS_PER_S
    if info.role is Role.AGGREGATED:
        wait += (node.queued_tokens + request.uncached(node)) / rate
        wait += request.loading_s.get(info.node_id, 0.0)
    else:
        wait += node.queued_tokens / rate
    return wait + node.load * step


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

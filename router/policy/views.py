"""What a policy sees and what it answers: nodes with their measured rates, a request, a decision, and how long
a request is expected to wait at a node, in seconds, by these rates. While a rate is not measured, every node
gets the same assumed rate, so the order is still right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import xxhash

from tandem.wire.nodes import NodeInfo, Role
from tandem.wire.requests import NodeStatus

# A window with fewer prompt tokens shows a step's fixed cost rather than the rate.
MIN_PROMPT_TOKENS = 64
MIN_STEPS = 4
WEIGHT = 0.3  # the weight of the newest observation
# The weight of the newest window. Counters come once a second, so a node that got slower is known after a few.
_WINDOW_WEIGHT = 0.5
_PREFILL = Role.PREFILL  # looked up once instead of with every status


class Average:
    """An exponentially weighted average; None before the first observation."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, value: float) -> None:
        self.value = _mixed(self.value, value)


def _mixed(average: float | None, value: float, weight: float = WEIGHT) -> float:
    return value if average is None else (1 - weight) * average + weight * value


# The expected length before any answer has ended here, and the least expected length.
ASSUMED_ANSWER_TOKENS = 256
LEAST_ANSWER_TOKENS = 32


class AnswerLengthMeter:
    """The expected length of an answer, from those that have ended."""

    def __init__(self) -> None:
        self._average = Average()

    def ended(self, tokens: int) -> None:
        self._average.observe(tokens)

    def expected(self, most: int) -> int:
        average = self._average.value
        return min(most, ASSUMED_ANSWER_TOKENS if average is None else max(LEAST_ANSWER_TOKENS, int(average)))


class NodeRates(msgspec.Struct, gc=False):
    """Rates of one incarnation of a node, from the counters that it reports and from requests. Each is None
    until measured.

    A prefill node's steps hold only prompts, so its counters give its rate. A decode node's steps mix prompts
    with the next tokens of running requests, so its rate is only measured by requests whose prompt it
    computed itself. Steps of idle work are short, so they are in no rate.
    """

    prefill_tokens_per_s: float | None = None
    step_s: float | None = None
    # Prompt tokens per second while prompts waited, with the node's other work included.
    line_tokens_per_s: float | None = None
    # The counters with which the present window began: a prefill node's prompt tokens, or another's steps that
    # only decode, and the time of both. Negative: there is no window yet.
    count: int = -1
    seconds: float = 0.0
    # Those with which the present window with waiting prompts began.
    line_seconds: float = -1.0
    line_tokens: int = 0

    def on_status(self, status: NodeStatus) -> None:
        if (counters := status.counters) is None:
            if not status.waiting_tokens:
                self.line_seconds = -1.0
            return
        if status.waiting_tokens:
            self._on_line(*counters.reading)
        else:
            self.line_seconds = -1.0
        is_prefill = status.role is _PREFILL
        if is_prefill:
            (seconds, count), least = counters.reading, MIN_PROMPT_TOKENS
        else:
            count, seconds, least = counters.decode_steps, counters.decode_seconds, MIN_STEPS
        if self.count >= 0:
            more, more_seconds = count - self.count, seconds - self.seconds
            if more < least or more_seconds <= 0:
                return
            if is_prefill:
                self.prefill_tokens_per_s = _mixed(self.prefill_tokens_per_s, more / more_seconds, _WINDOW_WEIGHT)
            else:
                self.step_s = _mixed(self.step_s, more_seconds / more, _WINDOW_WEIGHT)
        self.count, self.seconds = count, seconds

    def _on_line(self, seconds: float, tokens: int) -> None:
        """Measures the line's rate while prompts wait."""
        if self.line_seconds >= 0:
            more_seconds, more_tokens = seconds - self.line_seconds, tokens - self.line_tokens
            if more_tokens < MIN_PROMPT_TOKENS or more_seconds <= 0:
                return
            self.line_tokens_per_s = _mixed(self.line_tokens_per_s, more_tokens / more_seconds, _WINDOW_WEIGHT)
        self.line_seconds, self.line_tokens = seconds, tokens

    def on_local_prefill(self, tokens: int, seconds: float) -> None:
        """A node computed a prompt itself, with no other request waiting, and gave the first token after
        `seconds`."""
        if tokens >= MIN_PROMPT_TOKENS and seconds > 0:
            self.prefill_tokens_per_s = _mixed(self.prefill_tokens_per_s, tokens / seconds)


# Only for comparing nodes before any rate is measured; never for deciding whether to send a prompt away.
ASSUMED_PREFILL_TOKENS_PER_S = 1000.0
ASSUMED_STEP_S = 0.02


def blocks_for(tokens: int, node: NodeInfo) -> int:
    """About how many blocks a request of so many tokens takes on the node."""
    return (-(-tokens // node.block_size) if node.keeps_tokens else 0) + node.state_blocks


class NodeView(msgspec.Struct):
    """What policies read of a node: its last status, and what was sent to it since. Only the pool writes it, with
    every status and every request."""

    info: NodeInfo
    status: NodeStatus
    rates: NodeRates
    pending_requests: int = 0
    pending_tokens: int = 0
    pending_blocks: int = 0
    # Both belong to the shortlist: the node's place in its lane, and whether it counts as idle there.
    place: int | None = None
    is_idle: bool = False

    @property
    def room_blocks(self) -> int:
        """Free blocks that no request on the node is expected to take. Negative when some requests will have
        to wait."""
        return self.status.room_blocks - self.status.wanted_blocks - self.pending_blocks

    def has_room(self, tokens: int) -> bool:
        """Whether a request of so many tokens would find its blocks. A node without work takes any
        request."""
        return self.load == 0 or self.room_blocks >= blocks_for(tokens, self.info)

    @property
    def room_tokens(self) -> int:
        """The longest request that would find its blocks, in tokens."""
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
    """The nodes that a policy may choose from."""

    prefill: tuple[NodeView, ...]
    decode: tuple[NodeView, ...]  # decode and aggregated nodes
    handover_s: float | None = None  # measured from the first token to the decode node's start

    @property
    def prompt_readers(self) -> tuple[NodeView, ...]:
        """The nodes that make vectors: prefill and aggregated nodes. A vector's prompt would delay a decode
        node's streams."""
        return (*self.prefill, *(node for node in self.decode if node.info.role is Role.AGGREGATED))


class RoutingRequest(msgspec.Struct, frozen=True):
    """What a policy knows about a request."""

    prompt_tokens: int  # with the output so far, when the request moves
    max_new_tokens: int
    cached: Mapping[str, int] = {}  # by node id: leading prompt tokens that the node likely has cached
    # By node id: seconds to load the part of these that lies in its tiers.
    loading_s: Mapping[str, float] = {}
    session: str | None = None
    # The nodes that pin the KV of its job's last turn. Requests of other jobs may have to wait for these
    # blocks.
    home: frozenset[str] = frozenset()
    turn: int = 0  # counts requests, for policies that take turns
    avoid: frozenset[str] = frozenset()  # nodes that failed this request before
    mirror: NodeInfo | None = None  # the node that copied its blocks from a lost node
    content: str | None = None  # identity of the model on which it began; None means any
    is_measured: bool = True  # False: no one waits for it, so a prefill node reads it, whatever that costs
    makes_vector: bool = False  # nothing is decoded: only prefill and aggregated nodes take it
    # The version of Tandem's messages that it needs; nodes with an older one cannot read it.
    needs_version: int = 0

    def uncached(self, node: NodeView) -> int:
        """How many tokens the node has to compute. At least one, because the result is the last token's
        output."""
        return max(1, self.prompt_tokens - self.cached.get(node.info.node_id, 0))


def first_by_rendezvous(node_ids: Iterable[str], session: str) -> str:
    """The node of a session, by rendezvous hashing: a session moves only when its own node goes."""
    seed = xxhash.xxh3_64_intdigest(session.encode("utf-8", "surrogatepass"))
    return max(node_ids, key=lambda node_id: xxhash.xxh3_64_intdigest(node_id.encode(), seed))


class RoutingDecision(msgspec.Struct, frozen=True):
    """The chosen nodes. Either may be None, but not both. Without a decode node, the prefill node ends the
    request."""

    prefill: NodeInfo | None
    decode: NodeInfo | None
    reason: str
    source: NodeInfo | None = None  # likely has more of the prompt cached than the node that computes it
    mirror: NodeInfo | None = None  # copies the blocks that the decode node fills
    # Seconds until the first token, as its reader's line and rate let expect. None while no rate is measured.
    first_token_s: float | None = None

    @property
    def node_names(self) -> str:
        prefill, decode = self.prefill, self.decode
        if decode is None:
            return f"prefill={prefill.node_id}" if prefill is not None else ""
        if decode.role is Role.AGGREGATED:
            return f"aggregated={decode.node_id}"
        return f"prefill={prefill.node_id},decode={decode.node_id}" if prefill else f"decode={decode.node_id}"


def best_prefill_rate(nodes: Iterable[NodeView]) -> float | None:
    """The best measured rate of these nodes, assumed for nodes without a measurement, because a pool's
    machines are alike. None when no rate was measured."""
    return max([rate for node in nodes if (rate := node.rates.prefill_tokens_per_s) is not None], default=None)


def prefill_wait_s(node: NodeView, request: RoutingRequest, assumed: float | None) -> float:
    """The expected time to the first token: all tokens queued on the node, the uncached part of this prompt,
    and loading from a tier. `assumed`: the rate of a node without a measurement."""
    rate = node.rates.prefill_tokens_per_s or assumed or ASSUMED_PREFILL_TOKENS_PER_S
    return (node.queued_tokens + request.uncached(node)) / rate + request.loading_s.get(node.node_id, 0.0)


def line_wait_s(node: NodeView) -> float:
    """How long until the node begins a prompt that arrives now. 0 while no rate was measured."""
    rate = node.rates.line_tokens_per_s or node.rates.prefill_tokens_per_s
    return node.queued_tokens / rate if rate else 0.0


def prefill_costs_s(nodes: Iterable[NodeView], request: RoutingRequest, assumed: float | None) -> list[float]:
    """Each node's cost: the wait for the first token, and the prompt's own computing a second time, because
    requests that come after it wait for that too."""
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
    """The cost of decoding on the node: a longer step for each request that shares it, the prompts that it
    computes in between (on an aggregated node this request's too), and a wait if blocks are short.

    Blocks come back as running requests end. With `r` requests running, each step uses `r` tokens' worth of
    blocks, so the wait for a block is about as long as filling one takes.
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


# Users notice a stream that stands still for longer than this. Decode nodes exist so that other requests'
# prompts do not stop streams.
_UNNOTICED_S = 0.05


def reason_to_prefill_locally(
    pools: PoolSnapshot, request: RoutingRequest, prefill: NodeView, decode: NodeView
) -> str | None:
    """Returns why the decode node should compute the prompt itself. None means to send the prompt away, also
    while the rates are not measured.

    Both costs are in seconds that requests wait. Sent away, only this request waits: for the prefill node's
    queue, for its own prompt, and for the handover. Computed locally, it waits for its prompt after what is
    queued on the decode node, and every request that decodes there waits as long as its prompt takes. That
    time must be less than a user notices, however long the prefill nodes' lines are.
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

"""The router's own metrics since it started and, for the last ten minutes, how many requests met the `slo`,
how long the line was, and which requests were slowest, and why.

Metrics that mean the same as vLLM's have vLLM's names and buckets, with `tandem_` in front; the others are
named after the phase that they measure. Each request is noted once, at its end, by a few additions, and
memory is bounded at any load. Runs on the event loop only.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tandem.base.errors import Cancelled, Unavailable
from tandem.wire.nodes import PoolReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_INTER_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
# 1, 2, 5, 10 ... 1,000,000
_TOKEN_BUCKETS = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)
_CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
_HANDOVER_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Histogram(Collector):
    """A histogram without locks, for the event loop only. Every token is observed here, and the library's own
    histogram would cost as much as turning the token into text."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # the last one counts values above all bounds
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class PlainCounter(Collector):
    """A counter without locks, like Histogram, for counts of every token."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._value = 0

    def inc(self, count: int) -> None:
        self._value += count

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._text, value=self._value)


class LabelledCounter(Collector):
    """A labelled counter without locks: the library's lookup of a child takes longer than counting."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[tuple[str, ...], int] = {}
        self._since: dict[tuple[str, ...], float] = {}

    def inc(self, *values: str) -> None:
        """Counts one. `values`: those of its labels."""
        try:
            self._counts[values] += 1
        except KeyError:
            self._since[values] = time.time()
            self._counts[values] = 1

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in list(self._counts.items()):
            family.add_metric(values, count, created=self._since[values])
        yield family


class _WithModel(Collector):
    """Adds the model's name to every sample, as vLLM does, when it is read: looking up a child by its labels
    costs more than counting."""

    def __init__(self, parts: Sequence[Collector], model_name: str) -> None:
        self._parts = parts
        self._label = {"model_name": model_name}

    def collect(self) -> Iterable[Metric]:
        for metric in chain.from_iterable(part.collect() for part in self._parts):
            metric.samples = [
                sample._replace(labels={**self._label, **sample.labels}) for sample in metric.samples
            ]
            yield metric


class RouterMetrics:
    """The router's metrics, in their own registry, so that several routers can run in one process."""

    def __init__(self, model_name: str = "") -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        # What nodes report, which every router knows alike.
        self.node_registry = CollectorRegistry(auto_describe=True)
        self._model_name = model_name

        def plain(name: str, text: str) -> PlainCounter:
            made = PlainCounter(name, text)
            self.registry.register(made)
            return made

        def labelled(name: str, text: str, *labels: str) -> LabelledCounter:
            made = LabelledCounter(name, text, *labels)
            self.registry.register(made)
            return made

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, text, buckets)
            self.registry.register(made)
            return made

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labelnames=labels, registry=self.registry)

        self.time_to_first_token = histogram(
            "tandem_time_to_first_token_seconds",
            "From a request's arrival to its first token, with its waiting in the router and its tokenizing",
            _FIRST_TOKEN_BUCKETS,
        )
        self.inter_token_latency = histogram(
            "tandem_inter_token_latency_seconds",
            "Between two reports of one request's tokens",
            _INTER_TOKEN_BUCKETS,
        )
        self.e2e_latency = histogram(
            "tandem_e2e_request_latency_seconds",
            "From a request's arrival to the end of its answer",
            _REQUEST_BUCKETS,
        )
        self.time_per_output_token = histogram(
            "tandem_request_time_per_output_token_seconds",
            "A request's time from its first token to its last, by the tokens between",
            _INTER_TOKEN_BUCKETS,
        )
        self.queue_time = histogram(
            "tandem_request_queue_time_seconds",
            "Waiting in line, in the router and on the node that reads the prompt",
            _REQUEST_BUCKETS,
        )
        self.router_queue_time = histogram(
            "tandem_router_queue_time_seconds", "Waiting in the router for a first place", _REQUEST_BUCKETS
        )
        self.prefill_time = histogram(
            "tandem_request_prefill_time_seconds",
            "From an attempt's submission to its first token, without the node's line",
            _REQUEST_BUCKETS,
        )
        self.inference_time = histogram(
            "tandem_request_inference_time_seconds",
            "From an attempt's submission to the request's end, without the node's line",
            _REQUEST_BUCKETS,
        )
        self.handover_time = histogram(
            "tandem_request_handover_time_seconds",
            "From the prefill node's first token to the decode node's start",
            _HANDOVER_BUCKETS,
        )
        self.decode_time = histogram(
            "tandem_request_decode_time_seconds", "From a request's first token to its end", _REQUEST_BUCKETS
        )
        self.request_prompt_tokens = histogram(
            "tandem_request_prompt_tokens", "Prompt tokens of a sequence that ended", _TOKEN_BUCKETS
        )
        self.request_generation_tokens = histogram(
            "tandem_request_generation_tokens", "Output tokens of a sequence that ended", _TOKEN_BUCKETS
        )
        self.request_longest_answer = histogram(
            "tandem_request_max_num_generation_tokens",
            "Output tokens of a request's longest answer",
            _TOKEN_BUCKETS,
        )
        self.request_max_tokens = histogram(
            "tandem_request_params_max_tokens", "Output tokens that a sequence may have", _TOKEN_BUCKETS
        )
        self.request_choices = histogram("tandem_request_params_n", "Sequences of a request", _CHOICE_BUCKETS)
        self.prompt_tokens = plain("tandem_prompt_tokens", "Prompt tokens that were read")
        self.generation_tokens = plain("tandem_generation_tokens", "Output tokens that reached the router")
        self.requests_finished = labelled(
            "tandem_request_success", "Sequences that ended, by how", "finished_reason"
        )
        self.requests_preempted = counter(
            "tandem_requests_preempted", "Sequences that lost their blocks on a node at least once"
        )
        self.http_requests = labelled(
            "tandem_http_requests", "Answers by route and status", "route", "status"
        )
        # All answers, and those that failed by the server's fault. The controller asks for both.
        self.answers = self.errors = 0
        self.decisions = labelled("tandem_routing_decisions", "Where requests were sent", "kind")
        self.failovers = counter("tandem_failovers", "Requests that went on elsewhere", "reason")
        self.deadlines = counter("tandem_deadlines_exceeded", "Requests that took too long", "phase")
        self.refusals = counter("tandem_requests_refused", "Requests that were not let in", "reason")
        self.sequences_paused = counter(
            "tandem_sequences_paused", "Sequences that gave their place to another key, to go on later"
        )
        self.slow_readers_cut = counter("tandem_slow_readers_cut", "Answers whose client stopped reading")
        self.token_mismatches = counter("tandem_token_mismatches", "Two nodes disagreed about a token")
        self.foreign_chunks = counter(
            "tandem_foreign_chunks", "Tokens from a node that the request is not on"
        )
        self.stray_chunks = counter(
            "tandem_stray_chunks", "Tokens of a request that this router does not know"
        )
        self.traces_exported = counter("tandem_traces_exported", "Traces that a collector has taken")
        self.traces_dropped = counter("tandem_traces_dropped", "Traces that no collector took", "reason")
        self.running = Gauge(
            "tandem_num_requests_running", "Sequences that are on nodes now", registry=self.registry
        )
        self.waiting = Gauge(
            "tandem_num_requests_waiting", "Sequences that wait in the router", registry=self.registry
        )

        self.places = Gauge(
            "tandem_router_places", "Sequences that may be on nodes at once", registry=self.registry
        )
        self.places_held = Gauge("tandem_router_places_held", "Of these: taken", registry=self.registry)
        self.queue_limit = Gauge(
            "tandem_router_queue_limit", "Sequences that may wait in the router", registry=self.registry
        )
        self.healthy = Gauge("tandem_router_healthy", "1 when /health answers 200", registry=self.registry)
        self.oldest_wait = Gauge(
            "tandem_router_queue_oldest_seconds",
            "How long the first of the requests that wait in the router has waited",
            registry=self.registry,
        )

        # Begin at 0, so that the first count of a reason shows as an increase.
        for reason in ("queue_full", "unauthorized", "bodies", "memory", "quota"):
            self.refusals.labels(reason=reason)
        for phase in ("queue", "total", "token_idle", "failover_wait"):
            self.deadlines.labels(phase=phase)
        self.failovers.labels(reason="node_lost")

    def note_answer(self, route: str, status: int | None) -> None:
        self.answers += 1
        self.errors += status is not None and status >= 500 and status != Unavailable.http_status
        self.http_requests.inc(route, str(status))

    def render(self, of_routers: Collector | None = None) -> bytes:
        """Writes all metrics as text. May run in a thread: one figure may be newer than another, and each is
        whole. `of_routers`: the sums of all processes, instead of this process's own."""
        return generate_latest(
            _WithModel([of_routers or self.registry, self.node_registry], self._model_name)
        )


WINDOW_S = 600.0
BUCKET_S = 10.0
LATEST = 200  # how many requests are shown one by one
SLOWEST = 8  # kept of each bucket
TROUBLES = 40  # kinds of trouble that are kept
TEXT_SHOWN = 200

# What to do about the cause of a slow request, beside it on the page. The alerts say the same.
ADVICE = {
    "reading the request": "Give the router's machine more cores, or set `router.processes`.",
    "the router's line": "No decode node has the blocks for it: add a decode node, or raise `cache.memory_bytes`.",
    "a node's line": "Prefill nodes have more prompts than they can read: add a prefill node.",
    "computing the prompt": "Add a prefill node, or send shorter prompts; prefixes that repeat are read once.",
    "the handover": "Look at the network between the pools: `tandem trace` shows what the transfer waited for.",
    "writing the answer": "Decode nodes are too full: add a decode node, or lower `scheduler.step_target_ms`.",
    "one gap in its answer": "A node stood still: its log and `tandem trace` say why.",
    "it moved to another node": "The router's log names the node that was lost; `tandem status` says why.",
    "it lost its blocks and was computed again": "`scheduler.reserve: sequence` admits fewer requests; another decode node keeps them all.",
    "it failed": "The router's and the node's log have its id: `tandem logs --request ID`.",
}


class RequestAccount(msgspec.Struct, frozen=True):
    """Where one request's time went, as its router saw it. The parts follow one another and add up to the
    whole."""

    request_id: str
    ended_at: float  # time of day
    reading_s: float  # checking, rendering and tokenizing
    router_wait_s: float  # for a place
    node_wait_s: float  # in the line of the node that computes the prompt
    prefill_s: float  # until the first token; for a request that moved, with all earlier attempts
    handover_s: float  # until the decode node began; not every token waits for it
    decode_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    longest_gap_s: float  # between two reports of its tokens
    prefill_node: str
    decode_node: str
    decision: str
    preemptions: int
    failovers: int
    finish: str
    traced: bool

    @property
    def total_s(self) -> float:
        return (
            self.reading_s
            + self.router_wait_s
            + self.node_wait_s
            + self.prefill_s
            + self.handover_s
            + self.decode_s
        )

    @property
    def first_token_s(self) -> float:
        return self.reading_s + self.router_wait_s + self.node_wait_s + self.prefill_s

    @property
    def token_s(self) -> float:
        """The mean time between two tokens; 0 for an answer of one token."""
        return (
            (self.handover_s + self.decode_s) / max(self.output_tokens - 1, 1)
            if self.output_tokens > 1
            else 0.0
        )


class Targets(msgspec.Struct, frozen=True):
    """The cluster's `slo`."""

    ttft_s: float
    inter_token_s: float

    def excess(self, account: RequestAccount) -> float:
        """Returns how many times as long as its target the request took, by the worse of both targets. For a
        request without a token, all of its wait counts."""
        return max(account.first_token_s / self.ttft_s, account.token_s / self.inter_token_s)


class SlowRequest(msgspec.Struct, frozen=True):
    account: RequestAccount
    excess: float
    cause: str
    advice: str = ""


class Trouble(msgspec.Struct, frozen=True):
    """Something that went wrong, and how often: requests refused or failed in the same way, requests that moved
    away from a node, or a node that stopped serving."""

    at: float  # time of day, of the last time
    what: str  # its kind: "refused", "failed", "moved" or "node"
    request_id: str  # of the last one; "" for a node
    status: int  # of the answer; 0 for a node
    code: str
    node: str  # "" where no node has to do with it
    text: str
    count: int = 1

    @property
    def key(self) -> tuple[object, ...]:
        return (self.what, self.status, self.code, self.node)


class Moment(msgspec.Struct):
    """The figures of ten seconds."""

    began: float  # time of day
    ended: int = 0
    failed: int = 0  # of those that ended
    errors: int = 0  # answers that failed, with a status or in the middle
    refused: int = 0  # answers with a status from 400 on that are no errors of the server, and 503
    moved: int = 0  # times that a request went on at another node
    restarts: int = 0  # nodes that stopped serving and were started again
    first_in_time: int = 0
    tokens_in_time: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    worst_first_s: float = 0.0
    running: int = 0  # the most at once
    queued: int = 0


class RecentRequests:
    """The requests of the last ten minutes, summed up in moments of ten seconds."""

    def __init__(self, targets: Targets, time_of_day: Callable[[], float]) -> None:
        self.targets = targets
        self.now = time_of_day
        self._moments: deque[Moment] = deque(maxlen=int(WINDOW_S / BUCKET_S))
        self._slowest: deque[list[tuple[float, int, RequestAccount]]] = deque(maxlen=self._moments.maxlen)
        self._latest: deque[RequestAccount] = deque(maxlen=LATEST)
        self._count = 0  # breaks ties between equally slow requests
        self._troubles: dict[tuple[object, ...], Trouble] = {}  # the latest last
        self._out: frozenset[str] = frozenset()  # nodes that the controller says are down or left out

    def answered(self, request_id: str, status: int, code: str, text: str) -> None:
        """Notes an answer that was refused or failed. A request that its client left is neither."""
        if status == Cancelled.http_status:
            return
        moment = self._moment()
        if 400 <= status < 500 or status == Unavailable.http_status:
            moment.refused += 1
            self._add(Trouble(self.now(), "refused", request_id, status, code, "", text))
            return
        moment.errors += 1
        known = (one for one in reversed(self._latest) if one.request_id == request_id)
        account = next(known, None)
        node = (account.decode_node or account.prefill_node) if account is not None else ""
        self._add(Trouble(self.now(), "failed", request_id, status, code, node, text))

    def pools_are(self, reports: Sequence[PoolReport]) -> None:
        """Notes nodes that have stopped serving since the controller's last report."""
        out = {name: ("down", why) for report in reports for name, why in report.down.items()}
        left_out = {name: ("left_out", why) for report in reports for name, why in report.left_out.items()}
        for name, (code, why) in [*out.items(), *left_out.items()]:
            if name not in self._out:
                self._moment().restarts += code == "down"
                self._add(Trouble(self.now(), "node", "", 0, code, name, why))
        self._out = frozenset(out) | frozenset(left_out)

    def _add(self, one: Trouble) -> None:
        before = self._troubles.pop(one.key, None)
        count = one.count + (before.count if before is not None and one.at - before.at < WINDOW_S else 0)
        self._troubles[one.key] = msgspec.structs.replace(one, text=one.text[:TEXT_SHOWN], count=count)
        while len(self._troubles) > TROUBLES:
            del self._troubles[next(iter(self._troubles))]

    def troubles(self) -> list[Trouble]:
        """Returns what went wrong in the last ten minutes, the latest first."""
        since = self.now() - WINDOW_S
        return [one for one in reversed(self._troubles.values()) if one.at > since]

    def ended(self, account: RequestAccount) -> None:
        moment, targets = self._moment(), self.targets
        moment.ended += 1
        moment.failed += account.finish == "error"
        if account.failovers:
            moment.moved += account.failovers
            text = f"it went on there, after {account.prefill_node or 'no node'} had read its prompt"
            self._add(
                Trouble(self.now(), "moved", account.request_id, 200, "moved", account.decode_node, text)
            )
        moment.prompt_tokens += account.prompt_tokens
        moment.output_tokens += account.output_tokens
        if account.output_tokens:
            first_s = account.first_token_s
            moment.first_in_time += first_s <= targets.ttft_s
            moment.tokens_in_time += account.token_s <= targets.inter_token_s
            moment.worst_first_s = max(moment.worst_first_s, first_s)
        self._latest.append(account)
        if account.finish == "abort":
            return  # its client decided how long it took
        self._count += 1
        slowest, entry = self._slowest[-1], (targets.excess(account), self._count, account)
        if len(slowest) < SLOWEST:
            heapq.heappush(slowest, entry)
        elif entry[0] > slowest[0][0]:
            heapq.heapreplace(slowest, entry)

    def sample(self, running: int, queued: int) -> None:
        """Notes how many requests run and wait now. Called with every ping."""
        moment = self._moment()
        moment.running = max(moment.running, running)
        moment.queued = max(moment.queued, queued)

    def moments(self) -> list[Moment]:
        """Returns the last ten minutes, the oldest first, with empty moments for times without requests."""
        self._moment()
        return list(self._moments)

    def latest(self) -> list[RequestAccount]:
        return list(self._latest)

    def slowest(self, count: int) -> list[SlowRequest]:
        self._moment()
        found = heapq.nlargest(count, (entry for slowest in self._slowest for entry in slowest))
        causes = [(account, excess, cause_of(account, self.targets)) for excess, _, account in found]
        return [
            SlowRequest(account, excess, cause, ADVICE.get(cause, "")) for account, excess, cause in causes
        ]

    def _moment(self) -> Moment:
        began = self.now() // BUCKET_S * BUCKET_S
        if self._moments and began - self._moments[-1].began > WINDOW_S:
            self._moments.clear()
            self._slowest.clear()
        while not self._moments or self._moments[-1].began < began:
            self._moments.append(Moment(self._moments[-1].began + BUCKET_S if self._moments else began))
            self._slowest.append([])
        return self._moments[-1]


def parts_of(account: RequestAccount) -> Sequence[tuple[str, float]]:
    """Returns the names and lengths of a request's phases, in their order."""
    return (
        ("reading the request", account.reading_s),
        ("the router's line", account.router_wait_s),
        ("a node's line", account.node_wait_s),
        ("computing the prompt", account.prefill_s),
        ("the handover", account.handover_s),
        ("writing the answer", account.decode_s),
    )


def cause_of(account: RequestAccount, targets: Targets) -> str:
    """Returns in a few words what took most of a slow request's time."""
    if account.failovers:
        return "it moved to another node"
    if account.preemptions:
        return "it lost its blocks and was computed again"
    if not account.output_tokens and account.finish == "error":
        return "it failed"
    first = account.first_token_s / targets.ttft_s >= account.token_s / targets.inter_token_s
    parts = parts_of(account)[:4] if first else parts_of(account)[4:]
    name, seconds = max(parts, key=lambda part: part[1])
    if not first and account.longest_gap_s > seconds / 2:
        return "one gap in its answer"
    return name

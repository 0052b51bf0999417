"""The router's own metrics since it started.

Metrics that mean the same as vLLM's have vLLM's names and buckets, with `tandem_` in front; the others are
named after the phase that they measure. Runs on the event loop only.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import TypeVar

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tandem.base.errors import Unavailable

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


CollectorT = TypeVar("CollectorT", bound=Collector)


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


class Counter(Collector):
    """A counter without locks, like Histogram: the library's lookup of a child takes longer than counting. One thread counts the same
    labels."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[tuple[str, ...], int] = {}
        self._since: dict[tuple[str, ...], float] = {}
        if not labels:
            self.begin()

    def begin(self, *values: str) -> None:
        """Shows 0 for these labels, so that their first count shows as an increase."""
        self._since[values] = time.time()
        self._counts[values] = 0

    def inc(self, *values: str, count: int = 1) -> None:
        """`values`: those of its labels."""
        if values not in self._counts:
            self.begin(*values)
        self._counts[values] += count

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
            metric.samples = [sample._replace(labels={**self._label, **sample.labels}) for sample in metric.samples]
            yield metric


class _MadeMetrics:
    """Makes metrics, and registers them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def _registered(self, made: CollectorT) -> CollectorT:
        self._registry.register(made)
        return made

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._registered(Histogram(name, text, buckets))

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return self._registered(Counter(name, text, *labels))

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self._registry)


class RouterMetrics:
    """The router's metrics, in their own registry, so that several routers can run in one process."""

    def __init__(self, model_name: str = "") -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        # What nodes report, which every router knows alike.
        self.node_registry = CollectorRegistry(auto_describe=True)
        self._model_name = model_name

        made = _MadeMetrics(self.registry)
        self._time_requests(made)
        self._size_requests(made)
        self._count_requests(made)
        self._gauge(made)
        # All answers, and those that failed by the server's fault. The controller asks for both.
        self.answers = self.errors = 0

    def _time_requests(self, made: _MadeMetrics) -> None:
        self.time_to_first_token = made.histogram(
            "tandem_time_to_first_token_seconds",
            "From a request's arrival to its first token, with its waiting in the router and its tokenizing",
            _FIRST_TOKEN_BUCKETS,
        )
        self.inter_token_latency = made.histogram(
            "tandem_inter_token_latency_seconds", "Between two reports of one request's tokens", _INTER_TOKEN_BUCKETS
        )
        self.e2e_latency = made.histogram(
            "tandem_e2e_request_latency_seconds", "From a request's arrival to the end of its answer", _REQUEST_BUCKETS
        )
        self.time_per_output_token = made.histogram(
            "tandem_request_time_per_output_token_seconds",
            "A request's time from its first token to its last, by the tokens between",
            _INTER_TOKEN_BUCKETS,
        )
        self.queue_time = made.histogram(
            "tandem_request_queue_time_seconds",
            "Waiting in line, in the router and on the node that reads the prompt",
            _REQUEST_BUCKETS,
        )
        self.router_queue_time = made.histogram(
            "tandem_router_queue_time_seconds", "Waiting in the router for a first place", _REQUEST_BUCKETS
        )
        self.prefill_time = made.histogram(
            "tandem_request_prefill_time_seconds",
            "From an attempt's submission to its first token, without the node's line",
            _REQUEST_BUCKETS,
        )
        self.inference_time = made.histogram(
            "tandem_request_inference_time_seconds",
            "From an attempt's submission to the request's end, without the node's line",
            _REQUEST_BUCKETS,
        )
        self.handover_time = made.histogram(
            "tandem_request_handover_time_seconds",
            "From the prefill node's first token to the decode node's start",
            _HANDOVER_BUCKETS,
        )
        self.decode_time = made.histogram(
            "tandem_request_decode_time_seconds", "From a request's first token to its end", _REQUEST_BUCKETS
        )

    def _size_requests(self, made: _MadeMetrics) -> None:
        self.request_prompt_tokens = made.histogram(
            "tandem_request_prompt_tokens", "Prompt tokens of a sequence that ended", _TOKEN_BUCKETS
        )
        self.request_generation_tokens = made.histogram(
            "tandem_request_generation_tokens", "Output tokens of a sequence that ended", _TOKEN_BUCKETS
        )
        self.request_longest_answer = made.histogram(
            "tandem_request_max_num_generation_tokens", "Output tokens of a request's longest answer", _TOKEN_BUCKETS
        )
        self.request_max_tokens = made.histogram(
            "tandem_request_params_max_tokens", "Output tokens that a sequence may have", _TOKEN_BUCKETS
        )
        self.request_choices = made.histogram("tandem_request_params_n", "Sequences of a request", _CHOICE_BUCKETS)
        self.prompt_tokens = made.counter("tandem_prompt_tokens", "Prompt tokens that were read")
        self.generation_tokens = made.counter("tandem_generation_tokens", "Output tokens that reached the router")

    def _count_requests(self, made: _MadeMetrics) -> None:
        self.requests_finished = made.counter(
            "tandem_request_success", "Sequences that ended, by how", "finished_reason"
        )
        self.requests_preempted = made.counter(
            "tandem_requests_preempted", "Sequences that lost their blocks on a node at least once"
        )
        self.http_requests = made.counter("tandem_http_requests", "Answers by route and status", "route", "status")
        self.decisions = made.counter("tandem_routing_decisions", "Where requests were sent", "kind")
        self.failovers = made.counter("tandem_failovers", "Requests that went on elsewhere", "reason")
        self.deadlines = made.counter("tandem_deadlines_exceeded", "Requests that took too long", "phase")
        self.refusals = made.counter("tandem_requests_refused", "Requests that were not let in", "reason")
        self.sequences_paused = made.counter(
            "tandem_sequences_paused", "Sequences that gave their place to another key, to go on later"
        )
        self.batch_lines = made.counter("tandem_batch_lines", "Lines of batches that ended, by how", "outcome")
        self.quotes = made.counter(
            "tandem_quotes",
            "Requests that asked by when their first token comes, by how that went",
            "confidence",
            "outcome",
        )
        self.slow_readers_cut = made.counter("tandem_slow_readers_cut", "Answers whose client stopped reading")
        self.token_mismatches = made.counter("tandem_token_mismatches", "Two nodes disagreed about a token")
        self.foreign_chunks = made.counter("tandem_foreign_chunks", "Tokens from a node that the request is not on")
        self.stray_chunks = made.counter("tandem_stray_chunks", "Tokens of a request that this router does not know")
        self.traces_exported = made.counter("tandem_traces_exported", "Traces that a collector has taken")
        self.traces_dropped = made.counter("tandem_traces_dropped", "Traces that no collector took", "reason")
        # Begin at 0, so that the first count of a reason shows as an increase.
        for reason in ("queue_full", "long_wait", "deadline", "unauthorized", "bodies", "memory", "quota"):
            self.refusals.begin(reason)
        for phase in ("queue", "total", "token_idle", "failover_wait"):
            self.deadlines.begin(phase)
        self.failovers.begin("node_lost")

    def _gauge(self, made: _MadeMetrics) -> None:
        self.running = made.gauge("tandem_num_requests_running", "Sequences that are on nodes now")
        self.waiting = made.gauge("tandem_num_requests_waiting", "Sequences that wait in the router")

        self.places = made.gauge("tandem_router_places", "Sequences that may be on nodes at once")
        self.places_held = made.gauge("tandem_router_places_held", "Of these: taken")
        self.queue_limit = made.gauge("tandem_router_queue_limit", "Sequences that may wait in the router")
        self.healthy = made.gauge("tandem_router_healthy", "1 when /health answers 200")
        self.oldest_wait = made.gauge(
            "tandem_router_queue_oldest_seconds",
            "How long the first of the requests that wait in the router has waited",
        )

    def note_answer(self, route: str, status: int | None) -> None:
        self.answers += 1
        self.errors += status is not None and status >= 500 and status != Unavailable.http_status
        self.http_requests.inc(route, str(status))

    def render(self, of_routers: Collector | None = None) -> bytes:
        """Writes all metrics as text. May run in a thread: one figure may be newer than another, and each is
        whole. `of_routers`: the sums of all processes, instead of this process's own."""
        return generate_latest(_WithModel([of_routers or self.registry, self.node_registry], self._model_name))

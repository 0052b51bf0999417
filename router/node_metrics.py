"""The nodes' reports as metrics, so that one scrape of the router shows the whole cluster."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.base.tasks import Tasks
from tandem.router.links import NodeLinks
from tandem.router.member import Member
from tandem.router.pool import NodePool
from tandem.router.prefixes import CachedBlocks
from tandem.wire.nodes import NodeState, Role
from tandem.wire.requests import WAIT_BOUNDS_S, NodeCounters, TierStatus

_GAUGES = {
    "free_blocks": "KV cache blocks that are free",
    "total_blocks": "KV cache blocks in all",
    "running": "Requests that are running",
    "waiting": "Requests that are waiting",
    "waiting_tokens": "Prompt tokens that are still to be computed",
    "transfers": "KV transfers under way",
    "loading": "Requests whose prompt's KV is on its way",
    "wanted_blocks": "Blocks that the requests there are expected to take beyond those that they have",
    "oldest_wait_s": "Seconds since the first of those that wait came, but for those whose KV is on its way",
    "held_blocks": "Blocks of finished requests that wait for their transfer",
    "held_requests": "Requests that have ended, and whose blocks wait for their transfer",
    "cached_blocks": "KV cache blocks that a prefix can be found in, in use or free",
    "quarantined_blocks": "Blocks of failed transfers that a peer may still write to",
    "pinned_requests": "Requests that have ended, and keep their blocks for their job's next turn",
    "pinned_blocks": "Blocks of these",
    "idle_blocks": "Blocks of what runs when nothing else does",
    "step_age_s": "Seconds since the engine last completed a step or was idle",
}

_PER_LABEL = {
    "requests_finished": "reason",
    "transfers_finished": "outcome",
    "transfer_refusals": "reason",
    "transfer_blocks_freed": "by",
    "wrong_kv": "sender",
    "pins_ended": "why",
    "encoder_fallbacks": "reason",
}
# What alerts count, of a node that has transferred anything: a rate misses the failures that a series begins with.
_FROM_ZERO = {
    "transfers_finished": dict.fromkeys(
        (
            "mismatched",
            "incompatible",
            "timed_out",
            "too_slow",
            "lease_expired",
            "peer_lost",
            "move_failed",
            "corrupted",
            "refused",
        ),
        0,
    )
}


# Figures that are more than one number or numbers by label.
# In engine_metrics; `step_costs` are the simulator's, and count nothing.
_ELSEWHERE = frozenset({"step_tokens", "tokens_scheduled", "speculative_accepted_at", "step_costs"})


class LinkCollector(Collector):
    """What the router counts of its links to nodes."""

    def __init__(self, pool: NodePool, links: NodeLinks, tasks: Tasks, cached: CachedBlocks) -> None:
        self._cached = cached
        self._pool = pool
        self._links = links
        self._tasks = tasks

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "tandem_malformed_frames", "Frames from nodes that did not decode", value=self._links.malformed
        )
        yield CounterMetricFamily(
            "tandem_message_handler_errors", "Messages whose handling failed", value=self._links.handler_errors
        )
        yield CounterMetricFamily(
            "tandem_foreign_messages",
            "Messages of nodes or epochs that are not members",
            value=self._pool.foreign_messages + self._links.foreign,
        )
        yield CounterMetricFamily(
            "tandem_line_gaps",
            "Times that messages of a node were missing and asked for again",
            value=self._links.lines.gaps,
        )
        yield CounterMetricFamily(
            "tandem_messages_resent", "Messages that nodes asked for again", value=self._links.lines.resent
        )
        yield GaugeMetricFamily(
            "tandem_known_cached_blocks", "Blocks of nodes' caches that the router knows of", value=self._cached.count
        )
        yield CounterMetricFamily(
            "tandem_cache_news_gaps", "Times that a node's cache had to be listed again", value=self._cached.gaps
        )
        restarts = CounterMetricFamily("tandem_task_restarts", "Background tasks that died", labels=["task"])
        for name, count in self._tasks.restarts.items():
            restarts.add_metric([name], count)
        yield restarts


class NodeCollector(Collector):
    def __init__(self, pool: NodePool) -> None:
        self._pool = pool

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        yield self._up()
        yield self._pools()
        yield from self._forecasts()
        reporting = self._pool.counted_members
        yield from _gauges(reporting)
        yield from _tiers(reporting)
        yield from _counters(reporting)

    def _up(self) -> Metric:
        """A node that has died is no member any more, and still has to be seen as 0. One that drains is on its
        way out, and one that is left out counts in its pool: neither is shown here."""
        up = GaugeMetricFamily(
            "tandem_node_up",
            "1 when requests may go there; a node that drains or is left out is not shown",
            labels=["node", "role"],
        )
        for member in self._pool.members:
            if member.status.state is not NodeState.DRAINING:
                up.add_metric(labels_of(member), float(self._pool.unusable(member) is None))
        for node_id, role, state, _ in self._pool.absent():
            if state == "down":
                up.add_metric([node_id, role.value], 0.0)
        return up

    def _pools(self) -> Metric:
        """How many nodes are ready is this router's own view, so it is right while the controller is away; the
        rest is the controller's."""
        family = GaugeMetricFamily(
            "tandem_pool_nodes",
            "Nodes of a pool by state: wanted, ready (requests may go there), starting for the first time, "
            "waiting for a machine, left_out until an operator starts them again",
            labels=["role", "state"],
        )
        ready = self._pool.ready_by_role()
        for role in Role:
            family.add_metric([role.value, "ready"], ready[role])
        for report in self._pool.reports:
            for state, count in (
                ("wanted", report.wanted),
                ("starting", report.starting),
                ("waiting", report.waiting),
                ("left_out", len(report.left_out)),
            ):
                family.add_metric([report.role.value, state], count)
        return family

    def _forecasts(self) -> Iterable[Metric]:
        """The controller's, so every router shows the same."""
        score = self._pool.forecasts
        graded = GaugeMetricFamily(
            "tandem_forecasts",
            "The last changes of sizes that were graded, by figure, by who made the change (order, load), and by whether what came lay in the forecast's interval: inside, outside",
            labels=["figure", "by", "outcome"],
        )
        error = GaugeMetricFamily("tandem_forecast_error_ratio", "The median error of these", labels=["figure", "by"])
        for one in score.figures:
            by = "load" if one.by_load else "order"
            graded.add_metric([one.what, by, "inside"], one.inside)
            graded.add_metric([one.what, by, "outside"], one.graded - one.inside)
            error.add_metric([one.what, by], one.error)
        yield graded
        yield error


def labels_of(member: Member) -> list[str]:
    return [member.info.node_id, member.info.role.value]


def _gauges(reporting: list[Member]) -> Iterable[Metric]:
    for field, text in _GAUGES.items():
        name = "tandem_node_" + field.removesuffix("_s") + ("_seconds" if field.endswith("_s") else "")
        family = GaugeMetricFamily(name, text, labels=["node", "role"])
        for member in reporting:
            family.add_metric(labels_of(member), getattr(member.status, field))
        yield family


def _tiers(reporting: list[Member]) -> Iterable[Metric]:
    """Makes a metric of every field of TierStatus."""
    for field in TierStatus.__struct_fields__:
        if field == "name":
            continue
        gauge = field in ("used_bytes", "total_bytes", "left_out")
        family: GaugeMetricFamily | CounterMetricFamily = (GaugeMetricFamily if gauge else CounterMetricFamily)(
            f"tandem_node_tier_{field}",
            f"Of a tier of the node's cache: {field.replace('_', ' ')}",
            labels=["node", "role", "tier"],
        )
        for member in reporting:
            for tier in member.status.tiers:
                value = getattr(tier, field)
                shown = float(bool(value)) if isinstance(value, str) else value
                family.add_metric([*labels_of(member), tier.name], shown)
        yield family


def _counters(reporting: list[Member]) -> Iterable[Metric]:
    """Makes a metric of every field of NodeCounters; a new field needs no code here."""
    for field in msgspec.structs.fields(NodeCounters):
        if field.name in _ELSEWHERE:
            continue
        if field.name == "transfer_wait_seconds":
            yield _transfer_waits(reporting)
            continue
        label = _PER_LABEL.get(field.name)
        family = CounterMetricFamily(
            f"tandem_node_{field.name}",
            f"Of the node since its epoch began: {field.name.replace('_', ' ')}",
            labels=["node", "role", *([label] if label else [])],
        )
        for member in reporting:
            value = getattr(member.counters, field.name)
            if label is None:
                family.add_metric(labels_of(member), value)
            else:
                least = _FROM_ZERO.get(field.name, {}) if value else {}
                for key, count in {**least, **value}.items():
                    family.add_metric([*labels_of(member), key], count)
        yield family


def _transfer_waits(reporting: list[Member]) -> Metric:
    family = HistogramMetricFamily(
        "tandem_node_transfer_wait_seconds",
        "Of the node since its epoch began: how long its KV transfers waited, by stage",
        labels=["node", "role", "stage"],
    )
    bounds = [*(str(bound) for bound in WAIT_BOUNDS_S), "+Inf"]
    for member in reporting:
        for stage, waits in member.counters.transfer_wait_seconds.items():
            if len(waits.counts) == len(bounds):  # a node of another version may have other bounds
                buckets = list(zip(bounds, itertools.accumulate(waits.counts), strict=True))
                family.add_metric([*labels_of(member), stage], buckets, waits.total_s)
    return family

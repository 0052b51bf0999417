"""The nodes' reports of their engines under vLLM's names and labels (`tandem_` instead of `vllm:`), so that a
dashboard made for vLLM shows a cluster's engines. The labels `engine`, which is vLLM's, and `node`, which all
other metrics of nodes have, are both the node's id.

The router's own measurements under vLLM's names are in `metrics`; all other reports of nodes are in
`node_metrics`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.router.member import Member
from tandem.router.node_metrics import labels_of
from tandem.router.pool import NodePool
from tandem.wire.requests import STEP_TOKEN_BOUNDS

_LABELS = ["engine", "node", "role"]
_STEP_BOUNDS = [*(str(float(bound)) for bound in STEP_TOKEN_BOUNDS), "+Inf"]

# fmt: off
# Their names, what they count, and the fields of NodeCounters that make them up.
_COUNTERS = (
    ("num_preemptions", "Requests that lost their blocks", ("preemptions",)),
    ("prefix_cache_queries", "Tokens of prompts that were looked for in the prefix cache", ("prompt_tokens_looked_up",)),
    ("prefix_cache_hits", "Tokens of prompts that were found in the prefix cache", ("prompt_tokens_cached",)),
    ("external_prefix_cache_queries", "Tokens of prompts that a peer or a tier was asked for", ("prompt_tokens_asked",)),
    (
        "external_prefix_cache_hits", "Tokens of prompts that came from a peer or a tier",
        ("prompt_tokens_received", "prompt_tokens_loaded"),
    ),
    ("spec_decode_num_drafts", "Drafts that were checked", ("speculative_steps",)),
    ("spec_decode_num_draft_tokens", "Tokens of the drafts that were checked", ("speculative_drafted",)),
    ("spec_decode_num_accepted_tokens", "Tokens of drafts that were right", ("speculative_accepted",)),
)
# fmt: on


class EngineCollector(Collector):
    def __init__(self, pool: NodePool) -> None:
        self._pool = pool

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        engines = self._pool.counted_members
        yield _cache_usage(engines)
        yield _cache_config(engines)
        for name, text, fields in _COUNTERS:
            family = CounterMetricFamily(f"tandem_{name}", text, labels=_LABELS)
            for member in engines:
                family.add_metric(_labels_of(member), sum(getattr(member.counters, field) for field in fields))
            yield family
        yield _accepted_by_position(engines)
        yield _step_tokens(engines)


def _labels_of(member: Member) -> list[str]:
    node, role = labels_of(member)
    return [node, node, role]


def _cache_usage(engines: list[Member]) -> Metric:
    family = GaugeMetricFamily(
        "tandem_kv_cache_usage_perc", "Share of the KV cache that is in use, 0 to 1", labels=_LABELS
    )
    for member in engines:
        status = member.status
        used = status.total_blocks - status.free_blocks
        family.add_metric(_labels_of(member), used / status.total_blocks if status.total_blocks else 0.0)
    return family


def _cache_config(engines: list[Member]) -> Metric:
    family = GaugeMetricFamily(
        "tandem_cache_config_info", "The KV cache of each node", labels=[*_LABELS, "block_size", "num_gpu_blocks"]
    )
    for member in engines:
        blocks = str(member.status.total_blocks)
        family.add_metric([*_labels_of(member), str(member.info.block_size), blocks], 1.0)
    return family


def _accepted_by_position(engines: list[Member]) -> Metric:
    family = CounterMetricFamily(
        "tandem_spec_decode_num_accepted_tokens_per_pos",
        "Tokens of drafts that were right, by their position in the draft",
        labels=[*_LABELS, "position"],
    )
    for member in engines:
        for position, count in enumerate(member.counters.speculative_accepted_at):
            family.add_metric([*_labels_of(member), str(position)], count)
    return family


def _step_tokens(engines: list[Member]) -> Metric:
    family = HistogramMetricFamily("tandem_iteration_tokens_total", "Tokens that one step computed", labels=_LABELS)
    for member in engines:
        counts = member.counters.step_tokens
        if len(counts) == len(_STEP_BOUNDS):  # a node of another version may have other bounds
            buckets = list(zip(_STEP_BOUNDS, map(float, itertools.accumulate(counts)), strict=True))
            family.add_metric(_labels_of(member), buckets, member.counters.tokens_scheduled)
    return family

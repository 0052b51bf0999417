"""What a node's status and its counters take from what its scheduler and its connector have counted. Fields are copied by name."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from tandem.engine.model.runner import ModelWork
from tandem.engine.scheduling.state import SchedulerStats, Totals
from tandem.kvtransfer.base import TransferStats
from tandem.wire.requests import EMPTY_TABLE, NodeCounters, NodeStatus

_GAUGES = [name for name in NodeStatus.__struct_fields__ if name in SchedulerStats.__struct_fields__]
_COUNTED = [name for name in NodeCounters.__struct_fields__ if name in Totals.__struct_fields__ and name != "steps"]
_RENAMED = {"transfers_finished": "outcomes", "transfer_refusals": "refused", "transfer_wait_seconds": "waits"}
_MOVED = {
    name: theirs
    for name in NodeCounters.__struct_fields__
    if (theirs := _RENAMED.get(name, name.removeprefix("transfer_"))) in TransferStats.__struct_fields__
}
_gauges, _counted = operator.attrgetter(*_GAUGES), operator.attrgetter(*_COUNTED)


def gauges(scheduler: SchedulerStats, now: float) -> dict[str, Any]:
    """The fields of a NodeStatus that a scheduler knows."""
    oldest = scheduler.oldest_arrival
    return {
        **dict(zip(_GAUGES, _gauges(scheduler), strict=True)),
        "loading": scheduler.blocked,
        "oldest_wait_s": max(0.0, now - oldest) if oldest is not None else 0.0,
    }


def counted(scheduler: SchedulerStats) -> dict[str, Any]:
    """The fields of NodeCounters that a scheduler counts, without its steps: some of those make no progress."""
    return dict(zip(_COUNTED, _counted(scheduler), strict=True))


def worked(scheduler: SchedulerStats, work: ModelWork | None) -> dict[str, Any]:
    """The fields of NodeCounters that estimate what the model computed and read."""
    if work is None:
        return {}
    flops = (
        scheduler.tokens_scheduled * work.flops_per_token
        + scheduler.output_tokens * work.flops_per_output
        + scheduler.pairs_read * work.flops_per_pair
    )
    of_kv = (scheduler.context_read + scheduler.tokens_scheduled) * work.kv_bytes_per_token
    return {"model_flops": flops, "model_bytes": float(sum(scheduler.step_tokens) * work.weight_bytes + of_kv)}


def moved(transfer: TransferStats) -> dict[str, Any]:
    """The fields of NodeCounters that a connector counts."""
    return {name: copied(getattr(transfer, theirs)) for name, theirs in _MOVED.items()}


def copied(count: Any) -> Any:
    """A copy of a table, or the same number. An empty table is not sent."""
    return (dict(count) if count else EMPTY_TABLE) if isinstance(count, Mapping) else count

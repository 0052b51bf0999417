"""Makes a node's status, and the counters in it, of what its scheduler and its connector have counted."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.engine.scheduling.state import SchedulerStats, Totals
from tandem.kvtransfer.base import TransferStats
from tandem.wire.nodes import NodeState, Role
from tandem.wire.requests import EMPTY_TABLE, NodeCounters, NodeStatus, TierStatus

_COUNTED = [
    name for name in NodeCounters.__struct_fields__ if name in Totals.__struct_fields__ and name != "steps"
]
_counted = operator.attrgetter(*_COUNTED)


def node_status(
    node_id: str,
    role: Role,
    epoch: int,
    state: NodeState,
    scheduler: SchedulerStats,
    *,
    now: float,
    counters: NodeCounters,
    transfers: int = 0,
    step_age_s: float = 0.0,
    detail: str = "",
    tiers: Sequence[TierStatus] = (),
    left_out: Sequence[str] = (),
    adapters: Mapping[str, str] | None = None,
    replaced_adapters: Mapping[str, tuple[str, ...]] | None = None,
    age_s: float = 0.0,
    slower: str = "",
) -> NodeStatus:
    oldest = scheduler.oldest_arrival
    return NodeStatus(
        node_id=node_id,
        role=role,
        epoch=epoch,
        state=state,
        free_blocks=scheduler.free_blocks,
        total_blocks=scheduler.total_blocks,
        running=scheduler.running,
        waiting=scheduler.waiting,
        waiting_tokens=scheduler.waiting_tokens,
        transfers=transfers,
        held_blocks=scheduler.held_blocks,
        step_age_s=step_age_s,
        counters=counters,
        detail=detail,
        loading=scheduler.blocked,
        cached_blocks=scheduler.cached_blocks,
        held_requests=scheduler.held_requests,
        wanted_blocks=scheduler.wanted_blocks,
        oldest_wait_s=max(0.0, now - oldest) if oldest is not None else 0.0,
        quarantined_blocks=scheduler.quarantined_blocks,
        pinned_requests=scheduler.pinned_requests,
        pinned_blocks=scheduler.pinned_blocks,
        tiers=tuple(tiers),
        left_out=tuple(left_out),
        adapters=adapters or EMPTY_TABLE,
        replaced_adapters=replaced_adapters or EMPTY_TABLE,
        age_s=age_s,
        slower=slower,
    )


def node_counters(
    scheduler: SchedulerStats,
    transfer: TransferStats | None,
    *,
    steps: int,
    step_seconds: float,
    malformed_frames: int,
    line_gaps: int,
    kv_checks: int,
    wrong_kv: Mapping[str, int],
    encoder_fallbacks: Mapping[str, int] | None = None,
) -> NodeCounters:
    """`transfer`: None for a node that neither sends nor receives KV. The scheduler's counters are copied by name."""
    moved = transfer if transfer is not None else TransferStats()
    return NodeCounters(
        **dict(zip(_COUNTED, _counted(scheduler), strict=True)),
        steps=steps,  # only steps that made progress
        step_seconds=step_seconds,
        malformed_frames=malformed_frames + moved.malformed_frames,
        line_gaps=line_gaps,
        transfer_bytes_sent=moved.bytes_sent,
        transfer_bytes_received=moved.bytes_received,
        transfer_blocks_sent=moved.blocks_sent,
        transfer_blocks_received=moved.blocks_received,
        transfers_finished=_copied(moved.outcomes),
        leases_expired=moved.leases_expired,
        transfer_descriptors_sent=moved.descriptors_sent,
        transfer_bytes_overlapped=moved.bytes_overlapped,
        transfer_refusals=_copied(moved.refused),
        transfer_blocks_freed=_copied(moved.blocks_freed),
        transfer_blocks_checked=moved.blocks_checked,
        wrong_kv=dict(Counter(moved.wrong_kv) + Counter(wrong_kv))
        if moved.wrong_kv or wrong_kv
        else EMPTY_TABLE,
        transfer_wait_seconds=_copied(moved.waits),
        kv_checks=kv_checks,
        encoder_fallbacks=_copied(encoder_fallbacks or {}),
    )


def _copied(counts: Mapping[str, Any]) -> Mapping[str, Any]:
    return dict(counts) if counts else EMPTY_TABLE

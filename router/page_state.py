"""What a router shows of its cluster, with several router processes on one port the sums of all: the page at /ui,
`tandem top`, `tandem status`, and the router in /cluster."""

from __future__ import annotations

import msgspec

from tandem.router.recent import Moment, RequestAccount, SlowRequest, Trouble
from tandem.wire.forecasts import ForecastScore
from tandem.wire.requests import NodeCounters, NodeMemory, NodeStatus

SLOWEST_SHOWN = 12


class TierRow(msgspec.Struct, frozen=True, array_like=True):
    """A tier of a node's KV cache."""

    name: str
    used_bytes: int
    total_bytes: int
    asked_tokens: int = 0  # not found on the device, and looked for here
    found_tokens: int = 0
    fetched_bytes: int = 0  # from other nodes
    mirrored_bytes: int = 0


class NodeRow(msgspec.Struct, frozen=True, array_like=True):
    """One node, as a router or a controller shows it. Sent as an array without names, because a page may ask for a
    thousand of these every second."""

    node_id: str
    role: str
    state: str
    why: str  # why it gets no requests; "" when it does
    running: int = 0
    waiting: int = 0
    loading: int = 0
    waiting_tokens: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    cached_blocks: int = 0
    held_blocks: int = 0
    transfers: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    preemptions: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0  # computed
    step_s: float = 0.0
    tiers: list[TierRow] = []
    notes: list[str] = []  # what an operator should know of it although it serves
    quarantined_blocks: int = 0
    pinned_blocks: int = 0
    is_silent: bool = False  # it has reported nothing, so its figures are unknown
    memory: NodeMemory | None = None

    @classmethod
    def of(
        cls,
        node_id: str,
        role: str,
        state: str,
        why: str,
        status: NodeStatus | None,
        counters: NodeCounters,
        step_s: float = 0.0,
    ) -> NodeRow:
        if status is None:
            return cls(node_id, role, state, why, is_silent=True)
        return cls(
            node_id,
            role,
            state,
            why,
            used_blocks=status.total_blocks - status.free_blocks,
            bytes_sent=counters.transfer_bytes_sent,
            bytes_received=counters.transfer_bytes_received,
            preemptions=counters.preemptions,
            output_tokens=counters.output_tokens,
            prompt_tokens=counters.prompt_tokens_computed,
            step_s=step_s,
            tiers=[TierRow(*(getattr(tier, name) for name in TierRow.__struct_fields__)) for tier in status.tiers],
            notes=_notes(status),
            **{name: getattr(status, name) for name in _AS_REPORTED},
        )


_AS_REPORTED = (
    "running", "waiting", "loading", "waiting_tokens", "total_blocks", "cached_blocks", "held_blocks", "transfers",
    "quarantined_blocks", "pinned_blocks", "memory",
)  # fmt: skip


def _notes(status: NodeStatus) -> list[str]:
    notes = [note for note in (status.detail, status.slower) if note]
    notes += [f"{each.device}: {each.why}" for each in status.sick]
    notes += [f"its {tier.name} tier is left out: {tier.left_out}" for tier in status.tiers if tier.left_out]
    notes += [f"takes nothing from {sender}: its KV arrived wrong here" for sender in status.left_out]
    return notes


class PoolRow(msgspec.Struct, frozen=True):
    role: str
    wanted: int
    ready: int
    starting: int
    waiting: int  # for a machine


class Pair(msgspec.Struct, frozen=True):
    """The transfers from one node to another that are under way."""

    source: str
    target: str
    transfers: int
    tokens: int
    longest_s: float


class ProcessState(msgspec.Struct, frozen=True):
    """One of several router processes on a port."""

    name: str
    answers: bool  # whether it answers the process that asks
    running: int = 0
    queued: int = 0
    unhealthy: str | None = None


class RouterState(msgspec.Struct, frozen=True):
    model: str
    version: str
    policy: str
    unhealthy: str | None
    draining: bool
    running: int
    queued: int
    queue_limit: int
    places: int
    places_held: int
    oldest_wait_s: float
    handover_s: float | None
    paused: list[str] = []  # pools and nodes that get no new requests
    processes: list[ProcessState] = []  # the processes on its port; empty when it is the only one
    tells_decisions: bool = False  # whether /ui/decisions answers who may see this
    local_prefill: str = ""
    inbox: str = ""
    wire_version: int = 0
    forecasts: ForecastScore = ForecastScore()  # as the controller last told it


class PageState(msgspec.Struct, frozen=True):
    now: float  # time of day
    router: RouterState
    ttft_s: float  # the targets
    inter_token_s: float
    nodes: list[NodeRow]
    moving: list[Pair]
    moments: list[Moment]
    latest: list[RequestAccount]
    slowest: list[SlowRequest]
    troubles: list[Trouble] = []  # of the last ten minutes, the latest first
    pools: list[PoolRow] = []  # as the controller knows them; empty without one
    nodes_since: float = 0.0  # time of day: when a node last joined or left

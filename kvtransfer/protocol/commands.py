"""Commands that the scheduler half plans and the endpoint carries out. `StepCommands` has those of one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec

from tandem.kvtransfer.base import ConnectorMetadata
from tandem.wire.nodes import PeerAddress

BlockTable = list[list[int]]


class BeginReceive(msgspec.Struct, frozen=True):
    """Consumer: these blocks wait for the KV of `num_tokens` tokens, of which the first `local_tokens` are here."""

    request_id: str
    transfer_id: str
    peer: PeerAddress
    num_tokens: int
    local_tokens: int
    token_hash: bytes
    first_block: list[int]
    block_ids: BlockTable
    when_idle: bool = False  # it is read while no other request's KV is to be read the same way


class CancelReceive(msgspec.Struct, frozen=True):
    """Consumer: the request was aborted while it waited. Report `failed_recving` when its blocks are safe."""

    request_id: str


class DeclineTransfer(msgspec.Struct, frozen=True):
    """Consumer: the request ended before its blocks were registered. The producer shall not wait for it."""

    transfer_id: str
    peer: PeerAddress


class AnnounceSend(msgspec.Struct, frozen=True):
    """Producer: the request waits in this node's line. Tell its consumer so when it renews its lease."""

    request_id: str
    transfer_id: str


class PlanSend(msgspec.Struct, frozen=True):
    """Producer: the request has blocks. After a preemption a second one replaces the first one's blocks."""

    request_id: str
    transfer_id: str
    peer: PeerAddress
    num_tokens: int
    token_hash: bytes
    block_ids: BlockTable
    when_idle: bool = False  # it is written while no other request's KV is to be written the same way


class ExtendSend(msgspec.Struct, frozen=True):
    """Producer: a request that is being computed got more blocks."""

    request_id: str
    block_ids: BlockTable


class FinishSend(msgspec.Struct, frozen=True):
    """Producer: the first token is known. The request keeps these blocks until `finished_sending`."""

    request_id: str
    first_token: int
    block_ids: BlockTable


class AbandonSend(msgspec.Struct, frozen=True):
    """Producer: the request ended without a first token. `kept`: report `finished_sending`."""

    request_id: str
    transfer_id: str
    kept: bool


class BeginGeneration(msgspec.Struct, frozen=True):
    """Everything in our cache may be wrong, and so may what is being sent and what peers have received."""


class FoundWrong(msgspec.Struct, frozen=True):
    """Consumer: KV that this producer handed over is wrong, though it arrived as it was sent."""

    peer: PeerAddress


class VoidSend(msgspec.Struct, frozen=True):
    """Producer: KV of this request turned out wrong. Its transfer ends, and nothing that has arrived may be used."""

    request_id: str


class CallBackSend(msgspec.Struct, frozen=True):
    """Producer: the blocks that this ended request keeps are needed. Its transfer ends if no consumer has registered."""

    request_id: str


class PreemptedRequests(msgspec.Struct, frozen=True):
    """Producer: from `at` on, the blocks of these requests may hold something else."""

    request_ids: list[str]
    at: float


Fence = Callable[[], bool]
"""Returns True once the device has written what the forward pass computed."""


class ComputedTokens(msgspec.Struct, frozen=True):
    """Producer: the KV of each request's first `num_tokens` tokens is in its blocks."""

    num_tokens: dict[str, int]
    at: float
    fence: Fence | None = None


class LayersComputed(msgspec.Struct, frozen=True):
    """Producer: a forward pass that brings these requests to `num_tokens` tokens has finished the layers in the first
    `slots` slots."""

    num_tokens: dict[str, int]
    slots: int
    fence: Fence | None = None


class ComputesAt(msgspec.Struct, frozen=True):
    """Our engine's rate for prompt tokens."""

    tokens_per_s: float


Command = (
    BeginReceive
    | CancelReceive
    | DeclineTransfer
    | AnnounceSend
    | PlanSend
    | ExtendSend
    | FinishSend
    | AbandonSend
    | BeginGeneration
    | FoundWrong
    | VoidSend
    | CallBackSend
    | PreemptedRequests
    | LayersComputed
    | ComputedTokens
    | ComputesAt
)


@dataclasses.dataclass(slots=True)
class StepCommands(ConnectorMetadata):
    preempted: list[str] = dataclasses.field(default_factory=list)
    before_forward: list[Command] = dataclasses.field(default_factory=list)
    computed: dict[str, int] = dataclasses.field(default_factory=dict)  # after the forward pass
    num_tokens: int = 0  # how many tokens the step computes for requests that are being sent

"""What the scheduler half plans and the endpoint carries out; `StepCommands` is one step's worth of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec

from tandem.kvtransfer.base import ConnectorMetadata
from tandem.wire.nodes import PeerAddress

BlockTable = list[list[int]]


class BeginReceive(msgspec.Struct, frozen=True):
    """Consumer: these blocks wait for the KV of `num_tokens` tokens; the first `local_tokens` are here already."""

    request_id: str
    transfer_id: str
    peer: PeerAddress
    num_tokens: int
    local_tokens: int
    token_hash: bytes
    first_block: list[int]
    block_ids: BlockTable


class CancelReceive(msgspec.Struct, frozen=True):
    """Consumer: the request was aborted while it waited; report `failed_recving` when its blocks are safe."""

    request_id: str


class DeclineTransfer(msgspec.Struct, frozen=True):
    """Consumer: the request ended before it asked for anything. The producer should not wait for it."""

    transfer_id: str
    peer: PeerAddress


class AnnounceSend(msgspec.Struct, frozen=True):
    """Producer: the request is in line here. Its consumer is told that it waits."""

    request_id: str
    transfer_id: str


class PlanSend(msgspec.Struct, frozen=True):
    """Producer: the request has blocks. A second one for the same request replaces them (it was preempted)."""

    request_id: str
    transfer_id: str
    peer: PeerAddress
    num_tokens: int
    token_hash: bytes
    block_ids: BlockTable


class ExtendSend(msgspec.Struct, frozen=True):
    """Producer: more blocks for a request that is being computed."""

    request_id: str
    block_ids: BlockTable


class FinishSend(msgspec.Struct, frozen=True):
    """Producer: the first token is known and the blocks, which are these, stay until `finished_sending`."""

    request_id: str
    first_token: int
    block_ids: BlockTable


class AbandonSend(msgspec.Struct, frozen=True):
    """Producer: the request ended without a first token. `kept` asks for `finished_sending`."""

    request_id: str
    transfer_id: str
    kept: bool


class PreemptedRequests(msgspec.Struct, frozen=True):
    """Producer: from `at` on, the blocks of these requests may hold something else."""

    request_ids: list[str]
    at: float


Fence = Callable[[], bool]
"""True once the device has written what the forward pass computed."""


class ComputedTokens(msgspec.Struct, frozen=True):
    """Producer: of each request, so many leading tokens have their KV in its blocks."""

    num_tokens: dict[str, int]
    at: float
    fence: Fence | None = None


class LayersComputed(msgspec.Struct, frozen=True):
    """Producer: inside a forward pass that will bring these requests to so many tokens, the layers of the first
    `slots` slots are done."""

    num_tokens: dict[str, int]
    slots: int
    fence: Fence | None = None


class ComputesAt(msgspec.Struct, frozen=True):
    """How many tokens of prompts our engine computes in a second."""

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
    | PreemptedRequests
    | LayersComputed
    | ComputedTokens
    | ComputesAt
)


@dataclasses.dataclass(slots=True)
class StepCommands(ConnectorMetadata):
    preempted: list[str] = dataclasses.field(default_factory=list)
    before_forward: list[Command] = dataclasses.field(default_factory=list)
    computed: dict[str, int] = dataclasses.field(default_factory=dict)  # once the forward pass is over
    num_tokens: int = 0  # computed in this step for requests that are being sent

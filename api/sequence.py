"""One sequence that a request asks for: what a plan hands to whoever has it generated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from tandem.wire.embeds import PromptEmbeds
from tandem.wire.images import MediaFeature
from tandem.wire.nodes import NodeInfo
from tandem.wire.pooling import Pooling
from tandem.wire.sampling import SamplingParams
from tandem.wire.tracing import TracePhase


class TraceNotes(Protocol):
    """Where it is noted what happens to a traced request. Plans only hand it on."""

    def span(self, phase: TracePhase, start: float, end: float, tokens: int = 0) -> None: ...
    def attempt(self, request_id: str, nodes: Iterable[NodeInfo], decision: str) -> None: ...
    def considered(self, nodes: list[Any]) -> None: ...
    def arrived(self, at: float, node_id: str, tokens: int) -> None: ...
    def finished(self, reason: str) -> None: ...


class KeptAnswer(msgspec.Struct, frozen=True):
    """The decode node keeps the answer, for any router that asks for it by this id."""

    answer_id: str
    note: bytes  # what such a router needs to turn the tokens into the answer


class SequenceSpec(msgspec.Struct, frozen=True):
    label: str  # the HTTP request's id, for logs
    prompt_token_ids: list[int]
    sampling: SamplingParams  # with a drawn seed: any node continues exactly where another stopped
    deadline: float  # by the dispatcher's clock
    priority: int = 0
    cache_salt: str | None = None
    lora: str | None = None  # the adapter's identity: wire.adapters
    media: list[MediaFeature] = []  # where images, or the rows of `embeds`, stand in the prompt
    images: list[bytes] = []  # the images' files
    embeds: PromptEmbeds | None = None  # replaces all of the prompt's tokens
    session: str | None = None
    job_id: str | None = None  # the agent's job that this is a turn of, made distinct by tenant
    is_last_step: bool = False  # this is the job's last turn
    trace: TraceNotes | None = None
    arrived: float | None = None  # when the HTTP request arrived; None means now
    keep: KeptAnswer | None = None
    reads_ahead: bool = False  # the first part of an arriving prompt; its one token is dropped
    pooling: Pooling | None = None  # the result is a vector of the prompt instead of tokens

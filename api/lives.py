"""What an answer is read from: the lives of a request's sequences, as far as the API needs to see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tandem.api.logprob_store import LogprobStore
from tandem.api.sequence import SequenceSpec
from tandem.base.errors import TandemError
from tandem.wire.sampling import FinishReason, TokenLogprobs


class AnswerTokens(Protocol):
    """The tokens that are known, without a gap; `logprobs` is as long if log-probabilities are wanted."""

    tokens: list[int]
    logprobs: LogprobStore
    finish: FinishReason | None
    stop_token: int | None


class ReadableLife(Protocol):
    """One answer, as a choice reads it: either a request's life or a background answer that is followed."""

    spec: SequenceSpec
    finish: FinishReason | None
    error: TandemError | None
    ended: bool

    @property
    def ledger(self) -> AnswerTokens: ...
    @property
    def cached_tokens(self) -> int | None: ...
    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None: ...
    def stop(self) -> None: ...
    def fail(self, error: TandemError) -> None: ...


class ReadableLives(Protocol):
    @property
    def lives(self) -> Sequence[ReadableLife]: ...
    async def news(self) -> object: ...
    def cancel(self) -> None: ...


class FreshLives(ReadableLives, Protocol):
    """Those of a running request: `news` returns the lives that have some."""

    async def news(self) -> Sequence[ReadableLife]: ...


class VectorLife(Protocol):
    error: TandemError | None
    vector: bytes | None


class VectorLives(Protocol):
    @property
    def lives(self) -> Sequence[VectorLife]: ...
    async def news(self) -> Sequence[VectorLife]: ...

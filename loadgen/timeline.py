"""One request as it happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from tandem.base.errors import TandemError


class RequestFailure(TandemError):
    """A measured request did not get its answer. Failures are counted by `kind`:

    connect         the connection was refused, or TLS failed
    disconnected    the connection ended before the answer did
    timeout         the request's own deadline passed
    http_<status>   a response other than 200
    stream_error    an error event in a stream that had begun
    truncated       the stream ended properly, but without its [DONE]
    empty           a stream without a single token
    malformed       not HTTP, not SSE, or not a completion
    """

    code = "request_failed"

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True, eq=False)
class Timeline:
    """Times are seconds on one monotonic clock. Filled while the request runs; read only after it has ended."""

    label: str
    max_tokens: int
    sent_at: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    prompt_tokens: int = 0  # the server's count, or the workload's until the server reports one
    reported_tokens: int | None = None  # the server's count of the answer's tokens
    failure: RequestFailure | None = None
    ended_at: float = 0.0  # also set for failures
    trace: str = ""  # the id under which the server is asked to trace the request

    @property
    def succeeded(self) -> bool:
        return self.failure is None

    @property
    def output_tokens(self) -> int:
        """The server's count; without one, each chunk counts as one token."""
        return len(self.chunk_times) if self.reported_tokens is None else self.reported_tokens

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] - self.sent_at

    @property
    def e2e(self) -> float:
        return self.chunk_times[-1] - self.sent_at

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token, which has no second token to time."""
        others = self.output_tokens - 1
        return (self.e2e - self.ttft) / others if others > 0 else None

    @property
    def inter_token(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]

"""The client with which `tandem profile` asks a serving cluster for answers, and reads from their traces which steps took how long."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.cluster.api_client import checked_url, decoded, trusted
from tandem.router.tracing.record import NodePart, TraceRecord
from tandem.wire.nodes import Role
from tandem.wire.tracing import TracePhase

_TRACE_WITHIN_S = 5.0
_ASK_AGAIN_S = 0.05
_ANSWER_S = 600.0

T = TypeVar("T")


class ClusterNode(msgspec.Struct):
    """A node, as GET /cluster tells of it."""

    role: Role
    max_model_len: int
    block_size: int
    total_blocks: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    start_s: float = 0.0  # 0: the controller does not know


def refuse_contexts(nodes: Sequence[ClusterNode]) -> None:
    """Raises a ConfigurationError for nodes whose costs a plan cannot use."""
    if any(node.context_parallel > 1 for node in nodes):
        raise ConfigurationError(
            "some nodes' ranks read prompts together (context_parallel), and no plan has such nodes: measure nodes where it is 1"
        )


class _RouterFacts(msgspec.Struct):
    model: str


class _ClusterFacts(msgspec.Struct):
    router: _RouterFacts
    nodes: list[ClusterNode]


class _Completion(msgspec.Struct):
    id: str


@dataclasses.dataclass(frozen=True, slots=True)
class WorkStep:
    """One step of a node, from the trace of a request that was in it."""

    began: float
    ended: float
    tokens: int
    beside: int
    reads: bool
    role: str

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclasses.dataclass(frozen=True, slots=True)
class ProfiledRequest:
    """One request: its trace, and how long its client waited."""

    record: TraceRecord
    seconds: float

    @property
    def steps(self) -> list[WorkStep]:
        return sorted((step for part in self.record.nodes for step in _steps_of(part)), key=lambda step: step.began)


def _steps_of(part: NodePart) -> Iterator[WorkStep]:
    for step, work in pairwise(part.spans):
        if step.phase is TracePhase.STEP and work.phase in (TracePhase.PREFILL, TracePhase.DECODE):
            reads = work.phase is TracePhase.PREFILL
            yield WorkStep(step.start, step.end, step.tokens, step.beside, reads, part.role)


class ProfileClient:
    def __init__(self, url: str, key: str | None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url = checked_url(url)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=_ANSWER_S,
            transport=transport,
            trust_env=False,
            verify=trusted(self.url),
        )
        self._model = ""

    async def close(self) -> None:
        await self._http.aclose()

    async def facts(self) -> list[ClusterNode]:
        facts = await self._read("/cluster", _ClusterFacts)
        self._model = facts.router.model
        return facts.nodes

    async def ask(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        traced: bool = True,
        stream: bool = False,
        begun: asyncio.Event | None = None,
    ) -> ProfiledRequest | None:
        """Sends one completion request. Returns its trace, or None if not `traced`.

        `stream`: stream the answer as users do. That costs the router and the client time for each token, and on the node's own machine
        it takes this time from the node. `begun` is set with the first token, or when no token will come."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        headers = {"x-tandem-trace": "1"} if traced else {}
        began = time.perf_counter()
        if stream:
            try:
                content = await self._streamed("/v1/completions", body, headers, begun or asyncio.Event())
            finally:
                if begun is not None:
                    begun.set()
        else:
            answer = await self._send("POST", "/v1/completions", json=body, headers=headers)
            content = answer.content
        seconds = time.perf_counter() - began
        if not traced:
            return None
        name = decoded(f"{self.url}/v1/completions", content, _Completion).id
        return ProfiledRequest(await self._trace(name), seconds)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def asked(self, prompt: Sequence[int], tokens: int) -> ProfiledRequest:
        found = await self.ask(prompt, tokens)
        if found is None:
            raise Unavailable("the request was not traced")
        return found

    async def _trace(self, name: str) -> TraceRecord:
        """Waits up to `_TRACE_WITHIN_S` for the complete trace: a prefill node sends its part a moment after the answer's end."""
        deadline = time.monotonic() + _TRACE_WITHIN_S
        while True:
            record = await self._read(f"/traces/{quote(name, safe='')}", TraceRecord)
            if record.ended is not None and not record.missing:
                return record
            if time.monotonic() > deadline:
                raise Unavailable(f"{', '.join(record.missing)} did not tell of its part in {name}")
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _streamed(self, path: str, body: dict[str, Any], headers: dict[str, str], begun: asyncio.Event) -> bytes:
        """Reads the whole stream and returns its first event."""
        first, last = b"", ""
        try:
            async with self._http.stream("POST", path, json=body, headers=headers) as answer:
                if not answer.is_success:
                    text = (await answer.aread()).decode(errors="replace")
                    raise Unavailable(f"{self.url}{path} answered {answer.status_code}: {text[:200]}")
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        first = first or line.removeprefix("data: ").encode()
                        begun.set()
                    last = line or last
        except httpx.HTTPError as error:
            raise Unavailable(f"{self.url} does not answer ({error}): is `tandem serve` running there?") from error
        if last != "data: [DONE]":
            raise Unavailable(f"{self.url}{path} ended its stream with {last[:200]!r}")
        return first

    async def _read(self, path: str, kind: type[T]) -> T:
        return decoded(f"{self.url}{path}", (await self._send("GET", path)).content, kind)

    async def _send(self, method: str, path: str, **what: Any) -> httpx.Response:
        try:
            answer = await self._http.request(method, path, **what)
        except httpx.HTTPError as error:
            raise Unavailable(f"{self.url} does not answer ({error}): is `tandem serve` running there?") from error
        if not answer.is_success:
            raise Unavailable(f"{self.url}{path} answered {answer.status_code}: {answer.text[:200]}")
        return answer

"""Counts for `benchmarks.burst`: every request with its end, the tokens that a server computed, and how many of them were of use."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from benchmarks.lib.tables import Floor, at_least, at_most
from tandem.base.errors import Unavailable
from tandem.loadgen.metrics import ServiceLevel
from tandem.loadgen.timeline import RequestFailure, Timeline

_WINDOW_S = 10.0  # the length of the windows in which goodput must have recovered
_BACK = 0.95
_LATEST_S = 30.0
_DURING = 0.9
_THROWN = 0.05
_VLLM = re.compile(r"^vllm:(prompt|generation)_tokens_total(?:\{[^}]*\})? (\S+)$", re.M)
_QUIET_S = 1.5  # counters can be a second old


@dataclass(slots=True, eq=False)
class BurstQuestion:
    timeline: Timeline
    at: float  # when it was to be sent, from the beginning of the load
    retry_after: bool = False


class Tokens(msgspec.Struct, frozen=True):
    prompt: float = 0.0
    output: float = 0.0

    def less(self, other: Tokens) -> Tokens:
        return Tokens(self.prompt - other.prompt, self.output - other.output)


class BurstStage(msgspec.Struct, frozen=True):
    name: str
    begin: float
    end: float
    rate: float

    @property
    def count(self) -> int:
        return max(1, round(self.rate * (self.end - self.begin)))


class BurstFigures(msgspec.Struct):
    system: str
    capacity: float  # requests per second
    stages: list[BurstStage]
    requests: int
    goodput: dict[str, float]  # by stage: requests per second within the service level
    during_share: float  # goodput during the burst, as a share of the capacity
    recovered_after_s: float | None  # from the end of the burst; None: not while it was observed
    turned_away: int  # with 503 or 429
    with_retry_after: int
    failed: int  # had no whole answer for another reason, mostly because the client stopped waiting
    failures: dict[str, int]
    computed: Tokens
    answered: Tokens  # that are in whole answers
    thrown_prompt_share: float
    thrown_output_share: float


def floors_of(measured: BurstFigures) -> list[Floor]:
    title = measured.system
    thrown = max(measured.thrown_prompt_share, measured.thrown_output_share)
    back = math.inf if measured.recovered_after_s is None else measured.recovered_after_s
    untold = measured.turned_away - measured.with_retry_after
    return [
        at_least(f"{title}: goodput during the burst, of the capacity", measured.during_share, _DURING),
        at_most(f"{title}: until goodput is 95% of what it was, after the burst", back, _LATEST_S, "s"),
        at_most(f"{title}: computed tokens that are in no whole answer", thrown, _THROWN),
        at_most(f"{title}: turned away and not told when to come back", untold, 0),
    ]


class BurstClient:
    """Sends requests to one server, each on a connection of its own, as that many users would."""

    def __init__(
        self,
        url: str,
        model: str,
        patience_s: float,
        *,
        is_tandem: bool,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            base_url=url, timeout=None, limits=limits, trust_env=False, transport=transport
        )
        self._model = model
        self._patience_s = patience_s
        self.is_tandem = is_tandem

    async def __aenter__(self) -> BurstClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def text_of(self, path: str) -> str:
        try:
            return (await self._http.get(path, timeout=30.0)).raise_for_status().text
        except httpx.HTTPError as error:
            raise Unavailable(f"{path} is not shown: {error}") from error

    async def play(self, prompts: Sequence[str], times: Sequence[float], tokens: int) -> list[BurstQuestion]:
        """Sends each request at its time, whatever became of the others. Returns when all have ended."""
        began = time.perf_counter()

        async def one(prompt: str, at: float) -> BurstQuestion:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            return await self.ask(prompt, at, tokens)

        return list(await asyncio.gather(*(one(*pair) for pair in zip(prompts, times, strict=True))))

    async def crowd(self, prompts: Sequence[str], users: int, tokens: int) -> list[BurstQuestion]:
        """Sends the next request as soon as one of the users is free. Returns when all have ended."""
        places = asyncio.Semaphore(users)

        async def one(prompt: str) -> BurstQuestion:
            async with places:
                return await self.ask(prompt, 0.0, tokens)

        return list(await asyncio.gather(*map(one, prompts)))

    async def ask(self, prompt: str, at: float, tokens: int) -> BurstQuestion:
        """Always returns; the timeline holds the failure."""
        asked = BurstQuestion(Timeline("burst", tokens), at)
        timeline = asked.timeline
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        timeline.sent_at = time.perf_counter()
        try:
            async with (
                asyncio.timeout(self._patience_s),
                self._http.stream("POST", "/v1/completions", json=body) as response,
            ):
                if response.status_code != 200:
                    asked.retry_after = "retry-after" in response.headers
                    said = (await response.aread()).decode(errors="replace")[:200]
                    raise RequestFailure(f"http_{response.status_code}", said)
                await _read(response, timeline)
        except RequestFailure as failure:
            timeline.failure = failure
        except TimeoutError:
            timeline.failure = RequestFailure("timeout", f"no answer within {self._patience_s:g} s")
        except httpx.HTTPError as error:
            timeline.failure = RequestFailure("disconnected", f"{type(error).__name__}: {error}")
        timeline.ended_at = time.perf_counter()
        return asked


async def _read(response: httpx.Response, timeline: Timeline) -> None:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            if not timeline.chunk_times:
                raise RequestFailure("empty", "a stream without a token")
            return
        if not line.startswith("data: "):
            continue
        event: dict[str, Any] = msgspec.json.decode(line[6:])
        if "error" in event:
            raise RequestFailure("stream_error", line[6:200])
        if event.get("usage"):
            timeline.prompt_tokens = int(event["usage"]["prompt_tokens"])
            timeline.reported_tokens = int(event["usage"]["completion_tokens"])
        if any(choice.get("text") for choice in event["choices"]):
            timeline.chunk_times.append(time.perf_counter())
    raise RequestFailure("truncated", "the stream ended without [DONE]")


async def tokens_computed(client: BurstClient) -> Tokens:
    """Returns the tokens that the server has computed since its start, by its own counters."""
    await asyncio.sleep(_QUIET_S)
    if client.is_tandem:
        nodes = msgspec.json.decode(await client.text_of("/cluster"))["nodes"]
        counters = [node.get("counters", {}) for node in nodes]
        prompt = sum(one.get("prompt_tokens_computed", 0) for one in counters)
        # A prefill node's one output token of each answer is also counted as the decode node's first.
        output = sum(
            node.get("counters", {}).get("output_tokens", 0) for node in nodes if node["role"] != "prefill"
        )
        return Tokens(prompt, output)
    counted = dict.fromkeys(("prompt", "generation"), 0.0)
    for name, value in _VLLM.findall(await client.text_of("/metrics")):
        counted[name] += float(value)
    return Tokens(counted["prompt"], counted["generation"])


def attained(asked: Sequence[BurstQuestion], slo: ServiceLevel) -> float:
    return sum(slo.is_met_by(one.timeline) for one in asked) / len(asked) if asked else 0.0


def measure(
    system: str,
    capacity: float,
    stages: Sequence[BurstStage],
    asked: Sequence[BurstQuestion],
    computed: Tokens,
    slo: ServiceLevel,
) -> BurstFigures:
    of_stage = {
        stage.name: [
            one for one in asked if stage.begin <= one.at < stage.end or one.at == stage.end == stages[-1].end
        ]
        for stage in stages
    }
    goodput = {
        stage.name: sum(slo.is_met_by(one.timeline) for one in of_stage[stage.name])
        / (stage.end - stage.begin)
        for stage in stages
    }
    whole = [one.timeline for one in asked if one.timeline.succeeded]
    answered = Tokens(
        float(sum(one.prompt_tokens for one in whole)), float(sum(one.output_tokens for one in whole))
    )
    failures: dict[str, int] = {}
    for one in asked:
        if one.timeline.failure is not None:
            kind = one.timeline.failure.kind
            failures[kind] = failures.get(kind, 0) + 1
    turned_away = failures.get("http_503", 0) + failures.get("http_429", 0)
    return BurstFigures(
        system=system,
        capacity=capacity,
        stages=list(stages),
        requests=len(asked),
        goodput=goodput,
        during_share=goodput["burst"] / capacity,
        recovered_after_s=recovery(of_stage["before"], of_stage["after"], stages[-1], slo),
        turned_away=turned_away,
        with_retry_after=sum(one.retry_after for one in asked),
        failed=sum(failures.values()) - turned_away,
        failures=failures,
        computed=computed,
        answered=answered,
        thrown_prompt_share=_share(computed.prompt, answered.prompt),
        thrown_output_share=_share(computed.output, answered.output),
    )


def recovery(
    before: Sequence[BurstQuestion], after: Sequence[BurstQuestion], stage: BurstStage, slo: ServiceLevel
) -> float | None:
    """Returns from when on, in every window of ten seconds, as many requests meet the service level as before, less 5%."""
    wanted = _BACK * attained(before, slo)
    starts = sorted({one.at for one in after if one.at <= stage.end - _WINDOW_S} | {stage.begin})
    back: float | None = None
    for start in starts:
        window = [one for one in after if start <= one.at < start + _WINDOW_S]
        if not window or attained(window, slo) < wanted:
            back = None
        elif back is None:
            back = start
    return None if back is None else back - stage.begin


def _share(computed: float, answered: float) -> float:
    return max(0.0, 1 - answered / computed) if computed else 0.0

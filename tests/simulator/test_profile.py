"""The profiler, on a cluster with known costs, measures these costs."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tandem.base.errors import ConfigurationError, InternalError, Unavailable
from tandem.cluster.cli import main
from tandem.router.tracing.record import NodePart, TraceRecord
from tandem.simulator.costs import CostModel, Width, line_through
from tandem.simulator.profile import BESIDE, Profiler
from tandem.simulator.profile_client import ProfileClient
from tandem.wire.tracing import Span, TracePhase, TransferRecord
from tests.simulator.worlds import node_costs

TRUE = msgspec.structs.replace(node_costs(blocks=20_000, max_model_len=8192), mixed_saved_s=0.003)
IN_TRAFFIC = 1.1  # times as long takes a step that writes
APART_S = 1000.0  # between two requests of the traffic
PIECE = 100  # of a prompt that is read beside an answer


class TracedCluster:
    """Answers as a router does, with traces of steps that take what `TRUE` says."""

    def __init__(self, *roles: str, alone: int = 0, widths: Sequence[int] = (1, 1, 1), tokens: int = 0) -> None:
        """`tokens`: of the longest request, which its cache just holds."""
        self.roles = roles
        self.tokens = tokens
        self.widths = widths
        self.alone = alone  # steps of an answer before the rest of its batch has begun
        # prompts, tokens that are cached, tokens of an answer, whether another answer is written meanwhile, and when the request comes
        self.asked: dict[str, tuple[list[int], int, int, bool, float]] = {}
        self.batch = 1  # that is written together next: so many prompts were read one after another
        self.reads = False
        self.cached: dict[tuple[int, ...], int] = {}
        self.writes = False  # the next prompt is read while an answer is written
        self.now = 0.0
        self.is_traffic = False  # from now on; then requests come one by one, long after each other
        self._names = (f"cmpl-{number}" for number in itertools.count())

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/cluster":
            nodes = [
                {
                    "role": role,
                    "max_model_len": self.tokens or TRUE.max_model_len,
                    "block_size": 16,
                    "total_blocks": self.tokens // 16 or TRUE.blocks - 1,
                    "tensor_parallel": width,
                    "start_s": 4.0 + index,
                }
                for index, (role, width) in enumerate(zip(self.roles, self.widths, strict=False))
            ]
            return httpx.Response(200, json={"router": {"model": "m"}, "nodes": nodes})
        if request.url.path.startswith("/traces/"):
            name = request.url.path.rpartition("/")[2]
            record = self.trace(name, *self.asked[name])
            return httpx.Response(200, content=msgspec.json.encode(record))
        body = json.loads(request.content)
        name = next(self._names)
        prompt, tokens = body["prompt"], body["max_tokens"]
        # One token is always computed; of a prompt that was there as it is, no more than that is cached.
        found = self.cached.get(tuple(prompt[:64]), 0) if len(prompt) > 64 else 0
        known = min(found, (len(prompt) - 1) // 16 * 16)
        self.now += APART_S * self.is_traffic
        self.asked[name] = prompt, known, tokens, self.writes, self.now
        self.writes = body["stream"] and len(prompt) == BESIDE and len(self.roles) == 1
        if tokens == 2:
            self.batch = self.batch + 1 if self.reads else 1
        self.reads = tokens == 2
        self.cached[tuple(prompt[:64])] = len(prompt) // 16 * 16
        if body["stream"]:
            return httpx.Response(200, text=f'data: {{"id": "{name}"}}\n\ndata: {{"id": "{name}"}}\n\ndata: [DONE]\n\n')
        return httpx.Response(200, json={"id": name})

    def trace(self, name: str, prompt: list[int], known: int, tokens: int, beside: bool, came: float) -> TraceRecord:
        now = came + TRUE.request.arrive_s
        split = len(self.roles) == 2
        reading: list[Span] = []
        for begin in range(known, len(prompt), PIECE if beside else len(prompt)):
            piece = min(PIECE, len(prompt) - begin) if beside else len(prompt) - begin
            end = now + TRUE.step_s([(piece, begin)], int(beside), BESIDE)
            reading += pair(now, end, piece, int(beside), reads=True)
            now = end
        now = end + (TRUE.transfer.handover_s + TRUE.transfer_s(len(prompt) - known) if split else 0.0)
        writing: list[Span] = []
        for place in range(tokens - 1):
            here = 1 if place < self.alone or came else self.batch
            seconds = TRUE.step_s([], here, here * (len(prompt) + place)) * (IN_TRAFFIC if came else 1.0)
            writing += pair(now, now + seconds, 1, here - 1, reads=False)
            now += seconds
        moved = TransferRecord("r", "sent", int(len(prompt) * TRUE.kv_bytes_per_token), 1) if split else None
        parts = [part(self.roles[-1], reading, moved), part(self.roles[0], writing, None)]
        return TraceRecord(
            name, "c", "t", "s", None, "", "", "m", came, 0.0, now, 200, len(prompt), tokens, [], [], [], parts, []
        )


class TracedClient(ProfileClient):
    def __init__(self, cluster: TracedCluster) -> None:
        super().__init__("http://cluster", None, httpx.MockTransport(cluster))
        self._cluster = cluster

    async def pause(self, seconds: float) -> None:
        self._cluster.is_traffic = True


def pair(begin: float, end: float, tokens: int, beside: int, *, reads: bool) -> list[Span]:
    work = TracePhase.PREFILL if reads else TracePhase.DECODE
    return [Span(TracePhase.STEP, begin, end, tokens, beside), Span(work, begin, end, tokens, beside)]


def part(role: str, spans: list[Span], moved: TransferRecord | None) -> NodePart:
    return NodePart(role, role, "r", spans, 0.0, None, 0, moved)


@contextlib.asynccontextmanager
async def a_profiler(
    cluster: TracedCluster, rng: random.Random | None = None, said: list[str] | None = None
) -> AsyncIterator[Profiler]:
    """`said`: gets what is being measured."""
    client, heard = TracedClient(cluster), said if said is not None else []
    try:
        yield Profiler(client, lambda what, share: heard.append(what), repeats=1, rng=rng)
    finally:
        await client.close()


async def measured(*roles: str, **cluster: Any) -> CostModel:
    return await measured_of(TracedCluster(*roles, **cluster))


async def measured_of(cluster: TracedCluster, said: list[str] | None = None, seed: int | None = 0) -> CostModel:
    async with a_profiler(cluster, None if seed is None else random.Random(seed), said) as profiler:
        return await profiler.measure("known")


@pytest.mark.parametrize("roles", [("aggregated",), ("decode", "prefill")])
async def test_the_costs_of_a_known_cluster_are_found(roles: tuple[str, ...]) -> None:
    cluster = TracedCluster(*roles, widths=(2, 2))
    costs = await measured_of(cluster)
    assert costs.width == Width(2)
    assert (costs.blocks, costs.max_model_len) == (TRUE.blocks, TRUE.max_model_len)
    for size in (16, 512, 2048):
        assert costs.prefill.at(size, 0) == pytest.approx(TRUE.step_s([(size, 0)]), rel=1e-6)
    for batch, context in ((1, 1044), (8, 1044), (32, 84)):
        assert costs.decode.at(batch, context) == pytest.approx(
            TRUE.step_s([], batch, batch * context) * (IN_TRAFFIC if len(roles) == 2 else 1.0), rel=0.01
        )
    assert costs.request.arrive_s == pytest.approx(TRUE.request.arrive_s)
    assert costs.start_s == 3.0 + len(roles), "of the node that took longest"
    assert costs.fit["prefill"].worst < 1e-6
    assert costs.fit["decode"].worst < 0.05
    if len(roles) == 1:
        assert costs.mixed_saved_s == pytest.approx(TRUE.mixed_saved_s, rel=0.05)
        assert costs.fit["mixed"].points > 30
        assert costs.fit["mixed"].worst < 0.01
        # A cluster can be profiled again: it still has the prompts of the profile before in its cache.
        again = await measured_of(cluster, seed=None)
        for point in ((64, 0), (512, 1024), (2048, 0)):
            assert again.prefill.at(*point) == pytest.approx(costs.prefill.at(*point), rel=1e-6)
    if len(roles) == 2:
        assert costs.transfer.handover_s == pytest.approx(TRUE.transfer.handover_s, rel=1e-3)
        assert costs.transfer_s(1000) == pytest.approx(TRUE.transfer_s(1000), rel=1e-3)


async def test_large_batches_after_long_prompts_are_not_measured_where_those_take_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What they take follows from smaller ones."""
    batch_s = 32 * TRUE.step_s([(3072, 0)])
    monkeypatch.setattr("tandem.simulator.profile.LONGEST_PROMPTS_S", batch_s / 3)
    said: list[str] = []
    costs = await measured_of(TracedCluster("aggregated"), said)
    assert "writes 8 answers after 3072 tokens" in said
    assert "writes 16 answers after 3072 tokens" not in said
    for batch in (1, 8, 16, 32):
        expected = TRUE.step_s([], batch, batch * 3092)
        assert costs.decode.at(batch, 3092) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("tokens", [320, 1200, 3600])
async def test_a_cache_that_holds_one_long_request_is_profiled_with_shorter_ones(tokens: int) -> None:
    costs = await measured("aggregated", tokens=tokens)
    assert costs.decode.at(1, 84) == pytest.approx(TRUE.step_s([], 1, 84), rel=0.01)


async def test_requests_that_are_too_short_to_measure_are_said_to_be_so() -> None:
    with pytest.raises(ConfigurationError, match="requests of 96 tokens, in a cache of 96, are too short"):
        await measured("aggregated", tokens=96)


async def test_answers_that_begin_one_after_another_are_longer_until_they_run_together() -> None:
    """As prompts of gigabytes do that come over one link."""
    costs = await measured("decode", "prefill", alone=200)
    assert costs.decode.at(8, 1044) == pytest.approx(IN_TRAFFIC * TRUE.step_s([], 8, 8 * 1264), rel=0.02)
    with pytest.raises(Unavailable, match="2 answers of 704 tokens were not written together"):
        await measured("decode", "prefill", alone=10_000)


async def test_a_cluster_with_more_than_one_node_of_a_role_or_of_two_widths_is_not_profiled() -> None:
    """One file is of one kind of node: the costs of two kinds would be mixed in it."""
    for roles in ((), ("decode",), ("decode", "decode", "prefill"), ("aggregated", "prefill")):
        with pytest.raises(ConfigurationError, match="one aggregated node, or of one prefill node and one decode"):
            await measured(*roles)
    with pytest.raises(ConfigurationError, match="nodes of one width, not of TP 1 and TP 2: each width has a file"):
        await measured("decode", "prefill", widths=(1, 2))


async def test_a_server_that_is_away_is_one_sentence() -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        await ProfileClient("http://127.0.0.1:9", None).facts()


@pytest.mark.parametrize("body", [b"<html>It works</html>", b"{}", b"[]"])
async def test_a_server_of_another_kind_is_one_sentence(body: bytes) -> None:
    server = httpx.MockTransport(lambda request: httpx.Response(200, content=body))
    with pytest.raises(InternalError, match="http://server/cluster did not answer like a Tandem router"):
        await ProfileClient("http://server", None, server).facts()


def test_a_line_is_found_beside_single_values_that_are_far_off() -> None:
    points = [(place, 3.0 + 0.5 * place) for place in range(1, 9)]
    assert line_through([*points, (4, 90.0), (4, 91.0), (4, 5.0)]) == pytest.approx((3.0, 0.5), rel=0.2)
    assert line_through([]) == (0.0, 0.0)
    assert line_through([(5, 2.0)]) == (2.0, 0.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--quick", "-o", "json"], "does not answer"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--out", "no-folder/costs.json"], "no-folder/costs.json cannot be written: name another file"),
        (["--url", "http://[::1"], "is no URL"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "costs.json")
    assert main(["profile", "--url", "http://127.0.0.1:9", "--out", out, *words]) == 1
    assert said in capsys.readouterr().err

"""A whole trial against a server that serves one request at a time and refuses others."""

from __future__ import annotations

import argparse
import asyncio
import io
from typing import cast

import pytest
from rich.console import Console

from benchmarks.burst import BurstDurations, Trial
from benchmarks.bursting import BurstFigures, floors_of
from benchmarks.lib.processes import Family
from benchmarks.lib.servers import RunningSystem, System
from tandem.loadgen.metrics import ServiceLevel
from tandem.loadgen.vocabulary import TextVocabulary
from tests.loadgen.fake_server import Exchange, complete, serving
from tests.loadgen.made_tokenizers import byte_level

OPTIONS = argparse.Namespace(seed=1, input=12)
LASTING = BurstDurations(trial=1.0, before=0.4, burst=1.2, after=0.4)
MOST_WAITING = 3


@pytest.mark.slow
def test_a_trial_finds_the_capacity_and_counts_what_the_burst_did() -> None:
    async def work() -> BurstFigures:
        places, waiting = asyncio.Semaphore(1), 0

        async def answer(exchange: Exchange) -> None:
            nonlocal waiting
            if exchange.path == "/metrics":
                await exchange.respond(200, {})
            elif waiting >= MOST_WAITING:
                await exchange.respond(503, {"error": {"message": "full"}})
            else:
                waiting += 1
                async with places:
                    await asyncio.sleep(0.06)  # what it computes
                waiting -= 1
                await complete(exchange)

        async with serving(answer) as server:
            system = System("fake", "A fake", ("true",), int(server.url.rpartition(":")[2]))
            started = RunningSystem(system, "m", 0.0, cast("Family", None))
            slo = ServiceLevel(ttft=2.0)
            trial = Trial(
                started, OPTIONS, slo, LASTING, TextVocabulary(byte_level()), Console(file=io.StringIO())
            )
            return await asyncio.to_thread(trial.run)

    found = asyncio.run(work())
    for _ in range(3):
        if 3 * found.capacity > 16:
            break
        found = asyncio.run(
            work()
        )  # a machine that stood still in that second showed less than the server can do
    assert 16 / 3 < found.capacity < 60
    assert found.turned_away > 0
    assert found.with_retry_after == 0
    assert found.requests == sum(stage.count for stage in found.stages)
    assert found.goodput["burst"] > 0
    (told,) = [floor for floor in floors_of(found) if "told" in floor.claim]
    assert told.met is False

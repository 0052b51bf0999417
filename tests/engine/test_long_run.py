"""An engine that has run for long holds no more memory than a new one, and an idle engine rests."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from tandem.decode_node.node import DecodeRules
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.loading import load_runner
from tandem.engine.request import RequestStatus
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.wire.nodes import Role
from tandem.wire.requests import Ping
from tandem.wire.sampling import SamplingParams
from tests.engine.made_requests import made_request
from tests.engine.model import tiny
from tests.idling import idle_share
from tests.node.test_service import ROUTER, Node

STEPS = int(os.environ.get("TANDEM_STEPS", "2000"))
WARM_UP = 1000
VARIANTS = [
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(seed=3, max_tokens=25, top_p=0.9, presence_penalty=0.3, logprobs=2),
    SamplingParams(seed=4, max_tokens=12, top_k=9, min_tokens=3, prompt_logprobs=1, bad_words=[[5, 6]]),
]

linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process's size from /proc")


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@linux
@pytest.mark.slow
@pytest.mark.more
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.timeout(120 + STEPS // 10)
def test_memory_does_not_grow_over_thousands_of_steps(tmp_path: Path, native: bool) -> None:
    """Needs that many steps: a leak of some hundred bytes per step must show above the noise, and of a few dozen where
    `TANDEM_STEPS` asks for ten thousand. Requests of all kinds come, share prefixes, are preempted (the pool is too small
    for all), end, and are given up."""
    cache = CacheConfig(block_size=4, memory_bytes=1 << 20)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=40, max_model_len=64, num_speculative_tokens=2)
    model = ModelConfig(path=str(tiny.save("llama", tmp_path)), dtype="float32", device="cpu", threads=1)
    runner = load_runner(model, cache, config, native=native)
    info = runner.info
    engine = Engine(Scheduler(config, cache, info.groups, 40, info.max_model_len), runner, None, debug=True)
    steps = added = 0

    def work(until: int) -> None:
        nonlocal steps, added
        while steps < until:
            if len(engine.scheduler.requests) < 7:
                prompt = [7, 8, 9, 10] * 3 + [3 + added % 100, 4] * 4
                engine.add_request(made_request(f"r{added}", prompt, VARIANTS[added % 3]))
                added += 1
                if added % 9 == 0:
                    engine.abort_requests([f"r{added - 3}"])
            engine.step()
            steps += 1

    work(WARM_UP)
    before = resident_bytes()
    work(STEPS if native else WARM_UP + STEPS // 4)
    grown = resident_bytes() - before
    stats = engine.scheduler.stats()
    assert stats.preemptions > 10
    assert stats.prompt_tokens_cached > 100
    assert grown < 1 << 19
    engine.scheduler.finish_requests(list(engine.scheduler.requests), RequestStatus.FINISHED_ABORTED)
    engine.step()
    stats = engine.scheduler.stats()
    assert stats.free_blocks == stats.total_blocks


@linux
@pytest.mark.slow
def test_an_idle_node_uses_less_than_a_fiftieth_of_a_core() -> None:
    """A router receives the node's messages during the run."""
    node = Node(DecodeRules(Role.DECODE), status_period_s=0.25)
    try:
        node.submit()
        node.outgoing.until_finished("r")
        node.service.receive(Ping(reply_to=ROUTER))
        assert idle_share() < 0.02
    finally:
        node.service.stop()

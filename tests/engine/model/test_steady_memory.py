"""A runner that has been at work for long holds no more than one that began lately."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from engine.config import CacheConfig, ModelConfig, SchedulerConfig
from engine.model.loading import load_runner
from tests.engine.model import tiny
from tests.engine.model.driver import Driver
from wire.sampling import SamplingParams

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process's size from /proc")
def test_memory_does_not_grow_with_the_number_of_steps(tmp_path: Path) -> None:
    """Needs thousands of steps: a leak of a few hundred bytes per step must show above the noise."""
    runner = load_runner(
        ModelConfig(path=str(tiny.save("llama", tmp_path)), dtype="float32", device="cpu", threads=1),
        CacheConfig(block_size=4, memory_bytes=4 << 20),
        SchedulerConfig(max_num_seqs=8, num_speculative_tokens=2),
    )
    driver = Driver(runner)
    variants = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3, top_p=0.9, presence_penalty=0.3, logprobs=2),
        SamplingParams(seed=4, top_k=9, min_tokens=3, prompt_logprobs=1, bad_words=[[5, 6]]),
    ]
    steps = 0

    def work(until: int) -> None:
        nonlocal steps
        while steps < until:
            if len(driver.requests) < 6:
                driver.add(f"r{steps}", [3 + steps % 100, 4, 5, 3 + steps % 50] * 3, variants[steps % 3])
            driver.step({r.req_id: min(r.pending, 5) for r in driver.requests.values()})
            for request in list(driver.requests.values()):
                if len(request.output) >= 20:
                    driver.finish(request.req_id)
            steps += 1

    work(500)
    before = resident_bytes()
    work(2000)
    assert resident_bytes() - before < 1 << 19

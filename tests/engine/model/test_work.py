"""The estimate of a model's work, beside what torch counts of transformers' own forward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.model.loading import load_runner
from tandem.engine.model.runner import ModelInfo
from tandem.engine.scheduling.state import READ_EVERY, SchedulerStats
from tandem.node.status import worked
from tests.engine.model import tiny
from tests.engine.scheduling.driving import Driver

TOKENS = 24


def info_of(path: Path) -> ModelInfo:
    config = ModelConfig(path=str(path), dtype="float32", device="cpu", threads=1)
    return load_runner(config, CacheConfig(memory_bytes=1 << 20), SchedulerConfig(max_model_len=64)).info


@pytest.mark.parametrize("kind", ["llama", "llama-untied-odd-heads", "qwen3", "mixtral"])
def test_the_estimate_is_what_the_model_computes(kind: str, tmp_path: Path) -> None:
    path = tiny.save(kind, tmp_path)
    info = info_of(path)
    assert info.work is not None
    # torch counts plain products alone.
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **plain)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(torch.arange(3, 3 + TOKENS)[None])
    # transformers computes the head for every token, and every token with every other.
    stats = SchedulerStats(tokens_scheduled=TOKENS, output_tokens=TOKENS, pairs_read=TOKENS * TOKENS)
    assert worked(stats, info.work)["model_flops"] == pytest.approx(counter.get_total_flops(), rel=0.02)
    used = sum(weight.numel() for weight in model.parameters() if weight.dim() >= 2)
    embedding = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    assert info.work.weight_bytes == 4 * (used - embedding)


def test_steps_are_counted_by_what_their_requests_read() -> None:
    driver = Driver(max_num_batched_tokens=64)
    driver.add("a", prompt=10, max_tokens=1 + 2 * READ_EVERY)
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.context_read, stats.pairs_read) == (10, 10 * 11 // 2)
    driver.run()
    read = driver.scheduler.stats().context_read - 10
    exact = sum(range(11, 11 + 2 * READ_EVERY))
    assert read == pytest.approx(exact, rel=0.5)
    assert worked(driver.scheduler.stats(), None) == {}

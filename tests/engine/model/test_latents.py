"""Models that keep one latent of a token for all heads answer the same, whether keys and values are made of it or it is attended to
itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.model.attention.latents import Expansion, LatentAttention
from tandem.engine.model.attention.layers import AttentionLayer, plan_cache
from tandem.engine.model.loading import load_runner
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.model.transformers_forward import TransformersForward
from tandem.wire.errors import ConfigurationError
from tests.engine.model import tiny
from tests.engine.model.driver import Driver

NUM_TOKENS = 8


def load(path: Path, kv: str = "auto") -> TorchRunner:
    return load_runner(
        ModelConfig(path=str(path), dtype="float32", device="cpu", threads=1),
        CacheConfig(block_size=4, memory_bytes=8 << 20, dtype=kv),  # type: ignore[arg-type]
        SchedulerConfig(max_num_seqs=4, max_model_len=64),
    )


@pytest.mark.parametrize("name", ["deepseek-v3", pytest.param("kimi-linear", marks=pytest.mark.slow)])
@pytest.mark.parametrize("absorbs", [True, False])
def test_both_forms_answer_as_transformers_does(
    name: str, absorbs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.save(name, tmp_path)
    chance = random.Random(1)
    prompts = [[chance.randrange(3, tiny.VOCAB) for _ in range(length)] for length in (1, 9, 30)]
    expected = [answer.tokens for answer in tiny.reference(path, prompts, NUM_TOKENS)]
    runner = load(path)
    assert isinstance(runner.forward, TransformersForward)
    assert isinstance(runner.forward.attention, LatentAttention)
    assert runner.forward.parts.expansions[1 if name == "kimi-linear" else 0].to_keys is not None
    monkeypatch.setattr(Expansion, "absorbs", lambda self, rows: absorbs)
    driver = Driver(runner, 5)
    for index, prompt in enumerate(prompts):
        driver.add(f"r{index}", prompt)
    assert list(driver.generate(NUM_TOKENS, max_chunk=7).values()) == expected


def test_a_token_of_deepseek_v3_s_shape_keeps_seventy_kilobytes() -> None:
    layers = tuple(
        AttentionLayer(index, 128, 1, 576, 512, None, latent=(512, 64), expanded=(192, 128))
        for index in range(61)
    )
    plan = plan_cache(layers, 16)
    assert plan.elements_per_block * 2 // 16 == 61 * 576 * 2 == 70_272


def test_a_few_rows_are_absorbed_and_long_chunks_are_not() -> None:
    import torch

    of = torch.zeros
    deepseek = Expansion(None, lambda *_: (of(1), of(1)), 512, 64, of(2, 128, 512), of(2, 128, 512))
    assert deepseek.absorbs(1)
    assert deepseek.absorbs(128)
    assert not deepseek.absorbs(512)
    assert not Expansion(None, lambda *_: (of(1), of(1)), 512, 64).absorbs(1)


def test_in_eight_bits_a_latent_is_refused(tmp_path: Path) -> None:
    path = tiny.save("deepseek-v3", tmp_path)
    with pytest.raises(ConfigurationError, match=r"one latent of a token.*leave it at auto"):
        load(path, "fp8")

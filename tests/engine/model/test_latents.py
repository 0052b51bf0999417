"""Models that keep one latent of a token for all heads answer the same, whether keys and values are made of it or it is attended to
itself."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.base.errors import ConfigurationError
from tandem.engine.model.attention.interface import AttentionCall
from tandem.engine.model.attention.layers import AttentionLayer, plan_cache
from tandem.engine.model.batching import RequestRows, build_batch
from tandem.engine.model.capabilities import ToAttend
from tandem.engine.model.cuda import flashinfer
from tandem.engine.model.cuda.capability import attention_with
from tandem.engine.model.cuda.decode_inputs import DecodeInputs
from tandem.engine.model.cuda.flashinfer_latents import FlashInferLatents
from tandem.engine.model.latents.attention import Expansion, LatentAttention, LatentLayers
from tandem.engine.model.loaded import ForwardShape
from tandem.engine.model.transformers_forward import ModelParts, TransformersForward
from tests.engine.model import driver, fake_flashinfer, tiny
from tests.engine.model.driver import Driver
from tests.more import more

NUM_TOKENS = 8


load = partial(driver.load, max_model_len=64)


@pytest.mark.parametrize("name", ["deepseek-v3", *more(["kimi-linear"])])
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
    latents = runner.forward.parts.latents
    assert latents is not None
    assert latents[1 if name == "kimi-linear" else 0].to_keys is not None
    monkeypatch.setattr(Expansion, "absorbs", lambda self, rows: absorbs)
    driver = Driver(runner, 5)
    for index, prompt in enumerate(prompts):
        driver.add(f"r{index}", prompt)
    assert list(driver.generate(NUM_TOKENS, max_chunk=7).values()) == expected


def test_a_token_of_deepseek_v3_s_shape_keeps_seventy_kilobytes() -> None:
    layers = tuple(
        AttentionLayer(index, 128, 1, 576, 512, None, latent=(512, 64), expanded=(192, 128)) for index in range(61)
    )
    plan = plan_cache(layers, 16)
    assert plan.elements_per_block * 2 // 16 == 61 * 576 * 2 == 70_272


def test_a_few_rows_are_absorbed_and_long_chunks_are_not() -> None:
    of = torch.zeros
    deepseek = Expansion(None, lambda *_: (of(1), of(1)), 512, 64, of(2, 128, 512), of(2, 128, 512))
    assert deepseek.absorbs(1)
    assert deepseek.absorbs(128)
    assert not deepseek.absorbs(512)
    assert not Expansion(None, lambda *_: (of(1), of(1)), 512, 64).absorbs(1)


def test_in_eight_bits_a_latent_is_refused(tmp_path: Path) -> None:
    path = tiny.save("deepseek-v3", tmp_path)
    with pytest.raises(ConfigurationError, match=r"one latent of a token.*leave it at auto"):
        load(path, kept="fp8")


HEADS, LATENT, ROTARY = 4, 128, 64
LAYERS = tuple(
    AttentionLayer(
        index, HEADS, 1, LATENT + ROTARY, LATENT, None, scale=0.1, latent=(LATENT, ROTARY), expanded=(80, 16)
    )
    for index in range(2)
)


def expansions() -> LatentLayers:
    made = LatentLayers()
    for index in range(2):
        up = torch.randn(HEADS, 32, LATENT, dtype=torch.bfloat16) * 0.2

        def expand(latent: torch.Tensor, rotary: torch.Tensor, up: torch.Tensor = up) -> Any:
            both = torch.einsum("btl,hdl->bhtd", latent[:, 0], up)
            return torch.cat([both[..., :16], rotary.expand(-1, HEADS, -1, -1)], dim=-1), both[..., 16:]

        made[index] = Expansion(None, expand, LATENT, ROTARY, up[:, :16], up[:, 16:])
    return made


@pytest.fixture
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1 << 10)


@pytest.mark.usefixtures("small_workspace")
def test_flashinfer_s_kernels_are_given_what_gathering_computes_from() -> None:
    torch.manual_seed(0)
    plan, how = plan_cache(LAYERS, 4), expansions()
    ours, theirs = (torch.zeros(plan.shape(12), dtype=torch.bfloat16) for _ in range(2))
    gathered = LatentAttention(ours, plan, how)
    kernels = FlashInferLatents(fake_flashinfer, theirs, plan, LAYERS, how, 32)
    rows = RequestRows(2, 20, 4, len(plan.groups))
    rows.add("a", list(range(20)), 20, [[1, 2, 3, 4, 5]])
    rows.add("b", list(range(20)), 20, [[6, 7, 8, 9, 10]])

    def both(batch: Any, one: Any, other: Any) -> None:
        tokens = len(batch.token_ids)
        for layer in LAYERS:
            query = torch.randn(HEADS, tokens, 16 + ROTARY, dtype=torch.bfloat16)
            latent = torch.randn(tokens, LATENT + ROTARY, dtype=torch.bfloat16)
            value = latent.new_zeros(HEADS, tokens, 16)
            found, expected = (
                step.attend(layer.index, query, query, value, AttentionCall(0.1, latent=latent))
                for step in (other, one)
            )
            assert torch.allclose(found.float(), expected.float(), atol=0.05, rtol=0.05)

    for step in ({"a": 7}, {"a": 1, "b": 6}, {"a": 1, "b": 1}):
        batch, scheduled = build_batch(rows, step, {}, set(), 4, torch.device("cpu"))
        both(batch, gathered.begin(batch), kernels.begin(batch))
        rows.num_computed[scheduled.rows] += list(step.values())
    assert torch.equal(ours, theirs)
    batch, _ = build_batch(rows, {"a": 1, "b": 1}, {}, set(), 4, torch.device("cpu"))
    inputs = DecodeInputs(2, 0, len(plan.groups), 4, torch.device("cpu"))
    inputs.slot_mapping[0].copy_(batch.slot_mapping[0])
    inputs.padding.fill_(False)
    fixed = kernels.fixed(inputs)
    fixed.prepare(batch.host)
    both(batch, gathered.begin(batch), fixed.begin())


@pytest.mark.usefixtures("small_workspace")
@pytest.mark.parametrize("fails", ["", "otherwise", "other-pages"])
def test_the_library_is_tried_out_before_it_is_relied_on(fails: str) -> None:
    class Wrong(fake_flashinfer.BatchMLAPagedAttentionWrapper):
        def plan(self, *, metadata: fake_flashinfer.MLAPlanMetadata, **options: Any) -> None:
            if fails == "other-pages":
                metadata.kv_indices = metadata.kv_indices.sort().values
            super().plan(metadata=metadata, **options)

        def run(self, **given: Any) -> torch.Tensor:
            return super().run(**given) * (2 if fails == "otherwise" else 1)

    library = SimpleNamespace(
        mla=SimpleNamespace(MLAPlanMetadata=fake_flashinfer.MLAPlanMetadata, BatchMLAPagedAttentionWrapper=Wrong)
    )
    plan = plan_cache(LAYERS, 4)
    cache = torch.zeros(plan.shape(9), dtype=torch.bfloat16)
    parts = ModelParts(LAYERS, latents=expansions())
    made = attention_with(library, ToAttend(cache, plan, parts, ForwardShape(2, 16), None, cache.dtype))
    assert made is None if fails else isinstance(made, FlashInferLatents)
    assert not cache.any()

"""Tensors of a checkpoint that its model does not use: refused by name if they would change the answer, else ignored."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.base.errors import ConfigurationError
from tandem.engine.model.leftovers import refuse_leftovers
from tests.engine.model import tiny
from tests.engine.model.driver import load
from tests.engine.model.test_loading import edit, greedy, refusal

BOTH_PATHS = pytest.mark.parametrize("native", [True, False])


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny.save("llama", tmp_path)


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | tensors, folder / "model.safetensors", {"format": "pt"})


@BOTH_PATHS
def test_more_layers_than_the_configuration_says_are_refused(llama: Path, native: bool) -> None:
    edit(llama, "config.json", num_hidden_layers=1)
    said = refusal(llama, native=native)
    assert "holds 2 layers, and its configuration says 1" in said
    assert "model.layers.1.input_layernorm.weight" in said
    assert "and 5 more" in said
    assert "num_hidden_layers in config.json" in said


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "phi3", "gpt-oss"])
def test_layers_are_known_by_whatever_name_an_architecture_gives_them(tmp_path: Path, architecture: str) -> None:
    path = tiny.save(architecture, tmp_path)
    config = json.loads((path / "config.json").read_text())
    key = "n_layer" if architecture == "gpt2" else "num_hidden_layers"
    edit(path, "config.json", **{key: config[key] - 1}, layer_types=(config.get("layer_types") or [])[:1] or None)
    assert f"holds {config[key]} layers, and its configuration says {config[key] - 1}" in refusal(path)


@BOTH_PATHS
def test_a_bias_that_the_configuration_leaves_out_is_refused_by_name(llama: Path, native: bool) -> None:
    add(llama, {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})
    said = refusal(llama, native=native)
    assert "would answer without model.layers.0.self_attn.q_proj.bias" in said
    assert "correct config.json" in said


@BOTH_PATHS
def test_a_bias_that_the_configuration_promises_is_missed(llama: Path, native: bool) -> None:
    edit(llama, "config.json", attention_bias=True)
    assert "lacks model.layers.0.self_attn." in refusal(llama, native=native)


@BOTH_PATHS
def test_what_text_does_not_need_may_be_there(llama: Path, native: bool, caplog: pytest.LogCaptureFixture) -> None:
    expected = greedy(load(llama, native=native))
    weights = load_file(llama / "model.safetensors")
    add(
        llama,
        {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
            "model.layers.0.self_attn.k_proj.k_scale": torch.ones(1),
            "model.embeddings.position_ids": torch.arange(8),
            "lm_head.weight": weights["model.embed_tokens.weight"].clone(),
            "vision_tower.encoder.layers.7.mlp.fc1.weight": torch.ones(2, 2),
            "mtp.layers.0.mlp.up_proj.weight": torch.ones(2, 2),
        },
    )
    with caplog.at_level("INFO"):
        assert greedy(load(llama, native=native)) == expected
    assert any("text does not need" in message and "position_ids" in message for message in caplog.messages)


def test_a_head_of_its_own_counts_more_than_a_configuration_that_ties_it(llama: Path) -> None:
    torch.manual_seed(5)
    add(llama, {"lm_head.weight": torch.randn(tiny.VOCAB, 32)})
    (expected,) = tiny.reference(llama, [[7, 9, 11, 13, 5]], 6)
    assert greedy(load(llama)) == greedy(load(llama, native=False)) == expected.tokens


def test_layers_that_only_guess_further_tokens_are_no_layers_of_the_model(tmp_path: Path) -> None:
    path = tiny.save("deepseek-v3", tmp_path)
    add(path, {"model.layers.2.input_layernorm.weight": torch.ones(32)})
    edit(path, "config.json", num_nextn_predict_layers=1)
    load(path)
    edit(path, "config.json", num_nextn_predict_layers=0)
    assert "holds 3 layers, and its configuration says 2" in refusal(path)


def test_layers_are_named_in_their_order_and_not_all_of_them() -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=9))
    left = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (11, 10, 9, 30, 12, 13)]
    with pytest.raises(ConfigurationError) as caught:
        refuse_leftovers("m", left, config)
    assert "holds 31 layers" in str(caught.value)
    assert "without model.layers.9.mlp.up_proj.weight, model.layers.10." in str(caught.value)
    assert "and 2 more" in str(caught.value)

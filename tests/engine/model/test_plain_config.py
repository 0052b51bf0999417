"""Configurations that are read without transformers give the same values as transformers, or none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tandem.engine.model.checkpoint import choose_dtype, eos_tokens
from tandem.engine.model.context import context_length
from tandem.engine.model.native.architecture import describe, refusal
from tandem.engine.model.native.forward import rotary_of
from tandem.engine.model.paths import _native_layers
from tandem.engine.model.plain_config import PlainConfig, read_plain_config
from tandem.engine.model.source import ModelSource
from tests.engine.model import tiny

# As published, so far as it counts.
COMMON = {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, "attention_dropout": 0.0}
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": COMMON | {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 576,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "vocab_size": 49152,
    },
    "Llama-2-7B": COMMON | {
        "eos_token_id": 2, "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": False, "dtype": "float16",
        "vocab_size": 32000,
    },
    "Mistral-7B-v0.1": COMMON | {
        "eos_token_id": 2, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
    },
    "Qwen2.5-0.5B": COMMON | {
        "eos_token_id": 151645, "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3-0.6B": COMMON | {
        "attention_bias": False, "eos_token_id": [151645, 151643], "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
        "vocab_size": 151936,
    },
}  # fmt: skip
# What a user may write into one of these.
CHANGES: dict[str, list[Any]] = {
    "attention_bias": [True],
    "auto_map": [{"AutoConfig": "theirs.Config"}],
    "dtype": ["float32", "float8"],
    "eos_token_id": [None, 7, [3, 5], "x"],
    "head_dim": [None, 32, 80],
    "hidden_act": ["gelu"],
    "hidden_size": [1000, 0],
    "layer_types": [None, ["full_attention"] * 24, ["sliding_attention"] * 28],
    "max_window_layers": [2],
    "mlp_bias": [True],
    "model_type": ["llama", "mistral", "qwen2", "qwen3", "gemma"],
    "num_hidden_layers": [24, "24"],
    "num_key_value_heads": [None, 1],
    "partial_rotary_factor": [0.5],
    "quantization_config": [{"quant_method": "awq"}],
    "rope_parameters": [
        None,
        {"rope_theta": 5e5, "rope_type": "default"},
        {"rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 0.5},
        {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0},
    ],
    "rope_scaling": [{"rope_type": "linear", "factor": 2.0}],
    "rope_theta": [None, 5000, 123.5],
    "sliding_window": [None, 128],
    "tie_word_embeddings": [None, True, False],
    "torch_dtype": ["float32"],
    "use_sliding_window": [True],
}


def what_counts(config: Any, source: ModelSource) -> tuple[Any, ...]:
    dtype = choose_dtype("auto", source, config)
    frequencies, scaling = rotary_of(config)
    return (
        describe(config), refusal(config, dtype, torch.device("cpu")), dtype, config.model_type, config.vocab_size,
        _native_layers(config), eos_tokens(source, config), context_length(config, None),
        config.rope_parameters["rope_theta"], frequencies.tolist(), scaling
    )  # fmt: skip


def agrees(content: dict[str, Any], folder: Path) -> bool:
    """False where transformers has to be asked."""
    plain = read_plain_config(content)
    if plain is None:
        return False
    (folder / "config.json").write_text(json.dumps(content))
    save_file(
        {"norm.weight": torch.ones(1)}, folder / "model.safetensors"
    )  # where a quantized model's kind is looked for
    source = ModelSource(folder, None, "m")
    assert what_counts(plain, source) == what_counts(AutoConfig.from_pretrained(folder), source)
    return True


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    assert agrees(PUBLISHED[name], tmp_path)


@settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_changed_it_says_what_transformers_says_or_nothing(tmp_path: Path, data: st.DataObject) -> None:
    content = dict(data.draw(st.sampled_from(list(PUBLISHED.values()))))
    for key in data.draw(st.lists(st.sampled_from([*CHANGES, *content]), min_size=1, max_size=3)):
        if key in CHANGES and data.draw(st.booleans()):
            content[key] = data.draw(st.sampled_from(CHANGES[key]))
        else:
            content.pop(key, None)
    if "dtype" not in content and "torch_dtype" not in content:
        content["dtype"] = "bfloat16"  # else it is looked for in weights, which are not here
    agrees(content, tmp_path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("SmolLM2-135M", {"something_new": 1}),
        ("SmolLM2-135M", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
        ("SmolLM2-135M", {"model_type": "gemma"}),
        ("SmolLM2-135M", {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}),
        ("SmolLM2-135M", {"num_hidden_layers": "30"}),
        ("SmolLM2-135M", {"torch_dtype": "float8_e4m3fn"}),
        ("Qwen2.5-0.5B", {"use_sliding_window": True}),
        ("Mistral-7B-v0.1", {"layer_types": None}),
        # The types have other defaults for these, so they must be written.
        *(
            ("SmolLM2-135M", key)
            for key in ("rope_theta", "num_key_value_heads", "tie_word_embeddings", "eos_token_id")
        ),
    ],
)
def test_what_is_unusual_or_left_out_is_left_to_transformers(name: str, change: dict[str, Any] | str) -> None:
    content = PUBLISHED[name] | (change if isinstance(change, dict) else {})
    assert read_plain_config({key: value for key, value in content.items() if key != change}) is None


def test_the_rotary_embedding_is_the_models_own() -> None:
    plain = read_plain_config(PUBLISHED["Qwen3-0.6B"])
    assert isinstance(plain, PlainConfig)
    theirs: Any = LlamaRotaryEmbedding(AutoConfig.for_model(**PUBLISHED["Qwen3-0.6B"]))
    frequencies, scaling = rotary_of(plain)
    assert torch.equal(frequencies, theirs.inv_freq)
    assert scaling == theirs.attention_scaling


LOAD_WITHOUT_TRANSFORMERS = """
import sys
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.model.loading import load_runner
config = ModelConfig(path=sys.argv[1], device="cpu", threads=1)
load_runner(config, CacheConfig(memory_bytes=8 << 20), SchedulerConfig())
assert "transformers" not in sys.modules
"""


@pytest.mark.slow
def test_a_plain_model_is_loaded_without_transformers(tmp_path: Path) -> None:
    """Importing it takes seconds of every node's start. Slow: in a process of its own."""
    folder = tiny.save("llama", tmp_path)
    subprocess.run([sys.executable, "-c", LOAD_WITHOUT_TRANSFORMERS, str(folder)], check=True, timeout=120)

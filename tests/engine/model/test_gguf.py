"""GGUF files: what transformers passes over without a word is applied, or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tandem.engine.model.checkpoint import read_config
from tandem.engine.model.gguf.metadata import whole_config
from tandem.engine.model.native.architecture import describe
from tandem.engine.model.plain_config import PlainConfig
from tandem.engine.model.source import ModelSource
from tandem.wire.sampling import SamplingParams
from tests.engine.model import tiny
from tests.engine.model.driver import Driver, load
from tests.engine.model.gguf_files import llama3_factors, write_gguf
from tests.engine.model.test_loading import edit, greedy, refusal

BOTH_PATHS = pytest.mark.parametrize("native", [True, False])
WINDOW: dict[str, Any] = {"sliding_window": tiny.WINDOW}
LONG_PROMPT = [3 + 7 * index % 120 for index in range(90)]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny.save("llama", tmp_path)


def save(config: Any, folder: Path) -> Path:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.std() == 0:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    model.save_pretrained(folder / config.model_type)
    return folder / config.model_type


def assert_is_the_model(file: Path, original: Path, native: bool = False) -> None:
    """As transformers computes it, far beyond the first few positions: rotary embeddings differ little before."""
    (expected,) = tiny.reference(original, [LONG_PROMPT], 4)
    driver = Driver(load(file, native=native))
    request = driver.add("r", LONG_PROMPT, SamplingParams(temperature=0.0, logprobs=0))
    assert driver.generate(4)["r"] == expected.tokens
    found = [entry.logprob for entry in request.logprobs[:4]]
    assert found == pytest.approx(expected.logprobs, abs=2e-3)


@BOTH_PATHS
def test_a_file_is_the_same_model(llama: Path, tmp_path: Path, native: bool) -> None:
    folder = tmp_path / "quantized"
    folder.mkdir()
    write_gguf(llama, folder / "tiny.gguf")
    expected = greedy(load(llama))
    by_file, by_folder = load(folder / "tiny.gguf", native=native), load(folder, native=native)
    assert greedy(by_file) == greedy(by_folder) == expected
    assert (by_file.info.name, by_folder.info.name) == ("tiny", "quantized")
    assert by_file.info.eos_token_ids == {2}


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@BOTH_PATHS
def test_llama3s_frequency_factors_are_its_rope_parameters(llama: Path, tmp_path: Path, native: bool) -> None:
    factors = llama3_factors(8, LLAMA3)
    assert 1.0 < factors[1] < factors[2] == 8.0  # of every kind
    write_gguf(llama, tmp_path / "llama3.gguf", tensors={"rope_freqs.weight": factors})
    edit(llama, "config.json", rope_parameters=LLAMA3)
    assert_is_the_model(tmp_path / "llama3.gguf", llama, native)


@BOTH_PATHS
@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "finetuned": True},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_a_stretched_rotary_embedding_is_what_the_file_says(
    llama: Path, tmp_path: Path, native: bool, said: dict[str, Any], meant: dict[str, Any]
) -> None:
    write_gguf(llama, tmp_path / "long.gguf", metadata={f"rope.scaling.{key}": said[key] for key in said})
    edit(llama, "config.json", rope_parameters={"rope_theta": 10000.0, **meant})
    assert_is_the_model(tmp_path / "long.gguf", llama, native)


def test_phi3s_long_and_short_factors_and_its_window(tmp_path: Path) -> None:
    factors = {"short": [1.0, 1.5, 2.0, 2.5], "long": [4.0, 5.0, 6.0, 7.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0} | {f"{name}_factor": each for name, each in factors.items()}
    options = tiny.COMMON | {"max_position_embeddings": 256, "original_max_position_embeddings": 128}
    path = save(transformers.Phi3Config(**options, **WINDOW, rope_parameters=rope), tmp_path)
    said = {
        "attention.sliding_window": tiny.WINDOW,
        "rope.scaling.original_context_length": 128,
        "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(2) / np.log(128))),
    }
    tensors = {f"rope_factors_{name}.weight": np.array(each, np.float32) for name, each in factors.items()}
    write_gguf(path, tmp_path / "phi.gguf", "phi3", said, tensors)
    assert load(tmp_path / "phi.gguf").info.max_model_len == 128
    assert_is_the_model(tmp_path / "phi.gguf", path)


HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
BY_LAYERS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
STRETCHED = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}


@pytest.mark.parametrize(
    ("kind", "config", "options", "said"),
    [
        pytest.param("phi3", "Phi3Config", {"hidden_size": 64, "rope_parameters": HALF}, {}, id="a part of a head is turned"),
        pytest.param("starcoder2", "Starcoder2Config", {"rope_theta": 1e6}, {}, id="the base is the file's"),
        pytest.param(
            "gemma2", "Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 16, **WINDOW}, {}, id="scaled by its heads"
        ),
        pytest.param(
            "gemma3", "Gemma3TextConfig",
            {"num_hidden_layers": 6, "head_dim": 8, "query_pre_attn_scalar": 8, "rope_parameters": BY_LAYERS, **WINDOW},
            STRETCHED, id="layers that see everything are stretched",
        ),
    ],
)  # fmt: skip
def test_what_a_file_says_of_attention_is_computed(
    kind: str, config: str, options: dict[str, Any], said: dict[str, Any], tmp_path: Path
) -> None:
    path = save(getattr(transformers, config)(**tiny.COMMON | options), tmp_path)
    window = {"attention.sliding_window": tiny.WINDOW} if "sliding_window" in options else {}
    write_gguf(path, tmp_path / "one.gguf", kind, window | said)
    assert_is_the_model(tmp_path / "one.gguf", path)


def test_gemma2_of_27b_scales_its_attention_by_its_width(tmp_path: Path) -> None:
    """Nothing in the file says so."""
    path = save(transformers.Gemma2Config(**tiny.COMMON, head_dim=16), tmp_path)
    write_gguf(path, tmp_path / "27b.gguf", "gemma2", {"block_count": 46})
    assert read_config(ModelSource(tmp_path, "27b.gguf", "27b")).query_pre_attn_scalar == 32 // 4


_KINDS = gguf.GGMLQuantizationType
_STORED = {
    "attn_q.weight": _KINDS.Q4_1,
    "attn_k.weight": _KINDS.Q4_1,
    "attn_v.weight": _KINDS.Q8_0,
    "attn_output.weight": _KINDS.Q4_0,
    "ffn_gate.weight": _KINDS.Q5_0,
    "ffn_up.weight": _KINDS.Q5_1,
    "token_embd.weight": _KINDS.Q8_0,
}  # fmt: skip
_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "embed_tokens")


def widen_as_stored(folder: Path) -> None:
    """Gives a folder the weights that a file of these kinds stands for, in float32."""
    weights = load_file(folder / "model.safetensors")
    for ours, kind in zip(_NAMES, _STORED.values(), strict=True):
        for name in [name for name in weights if f"{ours}.weight" in name]:
            packed = gguf.quants.quantize(weights[name].numpy(), kind)
            weights[name] = torch.tensor(gguf.quants.dequantize(packed, kind))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@BOTH_PATHS
def test_quantized_weights_are_what_they_stand_for(llama: Path, tmp_path: Path, native: bool) -> None:
    write_gguf(llama, tmp_path / "small.gguf", quantize=_STORED)
    widen_as_stored(llama)
    assert_is_the_model(tmp_path / "small.gguf", llama, native)


def test_the_native_library_reads_fewer_bytes_of_a_quantized_file(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_gguf(llama, tmp_path / "small.gguf", quantize=_STORED)
    sizes: list[int] = []
    for path in (llama, tmp_path / "small.gguf"):
        with caplog.at_level("INFO", "tandem.engine.model.paths"):
            load(path, dtype="bfloat16")
        sizes += map(int, re.findall(r"(\d+) kB of packed matrices", caplog.messages[-1]))
    assert sizes[1] < sizes[0] * 0.9


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_plain_configuration_is_what_transformers_reads(kind: str, tmp_path: Path) -> None:
    config = tiny.build(kind).config
    if kind == "qwen3":
        config.head_dim = 128
    folder = save(config, tmp_path)
    write_gguf(folder, folder / "tiny.gguf", kind)
    source = ModelSource(folder, "tiny.gguf", "tiny")
    plain, whole = read_config(source), whole_config(source)
    assert isinstance(plain, PlainConfig)
    for name in set(PlainConfig.__struct_fields__) - {"dtype", "mlp_bias", "attention_bias", "sliding_window"}:
        assert getattr(plain, name) == getattr(whole, name, getattr(plain, name)), name
    assert msgspec.structs.replace(describe(plain), eps=0.0) == msgspec.structs.replace(describe(whole), eps=0.0)


def test_one_file_of_several_is_refused_and_a_whole_one_asked_for(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "split"
    folder.mkdir()
    for number in (1, 2):
        write_gguf(llama, folder / f"big-0000{number}-of-00002.gguf", metadata={".split.count": 2})
    for path in (folder, folder / "big-00002-of-00002.gguf"):
        message = refusal(path)
        assert "one of 2 files of a split model" in message
        assert "llama-gguf-split --merge" in message


@BOTH_PATHS
def test_more_layers_than_the_file_says_are_refused(llama: Path, tmp_path: Path, native: bool) -> None:
    write_gguf(llama, tmp_path / "cut.gguf", metadata={"block_count": 1})
    said = refusal(tmp_path / "cut.gguf", native=native)
    assert "cut cannot be served: its checkpoint holds 2 layers, and its configuration says 1" in said
    assert "blk.1.attn_k.weight" in said


def stretch(**said: Any) -> dict[str, Any]:
    return {"metadata": {f"rope.scaling.{key}": value for key, value in said.items()}}


def beside(name: str, tensor: Any) -> dict[str, Any]:
    return {"tensors": {name: np.asarray(tensor, np.float32)}}


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (beside("rope_freqs.weight", [2, 2, 2]), "rope_freqs.weight does not fit its rotary embedding"),
        (beside("blk.0.attn_q.bias", [1] * 32), "have a place in a model of its kind"),
        (stretch(type="yarn", factor=4.0), "yarn without original_context_length; its safetensors"),
        (stretch(type="dynamic", factor=4.0), "(dynamic); its safetensors"),
        (stretch(type="linear", factor=4.0, alpha=2.0), "linear with alpha; its safetensors"),
        (stretch(type="longrope", original_context_length=64), "longrope without rope_factors_long.weight; its safetensors"),
        ({"kind": "deepseek2"}, "deepseek2 is not supported yet; its safetensors may do"),
    ],
)  # fmt: skip
def test_what_is_not_known_of_a_file_is_refused_and_named(
    llama: Path, tmp_path: Path, written: dict[str, Any], why: str
) -> None:
    write_gguf(llama, tmp_path / "odd.gguf", **written)
    message = refusal(tmp_path / "odd.gguf")
    assert all(part in message for part in why.split("; "))


@BOTH_PATHS
@pytest.mark.parametrize(("rows", "tokens"), [(30, None), (40, None), (None, 96), (None, 160)])
def test_a_tensor_of_another_size_is_named(
    llama: Path, tmp_path: Path, native: bool, rows: int | None, tokens: int | None
) -> None:
    """`rows` divide by the heads or do not; `tokens` are those of a vocabulary that the embedding was not made for."""
    queries = {"blk.0.attn_q.weight": np.ones((rows, 32), np.float32)} if rows else None
    write_gguf(llama, tmp_path / "odd.gguf", metadata={"vocab_size": tokens or tiny.VOCAB}, tensors=queries)
    message = refusal(tmp_path / "odd.gguf", native=native)
    names = {30: "blk.0.attn_q.weight has 30 rows", 40: "self_attn.q_proj.weight", None: "embed_tokens.weight"}
    assert names[rows] in message


@pytest.mark.parametrize(
    ("tensor", "missing"), [("blk.1.ffn_up", "model.layers.1.mlp.up_proj"), ("output_norm", "model.norm")]
)
@BOTH_PATHS
def test_a_tensor_that_is_missing_is_named(
    llama: Path, tmp_path: Path, native: bool, tensor: str, missing: str
) -> None:
    write_gguf(llama, tmp_path / "whole.gguf")
    content = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "less.gguf").write_bytes(content.replace(f"{tensor}.weight".encode(), b"x" * len(f"{tensor}.weight")))
    assert f"lacks {missing}.weight" in refusal(tmp_path / "less.gguf", native=native)


def test_a_file_that_was_cut_off_or_written_over_is_refused(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    write_gguf(llama, tmp_path / "whole.gguf", tensors={"blk.9.attn_k.weight": np.ones((16, 32), np.float32)})
    content = (tmp_path / "whole.gguf").read_bytes()
    for length in range(0, len(content), len(content) // 23):
        file.write_bytes(content[:length])
        assert "broken cannot be" in refusal(file)
    file.write_bytes(content.replace(b"blk.9.attn_k.weight", b"blk.1.attn_k.weight"))
    assert "two tensors of the name blk.1.attn_k.weight" in refusal(file)
    # The name is followed by the number of dimensions, both of them, the type and the offset.
    at = content.index(b"blk.1.attn_k.weight") + len(b"blk.1.attn_k.weight") + 4 + 2 * 8 + 4
    for offset in (0, 1 << 62):
        file.write_bytes(content[:at] + offset.to_bytes(8, "little") + content[at + 8 :])
        assert "blk.1.attn_k.weight" in refusal(file)

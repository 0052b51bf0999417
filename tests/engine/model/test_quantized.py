"""A quantized checkpoint gives the tokens of the ordinary checkpoint with the same weights, on every path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from tandem.base.errors import ConfigurationError
from tandem.engine.model.attention.interface import PAGED
from tandem.engine.model.checkpoint import choose_dtype, read_config
from tandem.engine.model.cuda.pieces import DevicePieces
from tandem.engine.model.fused.cpu import cpu_pieces
from tandem.engine.model.fused.find import fuse
from tandem.engine.model.general import load_model
from tandem.engine.model.kernel_linear import KernelLinear, widen_left
from tandem.engine.model.native.forward import NativeLlamaForward
from tandem.engine.model.quantized import loading
from tandem.engine.model.quantized.blocks import BlockLinear
from tandem.engine.model.quantized.formats import QuantizedCheckpoint, dense
from tandem.engine.model.quantized.kernels import BlockScaled, FourBit, RowScaled
from tandem.engine.model.source import find_source
from tandem.kernels import library
from tests.engine.model import quantized_files as files
from tests.engine.model import tiny
from tests.engine.model.driver import Driver, load
from tests.engine.model.test_plain_config import LOAD_WITHOUT_TRANSFORMERS
from tests.engine.native.batches import Sequences

PROMPT = [5, 17, 99, 3, 42, 42, 8]


def tokens_of(path: Path, *, native: bool, dtype: str = "float32") -> list[int]:
    runner = load(path, dtype=dtype, memory_bytes=1 << 20, max_num_seqs=2, max_model_len=64, native=native)
    assert isinstance(runner.forward, NativeLlamaForward) is native
    driver = Driver(runner)
    driver.add("r", PROMPT)
    return driver.generate(6)["r"]


# Of the memory of the same matrices in float32, the head's among them.
_SHARES = dict.fromkeys(("compressed-4bit", "compressed-4bit-zeros", "awq", "gptq"), 0.25)
_SHARES |= dict.fromkeys(("compressed-int8", "gptq-8bit-v2"), 0.36)


@pytest.mark.parametrize(
    ("name", "native"),
    [
        *((name, False) for name in sorted(files.FORMATS)),
        *((name, True) for name in sorted(files.FORMATS.keys() - _SHARES)),
    ],
)
def test_tokens_are_those_of_the_numbers(name: str, native: bool, tmp_path: Path) -> None:
    quantized, ordinary = files.save(name, tmp_path)
    assert tokens_of(quantized, native=native) == tokens_of(ordinary, native=native)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(_SHARES))
def test_the_native_library_keeps_the_bits_and_computes_the_same(name: str, dtype: str, tmp_path: Path) -> None:
    def computed(path: Path) -> tuple[torch.Tensor, int]:
        forward = load(path, dtype=dtype).forward
        assert isinstance(forward, NativeLlamaForward)
        model = AutoModelForCausalLM.from_pretrained(ordinary, dtype=getattr(torch, dtype))
        batch = Sequences(forward, model, [None, None]).batch({0: PROMPT})
        return forward(batch).clone(), forward.weight_bytes

    quantized, ordinary = files.save(name, tmp_path, getattr(torch, dtype))
    (found, size), (expected, plain) = computed(quantized), computed(ordinary)
    assert size < plain * (_SHARES[name] if dtype == "float32" else 0.85)
    if dtype == "float32" or library.instruction_set(torch.bfloat16) in ("amx", "avx512bf16"):
        assert torch.equal(found, expected)
    else:  # such units compute with float32's values of the integers
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_fp8_in_blocks_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """It loads such a checkpoint on a CPU, too, where blocks divide the matrices; the others it does not."""
    quantized, _ = files.save("fp8-blocks", tmp_path, intermediate_size=384)
    theirs = AutoModelForCausalLM.from_pretrained(
        quantized, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    found = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False)[0, len(PROMPT) :].tolist()
    assert tokens_of(quantized, native=False) == found


def rewritten(path: Path, **changes: Any) -> Path:
    file = path / "config.json"
    written = json.loads(file.read_text())
    written["quantization_config"] |= changes
    file.write_text(json.dumps(written))
    return path


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("awq", {"version": "gemv"}, "AWQ's version gemv packs weights otherwise"),
        ("gptq", {"bits": 3}, "gptq with 3 bits; 2 and 4 and 8 are known here"),
        ("gptq", {"dynamic": {"-:.*down": {}}}, "GPTQ with other settings for some of its layers"),
        ("compressed-int8", {"sparsity_config": {"format": "sparse-24"}}, r"its weights are sparse \(sparse-24\)"),
        ("compressed-int8", {"quant_method": "fp8"}, None),
    ],
)
def test_what_would_be_computed_wrong_is_refused_by_name(
    name: str, changes: dict[str, Any], complaint: str | None, tmp_path: Path
) -> None:
    path = rewritten(files.save(name, tmp_path)[0], **changes)
    if complaint is None:
        tokens_of(path, native=False)  # what it is shows by its tensors
        return
    with pytest.raises(ConfigurationError, match=f"quantized cannot be served: {complaint}"):
        tokens_of(path, native=False)


@pytest.mark.parametrize(
    ("written", "lost"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128]}, 0),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, 0),
        ({"quant_method": "compressed-tensors", "sparsity_config": "dense"}, 0),
        ({"quant_method": "gptq"}, 100),
    ],
)
def test_settings_of_another_form_and_a_file_that_was_cut_are_refused_in_a_sentence(
    written: dict[str, Any], lost: int, tmp_path: Path
) -> None:
    path = tiny.save("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": written}))
    weights = path / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - lost)
    with pytest.raises(ConfigurationError, match="llama cannot be loaded: "):
        load(path)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("first_format", [True, False])
def test_a_zero_point_of_0_changes_no_other(bits: int, first_format: bool) -> None:
    """The group has no negative weight. Zero points that are stored minus one lie in one number, in which one of 0 borrows."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(bits))
    weight[::3] = weight[::3].abs()
    parts, right = files.gptq(weight, bits, 32, first_format=first_format)
    checkpoint = QuantizedCheckpoint("gptq", bits, first_format, (128, 128), {})
    assert torch.allclose(dense(parts, checkpoint), right, atol=1e-3)


def test_tensors_of_an_unknown_kind_are_refused_by_name(tmp_path: Path) -> None:
    path, _ = files.save("gptq", tmp_path)
    tensors = files.load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_global_scale"] = torch.ones(1)
    files.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigurationError, match=r"layers\.0\.mlp\.up_proj is quantized in a way .*weight_global_scale"
    ):
        tokens_of(path, native=True)


def with_biases(path: Path, value: float) -> None:
    tensors = files.load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".qweight")]:
        bias = torch.full((tensors[name].shape[1],), value)
        tensors[name.replace("qweight", "bias")] = bias
    files.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("native", [False, True], ids=["general", "native"])
def test_biases_that_a_model_does_not_have_may_be_zeros_alone(native: bool, tmp_path: Path) -> None:
    """Tools that write GPTQ add them."""
    quantized, ordinary = files.save("gptq", tmp_path)
    with_biases(quantized, 0.0)
    assert tokens_of(quantized, native=native) == tokens_of(ordinary, native=native)
    with_biases(quantized, 0.5)
    with pytest.raises(ConfigurationError, match=r"proj has a bias in its checkpoint, and none by its config"):
        tokens_of(quantized, native=native)


@pytest.mark.parametrize("native", [False, True], ids=["general", "native"])
@pytest.mark.parametrize("kind", ["gptq", "compressed-fp8-rows"])
def test_a_bias_of_another_size_is_refused(native: bool, kind: str, tmp_path: Path) -> None:
    path, _ = files.save(kind, tmp_path, attention_bias=True)
    tensors = files.load_file(path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.bias"] = torch.ones(1)
    files.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"layers\.1\.self_attn\.k_proj\.bias is \(1,\) in its checkpoint"):
        tokens_of(path, native=native)


def test_scales_that_are_found_anew_are_left_aside(tmp_path: Path) -> None:
    quantized, ordinary = files.save("compressed-fp8-rows", tmp_path)
    tensors = files.load_file(quantized / "model.safetensors")
    for part in ("input_scale", "k_scale", "output_scale"):
        tensors[f"model.layers.0.self_attn.k_proj.{part}"] = torch.ones(1)
    files.save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    assert tokens_of(quantized, native=False) == tokens_of(ordinary, native=False)


@pytest.mark.more
def test_integers_are_read_without_transformers(tmp_path: Path) -> None:
    quantized, _ = files.save("awq", tmp_path)
    subprocess.run([sys.executable, "-c", LOAD_WITHOUT_TRANSFORMERS, str(quantized)], check=True, timeout=120)


def test_half_precision_becomes_what_the_kernels_compute_in(tmp_path: Path) -> None:
    quantized, ordinary = files.save("awq", tmp_path, torch.float16)
    for path, dtype in ((quantized, torch.bfloat16), (ordinary, torch.float16)):
        source = find_source(str(path))
        config = read_config(source)
        assert choose_dtype("auto", source, config) is dtype
        assert choose_dtype("float16", source, config) is torch.float16


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_hidden_layers": 1}, r"its checkpoint holds 2 layers, and its configuration says 1"),
        ({"intermediate_size": 256}, r"gate_proj.weight is \(320, 128\) in its checkpoint, and \(256, 128\) by"),
        ({"num_hidden_layers": 3}, r"its checkpoint lacks model.layers.2"),
    ],
)
def test_integers_that_do_not_fit_the_configuration_are_refused(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    path, _ = files.save("compressed-4bit", tmp_path)
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ConfigurationError, match=complaint):
        tokens_of(path, native=True)


@pytest.mark.skipif(
    library.instruction_set(torch.float32) in (None, "portable"), reason="no kernels for this processor"
)
@pytest.mark.parametrize("name", ["compressed-4bit-zeros", "gptq-8bit-v2"])
def test_fused_pieces_take_integers_as_they_are(name: str, tmp_path: Path) -> None:
    quantized, ordinary = files.save(name, tmp_path)

    def logits(model: Any) -> torch.Tensor:
        ids = torch.tensor([PROMPT])
        model.set_attn_implementation("sdpa")
        found = model(input_ids=ids, position_ids=torch.arange(len(PROMPT))[None], use_cache=False).logits
        model.set_attn_implementation(PAGED)
        return torch.Tensor(found)

    def left(model: Any) -> int:
        layers = [layer for layer in model.modules() if isinstance(layer, BlockLinear)]
        kept = [each for layer in layers for each in layer.parameters() if each.dtype is torch.uint8]
        return sum(each.nbytes for each in kept)

    source = find_source(str(quantized))
    expected = logits(AutoModelForCausalLM.from_pretrained(ordinary, dtype=torch.float32))
    for fused in (True, False):
        model = load_model(source, read_config(source), torch.float32, torch.device("cpu"), lambda *_: None)
        assert left(model) > 0
        torch.testing.assert_close(logits(model), expected)
        if not fused:
            widen_left(model)
            torch.testing.assert_close(logits(model), expected)
            assert not [one for one in model.parameters() if one.dtype is torch.uint8 and one.numel()]
        else:
            assert (pieces := cpu_pieces(torch.float32, 1)) is not None
            assert (found := fuse(model, pieces)) is not None  # it compares the model's logits
            assert (found.gated, found.merged) == (2, 2)
        assert left(model) == 0


# --- as on a GPU: the same kernels of torch, on a CPU


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With its matrices as they are."""
    source = find_source(str(path))
    config, cpu = read_config(source), torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(loading, "_may_stay", lambda device: True)
        return load_model(source, config, torch.bfloat16, cpu, lambda *_: None)


KERNELS = {"fp8-tensor": RowScaled, "compressed-fp8-rows": RowScaled, "awq": FourBit, "gptq": FourBit}
KERNELS |= {"gptq-act-order": FourBit, "compressed-4bit": FourBit, "compressed-4bit-zeros": FourBit}


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_kernel_computes_what_the_matrix_stands_for_and_is_fused_like_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, ordinary = files.save(name, tmp_path, torch.bfloat16, intermediate_size=256)
    model = loaded(quantized, monkeypatch)
    plain = AutoModelForCausalLM.from_pretrained(ordinary, dtype=torch.bfloat16)
    layers = {part: layer for part, layer in model.named_modules() if isinstance(layer, KernelLinear)}
    assert len(layers) == 14
    torch.manual_seed(1)
    for part, layer in layers.items():
        assert type(layer) is KERNELS[name]
        x = torch.randn(1, 5, layer.in_features, dtype=torch.bfloat16)
        right = plain.get_submodule(part)(x).float()
        assert (layer(x).float() - right).abs().max() < 0.05 * right.abs().max()
    before = sum(weight.nbytes for weight in model.parameters())
    found = fuse(model, DevicePieces())  # it compares the model's logits
    assert found is not None
    assert (found.gated, found.norms, found.merged) == (2, 5, 2)
    assert sum(weight.nbytes for weight in model.parameters()) < before  # joined matrices are the pieces' own


def test_one_that_computes_something_else_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, _ = files.save("awq", tmp_path, torch.bfloat16, intermediate_size=256)
    product = FourBit.product
    monkeypatch.setattr(FourBit, "product", lambda self, rows: product(self, rows) * 1.3)
    model = loaded(quantized, monkeypatch)
    assert not any(isinstance(layer, KernelLinear) for layer in model.modules())
    assert "the kernel finds something else" in caplog.text


def test_blocks_are_given_to_the_library_as_it_wants_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signature is held to in tests/engine/model/test_flashinfer_package.py."""
    asked: list[tuple[Any, ...]] = []

    class Library:
        @staticmethod
        def fp8_blockscale_gemm_sm90(x: Any, weight: Any, input_scale: Any, weight_scale: Any) -> torch.Tensor:
            asked.append((x.shape, weight.shape, input_scale, weight_scale.shape))
            spread = weight_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            return (x.float() @ (weight.float() * spread[: weight.shape[0], : weight.shape[1]]).t()).bfloat16()

    monkeypatch.setitem(sys.modules, "flashinfer.gemm", Library)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 32}
    quantized, _ = files.save("fp8-blocks", tmp_path, torch.bfloat16, **sizes)
    model = loaded(quantized, monkeypatch)
    layers = [layer for layer in model.modules() if isinstance(layer, KernelLinear)]
    assert {type(layer) for layer in layers} == {BlockScaled}
    gate, up = model.model.layers[0].mlp.gate_proj, model.model.layers[0].mlp.up_proj
    joined = gate.joined([up])
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    assert torch.equal(joined(x), torch.cat((gate(x), up(x)), dim=-1))
    key, value = model.model.layers[0].self_attn.k_proj, model.model.layers[0].self_attn.v_proj
    assert key.joined([value]) is None  # half a block each
    assert asked[-1] == ((3, 256), (256, 256), None, (2, 2))

"""Blocks beside a checkpoint are computed with where they are its weights, and only there."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy
import pytest
import torch
from gguf.quants import quantize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tandem.base.errors import ConfigurationError
from tandem.engine.model.content import BLOCKS_FILE
from tandem.engine.model.native.blocks import StoredBlocks, write_blocks
from tandem.engine.model.native.forward import NativeLlamaForward
from tandem.kernels import library
from tandem.kernels.library import BlockRows
from tests.engine.model import tiny
from tests.engine.native.batches import Sequences
from tests.engine.native.test_native_model import windows

KIND = "Q4_0"
CHANGED = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in bfloat16 that was made of blocks, which lie beside it."""
    folder = tiny.save("llama", tmp_path)
    weights, blocks = load_file(folder / "model.safetensors"), {}
    for name, tensor in weights.items():
        if tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
            blocks[name] = BlockRows(quantize(tensor.float().numpy(), gguf.GGMLQuantizationType[KIND]), KIND)
            weights[name] = library.widen(blocks[name], torch.bfloat16)
        else:
            weights[name] = tensor.bfloat16()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    write_blocks(folder, blocks)
    return folder


def computed(folder: Path) -> tuple[torch.Tensor, int]:
    """The logits of a prompt, and how much memory the matrices take."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    forward = NativeLlamaForward.from_checkpoint(folder, model.config, dtype=torch.bfloat16, threads=1)
    sequences = Sequences(forward, model, windows(model.config))
    logits, size = forward(sequences.batch({0: list(range(3, 40))})).clone(), forward.weight_bytes
    forward.close()
    return logits, size


def divergence(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest KL divergence of a token. A matrix that is wrong by half gives 0.18."""
    mine, theirs = (each.float().log_softmax(-1) for each in (logits, expected))
    return float((theirs.exp() * (theirs - mine)).sum(-1).max())


def test_the_blocks_take_less_memory_and_compute_the_same_model(folder: Path) -> None:
    logits, size = computed(folder)
    (folder / BLOCKS_FILE).unlink()
    expected, plain = computed(folder)
    assert size < 0.7 * plain
    if library.instruction_set(torch.bfloat16) in ("amx", "avx512bf16"):
        assert torch.equal(logits, expected)
    else:  # such units compute with float32's values of the blocks
        assert divergence(logits, expected) < 0.005


def test_blocks_of_other_weights_are_not_used(folder: Path) -> None:
    _, size = computed(folder)
    weights = load_file(folder / "model.safetensors")
    weights[CHANGED][5, 7] *= 1.5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    logits, larger = computed(folder)
    assert larger > size
    (folder / BLOCKS_FILE).unlink()
    expected, _ = computed(folder)
    assert divergence(logits, expected) < 0.005


def test_blocks_that_cannot_be_read_are_named(folder: Path) -> None:
    (folder / BLOCKS_FILE).write_bytes(b"none")
    with pytest.raises(ConfigurationError, match=rf"{BLOCKS_FILE} cannot be read.*Remove it"):
        computed(folder)


@pytest.mark.parametrize("form", ["no bytes", "no bytes of blocks"])
def test_what_only_looks_like_blocks_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """The library reads as many bytes as the shape says, whatever there is."""
    rows, inputs = 64, 64
    shape = (rows, inputs // 32 * 18)
    data = numpy.empty((*shape, 0), numpy.uint8) if form == "no bytes" else numpy.zeros(shape, numpy.int8)
    write_blocks(tmp_path, {"weight": BlockRows(data, KIND)})
    read: list[BlockRows] = []
    monkeypatch.setattr(library, "widen", lambda rows, dtype: read.append(rows) or torch.zeros(1))
    assert StoredBlocks(tmp_path).of("weight", torch.zeros(rows, inputs, dtype=torch.bfloat16)) is None
    assert not read

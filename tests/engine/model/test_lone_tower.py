"""A vision tower without its model: the rows are the whole model's, and of its checkpoint nothing else is read into memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.base.errors import ConfigurationError
from tandem.engine.config import ModelConfig
from tandem.engine.model.checkpoint import read_config
from tandem.engine.model.embeds import rows_of
from tandem.engine.model.general import load_model
from tandem.engine.model.source import find_source
from tandem.engine.model.vision.alone import load_tower
from tandem.engine.model.vision.tower import find_tower, loader_of
from tandem.engine.scheduling.output import EncoderInput
from tests.engine.model.tiny import save
from tests.engine.model.tiny_vision import IDEFICS3, QWEN2_5_VL, QWEN2_VL, QWEN3_VL, SMOLVLM, VisionFamily, prompt_of
from tests.pictures import picture

FAMILIES = {
    "SmolVLM": SMOLVLM, "Idefics3": IDEFICS3, "Qwen2-VL": QWEN2_VL, "Qwen2.5-VL": QWEN2_5_VL, "Qwen3-VL": QWEN3_VL
}  # fmt: skip
FILE = picture(1)


def parts_of(family: VisionFamily) -> list[EncoderInput]:
    _, media, _ = prompt_of([FILE], family)
    return [EncoderInput(part.identifier, FILE, part.part, part.length, part.columns) for part in media]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_its_rows_are_the_whole_models(family: VisionFamily, tmp_path: Path) -> None:
    path = str(family.save(tmp_path))
    source = find_source(path)
    config = read_config(source)
    cpu = torch.device("cpu")
    whole = load_model(source, config, torch.float32, cpu, lambda *_: None, loader=loader_of(config))
    tower = find_tower(source, whole, 1)
    assert tower is not None
    alone = load_tower(ModelConfig(path=path, dtype="float32", threads=1), None)
    wanted = parts_of(family)
    with torch.inference_mode():
        expected = tower.encode(wanted)
    found = [rows_of(rows) for rows in alone.encode(wanted)]
    assert found
    for ours, theirs in zip(found, expected, strict=True):
        assert isinstance(ours, torch.Tensor)
        assert isinstance(theirs, torch.Tensor)
        assert torch.equal(ours, theirs)
        assert ours.shape[1] == tower.width


def test_names_of_older_checkpoints(tmp_path: Path) -> None:
    """Qwen's own, which begin otherwise than transformers' do now."""
    path = QWEN2_5_VL.save(tmp_path)
    model = ModelConfig(path=str(path), dtype="float32", threads=1)
    expected = load_tower(model, None).encode(parts_of(QWEN2_5_VL))
    file = path / "model.safetensors"
    tensors = {
        re.sub(r"^model\.visual\.", "visual.", re.sub(r"^model\.language_model\.", "model.", name)): tensor
        for name, tensor in load_file(file).items()
    }
    assert {"visual.merger.mlp.0.weight", "model.embed_tokens.weight"} <= tensors.keys()
    save_file(tensors, file, {"format": "pt"})
    assert load_tower(model, None).encode(parts_of(QWEN2_5_VL)) == expected


def test_a_checkpoint_without_a_weight_of_the_tower_is_refused(tmp_path: Path) -> None:
    path = QWEN3_VL.save(tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.visual.merger.norm.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"lacks model\.visual\.merger\.norm\.weight"):
        load_tower(ModelConfig(path=str(path), dtype="float32"), None)


def test_a_model_that_reads_no_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"set pools\.encode to 0"):
        load_tower(ModelConfig(path=str(save("llama", tmp_path))), None)


def in_memory(kind: str) -> int:
    """Of this process, in bytes."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the process's peak from /proc")
def test_its_memory_does_not_grow_with_the_language_model(tmp_path: Path) -> None:
    small = QWEN2_5_VL.save(tmp_path / "small")
    large = QWEN2_5_VL.save(tmp_path / "large")
    words = 400_000
    config = json.loads((large / "config.json").read_text())
    config["text_config"]["vocab_size"] = words
    (large / "config.json").write_text(json.dumps(config))
    tensors = load_file(large / "model.safetensors")
    names = [name for name in tensors if "embed_tokens" in name or "lm_head" in name]
    tensors |= {name: torch.ones(words, tensors[name].shape[1], dtype=torch.bfloat16) for name in names}
    save_file(tensors, large / "model.safetensors", {"format": "pt"})
    language = 4 * sum(
        tensors[name].numel() for name in names
    )  # as float32, so that none is read where it lies in its file
    assert language > 90 << 20
    load_tower(ModelConfig(path=str(small), dtype="float32", threads=1), None)  # with all that a first time needs
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = in_memory("VmRSS")
    load_tower(ModelConfig(path=str(large), dtype="float32", threads=1), None)
    assert in_memory("VmHWM") - before < language // 6

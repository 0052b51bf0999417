"""A model's identity is the content of its files, not its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.base.errors import ConfigurationError
from tandem.engine.model.content import BLOCKS_FILE, ModelContent, content_of
from tandem.engine.model.source import find_source

CONFIG = {"model_type": "llama", "rope_theta": 10000.0, "transformers_version": "5.0"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "one" / "model"
    folder.mkdir(parents=True)
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", {"eos_token_id": 2})
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("a model")
    save_file({"a": torch.zeros(4), "b": torch.ones(2, 2)}, folder / "model.safetensors")
    return folder


def write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content))


def content(folder: Path) -> ModelContent:
    return content_of(find_source(str(folder)))


def copy_of(folder: Path) -> Path:
    """Under another name, on another machine."""
    return Path(shutil.copytree(folder, folder.parent / "copy"))


def test_the_same_files_elsewhere_are_the_same_model(folder: Path) -> None:
    other = copy_of(folder)
    (other / "README.md").write_text("others say other things")
    (other / "consolidated.safetensors").write_bytes(b"the same weights in another form, which is never loaded")
    write_json(other / "config.json", CONFIG | {"transformers_version": "5.1", "_name_or_path": "/here"})
    assert content(other) == content(folder)


def other_weights(folder: Path) -> None:
    save_file({"a": torch.zeros(4), "b": torch.full((2, 2), 1.0001)}, folder / "model.safetensors")


def other_names(folder: Path) -> None:
    save_file({"a": torch.zeros(4), "c": torch.ones(2, 2)}, folder / "model.safetensors")


def other_shapes(folder: Path) -> None:
    save_file({"a": torch.zeros(4), "b": torch.ones(4)}, folder / "model.safetensors")


def other_rope(folder: Path) -> None:
    write_json(folder / "config.json", CONFIG | {"rope_theta": 10001.0})


def other_end(folder: Path) -> None:
    write_json(folder / "generation_config.json", {"eos_token_id": 3})


def other_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"added_tokens": []}')


def blocks_beside(folder: Path) -> None:
    (folder / BLOCKS_FILE).write_bytes(b"the same weights")


@pytest.mark.parametrize(
    "change", [other_weights, other_names, other_shapes, other_rope, other_end, other_tokenizer, blocks_beside]
)
def test_another_content_under_the_same_name_is_another_model(folder: Path, change) -> None:  # type: ignore[no-untyped-def]
    before = content(folder)
    change(folder)
    assert content(folder).digest != before.digest
    assert (content(folder).tokenizer != before.tokenizer) == (change is other_tokenizer)


def test_another_layout_of_kv_is_another_content(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tiny.gguf").write_bytes(b"blocks")
    file = find_source(str(folder / "tiny.gguf"))
    before, of_file = content(folder), content_of(file)
    monkeypatch.setattr("tandem.engine.model.content.KV_VERSION", 99)
    assert content(folder).digest != before.digest
    assert content_of(file) == of_file  # its KV has a version of its own, and is not what it was in the first
    monkeypatch.setattr("tandem.engine.model.content.QUANTIZED_KV_VERSION", 1)
    assert content_of(file) != of_file


def test_every_shard_of_an_index_counts(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    save_file({"c": torch.zeros(1)}, folder / "model-00002-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}
    write_json(folder / "model.safetensors.index.json", {"weight_map": names})
    before = content(folder)
    save_file({"c": torch.ones(1)}, folder / "model-00002-of-00002.safetensors")
    assert content(folder) != before


def test_a_missing_shard_is_said(folder: Path) -> None:
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": "gone.safetensors"}})
    with pytest.raises(ConfigurationError, match=r"model cannot be read: .*gone\.safetensors"):
        content(folder)


def test_every_part_of_a_gguf_counts(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"tiny-0000{number}-of-00002.gguf").write_bytes(b"part")
    (tmp_path / "tiny-00001-of-00003.gguf").write_bytes(b"another split of it")
    source = find_source(str(tmp_path / "tiny-00001-of-00002.gguf"))
    before = content_of(source)
    assert before.tokenizer == ""
    (tmp_path / "tiny-00002-of-00002.gguf").write_bytes(b"trap")
    assert content_of(source) != before

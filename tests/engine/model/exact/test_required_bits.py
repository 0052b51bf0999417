"""`model.exact: require` refuses, in words, what cannot promise the same bits, and makes the way of computing a part of the content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.cli import main
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.model.loading import load_runner
from tandem.engine.model.runner import ModelInfo
from tests.engine.model import tiny


def load(path: Path, *, native: bool = True, cache: str = "auto", loras: int = 0, **model: Any) -> ModelInfo:
    return load_runner(
        ModelConfig(path=str(path), **{"dtype": "float32", "exact": "require", "device": "cpu", "threads": 1, **model}),
        CacheConfig(block_size=4, memory_bytes=8 << 20, dtype=cache),
        SchedulerConfig(max_num_seqs=4, max_loras=loras),
        native=native,
    ).info  # fmt: skip


def test_how_a_node_computes_is_a_part_of_its_content(tmp_path: Path) -> None:
    path = tiny.save("llama", tmp_path)
    plain = load(path, exact="auto").content
    assert len(plain) == 64
    files, _, way = load(path).content.partition("+")
    assert files == plain
    assert "-float32-torch-" in way
    assert load(path).content == f"{files}+{way}"
    other = load(path, dtype="bfloat16").content
    assert other.startswith(f"{files}+")
    assert other != f"{files}+{way}"


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("gemma3", {}, "transformers computes it, because the model is of type gemma3_text"),
        ("llama", {"native": False}, "transformers computes it, because the caller asked for it"),
        ("llama", {"dtype": "float16"}, "model.dtype is float16, but model.exact is require"),
        ("llama", {"cache": "fp8"}, "cache.dtype is fp8, but model.exact is require"),
        ("llama", {"loras": 2}, "scheduler.max_loras is 2, but model.exact is require"),
        ("llama", {"hidden_states_folder": "/tmp"}, "model.hidden_states_folder is /tmp, but model.exact is"),
    ],
)
def test_what_cannot_promise_it_is_not_loaded(kind: str, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tiny.save(kind, tmp_path)
    with pytest.raises(ConfigurationError, match="or leave model") as refused:
        load(path, **options)
    assert said in str(refused.value)
    load(path, **{**options, "exact": "auto"})


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("cache.dtype=fp8", "the native path keeps no such KV: set it to auto"),
        (
            "model.device=cuda model.dtype=float32",
            "model.dtype is float32, but model.exact is require, and FlashInfer does not compute in it: set it to bfloat16",
        ),
        ("scheduler.max_loras=3", "transformers computes a model with adapters"),
        ("pools.decode.tensor_parallel=2", "a node has 2 ranks, and transformers computes a model on several"),
    ],
)
def test_settings_that_cannot_have_it_are_refused_by_every_command(
    setting: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"--set={each}" for each in setting.split()]
    assert main(["config", "--set", "model.exact=require", *given]) == 1
    assert said in capsys.readouterr().err
    assert main(["config", *given]) == 0


def test_a_model_of_another_type_is_refused_before_ray_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.save("gemma3", tmp_path)
    assert main(["serve", str(path), "--set", "model.exact=require", "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert "a model of type gemma3_text is computed by transformers, whose sums depend on the batch" in said

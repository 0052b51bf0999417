"""What Tandem says of vLLM before a node starts: the settings that it lacks, and what is wrong with its environment."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import ConfigurationError
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SchedulingPolicy
from tandem.engine.model.source import find_source
from tandem.engine.vllm.settings import arguments
from tandem.engine.vllm.wing import TRIED, look, make, refusals
from tandem.engine.wings import other_engine

RIGHT = {
    "python": platform.python_version(), "vllm": f"{TRIED[-1]}+cpu", "torch": "2.13.0+cpu",
    "ray": importlib.metadata.version("ray"), "missing": [], "arguments": ["enforce_eager", "kv_cache_dtype"]
}  # fmt: skip


def python_that_says(folder: Path, **other: Any) -> str:
    script = folder / "python"
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps({**RIGHT, **other})}\nEND\n")
    script.chmod(0o755)
    return str(script)


def test_an_environment_with_all_that_is_needed_is_right(tmp_path: Path) -> None:
    found = look(ModelConfig(engine_python=python_that_says(tmp_path), engine_args={"enforce_eager": True}), {})
    assert (found.version, found.device, found.wrong) == (f"{TRIED[-1]}+cpu", "cpu", [])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"vllm": ""}, "has no vLLM: install vllm=="),
        ({"vllm": "0.31.2"}, "has vLLM 0.31.2, and Tandem was tried with 0.32.0"),
        ({"python": "3.8.1"}, "is Python 3.8.1, and Ray's processes must all have the minor version"),
        ({"ray": "2.1.0"}, "has Ray 2.1.0, and this cluster has"),
        ({"ray": "", "missing": ["ray"]}, "has no Ray, and this cluster has"),
        ({"missing": ["tandem"]}, "does not find Tandem itself"),
        ({"missing": ["xxhash", "rich"]}, "lacks xxhash, rich"),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_right(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    found = look(ModelConfig(engine_python=python_that_says(tmp_path, **other)), {})
    assert len(found.wrong) == 1
    assert said in found.wrong[0]


def test_an_argument_that_vllm_does_not_know_is_named(tmp_path: Path) -> None:
    model = ModelConfig(engine_python=python_that_says(tmp_path), engine_args={"enforce_eagr": True})
    (said,) = look(model, {}).wrong
    assert "does not know; did you mean enforce_eager?" in said


def test_a_python_that_is_none_is_no_traceback(tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\necho oh >&2\n")
    silent.chmod(0o755)
    assert "is no Python that answers; it said: oh" in look(ModelConfig(engine_python=str(silent)), {}).wrong[0]
    assert "cannot be run" in look(ModelConfig(engine_python=str(tmp_path / "nowhere")), {}).wrong[0]
    assert "model.engine_python is empty" in look(ModelConfig(), {}).wrong[0]


def test_the_script_runs_in_any_python() -> None:
    found = look(ModelConfig(engine_python=sys.executable), {})
    assert found.version or "has no vLLM" in found.wrong[0]


def test_each_setting_that_vllm_lacks_is_refused_by_name(tmp_path: Path) -> None:
    assert not list(refusals(EngineConfig(model=ModelConfig(path=str(tmp_path / "m"), engine="vllm"))))
    config = EngineConfig(
        model=ModelConfig(path="model.gguf", pooling="mean", engine_args={"dtype": "auto", "enable_lora": True}),
        cache=CacheConfig(block_size=32, dtype="fp8"),
        scheduler=SchedulerConfig(policy=SchedulingPolicy.CONTINUUM, num_speculative_tokens=2),
    )
    said = dict(refusals(config))
    assert "GGUF" in said["model.path"]
    assert "leave it out" in said["model.pooling"]
    assert "model.engine_args: {block_size: 64}" in said["cache.block_size"]
    assert "kv_cache_dtype: fp8" in said["cache.dtype"]
    assert "speculative_config" in said["scheduler.num_speculative_tokens"]
    assert "continuum" in said["scheduler.policy"]
    of_args = [why for name, why in refusals(config) if name == "model.engine_args"]
    assert any("dtype, which follows from Tandem's settings: set model.dtype" in why for why in of_args)
    assert any("enable_lora, which follows from Tandem's settings: set scheduler.max_loras" in why for why in of_args)


@pytest.mark.parametrize(("rank", "slot"), [(1, 1), (2, 8), (16, 16), (33, 64), (512, 512)])
def test_adapters_get_slots_of_the_next_rank_that_vllm_has(tmp_path: Path, rank: int, slot: int) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = ModelConfig(path=str(tmp_path), device="cpu", engine="vllm", max_lora_rank=rank)
    cache = CacheConfig(memory_bytes=1 << 20)
    config = EngineConfig(model=model, cache=cache, scheduler=SchedulerConfig(max_loras=3))
    assert not list(refusals(config))
    source = find_source(str(tmp_path))
    given = arguments(config, model, source)
    assert (given["enable_lora"], given["max_loras"], given["max_lora_rank"]) == (True, 3, slot)
    assert "enable_lora" not in arguments(EngineConfig(model=model, cache=cache), model, source)


def test_the_caches_bytes_are_the_nodes_whatever_its_ranks(tmp_path: Path) -> None:
    model = ModelConfig(path=str(tmp_path), engine_args={"tensor_parallel_size": 2, "pipeline_parallel_size": 2})
    (tmp_path / "config.json").write_text("{}")
    source = find_source(str(tmp_path))
    given = arguments(EngineConfig(model=model, cache=CacheConfig(memory_bytes=1 << 22)), model, source)
    assert given["kv_cache_memory_bytes"] == 1 << 20


def test_a_rank_that_vllm_has_no_slots_for_is_refused() -> None:
    model = ModelConfig(path="m", engine="vllm", max_lora_rank=513)
    ((name, why),) = refusals(EngineConfig(model=model, scheduler=SchedulerConfig(max_loras=1)))
    assert (name, "up to 512" in why) == ("model.max_lora_rank", True)
    assert not list(refusals(EngineConfig(model=model)))


def test_a_node_in_a_python_without_vllm_says_which_setting_is_wrong() -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("this Python has vLLM")
    with pytest.raises(ConfigurationError, match=r"set model\.engine_python"):
        make(EngineConfig(), ModelConfig(engine="vllm"), lambda what, fraction: None, None)


def test_an_engine_that_is_not_there_is_refused() -> None:
    assert other_engine("tandem") is None
    with pytest.raises(ConfigurationError, match="must be one of tandem, vllm, not 'sglang'"):
        other_engine("sglang")

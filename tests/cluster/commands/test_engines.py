"""`tandem engines`, `--engine`, and the checks before nodes with another engine start."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tandem.cluster.cli import main
from tandem.cluster.commands.engines import check_engine
from tandem.cluster.config import TandemConfig
from tandem.cluster.settings.combined import SettingsError, resolve
from tandem.cluster.settings.layers import read_assignments
from tandem.wire.nodes import Role
from tests.engine.vllm.test_vllm_wing import python_that_says


def config(**values: str) -> TandemConfig:
    assignments = [(name.replace("__", "."), value, "--set") for name, value in values.items()]
    return resolve([read_assignments(assignments)]).config


VLLM = {"model__engine": "vllm", "model__engine_python": "/opt/python", "pools__aggregated": "1"}


def with_vllm(python: str, **others: str) -> TandemConfig:
    return config(**{**VLLM, "model__engine_python": python, **others})


def test_the_command_says_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", python_that_says(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("tandem ")
    assert f"vllm     0.32.0+cpu, {tmp_path}/python for cpu" in said
    assert main(["engines", "-o", "json"]) == 0
    own, vllm = json.loads(capsys.readouterr().out)
    assert (own["name"], own["wrong"]) == ("tandem", [])
    assert "model.engine_python is empty" in vllm["wrong"][0]


def test_the_flag_names_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    line = "config --engine vllm --aggregated 1 --set model.engine_python=/opt/vllm/bin/python"
    assert main([*shlex.split(line), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["model.engine"]["value"] == "vllm"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model__engine": "sglang"}, "model.engine must be one of tandem, vllm, not 'sglang'"),
        ({"model__engine": "vllm", "pools__aggregated": "1"}, "model.engine_python is empty"),
        ({"model__engine_python": "/opt/python"}, "model.engine_python is of another engine"),
        ({"model__engine_args": "{enforce_eager: true}"}, "model.engine_args is of another engine"),
        ({"pools__decode__engine_args": "{enforce_eager: true}"}, "pools.decode.engine_args is of another engine"),
        (
            {**VLLM, "pools__aggregated__engine_args": "{dtype: half}"},
            "pools.aggregated.engine_args has dtype, which follows from Tandem's settings",
        ),
        ({**VLLM, "model__engine_python": "python"}, "must be a whole path"),
        ({**VLLM, "pools__aggregated__tensor_parallel": "2"}, "set model.engine_args to what vllm calls them"),
        ({**VLLM, "pools__encode": "1"}, "vllm takes no rows from encoder nodes"),
        ({**VLLM, "cache__block_size": "32"}, "cache.block_size is set, but vLLM has no such setting"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_starts(values: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        config(**values)
    assert said in str(refused.value)


def test_an_environment_that_lacks_something_is_refused_before_anything_starts(tmp_path: Path) -> None:
    found = check_engine(with_vllm(python_that_says(tmp_path)))
    assert found.version == "0.32.0+cpu"
    assert check_engine(config()) is None
    wrong = with_vllm(python_that_says(tmp_path, vllm="0.31.0"), model__device="cuda")
    with pytest.raises(SettingsError) as refused:
        check_engine(wrong)
    assert "has vLLM 0.31.0" in str(refused.value)
    assert "has a build for CPUs: set it to cpu" in str(refused.value)


def test_a_pool_has_arguments_of_its_own_which_are_looked_for_too(tmp_path: Path) -> None:
    args = {"model__engine_args": "{enforce_eager: true, kv_cache_dtype: auto}"}
    pools = {"pools__aggregated": "0", "pools__prefill": "1", "pools__decode": "1"}
    python = python_that_says(tmp_path)
    told = with_vllm(python, **args, **pools, pools__decode__engine_args="{enforce_eager: false}")
    assert told.engine_of(Role.PREFILL).model.engine_args["enforce_eager"]
    assert told.engine_of(Role.DECODE).model.engine_args == {"enforce_eager": False, "kv_cache_dtype": "auto"}
    assert check_engine(told) is not None
    with pytest.raises(SettingsError, match=r"engine_args has 'enforce_eagr'"):
        check_engine(with_vllm(python, **pools, pools__decode__engine_args="{enforce_eagr: true}"))


def test_a_model_that_vllm_does_not_read_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"GGUF")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"model\.path is a GGUF file"):
        with_vllm(python_that_says(tmp_path), model__path=str(folder))

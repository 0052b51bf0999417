"""Adapters say what PEFT's merged models say, in mixed batches, chunks, after preemptions, and on another node."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.base.errors import ConfigurationError
from tandem.engine.model.torch_runner import TorchRunner
from tandem.wire.adapters import identity_of
from tests.engine.model import driver, tiny
from tests.engine.model.adapter_files import merged_answers, save_adapter
from tests.engine.model.driver import Driver
from tests.more import more

NUM_TOKENS = 8
LENGTHS = (3, 17, 29, 12)

# What PEFT can be told about the three adapters of a test.
KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"target_modules": ["q_proj", "down_proj"], "r": 8, "use_rslora": True, "layers_to_transform": [1]},
    "patterns": {
        "target_modules": r".*\.(self_attn\.v_proj|mlp\.(up|gate)_proj)",
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {r"layers\.0\.mlp\.up_proj": 20},
    },
}


def load(path: Path, adapters: dict[str, str], max_loras: int = 3, **model: Any) -> TorchRunner:
    return driver.load(path, adapters=adapters, max_num_seqs=8, max_loras=max_loras, **model)


def identities(runner: TorchRunner) -> dict[str | None, str | None]:
    assert runner.adapters is not None
    served = {name: identity_of(name, digest) for name, digest in runner.adapters.served.items()}
    return {None: None, **served}


@dataclasses.dataclass
class Case:
    path: Path
    folders: dict[str, Path]
    prompts: list[list[int]]
    answers: dict[str | None, list[list[int]]]
    runner: TorchRunner

    @property
    def names(self) -> list[str | None]:
        return list(self.answers)


def made_case(architecture: str, kinds: dict[str, dict[str, Any]], folder: Path) -> Case:
    path = tiny.save(architecture, folder)
    rng = random.Random(architecture)
    prompts = [[rng.randrange(3, tiny.VOCAB) for _ in range(length)] for length in LENGTHS]
    folders = {
        name: save_adapter(path, folder / name, seed, **options) for seed, (name, options) in enumerate(kinds.items())
    }
    answers: dict[str | None, list[list[int]]] = {
        None: [answer.tokens for answer in tiny.reference(path, prompts, NUM_TOKENS)]
    }
    for name, adapter in folders.items():
        answers[name] = merged_answers(path, adapter, prompts, NUM_TOKENS, folder / f"{name}-merged")
    runner = load(path, {name: str(adapter) for name, adapter in folders.items()})
    return Case(path, folders, prompts, answers, runner)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made_case("llama-untied-odd-heads", KINDS, tmp_path_factory.mktemp("llama"))


def add_all(driver: Driver, case: Case) -> dict[str, list[int]]:
    """Every prompt with every adapter and without: what each is to say."""
    known = identities(case.runner)
    expected: dict[str, list[int]] = {}
    for index, prompt in enumerate(case.prompts[:2]):
        for name in case.names:
            driver.add(f"{name}-{index}", prompt, lora=known[name])
            expected[f"{name}-{index}"] = case.answers[name][index]
    return expected


def test_adapters_change_what_is_said(llama: Case) -> None:
    assert len({json.dumps(answers) for answers in llama.answers.values()}) == len(llama.answers)


@pytest.mark.parametrize("dtype", ["bfloat16", *more(["float32"])])
def test_rows_without_an_adapter_are_the_models_own_to_the_bit(llama: Case, dtype: str) -> None:
    """Where adapters are served as where none are, and also beside rows that have one."""
    folders = {name: str(folder) for name, folder in llama.folders.items()}
    scores: list[torch.Tensor] = []
    for adapters, max_loras in (({}, 0), (folders, 3)):
        runner = load(llama.path, adapters, max_loras, dtype=dtype, threads=2, native=False)
        driver = Driver(runner)
        driver.add("own", llama.prompts[1])
        if adapters:
            driver.add("beside", llama.prompts[2], lora=identities(runner)["all"])
        seen: list[torch.Tensor] = []
        forward = runner.forward

        def noting(batch: Any, hooks: Any, forward: Any = forward, seen: Any = seen) -> torch.Tensor:
            logits: torch.Tensor = forward(batch, hooks)
            seen.append(logits.clone())
            return logits

        runner.forward = noting  # type: ignore[assignment]
        driver.step({"own": LENGTHS[1], **({"beside": LENGTHS[2]} if adapters else {})})
        scores.append(seen[0])
    assert torch.equal(scores[0][0], scores[1][0])


@pytest.mark.parametrize("seed", [0, *more([1])])
def test_the_base_and_three_adapters_in_one_batch_of_random_chunks(llama: Case, seed: int) -> None:
    driver = Driver(llama.runner, seed)
    expected = add_all(driver, llama)
    assert driver.generate(NUM_TOKENS, max_chunk=7) == expected
    driver.finish_all()


def test_more_adapters_than_slots_take_turns(llama: Case) -> None:
    runner = load(llama.path, {name: str(folder) for name, folder in llama.folders.items()}, max_loras=1)
    known = identities(runner)
    driver = Driver(runner)
    for name in ("all", "some", "patterns", "all"):
        driver.add("one", llama.prompts[1], lora=known[name])
        assert driver.generate(NUM_TOKENS)["one"] == llama.answers[name][1]
        driver.finish("one")


@pytest.mark.parametrize("architecture", ["gpt2", "phi3", *more(["gemma3", "qwen3-moe"])])
def test_other_architectures(architecture: str, tmp_path: Path) -> None:
    options: dict[str, dict[str, Any]] = {
        "gpt2": {"fan_in_fan_out": True},
        "qwen3-moe": {"target_modules": ["q_proj", "v_proj", "o_proj"]},  # experts are no linear layers
    }
    own = options.get(architecture, {})
    case = made_case(architecture, {"one": own, "two": {"r": 2, **own}}, tmp_path)
    driver = Driver(case.runner)
    assert len({json.dumps(answers) for answers in case.answers.values()}) == len(case.answers)
    expected = add_all(driver, case)
    assert driver.generate(NUM_TOKENS, max_chunk=7) == expected


def test_the_log_says_why_a_native_model_is_computed_by_transformers(
    llama: Case, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        load(llama.path, {})
    assert "is computed by transformers: scheduler.max_loras asks for adapters" in caplog.text


@pytest.mark.parametrize("architecture", ["falcon", "mamba", "deepseek-v3"])
def test_models_whose_rows_are_computed_apart_are_refused(architecture: str, tmp_path: Path) -> None:
    models = tiny.RECURRENT if architecture in tiny.RECURRENT else tiny.ARCHITECTURES
    assert architecture in models
    path = tiny.save(architecture, tmp_path)
    with pytest.raises(ConfigurationError, match=r"cannot be served with adapters: .* Set scheduler.max_loras to 0"):
        load(path, {})


# --- folders that are no adapters for this model


def changed(case: Case, folder: Path, name: str = "all", **config: Any) -> Path:
    target = folder / "changed"
    shutil.copytree(case.folders[name], target)
    file = target / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return target


def refusal(case: Case, folder: Path) -> str:
    assert case.runner.adapters is not None
    with pytest.raises(ConfigurationError) as refused:
        case.runner.adapters.read("bad", folder)
    message = str(refused.value)
    assert "bad" in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: lm_head"),
        ({"peft_type": "IA3"}, "only LORA is served"),
        ({"init_lora_weights": "pissa"}, "changed weights"),
        ({"init_lora_weights": "lora_ga"}, "changed weights"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"r": 17}, "rank 17, and model.max_lora_rank is 16: raise it to 17"),
        ({"r": 0}, "at least 1"),
        ({"r": 2}, "says that its rank is 2"),
        ({"r": "four"}, "not what PEFT writes"),
        ({"lora_alpha": None}, "not what PEFT writes"),
        ({"target_modules": ["q_proj"]}, "which target_modules in adapter_config.json does not name"),
        ({"target_modules": "(*"}, "no regular expression"),
        # Each request with it would fail, and the model's output would be blamed.
        ({"lora_alpha": 1e41}, "infinite in float32, in which this model computes"),
        ({"alpha_pattern": {"q_proj": 1e300}}, "infinite in float32, in which this model computes"),
    ],
)
def test_what_is_not_computed_is_refused(llama: Case, tmp_path: Path, config: dict[str, Any], says: str) -> None:
    assert says in refusal(llama, changed(llama, tmp_path, **config))


def test_an_adapter_whose_tensors_are_missing_is_refused(llama: Case, tmp_path: Path) -> None:
    folder = changed(llama, tmp_path, "some")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({key: value for key, value in tensors.items() if "q_proj" not in key}, file)
    assert "lacks model.layers.1.self_attn.q_proj" in refusal(llama, folder)
    save_file({key: value for key, value in tensors.items() if "q_proj.lora_A" not in key}, file)
    assert "lacks one half of model.layers.1.self_attn.q_proj" in refusal(llama, folder)
    save_file({**tensors, "base_model.model.lm_head.weight": torch.zeros(2, 2)}, file)
    assert "it holds base_model.model.lm_head.weight" in refusal(llama, folder)
    save_file({key: value * float("nan") for key, value in tensors.items()}, file)
    assert "infinite numbers or NaN" in refusal(llama, folder)
    save_file({key: (value * float("nan")).to(torch.float8_e4m3fn) for key, value in tensors.items()}, file)
    assert "infinite numbers or NaN" in refusal(llama, folder)
    save_file({}, file)
    assert "holds no updates" in refusal(llama, folder)


def test_an_adapter_of_eight_bit_numbers_is_read(llama: Case, tmp_path: Path) -> None:
    folder = changed(llama, tmp_path)
    file = folder / "adapter_model.safetensors"
    save_file({key: value.to(torch.float8_e4m3fn) for key, value in load_file(file).items()}, file)
    assert llama.runner.adapters is not None
    llama.runner.adapters.read("small", folder)


ENDLESS = r"(\w|.)*!"


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ENDLESS},
        {"target_modules": f"(?i){ENDLESS}", "alpha_pattern": {"(": 3}},
        {"exclude_modules": ENDLESS},
        {"rank_pattern": {ENDLESS: 4}},
        {"layers_to_transform": [0], "layers_pattern": ENDLESS},
    ],
)
def test_a_pattern_that_takes_for_ever_is_refused_and_stops_no_thread(
    llama: Case, tmp_path: Path, config: dict[str, Any]
) -> None:
    assert "take more than 2 s to match" in refusal(llama, changed(llama, tmp_path, **config))


def test_a_folder_that_is_no_adapter_is_refused(llama: Case, tmp_path: Path) -> None:
    assert "is no adapter" in refusal(llama, tmp_path)
    assert "is no adapter" in refusal(llama, llama.path)
    folder = changed(llama, tmp_path)
    file = folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert "damaged or cut short" in refusal(llama, folder)
    file.write_bytes(b"")
    assert "damaged or cut short" in refusal(llama, folder)
    file.unlink()
    assert "lacks adapter_model.safetensors" in refusal(llama, folder)
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    assert "opening a pickle runs what it says" in refusal(llama, folder)
    (folder / "adapter_config.json").write_text("[")
    assert "not what PEFT writes" in refusal(llama, folder)


def test_an_adapter_of_another_model_is_refused(llama: Case, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    other = tiny.save("gpt2", tmp_path / "model")
    folder = save_adapter(other, tmp_path / "adapter", 1, fan_in_fan_out=True)
    assert "is not for this model, which has no linear layer transformer.h." in refusal(llama, folder)
    (tmp_path / "wider").mkdir()
    wider = tiny.save("llama", tmp_path / "wider")
    folder = save_adapter(wider, tmp_path / "wide", 1)
    assert "does not fit this model" in refusal(llama, folder)


def test_the_layer_that_makes_logits_is_refused(llama: Case, tmp_path: Path) -> None:
    folder = save_adapter(llama.path, tmp_path / "head", 1, target_modules=["lm_head"])
    assert "lm_head" in refusal(llama, folder)


def test_the_same_files_have_the_same_identity_and_others_another(llama: Case, tmp_path: Path) -> None:
    adapters = llama.runner.adapters
    assert adapters is not None
    same = tmp_path / "same"
    shutil.copytree(llama.folders["all"], same)
    digest = adapters.served["all"]
    assert adapters.read("all", same).digest == digest
    assert adapters.read("all", changed(llama, tmp_path, lora_alpha=9)).digest != digest
    assert adapters.read("all", llama.folders["some"]).digest != digest

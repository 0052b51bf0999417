"""Hidden states that a request asks for stand in its file as transformers gives them, however its prompt is cut up."""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tandem.base.errors import ConfigurationError
from tandem.engine.model.hidden_states import prompts as hidden_states
from tandem.engine.model.hidden_states.prompts import SUFFIX
from tandem.engine.model.shard import Shard
from tandem.engine.model.torch_runner import TorchRunner
from tandem.wire.sampling import SamplingParams
from tests.engine.model import driver, tiny
from tests.engine.model.driver import Driver
from tests.engine.model.ranks_here import ranks_here
from tests.more import more
from tests.waiting import until

LAYERS = [0, 1, -1]


def load(path: Path, folder: Path, shard: Shard | None = None, layers: list[int] = LAYERS) -> TorchRunner:
    return driver.load(path, hidden_states_folder=str(folder), hidden_states_layers=tuple(layers), shard=shard)  # fmt: skip


def wanting(name: str) -> SamplingParams:
    return SamplingParams(temperature=0.0, hidden_states=name)


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    chance = random.Random(2)
    return [[chance.randrange(3, tiny.VOCAB) for _ in range(length)] for length in lengths]


def close_files(runner: TorchRunner) -> None:
    """Returns when what was to be written is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hidden_states, "_MOST_BYTES", 1)  # then the runner waits for the least that is not written
        until(lambda: not runner.states_wait)


def check(folder: Path, name: str, path: Path, prompt: list[int]) -> None:
    found = load_file(folder / (name + SUFFIX))
    assert found["token_ids"].tolist() == prompt
    assert ("routed_experts" in found) == (path.name == "mixtral")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    expected = torch.stack([states[number][0] for number in LAYERS], dim=1)
    torch.testing.assert_close(found["hidden_states"], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "width"), [("qwen3.5", 1), ("mixtral", 1), ("llama", 2), *more([("gemma3", 1)])])
def test_the_files_have_what_transformers_gives(name: str, width: int, tmp_path: Path) -> None:
    path, folder = tiny.save(name, tmp_path / "model"), tmp_path / "states"
    asked = prompts((1, 23, 37, 9))
    with ranks_here(width, functools.partial(load, path, folder)) as runner:
        driver = Driver(runner)
        for index, prompt in enumerate(asked):
            driver.add(f"r{index}", prompt, wanting(f"file-{index}") if index != 3 else SamplingParams(temperature=0.0))
        answers = driver.generate(6, max_chunk=11)
        close_files(runner)
    assert sorted(file.name for file in folder.iterdir()) == [f"file-{index}{SUFFIX}" for index in range(3)]
    for index in range(3):
        check(folder, f"file-{index}", path, asked[index])
    assert list(answers.values()) == [found.tokens for found in tiny.reference(path, asked, 6)]


@pytest.mark.parametrize("name", ["mixtral", *more(["deepseek-v3", "gpt-oss"])])
def test_the_files_have_the_experts_of_each_token(name: str, tmp_path: Path) -> None:
    path, folder = tiny.save(name, tmp_path / "model"), tmp_path / "states"
    (prompt,) = prompts((29,))
    runner = load(path, folder)
    driver = Driver(runner)
    driver.add("r", prompt, wanting("r"))
    driver.generate(3, max_chunk=11)
    close_files(runner)
    found = load_file(folder / ("r" + SUFFIX))
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected: list[torch.Tensor] = []
    # A layer's output changes where an expert that was chosen for a token changes, and nowhere else.
    for layer in found["routed_layers"].tolist():
        experts = model.model.layers[layer].mlp.experts
        used = torch.zeros(len(prompt), experts.num_experts, dtype=torch.bool)
        for expert in range(experts.num_experts):
            outputs: list[torch.Tensor] = []
            hook = experts.register_forward_hook(lambda _m, _g, out: outputs.append(out.clone()))  # noqa: B023
            with torch.inference_mode():
                model(torch.tensor([prompt]))
                kept = experts.down_proj[expert].clone()
                experts.down_proj[expert] += 1
                model(torch.tensor([prompt]))
                experts.down_proj[expert] = kept
            hook.remove()
            used[:, expert] = (outputs[0] - outputs[1]).reshape(len(prompt), -1).abs().amax(-1) > 1e-6
        expected.append(used)
    assert found["routed_layers"].tolist() == ([1] if name == "deepseek-v3" else [0, 1])
    chosen = torch.zeros_like(torch.stack(expected, dim=1))
    assert chosen.scatter(2, found["routed_experts"].long(), True).equal(torch.stack(expected, dim=1))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("model"))


@dataclasses.dataclass
class Noting:
    """A node that writes the hidden states of its requests into a folder."""

    path: Path
    folder: Path

    def __post_init__(self) -> None:
        self.runner = load(self.path, self.folder)
        self.driver = Driver(self.runner)

    def files(self, num_tokens: int) -> list[str]:
        """Those that are there when every request has so many tokens."""
        self.driver.generate(num_tokens)
        close_files(self.runner)
        return sorted(str(each.relative_to(self.folder)) for each in self.folder.rglob("*") if each.is_file())


@pytest.fixture
def noting(llama: Path, tmp_path: Path) -> Noting:
    return Noting(llama, tmp_path / "states")


def test_a_prompt_that_is_preempted_is_noted_from_its_beginning_again(noting: Noting) -> None:
    (prompt,) = prompts((30,))
    noting.driver.add("r", prompt, wanting("again"))
    noting.driver.step({"r": 12})
    noting.driver.preempt("r")
    noting.driver.step({"r": 7})
    noting.files(4)
    check(noting.folder, "again", noting.path, prompt)


def test_a_request_that_leaves_in_the_middle_leaves_no_file(noting: Noting) -> None:
    first, second = prompts((30, 12))
    noting.driver.add("r", first, wanting("gone"))
    noting.driver.step({"r": 12})
    noting.driver.finish("r")
    noting.driver.add("next", second, wanting("next"))  # in the same row
    assert noting.files(3) == ["next" + SUFFIX]
    check(noting.folder, "next", noting.path, second)


def test_a_prompt_whose_beginning_another_node_has_read_gets_no_file_here(noting: Noting) -> None:
    (prompt,) = prompts((30,))
    noting.driver.add("first", prompt)
    noting.driver.step({"first": 28})
    noting.driver.add("r", prompt, wanting("r"), prefix_of="first", shared_tokens=28)
    assert noting.files(3) == []


def test_a_folder_that_goes_away_harms_no_answer(noting: Noting, caplog: pytest.LogCaptureFixture) -> None:
    (prompt,) = prompts((9,))
    shutil.rmtree(noting.folder)
    noting.driver.add("r", prompt, wanting("lost"))
    with caplog.at_level(logging.ERROR):
        noting.files(4)
    (answer,) = tiny.reference(noting.path, [prompt], 4)
    assert noting.driver.requests["r"].output[:4] == answer.tokens
    assert f"the hidden states for lost are not in {noting.folder}" in caplog.text


def test_files_of_one_name_are_kept_apart_by_their_owners_folders(noting: Noting) -> None:
    ours, theirs = prompts((9, 12))
    noting.driver.add("a", ours, wanting("team-a/one"))
    noting.driver.add("b", theirs, wanting("team-b/one"))
    assert noting.files(2) == [f"team-a/one{SUFFIX}", f"team-b/one{SUFFIX}"]
    check(noting.folder, "team-a/one", noting.path, ours)
    check(noting.folder, "team-b/one", noting.path, theirs)


def test_no_step_waits_for_a_folder_that_takes_nothing(
    noting: Noting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_goes_on = threading.Event()
    save = hidden_states.save_file  # type: ignore[attr-defined]

    def slow_save(*given: Any) -> None:
        assert folder_goes_on.wait(60)
        save(*given)

    monkeypatch.setattr(hidden_states, "save_file", slow_save)
    runner, driver = noting.runner, noting.driver
    asked = prompts((5,) * 3)
    expected = [found.tokens for found in tiny.reference(noting.path, asked, 1)]
    two_files = 2 * 5 * (8 + len(LAYERS) * 32 * 4)  # of five tokens, with 32 float32 of each layer
    monkeypatch.setattr(hidden_states, "_MOST_BYTES", two_files)
    for index, prompt in enumerate(asked):
        assert runner.states_wait == (index == 2)
        driver.add(f"r{index}", prompt, wanting(f"file-{index}"))
        assert driver.generate(1)[f"r{index}"] == expected[index]
        driver.finish(f"r{index}")
    assert not folder_goes_on.is_set(), "every step has ended before the folder went on"
    assert "the hidden states for file-2 are dropped" in caplog.text
    folder_goes_on.set()
    close_files(runner)
    assert not runner.states_wait
    assert noting.files(0) == [f"file-{index}{SUFFIX}" for index in range(2)]


@pytest.mark.parametrize("layers", [[5], [-6], [0, 99]])
def test_layers_that_are_not_there_are_named(llama: Path, tmp_path: Path, layers: list[int]) -> None:
    with pytest.raises(ConfigurationError, match=rf"has {layers[-1]}, and .* has \d+ layers: the numbers are 0"):
        load(llama, tmp_path / "states", layers=layers)


def test_a_folder_that_is_none_is_named(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "states").write_text("")
    with pytest.raises(ConfigurationError, match="states, where this process cannot write: File exists"):
        load(llama, tmp_path / "states")

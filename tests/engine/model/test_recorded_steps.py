"""Short steps on a CPU that are recorded and played again: their tokens must be those of the model, whatever comes and goes."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.model.fused import recorded_steps
from tandem.engine.model.fused.recorded_steps import RecordedSteps
from tandem.engine.model.fused.tape import CannotRecord, Tape
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.model.transformers_forward import TransformersForward
from tandem.wire.adapters import identity_of
from tests.engine.model import driver, tiny
from tests.engine.model.adapter_files import merged_answers, save_adapter
from tests.engine.model.driver import Driver
from tests.engine.model.hooks import Recorder
from tests.more import more

NUM_TOKENS = 8
LENGTHS = (1, 6, 19, 33)
RECORDED = ("gemma3", "gpt2", *more(["llama", "llama-untied-odd-heads", "qwen3", "mistral-window"]))


load = partial(driver.load, max_num_seqs=5, native=False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(llama: Path) -> dict[str, list[int]]:
    return answers_of(load(llama), prompts_of("llama"))


def prompts_of(architecture: str) -> list[list[int]]:
    rng = random.Random(architecture)
    return [[rng.randrange(3, tiny.VOCAB) for _ in range(length)] for length in LENGTHS]


def as_it_comes(runner: TorchRunner) -> TransformersForward:
    """The same model without recording, as the reference for each step."""
    steps = runner.forward
    assert isinstance(steps, RecordedSteps)
    runner.forward = steps._forward
    return steps._forward


def answers_of(runner: TorchRunner, prompts: list[list[int]]) -> dict[str, list[int]]:
    driver = Driver(runner)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt)
    return driver.generate(NUM_TOKENS)


@pytest.mark.parametrize("dtype", ["float32", *more(["bfloat16"])])
@pytest.mark.parametrize("architecture", RECORDED)
def test_tokens_are_the_models_whatever_comes_and_goes(architecture: str, dtype: str, tmp_path: Path) -> None:
    path = tiny.save(architecture, tmp_path)
    prompts = prompts_of(architecture)
    plain = load(path, dtype=dtype)
    as_it_comes(plain)
    runner = load(path, dtype=dtype)
    steps = runner.forward
    assert isinstance(steps, RecordedSteps)
    expected, answers = (Driver(each, 4).live(prompts, NUM_TOKENS) for each in (plain, runner))
    assert answers == expected
    assert steps.num_replays > 0
    assert len(steps.shapes) > 1


def test_layers_are_announced_around_a_step_that_is_played_again(llama: Path) -> None:
    runner = load(llama)
    driver = Driver(runner)
    driver.add("r", prompts_of("llama")[1])
    driver.step({"r": LENGTHS[1]})
    layers = range(runner.info.num_layers)
    each = [[("load", layer), ("save", layer)] for layer in layers]
    for _ in range(3):  # recorded, and compared twice
        recorder = Recorder()
        driver.step({"r": 1}, recorder)
        assert recorder.calls == [call for calls in each for call in calls]
    recorder = Recorder()
    driver.step({"r": 1}, recorder)
    assert runner.forward.num_replays == 1  # type: ignore[attr-defined]
    assert recorder.calls == [calls[0] for calls in each] + [calls[1] for calls in each]


@pytest.mark.parametrize("how", ["item", "list", "array"])
def test_a_model_that_looks_at_its_results_runs_as_it_comes(
    how: str, llama: Path, expected: dict[str, list[int]]
) -> None:
    runner = load(llama)
    forward = as_it_comes(runner)
    compute: Any = forward.compute
    looks: dict[str, Any] = {
        "item": lambda logits: float(logits.sum()),
        "list": lambda logits: logits.sum(1).tolist()[0],
        "array": lambda logits: float(logits.numpy().sum()),
    }

    def looking(*arguments: Any) -> torch.Tensor:
        logits: torch.Tensor = compute(*arguments)
        return logits if looks[how](logits) > 0 else logits * 1

    forward.compute = looking  # type: ignore[method-assign]
    steps = RecordedSteps(forward, forward.attention)  # type: ignore[arg-type]
    runner.forward = steps
    assert answers_of(runner, prompts_of("llama")) == expected
    assert steps.shapes == []
    assert steps.num_replays == 0


def test_a_value_that_is_frozen_unseen_is_found_before_it_counts(llama: Path) -> None:
    runner = load(llama)
    forward = as_it_comes(runner)
    compute: Any = forward.compute
    steps_so_far = 0

    def counting(*arguments: Any) -> torch.Tensor:
        # The host's own knowledge goes into the result, and torch sees a constant.
        logits: torch.Tensor = compute(*arguments)
        return logits + steps_so_far

    forward.compute = counting  # type: ignore[method-assign]
    steps = RecordedSteps(forward, forward.attention)  # type: ignore[arg-type]
    runner.forward = steps
    driver = Driver(runner)
    driver.add("r", prompts_of("llama")[1])
    driver.step({"r": LENGTHS[1]})
    for _ in range(6):
        steps_so_far += 1
        driver.step({"r": 1})
    assert steps.shapes == []
    assert steps.num_replays == 0


def test_recordings_take_so_much_memory_and_no_more(
    llama: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_steps, "_MOST_BYTES", 1_000)
    runner = load(llama)
    assert answers_of(runner, prompts_of("llama")) == expected
    steps = runner.forward
    assert isinstance(steps, RecordedSteps)
    assert steps.shapes == []
    assert steps.num_replays == 0


def test_vectors_and_prompts_are_computed_as_they_come(tmp_path: Path) -> None:
    runner = load(tiny.save("qwen3", tmp_path))
    driver = Driver(runner)
    driver.add("r", prompts_of("qwen3")[1])
    driver.step({"r": 4})  # a chunk, whose rows want no logits
    driver.step({"r": LENGTHS[1] - 4})
    assert runner.forward.shapes == []  # type: ignore[attr-defined]


def test_adapters_take_turns_in_a_slot_and_change_different_layers(tmp_path: Path) -> None:
    path = tiny.save("llama-untied-odd-heads", tmp_path)
    options: dict[str, dict[str, Any]] = {"one": {"target_modules": ["q_proj"], "layers_to_transform": [1]}, "all": {}}
    folders = {name: save_adapter(path, tmp_path / name, 3, **each) for name, each in options.items()}
    prompts = prompts_of("llama")[1:3]
    expected = {
        name: merged_answers(path, folder, prompts, NUM_TOKENS, tmp_path / f"{name}-merged")
        for name, folder in folders.items()
    }
    runner = load(path, adapters={name: str(folder) for name, folder in folders.items()}, max_loras=1)
    steps = runner.forward
    assert isinstance(steps, RecordedSteps)
    assert runner.adapters is not None
    identity = {name: identity_of(name, digest) for name, digest in runner.adapters.served.items()}
    for name in ("one", "all", "one"):
        before = steps.num_replays
        driver = Driver(runner)
        for index, prompt in enumerate(prompts):
            driver.add(str(index), prompt, lora=identity[name])
        answers = driver.generate(NUM_TOKENS)
        assert [answers[str(index)] for index in range(len(prompts))] == expected[name]
        assert steps.num_replays > before


class TestTapes:
    def test_what_changes_in_place_and_what_is_made_is_done_again(self) -> None:
        given, total = torch.arange(6.0).view(2, 3), torch.zeros(3)

        def work() -> torch.Tensor:
            rows = given.t()[:, 0]  # a view is no operation
            total.add_(rows)
            first, second = torch.cat((rows, total)).split(3)
            return torch.stack(torch.sort(first * 2 + second, descending=True)[:1])

        tape = Tape()
        made = tape.record(work)
        assert made.tolist() == [[6.0, 3.0, 0.0]]
        given.copy_(torch.ones(2, 3))
        tape.play()
        # 2 * 1 + the total, which has grown by one
        assert total.tolist() == [1.0, 2.0, 3.0]
        assert made.tolist() == [[5.0, 4.0, 3.0]]
        assert tape.num_bytes > 0

    @pytest.mark.parametrize(
        "look",
        [
            lambda x: x[x > 0],
            lambda x: x.nonzero(),
            lambda x: x if x.any() else -x,
            lambda x: torch.tensor(x.tolist()),
            lambda x: torch.from_numpy(x.numpy()),
        ],
    )
    def test_work_that_looks_at_values_is_refused(self, look: Any) -> None:
        with pytest.raises(CannotRecord, match="values"):
            Tape().record(lambda: look(torch.arange(3.0)))

"""A request whose logits are NaN ends with an error, and gets no token from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.base.errors import InvalidLogits
from tandem.engine.model.runner import Batch, LayerHooks
from tandem.engine.model.torch_runner import TorchRunner
from tandem.wire.sampling import SamplingParams
from tests.engine.model import driver, tiny
from tests.engine.model.driver import Driver

PROMPTS = {"good": [5, 6, 7], "bad": [8, 9], "other": [10, 11, 12, 13]}
WAYS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy-penalized": SamplingParams(temperature=0.0, presence_penalty=0.5, logprobs=1),
    "drawn": SamplingParams(seed=1),
    "top-p": SamplingParams(seed=1, top_p=0.9),
    "top-k": SamplingParams(seed=1, top_k=5, min_p=0.01),
}
VALUES = {"nan": float("nan"), "infinity": float("inf"), "nothing": float("-inf")}


class Spoiling:
    """A forward pass that spoils the logits after one context length."""

    def __init__(self, runner: TorchRunner) -> None:
        self._forward = runner.forward
        self.context = 0
        self.where: slice | int = 0
        self.value = 0.0

    def __call__(self, batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
        logits = self._forward(batch, hooks)
        rows = (batch.positions[batch.logit_rows] + 1 == self.context).nonzero()[:, 0]
        for row in rows.tolist():
            logits[row, self.where] = self.value
        return logits


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("models"))


def load(path: Path, drafts: int = 0) -> tuple[TorchRunner, Spoiling]:
    runner = driver.load(path, memory_bytes=1 << 20, num_speculative_tokens=drafts)
    spoiling = Spoiling(runner)
    runner.forward = spoiling
    return runner, spoiling


@pytest.fixture(scope="module")
def runner(path: Path) -> tuple[TorchRunner, Spoiling]:
    return load(path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", VALUES)
def test_only_the_request_whose_logits_they_are_ends(runner: tuple[TorchRunner, Spoiling], way: str, kind: str) -> None:
    model, spoiling = runner
    spoiling.context = 0
    expected = {}
    for name, prompt in PROMPTS.items():
        driver = Driver(model)
        driver.add(name, prompt, WAYS[way])
        expected[name] = driver.generate(1)[name]
        driver.finish_all()
    spoiling.context, spoiling.value = len(PROMPTS["bad"]), VALUES[kind]
    spoiling.where = slice(None) if kind == "nothing" else 77
    driver = Driver(model)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, WAYS[way])
    driver.failing.add("bad")
    output = driver.step({name: len(prompt) for name, prompt in PROMPTS.items()})
    assert isinstance(output.errors["bad"], InvalidLogits)
    assert set(output.errors) == {"bad"}
    assert output.sampled_token_ids == {name: expected[name] for name in ("good", "other")}
    driver.finish_all()


def test_a_draft_behind_which_they_are_is_not_taken_either(path: Path) -> None:
    model, spoiling = load(path, drafts=3)
    driver = Driver(model)
    driver.add("r", PROMPTS["good"])
    answer = driver.generate(4)["r"]
    driver.finish_all()
    spoiling.context, spoiling.where, spoiling.value = len(PROMPTS["good"]) + 2, 0, float("nan")
    driver.add("s", PROMPTS["good"])
    driver.step({"s": len(PROMPTS["good"])})
    driver.drafts["s"] = answer[1:4]
    driver.failing.add("s")
    output = driver.step({"s": 1})
    assert "s" in output.errors
    assert output.sampled_token_ids == {}

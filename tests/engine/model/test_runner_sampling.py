"""A request's tokens depend on itself alone: not on its company, nor on how or where its steps were taken."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.engine.model import batching
from tandem.engine.model.runner import Batch, LayerHooks
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.scheduling.output import ModelOutput
from tandem.wire.sampling import SamplingParams
from tests.engine.model import driver, tiny
from tests.engine.model.driver import Driver
from tests.engine.model.hooks import Recorder

NUM_TOKENS = 14
PROMPT = [7, 8, 9, 7, 8, 9, 7, 8]
VARIED = [
    SamplingParams(seed=11),
    SamplingParams(seed=2**64 - 3, temperature=0.7, top_k=20),
    SamplingParams(seed=5, top_p=0.8, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, frequency_penalty=0.6),
    SamplingParams(seed=6, temperature=1.4, min_p=0.02, presence_penalty=0.5, logit_bias={3: 1.0}),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("qwen3", tmp_path_factory.mktemp("models"))


load = partial(driver.load, max_num_seqs=2)


@pytest.fixture(scope="module")
def runner(path: Path) -> TorchRunner:
    return load(path)


@pytest.fixture(scope="module")
def alone(runner: TorchRunner) -> list[list[int]]:
    outputs = []
    for params in VARIED:
        driver = Driver(runner)
        driver.add("r", PROMPT, params)
        outputs.append(driver.generate(NUM_TOKENS)["r"])
        driver.finish_all()
    return outputs


def test_different_seeds_give_different_texts(alone: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in alone}) == len(VARIED)


@pytest.mark.parametrize("with_its_blocks", [True, False])
def test_moved_to_another_node(path: Path, runner: TorchRunner, alone: list[list[int]], with_its_blocks: bool) -> None:
    """Without its blocks it is replayed from its tokens, as after the loss of a node."""
    first, second = Driver(runner), Driver(load(path))
    for index, params in enumerate(VARIED):
        first.add(str(index), PROMPT, params)
    first.generate(6)
    for index, params in enumerate(VARIED):
        if with_its_blocks:
            second.adopt(str(index), first)
        else:
            second.add(str(index), PROMPT, params, output=first.requests[str(index)].output)
    assert list(second.generate(NUM_TOKENS).values()) == alone
    first.finish_all()


def test_with_drafts(path: Path, alone: list[list[int]]) -> None:
    """Accepting what equals the sample keeps the very tokens, so it keeps their distribution; also where
    penalties make each position's logits depend on the drafts before it."""
    driver = Driver(load(path, num_speculative_tokens=3), seed=2)
    for index, params in enumerate(VARIED):
        driver.add(str(index), PROMPT, params)
        driver.step({str(index): len(PROMPT)})
        driver.drafts[str(index)] = [*alone[index][1:3], 1]
    assert list(driver.generate(NUM_TOKENS).values()) == alone
    assert driver.num_accepted >= 2 * len(VARIED)


def test_drafts_are_proposed_from_repeating_text(path: Path) -> None:
    driver = Driver(load(path, num_speculative_tokens=3))
    driver.add("r", [5, 6, 7, 8] * 6, SamplingParams(temperature=0.0, logit_bias={5: 1000.0}))
    driver.step({"r": 24})
    # "... 7 8 5" has stood there before, and was followed by 6 7 8.
    assert driver.drafts == {"r": [6, 7, 8]}


def test_logprobs_are_the_models_own(path: Path, runner: TorchRunner) -> None:
    """They are of the distribution before temperature, bias and penalties, with the chosen token's rank in it."""
    driver = Driver(runner)
    driver.add("r", PROMPT, SamplingParams(seed=3, temperature=0.5, logit_bias={3: 50.0}, logprobs=4))
    output = driver.step({"r": len(PROMPT)})
    (entry,) = output.logprobs["r"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1).detach()
    assert output.sampled_token_ids["r"] == [entry.token_id] == [3]
    assert entry.logprob == pytest.approx(float(expected[3]), abs=1e-4)
    assert entry.rank == int((expected > expected[3]).sum()) + 1
    values, tokens = expected.topk(4)
    assert [token for token, _ in entry.top] == tokens.tolist()
    assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
    driver.finish_all()


@pytest.mark.parametrize("max_chunk", [1, 3, 100])
def test_prompt_logprobs_come_once_whatever_the_chunks(path: Path, runner: TorchRunner, max_chunk: int) -> None:
    driver = Driver(runner)
    driver.add("other", PROMPT[::-1], SamplingParams(seed=1))
    driver.add("r", PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=2))
    reports = []
    while len(driver.requests["r"].output) < 3:
        work = {name: min(request.pending, max_chunk) for name, request in driver.requests.items()}
        output = driver.step(work)
        reports.extend(output.prompt_logprobs.values())
        # They come with the first token.
        assert bool(output.prompt_logprobs) == (len(driver.requests["r"].output) == 1)
    (entries,) = reports
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1).detach()
    assert len(entries) == len(PROMPT)
    assert entries[0] is None
    for position, entry in enumerate(entries[1:], start=1):
        assert entry is not None
        assert entry.token_id == PROMPT[position]
        assert entry.logprob == pytest.approx(float(expected[position - 1, PROMPT[position]]), abs=1e-4)
        assert len(entry.top) == 2
        assert math.isclose(entry.top[0][1], float(expected[position - 1].max()), abs_tol=1e-4)
    driver.finish_all()


def test_prompt_logprobs_are_not_told_again_after_a_preemption_or_a_move(path: Path, runner: TorchRunner) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    driver = Driver(runner)
    driver.add("r", PROMPT, params)
    driver.step({"r": 5})
    driver.preempt("r")
    # Half of the prompt was computed: all of it is told, once.
    assert len(driver.step({"r": len(PROMPT)}).prompt_logprobs["r"]) == len(PROMPT)
    driver.preempt("r")
    assert driver.step({"r": driver.requests["r"].pending}).prompt_logprobs == {}
    second = Driver(load(path))
    second.add("r", PROMPT, params, output=[5])
    assert second.step({"r": len(PROMPT) + 1}).prompt_logprobs == {}
    driver.finish_all()


@pytest.mark.parametrize("native", [True, False])
def test_a_long_prompts_logits_are_computed_in_passes(
    path: Path, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is the same as with all at once, beside requests that do not want log probabilities."""
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    prompt = PROMPT * 4

    def step(most: int) -> tuple[ModelOutput, Recorder, int]:
        monkeypatch.setattr(batching, "LOGIT_ROWS", most)
        runner = load(path, native=native)
        forward, most_rows = runner.forward, 0

        def counting(batch: Batch, hooks: LayerHooks | None) -> torch.Tensor:
            nonlocal most_rows
            most_rows = max(most_rows, batch.logit_rows.shape[0])
            return forward(batch, hooks)

        runner.forward = counting
        driver, hooks = Driver(runner), Recorder()
        driver.add("a", prompt, params)
        driver.add("b", prompt[::-1], params)
        driver.add("c", prompt[3:])
        return driver.step({"a": 30, "b": len(prompt), "c": len(prompt) - 3}, hooks), hooks, most_rows

    whole, _, all_rows = step(1000)
    cut, hooks, most_rows = step(8)
    assert all_rows > 50
    assert most_rows <= 8 + 2
    assert cut.sampled_token_ids == whole.sampled_token_ids
    for ours, theirs in zip(cut.prompt_logprobs["b"][1:], whole.prompt_logprobs["b"][1:], strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.token_id == theirs.token_id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert hooks.calls == [("load", 0), ("load", 1), ("save", 0), ("save", 1)]

"""Greedy tokens equal transformers' `generate`, however the work is cut up, shared, lost, or moved."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from tandem.engine.model.torch_runner import TorchRunner
from tests.engine.model import tiny
from tests.engine.model.driver import Driver, load
from tests.more import more

NUM_TOKENS = 7
LENGTHS = (1, 5, 23, 37, 16)


@dataclasses.dataclass
class Case:
    path: Path
    native: bool
    runner: TorchRunner
    prompts: list[list[int]]
    answers: list[list[int]]
    logprobs: list[list[float]]

    def driver(self, seed: int = 0) -> Driver:
        return Driver(self.runner, seed)

    @property
    def num_tokens(self) -> int:
        return len(self.answers[0])


# What the native library computes is computed by transformers, too, for the library may be missing.
NATIVE = ("llama", "llama-untied-odd-heads", "mistral-window", "qwen2", "qwen3")
# The general path has nine architectures of its own, so of these one is enough in every run.
VARIANTS = [
    *((name, True) for name in sorted(tiny.ARCHITECTURES)),
    (NATIVE[0], False),
    *(pytest.param((name, False), marks=pytest.mark.more) for name in NATIVE[1:]),
]


Reference = tuple[Path, list[list[int]], list[tiny.Answer]]


@pytest.fixture(scope="session")
def references() -> dict[str, Reference]:
    """What transformers answers, kept for the second way in which an architecture is computed."""
    return {}


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: v[0] if v[1] else f"{v[0]}-by-transformers")
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, references: dict[str, Reference]
) -> Case:
    architecture, native = request.param
    if architecture not in references:
        path = tiny.save(architecture, tmp_path_factory.mktemp("models"))
        rng = random.Random(architecture)
        prompts = [[rng.randrange(3, tiny.VOCAB) for _ in range(length)] for length in LENGTHS]
        # The last shares most of its prompt with another.
        prompts.append(prompts[3][:30] + prompts[0])
        references[architecture] = path, prompts, tiny.reference(path, prompts, NUM_TOKENS)
    path, prompts, answers = references[architecture]
    runner = load(path, native=native)
    return Case(path, native, runner, prompts, [a.tokens for a in answers], [a.logprobs for a in answers])


@pytest.fixture(scope="module")
def other_runner(case: Case) -> TorchRunner:
    """One with drafts."""
    return load(case.path, native=case.native, num_speculative_tokens=4)


@pytest.mark.parametrize("seed", [0, *more([1])])
def test_mixed_batches_in_random_chunks(case: Case, seed: int) -> None:
    case.driver(seed).expect(case.prompts, case.answers, case.logprobs)


def test_requests_come_go_and_are_preempted_at_random(case: Case) -> None:
    answers = case.driver(7).live(case.prompts, case.num_tokens)
    assert [answers[str(index)] for index in range(len(case.prompts))] == case.answers


def test_prefix_hits_read_blocks_that_another_request_computed(case: Case) -> None:
    driver = case.driver(3)
    driver.add("first", case.prompts[3])
    # No further than the hit, because what slides out of a window is gone.
    driver.step({"first": 28})
    driver.add("second", case.prompts[5], prefix_of="first", shared_tokens=28)
    outputs = driver.generate(case.num_tokens)
    assert outputs == {"first": case.answers[3], "second": case.answers[5]}
    driver.finish_all()


@pytest.mark.parametrize("after", [1, *more([4])])
def test_a_request_moves_to_another_runner_with_its_blocks(case: Case, other_runner: TorchRunner, after: int) -> None:
    prefill, decode = case.driver(1), Driver(other_runner, 2)
    for index in (2, 3):
        prefill.add(f"r{index}", case.prompts[index])
    prefill.generate(after, max_chunk=9)
    for index in (2, 3):
        decode.adopt(f"r{index}", prefill)
    assert list(decode.generate(case.num_tokens).values()) == [case.answers[2], case.answers[3]]
    prefill.finish_all()
    decode.finish_all()


def test_drafts_change_no_token(case: Case, other_runner: TorchRunner) -> None:
    """Speculation: what is proposed from the text is verified in one pass, and what is wrong leaves no trace."""
    driver = Driver(other_runner, 5)
    for index, prompt in enumerate(case.prompts):
        driver.add(f"r{index}", prompt)
        # Also proposals that are right in part, or not at all.
        guess = case.answers[index][1 : 1 + index % 4]
        driver.step({f"r{index}": len(prompt)})
        driver.drafts[f"r{index}"] = [*guess, (case.answers[index][len(guess) + 1] + 1) % tiny.VOCAB]
    outputs = driver.generate(case.num_tokens)
    assert list(outputs.values()) == case.answers
    assert driver.num_accepted >= sum(index % 4 for index in range(len(case.prompts)))
    driver.finish_all()

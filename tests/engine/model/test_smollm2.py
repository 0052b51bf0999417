"""The real model: transformers' own greedy tokens, chunked, mixed, drafted, and moved between two runners."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tandem.engine.model.torch_runner import TorchRunner
from tests.engine.model import driver, tiny
from tests.engine.model.driver import Driver

NUM_TOKENS = 16
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "One, two, three, four, five, six. One, two, three, four, five, six. One, two, three,",
)

pytestmark = pytest.mark.slow  # loads 135 million weights, and generates with transformers to compare


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def answers(smollm2_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    return [answer.tokens for answer in tiny.reference(smollm2_path, prompts, NUM_TOKENS)]


load = partial(driver.load, block_size=16, memory_bytes=512 << 20, max_model_len=1024)


@pytest.fixture(scope="module")
def runner(smollm2_path: Path) -> TorchRunner:
    return load(smollm2_path)


def test_the_packaged_model_is_computed_in_the_blocks_of_its_file(
    smollm2_path: Path, prompts: list[list[int]], answers: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "tandem.engine.model.paths"):
        driver = Driver(load(smollm2_path, dtype="auto"))
    (size,) = map(int, re.findall(r"(\d+) kB of packed matrices", caplog.text))
    assert size < 100_000  # 4 to 8 bits a weight; packed bfloat16 takes twice as much
    driver.add("r", prompts[0])
    assert driver.generate(2)["r"] == answers[0][:2]


def test_mixed_and_chunked(runner: TorchRunner, prompts: list[list[int]], answers: list[list[int]]) -> None:
    driver = Driver(runner)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt)
    assert list(driver.generate(NUM_TOKENS, max_chunk=13).values()) == answers
    driver.finish_all()


def test_prefilled_here_and_decoded_there_with_drafts(
    smollm2_path: Path, runner: TorchRunner, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    prefill, decode = Driver(runner, 1), Driver(load(smollm2_path, num_speculative_tokens=3), 2)
    for index, prompt in enumerate(prompts):
        prefill.add(str(index), prompt)
    prefill.generate(1)
    for index in range(len(prompts)):
        decode.adopt(str(index), prefill)
    assert list(decode.generate(NUM_TOKENS).values()) == answers
    # The counting text repeats itself, and so do its drafts.
    assert decode.num_accepted > 0
    prefill.finish_all()

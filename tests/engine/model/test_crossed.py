"""Models with an encoder: greedy tokens equal transformers' `generate`, however the work is cut up, lost, or moved."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import transformers

from tandem.base.errors import ConfigurationError
from tandem.engine.config import CacheConfig, Reserve, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.wire.sampling import SamplingParams
from tests.engine.made_requests import made_request
from tests.engine.model import tiny_crossed
from tests.engine.model.driver import load

# What holds for models without an encoder holds for these.
from tests.engine.model.test_runner_parity import Case as Case
from tests.engine.model.test_runner_parity import (
    test_a_request_moves_to_another_runner_with_its_blocks as test_a_request_moves_to_another_runner_with_its_blocks,
)
from tests.engine.model.test_runner_parity import test_drafts_change_no_token as test_drafts_change_no_token
from tests.engine.model.test_runner_parity import (
    test_mixed_batches_in_random_chunks as test_mixed_batches_in_random_chunks,
)
from tests.engine.model.test_runner_parity import (
    test_requests_come_go_and_are_preempted_at_random as test_requests_come_go_and_are_preempted_at_random,
)
from tests.more import more

NUM_TOKENS = 10
LENGTHS = (1, 5, 23, 37, 16)
QUICK = ("bart-forced", "t5")


@pytest.fixture(scope="module", params=[*QUICK, *more(name for name in tiny_crossed.CONFIGS if name not in QUICK)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tiny_crossed.save(request.param, tmp_path_factory.mktemp("models"))
    draw = random.Random(request.param)
    prompts = [[draw.randrange(3, tiny_crossed.VOCAB) for _ in range(length)] for length in LENGTHS]
    runner = load(path)
    assert runner.info.encoder is not None
    opening = list(runner.info.encoder.opening)
    answers = tiny_crossed.reference(path, prompts, NUM_TOKENS)
    return Case(
        path,
        False,
        runner,
        [prompt + opening for prompt in prompts],
        [answer.tokens for answer in answers],
        [answer.logprobs for answer in answers],
    )


@pytest.fixture(scope="module")
def other_runner(case: Case) -> TorchRunner:
    """One with drafts."""
    return load(case.path, num_speculative_tokens=4)


def test_a_token_that_generation_forces_belongs_to_the_opening(tmp_path: Path) -> None:
    rules = load(tiny_crossed.save("bart-forced", tmp_path)).info.encoder
    assert rules is not None
    assert rules.opening == (2, 5)


def test_a_request_goes_on_elsewhere_from_the_tokens_that_it_has(case: Case) -> None:
    driver = case.driver(4)
    for index in (1, 2):
        driver.add(f"r{index}", case.prompts[index], output=case.answers[index][:6])
    assert list(driver.generate(NUM_TOKENS, max_chunk=7).values()) == [case.answers[1], case.answers[2]]
    driver.finish_all()
    assert case.runner.info.work is None  # a token goes through one of two halves


@pytest.mark.parametrize(
    ("name", "wanted", "context", "longest"),
    [("bart", None, 128, 64), ("bart", 100, 100, 64), ("t5", None, 128, 128), ("t5", 300, 300, 300)],
)
def test_both_sides_have_the_models_positions(
    name: str, wanted: int | None, context: int, longest: int, tmp_path: Path
) -> None:
    info = load(tiny_crossed.save(name, tmp_path), max_model_len=wanted).info
    assert info.encoder is not None
    assert (info.max_model_len, info.encoder.longest_prompt) == (context, longest)


def test_more_positions_than_the_model_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the model's context is 128 tokens"):
        load(tiny_crossed.save("bart", tmp_path), max_model_len=129)


def test_an_unknown_type_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    transformers.WhisperConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="type whisper cannot be served: of the models with an encoder"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_loras": 1}, "scheduler.max_loras"),
        ({"pooling": "last"}, "model.pooling"),
        ({"kept": "fp8"}, "cache.dtype"),
    ],
)
def test_what_reads_only_decoders_is_refused_with_the_setting(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=f"has an encoder, and is not served with {named}"):
        load(tiny_crossed.save("bart", tmp_path), **settings)


@pytest.mark.parametrize("ahead", [True, *more([False])])
def test_an_engine_short_of_blocks_preempts_aborts_and_gives_every_block_back(case: Case, ahead: bool) -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, reserve=Reserve.NONE)
    info = case.runner.info
    scheduler = Scheduler(config, CacheConfig(block_size=4), info.groups, 26, info.max_model_len, has_encoder=True)
    engine = Engine(scheduler, case.runner, None, ahead=ahead)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    for turn in range(2):
        for index, prompt in enumerate(case.prompts):
            engine.add_request(made_request(f"{turn}.{index}", prompt, sampling))
        engine.add_request(made_request(f"aborted {turn}", case.prompts[turn + 2], sampling))
    steps = 0
    while scheduler.has_unfinished_requests():
        for update in engine.step().updates:
            assert update.error is None
            answers.setdefault(update.request_id, []).extend(update.token_ids)
        scheduler.check_integrity()
        steps += 1
        engine.abort_requests([f"aborted {steps // 9}"])
    engine.step()
    for turn in range(2):
        assert [answers[f"{turn}.{index}"] for index in range(len(case.prompts))] == case.answers
    stats = scheduler.stats()
    assert stats.preemptions > 0
    assert stats.free_blocks == stats.total_blocks
    assert stats.prompt_tokens_cached == 0  # the rows of a prompt depend on its end
    case.runner.forget_requests()

"""Models that keep recurrent states answer as transformers' `generate` does, however the work is cut up, shared, lost, or moved.

The driver fills free blocks with NaN, so a state that is read from another request's blocks spoils an answer.
"""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.base.errors import ConfigurationError
from tandem.engine.cache.group_manager import AttentionKind
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.loading import load_runner
from tandem.engine.model.probe import probe_attention
from tandem.engine.model.recurrent import layout, mixers
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.wire.sampling import SamplingParams
from tests.engine.made_requests import made_request
from tests.engine.model import tiny
from tests.engine.model.driver import Driver
from tests.engine.model.test_runner_parity import Case as Case
from tests.engine.model.test_runner_parity import (
    test_a_request_moves_to_another_runner_with_its_blocks as test_a_request_moves_to_another_runner_with_its_blocks,
)
from tests.more import more

NUM_TOKENS = 8
LENGTHS = (1, 5, 23, 37, 2)
CONFIG = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24, max_model_len=64)
CACHE = CacheConfig(block_size=4, memory_bytes=8 << 20)
GUESSING = msgspec.structs.replace(CONFIG, num_speculative_tokens=3, max_draft_loss=1.0)
# One of each way to keep a state.
QUICK = ("qwen3.5", "mamba", "falcon-h1", "lfm2", "minimax", "recurrent-gemma")
REFUSED = ("zamba2",)
# What transformers answers for all tokens at once and for one after the other differs by 3e-3 in this one.
TOLERANCES = {"nemotron-h": 4e-3}
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.more)
    for name in sorted(tiny.RECURRENT)
    if name not in REFUSED
]


def load(path: Path, config: SchedulerConfig = CONFIG) -> TorchRunner:
    model = ModelConfig(path=str(path), dtype="float32", device="cpu", threads=1)
    return load_runner(model, CACHE, config)


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tiny.save(request.param, tmp_path_factory.mktemp("models"))
    rng = random.Random(request.param)
    prompts = [[rng.randrange(3, tiny.VOCAB) for _ in range(length)] for length in LENGTHS]
    answers = tiny.reference(path, prompts, NUM_TOKENS)
    return Case(path, False, load(path), prompts, [a.tokens for a in answers], [a.logprobs for a in answers])


@pytest.fixture(scope="module")
def other_runner(case: Case) -> TorchRunner:
    """Another runner, with drafts."""
    return load(case.path, GUESSING)


def test_states_are_a_group_of_the_cache(case: Case) -> None:
    *others, group = case.runner.info.groups
    assert group.kind is AttentionKind.STATE
    assert group.blocks_per_request > 0
    assert all(other.kind is not AttentionKind.STATE for other in others)


@pytest.mark.parametrize("seed", [0, *more([1])])
def test_mixed_batches_in_random_chunks(case: Case, seed: int) -> None:
    within = TOLERANCES.get(case.path.name, 1e-3)
    Driver(case.runner, seed).expect(case.prompts, case.answers, case.logprobs, within)


@pytest.mark.parametrize("drafts", [False, True])
def test_requests_are_preempted_and_aborted_in_a_pool_that_is_too_small(
    case: Case, other_runner: TorchRunner, drafts: bool
) -> None:
    """The longest request has room, and few others beside it. Every block is accounted for after each step. With drafts there are
    checkpoints, too."""
    runner = other_runner if drafts else case.runner
    info = runner.info
    state = info.groups[-1].blocks_per_request
    blocks = 1 + (4 if drafts else 2) * state + (len(info.groups) - 1) * (20 if drafts else 17)
    runner.forget_requests()
    cache = msgspec.structs.replace(CACHE, checkpoint_tokens=8) if drafts else CACHE
    scheduler = Scheduler(GUESSING if drafts else CONFIG, cache, info.groups, blocks, info.max_model_len)
    engine = Engine(scheduler, runner, None)
    runner.kv_cache[1:] = float("nan")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    answers: dict[str, list[int]] = {}
    for round_ in range(2):
        for index, prompt in enumerate(case.prompts):
            engine.add_request(made_request(f"r{round_}-{index}", prompt, params))
        engine.add_request(made_request(f"given-up-{round_}", case.prompts[3], params))
        steps = 0
        while scheduler.has_unfinished_requests():
            for update in engine.step().updates:
                answers.setdefault(update.request_id, []).extend(update.token_ids)
            scheduler.check_integrity()
            steps += 1
            if steps == 3 + round_:
                engine.abort_requests([f"given-up-{round_}"])
            assert steps < 500
    for round_ in range(2):
        for index, expected in enumerate(case.answers):
            assert answers[f"r{round_}-{index}"] == expected
    stats = scheduler.stats()
    assert stats.free_blocks == stats.total_blocks


def test_a_prompt_begins_with_the_states_that_an_earlier_one_left(case: Case) -> None:
    """A conversation that goes on, the same prompt again, and two that part in the middle; the pool's free blocks hold no numbers."""
    info = case.runner.info
    case.runner.forget_requests()
    cache = msgspec.structs.replace(CACHE, checkpoint_tokens=4)
    scheduler = Scheduler(CONFIG, cache, info.groups, case.runner.kv_cache.shape[0], info.max_model_len)
    engine = Engine(scheduler, case.runner, None)
    case.runner.kv_cache[1:] = float("nan")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    prompt, answer = case.prompts[3], case.answers[3]
    parted = [*prompt[:18], *case.prompts[2][:15]]
    prompts = [prompt, prompt, [*prompt, *answer[:3]], parted, [*parted[:20], 7, 9, 11], prompt]
    expected = tiny.reference(case.path, prompts, NUM_TOKENS)
    cached = []
    for index, tokens in enumerate(prompts):
        engine.add_request(made_request(f"r{index}", tokens, params))
        found: list[int] = []
        while scheduler.has_unfinished_requests():
            for update in engine.step().updates:
                found += update.token_ids
                if update.cached_tokens is not None:
                    cached.append(update.cached_tokens)
            scheduler.check_integrity()
        assert found == expected[index].tokens
    # 36 of 37; then of the turn that follows; nothing where none was kept, and from then on where the first two parted, which a model
    # without attention cannot tell.
    assert cached == [0, 36, 36, 0, 16 if len(info.groups) > 1 else 0, 36]
    stats = scheduler.stats()
    assert stats.free_blocks == stats.total_blocks


def test_drafts_change_no_token(case: Case, other_runner: TorchRunner) -> None:
    """In every step, some all right, some in part, some not at all; beside chunks of prompts and single tokens."""
    other_runner.forget_requests()
    driver, numbers = Driver(other_runner, 5), random.Random(3)
    for index, prompt in enumerate(case.prompts):
        driver.add(f"r{index}", prompt)
    while unfinished := [r for r in driver.requests.values() if len(r.output) < NUM_TOKENS]:
        driver.drafts.clear()
        for request in unfinished:
            right = case.answers[int(request.req_id[1:])][len(request.output) :]
            guess = right[: numbers.randrange(3)]
            if numbers.random() < 0.5 and len(guess) < len(right):
                guess.append((right[len(guess)] + 1) % tiny.VOCAB)
            if guess and request.output and numbers.random() < 0.8:
                driver.drafts[request.req_id] = guess
        driver.step({r.req_id: numbers.randint(1, min(r.pending, 11)) for r in unfinished})
    assert [request.output[:NUM_TOKENS] for request in driver.requests.values()] == case.answers
    assert driver.num_accepted > len(case.prompts)
    driver.finish_all()


@pytest.mark.parametrize("name", REFUSED)
def test_what_keeps_its_state_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be served: "):
        load(tiny.save(name, tmp_path))


def test_a_state_that_does_not_hold_all_is_noticed_before_the_model_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a module of a new architecture kept something beside its states."""
    model = AutoModelForCausalLM.from_config(tiny.RECURRENT["qwen3.5"](), attn_implementation="eager")
    model.eval()
    put = mixers.StateCache.put

    def forgetful(self, states, values, begins):  # type: ignore[no-untyped-def]
        for key, value in values.items():
            if key[1] == layout.CONV:
                value[..., -1] = 0
        put(self, states, values, begins)

    monkeypatch.setattr(mixers.StateCache, "put", forgetful)
    with pytest.raises(ConfigurationError, match="a prompt that is read in parts gives other logits"):
        probe_attention(model)


def test_a_state_of_float32_lies_in_a_pool_of_bfloat16(tmp_path: Path) -> None:
    """Bytes are what is kept, so nothing of it is rounded."""
    path = tiny.save("qwen3-next", tmp_path)
    model = ModelConfig(path=str(path), dtype="bfloat16", device="cpu", threads=1)
    runner = load_runner(model, CACHE, CONFIG)
    assert runner.kv_cache.dtype is torch.bfloat16
    prompt = [5 + 7 * i % 100 for i in range(30)]
    whole, parts = Driver(runner), Driver(runner)
    whole.add("a", prompt, SamplingParams(temperature=0.0, logprobs=0))
    whole.generate(1)
    expected = whole.finish("a").logprobs[0].logprob
    whole.step({})
    parts.add("b", prompt, SamplingParams(temperature=0.0, logprobs=0))
    parts.generate(1, max_chunk=3)
    assert parts.finish("b").logprobs[0].logprob == pytest.approx(expected, abs=0.3)
    parts.step({})

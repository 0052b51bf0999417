"""The engine with a real model, its steps planned ahead or not: the same tokens, whatever comes and goes meanwhile."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.engine.config import AsyncScheduling, CacheConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.batching import StepOnDevice
from tandem.engine.model.cuda.pieces import DevicePieces
from tandem.engine.model.runner import LayerHooks
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.wire.sampling import FinishReason, SamplingParams, TokenLogprobs
from tests.engine.made_requests import made_request
from tests.engine.model import driver, tiny
from tests.engine.model.test_decode_graphs import graphed
from tests.engine.model.test_decode_graphs import load as load_as_on_a_gpu
from tests.engine.model.test_invalid_logits import Spoiling
from tests.more import more

BLOCK = 4
STOPS = tuple(range(3, tiny.VOCAB, 17))
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, stop_token_ids=list(STOPS), min_tokens=2),
    SamplingParams(seed=11, stop_token_ids=list(STOPS)),
    SamplingParams(seed=12, top_p=0.9, top_k=40, logprobs=2),
    SamplingParams(seed=13, logit_bias={7: 2.0}, temperature=0.7),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
    SamplingParams(seed=14, presence_penalty=0.5, bad_words=[[9, 10], [12]]),
    SamplingParams(temperature=0.0, prompt_logprobs=1, logprobs=0),
]
# What every request of a life may be: those that let steps be planned ahead, or any.
PLAIN, ALL = KINDS[:5], KINDS


@dataclasses.dataclass
class Told:
    """The updates of one request."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None


@dataclasses.dataclass(frozen=True)
class Arrival:
    at_step: int
    prompt: list[int]
    sampling: SamplingParams
    aborted_at: int | None


def draw_life(seed: int, kinds: list[SamplingParams], count: int, aborts: float) -> list[Arrival]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, tiny.VOCAB) for _ in range(24)]
    arrivals = []
    for _ in range(count):
        at = rng.randrange(40)
        prompt = shared[: rng.choice([0, 9, 20])] + [rng.randrange(3, tiny.VOCAB) for _ in range(rng.randrange(1, 30))]
        sampling = msgspec.structs.replace(rng.choice(kinds), max_tokens=rng.randrange(1, 24))
        aborted_at = at + rng.randrange(12) if rng.random() < aborts else None
        arrivals.append(Arrival(at, prompt, sampling, aborted_at))
    return arrivals


class CountingRunner:
    """A runner that counts how often a step was started before the one before it had been read."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self.num_ahead = 0
        self.unread = 0  # steps that compute and were not finished yet

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def start(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> CountedStep:
        computes = bool(step.num_scheduled_tokens)
        self.num_ahead += computes and self.unread > 0
        self.unread += computes
        return CountedStep(self, self._runner.start(step, hooks), computes)


class CountedStep:
    def __init__(self, runner: CountingRunner, step: StepOnDevice, computes: bool) -> None:
        self._runner, self._step, self._computes = runner, step, computes

    def finish(self) -> ModelOutput:
        self._runner.unread -= self._computes
        return self._step.finish()


def live(
    runner: TorchRunner, arrivals: list[Arrival], *, ahead: bool, **settings: Any
) -> tuple[dict[str, Told], Engine]:
    config = SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=24, max_model_len=64, **settings)
    cache = CacheConfig(block_size=BLOCK, hash_seed="tests")
    num_blocks = 32 * len(runner.info.groups)
    scheduler = Scheduler(config, cache, runner.info.groups, num_blocks, 64, frozenset({2}))
    engine = Engine(scheduler, CountingRunner(runner), None, ahead=ahead)  # type: ignore[arg-type]
    told = {f"r{index}": Told() for index in range(len(arrivals))}
    for step in range(2000):
        for index, arrival in enumerate(arrivals):
            if arrival.at_step == step:
                engine.add_request(made_request(f"r{index}", arrival.prompt, arrival.sampling))
            if arrival.aborted_at == step:
                engine.abort_requests([f"r{index}"])
        for update in engine.step().updates:
            request = told[update.request_id]
            assert request.finish is None
            assert update.start == len(request.tokens)
            assert update.error is None
            request.tokens += update.token_ids
            request.logprobs += update.logprobs or []
            request.prompt_logprobs = update.prompt_logprobs or request.prompt_logprobs
            request.finish, request.stop_token = update.finish, update.stop_token
        scheduler.check_integrity()
        if step > 60 and not scheduler.has_work():
            break
    stats = scheduler.stats()
    assert stats.free_blocks == stats.total_blocks
    assert not scheduler.has_unfinished_requests()
    engine.shutdown()
    runner.forget_requests()
    return told, engine


def assert_same(sync: dict[str, Told], ahead: dict[str, Told], arrivals: list[Arrival]) -> None:
    for arrival, one, other in zip(arrivals, sync.values(), ahead.values(), strict=True):
        if arrival.aborted_at is not None:
            common = min(len(one.tokens), len(other.tokens))
            assert one.tokens[:common] == other.tokens[:common]
            continue
        assert one.tokens == other.tokens
        assert (one.finish, one.stop_token) == (other.finish, other.stop_token)
        assert one.finish is not None
        assert [entry.logprob for entry in one.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs], abs=2e-4
        )
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)


def load(path: Path, native: bool) -> TorchRunner:
    return driver.load(path, max_num_seqs=5, native=native)


VARIANTS = ["llama-native", "llama-recorded", "gemma3", *more(["mistral-window-recorded", "llama"])]


@pytest.fixture(scope="module", params=VARIANTS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    name, native = request.param.removesuffix("-native"), request.param.endswith("-native")
    name, recorded = name.removesuffix("-recorded"), name.endswith("-recorded")
    path = tiny.save(name, tmp_path_factory.mktemp("models"))
    if not recorded:
        return load(path, native)
    loaded = load_as_on_a_gpu(path, DevicePieces())
    graphed(loaded)
    return loaded


@pytest.mark.parametrize("seed", [0, *more([1])])
def test_the_tokens_are_those_of_steps_one_after_the_other(runner: TorchRunner, seed: int) -> None:
    """In chunks, with shared prefixes, and with too few blocks for all."""
    arrivals = draw_life(seed, PLAIN, count=14, aborts=0.0)
    expected, sync = live(runner, arrivals, ahead=False)
    found, ahead = live(runner, arrivals, ahead=True)
    assert_same(expected, found, arrivals)
    assert sync.runner.num_ahead == 0  # type: ignore[attr-defined]
    assert ahead.runner.num_ahead > 20  # type: ignore[attr-defined]
    if runner.info.name == "llama":  # the others' windows need few blocks, and what they say may hold no stop
        stats = ahead.scheduler.stats()
        assert stats.preemptions > 0
        assert stats.prompt_tokens_cached > 0
        assert stats.requests_finished.keys() == {"stop", "length"}


@pytest.mark.parametrize("seed", [4, *more([5])])
def test_a_storm_of_aborts_changes_nobody_elses_answer(runner: TorchRunner, seed: int) -> None:
    arrivals = draw_life(seed, ALL, count=30, aborts=0.6)
    expected, _ = live(runner, arrivals, ahead=False)
    found, _ = live(runner, arrivals, ahead=True)
    assert_same(expected, found, arrivals)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    return load(tiny.save("llama", tmp_path_factory.mktemp("models")), native=False)


def plain_engine(runner: TorchRunner | CountingRunner, *, ahead: bool = True) -> Engine:
    groups: Any = runner.info.groups  # type: ignore[attr-defined]
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(block_size=BLOCK), groups, 60, 64)
    return Engine(scheduler, runner, None, ahead=ahead)  # type: ignore[arg-type]


def test_logits_that_are_no_numbers_end_their_request_though_the_next_step_runs(llama: TorchRunner) -> None:
    right, spoiling = llama.forward, Spoiling(llama)
    llama.forward = spoiling
    spoiling.context, spoiling.where, spoiling.value = 6, slice(None), float("nan")
    try:
        engine = plain_engine(llama)
        greedy = SamplingParams(temperature=0.0, max_tokens=8)
        engine.add_request(made_request("bad", [5, 6, 7, 8], greedy))
        engine.add_request(made_request("good", [5, 6, 7, 8, 9, 10, 11], greedy))
        told: dict[str, Told] = {"bad": Told(), "good": Told()}
        while engine.scheduler.has_work():
            for update in engine.step().updates:
                told[update.request_id].tokens += update.token_ids
                told[update.request_id].finish = update.finish
            engine.scheduler.check_integrity()
        assert (len(told["bad"].tokens), told["bad"].finish) == (2, FinishReason.ERROR)
        assert (len(told["good"].tokens), told["good"].finish) == (8, FinishReason.LENGTH)
    finally:
        llama.forward = right
        llama.forget_requests()


def test_a_step_under_way_is_finished_before_the_engine_ends(llama: TorchRunner) -> None:
    runner = CountingRunner(llama)
    engine = plain_engine(runner)
    engine.add_request(made_request("r", [5, 6, 7], SamplingParams(max_tokens=6)))
    assert engine.step().updates == []
    assert runner.unread == 1
    engine.shutdown()
    assert runner.unread == 0
    llama.forget_requests()


@pytest.mark.parametrize(
    ("setting", "device", "drafts", "expected"),
    [
        ("auto", "cuda:1", 0, True),
        ("auto", "cuda", 2, True),
        ("auto", "cpu", 0, False),
        ("always", "cpu", 0, True),
        ("never", "cuda", 0, False),
    ],
)
def test_when_steps_are_planned_ahead(setting: str, device: str, drafts: int, expected: bool) -> None:
    config = SchedulerConfig(async_scheduling=AsyncScheduling(setting), num_speculative_tokens=drafts)
    assert config.plans_ahead(device) is expected


@pytest.mark.parametrize("loss", [0.02, 1.0], ids=["as they pay", "always"])
def test_guessing_changes_no_token(llama: TorchRunner, loss: float) -> None:
    arrivals = draw_life(8, PLAIN, 14, aborts=0.2)
    plain, _ = live(llama, arrivals, ahead=False)
    for ahead in (False, True):
        told, engine = live(llama, arrivals, ahead=ahead, num_speculative_tokens=3, max_draft_loss=loss)
        for name, one in told.items():
            expected = plain[name]
            common = min(len(one.tokens), len(expected.tokens))  # where it was aborted is a matter of steps
            assert one.tokens[:common] == expected.tokens[:common]
            if one.finish is not None and expected.finish is not None:
                assert (one.tokens, one.finish, one.stop_token) == (
                    expected.tokens,
                    expected.finish,
                    expected.stop_token,
                )
        assert engine.scheduler.stats().speculative_drafted > 0


def test_steps_in_which_nothing_is_guessed_are_planned_ahead(llama: TorchRunner) -> None:
    arrivals = [Arrival(0, [5, 6, 7], SamplingParams(seed=3, temperature=2.0, max_tokens=50), None)]
    plain, _ = live(llama, arrivals, ahead=False)
    told, engine = live(llama, arrivals, ahead=True, num_speculative_tokens=3)
    assert told == plain
    assert engine.runner.num_ahead > 5  # type: ignore[attr-defined]

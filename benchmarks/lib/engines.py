"""An engine with a model and no node around it, its timed steps."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.loading import load_runner
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.request import Request
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.wire.requests import KVTransferParams, RequestFacts
from tandem.wire.sampling import SamplingParams

Say = Callable[[str], None]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def request_of(
    name: str,
    prompt: list[int],
    sampling: SamplingParams,
    *,
    lora: str | None = None,
    transfer: KVTransferParams | None = None,
) -> Request:
    facts = RequestFacts(prompt_token_ids=prompt, sampling=sampling, lora=lora)
    return Request(name, facts, transfer=transfer)


def random_prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for _ in range(count)]


def load_engine(
    model: ModelConfig, cache: CacheConfig, scheduling: SchedulerConfig, *, native: bool = True
) -> tuple[Engine, TorchRunner]:
    runner = load_runner(model, cache, scheduling, native=native)
    return engine_of(runner, cache, scheduling), runner


def engine_of(runner: TorchRunner, cache: CacheConfig, scheduling: SchedulerConfig) -> Engine:
    info = runner.info
    scheduler = Scheduler(scheduling, cache, info.groups, info.num_blocks, info.max_model_len, info.eos_token_ids)
    return Engine(scheduler, runner, None, ahead=scheduling.plans_ahead(info.device))


class EngineBench:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._count = 0

    def prefill(self, prompt: list[int]) -> float:
        """Returns the seconds from a new request to its first token."""
        self._add(prompt, 1)
        return self._timed(self._finish)

    def decode(self, prompts: list[list[int]], steps: int, loras: Sequence[str] = ()) -> float:
        """Returns the seconds of a step in which each of these requests gets a token. `loras` gives each an adapter."""
        with self.decoding(prompts, steps + len(prompts) + 2, loras):
            self._engine.step()
            return statistics.median(self._timed(self._engine.step) for _ in range(steps))

    @contextmanager
    def decoding(self, prompts: list[list[int]], tokens: int, loras: Sequence[str] = ()) -> Iterator[None]:
        """While it is entered these requests decode; afterwards they are aborted."""
        names = {self._add(prompt, tokens, lora) for prompt, lora in zip_longest(prompts, loras)}
        begun: set[str] = set()
        while begun != names:
            begun.update(update.request_id for update in self._engine.step().updates)
        yield
        self._engine.abort_requests(names)
        self._finish()

    def _add(self, prompt: list[int], tokens: int, lora: str | None = None) -> str:
        self._count += 1
        name = f"r{self._count}"
        self._engine.add_request(request_of(name, prompt, greedy(tokens), lora=lora))
        return name

    def _finish(self) -> None:
        while self._engine.step().progressed:
            pass

    @staticmethod
    def _timed(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

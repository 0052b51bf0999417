"""An engine with a model and no node around it, its timed steps."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tandem.engine.cache.hashing import BlockHasher
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.loading import load_runner
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.request import Request
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.wire.requests import KVTransferParams, RequestFacts
from tandem.wire.sampling import SamplingParams


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def request_of(
    name: str,
    prompt: list[int],
    sampling: SamplingParams,
    *,
    transfer: KVTransferParams | None = None,
    hasher: BlockHasher | None = None,
) -> Request:
    return Request(
        name, RequestFacts(prompt_token_ids=prompt, sampling=sampling), transfer=transfer, block_hasher=hasher
    )


def random_prompts(count: int, length: int, vocab: int, seed: int = 0, *, shared: int = 0) -> list[list[int]]:
    """Returns prompts that have nothing in common but their first `shared` tokens."""
    draw = random.Random(seed)
    common = [draw.randrange(vocab) for _ in range(shared)]
    return [common + [draw.randrange(vocab) for _ in range(length - shared)] for _ in range(count)]


def load_engine(
    model: ModelConfig, cache: CacheConfig, scheduling: SchedulerConfig, *, native: bool = True
) -> tuple[Engine, TorchRunner]:
    runner = load_runner(model, cache, scheduling, native=native)
    return engine_of(runner, cache, scheduling), runner


def engine_of(runner: TorchRunner, cache: CacheConfig, scheduling: SchedulerConfig) -> Engine:
    info = runner.info
    scheduler = Scheduler(scheduling, cache, info.groups, info.num_blocks, info.max_model_len, info.eos_token_ids)
    return Engine(scheduler, runner, None, ahead=scheduling.plans_ahead(info.device))


class TimedStep(NamedTuple):
    what: str
    seconds: float
    counts: list[int]  # of each request, the tokens that the step computes
    contexts: list[int]  # and those that it then has


class EngineBench:
    def __init__(self, engine: Engine, vocab: int) -> None:
        self._engine = engine
        self._vocab = vocab
        self._count = 0

    def prefills(self, lengths: Iterable[int], repeats: int) -> Iterator[TimedStep]:
        for length in lengths:
            (prompt,) = random_prompts(1, length, self._vocab)
            taken = [self.prefill(prompt) for _ in range(repeats + 1)][1:]
            yield TimedStep(f"prefill {length}", statistics.median(taken), [length], [length])

    def decodes(self, sizes: Iterable[tuple[int, int]], steps: int) -> Iterator[TimedStep]:
        """Times steps in which each of some requests with some tokens gets one more."""
        for batch, context in sizes:
            taken = []
            with self.decoding(batch, context, steps + batch + 2):
                self._engine.step()
                for _ in range(steps):
                    began = time.perf_counter()
                    self._engine.step()
                    taken.append(time.perf_counter() - began)
            yield TimedStep(f"decode {batch} x {context}", statistics.median(taken), [1] * batch, [context] * batch)

    def prefill(self, prompt: list[int]) -> float:
        """Returns the seconds from a new request to its first token, beside whatever else runs."""
        began = time.perf_counter()
        name = self._add(prompt, 1)
        while True:
            for update in self._engine.step().updates:
                if update.request_id == name and update.error is not None:
                    raise RuntimeError(f"{name}: {update.error}")
                if update.request_id == name and update.finish is not None:
                    return time.perf_counter() - began

    @contextmanager
    def decoding(self, batch: int, context: int, tokens: int) -> Iterator[None]:
        """While it is entered so many requests decode; afterwards they are aborted."""
        names = {self._add(prompt, tokens) for prompt in random_prompts(batch, context, self._vocab)}
        begun: set[str] = set()
        while begun != names:
            begun.update(update.request_id for update in self._engine.step().updates)
        yield
        self._engine.abort_requests(names)
        while self._engine.step().progressed:
            pass

    def _add(self, prompt: list[int], tokens: int) -> str:
        self._count += 1
        name = f"r{self._count}"
        self._engine.add_request(request_of(name, prompt, greedy(tokens)))
        return name

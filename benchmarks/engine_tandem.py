"""Tandem's engine under the work: the scheduler and the runner, without a node around them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest

from benchmarks.engine_costs import Times, Work
from tandem.engine.core import Engine
from tandem.engine.request import Request
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams

Say = Callable[[str], None]


def run_tandem(engine: Engine, work: Work, say: Say) -> Times:
    bench = EngineBench(engine)
    times = Times({}, {})
    for prompt in work.prefill:
        say(f"tandem: prefill of {len(prompt)}")
        taken = [bench.prefill(prompt) for _ in range(work.repeats + 1)]
        times.prefill[len(prompt)] = statistics.median(taken[1:])
    for prompts in work.decode:
        say(f"tandem: {len(prompts)} decodes at {len(prompts[0])}")
        times.decode[len(prompts), len(prompts[0])] = bench.decode(prompts, work.decode_steps)
    return times


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
        names = {
            self._add(prompt, steps + len(prompts) + 2, lora) for prompt, lora in zip_longest(prompts, loras)
        }
        begun: set[str] = set()
        while begun != names:
            begun.update(update.request_id for update in self._engine.step().updates)
        self._engine.step()
        median = statistics.median(self._timed(self._engine.step) for _ in range(steps))
        self._engine.abort_requests(names)
        self._finish()
        return median

    def _add(self, prompt: list[int], tokens: int, lora: str | None = None) -> str:
        self._count += 1
        name = f"r{self._count}"
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self._engine.add_request(
            Request(name, RequestFacts(prompt_token_ids=prompt, sampling=sampling, lora=lora))
        )
        return name

    def _finish(self) -> None:
        while self._engine.step().progressed:
            pass

    @staticmethod
    def _timed(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

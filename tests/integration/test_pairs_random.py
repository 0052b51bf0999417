"""Two nodes of one rank at random, as in test_ranks_random.py, with models of every kind, and requests that sample, stop and are adapted in
all ways. Requests that begin alike come at once, too: one reads blocks that another fills in the same step.

TANDEM_PAIR_RUNS=FIRST-LAST plays other runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.config import SchedulerConfig
from tandem.wire.adapters import identity_of
from tandem.wire.sampling import SamplingParams
from tests.engine.model import tiny
from tests.engine.model.adapter_files import save_adapter
from tests.integration.one_engine import OneEngine
from tests.integration.test_ranks_random import ONE, PATIENCE_S, RankRun, Way, runs

ADAPTED = "llama"
# Zamba 2 keeps what Tandem does not know, and is refused.
KINDS = [kind for kind in tiny.ALL if kind != "zamba2"] + [ADAPTED] * 5


class PairRun(RankRun):
    def __init__(self, number: int, folder: Path, models: Models) -> None:
        super().__init__(number, folder, models.path_of, models.alone)
        if self.kind == ADAPTED:
            self.adapters = models.adapters

    def draw_nodes(self) -> tuple[str, tuple[Way, Way]]:
        return self.draw.choice(KINDS), (ONE, ONE)

    def may_be_fp8(self) -> bool:
        return self.kind in (ADAPTED, "gemma3", "qwen3")

    def draw_adapter(self) -> str | None:
        served = self.alone.engine.runner.adapters
        if self.kind != ADAPTED or served is None:
            return None
        return self.draw.choice([None, *(identity_of(name, digest) for name, digest in served.served.items())])

    def draw_sampling(self) -> SamplingParams:
        draw = self.draw

        def some(chance: float, value: Callable[[], Any], otherwise: Any) -> Any:
            return value() if draw.random() < chance else otherwise

        def token() -> int:
            return draw.randrange(tiny.VOCAB)

        count = draw.randrange(1, 16)
        return SamplingParams(
            max_tokens=count,
            temperature=draw.choice([0.0, 0.0, 0.7, 1.0, 2.5]),
            seed=draw.randrange(1 << 40),
            ignore_eos=draw.random() < 0.5,
            top_p=some(0.2, lambda: draw.choice([0.1, 0.5, 0.9]), 1.0),
            top_k=some(0.2, lambda: draw.choice([1, 3, 20]), 0),
            min_p=some(0.1, lambda: draw.choice([0.01, 0.2]), 0.0),
            repetition_penalty=some(0.2, lambda: draw.choice([0.7, 1.3]), 1.0),
            presence_penalty=some(0.2, lambda: draw.choice([-1.5, 1.5]), 0.0),
            frequency_penalty=some(0.2, lambda: draw.choice([-0.5, 1.0]), 0.0),
            logit_bias=some(0.2, lambda: {token(): draw.choice([-100.0, 5.0, -3.0]) for _ in range(3)}, {}),
            bad_words=some(0.2, lambda: [[token() for _ in range(draw.randrange(1, 3))] for _ in range(3)], []),
            stop_token_ids=some(0.3, lambda: [token() for _ in range(draw.choice([1, 8]))], []),
            min_tokens=some(0.2, lambda: draw.randrange(count + 1), 0),
            logprobs=some(0.3, lambda: draw.choice([0, 5]), None),
        )


class Models:
    """One of each kind, and the engine of each that serves it alone."""

    def __init__(self, folder: Path, engines: contextlib.ExitStack) -> None:
        self.folder, self._engines = folder, engines
        self.path_of = functools.cache(lambda kind: tiny.save(kind, folder))
        self.alone = functools.cache(self._alone)

    @functools.cached_property
    def adapters(self) -> Mapping[str, str]:
        path = self.path_of(ADAPTED)
        return {name: str(save_adapter(path, self.folder / name, seed)) for seed, name in enumerate(("law", "art"))}

    def _alone(self, kind: str, kept: str) -> OneEngine:
        adapters = self.adapters if kind == ADAPTED else {}
        scheduler = SchedulerConfig(max_model_len=160, max_loras=len(adapters))
        options = {"memory_bytes": 8 << 20, "kept": kept, "scheduler": scheduler, "adapters": adapters}
        return self._engines.enter_context(OneEngine.start(self.path_of(kind), "alone", 4, None, **options))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    with contextlib.ExitStack() as engines:
        yield Models(tmp_path_factory.mktemp("models"), engines)


@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("number", runs("TANDEM_PAIR_RUNS", [1, 2, 3]))
def test_every_answer_is_that_of_one_request_alone(number: int, tmp_path: Path, models: Models) -> None:
    run = PairRun(number, tmp_path, models)
    try:
        print(number, run.run(), run)
    except BaseException as problem:
        problem.add_note(f"run {number}: {run}")
        raise

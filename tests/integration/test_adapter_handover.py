"""KV that was computed with an adapter is handed over only to a node with the same adapter, and only requests for that
adapter find it again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tandem.engine.config import SchedulerConfig
from tandem.kvtransfer.config import TransferConfig
from tandem.wire.adapters import identity_of
from tests.engine.model import tiny
from tests.engine.model.adapter_files import merged_answers, save_adapter
from tests.integration.one_engine import OneEngine, hand_over

NEW_TOKENS = 6
ADAPTERS = ("one", "two", "three")
_random = random.Random(5)
PROMPTS = [[_random.randrange(3, tiny.VOCAB) for _ in range(length)] for length in (5, 33)]


class Lab:
    def __init__(self, folder: Path) -> None:
        self.path = tiny.save("llama", folder)
        self.folders = {name: str(save_adapter(self.path, folder / name, seed)) for seed, name in enumerate(ADAPTERS)}
        self.answers = {
            name: merged_answers(self.path, Path(where), PROMPTS, NEW_TOKENS, folder / f"{name}-merged")
            for name, where in self.folders.items()
        }
        self.answers["base"] = [one.tokens for one in tiny.reference(self.path, PROMPTS, NEW_TOKENS)]

    def start(self, name: str, transfer: TransferConfig | None, **adapters: str) -> OneEngine:
        return OneEngine.start(
            self.path,
            name,
            4,
            transfer,
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=12, max_loras=3),
            memory_bytes=4 << 20,
            prefix_caching=True,
            adapters=adapters or self.folders,
        )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("adapters"))


def identities(engine: OneEngine) -> dict[str, str | None]:
    adapters = engine.engine.runner.adapters
    assert adapters is not None
    return {"base": None} | {name: identity_of(name, digest) for name, digest in adapters.served.items()}


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_the_answer_is_the_merged_models(lab: Lab, direction: str) -> None:
    config = TransferConfig(connector="nixl", direction=direction)
    with lab.start("p", config) as producer, lab.start("c", config) as consumer:
        known = identities(producer)
        assert known == identities(consumer)
        for index, prompt in enumerate(PROMPTS):
            for name, identity in known.items():
                found = hand_over(producer, consumer, f"{name}-{index}", prompt, NEW_TOKENS, loras=(identity, identity))
                assert found == lab.answers[name][index], name
        assert consumer.engine.scheduler.stats().prompt_tokens_computed == 0


def test_kv_of_an_adapter_with_other_weights_is_refused_though_it_has_the_name(lab: Lab) -> None:
    config = TransferConfig(connector="nixl")
    with lab.start("p", config, one=lab.folders["two"]) as producer, lab.start("c", config) as consumer:
        loras = identities(producer)["one"], identities(consumer)["one"]
        assert loras[0] != loras[1]
        found = hand_over(producer, consumer, "r", PROMPTS[1], NEW_TOKENS, loras=loras)
        assert found == lab.answers["one"][1]
        assert consumer.engine.scheduler.stats().prompt_tokens_computed == len(PROMPTS[1])
        assert consumer.stats().bytes_received == 0


def test_a_prefix_is_found_by_requests_with_the_same_adapter_alone(lab: Lab) -> None:
    with lab.start("alone", None) as engine:
        for name, identity in identities(engine).items():
            before = engine.engine.scheduler.stats().prompt_tokens_cached
            assert engine.answer(f"{name}-1", PROMPTS[1], NEW_TOKENS, identity) == lab.answers[name][1]
            assert engine.engine.scheduler.stats().prompt_tokens_cached == before
            assert engine.answer(f"{name}-2", PROMPTS[1], NEW_TOKENS, identity) == lab.answers[name][1]
            assert engine.engine.scheduler.stats().prompt_tokens_cached == before + 32

"""A request's tokens and log-probabilities are the same bits alone and in any company, however its prompt is cut, with its prefix found
or computed, after preemptions, with drafts, and after it has moved to another node. docs/exact.md has the table of what is promised."""

from __future__ import annotations

import dataclasses
import random
import struct
from pathlib import Path

import pytest

from tandem.engine.model.torch_runner import TorchRunner
from tandem.wire.sampling import SamplingParams
from tests.engine.model import tiny
from tests.engine.model.driver import DrivenRequest, Driver, load
from tests.more import more

NUM_TOKENS = 8
LENGTHS = (1, 5, 23, 37, 16, 64, 100)
PROMISED = ["llama", "llama-untied-odd-heads", "mistral-window", "qwen2", "qwen3"]

Bits = tuple[list[int], list[bytes]]


def bits_of(request: DrivenRequest) -> Bits:
    return request.output[:NUM_TOKENS], [struct.pack("<d", e.logprob) for e in request.logprobs[:NUM_TOKENS]]


def sampling(index: int) -> SamplingParams:
    return SamplingParams(temperature=float(index % 2), seed=index, logprobs=0)


@dataclasses.dataclass
class Case:
    path: Path
    dtype: str
    prompts: list[list[int]]
    alone: list[Bits]

    def runner(self, threads: int, drafts: int = 0) -> TorchRunner:
        settings = {"max_num_seqs": len(LENGTHS), "num_speculative_tokens": drafts}
        return load(self.path, dtype=self.dtype, threads=threads, **settings)


@pytest.fixture(
    scope="module",
    params=["llama-float32", "llama-bfloat16", *more(f"{kind}-float32" for kind in PROMISED[1:])],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind, _, dtype = request.param.rpartition("-")
    rng = random.Random(kind)
    prompts = [[rng.randrange(3, tiny.VOCAB) for _ in range(length)] for length in LENGTHS]
    made = Case(tiny.save(kind, tmp_path_factory.mktemp("models")), dtype, prompts, [])
    driver = Driver(made.runner(1))
    for index, prompt in enumerate(prompts):
        driver.add(f"r{index}", prompt, sampling(index))
        driver.generate(NUM_TOKENS)
        made.alone.append(bits_of(driver.finish(f"r{index}")))
    return made


@pytest.mark.parametrize(("threads", "chunk"), [(1, 1 << 30), (2, 11), (2, 1)])
def test_in_company_and_in_chunks(case: Case, threads: int, chunk: int) -> None:
    driver = Driver(case.runner(threads), chunk)
    for index, prompt in enumerate(case.prompts):
        driver.add(f"r{index}", prompt, sampling(index))
    driver.generate(NUM_TOKENS, max_chunk=chunk)
    assert [bits_of(request) for request in driver.requests.values()] == case.alone


def test_a_prefix_that_was_found(case: Case) -> None:
    driver = Driver(case.runner(1), 3)
    driver.add("first", case.prompts[3])
    driver.step({"first": 28})
    driver.add("second", case.prompts[3], sampling(3), prefix_of="first", shared_tokens=28)
    driver.generate(NUM_TOKENS)
    assert bits_of(driver.requests["second"]) == case.alone[3]


def test_preempted_again_and_again(case: Case) -> None:
    driver = Driver(case.runner(2), 7)
    for index, prompt in enumerate(case.prompts):
        driver.add(f"r{index}", prompt, sampling(index))
    while unfinished := [r for r in driver.requests.values() if len(r.output) < NUM_TOKENS]:
        for request in unfinished:
            if driver.random.random() < 0.1:
                driver.preempt(request.req_id)
        driver.step({r.req_id: driver.random.randint(1, r.pending) for r in unfinished})
    assert [bits_of(request) for request in driver.requests.values()] == case.alone


@pytest.mark.parametrize("after", [1, 4])
def test_another_node_goes_on(case: Case, after: int) -> None:
    """Once with the KV of the first node, and once with its tokens alone, as after a failover."""
    prefill, decode = Driver(case.runner(1), 1), Driver(case.runner(2), 2)
    for index, prompt in enumerate(case.prompts):
        prefill.add(f"r{index}", prompt, sampling(index))
    prefill.generate(after, max_chunk=9)
    for name, request in prefill.requests.items():
        first = len(request.logprobs)
        for moved in (
            decode.adopt(name, prefill),
            decode.add(f"{name}-lost", *_so_far(request), output=request.output),
        ):
            moved.logprobs = list(request.logprobs)
            assert len(moved.output) == first
    decode.generate(NUM_TOKENS, max_chunk=13)
    for index, expected in enumerate(case.alone):
        assert bits_of(decode.requests[f"r{index}"]) == expected
        assert bits_of(decode.requests[f"r{index}-lost"]) == expected


def _so_far(request: DrivenRequest) -> tuple[list[int], SamplingParams]:
    return request.tokens[: request.num_prompt], request.sampling


def test_drafts(case: Case) -> None:
    driver = Driver(case.runner(1, drafts=4), 5)
    for index, prompt in enumerate(case.prompts):
        driver.add(f"r{index}", prompt, sampling(index))
        driver.step({f"r{index}": len(prompt)})
        driver.drafts[f"r{index}"] = case.alone[index][0][1 : 1 + index % 4]
    driver.generate(NUM_TOKENS)
    assert [bits_of(request) for request in driver.requests.values()] == case.alone
    assert driver.num_accepted

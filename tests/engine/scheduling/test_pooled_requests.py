"""Requests that end in a vector are scheduled like prompts, beside answers, and never get a token."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.base.errors import ContextLengthExceeded, InvalidLogits, InvalidRequest
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.wire.pooling import Pooling, PoolingKind
from tandem.wire.requests import TokenChunk
from tandem.wire.sampling import FinishReason
from tests.engine.scheduling.driving import Driver, unique_tokens

LAST, MEAN, CLS = (Pooling(kind) for kind in (PoolingKind.LAST, PoolingKind.MEAN, PoolingKind.CLS))


@dataclasses.dataclass
class Vectors:
    """What the model does with such requests: it keeps the numbers of the tokens that it has computed, and no other."""

    driver: Driver
    seen: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    made: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    pooled: dict[str, int] = dataclasses.field(default_factory=dict)  # id -> tokens of its prompt

    def step(self) -> tuple[SchedulerOutput, list[TokenChunk]]:
        plan = self.driver.schedule()
        return plan, self.finish(plan)

    def finish(self, plan: SchedulerOutput) -> list[TokenChunk]:
        self.pooled |= {new.req_id: len(new.token_ids) for new in plan.new_reqs if new.facts.pooling is not None}
        begin = {new.req_id: new.num_computed_tokens for new in plan.new_reqs}
        cached = plan.cached_reqs
        begin |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        output = self.driver.model.execute(plan)
        for request_id, count in plan.num_scheduled_tokens.items():
            if request_id not in self.pooled:
                continue
            output.sampled_token_ids.pop(request_id, None)
            first = begin[request_id]
            seen = self.seen.setdefault(request_id, [])
            del seen[0 if first == 0 else len(seen) :]
            seen += range(first, first + count)
            if first + count == self.pooled[request_id]:
                output.vectors[request_id] = request_id.encode()
                self.made[request_id] = seen
        return self.driver.book(plan, output)

    def run(self) -> None:
        for _ in range(500):
            if not self.driver.scheduler.has_work():
                return
            self.step()
        raise AssertionError("there is no end to it")

    def last(self, request_id: str) -> TokenChunk:
        return self.driver.updates[request_id][-1]


def test_a_prompt_in_chunks_ends_with_its_vector() -> None:
    driver = Driver(max_num_batched_tokens=4)
    vectors = Vectors(driver)
    driver.add("a", prompt=10, pooling=MEAN)
    sizes = [vectors.step()[0].num_scheduled_tokens["a"] for _ in range(3)]
    assert sizes == [4, 4, 2]
    assert vectors.last("a") == TokenChunk("a", 0, [], FinishReason.STOP, vector=b"a", cached_tokens=0)
    assert vectors.made["a"] == list(range(10))
    vectors.run()
    assert driver.free_blocks == 99
    assert driver.scheduler.stats().output_tokens == 0


@pytest.mark.parametrize(("pooling", "cached"), [(LAST, 8), (MEAN, 0), (CLS, 0)])
def test_only_the_last_tokens_vector_begins_with_a_cached_prefix(pooling: Pooling, cached: int) -> None:
    driver = Driver()
    vectors = Vectors(driver)
    tokens = unique_tokens("t", 10)
    driver.add("text", prompt=tokens, max_tokens=1)
    vectors.run()
    driver.add("a", prompt=tokens, pooling=pooling)
    vectors.run()
    assert vectors.last("a").cached_tokens == cached
    assert vectors.made["a"] == list(range(cached, 10))
    # What it has computed is found by an answer, whatever it was computed for.
    driver.add("again", prompt=tokens, max_tokens=1)
    vectors.run()
    assert vectors.last("again").cached_tokens == 8


def test_it_says_nothing_about_how_long_answers_get() -> None:
    def wanted_after(pooling: Pooling | None) -> int:
        driver = Driver()
        vectors = Vectors(driver)
        if pooling is not None:
            driver.add("vector", prompt=10, pooling=pooling)
            vectors.run()
        driver.add("text", prompt=6, max_tokens=300)
        driver.step()
        return driver.scheduler.stats().wanted_blocks

    assert wanted_after(MEAN) == wanted_after(None)


def test_planned_ahead_it_gets_no_step_beyond_its_last() -> None:
    driver = Driver()
    vectors = Vectors(driver)
    driver.add("a", prompt=6, pooling=MEAN)
    first = driver.schedule()
    assert driver.scheduler.leave_open(first)
    second = driver.schedule()
    assert second.num_scheduled_tokens == {}
    vectors.finish(first)
    assert vectors.last("a").vector == b"a"
    driver.finish(second)
    vectors.run()
    assert driver.free_blocks == 99


def test_the_whole_context_is_allowed_and_no_more() -> None:
    driver = Driver(max_model_len=16)
    vectors = Vectors(driver)
    driver.add("a", prompt=16, pooling=LAST)
    vectors.run()
    assert vectors.last("a").vector == b"a"
    with pytest.raises(ContextLengthExceeded, match="17 tokens are more than the model's context of 16"):
        driver.add("b", prompt=17, pooling=LAST)
    small = Driver(num_blocks=4, max_model_len=100)
    with pytest.raises(InvalidRequest, match="has room for 12"):
        small.add("c", prompt=13, pooling=LAST)


def test_what_is_no_number_ends_it_and_its_blocks_are_forgotten() -> None:
    driver = Driver()
    vectors = Vectors(driver)
    tokens = unique_tokens("t", 10)
    driver.add("a", prompt=tokens, pooling=MEAN)
    plan = driver.schedule()
    driver.model.execute(plan)
    (update,) = driver.book(plan, ModelOutput({}, errors={"a": InvalidLogits("no number")}))
    assert update.finish is FinishReason.ERROR
    driver.add("text", prompt=tokens, max_tokens=1)
    vectors.run()
    assert vectors.last("text").cached_tokens == 0


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(st.sampled_from([None, LAST, MEAN, CLS]), min_size=1, max_size=8),
    lengths=st.lists(st.integers(1, 30), min_size=8, max_size=8),
    budget=st.integers(1, 12),
    num_blocks=st.integers(10, 40),
    shared=st.booleans(),
)
def test_any_mixture_ends_with_every_token_seen_once(
    kinds: list[Pooling | None], lengths: list[int], budget: int, num_blocks: int, shared: bool
) -> None:
    driver = Driver(num_blocks=num_blocks, max_num_batched_tokens=budget)
    vectors = Vectors(driver)
    for index, kind in enumerate(kinds):
        tokens = unique_tokens("same" if shared else f"r{index}", lengths[index])
        driver.add(f"r{index}", prompt=tokens, max_tokens=3, pooling=kind)
    vectors.run()
    for index, kind in enumerate(kinds):
        name, length = f"r{index}", lengths[index]
        if kind is None:
            assert len(driver.outputs[name]) == 3
        elif kind is LAST:
            assert vectors.made[name][-1] == length - 1
        else:
            assert vectors.made[name] == list(range(length))
    assert driver.free_blocks == num_blocks - 1

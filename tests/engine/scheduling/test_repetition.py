"""An answer that repeats itself ends, wherever its tokens came from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.scheduling.output import ModelOutput
from tandem.engine.scheduling.results import repeats
from tandem.wire.sampling import FinishReason, RepetitionDetection, SamplingParams
from tests.engine.scheduling.driving import Driver

WANTED = RepetitionDetection(max_pattern_size=3, min_pattern_size=1, min_count=3)


def by_definition(output: list[int], wanted: RepetitionDetection) -> bool:
    for size in range(wanted.min_pattern_size, wanted.max_pattern_size + 1):
        end = output[-size * wanted.min_count :]
        if len(end) == size * wanted.min_count and end == end[:size] * wanted.min_count:
            return True
    return False


@given(
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
    output=st.lists(st.integers(0, 1), min_size=1, max_size=24),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    count=st.integers(2, 5),
)
def test_it_is_found_where_the_output_alone_has_it(
    prompt: list[int], output: list[int], sizes: tuple[int, int], count: int
) -> None:
    wanted = RepetitionDetection(max(sizes), min(sizes), count)
    assert repeats(prompt + output, len(output), wanted) == by_definition(output, wanted)


def said(driver: Driver, tokens: list[int], drafts: int = 0) -> tuple[list[int], FinishReason | None]:
    """What the request keeps when the model samples these tokens, one a step, or with drafts; and how it ended."""
    kept: list[int] = []
    finish: FinishReason | None = None
    while tokens and "a" in driver.scheduler.requests:
        count = 1 + (drafts if kept else 0)
        now, tokens = tokens[:count], tokens[count:]
        step = driver.schedule()
        now = now[: 1 + len(step.spec_token_ids.get("a", ()))]
        proposal = {"a": tokens[:drafts]} if drafts and tokens else {}
        for update in driver.book(step, ModelOutput({"a": now}, draft_token_ids=proposal)):
            kept += update.token_ids
            finish = update.finish
    return kept, finish


@pytest.mark.parametrize("drafts", [0, 2])
def test_the_answer_ends_with_the_last_of_them(drafts: int) -> None:
    driver = Driver()
    driver.add("a", sampling=SamplingParams(max_tokens=40, repetition_detection=WANTED))
    assert said(driver, [5, 6, 7, 8, 7, 8, 7, 8, 7, 8, 7, 8], drafts) == ([5, 6, 7, 8, 7, 8, 7, 8], FinishReason.STOP)


def test_not_before_the_fewest_tokens_and_not_where_it_is_not_asked_for() -> None:
    driver = Driver()
    driver.add("a", sampling=SamplingParams(max_tokens=40, min_tokens=7, repetition_detection=WANTED))
    assert said(driver, [5] * 12) == ([5] * 7, FinishReason.STOP)
    other = Driver()
    other.add("a", max_tokens=12)
    assert said(other, [5] * 12) == ([5] * 12, FinishReason.LENGTH)


def test_tokens_that_another_node_said_count() -> None:
    driver = Driver()
    sampling = SamplingParams(max_tokens=40, repetition_detection=WANTED)
    driver.add("a", sampling=sampling, output_token_ids=[7, 8, 7, 8, 7])
    assert said(driver, [8, 7, 8]) == ([8], FinishReason.STOP)

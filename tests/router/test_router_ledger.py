from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.api.sequence import SequenceSpec
from tandem.base.errors import InternalError
from tandem.router.dispatch.ledger import MergedChunk, RequestTimings, TokenLedger
from tandem.router.metrics import RouterMetrics
from tandem.router.recent import parts_of
from tandem.wire.requests import RequestFacts, TokenChunk
from tandem.wire.sampling import FinishReason, SamplingParams
from tests.router.fake_node import fake_logprobs


def chunk(start: int, ids: list[int], *, logprobs: bool = False, finish: FinishReason | None = None) -> TokenChunk:
    found = [fake_logprobs(token, 0) for token in ids] if logprobs else None
    return TokenChunk("r", start, ids, logprobs=found, finish=finish)


def test_the_first_token_is_reported_by_both_nodes_and_counted_once() -> None:
    ledger = TokenLedger(wants_logprobs=False)
    assert ledger.accept(chunk(0, [7], finish=FinishReason.HANDOFF)) is MergedChunk.NEWS
    assert ledger.finish is None
    ledger.accept(chunk(0, [7]))
    ledger.accept(chunk(1, [8, 9], finish=FinishReason.LENGTH))
    assert ledger.tokens == [7, 8, 9]
    assert ledger.finish is FinishReason.LENGTH


def test_the_first_report_of_a_token_counts_and_what_goes_on_from_another_one_is_dropped() -> None:
    ledger = TokenLedger(wants_logprobs=False)
    ledger.accept(chunk(0, [7, 8]))
    assert ledger.accept(chunk(1, [9, 10])) is MergedChunk.DIFFERS
    assert ledger.tokens == [7, 8]
    assert ledger.accept(chunk(1, [9, 10]), may_differ=True) is MergedChunk.NEWS
    assert ledger.tokens == [7, 8, 10]


def test_a_negative_index_is_an_error() -> None:
    with pytest.raises(InternalError, match="index -1"):
        TokenLedger(wants_logprobs=False).accept(chunk(-1, [9]))


def test_what_was_reported_without_a_gap_counts_what_is_held() -> None:
    ledger = TokenLedger(wants_logprobs=True)
    ledger.accept(chunk(0, [7]))
    ledger.accept(chunk(1, [8, 9], logprobs=True))
    ledger.accept(chunk(5, [1], logprobs=True))
    assert (ledger.tokens, ledger.reported) == ([], 3)


def test_a_report_without_logprobs_waits_for_the_one_with() -> None:
    ledger = TokenLedger(wants_logprobs=True)
    assert ledger.accept(chunk(0, [7])) is MergedChunk.HELD
    assert ledger.accept(chunk(1, [8], logprobs=True, finish=FinishReason.LENGTH)) is MergedChunk.HELD
    assert ledger.tokens == []
    assert ledger.finish is None  # the end is not the end while something before it is missing
    assert ledger.waiting
    assert ledger.accept(chunk(0, [7], logprobs=True)) is MergedChunk.NEWS
    assert ledger.tokens == [7, 8]
    assert [found.token_id for found in ledger.logprobs] == [7, 8]
    assert ledger.finish is FinishReason.LENGTH
    assert not ledger.waiting


def test_nothing_that_an_attempt_left_waiting_goes_into_what_the_next_one_reports() -> None:
    ledger = TokenLedger(wants_logprobs=False)
    ledger.accept(chunk(0, [7]))
    assert ledger.accept(chunk(3, [1, 2], finish=FinishReason.LENGTH)) is MergedChunk.HELD
    ledger.drop_held()
    assert not ledger.waiting
    assert ledger.accept(chunk(1, [8, 9])) is MergedChunk.NEWS
    assert (ledger.tokens, ledger.finish) == ([7, 8, 9], None)


def test_a_held_report_that_disagrees_is_found_when_its_turn_comes() -> None:
    ledger = TokenLedger(wants_logprobs=True)
    ledger.accept(chunk(0, [6]))
    assert ledger.accept(chunk(0, [7], logprobs=True)) is MergedChunk.DIFFERS
    assert ledger.tokens == [7]


@given(tokens=st.lists(st.integers(0, 100), min_size=1, max_size=12), wants_logprobs=st.booleans(), data=st.data())
def test_any_order_of_overlapping_reports_gives_the_output(
    tokens: list[int], wants_logprobs: bool, data: st.DataObject
) -> None:
    chunks: list[TokenChunk] = []
    at = 0
    while at < len(tokens):
        begin = data.draw(st.integers(0, at))
        end = data.draw(st.integers(at + 1, len(tokens)))
        finish = FinishReason.STOP if end == len(tokens) else None
        chunks.append(chunk(begin, tokens[begin:end], logprobs=wants_logprobs, finish=finish))
        at = end
    chunks.append(chunk(0, tokens[:1]))  # the decode node's word of the first token
    ledger = TokenLedger(wants_logprobs=wants_logprobs)
    for one in data.draw(st.permutations(chunks)):
        ledger.accept(one)
        assert ledger.tokens == tokens[: len(ledger.tokens)]
        assert not wants_logprobs or len(ledger.logprobs) == len(ledger.tokens)
    assert ledger.tokens == tokens
    assert ledger.finish is FinishReason.STOP
    assert not ledger.waiting or wants_logprobs


def test_each_part_of_a_requests_time_is_what_it_took() -> None:
    now = 100.0
    facts = RequestFacts(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=9))
    timings = RequestTimings(RouterMetrics(), lambda: now, SequenceSpec("r", facts, 999.0, arrived=97.0), came=98.0)
    timings.submitted(100.0)
    timings.submitted(104.0)  # again, of another node
    timings.node_wait_s, timings.handover_s = 2.0, 0.5
    for now, count in ((110.0, 1), (111.0, 2), (115.0, 2)):
        assert timings.tokens(count) == now
    now = 116.0
    account = timings.account(0.0, FinishReason.STOP, 5, None, 1)
    assert [seconds for _, seconds in parts_of(account)] == [1.0, 2.0, 2.0, 8.0, 0.5, 5.5]
    assert account.longest_gap_s == 4.0
    assert account.total_s == 116.0 - 97.0

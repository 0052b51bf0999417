"""The live requests' deadlines and the kept background answers stay right, in whatever order events come."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import Cancelled, NodeLost, Unavailable
from tandem.node.answers import KeptAnswers
from tandem.node.config import AnswersConfig
from tandem.node.requests import LiveRequests, keeps_here, writes_states_here
from tandem.wire.nodes import PeerAddress
from tandem.wire.requests import Follow, KeepAnswer, KVTransferParams, Submit, TokenChunk, TransferRole
from tandem.wire.sampling import FinishReason, SamplingParams

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 9), st.integers(1, 50)),
        st.tuples(st.just("end"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("pass"), st.just(0), st.integers(1, 20)),
    ),
    max_size=60,
)


def submit(name: str, timeout_s: float, reply_to: str = "router") -> Submit:
    return Submit(name, reply_to, timeout_s, prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1))


@given(STEPS)
def test_each_request_that_is_late_is_named_once_and_no_other(steps: list[tuple[str, int, int]]) -> None:
    live, now, deadlines = LiveRequests(), 0.0, dict[str, float]()
    for kind, number, amount in steps:
        name = str(number)
        if kind == "begin" and name not in deadlines:
            live.begin(submit(name, amount), now)
            deadlines[name] = now + amount
        elif kind == "end":
            assert (live.end(name) is not None) == (deadlines.pop(name, None) is not None)
        elif kind == "pass":
            due = live.seconds_until_due(now)
            assert due == (min(deadlines.values()) - now if deadlines else None)
            now += amount
            late = []
            for request in live.overdue(now):
                late.append(request.submit.request_id)
                live.end(request.submit.request_id)
            assert sorted(late) == sorted(name for name, deadline in deadlines.items() if deadline <= now)
            for name in late:
                del deadlines[name]
        assert {request.submit.request_id for request in live} == set(deadlines)


def test_a_request_has_one_owner() -> None:
    live = LiveRequests()
    live.begin(submit("a", 1, "one"), 0.0)
    live.begin(submit("b", 1, "two"), 0.0)
    assert live.is_owner("a", "one")
    assert not live.is_owner("a", "two")
    assert not live.is_owner("c", "one")
    assert [request.submit.request_id for request in live.of_router("two")] == ["b"]


def test_deadlines_of_requests_that_ended_do_not_pile_up() -> None:
    live = LiveRequests()
    live.begin(submit("lasts", 50_000), 0.0)
    tracemalloc.start()
    for index in range(10_000):
        live.begin(submit(str(index), 1800), float(index))
        live.end(str(index))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 100_000
    assert [request.submit.request_id for request in live.overdue(50_000.0)] == ["lasts"]


ROUTER, OTHER = "tcp://router:1", "tcp://router:2"


class Kept:
    def __init__(self, **limits: float) -> None:
        self.now = 0.0
        self.sent: list[tuple[str, TokenChunk]] = []
        self.answers = KeptAnswers(
            AnswersConfig(**limits),  # type: ignore[arg-type]
            lambda reply_to, chunks: self.sent.extend((reply_to, chunk) for chunk in chunks),
            lambda: self.now,
        )

    def begin(self, answer_id: str = "a", attempt: int = 1, had: int = 0, note: bytes = b"note") -> str:
        request_id = f"{answer_id}-{attempt}"
        self.answers.begin(
            Submit(request_id, ROUTER, 60.0, prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=99), output_token_ids=list(range(had)), keep=KeepAnswer(answer_id, attempt, note))
        )  # fmt: skip
        return request_id

    def follow(self, answer_id: str = "a", after: int = 0, follower: str = "f") -> None:
        self.answers.follow(Follow(OTHER, follower, answer_id, after))

    def tokens(self, follower: str = "f") -> list[int]:
        """The follower's chunks, merged as a router's ledger merges them."""
        merged: list[int] = []
        for _, chunk in self.sent:
            if chunk.request_id == follower:
                assert chunk.start <= len(merged), "a gap"
                merged[chunk.start :] = chunk.token_ids
        return merged


def chunk(request_id: str, start: int, tokens: list[int], finish: FinishReason | None = None) -> TokenChunk:
    return TokenChunk(request_id, start, tokens, finish=finish)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.data(), st.integers(0, 3), st.booleans())
def test_a_follower_gets_every_token_once_it_asks_whenever_it_does(
    steps: list[int], data: st.DataObject, had: int, asks_again: bool
) -> None:
    kept = Kept()
    request_id = kept.begin(had=had)
    joins = data.draw(st.integers(0, len(steps)))
    total = had + sum(steps)
    at = had
    for index, step in enumerate(steps):
        if index == joins:
            kept.follow(after=0)
            if asks_again:
                kept.follow(after=data.draw(st.integers(0, at)))
        last = index == len(steps) - 1
        kept.answers.add(chunk(request_id, at, list(range(at, at + step)), FinishReason.LENGTH if last else None))
        at += step
    if joins == len(steps):
        kept.follow(after=0)
    assert kept.tokens() == list(range(total))
    assert kept.sent[-1][1].finish is FinishReason.LENGTH
    assert all(reply_to == OTHER for reply_to, _ in kept.sent)


def test_it_is_found_until_its_time_is_over() -> None:
    kept = Kept(kept_s=10.0)
    request_id = kept.begin()
    assert kept.answers.recall("a") == (KeepAnswer("a", 1, b"note"), False)
    kept.now = 100.0  # the answer is still in progress
    assert kept.answers.recall("a")[0] is not None
    kept.answers.add(chunk(request_id, 0, [7], FinishReason.STOP))
    kept.now = 109.0
    assert kept.answers.recall("a")[0] is not None
    kept.now = 111.0
    assert kept.answers.recall("a") == (None, False)
    kept.follow()
    assert kept.sent[-1][1].error is not None
    assert isinstance(kept.sent[-1][1].error.to_exception(), Unavailable)


def test_an_end_that_is_none_of_its_own_is_told_to_followers_and_kept() -> None:
    kept = Kept()
    request_id = kept.begin()
    kept.follow()
    kept.answers.add(chunk(request_id, 0, [0, 1]))
    kept.answers.end(request_id, Cancelled("the response was cancelled"))
    assert kept.answers.recall("a")[1]
    kept.follow(follower="late")
    assert kept.tokens() == kept.tokens("late") == [0, 1]
    assert kept.sent[-1][1].error is not None
    assert isinstance(kept.sent[-1][1].error.to_exception(), Cancelled)


def test_the_last_attempt_counts_and_the_followers_of_the_one_before_look_again() -> None:
    kept = Kept()
    kept.begin(attempt=1)
    kept.follow()
    second = kept.begin(attempt=3, had=2)
    assert kept.sent[-1][1].error is not None
    assert isinstance(kept.sent[-1][1].error.to_exception(), NodeLost)
    assert kept.answers.recall("a")[0] == KeepAnswer("a", 3, b"note")
    assert kept.answers.request_of("a") == second
    with pytest.raises(Unavailable):
        kept.begin(attempt=2)


def test_the_oldest_that_ended_make_room_and_what_is_being_made_never_does() -> None:
    kept = Kept(kept_bytes=5_000)
    for name in "abc":
        request_id = kept.begin(name)
        kept.answers.add(chunk(request_id, 0, [1], FinishReason.LENGTH))
    for name in "de":
        kept.begin(name, note=bytes(500))
    assert [name for name in "abcde" if kept.answers.recall(name)[0]] == ["c", "d", "e"]
    kept.begin("f", note=bytes(500))
    with pytest.raises(Unavailable, match=r"take up the 5000 bytes for them"):
        kept.begin("g", note=bytes(500))
    assert kept.answers.size <= 5_000
    assert kept.answers.request_of("g") is None


def test_a_follower_that_goes_away_is_told_no_more() -> None:
    kept = Kept()
    request_id = kept.begin()
    kept.follow(follower="one")
    kept.follow(follower="two")
    kept.answers.cancelled(["one", "unknown"])
    kept.sent.clear()
    kept.answers.add(chunk(request_id, 0, [1]))
    assert [told.request_id for _, told in kept.sent] == ["two"]
    kept.answers.router_lost(OTHER)
    kept.answers.add(chunk(request_id, 1, [2]))
    assert len(kept.sent) == 1


@pytest.mark.parametrize("role", list(TransferRole))
def test_of_a_pair_the_prefill_node_writes_hidden_states_and_the_decode_node_keeps_the_answer(
    role: TransferRole,
) -> None:
    transfer = KVTransferParams("t", role, PeerAddress("p0", 1, "tcp://peer:1"))
    sampling = SamplingParams(hidden_states="x")
    asked = msgspec.structs.replace(
        submit("r", 60.0), transfer=transfer, keep=KeepAnswer("a", 1, b""), sampling=sampling
    )
    assert writes_states_here(asked) == (role is TransferRole.PRODUCE)
    assert keeps_here(asked) == (role is TransferRole.CONSUME)
    assert not keeps_here(submit("plain", 60.0))

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ConfigurationError
from tandem.loadgen.answers import EventSplitter
from tandem.loadgen.api import Api, ApiEndpoint, RequestShape
from tandem.loadgen.connections import Address, HttpClient
from tandem.loadgen.http1 import MalformedResponse, ResponseParser
from tandem.loadgen.load import LoadStream, poisson
from tandem.loadgen.traces import TraceRow, read_trace, replay
from tandem.loadgen.vocabulary import GuessedVocabulary, IdVocabulary, TextVocabulary, Vocabulary, words_for
from tandem.loadgen.workload import Lengths, Session, SessionTurn, multi_turn, random_prompts, shared_prefix, single
from tests.loadgen.fake_server import Exchange, FakeServer, complete, serving
from tests.loadgen.made_tokenizers import byte_level, sentencepiece, shared_beginning


def sessions(count: int) -> list[Session]:
    return [single(f"The {index}", 2, 2) for index in range(count)]


def run_load(
    answer: Callable[[Exchange], Awaitable[None]],
    asked: Sequence[Session],
    *,
    shape: RequestShape | None = None,
    concurrency: int | None = None,
    arrivals: Sequence[float] | None = None,
    during: Callable[[LoadStream, FakeServer], Awaitable[None]] | None = None,
) -> tuple[LoadStream, FakeServer]:
    async def run() -> tuple[LoadStream, FakeServer]:
        async with serving(answer) as server, HttpClient(Address.of_url(server.url)) as http:
            api = Api(http, shape or RequestShape("smol"))
            load = LoadStream("test", api, asked, concurrency=concurrency, arrivals=arrivals)
            async with asyncio.timeout(20), asyncio.TaskGroup() as group:
                group.create_task(load.run())
                if during is not None:
                    group.create_task(during(load, server))
        return load, server

    return asyncio.run(run())


class Gate:
    """Holds answers back, and counts who waits."""

    def __init__(self) -> None:
        self.waiting = 0
        self.most = 0
        self._changed = asyncio.Condition()
        self._open = 0

    async def answer(self, exchange: Exchange) -> None:
        async with self._changed:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._open > 0)
            self._open -= 1
            self.waiting -= 1
        await complete(exchange)

    async def until_waiting(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.waiting >= count)

    async def let_through(self, count: int) -> None:
        async with self._changed:
            self._open += count
            self._changed.notify_all()


def test_users_each_wait_for_their_answer() -> None:
    gate = Gate()

    async def during(load: LoadStream, server: FakeServer) -> None:
        await gate.until_waiting(3)
        assert len(load.active) == 3
        await gate.let_through(1)
        await gate.until_waiting(3)  # the free user asks again
        await gate.let_through(6)

    load, _ = run_load(gate.answer, sessions(7), concurrency=3, during=during)
    assert gate.most == 3
    assert len(load.timelines) == 7
    assert all(timeline.succeeded for timeline in load.timelines)


def test_without_a_limit_nobody_waits_for_an_answer_and_requests_are_sent_at_their_times() -> None:
    gate = Gate()

    async def during(load: LoadStream, server: FakeServer) -> None:
        await gate.until_waiting(5)
        await gate.let_through(5)

    arrivals = [0.0, 0.001, 0.002, 0.02, 0.05]
    load, _ = run_load(gate.answer, sessions(5), arrivals=arrivals, during=during)
    sent = sorted(timeline.sent_at - load.began_at for timeline in load.timelines)
    assert all(at >= meant for at, meant in zip(sent, arrivals, strict=True))
    assert load.duration_s >= 0.05


def test_a_stopped_load_sends_nothing_more_and_waits_for_what_it_sent() -> None:
    gate = Gate()

    async def during(load: LoadStream, server: FakeServer) -> None:
        await gate.until_waiting(2)
        load.stop()
        await gate.let_through(2)

    load, server = run_load(gate.answer, sessions(50), concurrency=2, during=during)
    assert len(server.requests) == 2
    assert all(timeline.succeeded for timeline in load.timelines)


def test_a_stop_does_not_wait_for_the_next_arrival() -> None:
    async def during(load: LoadStream, server: FakeServer) -> None:
        load.stop()

    load, _ = run_load(complete, sessions(2), arrivals=[0.0, 3600.0], during=during)
    assert len(load.timelines) <= 1


def conversation() -> Session:
    return Session((SessionTurn("The one", 2, 1), SessionTurn(" two", 1, 1), SessionTurn(" three", 1, 1)))


async def reply(exchange: Exchange) -> None:
    await exchange.begin()
    if "messages" in exchange.body:
        await exchange.event({"choices": [{"index": 0, "delta": {"content": " yes"}}]})
    else:
        await exchange.token(" yes")
    await exchange.end()


def test_a_conversation_goes_on_from_its_answers() -> None:
    load, server = run_load(reply, [conversation()], concurrency=1)
    assert load.total == 3
    assert [request.body["prompt"] for request in server.requests] == [
        "The one",
        "The one yes two",
        "The one yes two yes three",
    ]


def test_a_conversation_in_chat_is_a_list_of_messages() -> None:
    _, server = run_load(reply, [conversation()], shape=RequestShape("smol", endpoint=ApiEndpoint.CHAT))
    assert server.requests[2].body["messages"] == [
        {"role": "user", "content": "The one"},
        {"role": "assistant", "content": " yes"},
        {"role": "user", "content": " two"},
        {"role": "assistant", "content": " yes"},
        {"role": "user", "content": " three"},
    ]


def test_a_failed_turn_ends_its_conversation_and_no_other() -> None:
    async def answer(exchange: Exchange) -> None:
        if exchange.body["prompt"].startswith("The bad"):
            await exchange.respond(500, {})
        else:
            await reply(exchange)

    bad = Session((SessionTurn("The bad", 2, 1), SessionTurn(" two", 1, 1)))
    load, server = run_load(answer, [bad, conversation()], concurrency=1)
    assert len(server.requests) == 4
    assert [timeline.succeeded for timeline in load.timelines] == [False, True, True, True]


@pytest.mark.parametrize("concurrency", [0, -1])
async def test_at_least_one_user_is_needed(concurrency: int) -> None:
    with pytest.raises(ConfigurationError):
        LoadStream("test", Api(HttpClient(Address.of_url("localhost")), RequestShape("m")), [], concurrency=concurrency)


@given(st.integers(1, 300), st.floats(0.01, 1000), st.integers(0, 2**32))
def test_arrivals_are_in_order_and_offer_exactly_the_rate(count: int, rate: float, seed: int) -> None:
    times = poisson(np.random.default_rng(seed), count, rate)
    assert len(times) == count
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] == pytest.approx(count / rate)


def test_gaps_are_exponential_as_a_poisson_process_has_them_and_the_same_with_the_same_seed() -> None:
    first, second, other = (poisson(np.random.default_rng(seed), 20, 2.0) for seed in (1, 1, 2))
    assert first == second
    assert first != other
    gaps = np.diff(poisson(np.random.default_rng(7), 20_000, 10.0))
    assert gaps.mean() == pytest.approx(0.1, rel=0.03)
    assert gaps.std() == pytest.approx(0.1, rel=0.03)  # as large as the mean: neither bursts nor a metronome
    assert np.mean(gaps > 0.1) == pytest.approx(np.exp(-1), rel=0.03)


def test_a_rate_above_zero_is_needed() -> None:
    assert poisson(np.random.default_rng(0), 0, 1.0) == []
    for rate in (0.0, -1.0):
        with pytest.raises(ConfigurationError):
            poisson(np.random.default_rng(0), 3, rate)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted({min(cut, len(data)) for cut in cuts}), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def chunked(chunks: list[bytes]) -> bytes:
    body = b"".join(b"%X;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return HEAD + b"Transfer-Encoding: Chunked\r\n\r\n" + body + b"0\r\nTrailer: x\r\n\r\n"


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(0, 400), max_size=12))
def test_a_body_is_the_same_however_it_arrives(chunks: list[bytes], cuts: list[int]) -> None:
    content = b"".join(chunks)
    for raw in (chunked(chunks), HEAD + b"content-length: %d\r\n\r\n" % len(content) + content):
        parser = ResponseParser()
        assert b"".join(parser.feed(piece) for piece in pieces_of(raw, cuts)) == content
        assert (parser.complete, parser.reusable, parser.status) == (True, True, 200)


def test_a_chunk_is_passed_on_as_soon_as_it_is_whole() -> None:
    parser = ResponseParser()
    parser.feed(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    assert parser.feed(b"5\r\nhel") == b""
    assert parser.feed(b"lo\r\n") == b"hello"
    assert not parser.complete


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.0 200 OK\r\n\r\nhel") == b"hel"
    assert parser.feed(b"lo") == b"lo"
    assert not parser.complete
    assert parser.end_of_stream()
    assert not parser.reusable
    early = ResponseParser()
    early.feed(HEAD + b"content-length: 5\r\n\r\nhel")
    assert not early.end_of_stream()


def test_an_interim_response_is_not_the_answer_and_a_server_that_says_close_is_not_asked_again() -> None:
    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert parser.status == 0
    parser.feed(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert (parser.status, parser.complete) == (204, True)
    for header in (b"connection: close\r\n", b"Connection: Close\r\n"):
        parser = ResponseParser()
        parser.feed(HEAD + header + b"content-length: 0\r\n\r\n")
        assert (parser.complete, parser.reusable) == (True, False)


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-server\r\n\r\n",
        b"HTTP/1.1 ok\r\n\r\n",
        HEAD + b"content-length: many\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n-20\r\nabcdefghijklmnop",
        b"x" * 70_000,
    ],
)
def test_what_is_not_http_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedResponse):
        ResponseParser().feed(raw)


@given(st.lists(st.integers(0, 200), max_size=10))
def test_events_are_the_same_however_they_arrive(cuts: list[int]) -> None:
    raw = (
        b': keep-alive\n\ndata: {"a": 1}\n\nevent: x\nid: 3\ndata: two\ndata:lines\n\n'
        b"\n\ndata: crlf\r\n\r\ndata: [DONE]\n\ndata: unfinished"
    )
    splitter = EventSplitter()
    payloads = [payload for piece in pieces_of(raw, cuts) for payload in splitter.feed(piece)]
    assert payloads == [b'{"a": 1}', b"two\nlines", b"crlf", b"[DONE]"]


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()
TEXT = {backend: TextVocabulary(backend) for backend in (BYTE_LEVEL, SENTENCEPIECE)}
MAKERS = pytest.mark.parametrize("backend", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "sentencepiece"])


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def counted(backend: tokenizers.Tokenizer, prompt: object) -> int:
    """As a server counts: with what its tokenizer adds."""
    assert isinstance(prompt, str)
    return len(backend.encode(prompt).ids)


@MAKERS
@pytest.mark.parametrize("tokens", [6, 17, 512])
def test_a_prompt_as_text_has_exactly_the_tokens_asked_for(backend: tokenizers.Tokenizer, tokens: int) -> None:
    vocabulary = TextVocabulary(backend)
    prompt = vocabulary.prompt(vocabulary.draw(rng(), words_for(vocabulary, tokens)))
    assert counted(backend, prompt) == tokens


def test_a_prompt_as_ids_is_counted_by_nobody_else() -> None:
    vocabulary = IdVocabulary(SENTENCEPIECE)
    prompt = vocabulary.prompt(vocabulary.draw(rng(), words_for(vocabulary, 33)))
    assert len(prompt) == 33
    assert all(SENTENCEPIECE.id_to_token(token).startswith("▁") for token in prompt)


def test_a_tokenizer_without_whole_words_and_a_prompt_shorter_than_what_every_prompt_has_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least"):
        words_for(TextVocabulary(SENTENCEPIECE), 1)
    letters = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    with pytest.raises(ConfigurationError, match="words of one token"):
        TextVocabulary(letters)


@MAKERS
@given(seed=st.integers(0, 1000), spread=st.floats(0, 0.9))
def test_lengths_stay_within_their_spread_and_are_what_the_prompts_have(
    backend: tokenizers.Tokenizer, seed: int, spread: float
) -> None:
    sessions = random_prompts(TEXT[backend], rng(seed), 3, Lengths(80, 20, spread))
    for session in sessions:
        (turn,) = session.turns
        assert counted(backend, turn.prompt) == turn.prompt_tokens
        assert int(80 * (1 - spread)) <= turn.prompt_tokens <= 80 * (1 + spread) + 1
        assert max(1, int(20 * (1 - spread))) <= turn.max_tokens <= 20 * (1 + spread) + 1


def test_the_same_seed_makes_the_same_prompts_and_random_ones_share_no_cache_block() -> None:
    vocabulary = TextVocabulary(BYTE_LEVEL)
    first, again, other = (random_prompts(vocabulary, rng(s), 4, Lengths(50, 5, 0.5)) for s in (1, 1, 2))
    assert first == again
    assert not {s.turns[0].prompt for s in first} & {s.turns[0].prompt for s in other}
    prompts = [s.turns[0].prompt for s in random_prompts(IdVocabulary(BYTE_LEVEL), rng(), 20, Lengths(64, 5))]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 20


@MAKERS
def test_shared_prefixes_are_shared_to_the_token_and_taken_in_turn(backend: tokenizers.Tokenizer) -> None:
    sessions = shared_prefix(TextVocabulary(backend), rng(), 6, Lengths(20, 5), prefix_tokens=100, prefixes=2)
    ids = [backend.encode(str(session.turns[0].prompt)).ids for session in sessions]
    assert [len(each) for each in ids] == [120] * 6
    assert len({tuple(each) for each in ids}) == 6
    assert len({tuple(each[:100]) for each in ids}) == 2
    assert ids[0][:100] == ids[2][:100] == ids[4][:100]
    assert shared_beginning(ids[0], ids[1]) < 16


@MAKERS
def test_a_conversation_grows_by_what_each_turn_adds(backend: tokenizers.Tokenizer) -> None:
    vocabulary = TextVocabulary(backend)
    (session,) = multi_turn(vocabulary, rng(), 1, Lengths(30, 5), turns=3, turn_tokens=12, think_s=0.5)
    first, second, third = session.turns
    assert counted(backend, first.prompt) == 30
    assert counted(backend, f"{first.prompt}{second.prompt}") == 42
    assert counted(backend, f"{first.prompt}{second.prompt}{third.prompt}") == 54
    assert (first.wait_s, second.wait_s, third.wait_s) == (0.0, 0.5, 0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda v: Lengths(0, 5),
        lambda v: Lengths(5, 0),
        lambda v: Lengths(5, 5, 1.0),
        lambda v: Lengths(5, 5, -0.1),
        lambda v: shared_prefix(v, rng(), 1, Lengths(5, 5), prefix_tokens=50, prefixes=0),
        lambda v: multi_turn(v, rng(), 1, Lengths(5, 5), turns=0, turn_tokens=5, think_s=0),
        lambda v: multi_turn(v, rng(), 1, Lengths(5, 5), turns=2, turn_tokens=0, think_s=0),
        lambda v: multi_turn(IdVocabulary(BYTE_LEVEL), rng(), 1, Lengths(30, 5), turns=2, turn_tokens=12, think_s=0),
    ],
)
def test_workloads_that_make_no_sense_are_refused(make: Callable[[Vocabulary], object]) -> None:
    with pytest.raises(ConfigurationError):
        make(GuessedVocabulary())


MOONCAKE = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 52, "hash_ids": [0, 1, 2]},
    {"timestamp": 3052, "input_length": 700, "output_length": 20, "hash_ids": [0, 3]},
    {"timestamp": 3010, "input_length": 40, "output_length": 1, "hash_ids": [4]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,110,27
"""


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in MOONCAKE) + "\n\n")
    return file


def test_a_mooncake_trace_begins_at_zero_and_is_in_order(mooncake: Path) -> None:
    rows = read_trace(mooncake)
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 0.010, 0.052])
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(1100, 52), (40, 1), (700, 20)]
    assert rows[0].blocks == (0, 1, 2)
    assert len(read_trace(mooncake, limit=2)) == 2


def test_an_azure_trace_begins_at_zero_and_has_no_blocks(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(AZURE)
    first, second = read_trace(file)
    assert first == TraceRow(0.0, 4808, 10)
    assert second.arrival_s == pytest.approx(0.052)
    assert (second.input_tokens, second.output_tokens, second.blocks) == (110, 27, ())
    file.write_text(
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:01.009930+00:00,2399,6\n"
    )
    assert [row.arrival_s for row in read_trace(file)] == pytest.approx([0.0, 1.0]), "with a time zone and a mark"


def test_replayed_prompts_have_the_recorded_lengths_and_share_what_was_shared(mooncake: Path) -> None:
    backend = byte_level()
    sessions = replay(read_trace(mooncake), TextVocabulary(backend), seed=1)
    turns = [session.turns[0] for session in sessions]
    long, short, other = (backend.encode(str(turn.prompt)).ids for turn in turns)
    assert [len(long), len(short), len(other)] == [1100, 40, 700]
    assert [turn.max_tokens for turn in turns] == [52, 1, 20]
    overhead = TextVocabulary(backend).overhead
    assert 512 <= shared_beginning(long, other) < 512 + overhead + 16
    assert shared_beginning(long, short) < 16
    assert [session.arrival_s for session in sessions] == pytest.approx([0.0, 0.010, 0.052])


def test_scaled_down_the_shared_part_shrinks_with_the_rest(mooncake: Path) -> None:
    sessions = replay(read_trace(mooncake), IdVocabulary(byte_level()), seed=1, speed=2.0, scale=0.125)
    long, short, other = (session.turns[0] for session in sessions)
    assert [long.prompt_tokens, short.prompt_tokens, other.prompt_tokens] == [138, 5, 88]
    assert 64 <= shared_beginning(long.prompt, other.prompt) < 72
    assert sessions[2].arrival_s == pytest.approx(0.026)


def test_without_blocks_nothing_is_shared() -> None:
    rows = [TraceRow(0.0, 100, 5), TraceRow(1.0, 100, 5)]
    first, second = (s.turns[0].prompt for s in replay(rows, IdVocabulary(byte_level()), seed=1))
    assert first[:16] != second[:16]
    for speed, scale in ((0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)):
        with pytest.raises(ConfigurationError):
            replay(rows, IdVocabulary(byte_level()), 0, speed, scale)

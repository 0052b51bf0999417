"""Answers of any size are written in bounded pieces, and equal the answer written at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tandem.api.logprob_store import LogprobStore
from tandem.api.openai.answer import RawPieces, json_pieces
from tandem.api.openai.logprobs import LOWEST, chat_logprobs, completion_logprobs
from tandem.api.text.tokenizer import Tokenizer
from tandem.wire.sampling import TokenLogprobs

LONGEST_PIECE = 256 << 10

texts = st.text(st.characters(codec="utf-8"), max_size=40)
leaves = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts
)
bodies = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4))

logprobs = st.floats(allow_nan=False, max_value=0.0)
token_ids = st.integers(0, 399)
rows = st.lists(
    st.builds(
        TokenLogprobs, token_ids, logprobs, st.integers(1, 400), st.lists(st.tuples(token_ids, logprobs), max_size=4)
    ),
    max_size=6,
)


@given(bodies)
def test_json_in_pieces_is_json(body: Any) -> None:
    assert b"".join(json_pieces(body)) == msgspec.json.encode(body)


@given(st.lists(bodies, max_size=5))
def test_what_is_made_as_it_is_written_is_a_list(items: list[Any]) -> None:
    body = {"before": 1, "items": iter(items), "raw": RawPieces([b"[1,", b"2]"])}
    assert msgspec.json.decode(b"".join(json_pieces(body))) == {"before": 1, "items": items, "raw": [1, 2]}


def test_a_long_text_deep_in_a_list_is_cut() -> None:
    body = {"item": {"content": [1, {"type": "text", "text": "ä" * 1_000_000}]}, "other": ["b" * 100_000] * 3}
    pieces = list(json_pieces(body))
    assert msgspec.json.decode(b"".join(pieces)) == body
    assert max(map(len, pieces)) < LONGEST_PIECE


def test_long_texts_and_lists_are_cut() -> None:
    body = {"text": 'ä"\n' * 200_000, "ids": list(range(200_000))}
    pieces = list(json_pieces(body))
    assert max(map(len, pieces)) < LONGEST_PIECE
    assert msgspec.json.decode(b"".join(pieces)) == body


@given(rows, st.integers(0, 6), st.data())
def test_a_store_gives_back_what_it_got(found: list[TokenLogprobs], cut: int, data: st.DataObject) -> None:
    store = LogprobStore(found[:cut])
    store.extend(found[cut:])
    assert list(store) == found
    assert store[1:] == found[1:]
    count = data.draw(st.integers(0, len(found)))
    mean = sum(row.logprob for row in found[:count]) / max(1, count)
    assert store.mean(count) == mean or math.isclose(store.mean(count), mean)


@given(st.integers(0, 5000), st.lists(st.integers(0, 5000), max_size=4))
def test_a_store_forgets_its_beginning(size: int, marks: list[int]) -> None:
    found = [TokenLogprobs(at, -at / 2, 1, [(at + 1, -1.0)] * (at % 3)) for at in range(size)]
    store = LogprobStore(found[: size // 2])
    for mark in sorted(min(mark, size // 2) for mark in marks):
        store.forget(mark)
    store.extend(found[size // 2 :])
    last = max((min(mark, size // 2) for mark in marks), default=0)
    assert len(store) == size
    assert [store[at] for at in range(last, size)] == found[last:]


def test_a_token_with_twenty_alternatives_is_small() -> None:
    store = LogprobStore([TokenLogprobs(7, -1.0, 1, [(at, -float(at)) for at in range(20)])] * 1000)
    assert store.nbytes < 400 * 1000


def shown(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": max(LOWEST, logprob), "bytes": list(data)}


@given(found=rows, top=st.integers(0, 4))
def test_a_chats_logprobs(tokenizer: Tokenizer, found: list[TokenLogprobs], top: int) -> None:
    pieces = chat_logprobs(LogprobStore(found), range(len(found)), tokenizer, top)
    content = [
        {
            **shown(row.token_id, row.logprob, tokenizer),
            "top_logprobs": [shown(token_id, logprob, tokenizer) for token_id, logprob in row.top[:top]],
        }
        for row in found
    ]
    assert msgspec.json.decode(b"".join(pieces.pieces)) == {"content": content, "refusal": None}


@given(echoed=rows, found=rows, top=st.integers(0, 4))
def test_a_completions_logprobs(
    tokenizer: Tokenizer, echoed: list[TokenLogprobs], found: list[TokenLogprobs], top: int
) -> None:
    def text(token_id: int) -> str:
        return tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def best(row: TokenLogprobs) -> dict[str, float]:
        alternatives: dict[str, float] = {}
        for token_id, logprob in [*row.top[:top], (row.token_id, row.logprob)]:
            alternatives.setdefault(text(token_id), max(LOWEST, logprob))
        return alternatives

    prompt = [5, *(row.token_id for row in echoed)]
    offsets = list(range(100, 100 + len(found)))
    pieces = completion_logprobs(
        LogprobStore(found), range(len(found)), offsets, tokenizer, top, prompt, [None, *echoed]
    )
    answer = msgspec.json.decode(b"".join(pieces.pieces))
    every = [*echoed, *found]
    assert answer["tokens"] == [text(token_id) for token_id in (*prompt, *(row.token_id for row in found))]
    assert answer["token_logprobs"] == [None, *(max(LOWEST, row.logprob) for row in every)]
    assert answer["top_logprobs"] == [None, *map(best, every)]
    assert answer["text_offset"][len(prompt) :] == offsets
    assert answer["text_offset"][0] == 0


def test_pieces_are_made_one_by_one() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for index in range(3):
            made.append(index)
            yield index

    pieces = json_pieces({"items": items()})
    next(pieces), next(pieces)
    assert made == [0]
    assert b"".join(pieces).endswith(b"0,1,2]}")


def test_a_store_without_rows_forgets_nothing() -> None:
    store = LogprobStore()
    store.forget(5000)
    assert len(store) == 0

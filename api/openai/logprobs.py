"""Writes log-probabilities in the forms of chat and completions."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from tandem.api.logprob_store import LogprobStore
from tandem.api.openai.answer import RawPieces
from tandem.api.text.tokenizer import Tokenizer
from tandem.wire.sampling import TokenLogprobs

# Stands for minus infinity, which JSON does not have.
LOWEST = -9999.0

_TOKENS_OF_A_PIECE = 64
_REMEMBERED_TOKENS = 1 << 16

_encode = msgspec.json.Encoder().encode


class _TokenTexts:
    """Caches tokens' JSON, because an answer shows the same alternatives over and over. `as_ids`: a token's text is
    `token_id:5`, which tells tokens of the same text apart."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._as_ids = as_ids
        self._known: dict[int, tuple[str, str]] = {}

    def of(self, token_id: int) -> tuple[str, str]:
        """Returns the JSON of the token's text and of its list of bytes."""
        found = self._known.get(token_id)
        if found is None:
            data = self._token_bytes(token_id)
            shown = f"token_id:{token_id}" if self._as_ids else data.decode("utf-8", "replace")
            text = _encode(shown).decode()
            found = (text, _encode(list(data)).decode())
            if len(self._known) >= _REMEMBERED_TOKENS:
                self._known.clear()
            self._known[token_id] = found
        return found


_texts_of: weakref.WeakKeyDictionary[Tokenizer, dict[bool, _TokenTexts]] = weakref.WeakKeyDictionary()


def _texts(tokenizer: Tokenizer, *, as_ids: bool) -> _TokenTexts:
    both = _texts_of.setdefault(tokenizer, {})
    if as_ids not in both:
        both[as_ids] = _TokenTexts(tokenizer, as_ids=as_ids)
    return both[as_ids]


def _finite(logprob: float) -> float:
    return max(LOWEST, logprob)


def _shown(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def chat_logprobs(
    store: LogprobStore, tokens: range, tokenizer: Tokenizer, top: int, *, as_ids: bool = False
) -> RawPieces:
    return RawPieces(_chat_logprobs(store, tokens, _texts(tokenizer, as_ids=as_ids), top))


def _chat_logprobs(store: LogprobStore, tokens: range, texts: _TokenTexts, top: int) -> Iterator[bytes]:
    def entry(token_id: int, logprob: float) -> str:
        text, data = texts.of(token_id)
        return f'{{"token":{text},"logprob":{_finite(logprob)!r},"bytes":{data}'

    def token(index: int) -> str:
        ids, values = store.row(index)
        alternatives = "},".join(map(entry, ids[1 : top + 1], values[1 : top + 1]))
        return f'{entry(ids[0], values[0])},"top_logprobs":[{alternatives}{"}" if alternatives else ""}]}}'

    yield b'{"content":['
    yield from _columns(map(token, tokens))
    yield b'],"refusal":null}'


def _columns(items: Iterable[str]) -> Iterator[bytes]:
    """Joins items with commas, some at a time."""
    batch: list[str] = []
    before = ""
    for item in items:
        batch.append(item)
        if len(batch) == _TOKENS_OF_A_PIECE:
            yield (before + ",".join(batch)).encode()
            batch.clear()
            before = ","
    if batch:
        yield (before + ",".join(batch)).encode()


def completion_logprobs(
    store: LogprobStore,
    tokens: range,
    offsets: Sequence[int],
    tokenizer: Tokenizer,
    top: int,
    prompt: Sequence[int] = (),
    prompt_found: Sequence[TokenLogprobs | None] = (),
    *,
    as_ids: bool = False,
) -> RawPieces:
    """Writes a completion's log-probabilities. `prompt` is echoed; its first token has no log-probability,
    because nothing precedes it. `offsets`: where each output token begins in the text."""
    echoed = LogprobStore(found or TokenLogprobs(0, 0.0, 0) for found in prompt_found)
    known = [at < len(prompt_found) and prompt_found[at] is not None for at in range(len(prompt))]
    texts = _texts(tokenizer, as_ids=as_ids)
    return RawPieces(_completion_logprobs(store, tokens, offsets, tokenizer, texts, top, prompt, echoed, known))


def _completion_logprobs(
    store: LogprobStore,
    tokens: range,
    offsets: Sequence[int],
    tokenizer: Tokenizer,
    texts: _TokenTexts,
    top: int,
    prompt: Sequence[int],
    echoed: LogprobStore,
    known: Sequence[bool],
) -> Iterator[bytes]:
    def rows() -> Iterator[tuple[Sequence[int], Sequence[float]] | None]:
        for at, is_known in enumerate(known):
            yield echoed.row(at) if is_known else None
        for index in tokens:
            yield store.row(index)

    def names() -> Iterator[str]:
        for token_id in prompt:
            yield texts.of(token_id)[0]
        for index in tokens:
            yield texts.of(store.row(index)[0][0])[0]

    def best(row: tuple[Sequence[int], Sequence[float]] | None) -> str:
        """Writes the alternatives and the token itself. If two tokens have the same text, the likelier
        alternative is shown."""
        if row is None:
            return "null"
        ids, values = row
        shown: dict[str, float] = {}
        for at in (*range(1, min(top + 1, len(ids))), 0):
            shown.setdefault(texts.of(ids[at])[0], _finite(values[at]))
        return "{" + ",".join(f"{text}:{value!r}" for text, value in shown.items()) + "}"

    def places() -> Iterator[str]:
        detokenizer, offset = tokenizer.detokenizer(skip_special=False), 0
        for token_id in prompt:
            yield str(offset)
            offset += len(detokenizer.push((token_id,)))
        for index in tokens:
            yield str(offsets[index])

    yield b'{"tokens":['
    yield from _columns(names())
    yield b'],"token_logprobs":['
    yield from _columns("null" if row is None else repr(_finite(row[1][0])) for row in rows())
    yield b'],"top_logprobs":['
    yield from _columns(map(best, rows()))
    yield b'],"text_offset":['
    yield from _columns(places())
    yield b"]}"


def prompt_logprobs(
    prompt: Sequence[int], found: Sequence[TokenLogprobs | None], tokenizer: Tokenizer, top: int
) -> Iterator[dict[str, Any] | None]:
    """Yields, for each prompt token, the alternatives and the token itself, by id; None for the first
    token."""
    for at in range(len(prompt)):
        one = found[at] if at < len(found) else None
        if one is None:
            yield None
            continue
        ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(one.top[:top], 1)}
        ranked.setdefault(one.token_id, (one.logprob, one.rank))
        yield {
            str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": _shown(token_id, tokenizer)}
            for token_id, (logprob, rank) in ranked.items()
        }

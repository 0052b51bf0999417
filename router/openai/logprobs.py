"""Log-probabilities as the two endpoints show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.router.openai.choice import ShownToken
from tandem.router.text.tokenizer import Tokenizer
from tandem.wire.sampling import TokenLogprobs

# JSON has no minus infinity.
LOWEST = -9999.0


def _finite(logprob: float) -> float:
    return max(LOWEST, logprob)


def _shown(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def chat_logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}

    content = []
    for token in tokens:
        found = token.logprobs
        alternatives = [entry(token_id, logprob) for token_id, logprob in found.top[:top]]
        content.append({**entry(found.token_id, found.logprob), "top_logprobs": alternatives})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[ShownToken],
    tokenizer: Tokenizer,
    top: int,
    echoed: Sequence[tuple[int, TokenLogprobs | None]] = (),
) -> dict[str, Any]:
    """`echoed` are the prompt's tokens; the first of them has no logprob, because nothing stands before it."""
    texts: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    detokenizer, offset = tokenizer.detokenizer(skip_special=False), 0
    for token_id, found in echoed:
        texts.append(_shown(token_id, tokenizer))
        offsets.append(offset)
        offset += len(detokenizer.push((token_id,)))
        logprobs.append(None if found is None else _finite(found.logprob))
        tops.append(None if found is None else _top(found, tokenizer, top))
    for token in tokens:
        texts.append(_shown(token.logprobs.token_id, tokenizer))
        offsets.append(token.offset)
        logprobs.append(_finite(token.logprobs.logprob))
        tops.append(_top(token.logprobs, tokenizer, top))
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def prompt_logprobs(
    prompt: Sequence[int], found: Sequence[TokenLogprobs | None], tokenizer: Tokenizer, top: int
) -> list[dict[str, Any] | None]:
    """For each token of the prompt the alternatives and the token itself, by id. Nothing stands before the first."""
    shown: list[dict[str, Any] | None] = []
    for at in range(len(prompt)):
        one = found[at] if at < len(found) else None
        if one is None:
            shown.append(None)
            continue
        ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(one.top[:top], 1)}
        ranked.setdefault(one.token_id, (one.logprob, one.rank))
        shown.append(
            {
                str(token_id): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": _shown(token_id, tokenizer),
                }
                for token_id, (logprob, rank) in ranked.items()
            }
        )
    return shown


def _top(found: TokenLogprobs, tokenizer: Tokenizer, top: int) -> dict[str, float]:
    """The alternatives, and always the token that stands there."""
    shown: dict[str, float] = {}
    for token_id, logprob in [*found.top[:top], (found.token_id, found.logprob)]:
        shown.setdefault(_shown(token_id, tokenizer), _finite(logprob))
    return shown

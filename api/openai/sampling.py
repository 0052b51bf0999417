"""Turns a checked request into the sampling parameters that nodes get, and into the one grammar, or none,
that its fields make together, checked before any node computes. Rules that cross several fields are here.

A value that the request leaves out is the one that the model's makers recommend, or OpenAI's (`Defaults`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tandem.api.openai.fields import RepetitionFields, SamplingFields
from tandem.api.settings import ApiSettings, SamplingDefaults
from tandem.api.text.tokenizer import Tokenizer, read_json
from tandem.base.errors import ConfigurationError, InvalidRequest
from tandem.wire.requests import new_id
from tandem.wire.sampling import RepetitionDetection, SamplingParams

FILE = "generation_config.json"


class Defaults(msgspec.Struct, frozen=True):
    """OpenAI's defaults; parameters that OpenAI does not have are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None  # of an answer; a request may ask for more


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "max_new_tokens": (1, 2**31 - 1),
}


def defaults_of(config: ApiSettings) -> Defaults:
    """Returns the defaults to use. Raises ConfigurationError for a value that a request could not have
    either."""
    if config.sampling_defaults is SamplingDefaults.OPENAI:
        return Defaults()
    path = Path(config.tokenizer_path) / FILE
    declared = read_json(path)
    return Defaults(
        **{
            name: _in_range(path, name, value)
            for name, value in declared.items()
            if name in _RANGES and value is not None
        }
    )


def _in_range(path: Path, name: str, value: Any) -> Any:
    low, high = _RANGES[name]
    whole = name in ("top_k", "max_new_tokens")
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not low <= value <= high:
        raise ConfigurationError(
            f"{path}: {name} must be a {'whole ' if whole else ''}number from {low} to {high}, not {value!r}; "
            "router.sampling_defaults: openai ignores the file"
        )
    if name == "top_k":
        return max(0, value)
    return value if whole else float(value)


T = TypeVar("T")

_SEED_MASK = 2**63 - 1


class Sampled(msgspec.Struct, frozen=True):
    """What a plan has found out about a request's sampling, besides its fields."""

    logprobs: int | None
    prompt_logprobs: int | None
    grammar: str | None
    bad_words: list[list[int]]
    hidden_states: str | None


def sampling_params(
    request: SamplingFields, tokenizer: Tokenizer, defaults: Defaults, sampled: Sampled, *, max_tokens: int
) -> SamplingParams:
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens: must be at most the {max_tokens} tokens that may be generated, not {min_tokens}", "min_tokens"
        )
    if sampled.grammar is not None:
        _check_ends_with_grammar(request)
    stop_token_ids = request.stop_token_ids or []
    for token_id in stop_token_ids:
        if token_id >= tokenizer.vocab_size:
            raise InvalidRequest(
                f"stop_token_ids: {token_id} is outside the vocabulary of {tokenizer.vocab_size} tokens",
                "stop_token_ids",
            )
    seed = request.seed if request.seed is not None else int(new_id(), 16)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_first(request.temperature, defaults.temperature),
        top_p=_first(request.top_p, defaults.top_p),
        top_k=max(0, _first(request.top_k, defaults.top_k)),
        min_p=_first(request.min_p, defaults.min_p),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request.logit_bias, tokenizer.vocab_size),
        bad_words=sampled.bad_words,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        seed=seed & _SEED_MASK,
        logprobs=sampled.logprobs,
        prompt_logprobs=sampled.prompt_logprobs,
        grammar=sampled.grammar,
        repetition_detection=_repetition(request.repetition_detection),
        hidden_states=sampled.hidden_states,
    )


def _repetition(asked: RepetitionFields | None) -> RepetitionDetection | None:
    if asked is None:
        return None
    if asked.min_pattern_size > asked.max_pattern_size:
        raise InvalidRequest(
            f"repetition_detection: min_pattern_size is {asked.min_pattern_size}, and max_pattern_size must not be less than that: it is "
            f"{asked.max_pattern_size}",
            "repetition_detection",
        )
    return RepetitionDetection(asked.max_pattern_size, asked.min_pattern_size, asked.min_count)


def _first(asked: T | None, default: T) -> T:
    return default if asked is None else asked


def _check_ends_with_grammar(request: SamplingFields) -> None:
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request, name):
            raise InvalidRequest(f"{name}: an answer that follows a grammar ends where the grammar does", name)


def of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Returns the sampling of one choice. The choices of a request differ only by their seeds."""
    if index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) & _SEED_MASK)


def stop_strings(request: SamplingFields) -> list[str]:
    if request.stop is None:
        return []
    return [request.stop] if isinstance(request.stop, str) else request.stop


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    checked: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias: {key[:40]!r} must be a token id from 0 to {vocab_size - 1}", "logit_bias"
            )
        checked[int(key)] = value
    return checked


async def bad_word_ids(words: list[str] | None, tokenizer: Tokenizer) -> list[list[int]]:
    """Tokenizes each word twice, at the start of a text and after a space, because the model may write
    either."""
    if not words:
        return []
    texts = [text for word in words for text in (word, " " + word.lstrip())]
    sequences: list[list[int]] = []
    for token_ids in await tokenizer.encode_all_async(texts, special=False):
        if token_ids and token_ids not in sequences:
            sequences.append(token_ids)
    return sequences

"""What an answer has to compare, and where two part first. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tandem.base.errors import ConfigurationError


class ComparedChoice(msgspec.Struct, frozen=True):
    prompt: Sequence[int]
    prompt_values: Sequence[Any]  # each token's log-probabilities, if they were asked for
    tokens: Sequence[int]
    values: Sequence[float]  # the log-probability of each token
    alternatives: Sequence[Any]  # the log-probabilities of others at each place
    end: str | None


class AnswerDifference(msgspec.Struct, frozen=True):
    """Where two answers part first."""

    question: str
    choice: int
    place: str  # such as "token 3 of the answer"
    what: str
    first: Any
    second: Any

    def __str__(self) -> str:
        return f"{self.question}, choice {self.choice}, {self.place}: {self.what} {self.first!r} and {self.second!r}"


def choices_of(answer: Any) -> list[ComparedChoice]:
    """Reads the answer of /v1/completions or /v1/chat/completions. Raises ConfigurationError if a server did not tell its tokens."""
    try:
        return [_choice(answer, choice) for choice in answer["choices"]]
    except (LookupError, TypeError) as error:
        raise ConfigurationError(
            "an answer has no token ids or log-probabilities to compare: both URLs must be Tandem servers of this version"
        ) from error


def _choice(answer: Any, choice: Any) -> ComparedChoice:
    if "message" in choice:
        content = choice["logprobs"]["content"]
        return ComparedChoice(
            answer["prompt_token_ids"],
            answer.get("prompt_logprobs", ()),
            choice["token_ids"],
            [each["logprob"] for each in content],
            [{other["token"]: other["logprob"] for other in each["top_logprobs"]} for each in content],
            choice["finish_reason"],
        )
    found = choice["logprobs"]
    return ComparedChoice(
        choice["prompt_token_ids"],
        choice.get("prompt_logprobs", ()),
        choice["token_ids"],
        found["token_logprobs"],
        found["top_logprobs"],
        choice["finish_reason"],
    )


def first_difference(
    question: str, one: Sequence[ComparedChoice], other: Sequence[ComparedChoice]
) -> AnswerDifference | None:
    """Returns None if all bits are the same. Numbers in JSON are written so that reading them gives every bit again."""
    if len(one) != len(other):
        return AnswerDifference(question, 0, "the answer", "numbers of choices", len(one), len(other))
    for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        for place, what, first, second in _differences(mine, theirs):
            return AnswerDifference(question, index, place, what, first, second)
    return None


def _differences(mine: ComparedChoice, theirs: ComparedChoice) -> Iterator[tuple[str, str, Any, Any]]:
    for place, what, first, second in (
        ("prompt", "tokens", mine.prompt, theirs.prompt),
        ("prompt", "log-probabilities", mine.prompt_values, theirs.prompt_values),
    ):
        for at, (one, other) in enumerate(itertools.zip_longest(first, second)):
            if one != other:
                yield f"token {at} of the {place}", what, one, other
    columns = (
        ("tokens", mine.tokens, theirs.tokens),
        ("log-probabilities", mine.values, theirs.values),
        ("other tokens' log-probabilities", mine.alternatives, theirs.alternatives),
    )
    for at in range(max(len(column) for _, *both in columns for column in both)):
        for what, first, second in columns:
            one, other = (column[at] if at < len(column) else None for column in (first, second))
            if one != other:
                yield f"token {at} of the answer", what, one, other
    if mine.end != theirs.end:
        yield "its end", "reasons", mine.end, theirs.end

"""The first difference of two answers, in the order of their tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.verify.comparison import choices_of, first_difference

BITS = -1.2345678901234567


def answer(values: tuple[float, ...] = (-0.5, BITS), **changes: Any) -> dict[str, Any]:
    choice = {
        "prompt_token_ids": [1, 2],
        "prompt_logprobs": [None, {"2": {"logprob": -3.0, "rank": 1, "decoded_token": "b"}}],
        "token_ids": [5, 6],
        "logprobs": {"token_logprobs": list(values), "top_logprobs": [{"a": -0.5}, {"b": values[1]}]},
        "finish_reason": "length",
    }
    return {"choices": [{**choice, **changes}]}


def difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    found = first_difference("q", choices_of(one), choices_of(other))
    return None if found is None else f"{found.place}: {found.what}"


def test_the_same_is_the_same_and_an_alternative_alone_is_a_difference() -> None:
    other = answer()
    assert difference(answer(), other) is None
    other["choices"][0]["logprobs"]["top_logprobs"][0] = {"a": -0.25}
    assert difference(answer(), other) == "token 0 of the answer: other tokens' log-probabilities"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (answer((-0.5, math.nextafter(BITS, 0))), "token 1 of the answer: log-probabilities"),
        (answer(token_ids=[5, 7]), "token 1 of the answer: tokens"),
        (answer(token_ids=[5]), "token 1 of the answer: tokens"),
        (answer(prompt_token_ids=[1]), "token 1 of the prompt: tokens"),
        (answer(prompt_logprobs=[None, {}]), "token 1 of the prompt: log-probabilities"),
        (answer(finish_reason="stop"), "its end: reasons"),
        ({"choices": []}, "the answer: numbers of choices"),
    ],
)
def test_one_difference_is_named_with_its_place(changed: dict[str, Any], said: str) -> None:
    assert difference(answer(), changed) == said


def test_a_chat_is_read_as_well_and_a_server_that_tells_no_tokens_cannot_be_compared() -> None:
    def chat(logprob: float) -> dict[str, Any]:
        content = [{"token": "a", "logprob": logprob, "top_logprobs": [{"token": "b", "logprob": -2.0}]}]
        choice = {"message": {}, "token_ids": [5], "logprobs": {"content": content}, "finish_reason": "stop"}
        return {"choices": [choice], "prompt_token_ids": [1]}

    assert difference(chat(-1.0), chat(-1.0)) is None
    assert difference(chat(-1.0), chat(-1.5)) == "token 0 of the answer: log-probabilities"
    with pytest.raises(ConfigurationError, match="both URLs must be Tandem servers"):
        choices_of({"choices": [{"text": "a"}]})
